//! The forward in f32: panels of queries, tiles of keys.

use fa_core::Strides;
use fa_core::program::TileState;

use super::buffer::Buffer;
use super::pack::{KeyRows, Shared, all_finite, is_finite, read_rows, row_stride};
use super::panels::{Panel, Panels};
use super::parts::{Parts, slot_len};
use super::programs::{OwnTile, OwnTiles};
use super::schedule;
use super::scores::Scores;
use super::work::{Forward, Item, TILE_N, Unit, items};
use crate::element::Element;
use crate::simd::scatter::Scatter;
use crate::simd::{Init, Kernels, Order, Product, TileShape};
use crate::view::TensorMut;

/// Most panels of queries that share a tile of keys while it is in the second-level cache.
pub(super) const PANELS: usize = 8;

struct Scratch<'a> {
    own: Option<OwnTiles<'a>>,
    /// Qt `[head_dim][panel]`, scaled.
    panels: Vec<Panel<f32>>,
    /// St, then Pt: `[TILE_N][panel]`.
    s: Buffer,
    factor: Buffer,
    /// Rows of Q before they are transposed, rows of O after.
    rows: Buffer,
    /// A tile of K and one of V, where they have to be converted.
    k: Buffer,
    v: Buffer,
}

/// Adds `p[i] * value` to those columns of Ot that are `seen`.
fn add_seen(seen: impl Iterator<Item = bool>, p: &[f32], value: &[f32], o: &mut [f32]) {
    for (column, _) in seen.enumerate().filter(|(_, seen)| *seen) {
        for (sum, value) in o[column..].iter_mut().step_by(p.len()).zip(value) {
            *sum += p[column] * value;
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
    let rows = [call.k, call.v.into()].map(|rows| KeyRows::new(rows, batch));
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
    let dims_v = problem.head_dim_v;
    let panels =
        Panels { call, units, cut: &cut, parts: &parts, queries: panel_of, width, dims_v, ld, out, lse };
    let scores = Scores::new(problem);
    let job = Job { panels: &panels, scores: &scores, k: &k, v: &v };
    schedule::run(
        cut.items.len(),
        threads,
        || job.scratch(cut.most),
        |scratch, item| {
            let item = &cut.items[item];
            for (panel, index) in scratch.panels.iter_mut().zip(item.panels.clone()) {
                let [batch, first] = panels.place(panel, item.unit, index);
                let at = [batch, first + panel.queries.start, panel.head];
                let count = panel.queries.len();
                read_rows(kernels, &q, at, count, scores.scale, &mut scratch.rows, ld);
                // Columns past the last query keep old values: their results are not used.
                kernels.transpose([count, problem.head_dim], &scratch.rows, ld, &mut panel.q, width);
                panel.reset();
            }
            job.main_loop(scratch, item);
            panels.write_item(item, &mut scratch.panels[..item.panels.len()], &mut scratch.rows);
        },
    );
    panels.merge(&[]);
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
    panels: &'a Panels<'a, T>,
    scores: &'a Scores,
    k: &'a Shared<'a, T>,
    v: &'a Shared<'a, T>,
}

impl<'a, T: Element> Job<'a, T> {
    fn scratch(&self, panels: usize) -> Scratch<'a> {
        let Panels { width, ld, .. } = *self.panels;
        let Forward { problem, batch, .. } = *self.panels.call;
        Scratch {
            own: OwnTiles::new(problem, batch, width, false),
            panels: (0..panels).map(|_| self.panels.panel(problem.head_dim)).collect(),
            s: Buffer::new(TILE_N * width),
            factor: Buffer::new(width),
            rows: Buffer::new(width * ld),
            k: Buffer::new(TILE_N * row_stride(problem.head_dim)),
            v: Buffer::new(TILE_N * row_stride(problem.head_dim_v)),
        }
    }

    /// All of the item's tiles of keys that its panels see, each for every panel.
    fn main_loop(&self, scratch: &mut Scratch<'_>, item: &Item) {
        let scores = self.scores;
        let Panels { call, units, width, .. } = *self.panels;
        let Forward { kernels, problem, batch, .. } = *call;
        let unit = units[item.unit];
        let band = &call.band(unit.sequence);
        let Scratch { own, panels, s, factor, k, v, .. } = scratch;
        let panels = &mut panels[..item.panels.len()];
        let seen = self.panels.seen(item, band, panels);
        for key in (seen.start / TILE_N * TILE_N..seen.end).step_by(TILE_N) {
            self.panels.before_tile(item, &seen, key, panels);
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
                let (sequence, head) = (unit.sequence, panel.head);
                let own_tile = OwnTile { sequence, head, queries: &queries, keys: &keys };
                let state = own.as_ref().map_or(TileState::Full, |own| own.state(&own_tile));
                if state == TileState::Empty {
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
                let mut hiding = !band.sees_all(&queries, &keys);
                let mut own = own.as_mut().filter(|own| own.evaluates(state));
                if let Some(own) = &mut own {
                    own.apply(&own_tile, state, s);
                }
                let hidden = own.as_ref().map_or(&[][..], |own| &own.hidden);
                for (s, &hidden) in s.iter_mut().zip(hidden) {
                    *s = if hidden { f32::NEG_INFINITY } else { *s };
                }
                if hiding {
                    band.hide(&queries, &keys, s, width, f32::NEG_INFINITY);
                }
                hiding |= !hidden.is_empty();
                let rescale = kernels.online_softmax(shape, s, &mut panel.max, &mut panel.sum, factor);
                if let Some(own) = &own {
                    own.weigh(&own_tile, s);
                }
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
                        let row = (to - keys.start) * width..(to - keys.start + 1) * width;
                        let hidden = hidden.get(row.clone()).unwrap_or(&[]);
                        let seen = queries.clone().enumerate().map(|(column, query)| {
                            band.visible(query, to) && hidden.get(column) != Some(&true)
                        });
                        add_seen(seen, &s[row], value(to), &mut panel.o);
                    }
                    (init, from) = (Init::Add, to + 1);
                }
                panel.started = true;
            }
        }
        self.panels.after_tiles(item, &seen, panels);
    }
}

/// Queries of a tile of the longest sequence, for [`super::plan`].
pub(super) fn tile_m(problem: &fa_core::Problem, width: usize, most: usize, workers: usize) -> usize {
    let panels = problem.lengths.max_q().div_ceil(width).max(1);
    let heads = (problem.lengths.sequences() * problem.heads_q).max(1);
    let tiles = panels.div_ceil(most).max((4 * workers).div_ceil(heads)).min(panels);
    width * panels.div_ceil(tiles)
}
