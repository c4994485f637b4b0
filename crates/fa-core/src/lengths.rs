//! How many queries and keys the sequences of a batch have, and how their rows lie in memory.

/// The sequences of a batch: how many there are, and the queries and keys of each.
///
/// Callers ask for what they need (the longest sequence, or all of them together) and not for how the batch
/// is laid out: for one tile grid, [`Lengths::max_q`]; for sizes of memory, [`Lengths::total_q`]. Lengths
/// that differ from sequence to sequence are known on the device only: the host has upper bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lengths {
    sequences: usize,
    q: Side,
    k: Side,
}

/// The rows of one side of a batch: queries, or keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Side {
    /// Layout of the rows.
    pub rows: SideRows,
    /// Whether a tensor of lengths on the device, i32 `[batch]` (`seqused`, `cache_seqlens`), shortens each
    /// sequence.
    pub used: bool,
}

/// Where the rows of a sequence lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SideRows {
    /// `[batch, len, heads, dim]`: the same number of rows for each sequence.
    Padded {
        /// Rows of a sequence.
        len: usize,
    },
    /// `[total, heads, dim]`: sequences end to end, their starts in `cu_seqlens` (i32 `[batch + 1]`).
    Packed {
        /// Rows of the tensor; rows behind `cu_seqlens[batch]` are never read or written.
        total: usize,
        /// Upper bound on the rows in use of a sequence.
        max: usize,
    },
    /// `[pages, page, heads_kv, dim]`: a cache whose pages a table (i32 `[batch, ceil(max / page)]`) assigns
    /// to the sequences. Keys only.
    Paged {
        /// Rows of a page.
        page: usize,
        /// Pages of the cache.
        pages: usize,
        /// Upper bound on the rows in use of a sequence.
        max: usize,
    },
}

impl Side {
    /// `len` rows for each sequence.
    pub const fn padded(len: usize) -> Side {
        Side { rows: SideRows::Padded { len }, used: false }
    }

    /// Sequences of at most `max` rows, end to end in a tensor of `total`.
    pub const fn packed(total: usize, max: usize) -> Side {
        Side { rows: SideRows::Packed { total, max }, used: false }
    }

    /// Sequences of at most `max` rows in pages of `page` rows, of which a cache has `pages`. Their lengths
    /// are on the device.
    pub const fn paged(page: usize, pages: usize, max: usize) -> Side {
        Side { rows: SideRows::Paged { page, pages, max }, used: true }
    }

    /// The same rows, of which each sequence uses a prefix; its length is on the device.
    pub const fn with_used(self) -> Side {
        Side { rows: self.rows, used: true }
    }

    /// Rows of the sequence that has the most: an upper bound where the lengths are on the device.
    pub const fn max(&self) -> usize {
        match self.rows {
            SideRows::Padded { len } => len,
            SideRows::Packed { max, .. } | SideRows::Paged { max, .. } => max,
        }
    }

    /// Rows of the tensor for a batch of `sequences`; at most `usize::MAX`.
    pub const fn total(&self, sequences: usize) -> usize {
        match self.rows {
            SideRows::Padded { len } => sequences.saturating_mul(len),
            SideRows::Packed { total, .. } => total,
            SideRows::Paged { page, pages, .. } => page.saturating_mul(pages),
        }
    }

    /// Whether every sequence has the same number of rows, and the host knows it.
    pub const fn is_uniform(&self) -> bool {
        matches!(self.rows, SideRows::Padded { .. }) && !self.used
    }

    /// Whether the sequences lie end to end.
    pub const fn is_packed(&self) -> bool {
        matches!(self.rows, SideRows::Packed { .. })
    }

    /// The most rows that the sequences can have together: what a pass may read.
    const fn reach(&self, sequences: usize) -> usize {
        let (total, all) = (self.total(sequences), sequences.saturating_mul(self.max()));
        if total < all { total } else { all }
    }

    /// The most tiles of `tile` rows that `sequences` sequences can have, each row counting `group` times.
    const fn most_tiles(&self, sequences: usize, tile: u32) -> usize {
        let tile = if tile > 0 { tile as usize } else { 1 };
        let all = sequences.saturating_mul(self.max().div_ceil(tile));
        // Of packed sequences each has one tile at most that is not full.
        let packed = (self.reach(sequences) / tile).saturating_add(sequences);
        if packed < all { packed } else { all }
    }

    /// [`Side::reach`] per sequence, rounded up.
    const fn mean(&self, sequences: usize) -> usize {
        match sequences {
            0 => self.max(),
            _ => self.reach(sequences).div_ceil(sequences),
        }
    }
}

impl Lengths {
    /// `batch` sequences of `q` queries and `k` keys each.
    pub const fn uniform(batch: usize, q: usize, k: usize) -> Lengths {
        Lengths { sequences: batch, q: Side::padded(q), k: Side::padded(k) }
    }

    /// `batch` sequences of at most `max_q` queries and `max_k` keys, both packed end to end.
    pub const fn packed(batch: usize, total_q: usize, total_k: usize, max_q: usize, max_k: usize) -> Lengths {
        Lengths { sequences: batch, q: Side::packed(total_q, max_q), k: Side::packed(total_k, max_k) }
    }

    /// `batch` sequences with these sides. Keys in pages always have used lengths.
    pub const fn of(batch: usize, q: Side, k: Side) -> Lengths {
        let used = k.used || matches!(k.rows, SideRows::Paged { .. });
        Lengths { sequences: batch, q, k: Side { rows: k.rows, used } }
    }

    /// The queries' side.
    pub const fn q(&self) -> Side {
        self.q
    }

    /// The side of keys and values.
    pub const fn k(&self) -> Side {
        self.k
    }

    /// Sequences of the batch.
    pub const fn sequences(&self) -> usize {
        self.sequences
    }

    /// Queries of the sequence that has the most: an upper bound where lengths are on the device.
    pub const fn max_q(&self) -> usize {
        self.q.max()
    }

    /// Keys of the sequence that has the most: an upper bound where lengths are on the device.
    pub const fn max_k(&self) -> usize {
        self.k.max()
    }

    /// Rows of Q's tensor: the queries of all sequences together where no row is unused; at most
    /// `usize::MAX`.
    pub const fn total_q(&self) -> usize {
        self.q.total(self.sequences)
    }

    /// Rows of K's tensor: the keys of all sequences together where no row is unused, and `pages *
    /// page` for a cache in pages; at most `usize::MAX`.
    pub const fn total_k(&self) -> usize {
        self.k.total(self.sequences)
    }

    /// The most queries that the sequences can have together: [`Lengths::total_q`], but no more than
    /// [`Lengths::max_q`] each. What a pass may read and write.
    pub const fn reach_q(&self) -> usize {
        self.q.reach(self.sequences)
    }

    /// The most keys that the sequences can have together: [`Lengths::total_k`], but no more than
    /// [`Lengths::max_k`] each. What a pass may read.
    pub const fn reach_k(&self) -> usize {
        self.k.reach(self.sequences)
    }

    /// Queries of a sequence as far as the host knows, rounded up: for estimates of cost.
    pub const fn mean_q(&self) -> usize {
        self.q.mean(self.sequences)
    }

    /// Keys of a sequence as far as the host knows, rounded up: for estimates of cost.
    pub const fn mean_k(&self) -> usize {
        self.k.mean(self.sequences)
    }

    /// Whether every sequence has the same lengths and the host knows them. Everything else takes a kernel
    /// that reads lengths on the device.
    pub const fn is_uniform(&self) -> bool {
        self.q.is_uniform() && self.k.is_uniform()
    }

    /// Whether each sequence has as many queries as keys, as far as the host knows: sequences that are
    /// packed, or used in part, may differ one by one.
    pub const fn is_square(&self) -> bool {
        self.max_q() == self.max_k() && self.reach_q() == self.reach_k()
    }

    /// The most tiles of `tile` queries that all sequences can have.
    pub const fn most_tiles_q(&self, tile: u32) -> usize {
        self.q.most_tiles(self.sequences, tile)
    }

    /// The most tiles of `tile` rows that the keys of all sequences can have.
    pub const fn most_tiles_k(&self, tile: u32) -> usize {
        self.k.most_tiles(self.sequences, tile)
    }

    /// Rows of a page of keys; `None` where keys do not lie in pages.
    pub const fn page(&self) -> Option<usize> {
        match self.k.rows {
            SideRows::Paged { page, .. } => Some(page),
            SideRows::Padded { .. } | SideRows::Packed { .. } => None,
        }
    }

    /// Entries of a sequence's row of the page table, `ceil(max_k / page)`; 0 where keys do not lie in pages.
    pub const fn table_columns(&self) -> usize {
        match self.k.rows {
            SideRows::Paged { page, max, .. } if page > 0 => max.div_ceil(page),
            SideRows::Paged { .. } | SideRows::Padded { .. } | SideRows::Packed { .. } => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_are_over_all_sequences() {
        let lengths = Lengths::uniform(3, 5, 7);
        assert_eq!((lengths.sequences(), lengths.max_q(), lengths.max_k()), (3, 5, 7));
        assert_eq!((lengths.total_q(), lengths.total_k()), (15, 21));
        assert_eq!((lengths.mean_q(), lengths.mean_k()), (5, 7));
        assert!(!lengths.is_square() && Lengths::uniform(3, 5, 5).is_square());
        assert!(lengths.is_uniform() && lengths.page().is_none());
        assert_eq!(Lengths::uniform(2, usize::MAX, 0).total_q(), usize::MAX);
    }

    #[test]
    fn packed_sequences_have_bounds_and_a_mean() {
        let lengths = Lengths::packed(4, 10, 100, 6, 20);
        assert_eq!((lengths.total_q(), lengths.max_q(), lengths.mean_q()), (10, 6, 3));
        // Rows behind the last sequence's end are nobody's.
        assert_eq!((lengths.total_k(), lengths.reach_k(), lengths.mean_k()), (100, 80, 20));
        assert!(!lengths.is_uniform() && !lengths.is_square());
        assert!(Lengths::packed(2, 9, 9, 8, 8).is_square());
        assert_eq!(Lengths::packed(0, 0, 0, 8, 8).mean_q(), 8);
    }

    #[test]
    fn tiles_are_bounded_by_rows_and_by_sequences() {
        let tiles = |side: Side, sequences, group: u32, tile: u32| {
            Lengths::of(sequences, side, Side::padded(1)).most_tiles_q(tile / group)
        };
        assert_eq!(tiles(Side::padded(300), 3, 1, 128), 9);
        // 1000 rows in 10 sequences of any lengths: 7 full tiles and one that is not for each.
        assert_eq!(tiles(Side::packed(1000, 1000), 10, 1, 128), 17);
        assert_eq!(tiles(Side::packed(10, 1), 10, 4, 128), 10);
        assert_eq!(tiles(Side::packed(0, 8), 0, 1, 64), 0);
        assert!(tiles(Side::padded(usize::MAX), 2, 2, 64) > usize::MAX / 65);
        for lengths in [[1usize, 999, 0, 128, 129], [0, 0, 1, 1, 1], [300, 300, 300, 300, 300]] {
            let (total, max) = (lengths.iter().sum(), lengths.into_iter().max().expect("five"));
            let found: usize = lengths.iter().map(|len| (len * 3).div_ceil(64)).sum();
            assert!(found <= tiles(Side::packed(total, max), 5, 3, 64));
            let keys = Lengths::of(5, Side::padded(1), Side::packed(total, max));
            assert_eq!(keys.most_tiles_k(64), tiles(Side::packed(total, max), 5, 1, 64));
        }
    }

    #[test]
    fn used_lengths_make_a_padded_batch_varied() {
        let lengths = Lengths::of(2, Side::padded(1), Side::padded(64).with_used());
        assert!(!lengths.is_uniform() && lengths.q().is_uniform() && lengths.k().used);
        assert_eq!((lengths.total_k(), lengths.max_k()), (128, 64));
    }

    #[test]
    fn keys_in_pages_have_used_lengths_and_a_table() {
        let rows = SideRows::Paged { page: 16, pages: 10, max: 100 };
        let lengths = Lengths::of(3, Side::packed(3, 1), Side { rows, used: false });
        assert_eq!(lengths, Lengths::of(3, Side::packed(3, 1), Side::paged(16, 10, 100)));
        assert_eq!((lengths.page(), lengths.table_columns()), (Some(16), 7));
        assert_eq!((lengths.total_k(), lengths.reach_k(), lengths.mean_k()), (160, 160, 54));
        assert!(!lengths.is_uniform());
        assert_eq!(Lengths::of(3, Side::padded(1), Side::paged(0, 10, 100)).table_columns(), 0);
        assert_eq!(Lengths::uniform(3, 5, 7).table_columns(), 0);
    }
}
