//! The formula itself, one query row after the other, in any precision: `R` is the type that is computed in, `S` the type that
//! what enters a second product is rounded to (`R` again for no rounding), `T` the tensors' type.

use std::ops::Range;

use fa_core::Problem;
use rayon::prelude::*;

use crate::element::Element;
use crate::real::Real;
use crate::softmax::origin;
use crate::view::TensorRef;

/// Q, K and V of one query head, packed `[seqlen, dim]`, and the scalars.
struct Head<'a, R> {
    problem: &'a Problem,
    q: Vec<R>,
    k: Vec<R>,
    v: Vec<R>,
    scale: R,
    softcap: Option<R>,
}

/// One query's softmax.
struct Row<R> {
    /// The keys that it sees.
    keys: Range<usize>,
    /// S of those keys.
    scores: Vec<R>,
    /// `exp(S - max)`.
    weights: Vec<R>,
    /// The sum of the weights.
    sum: R,
    lse: R,
}

/// (O `[batch, seqlen_q, heads_q, head_dim_v]`, LSE `[batch, heads_q, seqlen_q]`).
pub(super) fn forward<R: Real, S: Element, T: Element>(
    problem: &Problem,
    q: &TensorRef<'_, T>,
    k: &TensorRef<'_, T>,
    v: &TensorRef<'_, T>,
) -> (Vec<R>, Vec<R>) {
    let heads: Vec<(Vec<R>, Vec<R>)> = for_each_head(problem, |b, h| {
        let head = Head::gather(problem, q, k, v, b, h);
        let rows = (0..problem.seqlen_q).map(|i| {
            let row = head.row(i);
            (head.output::<S>(&row), row.lse)
        });
        let (out, lse): (Vec<Vec<R>>, Vec<R>) = rows.unzip();
        (out.concat(), lse)
    });
    let (out, lse): (Vec<Vec<R>>, Vec<Vec<R>>) = heads.into_iter().unzip();
    (interleave(&out, problem.heads_q, problem.seqlen_q, problem.head_dim_v), lse.concat())
}

/// dQ, dK and dV, packed BSHD.
pub(super) fn backward<R: Real, S: Element, T: Element>(
    problem: &Problem,
    q: &TensorRef<'_, T>,
    k: &TensorRef<'_, T>,
    v: &TensorRef<'_, T>,
    dout: &TensorRef<'_, T>,
) -> [Vec<R>; 3] {
    let heads: Vec<[Vec<R>; 3]> = for_each_head(problem, |b, h| {
        let head = Head::gather(problem, q, k, v, b, h);
        head.gradients::<S>(&gather(dout, b, h))
    });
    let mut gradients = [vec![], vec![], vec![]];
    for head in heads {
        for (all, of_head) in gradients.iter_mut().zip(head) {
            all.push(of_head);
        }
    }
    let [dq, dk, dv] = gradients;
    let (group, heads_kv, seqlen_k) = (problem.group_size(), problem.heads_kv, problem.seqlen_k);
    [
        interleave(&dq, problem.heads_q, problem.seqlen_q, problem.head_dim),
        interleave(&sum_groups(dk, group), heads_kv, seqlen_k, problem.head_dim),
        interleave(&sum_groups(dv, group), heads_kv, seqlen_k, problem.head_dim_v),
    ]
}

impl<'a, R: Real> Head<'a, R> {
    fn gather<T: Element>(
        problem: &'a Problem,
        q: &TensorRef<'_, T>,
        k: &TensorRef<'_, T>,
        v: &TensorRef<'_, T>,
        b: usize,
        h: usize,
    ) -> Self {
        let kv = h / problem.group_size();
        Head {
            problem,
            q: gather(q, b, h),
            k: gather(k, b, kv),
            v: gather(v, b, kv),
            scale: R::from_f64(problem.scale()),
            softcap: problem.softcap.map(R::from_f64),
        }
    }

    fn q(&self, i: usize) -> &[R] {
        row(&self.q, i, self.problem.head_dim)
    }

    fn k(&self, j: usize) -> &[R] {
        row(&self.k, j, self.problem.head_dim)
    }

    fn v(&self, j: usize) -> &[R] {
        row(&self.v, j, self.problem.head_dim_v)
    }

    /// The softmax of query `i`.
    fn row(&self, i: usize) -> Row<R> {
        let keys = self.problem.mask.keys(i, self.problem.seqlen_q, self.problem.seqlen_k);
        let scores: Vec<R> = keys
            .clone()
            .map(|j| {
                let score = self.scale * dot(self.q(i), self.k(j));
                self.softcap.map_or(score, |cap| cap * (score / cap).tanh())
            })
            .collect();
        let max = origin(scores.iter().fold(R::NEG_INFINITY, |max, &score| max.max(score)));
        let weights: Vec<R> = scores.iter().map(|&score| (score - max).exp()).collect();
        let sum = weights.iter().fold(R::ZERO, |sum, &weight| sum + weight);
        Row { keys, scores, weights, sum, lse: max + sum.ln() }
    }

    /// O of the query whose softmax is `row`.
    fn output<S: Element>(&self, row: &Row<R>) -> Vec<R> {
        let mut out = vec![R::ZERO; self.problem.head_dim_v];
        if row.sum == R::ZERO {
            return out;
        }
        for (j, &weight) in row.keys.clone().zip(&row.weights) {
            add_scaled(&mut out, weight.rounded_to::<S>(), self.v(j));
        }
        out.into_iter().map(|value| value / row.sum).collect()
    }

    /// dQ, dK and dV of this query head alone, packed `[seqlen, dim]`.
    fn gradients<S: Element>(&self, dout: &[R]) -> [Vec<R>; 3] {
        let (head_dim, head_dim_v) = (self.problem.head_dim, self.problem.head_dim_v);
        let mut dq = vec![R::ZERO; self.q.len()];
        let mut dk = vec![R::ZERO; self.k.len()];
        let mut dv = vec![R::ZERO; self.v.len()];
        for i in 0..self.problem.seqlen_q {
            let softmax = self.row(i);
            if softmax.sum == R::ZERO {
                continue;
            }
            let dout = row(dout, i, head_dim_v);
            let out: Vec<R> = self.output::<S>(&softmax).into_iter().map(R::rounded_to::<S>).collect();
            // sum_j P_ij dP_ij = sum_j P_ij (dO_i . V_j) = dO_i . O_i
            let p_dp = dot(dout, &out);
            for ((j, &score), &weight) in softmax.keys.clone().zip(&softmax.scores).zip(&softmax.weights) {
                let p = weight / softmax.sum;
                let dp = dot(dout, self.v(j));
                let tanh = self.softcap.map_or(R::ZERO, |cap| score / cap);
                let ds = (p * (dp - p_dp) * (R::ONE - tanh * tanh)).rounded_to::<S>();
                add_scaled(row_mut(&mut dq, i, head_dim), ds, self.k(j));
                add_scaled(row_mut(&mut dk, j, head_dim), ds, self.q(i));
                add_scaled(row_mut(&mut dv, j, head_dim_v), p.rounded_to::<S>(), dout);
            }
        }
        for value in dq.iter_mut().chain(&mut dk) {
            *value *= self.scale;
        }
        [dq, dk, dv]
    }
}

/// `compute(batch, query head)` for all of them, in parallel, in order.
fn for_each_head<A: Send>(problem: &Problem, compute: impl Fn(usize, usize) -> A + Sync) -> Vec<A> {
    (0..problem.batch * problem.heads_q)
        .into_par_iter()
        .map(|index| compute(index / problem.heads_q, index % problem.heads_q))
        .collect()
}

/// One head of a tensor, packed `[seqlen, dim]`.
fn gather<R: Real, T: Element>(tensor: &TensorRef<'_, T>, b: usize, h: usize) -> Vec<R> {
    let [_, seqlen, _, dim] = tensor.shape();
    (0..seqlen * dim).map(|at| R::from_element(tensor.at(b, at / dim, h, at % dim))).collect()
}

/// `[batch * heads][seqlen, dim]` to packed `[batch, seqlen, heads, dim]`.
fn interleave<R: Real>(per_head: &[Vec<R>], heads: usize, seqlen: usize, dim: usize) -> Vec<R> {
    let mut packed = Vec::with_capacity(per_head.len() * seqlen * dim);
    for of_batch in per_head.chunks(heads) {
        for s in 0..seqlen {
            for head in of_batch {
                packed.extend_from_slice(row(head, s, dim));
            }
        }
    }
    packed
}

/// Sums each run of `group` query heads, which share a K/V head.
fn sum_groups<R: Real>(mut per_head: Vec<Vec<R>>, group: usize) -> Vec<Vec<R>> {
    per_head
        .chunks_mut(group)
        .map(|heads| {
            let (first, rest) = heads.split_first_mut().expect("chunks are not empty");
            for head in rest {
                add_scaled(first, R::ONE, head);
            }
            std::mem::take(first)
        })
        .collect()
}

fn row<R>(matrix: &[R], index: usize, dim: usize) -> &[R] {
    &matrix[index * dim..(index + 1) * dim]
}

fn row_mut<R>(matrix: &mut [R], index: usize, dim: usize) -> &mut [R] {
    &mut matrix[index * dim..(index + 1) * dim]
}

/// Eight partial sums, so that the compiler may use vector registers without changing the order of any sum.
fn dot<R: Real>(a: &[R], b: &[R]) -> R {
    let (a_chunks, a_rest) = a.as_chunks::<8>();
    let (b_chunks, b_rest) = b.as_chunks::<8>();
    let mut sums = [R::ZERO; 8];
    for (x, y) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..8 {
            sums[lane] += x[lane] * y[lane];
        }
    }
    let rest = a_rest.iter().zip(b_rest).fold(R::ZERO, |sum, (&x, &y)| sum + x * y);
    sums.iter().fold(rest, |sum, &part| sum + part)
}

/// `to += factor * from`.
fn add_scaled<R: Real>(to: &mut [R], factor: R, from: &[R]) {
    for (to, &from) in to.iter_mut().zip(from) {
        *to += factor * from;
    }
}
