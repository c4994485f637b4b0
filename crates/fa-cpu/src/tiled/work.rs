//! What the forward is cut into: units of one K/V head of one sequence, and items of them for threads.

use std::ops::Range;

use fa_core::Problem;

use super::band::Band;
use crate::batch::Batch;
use crate::element::Element;
use crate::simd::Kernels;
use crate::view::TensorRef;

/// One K/V head of one sequence, with the query heads of its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unit {
    pub sequence: usize,
    pub kv_head: usize,
}

/// What a forward reads, and how it is to be run.
pub(super) struct Forward<'a, T> {
    pub kernels: Kernels,
    pub threads: Option<usize>,
    pub problem: &'a Problem,
    pub batch: &'a Batch<'a>,
    pub q: TensorRef<'a, T>,
    pub k: TensorRef<'a, T>,
    pub v: TensorRef<'a, T>,
}

impl<T: Element> Forward<'_, T> {
    /// The mask of a sequence.
    pub(super) fn band(&self, sequence: usize) -> Band {
        Band::new(self.problem.mask, &self.batch.sequences[sequence])
    }
}

/// All units with queries.
pub(super) fn units(problem: &Problem, batch: &Batch<'_>) -> Vec<Unit> {
    let with_queries = batch.sequences.iter().enumerate().filter(|(_, sequence)| sequence.q.len > 0);
    with_queries
        .flat_map(|(sequence, _)| (0..problem.heads_kv).map(move |kv_head| Unit { sequence, kv_head }))
        .collect()
}

/// Panels of queries of one unit that a thread takes together. Panels are counted through the query heads of
/// the group, head by head.
pub(super) struct Item {
    /// The unit's index.
    pub unit: usize,
    pub panels: Range<usize>,
}

/// A forward in panels of queries.
pub(super) struct Items {
    /// Most work first.
    pub items: Vec<Item>,
    /// Of each unit: whether several items read its keys.
    pub shared: Vec<bool>,
    /// Panels of the largest item.
    pub most: usize,
}

/// Cuts units into items of at most `most` panels of `width(queries of the sequence)` queries.
///
/// A unit whose panels fit one item is one, if that leaves every thread work: its keys are then converted by
/// the thread that needs them. Others are cut head by head into tiles of about equal length.
pub(super) fn items(
    problem: &Problem,
    batch: &Batch<'_>,
    units: &[Unit],
    width: impl Fn(usize) -> usize,
    most: usize,
    workers: usize,
) -> Items {
    let band = |unit: &Unit| Band::new(problem.mask, &batch.sequences[unit.sequence]);
    // Reading the rows costs as well.
    let cost = |band: &Band| band.pairs() + (band.q + band.k) as f64;
    let is_even = batch.is_even();
    let costs: Vec<f64> = match is_even {
        true => vec![units.first().map_or(0.0, |unit| cost(&band(unit))); units.len()],
        false => units.iter().map(|unit| cost(&band(unit))).collect(),
    };
    let total: f64 = costs.iter().sum();
    let even = workers == 1 || is_even && units.len().is_multiple_of(workers);
    let group = problem.group_size();
    let (mut found, mut largest) = (Vec::with_capacity(units.len()), 1);
    let mut shared = Vec::with_capacity(units.len());
    for (index, (unit, &cost)) in units.iter().zip(&costs).enumerate() {
        let queries = batch.sequences[unit.sequence].q.len;
        let panels = queries.div_ceil(width(queries));
        let whole = panels * group <= most && (even || cost * (2 * workers) as f64 <= total);
        shared.push(!whole);
        if whole {
            found.push(Item { unit: index, panels: 0..panels * group });
            largest = largest.max(panels * group);
            continue;
        }
        let fair = ((4 * workers) as f64 * cost / (total * group as f64)).ceil() as usize;
        let tile = panels.div_ceil(panels.div_ceil(most).max(fair).min(panels));
        largest = largest.max(tile);
        for head in 0..group {
            let tiles = (0..panels).step_by(tile).map(|first| first..panels.min(first + tile));
            found.extend(tiles.map(|tile| Item {
                unit: index,
                panels: head * panels + tile.start..head * panels + tile.end,
            }));
        }
    }
    if !(problem.mask.is_full() && is_even) {
        let weight = |item: &Item| {
            let band = band(&units[item.unit]);
            let width = width(band.q);
            let panels = band.q.div_ceil(width);
            let keys = if item.panels.len() > panels {
                band.visible_keys(&(0..band.q))
            } else {
                let first = item.panels.start % panels * width;
                band.visible_keys(&(first..band.q.min(first + item.panels.len() * width)))
            };
            keys.len() * item.panels.len()
        };
        found.sort_by_cached_key(|item| std::cmp::Reverse(weight(item)));
    }
    Items { items: found, shared, most: largest }
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Lengths, Mask};

    use super::*;
    use crate::Extras;

    #[test]
    fn items_hold_every_panel_once() {
        for (lengths, cu) in [
            (Lengths::uniform(3, 100, 70), None),
            (Lengths::uniform(1, 3000, 3000), None),
            (Lengths::packed(4, 1000, 1000, 900, 900), Some([0, 10, 900, 900, 1000])),
        ] {
            for mask in [Mask::FULL, Mask::CAUSAL] {
                for workers in [1, 2, 7] {
                    let problem =
                        Problem { lengths, heads_kv: 2, ..Problem::square(1, 1, 6, 8, mask, Dtype::F32) };
                    let cu = cu.as_ref().map(|cu| &cu[..]);
                    let batch = Batch::new(&problem, &Extras { cu_q: cu, cu_k: cu, ..Extras::NONE }).unwrap();
                    let units = units(&problem, &batch);
                    let items = items(&problem, &batch, &units, |_| 32, 16, workers);
                    let mut seen: Vec<(usize, usize)> = vec![];
                    for item in &items.items {
                        assert!(item.panels.len() <= items.most && items.most <= 16);
                        seen.extend(item.panels.clone().map(|panel| (item.unit, panel)));
                    }
                    seen.sort_unstable();
                    let of_unit = |unit: &Unit| 3 * batch.sequences[unit.sequence].q.len.div_ceil(32);
                    let expected = units.iter().enumerate();
                    let expected = expected.flat_map(|(i, unit)| (0..of_unit(unit)).map(move |p| (i, p)));
                    assert_eq!(seen, expected.collect::<Vec<_>>());
                }
            }
        }
    }
}
