//! Products of bf16 tiles with f32 sums, and the softmax between them.
//!
//! The first operand A is row-major. The second lies in pairs: a 32-bit word holds the terms `2 r` and
//! `2 r + 1` of one column (the earlier one in the low half), and row `r` of B is the words of all columns.
//! That is what both AMX and AVX512-BF16 read.
#![allow(unsafe_code)]
// Elsewhere no table of these kernels exists yet; the interface does.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]

use std::cell::Cell;
use std::marker::PhantomData;

use super::tile::{TileShape, extent};

/// Rows, columns and terms of a product are multiples of this.
pub const GRAIN: usize = 32;
/// Columns of the softmax are multiples of this.
pub const LANES: usize = 16;

/// A product `C[m][n] (+)= A[m][k] B[k][n]`.
///
/// # Safety
/// All elements that shape and strides name must be valid, C's for writes; `m`, `n` and `k` are multiples of
/// [`GRAIN`].
pub(super) struct RawProduct16 {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: *const u16,
    pub lda: usize,
    pub b: *const u32,
    pub ldb: usize,
    pub c: *mut f32,
    pub ldc: usize,
    pub add: bool,
}

/// One tile of scores for the online softmax.
///
/// # Safety
/// `scores` is valid for `keys` rows of `queries` values at stride `ld`, `p` for half as many rows of
/// words at stride `ldw`; `max`, `sum` and `factor` for `queries` values. `keys` is a multiple of [`GRAIN`],
/// `queries` of [`LANES`].
pub(super) struct RawSoftmax16 {
    pub keys: usize,
    pub queries: usize,
    pub scores: *const f32,
    pub ld: usize,
    pub p: *mut u32,
    pub ldw: usize,
    pub scale: f32,
    pub max: *mut f32,
    pub sum: *mut f32,
    pub factor: *mut f32,
}

/// One tile for the backward of the softmax.
///
/// # Safety
/// `scores` and `dscores` are valid for `keys` rows of `queries` values at stride `ld`; `p` and
/// `dscores_rows` for as many rows of 16-bit values at stride `ldw`, `dscores_pairs` for half as many rows of
/// words at stride `ldw`; `lse` and `delta` for `queries` values. `keys` and `queries` are multiples of
/// [`GRAIN`].
pub(super) struct RawGradient16 {
    pub keys: usize,
    pub queries: usize,
    pub scores: *const f32,
    pub dp: *const f32,
    pub ld: usize,
    pub scale: f32,
    pub cap: f32,
    pub lse: *const f32,
    pub delta: *const f32,
    pub p: *mut u16,
    pub dscores_rows: *mut u16,
    pub dscores_pairs: *mut u32,
    pub ldw: usize,
}

/// The 16-bit kernels of one instruction set.
///
/// # Safety
/// Only to be called on a CPU that has it, between `enter` and `leave` on the same thread.
pub(super) struct Table16 {
    pub enter: unsafe fn(),
    pub leave: unsafe fn(),
    pub product: unsafe fn(&RawProduct16),
    pub softmax: unsafe fn(&RawSoftmax16) -> bool,
    pub gradient: unsafe fn(&RawGradient16),
}

/// The 16-bit kernels, ready on this thread: while it lives, the thread's tile registers are configured.
pub struct Bf16Kernels {
    table: &'static Table16,
    /// Configuration belongs to a thread, so this must stay on it.
    here: PhantomData<*const ()>,
}

thread_local! {
    /// How many `Bf16Kernels` live on this thread: only the last one leaves.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

impl Drop for Bf16Kernels {
    fn drop(&mut self) {
        let depth = DEPTH.get() - 1;
        DEPTH.set(depth);
        if depth == 0 {
            // SAFETY: the table was given out for a CPU that has the instructions.
            unsafe { (self.table.leave)() }
        }
    }
}

/// One product `C (+)= A B` with bf16 factors and f32 sums.
pub struct Product16<'a> {
    /// Rows, columns and terms: multiples of [`GRAIN`].
    pub shape: [usize; 3],
    /// A `[m][k]`, bf16 bits.
    pub a: &'a [u16],
    /// Distance between A's rows.
    pub lda: usize,
    /// B `[k / 2][n]` in pairs.
    pub b: &'a [u32],
    /// Distance between B's rows.
    pub ldb: usize,
    /// C `[m][n]`.
    pub c: &'a mut [f32],
    /// Distance between C's rows.
    pub ldc: usize,
    /// Add to C instead of overwriting it.
    pub add: bool,
}

/// What the backward of the softmax reads and writes, one tile: see [`Bf16Kernels::softmax_gradient`].
pub struct Gradient16<'a> {
    /// Keys down, queries across; stride of the f32 tiles.
    pub shape: TileShape,
    /// Unscaled scores.
    pub scores: &'a [f32],
    /// dP.
    pub dp: &'a [f32],
    /// Factor that turns a score into base 2 (or into the cap's argument).
    pub scale: f32,
    /// `cap * log2(e)`.
    pub cap: Option<f32>,
    /// LSE of each query in base 2, +inf where it sees nothing.
    pub lse: &'a [f32],
    /// Row sums of dO * O.
    pub delta: &'a [f32],
    /// P, bf16 rows.
    pub p: &'a mut [u16],
    /// dS, bf16 rows.
    pub dscores_rows: &'a mut [u16],
    /// dS in pairs of keys.
    pub dscores_pairs: &'a mut [u32],
    /// Stride of the three outputs.
    pub ldw: usize,
}

fn check_grain(lengths: &[usize]) {
    assert!(lengths.iter().all(|len| len.is_multiple_of(GRAIN)), "{lengths:?} are no multiples of {GRAIN}");
}

impl Bf16Kernels {
    /// # Safety
    /// The CPU has what the table needs.
    pub(super) unsafe fn enter(table: &'static Table16) -> Self {
        if DEPTH.get() == 0 {
            // SAFETY: the caller vouches for the CPU.
            unsafe { (table.enter)() }
        }
        DEPTH.set(DEPTH.get() + 1);
        Bf16Kernels { table, here: PhantomData }
    }

    /// Computes a product.
    ///
    /// # Panics
    /// If an operand is shorter than its shape and stride say, or a length is no multiple of [`GRAIN`].
    pub fn product(&self, call: Product16<'_>) {
        let Product16 { shape, a, lda, b, ldb, c, ldc, add } = call;
        let [m, n, k] = shape;
        check_grain(&shape);
        assert!(lda >= k && ldb >= n && ldc >= n, "strides {lda}, {ldb}, {ldc} for {shape:?}");
        assert!(a.len() >= extent(m, k, lda), "A is too short");
        assert!(b.len() >= extent(k / 2, n, ldb), "B is too short");
        assert!(c.len() >= extent(m, n, ldc), "C is too short");
        let (a, b, c) = (a.as_ptr(), b.as_ptr(), c.as_mut_ptr());
        let raw = RawProduct16 { m, n, k, a, lda, b, ldb, c, ldc, add };
        // SAFETY: lengths were just checked, and this thread is ready for the instructions.
        unsafe { (self.table.product)(&raw) }
    }

    /// Online softmax of one tile, as [`super::Kernels::online_softmax`], on scores that are still to be
    /// multiplied by `scale` (above 0); the probabilities go to `p` as bf16 pairs of keys.
    ///
    /// # Panics
    /// If a buffer is shorter than the shape says, the keys are no multiple of [`GRAIN`], or the queries none
    /// of [`LANES`].
    #[allow(clippy::too_many_arguments)]
    pub fn online_softmax(
        &self,
        shape: TileShape,
        scores: &[f32],
        scale: f32,
        p: &mut [u32],
        ldw: usize,
        max: &mut [f32],
        sum: &mut [f32],
        factor: &mut [f32],
    ) -> bool {
        let TileShape { keys, queries, ld } = shape;
        check_grain(&[keys]);
        assert!(queries.is_multiple_of(LANES), "{queries} queries are no multiple of {LANES}");
        assert!(ld >= queries && ldw >= queries, "strides {ld} and {ldw} for {queries} queries");
        assert!(scores.len() >= extent(keys, queries, ld), "scores too short");
        assert!(p.len() >= extent(keys / 2, queries, ldw), "P is too short");
        assert!(max.len() >= queries && sum.len() >= queries && factor.len() >= queries, "state too short");
        let raw = RawSoftmax16 {
            keys,
            queries,
            scores: scores.as_ptr(),
            ld,
            p: p.as_mut_ptr(),
            ldw,
            scale,
            max: max.as_mut_ptr(),
            sum: sum.as_mut_ptr(),
            factor: factor.as_mut_ptr(),
        };
        // SAFETY: lengths were just checked, and this thread is ready for the instructions.
        unsafe { (self.table.softmax)(&raw) }
    }

    /// Backward of the softmax on one tile: `P = 2^(scale * score - lse)` and `dS = P (dP - delta)` (times
    /// the cap's derivative) as bf16, dS both in rows and in pairs of keys.
    ///
    /// # Panics
    /// If a buffer is shorter than the shape says, or a length is no multiple of [`GRAIN`].
    pub fn softmax_gradient(&self, call: Gradient16<'_>) {
        let TileShape { keys, queries, ld } = call.shape;
        let ldw = call.ldw;
        check_grain(&[keys, queries]);
        assert!(ld >= queries && ldw >= queries, "strides {ld} and {ldw} for {queries} queries");
        let len = call.scores.len().min(call.dp.len());
        assert!(len >= extent(keys, queries, ld), "scores too short");
        let len = call.p.len().min(call.dscores_rows.len());
        assert!(len >= extent(keys, queries, ldw), "P is too short");
        assert!(call.dscores_pairs.len() >= extent(keys / 2, queries, ldw), "pairs too short");
        assert!(call.lse.len() >= queries && call.delta.len() >= queries, "row data too short");
        let raw = RawGradient16 {
            keys,
            queries,
            scores: call.scores.as_ptr(),
            dp: call.dp.as_ptr(),
            ld,
            scale: call.scale,
            cap: call.cap.unwrap_or(0.0),
            lse: call.lse.as_ptr(),
            delta: call.delta.as_ptr(),
            p: call.p.as_mut_ptr(),
            dscores_rows: call.dscores_rows.as_mut_ptr(),
            dscores_pairs: call.dscores_pairs.as_mut_ptr(),
            ldw,
        };
        // SAFETY: lengths were just checked, and this thread is ready for the instructions.
        unsafe { (self.table.gradient)(&raw) }
    }
}
