//! Parameters that the problem alone decides, whatever the kernel: lengths, counts, the window, and the
//! factors of scores.

use fa_core::Problem;

use crate::Error;
use crate::jit::params::{ScoreParams, ShapeParams};
use crate::launch::checks::count;

/// The lengths, counts and window of `problem`.
pub(crate) fn shape_params(problem: &Problem) -> Result<ShapeParams, Error> {
    let [left, right] = problem.mask.limits();
    Ok(ShapeParams {
        batch: count("batch", problem.lengths.sequences())?,
        heads_q: count("heads_q", problem.heads_q)?,
        heads_kv: count("heads_kv", problem.heads_kv)?,
        group_size: count("heads_q / heads_kv", problem.group_size())?,
        seqlen_q: count("seqlen_q", problem.lengths.max_q())?,
        seqlen_k: count("seqlen_k", problem.lengths.max_k())?,
        head_dim: count("head_dim", problem.head_dim)?,
        head_dim_v: count("head_dim_v", problem.head_dim_v)?,
        window_left: side(left, problem.lengths.max_k()),
        window_right: side(right, problem.lengths.max_q()),
    })
}

/// A side of the window for the kernel: -1 for a side that hides no key of any query, so that the sum of a
/// diagonal and a side fits 32 bits.
fn side(side: Option<i64>, len: usize) -> i32 {
    side.filter(|&side| side < len as i64).map_or(-1, |side| side as i32)
}

/// The factors between products and scores, as f32.
///
/// # Errors
/// As [`Problem::check_gpu`], which says what the factors may be.
pub(crate) fn score_params(problem: &Problem) -> Result<ScoreParams, Error> {
    problem.check_gpu()?;
    let scale = problem.scale();
    let scale_log2 = scale * std::f64::consts::LOG2_E;
    let params = ScoreParams { scale: scale as f32, scale_log2: scale_log2 as f32, ..ScoreParams::default() };
    let Some(softcap) = problem.score.softcap else { return Ok(params) };
    let cap = softcap as f32;
    let (near, terms) = softcap_polynomial(scale, softcap);
    Ok(ScoreParams {
        softcap: cap,
        softcap_exponent: 2.0 * std::f32::consts::LOG2_E * params.scale / cap,
        softcap_log2: cap * std::f32::consts::LOG2_E,
        softcap_share: std::f32::consts::LN_2 / cap,
        softcap_near: near,
        softcap_term_0: terms[0],
        softcap_term_1: terms[1],
        softcap_term_2: terms[2],
        softcap_term_3: terms[3],
        ..params
    })
}

/// The soft cap of scores up to half of it as a polynomial: the square of the largest such product and the
/// terms of `f`, with which `log2(e) * cap * tanh(x)` is `product * f(near - product^2)`, x the score over
/// the cap. No product is near (-1) where a term would leave f32's normal numbers.
fn softcap_polynomial(scale: f64, cap: f64) -> (f32, [f32; 4]) {
    const NEAR: f64 = 0.5;
    // tanh(x) / x in NEAR^2 - x^2: minimax of x f - tanh x (Remez), within 1.3e-7.
    const TERMS: [f64; 4] = [0.924_234_059_1, 0.275_613_164_4, 0.098_922_098_19, 0.043_372_464_1];
    let per_cap = scale / cap;
    let mut factor = std::f64::consts::LOG2_E * scale;
    let terms = TERMS.map(|term| {
        let of_product = term * factor;
        factor *= per_cap * per_cap;
        of_product as f32
    });
    let near = (NEAR * NEAR / (per_cap * per_cap)) as f32;
    if near.is_normal() && terms.iter().all(|term| term.is_normal()) {
        (near, terms)
    } else {
        (-1.0, [0.0; 4])
    }
}

#[cfg(test)]
mod tests {
    use fa_core::spec::MAX_SOFTCAP;
    use fa_core::{Dtype, Mask, ScoreMod};

    use super::*;

    /// As `ScoreMod::near_exponent` does it in f32, without the row's maximum.
    fn near_exponent(params: &ScoreParams, product: f32) -> Option<f32> {
        let v = (-product).mul_add(product, params.softcap_near);
        let factor = params.softcap_term_3.mul_add(v, params.softcap_term_2);
        let factor = factor.mul_add(v, params.softcap_term_1).mul_add(v, params.softcap_term_0);
        (v >= 0.0).then_some(product * factor)
    }

    #[test]
    fn the_polynomial_of_scores_far_below_the_cap_is_the_cap_of_them() {
        // The last scale's terms don't fit f32.
        for softmax_scale in [None, Some(1.0), Some(0.0625), Some(1e-9)] {
            for cap in [1.0, 15.0, 30.0, 50.0, MAX_SOFTCAP] {
                let problem = Problem::square(1, 16, 1, 128, Mask::FULL, Dtype::F16);
                let problem = problem.with_softmax_scale(softmax_scale).with_score(ScoreMod::softcap(cap));
                let params = score_params(&problem).unwrap();
                let per_cap = problem.scale() / cap;
                let (mut near, mut worst) = (0, 0f64);
                for step in -100_000..=100_000 {
                    // Twice the cap to both sides.
                    let product = (f64::from(step) * 2e-5 / per_cap) as f32;
                    let x = f64::from(product) * per_cap;
                    let Some(exponent) = near_exponent(&params, product) else {
                        assert!(x.abs() > 0.499_999 || per_cap < 1e-8, "{x} of {cap}");
                        continue;
                    };
                    assert!(x.abs() < 0.500_001);
                    near += 1;
                    let exact = std::f64::consts::LOG2_E * cap * x.tanh();
                    worst = worst.max((f64::from(exponent) - exact).abs() / cap);
                }
                assert_eq!(near > 0, per_cap > 1e-8, "{cap}");
                // 1.5e-5 of an exponent of 2 at a cap of 50, a twentieth of half a step of f16.
                assert!(worst < 3e-7, "{worst} of {cap}, scale {}", problem.scale());
            }
        }
    }

    #[test]
    fn scales_and_soft_caps_that_spoil_scores_are_refused() {
        let check = |softmax_scale, softcap| {
            let problem = Problem::square(1, 16, 1, 64, Mask::FULL, Dtype::F16);
            score_params(
                &problem.with_softmax_scale(softmax_scale).with_score(ScoreMod::NONE.with_softcap(softcap)),
            )
        };
        assert_eq!(check(None, None).unwrap().scale, 0.125);
        for softcap in [1e-3, 30.0, MAX_SOFTCAP] {
            let params = check(None, Some(softcap)).unwrap();
            let exponent = 2.0 * std::f64::consts::LOG2_E * 0.125 / softcap;
            assert!((f64::from(params.softcap_exponent) / exponent - 1.0).abs() < 1e-6, "{params:?}");
            let share = std::f64::consts::LN_2 / softcap;
            assert!((f64::from(params.softcap_share) / share - 1.0).abs() < 1e-6, "{params:?}");
        }
        for softcap in [1e-39, MAX_SOFTCAP * 1.001, 1e300] {
            assert!(matches!(check(None, Some(softcap)), Err(Error::Softcap { .. })), "{softcap}");
        }
        assert!(matches!(check(Some(1e30), Some(1e-30)), Err(Error::Softcap { .. })));
        for scale in [0.0, -1.0, 1e-39, 1e39] {
            assert!(matches!(check(Some(scale), None), Err(Error::Scale { .. })), "{scale}");
        }
    }
}
