//! Transposing 32-bit words: f32 values, or pairs of 16-bit ones.
#![allow(unsafe_code)]

use super::vector::Vector;

/// `to[c * ld_to + r] = from[r * ld_from + c]` for `rows x columns` words.
///
/// # Safety
/// All words that shape and strides name must be valid, those of `to` for writes.
pub(super) struct RawTranspose {
    pub rows: usize,
    pub columns: usize,
    pub from: *const u32,
    pub ld_from: usize,
    pub to: *mut u32,
    pub ld_to: usize,
}

/// Square blocks of a register's lanes, and what remains word by word.
#[inline(always)]
pub(super) unsafe fn run<V: Vector>(p: &RawTranspose) {
    let (rows, columns) = (p.rows / V::LANES * V::LANES, p.columns / V::LANES * V::LANES);
    // SAFETY: `RawTranspose`'s contract.
    unsafe {
        for row in (0..rows).step_by(V::LANES) {
            for column in (0..columns).step_by(V::LANES) {
                let (from, to) = (p.from.add(row * p.ld_from + column), p.to.add(column * p.ld_to + row));
                V::transpose(from, p.ld_from, to, p.ld_to);
            }
        }
        for row in 0..p.rows {
            for column in if row < rows { columns } else { 0 }..p.columns {
                *p.to.add(column * p.ld_to + row) = *p.from.add(row * p.ld_from + column);
            }
        }
    }
}
