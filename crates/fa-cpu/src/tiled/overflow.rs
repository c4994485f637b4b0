//! Rows whose sums leave f32's range though their result is in it. Sums of P V are taken before they are
//! normalised: with values near the type's largest they reach infinity where the mean of the values does not.

use super::work::Forward;
use crate::batch::Span;
use crate::element::Element;

/// What normalises `sums`, the row of O of a query (given by its sequence, head and position): as it was; or
/// 1, where the sums had overflowed and now are O, computed anew.
#[inline]
pub(super) fn normaliser_of<T: Element>(
    call: &Forward<'_, T>,
    query: [usize; 3],
    (normaliser, lse): (f32, f32),
    sums: &mut [f32],
) -> f32 {
    const SIGN: u32 = 1 << 31;
    const STEP: u32 = 1 << 23;
    // Infinities and NaN carry into the sign.
    let carries = sums.iter().fold(0, |all, sum| all | ((sum.to_bits() & !SIGN) + STEP));
    let anew = carries & SIGN != 0 && lse.is_finite() && call.problem.score.program.is_none();
    if anew && sum_anew(call, query, sums) { 1.0 } else { normaliser }
}

/// The row in f64; `false` where a value that the query sees is infinite or NaN, as then is the row.
#[cold]
fn sum_anew<T: Element>(call: &Forward<'_, T>, [sequence, head, query]: [usize; 3], row: &mut [f32]) -> bool {
    let Forward { problem, batch, q, k, v, .. } = call;
    let (band, kv_head) = (call.band(sequence), head / problem.group_size());
    let Span { batch: outer, first, .. } = batch.sequences[sequence].q;
    let queries: Vec<f64> =
        (0..problem.head_dim).map(|dim| q.at(outer, first + query, head, dim).to_f64()).collect();
    let keys = band.keys(query);
    let slope = f64::from(batch.slope(sequence, head));
    let diagonal = band.mask.diagonal(query, band.q, band.k) as f64;
    let scores: Vec<f64> = keys
        .clone()
        .map(|key| {
            let (outer, inner) = batch.key(sequence, key);
            let products =
                queries.iter().enumerate().map(|(dim, q)| q * k.at(outer, inner, kv_head, dim).to_f64());
            let score = problem.scale() * products.sum::<f64>();
            let score = problem.score.softcap.map_or(score, |cap| cap * (score / cap).tanh());
            score - slope * (diagonal - key as f64).abs()
        })
        .collect();
    let sink = batch.sink(head).map_or(f64::NEG_INFINITY, f64::from);
    let max = scores.iter().copied().fold(sink, f64::max);
    let total: f64 = scores.iter().map(|score| (score - max).exp()).sum::<f64>() + (sink - max).exp();
    let mut sums = vec![0.0; problem.head_dim_v];
    for (key, score) in keys.zip(scores) {
        let (outer, inner) = batch.key(sequence, key);
        let weight = (score - max).exp() / total;
        for (dim, sum) in sums.iter_mut().enumerate() {
            *sum += weight * v.at(outer, inner, kv_head, dim).to_f64();
        }
        // The result is finite where every value is.
        if !sums.iter().all(|sum| sum.is_finite()) {
            return false;
        }
    }
    row.iter_mut().zip(sums).for_each(|(to, sum)| *to = sum as f32);
    true
}
