//! The oracle on some rows of one head.

use std::ops::Range;

use fa_attn::device::Half;
use fa_core::quantize::e4m3;
use fa_core::{Alibi, Lengths, Problem, ScoreMod, Strides, TensorLayout};
use fa_cpu::reference::fp8::{self, Accumulation};
use fa_cpu::reference::{self, low_precision};
use fa_cpu::{Arguments, CpuError, Extras, KvRef, TensorRef, Within};

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

/// The f64 result of some rows, and the same formula in the kernels' precision.
pub(super) type Expected<T> = (reference::Forward, low_precision::LowForward<T>);

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
    let arguments = Arguments {
        extras: extras(inputs, block.batch, block.head..block.head + 1),
        program: program.as_ref(),
        within: Within {
            first: [block.batch, block.head, head_kv, block.rows.start],
            lengths: Some([seqlen_q, seqlen_k]),
        },
    };
    if problem.types.is_fp8() {
        return expected_of_codes(&of_rows, arguments, [&q, &k, &v]);
    }
    Ok((
        reference::forward_extras(&of_rows, arguments, &q, &k, &v)?,
        low_precision::forward_extras(&of_rows, arguments, &q, &k, &v)?,
    ))
}

/// The expected results of rows of numbers that stand for codes: the low-precision ones are an fp8 kernel's,
/// and the tolerance of those is the noise.
///
/// # Errors
/// As [`expected`].
fn expected_of_codes<T: Half>(
    problem: &Problem,
    arguments: Arguments<'_>,
    tensors: [&TensorRef<'_, T>; 3],
) -> Result<Expected<T>, CpuError> {
    let codes = tensors.map(|tensor| {
        let [_, rows, _, dim] = tensor.shape();
        let row = |at: usize| (0..dim).map(move |d| e4m3::encode(tensor.at(0, at, 0, d).to_f32()));
        (0..rows).flat_map(row).collect::<Vec<u8>>()
    });
    let view = |i: usize, name| TensorRef::packed(name, &codes[i], tensors[i].shape(), TensorLayout::Bshd);
    let (q, k, v) = (view(0, "q")?, view(1, "k")?, view(2, "v")?);
    let bits: [KvRef<'_, T>; 3] = [q, k, v].map(KvRef::Codes);
    let exact = reference::forward_extras(problem, arguments, bits[0], bits[1], bits[2])?;
    let kernel = fp8::as_kernel(problem, arguments, &q, &k, &v, Accumulation::exact(TILE_N))?;
    let noise = kernel.tolerance(&exact.out).max(exact.out_noise);
    let low = low_precision::LowForward { out: T::narrowed(&kernel.out), lse: kernel.lse };
    Ok((reference::Forward { out_noise: noise, ..exact }, low))
}

/// Keys of a tile of the kernel that fp8 results are held to: whichever a kernel has, its error is much the
/// same.
const TILE_N: usize = 128;

/// Slopes, sinks and descales of some heads of a sequence.
pub(super) fn extras<T>(inputs: &Inputs<T>, sequence: usize, heads: Range<usize>) -> Extras<'_> {
    let (problem, mods) = (&inputs.problem, &inputs.mods);
    let kv_head = heads.start / problem.group_size();
    let [q_descale, k_descale, v_descale] = mods.descales_of(problem, sequence, kv_head);
    Extras {
        q_descale,
        k_descale,
        v_descale,
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
