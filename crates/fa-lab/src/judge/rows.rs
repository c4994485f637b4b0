//! The oracle on some rows of one head.

use std::ops::Range;

use fa_attn::device::Half;
use fa_core::quantize::Codes;
use fa_core::{Alibi, Lengths, Problem, ScoreMod, Strides, TensorLayout};
use fa_cpu::reference::{self, low_precision};
use fa_cpu::{Arguments, CpuError, Extras, KvRef, TensorRef, Within};

use super::codes::{self, Expected};
use crate::codes::kinds;
use crate::tensors::Inputs;

/// Query rows of one head.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Rows {
    /// Sequence.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// Positions.
    pub rows: Range<usize>,
}

/// The changes of scores of some heads of one sequence.
pub(super) fn per_head(score: ScoreMod) -> ScoreMod {
    score.with_alibi(score.alibi.map(|_| Alibi::PerHead))
}

/// The problem of some rows of one head: trailing keys that none of them sees are cut off, and the mask is
/// shifted so that the rows keep their position relative to the diagonal.
fn part(problem: &Problem, rows: &Range<usize>) -> Problem {
    let (queries, keys) = (problem.lengths.max_q(), problem.lengths.max_k());
    let seqlen_k = rows.clone().next_back().map_or(0, |last| problem.mask.keys(last, queries, keys).end);
    let moved = (keys - seqlen_k) as i64 - (queries - rows.end) as i64;
    let mask = problem.mask.with_offset(problem.mask.offset.saturating_add(moved));
    problem
        .with_lengths(Lengths::uniform(1, rows.len(), seqlen_k))
        .with_heads(1, 1)
        .with_mask(mask)
        .with_score(per_head(problem.score))
}

/// Computes the expected results of some rows of `inputs`. Shifting the mask would change ALiBi's distances:
/// with ALiBi, rows extend to their sequence's end.
///
/// # Errors
/// Inputs that do not fit their problem.
pub(super) fn expected<T: Half>(inputs: &Inputs<T>, block: &Rows) -> Result<Expected<T>, CpuError> {
    let (problem, sequences) = (&inputs.problem, &inputs.sequences);
    let Problem { heads_q, heads_kv, head_dim, head_dim_v, .. } = *problem;
    let (seqlen_q, seqlen_k) = (sequences.q.len(block.batch), sequences.k.len(block.batch));
    let whole = problem.with_lengths(Lengths::uniform(1, seqlen_q, seqlen_k));
    let of_rows = part(&whole, &block.rows);
    let head_kv = block.head / problem.group_size();
    let view = |name, i: usize, first: usize, shape: [usize; 4], heads: usize, dim: usize| {
        let strides = Strides { batch: 0, seq: (heads * dim) as i64, head: 0, dim: 1 };
        let from = first.min(inputs.values[i].len());
        TensorRef::new(name, &inputs.values[i][from..], shape, strides)
    };
    let first_q = ((sequences.q.start(block.batch) + block.rows.start) * heads_q + block.head) * head_dim;
    let first_kv = sequences.k.start(block.batch) * heads_kv + head_kv;
    let (rows, keys) = (of_rows.lengths.max_q(), of_rows.lengths.max_k());
    let q = view("q", 0, first_q, [1, rows, 1, head_dim], heads_q, head_dim)?;
    let dim_k = problem.head_dim_k();
    let k = view("k", 1, first_kv * dim_k, [1, keys, 1, dim_k], heads_kv, dim_k)?;
    let v = view("v", 2, first_kv * head_dim_v, [1, keys, 1, head_dim_v], heads_kv, head_dim_v)?;
    let program = inputs.program();
    let [q_descale, k_descale, v_descale] = {
        let first = sequences.k.start(block.batch);
        inputs.mods.descales_of(problem, block.batch, head_kv, first..first + keys)
    };
    let arguments = Arguments {
        extras: Extras {
            q_descale: q_descale.as_deref(),
            k_descale: k_descale.as_deref(),
            v_descale: v_descale.as_deref(),
            ..extras(inputs, block.batch, block.head..block.head + 1)
        },
        program: program.as_ref(),
        within: Within {
            first: [block.batch, block.head, head_kv, block.rows.start],
            lengths: Some([seqlen_q, seqlen_k]),
        },
    };
    let kinds = kinds(problem);
    if let [of_q, Some(of_k), Some(of_v)] = kinds {
        // Packed: the rows of a tensor of a single head lie apart.
        let bits = |tensor: &TensorRef<'_, T>, codes: Codes| {
            let [_, rows, _, dim] = tensor.shape();
            let numbers = (0..rows * dim).map(|i| tensor.at(0, i / dim, 0, i % dim).to_f32());
            codes.pack(&numbers.collect::<Vec<f32>>(), 1.0).collect::<Vec<u8>>()
        };
        let of_q = of_q.map(|codes| (bits(&q, codes), codes));
        let (k8, v8) = (bits(&k, of_k), bits(&v, of_v));
        let queries = match &of_q {
            Some((q8, codes)) => KvRef::Codes(packed("q", q8, *codes, q.shape())?),
            None => KvRef::Same(q),
        };
        let sides = [packed("k", &k8, of_k, k.shape())?, packed("v", &v8, of_v, v.shape())?];
        return codes::expected(&of_rows, arguments, queries, sides);
    }
    Ok((
        reference::forward_extras(&of_rows, arguments, &q, &k, &v)?,
        low_precision::forward_extras(&of_rows, arguments, &q, &k, &v)?,
    ))
}

/// A tensor of codes of so many numbers.
fn packed<'a>(
    name: &'static str,
    bytes: &'a [u8],
    codes: Codes,
    [batch, rows, heads, dim]: [usize; 4],
) -> Result<TensorRef<'a, u8>, CpuError> {
    TensorRef::packed(name, bytes, [batch, rows, heads, dim / codes.per_byte()], TensorLayout::Bshd)
}

/// Slopes and sinks of some heads of a sequence.
pub(super) fn extras<T>(inputs: &Inputs<T>, sequence: usize, heads: Range<usize>) -> Extras<'_> {
    let (problem, mods) = (&inputs.problem, &inputs.mods);
    Extras {
        alibi_slopes: mods.slopes_of(problem, sequence, heads.clone()),
        sinks: mods.sinks_of(problem, heads),
        ..Extras::default()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use fa_core::{Dtype, Mask};

    use super::*;

    pub(crate) const BASE: Problem = Problem::square(2, 37, 2, 16, Mask::FULL, Dtype::Bf16);

    /// Masks of every kind, on equal lengths, more queries, more keys, and no keys.
    pub(crate) fn problems() -> Vec<Problem> {
        let masks = [
            Mask::FULL,
            Mask::CAUSAL,
            Mask::window(3, 2),
            Mask::window(0, 11),
            Mask::causal_window(5),
            Mask::band(Some(4), None),
            Mask::band(None, Some(60)),
            Mask::CAUSAL.with_offset(-7),
            Mask::window(3, 2).with_offset(20),
        ];
        let lengths = [(37, 37), (40, 9), (9, 40), (5, 0)];
        masks
            .into_iter()
            .flat_map(|mask| {
                lengths.map(|(q, k)| BASE.with_mask(mask).with_lengths(Lengths::uniform(2, q, k)))
            })
            .collect()
    }

    #[test]
    fn parts_see_what_their_rows_see() {
        for problem in problems() {
            for first in 0..problem.lengths.max_q() {
                for end in first + 1..=problem.lengths.max_q() {
                    let own = part(&problem, &(first..end));
                    for row in first..end {
                        let whole = problem.mask.keys(row, problem.lengths.max_q(), problem.lengths.max_k());
                        let keys = own.mask.keys(row - first, own.lengths.max_q(), own.lengths.max_k());
                        let same = keys == whole || keys.is_empty() && whole.is_empty();
                        assert!(same, "{problem:?} rows {first}..{end} row {row}: {keys:?}, not {whole:?}");
                    }
                }
            }
        }
    }
}
