//! The kernels by instruction set, behind methods that check every length before a pointer is made: callers
//! stay safe code, and since a call covers a whole tile, the checks cost nothing.
#![allow(unsafe_code)]

use super::bf16::{Bf16Kernels, Table16};
use super::isa::Isa;
#[cfg(target_arch = "aarch64")]
use super::neon;
use super::product::{Init, Order, RawProduct};
use super::softmax::{RawAlibi, RawGradient, RawSoftmax};
use super::table::Table;
use super::tile::{TileShape, extent};
use super::transpose::RawTranspose;
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512, avx512bf16};
use super::{peak, portable};

/// The kernels of one instruction set that this CPU has.
#[derive(Clone, Copy)]
pub struct Kernels {
    isa: Isa,
    pub(super) table: &'static Table,
    table16: Option<&'static Table16>,
}

/// One product `C = init(C) + A B` of row-major tiles: C is `m x n` at stride `ldc`, B `k x n` at `ldb`, A
/// `m x k` at `lda` in the given order. `n` must be a multiple of [`Kernels::lanes`].
pub struct Product<'a> {
    /// Rows of C.
    pub m: usize,
    /// Columns of C.
    pub n: usize,
    /// Terms of each sum.
    pub k: usize,
    /// A and its stride.
    pub a: &'a [f32],
    /// Distance between A's rows (or columns, by `order`).
    pub lda: usize,
    /// How A lies.
    pub order: Order,
    /// B and its stride.
    pub b: &'a [f32],
    /// Distance between B's rows.
    pub ldb: usize,
    /// C and its stride.
    pub c: &'a mut [f32],
    /// Distance between C's rows.
    pub ldc: usize,
    /// What is added to.
    pub init: Init<'a>,
}

/// ALiBi's bias on one tile: `slope * |first + query - key|`, query and key counted within the tile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bias {
    /// The slope, in the scores' base.
    pub slope: f32,
    /// Distance of the tile's first query from its first key, with its sign: `i + seqlen_k - seqlen_q - j`.
    pub first: f32,
}

impl Kernels {
    /// The kernels for `isa`; `None` when this CPU does not have it.
    pub fn for_isa(isa: Isa) -> Option<Kernels> {
        if !isa.is_available() {
            return None;
        }
        let (table, table16): (&'static Table, Option<&'static Table16>) = match isa {
            Isa::Portable => (&portable::TABLE, None),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => (&avx2::TABLE, None),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => (&avx512::TABLE, None),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => (&avx512::TABLE, Some(&avx512bf16::AVX512_BF16)),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => (&avx512::TABLE, Some(&avx512bf16::AMX)),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => (&neon::TABLE, None),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => return None,
            #[cfg(not(target_arch = "aarch64"))]
            Isa::Neon => return None,
        };
        Some(Kernels { isa, table, table16 })
    }

    /// Whether there are kernels with bf16 factors.
    pub fn has_bf16(&self) -> bool {
        self.table16.is_some()
    }

    /// The kernels with bf16 factors, readied on this thread; `None` when this instruction set has none.
    pub fn bf16(&self) -> Option<Bf16Kernels> {
        // SAFETY: the table was given out for a CPU that has the instructions.
        self.table16.map(|table| unsafe { Bf16Kernels::enter(table) })
    }

    /// Which instruction set this is.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// f32 values in a register: tiles are padded to a multiple of it.
    pub fn lanes(&self) -> usize {
        self.table.lanes
    }

    /// Columns of the widest register block: the width of a panel of queries.
    pub fn panel(&self) -> usize {
        self.table.lanes * self.table.columns
    }

    /// Rows of the largest register block.
    pub fn block_rows(&self) -> usize {
        self.table.rows
    }

    /// Computes a product.
    ///
    /// # Panics
    /// If an operand is shorter than its shape and stride say, a stride is less than a row, or `n` is not a
    /// multiple of the lanes.
    pub fn product(&self, call: Product<'_>) {
        let Product { m, n, k, a, lda, order, b, ldb, c, ldc, init } = call;
        if m == 0 || n == 0 {
            return;
        }
        let (a_rows, a_len) = if order == Order::Rows { (m, k) } else { (k, m) };
        assert!(n.is_multiple_of(self.lanes()), "{n} columns are no multiple of {} lanes", self.lanes());
        assert!(lda >= a_len && ldb >= n && ldc >= n, "strides {lda}, {ldb}, {ldc} for {m} x {n} x {k}");
        assert!(a.len() >= extent(a_rows, a_len, lda), "A is too short");
        assert!(b.len() >= extent(k, n, ldb), "B is too short");
        assert!(c.len() >= extent(m, n, ldc), "C is too short");
        let scale = match init {
            Init::Scale(scale) => {
                assert!(scale.len() >= n, "{} factors for {n} columns", scale.len());
                scale.as_ptr()
            }
            Init::Zero | Init::Add => std::ptr::null(),
        };
        let raw = RawProduct {
            m,
            n,
            k,
            a: a.as_ptr(),
            lda,
            order,
            b: b.as_ptr(),
            ldb,
            c: c.as_mut_ptr(),
            ldc,
            add: matches!(init, Init::Add),
            scale,
        };
        // SAFETY: lengths were just checked, and the table was given out for a CPU that has the instructions.
        unsafe { (self.table.product)(&raw) }
    }

    /// Online softmax (base 2) of one tile: `scores` become probabilities `2^(score - max)`, `max` and `sum`
    /// (one value per query; -inf and 0 before the first tile) are brought up to date, `factor` receives what
    /// everything accumulated before has to be multiplied by. Returns whether any factor differs from 1.
    ///
    /// `max` may trail the true maximum by a few powers of two, which spares most rescaling;
    /// `max + log2(sum)` is exact.
    ///
    /// # Panics
    /// If a buffer is shorter than the shape says, or `queries` is no multiple of the lanes.
    pub fn online_softmax(
        &self,
        shape: TileShape,
        scores: &mut [f32],
        max: &mut [f32],
        sum: &mut [f32],
        factor: &mut [f32],
    ) -> bool {
        let TileShape { keys, queries, ld } = shape;
        self.check_tile(shape, scores.len());
        assert!(max.len() >= queries && sum.len() >= queries && factor.len() >= queries, "state too short");
        let raw = RawSoftmax {
            keys,
            queries,
            scores: scores.as_mut_ptr(),
            ld,
            max: max.as_mut_ptr(),
            sum: sum.as_mut_ptr(),
            factor: factor.as_mut_ptr(),
        };
        // SAFETY: lengths were just checked, and the table was given out for a CPU that has the instructions.
        unsafe { (self.table.softmax)(&raw) }
    }

    /// Backward of the softmax on one tile: `scores` (base 2) become probabilities `P = 2^(score - lse)`,
    /// `dp` (dP) become `dS = P (dP - delta)`. `lse` is in base 2 too, +inf for rows that see nothing.
    /// With a `cap` (times log2 e) the scores come in before the cap, divided by it, and dS takes in the
    /// cap's derivative. With `alibi` they come in before its bias, which comes after the cap.
    ///
    /// # Panics
    /// If a buffer is shorter than the shape says, or `queries` is no multiple of the lanes.
    #[allow(clippy::too_many_arguments)]
    pub fn softmax_gradient(
        &self,
        shape: TileShape,
        scores: &mut [f32],
        dp: &mut [f32],
        lse: &[f32],
        delta: &[f32],
        cap: Option<f32>,
        alibi: Option<Bias>,
    ) {
        let TileShape { keys, queries, ld } = shape;
        let Bias { slope, first } = alibi.unwrap_or(Bias { slope: 0.0, first: 0.0 });
        self.check_tile(shape, scores.len().min(dp.len()));
        assert!(lse.len() >= queries && delta.len() >= queries, "row data too short");
        let raw = RawGradient {
            keys,
            queries,
            scores: scores.as_mut_ptr(),
            dp: dp.as_mut_ptr(),
            ld,
            lse: lse.as_ptr(),
            delta: delta.as_ptr(),
            cap: cap.unwrap_or(0.0),
            slope,
            first,
        };
        // SAFETY: lengths were just checked, and the table was given out for a CPU that has the instructions.
        unsafe { (self.table.gradient)(&raw) }
    }

    /// Lowers a tile of scores by `slope * |first + query - key|`.
    ///
    /// # Panics
    /// If the buffer is shorter than the shape says, or `queries` is no multiple of the lanes.
    pub fn alibi(&self, shape: TileShape, scores: &mut [f32], Bias { slope, first }: Bias) {
        let TileShape { keys, queries, ld } = shape;
        self.check_tile(shape, scores.len());
        let raw = RawAlibi { keys, queries, scores: scores.as_mut_ptr(), ld, slope, first };
        // SAFETY: lengths were just checked, and the table was given out for a CPU that has the instructions.
        unsafe { (self.table.alibi)(&raw) }
    }

    fn check_tile(&self, shape: TileShape, len: usize) {
        let TileShape { keys, queries, ld } = shape;
        assert!(
            queries.is_multiple_of(self.lanes()),
            "{queries} queries are no multiple of {}",
            self.lanes()
        );
        assert!(ld >= queries && len >= extent(keys, queries, ld), "tile {shape:?} in {len} values");
    }

    /// Every value becomes `cap * tanh(value)`.
    ///
    /// # Panics
    /// If the length is no multiple of the lanes.
    pub fn softcap(&self, values: &mut [f32], cap: f32) {
        assert!(values.len().is_multiple_of(self.lanes()), "{} values", values.len());
        // SAFETY: the length was just checked, and the table was given out for a CPU that has the
        // instructions.
        unsafe { (self.table.softcap)(values.as_mut_ptr(), values.len(), cap) }
    }

    /// Every value becomes `2^value`, 0 below 2^-126.
    ///
    /// # Panics
    /// If the length is no multiple of the lanes.
    pub fn exp2(&self, values: &mut [f32]) {
        assert!(values.len().is_multiple_of(self.lanes()), "{} values", values.len());
        // SAFETY: the length was just checked, and the table was given out for a CPU that has the
        // instructions.
        unsafe { (self.table.exp2)(values.as_mut_ptr(), values.len()) }
    }

    /// Transposes `rows x columns` values: `to[c * ld_to + r] = from[r * ld_from + c]`.
    ///
    /// # Panics
    /// If a buffer is shorter than its shape and stride say, or a stride is less than a row.
    pub fn transpose(
        &self,
        [rows, columns]: [usize; 2],
        from: &[f32],
        ld_from: usize,
        to: &mut [f32],
        ld_to: usize,
    ) {
        check_transpose([rows, columns], from.len(), ld_from, to.len(), ld_to);
        let (from, to) = (from.as_ptr().cast(), to.as_mut_ptr().cast());
        let raw = RawTranspose { rows, columns, from, ld_from, to, ld_to };
        // SAFETY: lengths were just checked, and the table was given out for a CPU that has the instructions.
        unsafe { (self.table.transpose)(&raw) }
    }

    /// As [`transpose`](Self::transpose), for words that hold pairs of 16-bit values.
    ///
    /// # Panics
    /// As [`transpose`](Self::transpose).
    pub fn transpose_words(
        &self,
        [rows, columns]: [usize; 2],
        from: &[u32],
        ld_from: usize,
        to: &mut [u32],
        ld_to: usize,
    ) {
        check_transpose([rows, columns], from.len(), ld_from, to.len(), ld_to);
        let raw = RawTranspose { rows, columns, from: from.as_ptr(), ld_from, to: to.as_mut_ptr(), ld_to };
        // SAFETY: lengths were just checked, and the table was given out for a CPU that has the instructions.
        unsafe { (self.table.transpose)(&raw) }
    }

    /// Runs `rounds` rounds of independent multiply-adds and returns the f32 operations done (2 a lane), for
    /// measuring the peak rate.
    pub fn multiply_adds(&self, rounds: usize) -> f64 {
        // SAFETY: the table was given out for a CPU that has the instructions.
        std::hint::black_box(unsafe { (self.table.multiply_adds)(rounds) });
        (2 * self.lanes() * peak::CHAINS) as f64 * rounds as f64
    }
}

fn check_transpose([rows, columns]: [usize; 2], from: usize, ld_from: usize, to: usize, ld_to: usize) {
    assert!(ld_from >= columns && ld_to >= rows, "strides {ld_from} and {ld_to} for {rows} x {columns}");
    assert!(from >= extent(rows, columns, ld_from) && to >= extent(columns, rows, ld_to), "tile too short");
}
