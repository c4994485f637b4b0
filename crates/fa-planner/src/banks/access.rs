//! The patterns in which a warp accesses a tile, and the errors of patterns that do not fit.

use std::fmt;

use fa_core::layout::{Layout, LayoutError};
use fa_core::swizzle::SwizzleError;
use serde::{Deserialize, Serialize};

/// Lanes of a warp.
pub const WARP: u64 = 32;
/// Largest tile accepted, in bytes; no architecture has as much shared memory per CTA.
pub const MAX_TILE_BYTES: u64 = 256 * 1024;

/// Why a conflict count was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BankError {
    /// The layout itself.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The swizzle.
    #[error(transparent)]
    Swizzle(#[from] SwizzleError),
    /// A layout that is not a matrix.
    #[error("a tile has the two modes (rows, cols); {layout} has {rank}")]
    NotAMatrix {
        /// The layout.
        layout: Box<Layout>,
        /// Its rank.
        rank: usize,
    },
    /// An element size without a meaning here.
    #[error("elements of {have} bytes; elements of 1, 2, 4, 8 or 16 bytes can be placed")]
    ElemBytes {
        /// The refused size.
        have: u64,
    },
    /// More than any shared memory holds.
    #[error("the tile takes {} bytes of shared memory; at most {MAX_TILE_BYTES} are accepted",
            .bytes.map_or("over 2^64".to_string(), |b| b.to_string()))]
    TooLarge {
        /// Bytes needed, if they fit 64 bits.
        bytes: Option<u64>,
    },
    /// A tile that the access does not divide.
    #[error(
        "{access} works on blocks of {block_rows} x {block_cols} elements; a tile of {rows} x {cols} has no \
         whole number of them"
    )]
    Block {
        /// The access.
        access: Access,
        /// Rows of one block.
        block_rows: u64,
        /// Columns of one block.
        block_cols: u64,
        /// Rows of the tile.
        rows: u64,
        /// Columns of the tile.
        cols: u64,
    },
    /// An instruction that does not take elements of this size.
    #[error("{access} takes elements of {need} bytes; the tile's have {have}")]
    AccessElem {
        /// The access.
        access: Access,
        /// Sizes that it takes, in words.
        need: &'static str,
        /// Bytes per element of the tile.
        have: u64,
    },
    /// Lanes per row that do not divide a warp.
    #[error("{lanes} lanes per row; 1, 2, 4, 8, 16 or 32 divide a warp")]
    Lanes {
        /// The refused number.
        lanes: u64,
    },
    /// A vector whose elements are not contiguous in the layout.
    #[error("{access}: the {width} bytes from row {row}, column {col} are not contiguous in shared memory")]
    Torn {
        /// The access.
        access: Access,
        /// Row of the vector.
        row: u64,
        /// Its first column.
        col: u64,
        /// Bytes that the instruction moves per lane.
        width: u64,
    },
    /// A vector that is not aligned to its size.
    #[error(
        "{access}: row {row}, column {col} lies at byte {byte}, which is not a multiple of {width}; pad rows \
         by multiples of {width} bytes"
    )]
    Misaligned {
        /// The access.
        access: Access,
        /// Row of the vector.
        row: u64,
        /// Its first column.
        col: u64,
        /// Its byte offset.
        byte: u64,
        /// Bytes that the instruction moves per lane.
        width: u64,
    },
}

/// The pattern in which the lanes of a warp access a tile of `rows x cols` elements. Fragments are those of
/// `mma.m16n8k16` (PTX ISA, "Matrix Fragments for mma.m16n8k16"): lane `l` has group `g = l / 4` and
/// thread-in-group `t = l mod 4`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Access {
    /// `cp.async` of 16 bytes per lane: `lanes_per_row` neighbouring lanes along a row, the next ones a row
    /// below.
    CpAsync16 {
        /// 1, 2, 4, 8, 16 or 32.
        lanes_per_row: u64,
    },
    /// Plain loads or stores of 16 bytes per lane, arranged likewise.
    Vector16 {
        /// 1, 2, 4, 8, 16 or 32.
        lanes_per_row: u64,
    },
    /// `ldmatrix.x4` over blocks of 16 rows x 32 bytes: an A operand stored `[m][k]`, or two n-blocks of a B
    /// operand stored `[n][k]` (K).
    Ldmatrix,
    /// `ldmatrix.x4.trans` over blocks of 16 x 16 16-bit elements: a B operand stored `[k][n]` (V), or an A
    /// operand stored `[k][m]` (P or dS transposed).
    LdmatrixTrans,
    /// `stmatrix.x4` over blocks of 16 x 16 16-bit elements (sm_90 and later): P, dS or an output tile.
    Stmatrix,
    /// The A operand by plain 32-bit loads of a tile stored `[m][k]`: row `g`, columns `2t, 2t+1`.
    FragmentA,
    /// The A operand by plain 16-bit loads of a tile stored `[k][m]`: row `2t`, column `g`.
    FragmentATrans,
    /// The B operand by plain 32-bit loads of a tile stored `[n][k]` (K): row `g`, columns `2t, 2t+1`.
    FragmentB,
    /// The B operand by plain 16-bit loads of a tile stored `[k][n]` (V): row `2t`, column `g`.
    FragmentBTrans,
    /// Accumulators by plain loads or stores of two neighbours: row `g`, columns `2t, 2t+1`; 32 bits for
    /// 16-bit elements, 64 bits for f32.
    FragmentC,
}

impl Access {
    /// `cp.async` with as many lanes along a row of `row_bytes` as fit it, up to the 8 that make one phase.
    pub fn cp_async_for(row_bytes: u64) -> Self {
        Self::CpAsync16 { lanes_per_row: lanes_for(row_bytes) }
    }

    /// Plain 16-byte vectors arranged as [`Access::cp_async_for`] does.
    pub fn vector_for(row_bytes: u64) -> Self {
        Self::Vector16 { lanes_per_row: lanes_for(row_bytes) }
    }
}

fn lanes_for(row_bytes: u64) -> u64 {
    [8, 4, 2].into_iter().find(|lanes| row_bytes.is_multiple_of(16 * lanes)).unwrap_or(1)
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CpAsync16 { lanes_per_row } => write!(f, "cp.async 16 B, {lanes_per_row} lanes per row"),
            Self::Vector16 { lanes_per_row } => write!(f, "16 B vectors, {lanes_per_row} lanes per row"),
            Self::Ldmatrix => f.write_str("ldmatrix.x4"),
            Self::LdmatrixTrans => f.write_str("ldmatrix.x4.trans"),
            Self::Stmatrix => f.write_str("stmatrix.x4"),
            Self::FragmentA => f.write_str("32-bit loads of A [m][k]"),
            Self::FragmentATrans => f.write_str("16-bit loads of A [k][m]"),
            Self::FragmentB => f.write_str("32-bit loads of B [n][k]"),
            Self::FragmentBTrans => f.write_str("16-bit loads of B [k][n]"),
            Self::FragmentC => f.write_str("accumulator pairs"),
        }
    }
}
