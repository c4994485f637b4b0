//! Online softmax of one row: the running maximum and sum with which the scores may come in pieces, in any
//! order.

use crate::real::Real;

/// The state of an online softmax.
///
/// With the scores `s_j` seen so far, `max` is their maximum and `sum` is the sum of `exp(s_j - max)`. An
/// accumulator `sum of exp(s_j - max) * v_j` is multiplied by the factor that [`absorb`](Self::absorb)
/// returns before the new probabilities are added, and by [`normaliser`](Self::normaliser) at the end.
///
/// A score of -inf is a key that is not seen: as long as there are only such scores the sum is 0, the LSE
/// -inf and the normaliser 0. A NaN or +inf among the scores makes sum and LSE NaN, as IEEE arithmetic has
/// it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OnlineSoftmax<R> {
    /// The largest score; -inf before the first.
    pub max: R,
    /// The sum of `exp(score - max)`; 0 before the first.
    pub sum: R,
}

impl<R: Real> OnlineSoftmax<R> {
    /// No score seen.
    pub const EMPTY: Self = OnlineSoftmax { max: R::NEG_INFINITY, sum: R::ZERO };

    /// Takes in more scores. On return `scores` holds their probabilities `exp(score - max)`, not normalised,
    /// under the new maximum; the result is the factor `exp(old max - new max)` on everything accumulated
    /// under the old one.
    pub fn absorb(&mut self, scores: &mut [R]) -> R {
        let max = scores.iter().fold(self.max, |max, &score| max.max(score));
        let origin = origin(max);
        let factor = (self.max - origin).exp();
        let mut sum = self.sum * factor;
        for score in scores {
            *score = (*score - origin).exp();
            sum += *score;
        }
        *self = OnlineSoftmax { max, sum };
        factor
    }

    /// Takes in the scores that `other` has seen.
    pub fn join(&mut self, other: &Self) {
        let max = self.max.max(other.max);
        let origin = origin(max);
        let sum = self.sum * (self.max - origin).exp() + other.sum * (other.max - origin).exp();
        *self = OnlineSoftmax { max, sum };
    }

    /// The factor that normalises accumulated probabilities: `1 / sum`, or 0 for a row that has seen no key.
    pub fn normaliser(&self) -> R {
        if self.sum == R::ZERO { R::ZERO } else { R::ONE / self.sum }
    }

    /// The natural logarithm of the sum of `exp(score)`; -inf for a row that has seen no key.
    pub fn lse(&self) -> R {
        origin(self.max) + self.sum.ln()
    }
}

/// The maximum that scores are relative to, or 0 where it is -inf and `-inf - (-inf)` would be NaN.
pub(crate) fn origin<R: Real>(max: R) -> R {
    if max == R::NEG_INFINITY { R::ZERO } else { max }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_row_is_zero_and_minus_infinity() {
        let mut state = OnlineSoftmax::<f32>::EMPTY;
        let mut scores = [f32::NEG_INFINITY; 3];
        assert_eq!(state.absorb(&mut scores), 0.0);
        assert_eq!(
            (scores, state.sum, state.normaliser(), state.lse()),
            ([0.0; 3], 0.0, 0.0, f32::NEG_INFINITY)
        );
        state.join(&OnlineSoftmax::EMPTY);
        assert_eq!(state, OnlineSoftmax::EMPTY);
    }

    #[test]
    fn probabilities_and_factor_follow_the_maximum() {
        let mut state = OnlineSoftmax::<f64>::EMPTY;
        let mut scores = [1.0, 3.0];
        assert_eq!(state.absorb(&mut scores), 0.0);
        assert_eq!(scores, [(-2f64).exp(), 1.0]);
        let mut scores = [4.0];
        assert_eq!(state.absorb(&mut scores), (-1f64).exp());
        assert_eq!((scores, state.max), ([1.0], 4.0));
        let direct = (1f64.exp() + 3f64.exp() + 4f64.exp()).ln();
        assert!((state.lse() - direct).abs() < 1e-15 * 4.0);
    }

    #[test]
    fn what_is_not_a_number_stays_visible() {
        for bad in [f64::NAN, f64::INFINITY] {
            for scores in [vec![bad], vec![0.0, bad], vec![bad, f64::NEG_INFINITY, 1.0]] {
                let mut state = OnlineSoftmax::EMPTY;
                state.absorb(&mut scores.clone());
                state.absorb(&mut [5.0]);
                assert!(state.lse().is_nan() && state.normaliser().is_nan(), "{scores:?}");
            }
        }
    }
}
