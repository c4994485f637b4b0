//! A problem's tiles, cut once for all the kernels that share them.

use std::collections::HashMap;

use fa_core::{ArchLimits, KernelSpec, Problem};

use crate::work::Work;

use super::head_splits::{BackwardRates, Split};

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
    /// The tiles of queries of a forward.
    pub(crate) fn of_queries(&mut self, problem: &Problem, tile_m: u32, tile_n: u32, packed: bool) -> &Work {
        let cut = || Work::of(problem, tile_m, tile_n, packed);
        self.queries.entry((tile_m, tile_n, packed)).or_insert_with(cut)
    }

    /// The parts into which the backward by `spec` divides query heads, and the tiles of keys of these.
    pub(crate) fn of_keys(
        &mut self,
        problem: &Problem,
        spec: &KernelSpec,
        rates: BackwardRates,
        limits: &ArchLimits,
    ) -> (Split, &Work) {
        let traits = spec.traits();
        let (tile_m, tile_n) = traits.tile;
        let (split, work) = self.keys.entry((tile_m, tile_n, traits.blocks_per_sm)).or_insert_with(|| {
            let split = Split::choose(problem, spec, rates, limits, limits.sms);
            (split, Work::of_keys(problem, tile_m, tile_n, split.parts))
        });
        (*split, work)
    }
}
