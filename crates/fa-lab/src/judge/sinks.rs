//! Exact gradients of sinks: `dsink_h = -sum over rows of exp(sink_h - LSE) (O . dO)`.

use fa_attn::device::Half;
use fa_cpu::CpuError;
use rayon::prelude::*;

use super::rows::{Rows, expected};
use crate::tensors::Inputs;

/// Roundings of a row's O that its term may carry, each of half a step of the type.
const ROUNDINGS: f64 = 4.0;

/// Each head's exact gradient, and its tolerance.
pub(super) struct SinkGradients {
    exact: Vec<f64>,
    tolerance: Vec<f64>,
}

impl SinkGradients {
    /// Computes them from O and LSE of every row.
    ///
    /// # Errors
    /// Inputs that do not fit their problem.
    pub(super) fn new<T: Half>(inputs: &Inputs<T>, dout: &[T]) -> Result<SinkGradients, CpuError> {
        let heads = inputs.problem.heads_q;
        let of_head = |head: usize| -> Result<(f64, f64), CpuError> {
            let (mut exact, mut low, mut squares) = (0.0, 0.0, 0.0);
            for batch in 0..inputs.sequences.count() {
                let one = terms(inputs, dout, batch, head)?;
                exact -= one.exact;
                low -= one.low;
                squares += one.squares;
            }
            // The roundings of rows are independent; a low-precision sum is one sample of them.
            let step = fa_cpu::compare::rounding_step(inputs.problem.types.q, 1.0) / 2.0;
            let drawn = 2.0 * f64::abs(low - exact);
            Ok((exact, drawn.max(ROUNDINGS * step * f64::sqrt(squares)).max(1e-5)))
        };
        let of_heads = (0..heads).into_par_iter().map(of_head).collect::<Result<Vec<_>, CpuError>>()?;
        let (exact, tolerance) = of_heads.into_iter().unzip();
        Ok(SinkGradients { exact, tolerance })
    }

    /// The largest error as a share of its tolerance, with a description.
    pub(super) fn judge(&self, found: &[f32]) -> (f64, String) {
        if found.len() != self.exact.len() {
            let text = format!("dsinks: {} values for {} heads", found.len(), self.exact.len());
            return (f64::INFINITY, text);
        }
        let mut worst = (0.0, String::new());
        for (head, (&found, (&exact, &tolerance))) in
            found.iter().zip(self.exact.iter().zip(&self.tolerance)).enumerate()
        {
            let off = (f64::from(found) - exact).abs();
            let ratio = if off.is_finite() { off / tolerance } else { f64::INFINITY };
            if ratio >= worst.0 {
                worst = (
                    ratio,
                    format!("dsinks {off:.2e} of {tolerance:.2e} (head {head}: {found}, not {exact})"),
                );
            }
        }
        worst
    }
}

struct Terms {
    exact: f64,
    low: f64,
    /// Sum of the squares of the rows' terms.
    squares: f64,
}

fn terms<T: Half>(inputs: &Inputs<T>, dout: &[T], batch: usize, head: usize) -> Result<Terms, CpuError> {
    let (of_q, dim) = (&inputs.sequences.q, inputs.problem.head_dim_v);
    let (start, len) = (of_q.start(batch), of_q.len(batch));
    let (of_rows, low) = expected(inputs, &Rows { batch, head, rows: 0..len })?;
    let sink = f64::from(inputs.mods.sinks[head]);
    let mut terms = Terms { exact: 0.0, low: 0.0, squares: 0.0 };
    for row in 0..len {
        let from = ((start + row) * inputs.problem.heads_q + head) * dim;
        let products = dout[from..from + dim].iter().map(|value| f64::from(value.to_f32()));
        let exact = of_rows.out[row * dim..(row + 1) * dim].iter().copied();
        let low_out = low.out[row * dim..(row + 1) * dim].iter().map(|value| f64::from(value.to_f32()));
        let (mut sum, mut low_sum, mut size) = (0.0, 0.0, 0.0);
        for ((dout, exact), low) in products.zip(exact).zip(low_out) {
            sum += dout * exact;
            low_sum += dout * low;
            size += (dout * exact).powi(2);
        }
        let share = (sink - of_rows.lse[row]).exp();
        terms.exact += share * sum;
        terms.low += (sink - f64::from(low.lse[row])).exp() * low_sum;
        terms.squares += share * share * size;
    }
    Ok(terms)
}
