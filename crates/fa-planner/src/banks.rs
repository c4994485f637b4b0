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

mod access;
mod pattern;

use fa_core::layout::{Layout, LayoutError};
use fa_core::swizzle::{Swizzle, SwizzleError, SwizzleMode, SwizzledLayout};
use serde::{Deserialize, Serialize};

pub use access::{Access, BankError, MAX_TILE_BYTES, WARP};
use pattern::Pattern;

/// Banks of shared memory.
pub const BANKS: u64 = 32;
/// Bytes that a bank delivers per wavefront.
pub const BANK_BYTES: u64 = 4;

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

/// Counts every kind of access on one tile, for reports. Kinds that do not apply to the tile are listed with
/// the reason.
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
