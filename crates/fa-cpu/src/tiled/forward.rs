//! The forward in f32: panels of queries, tiles of keys.

use std::ops::Range;

use fa_core::Strides;

use super::band::Band;
use super::buffer::Buffer;
use super::long::{Accumulated, Stretches};
use super::overflow::normaliser_of;
use super::pack::{KeyRows, Shared, all_finite, is_finite, read_rows, row_stride};
use super::parts::{Parts, slot_len};
use super::schedule;
use super::scores::{Scores, finish};
use super::work::{Forward, Item, Items, TILE_N, Unit, items};
use crate::element::Element;
use crate::simd::scatter::Scatter;
use crate::simd::{Init, Kernels, Order, Product, TileShape};
use crate::view::TensorMut;

/// Most panels of queries that share a tile of keys while it is in the second-level cache.
pub(super) const PANELS: usize = 8;

/// A panel of queries and what has been accumulated for it.
struct Panel {
    /// Query head.
    head: usize,
    queries: Range<usize>,
    /// Qt `[head_dim][panel]`, scaled.
    q: Buffer,
    /// Ot `[head_dim_v][panel]`, not normalised.
    o: Buffer,
    max: Buffer,
    sum: Buffer,
    /// Whether `o` holds anything yet.
    started: bool,
    /// Sums over earlier stretches, for many keys.
    before: Stretches,
}

impl Panel {
    fn parts(&mut self) -> (&mut Stretches, Accumulated<'_>) {
        let Panel { o, max, sum, started, before, .. } = self;
        (before, Accumulated { o, max, sum, started })
    }
}

struct Scratch {
    panels: Vec<Panel>,
    /// St, then Pt: `[TILE_N][panel]`.
    s: Buffer,
    factor: Buffer,
    /// Rows of Q before they are transposed, rows of O after.
    rows: Buffer,
    /// A tile of K and one of V, where they have to be converted.
    k: Buffer,
    v: Buffer,
}

/// Adds `p[i] * value` to the columns of Ot of those `queries` that see `key`.
fn add_seen(band: &Band, queries: &Range<usize>, key: usize, p: &[f32], value: &[f32], o: &mut [f32]) {
    for (column, query) in queries.clone().enumerate() {
        if band.visible(query, key) {
            for (sum, value) in o[column..].iter_mut().step_by(p.len()).zip(value) {
                *sum += p[column] * value;
            }
        }
    }
}

/// Computes O and LSE of the given units.
pub(super) fn run<T: Element>(
    call: &Forward<'_, T>,
    units: &[Unit],
    out: &mut TensorMut<'_, T>,
    lse: Option<&mut [f32]>,
) {
    let Forward { kernels, threads, problem, batch, q, .. } = *call;
    let workers = schedule::workers(threads);
    let rows = [&call.k, &call.v].map(|tensor| KeyRows::new(tensor, batch));
    let converts = rows.iter().any(KeyRows::converts);
    let cut = items(problem, batch, units, |queries| panel_of(kernels, queries), PANELS, converts, workers);
    if cut.items.is_empty() {
        return;
    }
    let [k, v] = Shared::of(kernels, threads, rows, units, &cut.shared);
    let spans = || batch.sequences.iter().map(|sequence| (sequence.q, panel_of(kernels, sequence.q.len)));
    let mut lse = lse.map(|lse| lse_tensor(q.shape(), lse));
    let (out, lse) = (Scatter::new(out, spans()), lse.as_mut().map(|lse| Scatter::new(lse, spans())));
    let width = units.iter().map(|unit| panel_of(kernels, batch.sequences[unit.sequence].q.len)).max();
    let width = width.unwrap_or(kernels.panel());
    let len = problem.head_dim_v * width;
    let mut room = Buffer::uncleared(cut.slots() * slot_len(len, width));
    let parts = Parts::new(kernels, &mut room, len, width);
    let ld = row_stride(problem.head_dim.max(problem.head_dim_v));
    let scores = Scores::new(problem);
    let (k, v) = (&k, &v);
    let job = Job { call, scores: &scores, units, cut: &cut, parts: &parts, k, v, width, ld };
    schedule::run(
        cut.items.len(),
        threads,
        || job.scratch(cut.most),
        |scratch, item| {
            let item = &cut.items[item];
            for (panel, index) in scratch.panels.iter_mut().zip(item.panels.clone()) {
                let [batch, first] = job.place(panel, item.unit, index);
                let at = [batch, first + panel.queries.start, panel.head];
                let count = panel.queries.len();
                read_rows(kernels, &q, at, count, scores.scale, &mut scratch.rows, ld);
                // Columns past the last query keep old values: their results are not used.
                kernels.transpose([count, problem.head_dim], &scratch.rows, ld, &mut panel.q, width);
                panel.parts().1.reset();
            }
            job.main_loop(scratch, item);
            if item.stretches.is_none() {
                for panel in &mut scratch.panels[..item.panels.len()] {
                    job.write(item.unit, panel, &mut scratch.rows, &out, lse.as_ref());
                }
            }
        },
    );
    let merges = cut.merges();
    schedule::run(
        merges.len(),
        threads,
        || (job.panel(0), Buffer::new(width * ld)),
        |(panel, rows), merge| {
            let (divided, index) = merges[merge];
            job.place(panel, divided.unit, index);
            let slots = divided.stretches.clone().map(|stretch| divided.slot(stretch, index));
            let (sums, to) = panel.parts();
            parts.merge(slots, to, sums);
            job.write(divided.unit, panel, rows, &out, lse.as_ref());
        },
    );
}

/// Queries of each panel of a sequence: panels are as many as of the full width, and nearly equal. It follows
/// from the sequence alone, so that its bits do.
pub(super) fn panel_of(kernels: Kernels, queries: usize) -> usize {
    let registers = queries.div_ceil(kernels.lanes()).max(1);
    let panels = registers.div_ceil(kernels.panel() / kernels.lanes());
    registers.div_ceil(panels) * kernels.lanes()
}

/// The LSE buffer of queries `[batch, seqlen, heads, _]` as a tensor of head dim 1.
pub(super) fn lse_tensor([batch, seqlen, heads, _]: [usize; 4], lse: &mut [f32]) -> TensorMut<'_, f32> {
    let strides = Strides { batch: (heads * seqlen) as i64, seq: 1, head: seqlen as i64, dim: 1 };
    TensorMut::new("lse", lse, [batch, seqlen, heads, 1], strides)
        .expect("the length was checked against the problem")
}

struct Job<'a, T> {
    call: &'a Forward<'a, T>,
    scores: &'a Scores,
    units: &'a [Unit],
    cut: &'a Items,
    parts: &'a Parts<'a>,
    k: &'a Shared<'a, T>,
    v: &'a Shared<'a, T>,
    width: usize,
    /// Stride of rows of Q and O.
    ld: usize,
}

impl<T: Element> Job<'_, T> {
    /// A panel whose Q has so many dims.
    fn panel(&self, head_dim: usize) -> Panel {
        let (problem, width) = (self.call.problem, self.width);
        Panel {
            head: 0,
            queries: 0..0,
            q: Buffer::new(head_dim * width),
            o: Buffer::new(problem.head_dim_v * width),
            max: Buffer::new(width),
            sum: Buffer::new(width),
            started: false,
            before: Stretches::default(),
        }
    }

    fn scratch(&self, panels: usize) -> Scratch {
        let (problem, width) = (self.call.problem, self.width);
        Scratch {
            panels: (0..panels).map(|_| self.panel(problem.head_dim)).collect(),
            s: Buffer::new(TILE_N * width),
            factor: Buffer::new(width),
            rows: Buffer::new(width * self.ld),
            k: Buffer::new(TILE_N * row_stride(problem.head_dim)),
            v: Buffer::new(TILE_N * row_stride(problem.head_dim_v)),
        }
    }

    /// Makes it panel number `index` of a unit; returns the batch and row where the sequence begins.
    fn place(&self, panel: &mut Panel, unit: usize, index: usize) -> [usize; 2] {
        let Forward { kernels, problem, batch, .. } = *self.call;
        let Unit { sequence, kv_head } = self.units[unit];
        let span = batch.sequences[sequence].q;
        let queries = panel_of(kernels, span.len);
        let panels = span.len.div_ceil(queries);
        let first = index % panels * queries;
        panel.head = kv_head * problem.group_size() + index / panels;
        panel.queries = first..span.len.min(first + queries);
        [span.batch, span.first]
    }

    /// Writes a panel's O and LSE.
    fn write(
        &self,
        unit: usize,
        panel: &mut Panel,
        rows: &mut [f32],
        out: &Scatter<'_, T>,
        lse: Option<&Scatter<'_, f32>>,
    ) {
        let Job { call, width, ld, .. } = *self;
        let Forward { kernels, problem, batch, .. } = *call;
        let sequence = self.units[unit].sequence;
        if !panel.started {
            panel.o.fill(0.0);
        }
        let tile = panel.queries.start / panel_of(kernels, batch.sequences[sequence].q.len);
        let mut out_rows = out.take(sequence, panel.head, tile);
        let mut lse_rows = lse.map(|lse| lse.take(sequence, panel.head, tile));
        kernels.transpose([problem.head_dim_v, panel.queries.len()], &panel.o, width, rows, ld);
        for (i, row) in panel.queries.clone().enumerate() {
            let (normaliser, lse) = finish(panel.max[i], panel.sum[i], batch.sink(panel.head));
            let sums = &mut rows[i * ld..][..problem.head_dim_v];
            let normaliser = normaliser_of(call, [sequence, panel.head, row], (normaliser, lse), sums);
            out_rows.write(kernels, row, sums, normaliser);
            if let Some(lse_rows) = &mut lse_rows {
                lse_rows.write(kernels, row, &[lse], 1.0);
            }
        }
    }

    /// All of the item's tiles of keys that its panels see, each for every panel.
    fn main_loop(&self, scratch: &mut Scratch, item: &Item) {
        let Job { call, scores, cut, parts, width, .. } = *self;
        let Forward { kernels, problem, batch, .. } = *call;
        let unit = self.units[item.unit];
        let band = &call.band(unit.sequence);
        let Scratch { panels, s, factor, k, v, .. } = scratch;
        let panels = &mut panels[..item.panels.len()];
        let seen = panels.iter().map(|panel| band.visible_keys(&panel.queries));
        let seen = seen.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0);
        let seen = cut.keys(item, seen);
        let divided = cut.divided(item);
        let end = |panels: &mut [Panel], stretch, is_last| {
            for (index, panel) in panels.iter_mut().enumerate() {
                let slot = divided.map(|divided| divided.slot(stretch, index));
                let (before, sums) = panel.parts();
                parts.end(slot, before, sums, is_last);
            }
        };
        for key in (seen.start / TILE_N * TILE_N..seen.end).step_by(TILE_N) {
            if let Some(stretch) = cut.ended(item, &seen, key) {
                end(panels, stretch, false);
            }
            let tile = key.max(seen.start)..seen.end.min(key + TILE_N);
            let (k, ldk) = self.k.tile(kernels, item.unit, unit, tile.clone(), k);
            let (v, ldv) = self.v.tile(kernels, item.unit, unit, tile.clone(), v);
            let mut finite_v = None;
            for panel in panels.iter_mut() {
                let queries = panel.queries.clone();
                let seen = band.visible_keys(&queries);
                let keys = tile.start.max(seen.start)..seen.end.min(tile.end);
                if keys.is_empty() {
                    continue;
                }
                let columns = queries.len().next_multiple_of(kernels.lanes());
                kernels.product(Product {
                    m: keys.len(),
                    n: columns,
                    k: problem.head_dim,
                    a: &k[(keys.start - tile.start) * ldk..],
                    lda: ldk,
                    order: Order::Rows,
                    b: &panel.q,
                    ldb: width,
                    c: s,
                    ldc: width,
                    init: Init::Zero,
                });
                if let Some(cap) = scores.cap {
                    kernels.softcap(&mut s[..keys.len() * width], cap);
                }
                let shape = TileShape { keys: keys.len(), queries: columns, ld: width };
                let slope = batch.slope(unit.sequence, panel.head);
                if let Some(bias) = band.bias(slope, queries.start, keys.start) {
                    kernels.alibi(shape, s, bias);
                }
                let hiding = !band.sees_all(&queries, &keys);
                if hiding {
                    band.hide(&queries, &keys, s, width, f32::NEG_INFINITY);
                }
                let rescale = kernels.online_softmax(shape, s, &mut panel.max, &mut panel.sum, factor);
                let mut init = match (panel.started, rescale) {
                    (false, _) => Init::Zero,
                    (true, false) => Init::Add,
                    (true, true) => Init::Scale(factor),
                };
                // A probability of 0 times a non-finite value is NaN: where a tile is masked in part, such
                // values are added separately, only where they are visible.
                let value = |key: usize| &v[(key - tile.start) * ldv..][..problem.head_dim_v];
                let wild = hiding
                    && !*finite_v.get_or_insert_with(|| all_finite(v, tile.len(), problem.head_dim_v, ldv));
                let mut from = keys.start;
                while from < keys.end {
                    let to = (from..keys.end).find(|&key| wild && !is_finite(value(key)));
                    let to = to.unwrap_or(keys.end);
                    kernels.product(Product {
                        m: problem.head_dim_v,
                        n: columns,
                        k: to - from,
                        a: &v[(from - tile.start) * ldv..],
                        lda: ldv,
                        order: Order::Columns,
                        b: &s[(from - keys.start) * width..],
                        ldb: width,
                        c: &mut panel.o,
                        ldc: width,
                        init,
                    });
                    if to < keys.end {
                        let p = &s[(to - keys.start) * width..][..width];
                        add_seen(band, &queries, to, p, value(to), &mut panel.o);
                    }
                    (init, from) = (Init::Add, to + 1);
                }
                panel.started = true;
            }
        }
        end(panels, cut.stretch_of(item, seen.end.saturating_sub(1)), true);
    }
}

/// Queries of a tile of the longest sequence, for [`super::plan`].
pub(super) fn tile_m(problem: &fa_core::Problem, width: usize, most: usize, workers: usize) -> usize {
    let panels = problem.lengths.max_q().div_ceil(width).max(1);
    let heads = (problem.lengths.sequences() * problem.heads_q).max(1);
    let tiles = panels.div_ceil(most).max((4 * workers).div_ceil(heads)).min(panels);
    width * panels.div_ceil(tiles)
}
