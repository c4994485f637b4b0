//! The passes for each element type as functions of that type alone. They are compiled once, in this crate
//! and as far optimised as it is, where a generic function would be compiled again in every crate that calls
//! it.

use fa_core::Problem;
use half::{bf16, f16};

use super::inputs::BackwardInputs;
use super::{backward, forward};
use crate::element::Element;
use crate::simd::{Kernels, cast};
use crate::view::{TensorMut, TensorRef};

macro_rules! passes {
    ($($type:ty: $forward:ident, $backward:ident;)+) => {
        /// The forward of checked tensors.
        #[allow(clippy::too_many_arguments)]
        pub(super) fn run_forward<T: Element>(
            kernels: Kernels,
            threads: Option<usize>,
            problem: &Problem,
            q: &TensorRef<'_, T>,
            k: &TensorRef<'_, T>,
            v: &TensorRef<'_, T>,
            out: &mut TensorMut<'_, T>,
            lse: Option<&mut [f32]>,
        ) {
            $(if let (Some(q), Some(k), Some(v), Some(out)) =
                (cast::tensor(q), cast::tensor(k), cast::tensor(v), cast::tensor_mut(out))
            {
                return $forward(kernels, threads, problem, &q, &k, &v, out, lse);
            })+
            unreachable!("every Element is listed");
        }

        /// The backward of checked tensors.
        pub(super) fn run_backward<T: Element>(
            kernels: Kernels,
            threads: Option<usize>,
            problem: &Problem,
            inputs: &BackwardInputs<'_, T>,
            dq: &mut TensorMut<'_, T>,
            dk: &mut TensorMut<'_, T>,
            dv: &mut TensorMut<'_, T>,
        ) {
            $(if let (Some(inputs), Some(dq), Some(dk), Some(dv)) =
                (cast_inputs(inputs), cast::tensor_mut(dq), cast::tensor_mut(dk), cast::tensor_mut(dv))
            {
                return $backward(kernels, threads, problem, &inputs, dq, dk, dv);
            })+
            unreachable!("every Element is listed");
        }

        $(
            #[allow(clippy::too_many_arguments)]
            fn $forward(
                kernels: Kernels,
                threads: Option<usize>,
                problem: &Problem,
                q: &TensorRef<'_, $type>,
                k: &TensorRef<'_, $type>,
                v: &TensorRef<'_, $type>,
                out: &mut TensorMut<'_, $type>,
                lse: Option<&mut [f32]>,
            ) {
                forward::run(kernels, threads, problem, q, k, v, out, lse);
            }

            fn $backward(
                kernels: Kernels,
                threads: Option<usize>,
                problem: &Problem,
                inputs: &BackwardInputs<'_, $type>,
                dq: &mut TensorMut<'_, $type>,
                dk: &mut TensorMut<'_, $type>,
                dv: &mut TensorMut<'_, $type>,
            ) {
                backward::run(kernels, threads, problem, inputs, dq, dk, dv);
            }
        )+
    };
}

passes! {
    f32: forward_f32, backward_f32;
    f16: forward_f16, backward_f16;
    bf16: forward_bf16, backward_bf16;
    f64: forward_f64, backward_f64;
}

fn cast_inputs<'a, T: Element, U: Element>(inputs: &BackwardInputs<'a, T>) -> Option<BackwardInputs<'a, U>> {
    Some(BackwardInputs {
        q: cast::tensor(&inputs.q)?,
        k: cast::tensor(&inputs.k)?,
        v: cast::tensor(&inputs.v)?,
        out: cast::tensor(&inputs.out)?,
        lse: inputs.lse,
        dout: cast::tensor(&inputs.dout)?,
    })
}
