//! The formula in f32, nothing else rounded: what the tiled implementation computes for problems with
//! programs.

use fa_core::Problem;

use super::formula::{self, Forward, Gradients, Rows, Tensors};
use super::over;
use crate::codes::KvRef;
use crate::element::Element;
use crate::error::CpuError;
use crate::extras::Arguments;
use crate::view::TensorRef;

fn exact(value: f32) -> f32 {
    value
}

pub(crate) fn forward<T: Element>(
    problem: &Problem,
    arguments: &Arguments<'_>,
    q: &TensorRef<'_, T>,
    kv: [KvRef<'_, T>; 2],
) -> Result<Forward<f32>, CpuError> {
    let pass = |tensors: &Tensors<'_, f32>| formula::forward_f32(problem, tensors);
    over::forward(problem, arguments, [&q.into(), &kv[0], &kv[1]], exact, pass)
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
