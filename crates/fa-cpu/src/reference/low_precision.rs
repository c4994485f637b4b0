//! The formula of [`super`] in a fast kernel's precision: the yardstick of the tolerance rule, not an
//! implementation to use.
//!
//! Inputs as given, products and sums in f32, and what a kernel feeds to its matrix products rounded to the
//! tensors' type: the probabilities `exp(S - max)`, not normalised, in the forward, P and dS (before the
//! scale) in the backward, whose `sum_j P dP` is taken as `dO . O` with the rounded O. Results are rounded to
//! the tensors' type. With f32 tensors nothing but the arithmetic differs from the oracle.

use fa_core::Problem;

use super::Gradients;
use super::formula::{self, Rows, Tensors};
use super::over;
use crate::check::check_len;
use crate::element::Element;
use crate::error::CpuError;
use crate::extras::{Arguments, Extras};
use crate::kv_ref::KvRef;
use crate::view::TensorRef;

/// Scales, relative to `exp(S - max)`, at which a forward may hold the probabilities when it rounds them: the
/// draws that gradients are judged by ([`crate::compare`]). A factor of two changes nothing. Nearly every
/// implementation is within the tolerance of the first.
pub const HELD_AT: [f32; 3] = [1.0, 1.26, 1.587];

/// Output in the tensors' type and LSE in f32; shapes as in [`super::Forward`].
#[derive(Clone, Debug, PartialEq)]
pub struct LowForward<T> {
    /// O, packed `[batch, seqlen_q, heads_q, head_dim_v]`.
    pub out: Vec<T>,
    /// `[batch, heads_q, seqlen_q]`.
    pub lse: Vec<f32>,
}

/// Gradients in the tensors' type; shapes as in [`super::Gradients`].
#[derive(Clone, Debug, PartialEq)]
pub struct LowGradients<T> {
    /// Packed `[batch, seqlen_q, heads_q, head_dim]`.
    pub dq: Vec<T>,
    /// Packed `[batch, seqlen_k, heads_kv, head_dim]`.
    pub dk: Vec<T>,
    /// Packed `[batch, seqlen_k, heads_kv, head_dim_v]`.
    pub dv: Vec<T>,
    /// `[heads_q]`; empty without sinks.
    pub dsinks: Vec<f32>,
    /// Gradients of the arrays that the problem's program reads, each packed.
    pub darrays: Vec<Vec<f32>>,
}

/// O and LSE with the rounding errors that a kernel may make.
///
/// # Errors
/// As [`super::forward`].
pub fn forward<'a, T: Element>(
    problem: &Problem,
    q: impl Into<KvRef<'a, T>>,
    k: impl Into<KvRef<'a, T>>,
    v: impl Into<KvRef<'a, T>>,
) -> Result<LowForward<T>, CpuError> {
    forward_extras(problem, &Extras::NONE, q, k, v)
}

/// [`forward`] with lengths, pages, slopes or sinks.
///
/// # Errors
/// As [`super::forward_extras`].
pub fn forward_extras<'a, T: Element>(
    problem: &Problem,
    arguments: impl Into<Arguments<'a>>,
    q: impl Into<KvRef<'a, T>>,
    k: impl Into<KvRef<'a, T>>,
    v: impl Into<KvRef<'a, T>>,
) -> Result<LowForward<T>, CpuError> {
    let pass = |tensors: &Tensors<'_, f32>| formula::forward_f32(problem, tensors);
    let formula::Forward { out, lse, .. } =
        over::forward(problem, &arguments.into(), [&q.into(), &k.into(), &v.into()], T::held_f32, pass)?;
    Ok(LowForward { out: T::narrowed(&out), lse })
}

/// dQ, dK and dV with the rounding errors that a kernel may make.
///
/// # Errors
/// As [`super::backward`].
pub fn backward<T: Element>(
    problem: &Problem,
    q: &TensorRef<'_, T>,
    k: &TensorRef<'_, T>,
    v: &TensorRef<'_, T>,
    dout: &TensorRef<'_, T>,
) -> Result<LowGradients<T>, CpuError> {
    backward_held_at(problem, q, k, v, dout, 1.0)
}

/// [`backward`] with lengths, slopes or sinks.
///
/// # Errors
/// As [`super::backward_extras`].
pub fn backward_extras<'a, T: Element>(
    problem: &Problem,
    arguments: impl Into<Arguments<'a>>,
    q: &TensorRef<'_, T>,
    k: &TensorRef<'_, T>,
    v: &TensorRef<'_, T>,
    dout: &TensorRef<'_, T>,
) -> Result<LowGradients<T>, CpuError> {
    backward_extras_held_at(problem, arguments, q, k, v, dout, 1.0)
}

/// The same where the forward holds its probabilities at `held` times `exp(S - max)` when it rounds them, as
/// a forward does that does not always update the maximum. At 1 the largest probability of a row is exact; at
/// other scales its rounding enters O and so `dO . O`, which for rows dominated by one key is most of the
/// error of dQ and dK, several times that at 1.
///
/// # Errors
/// As [`super::backward`].
pub fn backward_held_at<T: Element>(
    problem: &Problem,
    q: &TensorRef<'_, T>,
    k: &TensorRef<'_, T>,
    v: &TensorRef<'_, T>,
    dout: &TensorRef<'_, T>,
    held: f32,
) -> Result<LowGradients<T>, CpuError> {
    backward_extras_held_at(problem, &Extras::NONE, q, k, v, dout, held)
}

/// [`backward_held_at`] with lengths, slopes or sinks.
///
/// # Errors
/// As [`super::backward_extras`].
pub fn backward_extras_held_at<'a, T: Element>(
    problem: &Problem,
    arguments: impl Into<Arguments<'a>>,
    q: &TensorRef<'_, T>,
    k: &TensorRef<'_, T>,
    v: &TensorRef<'_, T>,
    dout: &TensorRef<'_, T>,
    held: f32,
) -> Result<LowGradients<T>, CpuError> {
    let pass =
        |tensors: &Tensors<'_, f32>, dout: Rows<'_, f32>| formula::backward_f32(problem, tensors, dout, held);
    let gradients = over::backward(problem, &arguments.into(), [q, k, v, dout], T::held_f32, pass)?;
    let [dq, dk, dv] = [&gradients.dq, &gradients.dk, &gradients.dv].map(|gradient| T::narrowed(gradient));
    Ok(LowGradients { dq, dk, dv, dsinks: gradients.dsinks, darrays: gradients.darrays })
}

/// The worst of the draws [`HELD_AT`]: of each element the one that is farthest from `exact`.
///
/// # Errors
/// As [`super::backward_extras`]; [`CpuError::Length`] where `exact` is of another problem.
pub fn backward_worst<'a, T: Element>(
    problem: &Problem,
    arguments: impl Into<Arguments<'a>>,
    q: &TensorRef<'_, T>,
    k: &TensorRef<'_, T>,
    v: &TensorRef<'_, T>,
    dout: &TensorRef<'_, T>,
    exact: &Gradients,
) -> Result<LowGradients<T>, CpuError> {
    let arguments = arguments.into();
    let draw = |held| backward_extras_held_at(problem, arguments, q, k, v, dout, held);
    let mut worst = draw(HELD_AT[0])?;
    for held in &HELD_AT[1..] {
        let LowGradients { dq, dk, dv, dsinks, darrays } = draw(*held)?;
        keep_farther(&mut worst.dq, &dq, &exact.dq)?;
        keep_farther(&mut worst.dk, &dk, &exact.dk)?;
        keep_farther(&mut worst.dv, &dv, &exact.dv)?;
        keep_farther(&mut worst.dsinks, &dsinks, &exact.dsinks)?;
        for ((worst, own), exact) in worst.darrays.iter_mut().zip(&darrays).zip(&exact.darrays) {
            keep_farther(worst, own, exact)?;
        }
    }
    Ok(worst)
}

/// Takes the elements of another draw that are farther from the exact values than those of `worst`.
///
/// # Errors
/// [`CpuError::Length`] where the three are not of one length.
pub fn keep_farther<T: Element>(worst: &mut [T], draw: &[T], exact: &[f64]) -> Result<(), CpuError> {
    check_len("draw", draw.len(), worst.len())?;
    check_len("exact", exact.len(), worst.len())?;
    for ((worst, &draw), &exact) in worst.iter_mut().zip(draw).zip(exact) {
        if (draw.to_f64() - exact).abs() > (worst.to_f64() - exact).abs() {
            *worst = draw;
        }
    }
    Ok(())
}
