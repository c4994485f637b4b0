//! One K/V head for many query heads and few queries (MLA, MQA), on 16-bit tiles: the heads of a query become
//! the rows of a panel, so that they share each tile of keys, and every query is a sequence of its own.

use fa_core::{Lengths, Mask, Problem, TensorLayout};
use half::bf16;

use super::work::{Forward, Unit, units};
use super::{decode, forward16};
use crate::batch::{Sequence, Span};
use crate::view::{TensorMut, TensorRef};

/// Query heads from which on a panel of them is faster than rows one by one.
const HEADS: usize = 32;

/// Whether the problem can be folded; which sequences are is [`suits`].
pub(super) fn applies(call: &Forward<'_, bf16>) -> bool {
    let Problem { heads_q, heads_kv, mask, score, .. } = call.problem;
    // The rows of a panel see the same keys, from the first on, and their scores change alike.
    let alike = mask.left.is_none() && score.alibi.is_none() && !score.sinks;
    *heads_kv == 1 && *heads_q >= HEADS && alike && forward16::applies(call.kernels, call.problem)
}

/// Whether a sequence is folded: one of few queries, which would be computed head by head.
pub(super) fn suits(call: &Forward<'_, bf16>, unit: &Unit) -> bool {
    call.batch.sequences[unit.sequence].q.len <= decode::QUERIES
}

/// Computes O and LSE of the given units.
pub(super) fn run(
    call: &Forward<'_, bf16>,
    of: &[Unit],
    out: &mut TensorMut<'_, bf16>,
    lse: Option<&mut [f32]>,
) {
    let Forward { kernels, threads, problem, batch, q, k, v } = *call;
    let [_, seqlen, heads, dims] = q.shape();
    // Each query with its heads as rows; where it lies, and the row of the page table that has its keys.
    let (mut sequences, mut places, mut owners, mut rows) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for unit in of {
        let (Sequence { q: of_q, k }, band) = (batch.sequences[unit.sequence], call.band(unit.sequence));
        for query in 0..of_q.len {
            let own = Span { batch: sequences.len(), first: 0, len: heads };
            sequences.push(Sequence { q: own, k: Span { len: band.keys(query).end, ..k } });
            places.push([of_q.batch, of_q.first + query]);
            owners.push(unit.sequence);
            (0..heads).for_each(|head| q.row(of_q.batch, of_q.first + query, head).append(|x| x, &mut rows));
        }
    }
    let count = sequences.len();
    if count == 0 {
        return;
    }
    let lengths = Lengths::uniform(count, heads, problem.lengths.max_k());
    let alone = problem.with_heads(1, 1).with_mask(Mask::FULL).with_lengths(lengths);
    let folded = batch.of_sequences(sequences, owners);
    let (shape, packed) = ([count, heads, 1, dims], "the rows are as many as the shape says");
    let q = TensorRef::packed("q", &rows, shape, TensorLayout::Bshd).expect(packed);
    let call = Forward { kernels, threads, problem: &alone, batch: &folded, q, k, v };
    let shape = [count, heads, 1, problem.head_dim_v];
    let mut values = vec![bf16::ZERO; shape.iter().product()];
    let mut sums = vec![0.0; if lse.is_some() { count * heads } else { 0 }];
    let to = &mut TensorMut::packed("out", &mut values, shape, TensorLayout::Bshd).expect(packed);
    let left = forward16::run(&call, &units(&alone, &folded), to, lse.is_some().then_some(&mut sums[..]));
    debug_assert!(left.is_empty(), "nothing is masked");
    let (strides, data) = (out.strides(), out.data_mut());
    for (row, values) in values.chunks(problem.head_dim_v).enumerate() {
        let ([outer, query], head) = (places[row / heads], row % heads);
        for (dim, &value) in values.iter().enumerate() {
            data[strides.offset(outer, query, head, dim) as usize] = value;
        }
    }
    if let Some(lse) = lse {
        for (row, sum) in sums.into_iter().enumerate() {
            let ([outer, query], head) = (places[row / heads], row % heads);
            lse[(outer * heads + head) * seqlen + query] = sum;
        }
    }
}
