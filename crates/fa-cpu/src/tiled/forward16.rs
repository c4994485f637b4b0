//! The forward in bf16 with f32 sums: the same main loop as [`super::forward`], on tiles that AMX and
//! AVX512-BF16 read.
//!
//! Probabilities are rounded to bf16 before they meet V, as GPU kernels do; their sum is taken before the
//! rounding.

use std::sync::{Mutex, PoisonError};

use fa_core::Problem;
use half::bf16;

use super::buffer::Buffer;
use super::forward::lse_tensor;
use super::pack16::{Packed, TileBuffer, grain, read_rows};
use super::panels::{Panel, Panels};
use super::parts::{Parts, slot_len};
use super::schedule;
use super::scores::Scores;
use super::work::{Forward, Item, TILE_N, Unit, items};
use crate::simd::bf16::{Bf16Kernels, GRAIN, LANES, Product16};
use crate::simd::scatter::Scatter;
use crate::simd::{Isa, Kernels, TileShape};
use crate::view::TensorMut;

/// Queries of a panel: with a tile of keys, its scores stay in the first-level cache.
pub(super) const PANEL: usize = 32;
/// Most panels of queries that share a tile of keys while it is in the second-level cache.
pub(super) const PANELS: usize = 16;

struct Scratch {
    tiles: Bf16Kernels,
    /// Qt in pairs `[head_dim / 2][PANEL]`.
    panels: Vec<Panel<u32>>,
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

/// The largest scale without a soft cap. The backward's `score * scale - LSE` is one multiply-add, off by the
/// rounding of the LSE: as an exponent of 2 that must stay small. The forward takes the same problems.
const MAX_SCALE: f32 = 1024.0;

/// Whether this path can take the problem: the kernels are there and scores keep their order when scaled.
pub(super) fn applies(kernels: Kernels, problem: &Problem) -> bool {
    let Scores { scale, cap } = Scores::new(problem);
    let programs = problem.score.program.is_some();
    kernels.has_bf16()
        && !programs
        && scale.is_normal()
        && scale > 0.0
        && (cap.is_some() || scale <= MAX_SCALE)
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
    let (queries, width, ld) = (|_, _| PANEL, PANEL, dims_v);
    let panels = Panels { call, units, cut: &cut, parts: &parts, queries, width, dims_v, ld, out, lse };
    let job = Job { panels: &panels, scores: &Scores::new(problem), kv: &kv, words };
    let left = Mutex::new(vec![]);
    schedule::run(
        cut.items.len(),
        threads,
        || job.scratch(cut.most),
        |scratch, item| {
            let item = &cut.items[item];
            for (panel, index) in scratch.panels.iter_mut().zip(item.panels.clone()) {
                let [batch, first] = panels.place(panel, item.unit, index);
                let at = [batch, first + panel.queries.start, panel.head];
                read_rows(&q, at, panel.queries.len(), &mut scratch.rows, words);
                kernels.transpose_words([PANEL, words], &scratch.rows, words, &mut panel.q, PANEL);
                panel.reset();
            }
            if job.main_loop(scratch, item) {
                panels.write_item(item, &mut scratch.panels[..item.panels.len()], &mut scratch.out);
            } else {
                left.lock().unwrap_or_else(PoisonError::into_inner).push(item.unit);
            }
        },
    );
    let mut left = left.into_inner().unwrap_or_else(PoisonError::into_inner);
    left.sort_unstable();
    left.dedup();
    panels.merge(&left);
    left.into_iter().map(|unit| units[unit]).collect()
}

struct Job<'a> {
    panels: &'a Panels<'a, bf16>,
    scores: &'a Scores,
    kv: &'a Packed<'a>,
    /// Words of a padded row of Q or K.
    words: usize,
}

impl Job<'_> {
    fn scratch(&self, panels: usize) -> Scratch {
        let Panels { call, dims_v, .. } = *self.panels;
        Scratch {
            tiles: call.kernels.bf16().expect("the caller asked whether there are such kernels"),
            panels: (0..panels).map(|_| self.panels.panel(self.words)).collect(),
            s: Buffer::new(TILE_N * PANEL),
            p: Buffer::new(TILE_N / 2 * PANEL),
            rows: Buffer::new(PANEL * self.words),
            out: Buffer::new(PANEL * dims_v),
            tile: self.kv.buffer(),
        }
    }

    /// All of the item's tiles of keys that its panels see, each for every panel. Returns whether the unit's
    /// values allow this path: without a mask they do.
    fn main_loop(&self, scratch: &mut Scratch, item: &Item) -> bool {
        let Job { scores, kv, words, .. } = *self;
        let Panels { call, units, dims_v, .. } = *self.panels;
        let Forward { kernels, batch, .. } = *call;
        let unit = units[item.unit];
        let band = &call.band(unit.sequence);
        let Scratch { tiles, panels, s, p, tile: buffer, .. } = scratch;
        let panels = &mut panels[..item.panels.len()];
        let seen = self.panels.seen(item, band, panels);
        for index in seen.start / TILE_N..seen.end.div_ceil(TILE_N) {
            self.panels.before_tile(item, &seen, index * TILE_N, panels);
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
        self.panels.after_tiles(item, &seen, panels);
        true
    }
}
