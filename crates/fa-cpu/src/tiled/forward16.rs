//! The forward in bf16 with f32 sums: the same main loop as [`super::forward`], on tiles that AMX and
//! AVX512-BF16 read.
//!
//! Probabilities are rounded to bf16 before they meet V, as GPU kernels do; their sum is taken before the
//! rounding.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use fa_core::Problem;
use half::bf16;

use super::buffer::Buffer;
use super::forward::lse_tensor;
use super::long::{Accumulated, Stretches};
use super::overflow::normaliser_of;
use super::pack16::{Packed, TileBuffer, grain, read_rows};
use super::parts::{Parts, slot_len};
use super::schedule;
use super::scores::{Scores, finish};
use super::work::{Forward, Item, Items, TILE_N, Unit, items};
use crate::simd::bf16::{Bf16Kernels, GRAIN, LANES, Product16};
use crate::simd::scatter::Scatter;
use crate::simd::{Isa, Kernels, TileShape};
use crate::view::TensorMut;

/// Queries of a panel: with a tile of keys, its scores stay in the first-level cache.
pub(super) const PANEL: usize = 32;
/// Most panels of queries that share a tile of keys while it is in the second-level cache.
pub(super) const PANELS: usize = 16;

/// A panel of queries and what has been accumulated for it.
struct Panel {
    /// Query head.
    head: usize,
    queries: Range<usize>,
    /// Qt in pairs `[head_dim / 2][PANEL]`.
    q: Buffer<u32>,
    /// Ot `[head_dim_v][PANEL]`, not normalised.
    o: Buffer,
    max: [f32; PANEL],
    sum: [f32; PANEL],
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
    tiles: Bf16Kernels,
    panels: Vec<Panel>,
    /// St `[TILE_N][PANEL]`.
    s: Buffer,
    /// Pt in pairs `[TILE_N / 2][PANEL]`.
    p: Buffer<u32>,
    /// Rows of Q as words, before they are transposed; rows of O afterwards.
    rows: Buffer<u32>,
    out: Buffer,
    /// A tile of K and V that no other item reads.
    tile: TileBuffer,
}

/// The largest scale without a soft cap. `score * scale - max * scale` is one multiply-add, off by the
/// rounding of `max * scale`: as an exponent of 2 that must stay small.
const MAX_SCALE: f32 = 1024.0;

/// Whether this path can take the problem: the kernels are there and scores keep their order when scaled.
pub(super) fn applies(kernels: Kernels, problem: &Problem) -> bool {
    let Scores { scale, cap } = Scores::new(problem);
    kernels.has_bf16() && scale.is_normal() && scale > 0.0 && (cap.is_some() || scale <= MAX_SCALE)
}

/// Whether the 16-bit paths are the faster ones for a sequence of so many queries. Their tiles have [`PANEL`]
/// queries at least, the f32 paths' one register; AMX's products cost next to nothing.
pub(super) fn suits(kernels: Kernels, queries: usize) -> bool {
    kernels.isa() == Isa::Amx || queries > kernels.lanes()
}

/// Computes O and LSE of the given units; returns those that are left to the f32 path, which alone handles
/// masked values that are not finite.
pub(super) fn run(
    call: &Forward<'_, bf16>,
    units: &[Unit],
    out: &mut TensorMut<'_, bf16>,
    lse: Option<&mut [f32]>,
) -> Vec<Unit> {
    let Forward { kernels, threads, problem, batch, q, .. } = *call;
    let cut = items(problem, batch, units, |_| PANEL, PANELS, true, schedule::workers(threads));
    if cut.items.is_empty() {
        return vec![];
    }
    let kv = Packed::new(call, units, &cut.shared);
    let spans = || batch.sequences.iter().map(|sequence| (sequence.q, PANEL));
    let mut lse = lse.map(|lse| lse_tensor(q.shape(), lse));
    let (out, lse) = (Scatter::new(out, spans()), lse.as_mut().map(|lse| Scatter::new(lse, spans())));
    let (words, dims_v) = (grain(problem.head_dim) / 2, grain(problem.head_dim_v));
    let len = dims_v * PANEL;
    let mut room = Buffer::uncleared(cut.slots() * slot_len(len, PANEL));
    let parts = Parts::new(kernels, &mut room, len, PANEL);
    let scores = &Scores::new(problem);
    let job = Job { call, scores, units, cut: &cut, parts: &parts, kv: &kv, words, dims_v };
    let left = Mutex::new(vec![]);
    schedule::run(
        cut.items.len(),
        threads,
        || job.scratch(cut.most),
        |scratch, item| {
            let item = &cut.items[item];
            for (panel, index) in scratch.panels.iter_mut().zip(item.panels.clone()) {
                let [batch, first] = job.place(panel, item.unit, index);
                let at = [batch, first + panel.queries.start, panel.head];
                read_rows(&q, at, panel.queries.len(), &mut scratch.rows, words);
                kernels.transpose_words([PANEL, words], &scratch.rows, words, &mut panel.q, PANEL);
                panel.parts().1.reset();
                // A unit that was left to the other path may have left values.
                panel.before.clear();
            }
            if !job.main_loop(scratch, item) {
                left.lock().unwrap_or_else(PoisonError::into_inner).push(item.unit);
            } else if item.stretches.is_none() {
                for panel in &mut scratch.panels[..item.panels.len()] {
                    job.write(item.unit, panel, &mut scratch.out, &out, lse.as_ref());
                }
            }
        },
    );
    let mut left = left.into_inner().unwrap_or_else(PoisonError::into_inner);
    left.sort_unstable();
    left.dedup();
    let mut merges = cut.merges();
    merges.retain(|(divided, _)| left.binary_search(&divided.unit).is_err());
    schedule::run(
        merges.len(),
        threads,
        || (job.panel(0), Buffer::new(PANEL * dims_v)),
        |(panel, rows), merge| {
            let (divided, index) = merges[merge];
            job.place(panel, divided.unit, index);
            let slots = divided.stretches.clone().map(|stretch| divided.slot(stretch, index));
            let (sums, to) = panel.parts();
            parts.merge(slots, to, sums);
            job.write(divided.unit, panel, rows, &out, lse.as_ref());
        },
    );
    left.into_iter().map(|unit| units[unit]).collect()
}

struct Job<'a> {
    call: &'a Forward<'a, bf16>,
    scores: &'a Scores,
    units: &'a [Unit],
    cut: &'a Items,
    parts: &'a Parts<'a>,
    kv: &'a Packed<'a>,
    /// Words of a padded row of Q or K.
    words: usize,
    /// Padded head dim of V.
    dims_v: usize,
}

impl Job<'_> {
    /// A panel whose rows of Q have so many words.
    fn panel(&self, words: usize) -> Panel {
        Panel {
            head: 0,
            queries: 0..0,
            q: Buffer::new(words * PANEL),
            o: Buffer::new(self.dims_v * PANEL),
            max: [0.0; PANEL],
            sum: [0.0; PANEL],
            started: false,
            before: Stretches::default(),
        }
    }

    fn scratch(&self, panels: usize) -> Scratch {
        Scratch {
            tiles: self.call.kernels.bf16().expect("the caller asked whether there are such kernels"),
            panels: (0..panels).map(|_| self.panel(self.words)).collect(),
            s: Buffer::new(TILE_N * PANEL),
            p: Buffer::new(TILE_N / 2 * PANEL),
            rows: Buffer::new(PANEL * self.words),
            out: Buffer::new(PANEL * self.dims_v),
            tile: self.kv.buffer(),
        }
    }

    /// Makes it panel number `index` of a unit; returns the batch and row where the sequence begins.
    fn place(&self, panel: &mut Panel, unit: usize, index: usize) -> [usize; 2] {
        let Forward { problem, batch, .. } = *self.call;
        let Unit { sequence, kv_head } = self.units[unit];
        let span = batch.sequences[sequence].q;
        let panels = span.len.div_ceil(PANEL);
        let first = index % panels * PANEL;
        panel.head = kv_head * problem.group_size() + index / panels;
        panel.queries = first..span.len.min(first + PANEL);
        [span.batch, span.first]
    }

    /// Writes a panel's O and LSE.
    fn write(
        &self,
        unit: usize,
        panel: &mut Panel,
        rows: &mut [f32],
        out: &Scatter<'_, bf16>,
        lse: Option<&Scatter<'_, f32>>,
    ) {
        let Job { call, dims_v, .. } = *self;
        let Forward { kernels, problem, batch, .. } = *call;
        let sequence = self.units[unit].sequence;
        if !panel.started {
            panel.o.fill(0.0);
        }
        let tile = panel.queries.start / PANEL;
        let mut out_rows = out.take(sequence, panel.head, tile);
        let mut lse_rows = lse.map(|lse| lse.take(sequence, panel.head, tile));
        kernels.transpose([dims_v, PANEL], &panel.o, PANEL, rows, dims_v);
        for (i, row) in panel.queries.clone().enumerate() {
            let (normaliser, lse) = finish(panel.max[i], panel.sum[i], batch.sink(panel.head));
            let sums = &mut rows[i * dims_v..][..problem.head_dim_v];
            let normaliser = normaliser_of(call, [sequence, panel.head, row], (normaliser, lse), sums);
            out_rows.write(kernels, row, sums, normaliser);
            if let Some(lse_rows) = &mut lse_rows {
                lse_rows.write(kernels, row, &[lse], 1.0);
            }
        }
    }

    /// All of the item's tiles of keys that its panels see, each for every panel. Returns whether the unit's
    /// values allow this path: without a mask they do.
    fn main_loop(&self, scratch: &mut Scratch, item: &Item) -> bool {
        let Job { call, scores, cut, parts, kv, words, dims_v, .. } = *self;
        let Forward { kernels, batch, .. } = *call;
        let unit = self.units[item.unit];
        let band = &call.band(unit.sequence);
        let Scratch { tiles, panels, s, p, tile: buffer, .. } = scratch;
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
        for index in seen.start / TILE_N..seen.end.div_ceil(TILE_N) {
            if let Some(stretch) = cut.ended(item, &seen, index * TILE_N) {
                end(panels, stretch, false);
            }
            let first_key = index * TILE_N;
            let tile = kv.tile(kernels, item.unit, unit, index, buffer);
            if tile.wild && !band.mask.is_full() {
                return false;
            }
            for panel in panels.iter_mut() {
                let queries = panel.queries.clone();
                let seen = band.visible_keys(&queries);
                let keys = first_key.max(seen.start)..seen.end.min(first_key + TILE_N);
                if keys.is_empty() {
                    continue;
                }
                // Whole grains around the visible range; what they add is masked.
                let keys = keys.start / GRAIN * GRAIN..grain(keys.end);
                let within = keys.start - first_key..keys.end - first_key;
                tiles.product(Product16 {
                    shape: [keys.len(), PANEL, 2 * words],
                    a: &tile.k[2 * within.start * words..],
                    lda: 2 * words,
                    b: &panel.q,
                    ldb: PANEL,
                    c: s,
                    ldc: PANEL,
                    add: false,
                });
                let mut scale = scores.scale;
                let bias = band.bias(batch.slope(unit.sequence, panel.head), queries.start, keys.start);
                // Columns past the last query keep old values: their results are not used.
                let columns = queries.len().next_multiple_of(LANES);
                let shape = TileShape { keys: keys.len(), queries: columns, ld: PANEL };
                if scores.cap.is_some() || bias.is_some() {
                    let s = &mut s[..keys.len() * PANEL];
                    s.iter_mut().for_each(|score| *score *= scale);
                    if let Some(cap) = scores.cap {
                        kernels.softcap(s, cap);
                    }
                    if let Some(bias) = bias {
                        kernels.alibi(shape, s, bias);
                    }
                    scale = 1.0;
                }
                let real = keys.start..keys.end.min(band.k);
                if !band.sees_all(&queries, &real) {
                    band.hide(&queries, &real, s, PANEL, f32::NEG_INFINITY);
                }
                s[real.len() * PANEL..keys.len() * PANEL].fill(f32::NEG_INFINITY);
                let mut factor = [0.0; PANEL];
                let (max, sum) = (&mut panel.max, &mut panel.sum);
                let rescale = tiles.online_softmax(shape, s, scale, p, PANEL, max, sum, &mut factor);
                if rescale && panel.started {
                    for row in panel.o.chunks_exact_mut(PANEL) {
                        for (value, factor) in row.iter_mut().zip(factor) {
                            *value *= factor;
                        }
                    }
                }
                tiles.product(Product16 {
                    shape: [dims_v, PANEL, keys.len()],
                    a: &tile.vt[within.start..],
                    lda: tile.capacity,
                    b: p,
                    ldb: PANEL,
                    c: &mut panel.o,
                    ldc: PANEL,
                    add: panel.started,
                });
                panel.started = true;
            }
        }
        end(panels, cut.stretch_of(item, seen.end.saturating_sub(1)), true);
        true
    }
}
