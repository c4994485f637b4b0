//! Panels of tiles, and keys in pages as TMA loads them: a box for each part of a page.

/// Columns of a panel of a tile with `columns` columns in shared memory, a multiple of 16: the widest that
/// divides them.
pub const fn panel(columns: u32) -> u32 {
    match columns {
        _ if columns.is_multiple_of(64) => 64,
        _ if columns.is_multiple_of(32) => 32,
        _ => 16,
    }
}

/// Columns that rows of Q, K, V and dO take in shared memory where TMA loads a head dim of `columns`, a
/// multiple of 16: panels of at least 32 columns, of which the last one may be half empty. TMA moves one row
/// of a panel at a time, so narrower panels take longer to load.
pub const fn operand_columns(columns: u32) -> u32 {
    columns.next_multiple_of(32)
}

/// Columns of their panels, where no two warpgroups share the columns.
pub const fn operand_panel(columns: u32) -> u32 {
    panel(operand_columns(columns))
}

/// Columns of a panel of a tile of 8-bit elements: rows of as many bytes as those of half as many 16-bit
/// ones.
pub const fn byte_panel(columns: u32) -> u32 {
    2 * panel(columns / 2)
}

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

/// The number of which pages must be a multiple, so that TMA boxes can load tiles of `tile_n` rows in panels
/// of `row_bytes` a row; `None` for pages that they can load.
pub const fn boxes_need(page: usize, tile_n: u32, row_bytes: u32) -> Option<usize> {
    let part = page_part(page, tile_n);
    let aligned = BOX_ALIGN / row_bytes as usize;
    if aligned > 1 && !part.is_multiple_of(aligned) {
        return Some(aligned);
    }
    if part * LANES < tile_n as usize {
        Some((tile_n as usize).div_ceil(LANES).next_power_of_two())
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_divide_pages_and_tiles() {
        for (page, tile_n, part) in [(16, 128, 16), (1, 128, 1), (256, 176, 16), (48, 128, 16), (7, 64, 1)] {
            assert_eq!(page_part(page, tile_n), part);
        }
        let need = |page, tile_n, columns| boxes_need(page, tile_n, 2 * operand_panel(columns));
        assert_eq!(need(16, 128, 128), None);
        // 64 boxes of two rows for 32 lanes.
        assert_eq!(need(2, 128, 128), Some(4));
        assert_eq!(need(4, 80, 128), None);
        // Rows of 64 bytes: boxes of an odd number would start within 128 bytes.
        assert_eq!((need(9, 144, 96), need(9, 144, 128)), (Some(2), None));
        assert_eq!((need(9, 144, 80), need(8, 144, 80)), (Some(2), None));
        assert_eq!([64, 128, 96, 192, 256].map(byte_panel), [64, 128, 32, 64, 128]);
        assert_eq!([64, 128, 192, 256, 96, 32, 80].map(panel), [64, 64, 64, 64, 32, 32, 16]);
    }

    #[test]
    fn rows_of_operands_have_panels_of_32_columns_at_least() {
        assert_eq!([64, 80, 96, 112, 256, 16].map(operand_columns), [64, 96, 96, 128, 256, 32]);
        assert_eq!([64, 80, 96, 112, 256, 16].map(operand_panel), [64, 32, 32, 64, 64, 32]);
    }
}
