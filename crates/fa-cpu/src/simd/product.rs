//! `C = init(C) + A B` on f32 tiles, blocked for registers. Blocks that an instruction set does not have are
//! behind an `if const`, so that none is compiled for it.
#![allow(unsafe_code)]

use super::vector::Vector;

/// How the elements of A are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// `A[i][k]` at `i * lda + k`.
    Rows,
    /// `A[i][k]` at `k * lda + i`: the transpose of a row-major matrix.
    Columns,
}

/// What the product is added to.
#[derive(Clone, Copy, Debug)]
pub enum Init<'a> {
    /// Nothing: C is overwritten.
    Zero,
    /// C as it is.
    Add,
    /// C with each column multiplied by its factor (at least as many as columns).
    Scale(&'a [f32]),
}

/// A product `C[m][n] (+)= A[m][k] B[k][n]`.
///
/// # Safety
/// All elements that shape and strides name must be valid, C's for writes; `n` is a multiple of the lanes;
/// `scale` has `n` values or is null.
pub(super) struct RawProduct {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: *const f32,
    pub lda: usize,
    pub order: Order,
    pub b: *const f32,
    pub ldb: usize,
    pub c: *mut f32,
    pub ldc: usize,
    pub add: bool,
    pub scale: *const f32,
}

/// The whole product, panel of columns by panel of columns: a panel of B stays in the first-level cache while
/// A passes.
#[inline(always)]
pub(super) unsafe fn run<V: Vector>(p: &RawProduct) {
    // SAFETY: `RawProduct`'s contract; panels stay within n.
    unsafe {
        match p.order {
            Order::Rows => columns::<V, false>(p),
            Order::Columns => columns::<V, true>(p),
        }
    }
}

#[inline(always)]
unsafe fn columns<V: Vector, const BY_COLUMNS: bool>(p: &RawProduct) {
    let registers = p.n / V::LANES;
    // Panels of nearly equal width: 4 registers as 2 + 2, not 3 + 1, which would starve the multipliers.
    let panels = registers.div_ceil(V::COLUMNS);
    let mut done = 0;
    for panel in 0..panels {
        let width = (registers - done).div_ceil(panels - panel);
        let column = done * V::LANES;
        // SAFETY: `RawProduct`'s contract; `column + width * LANES <= n`.
        unsafe {
            if const { V::COLUMNS >= 3 } && width == 3 {
                rows::<V, 3, BY_COLUMNS>(p, column);
            } else if const { V::COLUMNS >= 2 } && width == 2 {
                rows::<V, 2, BY_COLUMNS>(p, column);
            } else {
                rows::<V, 1, BY_COLUMNS>(p, column);
            }
        }
        done += width;
    }
}

#[inline(always)]
unsafe fn rows<V: Vector, const N: usize, const BY_COLUMNS: bool>(p: &RawProduct, column: usize) {
    let mut row = 0;
    // SAFETY: `RawProduct`'s contract; each block stays within m.
    unsafe {
        if const { V::ROWS == 8 } {
            while p.m - row >= 8 {
                block::<V, 8, N, BY_COLUMNS>(p, row, column);
                row += 8;
            }
        }
        if const { V::ROWS == 6 } {
            // Eight rows are twice four: two alone leave the multipliers waiting for one another.
            while p.m - row >= 6 && p.m - row != 8 {
                block::<V, 6, N, BY_COLUMNS>(p, row, column);
                row += 6;
            }
        }
        while p.m - row >= 4 {
            block::<V, 4, N, BY_COLUMNS>(p, row, column);
            row += 4;
        }
        if p.m - row >= 2 {
            block::<V, 2, N, BY_COLUMNS>(p, row, column);
            row += 2;
        }
        if p.m - row >= 1 {
            block::<V, 1, N, BY_COLUMNS>(p, row, column);
        }
    }
}

/// `M` rows and `N` registers of C, kept in registers over all of k.
#[inline(always)]
unsafe fn block<V: Vector, const M: usize, const N: usize, const BY_COLUMNS: bool>(
    p: &RawProduct,
    row: usize,
    column: usize,
) {
    // SAFETY: `RawProduct`'s contract; the block lies within C.
    unsafe {
        let mut sums = [[V::splat(0.0); N]; M];
        let mut a = p.a.add(if BY_COLUMNS { row } else { row * p.lda });
        let mut b = p.b.add(column);
        for _ in 0..p.k {
            let mut panel = [V::splat(0.0); N];
            for (j, register) in panel.iter_mut().enumerate() {
                *register = V::load(b.add(j * V::LANES));
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                let factor = V::splat(*a.add(if BY_COLUMNS { i } else { i * p.lda }));
                for (sum, register) in sums.iter_mut().zip(panel) {
                    *sum = factor.mul_add(register, *sum);
                }
            }
            a = a.add(if BY_COLUMNS { p.lda } else { 1 });
            b = b.add(p.ldb);
        }
        let c = p.c.add(row * p.ldc + column);
        for (i, sums) in sums.iter().enumerate() {
            for (j, &sum) in sums.iter().enumerate() {
                let to = c.add(i * p.ldc + j * V::LANES);
                let sum = if !p.scale.is_null() {
                    V::load(to).mul_add(V::load(p.scale.add(column + j * V::LANES)), sum)
                } else if p.add {
                    V::load(to).add(sum)
                } else {
                    sum
                };
                sum.store(to);
            }
        }
    }
}
