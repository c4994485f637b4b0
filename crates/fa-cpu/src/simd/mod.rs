//! Vector kernels, chosen at run time: the only files of this crate with `unsafe` code.
//!
//! [`Isa`] names what a CPU can do, [`Kernels`] is the table of what runs on it. Its methods check every length before a
//! pointer is made, so that callers stay safe code; a call covers a whole tile, so the checks cost nothing.
#![allow(unsafe_code)]

use std::fmt;
use std::str::FromStr;

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512bf16;
pub mod bf16;
pub(crate) mod cast;
mod kernels;
#[cfg(target_arch = "aarch64")]
mod neon;
mod peak;
mod portable;
mod product;
pub(crate) mod scatter;
mod softmax;
mod transpose;
mod vector;
mod widest;

use bf16::{Bf16Kernels, Table16};
use kernels::Table;
use product::RawProduct;
pub use product::{Init, Order};
use softmax::{RawGradient, RawSoftmax};
use transpose::RawTranspose;
pub(crate) use widest::{Work, widest};

/// An instruction set that the kernels can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust, on every CPU.
    Portable,
    /// AArch64 Advanced SIMD.
    Neon,
    /// x86-64 AVX2 with FMA.
    Avx2,
    /// x86-64 AVX-512 (F, BW, DQ, VL).
    Avx512,
    /// AVX-512 with dot products of bf16 pairs; f32 and f16 as AVX-512.
    Avx512Bf16,
    /// AVX-512 with AMX tiles for bf16; f32 and f16 as AVX-512.
    Amx,
}

impl Isa {
    /// Every instruction set, from the plainest.
    pub const ALL: [Isa; 6] = [Isa::Portable, Isa::Neon, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx];

    /// The name that users see and give.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Neon => "neon",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512-bf16",
            Isa::Amx => "amx-bf16",
        }
    }

    /// Whether this CPU and its operating system have it.
    pub fn is_available(self) -> bool {
        Kernels::for_isa(self).is_some()
    }

    /// The best one that this CPU has.
    ///
    /// Not always the last in [`Isa::ALL`]: Intel's cores take a dot product of pairs every other cycle, which makes
    /// AVX512-BF16 slower than the f32 kernels there, so only AMD's are given it.
    pub fn detect() -> Isa {
        let best = |isa: &Isa| isa.is_available() && (*isa != Isa::Avx512Bf16 || fast_pairs());
        Isa::ALL.into_iter().rev().find(best).unwrap_or(Isa::Portable)
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Whether the CPU starts a 512-bit dot product of bf16 pairs every cycle: AMD's do.
#[cfg(target_arch = "x86_64")]
fn fast_pairs() -> bool {
    let vendor = core::arch::x86_64::__cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD"
}

#[cfg(not(target_arch = "x86_64"))]
fn fast_pairs() -> bool {
    false
}

/// A name that is no [`Isa`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown instruction set '{0}': use one of portable, neon, avx2, avx512, avx512-bf16, amx-bf16")]
pub struct ParseIsaError(pub String);

impl FromStr for Isa {
    type Err = ParseIsaError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wanted = text.to_ascii_lowercase();
        Isa::ALL.into_iter().find(|isa| isa.name() == wanted).ok_or_else(|| ParseIsaError(text.to_owned()))
    }
}

/// The kernels of one instruction set that this CPU has.
#[derive(Clone, Copy)]
pub struct Kernels {
    isa: Isa,
    table: &'static Table,
    table16: Option<&'static Table16>,
}

/// One product `C = init(C) + A B` of row-major tiles: C is `m x n` at stride `ldc`, B `k x n` at `ldb`, A `m x k` at `lda`
/// in the given order. `n` must be a multiple of [`Kernels::lanes`].
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

/// A tile of transposed scores: `keys` rows of `queries` values at stride `ld`. `queries` must be a multiple of
/// [`Kernels::lanes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileShape {
    /// Rows.
    pub keys: usize,
    /// Values in a row.
    pub queries: usize,
    /// Distance between rows.
    pub ld: usize,
}

/// Values that `rows` rows of `len` values at stride `ld` reach over.
fn extent(rows: usize, len: usize, ld: usize) -> usize {
    if rows == 0 || len == 0 { 0 } else { (rows - 1) * ld + len }
}

impl Kernels {
    /// The kernels for `isa`; `None` when this CPU does not have it.
    pub fn for_isa(isa: Isa) -> Option<Kernels> {
        let (table, table16) = Self::tables(isa)?;
        Some(Kernels { isa, table, table16 })
    }

    #[cfg(target_arch = "x86_64")]
    fn tables(isa: Isa) -> Option<(&'static Table, Option<&'static Table16>)> {
        let avx2 = || is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let avx512 = || {
            avx2()
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
        };
        let avx512_bf16 = || avx512() && is_x86_feature_detected!("avx512bf16");
        match isa {
            Isa::Portable => Some((&portable::TABLE, None)),
            Isa::Neon => None,
            Isa::Avx2 => avx2().then_some((&avx2::TABLE, None)),
            Isa::Avx512 => avx512().then_some((&avx512::TABLE, None)),
            Isa::Avx512Bf16 => avx512_bf16().then_some((&avx512::TABLE, Some(&avx512bf16::AVX512_BF16))),
            Isa::Amx => {
                (avx512_bf16() && amx::is_available()).then_some((&avx512::TABLE, Some(&avx512bf16::AMX)))
            }
        }
    }

    #[cfg(target_arch = "aarch64")]
    fn tables(isa: Isa) -> Option<(&'static Table, Option<&'static Table16>)> {
        match isa {
            Isa::Portable => Some((&portable::TABLE, None)),
            Isa::Neon => std::arch::is_aarch64_feature_detected!("neon").then_some((&neon::TABLE, None)),
            Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => None,
        }
    }

    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    fn tables(isa: Isa) -> Option<(&'static Table, Option<&'static Table16>)> {
        (isa == Isa::Portable).then_some((&portable::TABLE, None))
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
    /// If an operand is shorter than its shape and stride say, a stride is less than a row, or `n` is not a multiple of
    /// the lanes.
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

    /// Online softmax (base 2) of one tile: `scores` become weights `2^(score - max)`, `max` and `sum` (one value per
    /// query; -inf and 0 before the first tile) are brought up to date, `factor` receives what everything accumulated
    /// before has to be multiplied by. Returns whether any factor differs from 1.
    ///
    /// `max` may trail the true maximum by a few powers of two, which spares most rescaling; `max + log2(sum)` is exact.
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

    /// Backward of the softmax on one tile: `scores` (base 2) become weights `P = 2^(score - lse)`, `dweights` (dP) become
    /// `dS = P (dP - delta)`. `lse` is in base 2 too, +inf for rows that see nothing. With a `cap` (times log2 e) the
    /// scores come in before the cap, divided by it, and dS takes in the cap's derivative.
    ///
    /// # Panics
    /// If a buffer is shorter than the shape says, or `queries` is no multiple of the lanes.
    pub fn softmax_gradient(
        &self,
        shape: TileShape,
        scores: &mut [f32],
        dweights: &mut [f32],
        lse: &[f32],
        delta: &[f32],
        cap: Option<f32>,
    ) {
        let TileShape { keys, queries, ld } = shape;
        self.check_tile(shape, scores.len().min(dweights.len()));
        assert!(lse.len() >= queries && delta.len() >= queries, "row data too short");
        let raw = RawGradient {
            keys,
            queries,
            scores: scores.as_mut_ptr(),
            dweights: dweights.as_mut_ptr(),
            ld,
            lse: lse.as_ptr(),
            delta: delta.as_ptr(),
            cap: cap.unwrap_or(0.0),
        };
        // SAFETY: lengths were just checked, and the table was given out for a CPU that has the instructions.
        unsafe { (self.table.gradient)(&raw) }
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
        // SAFETY: the length was just checked, and the table was given out for a CPU that has the instructions.
        unsafe { (self.table.softcap)(values.as_mut_ptr(), values.len(), cap) }
    }

    /// Every value becomes `2^value`, 0 below 2^-126.
    ///
    /// # Panics
    /// If the length is no multiple of the lanes.
    pub fn exp2(&self, values: &mut [f32]) {
        assert!(values.len().is_multiple_of(self.lanes()), "{} values", values.len());
        // SAFETY: the length was just checked, and the table was given out for a CPU that has the instructions.
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

    /// Runs `rounds` rounds of independent multiply-adds and returns the f32 operations done (2 a lane), for measuring the
    /// peak rate.
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

#[cfg(test)]
mod tests;
