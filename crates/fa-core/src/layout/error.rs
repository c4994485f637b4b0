//! Errors of layouts, with shapes, strides and tiles in their notation.

/// Deepest nesting of tuples accepted.
pub(super) const MAX_DEPTH: usize = 16;

/// Why a layout, a coordinate or an operation on layouts was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Text that is not `shape:stride`.
    #[error("layout text {text:?} at byte {at}: {what}; expected shape:stride such as (4,8):(8,1)")]
    Parse {
        /// The text as given (its first 80 characters).
        text: String,
        /// Byte position of the fault.
        at: usize,
        /// What is wrong there.
        what: &'static str,
    },
    /// A tuple without entries; a layout of one element is `1:0`.
    #[error("a tuple needs at least one entry; one element is written 1:0")]
    EmptyTuple,
    /// An extent of zero.
    #[error("shape {shape} has an extent of 0; every extent must be at least 1")]
    ZeroExtent {
        /// The refused shape.
        shape: String,
    },
    /// Shape and stride are not nested alike.
    #[error("shape {shape} and stride {stride} are not nested alike; each extent needs exactly one stride")]
    NotCongruent {
        /// The shape.
        shape: String,
        /// The stride.
        stride: String,
    },
    /// Nesting beyond [`super::tuple::MAX_DEPTH`].
    #[error("nested more than {MAX_DEPTH} deep")]
    TooDeep,
    /// A size, an offset or a stride that does not fit 64 bits.
    #[error("{what} does not fit 64 bits")]
    Overflow {
        /// The quantity.
        what: &'static str,
    },
    /// An index or coordinate outside its mode.
    #[error("index {index} is outside the domain 0..{size}")]
    OutOfDomain {
        /// The index.
        index: u64,
        /// Number of indices there are.
        size: u64,
    },
    /// A coordinate or a list of tiles that does not match the modes.
    #[error("{have} entries given for {need} modes")]
    RankMismatch {
        /// Entries given.
        have: usize,
        /// Modes there are.
        need: usize,
    },
    /// Composition: a step that neither divides an extent nor is a multiple of it.
    #[error("a step of {stride} neither divides the extent {extent} it walks nor is a multiple of it")]
    StrideIndivisible {
        /// What is left of the step of the inner layout at this mode.
        stride: u64,
        /// Extent of the mode of the outer layout.
        extent: u64,
    },
    /// Composition: a run that leaves a mode of the outer layout part of the way through.
    #[error(
        "an extent of {extent} is not a multiple of the {steps} steps that cross a mode of the outer layout"
    )]
    ExtentIndivisible {
        /// What is left of the extent of the inner layout.
        extent: u64,
        /// Steps from one end of the mode to the other.
        steps: u64,
    },
    /// Composition: the modes of the inner layout together carry from one mode of the outer layout to the
    /// next.
    #[error(
        "the inner modes add up to {reach} in an outer mode of extent {extent}: they carry into the next mode"
    )]
    Carry {
        /// Largest sum of the inner modes within the outer mode.
        reach: u64,
        /// Extent of the outer mode.
        extent: u64,
    },
    /// Complement: strides that overlap or leave gaps that no layout fills.
    #[error("stride {stride} is not a multiple of the {covered} offsets that the smaller strides cover")]
    NotComplementable {
        /// The stride.
        stride: u64,
        /// Length of the block that the smaller strides fill.
        covered: u64,
    },
    /// Division: the tile does not divide the layout.
    #[error("tile {tile} does not divide a layout of {size} elements into equal parts")]
    NotATiling {
        /// The tile.
        tile: String,
        /// Elements of the layout to be divided.
        size: u64,
    },
}
