//! Kernels whose lanes lie along a row: conversions between element types, and the softmax. Products are in
//! [`super::row_products`].
#![allow(unsafe_code)]

use half::{bf16, f16};

use super::vector::{Vector, exp2};

/// A number type as it lies in memory, read and written a register at a time.
pub trait Stored: Copy {
    /// The number.
    #[allow(clippy::wrong_self_convention)]
    fn as_f32(self) -> f32;
    /// Rounded to nearest even.
    fn rounded(value: f32) -> Self;
    /// `LANES` numbers from `from` on.
    ///
    /// # Safety
    /// They must be valid, and the CPU must have the instructions of `V`.
    unsafe fn load<V: Lanes>(from: *const Self) -> V;
    /// Writes `LANES` numbers, rounded to nearest even.
    ///
    /// # Safety
    /// As [`Stored::load`], for writes.
    unsafe fn store<V: Lanes>(values: V, to: *mut Self);
    /// The kernels for this type.
    fn kernels(table: &RowTables) -> &RowTable<Self>;
}

/// [`Vector`] under a name that a public trait may mention.
#[allow(private_bounds)]
pub trait Lanes: Vector {}

impl<V: Vector> Lanes for V {}

/// The kernels of one instruction set and element type.
pub struct RowTable<T> {
    pub(super) widen: unsafe fn(*const T, *mut f32, usize),
    pub(super) narrow: unsafe fn(*const f32, f32, *mut T, usize),
}

/// The kernels of one instruction set.
pub struct RowTables {
    pub(super) f32: RowTable<f32>,
    pub(super) bf16: RowTable<bf16>,
    pub(super) f16: RowTable<f16>,
    pub(super) f64: RowTable<f64>,
    pub(super) softmax: unsafe fn(&RawRow) -> [f32; 3],
}

macro_rules! stored {
    ($type:ident, $to:expr, $from:expr, $load:ident, $store:ident) => {
        impl Stored for $type {
            #[inline(always)]
            fn as_f32(self) -> f32 {
                $to(self)
            }
            #[inline(always)]
            fn rounded(value: f32) -> Self {
                $from(value)
            }
            #[inline(always)]
            unsafe fn load<V: Lanes>(from: *const Self) -> V {
                // SAFETY: the caller's.
                unsafe { V::$load(from.cast()) }
            }
            #[inline(always)]
            unsafe fn store<V: Lanes>(values: V, to: *mut Self) {
                // SAFETY: the caller's.
                unsafe { values.$store(to.cast()) }
            }
            fn kernels(table: &RowTables) -> &RowTable<Self> {
                &table.$type
            }
        }
    };
}

stored!(f32, |value| value, |value| value, load, store);
stored!(bf16, bf16::to_f32, bf16::from_f32, load_bf16, store_bf16);
stored!(f16, f16::to_f32, f16::from_f32, load_f16, store_f16);
stored!(f64, |value| value as f32, f64::from, load_f64, store_f64);

/// One row of scores in base 2 for the online softmax.
///
/// # Safety
/// `scores` is valid for `len` values, a multiple of the lanes.
pub(super) struct RawRow {
    pub scores: *mut f32,
    pub len: usize,
    pub max: f32,
    pub sum: f32,
}

/// Converts `len` numbers.
#[inline(always)]
pub(super) unsafe fn widen<V: Vector, T: Stored>(from: *const T, to: *mut f32, len: usize) {
    let whole = len / V::LANES * V::LANES;
    // SAFETY: the caller vouches for `len` numbers at both.
    unsafe {
        for i in (0..whole).step_by(V::LANES) {
            T::load::<V>(from.add(i)).store(to.add(i));
        }
        for i in whole..len {
            *to.add(i) = (*from.add(i)).as_f32();
        }
    }
}

/// Multiplies `len` numbers by `factor` and rounds them.
#[inline(always)]
pub(super) unsafe fn narrow<V: Vector, T: Stored>(from: *const f32, factor: f32, to: *mut T, len: usize) {
    let whole = len / V::LANES * V::LANES;
    // SAFETY: the caller vouches for `len` numbers at both.
    unsafe {
        for i in (0..whole).step_by(V::LANES) {
            T::store(V::load(from.add(i)).mul(V::splat(factor)), to.add(i));
        }
        for i in whole..len {
            *to.add(i) = T::rounded(*from.add(i) * factor);
        }
    }
}

/// Scores become probabilities `2^(score - max)`; returns the new maximum, the new sum, and the factor on
/// what has been accumulated.
#[inline(always)]
pub(super) unsafe fn softmax<V: Vector>(call: &RawRow) -> [f32; 3] {
    // SAFETY: `RawRow`'s contract.
    unsafe {
        let mut tops = V::splat(call.max);
        for i in (0..call.len).step_by(V::LANES) {
            tops = V::load(call.scores.add(i)).max(tops);
        }
        let mut lanes = [f32::NEG_INFINITY; 16];
        tops.store(lanes.as_mut_ptr());
        let max = lanes[..V::LANES].iter().fold(f32::NEG_INFINITY, |max, &lane| max.max(lane));
        // -inf - (-inf) would be NaN.
        let origin = if max == f32::NEG_INFINITY { 0.0 } else { max };
        let mut sums = V::splat(0.0);
        for i in (0..call.len).step_by(V::LANES) {
            let p = exp2(V::load(call.scores.add(i)).sub(V::splat(origin)));
            p.store(call.scores.add(i));
            sums = sums.add(p);
        }
        let factor = if call.max == max { 1.0 } else { (call.max - origin).exp2() };
        [max, call.sum * factor + sums.sum(), factor]
    }
}
