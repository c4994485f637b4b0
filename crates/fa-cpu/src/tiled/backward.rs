//! The backward in f32: one work item is a range of keys of one K/V head, so that dK and dV belong to one
//! worker.
//!
//! When there are fewer K/V heads than threads, the keys of a head are split over several items; each keeps
//! its own dQ, and these partial sums are added in order afterwards. No sum depends on timing.

use std::ops::Range;
use std::sync::OnceLock;

use fa_core::{Mask, Problem};

use super::buffer::Buffer;
use super::forward::{Scores, hide, sees_all, visible_keys};
use super::inputs::BackwardInputs;
use super::pack::{HeadRows, all_finite, dot, is_finite, read_row, read_rows, row_stride};
use super::schedule;
use crate::element::Element;
use crate::simd::scatter::Scatter;
use crate::simd::{Init, Kernels, Order, Product, TileShape};
use crate::view::TensorMut;

/// Keys of a tile.
const TILE_N: usize = 128;
/// Tiles of keys that share a tile of queries while it is in the second-level cache.
const GROUP: usize = 2;
/// Panels of queries in a tile.
const PANELS: usize = 2;
/// Rows that see no more keys than this have their delta taken from P and dP; the time of it is a few percent
/// of the row's.
const FEW_KEYS: usize = 16;

/// A tile of queries, in the forms that the five products read.
struct QueryTile {
    /// Qt `[head_dim][tile_m]`, scaled: B of the scores.
    qt: Buffer,
    /// Q `[tile_m][ld]`: B of dK.
    q: Buffer,
    /// dOt `[head_dim_v][tile_m]`: B of dP.
    dot: Buffer,
    /// dO `[tile_m][ld]`: B of dV.
    dout: Buffer,
    /// LSE in base 2, +inf for rows that see nothing.
    lse: Buffer,
    /// Row sums of dO * O.
    delta: Buffer,
    /// Rows without any probability: they see no key, or all their scores are -inf. Q and dO hold zeros for
    /// them.
    dead: Vec<usize>,
    /// Rows where Q or dO holds infinities or NaN, as far as that matters: where the mask hides something.
    wild: Vec<usize>,
}

/// What one worker keeps.
struct Scratch {
    queries: Vec<QueryTile>,
    /// dK `[keys of the item][ld]`, dV the same.
    dk: Buffer,
    dv: Buffer,
    /// St then Pt, and dPt then dSt: `[TILE_N][tile_m]`.
    s: Buffer,
    ds: Buffer,
    /// Rows of O on their way in, rows of dQ on their way out: `[tile_m][ldq or ldo]`.
    rows: Buffer,
}

/// Sizes that follow from the problem and the kernels.
#[derive(Clone, Copy)]
struct Sizes {
    tile_m: usize,
    m_tiles: usize,
    /// Padded head dims: whole registers, so that they can be columns of a product.
    ldq: usize,
    ldo: usize,
    columns_q: usize,
    columns_o: usize,
    /// Keys of an item.
    keys: usize,
    /// Items of a head.
    parts: usize,
    /// Values of one head's dQt.
    dq_len: usize,
}

impl Sizes {
    fn new(problem: &Problem, kernels: Kernels, workers: usize) -> Sizes {
        let tile_m = PANELS * kernels.panel();
        let m_tiles = problem.lengths.max_q().div_ceil(tile_m);
        let n_tiles = problem.lengths.max_k().div_ceil(TILE_N);
        let heads = problem.lengths.sequences() * problem.heads_kv;
        // Splitting costs a dQ for each part, so only as far as every worker has something to do.
        let parts = if heads.is_multiple_of(workers) || heads >= 4 * workers {
            1
        } else {
            (2 * workers).div_ceil(heads.max(1)).clamp(1, n_tiles.max(1))
        };
        let keys = n_tiles.div_ceil(parts).max(1) * TILE_N;
        Sizes {
            tile_m,
            m_tiles,
            ldq: row_stride(problem.head_dim),
            ldo: row_stride(problem.head_dim_v),
            columns_q: problem.head_dim.next_multiple_of(kernels.lanes()),
            columns_o: problem.head_dim_v.next_multiple_of(kernels.lanes()),
            keys,
            parts: problem.lengths.max_k().div_ceil(keys).max(1),
            dq_len: m_tiles * problem.head_dim * tile_m,
        }
    }
}

impl Scratch {
    fn new(problem: &Problem, sizes: &Sizes) -> Scratch {
        let Sizes { tile_m, ldq, ldo, .. } = *sizes;
        let tile = || QueryTile {
            qt: Buffer::new(problem.head_dim * tile_m),
            q: Buffer::new(tile_m * ldq),
            dot: Buffer::new(problem.head_dim_v * tile_m),
            dout: Buffer::new(tile_m * ldo),
            lse: Buffer::new(tile_m),
            delta: Buffer::new(tile_m),
            dead: Vec::new(),
            wild: Vec::new(),
        };
        let keys = sizes.keys.min(problem.lengths.max_k());
        Scratch {
            queries: (0..sizes.m_tiles).map(|_| tile()).collect(),
            dk: Buffer::new(keys * ldq),
            dv: Buffer::new(keys * ldo),
            s: Buffer::new(TILE_N * tile_m),
            ds: Buffer::new(TILE_N * tile_m),
            rows: Buffer::new(tile_m * ldq.max(ldo)),
        }
    }
}

pub(super) fn run<T: Element>(
    kernels: Kernels,
    threads: Option<usize>,
    problem: &Problem,
    inputs: &BackwardInputs<'_, T>,
    dq: &mut TensorMut<'_, T>,
    dk: &mut TensorMut<'_, T>,
    dv: &mut TensorMut<'_, T>,
) {
    let sizes = Sizes::new(problem, kernels, schedule::workers(threads));
    let group = problem.group_size();
    let (k, v) = (HeadRows::new(&inputs.k, threads), HeadRows::new(&inputs.v, threads));
    let scores = Scores::new(problem);
    let finite_k = problem.mask.is_full() || all_finite(&k, inputs.k.shape(), threads);
    let job = Job { kernels, problem, scores: &scores, sizes, finite_k };
    let dq = Scatter::new(dq, sizes.tile_m);
    let dk = Scatter::new(dk, sizes.keys);
    let dv = Scatter::new(dv, sizes.keys);

    let items = problem.lengths.sequences() * problem.heads_kv * sizes.parts;
    // dQt of every (item, head of its group), where items of one head have to be added up.
    let partial: Vec<OnceLock<Buffer>> = match sizes.parts {
        1 => Vec::new(),
        _ => (0..items * group).map(|_| OnceLock::new()).collect(),
    };
    schedule::run(
        items,
        threads,
        || (Scratch::new(problem, &sizes), Buffer::new(if sizes.parts == 1 { sizes.dq_len } else { 0 })),
        |(scratch, own_dq), item| {
            let (index, part) = (item / sizes.parts, item % sizes.parts);
            let (batch, kv_head) = (index / problem.heads_kv, index % problem.heads_kv);
            let keys = part * sizes.keys..problem.lengths.max_k().min((part + 1) * sizes.keys);
            scratch.dk.fill(0.0);
            scratch.dv.fill(0.0);
            for member in 0..group {
                let head = kv_head * group + member;
                let tensors = [k.head(batch, kv_head), v.head(batch, kv_head)];
                for (tile, queries) in scratch.queries.iter_mut().enumerate() {
                    job.read_queries(inputs, batch, head, tile, queries, &mut scratch.rows);
                    if size_of::<T>() == 2 {
                        job.exact_deltas(job.rows(tile), queries, tensors);
                    }
                }
                if sizes.parts == 1 {
                    own_dq.fill(0.0);
                    job.main_loop(scratch, &keys, tensors, own_dq);
                    for tile in 0..sizes.m_tiles {
                        let dqt = &own_dq[tile * problem.head_dim * sizes.tile_m..];
                        job.write_queries(&dq, [batch, head, tile], dqt, &mut scratch.rows);
                    }
                } else {
                    let mut own = Buffer::new(sizes.dq_len);
                    job.main_loop(scratch, &keys, tensors, &mut own);
                    let empty = partial[item * group + member].set(own).is_ok();
                    debug_assert!(empty, "an item runs once");
                }
            }
            if !keys.is_empty() {
                let scale = problem.scale() as f32;
                let mut dk = dk.take(batch, kv_head, part);
                let mut dv = dv.take(batch, kv_head, part);
                for (i, key) in keys.enumerate() {
                    dk.write(key, scratch.dk[i * sizes.ldq..].iter().map(|&x| T::from_f32(x * scale)));
                    dv.write(key, scratch.dv[i * sizes.ldo..].iter().map(|&x| T::from_f32(x)));
                }
            }
        },
    );
    if sizes.parts > 1 {
        job.add_partial(threads, &partial, &dq);
    }
}

/// `to += factor * from`, as far as `to` goes.
fn add_scaled(to: &mut [f32], factor: f32, from: &[f32]) {
    for (to, &from) in to.iter_mut().zip(from) {
        *to += factor * from;
    }
}

struct Job<'a> {
    kernels: Kernels,
    problem: &'a Problem,
    scores: &'a Scores,
    sizes: Sizes,
    /// Whether K holds neither infinities nor NaN, as far as that matters.
    finite_k: bool,
}

impl Job<'_> {
    fn rows(&self, tile: usize) -> Range<usize> {
        tile * self.sizes.tile_m..self.problem.lengths.max_q().min((tile + 1) * self.sizes.tile_m)
    }

    fn read_queries<T: Element>(
        &self,
        inputs: &BackwardInputs<'_, T>,
        batch: usize,
        head: usize,
        tile: usize,
        to: &mut QueryTile,
        row: &mut [f32],
    ) {
        let (problem, Sizes { tile_m, ldq, ldo, .. }) = (self.problem, self.sizes);
        let rows = self.rows(tile);
        let at = [batch, rows.start, head];
        let (hd, hdv) = (problem.head_dim, problem.head_dim_v);
        // Qt is scaled, Q is not: the scaled rows only pass through. Rows past the end may hold what another
        // head left there; their probabilities are 0 because their LSE is +inf.
        read_rows(&inputs.q, at, rows.len(), self.scores.scale, &mut to.q, ldq);
        self.kernels.transpose([rows.len(), hd], &to.q, ldq, &mut to.qt, tile_m);
        read_rows(&inputs.q, at, rows.len(), 1.0, &mut to.q, ldq);
        read_rows(&inputs.dout, at, rows.len(), 1.0, &mut to.dout, ldo);
        self.kernels.transpose([rows.len(), hdv], &to.dout, ldo, &mut to.dot, tile_m);
        to.lse.fill(f32::INFINITY);
        to.delta.fill(0.0);
        to.dead.clear();
        to.wild.clear();
        let lse = &inputs.lse[(batch * problem.heads_q + head) * problem.lengths.max_q()..];
        let hides = !problem.mask.is_full();
        for (i, query) in rows.enumerate() {
            let (q, dout) = (&mut to.q[i * ldq..][..hd], &mut to.dout[i * ldo..][..hdv]);
            if lse[query] == f32::NEG_INFINITY {
                q.fill(0.0);
                dout.fill(0.0);
                to.dead.push(i);
                continue;
            }
            if hides && !(is_finite(q) && is_finite(dout)) {
                to.wild.push(i);
            }
            read_row(&inputs.out, [batch, query, head], &mut row[..hdv]);
            to.delta[i] = dot(&row[..hdv], dout);
            to.lse[i] = lse[query] * std::f32::consts::LOG2_E;
        }
    }

    /// Takes delta from P and dP in rows that see few keys. `sum_j P dP = dO . O` holds for the exact O; an O
    /// of 16 bits is off by its rounding, all of which is an error of dS where few terms cancel.
    fn exact_deltas(&self, rows: Range<usize>, tile: &mut QueryTile, [k, v]: [(&[f32], usize); 2]) {
        let (problem, Sizes { ldq, ldo, .. }) = (self.problem, self.sizes);
        for (i, query) in rows.enumerate() {
            let keys = problem.mask.keys(query, problem.lengths.max_q(), problem.lengths.max_k());
            if keys.len() > FEW_KEYS || tile.lse[i] == f32::INFINITY {
                continue;
            }
            let q = &tile.q[i * ldq..][..problem.head_dim];
            let dout = &tile.dout[i * ldo..][..problem.head_dim_v];
            let (mut sum, mut delta) = (0.0, 0.0);
            for key in keys {
                let score = self.scores.scale * dot(q, &k.0[key * k.1..][..problem.head_dim]);
                let score = self.scores.cap.map_or(score, |cap| cap * score.tanh());
                let p = (score - tile.lse[i]).exp2();
                sum += p;
                delta += p * dot(dout, &v.0[key * v.1..][..problem.head_dim_v]);
            }
            tile.delta[i] = delta / sum;
        }
    }

    /// All tiles of `keys`, each with all tiles of queries that see it: adds to the scratch's dK and dV and
    /// to dQt.
    fn main_loop(
        &self,
        scratch: &mut Scratch,
        keys: &Range<usize>,
        [k, v]: [(&[f32], usize); 2],
        dq: &mut [f32],
    ) {
        let Job { problem, sizes, .. } = *self;
        let transposed = Mask { left: problem.mask.right, right: problem.mask.left };
        let seen_by = |key| transposed.keys(key, problem.lengths.max_k(), problem.lengths.max_q());
        for key in keys.clone().step_by(GROUP * TILE_N) {
            let group = key..keys.end.min(key + GROUP * TILE_N);
            let seen = seen_by(group.start).start..seen_by(group.end - 1).end;
            if seen.is_empty() {
                continue;
            }
            for m_tile in seen.start / sizes.tile_m..seen.end.div_ceil(sizes.tile_m) {
                let queries = self.rows(m_tile);
                let visible = visible_keys(problem, &queries);
                let dq = &mut dq[m_tile * problem.head_dim * sizes.tile_m..];
                for key in group.clone().step_by(TILE_N) {
                    let tile = visible.start.max(key)..visible.end.min(group.end).min(key + TILE_N);
                    if !tile.is_empty() {
                        self.tile(scratch, m_tile, &queries, &tile, keys.start, k, v, dq);
                    }
                }
            }
        }
        // 0 times an infinity of K is NaN, but a row without probabilities has no gradient.
        for (tile, dq) in scratch.queries.iter().zip(dq.chunks_mut(problem.head_dim * sizes.tile_m)) {
            for column in dq.chunks_mut(sizes.tile_m) {
                tile.dead.iter().for_each(|&query| column[query] = 0.0);
            }
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn tile(
        &self,
        scratch: &mut Scratch,
        m_tile: usize,
        queries: &Range<usize>,
        keys: &Range<usize>,
        first_key: usize,
        (k, ldk): (&[f32], usize),
        (v, ldv): (&[f32], usize),
        dq: &mut [f32],
    ) {
        let Job { kernels, problem, sizes, .. } = *self;
        let Sizes { tile_m, ldq, ldo, .. } = sizes;
        let Scratch { queries: tiles, dk, dv, s, ds, .. } = scratch;
        let tile = &tiles[m_tile];
        let (k, v) = (&k[keys.start * ldk..], &v[keys.start * ldv..]);
        let (rows, columns) = (keys.len(), queries.len().next_multiple_of(kernels.lanes()));
        let product = |[m, n, depth]: [usize; 3],
                       (a, lda): (&[f32], usize),
                       order: Order,
                       (b, ldb): (&[f32], usize),
                       (c, ldc): (&mut [f32], usize),
                       init: Init<'_>| {
            kernels.product(Product { m, n, k: depth, a, lda, order, b, ldb, c, ldc, init });
        };

        let (scores, dp) = ([rows, columns, problem.head_dim], [rows, columns, problem.head_dim_v]);
        product(scores, (k, ldk), Order::Rows, (&tile.qt, tile_m), (s, tile_m), Init::Zero);
        let hiding = !sees_all(problem, queries, keys);
        if hiding {
            hide(problem, queries, keys, s, tile_m, f32::NEG_INFINITY);
        }
        product(dp, (v, ldv), Order::Rows, (&tile.dot, tile_m), (ds, tile_m), Init::Zero);
        let shape = TileShape { keys: rows, queries: columns, ld: tile_m };
        kernels.softmax_gradient(shape, s, ds, &tile.lse, &tile.delta, self.scores.cap);
        // P and dS are 0 where nothing is seen, even where 0 was multiplied by NaN.
        for tile_of in [&mut *s, &mut *ds] {
            if hiding {
                hide(problem, queries, keys, tile_of, tile_m, 0.0);
            }
            for row in tile_of.chunks_mut(tile_m).take(rows) {
                tile.dead.iter().for_each(|&query| row[query] = 0.0);
            }
        }

        // 0 times what is not finite is NaN too: where a tile hides something, such rows of Q, dO and K come
        // in by themselves, for those who see them.
        let seen = |query: usize, key: usize| {
            problem.mask.visible(
                queries.start + query,
                keys.start + key,
                problem.lengths.max_q(),
                problem.lengths.max_k(),
            )
        };
        let first = keys.start - first_key;
        let (dv, dk) = (&mut dv[first * ldo..], &mut dk[first * ldq..]);
        let mut from = 0;
        for to in tile.wild.iter().copied().filter(|_| hiding).chain([queries.len()]) {
            if from < to {
                let dout = &tile.dout[from * ldo..];
                let values = [rows, sizes.columns_o, to - from];
                product(values, (&s[from..], tile_m), Order::Rows, (dout, ldo), (dv, ldo), Init::Add);
                let values = [rows, sizes.columns_q, to - from];
                let q = &tile.q[from * ldq..];
                product(values, (&ds[from..], tile_m), Order::Rows, (q, ldq), (dk, ldq), Init::Add);
            }
            if to < queries.len() {
                for key in (0..rows).filter(|&key| seen(to, key)) {
                    let at = key * tile_m + to;
                    add_scaled(&mut dv[key * ldo..][..sizes.columns_o], s[at], &tile.dout[to * ldo..]);
                    add_scaled(&mut dk[key * ldq..][..sizes.columns_q], ds[at], &tile.q[to * ldq..]);
                }
            }
            from = to + 1;
        }
        let is_wild =
            |key: &usize| hiding && !self.finite_k && !is_finite(&k[key * ldk..][..problem.head_dim]);
        let mut from = 0;
        while from < rows {
            let to = (from..rows).find(is_wild).unwrap_or(rows);
            if from < to {
                let values = [problem.head_dim, columns, to - from];
                let (k, ds) = (&k[from * ldk..], &ds[from * tile_m..]);
                product(values, (k, ldk), Order::Columns, (ds, tile_m), (dq, tile_m), Init::Add);
            }
            if to < rows {
                for query in (0..queries.len()).filter(|&query| seen(query, to)) {
                    let sums = dq[query..].iter_mut().step_by(tile_m);
                    for (sum, value) in sums.zip(&k[to * ldk..][..problem.head_dim]) {
                        *sum += ds[to * tile_m + query] * value;
                    }
                }
            }
            from = to + 1;
        }
    }

    /// Writes one tile of dQ from dQt, by way of `rows`.
    fn write_queries<T: Element>(
        &self,
        dq: &Scatter<'_, T>,
        [batch, head, tile]: [usize; 3],
        dqt: &[f32],
        rows: &mut [f32],
    ) {
        let (Sizes { tile_m, ldq, .. }, scale) = (self.sizes, self.problem.scale() as f32);
        let queries = self.rows(tile);
        self.kernels.transpose([self.problem.head_dim, queries.len()], dqt, tile_m, rows, ldq);
        let mut to = dq.take(batch, head, tile);
        for (row, values) in queries.zip(rows.chunks(ldq)) {
            to.write(row, values.iter().map(|&value| T::from_f32(value * scale)));
        }
    }

    /// Adds up the parts of every head's dQ, in order, and writes it.
    fn add_partial<T: Element>(
        &self,
        threads: Option<usize>,
        partial: &[OnceLock<Buffer>],
        dq: &Scatter<'_, T>,
    ) {
        let Job { problem, sizes, .. } = *self;
        let (group, len) = (problem.group_size(), problem.head_dim * sizes.tile_m);
        schedule::run(
            problem.lengths.sequences() * problem.heads_q * sizes.m_tiles,
            threads,
            || [Buffer::new(len), Buffer::new(sizes.tile_m * sizes.ldq)],
            |[sum, rows], item| {
                let (index, tile) = (item / sizes.m_tiles, item % sizes.m_tiles);
                let (batch, head) = (index / problem.heads_q, index % problem.heads_q);
                let first = (batch * problem.heads_kv + head / group) * sizes.parts;
                sum.fill(0.0);
                for part in first..first + sizes.parts {
                    if let Some(part) = partial[part * group + head % group].get() {
                        for (sum, value) in sum.iter_mut().zip(&part[tile * len..]) {
                            *sum += value;
                        }
                    }
                }
                self.write_queries(dq, [batch, head, tile], sum, rows);
            },
        );
    }
}
