//! The formula in f32, nothing else rounded: what the tiled implementation computes gradients by where an LSE
//! leaves no fraction.

use fa_core::Problem;

use super::formula::{self, Gradients, Rows, Tensors};
use super::over;
use crate::element::Element;
use crate::error::CpuError;
use crate::extras::Arguments;
use crate::view::TensorRef;

fn exact(value: f32) -> f32 {
    value
}

pub(crate) fn backward<T: Element>(
    problem: &Problem,
    arguments: &Arguments<'_>,
    inputs: [&TensorRef<'_, T>; 4],
) -> Result<Gradients<f32>, CpuError> {
    let pass =
        |tensors: &Tensors<'_, f32>, dout: Rows<'_, f32>| formula::backward_f32(problem, tensors, dout, 1.0);
    over::backward(problem, arguments, inputs, exact, pass)
}
