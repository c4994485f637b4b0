//! The passes for each element type as functions of that type alone; f64 is the oracle's. They are compiled
//! once, in this crate and as far optimised as it is, where a generic function would be compiled again in
//! every crate that calls it.

use half::{bf16, f16};

use super::inputs::{Backward, BackwardInputs, Gradients};
use super::work::{Forward, Unit, units};
use super::{backward, backward16, decode, forward, forward16};
use crate::element::Element;
use crate::simd::cast;
use crate::simd::row_products::Factor;
use crate::view::TensorMut;

macro_rules! passes {
    ($($type:ty: $forward:ident, $backward:ident;)+) => {
        /// The forward of checked tensors.
        pub(super) fn run_forward<T: Element>(
            call: &Forward<'_, T>,
            out: &mut TensorMut<'_, T>,
            lse: Option<&mut [f32]>,
        ) {
            $(if let (Some(call), Some(out)) = (cast_forward(call), cast::tensor_mut(out)) {
                return $forward(&call, out, lse);
            })+
            unreachable!("every Element that is let in is listed");
        }

        /// The backward of checked tensors.
        pub(super) fn run_backward<T: Element>(call: &Backward<'_, T>, to: &mut Gradients<'_, T>) {
            $(if let (Some(call), Some(mut to)) = (cast_backward(call), cast_gradients(to)) {
                return $backward(&call, &mut to);
            })+
            unreachable!("every Element that is let in is listed");
        }

        $(
            fn $forward(call: &Forward<'_, $type>, out: &mut TensorMut<'_, $type>, lse: Option<&mut [f32]>) {
                forward_of(call, out, lse);
            }

            fn $backward(call: &Backward<'_, $type>, to: &mut Gradients<'_, $type>) {
                backward_of(call, to);
            }
        )+
    };
}

passes! {
    f32: forward_f32, backward_f32;
    f16: forward_f16, backward_f16;
    bf16: forward_bf16, backward_bf16;
}

/// Sequences of few queries one way, the others another.
fn forward_of<T: Element + Factor>(
    call: &Forward<'_, T>,
    out: &mut TensorMut<'_, T>,
    mut lse: Option<&mut [f32]>,
) {
    let decodes = decode::applies(call);
    let few = |unit: &Unit| decodes && decode::suits(call, &call.batch.sequences[unit.sequence]);
    let (few, mut many): (Vec<_>, Vec<_>) = units(call.problem, call.batch).into_iter().partition(few);
    decode::run(call, &few, out, lse.as_deref_mut());
    if forward16::applies(call.kernels, call.problem)
        && let (Some(call), Some(out)) = (cast_forward(call), cast::tensor_mut(out))
    {
        let queries = |unit: &Unit| call.batch.sequences[unit.sequence].q.len;
        let (wide, mut narrow): (Vec<_>, Vec<_>) =
            many.into_iter().partition(|unit| forward16::suits(call.kernels, queries(unit)));
        narrow.extend(forward16::run(&call, &wide, out, lse.as_deref_mut()));
        many = narrow;
    }
    forward::run(call, &many, out, lse);
}

/// Units that suit the 16-bit path by it, where there is one, the others in f32.
fn backward_of<T: Element + Factor>(call: &Backward<'_, T>, to: &mut Gradients<'_, T>) {
    let (mut left, mut sums) = (None, vec![]);
    if backward16::applies(call.kernels, call.problem)
        && let (Some(call), Some(mut to)) = (cast_backward(call), cast_gradients(to))
    {
        let (others, of_sinks) = backward16::run(&call, &mut to);
        (left, sums) = (Some(others), of_sinks);
    }
    sums.extend(backward::run(call, to, left.as_deref()));
    if let Some(to) = &mut to.dsinks {
        let mut totals = vec![0f64; to.len()];
        sums.into_iter().for_each(|(head, sum)| totals[head] += sum);
        to.iter_mut().zip(totals).for_each(|(to, sum)| *to = sum as f32);
    }
}

fn cast_forward<'a, T: Element, U: Element>(call: &Forward<'a, T>) -> Option<Forward<'a, U>> {
    let Forward { kernels, threads, problem, batch, ref q, ref k, ref v } = *call;
    let (q, k, v) = (cast::tensor(q)?, cast::tensor(k)?, cast::tensor(v)?);
    Some(Forward { kernels, threads, problem, batch, q, k, v })
}

fn cast_backward<'a, T: Element, U: Element>(call: &Backward<'a, T>) -> Option<Backward<'a, U>> {
    let Backward { kernels, threads, problem, batch, ref inputs } = *call;
    let inputs = BackwardInputs {
        q: cast::tensor(&inputs.q)?,
        k: cast::tensor(&inputs.k)?,
        v: cast::tensor(&inputs.v)?,
        out: cast::tensor(&inputs.out)?,
        lse: inputs.lse,
        dout: cast::tensor(&inputs.dout)?,
    };
    Some(Backward { kernels, threads, problem, batch, inputs })
}

fn cast_gradients<'s, T: Element, U: Element>(to: &'s mut Gradients<'_, T>) -> Option<Gradients<'s, U>> {
    Some(Gradients {
        dq: cast::tensor_mut(&mut to.dq)?.reborrow(),
        dk: cast::tensor_mut(&mut to.dk)?.reborrow(),
        dv: cast::tensor_mut(&mut to.dv)?.reborrow(),
        dsinks: to.dsinks.as_deref_mut(),
        darrays: to.darrays.as_deref_mut(),
    })
}
