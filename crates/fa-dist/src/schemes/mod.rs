//! The schemes: for each, the program of a rank.

pub(crate) mod arrays;
pub(crate) mod calls;
pub(crate) mod decode;
pub(crate) mod gather;
pub(crate) mod ring;
pub(crate) mod sums;
pub(crate) mod ulysses;

use std::ops::Range;

use fa_core::{Merge, TensorLayout};

use crate::plan::ShardPlan;
use crate::program::{Buffer, Builder, Cell, Lane, Op, Shape, View};

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
            let buffer = builder.scratch(Shape {
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

/// The other ranks, in an order in which no two have the same one at the same time.
pub(crate) fn others(plan: &ShardPlan, rank: usize) -> impl Iterator<Item = (usize, usize)> {
    let world = plan.world();
    (1..world).map(move |step| ((rank + step) % world, (rank + world - step) % world))
}

/// What of the gradient of the LSE a backward of a view's rows and heads takes, where the plan has one.
pub(crate) fn dlse(
    plan: &ShardPlan,
    builder: &mut Builder,
    packed: &mut Packed,
    rows: &Range<usize>,
    heads: &Range<usize>,
) -> Option<Box<View>> {
    plan.has_dlse().then(|| {
        let from = View::of(Buffer::Dlse, rows, heads);
        let own = packed.of(builder, &from);
        if own != from {
            builder.copy(Lane::Compute, from, own.clone());
        }
        Box::new(own)
    })
}

/// Parts of a result that are merged: of more than a launch takes, groups first, which are kept in f32.
pub(crate) struct Parts {
    count: usize,
    open: Vec<[View; 2]>,
    groups: Vec<[View; 2]>,
}

impl Parts {
    /// No part yet of so many.
    pub(crate) fn new(count: usize) -> Parts {
        Parts { count, open: Vec::new(), groups: Vec::new() }
    }

    /// Adds O and LSE of a part. Those of a full group are merged at once: their memory is free.
    pub(crate) fn push(&mut self, builder: &mut Builder, part: [View; 2]) {
        self.open.push(part);
        if self.count > Merge::MAX_PARTS && self.open.len() == Merge::MAX_PARTS {
            self.close(builder);
        }
    }

    fn close(&mut self, builder: &mut Builder) {
        let [out, lse] = [Buffer::Out, Buffer::Lse].map(|buffer| {
            let shape = Shape { cell: Cell::F32, ..builder.shape(buffer) };
            let group = builder.scratch(shape);
            builder.whole(group)
        });
        self.groups.push([out.clone(), lse.clone()]);
        let parts = std::mem::take(&mut self.open);
        builder.push(Lane::Compute, Op::Merge { parts, out, lse, sinks: false });
    }

    /// Writes the result.
    pub(crate) fn merge(mut self, builder: &mut Builder, sinks: bool) {
        if !self.groups.is_empty() && !self.open.is_empty() {
            self.close(builder);
        }
        let parts = if self.groups.is_empty() { self.open } else { self.groups };
        let [out, lse] = [Buffer::Out, Buffer::Lse].map(|buffer| builder.whole(buffer));
        builder.push(Lane::Compute, Op::Merge { parts, out, lse, sinks });
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
