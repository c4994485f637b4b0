//! A problem's shape, as flags and rows of results write it.

use std::num::{IntErrorKind, ParseIntError};
use std::str::FromStr;

use fa_core::{Append, CacheCodes, Descales, Dtype, Merge, Problem, Rotary, Side, SideRows};
use serde::{Deserialize, Serialize};

/// `a`, or `a` and `b` where they differ, as in `192-128`.
pub fn pair(a: usize, b: usize, separator: char) -> String {
    if a == b { a.to_string() } else { format!("{a}{separator}{b}") }
}

/// Head dims as in flags: `128`, or `192-128`, and whether they are those of a latent problem.
pub fn head_dims(problem: &Problem) -> String {
    head_dims_of([problem.head_dim, problem.head_dim_v], problem.latent)
}

fn head_dims_of([qk, v]: [usize; 2], latent: bool) -> String {
    pair(qk, v, '-') + if latent { " latent" } else { "" }
}

/// DeepSeek's softmax scale, for latent problems of which only the time matters: that of heads of 128 columns
/// and 64 rotary ones.
pub const LATENT_SCALE: f64 = 0.072_168_783_648_703_22;

/// Head dims of Q and K, and of V and O.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeadDim {
    /// Of Q and K.
    pub qk: usize,
    /// Of V and O.
    pub v: usize,
}

impl FromStr for HeadDim {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        parse_pair(text, '-', "D or D-DV, as in 192-128").map(|(qk, v)| HeadDim { qk, v })
    }
}

/// Parses a whole number.
///
/// # Errors
/// Text that is not a number, or a number above the largest of `T`.
pub fn whole<T: FromStr<Err = ParseIntError>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error: ParseIntError| {
        if *error.kind() == IntErrorKind::PosOverflow {
            format!("'{text}' is larger than any number of {} bits", 8 * size_of::<T>())
        } else {
            format!("'{text}' is not a whole number")
        }
    })
}

/// Parses `N` or `N<separator>M`; one number stands for both.
///
/// # Errors
/// Text that is not a number, with the expected `form`.
pub fn parse_pair(text: &str, separator: char, form: &str) -> Result<(usize, usize), String> {
    let number = |part: &str| whole(part.trim()).map_err(|error| format!("{error}: use {form}"));
    match text.split_once(separator) {
        Some((first, second)) => Ok((number(first)?, number(second)?)),
        None => number(text).map(|n| (n, n)),
    }
}

/// The problem of a row of results.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shape {
    /// Independent sequences.
    pub batch: usize,
    /// Query heads.
    pub heads_q: usize,
    /// Key/value heads.
    pub heads_kv: usize,
    /// Queries per sequence.
    pub seqlen_q: usize,
    /// Keys per sequence.
    pub seqlen_k: usize,
    /// Of Q and K.
    pub head_dim: usize,
    /// Of V and O.
    pub head_dim_v: usize,
    /// Whether V is the first columns of K.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub latent: bool,
    /// Whether the mask is causal, without a window.
    pub causal: bool,
    /// The mask's name.
    pub mask: String,
    /// Element type.
    pub dtype: Dtype,
    /// Element type of K and V, where it is another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_dtype: Option<Dtype>,
    /// The soft cap of the scores, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub softcap: Option<f64>,
    /// Keys of a page, where they lie in pages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page: Option<usize>,
    /// Whether a program masks pairs or changes scores; counts of visible pairs are the mask's alone.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub program: bool,
}

impl From<&Problem> for Shape {
    fn from(problem: &Problem) -> Shape {
        Shape {
            batch: problem.lengths.sequences(),
            heads_q: problem.heads_q,
            heads_kv: problem.heads_kv,
            seqlen_q: problem.lengths.max_q(),
            seqlen_k: problem.lengths.max_k(),
            head_dim: problem.head_dim,
            head_dim_v: problem.head_dim_v,
            latent: problem.latent,
            causal: problem.mask.is_causal(),
            mask: problem.mask.to_string(),
            dtype: problem.types.q,
            kv_dtype: (problem.types.kv != problem.types.q).then_some(problem.types.kv),
            softcap: problem.score.softcap,
            page: problem.lengths.page(),
            program: problem.score.program.is_some(),
        }
    }
}

impl Shape {
    /// The shape in words.
    pub fn words(&self) -> String {
        let Shape { batch, mask, .. } = self;
        let (heads, seqlens, dims) = (self.heads(), self.seqlens(), self.head_dims());
        format!("B {batch} H {heads} N {seqlens} hd {dims} {mask} {}", self.types())
    }

    /// The mask, and what changes scores.
    pub fn mask_and_scores(&self) -> String {
        let cap = self.softcap.map_or_else(String::new, |cap| format!(", cap {cap}"));
        format!("{}{cap}{}", self.mask, if self.program { ", program" } else { "" })
    }

    /// Element types: Q's, and K's and V's where they have another.
    pub fn types(&self) -> String {
        match self.kv_dtype {
            Some(kv) => format!("{}/{kv}", self.dtype),
            None => self.dtype.to_string(),
        }
    }

    /// Head dims as in flags.
    pub fn head_dims(&self) -> String {
        head_dims_of([self.head_dim, self.head_dim_v], self.latent)
    }

    /// Heads as in flags.
    pub fn heads(&self) -> String {
        pair(self.heads_q, self.heads_kv, ':')
    }

    /// Sequence lengths as in flags.
    pub fn seqlens(&self) -> String {
        pair(self.seqlen_q, self.seqlen_k, 'x')
    }

    /// The same, and the pages that keys lie in.
    pub fn rows(&self) -> String {
        let pages = self.page.map_or_else(String::new, |page| format!(" in pages of {page}"));
        self.seqlens() + &pages
    }
}

/// What is merged, in a few words.
pub fn merge_name(merge: &Merge) -> String {
    let Merge { parts, batch, seqlen, heads, dim, part, out, sinks } = merge;
    let sinks = if *sinks { " sinks" } else { "" };
    format!("{parts} parts b{batch} {seqlen} h{heads} hd{dim} {part} to {out}{sinks}")
}

/// What is appended, in a few words.
pub fn append_name(append: &Append) -> String {
    let rows = |side: Side| {
        let used = if side.used { " used" } else { "" };
        match side.rows {
            SideRows::Padded { len } => format!("{len}{used}"),
            SideRows::Packed { total, max } => format!("packed{total}/{max}{used}"),
            SideRows::Paged { page, pages, max } => format!("{pages}pages{page}/{max}"),
        }
    };
    let mut name = format!(
        "b{} {} to {} h{} hd{}-{} {}",
        append.sequences,
        rows(append.new),
        rows(append.cache),
        append.heads_kv,
        append.head_dim,
        append.head_dim_v,
        append.dtype
    );
    if let Some(CacheCodes { kind, descales: Descales { k, v, .. } }) = append.codes {
        name += &format!(" as {} descales {k} {v}", kind.dtype());
    }
    if let Some(Rotary { dim, pairs, positions, table, queries }) = append.rotary {
        name += &format!(" rotary{dim}/{positions} {pairs:?} {table}").to_lowercase();
        if let Some(queries) = queries {
            name += &format!(" q{} {:?}", queries.heads, queries.positions).to_lowercase();
        }
    }
    name
}
