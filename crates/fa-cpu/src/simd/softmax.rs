//! The online softmax and its backward on transposed tiles of scores, in base 2.
#![allow(unsafe_code)]

use super::vector::{Vector, counting, exp2, exp2_short, probability, tanh};

/// How far (in powers of two) scores may exceed the running maximum before it is raised and what has been
/// accumulated is rescaled. Probabilities up to 2^8 cost no precision in f32 sums, and on most tiles nothing
/// is rescaled.
const SLACK: f32 = 8.0;

/// One tile of scores for the online softmax.
///
/// # Safety
/// `scores` is valid for `keys` rows of `queries` values at stride `ld`; `max`, `sum` and `factor` for
/// `queries` values, a multiple of the lanes.
pub(super) struct RawSoftmax {
    pub keys: usize,
    pub queries: usize,
    pub scores: *mut f32,
    pub ld: usize,
    pub max: *mut f32,
    pub sum: *mut f32,
    pub factor: *mut f32,
}

/// A register of running maxima that has been raised: the maxima, their sums, and whether anything
/// accumulated before has to be multiplied by a factor other than 1.
pub(super) struct Raised<V> {
    pub max: V,
    pub sum: V,
    pub rescale: bool,
}

/// Raises those of the maxima at `max` that a tile's largest scores `top` exceed by more than [`SLACK`].
/// Stores them, and at `factor` what everything accumulated before is to be multiplied by; the sums returned
/// are multiplied by it already. `SHORT` takes [`exp2_short`].
///
/// # Safety
/// Each pointer is valid for a register of values.
#[inline(always)]
pub(super) unsafe fn raise<V: Vector, const SHORT: bool>(
    top: V,
    max: *mut f32,
    sum: *const f32,
    factor: *mut f32,
) -> Raised<V> {
    // SAFETY: the caller vouches for the pointers and the instruction set.
    unsafe {
        let old = V::load(max);
        let limit = old.add(V::splat(SLACK));
        let one = V::splat(1.0);
        let mut raised = Raised { max: old, sum: V::load(sum), rescale: false };
        let mut by = one;
        // -inf + SLACK is -inf, so the first visible key raises the maximum.
        if top.any_greater(limit) {
            raised.max = top.select_greater(limit, top, old);
            let down = old.sub(raised.max);
            let down = if SHORT { exp2_short(down) } else { exp2(down) };
            by = raised.max.select_greater(old, down, one);
            raised.sum = raised.sum.mul(by);
            raised.rescale = true;
            raised.max.store(max);
        }
        by.store(factor);
        raised
    }
}

/// Scores become probabilities `2^(score - max)`, `max` and `sum` are brought up to date; `factor` is what
/// everything accumulated before has to be multiplied by. Returns whether any factor differs from 1.
///
/// `max` is -inf before the first visible key. It may trail the true maximum by up to [`SLACK`].
#[inline(always)]
pub(super) unsafe fn online<V: Vector>(call: &RawSoftmax) -> bool {
    let mut rescale = false;
    // SAFETY: `RawSoftmax`'s contract.
    unsafe {
        for column in (0..call.queries).step_by(V::LANES) {
            let scores = call.scores.add(column);
            let lowest = V::splat(f32::NEG_INFINITY);
            let mut tops = [lowest; 4];
            let mut key = 0;
            while key + 4 <= call.keys {
                for (i, top) in tops.iter_mut().enumerate() {
                    *top = V::load(scores.add((key + i) * call.ld)).max(*top);
                }
                key += 4;
            }
            while key < call.keys {
                tops[0] = V::load(scores.add(key * call.ld)).max(tops[0]);
                key += 1;
            }
            let top = tops[0].max(tops[1]).max(tops[2].max(tops[3]));
            let [max, sum, factor] = [call.max, call.sum, call.factor].map(|row| row.add(column));
            let Raised { max, sum, rescale: raised } = raise::<V, false>(top, max, sum, factor);
            rescale |= raised;
            // Lanes that have seen nothing but -inf measure from 0: -inf - (-inf) would be NaN.
            let origin = max.select_greater(lowest, max, V::splat(0.0));

            let mut sums = [sum, V::splat(0.0), V::splat(0.0), V::splat(0.0)];
            let mut key = 0;
            while key + 4 <= call.keys {
                for (i, sum) in sums.iter_mut().enumerate() {
                    let at = scores.add((key + i) * call.ld);
                    let p = exp2(V::load(at).sub(origin));
                    p.store(at);
                    *sum = sum.add(p);
                }
                key += 4;
            }
            while key < call.keys {
                let at = scores.add(key * call.ld);
                let p = exp2(V::load(at).sub(origin));
                p.store(at);
                sums[0] = sums[0].add(p);
                key += 1;
            }
            sums[0].add(sums[1]).add(sums[2].add(sums[3])).store(call.sum.add(column));
        }
    }
    rescale
}

/// One tile for the backward of the softmax.
///
/// # Safety
/// `scores` and `dp` are valid for `keys` rows of `queries` values at stride `ld`; `lse` and `delta`
/// for `queries` values, a multiple of the lanes.
pub(super) struct RawGradient {
    pub keys: usize,
    pub queries: usize,
    pub scores: *mut f32,
    pub dp: *mut f32,
    pub ld: usize,
    pub lse: *const f32,
    pub delta: *const f32,
    /// `cap * log2(e)` when the scores are capped, else 0.
    pub cap: f32,
    /// ALiBi's slope times log2(e), else 0.
    pub slope: f32,
    /// Distance of query 0 from key 0, with its sign.
    pub first: f32,
}

/// One tile of scores that ALiBi lowers by `slope * |first + query - key|`.
///
/// # Safety
/// `scores` is valid for `keys` rows of `queries` values at stride `ld`; `queries` is a multiple of the
/// lanes.
pub(super) struct RawAlibi {
    pub keys: usize,
    pub queries: usize,
    pub scores: *mut f32,
    pub ld: usize,
    pub slope: f32,
    pub first: f32,
}

/// `score - slope * |position - key|`.
#[inline(always)]
unsafe fn lowered<V: Vector>(score: V, slope: V, position: V, key: usize) -> V {
    // SAFETY: register operations only; the caller vouches for the instruction set.
    unsafe {
        let distance = position.sub(V::splat(key as f32));
        let distance = distance.max(V::splat(0.0).sub(distance));
        V::splat(0.0).sub(slope).mul_add(distance, score)
    }
}

/// Lowers a tile of scores by their distance from the diagonal.
#[inline(always)]
pub(super) unsafe fn alibi<V: Vector>(call: &RawAlibi) {
    // SAFETY: `RawAlibi`'s contract.
    unsafe {
        let slope = V::splat(call.slope);
        for column in (0..call.queries).step_by(V::LANES) {
            let position = counting::<V>(call.first + column as f32);
            for key in 0..call.keys {
                let at = call.scores.add(key * call.ld + column);
                lowered(V::load(at), slope, position, key).store(at);
            }
        }
    }
}

/// With P = 2^(S - LSE): scores become P, `dp` (dP) becomes dS = P * (dP - delta).
///
/// With a cap, scores come in as `scale * q k / cap`, and dS is multiplied by the derivative `1 - tanh^2`.
#[inline(always)]
pub(super) unsafe fn gradient<V: Vector>(call: &RawGradient) {
    // SAFETY: `RawGradient`'s contract.
    unsafe { if call.slope == 0.0 { gradient_by::<V, false>(call) } else { gradient_by::<V, true>(call) } }
}

#[inline(always)]
unsafe fn gradient_by<V: Vector, const ALIBI: bool>(call: &RawGradient) {
    // SAFETY: `RawGradient`'s contract.
    unsafe {
        let slope = V::splat(call.slope);
        for column in (0..call.queries).step_by(V::LANES) {
            let lse = V::load(call.lse.add(column));
            let delta = V::load(call.delta.add(column));
            let position = counting::<V>(call.first + column as f32);
            for key in 0..call.keys {
                let score_at = call.scores.add(key * call.ld + column);
                let dp_at = call.dp.add(key * call.ld + column);
                let difference = V::load(dp_at).sub(delta);
                let score = V::load(score_at);
                if call.cap == 0.0 {
                    let score = if ALIBI { lowered(score, slope, position, key) } else { score };
                    let p = probability(score.sub(lse));
                    p.store(score_at);
                    p.mul(difference).store(dp_at);
                } else {
                    let capped = tanh(score);
                    let score = capped.mul(V::splat(call.cap));
                    let score = if ALIBI { lowered(score, slope, position, key) } else { score };
                    let p = probability(score.sub(lse));
                    p.store(score_at);
                    let slope = V::splat(1.0).sub(capped.mul(capped));
                    p.mul(difference).mul(slope).store(dp_at);
                }
            }
        }
    }
}

/// `cap * tanh(x)` of every value.
#[inline(always)]
pub(super) unsafe fn softcap<V: Vector>(data: *mut f32, len: usize, cap: f32) {
    for i in (0..len).step_by(V::LANES) {
        // SAFETY: the caller vouches for `len` values, a multiple of the lanes.
        unsafe { tanh(V::load(data.add(i))).mul(V::splat(cap)).store(data.add(i)) }
    }
}

/// `2^x` of every value.
#[inline(always)]
pub(super) unsafe fn exp2_all<V: Vector>(data: *mut f32, len: usize) {
    for i in (0..len).step_by(V::LANES) {
        // SAFETY: the caller vouches for `len` values, a multiple of the lanes.
        unsafe { exp2(V::load(data.add(i))).store(data.add(i)) }
    }
}
