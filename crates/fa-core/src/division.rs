//! How a caller wants a forward's work divided among CTAs.

use crate::{KernelSpec, Problem};

/// How a forward's work is divided among CTAs, as far as a caller decides it; the default leaves all to the
/// planner. Results are the same except for the order of sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Division {
    /// Parts of the keys of a tile, a CTA each: 1 for undivided keys, and no more parts than a tile has
    /// steps. Where lengths are on the device, the most parts of a tile: each tile is divided by its share of
    /// all work.
    pub splits: Option<usize>,
    /// Whether the query heads of a K/V head share a tile; without effect where a K/V head has one query
    /// head.
    pub pack_gqa: Option<bool>,
}

impl Division {
    /// The planner decides everything.
    pub const PLANNED: Division = Division { splits: None, pack_gqa: None };

    /// Whether a kernel of `spec` divides `problem` in this way. A kernel without splits counts as any number
    /// of them where a tile's keys are one step.
    pub fn admits(&self, spec: &KernelSpec, problem: &Problem) -> bool {
        let (_, tile_n) = spec.tile();
        let splits = match self.splits {
            None => true,
            Some(0 | 1) => !spec.split,
            Some(_) => spec.split || problem.lengths.max_k() <= tile_n as usize,
        };
        let alone = problem.group_size() <= 1;
        splits && self.pack_gqa.is_none_or(|packs| alone || spec.traits().packs_gqa == packs)
    }
}
