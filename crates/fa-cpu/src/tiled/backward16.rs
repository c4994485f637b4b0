//! The backward in bf16 with f32 sums: the same main loop as [`super::backward`], on tiles that AMX and
//! AVX512-BF16 read. P and dS are rounded to bf16 before they meet dO, Q and K, as GPU kernels do.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use fa_core::Problem;
use half::bf16;

use super::buffer::Buffer;
use super::cut::{Cut, TILE_N, cuts, items, partials};
use super::delta::{ExactDelta, FEW_KEYS};
use super::dq::Writers;
use super::forward16;
use super::inputs::{Backward, Gradients};
use super::long::{self, STRETCH, Sums};
use super::pack::{dot, read_row, row_stride};
use super::pack16::{grain, is_finite_row, pair_rows, read_rows};
use super::schedule;
use super::scores::{Scores, lse_exponent};
use super::sink_terms::SinkTerms;
use super::work::Unit;
use crate::simd::bf16::{Bf16Kernels, GRAIN, Gradient16, Product16};
use crate::simd::{Kernels, TileShape};

/// Queries of a tile.
const TILE_M: usize = 128;
/// The largest scale without a soft cap, as in the forward.
const MAX_SCALE: f32 = 1024.0;

/// A tile of queries, in the forms that the five products read.
struct QueryTile {
    /// Qt in pairs `[head_dim / 2][TILE_M]`: B of the scores.
    qt: Buffer<u32>,
    /// Q in pairs of queries `[TILE_M / 2][head_dim]`: B of dK.
    q: Buffer<u32>,
    /// dOt in pairs `[head_dim_v / 2][TILE_M]`: B of dP.
    dot: Buffer<u32>,
    /// dO in pairs of queries `[TILE_M / 2][head_dim_v]`: B of dV.
    dout: Buffer<u32>,
    /// LSE in base 2, +inf for rows that see nothing.
    lse: Buffer,
    /// Row sums of dO * O.
    delta: Buffer,
}

/// What one worker keeps.
struct Scratch {
    kernels: Bf16Kernels,
    queries: Vec<QueryTile>,
    /// K and V of the item's keys, in rows, and Kt of each of its tiles `[head_dim][TILE_N]`.
    k: Buffer<u32>,
    v: Buffer<u32>,
    kt: Buffer<u32>,
    /// dK `[keys of the item][head_dim]`, dV the same.
    dk: Buffer,
    dv: Buffer,
    /// Sums of dK and dV over earlier stretches, for many queries.
    before: [Sums; 2],
    /// St and dPt `[TILE_N][TILE_M]`.
    s: Buffer,
    dp: Buffer,
    /// Pt, dSt in rows and dSt in pairs of keys, as words.
    p: Buffer<u32>,
    ds: Buffer<u32>,
    ds_pairs: Buffer<u32>,
    /// Rows on their way in or out.
    words: Buffer<u32>,
    pairs: Buffer<u32>,
    rows: Buffer,
    /// dQt of one head, where no other thread adds to it.
    dq: Buffer,
}

/// Padded head dims.
#[derive(Clone, Copy)]
struct Sizes {
    q: usize,
    v: usize,
}

/// Whether this path can take the problem.
pub(super) fn applies(kernels: Kernels, problem: &Problem) -> bool {
    let Scores { scale, cap } = Scores::new(problem);
    let in_range = scale.is_normal() && scale > 0.0 && (cap.is_some() || scale <= MAX_SCALE);
    // The cap's derivative is computed from its value, to which ALiBi's bias would be added afterwards.
    kernels.has_bf16()
        && problem.score.program.is_none()
        && in_range
        && !(cap.is_some() && problem.score.alibi.is_some())
}

/// Computes the gradients of all units with more than a few queries whose inputs are finite; returns the
/// others, in order, and what the heads of those add to the gradients of their sinks.
pub(super) fn run(call: &Backward<'_, bf16>, to: &mut Gradients<'_, bf16>) -> (Vec<Unit>, Vec<(usize, f64)>) {
    let Backward { kernels, threads, problem, batch, .. } = *call;
    let sizes = Sizes { q: grain(problem.head_dim), v: grain(problem.head_dim_v) };
    let mut cuts = cuts(problem, batch, TILE_M, schedule::workers(threads));
    for cut in &mut cuts {
        cut.dq_len = cut.m_tiles * sizes.q * TILE_M;
    }
    let group = problem.group_size();
    let suits = |cut: &Cut| forward16::suits(kernels, cut.band.q);
    if !cuts.iter().any(suits) {
        return (cuts.iter().map(|cut| cut.unit).collect(), vec![]);
    }
    let taken: Vec<AtomicBool> = cuts.iter().map(|_| AtomicBool::new(true)).collect();
    schedule::run(
        cuts.len(),
        threads,
        || (),
        |(), index| {
            let cut = &cuts[index];
            taken[index].store(suits(cut) && is_finite(call, cut), Ordering::Relaxed);
        },
    );
    let taken: Vec<bool> = taken.into_iter().map(AtomicBool::into_inner).collect();
    let job = Job { call, scores: &Scores::new(problem), sizes };
    let tile = [TILE_M, sizes.q * TILE_M];
    let writers = Writers::new(call, &cuts, [&mut to.dq, &mut to.dk, &mut to.dv], tile);

    let items = items(&cuts, batch, |index| taken[index]);
    let partial = partials(&cuts, group);
    let dsinks = SinkTerms::new(to.dsinks.is_some(), cuts.len(), group);
    schedule::run(
        items.len(),
        threads,
        || (job.scratch(&cuts), ExactDelta::new(call)),
        |(scratch, exact), item| {
            let (index, part) = items[item];
            let cut = &cuts[index];
            let Unit { sequence, kv_head } = cut.unit;
            let keys = cut.keys_of(part);
            job.read_keys(scratch, cut, &keys);
            scratch.dk[..grain(keys.len()) * sizes.q].fill(0.0);
            scratch.dv[..grain(keys.len()) * sizes.v].fill(0.0);
            for member in 0..group {
                let head = kv_head * group + member;
                (0..cut.m_tiles).for_each(|tile| job.read_queries(scratch, exact, cut, head, tile));
                if part == 0 {
                    let deltas = scratch.queries[..cut.m_tiles].iter().map(|tile| &tile.delta[..]);
                    dsinks.set(index, member, || call.dsink(sequence, head, deltas));
                }
                if cut.parts == 1 {
                    let mut own = std::mem::take(&mut scratch.dq);
                    own[..cut.dq_len].fill(0.0);
                    job.main_loop(scratch, cut, head, &keys, &mut own);
                    for tile in 0..cut.m_tiles {
                        writers.dq.write(cut, [head, tile], &own[tile * writers.dq.len..], &mut scratch.rows);
                    }
                    scratch.dq = own;
                } else {
                    let mut own = Buffer::new(cut.dq_len);
                    job.main_loop(scratch, cut, head, &keys, &mut own);
                    let empty = partial[cut.partial + part * group + member].set(own).is_ok();
                    debug_assert!(empty, "an item runs once");
                }
            }
            long::finish_both(&mut scratch.before, [&mut scratch.dk, &mut scratch.dv]);
            let sums = [(&scratch.dk[..], sizes.q), (&scratch.dv[..], sizes.v)];
            writers.write_keys(cut.unit, part, keys, sums);
        },
    );
    let done: Vec<Cut> = cuts.iter().zip(&taken).filter(|(_, taken)| **taken).map(|(cut, _)| *cut).collect();
    if !partial.is_empty() {
        writers.dq.add_partial(threads, group, &done, &partial);
    }
    let left = cuts.iter().zip(&taken).filter(|(_, taken)| !**taken).map(|(cut, _)| cut.unit).collect();
    (left, dsinks.by_head(&cuts))
}

/// Whether all inputs of a unit are finite: 0 times infinity is NaN, and only the f32 path handles masked
/// rows with such values.
fn is_finite(call: &Backward<'_, bf16>, cut: &Cut) -> bool {
    let Backward { problem, batch, ref inputs, .. } = *call;
    let Unit { sequence, kv_head } = cut.unit;
    let keys = (0..cut.band.k).all(|key| {
        let (outer, inner) = batch.key(sequence, key);
        is_finite_row(&inputs.k, [outer, inner, kv_head]) && is_finite_row(&inputs.v, [outer, inner, kv_head])
    });
    let (span, group) = (batch.sequences[sequence].q, problem.group_size());
    let mut heads = kv_head * group..(kv_head + 1) * group;
    keys && heads.all(|head| {
        (0..span.len).all(|query| {
            let at = [span.batch, span.first + query, head];
            is_finite_row(&inputs.q, at) && is_finite_row(&inputs.dout, at)
        })
    })
}

struct Job<'a> {
    call: &'a Backward<'a, bf16>,
    scores: &'a Scores,
    sizes: Sizes,
}

impl Job<'_> {
    fn scratch(&self, cuts: &[Cut]) -> Scratch {
        let Sizes { q, v } = self.sizes;
        let tile = || QueryTile {
            qt: Buffer::new(q / 2 * TILE_M),
            q: Buffer::new(TILE_M / 2 * q),
            dot: Buffer::new(v / 2 * TILE_M),
            dout: Buffer::new(TILE_M / 2 * v),
            lse: Buffer::new(TILE_M),
            delta: Buffer::new(TILE_M),
        };
        let most = |of: fn(&Cut) -> usize| cuts.iter().map(of).max().unwrap_or(0);
        let keys = grain(most(|cut| cut.keys.min(cut.band.k)));
        let (n_tiles, widest) = (keys.div_ceil(TILE_N), q.max(v));
        let head_dims = row_stride(self.call.problem.head_dim.max(self.call.problem.head_dim_v));
        Scratch {
            kernels: self.call.kernels.bf16().expect("the caller asked whether there are such kernels"),
            queries: (0..most(|cut| cut.m_tiles)).map(|_| tile()).collect(),
            k: Buffer::new(keys * q / 2),
            v: Buffer::new(keys * v / 2),
            kt: Buffer::new(n_tiles * q * TILE_N / 2),
            dk: Buffer::new(keys * q),
            dv: Buffer::new(keys * v),
            before: <[Sums; 2]>::default(),
            s: Buffer::new(TILE_N * TILE_M),
            dp: Buffer::new(TILE_N * TILE_M),
            p: Buffer::new(TILE_N * TILE_M / 2),
            ds: Buffer::new(TILE_N * TILE_M / 2),
            ds_pairs: Buffer::new(TILE_N * TILE_M / 2),
            words: Buffer::new(TILE_M.max(TILE_N) * widest / 2),
            pairs: Buffer::new(TILE_M.max(TILE_N) * widest / 2),
            rows: Buffer::new(TILE_M * head_dims),
            dq: Buffer::new(most(|cut| if cut.parts == 1 { cut.dq_len } else { 0 })),
        }
    }

    fn rows(&self, cut: &Cut, tile: usize) -> Range<usize> {
        tile * TILE_M..cut.band.q.min((tile + 1) * TILE_M)
    }

    /// K and V of the item in rows, and Kt tile by tile.
    fn read_keys(&self, scratch: &mut Scratch, cut: &Cut, keys: &Range<usize>) {
        let Backward { kernels, batch, ref inputs, .. } = *self.call;
        let Sizes { q, v } = self.sizes;
        let Scratch { k: rows_k, v: rows_v, kt, pairs, .. } = scratch;
        let (span, len) = (batch.sequences[cut.unit.sequence].k, grain(keys.len()));
        let at = [span.batch, span.first + keys.start, cut.unit.kv_head];
        read_rows(&inputs.k, at, keys.len(), &mut rows_k[..len * q / 2], q / 2);
        read_rows(&inputs.v, at, keys.len(), &mut rows_v[..len * v / 2], v / 2);
        for (tile, first) in (0..len).step_by(TILE_N).enumerate() {
            let count = TILE_N.min(len - first);
            let rows = &rows_k[first * q / 2..(first + count) * q / 2];
            let pairs = &mut pairs[..count * q / 2];
            pair_rows(rows, q / 2, pairs);
            let to = &mut kt[tile * q * TILE_N / 2..];
            kernels.transpose_words([count / 2, q], pairs, q, to, TILE_N / 2);
        }
    }

    fn read_queries(
        &self,
        scratch: &mut Scratch,
        exact: &mut ExactDelta<'_, bf16>,
        cut: &Cut,
        head: usize,
        tile: usize,
    ) {
        let Backward { kernels, problem, batch, ref inputs, .. } = *self.call;
        let Sizes { q, v } = self.sizes;
        let Scratch { queries, words, rows, .. } = scratch;
        let (to, queries) = (&mut queries[tile], self.rows(cut, tile));
        let span = batch.sequences[cut.unit.sequence].q;
        let (at, len) = ([span.batch, span.first + queries.start, head], grain(queries.len()));
        let lse = self.call.lse(cut.unit.sequence, head);
        to.lse.fill(f32::INFINITY);
        to.delta.fill(0.0);
        for (tensor, dims, transposed, paired) in
            [(&inputs.q, q, &mut to.qt, &mut to.q), (&inputs.dout, v, &mut to.dot, &mut to.dout)]
        {
            let words = &mut words[..len * dims / 2];
            read_rows(tensor, at, queries.len(), words, dims / 2);
            kernels.transpose_words([len, dims / 2], words, dims / 2, transposed, TILE_M);
            pair_rows(words, dims / 2, &mut paired[..len / 2 * dims]);
        }
        let ld = row_stride(problem.head_dim.max(problem.head_dim_v));
        let [row, dout] = rows[..2 * ld].split_at_mut(ld).into();
        let dout = &mut dout[..problem.head_dim_v];
        let own = queries.clone();
        for (i, query) in queries.enumerate() {
            // Rows without any probability keep none with an LSE of +inf.
            if lse[query] == f32::NEG_INFINITY {
                continue;
            }
            to.lse[i] = lse_exponent(lse[query]);
            let at = [span.batch, span.first + query, head];
            read_row(kernels, &inputs.dout, at, dout);
            let delta = if cut.band.keys(query).len() <= FEW_KEYS {
                let q = &mut row[..problem.head_dim];
                read_row(kernels, &inputs.q, at, q);
                exact.of_row(cut.unit, &cut.band, [head, query], to.lse[i], [q, dout])
            } else {
                None
            };
            to.delta[i] = delta.unwrap_or_else(|| {
                let out = &mut row[..problem.head_dim_v];
                read_row(kernels, &inputs.out, at, out);
                dot(out, dout)
            });
        }
        self.call.take_dlse(cut.unit.sequence, head, own, &mut to.delta);
    }

    /// All tiles of `keys`, each with all tiles of queries that see it: adds to the scratch's dK and dV and
    /// to dQt.
    fn main_loop(&self, scratch: &mut Scratch, cut: &Cut, head: usize, keys: &Range<usize>, dq: &mut [f32]) {
        let (mut before_dq, all) = (Sums::default(), 0..dq.len());
        for (n_tile, first) in keys.clone().step_by(TILE_N).enumerate() {
            if n_tile > 0 && n_tile % STRETCH == 0 {
                before_dq.add(dq, all.clone());
            }
            let of_tile = first..keys.end.min(first + TILE_N);
            let seen = cut.band.queries(of_tile.start).start..cut.band.queries(of_tile.end - 1).end;
            if seen.is_empty() {
                continue;
            }
            for (count, m_tile) in (seen.start / TILE_M..seen.end.div_ceil(TILE_M)).enumerate() {
                if count > 0 && count % STRETCH == 0 {
                    let rows = of_tile.start - keys.start..grain(of_tile.end - keys.start);
                    let sums = [&mut scratch.dk[..], &mut scratch.dv[..]];
                    long::add_both(&mut scratch.before, sums, rows, [self.sizes.q, self.sizes.v]);
                }
                let queries = self.rows(cut, m_tile);
                let visible = cut.band.visible_keys(&queries);
                let seen = visible.start.max(of_tile.start)..visible.end.min(of_tile.end);
                if !seen.is_empty() {
                    let dq = &mut dq[m_tile * self.sizes.q * TILE_M..];
                    self.tile(
                        scratch,
                        cut,
                        [head, m_tile, n_tile],
                        &queries,
                        &seen,
                        &of_tile,
                        keys.start,
                        dq,
                    );
                }
            }
        }
        before_dq.finish(dq);
    }

    /// One tile: `seen` of its keys `of_tile`.
    #[allow(clippy::too_many_arguments)]
    fn tile(
        &self,
        scratch: &mut Scratch,
        cut: &Cut,
        [head, m_tile, n_tile]: [usize; 3],
        queries: &Range<usize>,
        seen: &Range<usize>,
        of_tile: &Range<usize>,
        first_key: usize,
        dq: &mut [f32],
    ) {
        use crate::simd::cast::{halves, halves_mut};
        let (Backward { kernels: f32_kernels, batch, .. }, Sizes { q, v }) = (self.call, self.sizes);
        let Scratch { kernels, queries: tiles, k, v: rows_v, kt, dk, dv, s, dp, p, ds, ds_pairs, .. } =
            scratch;
        let tile = &tiles[m_tile];
        // Whole grains around the visible range; what they add is masked.
        let begin = (seen.start - of_tile.start) / GRAIN * GRAIN;
        let (rows, columns) = (grain(seen.end - of_tile.start) - begin, grain(queries.len()));
        let first = of_tile.start + begin;
        let at = first - first_key;
        kernels.product(Product16 {
            shape: [rows, columns, q],
            a: halves(&k[at * q / 2..]),
            lda: q,
            b: &tile.qt,
            ldb: TILE_M,
            c: s,
            ldc: TILE_M,
            add: false,
        });
        kernels.product(Product16 {
            shape: [rows, columns, v],
            a: halves(&rows_v[at * v / 2..]),
            lda: v,
            b: &tile.dot,
            ldb: TILE_M,
            c: dp,
            ldc: TILE_M,
            add: false,
        });
        let mut scale = self.scores.scale;
        let shape = TileShape { keys: rows, queries: columns, ld: TILE_M };
        let bias = cut.band.bias(batch.slope(cut.unit.sequence, head), queries.start, first);
        if let Some(bias) = bias {
            s[..rows * TILE_M].iter_mut().for_each(|score| *score *= scale);
            f32_kernels.alibi(shape, s, bias);
            scale = 1.0;
        }
        let real = first..of_tile.end.min(first + rows);
        if !cut.band.sees_all(queries, &real) {
            cut.band.hide(queries, &real, s, TILE_M, f32::NEG_INFINITY);
        }
        s[real.len() * TILE_M..rows * TILE_M].fill(f32::NEG_INFINITY);
        kernels.softmax_gradient(Gradient16 {
            shape,
            scores: s,
            dp,
            scale,
            cap: self.scores.cap,
            lse: &tile.lse,
            delta: &tile.delta,
            p: halves_mut(p),
            dscores_rows: halves_mut(ds),
            dscores_pairs: ds_pairs,
            ldw: TILE_M,
        });
        kernels.product(Product16 {
            shape: [rows, v, columns],
            a: halves(p),
            lda: TILE_M,
            b: &tile.dout,
            ldb: v,
            c: &mut dv[at * v..],
            ldc: v,
            add: true,
        });
        kernels.product(Product16 {
            shape: [rows, q, columns],
            a: halves(ds),
            lda: TILE_M,
            b: &tile.q,
            ldb: q,
            c: &mut dk[at * q..],
            ldc: q,
            add: true,
        });
        kernels.product(Product16 {
            shape: [q, columns, rows],
            a: &halves(&kt[n_tile * q * TILE_N / 2..])[begin..],
            lda: TILE_N,
            b: ds_pairs,
            ldb: TILE_M,
            c: dq,
            ldc: TILE_M,
            add: true,
        });
    }
}
