//! The formula of [`super`] in a fast kernel's precision: the yardstick of the tolerance rule, not an
//! implementation to use.
//!
//! Inputs as given, products and sums in f32, and what a kernel feeds to its matrix products rounded to the
//! tensors' type: the probabilities `exp(S - max)`, not normalised, in the forward, P and dS (before the
//! scale) in the backward, whose `sum_j P dP` is taken as `dO . O` with the rounded O. Results are rounded to
//! the tensors' type. With f32 tensors nothing but the arithmetic differs from the oracle.

use fa_core::Problem;

use super::formula::{self, Tensors};
use super::heads::{gather_keys, gather_queries};
use crate::batch::Batch;
use crate::check::{check_forward, check_no_dlse, check_out};
use crate::element::Element;
use crate::error::CpuError;
use crate::extras::Extras;
use crate::real::Real;
use crate::view::TensorRef;

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
}

/// O and LSE with the rounding errors that a kernel may make.
///
/// # Errors
/// As [`super::forward`].
pub fn forward<T: Element>(
    problem: &Problem,
    q: &TensorRef<'_, T>,
    k: &TensorRef<'_, T>,
    v: &TensorRef<'_, T>,
) -> Result<LowForward<T>, CpuError> {
    forward_extras(problem, &Extras::NONE, q, k, v)
}

/// [`forward`] with lengths, pages, slopes or sinks.
///
/// # Errors
/// As [`super::forward_extras`].
pub fn forward_extras<T: Element>(
    problem: &Problem,
    extras: &Extras<'_>,
    q: &TensorRef<'_, T>,
    k: &TensorRef<'_, T>,
    v: &TensorRef<'_, T>,
) -> Result<LowForward<T>, CpuError> {
    check_forward(problem, q, k, v)?;
    check_no_dlse(extras)?;
    let batch = Batch::new(problem, extras)?;
    let tensors = Tensors {
        batch: &batch,
        q: &|s, h| gather_queries(q, &batch, s, h),
        k: &|s, h| gather_keys(k, &batch, s, h),
        v: &|s, h| gather_keys(v, &batch, s, h),
        round: f32::rounded_to::<T>,
    };
    let formula::Forward { out, lse, .. } = formula::forward_f32(problem, &tensors);
    Ok(LowForward { out: round(&out), lse })
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
pub fn backward_extras<T: Element>(
    problem: &Problem,
    extras: &Extras<'_>,
    q: &TensorRef<'_, T>,
    k: &TensorRef<'_, T>,
    v: &TensorRef<'_, T>,
    dout: &TensorRef<'_, T>,
) -> Result<LowGradients<T>, CpuError> {
    backward_extras_held_at(problem, extras, q, k, v, dout, 1.0)
}

/// The same where the forward holds its probabilities at `held` times `exp(S - max)` when it rounds them, as
/// one does that follows the maximum only now and then. At 1 the largest probability of a row is exact,
/// elsewhere its rounding is in O and so in `dO . O`: in steep rows most of the error of dQ and dK, and
/// several times as large as at 1.
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
pub fn backward_extras_held_at<T: Element>(
    problem: &Problem,
    extras: &Extras<'_>,
    q: &TensorRef<'_, T>,
    k: &TensorRef<'_, T>,
    v: &TensorRef<'_, T>,
    dout: &TensorRef<'_, T>,
    held: f32,
) -> Result<LowGradients<T>, CpuError> {
    check_forward(problem, q, k, v)?;
    check_out(problem, "dout", dout.shape())?;
    let batch = Batch::new(problem, extras)?;
    if batch.is_paged() {
        return Err(CpuError::PagedBackward);
    }
    let tensors = Tensors {
        batch: &batch,
        q: &|s, h| gather_queries(q, &batch, s, h),
        k: &|s, h| gather_keys(k, &batch, s, h),
        v: &|s, h| gather_keys(v, &batch, s, h),
        round: f32::rounded_to::<T>,
    };
    let dout = |s: usize, h: usize| gather_queries(dout, &batch, s, h);
    let gradients = formula::backward_f32(problem, &tensors, &dout, held);
    let [dq, dk, dv] = [&gradients.dq, &gradients.dk, &gradients.dv].map(|gradient| round(gradient));
    Ok(LowGradients { dq, dk, dv, dsinks: gradients.dsinks })
}

fn round<T: Element>(values: &[f32]) -> Vec<T> {
    values.iter().map(|&value| T::from_f32(value)).collect()
}
