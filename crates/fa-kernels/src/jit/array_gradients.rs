//! The arrays of a program whose gradients a backward computes, and what their kernels are compiled for.

use fa_core::KernelSpec;
use fa_core::program::{Axis, Element};

use crate::Error;

/// An array whose gradient a backward computes, and what indexes its axes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ArrayGradient {
    /// Its place among the program's arrays.
    pub slot: usize,
    /// Its place among the program's gradients.
    pub index: usize,
    pub axes: Vec<Axis>,
    /// The type of its elements.
    pub element: Element,
    /// Indices of each axis that has more than one.
    pub lengths: Vec<usize>,
    /// Whether the main kernel stores it where an element is of one score.
    pub may_be_stored: bool,
}

/// Queries, and keys, of a tile (`kArrayTile`).
pub(crate) const ARRAY_TILE: usize = 64;

/// What [`ArrayGradient`] computes no gradients of.
const OTHER_INDICES: &str =
    "gradients of arrays that are read twice, or at indices other than b, h, hk, q and k";

impl ArrayGradient {
    /// Those of a kernel's program.
    ///
    /// # Errors
    /// [`Error::NoCode`] for an array that is indexed in another way.
    pub(crate) fn all(spec: &KernelSpec) -> Result<Vec<ArrayGradient>, Error> {
        let Some(program) = spec.score.program.filter(|_| spec.kernel.is_backward()) else {
            return Ok(Vec::new());
        };
        let lacks = Error::NoCode { kernel: spec.kernel.name(), what: OTHER_INDICES };
        let mut all: Vec<ArrayGradient> = Vec::new();
        for (index, gradient) in program.gradients().iter().enumerate() {
            let axes = program.axes(gradient.load);
            if !program.is_direct(gradient.array) {
                return Err(lacks);
            }
            all.push(ArrayGradient {
                slot: gradient.array,
                index,
                axes,
                element: program.arrays()[gradient.array].element,
                lengths: Vec::new(),
                may_be_stored: spec.stored_gradient().is_some_and(|own| own.index == index),
            });
        }
        Ok(all)
    }

    /// `ArrayRules` of attn/array_gradient.cuh.
    pub(crate) fn rules(&self) -> String {
        let place = |axis: Axis| {
            self.axes.iter().position(|own| *own == axis).map_or("-1".to_owned(), |at| at.to_string())
        };
        let axes = [Axis::Batch, Axis::Head, Axis::HeadKv, Axis::Query, Axis::Key].map(place);
        let element = match self.element {
            Element::F16 => "F16",
            Element::Bf16 => "Bf16",
            // Only numbers have gradients.
            Element::F32 | Element::I32 | Element::U8 | Element::Bool | Element::Bits => "F32",
        };
        format!("{{{}, ArrayElement::{element}, {}}}", self.slot, axes.join(", "))
    }
}

/// Bytes of shared memory of a CTA: 64 rows of Q, K, dO and V, and a tile of sums.
pub(crate) fn array_gradient_smem(spec: &KernelSpec) -> u32 {
    64 * 2 * 2 * (spec.head_dim + spec.head_dim_v) + 64 * 64 * 4
}
