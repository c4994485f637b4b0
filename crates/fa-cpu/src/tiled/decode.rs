//! The forward of few queries: the query heads of a group read their keys together, as they lie, and the keys
//! are split over threads. All sums are f32, whatever the instruction set.
//!
//! The splits depend on the keys alone, so that the result depends neither on the number of threads nor on
//! the rest of the batch.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use fa_core::Problem;

use super::band::Band;
use super::buffer::Buffer;
use super::forward::lse_tensor;
use super::forward16;
use super::overflow::normaliser_of;
use super::pack::{KeyRows, read_rows, row_stride};
use super::schedule;
use super::scores::{Scores, finish};
use super::work::{Forward, Unit};
use crate::batch::Sequence;
use crate::codes::Values;
use crate::element::Element;
use crate::simd::ahead::Ahead;
use crate::simd::row_products::Factor;
use crate::simd::row_set::RowSet;
use crate::simd::scatter::Scatter;
use crate::simd::{Isa, Work, widest};
use crate::view::TensorMut;

/// The most queries of a sequence, or rows of a group together, for this path: more fill enough of a panel's
/// columns.
pub(super) const QUERIES: usize = 4;
const ROWS: usize = 16;
/// With many keys, queries that fill no more than this part of a panel take this path, in groups of any size:
/// the panel path takes as long for them as for a whole panel.
const PART: usize = 6;
/// Keys of a tile: its scores stay in the first-level cache.
const TILE_N: usize = 128;
/// Keys of a split, of which a sequence of more rows has more: see [`split_of`].
const SPLIT: usize = 512;
/// Values of a split's result for which [`SPLIT`] keys are enough.
const RESULT: usize = 1 << 14;

/// Multiply-adds that a thread is worth waking for: some ten microseconds.
const PRODUCTS: usize = 1 << 17;

/// Most f32 values of accumulators that an item has: they stay in the second-level cache.
const STATE: usize = 1 << 16;

/// One split of the keys of some units of a sequence.
struct Item {
    /// The units' indices.
    units: Range<usize>,
    /// Keys that one of the queries sees.
    keys: Range<usize>,
    /// The split's number; `None` where there is one split.
    split: Option<usize>,
}

/// Scratch memory of a thread.
struct Scratch<'a, T> {
    units: Vec<Rows>,
    s: Buffer,
    /// Products of the columns of K that are not the first.
    rest: Buffer,
    slices: Vec<&'a [T]>,
    /// A tile of K or V, where they are codes.
    decoded: Buffer,
    /// Where the next tile's rows of K and V begin, of several units.
    next: [Vec<&'a [T]>; 2],
    /// A row of O, where parts are merged.
    sums: Buffer<f64>,
}

/// The queries of a unit, and what has been accumulated for them.
struct Rows {
    /// Q `[rows][ldq]`, scaled. Rows are queries of the group's heads, head by head.
    q: Buffer,
    state: State,
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

/// Whether this path is the better one for a sequence: of a few queries, or of few rows and many keys.
pub(super) fn suits<T: Element>(call: &Forward<'_, T>, sequence: &Sequence) -> bool {
    let (queries, keys) = (sequence.q.len, sequence.k.len);
    let few = queries * call.problem.group_size() <= ROWS || queries <= most_queries(call);
    queries <= QUERIES || few && keys >= SPLIT
}

/// Queries of a sequence that this path takes whatever the group.
fn most_queries<T: Element>(call: &Forward<'_, T>) -> usize {
    // Not instead of AMX tiles, whose products cost next to nothing.
    let by_tiles = call.kernels.isa() == Isa::Amx && forward16::applies(call.kernels, call.problem);
    if by_tiles { QUERIES } else { (call.kernels.panel() / PART).max(QUERIES) }
}

/// Whether this path takes the call: rows of K and V must be slices, and a program is evaluated in panels.
pub(super) fn applies<T: Element>(call: &Forward<'_, T>) -> bool {
    let lies = |part: Values<'_, T>| KeyRows::new(part, call.batch).has_slices();
    call.problem.score.program.is_none() && call.k.parts().chain([call.v]).all(lies)
}

/// Keys of a split of a sequence with so many queries: the results of splits, which are kept until the last
/// one is there, take a small part of the memory of the keys. It follows from the sequence alone.
fn split_of(problem: &Problem, queries: usize) -> usize {
    SPLIT * (queries * problem.group_size() * problem.head_dim_v / RESULT).max(1)
}

/// The keys that a unit's queries see, and their splits.
struct Seen {
    keys: Range<usize>,
    /// How many splits there are.
    splits: usize,
    /// Keys of a split. Splits begin at its multiples.
    split: usize,
}

impl Seen {
    fn of<T: Element>(call: &Forward<'_, T>, unit: &Unit) -> Seen {
        let band = call.band(unit.sequence);
        let (keys, split) = (band.visible_keys(&(0..band.q)), split_of(call.problem, band.q));
        let splits = keys.end.div_ceil(split).saturating_sub(keys.start / split).max(1);
        Seen { keys, splits, split }
    }

    /// The keys of a split.
    fn keys_of(&self, index: usize) -> Range<usize> {
        let start = (self.keys.start / self.split + index) * self.split;
        let begin = start.max(self.keys.start);
        begin..self.keys.end.min(start + self.split).max(begin)
    }
}

/// The splits of all units, and their results.
struct Splits {
    units: Vec<Open>,
    /// The results of splits of units that have several.
    partial: Vec<OnceLock<State>>,
    /// Splits of all units.
    count: usize,
    /// Multiply-adds of all units.
    products: usize,
}

/// The splits of a unit.
struct Open {
    count: usize,
    /// Those that are still to come.
    left: AtomicUsize,
    /// The first of its results.
    first: usize,
}

impl Splits {
    fn of<T: Element>(call: &Forward<'_, T>, units: &[Unit]) -> Splits {
        let Forward { problem, batch, .. } = *call;
        let mut open = Vec::with_capacity(units.len());
        let (mut parts, mut all, mut products) = (0, 0, 0);
        for unit in units {
            let Seen { keys, splits, .. } = Seen::of(call, unit);
            let rows = batch.sequences[unit.sequence].q.len * problem.group_size();
            products += rows * keys.len() * (problem.head_dim + problem.head_dim_v);
            open.push(Open { count: splits, left: AtomicUsize::new(splits), first: parts });
            parts += if splits > 1 { splits } else { 0 };
            all += splits;
        }
        let partial = (0..parts).map(|_| OnceLock::new()).collect();
        Splits { units: open, partial, count: all, products }
    }

    /// Keeps the result of a unit's split, `rows` of `ldo` values. With the last of them, whichever thread
    /// has it, `state` becomes the result over all: whether it has.
    fn keep(
        &self,
        (unit, split): (usize, usize),
        state: &mut State,
        [rows, ldo]: [usize; 2],
        sums: &mut [f64],
    ) -> bool {
        let Open { count, left, first } = &self.units[unit];
        let mut own = State::new(rows, ldo);
        own.o.copy_from_slice(&state.o[..rows * ldo]);
        own.max.copy_from_slice(&state.max[..rows]);
        own.sum.copy_from_slice(&state.sum[..rows]);
        let empty = self.partial[first + split].set(own).is_ok();
        debug_assert!(empty, "an item runs once");
        if left.fetch_sub(1, Ordering::AcqRel) > 1 {
            return false;
        }
        let parts = self.partial[*first..].iter().map_while(OnceLock::get).take(*count);
        widest(Merge { to: state, parts, rows, ldo, sums });
        true
    }
}

/// The units in items of at most `together` of a sequence, each with one split of the keys.
fn items<T: Element>(call: &Forward<'_, T>, units: &[Unit], together: usize, splits: usize) -> Vec<Item> {
    let mut items = Vec::with_capacity(splits.div_ceil(together));
    let mut first = 0;
    while first < units.len() {
        let of_sequence = units[first..].iter().take_while(|unit| unit.sequence == units[first].sequence);
        let end = first + of_sequence.take(together).count();
        let seen = Seen::of(call, &units[first]);
        items.extend((0..seen.splits).map(|split| Item {
            units: first..end,
            keys: seen.keys_of(split),
            split: (seen.splits > 1).then_some(split),
        }));
        first = end;
    }
    items
}

/// Computes O and LSE of the given units, all of which it [suits].
pub(super) fn run<T: Element + Factor>(
    call: &Forward<'_, T>,
    units: &[Unit],
    out: &mut TensorMut<'_, T>,
    lse: Option<&mut [f32]>,
) {
    let Forward { threads, problem, batch, .. } = *call;
    if units.is_empty() {
        return;
    }
    let splits = Splits::of(call, units);
    let group = problem.group_size();
    let rows = ROWS.max(group * most_queries(call));
    let (ldq, ldo) = (row_stride(problem.head_dim), row_stride(problem.head_dim_v));
    // Where a key's heads are adjacent, a thread reads several of them: one by one, each would touch another
    // page for a few cache lines.
    let strides = call.k.first.strides();
    let side_by_side = strides.head.abs() < strides.seq.abs();
    let workers = schedule::workers(threads).min(splits.products / PRODUCTS).max(1);
    let fair = splits.count / (4 * workers);
    let together = if side_by_side { fair.min(STATE / (rows * ldo)).max(1) } else { 1 };
    let items = items(call, units, together, splits.count);
    let spans = || batch.sequences.iter().map(|sequence| (sequence.q, sequence.q.len.max(1)));
    let mut lse = lse.map(|lse| lse_tensor(call.q.shape(), lse));
    let lse = lse.as_mut().map(|lse| Scatter::new(lse, spans()));
    let out = Scatter::new(out, spans());
    let scores = Scores::new(problem);
    let (k, v) = (KeyRows::new(call.k, batch), KeyRows::new(call.v, batch));
    let job = Job { call, scores: &scores, k: k.parts().collect(), v };
    schedule::run(
        items.len(),
        Some(workers),
        || Scratch {
            units: (0..together)
                .map(|_| Rows { q: Buffer::new(rows * ldq), state: State::new(rows, ldo) })
                .collect(),
            s: Buffer::new(rows * TILE_N),
            rest: Buffer::new(if call.k.rest.is_some() { rows * TILE_N } else { 0 }),
            slices: Vec::with_capacity(TILE_N),
            decoded: Buffer::new(if job.v.are_codes() { TILE_N * ldq.max(ldo) } else { 0 }),
            next: [(); 2].map(|()| Vec::with_capacity(TILE_N)),
            sums: Buffer::new(if splits.partial.is_empty() { 0 } else { ldo }),
        },
        |scratch, item| {
            let Item { units: of_item, keys, split } = &items[item];
            let band = call.band(units[of_item.start].sequence);
            job.split(scratch, &units[of_item.clone()], &band, keys);
            let Scratch { units: of_units, sums, .. } = scratch;
            for (index, Rows { state, .. }) in of_item.clone().zip(of_units) {
                let size = [group * band.q, ldo];
                if split.is_none_or(|split| splits.keep((index, split), state, size, sums)) {
                    job.write(units[index], band.q, state, &out, lse.as_ref());
                }
            }
        },
    );
}

/// Merges the results over parts of the keys, in order. Parts are added in f64: millions of keys have so many
/// parts that an f32 sum would keep three digits.
struct Merge<'a, P> {
    to: &'a mut State,
    parts: P,
    rows: usize,
    ldo: usize,
    /// Of a row, `ldo` values.
    sums: &'a mut [f64],
}

impl<'a, P: Iterator<Item = &'a State> + Clone> Work for Merge<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Merge { to, parts, rows, ldo, sums } = self;
        for row in 0..rows {
            let max = parts.clone().fold(f32::NEG_INFINITY, |max, part| max.max(part.max[row]));
            // -inf - (-inf) would be NaN.
            let origin = if max == f32::NEG_INFINITY { 0.0 } else { max };
            sums.fill(0.0);
            let mut sum = 0.0;
            for part in parts.clone() {
                let factor = f64::from((part.max[row] - origin).exp2());
                sum += f64::from(part.sum[row]) * factor;
                for (sum, &part) in sums.iter_mut().zip(&part.o[row * ldo..]) {
                    *sum += f64::from(part) * factor;
                }
            }
            (to.max[row], to.sum[row]) = (max, sum as f32);
            to.o[row * ldo..].iter_mut().zip(&*sums).for_each(|(o, &sum)| *o = sum as f32);
        }
    }
}

struct Job<'a, T> {
    call: &'a Forward<'a, T>,
    scores: &'a Scores,
    /// K's columns, from left to right.
    k: Vec<KeyRows<'a, T>>,
    v: KeyRows<'a, T>,
}

impl<'a, T: Element + Factor> Job<'a, T> {
    /// One split of units of a sequence: the scratch's states become their results.
    fn split(&self, scratch: &mut Scratch<'a, T>, units: &[Unit], band: &Band, keys: &Range<usize>) {
        let Forward { kernels, problem, batch, q, .. } = *self.call;
        let Scratch { units: of_units, s, rest, slices, decoded, next, .. } = scratch;
        let (ldq, ldo) = (row_stride(problem.head_dim), row_stride(problem.head_dim_v));
        let group = problem.group_size();
        let rows = group * band.q;
        for (unit, Rows { q: rows_q, state }) in units.iter().zip(&mut *of_units) {
            let span = batch.sequences[unit.sequence].q;
            for member in 0..group {
                let at = [span.batch, span.first, unit.kv_head * group + member];
                let to = &mut rows_q[member * band.q * ldq..];
                read_rows(kernels, &q, at, band.q, self.scores.scale, to, ldq);
            }
            state.o[..rows * ldo].fill(0.0);
            state.max[..rows].fill(f32::NEG_INFINITY);
            state.sum[..rows].fill(0.0);
        }
        let tile = |first: usize| first.max(keys.start)..keys.end.min(first + TILE_N);
        for first in (keys.start / TILE_N * TILE_N..keys.end).step_by(TILE_N) {
            for (rows, next) in [&self.k[0], &self.v].into_iter().zip(&mut *next) {
                next.clear();
                if units.len() > 1 {
                    rows.slices(units[0], tile(first + TILE_N), next);
                }
            }
            for (index, (&unit, of_unit)) in units.iter().zip(&mut *of_units).enumerate() {
                // With several units, each prefetches a share of the next tile's keys of all units.
                let [from, to] = [index, index + 1].map(|index| index * next[0].len() / units.len());
                let ahead = [(&self.k[0], &next[0]), (&self.v, &next[1])].map(|(rows, next)| match units {
                    [_] => Ahead::Follow,
                    _ => Ahead::Rows(&next[from..to], rows.across(units.len())),
                });
                self.tile(unit, band, &tile(first), ahead, of_unit, [s, rest], (slices, decoded));
            }
        }
    }

    /// One tile of keys of a unit.
    #[allow(clippy::too_many_arguments)]
    fn tile(
        &self,
        unit: Unit,
        band: &Band,
        tile: &Range<usize>,
        [ahead_k, ahead_v]: [Ahead<'_, T>; 2],
        Rows { q, state }: &mut Rows,
        [s, rest]: [&mut [f32]; 2],
        (slices, decoded): (&mut Vec<&'a [T]>, &mut [f32]),
    ) {
        let Forward { kernels, problem, batch, .. } = *self.call;
        let (ldq, ldo) = (row_stride(problem.head_dim), row_stride(problem.head_dim_v));
        let group = problem.group_size();
        let rows = group * band.q;
        // Whole registers of scores; those beyond the last key are masked like the others.
        let columns = tile.len().next_multiple_of(kernels.lanes());
        let (mut first, mut ahead) = (0, ahead_k);
        for part in &self.k {
            let (to, dims) = (if first == 0 { &mut *s } else { &mut *rest }, part.dims());
            if part.are_codes() {
                let (data, step) = part.tile(kernels, unit, tile.clone(), decoded);
                let keys = RowSet::Strided { data, step, count: tile.len() };
                kernels.dots(keys, Ahead::Nothing, dims, rows, &q[first..], ldq, to, TILE_N);
            } else {
                let keys = part.rows(unit, tile.clone(), slices);
                kernels.dots(keys, ahead, dims, rows, &q[first..], ldq, to, TILE_N);
            }
            if first > 0 {
                for (s, rest) in s.chunks_mut(TILE_N).zip(rest.chunks(TILE_N)).take(rows) {
                    s[..columns].iter_mut().zip(rest).for_each(|(s, rest)| *s += rest);
                }
            }
            (first, ahead) = (first + dims, Ahead::Follow);
        }
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
            let seen = clip(&band.keys(query), tile);
            s[..seen.start].fill(f32::NEG_INFINITY);
            s[seen.end..].fill(f32::NEG_INFINITY);
            let [max, sum, factor] = kernels.row_softmax(s, state.max[row], state.sum[row]);
            (state.max[row], state.sum[row]) = (max, sum);
            if factor != 1.0 {
                state.o[row * ldo..][..ldo].iter_mut().for_each(|value| *value *= factor);
            }
        }
        if self.v.are_codes() {
            let (data, step) = self.v.tile(kernels, unit, tile.clone(), decoded);
            let values = RowSet::Strided { data, step, count: tile.len() };
            self.accumulate(values, Ahead::Nothing, band, tile, s, state);
        } else {
            self.accumulate(self.v.rows(unit, tile.clone(), slices), ahead_v, band, tile, s, state);
        }
    }

    /// Writes O and LSE of a unit.
    fn write(
        &self,
        unit: Unit,
        queries: usize,
        state: &mut State,
        out: &Scatter<'_, T>,
        lse: Option<&Scatter<'_, f32>>,
    ) {
        let Forward { kernels, problem, batch, .. } = *self.call;
        let (group, ldo) = (problem.group_size(), row_stride(problem.head_dim_v));
        let sequence = unit.sequence;
        for member in 0..group {
            let head = unit.kv_head * group + member;
            let mut out_rows = out.take(sequence, head, 0);
            let mut lse_rows = lse.map(|lse| lse.take(sequence, head, 0));
            for query in 0..queries {
                let row = member * queries + query;
                let (normaliser, lse) = finish(state.max[row], state.sum[row], batch.sink(head));
                let sums = &mut state.o[row * ldo..][..problem.head_dim_v];
                let normaliser = normaliser_of(self.call, [sequence, head, query], (normaliser, lse), sums);
                out_rows.write(kernels, query, sums, normaliser);
                if let Some(lse_rows) = &mut lse_rows {
                    lse_rows.write(kernels, query, &[lse], 1.0);
                }
            }
        }
    }

    /// Adds the products of probabilities and a tile of V.
    fn accumulate<U: Element + Factor>(
        &self,
        values: RowSet<'_, U>,
        ahead: Ahead<'_, U>,
        band: &Band,
        tile: &Range<usize>,
        s: &[f32],
        state: &mut State,
    ) {
        let Forward { kernels, problem, .. } = *self.call;
        let (dims, ldo) = (problem.head_dim_v, row_stride(problem.head_dim_v));
        let rows = problem.group_size() * band.q;
        if band.sees_all(&(0..band.q), tile) {
            kernels.accumulate(values, ahead, dims, rows, s, TILE_N, &mut state.o, ldo);
            return;
        }
        // A masked value may be anything, and 0 times infinity is NaN: what all queries see, before and after
        // it what only some do.
        let seen = |query: usize| clip(&band.keys(query), tile);
        let all = (0..band.q).map(seen).reduce(|a, b| a.start.max(b.start)..a.end.min(b.end));
        let all = all.filter(|all| !all.is_empty()).unwrap_or(0..0);
        let alone = |o: &mut [f32], keys: &dyn Fn(Range<usize>) -> Range<usize>| {
            for (row, o) in o.chunks_mut(ldo).enumerate().take(rows) {
                let keys = keys(seen(row % band.q));
                if !keys.is_empty() {
                    let s = &s[row * TILE_N + keys.start..];
                    kernels.accumulate(values.part(keys), Ahead::Nothing, dims, 1, s, TILE_N, o, ldo);
                }
            }
        };
        alone(&mut state.o, &|seen| seen.start..seen.end.min(all.start));
        if !all.is_empty() {
            let s = &s[all.start..];
            kernels.accumulate(values.part(all.clone()), ahead, dims, rows, s, TILE_N, &mut state.o, ldo);
        }
        alone(&mut state.o, &|seen| seen.start.max(all.end)..seen.end);
    }
}

/// What of `keys` is in `tile`, counted from its first key.
fn clip(keys: &Range<usize>, tile: &Range<usize>) -> Range<usize> {
    let at = |key: usize| key.clamp(tile.start, tile.end) - tile.start;
    at(keys.start)..at(keys.end)
}
