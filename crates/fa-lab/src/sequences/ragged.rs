//! One side of a batch: the rows of each sequence and their layout: padded, end to end or in pages.

use fa_core::{Side, SideRows};

use crate::random::Random;

/// One side of a batch: the rows of each sequence, and their layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ragged {
    /// Rows before each sequence's first where sequences stand end to end, and of all.
    starts: Vec<usize>,
    /// The bound on a sequence's rows that the host knows.
    max: usize,
    /// Whether there is an array of lengths (`seqused`).
    used: bool,
    store: Store,
}

/// The layout of rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Store {
    /// `[batch, len, heads, dim]`.
    Padded {
        /// Rows that each sequence has room for.
        len: usize,
    },
    /// `[total, heads, dim]`.
    Packed {
        /// The first row of each sequence, and of what is behind the last: `cu_seqlens`.
        cu: Vec<i32>,
        /// Rows of the tensor.
        total: usize,
    },
    /// `[pages, page, heads, dim]`.
    Paged {
        /// Rows of a page.
        page: usize,
        /// Pages of the cache.
        pages: usize,
        /// Entries of a sequence in the table.
        columns: usize,
        /// The pages of each sequence, `[batch, columns]`; entries behind its last page hold garbage.
        table: Vec<i32>,
    },
}

/// Values of unused entries of a page table, which no kernel may follow.
pub const GARBAGE: [i32; 4] = [-1, i32::MAX, i32::MIN, 0x7f7f_7f7f];

fn starts(lens: &[usize]) -> Vec<usize> {
    let sums = lens.iter().scan(0, |sum, len| {
        *sum += len;
        Some(*sum)
    });
    std::iter::once(0).chain(sums).collect()
}

fn index(value: usize) -> i32 {
    i32::try_from(value).expect("rows and pages of a case are counted in 31 bits")
}

impl Ragged {
    /// `batch` sequences of `len` rows.
    pub fn uniform(batch: usize, len: usize) -> Ragged {
        let starts = (0..=batch).map(|b| b * len).collect();
        Ragged { starts, max: len, used: false, store: Store::Padded { len } }
    }

    /// Sequences of `lens` rows, each padded to `len`; the padding belongs to no sequence.
    ///
    /// # Panics
    /// Where a sequence has more than `len` rows.
    pub fn padded(lens: &[usize], len: usize) -> Ragged {
        assert!(lens.iter().all(|&own| own <= len), "{lens:?} in room for {len}");
        Ragged { starts: starts(lens), max: len, used: true, store: Store::Padded { len } }
    }

    /// Sequences of `lens` rows end to end, and `behind` rows of no sequence behind the last.
    pub fn packed(lens: &[usize], behind: usize) -> Ragged {
        let starts = starts(lens);
        let total = starts[lens.len()] + behind;
        let cu = starts.iter().map(|&start| index(start)).collect();
        let max = lens.iter().copied().max().unwrap_or(0);
        Ragged { starts, max, used: false, store: Store::Packed { cu, total } }
    }

    /// Sequences of `lens` rows, each at the head of a slot of `slots` rows, slots end to end.
    ///
    /// # Panics
    /// Where the numbers of both differ, or a slot is too small.
    pub fn packed_in(lens: &[usize], slots: &[usize], behind: usize) -> Ragged {
        assert!(lens.len() == slots.len() && lens.iter().zip(slots).all(|(len, slot)| len <= slot));
        let of_slots = Ragged::packed(slots, behind);
        Ragged { starts: starts(lens), used: true, ..of_slots }
    }

    /// Sequences of `lens` rows in pages of `page`, drawn at random from a cache that has `spare` more pages
    /// than they need.
    pub fn paged(lens: &[usize], page: usize, spare: usize, random: &mut Random) -> Ragged {
        Ragged::paged_in_runs(lens, page, 1, spare, random)
    }

    /// The same with `run` consecutive pages at a time, as allocators give them.
    pub fn paged_in_runs(
        lens: &[usize],
        page: usize,
        run: usize,
        spare: usize,
        random: &mut Random,
    ) -> Ragged {
        let needed: usize = lens.iter().map(|len| len.div_ceil(page)).sum();
        let max = lens.iter().copied().max().unwrap_or(0);
        let rows = Ragged { starts: starts(lens), max, used: true, store: Store::Padded { len: max } };
        rows.in_pages((page, run), (needed + spare).max(1), max.div_ceil(page), random)
    }

    fn in_pages(
        self,
        (page, run): (usize, usize),
        pages: usize,
        columns: usize,
        random: &mut Random,
    ) -> Ragged {
        let runs = random.order(pages.div_ceil(run)).into_iter();
        let mut free = runs.flat_map(|own| own * run..own.saturating_add(1).saturating_mul(run).min(pages));
        let mut table = Vec::with_capacity(self.sequences() * columns);
        for b in 0..self.sequences() {
            let own = self.len(b).div_ceil(page);
            for column in 0..columns {
                table.push(match column < own {
                    true => index(free.next().expect("a page for every part of a sequence")),
                    false => random.of(&GARBAGE),
                });
            }
        }
        Ragged { store: Store::Paged { page, pages, columns, table }, ..self }
    }

    /// `batch` sequences as long as the bounds of `side` allow, or as its rows divide among them.
    pub(super) fn filling(batch: usize, side: Side, random: &mut Random) -> Ragged {
        let max = side.max();
        match side.rows {
            SideRows::Padded { len } if !side.used => Ragged::uniform(batch, len),
            SideRows::Padded { len } => Ragged::padded(&vec![len; batch], len),
            SideRows::Packed { total, .. } => {
                let share = |b: usize| ((b + 1) * total / batch - b * total / batch).min(max);
                let lens: Vec<usize> = (0..batch).map(share).collect();
                let left = total - lens.iter().sum::<usize>();
                let rows = Ragged::packed(&lens, left).bounded(max);
                Ragged { used: side.used, ..rows }
            }
            SideRows::Paged { page, pages, .. } => {
                let len = (pages / batch.max(1) * page).min(max);
                let rows = Ragged::padded(&vec![len; batch], max);
                rows.in_pages((page, 1), pages, max.div_ceil(page), random)
            }
        }
    }

    /// The same rows with a bound of `max` rows, which need not be tight; a page table grows with it.
    ///
    /// # Panics
    /// Where a sequence has more than `max` rows.
    #[must_use]
    pub fn bounded(self, max: usize) -> Ragged {
        assert!((0..self.sequences()).all(|b| self.len(b) <= max), "the bound {max} is below a length");
        let store = match self.store {
            Store::Paged { page, pages, columns, table } => {
                let wider = max.div_ceil(page).max(columns);
                let rows = table.chunks(columns.max(1)).flat_map(|row| {
                    row.iter().copied().chain((columns..wider).map(|column| GARBAGE[column % GARBAGE.len()]))
                });
                let none = vec![GARBAGE[0]; (self.starts.len() - 1) * wider];
                let table = if columns == 0 { none } else { rows.collect() };
                Store::Paged { page, pages, columns: wider, table }
            }
            store @ (Store::Padded { .. } | Store::Packed { .. }) => store,
        };
        Ragged { max, store, ..self }
    }

    /// The same memory with other lengths that fit: what a captured graph may find when it is replayed.
    #[must_use]
    pub fn drawn_again(&self, random: &mut Random) -> Ragged {
        let batch = self.sequences();
        match &self.store {
            Store::Padded { len } if !self.used => Ragged::uniform(batch, *len),
            Store::Padded { len } => {
                let lens: Vec<usize> = (0..batch).map(|_| random.below(len + 1)).collect();
                Ragged::padded(&lens, *len)
            }
            Store::Packed { cu, total } if self.used => {
                let slots: Vec<usize> = cu.windows(2).map(|ends| (ends[1] - ends[0]) as usize).collect();
                let lens: Vec<usize> = slots.iter().map(|slot| random.below(slot + 1)).collect();
                let behind = total - slots.iter().sum::<usize>();
                Ragged { max: self.max, ..Ragged::packed_in(&lens, &slots, behind) }
            }
            Store::Packed { total, .. } => {
                let mut left = *total;
                let lens: Vec<usize> = (0..batch)
                    .map(|_| {
                        let len = random.below(self.max.min(left) + 1);
                        left -= len;
                        len
                    })
                    .collect();
                Ragged { max: self.max, ..Ragged::packed(&lens, left) }
            }
            Store::Paged { page, pages, columns, .. } => {
                let mut left = *pages;
                let lens: Vec<usize> = (0..batch)
                    .map(|_| {
                        let len = random.below(self.max.min(left * page) + 1);
                        left -= len.div_ceil(*page);
                        len
                    })
                    .collect();
                let rows = Ragged { starts: starts(&lens), ..self.clone() };
                rows.in_pages((*page, 1), *pages, *columns, random)
            }
        }
    }

    /// The page table with some used entries that name no page, and the rows, end to end, that are lost by
    /// it: those of the first page of every second sequence.
    pub fn bad_pages(&self) -> (Vec<i32>, Vec<std::ops::Range<usize>>) {
        let Store::Paged { page, pages, columns, table } = &self.store else { return Default::default() };
        let mut table = table.clone();
        let nowhere = [index(*pages), -1, i32::MAX];
        let mut lost = Vec::new();
        for b in (0..self.sequences()).step_by(2).filter(|&b| self.len(b) > 0) {
            table[b * columns] = nowhere[b / 2 % nowhere.len()];
            lost.push(self.start(b)..self.start(b) + self.len(b).min(*page));
        }
        (table, lost)
    }

    /// The same sequences end to end.
    pub fn contiguous(&self) -> Ragged {
        let lens: Vec<usize> = (0..self.sequences()).map(|b| self.len(b)).collect();
        Ragged::packed(&lens, 0).bounded(self.max)
    }

    /// How many sequences there are.
    pub fn sequences(&self) -> usize {
        self.starts.len() - 1
    }

    /// Rows of a sequence.
    pub fn len(&self, sequence: usize) -> usize {
        self.starts[sequence + 1] - self.starts[sequence]
    }

    /// Rows before a sequence's first where sequences stand end to end, as they do on the host.
    pub fn start(&self, sequence: usize) -> usize {
        self.starts[sequence]
    }

    /// Rows of all sequences.
    pub fn total(&self) -> usize {
        self.starts[self.sequences()]
    }

    /// The sequence that a row belongs to where sequences stand end to end.
    pub fn sequence_of(&self, row: usize) -> usize {
        self.starts.partition_point(|&start| start <= row) - 1
    }

    /// The layout of rows.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// What the host knows.
    pub fn side(&self) -> Side {
        let rows = match self.store {
            Store::Padded { len } => SideRows::Padded { len },
            Store::Packed { total, .. } => SideRows::Packed { total, max: self.max },
            Store::Paged { page, pages, .. } => SideRows::Paged { page, pages, max: self.max },
        };
        Side { rows, used: self.used }
    }

    /// The first two indices of a row in a tensor of [`Ragged::shape`].
    pub fn place(&self, sequence: usize, row: usize) -> [usize; 2] {
        match &self.store {
            Store::Padded { .. } => [sequence, row],
            Store::Packed { cu, .. } => [0, cu[sequence] as usize + row],
            Store::Paged { page, columns, table, .. } => {
                [table[sequence * columns + row / page] as usize, row % page]
            }
        }
    }

    /// The tensor: `[batch, len, heads, dim]`, `[1, total, heads, dim]` or `[pages, page, heads, dim]`.
    pub fn shape(&self, heads: usize, dim: usize) -> [usize; 4] {
        match self.store {
            Store::Padded { len } => [self.sequences(), len, heads, dim],
            Store::Packed { total, .. } => [1, total, heads, dim],
            Store::Paged { page, pages, .. } => [pages, page, heads, dim],
        }
    }

    /// Elements of the LSEs of these rows: `[batch, heads, len]`, or `[heads, total]` of packed ones.
    pub fn lse_len(&self, heads: usize) -> usize {
        self.shape(heads, 1).iter().product()
    }

    /// Where the LSE of a row lies.
    pub fn lse_place(&self, heads: usize, sequence: usize, head: usize, row: usize) -> usize {
        let [outer, rows, ..] = self.shape(heads, 1);
        let [entry, row] = self.place(sequence, row);
        debug_assert!(entry < outer.max(1));
        (entry * heads + head) * rows + row
    }

    /// `cu_seqlens`, where there are.
    pub fn cu(&self) -> Option<&[i32]> {
        match &self.store {
            Store::Packed { cu, .. } => Some(cu),
            Store::Padded { .. } | Store::Paged { .. } => None,
        }
    }

    /// The array of lengths (`seqused`), where there is one.
    pub fn used(&self) -> Option<Vec<i32>> {
        self.used.then(|| (0..self.sequences()).map(|b| index(self.len(b))).collect())
    }

    /// The page table, where there is one.
    pub fn table(&self) -> Option<&[i32]> {
        match &self.store {
            Store::Paged { table, .. } => Some(table),
            Store::Padded { .. } | Store::Packed { .. } => None,
        }
    }

    /// Its name in cases: `1024`, `packed 4000/1500`, `pages of 16`.
    pub(super) fn name(&self) -> String {
        let used = if self.used { " used" } else { "" };
        match self.store {
            Store::Padded { len } => format!("{len}{used}"),
            Store::Packed { total, .. } => format!("packed{total}/{}{used}", self.max),
            Store::Paged { page, pages, .. } => format!("{pages}pages{page}/{}", self.max),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::HashSet;

    use fa_core::Lengths;

    use super::*;

    pub(in crate::sequences) fn every(random: &mut Random) -> Vec<Ragged> {
        let lens = [3, 0, 17, 1, 8];
        vec![
            Ragged::uniform(5, 9),
            Ragged::padded(&lens, 20),
            Ragged::packed(&lens, 0),
            Ragged::packed(&lens, 6).bounded(30),
            Ragged::packed_in(&lens, &[4, 5, 17, 3, 8], 2),
            Ragged::paged(&lens, 1, 3, random),
            Ragged::paged(&lens, 4, 0, random),
            Ragged::paged(&lens, 16, 2, random).bounded(70),
            Ragged::paged(&[0, 0], 16, 2, random).bounded(20),
        ]
    }

    #[test]
    fn rows_of_sequences_lie_apart_and_within_their_tensor() {
        let mut random = Random::new(3);
        for rows in every(&mut random) {
            let [outer, inner, ..] = rows.shape(2, 8);
            let mut seen = HashSet::new();
            let mut lses = HashSet::new();
            for b in 0..rows.sequences() {
                for r in 0..rows.len(b) {
                    let [n, s] = rows.place(b, r);
                    assert!(n < outer && s < inner && seen.insert((n, s)), "{rows:?}");
                    assert_eq!(rows.sequence_of(rows.start(b) + r), b);
                    for head in 0..3 {
                        let at = rows.lse_place(3, b, head, r);
                        assert!(at < rows.lse_len(3) && lses.insert(at), "{rows:?}");
                    }
                }
            }
            assert_eq!(seen.len(), rows.total());
            assert!(rows.side().max() >= (0..rows.sequences()).map(|b| rows.len(b)).max().unwrap());
        }
    }

    #[test]
    fn the_arrays_say_the_lengths() {
        let mut random = Random::new(4);
        for rows in every(&mut random) {
            let told: Vec<usize> = match (rows.used(), rows.cu()) {
                (Some(used), _) => used.iter().map(|&len| len as usize).collect(),
                (None, Some(cu)) => cu.windows(2).map(|ends| (ends[1] - ends[0]) as usize).collect(),
                (None, None) => vec![rows.side().max(); rows.sequences()],
            };
            assert_eq!(told, (0..rows.sequences()).map(|b| rows.len(b)).collect::<Vec<_>>());
            if let Some(table) = rows.table() {
                let lengths = Lengths::of(rows.sequences(), Side::padded(1), rows.side());
                assert_eq!(table.len(), rows.sequences() * lengths.table_columns());
            }
        }
    }

    #[test]
    fn unused_entries_of_a_table_point_nowhere() {
        let rows = Ragged::paged(&[5, 30, 0], 8, 1, &mut Random::new(1)).bounded(64);
        let table = rows.table().expect("a table");
        assert_eq!(table.len(), 3 * 8);
        for (b, row) in table.chunks(8).enumerate() {
            let own = rows.len(b).div_ceil(8);
            assert!(row[..own].iter().all(|page| (0..6).contains(page)));
            assert!(row[own..].iter().all(|page| GARBAGE.contains(page)));
        }
    }

    #[test]
    fn bad_pages_lose_the_rows_of_their_pages() {
        let rows = Ragged::paged(&[5, 30, 0, 9, 20], 8, 1, &mut Random::new(1));
        let (table, lost) = rows.bad_pages();
        assert_eq!(lost, [0..5, 44..52]);
        let changed = table.iter().zip(rows.table().expect("a table")).filter(|(bad, own)| bad != own);
        assert!(changed.clone().count() == 2 && changed.clone().all(|(&bad, _)| !(0..10).contains(&bad)));
        assert_eq!(Ragged::packed(&[5, 3], 0).bad_pages(), Default::default());
    }

    #[test]
    fn other_lengths_fit_the_same_memory() {
        let mut random = Random::new(5);
        for rows in every(&mut random) {
            for _ in 0..50 {
                let again = rows.drawn_again(&mut random);
                assert_eq!(again.shape(2, 8), rows.shape(2, 8));
                assert_eq!(again.side(), rows.side());
                assert_eq!(again.cu().map(<[i32]>::len), rows.cu().map(<[i32]>::len));
                assert_eq!(again.table().map(<[i32]>::len), rows.table().map(<[i32]>::len));
            }
        }
    }
}
