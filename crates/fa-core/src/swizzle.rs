//! Swizzles: permutations of shared-memory offsets by exclusive or.
//!
//! `Swizzle<B, M, S>` takes the `B` bits from bit `M + S` up and xors them into the `B` bits from bit `M` up.
//! With rows of `2^(M+B)` offsets and chunks of `2^M`, `S = B` xors the row number into the chunk number: 8
//! rows of one column then lie in 8 different chunks, which is what keeps `ldmatrix` and `wgmma` free of bank
//! conflicts.
//!
//! The unit of an offset is up to the user, bytes or elements; [`Swizzle::scaled`] changes between them. The
//! TMA and `wgmma` modes ([`SwizzleMode`]) are defined on byte addresses: PTX ISA, "Swizzling modes" of
//! tensor copies.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::layout::{Layout, LayoutError};

/// Why a swizzle was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SwizzleError {
    /// Source and target bits overlap, so that applying it twice would not undo it.
    #[error(
        "{swizzle}: |shift| must be at least bits ({}), or it would not be its own inverse",
        swizzle.bits
    )]
    Overlap {
        /// The refused swizzle.
        swizzle: Swizzle,
    },
    /// Bits beyond the 64 of an offset.
    #[error("{swizzle} reaches past bit 63: base + bits + |shift| must be at most 63")]
    TooWide {
        /// The refused swizzle.
        swizzle: Swizzle,
    },
    /// A change of units that the swizzle does not survive.
    #[error(
        "{swizzle} cannot be given in units of {unit}: the unit must be a power of two of at most 2^base"
    )]
    Unit {
        /// The swizzle.
        swizzle: Swizzle,
        /// The new unit in old units.
        unit: u64,
    },
    /// An offset that does not fit 64 bits.
    #[error("offset {offset} plus a layout that reaches {cosize} does not fit 64 bits")]
    Overflow {
        /// Offset in front of the layout.
        offset: u64,
        /// Cosize of the layout.
        cosize: u64,
    },
    /// A row that no swizzle mode can take.
    #[error(
        "a row of {row_bytes} bytes is not a positive multiple of 16; pad the head dim to a multiple of 16 \
         bytes"
    )]
    Row {
        /// Bytes per row.
        row_bytes: u64,
    },
}

/// `Swizzle<B, M, S>`: xor of `bits` bits at `base + shift` into those at `base`; for a negative shift, of
/// those at `base` into those at `base - shift`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Swizzle {
    /// B: number of bits; 0 changes nothing.
    pub bits: u32,
    /// M: the lower end of target (or, for a negative shift, source); offsets move in units of `2^base`.
    pub base: u32,
    /// S: distance from target to source.
    pub shift: i32,
}

impl Swizzle {
    /// Changes nothing.
    pub const NONE: Self = Self { bits: 0, base: 0, shift: 0 };

    /// Checks that the swizzle is an involution and fits 64-bit offsets.
    ///
    /// # Errors
    /// `Overlap` or `TooWide`.
    pub fn check(&self) -> Result<(), SwizzleError> {
        if self.shift.unsigned_abs() < self.bits {
            return Err(SwizzleError::Overlap { swizzle: *self });
        }
        if self.top() > 63 {
            return Err(SwizzleError::TooWide { swizzle: *self });
        }
        Ok(())
    }

    /// The swizzled offset. Never panics; the laws hold for a swizzle that passes [`Swizzle::check`]: it is
    /// its own inverse, keeps every aligned block of [`Swizzle::period`] offsets, and keeps aligned runs of
    /// [`Swizzle::vector`] offsets together and in order.
    pub fn apply(&self, offset: u64) -> u64 {
        let ones = 1u64.checked_shl(self.bits).map_or(u64::MAX, |bit| bit - 1);
        let distance = self.shift.unsigned_abs();
        let low = ones.checked_shl(self.base).unwrap_or(0);
        let high = low.checked_shl(distance).unwrap_or(0);
        let change = if self.shift >= 0 {
            (offset & high).checked_shr(distance).unwrap_or(0)
        } else {
            (offset & low).checked_shl(distance).unwrap_or(0)
        };
        offset ^ change
    }

    /// Length of the aligned blocks that are permuted within themselves, and the alignment that a buffer
    /// needs so that swizzling addresses and swizzling offsets into it agree. `None` if it does not fit 64
    /// bits (refused by [`Swizzle::check`]).
    pub fn period(&self) -> Option<u64> {
        if self.bits == 0 {
            Some(1)
        } else {
            u32::try_from(self.top()).ok().and_then(|t| 1u64.checked_shl(t))
        }
    }

    /// Length of the longest aligned runs of offsets that stay contiguous: `2^base`. `None` if it does not
    /// fit 64 bits or if nothing moves.
    pub fn vector(&self) -> Option<u64> {
        if self.bits == 0 { None } else { 1u64.checked_shl(self.base) }
    }

    /// The same permutation in units `unit` times as large: a swizzle of bytes with `unit = 2` is one of
    /// 16-bit elements, so that `<3,4,3>` becomes `<3,3,3>`.
    ///
    /// # Errors
    /// `Unit` unless `unit` is a power of two of at most `2^base`.
    pub fn scaled(&self, unit: u64) -> Result<Self, SwizzleError> {
        let log = unit.trailing_zeros();
        if self.bits == 0 {
            return Ok(*self);
        }
        if !unit.is_power_of_two() || log > self.base {
            return Err(SwizzleError::Unit { swizzle: *self, unit });
        }
        Ok(Self { base: self.base - log, ..*self })
    }

    /// One past the highest bit read or changed.
    fn top(&self) -> u64 {
        u64::from(self.bits) + u64::from(self.base) + u64::from(self.shift.unsigned_abs())
    }
}

impl fmt::Display for Swizzle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Swizzle<{},{},{}>", self.bits, self.base, self.shift)
    }
}

/// The shared-memory swizzles of TMA and of `wgmma` descriptors, named by the row of bytes that they permute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum SwizzleMode {
    /// Rows as they are; `wgmma` then needs 8x16-byte core matrices.
    None,
    /// 16-byte chunks within rows of 32 bytes.
    B32,
    /// 16-byte chunks within rows of 64 bytes.
    B64,
    /// 16-byte chunks within rows of 128 bytes, one row of banks.
    B128,
}

impl SwizzleMode {
    /// Every mode, the widest first.
    pub const ALL: [Self; 4] = [Self::B128, Self::B64, Self::B32, Self::None];

    /// Bytes of a row that the mode permutes; 16, the smallest unit of TMA, without swizzle.
    pub fn row_bytes(self) -> u64 {
        match self {
            Self::None => 16,
            Self::B32 => 32,
            Self::B64 => 64,
            Self::B128 => 128,
        }
    }

    /// The permutation of byte addresses: `<3,4,3>`, `<2,4,3>`, `<1,4,3>` or none.
    pub fn on_bytes(self) -> Swizzle {
        let bits = match self {
            Self::None => return Swizzle::NONE,
            Self::B32 => 1,
            Self::B64 => 2,
            Self::B128 => 3,
        };
        Swizzle { bits, base: 4, shift: 3 }
    }

    /// Bytes after which the pattern repeats, and the alignment in bytes that a buffer needs: 8 rows (1024,
    /// 512 or 256), 16 without swizzle.
    pub fn alignment(self) -> u64 {
        match self {
            Self::None => 16,
            Self::B32 | Self::B64 | Self::B128 => 8 * self.row_bytes(),
        }
    }

    /// The widest mode whose row divides rows of `row_bytes` bytes. A longer row is stored as panels of
    /// [`SwizzleMode::row_bytes`] each.
    ///
    /// # Errors
    /// `Row` unless `row_bytes` is a positive multiple of 16.
    pub fn widest(row_bytes: u64) -> Result<Self, SwizzleError> {
        if row_bytes == 0 {
            return Err(SwizzleError::Row { row_bytes });
        }
        Self::ALL
            .into_iter()
            .find(|mode| row_bytes.is_multiple_of(mode.row_bytes()))
            .ok_or(SwizzleError::Row { row_bytes })
    }
}

/// A layout seen through a swizzle: `i -> swizzle(offset + layout(i))`. Not a layout itself, as a rule: the
/// xor is not linear in the coordinates.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwizzledLayout {
    /// Applied last, to whole offsets.
    pub swizzle: Swizzle,
    /// Added to every offset of the layout, before the swizzle.
    pub offset: u64,
    /// Applied first.
    pub layout: Layout,
}

impl SwizzledLayout {
    /// Checks the swizzle, and that offsets stay within 63 bits.
    ///
    /// # Errors
    /// [`SwizzleError`].
    pub fn check(&self) -> Result<(), SwizzleError> {
        self.swizzle.check()?;
        let overflow = SwizzleError::Overflow { offset: self.offset, cosize: self.layout.cosize() };
        self.offset.checked_add(self.layout.cosize()).map(|_| ()).ok_or(overflow)
    }

    /// Offset of a linear index.
    ///
    /// # Errors
    /// As [`Layout::at`]; `Overflow` if the offset does not fit (refused by [`SwizzledLayout::check`]).
    pub fn at(&self, index: u64) -> Result<u64, LayoutError> {
        self.finish(self.layout.at(index)?)
    }

    /// Offset of one index per top-level mode.
    ///
    /// # Errors
    /// As [`Layout::at_modes`]; `Overflow` as [`SwizzledLayout::at`].
    pub fn at_modes(&self, indices: &[u64]) -> Result<u64, LayoutError> {
        self.finish(self.layout.at_modes(indices)?)
    }

    /// Offsets to reserve: the end of the last block of the swizzle's period that the layout touches (exact
    /// without a swizzle). `None` if it does not fit 64 bits.
    pub fn span(&self) -> Option<u64> {
        let end = self.offset.checked_add(self.layout.cosize())?;
        end.checked_next_multiple_of(self.swizzle.period()?)
    }

    fn finish(&self, offset: u64) -> Result<u64, LayoutError> {
        let plain = self.offset.checked_add(offset).ok_or(LayoutError::Overflow { what: "an offset" })?;
        Ok(self.swizzle.apply(plain))
    }
}
