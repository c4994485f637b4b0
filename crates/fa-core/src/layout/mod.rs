//! The shape:stride layout algebra.
//!
//! A [`Layout`] is a function from a small index space to offsets: a shape says how an index splits into
//! coordinates (first mode fastest), a stride says what each coordinate is worth, and the offset is their
//! inner product. `(8,64):(64,1)` is eight rows of 64 elements stored row after row. Modes nest: a
//! mode that is itself a layout, as in `((2,4),64):((64,512),1)`, is still one mode to its user.
//!
//! The notation and the operations are those of CuTe ("CuTe Layout Algebra", CUTLASS documentation). Where
//! CuTe leaves a precondition to its user, this module checks it: an operation either returns a layout for
//! which its law holds at every index, or says what does not divide. In particular a layout is defined on its
//! own `0..size()` only; the last mode does not extend past its extent.
//!
//! * [`mod@tuple`]: nested tuples of numbers and their notation
//! * [`algebra`]: coalesce, composition, complement, right inverse
//! * [`tiling`]: division into tiles, products that repeat a tile

pub mod algebra;
mod error;
pub mod tiling;
pub mod tuple;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub use self::error::LayoutError;
pub use self::tuple::IntTuple;

/// A function from `0..size()` to offsets, by shape and stride. Always well formed: shape and stride are
/// nested alike, no extent is 0, and neither size nor cosize overflows, so evaluating it within its domain
/// cannot fail. In text and in serde formats it is its notation, `"(4,8):(8,1)"`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Layout {
    shape: IntTuple,
    stride: IntTuple,
    size: u64,
    cosize: u64,
}

/// One innermost mode: `extent` offsets, `stride` apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    /// Number of indices, at least 1.
    pub extent: u64,
    /// Offset between neighbours.
    pub stride: u64,
}

impl Layout {
    /// A layout from a shape and a stride nested alike.
    ///
    /// # Errors
    /// [`LayoutError::NotCongruent`], `ZeroExtent`, `EmptyTuple`, `TooDeep`, or `Overflow` of size or cosize.
    pub fn new(shape: IntTuple, stride: IntTuple) -> Result<Self, LayoutError> {
        shape.check()?;
        stride.check()?;
        let mut extents = Vec::new();
        let mut strides = Vec::new();
        shape.flatten_into(&mut extents);
        stride.flatten_into(&mut strides);
        if !shape.congruent(&stride) {
            return Err(LayoutError::NotCongruent { shape: shape.to_string(), stride: stride.to_string() });
        }
        if extents.contains(&0) {
            return Err(LayoutError::ZeroExtent { shape: shape.to_string() });
        }
        let (mut size, mut last) = (1u64, 0u64);
        for (&extent, &stride) in extents.iter().zip(&strides) {
            size =
                size.checked_mul(extent).ok_or(LayoutError::Overflow { what: "the size of the layout" })?;
            last = (extent - 1)
                .checked_mul(stride)
                .and_then(|reach| last.checked_add(reach))
                .ok_or(LayoutError::Overflow { what: "the largest offset of the layout" })?;
        }
        let cosize = last.checked_add(1).ok_or(LayoutError::Overflow { what: "the cosize of the layout" })?;
        Ok(Self { shape, stride, size, cosize })
    }

    /// A flat layout from `(extent, stride)` pairs, the first varying fastest; one pair gives a bare mode,
    /// none gives `1:0`.
    ///
    /// # Errors
    /// As [`Layout::new`].
    pub fn from_modes(modes: &[(u64, u64)]) -> Result<Self, LayoutError> {
        match modes {
            [] => Self::new(IntTuple::Int(1), IntTuple::Int(0)),
            &[(extent, stride)] => Self::new(IntTuple::Int(extent), IntTuple::Int(stride)),
            _ => Self::new(
                modes.iter().map(|m| IntTuple::Int(m.0)).collect(),
                modes.iter().map(|m| IntTuple::Int(m.1)).collect(),
            ),
        }
    }

    /// A layout whose top-level modes are the given layouts.
    ///
    /// # Errors
    /// As [`Layout::new`]; `EmptyTuple` for no layouts.
    pub fn concat(modes: &[Layout]) -> Result<Self, LayoutError> {
        Self::new(
            modes.iter().map(|m| m.shape.clone()).collect(),
            modes.iter().map(|m| m.stride.clone()).collect(),
        )
    }

    /// Compact layout of the given extents with the last one contiguous (C order): `[rows, cols]` is stored
    /// row after row.
    ///
    /// # Errors
    /// `ZeroExtent` or `Overflow`.
    pub fn row_major(extents: &[u64]) -> Result<Self, LayoutError> {
        let mut strides = compact_strides(extents.iter().rev())?;
        strides.reverse();
        let modes: Vec<_> = extents.iter().copied().zip(strides).collect();
        Self::from_modes(&modes)
    }

    /// Compact layout of the given extents with the first one contiguous (Fortran order).
    ///
    /// # Errors
    /// `ZeroExtent` or `Overflow`.
    pub fn col_major(extents: &[u64]) -> Result<Self, LayoutError> {
        let strides = compact_strides(extents.iter())?;
        let modes: Vec<_> = extents.iter().copied().zip(strides).collect();
        Self::from_modes(&modes)
    }

    /// The shape.
    pub fn shape(&self) -> &IntTuple {
        &self.shape
    }

    /// The stride, nested like the shape.
    pub fn stride(&self) -> &IntTuple {
        &self.stride
    }

    /// Number of indices: the product of all extents.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// One more than the largest offset.
    pub fn cosize(&self) -> u64 {
        self.cosize
    }

    /// Number of top-level modes; 1 for a bare mode.
    pub fn rank(&self) -> usize {
        self.shape.rank()
    }

    /// Levels of nesting; 0 for a bare mode.
    pub fn depth(&self) -> usize {
        self.shape.depth()
    }

    /// The top-level modes as layouts; a bare mode is its only one.
    pub fn modes(&self) -> Vec<Layout> {
        match (&self.shape, &self.stride) {
            (IntTuple::Tuple(shapes), IntTuple::Tuple(strides)) => {
                shapes.iter().zip(strides).map(|(shape, stride)| Self::part(shape, stride)).collect()
            }
            (IntTuple::Int(_), _) | (_, IntTuple::Int(_)) => vec![self.clone()],
        }
    }

    /// The innermost modes from left to right, the first varying fastest.
    pub fn flat(&self) -> Vec<Mode> {
        let mut modes = Vec::new();
        visit(&self.shape, &self.stride, &mut |mode| modes.push(mode));
        modes
    }

    /// Offset of a linear index (first mode fastest).
    ///
    /// # Errors
    /// `OutOfDomain` unless `index < size()`.
    pub fn at(&self, index: u64) -> Result<u64, LayoutError> {
        if index >= self.size {
            return Err(LayoutError::OutOfDomain { index, size: self.size });
        }
        Ok(linear(&self.shape, &self.stride, index))
    }

    /// Offset of one linear index per top-level mode: `at_modes(&[row, col])`.
    ///
    /// # Errors
    /// `RankMismatch`, or `OutOfDomain` for an index past its mode.
    pub fn at_modes(&self, indices: &[u64]) -> Result<u64, LayoutError> {
        if indices.len() != self.rank() {
            return Err(LayoutError::RankMismatch { have: indices.len(), need: self.rank() });
        }
        match (&self.shape, &self.stride) {
            (IntTuple::Tuple(shapes), IntTuple::Tuple(strides)) => {
                let mut offset = 0;
                for ((shape, stride), &index) in shapes.iter().zip(strides).zip(indices) {
                    offset += linear_checked(shape, stride, index)?;
                }
                Ok(offset)
            }
            (IntTuple::Int(_), _) | (_, IntTuple::Int(_)) => self.at(indices[0]),
        }
    }

    /// Offset of a coordinate. The coordinate may be nested like the shape or stop earlier: a number in the
    /// place of a nested mode is a linear index into it.
    ///
    /// # Errors
    /// `RankMismatch` where the coordinate's tuples do not match the modes, `OutOfDomain` past a mode.
    pub fn at_coord(&self, coord: &IntTuple) -> Result<u64, LayoutError> {
        by_coord(&self.shape, &self.stride, coord)
    }

    /// The coordinate, nested like the shape, of a linear index.
    ///
    /// # Errors
    /// `OutOfDomain` unless `index < size()`.
    pub fn coord_of(&self, index: u64) -> Result<IntTuple, LayoutError> {
        fn split(shape: &IntTuple, rest: &mut u64) -> IntTuple {
            match shape {
                IntTuple::Int(extent) => {
                    let coord = *rest % extent;
                    *rest /= extent;
                    IntTuple::Int(coord)
                }
                IntTuple::Tuple(shapes) => shapes.iter().map(|s| split(s, rest)).collect(),
            }
        }
        if index >= self.size {
            return Err(LayoutError::OutOfDomain { index, size: self.size });
        }
        let mut rest = index;
        Ok(split(&self.shape, &mut rest))
    }

    /// A part of a well-formed layout is well formed: its size and cosize are no larger than the whole's.
    fn part(shape: &IntTuple, stride: &IntTuple) -> Self {
        let (mut size, mut cosize) = (1, 1);
        visit(shape, stride, &mut |mode| {
            size *= mode.extent;
            cosize += (mode.extent - 1) * mode.stride;
        });
        Self { shape: shape.clone(), stride: stride.clone(), size, cosize }
    }
}

/// Strides of a compact layout whose extents are given fastest first.
fn compact_strides<'a>(extents: impl Iterator<Item = &'a u64>) -> Result<Vec<u64>, LayoutError> {
    let mut next = 1u64;
    let mut strides = Vec::new();
    for &extent in extents {
        strides.push(next);
        next = next.checked_mul(extent).ok_or(LayoutError::Overflow { what: "the size of the layout" })?;
    }
    Ok(strides)
}

/// Calls `each` for every innermost mode, left to right.
fn visit(shape: &IntTuple, stride: &IntTuple, each: &mut impl FnMut(Mode)) {
    match (shape, stride) {
        (IntTuple::Tuple(shapes), IntTuple::Tuple(strides)) => {
            for (shape, stride) in shapes.iter().zip(strides) {
                visit(shape, stride, each);
            }
        }
        (IntTuple::Int(extent), IntTuple::Int(stride)) => each(Mode { extent: *extent, stride: *stride }),
        // `Layout::new` admits congruent tuples only.
        (IntTuple::Int(_), IntTuple::Tuple(_)) | (IntTuple::Tuple(_), IntTuple::Int(_)) => {}
    }
}

/// Offset of an index known to be inside.
fn linear(shape: &IntTuple, stride: &IntTuple, index: u64) -> u64 {
    let (mut rest, mut offset) = (index, 0);
    visit(shape, stride, &mut |mode| {
        offset += (rest % mode.extent) * mode.stride;
        rest /= mode.extent;
    });
    offset
}

fn linear_checked(shape: &IntTuple, stride: &IntTuple, index: u64) -> Result<u64, LayoutError> {
    let size = shape.product();
    if index >= size {
        return Err(LayoutError::OutOfDomain { index, size });
    }
    Ok(linear(shape, stride, index))
}

fn by_coord(shape: &IntTuple, stride: &IntTuple, coord: &IntTuple) -> Result<u64, LayoutError> {
    match (shape, stride, coord) {
        (_, _, IntTuple::Int(index)) => linear_checked(shape, stride, *index),
        (IntTuple::Tuple(shapes), IntTuple::Tuple(strides), IntTuple::Tuple(coords)) => {
            if coords.len() != shapes.len() {
                return Err(LayoutError::RankMismatch { have: coords.len(), need: shapes.len() });
            }
            let mut offset = 0;
            for ((shape, stride), coord) in shapes.iter().zip(strides).zip(coords) {
                offset += by_coord(shape, stride, coord)?;
            }
            Ok(offset)
        }
        (_, _, IntTuple::Tuple(coords)) => {
            Err(LayoutError::RankMismatch { have: coords.len(), need: shape.rank() })
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.shape, self.stride)
    }
}

impl FromStr for Layout {
    type Err = LayoutError;

    fn from_str(text: &str) -> Result<Self, LayoutError> {
        let (shape, stride) = tuple::parse_pair(text)?;
        Self::new(shape, stride)
    }
}

impl TryFrom<String> for Layout {
    type Error = LayoutError;

    fn try_from(text: String) -> Result<Self, LayoutError> {
        text.parse()
    }
}

impl From<Layout> for String {
    fn from(layout: Layout) -> Self {
        layout.to_string()
    }
}
