//! Sums over many keys: panels that see a long range of them are added up in f64, stretch by stretch, where
//! f32 would lose digits, and where several threads may have a stretch each.

use std::ops::Range;

use crate::simd::{Kernels, Work, widest};

/// Tiles of keys (of queries, for dK and dV) of a stretch. An f32 sum over the tiles of one loses 2e-5 at
/// most, where all terms are rounded the same way; to add one takes a thousandth of its products' time.
pub(super) const STRETCH: usize = 256;
/// The least tiles of a stretch that a thread may have alone: to add one then takes a thirtieth of its
/// products' time.
const LEAST: usize = 4;
/// The most stretches of a sequence's K/V heads together, where they are shorter than [`STRETCH`]: more
/// threads are not kept busy by a sequence of few queries.
const MOST: usize = 32;

/// Tiles of a stretch of a sequence's `tiles`; `few` says that its queries are few enough for its keys to be
/// divided among threads. It follows from the sequence alone, so that its bits do.
pub(super) fn stretch(tiles: usize, heads_kv: usize, few: bool) -> usize {
    let parts = if few { (MOST / heads_kv).max(1) } else { 1 };
    tiles.div_ceil(parts).clamp(LEAST, STRETCH)
}

/// What a panel of queries has accumulated: O as a row of the queries for each element of the head dim, not
/// normalised, and the maximum and sum of each query.
pub(super) struct Accumulated<'a> {
    pub o: &'a mut [f32],
    pub max: &'a mut [f32],
    pub sum: &'a mut [f32],
    /// Whether `o` holds anything yet.
    pub started: &'a mut bool,
}

impl Accumulated<'_> {
    /// Nothing, before the first key.
    pub(super) fn reset(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
        *self.started = false;
    }
}

/// The earlier stretches of a panel; empty where there is only one.
#[derive(Default)]
pub(super) struct Stretches {
    started: bool,
    o: Vec<f64>,
    max: Vec<f32>,
    sum: Vec<f64>,
    /// Factors of the old sums and of the new ones.
    factors: [Vec<f32>; 2],
}

impl Stretches {
    /// Forgets all.
    pub(super) fn clear(&mut self) {
        self.started = false;
    }

    /// Adds a stretch: O, and the maximum and sum of each query.
    pub(super) fn add(&mut self, kernels: Kernels, [rows, new_max, new_sum]: [&[f32]; 3]) {
        let Stretches { started, o, max, sum, factors: [of_before, of_new] } = self;
        if !*started {
            // As it is, to the sign of a zero: a single stretch has the same bits if it is not added.
            *started = true;
            o.clear();
            o.extend(rows.iter().map(|&value| f64::from(value)));
            sum.clear();
            sum.extend(new_sum.iter().map(|&value| f64::from(value)));
            max.clear();
            max.extend_from_slice(new_max);
            return;
        }
        // Under the larger maximum. -inf - (-inf) would be NaN.
        of_before.clear();
        of_new.clear();
        for (max, &new) in max.iter_mut().zip(new_max) {
            let top = new.max(*max);
            let origin = if top == f32::NEG_INFINITY { 0.0 } else { top };
            of_before.push(*max - origin);
            of_new.push(new - origin);
            *max = top;
        }
        kernels.exp2(of_before);
        kernels.exp2(of_new);
        widest(AddRows { to: sum, rows: new_sum, of_before, of_new });
        widest(AddRows { to: o, rows, of_before, of_new });
    }

    /// All stretches so far as one.
    pub(super) fn give(&self, to: Accumulated<'_>) {
        let Accumulated { o, max, sum, started } = to;
        *started = self.started;
        if self.started {
            o.iter_mut().zip(&self.o).for_each(|(o, &all)| *o = all as f32);
            max.copy_from_slice(&self.max);
            sum.iter_mut().zip(&self.sum).for_each(|(sum, &all)| *sum = all as f32);
        }
    }

    /// Adds a stretch of a panel that goes on, and resets it.
    pub(super) fn end(&mut self, kernels: Kernels, mut stretch: Accumulated<'_>) {
        if *stretch.started {
            self.add(kernels, [stretch.o, stretch.max, stretch.sum]);
        }
        stretch.reset();
    }

    /// All stretches as one, the last of which is `stretch`.
    pub(super) fn finish(&mut self, kernels: Kernels, stretch: Accumulated<'_>) {
        if !self.started {
            return;
        }
        if *stretch.started {
            self.add(kernels, [stretch.o, stretch.max, stretch.sum]);
        }
        self.give(stretch);
        self.clear();
    }
}

/// Adds rows of O under the factors of each query, compiled for wide vectors.
struct AddRows<'a> {
    to: &'a mut [f64],
    rows: &'a [f32],
    of_before: &'a [f32],
    of_new: &'a [f32],
}

impl Work for AddRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let AddRows { to, rows, of_before, of_new } = self;
        let width = of_before.len();
        for (to, row) in to.chunks_exact_mut(width).zip(rows.chunks_exact(width)) {
            for (((to, &value), &of_before), &of_new) in to.iter_mut().zip(row).zip(of_before).zip(of_new) {
                *to = *to * f64::from(of_before) + f64::from(value) * f64::from(of_new);
            }
        }
    }
}

/// The earlier stretches of a backward's sums; empty where there is only one.
#[derive(Default)]
pub(super) struct Sums(Vec<f64>);

impl Sums {
    /// Adds `range` of a stretch of `sums` and resets it.
    pub(super) fn add(&mut self, sums: &mut [f32], range: Range<usize>) {
        if self.0.is_empty() {
            self.0 = vec![0.0; sums.len()];
        }
        for (before, sum) in self.0[range.clone()].iter_mut().zip(&mut sums[range]) {
            *before += f64::from(*sum);
            *sum = 0.0;
        }
    }

    /// All stretches as one, the last of which is `sums`.
    pub(super) fn finish(&mut self, sums: &mut [f32]) {
        for (sum, before) in sums.iter_mut().zip(&self.0) {
            *sum = (f64::from(*sum) + before) as f32;
        }
        *self = Sums::default();
    }
}

/// Adds these rows of a stretch of dK and dV, at their row strides, and resets them.
pub(super) fn add_both(
    before: &mut [Sums; 2],
    sums: [&mut [f32]; 2],
    rows: Range<usize>,
    strides: [usize; 2],
) {
    for ((before, sums), stride) in before.iter_mut().zip(sums).zip(strides) {
        before.add(sums, rows.start * stride..rows.end * stride);
    }
}

/// All stretches of dK and dV as one.
pub(super) fn finish_both(before: &mut [Sums; 2], sums: [&mut [f32]; 2]) {
    before.iter_mut().zip(sums).for_each(|(before, sums)| before.finish(sums));
}
