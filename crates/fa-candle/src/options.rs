//! What a call is given beside Q, K and V.

use candle_core::Tensor;
use fa_core::Dropout;
use fa_core::quantize::Codes;

use crate::program::Program;

/// How attention is computed; what candle-flash-attn's functions take, and more.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Options<'a> {
    /// Factor on Q K^T; usually `1 / sqrt(head_dim)`.
    pub softmax_scale: f32,
    /// How many keys left of the diagonal are visible; `None`, or more than there are, for all.
    pub window_size_left: Option<usize>,
    /// How many keys right of the diagonal are visible; `None`, or more than there are, for all, `Some(0)`
    /// for a causal mask. The diagonal ends in the bottom right corner.
    pub window_size_right: Option<usize>,
    /// How many keys right of the bottom-right alignment queries lie, for windows and ALiBi: query `i` lies
    /// on key `i + seqlen_k - seqlen_q + query_offset`.
    pub query_offset: i64,
    /// Scores pass through `cap * tanh(s / cap)`; `None` or 0 for no cap.
    pub softcap: Option<f32>,
    /// ALiBi: slopes `(heads)` or `(batch, heads)`; `slope * |i + seqlen_k - seqlen_q + query_offset -
    /// j|` is subtracted from scores. They get no gradient.
    pub alibi_slopes: Option<&'a Tensor>,
    /// A logit per query head, `(heads)`, which joins the denominator of each row. They get a gradient.
    pub sinks: Option<&'a Tensor>,
    /// What Q of candle's `F8E4M3` is multiplied by, beside K and V of that type and an output in bf16, f32:
    /// `(1)`, `(heads)` or `(batch, heads)`, with K's heads; `None` for 1. Without gradients; on GPUs of
    /// compute capability 9.0.
    pub q_descale: Option<&'a Tensor>,
    /// What K of candle's `F8E4M3`, or of `U8` (see `byte_codes`), is multiplied by, f32: as `q_descale`, or
    /// beside a Q of another type for each row of each head, in the shape of K without its last axis; `None`
    /// for 1. Without gradients.
    pub k_descale: Option<&'a Tensor>,
    /// The same of V.
    pub v_descale: Option<&'a Tensor>,
    /// What the bytes of K and V of `U8` are: two int4 codes each, the first in the lower half, so that rows
    /// have half as many elements; or int8 (candle has no type for it) or e4m3.
    pub byte_codes: Codes,
    /// Which keys a query sees, `(batch, heads, seqlen_q, seqlen_k)`, beside the windows: u8, 0 where a key
    /// is hidden, as candle's comparisons give, or a float type, which is added to the scores (`-inf` hides).
    /// Axes may be 1 or, in front, missing. Of packed sequences and those in pages `seqlen_q` and `seqlen_k`
    /// are the maxima, and indices count in each sequence. Rows that see no key are zero. No gradient.
    pub mask: Option<&'a Tensor>,
    /// Added to the scaled scores, in f32; of the shapes of `mask`. A key is hidden where it is `-inf`. It
    /// gets a gradient, in its own shape.
    pub bias: Option<&'a Tensor>,
    /// A mask or a change of scores by a text of the caller's own, before mask and bias.
    pub program: Option<&'a Program>,
    /// Probabilities are dropped after the softmax, as FlashAttention-2 drops them for the same seed and
    /// offset; draw another seed for each call. In both passes; on the CPU.
    pub dropout: Option<Dropout>,
    /// Multi-head latent attention: every key is V's row followed by K's, of which Q has the columns in that
    /// order; see [`fa_core::Problem`]. The scale is that of the heads before absorption. On the CPU and on
    /// GPUs of compute capability 9.0, without gradients.
    pub latent: bool,
    /// Whether gradients are the same bits from run to run on a GPU, at some cost of time. On the CPU they
    /// are, whatever this says.
    pub deterministic: bool,
    /// Where the rows of the sequences lie.
    pub rows: Rows<'a>,
}

/// Where the rows of a batch of sequences lie. Starts and lengths are u32 or i32 tensors on Q's device: on a
/// GPU they are never read on the host.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// Q, K and V are `(batch, seqlen, heads, dim)`.
    Padded {
        /// `(batch)`: queries that each sequence uses, of those it has; `None` for all. Rows behind them are
        /// zero in the output.
        used_q: Option<&'a Tensor>,
        /// `(batch)`: keys that each sequence uses, as in a cache that fills up; `None` for all.
        used_k: Option<&'a Tensor>,
    },
    /// Sequences end to end: Q, K and V are `(total, heads, dim)`.
    Packed {
        /// `(batch + 1)`: the first row of each sequence in Q, then the end of the last.
        seqlens_q: &'a Tensor,
        /// `(batch + 1)`: the same of K and V.
        seqlens_k: &'a Tensor,
        /// Upper bound on the queries of a sequence.
        max_seqlen_q: usize,
        /// Upper bound on the keys of a sequence.
        max_seqlen_k: usize,
    },
    /// Queries end to end, `(total, heads, dim)`; K and V in pages, `(pages, page_block_size, heads, dim)`.
    Paged {
        /// `(batch + 1)`: the first row of each sequence in Q, then the end of the last.
        seqlens_q: &'a Tensor,
        /// `(batch + 1)`: sums of the lengths of the sequences before.
        seqlens_k: &'a Tensor,
        /// `(batch, columns)`: the pages of each sequence, in order. Of more columns than
        /// `ceil(max_seqlen_k / page_block_size)` a copy is made.
        block_table: &'a Tensor,
        /// Upper bound on the queries of a sequence.
        max_seqlen_q: usize,
        /// Upper bound on the keys of a sequence.
        max_seqlen_k: usize,
    },
    /// Each query sees the keys that it names, as DeepSeek's sparse attention: Q is `(tokens, heads, dim)`, K
    /// and V are `(rows, 1, heads, dim)`, of which masks and windows see only the order that they are named
    /// in.
    Named {
        /// `(tokens, most)`: rows of K and V. What is behind those that count may hold anything.
        indices: &'a Tensor,
        /// `(tokens)`: how many of its entries count for a query, from the first one on.
        lengths: &'a Tensor,
    },
}

impl Rows<'_> {
    /// As many queries, and as many keys, for each sequence.
    pub const EVEN: Rows<'static> = Rows::Padded { used_q: None, used_k: None };
}

impl Options<'_> {
    /// Every key is visible.
    pub const fn full(softmax_scale: f32) -> Options<'static> {
        Options {
            softmax_scale,
            window_size_left: None,
            window_size_right: None,
            query_offset: 0,
            softcap: None,
            alibi_slopes: None,
            sinks: None,
            q_descale: None,
            k_descale: None,
            v_descale: None,
            byte_codes: Codes::Int4,
            mask: None,
            bias: None,
            program: None,
            dropout: None,
            latent: false,
            deterministic: false,
            rows: Rows::EVEN,
        }
    }

    /// No key right of the diagonal is visible, which ends in the bottom right corner.
    pub const fn causal(softmax_scale: f32) -> Options<'static> {
        Options::full(softmax_scale).with_window_size_right(Some(0))
    }
}

impl<'a> Options<'a> {
    fa_core::with_methods! {
        with_softmax_scale(softmax_scale: f32),
        with_window_size_left(window_size_left: Option<usize>),
        with_window_size_right(window_size_right: Option<usize>),
        with_query_offset(query_offset: i64),
        with_softcap(softcap: Option<f32>),
        with_alibi_slopes(alibi_slopes: Option<&'a Tensor>),
        with_sinks(sinks: Option<&'a Tensor>),
        with_q_descale(q_descale: Option<&'a Tensor>),
        with_k_descale(k_descale: Option<&'a Tensor>),
        with_v_descale(v_descale: Option<&'a Tensor>),
        with_byte_codes(byte_codes: Codes),
        with_mask(mask: Option<&'a Tensor>),
        with_bias(bias: Option<&'a Tensor>),
        with_program(program: Option<&'a Program>),
        with_dropout(dropout: Option<Dropout>),
        with_latent(latent: bool),
        with_deterministic(deterministic: bool),
        with_rows(rows: Rows<'a>),
    }
}
