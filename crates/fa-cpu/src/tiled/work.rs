//! What the forward is cut into: units of one K/V head of one sequence, and items of them for threads.

use std::ops::Range;

use fa_core::Problem;

use super::band::Band;
use super::long;
use crate::batch::Batch;
use crate::codes::Values;
use crate::element::Element;
use crate::simd::Kernels;
use crate::view::TensorRef;

/// Keys of a tile: a panel of probabilities (`TILE_N x panel`) and one of queries stay in the first-level
/// cache.
pub(super) const TILE_N: usize = 128;

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
    pub k: Values<'a, T>,
    pub v: Values<'a, T>,
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
    /// Stretches of the keys, by number, where others have the rest.
    pub stretches: Option<Range<usize>>,
}

/// A forward in panels of queries.
pub(super) struct Items {
    /// Most work first.
    pub items: Vec<Item>,
    /// Of each unit: whether several items read the same keys.
    pub shared: Vec<bool>,
    /// Tiles of a stretch of each unit's keys.
    pub stretch: Vec<usize>,
    pub divided: Vec<Divided>,
    /// Panels of the largest item.
    pub most: usize,
}

/// A unit whose keys are divided.
pub(super) struct Divided {
    pub unit: usize,
    pub panels: usize,
    /// Stretches that one of its queries sees.
    pub stretches: Range<usize>,
    /// Slots for results before its own, of which each stretch has one for every panel.
    pub first: usize,
}

impl Divided {
    /// The slot of a panel over a stretch.
    pub(super) fn slot(&self, stretch: usize, panel: usize) -> usize {
        self.first + (stretch - self.stretches.start) * self.panels + panel
    }

    /// How many there are.
    pub(super) fn slots(&self) -> usize {
        self.stretches.len() * self.panels
    }
}

impl Items {
    /// Slots for the results of all divided units.
    pub(super) fn slots(&self) -> usize {
        self.divided.iter().map(Divided::slots).sum()
    }

    /// The stretch of an item's unit that a key belongs to.
    pub(super) fn stretch_of(&self, item: &Item, key: usize) -> usize {
        key / (self.stretch[item.unit] * TILE_N)
    }

    /// The stretch that has ended before the tile at `key`, if one has, of those that an item reads from the
    /// first of `keys` on.
    pub(super) fn ended(&self, item: &Item, keys: &Range<usize>, key: usize) -> Option<usize> {
        let begins = key > keys.start && key.is_multiple_of(self.stretch[item.unit] * TILE_N);
        begins.then(|| self.stretch_of(item, key - 1))
    }

    /// What of `keys` an item reads.
    pub(super) fn keys(&self, item: &Item, keys: Range<usize>) -> Range<usize> {
        let Some(stretches) = &item.stretches else { return keys };
        let [start, end] = [stretches.start, stretches.end].map(|at| at * self.stretch[item.unit] * TILE_N);
        keys.start.max(start)..keys.end.min(end)
    }

    /// The unit of an item that has some stretches of its keys.
    pub(super) fn divided(&self, item: &Item) -> Option<&Divided> {
        let found = self.divided.binary_search_by_key(&item.unit, |divided| divided.unit).ok()?;
        Some(&self.divided[found])
    }

    /// Every panel of every divided unit.
    pub(super) fn merges(&self) -> Vec<(&Divided, usize)> {
        let mut merges = Vec::new();
        for divided in &self.divided {
            merges.extend((0..divided.panels).map(|panel| (divided, panel)));
        }
        merges
    }
}

/// Cuts units into items of at most `most` panels of `width(queries of the sequence)` queries.
///
/// A unit whose panels fit one item is one, if that leaves every thread work: its keys are then converted by
/// the thread that needs them. If it does not, its keys are divided, so that each is converted by one thread;
/// where no rows are to be converted (`converts`), only if it has too few panels for the threads. Others are
/// cut head by head into tiles of about equal length.
pub(super) fn items(
    problem: &Problem,
    batch: &Batch<'_>,
    units: &[Unit],
    width: impl Fn(usize) -> usize,
    most: usize,
    converts: bool,
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
    let mut stretch = Vec::with_capacity(units.len());
    let (mut divided, mut slots) = (Vec::new(), 0);
    for (index, (unit, &cost)) in units.iter().zip(&costs).enumerate() {
        let band = band(unit);
        let panels = band.q.div_ceil(width(band.q));
        let few = panels * group <= most;
        stretch.push(long::stretch(band.k.div_ceil(TILE_N), problem.heads_kv, few));
        if few && (even || cost * (2 * workers) as f64 <= total) {
            shared.push(false);
            found.push(Item { unit: index, panels: 0..panels * group, stretches: None });
            largest = largest.max(panels * group);
            continue;
        }
        let keys = stretch[index] * TILE_N;
        let seen = band.visible_keys(&(0..band.q));
        let stretches = seen.start / keys..seen.end.div_ceil(keys).max(seen.start / keys);
        let wanted = ((2 * workers) as f64 * cost / total).ceil() as usize;
        let rows_suffice = !converts && 2 * panels * group >= wanted;
        let keys_suffice = stretches.len() > 1 && 2 * stretches.len() >= wanted.min(2 * panels * group);
        if few && keys_suffice && !rows_suffice {
            shared.push(false);
            let parts = wanted.min(stretches.len());
            let at = |part: usize| stretches.start + part * stretches.len() / parts;
            found.extend((0..parts).map(|part| Item {
                unit: index,
                panels: 0..panels * group,
                stretches: Some(at(part)..at(part + 1)),
            }));
            largest = largest.max(panels * group);
            divided.push(Divided { unit: index, panels: panels * group, stretches, first: slots });
            slots += divided.last().map_or(0, Divided::slots);
            continue;
        }
        shared.push(true);
        let fair = ((4 * workers) as f64 * cost / (total * group as f64)).ceil() as usize;
        let tile = panels.div_ceil(panels.div_ceil(most).max(fair).min(panels));
        largest = largest.max(tile);
        for head in 0..group {
            let tiles = (0..panels).step_by(tile).map(|first| first..panels.min(first + tile));
            found.extend(tiles.map(|tile| Item {
                unit: index,
                panels: head * panels + tile.start..head * panels + tile.end,
                stretches: None,
            }));
        }
    }
    let mut cut = Items { items: found, shared, stretch, divided, most: largest };
    if !(problem.mask.is_full() && is_even) {
        let mut items = std::mem::take(&mut cut.items);
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
            cut.keys(item, keys).len() * item.panels.len()
        };
        items.sort_by_cached_key(|item| std::cmp::Reverse(weight(item)));
        cut.items = items;
    }
    cut
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Lengths, Mask};

    use super::*;
    use crate::Extras;

    #[test]
    fn items_hold_every_panel_once() {
        let mut are_divided = false;
        for (lengths, cu) in [
            (Lengths::uniform(3, 100, 70), None),
            (Lengths::uniform(1, 100, 3000), None),
            (Lengths::uniform(1, 3000, 3000), None),
            (Lengths::packed(4, 1000, 1000, 900, 900), Some([0, 10, 900, 900, 1000])),
        ] {
            for mask in [Mask::FULL, Mask::CAUSAL] {
                for (workers, converts) in [(1, true), (2, true), (7, false), (7, true)] {
                    let problem =
                        Problem::square(1, 1, 6, 8, mask, Dtype::F32).with_lengths(lengths).with_heads_kv(2);
                    let cu = cu.as_ref().map(|cu| &cu[..]);
                    let batch =
                        Batch::new(&problem, &Extras { cu_seqlens_q: cu, cu_seqlens_k: cu, ..Extras::NONE })
                            .unwrap();
                    let units = units(&problem, &batch);
                    let items = items(&problem, &batch, &units, |_| 32, 16, converts, workers);
                    let mut seen: Vec<(usize, usize)> = vec![];
                    let mut slots = vec![0; items.slots()];
                    for item in &items.items {
                        assert!(item.panels.len() <= items.most && items.most <= 16);
                        let Some(stretches) = &item.stretches else {
                            seen.extend(item.panels.clone().map(|panel| (item.unit, panel)));
                            continue;
                        };
                        let divided = items.divided(item).unwrap();
                        for stretch in stretches.clone() {
                            item.panels.clone().for_each(|panel| slots[divided.slot(stretch, panel)] += 1);
                        }
                    }
                    assert!(slots.iter().all(|&count| count == 1));
                    let merges = items.merges();
                    are_divided |= !merges.is_empty();
                    seen.extend(merges.iter().map(|(divided, panel)| (divided.unit, *panel)));
                    seen.sort_unstable();
                    let of_unit = |unit: &Unit| 3 * batch.sequences[unit.sequence].q.len.div_ceil(32);
                    let expected = units.iter().enumerate();
                    let expected = expected.flat_map(|(i, unit)| (0..of_unit(unit)).map(move |p| (i, p)));
                    assert_eq!(seen, expected.collect::<Vec<_>>());
                }
            }
        }
        assert!(are_divided);
    }
}
