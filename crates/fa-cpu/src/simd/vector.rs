//! The few vector operations that the kernels are written in, implemented once per instruction set.
#![allow(unsafe_code)]

/// A register of f32 lanes.
///
/// # Safety
/// Every operation may use the instruction set of its implementation: calling one on a CPU without it is
/// undefined. The kernels are only reached through a table that [`super::Kernels::for_isa`] hands out after
/// asking the CPU. Loads and stores need `LANES` valid f32 at the pointer; no alignment is asked for.
pub(super) trait Vector: Copy {
    /// f32 values in a register.
    const LANES: usize;
    /// Rows of the largest register block of a product, 4, 6 or 8: `ROWS * COLUMNS + COLUMNS + 1` registers
    /// are live. With no register to spare, the compiler moves sums around and spills some.
    const ROWS: usize;
    /// Registers across the largest register block.
    const COLUMNS: usize;

    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn splat(value: f32) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    /// `self * factor + addend`, in one rounding where the hardware can.
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// The larger; `other` where either is NaN (or NaN in any case).
    unsafe fn max(self, other: Self) -> Self;
    /// The smaller; `other` where either is NaN (or NaN in any case).
    unsafe fn min(self, other: Self) -> Self;
    /// The bits of each lane shifted left by 23: what turns a small integer into an exponent.
    unsafe fn shift_to_exponent(self) -> Self;
    /// Lanes of `yes` where `self > limit`, else of `no`.
    unsafe fn select_greater(self, limit: Self, yes: Self, no: Self) -> Self;
    /// Whether `self > limit` in any lane.
    unsafe fn any_greater(self, limit: Self) -> bool;
    /// Whether [`Vector::prefetch`] does anything.
    const PREFETCHES: bool = false;
    /// Prefetches the cache line at any address into the second-level cache.
    #[inline(always)]
    unsafe fn prefetch(_at: *const u8) {}
    /// The sum of all lanes.
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let mut lanes = [0.0; 16];
        // SAFETY: no register has more lanes.
        unsafe { self.store(lanes.as_mut_ptr()) };
        lanes.iter().sum()
    }
    /// The sums of several registers, each taken in the same order.
    #[inline(always)]
    unsafe fn sums<const N: usize>(registers: [Self; N]) -> [f32; N] {
        // SAFETY: register operations; the caller vouches for the instruction set.
        registers.map(|register| unsafe { register.sum() })
    }
    /// `count` numbers, at most `LANES`, and zeros.
    #[inline(always)]
    unsafe fn load_part(from: *const f32, count: usize) -> Self {
        // SAFETY: the caller vouches for the numbers.
        unsafe { load_each::<Self>(|i| if i < count { *from.add(i) } else { 0.0 }) }
    }
    /// As [`Vector::load_part`], of bf16 numbers.
    #[inline(always)]
    unsafe fn load_part_bf16(from: *const u16, count: usize) -> Self {
        // SAFETY: the caller vouches for the numbers.
        unsafe {
            load_each::<Self>(|i| if i < count { half::bf16::from_bits(*from.add(i)).to_f32() } else { 0.0 })
        }
    }
    /// As [`Vector::load_part`], of f16 numbers.
    #[inline(always)]
    unsafe fn load_part_f16(from: *const u16, count: usize) -> Self {
        // SAFETY: the caller vouches for the numbers.
        unsafe {
            load_each::<Self>(|i| if i < count { half::f16::from_bits(*from.add(i)).to_f32() } else { 0.0 })
        }
    }
    /// `LANES` bf16 numbers.
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: the caller vouches for the numbers.
        unsafe { load_each::<Self>(|i| half::bf16::from_bits(*from.add(i)).to_f32()) }
    }
    /// `LANES` f16 numbers.
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: the caller vouches for the numbers.
        unsafe { load_each::<Self>(|i| half::f16::from_bits(*from.add(i)).to_f32()) }
    }
    /// `LANES` f64 numbers, rounded.
    #[inline(always)]
    unsafe fn load_f64(from: *const f64) -> Self {
        // SAFETY: the caller vouches for the numbers.
        unsafe { load_each::<Self>(|i| *from.add(i) as f32) }
    }
    /// Rounds to nearest even.
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        // SAFETY: the caller vouches for `LANES` places.
        unsafe { store_each(self, |i, value| *to.add(i) = half::bf16::from_f32(value).to_bits()) }
    }
    /// Rounds to nearest even.
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16) {
        // SAFETY: the caller vouches for `LANES` places.
        unsafe { store_each(self, |i, value| *to.add(i) = half::f16::from_f32(value).to_bits()) }
    }
    /// Exact.
    #[inline(always)]
    unsafe fn store_f64(self, to: *mut f64) {
        // SAFETY: the caller vouches for `LANES` places.
        unsafe { store_each(self, |i, value| *to.add(i) = f64::from(value)) }
    }
    /// Transposes a square of `LANES x LANES` words.
    #[inline(always)]
    unsafe fn transpose(from: *const u32, ld_from: usize, to: *mut u32, ld_to: usize) {
        for i in 0..Self::LANES {
            for j in 0..Self::LANES {
                // SAFETY: the caller vouches for all words of both squares.
                unsafe { *to.add(j * ld_to + i) = *from.add(i * ld_from + j) }
            }
        }
    }
}

/// A register, lane by lane.
#[inline(always)]
unsafe fn load_each<V: Vector>(lane: impl Fn(usize) -> f32) -> V {
    let mut lanes = [0.0; 16];
    lanes[..V::LANES].iter_mut().enumerate().for_each(|(i, value)| *value = lane(i));
    // SAFETY: no register has more lanes.
    unsafe { V::load(lanes.as_ptr()) }
}

/// Each lane of a register.
#[inline(always)]
unsafe fn store_each<V: Vector>(values: V, mut lane: impl FnMut(usize, f32)) {
    let mut lanes = [0.0; 16];
    // SAFETY: no register has more lanes.
    unsafe { values.store(lanes.as_mut_ptr()) };
    lanes[..V::LANES].iter().enumerate().for_each(|(i, &value)| lane(i, value));
}

/// 0, 1, 2, ...
const COUNTING: [f32; 16] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];

/// `first`, `first + 1`, ...
#[inline(always)]
pub(super) unsafe fn counting<V: Vector>(first: f32) -> V {
    // SAFETY: no register has more lanes; the caller vouches for the instruction set.
    unsafe { V::load(COUNTING.as_ptr()).add(V::splat(first)) }
}

/// 1.5 * 2^23: adding it leaves the nearest integer in the low bits.
pub(crate) const ROUND: f32 = 12_582_912.0;
/// The exponent bias, so that the low bits hold the exponent field of `2^n`.
const BIAS: f32 = 127.0;
/// Least-squares minimax fit of `(2^f - 1) / f` on [-1/2, 1/2] for the relative error of `2^f`: 2e-9 before
/// rounding.
pub(crate) const EXP2: [f32; 6] =
    [core::f32::consts::LN_2, 0.240_226_48, 0.055_503_324, 0.009_618_437, 0.001_339_887_5, 0.000_153_533_62];

/// `2^x` to about one unit in the last place for x up to 127; 0 for x below -126.5, -inf included. NaN stays
/// NaN.
#[inline(always)]
pub(super) unsafe fn exp2<V: Vector>(x: V) -> V {
    // SAFETY: register operations only; the caller vouches for the instruction set.
    unsafe {
        // The limit comes first so that a NaN in x comes through.
        let x = V::splat(-BIAS).max(x);
        let shifted = x.add(V::splat(ROUND + BIAS));
        let fraction = x.sub(shifted.sub(V::splat(ROUND + BIAS)));
        let mut series = V::splat(EXP2[5]);
        for coefficient in [EXP2[4], EXP2[3], EXP2[2], EXP2[1], EXP2[0], 1.0] {
            series = series.mul_add(fraction, V::splat(coefficient));
        }
        series.mul(shifted.shift_to_exponent())
    }
}

/// P of the backward: `2^x` with x = score - LSE, which is at most 0 but for the rounding of both. Of scores
/// of 1e9 that is 64 and more, and P would be 2^64.
#[inline(always)]
pub(super) unsafe fn probability<V: Vector>(x: V) -> V {
    // SAFETY: register operations only; the caller vouches for the instruction set.
    unsafe { exp2(V::splat(0.0).min(x)) }
}

/// The same fit with fewer terms: 3e-6, far below the rounding of a probability to 16 bits.
const EXP2_SHORT: [f32; 4] = [0.693_124_2, 0.240_241, 0.055_906_426, 0.009_582_853];

/// `2^x` to about 3e-6 relative, for probabilities that are rounded to 16 bits; otherwise as [`exp2`].
#[inline(always)]
pub(super) unsafe fn exp2_short<V: Vector>(x: V) -> V {
    // SAFETY: register operations only; the caller vouches for the instruction set.
    unsafe {
        let x = V::splat(-BIAS).max(x);
        let shifted = x.add(V::splat(ROUND + BIAS));
        let fraction = x.sub(shifted.sub(V::splat(ROUND + BIAS)));
        let mut series = V::splat(EXP2_SHORT[3]);
        for coefficient in [EXP2_SHORT[2], EXP2_SHORT[1], EXP2_SHORT[0], 1.0] {
            series = series.mul_add(fraction, V::splat(coefficient));
        }
        series.mul(shifted.shift_to_exponent())
    }
}

/// Fit of `(tanh(y) / y - 1) / y^2` in powers of `y^2` for |y| up to 0.65.
pub(crate) const TANH: [f32; 5] =
    [-0.333_332_75, 0.133_311_9, -0.053_716_96, 0.020_559_607, -0.005_610_772_4];
/// 2 / ln 2.
const TWO_LOG2E: f32 = 2.0 * core::f32::consts::LOG2_E;

/// `tanh(y)` to a few units in the last place.
#[inline(always)]
pub(super) unsafe fn tanh<V: Vector>(y: V) -> V {
    // SAFETY: register operations only; the caller vouches for the instruction set.
    unsafe {
        let magnitude = y.max(V::splat(0.0).sub(y));
        let square = y.mul(y);
        let mut series = V::splat(TANH[4]);
        for coefficient in [TANH[3], TANH[2], TANH[1], TANH[0]] {
            series = series.mul_add(square, V::splat(coefficient));
        }
        let near = square.mul(y).mul_add(series, y);
        // Away from 0 the difference 1 - 2 / (e^2|y| + 1) cancels little; above 9 it is 1 to the last bit.
        let bounded = V::splat(9.5).sub(V::splat(0.0).max(V::splat(9.5).sub(magnitude)));
        let power = exp2(bounded.mul(V::splat(TWO_LOG2E)));
        let far = V::splat(1.0).sub(V::splat(2.0).div(power.add(V::splat(1.0))));
        let signed = y.select_greater(V::splat(0.0), far, V::splat(0.0).sub(far));
        magnitude.select_greater(V::splat(0.6), signed, near)
    }
}
