//! A mask cut down to some rows and some keys: the problem that a kernel is given for them.

use std::ops::Range;

use fa_core::Mask;

use crate::shard::overlap;

/// Rows and keys of which at least one pair is visible, and the mask between them by a kernel's own
/// (bottom-right) alignment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    /// Rows of the sequence that see a key, and those between them.
    pub(crate) rows: Range<usize>,
    /// Keys of the sequence.
    pub(crate) keys: Range<usize>,
    /// The mask between them.
    pub(crate) mask: Mask,
    /// Where sequences begin among these rows and these keys, where they are packed.
    pub(crate) starts: Option<[Vec<i32>; 2]>,
}

/// The visible part of `mask` for `rows` and `keys` of a sequence of `len` queries and keys, whose first key
/// may be moved down to a multiple of `tile` for a kernel's tiles to be those of the whole sequence.
///
/// Rows and keys at the ends that see or are seen by nothing are left out: what is left of the mask is a band
/// that every kernel knows, without an offset.
pub(crate) fn block(
    mask: Mask,
    len: (usize, usize),
    rows: Range<usize>,
    keys: Range<usize>,
    tile: usize,
) -> Option<Block> {
    let diagonal = len.1 as i64 - len.0 as i64 + mask.offset;
    let (mut first, mut last) = (rows.start as i64, rows.end as i64);
    let (mut begin, mut end) = (keys.start as i64, keys.end as i64);
    // Row i sees the keys from i + diagonal - left to i + diagonal + right.
    if let Some(left) = mask.left.map(i64::from) {
        last = last.min(end + left - diagonal);
        begin = begin.max(first + diagonal - left);
    }
    if let Some(right) = mask.right.map(i64::from) {
        first = first.max(begin - right - diagonal);
        end = end.min(last + diagonal + right);
    }
    if first >= last || begin >= end {
        return None;
    }
    let low = (begin as usize / tile.max(1) * tile.max(1)).max(keys.start);
    // A kernel's diagonal ends in the corner of the last row and the last key.
    let shift = end - last - diagonal;
    // The last row's diagonal ends at the last key: sides that reach beyond all keys are none.
    let side = |side: Option<u32>, shift: i64, reach: i64| {
        let moved = i64::from(side?) + shift;
        if shift == 0 { side } else { u32::try_from(moved).ok().filter(|_| moved < reach) }
    };
    let (columns, count) = (end - low as i64 - 1, last - first - 1);
    let mask = Mask::band(side(mask.left, shift, columns), side(mask.right, -shift, count));
    Some(Block { rows: first as usize..last as usize, keys: low..end as usize, mask, starts: None })
}

/// What `rows` of packed sequences that begin at `starts` see of their own sequences' keys among `keys`,
/// under a mask that is causal or full. The keys are all of them, those of the rows, or others: of these at
/// most one sequence has rows and keys.
///
/// Under a causal mask keys end where the rows do, so that each sequence's diagonal ends in the corner of its
/// last row and key.
pub(crate) fn packed_block(
    mask: Mask,
    starts: &[i32],
    rows: Range<usize>,
    keys: Range<usize>,
    tile: usize,
) -> Option<Block> {
    let sequences = starts.windows(2).map(|pair| pair[0] as usize..pair[1] as usize).enumerate();
    let touched = |(number, whole): (usize, Range<usize>)| {
        Some((number, overlap(&whole, &rows)?, overlap(&whole, &keys)?, whole))
    };
    let mut touched = sequences.filter_map(touched);
    if overlap(&rows, &keys).is_none() {
        let (_, own, seen, whole) = touched.next()?;
        let inside = |range: Range<usize>| range.start - whole.start..range.end - whole.start;
        let back = |range: Range<usize>| range.start + whole.start..range.end + whole.start;
        let cut = block(mask, (whole.len(), whole.len()), inside(own), inside(seen), tile)?;
        return Some(Block { rows: back(cut.rows), keys: back(cut.keys), ..cut });
    }
    let seen = |(number, own, seen, whole): (usize, Range<usize>, Range<usize>, Range<usize>)| {
        let end = if mask.right.is_some() { own.end } else { seen.end };
        // Of the first sequence alone rows may be missing before these.
        let unseen = mask.left.map_or(0, |left| (own.start - whole.start).saturating_sub(left as usize));
        let begin = whole.start + unseen / tile.max(1) * tile.max(1);
        (number, own, begin.max(seen.start)..end)
    };
    let parts: Vec<(usize, Range<usize>, Range<usize>)> = touched.map(seen).collect();
    let (first, last) = (parts.first()?, parts.last()?);
    let (rows, keys) = (first.1.start..last.1.end, first.2.start..last.2.end);
    let (mut starts, mut next) = ([Vec::new(), Vec::new()], first.0);
    for (number, own, seen) in &parts {
        // Empty sequences before it count, too.
        for _ in next..=*number {
            starts[0].push((own.start - rows.start) as i32);
            starts[1].push((seen.start - keys.start) as i32);
        }
        next = number + 1;
    }
    starts[0].push(rows.len() as i32);
    starts[1].push(keys.len() as i32);
    Some(Block { rows, keys, mask, starts: Some(starts) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every cut of every small mask sees what the whole mask sees there, and nothing else.
    #[test]
    fn cuts_see_what_the_whole_mask_sees() {
        let masks = [
            Mask::FULL,
            Mask::CAUSAL,
            Mask::causal_window(2),
            Mask::window(3, 2),
            Mask::band(Some(1), None),
            Mask::band(None, Some(2)),
            Mask::window(0, 0),
            Mask::CAUSAL.with_offset(2),
            Mask::window(3, 2).with_offset(-3),
        ];
        let len = 9;
        for mask in masks {
            for (queries, total) in [(len, len), (len, len + 3), (len, len - 4)] {
                for (a, b) in pairs(queries) {
                    for (c, d) in pairs(total) {
                        for tile in [1, 4] {
                            check(mask, (queries, total), a..b, c..d, tile);
                        }
                    }
                }
            }
        }
    }

    fn pairs(len: usize) -> impl Iterator<Item = (usize, usize)> {
        (0..len).flat_map(move |a| (a + 1..=len).map(move |b| (a, b)))
    }

    fn check(mask: Mask, len: (usize, usize), rows: Range<usize>, keys: Range<usize>, tile: usize) {
        let text = format!("{mask} {len:?} {rows:?} {keys:?} {tile}");
        let cut = block(mask, len, rows.clone(), keys.clone(), tile);
        for i in rows {
            for j in keys.clone() {
                let seen = cut.as_ref().is_some_and(|cut| {
                    cut.rows.contains(&i)
                        && cut.keys.contains(&j)
                        && cut.mask.visible(
                            i - cut.rows.start,
                            j - cut.keys.start,
                            cut.rows.len(),
                            cut.keys.len(),
                        )
                });
                assert_eq!(seen, mask.visible(i, j, len.0, len.1), "{text}: ({i}, {j}) in {cut:?}");
            }
        }
    }
}
