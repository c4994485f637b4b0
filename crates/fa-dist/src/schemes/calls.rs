//! The calls of a kernel between some queries and the keys of one rank: as few as the mask allows.

use std::ops::Range;

use fa_core::Mask;

use crate::plan::ShardPlan;
use crate::shard::Placed;

/// A kernel's call.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Call {
    /// Rows, by the querying rank's own numbers.
    pub rows: Range<usize>,
    /// Keys, by their owner's own numbers.
    pub keys: Range<usize>,
    /// The mask between them.
    pub mask: Mask,
}

/// The calls for queries at `rows` over the keys of rank `owner`.
pub(crate) fn calls(plan: &ShardPlan, rows: &[Placed], owner: usize) -> Vec<Call> {
    let keys = plan.keys().placed(owner);
    // Both of a rank's ranges in one: the first is wholly before the second.
    if plan.problem().mask.is_causal() && plan.len().0 == plan.len().1 && rows == keys {
        let all = 0..rows.iter().map(|placed| placed.range.len()).sum();
        return vec![Call { rows: all.clone(), keys: all, mask: Mask::CAUSAL }];
    }
    let mut calls: Vec<Call> = Vec::new();
    for keys in &keys {
        for rows in rows {
            let Some(block) = plan.block(rows.range.clone(), keys.range.clone()) else { continue };
            let (rows, keys) = (rows.locals(&block.rows), keys.locals(&block.keys));
            calls.push(Call { rows, keys, mask: block.mask });
        }
    }
    while let Some((first, second, joined)) = joinable(&calls) {
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
            if first >= second || !a.mask.is_full() || !b.mask.is_full() {
                continue;
            }
            let mask = Mask::FULL;
            if a.keys == b.keys
                && let Some(rows) = meet(&a.rows, &b.rows)
            {
                return Some((first, second, Call { rows, keys: a.keys.clone(), mask }));
            }
            if a.rows == b.rows
                && let Some(keys) = meet(&a.keys, &b.keys)
            {
                return Some((first, second, Call { rows: a.rows.clone(), keys, mask }));
            }
        }
    }
    None
}
