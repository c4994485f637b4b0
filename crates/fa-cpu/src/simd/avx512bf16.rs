//! bf16 on AVX-512: dot products of pairs where there is no AMX, and the softmax with bf16 probabilities for
//! both.
#![allow(unsafe_code)]

use core::arch::x86_64::*;

use super::amx;
use super::avx512::F32x16;
use super::bf16::{RawGradient16, RawProduct16, RawSoftmax16, Table16};
use super::softmax::{Raised, raise};
use super::vector::{Vector, exp2_short, tanh};

/// Products by AMX tiles.
pub(super) static AMX: Table16 =
    Table16 { enter: amx::enter, leave: amx::leave, product: amx::product, softmax, gradient };

/// Products by AVX512-BF16 dot products.
pub(super) static AVX512_BF16: Table16 =
    Table16 { enter: nothing, leave: nothing, product, softmax, gradient };

unsafe fn nothing() {}

/// Blocks of 8 rows and 2 registers of sums.
///
/// # Safety
/// `RawProduct16`'s contract on a CPU with AVX512-BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn product(p: &RawProduct16) {
    const ROWS: usize = 8;
    // SAFETY: m and n are multiples of 32, so the blocks lie within A, B and C.
    unsafe {
        for column in (0..p.n).step_by(32) {
            for row in (0..p.m).step_by(ROWS) {
                let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
                let a = p.a.add(row * p.lda).cast::<i32>();
                for pair in 0..p.k / 2 {
                    let b = p.b.add(pair * p.ldb + column);
                    let panel =
                        [bits(_mm512_loadu_si512(b.cast())), bits(_mm512_loadu_si512(b.add(16).cast()))];
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let at = a.byte_add(2 * i * p.lda).add(pair);
                        let factor = bits(_mm512_set1_epi32(at.read_unaligned()));
                        sums[0] = _mm512_dpbf16_ps(sums[0], factor, panel[0]);
                        sums[1] = _mm512_dpbf16_ps(sums[1], factor, panel[1]);
                    }
                }
                for (i, sums) in sums.iter().enumerate() {
                    for (j, &sum) in sums.iter().enumerate() {
                        let to = p.c.add((row + i) * p.ldc + column + 16 * j);
                        let start = if p.add { _mm512_loadu_ps(to) } else { _mm512_setzero_ps() };
                        _mm512_storeu_ps(to, _mm512_add_ps(start, sum));
                    }
                }
            }
        }
    }
}

/// The same bits as a register of bf16.
#[inline(always)]
unsafe fn bits(words: __m512i) -> __m512bh {
    // SAFETY: both types are 64 bytes without invalid values.
    unsafe { core::mem::transmute(words) }
}

/// Words with `low` rounded to bf16 in the low and `high` in the high half of each lane. Ties round away from
/// zero.
#[inline(always)]
unsafe fn pairs(low: F32x16, high: F32x16) -> __m512i {
    // SAFETY: register operations; the caller vouches for AVX-512.
    unsafe {
        let half = _mm512_set1_epi32(0x8000);
        let low = _mm512_srli_epi32::<16>(_mm512_add_epi32(_mm512_castps_si512(low.0), half));
        let high = _mm512_add_epi32(_mm512_castps_si512(high.0), half);
        // low | (high & 0xffff0000)
        _mm512_ternarylogic_epi32::<0xf8>(low, high, _mm512_set1_epi32(0xffff_0000_u32 as i32))
    }
}

/// See [`super::softmax::online`]: the same with a scale and bf16 probabilities.
///
/// # Safety
/// `RawSoftmax16`'s contract on a CPU with AVX-512.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx2,fma")]
unsafe fn softmax(call: &RawSoftmax16) -> bool {
    type V = F32x16;
    let mut rescale = false;
    // SAFETY: `RawSoftmax16`'s contract.
    unsafe {
        let scale = V::splat(call.scale);
        for column in (0..call.queries).step_by(V::LANES) {
            let scores = call.scores.add(column);
            let lowest = V::splat(f32::NEG_INFINITY);
            let mut tops = [lowest; 4];
            for key in (0..call.keys).step_by(4) {
                for (i, top) in tops.iter_mut().enumerate() {
                    *top = V::load(scores.add((key + i) * call.ld)).max(*top);
                }
            }
            let top = tops[0].max(tops[1]).max(tops[2].max(tops[3])).mul(scale);
            let [max, sum, factor] = [call.max, call.sum, call.factor].map(|row| row.add(column));
            let Raised { max, sum, rescale: raised } = raise::<V, true>(top, max, sum, factor);
            rescale |= raised;
            let origin = max.select_greater(lowest, V::splat(0.0).sub(max), V::splat(0.0));

            let mut sums = [sum, V::splat(0.0)];
            // Rounded as the maximum was: one multiply-add would be off by the rounding of the maximum, which
            // is above 1 for exponents above 2^24.
            let below = |score: V| exp2_short(score.mul(scale).add(origin));
            for pair in 0..call.keys / 2 {
                let at = scores.add(2 * pair * call.ld);
                let (low, high) = (below(V::load(at)), below(V::load(at.add(call.ld))));
                sums[0] = sums[0].add(low);
                sums[1] = sums[1].add(high);
                _mm512_storeu_si512(call.p.add(pair * call.ldw + column).cast(), pairs(low, high));
            }
            sums[0].add(sums[1]).store(call.sum.add(column));
        }
    }
    rescale
}

/// See [`super::softmax::gradient`]: the same with a scale and bf16 results.
///
/// # Safety
/// `RawGradient16`'s contract on a CPU with AVX512-BF16.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx2,fma")]
unsafe fn gradient(call: &RawGradient16) {
    // SAFETY: `RawGradient16`'s contract.
    unsafe { if call.cap == 0.0 { gradient_by::<false>(call) } else { gradient_by::<true>(call) } }
}

#[inline(always)]
unsafe fn gradient_by<const CAP: bool>(call: &RawGradient16) {
    type V = F32x16;
    // SAFETY: `RawGradient16`'s contract.
    unsafe {
        let (scale, cap) = (V::splat(call.scale), V::splat(call.cap));
        // No P is above 1: see `probability`.
        let zero = V::splat(0.0);
        for column in (0..call.queries).step_by(V::LANES) {
            let lse = V::splat(0.0).sub(V::load(call.lse.add(column)));
            let delta = V::load(call.delta.add(column));
            for pair in 0..call.keys / 2 {
                let mut p = [lse; 2];
                let mut dscores = [lse; 2];
                for i in 0..2 {
                    let at = (2 * pair + i) * call.ld + column;
                    let score = V::load(call.scores.add(at));
                    let difference = V::load(call.dp.add(at)).sub(delta);
                    if CAP {
                        let capped = tanh(score.mul(scale));
                        // A hidden score must stay -inf: the cap would make it visible.
                        let hidden = V::splat(f32::NEG_INFINITY);
                        let score = V::splat(f32::MIN).select_greater(score, hidden, capped.mul(cap));
                        p[i] = exp2_short(zero.min(score.add(lse)));
                        let slope = V::splat(1.0).sub(capped.mul(capped));
                        dscores[i] = p[i].mul(difference).mul(slope);
                    } else {
                        p[i] = exp2_short(zero.min(score.mul_add(scale, lse)));
                        dscores[i] = p[i].mul(difference);
                    }
                    let to = (2 * pair + i) * call.ldw + column;
                    store_rounded(p[i], call.p.add(to));
                    store_rounded(dscores[i], call.dscores_rows.add(to));
                }
                let to = call.dscores_pairs.add(pair * call.ldw + column);
                _mm512_storeu_si512(to.cast(), pairs(dscores[0], dscores[1]));
            }
        }
    }
}

/// Stores 16 values as bf16.
#[inline(always)]
unsafe fn store_rounded(values: F32x16, to: *mut u16) {
    // SAFETY: the caller vouches for AVX512-BF16 and for 16 values at `to`.
    unsafe { to.cast::<__m256bh>().write_unaligned(_mm512_cvtneps_pbh(values.0)) }
}
