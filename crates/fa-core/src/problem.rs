//! One attention problem: shapes, types, mask and scalars.

mod built_in;
mod check;
mod counts;
mod error;
mod text;

use serde::{Deserialize, Serialize};

use crate::{Descales, Dtype, Lengths, Mask, ScoreMod, Types, with_methods};

pub use check::ELEMENT_BITS;
pub use error::ProblemError;

/// `O = softmax(mask(score(scale * Q K^T))) V` for each query head of each sequence.
///
/// Q is `[batch, seqlen_q, heads_q, head_dim]`, K `[batch, seqlen_k, heads_kv, head_dim]`, V `[batch,
/// seqlen_k, heads_kv, head_dim_v]`, O `[batch, seqlen_q, heads_q, head_dim_v]` (or the BHSD forms). Query
/// head `h` reads K and V head `h / (heads_q / heads_kv)`. Packed sides are `[total, heads, head_dim]`, a
/// cache in pages `[pages, page, heads_kv, head_dim]` ([`crate::lengths::SideRows`]).
///
/// # Latent problems
///
/// Multi-head latent attention (MLA) keeps one row per token for all heads: a latent vector, which is the
/// value and begins the key, and the part of the key that rotary embedding turned. With [`Problem::latent`]
/// a key is therefore V's row followed by K's: V is `[.., head_dim_v]` as ever, Q `[.., head_dim]` in the
/// order latent, rotary, and the tensor K holds the other [`Problem::head_dim_k`] `= head_dim - head_dim_v`
/// columns only (none where head dims are equal: `[.., 0]`). DeepSeek's cache of rows of 576 is V
/// `row[..512]` and K `row[512..]`, two views of one buffer. Such a problem names its softmax scale: that
/// of the heads before their projection was absorbed into Q, `(128 + 64)^-0.5` for DeepSeek, which does not
/// follow from 576. It has no gradients: those are taken of the heads that are not absorbed.
///
/// As text (JSON, RON) a problem is flat: `batch`, `seqlen_q` and `seqlen_k` for the lengths (upper bounds
/// where lengths are on the device) with `total_q` and `total_k` for packed sides, `page` and `pages` for a
/// cache in pages, `used_q` and `used_k` for lengths in use; `dtype` for the types, with `kv_dtype`,
/// `k_descale` and `v_descale` for K and V in codes, and `q_descale` for an fp8 Q; `softcap`, `alibi` and
/// `sinks` for the change of scores.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "text::Flat", into = "text::Flat")]
#[non_exhaustive]
pub struct Problem {
    /// Sequences, with the queries and keys of each.
    pub lengths: Lengths,
    /// Query heads.
    pub heads_q: usize,
    /// Key and value heads; divides `heads_q`.
    pub heads_kv: usize,
    /// Elements of a query or key.
    pub head_dim: usize,
    /// Elements of a value or output row.
    pub head_dim_v: usize,
    /// Whether V is also the first `head_dim_v` columns of each key, of which K has the others.
    pub latent: bool,
    /// Which keys a query sees.
    pub mask: Mask,
    /// Types of the tensors.
    pub types: Types,
    /// What the codes of K and V, and of an fp8 Q, are multiplied by; none for other types.
    pub descales: Descales,
    /// Factor on Q K^T; `None` for `1 / sqrt(head_dim)`, which latent problems do not have.
    pub softmax_scale: Option<f64>,
    /// What is done to the scaled scores, before the mask.
    pub score: ScoreMod,
}

impl Problem {
    /// A square self-attention problem: equal lengths, heads and head dims, default scale, no cap.
    pub const fn square(
        batch: usize,
        seqlen: usize,
        heads: usize,
        head_dim: usize,
        mask: Mask,
        dtype: Dtype,
    ) -> Self {
        let lengths = Lengths::uniform(batch, seqlen, seqlen);
        Problem::new(lengths, (heads, heads), (head_dim, head_dim), Types::same(dtype)).with_mask(mask)
    }

    /// A problem with these query and K/V heads, and these elements of a query and of a value: every key is
    /// visible, the scale is the default, scores are as they are.
    pub const fn new(
        lengths: Lengths,
        (heads_q, heads_kv): (usize, usize),
        (head_dim, head_dim_v): (usize, usize),
        types: Types,
    ) -> Self {
        Problem {
            lengths,
            heads_q,
            heads_kv,
            head_dim,
            head_dim_v,
            latent: false,
            mask: Mask::FULL,
            types,
            descales: Descales::NONE,
            softmax_scale: None,
            score: ScoreMod::NONE,
        }
    }

    with_methods! {
        with_lengths(lengths: Lengths),
        with_heads_q(heads_q: usize),
        with_heads_kv(heads_kv: usize),
        with_head_dim(head_dim: usize),
        with_head_dim_v(head_dim_v: usize),
        with_latent(latent: bool),
        with_mask(mask: Mask),
        with_types(types: Types),
        with_descales(descales: Descales),
        with_softmax_scale(softmax_scale: Option<f64>),
        with_score(score: ScoreMod),
    }

    /// The same with other query heads and K/V heads.
    #[must_use]
    pub const fn with_heads(self, heads_q: usize, heads_kv: usize) -> Self {
        self.with_heads_q(heads_q).with_heads_kv(heads_kv)
    }

    /// The same with other elements of a query, and of a value.
    #[must_use]
    pub const fn with_head_dims(self, head_dim: usize, head_dim_v: usize) -> Self {
        self.with_head_dim(head_dim).with_head_dim_v(head_dim_v)
    }

    /// Columns of the tensor K: `head_dim`, and of latent problems those behind V's.
    pub const fn head_dim_k(&self) -> usize {
        if self.latent { self.head_dim.saturating_sub(self.head_dim_v) } else { self.head_dim }
    }

    /// The factor on Q K^T.
    pub fn scale(&self) -> f64 {
        self.softmax_scale.unwrap_or_else(|| 1.0 / (self.head_dim as f64).sqrt())
    }

    /// Query heads per K/V head; 0 without K/V heads, which [`Problem::check`] refuses.
    pub const fn group_size(&self) -> usize {
        match self.heads_q.checked_div(self.heads_kv) {
            Some(group) => group,
            None => 0,
        }
    }
}
