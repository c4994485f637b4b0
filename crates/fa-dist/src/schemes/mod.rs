//! The schemes: for each, the program of a rank.

pub(crate) mod calls;
pub(crate) mod decode;
pub(crate) mod gather;
pub(crate) mod ring;
pub(crate) mod sums;
pub(crate) mod ulysses;

use std::ops::Range;

use fa_core::TensorLayout;

use crate::program::{Buffer, Builder, Cell, Lane, Op, View};

/// Where a kernel's LSE is: packed for its rows and heads, as kernels have it.
pub(crate) struct Packed {
    made: Vec<(usize, usize, Buffer)>,
}

impl Packed {
    pub(crate) fn new() -> Packed {
        Packed { made: Vec::new() }
    }

    /// A packed LSE of as many rows and heads as the view has: the caller's own where it is one, else memory
    /// that later calls of the same shape reuse.
    pub(crate) fn of(&mut self, builder: &mut Builder, view: &View) -> View {
        if *view == builder.whole(view.buffer) {
            return view.clone();
        }
        let (rows, heads) = (view.rows.len(), view.heads.len());
        let found =
            self.made.iter().find(|(r, h, _)| (*r, *h) == (rows, heads)).map(|(_, _, buffer)| *buffer);
        let buffer = found.unwrap_or_else(|| {
            let batch = builder.shape(view.buffer).batch;
            let buffer = builder.scratch(crate::program::Shape {
                batch,
                rows,
                heads,
                dim: 1,
                cell: Cell::F32,
                order: TensorLayout::Bhsd,
            });
            self.made.push((rows, heads, buffer));
            buffer
        });
        builder.whole(buffer)
    }
}

/// Writes the result of rows that see nothing: O = 0, LSE = -inf.
pub(crate) fn nothing(builder: &mut Builder, rows: &Range<usize>, heads: &Range<usize>) {
    builder.push(Lane::Compute, Op::Sum { parts: Vec::new(), to: View::of(Buffer::Out, rows, heads) });
    builder.push(Lane::Compute, Op::Nothing { to: View::of(Buffer::Lse, rows, heads) });
}

/// What of `whole` is outside `part`, which lies in it.
pub(crate) fn outside(whole: &Range<usize>, part: &Range<usize>) -> [Range<usize>; 2] {
    [whole.start..part.start, part.end..whole.end]
}

/// Ranges in order, those that meet or touch joined.
pub(crate) fn joined(mut ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    ranges.retain(|range| !range.is_empty());
    ranges.sort_by_key(|range| range.start);
    let mut all: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        match all.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => all.push(range),
        }
    }
    all
}
