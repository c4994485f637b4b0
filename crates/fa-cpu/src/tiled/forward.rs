//! The forward in f32: one work item is a tile of queries of one head.

use std::ops::Range;

use fa_core::{Mask, Problem, Strides};

use super::buffer::Buffer;
use super::pack::{HeadRows, all_finite, read_rows, row_stride};
use super::schedule;
use crate::element::Element;
use crate::error::CpuError;
use crate::simd::scatter::Scatter;
use crate::simd::{Init, Kernels, Order, Product, TileShape};
use crate::view::{TensorMut, TensorRef};

/// Keys of a tile: a panel of probabilities (`tile_n x panel`) and one of queries stay in the first-level
/// cache.
pub(super) const TILE_N: usize = 128;
/// Most panels of queries that share a tile of keys while it is in the second-level cache.
const PANELS: usize = 8;

/// The largest factor on products: queries are scaled before they meet keys, and what is left of f32's range
/// is for both. Beyond it a query that overflows would give NaN with a key of 0.
const MAX_FACTOR: f32 = 1e30;

/// Score tiles are in base 2: `scale` turns a product into it (or into the cap's argument).
pub(super) struct Scores {
    pub(super) scale: f32,
    /// `cap * log2(e)`.
    pub(super) cap: Option<f32>,
}

impl Scores {
    pub(super) fn new(problem: &Problem) -> Scores {
        let log2e = std::f64::consts::LOG2_E;
        match problem.score.softcap {
            None => Scores { scale: (problem.scale() * log2e) as f32, cap: None },
            Some(cap) => Scores { scale: (problem.scale() / cap) as f32, cap: Some((cap * log2e) as f32) },
        }
    }

    /// The factor on products leaves room for them in f32, and the soft cap is a normal number of f32.
    ///
    /// # Errors
    /// [`CpuError::Range`].
    pub(super) fn check(problem: &Problem) -> Result<(), CpuError> {
        let Scores { scale, cap } = Scores::new(problem);
        if scale.abs() <= MAX_FACTOR && cap.is_none_or(f32::is_normal) {
            return Ok(());
        }
        Err(CpuError::Range { scale: problem.scale(), softcap: problem.score.softcap, limit: MAX_FACTOR })
    }
}

/// A panel of queries and what has been accumulated for it.
struct Panel {
    /// Qt `[head_dim][panel]`, scaled.
    q: Buffer,
    /// Ot `[head_dim_v][panel]`, not normalised.
    o: Buffer,
    max: Buffer,
    sum: Buffer,
    /// Whether `o` holds anything yet.
    started: bool,
}

struct Scratch {
    panels: Vec<Panel>,
    /// St, then Pt: `[TILE_N][panel]`.
    s: Buffer,
    factor: Buffer,
    /// Rows of Q on their way in, rows of O on their way out.
    rows: Buffer,
}

impl Scratch {
    fn new(problem: &Problem, width: usize, panels: usize) -> Scratch {
        let panel = || Panel {
            q: Buffer::new(problem.head_dim * width),
            o: Buffer::new(problem.head_dim_v * width),
            max: Buffer::new(width),
            sum: Buffer::new(width),
            started: false,
        };
        Scratch {
            panels: (0..panels).map(|_| panel()).collect(),
            s: Buffer::new(TILE_N * width),
            factor: Buffer::new(width),
            rows: Buffer::new(width * row_stride(problem.head_dim.max(problem.head_dim_v))),
        }
    }
}

/// How many panels of `width` queries make a tile: as many as `most`, but fewer where threads would have
/// nothing to do, and so that all tiles are about equally long.
pub(super) fn panels_in_tile(problem: &Problem, width: usize, most: usize, workers: usize) -> usize {
    let panels = problem.lengths.max_q().div_ceil(width).max(1);
    let heads = (problem.lengths.sequences() * problem.heads_q).max(1);
    let tiles = panels.div_ceil(most).max((4 * workers).div_ceil(heads)).min(panels);
    panels.div_ceil(tiles)
}

/// (batch, query head, tile of queries), most work first.
pub(super) fn items(problem: &Problem, tile_m: usize) -> Vec<(usize, usize, usize)> {
    let tiles = problem.lengths.max_q().div_ceil(tile_m);
    let mut items = Vec::with_capacity(problem.lengths.sequences() * problem.heads_q * tiles);
    for batch in 0..problem.lengths.sequences() {
        for head in 0..problem.heads_q {
            items.extend((0..tiles).map(|tile| (batch, head, tile)));
        }
    }
    if !problem.mask.is_full() {
        let cost = |tile: usize| {
            let rows = tile * tile_m..problem.lengths.max_q().min((tile + 1) * tile_m);
            problem.mask.n_blocks(rows, problem.lengths.max_q(), problem.lengths.max_k(), 1).len()
        };
        items.sort_by_key(|&(_, _, tile)| std::cmp::Reverse(cost(tile)));
    }
    items
}

/// The keys that at least one of `queries` (not empty) sees.
pub(super) fn visible_keys(problem: &Problem, queries: &Range<usize>) -> Range<usize> {
    let keys = |query| problem.mask.keys(query, problem.lengths.max_q(), problem.lengths.max_k());
    let (first, last) = (keys(queries.start), keys(queries.end - 1));
    first.start..last.end.max(first.start)
}

/// Whether every one of `queries` sees every one of `keys`.
pub(super) fn sees_all(problem: &Problem, queries: &Range<usize>, keys: &Range<usize>) -> bool {
    let seen = |query| problem.mask.keys(query, problem.lengths.max_q(), problem.lengths.max_k());
    seen(queries.end - 1).start <= keys.start && keys.end <= seen(queries.start).end
}

/// Sets what the mask hides to `value` in a tile, `keys` down and `queries` across at stride `ld`: -inf for
/// scores.
pub(super) fn hide(
    problem: &Problem,
    queries: &Range<usize>,
    keys: &Range<usize>,
    s: &mut [f32],
    ld: usize,
    value: f32,
) {
    // Key j is seen by a band of queries: the mask with its sides exchanged.
    let transposed = Mask { left: problem.mask.right, right: problem.mask.left };
    let clamp = |query: usize| query.clamp(queries.start, queries.end) - queries.start;
    for (row, key) in s.chunks_mut(ld).zip(keys.clone()) {
        let seen = transposed.keys(key, problem.lengths.max_k(), problem.lengths.max_q());
        let row = &mut row[..queries.len()];
        row[..clamp(seen.start)].fill(value);
        row[clamp(seen.end)..].fill(value);
    }
}

/// Queries of a work item.
pub(super) fn tile_m(kernels: Kernels, problem: &Problem, threads: Option<usize>) -> usize {
    kernels.panel() * panels_in_tile(problem, kernels.panel(), PANELS, schedule::workers(threads))
}

/// Adds `p[i] * value` to the columns of Ot of those `queries` that see `key`.
fn add_seen(problem: &Problem, queries: &Range<usize>, key: usize, p: &[f32], value: &[f32], o: &mut [f32]) {
    for (column, query) in queries.clone().enumerate() {
        if problem.mask.visible(query, key, problem.lengths.max_q(), problem.lengths.max_k()) {
            for (sum, value) in o[column..].iter_mut().step_by(p.len()).zip(value) {
                *sum += p[column] * value;
            }
        }
    }
}

#[allow(clippy::too_many_arguments)]
pub(super) fn run<T: Element>(
    kernels: Kernels,
    threads: Option<usize>,
    problem: &Problem,
    q: &TensorRef<'_, T>,
    k: &TensorRef<'_, T>,
    v: &TensorRef<'_, T>,
    out: &mut TensorMut<'_, T>,
    lse: Option<&mut [f32]>,
) {
    let width = kernels.panel();
    let tile_m = tile_m(kernels, problem, threads);
    let items = items(problem, tile_m);
    if items.is_empty() {
        return;
    }
    let v_shape = v.shape();
    let (k, v) = (HeadRows::new(k, threads), HeadRows::new(v, threads));
    let finite_v = problem.mask.is_full() || all_finite(&v, v_shape, threads);
    let out = Scatter::new(out, tile_m);
    let mut lse = lse.map(|lse| lse_tensor(problem, lse));
    let lse = lse.as_mut().map(|lse| Scatter::new(lse, tile_m));
    let scores = Scores::new(problem);
    schedule::run(
        items.len(),
        threads,
        || Scratch::new(problem, width, tile_m / width),
        |scratch, item| {
            let (batch, head, tile) = items[item];
            let rows = tile * tile_m..problem.lengths.max_q().min((tile + 1) * tile_m);
            let kv_head = head / problem.group_size();
            let job = Job { kernels, problem, scores: &scores, width, finite_v };
            let ld = row_stride(problem.head_dim.max(problem.head_dim_v));
            for (panel, first) in scratch.panels.iter_mut().zip(rows.clone().step_by(width)) {
                let count = width.min(rows.end - first);
                read_rows(q, [batch, first, head], count, scores.scale, &mut scratch.rows, ld);
                // Columns past the last query keep what an earlier tile left there: nobody looks at their
                // results.
                kernels.transpose([count, problem.head_dim], &scratch.rows, ld, &mut panel.q, width);
                panel.max.fill(f32::NEG_INFINITY);
                panel.sum.fill(0.0);
                panel.started = false;
            }
            job.main_loop(scratch, &rows, k.head(batch, kv_head), v.head(batch, kv_head));

            let mut out_rows = out.take(batch, head, tile);
            let mut lse_rows = lse.as_ref().map(|lse| lse.take(batch, head, tile));
            for (panel, first) in scratch.panels.iter_mut().zip(rows.clone().step_by(width)) {
                if !panel.started {
                    panel.o.fill(0.0);
                }
                let queries = first..rows.end.min(first + width);
                let shape = [problem.head_dim_v, queries.len()];
                kernels.transpose(shape, &panel.o, width, &mut scratch.rows, ld);
                for (i, row) in queries.enumerate() {
                    let sum = panel.sum[i];
                    let normaliser = if sum == 0.0 { 0.0 } else { 1.0 / sum };
                    let values = &scratch.rows[i * ld..][..problem.head_dim_v];
                    out_rows.write(row, values.iter().map(|&value| T::from_f32(value * normaliser)));
                    if let Some(lse_rows) = &mut lse_rows {
                        lse_rows.write(row, std::iter::once(natural_lse(panel.max[i], sum)));
                    }
                }
            }
        },
    );
}

/// The natural logarithm of `sum * 2^max`; -inf when nothing was seen.
pub(super) fn natural_lse(max: f32, sum: f32) -> f32 {
    if sum == 0.0 { f32::NEG_INFINITY } else { max * std::f32::consts::LN_2 + sum.ln() }
}

/// The LSE buffer as a tensor of head dim 1.
pub(super) fn lse_tensor<'a>(problem: &Problem, lse: &'a mut [f32]) -> TensorMut<'a, f32> {
    let (seqlen, heads) = (problem.lengths.max_q() as i64, problem.heads_q as i64);
    let strides = Strides { batch: heads * seqlen, seq: 1, head: seqlen, dim: 1 };
    TensorMut::new(
        "lse",
        lse,
        [problem.lengths.sequences(), problem.lengths.max_q(), problem.heads_q, 1],
        strides,
    )
    .expect("the length was checked against the problem")
}

struct Job<'a> {
    kernels: Kernels,
    problem: &'a Problem,
    scores: &'a Scores,
    width: usize,
    /// Whether V holds neither infinities nor NaN, as far as that matters.
    finite_v: bool,
}

impl Job<'_> {
    /// All tiles of keys that `rows` see, each for every panel of queries.
    fn main_loop(
        &self,
        scratch: &mut Scratch,
        rows: &Range<usize>,
        (k, ldk): (&[f32], usize),
        (v, ldv): (&[f32], usize),
    ) {
        let Job { kernels, problem, scores, width, finite_v } = *self;
        let Scratch { panels, s, factor, .. } = scratch;
        let seen = visible_keys(problem, rows);
        for key in (seen.start / TILE_N * TILE_N..seen.end).step_by(TILE_N) {
            for (panel, first) in panels.iter_mut().zip(rows.clone().step_by(width)) {
                let queries = first..rows.end.min(first + width);
                let seen = visible_keys(problem, &queries);
                let keys = key.max(seen.start)..seen.end.min(key + TILE_N);
                if keys.is_empty() {
                    continue;
                }
                let columns = queries.len().next_multiple_of(kernels.lanes());
                kernels.product(Product {
                    m: keys.len(),
                    n: columns,
                    k: problem.head_dim,
                    a: &k[keys.start * ldk..],
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
                let hiding = !sees_all(problem, &queries, &keys);
                if hiding {
                    hide(problem, &queries, &keys, s, width, f32::NEG_INFINITY);
                }
                let shape = TileShape { keys: keys.len(), queries: columns, ld: width };
                let rescale = kernels.online_softmax(shape, s, &mut panel.max, &mut panel.sum, factor);
                let mut init = match (panel.started, rescale) {
                    (false, _) => Init::Zero,
                    (true, false) => Init::Add,
                    (true, true) => Init::Scale(factor),
                };
                // A probability of 0 times a value that is not finite is NaN: where a tile hides something,
                // such values come in by themselves, for those who see them.
                let value = |key: usize| &v[key * ldv..][..problem.head_dim_v];
                let wild =
                    |key: &usize| hiding && !finite_v && value(*key).iter().any(|value| !value.is_finite());
                let mut from = keys.start;
                while from < keys.end {
                    let to = (from..keys.end).find(wild).unwrap_or(keys.end);
                    kernels.product(Product {
                        m: problem.head_dim_v,
                        n: columns,
                        k: to - from,
                        a: &v[from * ldv..],
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
                        add_seen(problem, &queries, to, p, value(to), &mut panel.o);
                    }
                    (init, from) = (Init::Add, to + 1);
                }
                panel.started = true;
            }
        }
    }
}
