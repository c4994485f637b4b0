//! The forward of few queries: the query heads of a group read their keys together, as they lie, and the keys
//! are split over threads. All sums are f32, whatever the instruction set.
//!
//! Where the splits are follows from the keys alone, so that the result depends neither on the number of
//! threads nor on what else is in the batch.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::band::Band;
use super::buffer::Buffer;
use super::forward::lse_tensor;
use super::pack::{KeyRows, read_rows, row_stride};
use super::schedule;
use super::scores::{Scores, finish};
use super::work::{Forward, Unit};
use crate::element::Element;
use crate::simd::scatter::Scatter;
use crate::view::TensorMut;

/// Most queries of a sequence. More of them fill enough of a panel's columns.
pub(super) const QUERIES: usize = 4;
/// Keys of a tile: its scores stay in the first-level cache.
const TILE_N: usize = 128;
/// Keys of a split.
const SPLIT: usize = 512;

/// One split of a unit's keys.
struct Item {
    /// The unit's index.
    unit: usize,
    /// Keys that one of the queries sees.
    keys: Range<usize>,
    /// Index among all partial results; `None` where the unit has one split.
    part: Option<usize>,
}

/// What a thread keeps.
struct Scratch<'a, T> {
    /// Q `[rows][ldq]`, scaled. Rows are queries of the group's heads, head by head.
    q: Buffer,
    s: Buffer,
    state: State,
    slices: Vec<&'a [T]>,
}

/// What has been accumulated for each row.
struct State {
    /// O `[rows][ldo]`, not normalised.
    o: Buffer,
    /// Maximum and sum of each row.
    max: Buffer,
    sum: Buffer,
}

impl State {
    fn new(rows: usize, ldo: usize) -> State {
        State { o: Buffer::new(rows * ldo), max: Buffer::new(rows), sum: Buffer::new(rows) }
    }
}

/// Whether this path takes the call's tensors: rows of K and V must be slices.
pub(super) fn applies<T: Element>(call: &Forward<'_, T>) -> bool {
    KeyRows::new(&call.k, call.batch).has_slices() && KeyRows::new(&call.v, call.batch).has_slices()
}

/// Computes O and LSE of the given units, none of more than [`QUERIES`] queries.
pub(super) fn run<T: Element>(
    call: &Forward<'_, T>,
    units: &[Unit],
    out: &mut TensorMut<'_, T>,
    lse: Option<&mut [f32]>,
) {
    let Forward { kernels, threads, problem, batch, .. } = *call;
    let (mut items, mut parts) = (Vec::with_capacity(units.len()), 0);
    // Splits of each unit that are still to come, and its first partial result.
    let mut open: Vec<(AtomicUsize, usize)> = Vec::with_capacity(units.len());
    for (unit, &Unit { sequence, .. }) in units.iter().enumerate() {
        let band = call.band(sequence);
        let seen = band.visible_keys(&(0..band.q));
        let splits = seen.end.div_ceil(SPLIT).saturating_sub(seen.start / SPLIT).max(1);
        open.push((AtomicUsize::new(splits), parts));
        let begin = seen.start / SPLIT * SPLIT;
        for split in 0..splits {
            let first = begin + split * SPLIT;
            let keys = first.max(seen.start)..seen.end.min(first + SPLIT).max(first.max(seen.start));
            items.push(Item { unit, keys, part: (splits > 1).then_some(parts + split) });
        }
        parts += if splits > 1 { splits } else { 0 };
    }
    if items.is_empty() {
        return;
    }
    let partial: Vec<OnceLock<State>> = (0..parts).map(|_| OnceLock::new()).collect();
    let spans = || batch.sequences.iter().map(|sequence| (sequence.q, sequence.q.len.max(1)));
    let mut lse = lse.map(|lse| lse_tensor(call.q.shape(), lse));
    let lse = lse.as_mut().map(|lse| Scatter::new(lse, spans()));
    let out = Scatter::new(out, spans());
    let group = problem.group_size();
    let (ldq, ldo) = (row_stride(problem.head_dim), row_stride(problem.head_dim_v));
    let scores = Scores::new(problem);
    let job = Job { call, scores: &scores, k: KeyRows::new(&call.k, batch), v: KeyRows::new(&call.v, batch) };
    schedule::run(
        items.len(),
        threads,
        || Scratch {
            q: Buffer::new(group * QUERIES * ldq),
            s: Buffer::new(group * QUERIES * TILE_N),
            state: State::new(group * QUERIES, ldo),
            slices: Vec::with_capacity(TILE_N),
        },
        |scratch, item| {
            let Item { unit, keys, part } = &items[item];
            let (at, (left, first)) = (units[*unit], &open[*unit]);
            let band = call.band(at.sequence);
            job.split(scratch, at, &band, keys);
            let rows = group * band.q;
            if let Some(part) = part {
                let mut own = State::new(rows, ldo);
                own.o.copy_from_slice(&scratch.state.o[..rows * ldo]);
                own.max.copy_from_slice(&scratch.state.max[..rows]);
                own.sum.copy_from_slice(&scratch.state.sum[..rows]);
                let empty = partial[*part].set(own).is_ok();
                debug_assert!(empty, "an item runs once");
                // Whoever is last finds the results of all.
                if left.fetch_sub(1, Ordering::AcqRel) > 1 {
                    return;
                }
                let parts = partial[*first..].iter().map_while(OnceLock::get);
                let band_seen = band.visible_keys(&(0..band.q));
                let splits = band_seen.end.div_ceil(SPLIT) - band_seen.start / SPLIT;
                merge(&mut scratch.state, parts.take(splits), rows, ldo);
            }
            let State { o, max, sum } = &scratch.state;
            for member in 0..group {
                let head = at.kv_head * group + member;
                let mut out_rows = out.take(at.sequence, head, 0);
                let mut lse_rows = lse.as_ref().map(|lse| lse.take(at.sequence, head, 0));
                for query in 0..band.q {
                    let row = member * band.q + query;
                    let (normaliser, lse) = finish(max[row], sum[row], batch.sink(head));
                    out_rows.write(kernels, query, &o[row * ldo..], normaliser);
                    if let Some(lse_rows) = &mut lse_rows {
                        lse_rows.write(kernels, query, &[lse], 1.0);
                    }
                }
            }
        },
    );
}

/// Merges the results over parts of the keys, in order.
fn merge<'a>(to: &mut State, parts: impl Iterator<Item = &'a State> + Clone, rows: usize, ldo: usize) {
    for row in 0..rows {
        let max = parts.clone().fold(f32::NEG_INFINITY, |max, part| max.max(part.max[row]));
        // -inf - (-inf) would be NaN.
        let origin = if max == f32::NEG_INFINITY { 0.0 } else { max };
        let o = &mut to.o[row * ldo..][..ldo];
        o.fill(0.0);
        (to.max[row], to.sum[row]) = (max, 0.0);
        for part in parts.clone() {
            let factor = (part.max[row] - origin).exp2();
            to.sum[row] += part.sum[row] * factor;
            for (o, part) in o.iter_mut().zip(&part.o[row * ldo..]) {
                *o += part * factor;
            }
        }
    }
}

struct Job<'a, T> {
    call: &'a Forward<'a, T>,
    scores: &'a Scores,
    k: KeyRows<'a, T>,
    v: KeyRows<'a, T>,
}

impl<'a, T: Element> Job<'a, T> {
    /// One split: the scratch's state becomes its result.
    fn split(&self, scratch: &mut Scratch<'a, T>, unit: Unit, band: &Band, keys: &Range<usize>) {
        let Forward { kernels, problem, batch, q, .. } = *self.call;
        let Scratch { q: rows_q, s, state, slices } = scratch;
        let (ldq, ldo) = (row_stride(problem.head_dim), row_stride(problem.head_dim_v));
        let (group, span) = (problem.group_size(), batch.sequences[unit.sequence].q);
        let rows = group * band.q;
        for member in 0..group {
            let at = [span.batch, span.first, unit.kv_head * group + member];
            let to = &mut rows_q[member * band.q * ldq..];
            read_rows(kernels, &q, at, band.q, self.scores.scale, to, ldq);
        }
        state.o[..rows * ldo].fill(0.0);
        state.max[..rows].fill(f32::NEG_INFINITY);
        state.sum[..rows].fill(0.0);
        for first in (keys.start / TILE_N * TILE_N..keys.end).step_by(TILE_N) {
            let tile = first.max(keys.start)..keys.end.min(first + TILE_N);
            self.k.slices(unit, tile.clone(), slices);
            kernels.dots(slices, problem.head_dim, rows, rows_q, ldq, s, TILE_N);
            // Whole registers of scores; what is behind the last key is hidden with what the mask hides.
            let columns = tile.len().next_multiple_of(kernels.lanes());
            for (row, s) in s.chunks_mut(TILE_N).take(rows).enumerate() {
                let (head, query) = (unit.kv_head * group + row / band.q, row % band.q);
                let s = &mut s[..columns];
                if let Some(cap) = self.scores.cap {
                    kernels.softcap(s, cap);
                }
                if let Some(bias) = band.bias(batch.slope(unit.sequence, head), query, tile.start) {
                    for (key, score) in s.iter_mut().enumerate() {
                        *score -= bias.slope * (bias.first - key as f32).abs();
                    }
                }
                let seen = clip(&band.keys(query), &tile);
                s[..seen.start].fill(f32::NEG_INFINITY);
                s[seen.end..].fill(f32::NEG_INFINITY);
                let [max, sum, factor] = kernels.row_softmax(s, state.max[row], state.sum[row]);
                (state.max[row], state.sum[row]) = (max, sum);
                if factor != 1.0 {
                    state.o[row * ldo..][..ldo].iter_mut().for_each(|value| *value *= factor);
                }
            }
            self.v.slices(unit, tile.clone(), slices);
            let dims = problem.head_dim_v;
            if band.sees_all(&(0..band.q), &tile) {
                kernels.accumulate(slices, dims, rows, s, TILE_N, &mut state.o, ldo);
                continue;
            }
            // A hidden value may be anything, and 0 times infinity is NaN.
            for row in 0..rows {
                let seen = clip(&band.keys(row % band.q), &tile);
                let (s, o) = (&s[row * TILE_N + seen.start..], &mut state.o[row * ldo..]);
                kernels.accumulate(&slices[seen], dims, 1, s, TILE_N, o, ldo);
            }
        }
    }
}

/// What of `keys` is in `tile`, counted from its first key.
fn clip(keys: &Range<usize>, tile: &Range<usize>) -> Range<usize> {
    let at = |key: usize| key.clamp(tile.start, tile.end) - tile.start;
    at(keys.start)..at(keys.end)
}
