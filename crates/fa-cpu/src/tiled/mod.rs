//! Attention on all cores without an N x N buffer: online softmax over tiles of keys, vector kernels chosen
//! at run time.
//!
//! A worker takes a tile of queries, loops over the tiles of keys that the mask leaves, and keeps the
//! running maximum, sum and output in its own scratch: memory grows with N, never with N^2. Tiles of scores
//! lie transposed (keys down, queries across; see [`crate::simd`]).

mod backward;
mod backward16;
mod band;
mod buffer;
mod by_type;
mod cut;
mod decode;
mod delta;
mod dq;
mod fold;
mod forward;
mod forward16;
mod fp8;
mod functions;
mod gate;
mod inputs;
mod lanes;
mod long;
mod overflow;
mod own;
mod pack;
mod pack16;
mod panels;
mod parts;
mod programs;
pub(crate) mod schedule;
mod scores;
mod scratch;
mod sink_terms;
mod work;

use fa_core::{Pass, Problem};
pub use inputs::BackwardInputs;

use crate::batch::Batch;
use crate::check;
use crate::codes::{Of, Values};
use crate::element::Element;
use crate::error::CpuError;
use crate::extras::{Arguments, Extras, check_extras};
use crate::keys::Keys;
use crate::kv_ref::KvRef;
use crate::simd::{Isa, Kernels};
use crate::view::{TensorMut, TensorRef};

/// Options of a run; the default is the fastest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Instruction set; `None` for the best that the CPU has.
    pub isa: Option<Isa>,
    /// Most threads of the current rayon pool to use; `None` for all of them.
    pub threads: Option<usize>,
}

/// The execution plan of a forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Instruction set.
    pub isa: Isa,
    /// Threads.
    pub threads: usize,
    /// Queries of a work item.
    pub tile_m: usize,
    /// Keys of a step.
    pub tile_n: usize,
}

/// The execution plan of [`forward_with`] for `problem` with these options on the current rayon pool.
///
/// # Errors
/// [`CpuError::Isa`] when the CPU lacks the instruction set.
pub fn plan(options: Options, problem: &Problem) -> Result<Plan, CpuError> {
    let kernels = kernels(options)?;
    let workers = schedule::workers(options.threads);
    let (width, most) = match forward16::applies(kernels, problem) {
        true => (forward16::PANEL, forward16::PANELS),
        false => (forward::panel_of(kernels, problem.lengths.max_q()), forward::PANELS),
    };
    let tile_m = forward::tile_m(problem, width, most, workers);
    Ok(Plan { isa: kernels.isa(), threads: workers, tile_m, tile_n: work::TILE_N })
}

/// Attention forward: `out`, and `lse` (natural logarithm, `[batch, heads_q, seqlen_q]`) when asked for.
///
/// `q` is `[batch, seqlen_q, heads_q, head_dim]`, `k` and `v` `[batch, seqlen_k, heads_kv, head_dim or
/// head_dim_v]`, `out` `[batch, seqlen_q, heads_q, head_dim_v]`, each with any strides.
///
/// Sums are f32 whatever the element type; a row of O whose sums overflow, because values are near the type's
/// largest, is computed again in f64. Rows that see no key give 0 and -inf.
///
/// Of an fp8 problem ([`fa_core::Types::fp8`]) `q`, `k` and `v` are the bits of codes. Beside the tensors a
/// call takes 4 bytes for each element of Q, and for each of O where that is not f32.
///
/// # Errors
/// [`CpuError`] when problem, shapes, dtype or buffer lengths do not fit together; nothing is written then.
pub fn forward<'a, T: Element>(
    problem: &Problem,
    q: impl Into<KvRef<'a, T>>,
    k: impl Into<KvRef<'a, T>>,
    v: impl Into<KvRef<'a, T>>,
    out: &mut TensorMut<'_, T>,
    lse: Option<&mut [f32]>,
) -> Result<(), CpuError> {
    forward_with(Options::default(), problem, q, k, v, out, lse)
}

/// [`forward`] with a chosen instruction set or number of threads.
///
/// # Errors
/// As [`forward`], and [`CpuError::Isa`] when the CPU lacks the instruction set.
pub fn forward_with<'a, T: Element>(
    options: Options,
    problem: &Problem,
    q: impl Into<KvRef<'a, T>>,
    k: impl Into<KvRef<'a, T>>,
    v: impl Into<KvRef<'a, T>>,
    out: &mut TensorMut<'_, T>,
    lse: Option<&mut [f32]>,
) -> Result<(), CpuError> {
    forward_extras(options, problem, &Extras::NONE, q, k, v, out, lse)
}

/// [`forward_with`] lengths, pages, slopes or sinks.
///
/// Packed queries are `[1, total_q, heads_q, head_dim]`, with an LSE `[heads_q, total_q]`; keys in pages are
/// `[pages, page, heads_kv, head_dim]`. Rows of no sequence are neither read nor written. LSE includes the
/// sink. K and V in codes are decoded tile by tile, in f32: no memory grows with them.
///
/// # Errors
/// As [`forward_with`], and those of [`Batch::new`]; nothing is written then.
#[allow(clippy::too_many_arguments)]
pub fn forward_extras<'a, T: Element>(
    options: Options,
    problem: &Problem,
    arguments: impl Into<Arguments<'a>>,
    q: impl Into<KvRef<'a, T>>,
    k: impl Into<KvRef<'a, T>>,
    v: impl Into<KvRef<'a, T>>,
    out: &mut TensorMut<'_, T>,
    lse: Option<&mut [f32]>,
) -> Result<(), CpuError> {
    forward_of(options, problem, &arguments.into(), [&q.into(), &k.into(), &v.into()], out, lse)
}

fn forward_of<T: Element>(
    options: Options,
    problem: &Problem,
    arguments: &Arguments<'_>,
    [q, k, v]: [&KvRef<'_, T>; 3],
    out: &mut TensorMut<'_, T>,
    lse: Option<&mut [f32]>,
) -> Result<(), CpuError> {
    check_type::<T>(problem)?;
    let q = match q {
        KvRef::Same(q) => q,
        KvRef::Codes(q) => {
            return fp8::forward((forward_of::<f32>, options), problem, arguments, (q, k, v), out, lse);
        }
    };
    check::check_forward(problem, q, *k, *v)?;
    check::check_out(problem, "out", out.shape())?;
    if let Some(lse) = &lse {
        check::check_lse(problem, lse.len())?;
    }
    scores::Scores::check(problem)?;
    let extras = &arguments.extras;
    check_extras(problem, Pass::Forward, extras)?;
    let (batch, kernels) = (Batch::new(problem, arguments)?, kernels(options)?);
    tracing::debug!(isa = %kernels.isa(), threads = schedule::workers(options.threads), "tiled forward");
    let Options { threads, .. } = options;
    let [k, v] = [(Of::K, k), (Of::V, v)].map(|(of, tensor)| Values::new(problem, extras, of, tensor));
    let k = Keys::of(problem, k, v);
    let call = work::Forward { kernels, threads, problem, batch: &batch, q: *q, k, v };
    by_type::run_forward(&call, out, lse);
    Ok(())
}

/// Attention backward: gradients of Q, K and V from the forward's inputs, output and LSE and the output's
/// gradient.
///
/// The gradients have the shapes of `q`, `k` and `v`, `dout` that of `out`; `lse` is the forward's.
///
/// The result does not depend on timing: equal inputs on equally many threads give equal bits. Products
/// `dO V` are f32 and may overflow where values or `dout` are near f32's largest number.
///
/// # Errors
/// [`CpuError`] when problem, shapes, dtype or buffer lengths do not fit together; nothing is written then.
#[allow(clippy::too_many_arguments)]
pub fn backward<T: Element>(
    problem: &Problem,
    q: &TensorRef<'_, T>,
    k: &TensorRef<'_, T>,
    v: &TensorRef<'_, T>,
    out: &TensorRef<'_, T>,
    lse: &[f32],
    dout: &TensorRef<'_, T>,
    dq: &mut TensorMut<'_, T>,
    dk: &mut TensorMut<'_, T>,
    dv: &mut TensorMut<'_, T>,
) -> Result<(), CpuError> {
    let inputs = BackwardInputs { q: *q, k: *k, v: *v, out: *out, lse, dout: *dout };
    backward_with(Options::default(), problem, &inputs, dq, dk, dv)
}

/// [`backward`] with a chosen instruction set or number of threads.
///
/// # Errors
/// As [`backward`], and [`CpuError::Isa`] when the CPU lacks the instruction set.
pub fn backward_with<T: Element>(
    options: Options,
    problem: &Problem,
    inputs: &BackwardInputs<'_, T>,
    dq: &mut TensorMut<'_, T>,
    dk: &mut TensorMut<'_, T>,
    dv: &mut TensorMut<'_, T>,
) -> Result<(), CpuError> {
    backward_extras(options, problem, &Extras::NONE, inputs, dq, dk, dv, None)
}

/// [`backward_with`] lengths, slopes, a gradient of the LSE, or sinks, whose gradients (`[heads_q]`) go to
/// `dsinks` when asked for.
///
/// Rows of no sequence are neither read nor written.
///
/// # Errors
/// As [`backward_with`], those of [`Batch::new`], and [`CpuError::PagedBackward`]; nothing is written then.
#[allow(clippy::too_many_arguments)]
pub fn backward_extras<'a, T: Element>(
    options: Options,
    problem: &Problem,
    arguments: impl Into<Arguments<'a>>,
    inputs: &BackwardInputs<'_, T>,
    dq: &mut TensorMut<'_, T>,
    dk: &mut TensorMut<'_, T>,
    dv: &mut TensorMut<'_, T>,
    dsinks: Option<&mut [f32]>,
) -> Result<(), CpuError> {
    backward_program(options, problem, arguments, inputs, dq, dk, dv, dsinks, None)
}

/// [`backward_extras`] with the gradients of the arrays that the problem's program reads: `darrays` takes a
/// packed array for each, which is empty where the program wants none.
///
/// # Errors
/// As [`backward_extras`].
#[allow(clippy::too_many_arguments)]
pub fn backward_program<'a, T: Element>(
    options: Options,
    problem: &Problem,
    arguments: impl Into<Arguments<'a>>,
    inputs: &BackwardInputs<'_, T>,
    dq: &mut TensorMut<'_, T>,
    dk: &mut TensorMut<'_, T>,
    dv: &mut TensorMut<'_, T>,
    dsinks: Option<&mut [f32]>,
    darrays: Option<&mut Vec<Vec<f32>>>,
) -> Result<(), CpuError> {
    check_type::<T>(problem)?;
    problem.check_pass(Pass::BACKWARD)?;
    check::check_forward(problem, &inputs.q, &inputs.k, &inputs.v)?;
    check::check_out(problem, "out", inputs.out.shape())?;
    check::check_out(problem, "dout", inputs.dout.shape())?;
    check::check_lse(problem, inputs.lse.len())?;
    check::check_gradients(problem, dq.shape(), dk.shape(), dv.shape())?;
    scores::Scores::check(problem)?;
    let arguments = arguments.into();
    let (batch, kernels) = (Batch::new(problem, arguments)?, kernels(options)?);
    if darrays.is_some() && problem.score.program.is_none() {
        return Err(CpuError::Extra { name: "darrays", asked: false });
    }
    check::check_backward(problem)?;
    if let Some(dsinks) = &dsinks {
        if !problem.score.sinks {
            return Err(CpuError::Extra { name: "dsinks", asked: false });
        }
        check::check_len("dsinks", dsinks.len(), problem.heads_q)?;
    }
    tracing::debug!(isa = %kernels.isa(), threads = schedule::workers(options.threads), "tiled backward");
    let Options { threads, .. } = options;
    let call = inputs::Backward { kernels, threads, problem, batch: &batch, inputs: *inputs };
    let (dq, dk, dv) = (dq.reborrow(), dk.reborrow(), dv.reborrow());
    let mut to = inputs::Gradients { dq, dk, dv, dsinks, darrays };
    if own::applies(problem, inputs.lse) {
        let BackwardInputs { q, k, v, dout, .. } = inputs;
        return own::backward(problem, &arguments, [q, k, v, dout], &mut to);
    }
    by_type::run_backward(&call, &mut to);
    Ok(())
}

/// f64 is for the oracle ([`crate::reference`]): nothing here is compiled for it.
fn check_type<T: Element>(problem: &Problem) -> Result<(), CpuError> {
    match T::DTYPE {
        Some(_) => Ok(()),
        got @ None => Err(CpuError::Dtype { got, need: problem.types.q }),
    }
}

fn kernels(options: Options) -> Result<Kernels, CpuError> {
    let isa = options.isa.unwrap_or_else(Isa::detect);
    Kernels::for_isa(isa).ok_or_else(|| CpuError::Isa { wanted: isa, best: Isa::detect() })
}

#[cfg(test)]
mod tests;
