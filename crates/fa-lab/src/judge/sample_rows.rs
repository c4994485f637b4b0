//! Judges an output by a few rows, so that a large problem is checked quickly before it is timed.

use fa_attn::device::{DeviceOutput, Half};
use fa_core::Problem;
use fa_cpu::CpuError;
use fa_cpu::compare::{self, Comparison};
use rayon::prelude::*;
use serde::Serialize;

use super::rows::{Rows, expected};
use crate::random::Random;
use crate::sequences::Ragged;
use crate::tensors::Inputs;

/// Query rows of a block.
const ROWS: usize = 4;

/// Heads drawn at random, in addition to the first and the last.
const DRAWN: usize = 4;

/// Query rows of one head with their exact output.
struct Block {
    batch: usize,
    head: usize,
    first: usize,
    rows: usize,
    /// `[rows, head_dim_v]`.
    out: Vec<f64>,
    low: Vec<f64>,
    noise: f64,
    lse: Vec<f64>,
    lse_noise: f64,
}

/// The exact output of one problem on some rows.
pub struct SampleRows {
    problem: Problem,
    /// The sequences' queries.
    of_q: Ragged,
    blocks: Vec<Block>,
}

/// The largest error of an output.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Judged {
    /// Rows compared.
    pub rows: usize,
    /// Largest difference.
    pub max_abs: f64,
    /// The tolerance of that.
    pub tolerance: f64,
    /// Whether all rows are near enough, their LSEs too, and every element of the whole output was written.
    pub passed: bool,
}

impl SampleRows {
    /// Computes the rows in f64: the first, middle and last ones of some heads.
    ///
    /// # Errors
    /// [`CpuError`] when the inputs do not fit their problem.
    pub fn new<T: Half>(inputs: &Inputs<T>, seed: u64) -> Result<SampleRows, CpuError> {
        let (problem, of_q) = (inputs.problem, inputs.sequences.q.clone());
        let Problem { heads_q, .. } = problem;
        if of_q.total() == 0 {
            return Ok(SampleRows { problem, of_q, blocks: Vec::new() });
        }
        let mut random = Random::new(seed);
        // Sequences are drawn in proportion to their rows, so never an empty one.
        let (first, last) = (of_q.sequence_of(0), of_q.sequence_of(of_q.total() - 1));
        let mut heads = vec![(first, 0), (last, heads_q - 1)];
        heads.extend(
            (0..DRAWN).map(|_| (of_q.sequence_of(random.below(of_q.total())), random.below(heads_q))),
        );
        let mut wanted = Vec::new();
        for (batch, head) in heads {
            let len = of_q.len(batch);
            let rows = ROWS.min(len);
            wanted.extend([0, (len - rows) / 2, len - rows].map(|first| (batch, head, first, rows)));
        }
        let compute = |&(batch, head, first, rows): &_| block(inputs, batch, head, first, rows);
        let blocks = wanted.par_iter().map(compute).collect::<Result<_, CpuError>>()?;
        Ok(SampleRows { problem, of_q, blocks })
    }

    /// No rows: only checks that outputs are written.
    pub fn none<T>(inputs: &Inputs<T>) -> SampleRows {
        SampleRows { problem: inputs.problem, of_q: inputs.sequences.q.clone(), blocks: Vec::new() }
    }

    /// Judges an output by these rows.
    ///
    /// # Errors
    /// [`CpuError`] when the output does not have the problem's size.
    pub fn judge<T: Half>(&self, outputs: &DeviceOutput<T>) -> Result<Judged, CpuError> {
        let Problem { heads_q, head_dim_v, .. } = self.problem;
        let dtype = self.problem.types.wide();
        fa_cpu::check::check_len("out", outputs.out.len(), self.of_q.total() * heads_q * head_dim_v)?;
        let mut worst = Judged { rows: 0, max_abs: 0.0, tolerance: 0.0, passed: outputs.strays == 0 };
        let written = outputs.out.par_iter().all(|value| !value.to_f32().is_nan());
        worst.passed &= written && outputs.lse.par_iter().all(|lse| !lse.is_nan());
        for block in &self.blocks {
            let Block { batch, head, first, rows, .. } = *block;
            let (start, len) = (self.of_q.start(batch), self.of_q.len(batch));
            let row = |i: usize| ((start + first + i) * heads_q + head) * head_dim_v;
            let out: Vec<T> =
                (0..rows).flat_map(|i| &outputs.out[row(i)..row(i) + head_dim_v]).copied().collect();
            let shape = [1, rows, 1, head_dim_v];
            let found =
                compare::compare(shape, dtype, &out, &block.out, Some(&block.low))?.allowing(block.noise);
            let at = start * heads_q + head * len + first;
            let lse = &outputs.lse[at..at + rows];
            let lse = compare::compare_lse([1, 1, rows], dtype, lse, &block.lse)?.allowing(block.lse_noise);
            worst.passed &= found.passed() && lse.passed();
            worst.rows += rows;
            let nearer = |a: &Comparison| a.max_abs * worst.tolerance <= worst.max_abs * a.tolerance;
            if worst.tolerance == 0.0 || !nearer(&found) {
                (worst.max_abs, worst.tolerance) = (found.max_abs, found.tolerance);
            }
        }
        Ok(worst)
    }
}

/// The exact rows `first..first + rows` of one head.
fn block<T: Half>(
    inputs: &Inputs<T>,
    batch: usize,
    head: usize,
    first: usize,
    rows: usize,
) -> Result<Block, CpuError> {
    let (exact, low) = expected(inputs, &Rows { batch, head, rows: first..first + rows })?;
    Ok(Block {
        batch,
        head,
        first,
        rows,
        out: exact.out,
        low: low.out.iter().map(|value| value.to_f64()).collect(),
        noise: exact.out_noise,
        lse: exact.lse,
        lse_noise: exact.lse_noise,
    })
}

#[cfg(test)]
mod tests {
    use fa_attn::device::shapes;
    use fa_core::{Dtype, Lengths, Mask, TensorLayout};
    use fa_cpu::TensorRef;
    use fa_cpu::reference::low_precision;
    use half::bf16;

    use super::*;

    #[test]
    fn rows_are_judged_under_every_mask() {
        for mask in [Mask::FULL, Mask::CAUSAL, Mask::window(30, 9), Mask::causal_window(20)] {
            let problem =
                Problem::square(2, 70, 3, 32, mask, Dtype::Bf16).with_lengths(Lengths::uniform(2, 70, 90));
            let inputs = Inputs::<bf16>::random(&problem, TensorLayout::Bshd, 3);
            let shapes = shapes(&problem);
            let view = |i: usize, name| {
                TensorRef::packed(name, &inputs.values[i], shapes[i], TensorLayout::Bshd).unwrap()
            };
            let low = low_precision::forward(&problem, &view(0, "q"), &view(1, "k"), &view(2, "v")).unwrap();
            let good = DeviceOutput { out: low.out, lse: low.lse, strays: 0 };
            let sample = SampleRows::new(&inputs, 2).unwrap();
            let judged = sample.judge(&good).unwrap();
            assert!(judged.passed && judged.rows == 72, "{mask}: {judged:?}");
            // The first, a middle and the last row of the first head are among them.
            for row in [0, 34, 69] {
                let mut bad = good.clone();
                bad.out[row * 3 * 32] = bf16::from_f32(bad.out[row * 3 * 32].to_f32() + 1.0);
                assert!(!sample.judge(&bad).unwrap().passed, "{mask} row {row}");
            }
            let mut missing = good.clone();
            missing.lse[11] = f32::NAN;
            assert!(!sample.judge(&missing).unwrap().passed, "{mask}");
        }
    }
}
