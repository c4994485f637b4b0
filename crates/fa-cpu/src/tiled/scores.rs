//! Score modifiers in base 2, and the final normalisation of a row.

use fa_core::Problem;

use crate::error::CpuError;

/// The largest factor on products: queries are scaled before the products, and both need the rest of f32's
/// range. Beyond it a query that overflows would give NaN with a key of 0.
const MAX_FACTOR: f32 = 1e30;

/// The same as a softmax scale, which without a soft cap is multiplied by log2(e); rounded down.
const MAX_SCALE: f32 = 6.93e29;

/// Score tiles are in base 2: `scale` turns a product into it (or into the cap's argument; before a program,
/// into a natural score).
pub(super) struct Scores {
    pub(super) scale: f32,
    /// `cap * log2(e)`.
    pub(super) cap: Option<f32>,
}

impl Scores {
    pub(super) fn new(problem: &Problem) -> Scores {
        let log2e = std::f64::consts::LOG2_E;
        // A program takes scores in natural units, and comes with no cap beside it.
        if problem.score.kind().changes() {
            return Scores { scale: problem.scale() as f32, cap: None };
        }
        match problem.score.softcap {
            None => Scores { scale: (problem.scale() * log2e) as f32, cap: None },
            Some(cap) => Scores { scale: (problem.scale() / cap) as f32, cap: Some((cap * log2e) as f32) },
        }
    }

    /// The factor on products leaves room for them in f32, and the soft cap is a normal number of f32.
    ///
    /// # Errors
    /// [`CpuError::Range`].
    pub(super) fn check(problem: &Problem) -> Result<(), CpuError> {
        let Scores { scale, cap } = Scores::new(problem);
        if scale.abs() <= MAX_FACTOR && cap.is_none_or(f32::is_normal) {
            return Ok(());
        }
        let limit = if cap.is_some() { MAX_FACTOR } else { MAX_SCALE };
        Err(CpuError::Range { scale: problem.scale(), softcap: problem.score.softcap, limit })
    }
}

/// What normalises a row, and its LSE (natural), from the maximum and the sum (base 2) of the keys' scores.
/// A sink joins the sum here, once.
pub(super) fn finish(max: f32, sum: f32, sink: Option<f32>) -> (f32, f32) {
    use std::f32::consts::{LN_2, LOG2_E};
    match sink {
        None if sum == 0.0 => (0.0, f32::NEG_INFINITY),
        // The exponents of lower scores are as low.
        None if max == -f32::MAX => (1.0 / sum, max),
        None => (1.0 / sum, max * LN_2 + sum.ln()),
        Some(sink) if sum == 0.0 => (0.0, sink),
        Some(sink) => {
            // A sink above f32's range in base 2 is above every score all the same.
            let exponent = sink * LOG2_E;
            let exponent = if exponent > f32::MAX { f32::MAX } else { exponent };
            let top = max.max(exponent);
            let keys = (max - top).exp2();
            let total = sum * keys + (exponent - top).exp2();
            // Relative to a sink above the scores, the LSE is that sink to the last bit.
            let origin = if exponent >= max { sink } else { top * LN_2 };
            (keys / total, origin + total.ln())
        }
    }
}

/// A natural score in base 2: finite where it is, as biases of the lowest number are.
pub(super) fn exponent(score: f32) -> f32 {
    let exponent = score * std::f32::consts::LOG2_E;
    if score.is_infinite() { score } else { exponent.clamp(-f32::MAX, f32::MAX) }
}

/// The base-2 LSE that the backward subtracts from a row's scores: finite, as the difference of two
/// infinities is NaN. NaN stays.
pub(super) fn lse_exponent(lse: f32) -> f32 {
    (lse * std::f32::consts::LOG2_E).clamp(-f32::MAX, f32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sink_is_one_more_logit() {
        assert_eq!(finish(f32::NEG_INFINITY, 0.0, None), (0.0, f32::NEG_INFINITY));
        assert_eq!(finish(f32::NEG_INFINITY, 0.0, Some(3.5)), (0.0, 3.5));
        assert_eq!(finish(2.0, 4.0, Some(f32::NEG_INFINITY)), finish(2.0, 4.0, None));
        // Scores 1 and 2, natural, and a sink of 3; then a sink far above and far below.
        let log2e = std::f32::consts::LOG2_E;
        let (max, sum) = (2.0 * log2e, 1.0 + (-1f32).exp());
        let total = 1f32.exp() + 2f32.exp() + 3f32.exp();
        let (normaliser, lse) = finish(max, sum, Some(3.0));
        assert!((normaliser - 2f32.exp() / total).abs() < 1e-6 && (lse - total.ln()).abs() < 1e-6);
        let (normaliser, lse) = finish(max, sum, Some(500.0));
        assert_eq!((normaliser, lse), (0.0, 500.0));
        for sink in [1e10, 2.4e38, 3e38, f32::MAX] {
            assert_eq!(finish(max, sum, Some(sink)), (0.0, sink));
            assert_eq!(finish(max, sum, Some(-sink)), finish(max, sum, None));
            assert_eq!(finish(f32::NEG_INFINITY, 0.0, Some(-sink)), (0.0, -sink));
        }
        assert!(finish(max, sum, Some(f32::NAN)).0.is_nan());
        let (normaliser, lse) = finish(max, sum, Some(-500.0));
        let (alone, lse_alone) = finish(max, sum, None);
        assert!((normaliser - alone).abs() < 1e-6 && (lse - lse_alone).abs() < 1e-6);
    }
}
