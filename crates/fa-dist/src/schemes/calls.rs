//! The calls of a kernel between some queries and the keys of one rank: as few as the mask allows.

use std::ops::Range;

use fa_core::Mask;

use crate::block::block;
use crate::plan::ShardPlan;
use crate::program::Part;
use crate::shard::Placed;

/// A kernel's call.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Call {
    /// Rows, by the querying rank's own numbers.
    pub rows: Range<usize>,
    /// Keys, by their owner's own numbers.
    pub keys: Range<usize>,
    /// The first of both in the whole, where programs see that.
    pub first: (usize, usize),
    /// The mask between them.
    pub mask: Mask,
    /// Where sequences begin among these rows and these keys, where several are packed.
    pub starts: Option<[Vec<i32>; 2]>,
}

impl Call {
    /// Its problem.
    pub(crate) fn part(&self, plan: &ShardPlan, heads: &Range<usize>, kv_heads: usize) -> Part {
        let whole = |first: usize, own: &Range<usize>| first..first + own.len();
        let (rows, keys) = (whole(self.first.0, &self.rows), whole(self.first.1, &self.keys));
        plan.part((&rows, &keys), (self.mask, &self.starts), heads, kv_heads)
    }

    /// The same for some of its rows, of which each sees a key; of sequences that are not packed.
    pub(crate) fn of_rows(&self, rows: &Range<usize>) -> Option<Call> {
        let inside = rows.start - self.rows.start..rows.end - self.rows.start;
        let cut = block(self.mask, (self.rows.len(), self.keys.len()), inside, 0..self.keys.len(), 1)?;
        let moved = |range: Range<usize>, by: usize| range.start + by..range.end + by;
        let first = (self.first.0 + cut.rows.start, self.first.1 + cut.keys.start);
        let (rows, keys) = (moved(cut.rows, self.rows.start), moved(cut.keys, self.keys.start));
        Some(Call { rows, keys, first, mask: cut.mask, starts: None })
    }
}

/// The calls for queries at `rows` over the keys of rank `owner`.
pub(crate) fn calls(plan: &ShardPlan, rows: &[Placed], owner: usize) -> Vec<Call> {
    let keys = plan.keys().placed(owner);
    // Both of a rank's ranges in one: the first is wholly before the second.
    let is_square = plan.len().0 == plan.len().1 && plan.starts().is_none();
    // A program counts rows and keys of one range.
    if plan.problem().mask.is_causal() && is_square && rows == keys && !plan.has_program() {
        let all = 0..rows.iter().map(|placed| placed.range.len()).sum();
        return vec![Call { rows: all.clone(), keys: all, first: (0, 0), mask: Mask::CAUSAL, starts: None }];
    }
    let mut calls: Vec<Call> = Vec::new();
    for keys in &keys {
        for rows in rows {
            let Some(block) = plan.block(rows.range.clone(), keys.range.clone()) else { continue };
            let first = (block.rows.start, block.keys.start);
            let (rows, keys) = (rows.locals(&block.rows), keys.locals(&block.keys));
            calls.push(Call { rows, keys, first, mask: block.mask, starts: block.starts });
        }
    }
    while !plan.has_program()
        && let Some((first, second, joined)) = joinable(&calls)
    {
        calls.remove(second);
        calls[first] = joined;
    }
    calls
}

/// Two calls without a mask that are one.
fn joinable(calls: &[Call]) -> Option<(usize, usize, Call)> {
    let meet = |a: &Range<usize>, b: &Range<usize>| (a.end == b.start).then_some(a.start..b.end);
    for (first, a) in calls.iter().enumerate() {
        for (second, b) in calls.iter().enumerate() {
            let is_plain = |call: &Call| call.mask.is_full() && call.starts.is_none();
            if first >= second || !is_plain(a) || !is_plain(b) {
                continue;
            }
            let (place, mask, starts) = (a.first, Mask::FULL, None);
            if a.keys == b.keys
                && let Some(rows) = meet(&a.rows, &b.rows)
            {
                return Some((
                    first,
                    second,
                    Call { rows, keys: a.keys.clone(), first: place, mask, starts },
                ));
            }
            if a.rows == b.rows
                && let Some(keys) = meet(&a.keys, &b.keys)
            {
                return Some((
                    first,
                    second,
                    Call { rows: a.rows.clone(), keys, first: place, mask, starts },
                ));
            }
        }
    }
    None
}
