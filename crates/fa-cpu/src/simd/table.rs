//! The kernels, written once over [`Vector`]: products of tiles, the online softmax and its backward.
//!
//! Tiles of scores lie transposed, keys down and queries across, so that a register holds one key and `LANES`
//! queries: maxima, sums and rescaling never cross lanes, and the first operand of every product is read by
//! broadcast, in whichever order its rows and columns lie.
#![allow(unsafe_code)]

use super::product::RawProduct;
use super::softmax::{RawGradient, RawSoftmax};
use super::transpose::RawTranspose;

/// The kernels of one instruction set.
///
/// # Safety
/// The functions must only be called on a CPU that has the instruction set.
pub(super) struct Table {
    pub lanes: usize,
    pub rows: usize,
    pub columns: usize,
    pub product: unsafe fn(&RawProduct),
    pub softmax: unsafe fn(&RawSoftmax) -> bool,
    pub gradient: unsafe fn(&RawGradient),
    pub softcap: unsafe fn(*mut f32, usize, f32),
    pub exp2: unsafe fn(*mut f32, usize),
    pub transpose: unsafe fn(&RawTranspose),
    pub multiply_adds: unsafe fn(usize) -> f32,
}

/// Instantiates the kernels for a vector type, compiled for the given target features.
macro_rules! table {
    ($vector:ty $(, $features:literal)?) => {
        /// The kernels on these registers.
        pub(super) static TABLE: super::table::Table = {
            use super::{peak, product, softmax, transpose};
            $(#[target_feature(enable = $features)])?
            unsafe fn product(call: &product::RawProduct) {
                // SAFETY: the caller keeps the contract of `RawProduct`.
                unsafe { product::run::<$vector>(call) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn softmax(call: &softmax::RawSoftmax) -> bool {
                // SAFETY: the caller keeps the contract of `RawSoftmax`.
                unsafe { softmax::online::<$vector>(call) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn gradient(call: &softmax::RawGradient) {
                // SAFETY: the caller keeps the contract of `RawGradient`.
                unsafe { softmax::gradient::<$vector>(call) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn softcap(data: *mut f32, len: usize, cap: f32) {
                // SAFETY: the caller vouches for `len` values, a multiple of the lanes.
                unsafe { softmax::softcap::<$vector>(data, len, cap) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn exp2(data: *mut f32, len: usize) {
                // SAFETY: the caller vouches for `len` values, a multiple of the lanes.
                unsafe { softmax::exp2_all::<$vector>(data, len) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn transpose(call: &transpose::RawTranspose) {
                // SAFETY: the caller keeps the contract of `RawTranspose`.
                unsafe { transpose::run::<$vector>(call) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn multiply_adds(rounds: usize) -> f32 {
                // SAFETY: registers only.
                unsafe { peak::multiply_adds::<$vector>(rounds) }
            }
            super::table::Table {
                lanes: <$vector as Vector>::LANES,
                rows: <$vector as Vector>::ROWS,
                columns: <$vector as Vector>::COLUMNS,
                product,
                softmax,
                gradient,
                softcap,
                exp2,
                transpose,
                multiply_adds,
            }
        };
    };
}
pub(super) use table;
