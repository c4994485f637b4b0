//! What a call gives a program of the caller's: arrays and scalars, by address.

use fa_core::Problem;
use fa_core::program::{ALIGNED_BYTES, ArrayDecl, Axis, Interned};

use crate::Error;
use crate::jit::array_gradients::ArrayGradient;
use crate::jit::declare::{ConstPtr, MutPtr};
use crate::jit::program_params::{
    ArrayGradientParams, MAX_ARRAYS, ManyGradientParams, ManyProgramParams, ProgramArray, ProgramParams,
    StoredParams,
};
use crate::launch::checks::check_address;

/// What TMA's addresses and strides are multiples of.
const TMA_BYTES: u64 = 16;

/// An array of a program in device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawArray {
    /// Its element at index 0 of every axis, on a multiple of the element's bytes.
    pub address: u64,
    /// Elements from one index of an axis to the next, 0 where all are the same; of bits, words.
    pub strides: [i64; 4],
    /// Indices of each axis, at least 1; axes beyond the rank have 1.
    pub extents: [i32; 4],
}

/// What a call gives a problem's program, in the order of its declarations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawProgram {
    /// As many as the program declares; others are not read.
    pub arrays: [RawArray; MAX_ARRAYS],
    /// The bits of an i32 or f32 each.
    pub scalars: [u32; 8],
    /// Where the gradients of arrays go, each packed, written in full; 0 for none. Backward only.
    pub gradients: [u64; MAX_ARRAYS],
    /// Whether such a gradient is of the array's own type, f16 or bf16; else it is f32.
    pub is_narrow: [bool; MAX_ARRAYS],
    /// Memory of `Backward::room_bytes` bytes, on a multiple of 16, for the scores' gradients, whose sums are
    /// the gradient of an array that sequences or heads share; 0 where that is computed without.
    pub room: u64,
}

/// Where the main kernel stores the scores' gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stored {
    /// As the gradient of the array.
    Own,
    /// In the call's room.
    Room,
}

/// Sequences, query heads, and the most queries and keys of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Scores {
    pub batch: usize,
    pub heads: usize,
    pub queries: usize,
    pub keys: usize,
}

impl Scores {
    pub(crate) fn of(problem: &Problem) -> Scores {
        Scores {
            batch: problem.lengths.sequences(),
            heads: problem.heads_q,
            queries: problem.lengths.max_q(),
            keys: problem.lengths.max_k(),
        }
    }

    /// Elements from one row of a room to the next.
    pub(crate) fn pitch(self) -> usize {
        self.keys.next_multiple_of(TMA_BYTES as usize / 2)
    }

    /// Bytes of a room.
    pub(crate) fn room_bytes(self) -> usize {
        let rows = self.batch.saturating_mul(self.heads).saturating_mul(self.queries);
        rows.saturating_mul(2 * self.pitch())
    }
}

impl RawProgram {
    pub(crate) fn gradients(&self) -> ArrayGradientParams {
        ArrayGradientParams { to: self.rooms() }
    }

    pub(crate) fn many_gradients(&self) -> ManyGradientParams {
        ManyGradientParams { to: self.rooms() }
    }

    fn rooms<const N: usize>(&self) -> [MutPtr; N] {
        std::array::from_fn(|slot| MutPtr(self.gradients[slot]))
    }

    /// `is_stored`: whether the main kernel stores the gradients of `scores`.
    pub(crate) fn stored_params(&self, scores: Scores, is_stored: bool) -> StoredParams {
        StoredParams {
            room: ConstPtr(self.room),
            pitch: scores.pitch() as i32,
            is_stored: is_stored.into(),
            narrow: self.narrow(),
        }
    }

    /// A bit for each gradient of 16 bits.
    fn narrow(&self) -> u32 {
        self.is_narrow.iter().enumerate().map(|(slot, &own)| u32::from(own) << slot).sum()
    }

    /// The axes of a gradient's array, with the indices of each that elements are read at: all of it, or as
    /// many as what indexes it has.
    pub(crate) fn reached(&self, gradient: &ArrayGradient) -> impl Iterator<Item = (Axis, usize)> {
        let own = gradient.axes.iter().zip(self.arrays[gradient.slot].extents).zip(&gradient.lengths);
        own.map(|((&axis, extent), &len)| (axis, if extent > 1 { len.min(extent as usize) } else { 1 }))
    }

    /// Indices that are read of the axes that follow one of these, 1 for none.
    fn reach(&self, gradient: &ArrayGradient, all: &[Axis]) -> usize {
        self.reached(gradient).filter(|(axis, _)| all.contains(axis)).map(|(_, len)| len).product()
    }

    /// Where the main kernel stores the scores' gradients for this one, whose array has an element for each
    /// query and key. As the gradient itself: it is wanted in 16 bits, each of its elements is of one score,
    /// and rows begin on multiples of 16 bytes.
    pub(crate) fn stores(&self, gradient: &ArrayGradient, scores: Scores) -> Option<Stored> {
        let to = self.gradients[gradient.slot];
        let reach = |all: &[Axis]| self.reach(gradient, all);
        let has_pairs = reach(&[Axis::Query]) == scores.queries && reach(&[Axis::Key]) == scores.keys;
        let is_empty = self.reached(gradient).any(|(_, len)| len == 0);
        if !has_pairs || is_empty || !gradient.may_be_stored || to == 0 {
            return None;
        }
        let own = [reach(&[Axis::Batch]), reach(&[Axis::Head, Axis::HeadKv])];
        // The keys of an array whose gradient may be stored lie side by side.
        let pitch = self.arrays[gradient.slot].extents[gradient.axes.len() - 1] as u64;
        let is_aligned = to.is_multiple_of(TMA_BYTES) && (2 * pitch).is_multiple_of(TMA_BYTES);
        if own == [scores.batch, scores.heads] && is_aligned && self.is_narrow[gradient.slot] {
            Some(Stored::Own)
        } else {
            (self.room != 0).then_some(Stored::Room)
        }
    }

    /// Bytes of the gradient of the array at a slot.
    pub(crate) fn gradient_bytes(&self, slot: usize) -> usize {
        let elements = self.arrays[slot].extents.iter().map(|&extent| extent.max(0) as usize);
        elements.product::<usize>() * if self.is_narrow[slot] { 2 } else { 4 }
    }

    /// Whether a room serves this gradient.
    pub(crate) fn needs_room(&self, gradient: &ArrayGradient, scores: Scores) -> bool {
        RawProgram { room: TMA_BYTES, ..*self }.stores(gradient, scores) == Some(Stored::Room)
    }

    /// The problem of a call with these arrays: where the rows of the one whose tiles kernels copy are
    /// aligned, that of the program in which they are.
    pub fn with_aligned_rows(&self, mut problem: Problem) -> Problem {
        if let Some(program) = problem.score.program
            && let Some((slot, aligned)) = program.with_aligned_rows()
            && self.rows_are_aligned(slot, &program.arrays()[slot], problem.lengths.max_k())
        {
            problem.score.program = Some(aligned);
        }
        problem
    }

    /// Whether the rows of an array are as [`ArrayDecl::aligned`] says, in a call of so many keys.
    fn rows_are_aligned(&self, slot: usize, decl: &ArrayDecl, keys: usize) -> bool {
        let RawArray { address, strides, extents } = self.arrays[slot];
        let bytes = decl.element.bytes() as i64;
        let last = decl.rank - 1;
        let mut others = strides.into_iter().zip(extents).take(last);
        address.is_multiple_of(ALIGNED_BYTES)
            && strides[last] == 1
            && extents[last] as usize >= keys
            && others.all(|(stride, extent)| extent <= 1 || stride * bytes % ALIGNED_BYTES as i64 == 0)
    }

    /// Their parameters, with the offset of the mask that the program joins.
    pub(crate) fn params(&self, offset: i32) -> ProgramParams {
        ProgramParams { arrays: self.placed(), scalars: self.scalars, offset }
    }

    /// Those of a kernel whose program reads more arrays than most.
    pub(crate) fn many_params(&self, offset: i32) -> ManyProgramParams {
        ManyProgramParams { arrays: self.placed(), scalars: self.scalars, offset }
    }

    fn placed<const N: usize>(&self) -> [ProgramArray; N] {
        std::array::from_fn(|slot| {
            let RawArray { address, strides, extents } = self.arrays[slot];
            ProgramArray { data: ConstPtr(address), strides, extents }
        })
    }
}

/// Checks that a call brings what its problem's program reads.
///
/// # Errors
/// [`Error::MissingExtra`], [`Error::UnusedExtra`], [`Error::Address`], [`Error::ProgramArray`] and
/// [`Error::Unaligned`].
pub(crate) fn check_program(
    program: Option<Interned>,
    given: Option<&RawProgram>,
    gradients: &[ArrayGradient],
    keys: usize,
) -> Result<(), Error> {
    let Some(program) = program else {
        return given.map_or(Ok(()), |_| Err(Error::UnusedExtra { name: "program" }));
    };
    let inputs = program.arrays().len() + program.scalars().len();
    let Some(given) = given else {
        return if inputs == 0 { Ok(()) } else { Err(Error::MissingExtra { name: "program", need: inputs }) };
    };
    for (slot, (decl, array)) in program.arrays().iter().zip(&given.arrays).enumerate() {
        check_address("program", array.address, decl.element.bytes() as u64)?;
        if let Some(axis) = array.extents[..decl.rank].iter().position(|&extent| extent < 1) {
            return Err(Error::ProgramArray { name: decl.name.clone(), axis });
        }
        if decl.aligned && !given.rows_are_aligned(slot, decl, keys) {
            return Err(Error::Unaligned { name: decl.name.clone() });
        }
    }
    for (slot, &address) in given.gradients.iter().enumerate().filter(|(_, address)| **address != 0) {
        let Some(decl) = program.arrays().get(slot).filter(|decl| decl.gradient) else {
            return Err(Error::UnusedExtra { name: "the gradient of an array" });
        };
        let is_narrow = given.is_narrow[slot];
        if is_narrow && decl.element.narrow().is_none() {
            return Err(Error::UnusedExtra { name: "16 bits for the gradient of an array of others" });
        }
        check_address("the gradient of an array", address, if is_narrow { 2 } else { 4 })?;
        let lengths = gradients.iter().filter(|own| own.slot == slot).flat_map(|own| &own.lengths);
        for (axis, &len) in lengths.enumerate() {
            let extent = given.arrays[slot].extents[axis];
            if extent != 1 && (extent as usize) < len {
                let name = decl.name.clone();
                return Err(Error::GradientExtent { name, axis, extent, len });
            }
        }
    }
    Ok(())
}
