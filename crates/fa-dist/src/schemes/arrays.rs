//! Gradients of the arrays of a program: summed over a rank's calls, then over ranks.
//!
//! Every rank owns a stretch of each array and adds up those of all ranks in their order, then gives the sum
//! to all: the bits are the same on every rank and in every run.

use std::ops::Range;

use fa_core::{Merge, TensorLayout};

use super::others;
use crate::plan::ShardPlan;
use crate::program::{AXES, Buffer, Builder, Cell, Lane, Op, Part, Shape, View, Window};

/// Elements of a row of an array's sum: sums are of whole vectors.
const WIDTH: usize = 8;

/// The gradient of an array on a rank.
struct Own {
    /// The array, by its number in the whole's program.
    array: usize,
    whole: Window,
    is_read: bool,
    /// That of a call, packed.
    part: Buffer,
    /// Their sum.
    sum: Buffer,
    /// A call's among zeros, where several have the same elements.
    term: Option<Buffer>,
    /// What the sum has.
    placed: Vec<Window>,
}

/// The gradients of the arrays of a plan.
pub(crate) struct Arrays {
    all: Vec<Own>,
}

fn vectors(builder: &mut Builder, rows: usize) -> Buffer {
    let order = TensorLayout::Bshd;
    builder.scratch(Shape { batch: 1, rows, heads: 1, dim: WIDTH, cell: Cell::F32, order })
}

fn zero(builder: &mut Builder, buffer: Buffer) {
    let to = builder.whole(buffer);
    builder.push(Lane::Compute, Op::Sum { parts: Vec::new(), to });
}

impl Arrays {
    /// Sums of 0.
    pub(crate) fn new(plan: &ShardPlan, builder: &mut Builder) -> Arrays {
        let all = plan.arrays().iter().map(|own| {
            let whole = Window::whole(own.extents);
            let rows = whole.elements().div_ceil(WIDTH);
            let [part, sum] = [(); 2].map(|()| vectors(builder, rows));
            zero(builder, sum);
            let (array, is_read) = (own.array, own.is_read);
            Own { array, whole, is_read, part, sum, term: None, placed: Vec::new() }
        });
        Arrays { all: all.collect() }
    }

    /// Where a call of a part writes the gradients of the arrays that it reads.
    pub(crate) fn of_call(&self, part: &Part) -> Vec<(usize, View)> {
        let read = self.all.iter().filter(|own| own.is_read);
        let of = |own: &Own| {
            let rows = own.window(part).elements().div_ceil(WIDTH);
            (own.array, View::of(own.part, &(0..rows), &(0..1)))
        };
        read.map(of).collect()
    }

    /// Adds what a call of a part has written.
    pub(crate) fn add(&mut self, builder: &mut Builder, part: &Part) {
        for own in self.all.iter_mut().filter(|own| own.is_read) {
            let window = own.window(part);
            let from = View::of(own.part, &(0..window.elements().div_ceil(WIDTH)), &(0..1));
            let sum = builder.whole(own.sum);
            if !own.placed.iter().any(|placed| placed.meets(&window)) {
                builder.push(Lane::Compute, Op::Place { from, to: sum, window: window.clone() });
                own.placed.push(window);
                continue;
            }
            let term = *own.term.get_or_insert_with(|| vectors(builder, sum.rows.len()));
            zero(builder, term);
            let to = builder.whole(term);
            builder.push(Lane::Compute, Op::Place { from, to: to.clone(), window: window.clone() });
            builder.push(Lane::Compute, Op::Sum { parts: vec![sum.clone(), to], to: sum });
            own.placed.push(window);
        }
    }

    /// Adds up those of all ranks, for each of them.
    pub(crate) fn finish(self, plan: &ShardPlan, rank: usize, builder: &mut Builder) {
        if plan.world() > 1 {
            self.over_ranks(plan, rank, builder);
        }
        for own in self.all {
            let (from, to) = (builder.whole(own.sum), builder.whole(Buffer::Darray(own.array)));
            let len = own.whole.elements();
            let mut window = Window::whole([1; AXES]);
            (window.extents[AXES - 1], window.ranges[AXES - 1]) = (len, 0..len);
            builder.push(Lane::Compute, Op::Place { from, to, window });
        }
    }

    fn over_ranks(&self, plan: &ShardPlan, rank: usize, builder: &mut Builder) {
        let world = plan.world();
        // The stretch of a sum that a rank adds up.
        let stretch = |rows: usize, rank: usize| rows * rank / world..rows * (rank + 1) / world;
        let of = |own: &Own, rows: &Range<usize>| View::of(own.sum, rows, &(0..1));
        let is_there = |(_, view): &(usize, View)| !view.rows.is_empty();
        let (mut sends, mut recvs, mut totals) = (Vec::new(), Vec::new(), Vec::new());
        for own in &self.all {
            let rows = builder.shape(own.sum).rows;
            let mine = stretch(rows, rank);
            let mut parts = vec![of(own, &mine); world];
            for (next, last) in others(plan, rank) {
                sends.push((next, of(own, &stretch(rows, next))));
                let room = vectors(builder, mine.len());
                parts[last] = builder.whole(room);
                recvs.push((last, parts[last].clone()));
            }
            let total = vectors(builder, mine.len());
            totals.push((own, rows, parts, builder.whole(total)));
        }
        let [sends, recvs] = [sends, recvs].map(|all| all.into_iter().filter(is_there).collect());
        builder.push(Lane::Transfer, Op::Exchange { sends, recvs });
        let (mut sends, mut recvs) = (Vec::new(), Vec::new());
        for (own, rows, parts, total) in totals {
            let mut known: Vec<View> = Vec::new();
            for group in parts.chunks(Merge::MAX_PARTS - 1) {
                let parts = known.iter().chain(group).cloned().collect();
                builder.push(Lane::Compute, Op::Sum { parts, to: total.clone() });
                known = vec![total.clone()];
            }
            builder.copy(Lane::Compute, total.clone(), of(own, &stretch(rows, rank)));
            for (next, last) in others(plan, rank) {
                sends.push((next, total.clone()));
                recvs.push((last, of(own, &stretch(rows, last))));
            }
        }
        let [sends, recvs] = [sends, recvs].map(|all| all.into_iter().filter(is_there).collect());
        builder.push(Lane::Transfer, Op::Exchange { sends, recvs });
    }
}

impl Own {
    /// What a part has of the array.
    fn window(&self, part: &Part) -> Window {
        let found = part.arrays.iter().find(|(array, _)| *array == self.array);
        found.map_or_else(|| self.whole.clone(), |(_, window)| window.clone())
    }
}
