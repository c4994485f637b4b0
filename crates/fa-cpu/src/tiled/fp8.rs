//! The forward of an fp8 Q, K and V: Q is decoded as a whole, K and V tile by tile, and the rest is f32's.
//! Nothing is rounded to 8 bits on the way.

use fa_core::{Problem, TensorLayout};

use super::own;
use crate::batch::{Batch, Span};
use crate::check;
use crate::element::Element;
use crate::error::CpuError;
use crate::extras::Arguments;
use crate::fp8::Decoded;
use crate::kv_ref::KvRef;
use crate::simd::cast;
use crate::view::{TensorMut, TensorRef};

/// The forward of f32 tensors: its options, the problem, what is beside Q, K and V, O and LSE.
type OfNumbers<O> = fn(
    O,
    &Problem,
    &Arguments<'_>,
    [&KvRef<'_, f32>; 3],
    &mut TensorMut<'_, f32>,
    Option<&mut [f32]>,
) -> Result<(), CpuError>;

/// As [`super::forward_extras`], with the bits of Q's codes, by the forward of f32 tensors.
///
/// # Errors
/// As [`super::forward_extras`].
pub(super) fn forward<T: Element, O>(
    (forward_of, options): (OfNumbers<O>, O),
    problem: &Problem,
    arguments: &Arguments<'_>,
    (q, k, v): (&TensorRef<'_, u8>, &KvRef<'_, T>, &KvRef<'_, T>),
    out: &mut TensorMut<'_, T>,
    lse: Option<&mut [f32]>,
) -> Result<(), CpuError> {
    let decoded = Decoded::<f32>::of(problem, arguments, q)?;
    if T::DTYPE != Some(problem.types.out) {
        return Err(CpuError::Dtype { got: T::DTYPE, need: problem.types.out });
    }
    check::check_out(problem, "out", out.shape())?;
    let inputs = [&KvRef::Same(decoded.q()?), &decoded.beside(k)?, &decoded.beside(v)?];
    let (numbers, arguments) = (&decoded.problem, &decoded.arguments);
    if let Some(out) = cast::tensor_mut::<T, f32>(out) {
        return forward_of(options, numbers, arguments, inputs, out, lse);
    }
    let shape = check::out_shape(problem);
    let mut wide = vec![0.0; shape.iter().product()];
    let mut to = TensorMut::packed("out", &mut wide, shape, TensorLayout::Bshd)?;
    forward_of(options, numbers, arguments, inputs, &mut to, lse)?;
    let batch = Batch::new(numbers, arguments)?;
    let rows = |span: Span| (span.batch, span.first..span.first + span.len);
    own::scatter(&wide, out, batch.sequences.iter().map(|sequence| rows(sequence.q)));
    Ok(())
}
