//! Problems over ranks.

use fa_core::{Dtype, Lengths, Mask, Problem};
use fa_dist::{Layout, Scheme, ShardPlan};

/// A small problem: queries and keys, query and K/V heads, a mask.
pub(crate) fn problem(
    batch: usize,
    (q, k): (usize, usize),
    (heads_q, heads_kv): (usize, usize),
    mask: Mask,
) -> Problem {
    let square = Problem::square(batch, q, heads_q, 8, mask, Dtype::F32);
    square.with_lengths(Lengths::uniform(batch, q, k)).with_heads_kv(heads_kv)
}

/// The masks of the tests.
pub(crate) const MASKS: [Mask; 7] = [
    Mask::FULL,
    Mask::CAUSAL,
    Mask::causal_window(5),
    Mask::window(3, 4),
    Mask::CAUSAL.with_offset(-2),
    Mask::band(Some(9), None),
    Mask::band(None, Some(2)),
];

/// The schemes that have gradients, over a problem, that do not refuse it.
pub(crate) fn plans(problem: &Problem, world: usize) -> Vec<ShardPlan> {
    let schemes = [Scheme::Gather, Scheme::Ulysses, Scheme::Ring];
    let layouts = [Layout::Zigzag, Layout::Contiguous];
    let pairs = schemes.into_iter().flat_map(|scheme| layouts.map(|layout| (scheme, layout)));
    pairs.filter_map(|(scheme, layout)| ShardPlan::new(problem, world, scheme, layout).ok()).collect()
}
