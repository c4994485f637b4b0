//! The number of CTAs that share the keys of a tile's rows in the forward that takes the least time.

use fa_core::spec::MAX_COUNT;
use fa_core::{ArchLimits, KernelSpec, Problem};

use crate::account::clusters::MANY_PARTS;
use crate::account::combine::MAX_SPLITS;
use crate::cost::constants::CostConstants;
use crate::cost::core::Launch;
use crate::cost::predicted::Cost;
use crate::kernels::planned::{self, Forward, Time};
use crate::work::Work;

/// More splits are taken only if they are faster by this factor: they need more workspace. As long as all
/// parts run at once and need a combine kernel anyway, they are taken unless they are slower by it: SMs that
/// are idle would read, too, which the model does not know (decoding by 112 CTAs reads 3 % less per second
/// than by 128, NB-146).
const GAIN: f64 = 1.01;

/// More splits than run at once are taken only if they are faster by this factor: parts that follow one
/// another on an SM cost 1 to 5 % that the model does not know (NB-150).
pub(crate) const WAVES_GAIN: f64 = 1.05;

/// The forward of `problem` by `spec`, with the number of splits that takes the least time. `None` for a
/// backward, and where no number of splits can take less than `below` seconds. `cut` is the problem cut into
/// the kernel's tiles, where that is at hand.
pub(crate) fn best_split(
    problem: &Problem,
    spec: &KernelSpec,
    limits: &ArchLimits,
    constants: &CostConstants,
    (cut, below): (Option<&Work>, f64),
) -> Option<Cost> {
    let traits = spec.traits();
    let (tile_m, tile_n) = traits.tile;
    let own_cut = cut.is_none().then(|| Work::of(&traits.tiled(problem), tile_m, tile_n, traits.packs_gqa));
    let work = cut.or(own_cut.as_ref())?;
    match planned::of(&spec.kernel).time() {
        Time::Forward(kernel) => {
            kernel.best_split(&Forward { problem, spec, work, limits, constants }, below)
        }
        Time::Backward(_) => None,
    }
}

/// A lower bound in seconds on the forward of `problem` by `spec` with the keys of a tile undivided; 0 for a
/// backward. `work`: its tiles, or a lower bound on them.
pub(crate) fn least_seconds(
    problem: &Problem,
    spec: &KernelSpec,
    limits: &ArchLimits,
    constants: &CostConstants,
    work: &Work,
) -> f64 {
    match planned::of(&spec.kernel).time() {
        Time::Forward(kernel) => kernel.least_seconds(&Forward { problem, spec, work, limits, constants }),
        Time::Backward(_) => 0.0,
    }
}

/// The launch with the number of splits that takes the least time; `None` where none can take less than
/// `below` seconds.
pub(crate) fn best_of<F: Fn(f64) -> f64>(launch: &Launch<'_, F>, split: bool, below: f64) -> Option<Cost> {
    let steps = if split && launch.work.tiles > 0.0 { launch.work.longest.steps as usize } else { 0 };
    // A launch counts the parts of all tiles in 32 bits.
    let most = MAX_COUNT as f64 / launch.work.tiles.max(1.0);
    let counts = || part_counts(steps).take_while(|&parts| parts as f64 <= most);
    let is_slower = |parts: usize| launch.at_least(parts) >= below;
    if is_slower(1) && counts().all(is_slower) {
        return None;
    }
    if steps == 0 {
        return Some(launch.cost(1));
    }
    let (mut best, mut least) = (1, launch.seconds(1));
    let run_on = |ctas: f64| move |&parts: &usize| launch.work.tiles_in_parts(parts) <= ctas;
    let (at_once, alone) = (run_on(launch.slots()), run_on(f64::from(launch.limits.sms)));
    for parts in counts() {
        let gain = if at_once(&parts) { GAIN } else { WAVES_GAIN };
        // A bound is enough for most of them.
        if launch.at_least(parts) * gain < least {
            let seconds = launch.seconds(parts);
            if seconds * gain < least {
                (best, least) = (parts, seconds);
            }
        }
    }
    if best > 1 && launch.cluster(best) == 1 {
        // From the most down: the first that is not slower is the one.
        let fuller: Vec<usize> = counts().filter(|&parts| parts > best).take_while(alone).collect();
        let found = fuller.into_iter().rev().find(|&parts| launch.seconds(parts) < least * GAIN);
        best = found.unwrap_or(best);
    }
    Some(launch.cost(best))
}

/// The numbers of parts above 1 worth trying for tiles of up to `steps` steps, in ascending order: the fewest
/// parts for each length of a part, and from [`MANY_PARTS`] on the multiples of 8, which clusters can divide
/// evenly.
fn part_counts(steps: usize) -> impl Iterator<Item = usize> {
    let most = steps.min(MAX_SPLITS);
    let mut parts = 1;
    std::iter::from_fn(move || {
        let length = steps.div_ceil(parts);
        if length <= 1 && parts >= most {
            return None;
        }
        let fewest = if length > 1 { steps.div_ceil(length - 1) } else { most + 1 };
        parts = fewest.min((parts + 1).max(MANY_PARTS).next_multiple_of(8));
        (parts <= most).then_some(parts)
    })
}

#[cfg(test)]
mod tests {
    use fa_core::{Arch, Dtype, Kernel, Lengths, Mask};

    use super::*;
    use crate::kernels::sm90_fwd;
    use crate::plan::{PlanOptions, explore};

    /// The reference for [`best_of`]: every number of splits in turn.
    fn tried_in_turn<F: Fn(f64) -> f64>(launch: &Launch<'_, F>) -> Cost {
        let mut best = launch.cost(1);
        let sms = f64::from(launch.limits.sms);
        for parts in part_counts(launch.work.longest.steps as usize) {
            let cost = launch.cost(parts);
            assert_eq!(cost.seconds, launch.seconds(parts));
            let gain = if launch.work.tiles_in_parts(parts) <= sms { GAIN } else { WAVES_GAIN };
            if cost.seconds * gain < best.seconds {
                best = cost;
            }
        }
        let first = best.splits;
        let more = part_counts(launch.work.longest.steps as usize)
            .filter(|&parts| {
                first > 1
                    && launch.cluster(first) == 1
                    && parts > first
                    && launch.work.tiles_in_parts(parts) <= sms
            })
            .map(|parts| launch.cost(parts));
        let least = best.seconds;
        more.fold(best, |best, cost| if cost.seconds < least * GAIN { cost } else { best })
    }

    #[test]
    fn bounds_leave_out_only_what_is_slower() {
        let base = Problem::square(1, 1, 32, 128, Mask::CAUSAL, Dtype::Bf16);
        for (batch, queries, keys) in [(1, 1, 4097), (1, 3, 70_000), (8, 1, 300), (3, 16, 5000), (40, 1, 900)]
        {
            let problem = base.with_heads_kv(8).with_lengths(Lengths::uniform(batch, queries, keys));
            let (arch, limits) = (Arch::Sm90, Arch::Sm90.limits());
            let constants = CostConstants::of(arch);
            let plans = explore(&problem, arch, &PlanOptions::default()).expect("a supported problem").plans;
            for spec in plans.into_iter().map(|plan| plan.spec).filter(|spec| spec.split) {
                let Kernel::Sm90Fwd(kernel) = &spec.kernel else { panic!("{spec}") };
                let (tile_m, tile_n) = spec.tile();
                let work = Work::of(&problem, tile_m, tile_n, kernel.pack_gqa);
                let launch = sm90_fwd::cost::launch(
                    kernel,
                    &Forward { problem: &problem, spec: &spec, work: &work, limits, constants: &constants },
                );
                for parts in std::iter::once(1).chain(part_counts(work.longest.steps as usize)) {
                    assert!(launch.at_least(parts) <= launch.seconds(parts), "{spec}: {parts} parts");
                }
                let best = tried_in_turn(&launch);
                assert_eq!(best_of(&launch, true, f64::INFINITY), Some(best), "{spec}");
                let above = best_of(&launch, true, best.seconds * 1.000_001);
                assert_eq!(above, Some(best), "{spec}");
            }
        }
    }

    #[test]
    fn every_length_of_a_part_has_its_fewest_parts() {
        for steps in 0..600usize {
            let counts: Vec<usize> = part_counts(steps).collect();
            let mut expected: Vec<usize> = (1..=steps.max(1)).map(|len| steps.div_ceil(len)).collect();
            expected.extend((MANY_PARTS..=steps).step_by(8));
            expected.retain(|&parts| parts > 1 && parts <= MAX_SPLITS);
            expected.sort_unstable();
            expected.dedup();
            assert_eq!(counts, expected, "{steps}");
        }
    }
}
