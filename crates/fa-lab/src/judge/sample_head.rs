//! Judges gradients by one head, so that a large problem is checked quickly before it is timed.

use fa_attn::device::{Half, shapes};
use fa_core::{Dtype, Problem, TensorLayout, Types};
use fa_cpu::tiled::{self, BackwardInputs};
use fa_cpu::{Arguments, CpuError, Extras, TensorMut, TensorRef, Within, check, compare};
use rayon::prelude::*;

use super::heads::part_of;
use super::rows::extras;
use super::sample_rows::Judged;
use crate::memory::Gradients;
use crate::sequences::{Ragged, Sequences};
use crate::tensors::Inputs;

/// Tolerance of gradients in a 16-bit type, as a share of their tensor's largest: probabilities and their
/// gradients are rounded to 16 bits before they are summed. `fa validate` applies the exact rule; this one
/// finds kernels that are plainly wrong.
const SHARE: f64 = 1.0 / 64.0;

/// The last K/V head of the last sequence that has rows, with its query heads, and its gradients in f32.
pub struct SampleHead {
    problem: Problem,
    sequences: Sequences,
    /// The sequence.
    batch: usize,
    gradients: [Vec<f64>; 3],
}

/// Copies the last `own` heads of a sequence of rows of `heads * dim` end to end.
fn last_heads<T: Half, U>(
    values: &[T],
    (rows, batch): (&Ragged, usize),
    [heads, dim]: [usize; 2],
    own: usize,
    to: fn(&T) -> U,
) -> Vec<U> {
    let row = |s: usize| ((rows.start(batch) + s) * heads + heads - own) * dim;
    (0..rows.len(batch)).flat_map(|s| values[row(s)..row(s) + own * dim].iter().map(to)).collect()
}

impl SampleHead {
    /// Computes the head's gradients on the CPU.
    ///
    /// # Errors
    /// [`CpuError`] when the inputs do not fit their problem.
    pub fn new<T: Half>(inputs: &Inputs<T>, dout: &[T]) -> Result<SampleHead, CpuError> {
        let (problem, sequences) = (inputs.problem, inputs.sequences.clone());
        let Sequences { q: of_q, k: of_k } = &sequences;
        let with_rows = |&b: &usize| of_q.len(b) > 0 && of_k.len(b) > 0;
        let Some(batch) = (0..sequences.count()).rev().find(with_rows) else {
            return Ok(SampleHead { problem, sequences, batch: 0, gradients: Default::default() });
        };
        let Problem { heads_q, heads_kv, head_dim, head_dim_v, .. } = problem;
        let group = problem.group_size();
        let whole = part_of(&problem, of_q.len(batch), of_k.len(batch));
        // The LSE that gradients are computed from includes the sinks.
        let score = whole.score.with_sinks(false);
        let own = whole.with_types(Types::same(Dtype::F32)).with_score(score);
        let f32_of = |values: &[T], rows, width, heads| {
            last_heads(values, (rows, batch), width, heads, |value: &T| value.to_f32())
        };
        let q = f32_of(&inputs.values[0], of_q, [heads_q, head_dim], group);
        let k = f32_of(&inputs.values[1], of_k, [heads_kv, head_dim], 1);
        let v = f32_of(&inputs.values[2], of_k, [heads_kv, head_dim_v], 1);
        let dout = f32_of(dout, of_q, [heads_q, head_dim_v], group);
        let heads = heads_q - group..heads_q;
        let program = inputs.program();
        let arguments = Arguments {
            extras: Extras { sinks: None, ..extras(inputs, batch, heads.clone()) },
            program: program.as_ref(),
            within: Within { first: [batch, heads.start, heads_kv - 1, 0], lengths: None },
        };
        let [q_shape, k_shape, v_shape, out_shape] = shapes(&own);
        let view = |name, values, shape| TensorRef::packed(name, values, shape, TensorLayout::Bshd);
        let (q, k, v) = (view("q", &q, q_shape)?, view("k", &k, k_shape)?, view("v", &v, v_shape)?);
        let mut out = vec![0.0; out_shape.iter().product()];
        let mut lse = vec![0.0; check::lse_len(&own)];
        let mut written = TensorMut::packed("out", &mut out, out_shape, TensorLayout::Bshd)?;
        let options = tiled::Options::default();
        tiled::forward_extras(options, &own, arguments, &q, &k, &v, &mut written, Some(&mut lse))?;
        if let Some(sinks) = inputs.mods.sinks_of(&problem, heads) {
            add_sinks(sinks, head_dim_v, &mut out, &mut lse);
        }
        let (out, dout) = (view("out", &out, out_shape)?, view("dout", &dout, out_shape)?);
        let mut found = [q_shape, k_shape, v_shape].map(|shape| vec![0f32; shape.iter().product()]);
        let [dq, dk, dv] = &mut found;
        let room = |name, values, shape| TensorMut::packed(name, values, shape, TensorLayout::Bshd);
        let (mut dq, mut dk, mut dv) =
            (room("dq", dq, q_shape)?, room("dk", dk, k_shape)?, room("dv", dv, v_shape)?);
        let from = BackwardInputs { q, k, v, out, lse: &lse, dout };
        tiled::backward_extras(options, &own, arguments, &from, &mut dq, &mut dk, &mut dv, None)?;
        let gradients = found.map(|values| values.into_iter().map(f64::from).collect());
        Ok(SampleHead { problem, sequences, batch, gradients })
    }

    /// Judges gradients by this head, and checks that every element was written.
    ///
    /// # Errors
    /// [`CpuError`] when the gradients do not have the problem's size.
    pub fn judge<T: Half>(&self, gradients: &Gradients<T>) -> Result<Judged, CpuError> {
        let Problem { heads_q, heads_kv, head_dim, head_dim_v, .. } = self.problem;
        let Sequences { q: of_q, k: of_k } = &self.sequences;
        let passed = gradients.strays == 0 && gradients.dsinks.iter().all(|value| !value.is_nan());
        let mut worst = Judged { rows: 0, max_abs: 0.0, tolerance: 0.0, passed };
        let tensors = [
            (of_q, [heads_q, head_dim], self.problem.group_size()),
            (of_k, [heads_kv, head_dim], 1),
            (of_k, [heads_kv, head_dim_v], 1),
        ];
        for (i, (rows, [all, dim], heads)) in tensors.into_iter().enumerate() {
            check::check_len("a gradient", gradients.values[i].len(), rows.total() * all * dim)?;
            worst.passed &= gradients.values[i].par_iter().all(|value| !value.to_f32().is_nan());
            if self.gradients[i].is_empty() {
                continue;
            }
            let own =
                last_heads(&gradients.values[i], (rows, self.batch), [all, dim], heads, |value: &T| *value);
            let largest = self.gradients[i].iter().fold(0.0, |most: f64, value| most.max(value.abs()));
            let of_head = [1, rows.len(self.batch), heads, dim];
            let found =
                compare::compare::<T, T>(of_head, self.problem.types.q, &own, &self.gradients[i], None)?
                    .allowing(SHARE * largest);
            worst.passed &= found.passed();
            worst.rows += rows.len(self.batch) * heads;
            if worst.tolerance == 0.0 || found.max_abs * worst.tolerance > worst.max_abs * found.tolerance {
                (worst.max_abs, worst.tolerance) = (found.max_abs, found.tolerance);
            }
        }
        Ok(worst)
    }
}

/// O and LSE of `[len, heads, dim]` and `[heads, len]` with a sink in each head's denominator.
fn add_sinks(sinks: &[f32], dim: usize, out: &mut [f32], lse: &mut [f32]) {
    let (heads, len) = (sinks.len(), lse.len() / sinks.len());
    for (head, &sink) in sinks.iter().enumerate() {
        for row in 0..len {
            let own = &mut lse[head * len + row];
            let most = own.max(sink);
            let with = most + ((*own - most).exp() + (sink - most).exp()).ln();
            let share = (*own - with).exp();
            out[(row * heads + head) * dim..][..dim].iter_mut().for_each(|value| *value *= share);
            *own = with;
        }
    }
}

#[cfg(test)]
mod tests {
    use fa_core::Mask;
    use half::bf16;

    use super::*;
    use crate::judge::agree::low_precision_gradients;
    use crate::tensors::random_dout;

    #[test]
    fn right_gradients_pass_and_wrong_or_missing_ones_do_not() {
        let problem = Problem::square(2, 70, 4, 32, Mask::CAUSAL, Dtype::Bf16).with_heads_kv(2);
        let inputs = Inputs::<bf16>::random(&problem, TensorLayout::Bshd, 3);
        let dout = random_dout::<bf16>(&inputs, 3);
        let head = SampleHead::new(&inputs, &dout).unwrap();
        let good = low_precision_gradients(&inputs, &dout);
        let judged = head.judge(&good).unwrap();
        assert!(judged.passed, "{judged:?}");
        for tensor in 0..3 {
            let mut bad = good.clone();
            let last = bad.values[tensor].len() - 1;
            bad.values[tensor][last] = bf16::from_f32(bad.values[tensor][last].to_f32() + 1.0);
            assert!(!head.judge(&bad).unwrap().passed, "{tensor}");
            let mut missing = good.clone();
            missing.values[tensor][0] = bf16::NAN;
            assert!(!head.judge(&missing).unwrap().passed, "{tensor}");
        }
    }
}
