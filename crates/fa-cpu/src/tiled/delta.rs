//! Row sums of dO * O, exactly. `sum_j P dP = dO . O` holds for the exact O; the rounding of a 16-bit O is an
//! error of dS where few terms cancel it: there they are computed from P and dP. Where O and LSE are of more
//! keys than K and V (a step of ring attention), P does not sum to 1, and delta is computed from O.

use super::band::Band;
use super::buffer::Buffer;
use super::inputs::Backward;
use super::pack::{KeyRows, row_stride};
use super::scores::{Scores, lse_exponent};
use super::work::Unit;
use crate::codes::Values;
use crate::element::Element;
use crate::simd::ahead::Ahead;
use crate::simd::row_products::Factor;
use crate::simd::row_set::RowSet;

/// Rows that see at most this many keys compute delta from P and dP, in a few percent of the row's time.
pub(super) const FEW_KEYS: usize = 16;

/// Computes deltas from P and dP.
pub(super) struct ExactDelta<'a, T> {
    call: &'a Backward<'a, T>,
    scores: Scores,
    k: KeyRows<'a, T>,
    v: KeyRows<'a, T>,
    slices: Vec<&'a [T]>,
    /// Converted rows, where rows are no slices.
    rows: Buffer,
    s: Buffer,
    dp: Buffer,
}

impl<'a, T: Element + Factor> ExactDelta<'a, T> {
    pub(super) fn new(call: &'a Backward<'a, T>) -> Self {
        let Backward { problem, batch, ref inputs, .. } = *call;
        let [k, v] = [inputs.k, inputs.v].map(|tensor| KeyRows::new(&Values::Same(tensor), batch));
        let converted = if k.has_slices() && v.has_slices() { 0 } else { FEW_KEYS };
        ExactDelta {
            call,
            scores: Scores::new(problem),
            k,
            v,
            slices: Vec::with_capacity(FEW_KEYS),
            rows: Buffer::new(converted * row_stride(problem.head_dim.max(problem.head_dim_v))),
            s: Buffer::new(FEW_KEYS),
            dp: Buffer::new(FEW_KEYS),
        }
    }

    /// Delta of a row of `band`, whose Q and dO are `q` and `dout`, from its LSE in base 2; `None` where it
    /// sees more than [`FEW_KEYS`] keys, and where the LSE is of others too.
    pub(super) fn of_row(
        &mut self,
        unit: Unit,
        band: &Band,
        [head, query]: [usize; 2],
        lse: f32,
        [q, dout]: [&[f32]; 2],
    ) -> Option<f32> {
        let keys = band.keys(query);
        if keys.len() > FEW_KEYS {
            return None;
        }
        let Backward { kernels, batch, .. } = *self.call;
        for (rows, with, to) in [(&self.k, q, &mut self.s), (&self.v, dout, &mut self.dp)] {
            let dims = rows.dims();
            if rows.has_slices() {
                let keys = rows.rows(unit, keys.clone(), &mut self.slices);
                kernels.dots(keys, Ahead::Nothing, dims, 1, with, dims, to, FEW_KEYS);
            } else {
                let ld = row_stride(dims);
                rows.read(kernels, unit, keys.clone(), &mut self.rows, ld);
                let keys = RowSet::Strided { data: &self.rows, step: ld, count: keys.len() };
                kernels.dots(keys, Ahead::Nothing, dims, 1, with, dims, to, FEW_KEYS);
            }
        }
        let sink = batch.sink(head).map_or(0.0, |sink| (lse_exponent(sink) - lse).exp2());
        let slope = batch.slope(unit.sequence, head);
        let (mut sum, mut delta) = (sink, 0.0);
        for (key, (&s, &dp)) in keys.zip(self.s.iter().zip(&*self.dp)) {
            let score = self.scores.scale * s;
            let score = self.scores.cap.map_or(score, |cap| cap * score.tanh());
            let bias = band.bias(slope, query, key).map_or(0.0, |bias| bias.slope * bias.first.abs());
            let p = (score - bias - lse).min(0.0).exp2();
            sum += p;
            delta += p * dp;
        }
        // Bound of the sum's distance from 1 by rounding of scores and LSE.
        let rounding = 2f32.powi(-10) + 2f32.powi(-20) * lse.abs();
        (sum > 0.0 && (sum - 1.0).abs() <= rounding).then(|| delta / sum)
    }
}
