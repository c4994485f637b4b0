//! Sums over very many keys: panels that see a long range of them are added up in f64, stretch by stretch,
//! where f32 would lose digits.

use std::ops::Range;

/// Tiles of keys (of queries, for dK and dV) of a stretch. An f32 sum over the tiles of one loses 2e-5 at
/// most, where all terms are rounded the same way; to add one takes a thousandth of its products' time.
pub(super) const STRETCH: usize = 256;

/// What a panel of queries has accumulated: O as a row of the queries for each element of the head dim, not
/// normalised, and the maximum and sum of each query.
pub(super) struct Accumulated<'a> {
    pub o: &'a mut [f32],
    pub max: &'a mut [f32],
    pub sum: &'a mut [f32],
    /// Whether `o` holds anything yet.
    pub started: &'a mut bool,
}

/// The earlier stretches of a panel; empty where there is only one.
#[derive(Default)]
pub(super) struct Stretches {
    o: Vec<f64>,
    max: Vec<f32>,
    sum: Vec<f64>,
}

impl Stretches {
    /// Adds a stretch and resets it.
    pub(super) fn add(&mut self, stretch: Accumulated<'_>) {
        let Accumulated { o, max, sum, started } = stretch;
        if !*started {
            return;
        }
        let width = max.len();
        if self.max.is_empty() {
            self.max = vec![f32::NEG_INFINITY; width];
            self.sum = vec![0.0; width];
            self.o = vec![0.0; o.len()];
        }
        // Factors of the old and the new sums under the larger maximum. -inf - (-inf) would be NaN.
        let factors: Vec<[f64; 2]> = (0..width)
            .map(|i| {
                let top = max[i].max(self.max[i]);
                let origin = if top == f32::NEG_INFINITY { 0.0 } else { top };
                let factors = [self.max[i], max[i]].map(|max| f64::from((max - origin).exp2()));
                self.max[i] = top;
                self.sum[i] = self.sum[i] * factors[0] + f64::from(sum[i]) * factors[1];
                factors
            })
            .collect();
        for (before, o) in self.o.chunks_exact_mut(width).zip(o.chunks_exact(width)) {
            for ((before, &o), [of_before, of_new]) in before.iter_mut().zip(o).zip(&factors) {
                *before = *before * of_before + f64::from(o) * of_new;
            }
        }
        max.fill(f32::NEG_INFINITY);
        sum.fill(0.0);
        *started = false;
    }

    /// All stretches as one, the last of which is `stretch`.
    pub(super) fn finish(&mut self, stretch: Accumulated<'_>) {
        if self.max.is_empty() {
            return;
        }
        let Accumulated { o, max, sum, started } = stretch;
        self.add(Accumulated { o, max, sum, started });
        o.iter_mut().zip(&self.o).for_each(|(o, &all)| *o = all as f32);
        max.copy_from_slice(&self.max);
        sum.iter_mut().zip(&self.sum).for_each(|(sum, &all)| *sum = all as f32);
        *started = true;
        *self = Stretches::default();
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
