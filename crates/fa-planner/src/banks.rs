//! Shared-memory bank conflicts, counted from a layout, a swizzle and an access.
//!
//! The model. Shared memory is 32 banks of 4 bytes (CUDA C++ Programming Guide, "Shared Memory" of every
//! compute capability from 5.0): word `w` lies in bank `w mod 32`. A warp's access is split into phases of at
//! most 128 bytes: all 32 lanes of an access of up to 4 bytes, half a warp of 8 bytes, a quarter of 16 bytes.
//! `ldmatrix` and `stmatrix` go matrix by matrix: 8 row addresses of 16 bytes, which is a quarter warp of 16
//! bytes each. Within a phase, lanes that touch the same word are served together; a phase takes one
//! wavefront for every word of its busiest bank. One wavefront per phase is ideal.
//!
//! A count covers a whole tile: the access is repeated block by block until it has touched every element, so
//! that conflicts that only some rows or columns meet are not missed. The tile is taken to start at a
//! multiple of the swizzle's period.

use std::fmt;

use fa_core::layout::{Layout, LayoutError};
use fa_core::swizzle::{Swizzle, SwizzleError, SwizzleMode, SwizzledLayout};
use serde::{Deserialize, Serialize};

/// Banks of shared memory.
pub const BANKS: u64 = 32;
/// Bytes that a bank delivers per wavefront.
pub const BANK_BYTES: u64 = 4;
/// Lanes of a warp.
pub const WARP: u64 = 32;
/// Largest tile accepted, in bytes; no architecture has as much shared memory per block.
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
        /// Where it lies.
        byte: u64,
        /// Bytes that the instruction moves per lane.
        width: u64,
    },
}

/// How the lanes of a warp go over a tile of `rows x cols` elements. Fragments are those of `mma.m16n8k16`
/// (PTX ISA, "Matrix Fragments for mma.m16n8k16"): lane `l` has group `g = l / 4` and thread-in-group `t = l
/// mod 4`.
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

/// A tile in shared memory: (row, col) to element offset, then the swizzle of element offsets, then bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SmemLayout {
    /// Two top-level modes (rows, cols), in elements; the swizzle too is one of elements.
    pub tile: SwizzledLayout,
    /// Bytes per element: 1, 2, 4, 8 or 16.
    pub elem_bytes: u64,
}

impl SmemLayout {
    /// Rows one after another, without swizzle.
    ///
    /// # Errors
    /// As [`SmemLayout::check`].
    pub fn row_major(rows: u64, cols: u64, elem_bytes: u64) -> Result<Self, BankError> {
        Self::padded(rows, cols, 0, elem_bytes)
    }

    /// Rows one after another with `pad` unused elements after each, without swizzle.
    ///
    /// # Errors
    /// As [`SmemLayout::check`].
    pub fn padded(rows: u64, cols: u64, pad: u64, elem_bytes: u64) -> Result<Self, BankError> {
        let stride = cols.checked_add(pad).ok_or(LayoutError::Overflow { what: "the row stride" })?;
        Self::checked(Layout::from_modes(&[(rows, stride), (cols, 1)])?, Swizzle::NONE, elem_bytes)
    }

    /// Panels as TMA writes them: columns are cut into panels of the mode's row, each panel holds all rows
    /// one after another and is swizzled. Without a swizzle the panels are 16 bytes wide (8x16-byte core
    /// matrices).
    ///
    /// # Errors
    /// [`SwizzleError::Row`] if a row is not a whole number of panels; otherwise as
    /// [`SmemLayout::check`].
    pub fn panels(rows: u64, cols: u64, mode: SwizzleMode, elem_bytes: u64) -> Result<Self, BankError> {
        check_elem_bytes(elem_bytes)?;
        let row_bytes =
            cols.checked_mul(elem_bytes).ok_or(LayoutError::Overflow { what: "the bytes of a row" })?;
        if row_bytes == 0 || !row_bytes.is_multiple_of(mode.row_bytes()) {
            return Err(SwizzleError::Row { row_bytes }.into());
        }
        let width = mode.row_bytes() / elem_bytes;
        let atom = Layout::row_major(&[rows, width])?;
        let layout = atom.blocked_product(&Layout::col_major(&[1, cols / width])?)?;
        Self::checked(layout, mode.on_bytes().scaled(elem_bytes)?, elem_bytes)
    }

    /// [`SmemLayout::panels`] with the widest swizzle that divides the rows: what the kernels use.
    ///
    /// # Errors
    /// As [`SmemLayout::panels`].
    pub fn swizzled(rows: u64, cols: u64, elem_bytes: u64) -> Result<Self, BankError> {
        let mode = SwizzleMode::widest(cols.saturating_mul(elem_bytes))?;
        Self::panels(rows, cols, mode, elem_bytes)
    }

    /// Refuses layouts that are not matrices, invalid swizzles, element sizes other than 1, 2, 4, 8 and 16
    /// bytes, and tiles of more than [`MAX_TILE_BYTES`].
    ///
    /// # Errors
    /// [`BankError`].
    pub fn check(&self) -> Result<(), BankError> {
        check_elem_bytes(self.elem_bytes)?;
        self.tile.check()?;
        let layout = &self.tile.layout;
        if layout.rank() != 2 {
            return Err(BankError::NotAMatrix { layout: Box::new(layout.clone()), rank: layout.rank() });
        }
        // Broadcast strides make a small span of many elements: bound both.
        for elements in [Some(layout.size()), self.tile.span()] {
            let bytes = elements.and_then(|e| e.checked_mul(self.elem_bytes));
            if bytes.is_none_or(|b| b > MAX_TILE_BYTES) {
                return Err(BankError::TooLarge { bytes });
            }
        }
        Ok(())
    }

    /// Rows of the tile.
    pub fn rows(&self) -> u64 {
        self.tile.layout.modes().first().map_or(0, Layout::size)
    }

    /// Columns of the tile.
    pub fn cols(&self) -> u64 {
        self.tile.layout.modes().get(1).map_or(0, Layout::size)
    }

    /// Bytes to reserve, padding included; `None` if they do not fit 64 bits (refused by
    /// [`SmemLayout::check`]).
    pub fn bytes(&self) -> Option<u64> {
        self.tile.span()?.checked_mul(self.elem_bytes)
    }

    /// Byte at which an element starts.
    ///
    /// # Errors
    /// `Layout` for coordinates outside the tile or an offset beyond 64 bits.
    pub fn byte_of(&self, row: u64, col: u64) -> Result<u64, BankError> {
        let offset = self.tile.at_modes(&[row, col])?;
        Ok(offset.checked_mul(self.elem_bytes).ok_or(LayoutError::Overflow { what: "a byte offset" })?)
    }

    /// Bank in which an element starts, 0 to 31.
    ///
    /// # Errors
    /// As [`SmemLayout::byte_of`].
    pub fn bank_of(&self, row: u64, col: u64) -> Result<u64, BankError> {
        Ok(self.byte_of(row, col)? / BANK_BYTES % BANKS)
    }

    fn checked(layout: Layout, swizzle: Swizzle, elem_bytes: u64) -> Result<Self, BankError> {
        let smem = Self { tile: SwizzledLayout { swizzle, offset: 0, layout }, elem_bytes };
        smem.check()?;
        Ok(smem)
    }
}

fn check_elem_bytes(have: u64) -> Result<(), BankError> {
    if matches!(have, 1 | 2 | 4 | 8 | 16) { Ok(()) } else { Err(BankError::ElemBytes { have }) }
}

/// The count for one access over one tile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Conflicts {
    /// The access.
    pub access: Access,
    /// Warp instructions that cover the tile.
    pub instructions: u64,
    /// Wavefronts that they take.
    pub wavefronts: u64,
    /// Wavefronts without conflicts: one per phase.
    pub ideal_wavefronts: u64,
    /// The worst phase: n words of one bank, an n-way conflict; 1 means no conflict.
    pub ways: u64,
    /// Bytes moved, each lane's counted.
    pub bytes: u64,
    /// Every phase, in order.
    pub phases: Vec<Phase>,
}

/// One phase: the lanes that are served together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Phase {
    /// Row of its first lane.
    pub row: u64,
    /// Column of its first lane.
    pub col: u64,
    /// Wavefronts it takes: the words of its busiest bank.
    pub wavefronts: u64,
    /// That bank (the first, if several are equally busy).
    pub busiest_bank: u64,
    /// Banks that it touches.
    pub banks: u64,
}

impl Conflicts {
    /// No phase takes a second wavefront.
    pub fn is_free(&self) -> bool {
        self.wavefronts == self.ideal_wavefronts
    }

    /// Wavefronts per ideal wavefront: the factor by which conflicts slow the access, on average.
    pub fn slowdown(&self) -> f64 {
        self.wavefronts as f64 / self.ideal_wavefronts as f64
    }

    /// Share of the 128 bytes per wavefront that is used, 0 to 1 (above 1 only where lanes read the same
    /// bytes). Unlike [`Conflicts::slowdown`] it also counts what narrow loads leave idle.
    pub fn bandwidth_share(&self) -> f64 {
        self.bytes as f64 / (self.wavefronts * BANKS * BANK_BYTES) as f64
    }
}

/// Counts the bank conflicts of `access` over the whole tile.
///
/// # Errors
/// [`BankError`] if the layout does not pass its check, if the access does not fit the tile or its element
/// size, or if a lane's bytes are not contiguous and aligned, which the instruction requires.
pub fn conflicts(layout: &SmemLayout, access: Access) -> Result<Conflicts, BankError> {
    layout.check()?;
    let pattern = Pattern::of(access, layout.elem_bytes)?;
    let (rows, cols) = (layout.rows(), layout.cols());
    if !rows.is_multiple_of(pattern.block_rows) || !cols.is_multiple_of(pattern.block_cols) {
        let Pattern { block_rows, block_cols, .. } = pattern;
        return Err(BankError::Block { access, block_rows, block_cols, rows, cols });
    }
    let address = Addresses::new(layout, rows, cols)?;

    let mut phases = Vec::new();
    let mut instructions = 0;
    for block_row in (0..rows).step_by(pattern.block_rows as usize) {
        for block_col in (0..cols).step_by(pattern.block_cols as usize) {
            for lanes in &pattern.instructions {
                instructions += 1;
                for phase in lanes.chunks(pattern.lanes_per_phase()) {
                    let places = phase.iter().map(|&(row, col)| (block_row + row, block_col + col));
                    phases.push(address.phase(access, places, pattern.width)?);
                }
            }
        }
    }
    Ok(Conflicts {
        access,
        instructions,
        wavefronts: phases.iter().map(|p| p.wavefronts).sum(),
        ideal_wavefronts: phases.len() as u64,
        ways: phases.iter().map(|p| p.wavefronts).max().unwrap_or(1),
        bytes: instructions * WARP * pattern.width,
        phases,
    })
}

/// Counts every kind of access on one tile: for a report. What does not apply to the tile is there with the
/// reason.
pub fn survey(layout: &SmemLayout) -> Vec<(Access, Result<Conflicts, BankError>)> {
    let row_bytes = layout.cols().saturating_mul(layout.elem_bytes);
    [
        Access::cp_async_for(row_bytes),
        Access::vector_for(row_bytes),
        Access::Ldmatrix,
        Access::LdmatrixTrans,
        Access::Stmatrix,
        Access::FragmentA,
        Access::FragmentATrans,
        Access::FragmentB,
        Access::FragmentBTrans,
        Access::FragmentC,
    ]
    .into_iter()
    .map(|access| (access, conflicts(layout, access)))
    .collect()
}

/// Row and column, within a block, at which each lane's bytes start.
type Lanes = Vec<(u64, u64)>;

/// An access as data: the instructions that cover one block.
struct Pattern {
    block_rows: u64,
    block_cols: u64,
    /// Bytes per lane.
    width: u64,
    instructions: Vec<Lanes>,
}

impl Pattern {
    fn of(access: Access, elem_bytes: u64) -> Result<Self, BankError> {
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
    fn lanes_per_phase(&self) -> usize {
        match self.width {
            16.. => 8,
            8.. => 16,
            _ => 32,
        }
    }
}

/// Element addresses from two tables: a layout adds up over its modes, so that only the swizzle is left to
/// do.
struct Addresses {
    rows: Vec<u64>,
    cols: Vec<u64>,
    swizzle: Swizzle,
    elem_bytes: u64,
}

impl Addresses {
    fn new(smem: &SmemLayout, rows: u64, cols: u64) -> Result<Self, BankError> {
        let layout = &smem.tile.layout;
        let first = smem.tile.offset;
        Ok(Self {
            rows: (0..rows)
                .map(|row| layout.at_modes(&[row, 0]).map(|o| first + o))
                .collect::<Result<_, _>>()?,
            cols: (0..cols).map(|col| layout.at_modes(&[0, col])).collect::<Result<_, _>>()?,
            swizzle: smem.tile.swizzle,
            elem_bytes: smem.elem_bytes,
        })
    }

    fn byte(&self, row: u64, col: u64) -> u64 {
        self.swizzle.apply(self.rows[row as usize] + self.cols[col as usize]) * self.elem_bytes
    }

    fn phase(
        &self,
        access: Access,
        places: impl Iterator<Item = (u64, u64)>,
        width: u64,
    ) -> Result<Phase, BankError> {
        let mut first = None;
        let mut words = Vec::with_capacity(BANKS as usize);
        for (row, col) in places {
            first.get_or_insert((row, col));
            let byte = self.byte(row, col);
            if !byte.is_multiple_of(width) {
                return Err(BankError::Misaligned { access, row, col, byte, width });
            }
            let elements = width / self.elem_bytes;
            if (1..elements).any(|i| self.byte(row, col + i) != byte + i * self.elem_bytes) {
                return Err(BankError::Torn { access, row, col, width });
            }
            words.extend(byte / BANK_BYTES..(byte + width).div_ceil(BANK_BYTES));
        }
        words.sort_unstable();
        words.dedup();
        let mut per_bank = [0u64; BANKS as usize];
        for word in words {
            per_bank[(word % BANKS) as usize] += 1;
        }
        let wavefronts = per_bank.iter().copied().max().unwrap_or(0);
        let busiest_bank = per_bank.iter().position(|&n| n == wavefronts).unwrap_or(0) as u64;
        let banks = per_bank.iter().filter(|&&n| n > 0).count() as u64;
        let (row, col) = first.unwrap_or((0, 0));
        Ok(Phase { row, col, wavefronts, busiest_bank, banks })
    }
}
