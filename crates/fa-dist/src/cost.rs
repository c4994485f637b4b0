//! How long a plan takes, by the planner's model of kernels and links as data, and what hides what.
//!
//! The programs of all ranks are simulated: two queues for each rank, kernels as long as fa-planner predicts,
//! an exchange from when all that take part have come to it.

use std::collections::{BTreeSet, HashMap};
use std::fmt;

use fa_core::{Arch, KernelSpec, Pass, Problem};
use fa_planner::plan::{self, Plan, PlanOptions};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::moved::{Place, known};
use crate::plan::{Scheme, ShardPlan};
use crate::program::{Lane, Op, Program, Step};
use crate::shard::Layout;
use crate::visible::Seen;

/// A link between GPUs: what each sends while it receives as much.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// From the call to the first byte, in seconds.
    pub latency: f64,
    /// Bytes per second of a GPU, one way.
    pub rate: f64,
}

impl Link {
    /// NVLink of an H100 or H200 through a switch, by NCCL: 360 GB/s expected of its tests on 8 GPUs, 300 of
    /// a send and a receive of 256 MB of which 13 GB/s were left at 1 MB. Copies take 118 us for 33.5 MB and
    /// 199 to 214 for 67, under kernels, too (NB-222): 127 and 228 by this.
    pub const NVLINK: Link = Link { latency: 25e-6, rate: 330e9 };
    /// PCIe 5.0 with 16 lanes.
    pub const PCIE: Link = Link { latency: 30e-6, rate: 50e9 };
    /// A network of 400 Gb/s for each GPU.
    pub const NETWORK: Link = Link { latency: 40e-6, rate: 45e9 };

    /// The time of an exchange of so many bytes.
    fn seconds(&self, bytes: usize) -> f64 {
        self.latency + bytes as f64 / self.rate
    }
}

/// GPUs and what is between them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// The GPUs.
    pub arch: Arch,
    /// The link of each.
    pub link: Link,
}

impl Machine {
    /// What plans are for that name no machine: an H100 or H200 with NVLink.
    pub const DEFAULT: Machine = Machine { arch: Arch::Sm90, link: Link::NVLINK };
}

/// Launching a kernel, from the end of the one before.
const LAUNCH: f64 = 3e-6;

/// Of a memory's rate what sums reach.
const SUM_SHARE: f64 = 0.7;

/// The time of a plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cost {
    /// The scheme.
    pub scheme: Scheme,
    /// How rows are dealt.
    pub layout: Layout,
    /// Parts of the heads, one after the other.
    pub stages: usize,
    /// Until the last rank is done, in seconds.
    pub seconds: f64,
    /// Kernels of attention of the busiest rank.
    pub kernels: f64,
    /// Kernels of the mean rank as a share of those of the busiest.
    pub balance: f64,
    /// Sums, copies and merges of the busiest rank.
    pub sums: f64,
    /// Transfers of the busiest rank.
    pub transfers: f64,
    /// The time that is not under kernels.
    pub exposed: f64,
    /// One GPU with the whole problem.
    pub one_gpu: f64,
    /// Bytes that the rank with the most receives.
    pub received: usize,
    /// Bytes of the program's own memory on that rank.
    pub scratch: usize,
    /// Whether the results have the bits of one GPU.
    pub same_bits: bool,
}

impl Cost {
    /// The rate of each GPU as a share of one GPU's on the whole problem.
    pub fn share(&self, world: usize) -> f64 {
        self.one_gpu / (world as f64 * self.seconds)
    }
}

/// Predicted times of kernels by problem, and shares of tiles that programs leave: those of many parts are
/// the same.
#[derive(Debug)]
pub struct Times {
    machine: Machine,
    pass: Pass,
    known: HashMap<String, f64>,
}

impl Times {
    /// No times yet, of a pass on a machine.
    pub fn new(machine: Machine, pass: Pass) -> Times {
        Times { machine, pass, known: HashMap::new() }
    }

    /// The planner's best kernel.
    fn best(&self, problem: &Problem) -> Result<Plan, Error> {
        let options = PlanOptions::default().with_pass(self.pass);
        Ok(plan::best(problem, self.machine.arch, &options).map_err(fa_attn::Error::Plan)?)
    }

    /// The time of the planner's best kernel, or of a given one wherever that computes the problem: one that
    /// is right for all heads may have too few tiles in a part for the SMs.
    fn of(&mut self, problem: &Problem, pinned: Option<&KernelSpec>) -> Result<f64, Error> {
        let key = format!("{problem:?} by {}", pinned.map_or_else(String::new, KernelSpec::to_string));
        if let Some(known) = self.known.get(&key) {
            return Ok(*known);
        }
        let options = PlanOptions::default().with_pass(self.pass);
        let planned = pinned.map(|spec| plan::plan_spec(problem, spec, self.machine.arch, &options));
        let plan = match planned {
            Some(Ok(plan)) => plan,
            Some(Err(_)) | None => self.best(problem)?,
        };
        self.known.insert(key, plan.cost.seconds);
        Ok(plan.cost.seconds)
    }

    /// The time of a part, or of a whole problem with what it knows of the scalars of its program: of the
    /// tiles that are not empty, which the planner takes all for.
    fn seen(
        &mut self,
        problem: &Problem,
        places: &[Place],
        pinned: Option<&KernelSpec>,
    ) -> Result<f64, Error> {
        let seconds = self.of(problem, pinned)?;
        let Some(program) = problem.score.program else { return Ok(seconds) };
        let key = format!("{problem:?} at {places:?}");
        if let Some(share) = self.known.get(&key) {
            return Ok(seconds * share);
        }
        let scalars = known(&program, places);
        let share = Seen::of(problem, &scalars).map_or(1.0, |seen| seen.share(problem.mask));
        self.known.insert(key, share);
        Ok(seconds * share)
    }
}

/// What a step takes, in seconds, and of what kind it is.
fn step_seconds(
    program: &Program,
    step: &Step,
    pinned: Option<&KernelSpec>,
    times: &mut Times,
) -> Result<f64, Error> {
    let limits = times.machine.arch.limits();
    let bytes = || {
        let views = step.op.reads().into_iter().chain(step.op.writes());
        views.map(|view| program.bytes(view)).sum::<usize>() as f64
    };
    Ok(match &step.op {
        Op::Forward { part, .. } | Op::Backward { part, .. } => {
            LAUNCH + times.seen(&part.problem, &part.places, pinned)?
        }
        Op::Sum { .. } | Op::Nothing { .. } | Op::Merge { .. } | Op::Place { .. } => {
            LAUNCH + bytes() / (SUM_SHARE * limits.hbm_bytes_per_s)
        }
        Op::Exchange { sends, recvs } => {
            let total = |views: &[(usize, crate::program::View)]| -> usize {
                let others = views.iter().filter(|(peer, _)| *peer != program.rank);
                others.map(|(_, view)| program.bytes(view)).sum()
            };
            times.machine.link.seconds(total(sends).max(total(recvs)))
        }
    })
}

/// A rank, and the number of one of its steps.
type At = (usize, usize);

/// For each exchange of each rank those of other ranks that it meets.
fn meetings(programs: &[Program]) -> HashMap<At, BTreeSet<At>> {
    // From one rank to another: the exchanges that send, and those that receive.
    let mut messages: HashMap<(usize, usize), [Vec<At>; 2]> = HashMap::new();
    for (rank, program) in programs.iter().enumerate() {
        for (number, step) in program.steps.iter().enumerate() {
            let Op::Exchange { sends, recvs } = &step.op else { continue };
            for (peer, _) in sends {
                messages.entry((rank, *peer)).or_default()[0].push((rank, number));
            }
            for (peer, _) in recvs {
                messages.entry((*peer, rank)).or_default()[1].push((rank, number));
            }
        }
    }
    let mut all: HashMap<At, BTreeSet<At>> = HashMap::new();
    for [sent, received] in messages.into_values() {
        for (a, b) in sent.into_iter().zip(received) {
            all.entry(a).or_default().insert(b);
            all.entry(b).or_default().insert(a);
        }
    }
    all
}

/// The time of `plan` for the pass of `times`.
///
/// # Errors
/// What the plan and the planner refuse.
pub fn predict(plan: &ShardPlan, times: &mut Times) -> Result<Cost, Error> {
    let world = plan.world();
    let programs =
        (0..world).map(|rank| plan.program(rank, times.pass)).collect::<Result<Vec<_>, Error>>()?;
    // Bits of one GPU are those of one kernel.
    let pinned = plan.same_bits().then(|| times.best(plan.problem())).transpose()?.map(|best| best.spec);
    let seconds = programs.iter().map(|program| {
        let steps = program.steps.iter();
        steps
            .map(|step| step_seconds(program, step, pinned.as_ref(), times))
            .collect::<Result<Vec<f64>, Error>>()
    });
    let seconds = seconds.collect::<Result<Vec<_>, Error>>()?;
    let meetings = meetings(&programs);
    // The steps of each rank's two queues, and how many of them are done.
    let queue = |program: &Program, lane: Lane| -> Vec<usize> {
        (0..program.steps.len()).filter(|number| program.steps[*number].lane == lane).collect()
    };
    let queues: Vec<[Vec<usize>; 2]> = programs
        .iter()
        .map(|program| [Lane::Compute, Lane::Transfer].map(|lane| queue(program, lane)))
        .collect();
    let mut ended = vec![[0usize; 2]; world];
    let mut clocks = vec![[0.0f64; 2]; world];
    let mut done: Vec<Vec<Option<f64>>> =
        programs.iter().map(|program| vec![None; program.steps.len()]).collect();
    // When a rank has come to an exchange.
    let mut come: HashMap<(usize, usize), f64> = HashMap::new();
    loop {
        let mut moved = false;
        for (rank, lane) in (0..world).flat_map(|rank| [(rank, 0), (rank, 1)]) {
            while let Some(&number) = queues[rank][lane].get(ended[rank][lane]) {
                let waited = match programs[rank].steps[number].after {
                    Some(after) => done[rank][after],
                    None => Some(0.0),
                };
                let Some(waited) = waited else { break };
                let mut begin = waited.max(clocks[rank][lane]);
                if let Some(others) = meetings.get(&(rank, number)) {
                    moved |= come.insert((rank, number), begin).is_none();
                    let begun: Option<Vec<f64>> =
                        others.iter().map(|other| come.get(other).copied()).collect();
                    let Some(begun) = begun else { break };
                    begin = begun.into_iter().fold(begin, f64::max);
                }
                let end = begin + seconds[rank][number];
                done[rank][number] = Some(end);
                clocks[rank][lane] = end;
                ended[rank][lane] += 1;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    let each = |kind: fn(&Op) -> bool| -> Vec<f64> {
        let of = |rank: usize| -> f64 {
            let steps = programs[rank].steps.iter().zip(&seconds[rank]);
            steps.filter(|(step, _)| kind(&step.op)).map(|(_, seconds)| *seconds).sum()
        };
        (0..world).map(of).collect()
    };
    let total = |kind: fn(&Op) -> bool| each(kind).into_iter().fold(0.0, f64::max);
    let of_kernels = each(|op| matches!(op, Op::Forward { .. } | Op::Backward { .. }));
    let kernels = of_kernels.iter().copied().fold(0.0, f64::max);
    let mean = of_kernels.iter().sum::<f64>() / world as f64;
    let end = clocks.iter().flatten().copied().fold(0.0, f64::max);
    Ok(Cost {
        scheme: plan.scheme(),
        layout: plan.queries().layout(),
        stages: plan.stages(),
        seconds: end,
        kernels,
        balance: if kernels > 0.0 { mean / kernels } else { 1.0 },
        sums: total(|op| {
            matches!(op, Op::Sum { .. } | Op::Nothing { .. } | Op::Merge { .. } | Op::Place { .. })
        }),
        transfers: total(|op| matches!(op, Op::Exchange { .. })),
        exposed: end - kernels,
        one_gpu: times.seen(plan.problem(), &[], None)?,
        received: programs.iter().map(Program::received).max().unwrap_or(0),
        scratch: programs.iter().map(Program::scratch_bytes).max().unwrap_or(0),
        same_bits: plan.same_bits() && !times.pass.is_backward(),
    })
}

/// Into how many parts heads may be cut.
const STAGES: [usize; 4] = [1, 2, 4, 8];

/// The plan with the number of stages that takes the least time over `passes`: few stages expose the first
/// transfer, many leave a kernel too few tiles for the SMs.
///
/// # Errors
/// What the plan and the planner refuse.
pub fn staged(plan: &ShardPlan, passes: &[Pass], machine: Machine) -> Result<ShardPlan, Error> {
    let mut all: Vec<Times> = passes.iter().map(|pass| Times::new(machine, *pass)).collect();
    let mut best: Option<(f64, ShardPlan)> = None;
    for stages in STAGES {
        let Ok(staged) = plan.clone().with_stages(stages) else { continue };
        let mut seconds = 0.0;
        for times in &mut all {
            seconds += predict(&staged, times)?.seconds;
        }
        if best.as_ref().is_none_or(|(known, _)| seconds < *known) {
            best = Some((seconds, staged));
        }
    }
    Ok(best.map_or_else(|| plan.clone(), |(_, staged)| staged))
}

/// The number of stages for a step of training, or a forward where that has no gradients; `None` where the
/// planner has no kernel.
pub(crate) fn stages(plan: &ShardPlan, machine: Machine) -> Option<usize> {
    let is_computed = |pass: &Pass| {
        plan.program(0, *pass).is_ok() && Times::new(machine, *pass).best(plan.problem()).is_ok()
    };
    let passes: Vec<Pass> = [Pass::Forward, Pass::BACKWARD].into_iter().filter(is_computed).collect();
    if passes.is_empty() {
        return None;
    }
    Some(staged(plan, &passes, machine).ok()?.stages())
}

/// All schemes for a problem, the fastest first, and why the others do not compute it.
#[derive(Debug)]
pub struct Ranking {
    /// Ranks.
    pub world: usize,
    /// The pass.
    pub pass: Pass,
    /// What computes the problem, the fastest first.
    pub plans: Vec<(ShardPlan, Cost)>,
    /// What does not, and why.
    pub refused: Vec<(Scheme, Error)>,
}

/// Ranks every scheme with rows dealt in each of `layouts`, with the number of stages that takes the least
/// time.
///
/// # Errors
/// A problem that contradicts itself, or that no kernel computes.
pub fn rank(
    problem: &Problem,
    world: usize,
    layouts: &[Layout],
    pass: Pass,
    machine: Machine,
) -> Result<Ranking, Error> {
    let mut times = Times::new(machine, pass);
    let mut ranking = Ranking { world, pass, plans: Vec::new(), refused: Vec::new() };
    let is_decode = problem.lengths.max_q() * 16 <= problem.lengths.max_k();
    for (scheme, layout) in
        Scheme::ALL.into_iter().flat_map(|scheme| layouts.iter().map(move |&own| (scheme, own)))
    {
        // A few queries are not worth a shard, and many not to be on every rank.
        if (scheme == Scheme::Decode) != is_decode {
            continue;
        }
        let plan = match ShardPlan::in_one_stage(problem, None, world, scheme, layout) {
            Ok(plan) => plan,
            Err(error @ (Error::Problem(_) | Error::Ranks { .. })) => return Err(error),
            Err(error) => {
                ranking.refused.push((scheme, error));
                continue;
            }
        };
        let mut best: Option<(ShardPlan, Cost)> = None;
        for stages in STAGES {
            let Ok(staged) = plan.clone().with_stages(stages) else { continue };
            match predict(&staged, &mut times) {
                Ok(cost) if best.as_ref().is_none_or(|(_, known)| cost.seconds < known.seconds) => {
                    best = Some((staged, cost));
                }
                Ok(_) => {}
                Err(error) if best.is_none() && stages == 1 => {
                    ranking.refused.push((scheme, error));
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        ranking.plans.extend(best);
    }
    ranking.plans.sort_by(|a, b| a.1.seconds.total_cmp(&b.1.seconds));
    Ok(ranking)
}

/// Milliseconds, with digits that tell.
fn ms(seconds: f64) -> String {
    let ms = seconds * 1e3;
    if ms < 10.0 { format!("{ms:.3}") } else { format!("{ms:.1}") }
}

impl fmt::Display for Ranking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<8} {:<10} {:>6} {:>10} {:>6} {:>10} {:>10} {:>10} {:>10} {:>9} {:>9}  bits",
            "scheme",
            "layout",
            "stages",
            "ms",
            "share",
            "kernels",
            "transfers",
            "sums",
            "exposed",
            "MB in",
            "MB own"
        )?;
        for (_, cost) in &self.plans {
            writeln!(
                f,
                "{:<8} {:<10} {:>6} {:>10} {:>5.1}% {:>10} {:>10} {:>10} {:>10} {:>9.0} {:>9.0}  {}",
                cost.scheme.name(),
                cost.layout.name(),
                cost.stages,
                ms(cost.seconds),
                100.0 * cost.share(self.world),
                ms(cost.kernels),
                ms(cost.transfers),
                ms(cost.sums),
                ms(cost.exposed),
                cost.received as f64 / 1e6,
                cost.scratch as f64 / 1e6,
                if cost.same_bits { "of one GPU" } else { "other sums" },
            )?;
        }
        // Schemes may be refused for one reason.
        let mut reasons: Vec<String> = self.refused.iter().map(|(_, error)| error.to_string()).collect();
        reasons.dedup();
        for reason in reasons {
            writeln!(f, "refused: {reason}")?;
        }
        if let Some((_, best)) = self.plans.first() {
            writeln!(f, "{}", why(best, self.plans.get(1).map(|(_, cost)| cost), self.world))?;
        }
        Ok(())
    }
}

/// Why the first is first, and what is hidden under what.
fn why(best: &Cost, next: Option<&Cost>, world: usize) -> String {
    let hidden = (best.transfers + best.sums - best.exposed).max(0.0);
    let of = match best.scheme {
        Scheme::Gather | Scheme::Ulysses if best.stages == 1 => "all heads of a rank come at once",
        Scheme::Gather => "keys and values of the next heads come under the kernels of these",
        Scheme::Ulysses => "the exchanges of the next heads run under the kernels of these",
        Scheme::Ring => "the keys of the next rank come under the kernels of this step",
        Scheme::Decode => "one exchange of (O, LSE), which nothing hides",
    };
    let mut than = next.map_or(String::new(), |next| {
        let layout = if next.scheme == best.scheme { next.layout.name() } else { "" };
        let name = format!("{layout} {}", next.scheme.name());
        format!("; {} takes {:.1}% longer", name.trim(), 100.0 * (next.seconds / best.seconds - 1.0))
    });
    if best.balance < 0.99 {
        than +=
            &format!("; the busiest rank computes {:.0}% more than the mean", 100.0 / best.balance - 100.0);
    }
    format!(
        "{}: {of}; {} of {} ms of transfers and sums are hidden, {} ms are not: {world} GPUs are {:.2} \
         times as fast as one ({} ms){than}",
        best.scheme.name(),
        ms(hidden),
        ms(best.transfers + best.sums),
        ms(best.exposed),
        best.one_gpu / best.seconds,
        ms(best.one_gpu),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use fa_core::{Dtype, Lengths, Mask};

    const MACHINE: Machine = Machine { arch: Arch::Sm90, link: Link::NVLINK };

    fn ranking(len: usize, heads: (usize, usize), world: usize, pass: Pass, link: Link) -> Ranking {
        let problem = Problem::square(1, len, heads.0, 128, Mask::CAUSAL, Dtype::Bf16).with_heads_kv(heads.1);
        rank(&problem, world, &[Layout::Zigzag], pass, Machine { link, ..MACHINE }).unwrap()
    }

    #[test]
    fn long_sequences_hide_their_gathers() {
        let long = ranking(131_072, (32, 8), 8, Pass::Forward, Link::NVLINK);
        let gather = long.plans.iter().find(|(_, cost)| cost.scheme == Scheme::Gather);
        let (plan, best) = gather.expect("gather computes the problem");
        let share = best.share(8);
        assert!((0.92..1.02).contains(&share), "{share} of one GPU");
        let parts = plan.clone().with_stages(8).unwrap();
        let parts = predict(&parts, &mut Times::new(MACHINE, Pass::Forward)).unwrap();
        assert!(parts.exposed < 0.4 * (parts.transfers + parts.sums), "{parts:?}");
        assert!(best.seconds <= parts.seconds, "{best:?} {parts:?}");
        let text = long.to_string();
        assert!(text.contains("come at once") && text.contains("times as fast as one"), "{text}");
    }

    #[test]
    fn slow_links_expose_more_and_never_less() {
        let [fast, slow] = [Link::NVLINK, Link::NETWORK]
            .map(|link| ranking(32_768, (32, 32), 4, Pass::BACKWARD, link).plans[0].1.clone());
        assert!(slow.seconds > fast.seconds && slow.exposed > fast.exposed, "{fast:?} {slow:?}");
    }

    #[test]
    fn parts_have_the_kernel_of_the_whole() {
        let problem = Problem::square(1, 32_768, 32, 128, Mask::CAUSAL, Dtype::Bf16).with_heads_kv(8);
        let plan = ShardPlan::new(&problem, 2, Scheme::Gather, Layout::Zigzag).unwrap();
        let chosen = staged(&plan, &[Pass::Forward], MACHINE).unwrap();
        let share =
            |plan: &ShardPlan| predict(plan, &mut Times::new(MACHINE, Pass::Forward)).unwrap().share(2);
        // Of one K/V head a chunk has 171 tiles of 192 rows, which 132 SMs take in two rounds.
        let parts = plan.clone().with_stages(8).unwrap();
        assert!(share(&parts) < 0.9, "{}", share(&parts));
        assert!(chosen.stages() < 8 && share(&chosen) > 0.94, "{chosen:?}");
        // Who names neither stages nor a machine gets the choice for a training step.
        let step = staged(&plan.clone().with_stages(1).unwrap(), &[Pass::Forward, Pass::BACKWARD], MACHINE);
        assert_eq!(plan.stages(), step.unwrap().stages());
        assert!(plan.stages() < 8 && share(&plan) > 0.94, "{plan:?}");
    }

    #[test]
    fn documents_by_a_program_cost_what_they_see() {
        let causal = Problem::square(1, 32_768, 32, 128, Mask::CAUSAL, Dtype::Bf16).with_heads_kv(8);
        let program = fa_core::program::Program::parse("mask = q // 5000 == k // 5000;").unwrap();
        let own = causal.with_score(causal.score.with_program(Some(program.intern().unwrap())));
        let ranked = |problem: &Problem| {
            rank(problem, 2, &[Layout::Zigzag, Layout::Contiguous], Pass::Forward, MACHINE).unwrap()
        };
        let (dense, found) = (ranked(&causal), ranked(&own));
        let (dense, (plan, best)) = (&dense.plans[0].1, &found.plans[0]);
        // About a sixth of the pairs.
        assert!((0.12..0.25).contains(&(best.one_gpu / dense.one_gpu)), "{best:?} {dense:?}");
        assert!(best.one_gpu / best.seconds > 1.4, "{best:?}");
        // Of the other half a document that both have.
        assert_eq!((best.scheme, plan.queries().layout()), (Scheme::Gather, Layout::Contiguous), "{found}");
        assert!(best.received * 6 < dense.received, "{best:?} {dense:?}");
        let zigzag = found.plans.iter().find(|(_, cost)| cost.layout == Layout::Zigzag).unwrap();
        assert!(zigzag.1.received * 2 < dense.received, "{zigzag:?}");
        // Rows that see more than others are named.
        let prefix =
            fa_core::program::Program::parse("mask = k <= q and (q < 16384 or q - k < 100);").unwrap();
        let own = causal.with_score(causal.score.with_program(Some(prefix.intern().unwrap())));
        let uneven = rank(&own, 2, &[Layout::Contiguous], Pass::Forward, MACHINE).unwrap();
        assert!(uneven.plans.iter().any(|(_, cost)| cost.balance < 0.8), "{uneven}");
        assert!(uneven.to_string().contains("more than the mean") || uneven.plans[0].1.balance > 0.99);
    }

    #[test]
    fn decodes_are_ranked_apart() {
        let problem = Problem::square(1, 1, 32, 128, Mask::CAUSAL, Dtype::Bf16)
            .with_heads_kv(8)
            .with_lengths(Lengths::uniform(1, 1, 1 << 20));
        let found = rank(&problem, 2, &[Layout::Contiguous], Pass::Forward, MACHINE).unwrap();
        assert_eq!(found.plans.len(), 1);
        let (_, cost) = &found.plans[0];
        assert_eq!(cost.scheme, Scheme::Decode);
        assert!((1.4..2.05).contains(&(cost.one_gpu / cost.seconds)), "{cost:?}");
    }

    #[test]
    fn refusals_are_listed_with_their_reason() {
        let found = ranking(16_384, (6, 3), 4, Pass::Forward, Link::NVLINK);
        assert!(found.refused.iter().any(|(scheme, _)| *scheme == Scheme::Ulysses));
        assert!(found.to_string().contains("refused: ulysses over 4 ranks"), "{found}");
    }
}
