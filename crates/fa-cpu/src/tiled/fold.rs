//! One K/V head for many query heads and few queries (MLA, MQA), on 16-bit tiles: the heads of a query become
//! the rows of a panel, so that they share each tile of keys, and every query is a sequence of its own.

use fa_core::{Lengths, Mask, Problem, Strides};
use half::bf16;

use super::work::{Forward, Unit, units};
use super::{decode, forward16};
use crate::batch::{Sequence, Span};
use crate::view::{TensorMut, TensorRef};

/// Query heads from which on a panel of them is faster than rows one by one.
const HEADS: usize = 32;

/// Shape and strides of a tensor of queries `[batch, seqlen, heads, dim]` as `[queries, heads, 1, dim]`,
/// where queries follow each other.
fn by_query([batch, seqlen, heads, dim]: [usize; 4], strides: Strides) -> Option<([usize; 4], Strides)> {
    let step = if seqlen > 1 { strides.seq } else { strides.batch };
    let follows = batch <= 1 || i64::try_from(seqlen).ok()?.checked_mul(step) == Some(strides.batch);
    let step = if batch > 1 || seqlen > 1 { step } else { 0 };
    let folded = Strides { batch: step, seq: strides.head, head: 0, dim: strides.dim };
    follows.then_some(([batch * seqlen, heads, 1, dim], folded))
}

/// Whether the problem and its tensors can be folded; which sequences are is [`suits`].
pub(super) fn applies(call: &Forward<'_, bf16>, out: &TensorMut<'_, bf16>) -> bool {
    let Forward { kernels, problem, q, .. } = call;
    let Problem { heads_q, heads_kv, mask, score, .. } = problem;
    let heads = *heads_kv == 1 && *heads_q >= HEADS;
    // The rows of a panel see the same keys, from the first on, and their scores change alike.
    let alike = mask.left.is_none() && score.alibi.is_none() && !score.sinks;
    let lie = [(q.shape(), q.strides()), (out.shape(), out.strides())];
    let lie = lie.into_iter().all(|(shape, strides)| by_query(shape, strides).is_some());
    heads && alike && lie && forward16::applies(*kernels, problem)
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
    let [_, seqlen, heads, _] = q.shape();
    let (mut sequences, mut rows) = (Vec::new(), Vec::new());
    for unit in of {
        let (Sequence { q, k }, band) = (batch.sequences[unit.sequence], call.band(unit.sequence));
        for query in 0..q.len {
            let own = Span { batch: q.batch * seqlen + q.first + query, first: 0, len: heads };
            sequences.push(Sequence { q: own, k: Span { len: band.keys(query).end, ..k } });
            rows.push(unit.sequence);
        }
    }
    if sequences.is_empty() {
        return;
    }
    let places: Vec<usize> = sequences.iter().map(|sequence| sequence.q.batch).collect();
    let lengths = Lengths::uniform(sequences.len(), heads, problem.lengths.max_k());
    let alone = problem.with_heads(1, 1).with_mask(Mask::FULL).with_lengths(lengths);
    let folded = batch.of_sequences(sequences, rows);
    let views = "folding was found to apply";
    let (shape, strides) = by_query(q.shape(), q.strides()).expect(views);
    let q = TensorRef::new("q", q.data(), shape, strides).expect(views);
    let call = Forward { kernels, threads, problem: &alone, batch: &folded, q, k, v };
    let (shape, strides) = by_query(out.shape(), out.strides()).expect(views);
    let mut to = TensorMut::new("out", out.data_mut(), shape, strides).expect(views);
    let mut by_place = vec![0.0; if lse.is_some() { shape[0] * heads } else { 0 }];
    let units = units(&alone, &folded);
    let left = forward16::run(&call, &units, &mut to, lse.is_some().then_some(&mut by_place[..]));
    debug_assert!(left.is_empty(), "nothing is masked");
    if let Some(lse) = lse {
        for place in places {
            let (outer, query) = (place / seqlen, place % seqlen);
            for head in 0..heads {
                lse[(outer * heads + head) * seqlen + query] = by_place[place * heads + head];
            }
        }
    }
}
