//! What a call gives a program of the caller's: arrays and scalars, by address.

use fa_core::program::Interned;

use crate::Error;
use crate::jit::array_gradients::ArrayGradient;
use crate::jit::declare::{ConstPtr, MutF32Ptr};
use crate::jit::program_params::{
    ArrayGradientParams, MAX_ARRAYS, ManyGradientParams, ManyProgramParams, ProgramArray, ProgramParams,
};
use crate::launch::checks::check_address;

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
    /// Where the gradients of arrays go, each packed in f32, written in full; 0 for none. Backward only.
    pub gradients: [u64; MAX_ARRAYS],
}

impl RawProgram {
    pub(crate) fn gradients(&self) -> ArrayGradientParams {
        ArrayGradientParams { to: self.rooms() }
    }

    pub(crate) fn many_gradients(&self) -> ManyGradientParams {
        ManyGradientParams { to: self.rooms() }
    }

    fn rooms<const N: usize>(&self) -> [MutF32Ptr; N] {
        std::array::from_fn(|slot| MutF32Ptr(self.gradients[slot]))
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
        check_address("the gradient of an array", address, 4)?;
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
