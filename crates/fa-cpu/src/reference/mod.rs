//! Attention by its definition, in f64: the oracle that everything else is checked against.
//!
//! With query `i`, the keys `j` that it sees, and K/V head `h / (heads_q / heads_kv)` for query head `h`:
//!
//! ```text
//! S_ij  = cap(scale * Q_i . K_j) - slope * |i + seqlen_k - seqlen_q + offset - j|
//!                                           cap(s) = softcap * tanh(s / softcap), or s; without ALiBi 0
//! LSE_i = ln (sum_j exp(S_ij) + exp(sink))  without the last term where there is no sink
//! P_ij  = exp(S_ij - LSE_i)
//! O_i   = sum_j w_ij P_ij V_j                              w: a program's weights, or 1
//!
//! dP_ij = w_ij dO_i . V_j
//! dS_ij = P_ij (dP_ij - D_i) * cap'                         cap' = 1 - tanh(s / softcap)^2, or 1
//! D_i   = sum_j P_ij dP_ij - dLSE_i         the last term where LSE has a gradient
//! dQ_i  = scale * sum_j dS_ij K_j
//! dK_j  = scale * sum_i dS_ij Q_i           summed over the query heads that share the K/V head
//! dV_j  = sum_i w_ij P_ij dO_i                   likewise
//! dsink = -sum_i exp(sink - LSE_i) D_i      for each query head, over all sequences
//! ```
//!
//! A masked key has no influence, whatever it and its value hold. A query that sees no key, or whose scores
//! are all -inf, has `O = 0`, `LSE = -inf` (or the sink) and gives no gradient. Any other NaN or infinity
//! goes where IEEE arithmetic takes it.
//!
//! Where sequences are packed or used in part, rows of no sequence are never read, and hold NaN in the
//! results, which marks an output that was never written.
//!
//! [`low_precision`] is the same formula in the precision of a fast kernel; the tolerance rule of
//! [`crate::compare`] is based on its error. [`fp8`] is the formula for Q, K and V in e4m3, exactly and with
//! a kernel's roundings.

mod formula;
#[cfg(feature = "reference")]
pub mod fp8;
mod heads;
pub(crate) mod in_f32;
pub mod low_precision;
mod over;
mod own;
mod vectors;

use fa_core::Problem;

use crate::element::Element;
use crate::error::CpuError;
use crate::extras::{Arguments, Extras};
use crate::kv_ref::KvRef;
use crate::view::TensorRef;
use formula::{Rows, Tensors};

/// Output and LSE in f64.
#[derive(Clone, Debug, PartialEq)]
pub struct Forward {
    /// O, packed `[batch, seqlen_q, heads_q, head_dim_v]`, or `[total_q, ..]`.
    pub out: Vec<f64>,
    /// Natural logarithm of the sum of exponentials, `[batch, heads_q, seqlen_q]`, or `[heads_q, total_q]`.
    pub lse: Vec<f64>,
    /// Bound of the noise of f32 arithmetic in O: see [`Gradients::dq_noise`].
    pub out_noise: f64,
    /// What a kernel's scores may be off by beyond f32's roundings: see [`fp8::AsKernel::lse_tolerance`]; 0
    /// for products of 16 bits and more.
    pub lse_noise: f64,
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
    /// `[heads_q]`; empty without sinks.
    pub dsinks: Vec<f64>,
    /// Gradients of the arrays that the problem's program reads, each packed; empty for those that want none.
    pub darrays: Vec<Vec<f64>>,
    /// Bound of the noise of f32 arithmetic in dQ.
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
    /// The same of the sinks' gradients.
    pub dsinks_noise: f64,
    /// The same of the arrays' gradients.
    pub darrays_noise: Vec<f64>,
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

/// O and LSE of `problem` on the given tensors: of an fp8 problem the bits of codes ([`KvRef::Codes`]). Heads
/// are computed in parallel; the result does not depend on how many threads there are.
///
/// # Errors
/// Tensors that do not fit the problem: see [`crate::check::check_forward`]. A problem that needs
/// [`Extras`]: see [`forward_extras`].
pub fn forward<'a, T: Element>(
    problem: &Problem,
    q: impl Into<KvRef<'a, T>>,
    k: impl Into<KvRef<'a, T>>,
    v: impl Into<KvRef<'a, T>>,
) -> Result<Forward, CpuError> {
    forward_extras(problem, &Extras::NONE, q, k, v)
}

/// [`forward`] with lengths, pages, slopes or sinks.
///
/// # Errors
/// Tensors that do not fit the problem: see [`crate::check::check_forward`] and
/// [`crate::batch::Batch::new`].
pub fn forward_extras<'a, T: Element>(
    problem: &Problem,
    arguments: impl Into<Arguments<'a>>,
    q: impl Into<KvRef<'a, T>>,
    k: impl Into<KvRef<'a, T>>,
    v: impl Into<KvRef<'a, T>>,
) -> Result<Forward, CpuError> {
    let pass = |tensors: &Tensors<'_, f64>| formula::forward_f64(problem, tensors);
    let inputs = [&q.into(), &k.into(), &v.into()];
    let formula::Forward { out, lse, out_terms, .. } =
        over::forward(problem, &arguments.into(), inputs, exact, pass)?;
    Ok(Forward { out, lse, out_noise: noise(out_terms), lse_noise: 0.0 })
}

/// The gradients of `sum(O * dO)`, and of `sum(LSE * dLSE)` where extras hold one, with respect to Q, K
/// and V. Deterministic as [`forward`] is.
///
/// # Errors
/// As [`forward`].
pub fn backward<T: Element>(
    problem: &Problem,
    q: &TensorRef<'_, T>,
    k: &TensorRef<'_, T>,
    v: &TensorRef<'_, T>,
    dout: &TensorRef<'_, T>,
) -> Result<Gradients, CpuError> {
    backward_extras(problem, &Extras::NONE, q, k, v, dout)
}

/// [`backward`] with lengths, slopes, sinks or a gradient of the LSE.
///
/// # Errors
/// As [`forward_extras`], and [`CpuError::PagedBackward`].
pub fn backward_extras<'a, T: Element>(
    problem: &Problem,
    arguments: impl Into<Arguments<'a>>,
    q: &TensorRef<'_, T>,
    k: &TensorRef<'_, T>,
    v: &TensorRef<'_, T>,
    dout: &TensorRef<'_, T>,
) -> Result<Gradients, CpuError> {
    let pass =
        |tensors: &Tensors<'_, f64>, dout: Rows<'_, f64>| formula::backward_f64(problem, tensors, dout);
    let found = over::backward(problem, &arguments.into(), [q, k, v, dout], exact, pass)?;
    Ok(Gradients {
        dq: found.dq,
        dk: found.dk,
        dv: found.dv,
        dsinks: found.dsinks,
        dq_noise: noise(found.dq_terms),
        dk_noise: noise(found.dk_terms),
        dv_noise: noise(found.dv_terms),
        dsinks_noise: noise(found.dsinks_terms),
        darrays: found.darrays,
        darrays_noise: found.darrays_terms.into_iter().map(noise).collect(),
    })
}
