//! How many CTAs share the keys of a tile's rows in the forward: launch and cost model take the same number.

use fa_core::spec::MAX_COUNT;
use fa_core::{Arch, ArchLimits, Kernel, KernelSpec, Lengths, Problem};

use crate::cost::constants::CostConstants;
use crate::cost::core::Cost;
use crate::cost::schedule::Work;
use crate::kernels::{sm80_fwd, sm90_fwd};

/// The most CTAs that share the keys of a tile's rows: the combine kernel holds their LSEs.
pub const MAX_SPLITS: usize = 256;

/// Fewer splits are kept unless more are faster by this factor: they take less workspace.
const GAIN: f64 = 1.01;

/// CTAs that share the keys of each tile's rows (splits): 1 to [`MAX_SPLITS`], and no more than a tile has
/// steps. 1 for kernels without `split`, and for problems without queries or keys.
///
/// Splits fill the GPU where there are fewer tiles than SMs, which is decode: one token of a batch of one has
/// as many tiles as there are K/V heads. They cost partial results in f32 and a combine kernel. The number is
/// the one with the least predicted time on a GPU of `arch` with `sms` SMs: whole waves of parts as long as
/// the SMs take for them, or the time of K and V through device memory, and the combine kernel.
///
/// Where lengths are on the device, the plan kernel divides each sequence by its share of all work; this is
/// then the most that one may have, as if it were alone with the most queries and keys.
pub fn kv_splits(problem: &Problem, spec: &KernelSpec, arch: Arch, sms: u32) -> usize {
    let lengths = &problem.lengths;
    let alone = if lengths.is_uniform() {
        *problem
    } else {
        Problem { lengths: Lengths::uniform(1, lengths.max_q(), lengths.max_k()), ..*problem }
    };
    let limits = ArchLimits { sms, ..*arch.limits() };
    best_split(&alone, spec, &limits, &CostConstants::of(arch), None).map_or(1, |cost| cost.splits)
}

/// The forward of `problem` by `spec`, with the number of splits that takes the least time. `None` for a
/// backward. `cut` is the problem cut into the kernel's tiles, where that is at hand.
pub(crate) fn best_split(
    problem: &Problem,
    spec: &KernelSpec,
    limits: &ArchLimits,
    constants: &CostConstants,
    cut: Option<&Work>,
) -> Option<Cost> {
    let (tile_m, tile_n) = spec.tile();
    let own_cut = cut.is_none().then(|| Work::of(problem, tile_m, tile_n, spec.traits().packs_gqa));
    let work = cut.or(own_cut.as_ref())?;
    let predict = |parts: usize| match &spec.kernel {
        Kernel::Sm80Fwd(kernel) => {
            Some(sm80_fwd::cost::predict(problem, work, parts, (spec, kernel), limits, constants))
        }
        Kernel::Sm90Fwd(kernel) => {
            Some(sm90_fwd::cost::predict(problem, work, parts, (spec, kernel), limits, constants))
        }
        Kernel::Sm80Bwd(_) | Kernel::Sm90Bwd(_) => None,
    };
    let mut best = predict(1)?;
    if !spec.split || work.tiles == 0.0 {
        return Some(best);
    }
    let mut least = best.seconds;
    // A launch counts the parts of all tiles in 32 bits.
    let most = MAX_COUNT as f64 / work.tiles;
    for parts in part_counts(work.longest.steps as usize).take_while(|&parts| parts as f64 <= most) {
        let cost = predict(parts)?;
        if cost.seconds * GAIN < least {
            (best, least) = (cost, cost.seconds);
        }
    }
    Some(best)
}

/// The numbers of parts above 1 that are worth a look for tiles of up to `steps` steps: for each length of a
/// part the fewest, in ascending order.
fn part_counts(steps: usize) -> impl Iterator<Item = usize> {
    let most = steps.min(MAX_SPLITS);
    let mut parts = 1;
    std::iter::from_fn(move || {
        let length = steps.div_ceil(parts);
        if length <= 1 {
            return None;
        }
        parts = steps.div_ceil(length - 1);
        (parts <= most).then_some(parts)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_of_a_part_has_its_fewest_parts() {
        for steps in 0..600usize {
            let counts: Vec<usize> = part_counts(steps).collect();
            let mut expected: Vec<usize> = (1..=steps.max(1)).map(|len| steps.div_ceil(len)).collect();
            expected.retain(|&parts| parts > 1 && parts <= MAX_SPLITS);
            expected.sort_unstable();
            expected.dedup();
            assert_eq!(counts, expected, "{steps}");
        }
    }
}
