//! The arguments of a call besides its tensors: lengths and starts of sequences, page table, slopes, sinks.

use fa_core::{Problem, Side, SideRows};

/// Host arrays besides Q, K and V, with the same meaning as on a GPU: a call takes exactly those that its
/// problem names ([`fa_core::Lengths`], [`fa_core::ScoreMod`]).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Extras<'a> {
    /// Row of Q at which each packed sequence starts, and where the last one ends: `[batch + 1]`, ascending.
    pub cu_q: Option<&'a [i32]>,
    /// The same of K and V.
    pub cu_k: Option<&'a [i32]>,
    /// Queries in use of each sequence: `[batch]`.
    pub used_q: Option<&'a [i32]>,
    /// Keys in use of each sequence: `[batch]`; required where keys lie in pages.
    pub used_k: Option<&'a [i32]>,
    /// Pages of each sequence, in order: `[batch, ceil(max_k / page)]`. Entries behind a sequence's last page
    /// may hold anything.
    pub page_table: Option<&'a [i32]>,
    /// ALiBi: `[heads_q]` or `[batch, heads_q]`.
    pub alibi_slopes: Option<&'a [f32]>,
    /// A logit per query head: `[heads_q]`.
    pub sinks: Option<&'a [f32]>,
    /// Gradient of the LSE, in its shape, `[batch, heads_q, seqlen_q]` or `[heads_q, total_q]`: for a
    /// backward, optional for every problem. Rows with an LSE of -inf have none.
    pub dlse: Option<&'a [f32]>,
}

impl Extras<'_> {
    /// No extras, for a problem of equal lengths without slopes and sinks.
    pub const NONE: Extras<'static> = Extras {
        cu_q: None,
        cu_k: None,
        used_q: None,
        used_k: None,
        page_table: None,
        alibi_slopes: None,
        sinks: None,
        dlse: None,
    };
}

/// [`Extras`] that own their values.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OwnedExtras {
    /// [`Extras::cu_q`].
    pub cu_q: Option<Vec<i32>>,
    /// [`Extras::cu_k`].
    pub cu_k: Option<Vec<i32>>,
    /// [`Extras::used_q`].
    pub used_q: Option<Vec<i32>>,
    /// [`Extras::used_k`].
    pub used_k: Option<Vec<i32>>,
    /// [`Extras::page_table`].
    pub page_table: Option<Vec<i32>>,
    /// [`Extras::alibi_slopes`].
    pub alibi_slopes: Option<Vec<f32>>,
    /// [`Extras::sinks`].
    pub sinks: Option<Vec<f32>>,
    /// [`Extras::dlse`].
    pub dlse: Option<Vec<f32>>,
}

impl OwnedExtras {
    /// [`Extras::NONE`].
    pub const NONE: OwnedExtras = OwnedExtras {
        cu_q: None,
        cu_k: None,
        used_q: None,
        used_k: None,
        page_table: None,
        alibi_slopes: None,
        sinks: None,
        dlse: None,
    };

    /// As an argument of a call.
    pub fn view(&self) -> Extras<'_> {
        Extras {
            cu_q: self.cu_q.as_deref(),
            cu_k: self.cu_k.as_deref(),
            used_q: self.used_q.as_deref(),
            used_k: self.used_k.as_deref(),
            page_table: self.page_table.as_deref(),
            alibi_slopes: self.alibi_slopes.as_deref(),
            sinks: self.sinks.as_deref(),
            dlse: self.dlse.as_deref(),
        }
    }

    /// The extras that `problem` names, for timing: sequences of equal length within the problem's bounds,
    /// pages in order, slopes from 1/2 down, sinks of 0.
    pub fn even(problem: &Problem) -> OwnedExtras {
        let lengths = &problem.lengths;
        let batch = lengths.sequences();
        let (q, k) = (lengths.q(), lengths.k());
        let starts = |side: Side| match side.rows {
            SideRows::Packed { .. } => Some((0..=batch).map(|i| count(i * even_len(side, batch))).collect()),
            SideRows::Padded { .. } | SideRows::Paged { .. } => None,
        };
        let used = |side: Side| side.used.then(|| vec![count(even_len(side, batch)); batch]);
        let table = |pages: usize| {
            let entries = 0..batch * lengths.table_columns();
            entries.map(|entry| count(entry % pages.max(1))).collect()
        };
        let page_table = match k.rows {
            SideRows::Paged { pages, .. } => Some(table(pages)),
            SideRows::Padded { .. } | SideRows::Packed { .. } => None,
        };
        let alibi_slopes = problem.score.alibi.map(|alibi| {
            let slope = |i: usize| 0.5f32.powi((i % problem.heads_q % 16) as i32 + 1);
            (0..alibi.count(batch, problem.heads_q)).map(slope).collect()
        });
        OwnedExtras {
            cu_q: starts(q),
            cu_k: starts(k),
            used_q: used(q),
            used_k: used(k),
            page_table,
            alibi_slopes,
            sinks: problem.score.sinks.then(|| vec![0.0; problem.heads_q]),
            dlse: None,
        }
    }
}

/// Rows of each sequence, if all have the same number.
fn even_len(side: Side, batch: usize) -> usize {
    match side.rows {
        SideRows::Padded { len } => len,
        SideRows::Packed { total, max } => (total / batch.max(1)).min(max),
        SideRows::Paged { page, pages, max } => (page.saturating_mul(pages) / batch.max(1)).min(max),
    }
}

/// The device's counts are i32; a checked problem's fit.
fn count(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::Batch;
    use fa_core::{Alibi, Dtype, Lengths, Mask, ScoreMod};

    #[test]
    fn even_extras_are_what_the_problem_names() {
        let square = Problem::square(1, 1, 4, 8, Mask::CAUSAL, Dtype::F32);
        let score = ScoreMod { alibi: Some(Alibi::PerSequenceHead), sinks: true, ..ScoreMod::NONE };
        let padded = Side::padded(7);
        for (lengths, counts) in [
            (Lengths::uniform(3, 7, 9), [7, 9]),
            (Lengths::packed(3, 20, 100, 7, 30), [6, 30]),
            (Lengths::of(3, padded.with_used(), Side::packed(20, 7).with_used()), [7, 6]),
            (Lengths::of(3, padded, Side::paged(4, 5, 40)), [7, 6]),
            (Lengths::of(3, padded, Side::paged(16, 50, 40)), [7, 40]),
        ] {
            for score in [ScoreMod::NONE, score] {
                let problem = Problem { lengths, score, ..square };
                let extras = OwnedExtras::even(&problem);
                let batch = Batch::new(&problem, &extras.view()).unwrap();
                assert!(batch.sequences.iter().all(|one| [one.q.len, one.k.len] == counts), "{lengths:?}");
            }
        }
        assert_eq!(OwnedExtras::even(&square), OwnedExtras::default());
    }
}
