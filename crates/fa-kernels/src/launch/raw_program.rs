//! What a call gives a program of the caller's: arrays and scalars, by address.

use fa_core::program::{Axis, Interned};

use crate::Error;
use crate::jit::array_gradients::ArrayGradient;
use crate::jit::declare::{ConstPtr, MutPtr};
use crate::jit::program_params::{
    ArrayGradientParams, MAX_ARRAYS, ManyGradientParams, ManyProgramParams, ProgramArray, ProgramParams,
};
use crate::launch::checks::check_address;
use crate::launch::tma::{MapShape, TensorMap};

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
}

impl RawProgram {
    /// `is_stored`: whether the main kernel stores one of them.
    pub(crate) fn gradients(&self, is_stored: bool) -> ArrayGradientParams {
        ArrayGradientParams { to: self.rooms(), narrow: self.narrow(), stored: is_stored.into() }
    }

    pub(crate) fn many_gradients(&self, is_stored: bool) -> ManyGradientParams {
        ManyGradientParams { to: self.rooms(), narrow: self.narrow(), stored: is_stored.into() }
    }

    fn rooms<const N: usize>(&self) -> [MutPtr; N] {
        std::array::from_fn(|slot| MutPtr(self.gradients[slot]))
    }

    fn narrow(&self) -> u32 {
        self.is_narrow.iter().enumerate().map(|(slot, &own)| u32::from(own) << slot).sum()
    }

    /// Whether the main kernel stores the gradient: it is wanted in 16 bits, each of its elements is of one
    /// score, and its rows begin on multiples of 16 bytes, as TMA stores them.
    pub(crate) fn stores(&self, gradient: &ArrayGradient, problem: [usize; 4]) -> bool {
        let (slot, [batch, heads, queries, keys]) = (gradient.slot, problem);
        let extent = |all: &[Axis]| {
            let own = gradient.axes.iter().zip(self.arrays[slot].extents);
            own.filter(|(axis, _)| all.contains(axis)).map(|(_, extent)| extent as usize).product::<usize>()
        };
        gradient.may_be_stored
            && self.is_narrow[slot]
            && self.gradients[slot] != 0
            && self.gradients[slot].is_multiple_of(TMA_BYTES)
            && (2 * keys as u64).is_multiple_of(TMA_BYTES)
            && extent(&[Axis::Batch]) == batch
            && extent(&[Axis::Head, Axis::HeadKv]) == heads
            && extent(&[Axis::Query]) == queries
            && extent(&[Axis::Key]) == keys
    }

    /// The map by which it does: `{keys, queries, heads, sequences}` of a packed array whose axes have any
    /// order but for the keys, and a box of one panel of a tile.
    pub(crate) fn map(&self, gradient: &ArrayGradient, panel: u32, rows: u32) -> TensorMap {
        let of = |all: &[Axis]| {
            let axis = gradient.axes.iter().position(|axis| all.contains(axis));
            let extents = &self.arrays[gradient.slot].extents[..gradient.axes.len()];
            axis.map_or((1, 0), |axis| {
                (extents[axis] as u64, extents[axis + 1..].iter().map(|&own| own as u64).product())
            })
        };
        let axes = [&[Axis::Key][..], &[Axis::Query], &[Axis::Head, Axis::HeadKv], &[Axis::Batch]].map(of);
        let [mut dims, mut strides] = [[1; 5], [0; 5]];
        for (at, (len, stride)) in axes.into_iter().enumerate() {
            (dims[at], strides[at]) = (len, stride);
        }
        let shape = MapShape { rank: 4, dims, strides, tile: [panel, rows, 1, 1, 1] };
        TensorMap { tensor: "the gradient of an array", address: self.gradients[gradient.slot], shape }
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
/// [`Error::MissingExtra`], [`Error::UnusedExtra`], [`Error::Address`] and [`Error::ProgramArray`].
pub(crate) fn check_program(
    program: Option<Interned>,
    given: Option<&RawProgram>,
    gradients: &[ArrayGradient],
) -> Result<(), Error> {
    let Some(program) = program else {
        return given.map_or(Ok(()), |_| Err(Error::UnusedExtra { name: "program" }));
    };
    let inputs = program.arrays().len() + program.scalars().len();
    let Some(given) = given else {
        return if inputs == 0 { Ok(()) } else { Err(Error::MissingExtra { name: "program", need: inputs }) };
    };
    for (decl, array) in program.arrays().iter().zip(&given.arrays) {
        check_address("program", array.address, decl.element.bytes() as u64)?;
        if let Some(axis) = array.extents[..decl.rank].iter().position(|&extent| extent < 1) {
            return Err(Error::ProgramArray { name: decl.name.clone(), axis });
        }
    }
    for (slot, &address) in given.gradients.iter().enumerate().filter(|(_, address)| **address != 0) {
        let Some(gradient) = gradients.iter().find(|gradient| gradient.slot == slot) else {
            return Err(Error::UnusedExtra { name: "the gradient of an array" });
        };
        let is_narrow = given.is_narrow[slot];
        if is_narrow && gradient.element.narrow().is_none() {
            return Err(Error::UnusedExtra { name: "16 bits for the gradient of an array of others" });
        }
        check_address("the gradient of an array", address, if is_narrow { 2 } else { 4 })?;
        for (axis, &len) in gradient.lengths.iter().enumerate() {
            let extent = given.arrays[slot].extents[axis];
            if extent != 1 && extent as usize != len {
                let name = program.arrays()[slot].name.clone();
                return Err(Error::GradientExtent { name, axis, extent, len });
            }
        }
    }
    Ok(())
}
