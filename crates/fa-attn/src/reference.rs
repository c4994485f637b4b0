//! Host tensors by the reference in f64, each result rounded once.

use std::time::{Duration, Instant};

use fa_core::Problem;
use fa_cpu::batch::{Batch, Span};
use fa_cpu::{TensorMut, check, reference};

use crate::cpu::Cpu;
use crate::element::Element;
use crate::error::Error;
use crate::extras::check_dsinks;
use crate::tensors::{BackwardTensors, ForwardTensors, Tensors};

/// Computes the pass that the tensors are of; the time without rounding.
pub(crate) fn run<T: Element>(
    problem: &Problem,
    cpu: &Cpu,
    tensors: Tensors<'_, T>,
) -> Result<Duration, Error> {
    match tensors {
        Tensors::Forward(tensors) => forward(problem, cpu, tensors),
        Tensors::Backward(tensors) => backward(problem, cpu, tensors),
    }
}

fn forward<T: Element>(
    problem: &Problem,
    cpu: &Cpu,
    tensors: ForwardTensors<'_, T>,
) -> Result<Duration, Error> {
    let arguments = tensors.arguments();
    let ForwardTensors { q, k, v, mut out, lse, .. } = tensors;
    check::check_out(problem, "out", out.shape())?;
    check::check_lse(problem, lse.len())?;
    let batch = Batch::new(problem, arguments)?;
    let start = Instant::now();
    let exact = cpu.install(|| reference::forward_extras(problem, arguments, &q, k, v))?;
    let time = start.elapsed();
    let spans = || batch.sequences.iter().map(|sequence| sequence.q);
    let [_, seqlen, heads, _] = out.shape();
    round_rows(&exact.out, &mut out, spans());
    for Span { batch, first, len } in spans() {
        for (s, h) in (first..first + len).flat_map(|s| (0..heads).map(move |h| (s, h))) {
            let at = (batch * heads + h) * seqlen + s;
            lse[at] = exact.lse[at] as f32;
        }
    }
    Ok(time)
}

fn backward<T: Element>(
    problem: &Problem,
    cpu: &Cpu,
    tensors: BackwardTensors<'_, T>,
) -> Result<Duration, Error> {
    let arguments = tensors.arguments();
    let BackwardTensors { q, k, v, out, lse, dout, mut dq, mut dk, mut dv, dsinks, darrays, .. } = tensors;
    check::check_out(problem, "out", out.shape())?;
    check::check_lse(problem, lse.len())?;
    check::check_gradients(problem, dq.shape(), dk.shape(), dv.shape())?;
    check_dsinks(problem, dsinks.as_deref())?;
    let batch = Batch::new(problem, arguments)?;
    let start = Instant::now();
    let exact = cpu.install(|| reference::backward_extras(problem, arguments, &q, &k, &v, &dout))?;
    let time = start.elapsed();
    let keys = || batch.sequences.iter().map(|sequence| sequence.k);
    round_rows(&exact.dq, &mut dq, batch.sequences.iter().map(|sequence| sequence.q));
    round_rows(&exact.dk, &mut dk, keys());
    round_rows(&exact.dv, &mut dv, keys());
    let dsinks = dsinks.into_iter().flatten().zip(&exact.dsinks);
    dsinks.for_each(|(to, &value)| *to = value as f32);
    if let Some(darrays) = darrays {
        let rounded = |array: &Vec<f64>| array.iter().map(|&value| value as f32).collect();
        *darrays = exact.darrays.iter().map(rounded).collect();
    }
    Ok(time)
}

/// Rounds the rows of `spans` of a packed BSHD tensor into `to`; other rows keep their values.
fn round_rows<T: Element>(values: &[f64], to: &mut TensorMut<'_, T>, spans: impl Iterator<Item = Span>) {
    let [_, seqlen, heads, dim] = to.shape();
    let strides = to.strides();
    let data = to.data_mut();
    for Span { batch, first, len } in spans {
        for s in first..first + len {
            for h in 0..heads {
                let row = &values[((batch * seqlen + s) * heads + h) * dim..][..dim];
                for (d, &value) in row.iter().enumerate() {
                    data[strides.offset(batch, s, h, d) as usize] = T::from_f64(value);
                }
            }
        }
    }
}
