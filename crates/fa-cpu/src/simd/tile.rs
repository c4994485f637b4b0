//! How a tile of scores lies in memory.

/// A tile of transposed scores: `keys` rows of `queries` values at stride `ld`. `queries` must be a multiple
/// of [`crate::simd::Kernels::lanes`].
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
pub(super) fn extent(rows: usize, len: usize, ld: usize) -> usize {
    if rows == 0 || len == 0 { 0 } else { (rows - 1) * ld + len }
}
