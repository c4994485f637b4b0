//! Judges outputs: by the f64 oracle and its low-precision twin on all rows, or, where that would take long,
//! on rows sampled from everywhere.

use fa_attn::device::{DeviceOutput, Half};
use fa_core::Problem;
use fa_cpu::CpuError;
use fa_cpu::compare::{self, Comparison, Verdict};
use rayon::prelude::*;

use super::rows::{Rows, expected};
use crate::random::Random;
use crate::sequences::Sequences;
use crate::tensors::Inputs;

/// Operations of the forward (by [`Problem::flops_forward`]) that an oracle spends on a case at most,
/// roughly.
const BUDGET: f64 = 3e8;

/// Rows of a block where all rows are computed.
const BLOCK: usize = 64;

/// Rows of a block where rows are chosen.
const CHOSEN_BLOCK: usize = 4;

/// The expected results of some or all rows.
pub struct Oracle<T> {
    blocks: Vec<Rows>,
    out: Vec<f64>,
    low: Vec<T>,
    lse: Vec<f64>,
    noise: f64,
    lse_noise: f64,
}

/// The verdict on a result.
#[derive(Clone, Debug)]
pub struct Judgement {
    /// Whether it is right.
    pub passed: bool,
    /// The largest error as a share of its tolerance, of O and of LSE.
    pub ratio: f64,
    /// What is wrong, or the figures.
    pub detail: String,
}

impl<T: Half> Oracle<T> {
    /// Computes the oracle for `inputs`.
    ///
    /// # Errors
    /// Inputs that do not fit their problem.
    pub fn new(inputs: &Inputs<T>, seed: u64) -> Result<Oracle<T>, CpuError> {
        let blocks = choose(&inputs.problem, &inputs.sequences, BUDGET, seed);
        let computed: Vec<_> =
            blocks.par_iter().map(|block| expected(inputs, block)).collect::<Result<_, CpuError>>()?;
        let mut oracle = Oracle { blocks, out: vec![], low: vec![], lse: vec![], noise: 0.0, lse_noise: 0.0 };
        for (exact, low) in computed {
            oracle.out.extend(exact.out);
            oracle.lse.extend(exact.lse);
            oracle.low.extend(low.out);
            oracle.noise = oracle.noise.max(exact.out_noise);
            oracle.lse_noise = oracle.lse_noise.max(exact.lse_noise);
        }
        Ok(oracle)
    }

    /// Compares the output of a call: the chosen rows by the rule of [`compare`]. All other rows must be
    /// written, and be 0 and -inf where they see no key.
    ///
    /// # Errors
    /// Outputs that do not fit the problem.
    pub fn judge(&self, inputs: &Inputs<T>, outputs: &DeviceOutput<T>) -> Result<Judgement, CpuError> {
        let (problem, of_q) = (&inputs.problem, &inputs.sequences.q);
        let Problem { heads_q, head_dim_v, .. } = *problem;
        let dtype = problem.types.wide();
        let mut out = Vec::with_capacity(self.out.len());
        let mut lse = Vec::with_capacity(self.lse.len());
        let mut at = Vec::with_capacity(self.lse.len());
        for Rows { batch, head, rows } in &self.blocks {
            let (start, len) = (of_q.start(*batch), of_q.len(*batch));
            for row in rows.clone() {
                let from = ((start + row) * heads_q + head) * head_dim_v;
                out.extend_from_slice(&outputs.out[from..from + head_dim_v]);
                lse.push(outputs.lse[start * heads_q + head * len + row]);
                at.push((*batch, row, *head));
            }
        }
        let shape = [1, 1, lse.len(), head_dim_v];
        let of_out = compare::compare(shape, dtype, &out, &self.out, Some(&self.low))?.allowing(self.noise);
        let of_lse =
            compare::compare_lse([1, 1, lse.len()], dtype, &lse, &self.lse)?.allowing(self.lse_noise);
        let position = |found: &Comparison, axis: usize| {
            let at_fault = found.first_mismatch.or(found.worst)?;
            let (batch, row, head) = *at.get(at_fault[axis])?;
            Some(format!("batch {batch} row {row} head {head} column {}", at_fault[3]))
        };
        let mut faults = Vec::new();
        for (name, found, axis) in [("O", &of_out, 2), ("LSE", &of_lse, 1)] {
            if found.verdict != Verdict::Pass {
                let position = position(found, axis).unwrap_or_default();
                faults.push(format!("{name}: {found}, at {position}"));
            }
        }
        faults.extend(unwritten(inputs, outputs));
        if outputs.strays > 0 {
            faults.push(format!("{} elements that are no row's of O or LSE were written", outputs.strays));
        }
        let ratio = |found: &Comparison| match found.max_abs / found.tolerance {
            ratio if ratio.is_finite() => ratio,
            _ => 0.0,
        };
        Ok(Judgement {
            passed: faults.is_empty(),
            ratio: ratio(&of_out).max(ratio(&of_lse)),
            detail: if faults.is_empty() {
                format!(
                    "O max abs {:.2e} of {:.2e}, LSE {:.2e} of {:.2e}, {} rows",
                    of_out.max_abs,
                    of_out.tolerance,
                    of_lse.max_abs,
                    of_lse.tolerance,
                    lse.len()
                )
            } else {
                faults.join("; ")
            },
        })
    }
}

/// The first row that still holds NaN, or sees no key and is not 0 and -inf (or the sink).
fn unwritten<T: Half>(inputs: &Inputs<T>, outputs: &DeviceOutput<T>) -> Option<String> {
    let Problem { heads_q, head_dim_v, mask, .. } = inputs.problem;
    let Sequences { q: of_q, k: of_k } = &inputs.sequences;
    let fault = outputs.out.par_chunks(head_dim_v).enumerate().find_map_first(|(index, values)| {
        let (row, head) = (index / heads_q, index % heads_q);
        let sequence = of_q.sequence_of(row);
        let (start, len) = (of_q.start(sequence), of_q.len(sequence));
        let row = row - start;
        let lse = outputs.lse[start * heads_q + head * len + row];
        let blind = mask.keys(row, len, of_k.len(sequence)).is_empty();
        let nothing = inputs.mods.lse_of_nothing(head);
        let near = lse == nothing || (lse - nothing).abs() <= 1e-3;
        let what = if values.iter().any(|value| value.to_f32().is_nan()) {
            "O holds NaN: not written".to_owned()
        } else if lse.is_nan() {
            "LSE is NaN: not written".to_owned()
        } else if blind && (!near || values.iter().any(|value| value.to_f32() != 0.0)) {
            format!("sees no key and is not O = 0 and LSE = {nothing}")
        } else {
            return None;
        };
        Some(format!("batch {sequence} row {row} head {head}: {what}"))
    });
    let written = outputs.lse.len() == of_q.total() * heads_q;
    fault.or_else(|| (!written).then(|| "LSE has another length than there are rows".to_owned()))
}

/// All rows if the budget allows, or else the first, the last and random ones of the first, the last and
/// random heads.
fn choose(problem: &Problem, sequences: &Sequences, budget: f64, seed: u64) -> Vec<Rows> {
    let Problem { heads_q, .. } = *problem;
    let Sequences { q: of_q, k: of_k } = sequences;
    if of_q.total() == 0 {
        return Vec::new();
    }
    // With ALiBi, blocks extend to the end of the sequence: see `expected`.
    let (whole, some) =
        if problem.score.alibi.is_some() { (usize::MAX, usize::MAX) } else { (BLOCK, CHOSEN_BLOCK) };
    let block = |batch: usize, head: usize, first: usize, most: usize| Rows {
        batch,
        head,
        rows: first..first.saturating_add(most).min(of_q.len(batch)),
    };
    // A block costs something even when it sees nothing.
    let fixed = (heads_q * of_q.total()) as f64 * 1e3;
    let per_pair = 2.0 * (problem.head_dim + problem.head_dim_v) as f64;
    if per_pair * heads_q as f64 * sequences.pairs(&problem.mask) + fixed <= budget {
        return (0..sequences.count() * heads_q)
            .flat_map(|i| {
                let (batch, head) = (i / heads_q, i % heads_q);
                let firsts = (0..of_q.len(batch)).step_by(whole.min(of_q.len(batch).max(1)));
                firsts.map(move |first| (batch, head, first))
            })
            .map(|(batch, head, first)| block(batch, head, first, whole))
            .collect();
    }
    // Sequences are drawn in proportion to their rows.
    let chosen = |batch: usize, head: usize, first: usize| {
        let last = of_q.len(batch).saturating_sub(some);
        block(batch, head, first.min(last), some)
    };
    let mut blocks: Vec<Rows> = Vec::new();
    for (batch, head) in [(of_q.sequence_of(0), 0), (of_q.sequence_of(of_q.total() - 1), heads_q - 1)] {
        let len = of_q.len(batch);
        for first in [0, len / 2 / CHOSEN_BLOCK * CHOSEN_BLOCK, len] {
            blocks.push(chosen(batch, head, first));
        }
    }
    let cost = |rows: &Rows| {
        let (len, seqlen_k) = (of_q.len(rows.batch), of_k.len(rows.batch));
        let keys = |row| problem.mask.keys(row, len, seqlen_k).len() as f64;
        rows.rows.clone().map(keys).sum::<f64>() * per_pair + 1e4
    };
    let mut spent: f64 = blocks.iter().map(cost).sum();
    let mut random = Random::new(seed);
    while spent < budget && blocks.len() < 4000 {
        let row = random.below(of_q.total());
        let batch = of_q.sequence_of(row);
        let drawn = chosen(batch, random.below(heads_q), row - of_q.start(batch));
        spent += cost(&drawn);
        blocks.push(drawn);
    }
    blocks.sort_by_key(|rows| (rows.batch, rows.head, rows.rows.start));
    blocks.dedup();
    blocks
}

#[cfg(test)]
mod tests {
    use fa_core::{Lengths, Mask, TensorLayout};
    use fa_cpu::TensorRef;
    use fa_cpu::reference::low_precision;
    use half::bf16;

    use super::*;
    use crate::judge::rows::tests::{BASE, problems};

    #[test]
    fn the_low_precision_result_passes_and_a_wrong_element_does_not() {
        let latent = |problem: Problem| {
            problem.with_head_dim(24).with_heads_kv(1).with_latent(true).with_softmax_scale(Some(0.2))
        };
        for problem in problems().into_iter().flat_map(|problem| [problem, latent(problem)]) {
            let inputs = Inputs::<bf16>::random(&problem, TensorLayout::Bshd, 5);
            let oracle = Oracle::new(&inputs, 1).unwrap();
            let shapes = fa_attn::device::shapes(&problem);
            let view = |i: usize, name| {
                TensorRef::packed(name, &inputs.values[i], shapes[i], TensorLayout::Bshd).unwrap()
            };
            let low = low_precision::forward(&problem, &view(0, "q"), &view(1, "k"), &view(2, "v")).unwrap();
            let good = DeviceOutput { out: low.out, lse: low.lse, strays: 0 };
            let found = oracle.judge(&inputs, &good).unwrap();
            assert!(found.passed, "{problem:?}: {}", found.detail);
            let mut bad = good.clone();
            bad.out[33] = bf16::from_f32(bad.out[33].to_f32() + 0.5);
            assert!(!oracle.judge(&inputs, &bad).unwrap().passed, "{problem:?}");
            bad = good.clone();
            bad.lse[7] += 0.01;
            assert!(!oracle.judge(&inputs, &bad).unwrap().passed || !good.lse[7].is_finite());
            bad = DeviceOutput { strays: 1, ..good };
            assert!(oracle.judge(&inputs, &bad).unwrap().detail.contains("no row's"));
        }
    }

    #[test]
    fn large_problems_are_judged_by_rows_from_everywhere_and_all_must_be_written() {
        let problem =
            BASE.with_lengths(Lengths::uniform(BASE.lengths.sequences(), 3000, 3000)).with_mask(Mask::CAUSAL);
        let blocks = choose(&problem, &Sequences::uniform(&problem.lengths), 1e6, 3);
        assert!(blocks.len() < 2 * 2 * 3000 / 8 && blocks.len() > 4);
        assert!(blocks.iter().any(|block| block.rows.start == 0));
        assert!(blocks.iter().any(|block| block.rows.end == 3000 && block.head == 1 && block.batch == 1));
        let rows = 2 * 2 * 3000;
        let inputs = |problem: &Problem| Inputs::<bf16>::random(problem, TensorLayout::Bshd, 1);
        let of_square = inputs(&problem);
        let mut outputs = DeviceOutput { out: vec![bf16::ZERO; rows * 16], lse: vec![0.0; rows], strays: 0 };
        assert_eq!(unwritten(&of_square, &outputs), None);
        outputs.out[16 * 77] = bf16::NAN;
        assert!(unwritten(&of_square, &outputs).unwrap().contains("row 38 head 1"));
        outputs.out[16 * 77] = bf16::ZERO;
        let blind = problem.with_lengths(Lengths::uniform(
            problem.lengths.sequences(),
            problem.lengths.max_q(),
            2999,
        ));
        assert!(unwritten(&inputs(&blind), &outputs).unwrap().contains("row 0 head 0: sees no key"));
    }
}
