//! Bounds on work whose amount only the device knows, by which grids and lists are sized.

use fa_core::spec::{Scheduler, Traits};
use fa_core::{KernelSpec, Problem};

use crate::Error;
use crate::jit::entries::{PLAN, PLAN_CTAS, PLAN_SMEM, PLAN_THREADS, plans_in_clusters};
use crate::jit::params::PlanParams;
use crate::launch::checks::count;
use crate::launch::launches::{Launch, Step};

/// Ints of a plan's header (`kPlanHeader`), and of an entry of its lists.
const PLAN_HEADER: usize = 16;
const PLAN_ENTRY: usize = 4;

/// Tiles of a head up to which the CTAs of a forward plan for themselves (`kOwnTiles` of
/// `attn/plan_few.cuh`).
const OWN_TILES: usize = 256;

/// Ints that a CTA's own plan is a multiple of: a cache line.
const OWN_PLAN_ALIGN: usize = 32;

/// Lengths that a plan distinguishes (`kPlanThreads`).
const PLAN_BINS: usize = 1024;

/// The launch of the plan kernel: one CTA, or where GPUs have clusters one for every 1,024 sequences, up to
/// eight.
pub(crate) fn plan_step(spec: &KernelSpec, problem: &Problem) -> Step {
    let needed = problem.lengths.sequences().div_ceil(PLAN_THREADS as usize);
    let most = if plans_in_clusters(spec) { PLAN_CTAS } else { 1 };
    let ctas = needed.clamp(1, most as usize) as u32;
    Step::Plan(Launch { cluster: ctas, ..Launch::plain(PLAN, ctas, PLAN_THREADS, PLAN_SMEM) })
}

/// Bounds on the lists of a work plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PlanBounds {
    /// Tiles of queries with parts of their keys.
    pub items: usize,
    /// Tiles of queries whose keys are divided.
    pub split_items: usize,
    /// Partial results of a head.
    pub slots: usize,
    /// Tiles of queries of a backward.
    pub m_tiles: usize,
    /// Tiles of keys of a backward.
    pub n_tiles: usize,
}

impl PlanBounds {
    /// Bounds of a forward on `ctas` CTAs at once, for `heads` tiles per entry.
    pub(crate) fn forward(
        problem: &Problem,
        traits: &Traits,
        split: bool,
        (heads, ctas): (usize, usize),
    ) -> PlanBounds {
        let lengths = &problem.lengths;
        let tiles = lengths.most_tiles_q(traits.tile_queries(problem.group_size()).max(1) as u32);
        let slots = if split { most_slots(heads, ctas) } else { 0 };
        PlanBounds {
            items: tiles.saturating_add(slots),
            split_items: (slots / 2).min(tiles),
            slots,
            ..PlanBounds::default()
        }
    }

    /// Bounds of a backward.
    pub(crate) fn backward(problem: &Problem, traits: &Traits) -> PlanBounds {
        let lengths = &problem.lengths;
        let (tile_m, tile_n) = traits.tile;
        PlanBounds {
            m_tiles: lengths.most_tiles_q(tile_m),
            n_tiles: lengths.most_tiles_k(tile_n),
            ..PlanBounds::default()
        }
    }

    /// The plan's parameters. `longest`: tiles that the longest work of an entry visits.
    ///
    /// # Errors
    /// [`Error::TooLong`].
    pub(crate) fn params(&self, heads: usize, ctas: usize, longest: usize) -> Result<PlanParams, Error> {
        let shift = (0..31).find(|shift| longest >> shift < PLAN_BINS).unwrap_or(31);
        Ok(PlanParams {
            items: count("entries of the work plan", self.items)?,
            split_items: count("entries of the work plan", self.split_items)?,
            m_tiles: count("entries of the work plan", self.m_tiles)?,
            n_tiles: count("entries of the work plan", self.n_tiles)?,
            heads: count("heads", heads)?,
            slots: count("CTAs", ctas)?,
            shift,
            ..PlanParams::default()
        })
    }

    /// Bytes of the plan.
    pub(crate) fn bytes(&self) -> usize {
        4 * self.ints()
    }

    fn ints(&self) -> usize {
        let entries = self.items + self.split_items + self.m_tiles + self.n_tiles;
        PLAN_HEADER + PLAN_ENTRY * entries
    }

    /// Ints of the plan that each CTA of a forward of `m_blocks` tiles for each head of a sequence makes for
    /// itself where a call brings none; 0 where a kernel before it plans for all.
    pub(crate) fn own_ints(&self, spec: &KernelSpec, problem: &Problem, m_blocks: usize) -> usize {
        let tiles = m_blocks.saturating_mul(problem.lengths.sequences());
        let own = spec.plans_for_itself() && spec.traits().scheduler != Scheduler::PerTile;
        if own && tiles <= OWN_TILES { self.ints().next_multiple_of(OWN_PLAN_ALIGN) } else { 0 }
    }
}

/// Partial results of a head that a plan asks for at most (`part_length_of` of attn/plan_cta.cuh). Tiles of
/// nearly one length are divided for six rounds of `ctas` CTAs at most. Of others a tile is divided into `n /
/// length` parts to the nearest, two at least, where a part's length is at least a quarter of what each CTA
/// does: 4/3 of `4 * ctas / heads` parts, and some for what is rounded.
fn most_slots(heads: usize, ctas: usize) -> usize {
    6 * ctas / heads.max(1) + 2
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// Whatever the lengths: as `part_length_of` and `parts_of` of attn/plan_cta.cuh count.
        #[test]
        fn a_plan_has_room_for_every_part(
            (heads, ctas) in (1..=64usize, 1..=200usize),
            lengths in (1..=2000usize, 0..=2usize)
                .prop_flat_map(|(most, spread)| vec(most * spread / 2..most + 1, 1..=300)),
        ) {
            let all = lengths.iter().sum::<usize>();
            let longest = lengths.iter().copied().max().unwrap_or(0);
            let tiles = lengths.iter().filter(|&&n| n > 0).count();
            let each = (all * heads) as f64 / ctas as f64;
            let is_even = each > 1.0 && (longest * tiles) as f64 <= 1.1 * all as f64;
            // (The number of rounds that takes least does not matter.)
            let rounds = |rounds: usize| longest.div_ceil((rounds * ctas / (tiles * heads)).max(1));
            let choices: Vec<(usize, usize)> = if is_even {
                (1..=6).map(rounds).map(|length| (length, length - 1)).collect()
            } else {
                let length = if each <= 8.0 { each } else { each / 4.0 };
                let length = ((length + 0.999) as usize).max(1);
                vec![(length, length / 2)]
            };
            let slots = most_slots(heads, ctas);
            for (length, up) in choices {
                let splits = lengths.iter().map(|n| ((n + up) / length).clamp(1, (*n).max(1)));
                let divided: Vec<usize> = splits.filter(|&splits| splits > 1).collect();
                prop_assert!(divided.iter().sum::<usize>() <= slots);
                prop_assert!(divided.len() <= slots / 2);
            }
        }
    }
}
