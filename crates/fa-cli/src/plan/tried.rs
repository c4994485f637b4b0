//! What was tried for a pass, of kernels that exist and of SM100 shapes, seen alike.

use std::fmt::Write;

use fa_core::{Arch, ArchLimits, Dtype, KernelSpec, Pass, Problem, counted};
use fa_kernels::launch::Launches;
use fa_planner::account::Reason;
use fa_planner::cost::Cost;
use fa_planner::divide;
use fa_planner::kernels::sm100_fwd::Sm100Plan;
use fa_planner::occupancy::Occupancy;
use fa_planner::plan::{Plan, PlanSet};
use fa_planner::report::{LimitReport, Tried};
use fa_planner::smem::SmemPlan;

use crate::plan::kernels::Group;
use crate::plan::{kernels, splits};
use crate::term::output::{self, plain, si, tenths};

/// A candidate that fits, whatever its family.
#[derive(Clone, Debug)]
pub(crate) struct Fit<'a> {
    /// The spec's name, or the shape's.
    pub name: String,
    /// What it has beside the tile.
    pub knobs: String,
    /// The row of the tile map that it belongs to.
    pub group: Group,
    /// Query rows of a block.
    pub tile_m: u32,
    /// Keys per step.
    pub tile_n: u32,
    /// What it is made of.
    pub shape: Shape<'a>,
    /// Shared memory by buffer.
    pub smem: &'a SmemPlan,
    /// Registers of a computing thread by use; empty where the planner has no account of them.
    pub regs: Vec<(&'static str, u32)>,
    /// Registers that such a thread may have.
    pub reg_limit: u32,
    /// Registers by role, where roles differ.
    pub roles: String,
    /// Threads of a block.
    pub threads: u32,
    /// Blocks per SM that the plan counts on.
    pub blocks_per_sm: u32,
    /// Blocks per SM by resource.
    pub occupancy: &'a Occupancy,
    /// Predicted time.
    pub cost: &'a Cost,
}

/// What a candidate is made of.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Shape<'a> {
    /// A kernel.
    Kernel(&'a KernelSpec),
    /// A shape for tcgen05.
    Sm100(&'a Sm100Plan),
}

/// A candidate that does not fit.
#[derive(Clone, Debug)]
pub(crate) struct Miss<'a> {
    /// The spec's name, or the shape's.
    pub name: String,
    /// The row of the tile map.
    pub group: Group,
    /// Keys per step.
    pub tile_n: u32,
    /// The limit that it breaks.
    pub reason: &'a Reason,
}

/// What was tried, for people.
pub(crate) trait Shown {
    /// What fits, best first.
    fn fits(&self) -> Vec<Fit<'_>>;

    /// The best that fits.
    fn best(&self) -> Option<Fit<'_>>;

    /// What does not fit, in the order of enumeration.
    fn misses(&self) -> Vec<Miss<'_>>;

    /// A table of at most `limit` plans and the account of the best. The plans are those of `pass` over
    /// `problem` on an architecture, by the rates of a board.
    fn text(&self, problem: &Problem, pass: Pass, on: (Arch, &ArchLimits), limit: usize) -> String;
}

impl Shown for Tried {
    fn fits(&self) -> Vec<Fit<'_>> {
        match self {
            Tried::Kernels(set) => set.plans.iter().map(fit_of_plan).collect(),
            Tried::Sm100(set) => set.plans.iter().map(fit_of_shape).collect(),
        }
    }

    fn best(&self) -> Option<Fit<'_>> {
        match self {
            Tried::Kernels(set) => set.plans.first().map(fit_of_plan),
            Tried::Sm100(set) => set.plans.first().map(fit_of_shape),
        }
    }

    fn misses(&self) -> Vec<Miss<'_>> {
        match self {
            Tried::Kernels(set) => set
                .rejected
                .iter()
                .map(|miss| Miss {
                    name: miss.spec.to_string(),
                    group: kernels::of(&miss.spec.kernel).group(),
                    tile_n: miss.spec.tile().1,
                    reason: &miss.reason,
                })
                .collect(),
            Tried::Sm100(set) => set
                .rejected
                .iter()
                .map(|miss| Miss {
                    name: miss.tile.name(),
                    group: Group::of_tensor_memory(miss.tile.tile_m()),
                    tile_n: miss.tile.tile_n,
                    reason: &miss.reason,
                })
                .collect(),
        }
    }

    fn text(&self, problem: &Problem, pass: Pass, on: (Arch, &ArchLimits), limit: usize) -> String {
        let (arch, limits) = on;
        let fits = self.fits();
        let tried = fits.len() + self.misses().len();
        let mut text = format!("{:<10}{} of {tried} candidates fit\n", pass.name(), fits.len());
        if let Some(best) = fits.first() {
            text.push('\n');
            let moves_bytes = pass == Pass::Forward && splits::moves_bytes(problem);
            let bytes = moves_bytes.then(|| problem.bytes(pass));
            text += &table(&fits[..fits.len().min(limit)], limits, problem.types.q, bytes);
            text.push('\n');
            text += &account(best, problem, pass, limits);
            if let Shape::Kernel(spec) = best.shape
                && let sms = limits.sms
                && let plan = divide(problem, spec, arch, sms, None)
                && let Ok(launches) = Launches::of(&plan, problem, arch, sms)
            {
                let workspace = match launches.workspace.bytes {
                    0 => "no workspace".to_owned(),
                    bytes => format!("{} of workspace", si(bytes as f64, "B")),
                };
                let codes = of_codes(problem);
                let memory = format!("{} of tensors{codes}, {workspace}", si(problem.bytes_held(pass), "B"));
                line(&mut text, "memory", &memory);
            }
            if let Tried::Kernels(PlanSet { plans, .. }) = self
                && pass == Pass::Forward
                && let Some(reason) = splits::reason(&plans[0], problem, on)
            {
                line(&mut text, "splits", &reason);
            }
        }
        for LimitReport { limit, count, nearest, reason } in self.limits() {
            line(&mut text, "rejected", &format!("{count} by {limit}, nearest {nearest}: {reason}"));
        }
        text
    }
}

/// What K and V in codes and their descales take of a problem's memory.
fn of_codes(problem: &Problem) -> String {
    if !problem.types.kv.is_code() {
        return String::new();
    }
    let keys = si(problem.bytes_of_keys(), "B");
    match problem.descale_bytes() {
        0.0 => format!(" ({keys} of codes of K and V)"),
        descales => format!(" ({keys} of codes of K and V, {} of descales)", si(descales, "B")),
    }
}

fn line(text: &mut String, name: &str, value: &str) {
    writeln!(text, "{name:<10}{value}").expect("writing to a string cannot fail");
}

/// The plans, with the rate at which they move `bytes` where that is what counts, and with splits where one
/// has any. Rates are shares of the peak of products of `dtype`.
fn table(fits: &[Fit], limits: &ArchLimits, dtype: Dtype, bytes: Option<f64>) -> String {
    let peak = limits.peak_tensor_flops_of(dtype) / 1e12;
    let has_splits = fits.iter().any(|fit| fit.cost.splits > 1);
    let mut headers = vec![
        "#",
        "tile_m",
        "tile_n",
        "knobs",
        "regs",
        "SMEM KiB",
        "blocks/SM",
        "time",
        "TFLOP/s",
        if dtype.is_code() { "of 8-bit peak" } else { "of peak" },
        "bottleneck",
    ];
    headers.extend(bytes.map(|_| "GB/s"));
    headers.extend(has_splits.then_some("splits"));
    let mut table = output::table(&headers);
    for (rank, fit) in fits.iter().enumerate() {
        let regs: u32 = fit.regs.iter().map(|(_, n)| n).sum();
        let mut row = vec![
            (rank + 1).to_string(),
            fit.tile_m.to_string(),
            fit.tile_n.to_string(),
            fit.knobs.clone(),
            if fit.regs.is_empty() { "-".to_owned() } else { format!("{regs}/{}", fit.reg_limit) },
            format!("{:.1}", kib(fit.smem.total)),
            fit.blocks_per_sm.to_string(),
            si(fit.cost.seconds, "s"),
            tenths(fit.cost.tflops),
            format!("{} %", plain(100.0 * fit.cost.tflops / peak)),
            fit.cost.bottleneck.name().to_owned(),
        ];
        row.extend(bytes.map(|bytes| plain(bytes / fit.cost.seconds / 1e9)));
        row.extend(has_splits.then(|| fit.cost.splits.to_string()));
        table.add_row(row);
    }
    output::table_text(&table)
}

fn account(best: &Fit, problem: &Problem, pass: Pass, limits: &ArchLimits) -> String {
    let mut text = String::new();
    line(&mut text, "best", &best.name);
    line(&mut text, "predicted", &prediction(best.cost));
    // Of an empty problem nothing is moved.
    let flops = problem.flops(pass);
    let intensity = flops / problem.bytes(pass).max(1.0);
    line(&mut text, "work", &format!("{}, {} FLOP per byte", si(flops, "FLOP"), plain(intensity)));
    if pass == Pass::Forward && splits::moves_bytes(problem) {
        let (rate, most) = (problem.bytes(pass) / best.cost.seconds, limits.hbm_bytes_per_s);
        let share = plain(100.0 * rate / most);
        let rate = format!("{} GB/s, {share} % of the memory's {:.0}", plain(rate / 1e9), most / 1e9);
        line(&mut text, "bandwidth", &rate);
    }
    if !best.regs.is_empty() {
        let parts: Vec<String> = best.regs.iter().map(|(name, n)| format!("{name} {n}")).collect();
        let total: u32 = best.regs.iter().map(|(_, n)| n).sum();
        line(
            &mut text,
            "registers",
            &format!("{} = {total} of {} per thread", parts.join(" + "), best.reg_limit),
        );
    }
    if !best.roles.is_empty() {
        line(&mut text, "", &best.roles);
    }
    let buffers: Vec<String> = best
        .smem
        .buffers
        .iter()
        .map(|b| match &b.alias_of {
            Some(owner) => format!("{} in {owner}", b.name),
            None => format!("{} {}", b.name, bytes(b.size)),
        })
        .collect();
    line(
        &mut text,
        "smem",
        &format!("{} of {} KiB: {}", kib(best.smem.total), kib(limits.smem_per_block), buffers.join(", ")),
    );
    let o = best.occupancy;
    line(
        &mut text,
        "per SM",
        &format!(
            "{} of {} threads planned, {} % of the SM's {} (SMEM allows {}, registers {}, threads {})",
            counted(best.blocks_per_sm as usize, "block"),
            best.threads,
            tenths(100.0 * f64::from(best.blocks_per_sm * best.threads) / f64::from(limits.threads_per_sm)),
            limits.threads_per_sm,
            o.by_smem,
            o.by_registers,
            o.by_threads
        ),
    );
    text
}

/// A cost in a line.
pub(crate) fn prediction(cost: &Cost) -> String {
    format!(
        "{}, {} TFLOP/s, bound by {}; {} on {} at once",
        si(cost.seconds, "s"),
        plain(cost.tflops),
        cost.bottleneck.name(),
        counted(cost.tiles as usize, "tile"),
        counted(cost.slots as usize, "CTA")
    )
}

/// Bytes as KiB.
pub(crate) fn kib(bytes: u32) -> f64 {
    f64::from(bytes) / 1024.0
}

/// Bytes with the unit that suits them.
pub(crate) fn bytes(bytes: u32) -> String {
    if bytes >= 1024 { format!("{} KiB", kib(bytes)) } else { format!("{bytes} B") }
}

fn fit_of_plan(plan: &Plan) -> Fit<'_> {
    let (tile_m, tile_n) = plan.spec.tile();
    let kernel = kernels::of(&plan.spec.kernel);
    let r = &plan.regs;
    let parts = if plan.spec.kernel.is_backward() {
        // dQ's accumulators come and go where S and dP were; the rest is what else is live at the peak.
        let scores = r.s.max(r.q);
        let other = r.total.saturating_sub(scores + r.o);
        vec![("S and dP, then dQ", scores), ("dK and dV", r.o), ("other", other)]
    } else {
        vec![("S", r.s), ("P", r.p), ("O", r.o), ("Q", r.q), ("other", r.other)]
    };
    Fit {
        name: plan.spec.to_string(),
        knobs: kernel.knobs(&plan.spec).join(", "),
        group: kernel.group(),
        tile_m,
        tile_n,
        shape: Shape::Kernel(&plan.spec),
        smem: &plan.smem,
        regs: parts.into_iter().filter(|(_, n)| *n > 0).collect(),
        reg_limit: r.limit,
        roles: r.setmaxnreg.map_or(String::new(), |split| {
            let follower = split.follower.map_or(String::new(), |regs| format!(" ({regs} for the follower)"));
            format!(
                "setmaxnreg {} for the consumer warpgroups{follower}, {} for the producer",
                split.mma, split.producer
            )
        }),
        threads: plan.threads,
        blocks_per_sm: plan.blocks_per_sm,
        occupancy: &plan.occupancy,
        cost: &plan.cost,
    }
}

fn fit_of_shape(plan: &Sm100Plan) -> Fit<'_> {
    let warps = |warps: u32| counted(warps as usize, "warp");
    let roles: Vec<String> = plan
        .roles
        .iter()
        .map(|role| format!("{} {} x {}", role.name, warps(role.warps), role.regs))
        .collect();
    Fit {
        name: plan.tile.name(),
        knobs: format!(
            "{} q tiles, {} K/V buffers, {} of 512 TMEM columns",
            plan.tile.q_tiles, plan.tile.kv_stages, plan.tmem.used
        ),
        group: Group::of_tensor_memory(plan.tile_m),
        tile_m: plan.tile_m,
        tile_n: plan.tile.tile_n,
        shape: Shape::Sm100(plan),
        smem: &plan.smem,
        regs: Vec::new(),
        reg_limit: 0,
        roles: format!("registers by role: {}", roles.join(", ")),
        threads: plan.threads,
        blocks_per_sm: 1,
        occupancy: &plan.occupancy,
        cost: &plan.cost,
    }
}
