//! The kernels, written once over [`Vector`]: products of tiles, the online softmax and its backward.
//!
//! Tiles of scores lie transposed, keys down and queries across, so that a register holds one key and `LANES`
//! queries: maxima, sums and rescaling never cross lanes, and the first operand of every product is read by
//! broadcast, in whichever order its rows and columns lie.
#![allow(unsafe_code)]

use super::product::RawProduct;
use super::row_products::ProductTables;
use super::rows::RowTables;
use super::softmax::{RawAlibi, RawGradient, RawSoftmax};
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
    pub alibi: unsafe fn(&RawAlibi),
    pub rows_of: RowTables,
    pub products_of: ProductTables,
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
            use super::{peak, product, row_products, rows, softmax, transpose};
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
            unsafe fn alibi(call: &softmax::RawAlibi) {
                // SAFETY: the caller keeps the contract of `RawAlibi`.
                unsafe { softmax::alibi::<$vector>(call) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn row_softmax(call: &rows::RawRow) -> [f32; 3] {
                // SAFETY: the caller keeps the contract of `RawRow`.
                unsafe { rows::softmax::<$vector>(call) }
            }
            /// The kernels on rows of one element type.
            macro_rules! row_table {
                ($type:ty) => {{
                    $(#[target_feature(enable = $features)])?
                    unsafe fn widen(from: *const $type, to: *mut f32, len: usize) {
                        // SAFETY: the caller vouches for `len` numbers at both.
                        unsafe { rows::widen::<$vector, $type>(from, to, len) }
                    }
                    $(#[target_feature(enable = $features)])?
                    unsafe fn narrow(from: *const f32, factor: f32, to: *mut $type, len: usize) {
                        // SAFETY: the caller vouches for `len` numbers at both.
                        unsafe { rows::narrow::<$vector, $type>(from, factor, to, len) }
                    }
                    rows::RowTable { widen, narrow }
                }};
            }
            /// The products of rows of one element type.
            macro_rules! product_table {
                ($type:ty) => {{
                    $(#[target_feature(enable = $features)])?
                    unsafe fn dots(call: &row_products::RawDots<'_, $type>) {
                        // SAFETY: the caller keeps the contract of `RawDots`.
                        unsafe { row_products::dots::<$vector, $type>(call) }
                    }
                    $(#[target_feature(enable = $features)])?
                    unsafe fn accumulate(call: &row_products::RawAccumulate<'_, $type>) {
                        // SAFETY: the caller keeps the contract of `RawAccumulate`.
                        unsafe { row_products::accumulate::<$vector, $type>(call) }
                    }
                    row_products::ProductTable { dots, accumulate }
                }};
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
                alibi,
                rows_of: rows::RowTables {
                    f32: row_table!(f32),
                    bf16: row_table!(half::bf16),
                    f16: row_table!(half::f16),
                    f64: row_table!(f64),
                    softmax: row_softmax,
                },
                products_of: row_products::ProductTables {
                    f32: product_table!(f32),
                    bf16: product_table!(half::bf16),
                    f16: product_table!(half::f16),
                },
                softcap,
                exp2,
                transpose,
                multiply_adds,
            }
        };
    };
}
pub(super) use table;
