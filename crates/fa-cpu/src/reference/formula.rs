//! The formula itself, in any precision: `R` is the type that is computed in. Operands of a second product
//! are rounded by a function, and heads are read by another, so that the formula is compiled once for f64 and
//! once for f32, in this crate, whatever the tensors' type.

use std::ops::Range;

use fa_core::Problem;

use super::heads::{for_each_head, interleave, row};
use super::own::{ArraySums, OwnProgram, OwnRow, gathered};
use super::vectors::{Norms, abs, add_scaled, dot, norm, row_mut, sum};
use crate::batch::{Batch, Span};
use crate::check;
use crate::real::Real;
use crate::simd::{Work, widest};
use crate::softmax::origin;

/// Reads one head of a tensor, `(sequence, head)`, packed `[rows of the sequence, dim]`.
pub(super) type Rows<'a, R> = &'a (dyn Fn(usize, usize) -> Vec<R> + Sync);

/// Q, K and V, and the rounding of operands of a second product.
pub(super) struct Tensors<'a, R> {
    /// Where the sequences lie, with their slopes and sinks.
    pub batch: &'a Batch<'a>,
    pub q: Rows<'a, R>,
    pub k: Rows<'a, R>,
    pub v: Rows<'a, R>,
    /// Rounds to the type that matrix products take, or leaves the number as it is.
    pub round: fn(R) -> R,
}

/// Q, K and V of one query head of one sequence, packed `[rows, dim]`, and the scalars.
pub(super) struct Head<'a, R> {
    pub(super) problem: &'a Problem,
    /// Queries and keys of the sequence.
    pub(super) seqlens: [usize; 2],
    q: Vec<R>,
    k: Vec<R>,
    v: Vec<R>,
    round: fn(R) -> R,
    scale: R,
    softcap: Option<R>,
    /// ALiBi's; 0 without it.
    slope: R,
    pub(super) sink: Option<R>,
    /// The gradient of the LSE; empty without one.
    dlse: Vec<R>,
    program: Option<OwnProgram<'a>>,
}

/// One query's softmax.
struct Row<R> {
    /// The keys that it sees; empty where all scores are -inf.
    keys: Range<usize>,
    /// Scores of those keys, capped, without ALiBi's bias.
    scores: Vec<R>,
    /// `exp(S - max)`.
    exps: Vec<R>,
    /// What a program makes of the scores.
    own: OwnRow<R>,
    /// `exp(sink - max)`; 0 without a sink.
    sink: R,
    /// The sum of all of these.
    sum: R,
    lse: R,
}

impl<R: Real> Row<R> {
    /// Whether a program hides key `j`.
    fn hides(&self, j: usize) -> bool {
        self.own.hidden.get(j - self.keys.start).is_some_and(|&hidden| hidden)
    }

    /// The derivative of the score of key `j` by what the program takes.
    fn slope(&self, j: usize) -> R {
        self.own.slopes.get(j - self.keys.start).copied().unwrap_or(R::ONE)
    }

    /// What the probability of key `j` is multiplied by.
    fn weight(&self, j: usize) -> R {
        self.own.weights.get(j - self.keys.start).copied().unwrap_or(R::ONE)
    }

    /// The magnitude of the score that the program makes; 0 without one.
    fn changed(&self, j: usize) -> R {
        let score = self.own.scores.get(j - self.keys.start).copied().unwrap_or(R::ZERO);
        abs(score).max(R::ZERO)
    }
}

/// Queries that visit a block of keys together,
pub(super) const QUERIES: usize = 16;

/// and the keys of a step, whose rows of K, V, dK and dV stay in a core's own cache meanwhile.
const KEYS: usize = 32;

/// `range` in pieces of `step`.
pub(super) fn blocks(range: Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(step).map(move |first| first..(first + step).min(range.end))
}

/// The blocks that the keys of some rows lie in. With these as the outer loop, each row visits its keys in
/// order, and each key its rows in order, so that no sum depends on the blocks.
fn key_blocks<'a>(
    keys: impl Iterator<Item = &'a Range<usize>> + Clone,
) -> impl Iterator<Item = Range<usize>> {
    let seen = keys.filter(|keys| !keys.is_empty());
    let first = seen.clone().map(|keys| keys.start).min().unwrap_or(0);
    let last = seen.map(|keys| keys.end).max().unwrap_or(0);
    blocks(first..last, KEYS)
}

/// The intersection.
fn within(keys: &Range<usize>, block: &Range<usize>) -> Range<usize> {
    keys.start.max(block.start)..keys.end.min(block.end)
}

/// What the forward computes.
pub(crate) struct Forward<R> {
    /// Packed BSHD; NaN in rows of no sequence.
    pub out: Vec<R>,
    /// `[batch, heads_q, seqlen_q]`, NaN likewise.
    pub lse: Vec<R>,
    /// Per row of O, see [`Norms`]; head by head.
    pub out_terms: Vec<R>,
    /// Per row, the largest magnitude of its scores before biases, where a product's roundings are in them;
    /// head by head.
    pub score_terms: Vec<R>,
}

/// The forward of f64 tensors or of tensors that f64 stands for.
pub(super) fn forward_f64(problem: &Problem, tensors: &Tensors<'_, f64>) -> Forward<f64> {
    forward(problem, tensors)
}

/// The forward in f32.
pub(super) fn forward_f32(problem: &Problem, tensors: &Tensors<'_, f32>) -> Forward<f32> {
    forward(problem, tensors)
}

fn forward<R: Real>(problem: &Problem, tensors: &Tensors<'_, R>) -> Forward<R> {
    forward_by(problem, tensors, |head| widest(OneForward { head }))
}

/// The forward by what computes one query head.
pub(super) fn forward_by<R: Real>(
    problem: &Problem,
    tensors: &Tensors<'_, R>,
    of_head: impl Fn(Head<'_, R>) -> Forward<R> + Sync,
) -> Forward<R> {
    let batch = tensors.batch;
    let heads: Vec<Forward<R>> =
        for_each_head(problem, batch, |s, h| of_head(Head::gather(problem, tensors, s, h)));
    let out: Vec<&[R]> = heads.iter().map(|head| &head.out[..]).collect();
    let spans: Vec<Span> = batch.sequences.iter().map(|sequence| sequence.q).collect();
    let mut lse = vec![R::NAN; check::lse_len(problem)];
    let [_, seqlen, heads_q, _] = check::q_shape(problem);
    for (index, head) in heads.iter().enumerate() {
        let Span { batch, first, len } = spans[index / heads_q];
        let start = (batch * heads_q + index % heads_q) * seqlen + first;
        lse[start..start + len].copy_from_slice(&head.lse);
    }
    Forward {
        out: interleave(&out, &spans, check::out_shape(problem)),
        lse,
        out_terms: heads.iter().flat_map(|head| &head.out_terms).copied().collect(),
        score_terms: heads.iter().flat_map(|head| &head.score_terms).copied().collect(),
    }
}

/// What the backward computes, packed BSHD (NaN in rows of no sequence), or `[rows, dim]` where it is one
/// head's of one sequence.
#[derive(Default)]
pub(crate) struct Gradients<R> {
    pub dq: Vec<R>,
    pub dk: Vec<R>,
    pub dv: Vec<R>,
    /// `[heads_q]`, or one value; empty without sinks.
    pub dsinks: Vec<R>,
    /// Per row of dQ, see [`Norms`]; head by head.
    pub dq_terms: Vec<R>,
    /// Per row of dK.
    pub dk_terms: Vec<R>,
    /// Per row of dV.
    pub dv_terms: Vec<R>,
    /// Per sink.
    pub dsinks_terms: Vec<R>,
    /// Of each array that a program reads; empty where it wants no gradient.
    pub darrays: Vec<Vec<R>>,
    /// Per element.
    pub darrays_terms: Vec<Vec<R>>,
    /// One head's share of these two.
    sums: [ArraySums<R>; 2],
}

/// The backward in f64, without any rounding but f64's.
pub(super) fn backward_f64(
    problem: &Problem,
    tensors: &Tensors<'_, f64>,
    dout: Rows<'_, f64>,
) -> Gradients<f64> {
    backward(problem, tensors, dout, 1.0)
}

/// The backward in f32. `held` is the factor on the exponentials of O when they are rounded.
pub(super) fn backward_f32(
    problem: &Problem,
    tensors: &Tensors<'_, f32>,
    dout: Rows<'_, f32>,
    held: f32,
) -> Gradients<f32> {
    backward(problem, tensors, dout, held)
}

fn backward<R: Real>(
    problem: &Problem,
    tensors: &Tensors<'_, R>,
    dout: Rows<'_, R>,
    held: R,
) -> Gradients<R> {
    let batch = tensors.batch;
    let heads: Vec<Gradients<R>> = for_each_head(problem, batch, |s, h| {
        let head = Head::gather(problem, tensors, s, h);
        widest(OneBackward { head, dout: dout(s, h), held })
    });
    let spans_q: Vec<Span> = batch.sequences.iter().map(|sequence| sequence.q).collect();
    let spans_k: Vec<Span> = batch.sequences.iter().map(|sequence| sequence.k).collect();
    let dq: Vec<&[R]> = heads.iter().map(|head| &head.dq[..]).collect();
    let of_keys = |field: fn(&Gradients<R>) -> &[R]| -> Vec<Vec<R>> {
        heads.chunks(problem.group_size()).map(|group| sum(group.iter().map(field))).collect()
    };
    let of_sinks = |field: fn(&Gradients<R>) -> &[R]| -> Vec<R> {
        if !problem.score.sinks {
            return vec![];
        }
        let of_head = |h: usize| heads.iter().skip(h).step_by(problem.heads_q).flat_map(field);
        (0..problem.heads_q).map(|h| of_head(h).fold(R::ZERO, |sum, &value| sum + value)).collect()
    };
    Gradients {
        dq: interleave(&dq, &spans_q, check::q_shape(problem)),
        dk: interleave(&of_keys(|head| &head.dk), &spans_k, check::k_shape(problem)),
        dv: interleave(&of_keys(|head| &head.dv), &spans_k, check::v_shape(problem)),
        dsinks: of_sinks(|head| &head.dsinks),
        dq_terms: heads.iter().flat_map(|head| &head.dq_terms).copied().collect(),
        dk_terms: of_keys(|head| &head.dk_terms).concat(),
        dv_terms: of_keys(|head| &head.dv_terms).concat(),
        dsinks_terms: of_sinks(|head| &head.dsinks_terms),
        darrays: gathered(batch, heads.iter().map(|head| &head.sums[0])),
        darrays_terms: gathered(batch, heads.iter().map(|head| &head.sums[1])),
        sums: Default::default(),
    }
}

/// The forward of one query head.
struct OneForward<'a, R> {
    head: Head<'a, R>,
}

impl<R: Real> Work for OneForward<'_, R> {
    type Output = Forward<R>;

    #[inline(always)]
    fn run(self) -> Forward<R> {
        self.head.forward()
    }
}

/// The backward of one query head.
struct OneBackward<'a, R> {
    head: Head<'a, R>,
    dout: Vec<R>,
    held: R,
}

impl<R: Real> Work for OneBackward<'_, R> {
    type Output = Gradients<R>;

    #[inline(always)]
    fn run(self) -> Gradients<R> {
        self.head.gradients(&self.dout, self.held)
    }
}

impl<'a, R: Real> Head<'a, R> {
    fn gather(problem: &'a Problem, tensors: &Tensors<'a, R>, s: usize, h: usize) -> Self {
        let (kv, sequence) = (h / problem.group_size(), tensors.batch.sequences[s]);
        Head {
            problem,
            seqlens: [sequence.q.len, sequence.k.len],
            q: (tensors.q)(s, h),
            k: (tensors.k)(s, kv),
            v: (tensors.v)(s, kv),
            round: tensors.round,
            scale: R::from_f64(problem.scale()),
            softcap: problem.score.softcap.map(R::from_f64),
            slope: R::from_element(tensors.batch.slope(s, h)),
            sink: tensors.batch.sink(h).map(R::from_element),
            program: OwnProgram::of::<R>(tensors.batch, s, h, kv, problem.mask.offset),
            dlse: tensors
                .batch
                .dlse(s, h)
                .unwrap_or(&[])
                .iter()
                .map(|&value| R::from_element(value))
                .collect(),
        }
    }

    fn q(&self, i: usize) -> &[R] {
        row(&self.q, i, self.problem.head_dim)
    }

    fn k(&self, j: usize) -> &[R] {
        row(&self.k, j, self.problem.head_dim)
    }

    pub(super) fn v(&self, j: usize) -> &[R] {
        row(&self.v, j, self.problem.head_dim_v)
    }

    /// The gradient of the LSE of query `i`; 0 without one, and where the LSE is -inf.
    fn dlse(&self, i: usize, softmax: &Row<R>) -> R {
        if softmax.lse == R::NEG_INFINITY { R::ZERO } else { self.dlse.get(i).copied().unwrap_or(R::ZERO) }
    }

    /// The keys that some queries see by the mask, and the scores of those, capped.
    #[inline(always)]
    pub(super) fn scores(&self, queries: Range<usize>) -> impl Iterator<Item = (Range<usize>, Vec<R>)> {
        let Problem { mask, .. } = *self.problem;
        let [seqlen_q, seqlen_k] = self.seqlens;
        let keys: Vec<Range<usize>> = queries.clone().map(|i| mask.keys(i, seqlen_q, seqlen_k)).collect();
        let mut scores: Vec<Vec<R>> = keys.iter().map(|keys| Vec::with_capacity(keys.len())).collect();
        for block in key_blocks(keys.iter()) {
            for ((keys, scores), i) in keys.iter().zip(&mut scores).zip(queries.clone()) {
                for j in within(keys, &block) {
                    let score = self.scale * dot(self.q(i), self.k(j));
                    scores.push(self.softcap.map_or(score, |cap| cap * (score / cap).tanh()));
                }
            }
        }
        keys.into_iter().zip(scores)
    }

    /// What the program makes of a query's scores, and the scores with ALiBi's bias or changed by the
    /// program; -inf where it hides a key.
    #[inline(always)]
    pub(super) fn biased(&self, i: usize, keys: &Range<usize>, scores: &[R]) -> (OwnRow<R>, Vec<R>) {
        let own = self.program.as_ref().map_or(OwnRow::NONE, |program| program.row(i, keys.clone(), scores));
        let mut biased: Vec<R> = if self.slope == R::ZERO {
            scores.to_vec()
        } else {
            keys.clone().zip(scores).map(|(j, &score)| score - self.slope * self.distance(i, j)).collect()
        };
        if self.program.as_ref().is_some_and(OwnProgram::changes) {
            biased.copy_from_slice(&own.scores);
        }
        for (score, _) in biased.iter_mut().zip(&own.hidden).filter(|(_, hidden)| **hidden) {
            *score = R::NEG_INFINITY;
        }
        (own, biased)
    }

    /// The softmaxes of some queries.
    #[inline(always)]
    fn rows(&self, queries: Range<usize>) -> Vec<Row<R>> {
        let softmax = |(i, (keys, scores)): (usize, (Range<usize>, Vec<R>))| {
            let (own, biased) = self.biased(i, &keys, &scores);
            let max = biased.iter().fold(R::NEG_INFINITY, |max, &score| max.max(score));
            let max = origin(self.sink.map_or(max, |sink| max.max(sink)));
            let exps: Vec<R> = biased.iter().map(|&score| (score - max).exp()).collect();
            let sum = exps.iter().fold(R::ZERO, |sum, &exp| sum + exp);
            let keys = if sum == R::ZERO { 0..0 } else { keys };
            let sink = self.sink.map_or(R::ZERO, |sink| (sink - max).exp());
            let sum = sum + sink;
            Row { keys, scores, exps, own, sink, sum, lse: max + sum.ln() }
        };
        queries.clone().zip(self.scores(queries)).map(softmax).collect()
    }

    /// The distance of key `j` from the one that query `i` lies on.
    fn distance(&self, i: usize, j: usize) -> R {
        let [seqlen_q, seqlen_k] = self.seqlens;
        R::from_f64((self.problem.mask.diagonal(i, seqlen_q, seqlen_k) - j as i128).abs() as f64)
    }

    /// O of the queries whose softmaxes are `rows`, packed, the exponentials rounded at `held` times their
    /// size.
    #[inline(always)]
    fn outputs(&self, rows: &[Row<R>], held: R) -> Vec<R> {
        let dim = self.problem.head_dim_v;
        let mut out = vec![R::ZERO; rows.len() * dim];
        for block in key_blocks(rows.iter().map(|row| &row.keys)) {
            for (row, out) in rows.iter().zip(out.chunks_mut(dim)) {
                for j in within(&row.keys, &block).filter(|&j| !row.hides(j)) {
                    let exp = row.exps[j - row.keys.start] * row.weight(j);
                    add_scaled(out, (self.round)(exp * held), self.v(j));
                }
            }
        }
        for (row, out) in rows.iter().zip(out.chunks_mut(dim)).filter(|(row, _)| row.sum != R::ZERO) {
            out.iter_mut().for_each(|value| *value = *value / (row.sum * held));
        }
        out
    }

    /// The forward of this query head alone.
    #[inline(always)]
    fn forward(&self) -> Forward<R> {
        let Problem { head_dim, head_dim_v, .. } = *self.problem;
        let [seqlen_q, _] = self.seqlens;
        let (q, k) = (Norms::of(&self.q, head_dim), Norms::of(&self.k, head_dim));
        let v = Norms::of(&self.v, head_dim_v);
        let (mut out, mut lse, mut out_terms) = (vec![], vec![], vec![]);
        for queries in blocks(0..seqlen_q, QUERIES) {
            let rows = self.rows(queries.clone());
            out.extend(self.outputs(&rows, R::ONE));
            for (i, row) in queries.zip(rows) {
                let seen = row.keys.clone().zip(&row.exps).filter(|(j, _)| !row.hides(*j));
                let terms = seen.map(|(j, &exp)| {
                    let slope = abs(row.slope(j)).max(R::ONE);
                    let norm = slope * q.norm[i];
                    let roundings = self.exp_roundings(norm, k.norm[j], self.distance(i, j), row.lse);
                    exp * abs(row.weight(j)) / row.sum * (roundings + row.changed(j)) * v.largest[j]
                });
                lse.push(row.lse);
                out_terms.push(terms.fold(R::ZERO, |sum, term| sum + term));
            }
        }
        Forward { out, lse, out_terms, score_terms: vec![] }
    }

    /// The gradients of this query head alone.
    #[inline(always)]
    fn gradients(&self, dout: &[R], held: R) -> Gradients<R> {
        let Problem { head_dim, head_dim_v, .. } = *self.problem;
        let [seqlen_q, seqlen_k] = self.seqlens;
        let mut dq = vec![R::ZERO; self.q.len()];
        let mut dk = vec![R::ZERO; self.k.len()];
        let mut dv = vec![R::ZERO; self.v.len()];
        let mut dq_terms = vec![R::ZERO; seqlen_q];
        let [mut dk_terms, mut dv_terms] = [(); 2].map(|()| vec![R::ZERO; seqlen_k]);
        let (q_norms, k_norms) = (Norms::of(&self.q, head_dim), Norms::of(&self.k, head_dim));
        let (v_norms, dout_norms) = (Norms::of(&self.v, head_dim_v), Norms::of(dout, head_dim_v));
        let longest_key = k_norms.norm.iter().fold(R::ZERO, |max, &norm| max.max(norm));
        let (mut dsink, mut dsink_terms) = (R::ZERO, R::ZERO);
        let new_sums = || self.program.as_ref().map_or_else(Vec::new, OwnProgram::sums);
        let mut sums = [new_sums(), new_sums()];
        for queries in blocks(0..seqlen_q, QUERIES) {
            let rows = self.rows(queries.clone());
            let out = self.outputs(&rows, held);
            let out: Vec<R> = out.into_iter().map(self.round).collect();
            let of_out = queries.clone().zip(out.chunks(head_dim_v)).zip(&rows).map(|((i, out), softmax)| {
                // sum_j P_ij dP_ij = sum_j P_ij (dO_i . V_j) = dO_i . O_i; rows that see nothing have no O.
                let p_dp = dot(row(dout, i, head_dim_v), out);
                let p_dp = if softmax.keys.is_empty() { R::ZERO } else { p_dp };
                (p_dp - self.dlse(i, softmax), norm(out))
            });
            let of_out: Vec<(R, R)> = of_out.collect();
            if let Some(sink) = self.sink {
                // A sink that is not there has no probability. One beside an infinite score has that of its
                // row: NaN.
                let rows = rows.iter().zip(&of_out).zip(queries.clone()).filter(|_| sink != R::NEG_INFINITY);
                for ((softmax, &(p_dp, out_norm)), i) in rows {
                    let p = softmax.sink / softmax.sum;
                    dsink += R::ZERO - p * p_dp;
                    let farthest = self.distance(i, 0).max(self.distance(i, seqlen_k));
                    let roundings = self.exp_roundings(q_norms.norm[i], longest_key, farthest, softmax.lse);
                    let terms = dout_norms.norm[i] * out_norm + abs(self.dlse(i, softmax));
                    dsink_terms += p * (roundings + abs(sink)) * terms;
                }
            }
            for block in key_blocks(rows.iter().map(|row| &row.keys)) {
                for ((softmax, &(p_dp, out_norm)), i) in rows.iter().zip(&of_out).zip(queries.clone()) {
                    let Row { keys, scores, exps, sum, lse, .. } = softmax;
                    let dout = row(dout, i, head_dim_v);
                    for j in within(keys, &block).filter(|&j| !softmax.hides(j)) {
                        let (score, exp) = (scores[j - keys.start], exps[j - keys.start]);
                        let p = exp / *sum;
                        let weight = softmax.weight(j);
                        let dp = dot(dout, self.v(j)) * weight;
                        let tanh = self.softcap.map_or(R::ZERO, |cap| score / cap);
                        let slope = softmax.slope(j);
                        let ds = (self.round)(p * (dp - p_dp) * (R::ONE - tanh * tanh) * slope);
                        add_scaled(row_mut(&mut dq, i, head_dim), ds, self.k(j));
                        add_scaled(row_mut(&mut dk, j, head_dim), ds, self.q(i));
                        add_scaled(row_mut(&mut dv, j, head_dim_v), (self.round)(p * weight), dout);

                        let distance = self.distance(i, j);
                        let norm = abs(slope).max(R::ONE) * q_norms.norm[i];
                        let roundings = self.exp_roundings(norm, k_norms.norm[j], distance, *lse);
                        let roundings = roundings + softmax.changed(j);
                        let weight = abs(weight);
                        let dp_terms = dout_norms.norm[i] * (v_norms.norm[j] * weight + out_norm);
                        let dp_terms = dp_terms + abs(self.dlse(i, softmax));
                        let ds_terms = p * (abs(dp - p_dp) * roundings + dp_terms);
                        if let Some(program) = &self.program {
                            program.add((i, j), score, p * (dp - p_dp), true, &mut sums[0]);
                            program.add((i, j), score, ds_terms, false, &mut sums[1]);
                        }
                        let ds_terms = ds_terms * abs(slope) * abs(self.scale);
                        dq_terms[i] += ds_terms * k_norms.largest[j];
                        dk_terms[j] += ds_terms * q_norms.largest[i];
                        dv_terms[j] += p * weight * roundings * dout_norms.largest[i];
                    }
                }
            }
        }
        for value in dq.iter_mut().chain(&mut dk) {
            *value *= self.scale;
        }
        let [dsinks, dsinks_terms] =
            [dsink, dsink_terms].map(|value| self.sink.map_or(vec![], |_| vec![value]));
        Gradients {
            dq,
            dk,
            dv,
            dsinks,
            dq_terms,
            dk_terms,
            dv_terms,
            dsinks_terms,
            darrays: vec![],
            darrays_terms: vec![],
            sums,
        }
    }

    /// How many roundings, in the relative error of `exp(S - LSE)`, a computation may make: what S and LSE
    /// lose is relative to the magnitudes that they are made of.
    fn exp_roundings(&self, q_norm: R, k_norm: R, distance: R, lse: R) -> R {
        R::ONE + abs(self.scale) * q_norm * k_norm + abs(self.slope) * distance + abs(lse)
    }
}
