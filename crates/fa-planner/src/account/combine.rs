//! Parts of a tile's keys, and the kernel that combines their results.

use fa_core::spec::WHOLE_ROW_HEAD_DIM;

/// The most CTAs that share the keys of a tile's rows: the combine kernel holds their LSEs.
pub const MAX_SPLITS: usize = 256;

/// CTAs of the combine kernel for each SM, at the most.
const COMBINE_CTAS: usize = 16;

/// Rows for each SM up to which a CTA of the combine kernel takes one, whose parts its warps share. By a warp
/// each, 1,024 rows of 16 parts take 2 us more, and 2,048 of 8 parts 1.7 us less (NB-166).
const COMBINE_SHARED_ROWS: usize = 8;

/// Warps of a CTA of the combine kernel.
pub(crate) const COMBINE_WARPS: usize = 4;

/// Whether a row of `rows` is combined by a CTA, whose warps share the parts, rather than by a warp.
pub(crate) fn shares_rows(rows: usize, sms: usize) -> bool {
    rows <= COMBINE_SHARED_ROWS * sms
}

/// CTAs that share a row of more columns than [`WHOLE_ROW_HEAD_DIM`].
const WIDE_ROW_CTAS: usize = 4;

/// CTAs of the combine kernel for `rows` rows of `columns` columns on `sms` SMs. As many as there are rows,
/// or more where rows are wide: a CTA takes a row, or its share of one; fewer: a warp takes a row.
pub fn combine_ctas(rows: usize, columns: u32, sms: usize) -> usize {
    let of_row = if columns > WHOLE_ROW_HEAD_DIM { WIDE_ROW_CTAS } else { 1 };
    let ctas = if shares_rows(rows, sms) { of_row * rows } else { rows.div_ceil(COMBINE_WARPS) };
    ctas.min(COMBINE_CTAS * sms)
}
