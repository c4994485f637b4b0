//! The addresses of an access: which lane starts where, instruction by instruction.

use super::access::{Access, BankError, WARP};

/// Row and column, within a block, at which each lane's bytes start.
pub(super) type Lanes = Vec<(u64, u64)>;

/// An access as data: the instructions that cover one block.
pub(super) struct Pattern {
    pub block_rows: u64,
    pub block_cols: u64,
    /// Bytes per lane.
    pub width: u64,
    pub instructions: Vec<Lanes>,
}

impl Pattern {
    pub(super) fn of(access: Access, elem_bytes: u64) -> Result<Self, BankError> {
        let takes = |sizes: &[u64], need: &'static str| {
            if sizes.contains(&elem_bytes) {
                Ok(())
            } else {
                Err(BankError::AccessElem { access, need, have: elem_bytes })
            }
        };
        // `count` instructions; the closure gives the position of lane (g, t) of instruction i.
        let fragment = |count: u64, place: fn(u64, u64, u64) -> (u64, u64)| -> Vec<Lanes> {
            (0..count).map(|i| (0..WARP).map(|lane| place(i, lane / 4, lane % 4)).collect()).collect()
        };
        let chunk = 16 / elem_bytes;
        Ok(match access {
            Access::CpAsync16 { lanes_per_row: lanes } | Access::Vector16 { lanes_per_row: lanes } => {
                if lanes == 0 || !WARP.is_multiple_of(lanes) {
                    return Err(BankError::Lanes { lanes });
                }
                let all = (0..WARP).map(|lane| (lane / lanes, lane % lanes * chunk)).collect();
                Self {
                    block_rows: WARP / lanes,
                    block_cols: lanes * chunk,
                    width: 16,
                    instructions: vec![all],
                }
            }
            Access::Ldmatrix | Access::LdmatrixTrans | Access::Stmatrix => {
                if access != Access::Ldmatrix {
                    takes(&[2], "2")?;
                }
                // Matrix i is addressed by lanes 8i to 8i + 7: the first two below each other, then 16 bytes
                // on.
                let all = (0..WARP).map(|lane| (lane % 16, lane / 16 * chunk)).collect();
                Self { block_rows: 16, block_cols: 2 * chunk, width: 16, instructions: vec![all] }
            }
            Access::FragmentA => {
                takes(&[2], "2")?;
                let instructions = fragment(4, |i, g, t| (g + i % 2 * 8, 2 * t + i / 2 * 8));
                Self { block_rows: 16, block_cols: 16, width: 4, instructions }
            }
            Access::FragmentATrans => {
                takes(&[2], "2")?;
                let instructions = fragment(8, |i, g, t| (2 * t + i % 2 + i / 4 * 8, g + i / 2 % 2 * 8));
                Self { block_rows: 16, block_cols: 16, width: 2, instructions }
            }
            Access::FragmentB => {
                takes(&[2], "2")?;
                let instructions = fragment(2, |i, g, t| (g, 2 * t + i * 8));
                Self { block_rows: 8, block_cols: 16, width: 4, instructions }
            }
            Access::FragmentBTrans => {
                takes(&[2], "2")?;
                let instructions = fragment(4, |i, g, t| (2 * t + i % 2 + i / 2 * 8, g));
                Self { block_rows: 16, block_cols: 8, width: 2, instructions }
            }
            Access::FragmentC => {
                takes(&[2, 4], "2 or 4")?;
                let instructions = fragment(2, |i, g, t| (g + i * 8, 2 * t));
                Self { block_rows: 16, block_cols: 8, width: 2 * elem_bytes, instructions }
            }
        })
    }

    /// Lanes served together: as many as 128 bytes allow.
    pub(super) fn lanes_per_phase(&self) -> usize {
        match self.width {
            16.. => 8,
            8.. => 16,
            _ => 32,
        }
    }
}
