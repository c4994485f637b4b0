//! The forward of an fp8 Q, K and V with the roundings of a kernel that computes both products in e4m3: what
//! the tolerance of such a kernel is made of.

use std::ops::Range;

use fa_core::Problem;
use fa_core::quantize::e4m3;

use super::formula::{self, Head, Tensors};
use super::over;
use crate::compare::LSE_TOLERANCE_16;
use crate::error::CpuError;
use crate::extras::Arguments;
use crate::kv_ref::KvRef;
use crate::view::TensorRef;

/// Probabilities are multiplied by this before they are rounded to e4m3, so that those down to 2^-17 of the
/// largest keep some bits.
pub const HELD_AT: f32 = 256.0;

/// Products that a tensor core adds up at once.
const STEP: usize = 32;

/// Bits after the leading one that Hopper's fp8 tensor core keeps of an addend, relative to the largest one
/// of a step.
const KEPT_BITS: i32 = 13;

/// How a kernel adds up P V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accumulation {
    /// Keys of a tile.
    pub tile_n: usize,
    /// Whether a tile's products are added up apart, and their sum to O in f32; otherwise all in one
    /// accumulator.
    pub two_level: bool,
    /// Whether accumulators are those of Hopper's tensor core, which cuts off what is below 13 bits of
    /// the largest addend; otherwise they are exact.
    pub truncates: bool,
}

impl Accumulation {
    /// In two levels, exact within a tile of `tile_n` keys: what tolerances are made of.
    pub const fn exact(tile_n: usize) -> Accumulation {
        Accumulation { tile_n, two_level: true, truncates: false }
    }
}

/// O and LSE with a kernel's roundings.
#[derive(Clone, Debug, PartialEq)]
pub struct AsKernel {
    /// O, packed as [`super::Forward::out`].
    pub out: Vec<f32>,
    /// As [`super::Forward::lse`].
    pub lse: Vec<f32>,
    /// The largest magnitude of the values that some row sees.
    pub largest_v: f64,
    /// The largest magnitude of the scores that some row sees, before ALiBi.
    pub largest_score: f64,
}

impl AsKernel {
    /// What an fp8 kernel's O may be off by: three times the error of this one, which has the same kind of
    /// roundings, and 2^-8 of the largest value that a row sees.
    pub fn tolerance(&self, exact: &[f64]) -> f64 {
        let errors = self.out.iter().zip(exact).map(|(&value, exact)| (f64::from(value) - exact).abs());
        3.0 * errors.filter(|error| error.is_finite()).fold(0.0, f64::max) + self.largest_v / 256.0
    }

    /// What an fp8 kernel's LSE may be off by: that of 16-bit inputs, and 2^-10 of the largest score, whose
    /// product is cut off below 13 bits in each of its steps (on an H200, 2^-11.3 of it at head dim 256).
    pub fn lse_tolerance(&self) -> f64 {
        LSE_TOLERANCE_16 + self.largest_score / 1024.0
    }
}

/// O and LSE as a kernel computes them: tiles of keys from the last to the first, with the largest score so
/// far as the origin; each probability, times [`HELD_AT`], rounded to e4m3 for the product with V, and
/// unrounded in the row sum; f32 between tiles. Scores are those of f32 products.
///
/// # Errors
/// As [`super::forward_extras`]; [`CpuError::Dtype`] for a problem that is not of fp8.
pub fn as_kernel<'a>(
    problem: &Problem,
    arguments: impl Into<Arguments<'a>>,
    q: &TensorRef<'_, u8>,
    k: &TensorRef<'_, u8>,
    v: &TensorRef<'_, u8>,
    how: Accumulation,
) -> Result<AsKernel, CpuError> {
    let pass = |tensors: &Tensors<'_, f32>| {
        formula::forward_by(problem, tensors, |head: Head<'_, f32>| head.as_kernel(how))
    };
    let inputs: [KvRef<'_, f32>; 3] = [q, k, v].map(|tensor| KvRef::Codes(*tensor));
    let [q, k, v] = &inputs;
    let found = over::forward(problem, &arguments.into(), [q, k, v], |value| value, pass)?;
    let largest = |terms: &[f32]| f64::from(terms.iter().fold(0.0, |max: f32, &value| max.max(value)));
    let [largest_v, largest_score] = [&found.out_terms, &found.score_terms].map(|terms| largest(terms));
    Ok(AsKernel { out: found.out, lse: found.lse, largest_v, largest_score })
}

impl Head<'_, f32> {
    /// The forward of this query head alone; the terms of a row are the largest magnitude of V that it sees.
    fn as_kernel(&self, how: Accumulation) -> formula::Forward<f32> {
        let dim = self.problem.head_dim_v;
        let (mut out, mut lse, mut out_terms, mut score_terms) = (vec![], vec![], vec![], vec![]);
        let blocks = formula::blocks(0..self.seqlens[0], formula::QUERIES);
        let rows = blocks.flat_map(|queries| queries.clone().zip(self.scores(queries)));
        for (i, (keys, scores)) in rows {
            let (own, biased) = self.biased(i, &keys, &scores);
            let hides = |j: usize| own.hidden.get(j - keys.start).is_some_and(|&hidden| hidden);
            let (mut max, mut sum, mut row) = (f32::NEG_INFINITY, 0f32, vec![0f32; dim]);
            let mut largest = 0f32;
            let tiles = keys.start / how.tile_n..keys.end.div_ceil(how.tile_n);
            for tile in tiles.rev() {
                let first = (tile * how.tile_n).max(keys.start);
                let seen = first..((tile + 1) * how.tile_n).min(keys.end);
                let of_tile = &biased[seen.start - keys.start..seen.end - keys.start];
                let new_max = of_tile.iter().fold(max, |max, &score| max.max(score));
                if new_max == f32::NEG_INFINITY && of_tile.iter().all(|score| !score.is_nan()) {
                    continue;
                }
                let alpha = if max == f32::NEG_INFINITY { 0.0 } else { (max - new_max).exp() };
                (max, sum) = (new_max, sum * alpha);
                row.iter_mut().for_each(|value| *value *= alpha);
                let mut codes = Vec::with_capacity(seen.len());
                for (j, score) in seen.clone().zip(of_tile) {
                    let p = if hides(j) { 0.0 } else { (score - max).exp() };
                    sum += p;
                    codes.push(e4m3::decode(e4m3::encode(p * HELD_AT)));
                    if !hides(j) {
                        largest = self.v(j).iter().fold(largest, |max, value| max.max(value.abs()));
                    }
                }
                let products = Products { codes: &codes, first, seen: &seen, tile: tile * how.tile_n };
                self.add_tile(&mut row, &products, how, &hides);
            }
            let origin = self.sink.map_or(max, |sink| max.max(sink));
            let (of_keys, of_sink) = if origin == f32::NEG_INFINITY {
                (0.0, 0.0)
            } else {
                ((max - origin).exp(), self.sink.map_or(0.0, |sink| (sink - origin).exp()))
            };
            let total = sum * of_keys + of_sink;
            lse.push(if total == 0.0 { f32::NEG_INFINITY } else { origin + total.ln() });
            let factor = if total == 0.0 { 0.0 } else { of_keys / (total * HELD_AT) };
            out.extend(row.into_iter().map(|value| value * factor));
            out_terms.push(largest);
            score_terms.push(scores.iter().fold(0.0, |max: f32, score| max.max(score.abs())));
        }
        formula::Forward { out, lse, out_terms, score_terms }
    }

    /// Adds the products of a tile to a row of O.
    fn add_tile(
        &self,
        row: &mut [f32],
        products: &Products<'_>,
        how: Accumulation,
        hides: &impl Fn(usize) -> bool,
    ) {
        let mut addends = Vec::with_capacity(STEP + 1);
        for (d, to) in row.iter_mut().enumerate() {
            let mut sum = if how.two_level { 0.0 } else { f64::from(*to) };
            for step in products.steps() {
                let keys = step.filter(|&j| !hides(j));
                addends.clear();
                addends.extend(
                    keys.map(|j| f64::from(products.codes[j - products.first]) * f64::from(self.v(j)[d])),
                );
                addends.push(sum);
                sum = if how.truncates { truncated_sum(&addends) } else { addends.iter().sum() };
            }
            *to = if how.two_level { *to + sum as f32 } else { sum as f32 };
        }
    }
}

/// The probabilities of a tile's keys, as e4m3 holds them.
struct Products<'a> {
    codes: &'a [f32],
    /// The key of the first code.
    first: usize,
    seen: &'a Range<usize>,
    /// The tile's first key.
    tile: usize,
}

impl Products<'_> {
    /// The keys that are multiplied at once.
    fn steps(&self) -> impl Iterator<Item = Range<usize>> {
        let (seen, tile) = (self.seen.clone(), self.tile);
        (tile..seen.end)
            .step_by(STEP)
            .map(move |at| at.max(seen.start)..(at + STEP).min(seen.end))
            .filter(|step| !step.is_empty())
    }
}

/// The sum of what is left of addends that are cut off below [`KEPT_BITS`] of the largest.
fn truncated_sum(addends: &[f64]) -> f64 {
    let largest = addends.iter().fold(0.0, |max: f64, value| max.max(value.abs()));
    if largest == 0.0 || addends.iter().any(|value| !value.is_finite()) {
        return addends.iter().sum();
    }
    let exponent = (largest.to_bits() >> 52) as i32 - 1023;
    let step = 2f64.powi(exponent - KEPT_BITS);
    addends.iter().map(|value| (value / step).trunc()).sum::<f64>() * step
}
