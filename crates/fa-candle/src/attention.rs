//! Attention with all options.

use candle_core::{Result, Tensor};

use crate::error::Error;
use crate::op::apply;
use crate::options::Options;
use crate::problem::Posed;

/// Attention of `q` on `k` and `v`, in the shapes that [`crate::Rows`] names, f16 or bf16 (on the CPU also
/// f32). K and V may have fewer heads than Q, and V rows of another length. The output is contiguous, in the
/// shape of `q` with V's rows; rows that belong to no sequence are zero. Q, K, V and sinks get gradients.
///
/// # Errors
/// [`crate::Error`], as a candle error.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, options: &Options<'_>) -> Result<Tensor> {
    Ok(apply(q, k, v, Posed::new(q, k, v, options)?, false)?.0)
}

/// [`attention`], and the logarithm of each row's sum of exponentials: f32 `(batch, heads, seqlen_q)`, or
/// `(heads, total_q)` of packed queries. It includes the sink, is `-inf` for rows that see no key, 0 for
/// rows that belong to no sequence, and passes gradients on to Q, K and sinks as the output does.
///
/// # Errors
/// As [`attention`].
pub fn attention_with_lse(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    options: &Options<'_>,
) -> Result<(Tensor, Tensor)> {
    let (out, lse) = apply(q, k, v, Posed::new(q, k, v, options)?, true)?;
    Ok((out, lse.ok_or(Error::NoForward)?))
}
