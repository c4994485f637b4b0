//! What a call is given beside its tensors: lengths and starts of sequences, page table, slopes, sinks.

/// Host tensors beside Q, K and V, with the meaning that a GPU's have: a problem asks for exactly the ones it
/// names ([`fa_core::Lengths`], [`fa_core::ScoreMod`]), and a call refuses others.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Extras<'a> {
    /// Row of Q at which each packed sequence starts, and where the last one ends: `[batch + 1]`, ascending.
    pub cu_q: Option<&'a [i32]>,
    /// The same of K and V.
    pub cu_k: Option<&'a [i32]>,
    /// Queries that each sequence uses of those it has: `[batch]`.
    pub used_q: Option<&'a [i32]>,
    /// The same of keys; compulsory where they lie in pages.
    pub used_k: Option<&'a [i32]>,
    /// Pages of each sequence, in order: `[batch, ceil(max_k / page)]`. Entries behind a sequence's last page
    /// may hold anything.
    pub page_table: Option<&'a [i32]>,
    /// ALiBi: `[heads_q]` or `[batch, heads_q]`.
    pub alibi_slopes: Option<&'a [f32]>,
    /// A logit per query head: `[heads_q]`.
    pub sinks: Option<&'a [f32]>,
}

impl Extras<'_> {
    /// Nothing: what a problem of equal lengths without slopes and sinks takes.
    pub const NONE: Extras<'static> = Extras {
        cu_q: None,
        cu_k: None,
        used_q: None,
        used_k: None,
        page_table: None,
        alibi_slopes: None,
        sinks: None,
    };
}
