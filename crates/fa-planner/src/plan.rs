//! From a problem to ranked kernels: candidates, account, predicted time.
//!
//! The three steps are separate: candidates are not judged when enumerated, [`account()`] knows no problem,
//! and [`predict`](crate::cost::predict) no limits.

use fa_core::{
    Arch, ArchLimits, Division, Dtype, Family, Kernel, KernelSpec, Lengths, Pass, Problem, ProblemError,
    Unserved,
};
use serde::Serialize;

use crate::account::reason::Reason;
use crate::account::{Account, account, missing_code};
use crate::cost::gpu::Gpu;
use crate::cost::{Cost, CostConstants, Cuts, at_least, predict_below};
use crate::kernels::planned::{self, Wanted};
use crate::occupancy::Occupancy;
use crate::registers::Registers;
use crate::smem::SmemPlan;
use crate::tally::{Tally, tally};

/// A kernel that computes the problem and fits the GPU, with its account and its predicted time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// The kernel.
    pub spec: KernelSpec,
    /// Its shared memory, buffer by buffer.
    pub smem: SmemPlan,
    /// Registers of a computing thread.
    pub regs: Registers,
    /// Threads of a CTA.
    pub threads: u32,
    /// CTAs per SM by each resource.
    pub occupancy: Occupancy,
    /// CTAs per SM that the plan counts on.
    pub blocks_per_sm: u32,
    /// Predicted time.
    pub cost: Cost,
}

/// A candidate that does not fit.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RejectedSpec {
    /// The candidate.
    pub spec: KernelSpec,
    /// The first limit that it breaks.
    pub reason: Reason,
}

/// All that was tried for a problem.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlanSet {
    /// What fits, by predicted time, best first.
    pub plans: Vec<Plan>,
    /// What does not, in the order of enumeration.
    pub rejected: Vec<RejectedSpec>,
}

/// The head dim extents of a family's forward tiles, in ascending order.
pub fn head_dims(family: Family) -> &'static [u32] {
    Kernel::of(family, Pass::Forward).map_or(&[], |kernel| planned::of(&kernel).head_dims())
}

/// The smallest tile extent that holds `head_dim`, and one to try beside it: the next one where the smallest
/// is no multiple of 32, whose columns cannot be divided among warpgroups in every tile; else the same.
///
/// # Errors
/// [`PlanError::HeadDim`] where none does, or the kernels cannot load such rows.
fn padded(
    (extents, most): (&[u32], u32),
    name: &'static str,
    head_dim: usize,
) -> Result<[u32; 2], PlanError> {
    let mut holding = extents.iter().copied().filter(|&extent| extent as usize >= head_dim);
    let least = holding
        .next()
        .filter(|_| head_dim > 0 && head_dim.is_multiple_of(8))
        .ok_or(PlanError::HeadDim { name, value: head_dim, most })?;
    let beside = if least.is_multiple_of(32) { least } else { holding.next().unwrap_or(least) };
    Ok([least, beside])
}

/// What to plan for.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct PlanOptions {
    /// Kernels to choose from; `None` for those of the first of [`families`] of which one fits.
    pub family: Option<Family>,
    /// Constants of the cost model; `None` for those of the architecture's board.
    pub constants: Option<CostConstants>,
    /// The board whose limits and rates rank the kernels; `None` for the architecture's own.
    pub board: Option<ArchLimits>,
    /// What the kernels are to compute.
    pub pass: Pass,
    /// What the caller decides of a forward's division among CTAs. Kernels are ranked by their time with as
    /// many splits as the model would take.
    pub division: Division,
}

impl PlanOptions {
    fa_core::with_methods! {
        with_family(family: Option<Family>),
        with_constants(constants: Option<CostConstants>),
        with_board(board: Option<ArchLimits>),
        with_pass(pass: Pass),
        with_division(division: Division),
    }

    fn constants(&self, arch: Arch) -> CostConstants {
        self.constants.unwrap_or(CostConstants::of(arch))
    }

    fn limits(&self, arch: Arch) -> ArchLimits {
        self.board.unwrap_or(*arch.limits())
    }
}

/// The error where there is no plan.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// The problem contradicts itself.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// No launch of any kernel holds the problem.
    #[error(transparent)]
    Unserved(#[from] Unserved),
    /// No kernel computes in this type.
    #[error("no GPU kernel computes in {0}: use f16 or bf16 (or the CPU backend, which also takes f32)")]
    Dtype(Dtype),
    /// The family's kernel has no code for what the problem asks for.
    #[error("{kernel} has no device code for {what}: use kernels of the sm80 family, which run there too")]
    NoCode {
        /// The kernel.
        kernel: &'static str,
        /// What it lacks.
        what: &'static str,
    },
    /// No kernel has tiles for this head dim.
    #[error(
        "{name} = {value}: GPU kernels take multiples of 8 from 8 to {most} (pad with zeros, or use the CPU \
         backend)"
    )]
    HeadDim {
        /// `head_dim` or `head_dim_v`.
        name: &'static str,
        /// Its value.
        value: usize,
        /// The largest that the family's kernels take.
        most: u32,
    },
    /// The family's kernels do not run there.
    #[error("{family} kernels do not run on {arch}: use those of the sm80 family there")]
    Family {
        /// The family asked for.
        family: Family,
        /// The architecture.
        arch: Arch,
    },
    /// The family has no kernel for the pass.
    #[error("there is no {family} kernel for the {pass}: use those of the sm80 family")]
    NoKernel {
        /// The family asked for.
        family: Family,
        /// `forward` or `backward`.
        pass: &'static str,
    },
    /// Keys that begin with their values.
    #[error(
        "there is no {family} kernel for the {pass} of a latent problem ({head_dim}-{head_dim_v}: V is the \
         first columns of K): its forward alone is computed, with Q in 16 bits on sm90, and by the CPU \
         backend"
    )]
    Latent {
        /// The family asked for.
        family: Family,
        /// Elements of a key.
        head_dim: usize,
        /// Elements of a value.
        head_dim_v: usize,
        /// `forward` or `backward`.
        pass: &'static str,
    },
    /// The family has no kernel of e4m3 tensors for the pass.
    #[error(
        "there is no {family} kernel for the {pass} of e4m3 tensors: the forward of sm90 computes in them; \
         elsewhere convert Q, K and V to f16 or bf16"
    )]
    NoFp8 {
        /// The family asked for.
        family: Family,
        /// `forward` or `backward`.
        pass: &'static str,
    },
    /// Gradients of keys in pages.
    #[error("keys in pages of {page} rows have no backward: pack or pad them")]
    PagedBackward {
        /// Rows of a page.
        page: usize,
    },
    /// Query heads are to share a tile that holds not as many.
    #[error("pack_gqa: no tile holds the {group} query heads of a K/V head, leave it to the planner")]
    Packing {
        /// Query heads of a K/V head.
        group: usize,
    },
    /// SM100 planned for an architecture without tensor memory.
    #[error("{arch} has no tensor memory: SM100 plans are for sm100 and sm103")]
    NoTensorMemory {
        /// The architecture.
        arch: Arch,
    },
    /// Every candidate breaks a limit.
    #[error("none of {tried} kernels fits {arch}; nearest misses: {}", misses(.nearest))]
    NoneFits {
        /// The architecture.
        arch: Arch,
        /// Candidates tried.
        tried: usize,
        /// For each limit the candidate that breaks it least.
        nearest: Vec<RejectedSpec>,
    },
}

fn misses(nearest: &[RejectedSpec]) -> String {
    let lines: Vec<String> = nearest.iter().map(|miss| format!("{} ({})", miss.spec, miss.reason)).collect();
    lines.join("; ")
}

impl PlanSet {
    /// How many candidates each limit rejected, and for each the candidate that breaks it least.
    pub fn nearest(&self) -> Vec<Tally<&'static str, &RejectedSpec>> {
        tally(self.rejected.iter().map(|miss| (miss.reason.kind(), miss.reason.excess(), miss)))
    }
}

/// Everything that fits `problem` on `arch`, best first.
///
/// # Errors
/// As [`explore`], and [`PlanError::NoneFits`] with the nearest misses.
pub fn plan(problem: &Problem, arch: Arch, options: &PlanOptions) -> Result<Vec<Plan>, PlanError> {
    let set = explore(problem, arch, options)?;
    if set.plans.is_empty() && set.rejected.is_empty() && options.division.pack_gqa == Some(true) {
        return Err(PlanError::Packing { group: problem.group_size() });
    }
    if set.plans.is_empty() {
        let nearest = set.nearest().into_iter().map(|limit| limit.nearest.clone()).collect();
        return Err(PlanError::NoneFits { arch, tried: set.rejected.len(), nearest });
    }
    Ok(set.plans)
}

/// The first of [`plan`], in a fraction of its time: most other kernels are known to take longer before their
/// own time is.
///
/// # Errors
/// As [`plan`].
pub fn best(problem: &Problem, arch: Arch, options: &PlanOptions) -> Result<Plan, PlanError> {
    let (limits, constants) = (options.limits(arch), options.constants(arch));
    let gpu = Gpu { arch, limits: &limits, constants: &constants };
    let (mean_q, mean_k) = (problem.lengths.mean_q(), problem.lengths.mean_k());
    let pairs = problem.mask.pairs(mean_q, mean_k) as f64;
    let (mut fitting, mut number) = (Vec::new(), 0);
    for_each(problem, arch, options, |spec| {
        if let Ok(account) = fits(problem, &spec, arch) {
            let least = at_least(problem, &spec, gpu, pairs);
            fitting.push((least, number, spec, account));
        }
        number += 1;
    })?;
    // The most promising first: a kernel whose lower bound exceeds the time of one before it is skipped.
    fitting.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let (mut cuts, mut best) = (Cuts::default(), None::<(Plan, usize)>);
    for (least, number, spec, account) in fitting {
        let known = best.as_ref().map_or(f64::INFINITY, |(best, _)| best.cost.seconds);
        // With divided keys no lower bound is known.
        if !spec.split && least > known {
            continue;
        }
        let Some(plan) = predicted(problem, spec, gpu, account, known.next_up(), &mut cuts) else { continue };
        // Of equals the first in the order of enumeration.
        let is_before = best.as_ref().is_none_or(|(_, first)| plan.cost.seconds < known || number < *first);
        if plan.cost.seconds <= known && is_before && !is_whole(problem, &plan, options) {
            best = Some((plan, number));
        }
    }
    // The error lists why nothing fits.
    best.map_or_else(
        || plan(problem, arch, options).map(|mut plans| plans.swap_remove(0)),
        |(best, _)| Ok(best),
    )
}

/// The most query rows of a K/V head, heads of a group included, for which keys in codes are left to the
/// SM80 class: a tile of its forward.
const FEW_ROWS: usize = 64;

/// The families whose kernels are tried for a forward or backward on `arch` where none is named, in order:
/// the fastest that the architecture runs, and where none of its kernels fits, the SM80 class, which runs
/// everywhere. A few rows over K and V in codes are the other way about: what takes time is the conversion of
/// codes, which all warps of the SM80 class share and a single warpgroup of the SM90 kernel does (64 x 4k,
/// 32:8 heads of 128 on an H200: 151 and 326 us, NB-176). The cost model knows one family at a time and does
/// not tell.
pub fn families(problem: &Problem, pass: Pass, arch: Arch) -> Vec<Family> {
    let native = Family::native(arch);
    let is_forward = !pass.is_backward();
    let widest = *head_dims(Family::Sm80).last().unwrap_or(&0) as usize;
    let fits_sm80 = !problem.latent && problem.head_dim.max(problem.head_dim_v) <= widest;
    let rows = problem.lengths.max_q().saturating_mul(problem.group_size());
    let converts = is_forward && problem.types.kv.is_code() && !problem.types.is_fp8();
    match native {
        Family::Sm80 => vec![native],
        // No kernel of the SM80 class multiplies e4m3 numbers.
        Family::Sm90 | Family::Sm100 if problem.types.is_fp8() => vec![native],
        Family::Sm90 | Family::Sm100 if converts && fits_sm80 && rows <= FEW_ROWS => {
            vec![Family::Sm80, native]
        }
        Family::Sm90 | Family::Sm100 => vec![native, Family::Sm80],
    }
}

/// Everything that is tried for `problem` on `arch`: what fits, best first, and what does not, with the
/// reason. Without a family in `options` those of [`families`], as far as the first of which a kernel fits.
///
/// # Errors
/// [`PlanError`] where no candidate of the first family can be formed; a set without plans is no error.
pub fn explore(problem: &Problem, arch: Arch, options: &PlanOptions) -> Result<PlanSet, PlanError> {
    let families = options.family.map_or_else(|| families(problem, options.pass, arch), |own| vec![own]);
    let mut set = PlanSet { plans: Vec::new(), rejected: Vec::new() };
    for (at, &family) in families.iter().enumerate() {
        match explore_family(problem, arch, &options.clone().with_family(Some(family))) {
            Ok(own) => {
                set.plans = own.plans;
                set.rejected.extend(own.rejected);
            }
            Err(error) if at == 0 => return Err(error),
            // Of the others none can be formed; what is said is why the first ones do not fit.
            Err(_) => {}
        }
        if !set.plans.is_empty() {
            break;
        }
    }
    Ok(set)
}

/// [`explore`] among the kernels of one family.
fn explore_family(problem: &Problem, arch: Arch, options: &PlanOptions) -> Result<PlanSet, PlanError> {
    let (limits, constants) = (options.limits(arch), options.constants(arch));
    let gpu = Gpu { arch, limits: &limits, constants: &constants };
    let mut set = PlanSet { plans: Vec::new(), rejected: Vec::new() };
    let mut cuts = Cuts::default();
    for_each(problem, arch, options, |spec| {
        match judge(problem, spec.clone(), gpu, f64::INFINITY, &mut cuts) {
            Ok(plan) => set.plans.extend(plan.filter(|plan| !is_whole(problem, plan, options))),
            Err(reason) => set.rejected.push(RejectedSpec { spec, reason }),
        }
    })?;
    // The sort is stable: ties stay in the order of enumeration.
    set.plans.sort_by(|a, b| a.cost.seconds.total_cmp(&b.cost.seconds));
    Ok(set)
}

/// Whether a kernel with splits does without: with one CTA for each tile's keys the same kernel without
/// splits does as well.
fn is_whole(problem: &Problem, plan: &Plan, options: &PlanOptions) -> bool {
    options.division.splits.is_none()
        && plan.spec.split
        && plan.cost.splits == 1
        && problem.lengths.is_uniform()
}

/// Gives every candidate of the family asked for, or of the first of [`families`], to `judge`, in the order
/// of enumeration.
fn for_each(
    problem: &Problem,
    arch: Arch,
    options: &PlanOptions,
    mut judge: impl FnMut(KernelSpec),
) -> Result<(), PlanError> {
    problem.check_pass(options.pass)?;
    let types = problem.types;
    if !(types.q.is_half() || types.q == Dtype::E4m3) {
        return Err(PlanError::Dtype(types.q));
    }
    problem.check_gpu()?;
    if let (Some(page), true) = (problem.lengths.page(), options.pass.is_backward()) {
        return Err(PlanError::PagedBackward { page });
    }
    let family = options.family.unwrap_or_else(|| families(problem, options.pass, arch)[0]);
    if !family.runs_on(arch) {
        return Err(PlanError::Family { family, arch });
    }
    let pass = options.pass;
    let kernels: Vec<Kernel> = Kernel::all_of(family, pass, types).collect();
    let widest = kernels.last().ok_or_else(|| {
        let pass = pass.name();
        if types.q == Dtype::E4m3 {
            PlanError::NoFp8 { family, pass }
        } else {
            PlanError::NoKernel { family, pass }
        }
    })?;
    let own = kernels.iter().find(|kernel| planned::of(kernel).takes(problem));
    if own.is_none() && problem.latent {
        let Problem { head_dim, head_dim_v, .. } = *problem;
        return Err(PlanError::Latent { family, head_dim, head_dim_v, pass: options.pass.name() });
    }
    let (kernel, widest) = (planned::of(own.unwrap_or(widest)), planned::of(widest));
    let of = |own: &'static [u32], widest: &[u32]| (own, widest.last().copied().unwrap_or(0));
    let extents = of(kernel.head_dims(), widest.head_dims());
    let [head_dim, wider] = padded(extents, "head_dim", problem.head_dim)?;
    let extents = of(kernel.head_dims_v(), widest.head_dims_v());
    let [head_dim_v, wider_v] = padded(extents, "head_dim_v", problem.head_dim_v)?;
    let wanted = Wanted {
        problem,
        head_dim,
        head_dim_v,
        arch,
        deterministic: options.pass.deterministic(),
        division: options.division,
    };
    kernel.candidates(wanted).for_each(&mut judge);
    if (wider, wider_v) != (head_dim, head_dim_v) {
        kernel.candidates(Wanted { head_dim: wider, head_dim_v: wider_v, ..wanted }).for_each(judge);
    }
    Ok(())
}

/// The plan of one given kernel, which may come from a file.
///
/// # Errors
/// The [`Reason`] why it does not compute the problem or does not fit.
pub fn plan_spec(
    problem: &Problem,
    spec: &KernelSpec,
    arch: Arch,
    options: &PlanOptions,
) -> Result<Plan, Reason> {
    problem.check().map_err(|e| Reason::Rule(e.to_string()))?;
    let (limits, constants) = (options.limits(arch), options.constants(arch));
    let gpu = Gpu { arch, limits: &limits, constants: &constants };
    let plan = judge(problem, spec.clone(), gpu, f64::INFINITY, &mut Cuts::default())?;
    Ok(plan.expect("every time is below infinity"))
}

/// The plan of a kernel, or the first limit that it breaks; no plan for some that take `below` seconds or
/// more.
fn judge(
    problem: &Problem,
    spec: KernelSpec,
    gpu: Gpu<'_>,
    below: f64,
    cuts: &mut Cuts,
) -> Result<Option<Plan>, Reason> {
    let account = fits(problem, &spec, gpu.arch)?;
    Ok(predicted(problem, spec, gpu, account, below, cuts))
}

/// What a kernel that computes the problem takes of an SM, or the first limit that it breaks.
fn fits(problem: &Problem, spec: &KernelSpec, arch: Arch) -> Result<Account, Reason> {
    spec.serves(problem)?;
    if let Some(what) = missing_code(spec) {
        return Err(Reason::Code { kernel: spec.kernel.name(), what });
    }
    account(spec, arch)
}

/// The plan of a kernel that fits; `None` for some that take `below` seconds or more.
fn predicted(
    problem: &Problem,
    spec: KernelSpec,
    gpu: Gpu<'_>,
    account: Account,
    below: f64,
    cuts: &mut Cuts,
) -> Option<Plan> {
    let cost = predict_below(cuts, problem, &spec, gpu, below)?;
    let Account { smem, regs, threads, occupancy, blocks_per_sm } = account;
    Some(Plan { spec, smem, regs, threads, occupancy, blocks_per_sm, cost })
}

/// The best plan by sequence length: both lengths of a square problem, the keys' of another (decode).
///
/// # Errors
/// As [`plan`], for the first length that has none.
pub fn sweep(
    problem: &Problem,
    arch: Arch,
    options: &PlanOptions,
    seqlens: &[usize],
) -> Result<Vec<(usize, Plan)>, PlanError> {
    let square = problem.lengths.max_q() == problem.lengths.max_k();
    let best = |seqlen: usize| {
        let seqlen_q = if square { seqlen } else { problem.lengths.max_q() };
        let problem = problem.with_lengths(Lengths::uniform(problem.lengths.sequences(), seqlen_q, seqlen));
        let plans = plan(&problem, arch, options)?;
        Ok((seqlen, plans.into_iter().next().expect("a plan without error is not empty")))
    };
    seqlens.iter().copied().map(best).collect()
}
