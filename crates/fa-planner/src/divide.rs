//! How a problem's work is divided among CTAs: what a launch takes beside the kernel.

use fa_core::{Arch, ArchLimits, KernelSpec, LaunchPlan, Lengths, Problem};

use crate::account::MAX_SPLITS;
use crate::account::clusters::split_cluster;
use crate::cost::CostConstants;
use crate::cost::head_splits::Split;
use crate::cost::kv_splits::best_split;
use crate::kernels::planned::{self, Time};

/// What a call of `spec` for `problem` launches on a GPU of `arch` with `sms` SMs. `splits` are those that
/// the caller wants of a forward, as [`fa_core::Division::splits`] says, or as many as take the least time.
///
/// A kernel that does not compute the problem is left whole: the launch says why it does not.
pub fn divide(
    problem: &Problem,
    spec: &KernelSpec,
    arch: Arch,
    sms: u32,
    splits: Option<usize>,
) -> LaunchPlan {
    let whole = LaunchPlan::whole(spec.clone());
    let is_served = problem.check().is_ok() && spec.serves(problem).is_ok();
    if !is_served {
        return whole;
    }
    if spec.kernel.is_backward() {
        return LaunchPlan { splits: head_splits(problem, spec, arch, sms), ..whole };
    }
    if !spec.split {
        return whole;
    }
    let traits = spec.traits();
    if spec.reads.varied {
        // Sequences of several tiles fill the SMs with as many parts as a dense one has; the plan kernel
        // alone would cut four for each CTA.
        let several =
            problem.lengths.max_q() > traits.tile_queries(traits.tiled(problem).group_size()).max(1);
        let planned = || if several { kv_splits(problem, spec, arch, sms) } else { LaunchPlan::UNBOUNDED };
        return LaunchPlan { splits: splits.unwrap_or_else(planned).max(1), ..whole };
    }
    let steps = problem.lengths.max_k().div_ceil(traits.tile.1 as usize).max(1);
    let splits = match splits {
        Some(parts) => parts.clamp(1, steps.min(MAX_SPLITS)),
        None => kv_splits(problem, spec, arch, sms),
    };
    LaunchPlan { splits, cluster: split_cluster(problem, spec, sms, splits), ..whole }
}

/// CTAs that share the keys of each tile's rows (splits): 1 to [`MAX_SPLITS`], and no more than a tile has
/// steps. 1 for kernels without `split`, and for problems without queries or keys.
///
/// Splits fill the GPU where there are fewer tiles than SMs, which is decode: one token of a batch of one has
/// as many tiles as there are K/V heads. They cost partial results in f32 and a combine kernel. The number is
/// the one with the least predicted time on a GPU of `arch` with `sms` SMs: whole waves of parts as long as
/// the SMs take for them, or the time of K and V through device memory, and the combine kernel.
///
/// With lengths on the device, the plan kernel divides each sequence by its share of all work. The result is
/// then an upper bound: the number for a batch of one with the most queries and keys.
pub fn kv_splits(problem: &Problem, spec: &KernelSpec, arch: Arch, sms: u32) -> usize {
    let lengths = &problem.lengths;
    let alone = if lengths.is_uniform() {
        *problem
    } else {
        problem.with_lengths(Lengths::uniform(1, lengths.max_q(), lengths.max_k()))
    };
    let limits = ArchLimits { sms, ..*arch.limits() };
    best_split(&alone, spec, &limits, &CostConstants::of(arch), (None, f64::INFINITY))
        .map_or(1, |cost| cost.splits)
}

/// Parts into which the query heads of a K/V head are divided, each with a CTA per tile of keys: 1 to the
/// group's size; 1 for a forward.
///
/// Without parts the CTAs of a K/V head's tiles step through all its query heads. Under a mask they see
/// different numbers of queries and drift apart, each in another head's Q, dO and dQ, until the L2 no longer
/// holds what is in use (NB-052). Parts keep them together and fill the GPU, but dK and dV are then summed up
/// in f32 in device memory. The number with the least estimated time is taken; the constants reproduce the
/// measured choice (`tests/splits.rs`), not the rates.
///
/// 1 where there is nothing to sum. In a deterministic backward the parts add in turn. `sms` is the number of
/// SMs of the GPU at hand.
pub fn head_splits(problem: &Problem, spec: &KernelSpec, arch: Arch, sms: u32) -> usize {
    match planned::of(&spec.kernel).time() {
        Time::Backward(kernel) => {
            let rates = kernel.rates(arch.limits(), &CostConstants::of(arch));
            Split::choose(problem, spec, rates, arch.limits(), sms).parts
        }
        Time::Forward(_) => 1,
    }
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Mask};

    use super::*;
    use crate::plan::{PlanOptions, explore};

    #[test]
    fn parts_fill_the_gpu_where_that_costs_nothing() {
        let problem = Problem::square(1, 1, 64, 128, Mask::FULL, Dtype::Bf16)
            .with_heads_kv(8)
            .with_lengths(Lengths::uniform(1, 1, 131_072));
        let (arch, sms) = (Arch::Sm90, Arch::Sm90.limits().sms);
        let plans = explore(&problem, arch, &PlanOptions::default()).expect("a supported problem").plans;
        let spec = plans.into_iter().map(|plan| plan.spec).find(|spec| spec.split).expect("a split kernel");
        // Eight tiles on 132 SMs: in clusters of 8.
        assert_eq!(kv_splits(&problem, &spec, arch, sms), 8, "{spec}");
        // Four tiles need more CTAs than clusters of 8 have: as many as read at the full rate.
        let fewer = problem.with_heads(32, 4);
        let splits = kv_splits(&fewer, &spec, arch, sms);
        assert!((16..=33).contains(&splits), "{spec}: {splits}");
    }
}
