//! How a caller wants a forward's work divided among CTAs.

use crate::{KernelSpec, Problem};

/// How a forward's work is divided among CTAs, as far as a caller decides it; the default leaves all to the
/// planner. Results are the same but for the order of sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Division {
    /// Parts of the keys of a tile's rows, a CTA each: 1 for undivided keys, more for so many, but no more
    /// than a tile takes steps. Where lengths are on the device, the most parts of a tile: each has its
    /// share of all work.
    pub splits: Option<usize>,
    /// Whether the query heads of a K/V head share a tile; of no matter where there is one.
    pub pack_gqa: Option<bool>,
}

impl Division {
    /// All is the planner's choice.
    pub const PLANNED: Division = Division { splits: None, pack_gqa: None };

    /// Whether a kernel of `spec` divides `problem` in this way. One without splits stands for any number of
    /// them where a tile's keys are one step.
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
