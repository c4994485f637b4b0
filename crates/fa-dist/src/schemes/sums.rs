//! Sums of parts that cover different rows.

use std::ops::Range;

use crate::program::{Buffer, Builder, Lane, Op, View};
use crate::shard::overlap;

/// A part of a sum: rows of the whole sequence, and where they are.
pub(crate) struct Term {
    /// Rows of the whole.
    pub rows: Range<usize>,
    /// The buffer.
    pub buffer: Buffer,
    /// The buffer's number of the first of them.
    pub first: usize,
}

/// Adds up `terms` over `rows` of the whole, into `to` from its row `first` on: stretches that the same terms
/// cover are one sum each, those that none covers become zeros. Terms are added in the order given.
pub(crate) fn sum(
    builder: &mut Builder,
    lane: Lane,
    terms: &[Term],
    from_heads: &Range<usize>,
    rows: &Range<usize>,
    (to, first, to_heads): (Buffer, usize, &Range<usize>),
) {
    let mut cuts = vec![rows.start, rows.end];
    for term in terms {
        cuts.extend(overlap(&term.rows, rows).into_iter().flat_map(|both| [both.start, both.end]));
    }
    cuts.sort_unstable();
    cuts.dedup();
    for cut in cuts.windows(2) {
        let stretch = cut[0]..cut[1];
        let covering = terms.iter().filter(|term| overlap(&term.rows, &stretch).is_some());
        let at = |start: usize, first: usize| stretch.start - start + first..stretch.end - start + first;
        let parts = covering.map(|term| View::of(term.buffer, &at(term.rows.start, term.first), from_heads));
        let to = View::of(to, &at(rows.start, first), to_heads);
        builder.push(lane, Op::Sum { parts: parts.collect(), to });
    }
}
