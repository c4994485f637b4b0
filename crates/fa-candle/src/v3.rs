//! The functions of candle-flash-attn-v3, whose names are those of candle-flash-attn: of any head dim, with
//! gradients. Their last argument, `use_gqa_packing`, changes no result: the planner decides how the heads of
//! a group share a tile. Windows are computed here, which candle-flash-attn-v3 leaves out.
//!
//! What each of them refuses is a [`crate::Error`], as a candle error.
#![allow(clippy::too_many_arguments)]

use candle_core::{Result, Tensor};

use crate::functions;

/// [`crate::flash_attn`].
///
/// # Errors
/// [`crate::Error`].
pub fn flash_attn(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    causal: bool,
    _use_gqa_packing: bool,
) -> Result<Tensor> {
    functions::flash_attn(q, k, v, softmax_scale, causal)
}

/// [`crate::flash_attn_windowed`].
///
/// # Errors
/// [`crate::Error`].
pub fn flash_attn_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    _use_gqa_packing: bool,
) -> Result<Tensor> {
    functions::flash_attn_windowed(q, k, v, softmax_scale, window_size_left, window_size_right)
}

/// [`crate::flash_attn_alibi`].
///
/// # Errors
/// [`crate::Error`].
pub fn flash_attn_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    causal: bool,
    _use_gqa_packing: bool,
) -> Result<Tensor> {
    functions::flash_attn_alibi(q, k, v, alibi_slopes, softmax_scale, causal)
}

/// [`crate::flash_attn_alibi_windowed`].
///
/// # Errors
/// [`crate::Error`].
pub fn flash_attn_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    _use_gqa_packing: bool,
) -> Result<Tensor> {
    let (left, right) = (window_size_left, window_size_right);
    functions::flash_attn_alibi_windowed(q, k, v, alibi_slopes, softmax_scale, left, right)
}

/// [`crate::flash_attn_varlen`].
///
/// # Errors
/// [`crate::Error`].
pub fn flash_attn_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
    _use_gqa_packing: bool,
) -> Result<Tensor> {
    let (most_q, most_k) = (max_seqlen_q, max_seqlen_k);
    functions::flash_attn_varlen(q, k, v, seqlens_q, seqlens_k, most_q, most_k, softmax_scale, causal)
}

/// [`crate::flash_attn_varlen_windowed`].
///
/// # Errors
/// [`crate::Error`].
pub fn flash_attn_varlen_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    _use_gqa_packing: bool,
) -> Result<Tensor> {
    functions::flash_attn_varlen_windowed(
        q,
        k,
        v,
        seqlens_q,
        seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        window_size_left,
        window_size_right,
    )
}

/// [`crate::flash_attn_varlen_alibi`].
///
/// # Errors
/// [`crate::Error`].
pub fn flash_attn_varlen_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
    _use_gqa_packing: bool,
) -> Result<Tensor> {
    functions::flash_attn_varlen_alibi(
        q,
        k,
        v,
        alibi_slopes,
        seqlens_q,
        seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
    )
}

/// [`crate::flash_attn_varlen_alibi_windowed`].
///
/// # Errors
/// [`crate::Error`].
pub fn flash_attn_varlen_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    _use_gqa_packing: bool,
) -> Result<Tensor> {
    functions::flash_attn_varlen_alibi_windowed(
        q,
        k,
        v,
        alibi_slopes,
        seqlens_q,
        seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        window_size_left,
        window_size_right,
    )
}
