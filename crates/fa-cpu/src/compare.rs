//! How far an output is from the oracle, and whether that is near enough.
//!
//! The rule: where the reference is infinite or NaN the output must be, in the same way, and nowhere else.
//! Then
//!
//! ```text
//! max|out - reference| <= 2 max|low - reference| + atol
//! ```
//!
//! where the reference is [`crate::reference`] on the same (rounded) inputs, low is
//! [`crate::reference::low_precision`], and atol is one rounding step of the output type at the largest
//! magnitude in the reference. With f32 tensors, low has the same kind of error as an implementation: both
//! are samples of the same noise, which another order of sums, scores in base 2 or an LSE rounded in between
//! make larger or smaller. There the error of low counts as no less than [`assumed_low_error`]. Gradients
//! that are beyond the tolerance of one low-precision computation are judged by the worst of three
//! ([`crate::reference::low_precision::backward_worst`]). LSEs and outputs of fp8 kernels have rules of their
//! own.

mod sums;

use std::fmt;

use fa_core::Dtype;

use crate::check::check_len;
use crate::element::Element;
use crate::error::CpuError;
use crate::view::Row;
use sums::Sums;

/// Absolute tolerance on LSEs of 16-bit inputs, where f32 can hold them that exactly.
pub const LSE_TOLERANCE_16: f64 = 1e-3;

/// Tolerance on LSEs of 16-bit inputs in rounding steps of f32 at the largest magnitude in the reference. It
/// exceeds [`LSE_TOLERANCE_16`] from 2048 on: scores are sums in f32, scaled, turned to base 2 and back.
pub const LSE_STEPS_16: f64 = 8.0;

/// Tolerance on LSEs of f32 inputs, relative to the largest magnitude in the reference (at least 1): an LSE
/// is as exact as the scores, whose error is a few hundred roundings of their magnitude at the worst.
pub const LSE_TOLERANCE_F32: f64 = 1e-5;

/// Whether an output is near enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Within the tolerance.
    Pass,
    /// Infinite or NaN where the reference is not, or the other way round.
    NonFiniteMismatch,
    /// Everything finite, and further from the reference than the tolerance.
    TooFar,
}

/// What [`compare`] found. Differences are taken over the positions where output and reference are both
/// finite.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Comparison {
    /// Values compared.
    pub count: usize,
    /// Largest absolute difference; 0 when nothing is finite.
    pub max_abs: f64,
    /// Position `[batch, seq, head, dim]` of the largest difference (dim 0 for LSEs); `None` when nothing is
    /// finite.
    pub worst: Option<[usize; 4]>,
    /// The output there.
    pub worst_out: f64,
    /// The reference there.
    pub worst_reference: f64,
    /// Root mean square of the differences.
    pub rms: f64,
    /// Mean absolute difference.
    pub mean_abs: f64,
    /// Cosine of the angle between output and reference; 1 when both are zero.
    pub cosine: f64,
    /// The least of the same over rows `[batch, seq, head]`; that of all for LSEs.
    pub least_cosine: f64,
    /// Positions that are infinite or NaN in one and not in the same way in the other.
    pub mismatches: usize,
    /// The first of them.
    pub first_mismatch: Option<[usize; 4]>,
    /// Largest absolute difference between the low-precision result and the reference, where there is one.
    pub low_max_abs: Option<f64>,
    /// What `max_abs` may be.
    pub tolerance: f64,
    /// The decision.
    pub verdict: Verdict,
}

impl Comparison {
    /// Whether the output is near enough.
    pub fn passed(&self) -> bool {
        self.verdict == Verdict::Pass
    }

    /// The same comparison with a tolerance of at least `noise`: what f32 arithmetic may leave where terms
    /// are large or cancel, however small the reference. [`crate::reference::Gradients::dq_noise`] says how
    /// much that is.
    #[must_use]
    pub fn allowing(self, noise: f64) -> Self {
        let tolerance = self.tolerance.max(noise);
        Comparison { tolerance, verdict: verdict(self.mismatches, self.max_abs, tolerance), ..self }
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.verdict {
            Verdict::Pass => write!(f, "pass")?,
            Verdict::TooFar => write!(f, "TOO FAR")?,
            Verdict::NonFiniteMismatch => write!(
                f,
                "NaN or infinity at {} positions where the other has none of its kind, first {:?};",
                self.mismatches,
                self.first_mismatch.unwrap_or_default()
            )?,
        }
        write!(f, " max abs {:.3e} (tolerance {:.3e}", self.max_abs, self.tolerance)?;
        if let Some(low) = self.low_max_abs {
            write!(f, ", low precision {low:.3e}")?;
        }
        write!(f, ") rms {:.3e} cosine {:.9}", self.rms, self.cosine)?;
        if let Some(worst) = self.worst {
            write!(f, " worst {worst:?}: {} for {}", self.worst_out, self.worst_reference)?;
        }
        Ok(())
    }
}

/// Compares an output or gradient of type `dtype`, packed `[batch, seq, head, dim]`, with the f64 reference
/// by the rule.
///
/// `low` is the low-precision result. Without one (where the inputs are not known, say) its error is taken to
/// be [`assumed_low_error`]. A reference value beyond the range of `dtype` counts as the infinity that it
/// rounds to.
///
/// # Errors
/// [`CpuError::Length`] when `out`, `reference` or `low` do not hold as many values as `shape` says.
pub fn compare<T: Element, L: Element>(
    shape: [usize; 4],
    dtype: Dtype,
    out: &[T],
    reference: &[f64],
    low: Option<&[L]>,
) -> Result<Comparison, CpuError> {
    let count = shape.iter().fold(1, |count: usize, &len| count.saturating_mul(len));
    check_len("out", out.len(), count)?;
    check_len("reference", reference.len(), count)?;
    if let Some(low) = low {
        check_len("low", low.len(), count)?;
    }
    let low_max_abs = low.map(|low| max_difference(low, reference, dtype));
    let largest = largest_finite(reference, dtype);
    let assumed = assumed_low_error(dtype, largest);
    let low_error = match low_max_abs {
        Some(low) if dtype == Dtype::F32 => low.max(assumed),
        Some(low) => low,
        None => assumed,
    };
    let tolerance = 2.0 * low_error + rounding_step(dtype, largest);
    let position = |index: usize| {
        let [_, seq, heads, dim] = shape;
        [index / (seq * heads * dim), index / (heads * dim) % seq, index / dim % heads, index % dim]
    };
    Ok(measure(dtype, out, reference, low_max_abs, tolerance, (shape[3], position)))
}

/// Compares LSEs, `[batch, heads, seqlen_q]` both, of a problem whose inputs are `dtype`: within
/// [`LSE_TOLERANCE_16`] or [`LSE_STEPS_16`] for 16-bit and narrower inputs, whichever is more, within
/// [`LSE_TOLERANCE_F32`] of the largest magnitude (at least 1) for f32.
///
/// # Errors
/// [`CpuError::Length`] when `lse` or `reference` do not hold as many values as `shape` says.
pub fn compare_lse<T: Element>(
    shape: [usize; 3],
    dtype: Dtype,
    lse: &[T],
    reference: &[f64],
) -> Result<Comparison, CpuError> {
    let count = shape.iter().fold(1, |count: usize, &len| count.saturating_mul(len));
    check_len("lse", lse.len(), count)?;
    check_len("reference lse", reference.len(), count)?;
    let largest = largest_finite(reference, Dtype::F32);
    let tolerance = match dtype {
        Dtype::F32 => LSE_TOLERANCE_F32 * largest.max(1.0),
        Dtype::F16 | Dtype::Bf16 | Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2 => {
            LSE_TOLERANCE_16.max(LSE_STEPS_16 * rounding_step(Dtype::F32, largest))
        }
    };
    let position = |index: usize| {
        let [_, heads, seq] = shape;
        [index / (heads * seq), index % seq, index / seq % heads, 0]
    };
    Ok(measure(Dtype::F32, lse, reference, None, tolerance, (0, position)))
}

/// One rounding step of `dtype` at `magnitude`: the distance between neighbouring numbers there.
pub fn rounding_step(dtype: Dtype, magnitude: f64) -> f64 {
    // Exponent of the smallest normal number, and bits after the leading one.
    let (least_exponent, mantissa_bits) = match dtype {
        Dtype::F32 => (-126, 23),
        Dtype::F16 => (-14, 10),
        Dtype::Bf16 => (-126, 7),
        Dtype::E4m3 => (-6, 3),
        Dtype::E5m2 => (-14, 2),
        // Whole numbers.
        Dtype::Int8 | Dtype::Int4 => return 1.0,
    };
    let bits = magnitude.abs().to_bits();
    let exponent = (bits >> 52) as i32 - 1023;
    2f64.powi(exponent.max(least_exponent) - mantissa_bits)
}

/// The error that a low-precision result is taken to have where there is none to measure, at the largest
/// magnitude of the reference: one rounding step of a 16-bit type, which rounding P and the output comes to,
/// and 32 of f32, whose sums, not its output, make the error.
pub fn assumed_low_error(dtype: Dtype, largest: f64) -> f64 {
    let steps = if dtype == Dtype::F32 { 32.0 } else { 1.0 };
    steps * rounding_step(dtype, largest)
}

/// The smallest magnitude that rounds to infinity (in E4m3, which has none, to NaN; codes are clamped).
fn overflow_threshold(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => f64::from(f32::MAX) + rounding_step(Dtype::F32, f64::from(f32::MAX)) / 2.0,
        Dtype::F16 => 65520.0,
        Dtype::Bf16 => 2f64.powi(127) * (2.0 - 2f64.powi(-8)),
        Dtype::E4m3 => 464.0,
        Dtype::E5m2 => 61440.0,
        Dtype::Int8 => 127.5,
        Dtype::Int4 => 7.5,
    }
}

/// The reference's value as `dtype` holds it: itself, or the infinity that it rounds to.
fn in_range(value: f64, dtype: Dtype) -> f64 {
    if value.abs() >= overflow_threshold(dtype) { f64::INFINITY.copysign(value) } else { value }
}

fn largest_finite(reference: &[f64], dtype: Dtype) -> f64 {
    reference
        .iter()
        .map(|&value| in_range(value, dtype).abs())
        .filter(|value| value.is_finite())
        .fold(0.0, f64::max)
}

/// Calls `take` with the values as f64 and their references, some at a time, in order.
fn each_part<T: Element>(values: &[T], reference: &[f64], mut take: impl FnMut(&[f64], &[f64])) {
    const PART: usize = 4096;
    let mut wide = Vec::with_capacity(PART.min(values.len()));
    for (values, reference) in values.chunks(PART).zip(reference.chunks(PART)) {
        wide.clear();
        T::append_f64(&Row::of(values), &mut wide);
        take(&wide, reference);
    }
}

fn max_difference<T: Element>(values: &[T], reference: &[f64], dtype: Dtype) -> f64 {
    let mut largest = 0.0;
    each_part(values, reference, |values, reference| {
        largest = f64::max(largest, difference(values, reference, dtype));
    });
    largest
}

/// The largest finite difference.
fn difference(values: &[f64], reference: &[f64], dtype: Dtype) -> f64 {
    let differences =
        values.iter().zip(reference).map(|(value, &reference)| value - in_range(reference, dtype));
    differences.filter(|difference| difference.is_finite()).fold(0.0, |max, d| max.max(d.abs()))
}

fn measure<T: Element>(
    dtype: Dtype,
    out: &[T],
    reference: &[f64],
    low_max_abs: Option<f64>,
    tolerance: f64,
    (row_len, position): (usize, impl Fn(usize) -> [usize; 4]),
) -> Comparison {
    let mut sums = Sums::of_rows(row_len);
    each_part(out, reference, |out, reference| add(&mut sums, dtype, out, reference));
    let (mean_abs, least_cosine) = (sums.mean_abs(), sums.least_cosine());
    let Sums { mismatches, first_mismatch, max_abs, worst, .. } = sums;
    Comparison {
        count: out.len(),
        max_abs,
        worst: worst.map(&position),
        worst_out: worst.map_or(0.0, |index| out[index].to_f64()),
        worst_reference: worst.map_or(0.0, |index| reference[index]),
        rms: sums.rms(),
        mean_abs,
        cosine: sums.cosine(),
        least_cosine,
        mismatches,
        first_mismatch: first_mismatch.map(position),
        low_max_abs,
        tolerance,
        verdict: verdict(mismatches, max_abs, tolerance),
    }
}

/// Adds some elements. Not generic, for the reason that [`Element::append_f32`] gives.
fn add(sums: &mut Sums, dtype: Dtype, out: &[f64], reference: &[f64]) {
    for (&out, &reference) in out.iter().zip(reference) {
        sums.add(out, in_range(reference, dtype));
    }
}

fn verdict(mismatches: usize, max_abs: f64, tolerance: f64) -> Verdict {
    if mismatches > 0 {
        Verdict::NonFiniteMismatch
    } else if max_abs <= tolerance {
        Verdict::Pass
    } else {
        Verdict::TooFar
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    fn check<T: Element>(dtype: Dtype, out: &[f64], reference: &[f64], low: Option<&[f64]>) -> Comparison {
        let out: Vec<T> = out.iter().map(|&value| T::from_f64(value)).collect();
        compare([1, 1, 1, out.len()], dtype, &out, reference, low).unwrap()
    }

    #[test]
    fn mean_and_least_cosine_are_of_elements_and_rows() {
        // Two rows: one alike, one at a right angle.
        let (out, reference) = ([3.0f32, 4.0, 1.0, 0.0], [3.0, 4.0, 0.0, 1.0]);
        let found = compare::<f32, f32>([1, 2, 1, 2], Dtype::F32, &out, &reference, None).unwrap();
        assert_eq!((found.mean_abs, found.max_abs, found.least_cosine), (0.5, 1.0, 0.0));
        assert!((found.cosine - 25.0 / 26.0).abs() < 1e-12, "{}", found.cosine);
        let lse = compare_lse::<f32>([1, 1, 4], Dtype::F32, &out, &reference).unwrap();
        assert_eq!(lse.least_cosine, lse.cosine);
    }

    #[test]
    fn rounding_steps_are_distances_between_neighbours() {
        for value in [1.0f32, 1.5, 0.75, 3e-39, 1e30, f32::MAX / 2.0, 0.0] {
            let step = f64::from(f32::from_bits(value.to_bits() + 1)) - f64::from(value);
            assert_eq!(rounding_step(Dtype::F32, f64::from(value)), step);
        }
        for bits in [0u16, 1, 0x03ff, 0x0400, 0x3c00, 0x3c01, 0x7bfe] {
            let step = f16::from_bits(bits + 1).to_f64() - f16::from_bits(bits).to_f64();
            assert_eq!(rounding_step(Dtype::F16, f16::from_bits(bits).to_f64()), step);
        }
        for bits in [0u16, 1, 0x007f, 0x0080, 0x3f80, 0x3fff, 0x7f7e] {
            let step = bf16::from_bits(bits + 1).to_f64() - bf16::from_bits(bits).to_f64();
            assert_eq!(rounding_step(Dtype::Bf16, bf16::from_bits(bits).to_f64()), step);
        }
        assert_eq!(rounding_step(Dtype::E4m3, -1.75), 0.125);
    }

    #[test]
    fn many_elements_count_on_from_part_to_part() {
        let reference: Vec<f64> = (0..10_000).map(|i| f64::from(i % 7)).collect();
        let mut out: Vec<f32> = reference.iter().map(|&value| value as f32).collect();
        let shape = [2, 10, 5, 100];
        let same = compare::<f32, f32>(shape, Dtype::F32, &out, &reference, None).unwrap();
        assert_eq!((same.verdict, same.count, same.max_abs), (Verdict::Pass, 10_000, 0.0));
        assert!((same.cosine - 1.0).abs() < 1e-12);
        (out[9_003], out[4_097]) = (out[9_003] + 0.5, out[4_097] + 0.25);
        let found = compare(shape, Dtype::F32, &out, &reference, Some(&out)).unwrap();
        assert_eq!((found.worst, found.low_max_abs), (Some([1, 8, 0, 3]), Some(0.5)));
        assert_eq!(found.rms, ((0.25 + 0.0625) / 10_000f64).sqrt());
        out[8_192] = f32::NAN;
        let found = compare::<f32, f32>(shape, Dtype::F32, &out, &reference, None).unwrap();
        assert_eq!((found.verdict, found.first_mismatch), (Verdict::NonFiniteMismatch, Some([1, 6, 1, 92])));
    }

    #[test]
    fn overflow_is_where_rounding_reaches_infinity() {
        let threshold = overflow_threshold(Dtype::F32);
        let below = f64::from_bits(threshold.to_bits() - 1);
        assert!((threshold as f32).is_infinite() && (below as f32).is_finite());
        // In f32 steps, since conversions to 16 bits may go through f32.
        let (at, below) = neighbours(overflow_threshold(Dtype::F16));
        assert!(f16::from_f32(at).is_infinite() && f16::from_f32(below).is_finite());
        let (at, below) = neighbours(overflow_threshold(Dtype::Bf16));
        assert!(bf16::from_f32(at).is_infinite() && bf16::from_f32(below).is_finite());
    }

    fn neighbours(value: f64) -> (f32, f32) {
        (value as f32, f32::from_bits((value as f32).to_bits() - 1))
    }

    #[test]
    fn the_rule_is_twice_the_low_error_and_one_step() {
        let reference = [1.0, -0.5, 0.25];
        let low = [1.0, -0.5, 0.2505];
        // 2 * 0.0005 + 2^-10
        let far = check::<f64>(Dtype::F16, &[1.0, -0.5, 0.252], &reference, Some(&low));
        assert!((far.tolerance - (0.001 + 1.0 / 1024.0)).abs() < 1e-12 && !far.passed());
        assert_eq!((far.verdict, far.worst, far.mismatches), (Verdict::TooFar, Some([0, 0, 0, 2]), 0));
        let near = check::<f64>(Dtype::F16, &[1.0, -0.5, 0.2519], &reference, Some(&low));
        assert!(near.passed() && (near.max_abs - 0.0019).abs() < 1e-12, "{near}");
        assert!(far.clone().allowing(0.0021).passed() && !far.allowing(0.0019).passed());
        assert!((near.rms - 0.0019 / 3f64.sqrt()).abs() < 1e-12);
        assert!(near.cosine < 1.0 && near.cosine > 0.999);
    }

    #[test]
    fn in_f32_the_low_error_is_one_of_many_draws() {
        let step = f64::from(f32::EPSILON);
        let found = check::<f32>(Dtype::F32, &[1.0 + 60.0 * step], &[1.0], Some(&[1.0]));
        assert!(found.passed() && found.tolerance == 65.0 * step, "{found}");
        let found = check::<f32>(Dtype::F32, &[1.0], &[1.0], Some(&[1.0 + 100.0 * step]));
        assert_eq!(found.tolerance, 201.0 * step);
    }

    #[test]
    fn nan_and_infinity_must_stand_in_the_same_places() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        assert!(check::<f32>(Dtype::F32, &[nan, inf, -inf, 1.0], &[nan, inf, -inf, 1.0], None).passed());
        for (out, reference) in [(nan, 1.0), (1.0, nan), (inf, -inf), (inf, nan), (1.0, inf), (-inf, 1.0)] {
            let found = check::<f32>(Dtype::F32, &[1.0, out], &[1.0, reference], None);
            assert_eq!(found.verdict, Verdict::NonFiniteMismatch, "{out} for {reference}");
            assert_eq!((found.mismatches, found.first_mismatch), (1, Some([0, 0, 0, 1])));
        }
        // 70000 is infinity in f16.
        assert!(check::<f16>(Dtype::F16, &[inf, 2.0], &[70000.0, 2.0], None).passed());
        assert!(!check::<f16>(Dtype::F16, &[65504.0, 2.0], &[70000.0, 2.0], None).passed());
    }

    #[test]
    fn nothing_and_zeros_compare_equal() {
        let empty = compare::<f32, f32>([0, 4, 2, 8], Dtype::F32, &[], &[], None).unwrap();
        assert!(empty.passed() && empty.worst.is_none() && empty.cosine == 1.0);
        assert!(check::<f32>(Dtype::F32, &[0.0, 0.0], &[0.0, -0.0], None).passed());
        assert_eq!(check::<f32>(Dtype::F32, &[0.0, 1.0], &[0.0, 0.0], None).cosine, 0.0);
        assert_eq!(
            compare::<f32, f32>([1, 1, 1, 2], Dtype::F32, &[1.0], &[1.0, 2.0], None).unwrap_err(),
            CpuError::Length { buffer: "out", got: 1, need: 2 }
        );
    }

    #[test]
    fn lse_has_its_own_tolerance_and_order() {
        let reference = [0.0, 1.0, 2.0, 3.0, 4.0, f64::NEG_INFINITY];
        let mut lse = reference.map(|value| value as f32);
        lse[4] += 9e-4;
        let near = compare_lse([1, 2, 3], Dtype::F16, &lse, &reference).unwrap();
        // Head 1, position 1.
        assert!(near.passed() && near.worst == Some([0, 1, 1, 0]), "{near}");
        assert_eq!(compare_lse([1, 2, 3], Dtype::F32, &lse, &reference).unwrap().verdict, Verdict::TooFar);
        lse[5] = -1e30;
        let masked = compare_lse([1, 2, 3], Dtype::F16, &lse, &reference).unwrap();
        assert_eq!(masked.first_mismatch, Some([0, 2, 1, 0]));
    }
    #[test]
    fn lse_beyond_what_f32_holds_to_the_tolerance_is_judged_in_its_steps() {
        // The neighbours of 20686.76 in f32 are 2^-9 away.
        let step = rounding_step(Dtype::F32, 20686.758);
        let judged = |reference: f64, steps: f64| {
            compare_lse([1, 1, 1], Dtype::Bf16, &[reference + steps * step], &[reference]).unwrap()
        };
        assert_eq!(judged(20686.75, 0.0).tolerance, 8.0 * step);
        assert!(judged(20686.75, 8.0).passed() && !judged(20686.75, 9.0).passed());
        assert_eq!(judged(2047.0, 0.0).tolerance, LSE_TOLERANCE_16);
        assert!(judged(2048.0, 0.0).tolerance > LSE_TOLERANCE_16);
    }
}
