//! How long a kernel will take on a problem, and what it will wait for.
//!
//! A roofline with a schedule. A step (one tile of scores) keeps the tensor cores, the softmax pipes and
//! shared memory busy for some clocks each; how well they overlap is the exponent `p` of `(a^p + b^p)^(1/p)`:
//! 1 for one after the other, infinity for perfect overlap. Steps add up to tiles, tiles are distributed over
//! the SMs in whole waves, and the sum is compared with L2, device memory and the power limit. Fully masked
//! tiles cost nothing, partly masked ones as much as others.
//!
//! The model ranks candidates; its constants ([`CostConstants`]) are calibrated by measurement.

pub(crate) mod constants;
pub(crate) mod core;
mod correlation;
pub(crate) mod cuts;
pub(crate) mod gpu;
pub(crate) mod head_splits;
pub(crate) mod kv_splits;
pub(crate) mod memory;
pub(crate) mod predicted;
pub(crate) mod scores;
mod step;

use fa_core::{Arch, ArchLimits, KernelSpec, Lengths, Problem};

use crate::kernels::planned::{self, Time};
use crate::work::Work;

pub use constants::{CostConstants, Sm90BwdConstants};
pub use correlation::rank_correlation;
pub(crate) use cuts::Cuts;
use gpu::Gpu;
use kv_splits::{best_split, least_seconds};
pub use predicted::{Bottleneck, Cost, StepClocks, Terms};
pub use step::{MOST_DECODED, phases};

/// Predicts the forward, or the backward, of `problem` by the kernel `spec` on `arch`.
///
/// Assumes that the spec serves the problem and fits the GPU, which [`crate::plan`] checks; what is invalid,
/// or does not run on the GPU at all, takes forever ([`Cost::NEVER`]). An SM80-class
/// kernel has as many resident CTAs as shared memory and registers allow, an SM90 kernel one. A kernel with
/// `split` has the number of splits that takes the least time.
pub fn predict(problem: &Problem, spec: &KernelSpec, arch: Arch, constants: &CostConstants) -> Cost {
    predict_on(problem, spec, (arch, arch.limits()), constants)
}

/// The same on a board of `arch` with other limits and rates than its own.
pub fn predict_on(
    problem: &Problem,
    spec: &KernelSpec,
    (arch, limits): (Arch, &ArchLimits),
    constants: &CostConstants,
) -> Cost {
    if spec.check().is_err() || problem.check().is_err() {
        return Cost::NEVER;
    }
    let gpu = Gpu { arch, limits, constants };
    let cost = predict_below(&mut Cuts::default(), problem, spec, gpu, f64::INFINITY);
    cost.unwrap_or(Cost::NEVER)
}

/// What [`predict`] is at least, before the tiles of a kernel are counted: infinite where keys are divided,
/// which no bound is known for, and 0 for backwards, whose tiles are those of many kernels, and for steps of
/// servers. `pairs` are those of a query and a key that it sees, in a head of a sequence of mean length.
pub(crate) fn at_least(problem: &Problem, spec: &KernelSpec, gpu: Gpu<'_>, pairs: f64) -> f64 {
    if spec.split {
        return f64::INFINITY;
    }
    if spec.kernel.is_backward() || step::phases(problem).is_some() {
        return 0.0;
    }
    let traits = spec.traits();
    let work = Work::at_least(&traits.tiled(problem), traits.tile, traits.packs_gqa, pairs);
    least_seconds(problem, spec, gpu.limits, gpu.constants, &work)
}

/// The same as [`predict`], with the tiles that `problem` was already cut into; `None` for some kernels that
/// take `below` seconds or more.
pub(crate) fn predict_below(
    cuts: &mut Cuts,
    problem: &Problem,
    spec: &KernelSpec,
    gpu: Gpu<'_>,
    below: f64,
) -> Option<Cost> {
    let Gpu { limits, constants, .. } = gpu;
    match planned::of(&spec.kernel).time() {
        Time::Forward(_) => {
            let traits = spec.traits();
            let (tile_m, tile_n) = traits.tile;
            if let Some(phases) = step::phases(problem) {
                return one_after_another(problem, &phases, spec, limits, constants);
            }
            let work = cuts.of_queries(&traits.tiled(problem), tile_m, tile_n, traits.packs_gqa);
            best_split(problem, spec, limits, constants, (Some(work), below))
        }
        Time::Backward(kernel) => Some(kernel.predict(problem, spec, gpu, cuts)),
    }
}

/// The cost of `phases` of `problem` together; terms and what bounds them are of the longest. Parts of the
/// keys are those of a batch of one, which a launch has at most.
fn one_after_another(
    problem: &Problem,
    phases: &[Problem],
    spec: &KernelSpec,
    limits: &ArchLimits,
    constants: &CostConstants,
) -> Option<Cost> {
    let of = |problem: &Problem| best_split(problem, spec, limits, constants, (None, f64::INFINITY));
    let costs = phases.iter().map(of).collect::<Option<Vec<Cost>>>()?;
    let lengths = Lengths::uniform(1, problem.lengths.max_q(), problem.lengths.max_k());
    let splits = if spec.split { of(&problem.with_lengths(lengths))?.splits } else { 1 };
    let sum = |value: fn(&Cost) -> f64| costs.iter().map(value).sum::<f64>();
    let seconds = sum(|cost| cost.seconds);
    Some(Cost {
        seconds,
        tflops: problem.flops_forward() / seconds / 1e12,
        bytes_per_s: problem.bytes_forward() / seconds,
        tiles: sum(|cost| cost.tiles),
        steps: sum(|cost| cost.steps),
        masked_steps: sum(|cost| cost.masked_steps),
        splits,
        ..costs.iter().copied().max_by(|a, b| a.seconds.total_cmp(&b.seconds))?
    })
}
