//! Keys in pages as the SM90 forward loads them: a box of TMA for each part of a page, or rows copied by
//! threads.

use fa_core::Problem;

use super::panels::widest;

/// Rows of a page that one box of TMA loads: the largest number that divides both page and tile.
pub const fn page_part(page: usize, tile_n: u32) -> usize {
    let (mut a, mut b) = (page, tile_n as usize);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// Lanes of the warp that issues boxes, one each.
const LANES: usize = 32;

/// Bytes that boxes start on in shared memory.
const BOX_ALIGN: usize = 128;

/// What a page's parts have to be a multiple of for boxes to load tiles of `tile_n` rows with `columns`
/// columns, where they are not.
pub const fn boxes_need(page: usize, tile_n: u32, columns: u32) -> Option<usize> {
    let part = page_part(page, tile_n);
    let aligned = BOX_ALIGN / (2 * widest(columns) as usize);
    if aligned > 1 && !part.is_multiple_of(aligned) {
        return Some(aligned);
    }
    if part * LANES < tile_n as usize {
        Some((tile_n as usize).div_ceil(LANES).next_power_of_two())
    } else {
        None
    }
}

/// Fewest rows of a box that TMA loads about as fast as long ones: 2.13 TB/s of 2.46 with 8, 1.64 with 4,
/// 0.48 with 1 (NB-058).
const BOX_ROWS: usize = 8;

/// Whether threads should copy the keys of `problem` row by row: boxes of its pages are too small, or cannot
/// be.
pub fn gathers(problem: &Problem, tile_n: u32, (head_dim, head_dim_v): (u32, u32)) -> bool {
    let Some(page) = problem.lengths.page() else { return false };
    let boxes = [head_dim, head_dim_v].into_iter().all(|columns| boxes_need(page, tile_n, columns).is_none());
    widest(head_dim) == widest(head_dim_v) && (!boxes || page_part(page, tile_n) < BOX_ROWS)
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Lengths, Mask, Side};

    use super::*;

    #[test]
    fn boxes_divide_pages_and_tiles() {
        for (page, tile_n, part) in [(16, 128, 16), (1, 128, 1), (256, 176, 16), (48, 128, 16), (7, 64, 1)] {
            assert_eq!(page_part(page, tile_n), part);
        }
        assert_eq!(boxes_need(16, 128, 128), None);
        // 64 boxes of two rows for 32 lanes.
        assert_eq!(boxes_need(2, 128, 128), Some(4));
        assert_eq!(boxes_need(4, 80, 128), None);
        // Rows of 64 bytes: boxes of an odd number would start within 128 bytes.
        assert_eq!((boxes_need(9, 144, 96), boxes_need(9, 144, 128)), (Some(2), None));
    }

    #[test]
    fn small_pages_are_gathered() {
        let of = |page| Problem {
            lengths: Lengths::of(2, Side::padded(1), Side::paged(page, 64, 100)),
            ..Problem::square(2, 1, 8, 128, Mask::FULL, Dtype::Bf16)
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
