//! The extras of a call, and batches of sequences of different lengths to try kernels on.

use fa_core::{Extra, Lengths, Pass, Problem, Side};
use fa_cpu::OwnedExtras;
use fa_lab::codes::{kinds, spread};
use fa_lab::random::Random;

/// `extras` with slopes, sinks and descales for a problem that has them: slopes as published models have
/// them, sinks of which some outweigh the keys, and descales of which all differ from their neighbours.
#[must_use]
pub fn with_mods(mut extras: OwnedExtras, problem: &Problem) -> OwnedExtras {
    let heads = problem.heads_q;
    if let Some(alibi) = problem.score.alibi {
        let count = alibi.count(problem.lengths.sequences(), heads);
        let slope = |i: usize| (-8.0 * (i % heads + 1) as f32 / heads as f32).exp2() * (1 + i / heads) as f32;
        extras.alibi_slopes = Some((0..count).map(slope).collect());
    }
    if problem.score.sinks {
        extras.sinks = Some((0..heads).map(|head| [1.5, -3.0, 4.25, 0.0][head % 4]).collect());
    }
    let kinds = kinds(problem);
    let descale = |extra: Extra, of: usize| {
        let need = extra.need(problem, Pass::Forward)?;
        let one = 1.0 / kinds[of].map_or(1.0, spread);
        Some((0..need.len).map(|i| one * (0.75 + 0.25 * (i % 5) as f32)).collect())
    };
    OwnedExtras {
        q_descale: descale(Extra::QDescale, 0),
        k_descale: descale(Extra::KDescale, 1),
        v_descale: descale(Extra::VDescale, 2),
        ..extras
    }
}

/// The layout of one side of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    /// In slots of equal size, of which each sequence uses its length.
    Padded,
    /// End to end.
    Packed,
    /// In slots end to end, each with a few more rows than are used.
    PackedUsed,
    /// In pages of this many rows; keys only.
    Paged(usize),
}

/// Sequences with lengths of their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Queries and keys of each.
    pub sequences: Vec<(usize, usize)>,
    /// The queries' rows.
    pub q: Lie,
    /// The keys' rows.
    pub k: Lie,
    /// Rows by which the upper bounds exceed the longest sequence, and the tensors the end of the last one.
    pub slack: usize,
}

/// Unused rows of a slot.
const ROOM: usize = 3;

fn sum(counts: impl Iterator<Item = usize>) -> usize {
    counts.fold(0, usize::saturating_add)
}

impl Batch {
    /// The lengths of a problem of this batch. Sums stop at `usize::MAX`, which [`Problem::check`] refuses.
    pub fn lengths(&self) -> Lengths {
        let (queries, keys) = self.sides();
        let side = |lie: Lie, lens: &[usize]| {
            let max = lens.iter().copied().max().unwrap_or(0).saturating_add(self.slack);
            let packed = |room: usize| {
                let total = sum(lens.iter().map(|len| len.saturating_add(room)));
                Side::packed(total.saturating_add(self.slack), max.saturating_add(room))
            };
            match lie {
                Lie::Padded => Side::padded(max).with_used(),
                Lie::Packed => packed(0),
                Lie::PackedUsed => packed(ROOM).with_used(),
                Lie::Paged(page) => Side::paged(page, self.pages(page), max),
            }
        };
        Lengths::of(self.sequences.len(), side(self.q, &queries), side(self.k, &keys))
    }

    fn sides(&self) -> (Vec<usize>, Vec<usize>) {
        self.sequences.iter().copied().unzip()
    }

    /// Pages of the cache: those in use and a few more.
    fn pages(&self, page: usize) -> usize {
        sum(self.sequences.iter().map(|(_, k)| k.div_ceil(page))).saturating_add(2)
    }

    /// Starts, lengths and the page table, with slopes and sinks where `problem`, whose lengths are this
    /// batch's, has them. Pages are in random order, and table entries that no key needs are invalid.
    pub fn extras(&self, problem: &Problem) -> OwnedExtras {
        let (queries, keys) = self.sides();
        let starts = |lie: Lie, lens: &[usize]| {
            let room = match lie {
                Lie::Packed => 0,
                Lie::PackedUsed => ROOM,
                Lie::Padded | Lie::Paged(_) => return None,
            };
            let mut cu = vec![0];
            for len in lens {
                cu.push(cu[cu.len() - 1] + (len + room) as i32);
            }
            Some(cu)
        };
        let used = |lie: Lie, lens: &[usize]| {
            (lie != Lie::Packed).then(|| lens.iter().map(|&len| len as i32).collect())
        };
        let page_table = match self.k {
            Lie::Paged(page) => Some(self.table(page, problem.lengths.table_columns())),
            Lie::Padded | Lie::Packed | Lie::PackedUsed => None,
        };
        let extras = OwnedExtras {
            cu_seqlens_q: starts(self.q, &queries),
            cu_seqlens_k: starts(self.k, &keys),
            seqused_q: used(self.q, &queries),
            seqused_k: used(self.k, &keys),
            page_table,
            ..OwnedExtras::NONE
        };
        with_mods(extras, problem)
    }

    fn table(&self, page: usize, columns: usize) -> Vec<i32> {
        let mut free: Vec<i32> = (0..self.pages(page) as i32).collect();
        let mut random = Random::new(0);
        let mut table = Vec::new();
        for &(_, keys) in &self.sequences {
            for column in 0..columns {
                if column * page < keys {
                    table.push(free.swap_remove(random.below(free.len())));
                } else {
                    table.push([-1, i32::MAX, self.pages(page) as i32, i32::MIN][column % 4]);
                }
            }
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Mask};

    use super::*;

    fn problem(batch: &Batch) -> Problem {
        let one = Problem::square(1, 1, 4, 64, Mask::FULL, Dtype::Bf16);
        one.with_lengths(batch.lengths()).with_heads_kv(2)
    }

    #[test]
    fn batches_are_what_the_oracle_takes() {
        let sequences = vec![(3, 5), (0, 17), (40, 0), (1, 33)];
        for q in [Lie::Padded, Lie::Packed, Lie::PackedUsed] {
            for k in [Lie::Padded, Lie::Packed, Lie::PackedUsed, Lie::Paged(1), Lie::Paged(16)] {
                let batch = Batch { sequences: sequences.clone(), q, k, slack: 7 };
                let problem = problem(&batch);
                problem.check().unwrap();
                let extras = batch.extras(&problem);
                let read = fa_cpu::batch::Batch::new(&problem, &extras.view()).unwrap();
                let lens: Vec<_> = read.sequences.iter().map(|own| (own.q.len, own.k.len)).collect();
                assert_eq!(lens, sequences, "{q:?} {k:?}");
            }
        }
    }

    #[test]
    fn no_page_is_of_two_sequences() {
        let batch = Batch { sequences: vec![(1, 40), (1, 33)], q: Lie::Packed, k: Lie::Paged(4), slack: 9 };
        let table = batch.extras(&problem(&batch)).page_table.unwrap();
        assert_eq!(table.len(), 2 * 49usize.div_ceil(4));
        let mut used: Vec<i32> = table[..10].iter().chain(&table[13..22]).copied().collect();
        used.sort_unstable();
        used.dedup();
        assert_eq!(used.len(), 19);
        assert!(used.iter().all(|page| (0..21).contains(page)) && !(0..21).contains(&table[12]));
    }
}
