//! Which keys the queries of one sequence see, in ranges and tiles.

use std::ops::Range;

use fa_core::Mask;

use crate::batch::Sequence;
use crate::simd::Bias;

/// The mask of one sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Band {
    pub mask: Mask,
    /// Queries and keys of the sequence.
    pub q: usize,
    pub k: usize,
}

impl Band {
    pub(super) fn new(mask: Mask, sequence: &Sequence) -> Band {
        Band { mask, q: sequence.q.len, k: sequence.k.len }
    }

    /// The keys that a query sees.
    pub(super) fn keys(&self, query: usize) -> Range<usize> {
        self.mask.keys(query, self.q, self.k)
    }

    /// The queries that see a key: the mask with its sides exchanged.
    pub(super) fn queries(&self, key: usize) -> Range<usize> {
        self.mask.transposed().keys(key, self.k, self.q)
    }

    /// Whether a query sees a key.
    pub(super) fn visible(&self, query: usize, key: usize) -> bool {
        self.keys(query).contains(&key)
    }

    /// The keys that at least one of `queries` (not empty) sees.
    pub(super) fn visible_keys(&self, queries: &Range<usize>) -> Range<usize> {
        let (first, last) = (self.keys(queries.start), self.keys(queries.end - 1));
        first.start..last.end.max(first.start)
    }

    /// Whether every one of `queries` sees every one of `keys`.
    pub(super) fn sees_all(&self, queries: &Range<usize>, keys: &Range<usize>) -> bool {
        self.keys(queries.end - 1).start <= keys.start && keys.end <= self.keys(queries.start).end
    }

    /// Sets what the mask hides to `value` in a tile, `keys` down and `queries` across at stride `ld`: -inf
    /// for scores.
    pub(super) fn hide(
        &self,
        queries: &Range<usize>,
        keys: &Range<usize>,
        s: &mut [f32],
        ld: usize,
        value: f32,
    ) {
        let clamp = |query: usize| query.clamp(queries.start, queries.end) - queries.start;
        for (row, key) in s.chunks_mut(ld).zip(keys.clone()) {
            let seen = self.queries(key);
            let row = &mut row[..queries.len()];
            row[..clamp(seen.start)].fill(value);
            row[clamp(seen.end)..].fill(value);
        }
    }

    /// Pairs of a query and a key that it sees.
    pub(super) fn pairs(&self) -> f64 {
        self.mask.pairs(self.q, self.k) as f64
    }

    /// ALiBi's bias, in base 2, on the tile that begins at `query` and `key`; `None` where the slope is 0.
    /// Slopes stay finite, as the diagonal's bias is 0 times the slope.
    pub(super) fn bias(&self, slope: f32, query: usize, key: usize) -> Option<Bias> {
        let first = self.mask.diagonal(query, self.q, self.k) - key as i128;
        let exponent = (slope * std::f32::consts::LOG2_E).clamp(-f32::MAX, f32::MAX);
        (slope != 0.0).then_some(Bias { slope: exponent, first: first as f32 })
    }
}
