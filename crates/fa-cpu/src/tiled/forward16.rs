//! The forward in bf16 with f32 sums: the same main loop as [`super::forward`], on tiles that AMX and
//! AVX512-BF16 read.
//!
//! Probabilities are rounded to bf16 before they meet V, as GPU kernels do; their sum is taken before the
//! rounding.

use std::ops::Range;

use fa_core::Problem;
use half::bf16;

use super::buffer::Buffer;
use super::forward::{Scores, hide, items, lse_tensor, natural_lse, panels_in_tile, sees_all, visible_keys};
use super::pack16::{PackedKv, grain, read_rows};
use super::schedule;
use crate::simd::bf16::{Bf16Kernels, GRAIN, Product16};
use crate::simd::scatter::Scatter;
use crate::simd::{Kernels, TileShape};
use crate::view::{TensorMut, TensorRef};

/// Keys of a tile.
pub(super) const TILE_N: usize = 128;
/// Queries of a panel: with a tile of keys, its scores stay in the first-level cache.
const PANEL: usize = 32;
/// Most panels of queries that share a tile of keys while it is in the second-level cache.
const PANELS: usize = 16;

/// A panel of queries and what has been accumulated for it.
struct Panel {
    /// Qt in pairs `[head_dim / 2][PANEL]`.
    q: Buffer<u32>,
    /// Ot `[head_dim_v][PANEL]`, not normalised.
    o: Buffer,
    max: [f32; PANEL],
    sum: [f32; PANEL],
    /// Whether `o` holds anything yet.
    started: bool,
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
}

/// The largest scale without a soft cap. `score * scale - max * scale` is one multiply-add, off by the
/// rounding of `max * scale`: as an exponent of 2 that must stay small.
const MAX_SCALE: f32 = 1024.0;

/// Whether this path can take the problem: the kernels are there and scores keep their order when scaled.
pub(super) fn applies(kernels: Kernels, problem: &Problem) -> bool {
    let Scores { scale, cap } = Scores::new(problem);
    kernels.has_bf16() && scale.is_normal() && scale > 0.0 && (cap.is_some() || scale <= MAX_SCALE)
}

/// Queries of a work item.
pub(super) fn tile_m(problem: &Problem, threads: Option<usize>) -> usize {
    PANEL * panels_in_tile(problem, PANEL, PANELS, schedule::workers(threads))
}

#[allow(clippy::too_many_arguments)]
pub(super) fn run(
    kernels: Kernels,
    threads: Option<usize>,
    problem: &Problem,
    q: &TensorRef<'_, bf16>,
    k: &TensorRef<'_, bf16>,
    v: &TensorRef<'_, bf16>,
    out: &mut TensorMut<'_, bf16>,
    lse: Option<&mut [f32]>,
) {
    let tile_m = tile_m(problem, threads);
    let items = items(problem, tile_m);
    if items.is_empty() {
        return;
    }
    let kv = PackedKv::new(kernels, threads, k, v, TILE_N);
    if !kv.finite_v && !problem.mask.is_full() {
        // Hidden values that are not finite need the care that only the f32 path takes.
        return super::forward::run(kernels, threads, problem, q, k, v, out, lse);
    }
    let out = Scatter::new(out, tile_m);
    let mut lse = lse.map(|lse| lse_tensor(problem, lse));
    let lse = lse.as_mut().map(|lse| Scatter::new(lse, tile_m));
    let (words, dims_v) = (grain(problem.head_dim) / 2, grain(problem.head_dim_v));
    let job = Job { kernels, problem, scores: &Scores::new(problem), kv: &kv, words, dims_v };
    schedule::run(
        items.len(),
        threads,
        || job.scratch(tile_m / PANEL),
        |scratch, item| {
            let (batch, head, tile) = items[item];
            let rows = tile * tile_m..problem.lengths.max_q().min((tile + 1) * tile_m);
            for (panel, first) in scratch.panels.iter_mut().zip(rows.clone().step_by(PANEL)) {
                let count = PANEL.min(rows.end - first);
                read_rows(q, [batch, first, head], count, &mut scratch.rows, words);
                kernels.transpose_words([PANEL, words], &scratch.rows, words, &mut panel.q, PANEL);
                panel.max.fill(f32::NEG_INFINITY);
                panel.sum.fill(0.0);
                panel.started = false;
            }
            job.main_loop(scratch, &rows, batch, head / problem.group_size());

            let mut out_rows = out.take(batch, head, tile);
            let mut lse_rows = lse.as_ref().map(|lse| lse.take(batch, head, tile));
            for (panel, first) in scratch.panels.iter_mut().zip(rows.clone().step_by(PANEL)) {
                if !panel.started {
                    panel.o.fill(0.0);
                }
                kernels.transpose([dims_v, PANEL], &panel.o, PANEL, &mut scratch.out, dims_v);
                for (i, row) in (first..rows.end.min(first + PANEL)).enumerate() {
                    let sum = panel.sum[i];
                    let normaliser = if sum == 0.0 { 0.0 } else { 1.0 / sum };
                    let values = &scratch.out[i * dims_v..][..problem.head_dim_v];
                    out_rows.write(row, values.iter().map(|&value| bf16::from_f32(value * normaliser)));
                    if let Some(lse_rows) = &mut lse_rows {
                        lse_rows.write(row, std::iter::once(natural_lse(panel.max[i], sum)));
                    }
                }
            }
        },
    );
}

struct Job<'a> {
    kernels: Kernels,
    problem: &'a Problem,
    scores: &'a Scores,
    kv: &'a PackedKv,
    /// Words of a padded row of Q or K.
    words: usize,
    /// Padded head dim of V.
    dims_v: usize,
}

impl Job<'_> {
    fn scratch(&self, panels: usize) -> Scratch {
        let panel = || Panel {
            q: Buffer::new(self.words * PANEL),
            o: Buffer::new(self.dims_v * PANEL),
            max: [0.0; PANEL],
            sum: [0.0; PANEL],
            started: false,
        };
        Scratch {
            tiles: self.kernels.bf16().expect("the caller asked whether there are such kernels"),
            panels: (0..panels).map(|_| panel()).collect(),
            s: Buffer::new(TILE_N * PANEL),
            p: Buffer::new(TILE_N / 2 * PANEL),
            rows: Buffer::new(PANEL * self.words),
            out: Buffer::new(PANEL * self.dims_v),
        }
    }

    /// All tiles of keys that `rows` see, each for every panel of queries.
    fn main_loop(&self, scratch: &mut Scratch, rows: &Range<usize>, batch: usize, kv_head: usize) {
        let Job { problem, scores, kv, words, dims_v, .. } = *self;
        let Scratch { tiles, panels, s, p, .. } = scratch;
        let seen = visible_keys(problem, rows);
        for tile in seen.start / TILE_N..seen.end.div_ceil(TILE_N) {
            let first_key = tile * TILE_N;
            for (panel, first) in panels.iter_mut().zip(rows.clone().step_by(PANEL)) {
                let queries = first..rows.end.min(first + PANEL);
                let seen = visible_keys(problem, &queries);
                let keys = first_key.max(seen.start)..seen.end.min(first_key + TILE_N);
                if keys.is_empty() {
                    continue;
                }
                // Whole grains around what is seen; what that adds is hidden.
                let keys = keys.start / GRAIN * GRAIN..grain(keys.end);
                let within = keys.start - first_key..keys.end - first_key;
                tiles.product(Product16 {
                    shape: [keys.len(), PANEL, 2 * words],
                    a: kv.k(batch, kv_head, tile, &within, words),
                    lda: 2 * words,
                    b: &panel.q,
                    ldb: PANEL,
                    c: s,
                    ldc: PANEL,
                    add: false,
                });
                let mut scale = scores.scale;
                if let Some(cap) = scores.cap {
                    let s = &mut s[..keys.len() * PANEL];
                    s.iter_mut().for_each(|score| *score *= scale);
                    self.kernels.softcap(s, cap);
                    scale = 1.0;
                }
                let real = keys.start..keys.end.min(problem.lengths.max_k());
                if !sees_all(problem, &queries, &real) {
                    hide(problem, &queries, &real, s, PANEL, f32::NEG_INFINITY);
                }
                s[real.len() * PANEL..keys.len() * PANEL].fill(f32::NEG_INFINITY);
                let shape = TileShape { keys: keys.len(), queries: PANEL, ld: PANEL };
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
                    a: kv.vt(batch, kv_head, tile, within.start),
                    lda: TILE_N,
                    b: p,
                    ldb: PANEL,
                    c: &mut panel.o,
                    ldc: PANEL,
                    add: panel.started,
                });
                panel.started = true;
            }
        }
    }
}
