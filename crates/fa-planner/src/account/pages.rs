//! Keys in pages as the SM90 forward loads them: a box of TMA for each part of a page, or rows copied by
//! threads.

use fa_core::Problem;
use fa_core::spec::operand_panel;

pub use fa_core::spec::{boxes_need, page_part};

/// Fewest rows of a box that TMA loads about as fast as long ones: 2.13 TB/s of 2.46 with 8, 1.64 with 4,
/// 0.48 with 1 (NB-058).
const BOX_ROWS: usize = 8;

/// Whether threads should copy the keys of `problem` row by row: boxes of its pages are too small, or cannot
/// be.
pub(crate) fn gathers(problem: &Problem, tile_n: u32, (head_dim, head_dim_v): (u32, u32)) -> bool {
    let Some(page) = problem.lengths.page() else { return false };
    let fits = |columns: u32| boxes_need(page, tile_n, 2 * operand_panel(columns)).is_none();
    let boxes = fits(head_dim) && fits(head_dim_v);
    operand_panel(head_dim) == operand_panel(head_dim_v) && (!boxes || page_part(page, tile_n) < BOX_ROWS)
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Lengths, Mask, Side};

    use super::*;

    #[test]
    fn small_pages_are_gathered() {
        let of = |page| {
            Problem::square(2, 1, 8, 128, Mask::FULL, Dtype::Bf16).with_lengths(Lengths::of(
                2,
                Side::padded(1),
                Side::paged(page, 64, 100),
            ))
        };
        for (page, by_threads) in
            [(1, true), (4, true), (7, true), (8, false), (16, false), (100, true), (104, false)]
        {
            assert_eq!(gathers(&of(page), 128, (128, 128)), by_threads, "pages of {page}");
        }
        // Panels of different widths have to take boxes.
        assert!(!gathers(&of(1), 64, (96, 64)));
        let one_piece = Problem::square(2, 1, 8, 128, Mask::FULL, Dtype::Bf16);
        assert!(!gathers(&one_piece, 128, (128, 128)));
    }
}
