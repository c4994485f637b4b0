//! Attention by its definition, in f64: the oracle that everything else is checked against.
//!
//! With query `i`, the keys `j` that it sees, and K/V head `h / (heads_q / heads_kv)` for query head `h`:
//!
//! ```text
//! S_ij  = cap(scale * Q_i . K_j)            cap(s) = softcap * tanh(s / softcap), or s
//! LSE_i = ln sum_j exp(S_ij)
//! P_ij  = exp(S_ij - LSE_i)
//! O_i   = sum_j P_ij V_j
//!
//! dP_ij = dO_i . V_j
//! dS_ij = P_ij (dP_ij - sum_j P_ij dP_ij) * cap'(S_ij)      cap' = 1 - tanh(s / softcap)^2, or 1
//! dQ_i  = scale * sum_j dS_ij K_j
//! dK_j  = scale * sum_i dS_ij Q_i           summed over the query heads that share the K/V head
//! dV_j  = sum_i P_ij dO_i                   likewise
//! ```
//!
//! A key that the mask hides takes no part, whatever it and its value hold. A query that sees no key, or
//! whose scores are all -inf, has `O = 0`, `LSE = -inf` and gives no gradient. Any other NaN or infinity goes
//! where IEEE arithmetic takes it.
//!
//! [`low_precision`] is the same formula in the precision of a fast kernel; the tolerance rule of
//! [`crate::compare`] measures an implementation's error by its.

mod formula;
pub mod low_precision;

use fa_core::Problem;

use crate::check::{check_forward, check_out};
use crate::element::Element;
use crate::error::CpuError;
use crate::view::TensorRef;
use formula::{Tensors, gather};

/// Output and LSE in f64.
#[derive(Clone, Debug, PartialEq)]
pub struct Forward {
    /// O, packed `[batch, seqlen_q, heads_q, head_dim_v]`.
    pub out: Vec<f64>,
    /// Natural logarithm of the sum of exponentials, `[batch, heads_q, seqlen_q]`.
    pub lse: Vec<f64>,
    /// How much of O may be noise of f32 arithmetic: see [`Gradients::dq_noise`].
    pub out_noise: f64,
}

/// Gradients in f64.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    /// Packed `[batch, seqlen_q, heads_q, head_dim]`.
    pub dq: Vec<f64>,
    /// Packed `[batch, seqlen_k, heads_kv, head_dim]`.
    pub dk: Vec<f64>,
    /// Packed `[batch, seqlen_k, heads_kv, head_dim_v]`.
    pub dv: Vec<f64>,
    /// How much of dQ may be noise of f32 arithmetic.
    ///
    /// The roundings of a computation are relative to the terms that make a result, not to the result: scores
    /// in the hundreds leave fewer digits to their exponentials, and a row that sees one key has
    /// `dP = sum_j P dP` and exact gradients 0, but an implementation takes the two sums in different orders.
    /// This is [`F32_ROUNDING`] times a bound of those terms, at its largest over the tensor.
    /// [`crate::compare::Comparison::allowing`] makes room for it.
    pub dq_noise: f64,
    /// The same of dK.
    pub dk_noise: f64,
    /// The same of dV.
    pub dv_noise: f64,
}

/// The distance from 1 to the next f32: two roundings.
pub const F32_ROUNDING: f64 = f32::EPSILON as f64;

/// No rounding.
fn exact(value: f64) -> f64 {
    value
}

/// The largest finite one of `terms` in roundings.
fn noise(terms: Vec<f64>) -> f64 {
    F32_ROUNDING * terms.into_iter().filter(|term| term.is_finite()).fold(0.0, f64::max)
}

/// O and LSE of `problem` on the given tensors. Heads are computed in parallel; the result does not depend on
/// how many threads there are.
///
/// # Errors
/// Tensors that do not fit the problem: see [`check_forward`].
pub fn forward<T: Element>(
    problem: &Problem,
    q: &TensorRef<'_, T>,
    k: &TensorRef<'_, T>,
    v: &TensorRef<'_, T>,
) -> Result<Forward, CpuError> {
    check_forward(problem, q, k, v)?;
    let tensors = Tensors {
        q: &|b, h| gather(q, b, h),
        k: &|b, h| gather(k, b, h),
        v: &|b, h| gather(v, b, h),
        round: exact,
    };
    let formula::Forward { out, lse, out_terms } = formula::forward_f64(problem, &tensors);
    Ok(Forward { out, lse, out_noise: noise(out_terms) })
}

/// The gradients of `sum(O * dO)` with respect to Q, K and V. Deterministic as [`forward`] is.
///
/// # Errors
/// Tensors that do not fit the problem: see [`check_forward`].
pub fn backward<T: Element>(
    problem: &Problem,
    q: &TensorRef<'_, T>,
    k: &TensorRef<'_, T>,
    v: &TensorRef<'_, T>,
    dout: &TensorRef<'_, T>,
) -> Result<Gradients, CpuError> {
    check_forward(problem, q, k, v)?;
    check_out(problem, "dout", dout.shape())?;
    let tensors = Tensors {
        q: &|b, h| gather(q, b, h),
        k: &|b, h| gather(k, b, h),
        v: &|b, h| gather(v, b, h),
        round: exact,
    };
    let found = formula::backward_f64(problem, &tensors, &|b, h| gather(dout, b, h));
    Ok(Gradients {
        dq: found.dq,
        dk: found.dk,
        dv: found.dv,
        dq_noise: noise(found.dq_terms),
        dk_noise: noise(found.dk_terms),
        dv_noise: noise(found.dv_terms),
    })
}
