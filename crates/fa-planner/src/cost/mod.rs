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
pub(crate) mod schedule;

use std::collections::HashMap;

use fa_core::{Arch, Kernel, KernelSpec, Problem};

use crate::account::kv_splits::{best_split, least_seconds};
use crate::account::splits::Split;
use crate::kernels::{sm80_bwd, sm90_bwd};

pub use constants::{CostConstants, Sm90BwdConstants};
pub use core::{Bottleneck, Cost, StepClocks, Terms};
pub use correlation::rank_correlation;
pub use schedule::{Queue, TileClass, Work};

/// Predicts the forward, or the backward, of `problem` by the kernel `spec` on `arch`.
///
/// Assumes that the spec serves the problem and fits the GPU, which [`crate::plan`] checks. An SM80-class
/// kernel has as many resident CTAs as shared memory and registers allow, an SM90 kernel one. A kernel with
/// `split` has the number of splits that takes the least time.
pub fn predict(problem: &Problem, spec: &KernelSpec, arch: Arch, constants: &CostConstants) -> Cost {
    let cost = predict_below(&mut Cuts::default(), problem, spec, arch, (constants, f64::INFINITY));
    cost.expect("every time is below infinity")
}

/// A problem cut into the tiles of kernels of one family, pass and pair of head dims: most candidates share
/// their tile with others.
#[derive(Debug, Default)]
pub(crate) struct Cuts {
    /// Forwards, by (tile_m, tile_n, packed).
    queries: HashMap<(u32, u32, bool), Work>,
    /// Backwards, by (tile_m, tile_n, CTAs on an SM): the parts of a K/V head's query heads, and the tiles.
    keys: HashMap<(u32, u32, u32), (Split, Work)>,
}

impl Cuts {
    fn of_queries(&mut self, problem: &Problem, tile_m: u32, tile_n: u32, packed: bool) -> &Work {
        let cut = || Work::of(problem, tile_m, tile_n, packed);
        self.queries.entry((tile_m, tile_n, packed)).or_insert_with(cut)
    }

    /// The parts into which the backward by `spec` divides query heads, and the tiles of keys of these.
    pub fn of_keys(&mut self, problem: &Problem, spec: &KernelSpec, arch: Arch) -> (Split, &Work) {
        let traits = spec.traits();
        let (tile_m, tile_n) = traits.tile;
        let (split, work) = self.keys.entry((tile_m, tile_n, traits.blocks_per_sm)).or_insert_with(|| {
            let split = Split::choose(problem, spec, arch, arch.limits().sms);
            (split, Work::of_keys(problem, tile_m, tile_n, split.parts))
        });
        (*split, work)
    }
}

/// What [`predict`] is at least, before the tiles of a kernel are counted: infinite where keys are divided,
/// which no bound is known for, and 0 for backwards, whose tiles are those of many kernels. `pairs` are those of a query and a key that it
/// sees, in a head of a sequence of mean length.
pub(crate) fn at_least(
    problem: &Problem,
    spec: &KernelSpec,
    arch: Arch,
    (constants, pairs): (&CostConstants, f64),
) -> f64 {
    if spec.split {
        return f64::INFINITY;
    }
    if spec.kernel.is_backward() {
        return 0.0;
    }
    let work = Work::at_least(problem, spec.tile(), spec.traits().packs_gqa, pairs);
    least_seconds(problem, spec, arch.limits(), constants, &work)
}

/// The same as [`predict`], with the tiles that `problem` was already cut into; `None` for some kernels that
/// take `below` seconds or more.
pub(crate) fn predict_below(
    cuts: &mut Cuts,
    problem: &Problem,
    spec: &KernelSpec,
    arch: Arch,
    (constants, below): (&CostConstants, f64),
) -> Option<Cost> {
    match &spec.kernel {
        Kernel::Sm80Fwd(_) | Kernel::Sm90Fwd(_) => {
            let (tile_m, tile_n) = spec.tile();
            let work = cuts.of_queries(problem, tile_m, tile_n, spec.traits().packs_gqa);
            best_split(problem, spec, arch.limits(), constants, (Some(work), below))
        }
        Kernel::Sm80Bwd(kernel) => {
            Some(sm80_bwd::cost::predict(problem, spec, kernel, arch, (constants, cuts)))
        }
        Kernel::Sm90Bwd(kernel) => {
            Some(sm90_bwd::cost::predict(problem, spec, kernel, arch, (constants, cuts)))
        }
    }
}
