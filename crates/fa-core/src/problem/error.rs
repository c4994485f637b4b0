//! What is wrong with a problem.

use crate::dtype::TypesError;
use crate::{DescaleForm, Dtype};

/// Why a [`crate::Problem`] is invalid.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ProblemError {
    /// A length that must be at least 1 is 0.
    #[error("{name} is 0: it must be at least 1")]
    Zero {
        /// The field.
        name: &'static str,
    },
    /// There are more heads, or columns of a head, than anything computes.
    #[error("{name} = {value}: at most {limit} are computed, as no model has more")]
    TooMany {
        /// The field.
        name: &'static str,
        /// Its value.
        value: usize,
        /// The most that there may be.
        limit: usize,
    },
    /// The number of query heads is not a multiple of the number of K/V heads.
    #[error(
        "heads_q = {heads_q} is not a multiple of heads_kv = {heads_kv}: each K/V head serves \
         heads_q / heads_kv query heads"
    )]
    HeadsNotDivisible {
        /// Query heads.
        heads_q: usize,
        /// Key and value heads.
        heads_kv: usize,
    },
    /// K's rows would have fewer columns than V's, with which they begin.
    #[error(
        "head_dim = {head_dim} and head_dim_v = {head_dim_v} of a latent problem: a key begins with its \
         value, so head_dim must be head_dim_v or more (576 and 512 for DeepSeek)"
    )]
    LatentColumns {
        /// Elements of a key.
        head_dim: usize,
        /// Elements of a value.
        head_dim_v: usize,
    },
    /// A latent problem without a softmax scale.
    #[error(
        "softmax_scale is not given: a latent problem of head_dim = {head_dim} has no default. Give the \
         scale of the heads before absorption, (d_nope + d_rope)^-0.5: 192^-0.5 = 0.07217 for DeepSeek's \
         128 + 64, times what YaRN adds"
    )]
    LatentScale {
        /// Elements of a key.
        head_dim: usize,
    },
    /// Types that nothing computes together.
    #[error(transparent)]
    Types(#[from] TypesError),
    /// A row of K or V that ends within a byte.
    #[error(
        "{name} = {value} with K and V in {dtype}: a byte holds two codes, so it must be even; pad with zeros"
    )]
    OddRow {
        /// The field.
        name: &'static str,
        /// Its value.
        value: usize,
        /// Type of K and V.
        dtype: Dtype,
    },
    /// Descales of K and V that are no codes.
    #[error(
        "{name} with K and V in {dtype}: descales are of codes; use kv_dtype e4m3, int8, int4 or e5m2, or \
         leave {name} out"
    )]
    Descale {
        /// The tensor.
        name: &'static str,
        /// Type of K and V.
        dtype: Dtype,
    },
    /// Descales of a Q that is no codes.
    #[error("q_descale with Q in {dtype}: descales are of codes; use dtype e4m3, or leave q_descale out")]
    QDescale {
        /// Type of Q.
        dtype: Dtype,
    },
    /// Descales of Q in a form that they do not have.
    #[error("q_descale is {form}: it is per K/V head, head or sequence_head")]
    QDescaleForm {
        /// The form.
        form: DescaleForm,
    },
    /// ALiBi's distances would not be exact, or a program's `off` overflow.
    #[error("query_offset = {offset} with {what}: use an offset from -{limit} to {limit}")]
    Offset {
        /// The mask's offset.
        offset: i64,
        /// What it counts in.
        what: &'static str,
        /// The largest.
        limit: u64,
    },
    /// A tensor would have more elements than can be addressed.
    #[error(
        "{tensor} has the shape {shape}, of more than 2^{limit_bits} - 1 elements (a length of 0 counts \
         as 1): split the batch"
    )]
    TooLarge {
        /// The tensor.
        tensor: &'static str,
        /// Its shape as text.
        shape: String,
        /// Bits of the largest count of elements.
        limit_bits: u32,
    },
    /// A count that is read as a 32-bit integer on the device does not fit one.
    #[error("{name} = {value}: lengths, starts and page numbers on the device are i32, of at most {limit}")]
    TooLong {
        /// The field.
        name: &'static str,
        /// Its value.
        value: usize,
        /// The most that there may be.
        limit: usize,
    },
    /// The text names a cache in pages and something else, or half of it.
    #[error(
        "page is {}, pages is {} and total_k is {}: keys in pages need page and pages and no total_k, packed \
         keys total_k alone",
        given(.page), given(.pages), given(.total_k)
    )]
    Keys {
        /// Rows of a page.
        page: Option<usize>,
        /// Pages of the cache.
        pages: Option<usize>,
        /// Rows of packed keys.
        total_k: Option<usize>,
    },
    /// Queries in pages.
    #[error("the queries lie in pages of {page} rows: only keys and values may; pack or pad the queries")]
    PagedQueries {
        /// Rows of a page.
        page: usize,
    },
    /// A program changes the scores, and something else does.
    #[error(
        "{name} and a program that changes scores: leave {name} out and let the program compute both, with \
         `{text}` in place of `s`"
    )]
    Program {
        /// The other change.
        name: &'static str,
        /// It as an expression of a program.
        text: &'static str,
    },
    /// A scalar that must be finite is not, or must be positive and is not.
    #[error("{name} is {value}: it must be {need}")]
    BadScalar {
        /// The field.
        name: &'static str,
        /// Its value.
        value: f64,
        /// What it must be.
        need: &'static str,
    },
}

fn given(value: &Option<usize>) -> String {
    value.map_or("not given".to_owned(), |value| value.to_string())
}
