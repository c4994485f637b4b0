//! Which keys a query sees, and which tiles of keys a tile of queries has to visit.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::with_methods;

/// A band of visible keys around the diagonal, aligned to the bottom right corner.
///
/// With `d = i + seqlen_k - seqlen_q + offset`, query `i` sees the keys `j` with `d - left <= j <= d + right`
/// (a side that is `None` has no limit). Causal is `right = 0`. The offset moves queries away from the bottom
/// right corner, as where they or the keys are a part of a sequence; ALiBi's distances move with them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Mask {
    /// How many keys left of the diagonal are visible; `None` for all.
    pub left: Option<u32>,
    /// How many keys right of the diagonal are visible; `None` for all, `0` for causal.
    pub right: Option<u32>,
    /// How many keys the diagonal lies right of the bottom-right alignment.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub offset: i64,
}

#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_zero(offset: &i64) -> bool {
    *offset == 0
}

/// The tiles of `tile_n` keys that a range of queries has to visit.
///
/// Every visible pair lies in `begin..end`; of these tiles, `full_begin..full_end` need no mask at all. Tiles
/// outside `full_begin..full_end` need per-element masking. Empty ranges have `begin == end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRange {
    /// First tile to visit.
    pub begin: usize,
    /// One past the last tile to visit.
    pub end: usize,
    /// First tile in which every pair is visible.
    pub full_begin: usize,
    /// One past the last tile in which every pair is visible.
    pub full_end: usize,
}

impl BlockRange {
    /// Tiles to visit.
    pub fn len(&self) -> usize {
        self.end - self.begin
    }

    /// Whether no tile has to be visited.
    pub fn is_empty(&self) -> bool {
        self.begin == self.end
    }

    /// Tiles that need per-element masking.
    pub fn masked(&self) -> usize {
        self.len() - (self.full_end - self.full_begin)
    }
}

impl Mask {
    /// Every key is visible.
    pub const FULL: Mask = Mask::band(None, None);
    /// No key right of the (bottom-right aligned) diagonal is visible.
    pub const CAUSAL: Mask = Mask::band(None, Some(0));

    /// A band with these limits, `None` for none, around the bottom-right diagonal.
    pub const fn band(left: Option<u32>, right: Option<u32>) -> Mask {
        Mask { left, right, offset: 0 }
    }

    with_methods! {
        with_left(left: Option<u32>),
        with_right(right: Option<u32>),
        with_offset(offset: i64),
    }

    /// `left` keys before the diagonal, the diagonal, and `right` keys after it.
    pub const fn window(left: u32, right: u32) -> Mask {
        Mask::band(Some(left), Some(right))
    }

    /// `left` keys before the diagonal and the diagonal itself.
    pub const fn causal_window(left: u32) -> Mask {
        Mask::window(left, 0)
    }

    /// The mask of queries and keys exchanged: which queries see a key. Key `j` lies on query `j + seqlen_q -
    /// seqlen_k - offset`, in a band with its sides exchanged.
    pub const fn transposed(&self) -> Mask {
        Mask { left: self.right, right: self.left, offset: self.offset.saturating_neg() }
    }

    /// The keys left and right of the bottom-right diagonal that are visible: the limits with the offset, by
    /// which a side may be negative.
    pub const fn limits(&self) -> [Option<i64>; 2] {
        const fn moved(side: Option<u32>, by: i64) -> Option<i64> {
            match side {
                Some(side) => Some(by.saturating_add(side as i64)),
                None => None,
            }
        }
        [moved(self.left, self.offset.saturating_neg()), moved(self.right, self.offset)]
    }

    /// Whether the window's limits hold the offset, as kernels need: no side is negative.
    pub fn holds_offset(&self) -> bool {
        self.limits().into_iter().flatten().all(|limit| limit >= 0)
    }

    /// Whether every key is visible whatever the lengths.
    pub const fn is_full(&self) -> bool {
        self.left.is_none() && self.right.is_none()
    }

    /// Whether this is exactly the causal mask.
    pub const fn is_causal(&self) -> bool {
        self.left.is_none() && matches!(self.right, Some(0)) && self.offset == 0
    }

    /// The key that query `i` lies on, which may be none of the sequence.
    pub fn diagonal(&self, i: usize, seqlen_q: usize, seqlen_k: usize) -> i128 {
        i as i128 + seqlen_k as i128 - seqlen_q as i128 + i128::from(self.offset)
    }

    /// The keys that query `i` sees, as a range within `0..seqlen_k` (possibly empty).
    pub fn keys(&self, i: usize, seqlen_q: usize, seqlen_k: usize) -> Range<usize> {
        let diagonal = self.diagonal(i, seqlen_q, seqlen_k);
        let clamp = |key: i128| key.clamp(0, seqlen_k as i128) as usize;
        let begin = self.left.map_or(0, |left| clamp(diagonal - i128::from(left)));
        let end = self.right.map_or(seqlen_k, |right| clamp(diagonal + i128::from(right) + 1));
        begin..end.max(begin)
    }

    /// Whether query `i` sees key `j`.
    pub fn visible(&self, i: usize, j: usize, seqlen_q: usize, seqlen_k: usize) -> bool {
        self.keys(i, seqlen_q, seqlen_k).contains(&j)
    }

    /// The keys that some query sees, as a range within `0..seqlen_k` (possibly empty). It has no gap: the
    /// ranges of neighbouring queries touch.
    pub fn keys_of_all(&self, seqlen_q: usize, seqlen_k: usize) -> Range<usize> {
        let Some(last) = seqlen_q.checked_sub(1) else { return 0..0 };
        let (first, last) = (self.keys(0, seqlen_q, seqlen_k), self.keys(last, seqlen_q, seqlen_k));
        // The first queries of a causal mask may see nothing, which is at key 0; so may the last, at the end.
        first.start..last.end.max(first.start)
    }

    /// The number of visible (query, key) pairs; lengths count up to 2^62.
    pub fn pairs(&self, seqlen_q: usize, seqlen_k: usize) -> u128 {
        // Lengths that no problem has, whose products would not fit.
        let (sq, sk) = (seqlen_q.min(MAX_LEN) as i128, seqlen_k.min(MAX_LEN) as i128);
        // Row i ends at clamp(i + end) and begins at clamp(i + begin), so the count is a difference of two
        // clamped sums.
        let first = sk - sq + i128::from(self.offset);
        let end = self.right.map_or(sk * sq, |right| clamped_sum(first + i128::from(right) + 1, sq, sk));
        let begin = self.left.map_or(0, |left| clamped_sum(first - i128::from(left), sq, sk));
        (end - begin) as u128
    }

    /// The tiles of `tile_n` keys that the queries `rows` (within `0..seqlen_q`) have to visit.
    ///
    /// A `tile_n` of 0 counts as 1.
    pub fn n_blocks(
        &self,
        rows: Range<usize>,
        seqlen_q: usize,
        seqlen_k: usize,
        tile_n: usize,
    ) -> BlockRange {
        if rows.is_empty() {
            return BlockRange { begin: 0, end: 0, full_begin: 0, full_end: 0 };
        }
        let (first, last) =
            (self.keys(rows.start, seqlen_q, seqlen_k), self.keys(rows.end - 1, seqlen_q, seqlen_k));
        blocks(first.start..last.end, last.start..first.end, seqlen_k, tile_n)
    }

    /// The tiles of `tile_m` queries that see one of the keys `columns` (within `0..seqlen_k`): those that a
    /// backward's mainloop visits.
    ///
    /// A `tile_m` of 0 counts as 1.
    pub fn m_blocks(
        &self,
        columns: Range<usize>,
        seqlen_q: usize,
        seqlen_k: usize,
        tile_m: usize,
    ) -> BlockRange {
        if columns.is_empty() {
            return BlockRange { begin: 0, end: 0, full_begin: 0, full_end: 0 };
        }
        self.transposed().n_blocks(columns, seqlen_k, seqlen_q, tile_m)
    }
}

/// Of [`Mask::pairs`].
const MAX_LEN: usize = 1 << 62;

/// The sum of `clamp(i + offset, 0, limit)` over `i` in `0..count`.
fn clamped_sum(offset: i128, count: i128, limit: i128) -> i128 {
    let rising_begin = (-offset).clamp(0, count);
    let rising_end = (limit - offset).clamp(rising_begin, count);
    let rising = rising_end - rising_begin;
    rising * offset + (rising_begin + rising_end - 1) * rising / 2 + (count - rising_end) * limit
}

/// Tiles that meet `visible` and, among them, those that lie within `full` (all rows see them whole).
fn blocks(visible: Range<usize>, full: Range<usize>, len: usize, tile: usize) -> BlockRange {
    if visible.is_empty() {
        return BlockRange { begin: 0, end: 0, full_begin: 0, full_end: 0 };
    }
    let tile = tile.max(1);
    let (begin, end) = (visible.start / tile, visible.end.div_ceil(tile));
    // A ragged last tile needs a mask even where every key in it is visible.
    let whole_end = full.end.min(len) / tile;
    let full_begin = full.start.div_ceil(tile).clamp(begin, end);
    BlockRange { begin, end, full_begin, full_end: whole_end.clamp(full_begin, end) }
}

impl fmt::Display for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |side: Option<u32>| side.map_or("inf".to_owned(), |n| n.to_string());
        let text = match (self.left, self.right) {
            (None, None) => "full".to_owned(),
            (None, Some(0)) => "causal".to_owned(),
            (Some(left), Some(0)) => format!("causal+window({left})"),
            (left, right) => format!("window({},{})", side(left), side(right)),
        };
        let moved = if self.offset == 0 { String::new() } else { format!("+offset({})", self.offset) };
        f.pad(&(text + &moved))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MASKS: [Mask; 17] = [
        Mask::FULL,
        Mask::CAUSAL,
        Mask::window(0, 0),
        Mask::window(3, 2),
        Mask::window(0, 7),
        Mask::causal_window(5),
        Mask::band(Some(4), None),
        Mask::band(None, Some(6)),
        Mask::window(100, 100),
        Mask::CAUSAL.with_offset(4),
        Mask::CAUSAL.with_offset(-3),
        Mask::window(3, 2).with_offset(-5),
        Mask::window(3, 2).with_offset(7),
        Mask::band(Some(4), None).with_offset(6),
        Mask::band(None, Some(6)).with_offset(-20),
        Mask::window(0, 0).with_offset(40),
        Mask::FULL.with_offset(-2),
    ];

    /// The definition, element by element.
    fn sees(mask: &Mask, i: usize, j: usize, sq: usize, sk: usize) -> bool {
        let distance = j as i64 - (i as i64 + sk as i64 - sq as i64 + mask.offset);
        mask.left.is_none_or(|left| distance >= -i64::from(left))
            && mask.right.is_none_or(|right| distance <= i64::from(right))
    }

    fn for_each_case(mut check: impl FnMut(&Mask, usize, usize)) {
        for mask in &MASKS {
            for sq in 0..14 {
                for sk in 0..14 {
                    check(mask, sq, sk);
                }
            }
        }
    }

    #[test]
    fn keys_and_pairs_follow_the_definition() {
        for_each_case(|mask, sq, sk| {
            let mut pairs = 0;
            for i in 0..sq {
                for j in 0..sk {
                    let expected = sees(mask, i, j, sq, sk);
                    assert_eq!(mask.visible(i, j, sq, sk), expected, "{mask} q{i} k{j} of {sq}x{sk}");
                    pairs += u128::from(expected);
                }
            }
            assert_eq!(mask.pairs(sq, sk), pairs, "{mask} {sq}x{sk}");
        });
    }

    #[test]
    fn keys_of_all_are_those_that_some_query_sees() {
        for_each_case(|mask, sq, sk| {
            let some = |j: usize| (0..sq).any(|i| sees(mask, i, j, sq, sk));
            let range = mask.keys_of_all(sq, sk);
            for j in 0..sk {
                assert_eq!(range.contains(&j), some(j), "{mask} {sq} x {sk}: key {j}, {range:?}");
            }
        });
    }

    #[test]
    fn block_ranges_cover_what_is_visible_and_split_it_rightly() {
        for_each_case(|mask, sq, sk| {
            for tile_n in [1, 3, 4] {
                for m0 in 0..sq {
                    for m1 in m0..=sq {
                        let range = mask.n_blocks(m0..m1, sq, sk, tile_n);
                        check_range(&range, m0..m1, sk, tile_n, |i, j| sees(mask, i, j, sq, sk));
                    }
                }
            }
            for tile_m in [1, 3, 4] {
                for n0 in 0..sk {
                    for n1 in n0..=sk {
                        let range = mask.m_blocks(n0..n1, sq, sk, tile_m);
                        check_range(&range, n0..n1, sq, tile_m, |j, i| sees(mask, i, j, sq, sk));
                    }
                }
            }
        });
    }

    /// The dQ semaphore of a deterministic backward relies on it: exactly the tiles of keys that a tile of
    /// queries visits also visit that tile.
    #[test]
    fn tiles_of_keys_and_of_queries_visit_one_another() {
        for_each_case(|mask, sq, sk| {
            for (tile_m, tile_n) in [(1, 1), (1, 4), (3, 1), (3, 4), (4, 3), (5, 5), (20, 3)] {
                for m in 0..sq.div_ceil(tile_m) {
                    let rows = m * tile_m..((m + 1) * tile_m).min(sq);
                    let keys = mask.n_blocks(rows, sq, sk, tile_n);
                    for n in 0..sk.div_ceil(tile_n) {
                        let columns = n * tile_n..((n + 1) * tile_n).min(sk);
                        let queries = mask.m_blocks(columns, sq, sk, tile_m);
                        let there = (keys.begin..keys.end).contains(&n);
                        let back = (queries.begin..queries.end).contains(&m);
                        assert_eq!(
                            there, back,
                            "{mask} {sq}x{sk}: queries {m} of {tile_m}, keys {n} of {tile_n}"
                        );
                    }
                }
            }
        });
    }

    fn check_range(
        range: &BlockRange,
        rows: Range<usize>,
        len: usize,
        tile: usize,
        sees: impl Fn(usize, usize) -> bool,
    ) {
        assert!(
            range.begin <= range.full_begin
                && range.full_begin <= range.full_end
                && range.full_end <= range.end
        );
        for block in 0..len.div_ceil(tile) {
            let mut visible =
                (block * tile..(block + 1) * tile).flat_map(|j| rows.clone().map(move |i| (i, j)));
            if (range.full_begin..range.full_end).contains(&block) {
                assert!(
                    visible.all(|(i, j)| j < len && sees(i, j)),
                    "tile {block} of {range:?} needs a mask"
                );
            } else if !(range.begin..range.end).contains(&block) {
                assert!(
                    !visible.any(|(i, j)| j < len && sees(i, j)),
                    "tile {block} is missing from {range:?}"
                );
            } else {
                let all = visible.all(|(i, j)| j < len && sees(i, j));
                assert!(!all, "tile {block} of {range:?} needs no mask");
            }
        }
    }

    #[test]
    fn pairs_do_not_overflow_on_long_sequences() {
        let n = 1usize << 40;
        assert_eq!(Mask::CAUSAL.pairs(n, n), (1u128 << 79) + (1 << 39));
    }

    #[test]
    fn pairs_of_impossible_lengths_are_many_and_no_panic() {
        for (left, right) in
            [(None, None), (None, Some(0)), (Some(u32::MAX), Some(u32::MAX)), (Some(0), None)]
        {
            for offset in [0, i64::MAX, i64::MIN] {
                let mask = Mask::band(left, right).with_offset(offset);
                for (sq, sk) in
                    [(usize::MAX, usize::MAX), (usize::MAX, 1), (1, usize::MAX), (1 << 63, 1 << 62)]
                {
                    assert!(mask.pairs(sq, sk) <= 1 << 124, "{mask} {sq} {sk}");
                }
            }
        }
        assert_eq!(Mask::FULL.pairs(usize::MAX, usize::MAX), 1 << 124);
    }

    #[test]
    fn an_offset_moves_the_limits_and_text_has_it_where_there_is_one() {
        assert_eq!(Mask::CAUSAL.with_offset(4).limits(), [None, Some(4)]);
        let held =
            [Mask::FULL.with_offset(-9), Mask::CAUSAL.with_offset(4), Mask::window(3, 2).with_offset(3)];
        assert!(held.iter().all(Mask::holds_offset));
        assert!(
            !Mask::CAUSAL.with_offset(-1).holds_offset() && !Mask::window(3, 2).with_offset(4).holds_offset()
        );
        assert_eq!(Mask::window(3, 2).with_offset(5).limits(), [Some(-2), Some(7)]);
        assert_eq!(Mask::window(3, 2).with_offset(i64::MIN).limits(), [Some(i64::MAX), Some(i64::MIN + 2)]);
        assert!(!Mask::CAUSAL.with_offset(1).is_causal() && Mask::FULL.with_offset(1).is_full());
        for (mask, text) in [
            (Mask::CAUSAL, r#"{"left":null,"right":0}"#),
            (Mask::CAUSAL.with_offset(-3), r#"{"left":null,"right":0,"offset":-3}"#),
        ] {
            assert_eq!(serde_json::to_string(&mask).unwrap(), text);
            assert_eq!(serde_json::from_str::<Mask>(text).unwrap(), mask);
        }
        for_each_case(|mask, sq, sk| {
            let [left, right] = mask.limits();
            for (i, j) in (0..sq).flat_map(|i| (0..sk).map(move |j| (i, j))) {
                let distance = j as i64 - (i as i64 + sk as i64 - sq as i64);
                let inside = left.is_none_or(|n| distance >= -n) && right.is_none_or(|n| distance <= n);
                assert_eq!(inside, sees(mask, i, j, sq, sk), "{mask} {sq}x{sk} {i} {j}");
            }
        });
    }

    #[test]
    fn names() {
        let names: Vec<String> = MASKS.iter().map(Mask::to_string).collect();
        assert_eq!(
            names[..7],
            [
                "full",
                "causal",
                "causal+window(0)",
                "window(3,2)",
                "window(0,7)",
                "causal+window(5)",
                "window(4,inf)"
            ]
        );
        assert_eq!(names[9..12], ["causal+offset(4)", "causal+offset(-3)", "window(3,2)+offset(-5)"]);
    }
}
