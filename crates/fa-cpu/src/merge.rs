//! Merging attention over parts of the keys: each part's output and LSE are all that is needed for the
//! whole's.
//!
//! A part with LSE `a` holds `exp(a)` of the row's exponential mass, so parts are averaged with weights
//! proportional to `exp(LSE)`: an online softmax whose scores are the LSEs and whose values are the outputs.
//! Merging is associative and commutative up to rounding, and `(O = 0, LSE = -inf)`, the result of a row that
//! sees no key, is its identity. A part whose LSE is -inf leaves the other exactly as it is, whatever its own
//! output holds; so does one whose LSE is +inf, which FlashAttention-2 and FlashMLA write for such a row.
//!
//! Partial results leave sinks out: [`add_sinks`] adds them to the merged result, once.

use crate::check::{check_len, check_shape};
use crate::element::Element;
use crate::error::CpuError;
use crate::real::Real;
use crate::softmax::OnlineSoftmax;
use crate::view::{TensorMut, TensorRef};

/// Merges one row's partial result into another: `out` and `lse` become those of both parts' keys together.
///
/// Rows of different length are merged as far as both go. An LSE of +inf counts as -inf, also in `lse`.
pub fn merge_row<R: Real>(out: &mut [R], lse: &mut R, other_out: &[R], other_lse: R) {
    let values = out.iter_mut().zip(other_out);
    let sees_none = |lse: R| lse.to_f64().is_infinite();
    if sees_none(*lse) {
        *lse = R::NEG_INFINITY;
    }
    if sees_none(other_lse) {
        return;
    }
    if *lse == R::NEG_INFINITY {
        values.for_each(|(value, &other)| *value = other);
        *lse = other_lse;
        return;
    }
    let mut softmax = OnlineSoftmax { max: *lse, sum: R::ONE };
    let mut weight = [other_lse];
    let factor = softmax.absorb(&mut weight);
    for (value, &other) in values {
        *value = (*value * factor + other * weight[0]) / softmax.sum;
    }
    *lse = softmax.lse();
}

/// Merges the result over some keys into the result over other keys, for whole tensors.
///
/// `out` and `other_out` are `[batch, seqlen_q, heads_q, head_dim_v]`, `lse` and `other_lse`
/// `[batch, heads_q, seqlen_q]`. Computed in `R`, the type of the LSEs; the output is rounded to `T`, so
/// parts that are to be merged many times over are best kept in f32.
///
/// # Errors
/// [`CpuError::Shape`] or [`CpuError::Length`] when the four do not fit each other; nothing is written then.
pub fn merge<T: Element, R: Real>(
    out: &mut TensorMut<'_, T>,
    lse: &mut [R],
    other_out: &TensorRef<'_, T>,
    other_lse: &[R],
) -> Result<(), CpuError> {
    let [batch, seqlen, heads, dim] = out.shape();
    check_shape("other_out", other_out.shape(), out.shape())?;
    check_len("lse", lse.len(), batch * heads * seqlen)?;
    check_len("other_lse", other_lse.len(), batch * heads * seqlen)?;
    let strides = out.strides();
    let (mut row, mut other_row) = (vec![R::ZERO; dim], vec![R::ZERO; dim]);
    for (index, (lse, &other_lse)) in lse.iter_mut().zip(other_lse).enumerate() {
        // Rows in the order of the LSE: [batch, heads, seqlen].
        let (b, h, s) = (index / (heads * seqlen), index / seqlen % heads, index % seqlen);
        let at = |d: usize| strides.offset(b, s, h, d) as usize;
        for d in 0..dim {
            row[d] = R::from_element(out.data_mut()[at(d)]);
            other_row[d] = R::from_element(other_out.at(b, s, h, d));
        }
        merge_row(&mut row, lse, &other_row, other_lse);
        for (d, value) in row.iter().enumerate() {
            out.data_mut()[at(d)] = T::from_f64(value.to_f64());
        }
    }
    Ok(())
}

/// Adds a row's sink: one more logit in the denominator, without a value.
pub fn add_sink_to_row<R: Real>(out: &mut [R], lse: &mut R, sink: R) {
    if sink == R::NEG_INFINITY {
        return;
    }
    if *lse == R::NEG_INFINITY {
        out.iter_mut().for_each(|value| *value = R::ZERO);
        *lse = sink;
        return;
    }
    let mut softmax = OnlineSoftmax { max: *lse, sum: R::ONE };
    let factor = softmax.absorb(&mut [sink]);
    out.iter_mut().for_each(|value| *value = *value * factor / softmax.sum);
    *lse = softmax.lse();
}

/// Adds a sink for each head to a result that has none: `out` is `[batch, seqlen_q, heads_q, head_dim_v]`,
/// `lse` `[batch, heads_q, seqlen_q]`, `sinks` `[heads_q]`. Computed in `R`, the output rounded to `T`.
///
/// # Errors
/// [`CpuError::Length`] when the three do not fit each other; nothing is written then.
pub fn add_sinks<T: Element, R: Real>(
    out: &mut TensorMut<'_, T>,
    lse: &mut [R],
    sinks: &[f32],
) -> Result<(), CpuError> {
    let [batch, seqlen, heads, dim] = out.shape();
    check_len("lse", lse.len(), batch * heads * seqlen)?;
    check_len("sinks", sinks.len(), heads)?;
    crate::batch::check_sinks(sinks)?;
    let strides = out.strides();
    let mut row = vec![R::ZERO; dim];
    for (index, lse) in lse.iter_mut().enumerate() {
        let (b, h, s) = (index / (heads * seqlen), index / seqlen % heads, index % seqlen);
        let at = |d: usize| strides.offset(b, s, h, d) as usize;
        for (d, value) in row.iter_mut().enumerate() {
            *value = R::from_element(out.data_mut()[at(d)]);
        }
        add_sink_to_row(&mut row, lse, R::from_element(sinks[h]));
        for (d, value) in row.iter().enumerate() {
            out.data_mut()[at(d)] = T::from_f64(value.to_f64());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use fa_core::TensorLayout;

    use super::*;

    #[test]
    fn equal_masses_average_and_the_identity_changes_nothing() {
        let (mut out, mut lse) = ([1.0f64, -3.0], 2.0);
        merge_row(&mut out, &mut lse, &[3.0, 5.0], 2.0);
        assert_eq!((out, lse), ([2.0, 1.0], 2.0 + 2f64.ln()));
        // An empty part may even be unwritten.
        merge_row(&mut out, &mut lse, &[f64::NAN; 2], f64::NEG_INFINITY);
        assert_eq!((out, lse), ([2.0, 1.0], 2.0 + 2f64.ln()));
        let (mut empty, mut empty_lse) = ([f64::NAN; 2], f64::NEG_INFINITY);
        merge_row(&mut empty, &mut empty_lse, &out, lse);
        assert_eq!((empty, empty_lse), (out, lse));
    }

    #[test]
    fn lse_of_plus_infinity_is_that_of_a_row_without_keys() {
        let (mut out, mut lse) = ([1.0f32, -3.0], 2.0);
        merge_row(&mut out, &mut lse, &[f32::NAN; 2], f32::INFINITY);
        assert_eq!((out, lse), ([1.0, -3.0], 2.0));
        let (mut first, mut first_lse) = ([f32::NAN; 2], f32::INFINITY);
        merge_row(&mut first, &mut first_lse, &out, lse);
        assert_eq!((first, first_lse), (out, lse));
        let (mut none, mut none_lse) = ([0.0f32; 2], f32::INFINITY);
        merge_row(&mut none, &mut none_lse, &[1.0; 2], f32::INFINITY);
        assert_eq!((none, none_lse), ([0.0; 2], f32::NEG_INFINITY));
    }

    #[test]
    fn tensors_are_merged_row_by_row_in_any_layout() {
        // Two batch entries, three positions, two heads, dim 1; the row's value is its own index in LSE
        // order.
        let shape = [2, 3, 2, 1];
        let lse_order: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let bshd: Vec<f32> = (0..12).map(|i| (i / 6 * 6 + i % 2 * 3 + i % 6 / 2) as f32).collect();
        let mut out = lse_order.clone();
        let mut lse: Vec<f32> =
            lse_order.iter().map(|&i| if i < 6.0 { 0.0 } else { f32::NEG_INFINITY }).collect();
        let doubled: Vec<f32> = bshd.iter().map(|i| 2.0 * i).collect();
        let mut view = TensorMut::packed("out", &mut out, shape, TensorLayout::Bhsd).unwrap();
        let other = TensorRef::packed("other", &doubled, shape, TensorLayout::Bshd).unwrap();
        merge(&mut view, &mut lse, &other, &[0.0; 12]).unwrap();
        for (i, &merged) in out.iter().enumerate() {
            let expected = if i < 6 { 1.5 * i as f32 } else { 2.0 * i as f32 };
            assert_eq!(merged, expected, "row {i}");
        }
        assert_eq!(lse, [[2f32.ln(); 6], [0.0; 6]].concat());
        let mut view = TensorMut::packed("out", &mut out, shape, TensorLayout::Bhsd).unwrap();
        assert_eq!(
            merge(&mut view, &mut lse, &other, &[0.0; 11]),
            Err(CpuError::Length { buffer: "other_lse", got: 11, need: 12 })
        );
    }
}
