//! The backward in f32: one work item is a range of keys of one K/V head, so that dK and dV belong to one
//! worker.
//!
//! When there are fewer K/V heads than threads, the keys of a head are split over several items; each keeps
//! its own dQ, and these partial sums are added in order afterwards. No sum depends on timing.

use std::ops::Range;
use std::sync::OnceLock;

use fa_core::program::TileState;

use super::buffer::Buffer;
use super::cut::{Cut, Sizes, TILE_N, cuts, items, partials};
use super::delta::ExactDelta;
use super::dq::Writers;
use super::inputs::{Backward, Gradients};
use super::long::{self, STRETCH, Sums};
use super::pack::{KeyRows, all_finite, dot, is_finite, read_row, read_rows};
use super::programs::{ArraySums, OwnTile, gathered};
use super::schedule;
use super::scores::{Scores, lse_exponent};
use super::scratch::{QueryTile, Scratch};
use super::sink_terms::SinkTerms;
use super::work::Unit;
use crate::element::Element;
use crate::simd::row_products::Factor;
use crate::simd::{Init, Order, Product, TileShape};

/// Tiles of keys that share a tile of queries while it is in the second-level cache.
const GROUP: usize = 2;

/// Computes the gradients of the given units, which come in the order of cuts, or of all; returns what each
/// of their heads adds to the gradient of its sink, in order.
pub(super) fn run<T: Element + Factor>(
    call: &Backward<'_, T>,
    to: &mut Gradients<'_, T>,
    only: Option<&[Unit]>,
) -> Vec<(usize, f64)> {
    let Backward { kernels, threads, problem, batch, ref inputs } = *call;
    let sizes = Sizes::new(problem, kernels);
    let mut cuts = cuts(problem, batch, sizes.tile_m, schedule::workers(threads));
    if let Some(only) = only {
        let mut only = only.iter().peekable();
        cuts.retain(|cut| only.next_if(|unit| **unit == cut.unit).is_some());
    }
    if cuts.is_empty() {
        if let Some(darrays) = &mut to.darrays {
            // Of a batch without sequences; programs have no other path, which would have written them.
            **darrays = gathered(batch, [].into_iter());
        }
        return vec![];
    }
    let group = problem.group_size();
    let [k, v] = [inputs.k, inputs.v].map(|tensor| KeyRows::new(tensor, batch));
    let job = Job { call, scores: &Scores::new(problem), sizes };
    let tile = [sizes.tile_m, problem.head_dim * sizes.tile_m];
    let writers = Writers::new(call, &cuts, [&mut to.dq, &mut to.dk, &mut to.dv], tile);

    let items = items(&cuts, batch, |_| true);
    let partial = partials(&cuts, group);
    let array_sums: Vec<OnceLock<ArraySums>> = items.iter().map(|_| OnceLock::new()).collect();
    let dsinks = SinkTerms::new(to.dsinks.is_some(), cuts.len(), group);
    schedule::run(
        items.len(),
        threads,
        || {
            let converts = k.converts() || v.converts();
            (Scratch::new(problem, batch, &sizes, &cuts, converts), ExactDelta::new(call))
        },
        |(scratch, exact), item| {
            let (index, part) = items[item];
            let cut = &cuts[index];
            let Unit { sequence, kv_head } = cut.unit;
            let keys = cut.keys_of(part);
            let (mut k_rows, mut v_rows) = (std::mem::take(&mut scratch.k), std::mem::take(&mut scratch.v));
            let k = k.tile(kernels, cut.unit, keys.clone(), &mut k_rows);
            let v = v.tile(kernels, cut.unit, keys.clone(), &mut v_rows);
            let mut own_dq = std::mem::take(&mut scratch.dq);
            scratch.dk[..keys.len() * sizes.ldq].fill(0.0);
            scratch.dv[..keys.len() * sizes.ldo].fill(0.0);
            for member in 0..group {
                let head = kv_head * group + member;
                for tile in 0..cut.m_tiles {
                    let queries = &mut scratch.queries[tile];
                    job.read_queries(cut, head, tile, queries, &mut scratch.rows);
                    if size_of::<T>() == 2 && scratch.own.is_none() {
                        job.exact_deltas(cut, head, tile, queries, exact);
                    }
                    call.take_dlse(sequence, head, job.rows(cut, tile), &mut queries.delta);
                }
                if part == 0 {
                    let deltas = scratch.queries[..cut.m_tiles].iter().map(|tile| &tile.delta[..]);
                    dsinks.set(index, member, || call.dsink(sequence, head, deltas));
                }
                if cut.parts == 1 {
                    let own_dq = &mut own_dq[..cut.dq_len];
                    own_dq.fill(0.0);
                    job.main_loop(scratch, cut, head, &keys, [k, v], own_dq);
                    for tile in 0..cut.m_tiles {
                        let dqt = &own_dq[tile * problem.head_dim * sizes.tile_m..];
                        writers.dq.write(cut, [head, tile], dqt, &mut scratch.rows);
                    }
                } else {
                    let mut own = Buffer::new(cut.dq_len);
                    job.main_loop(scratch, cut, head, &keys, [k, v], &mut own);
                    let empty = partial[cut.partial + part * group + member].set(own).is_ok();
                    debug_assert!(empty, "an item runs once");
                }
            }
            long::finish_both(&mut scratch.before, [&mut scratch.dk, &mut scratch.dv]);
            let sums = [(&scratch.dk[..], sizes.ldq), (&scratch.dv[..], sizes.ldo)];
            writers.write_keys(cut.unit, part, keys, sums);
            (scratch.k, scratch.v, scratch.dq) = (k_rows, v_rows, own_dq);
            let empty = array_sums[item].set(std::mem::take(&mut scratch.sums)).is_ok();
            debug_assert!(empty, "an item runs once");
        },
    );
    if !partial.is_empty() {
        writers.dq.add_partial(threads, group, &cuts, &partial);
    }
    if let Some(darrays) = &mut to.darrays {
        **darrays = gathered(batch, array_sums.iter().filter_map(OnceLock::get));
    }
    dsinks.by_head(&cuts)
}

/// `to += factor * from`, as far as `to` goes.
fn add_scaled(to: &mut [f32], factor: f32, from: &[f32]) {
    for (to, &from) in to.iter_mut().zip(from) {
        *to += factor * from;
    }
}

struct Job<'a, T> {
    call: &'a Backward<'a, T>,
    scores: &'a Scores,
    sizes: Sizes,
}

impl<T: Element + Factor> Job<'_, T> {
    fn rows(&self, cut: &Cut, tile: usize) -> Range<usize> {
        tile * self.sizes.tile_m..cut.band.q.min((tile + 1) * self.sizes.tile_m)
    }

    fn read_queries(&self, cut: &Cut, head: usize, tile: usize, to: &mut QueryTile, row: &mut [f32]) {
        let Backward { kernels, problem, batch, ref inputs, .. } = *self.call;
        let Sizes { tile_m, ldq, ldo, .. } = self.sizes;
        let (rows, span) = (self.rows(cut, tile), batch.sequences[cut.unit.sequence].q);
        let at = [span.batch, span.first + rows.start, head];
        let (hd, hdv) = (problem.head_dim, problem.head_dim_v);
        // Qt is scaled, Q is not: the scaled rows only pass through. Rows past the end may hold what another
        // head left there; their probabilities are 0 because their LSE is +inf.
        read_rows(kernels, &inputs.q, at, rows.len(), self.scores.scale, &mut to.q, ldq);
        kernels.transpose([rows.len(), hd], &to.q, ldq, &mut to.qt, tile_m);
        read_rows(kernels, &inputs.q, at, rows.len(), 1.0, &mut to.q, ldq);
        read_rows(kernels, &inputs.dout, at, rows.len(), 1.0, &mut to.dout, ldo);
        kernels.transpose([rows.len(), hdv], &to.dout, ldo, &mut to.dot, tile_m);
        to.lse.fill(f32::INFINITY);
        to.delta.fill(0.0);
        to.dead.clear();
        to.wild.clear();
        let lse = self.call.lse(cut.unit.sequence, head);
        let hides = !problem.mask.is_full() || problem.score.program.is_some();
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
            read_row(kernels, &inputs.out, [span.batch, span.first + query, head], &mut row[..hdv]);
            // With a sink, O is 0 where no key is seen; dO may be anything.
            to.delta[i] = if cut.band.keys(query).is_empty() { 0.0 } else { dot(&row[..hdv], dout) };
            to.lse[i] = lse_exponent(lse[query]);
        }
    }

    /// Takes delta from P and dP in rows that see few keys.
    fn exact_deltas(
        &self,
        cut: &Cut,
        head: usize,
        tile: usize,
        to: &mut QueryTile,
        exact: &mut ExactDelta<'_, T>,
    ) {
        let (problem, Sizes { ldq, ldo, .. }) = (self.call.problem, self.sizes);
        for (i, query) in self.rows(cut, tile).enumerate() {
            if to.lse[i] == f32::INFINITY {
                continue;
            }
            let rows = [&to.q[i * ldq..][..problem.head_dim], &to.dout[i * ldo..][..problem.head_dim_v]];
            if let Some(delta) = exact.of_row(cut.unit, &cut.band, [head, query], to.lse[i], rows) {
                to.delta[i] = delta;
            }
        }
    }

    /// All tiles of `keys`, each with all tiles of queries that see it: adds to the scratch's dK and dV and
    /// to dQt. `k` and `v` begin with the first of the keys.
    fn main_loop(
        &self,
        scratch: &mut Scratch<'_>,
        cut: &Cut,
        head: usize,
        keys: &Range<usize>,
        [k, v]: [(&[f32], usize); 2],
        dq: &mut [f32],
    ) {
        let (Backward { problem, .. }, sizes, band) = (self.call, self.sizes, &cut.band);
        let (mut before_dq, all) = (Sums::default(), 0..dq.len());
        for (count, key) in keys.clone().step_by(GROUP * TILE_N).enumerate() {
            if count > 0 && count % (STRETCH / GROUP) == 0 {
                before_dq.add(dq, all.clone());
            }
            let group = key..keys.end.min(key + GROUP * TILE_N);
            let seen = band.queries(group.start).start..band.queries(group.end - 1).end;
            if seen.is_empty() {
                continue;
            }
            for (count, m_tile) in (seen.start / sizes.tile_m..seen.end.div_ceil(sizes.tile_m)).enumerate() {
                if count > 0 && count % STRETCH == 0 {
                    let rows = group.start - keys.start..group.end - keys.start;
                    let sums = [&mut scratch.dk[..], &mut scratch.dv[..]];
                    long::add_both(&mut scratch.before, sums, rows, [sizes.ldq, sizes.ldo]);
                }
                let queries = self.rows(cut, m_tile);
                let visible = band.visible_keys(&queries);
                let dq = &mut dq[m_tile * problem.head_dim * sizes.tile_m..];
                for key in group.clone().step_by(TILE_N) {
                    let tile = visible.start.max(key)..visible.end.min(group.end).min(key + TILE_N);
                    if !tile.is_empty() {
                        self.tile(scratch, cut, [head, m_tile], &queries, &tile, keys.start, k, v, dq);
                    }
                }
            }
        }
        before_dq.finish(dq);
        // 0 times an infinity of K is NaN, but a row without probabilities has no gradient.
        let tiles = scratch.queries[..cut.m_tiles].iter();
        for (tile, dq) in tiles.zip(dq.chunks_mut(problem.head_dim * sizes.tile_m)) {
            for column in dq.chunks_mut(sizes.tile_m) {
                tile.dead.iter().for_each(|&query| column[query] = 0.0);
            }
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn tile(
        &self,
        scratch: &mut Scratch<'_>,
        cut: &Cut,
        [head, m_tile]: [usize; 2],
        queries: &Range<usize>,
        keys: &Range<usize>,
        first_key: usize,
        (k, ldk): (&[f32], usize),
        (v, ldv): (&[f32], usize),
        dq: &mut [f32],
    ) {
        let (Backward { kernels, problem, batch, .. }, sizes, band) = (self.call, self.sizes, &cut.band);
        let Sizes { tile_m, ldq, ldo, .. } = sizes;
        let Scratch { own, sums, queries: tiles, dk, dv, s, ds, .. } = scratch;
        let own_tile = OwnTile { sequence: cut.unit.sequence, head, queries, keys };
        let state = own.as_ref().map_or(TileState::Full, |own| own.state(&own_tile));
        if state == TileState::Empty {
            return;
        }
        let tile = &tiles[m_tile];
        let first = keys.start - first_key;
        let (k, v) = (&k[first * ldk..], &v[first * ldv..]);
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
        let mut own = own.as_mut().filter(|own| own.evaluates(state));
        if let Some(own) = &mut own {
            own.apply(&own_tile, state, s);
        }
        let hiding = own.is_some() || !band.sees_all(queries, keys);
        product(dp, (v, ldv), Order::Rows, (&tile.dot, tile_m), (ds, tile_m), Init::Zero);
        if let Some(own) = &own {
            own.weigh(&own_tile, ds);
        }
        let shape = TileShape { keys: rows, queries: columns, ld: tile_m };
        let bias = band.bias(batch.slope(cut.unit.sequence, head), queries.start, keys.start);
        kernels.softmax_gradient(shape, s, ds, &tile.lse, &tile.delta, self.scores.cap, bias);
        // P and dS are 0 where nothing is seen. Hidden scores are not made -inf before: below a soft cap
        // scores of -inf, which infinite keys have, are visible.
        let hidden = own.as_ref().map_or(&[][..], |own| &own.hidden);
        for tile_of in [&mut *s, &mut *ds] {
            for (value, &hidden) in tile_of.iter_mut().zip(hidden) {
                *value = if hidden { 0.0 } else { *value };
            }
            if hiding {
                band.hide(queries, keys, tile_of, tile_m, 0.0);
            }
            for row in tile_of.chunks_mut(tile_m).take(rows) {
                tile.dead.iter().for_each(|&query| row[query] = 0.0);
            }
        }

        if let Some(own) = &mut own {
            own.differentiate(&own_tile, ds, sums);
            own.weigh(&own_tile, s);
        }

        // 0 times a non-finite value is NaN as well: where a tile is masked in part, such rows of Q, dO and K
        // are added separately, only where they are visible.
        let hidden = own.as_ref().map_or(&[][..], |own| &own.hidden);
        let seen = |query: usize, key: usize| {
            let is_hidden = hidden.get(key * tile_m + query) == Some(&true);
            !is_hidden && band.visible(queries.start + query, keys.start + key)
        };
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
        let any_wild = hiding && !all_finite(k, rows, problem.head_dim, ldk);
        let is_wild = |key: &usize| any_wild && !is_finite(&k[key * ldk..][..problem.head_dim]);
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
}
