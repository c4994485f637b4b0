//! Exponentials in plain Rust that compilers turn into vector code, where the standard library calls a
//! function for each number.

use std::f32::consts::LOG2_E;

use crate::simd::{EXP2, ROUND, TANH};

/// `2^(n + fraction)` of a whole n from -152 to 129 and a fraction of at most a half.
#[inline(always)]
fn power(n: f32, fraction: f32) -> f32 {
    let series = EXP2.iter().rev().fold(0.0, |series, coefficient| series * fraction + coefficient);
    // In two steps: 2^n may be no number of f32 where the result is one.
    let n = n as i32;
    let two_to = |n: i32| f32::from_bits(((n + 127) as u32) << 23);
    (series * fraction + 1.0) * two_to(n >> 1) * two_to(n - (n >> 1))
}

/// `2^x`; NaN stays NaN.
#[inline(always)]
pub(super) fn exp2(x: f32) -> f32 {
    let x = x.clamp(-151.0, 129.0);
    let n = (x + ROUND) - ROUND;
    power(n, x - n)
}

/// `e^x`; NaN stays NaN.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // ln 2 in two parts, the first of few bits, so that its products are exact.
    const HIGH: f32 = 0.693_359_4;
    const LOW: f32 = -2.121_944_4e-4;
    let x = x.clamp(-105.0, 89.4);
    let n = (x * LOG2_E + ROUND) - ROUND;
    power(n, ((x - n * HIGH) - n * LOW) * LOG2_E)
}

/// Hyperbolic tangent.
#[inline(always)]
pub(super) fn tanh(x: f32) -> f32 {
    let square = x * x;
    let near =
        x + x * square * TANH.iter().rev().fold(0.0, |series, coefficient| series * square + coefficient);
    let far = 1.0 - 2.0 / (exp2(2.0 * LOG2_E * x.abs()) + 1.0);
    if x.abs() > 0.6 { far.copysign(x) } else { near }
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_those_of_f64_to_a_few_roundings() {
        type Pair = (fn(f32) -> f32, fn(f64) -> f64);
        let pairs: [Pair; 4] =
            [(exp, f64::exp), (exp2, f64::exp2), (tanh, f64::tanh), (sigmoid, |x| 1.0 / (1.0 + (-x).exp()))];
        for (number, (own, exact)) in pairs.into_iter().enumerate() {
            for at in -200_000..=200_000i32 {
                let x = at as f32 * if at % 2 == 0 { 1e-3 } else { 1e-5 };
                let (got, want) = (own(x), exact(f64::from(x)));
                if want.abs() >= f64::from(f32::MAX) {
                    assert_eq!(f64::from(got.abs()), f64::INFINITY, "function {number} of {x}");
                    continue;
                }
                let error = (f64::from(got) - want).abs();
                // Below the normal numbers a sigmoid is 0.
                let bound = 4e-7 * want.abs() + f64::from(f32::MIN_POSITIVE);
                assert!(error <= bound, "function {number} of {x} is {got}, not {want}");
            }
            assert!(own(f32::NAN).is_nan(), "function {number}");
            for x in [f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, 0.0] {
                assert_eq!(own(x), exact(f64::from(x)) as f32, "function {number} of {x}");
            }
        }
    }
}
