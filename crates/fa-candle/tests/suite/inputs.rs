//! Tensors as programs have them: views, empty ones, shared ones, bounds of any size.

use candle_core::{DType, Device, IndexOp, Result, Tensor, Var};
use fa_candle::*;

use crate::materialised::{Scores, assert_close, attention as materialised, values};

const SCALE: f32 = 0.3;

#[test]
fn parts_of_a_tensor_are_read_where_they_lie() -> Result<()> {
    // Neither the first sequence, nor the first row, head or column.
    let whole = values((4, 30, 6, 24), 1);
    let part = |at, len| whole.i((1..3, at..at + len, 2..4, 5..21));
    let [q, k, v] = [part(3, 9)?, part(7, 17)?, part(2, 17)?];
    let need = materialised(&q, &k, &v, SCALE, Scores::CAUSAL)?.0;
    let out = flash_attn(&q, &k, &v, SCALE, true)?;
    assert!(out.is_contiguous());
    assert_close("part", &out, &need, 2e-6);
    // Columns that are strided, and rows that are heads.
    let turned = |x: &Tensor| x.contiguous()?.permute((3, 1, 0, 2))?.contiguous()?.permute((2, 1, 3, 0));
    let out = flash_attn(&turned(&q)?, &turned(&k)?, &turned(&v)?, SCALE, true)?;
    assert_close("turned", &out, &need, 2e-6);
    // Packed rows from the middle of others.
    let rows = values((20, 4, 16), 2);
    let [q, k, v] = [rows.i((3..9, .., ..))?, rows.i((8..19, 2.., ..))?, rows.i((1..12, ..2, ..))?];
    let starts = |end: u32| Tensor::new(&[0, end], &Device::Cpu);
    let out = flash_attn_varlen(&q, &k, &v, &starts(6)?, &starts(11)?, 6, 11, SCALE, true)?;
    let [q, k, v] = [q.unsqueeze(0)?, k.unsqueeze(0)?, v.unsqueeze(0)?];
    let need = materialised(&q, &k, &v, SCALE, Scores::CAUSAL)?.0.squeeze(0)?;
    assert_close("packed part", &out, &need, 2e-6);
    Ok(())
}

#[test]
fn empty_batches_and_sequences_give_empty_and_zero_outputs() -> Result<()> {
    let zeros = |b: usize, s: usize| Tensor::zeros((b, s, 4, 16), DType::F32, &Device::Cpu);
    for (batch, seqlen) in [(0, 8), (2, 0), (0, 0)] {
        let x = zeros(batch, seqlen)?;
        let (out, lse) = attention_with_lse(&x, &x, &x, &Options::causal(SCALE))?;
        assert_eq!((out.dims(), lse.dims()), (x.dims(), &[batch, 4, seqlen][..]));
        let var = Var::from_tensor(&x)?;
        let store = flash_attn(&var, &var, &var, SCALE, false)?.sum_all()?.backward()?;
        assert_eq!(store.get(&var).map(Tensor::dims), Some(x.dims()));
    }
    // Queries without a key.
    let q = Var::from_tensor(&values((2, 3, 4, 16), 1))?;
    let (out, lse) = attention_with_lse(&q, &zeros(2, 0)?, &zeros(2, 0)?, &Options::full(SCALE))?;
    assert_eq!(out.abs()?.sum_all()?.to_scalar::<f32>()?, 0.0);
    assert!(lse.flatten_all()?.to_vec1::<f32>()?.iter().all(|lse| *lse == f32::NEG_INFINITY));
    let dq = out.sum_all()?.backward()?;
    assert_eq!(dq.get(&q).unwrap().abs()?.sum_all()?.to_scalar::<f32>()?, 0.0);
    // No sequence, and sequences without rows.
    let x = Tensor::zeros((0, 4, 16), DType::F32, &Device::Cpu)?;
    for starts in [vec![0u32], vec![0, 0, 0]] {
        let starts = Tensor::new(starts, &Device::Cpu)?;
        let out = flash_attn_varlen(&x, &x, &x, &starts, &starts, 0, 0, SCALE, true)?;
        assert_eq!(out.dims(), x.dims());
    }
    Ok(())
}

#[test]
fn one_tensor_may_be_several_of_q_k_and_v() -> Result<()> {
    let (q, x) = (&Var::from_tensor(&values((2, 7, 4, 8), 1))?, &Var::from_tensor(&values((2, 9, 2, 8), 2))?);
    let weights = values((2, 7, 4, 8), 3);
    let gradients = |out: Tensor| (out * &weights)?.sum_all()?.backward();
    let got = gradients(flash_attn(q, x, x, SCALE, true)?)?;
    let need = gradients(materialised(q, x, x, SCALE, Scores::CAUSAL)?.0)?;
    for (name, var) in [("dq", q), ("dx", x)] {
        assert_close(name, got.get(var).unwrap(), need.get(var).unwrap(), 5e-6);
    }
    let got = gradients(flash_attn(q, q, q, SCALE, false)?)?;
    let need = gradients(materialised(q, q, q, SCALE, Scores::default())?.0)?;
    assert_close("all", got.get(q).unwrap(), need.get(q).unwrap(), 5e-6);
    // With sinks K and V go through the graph as one.
    let sinks = &Var::from_tensor(&values(4, 4))?;
    let got = gradients(attention(q, x, x, &Options::causal(SCALE).with_sinks(Some(sinks)))?)?;
    let scores = Scores { sinks: Some(sinks), ..Scores::CAUSAL };
    let need = gradients(materialised(q, x, x, SCALE, scores)?.0)?;
    assert_close("sinks, dx", got.get(x).unwrap(), need.get(x).unwrap(), 5e-6);
    Ok(())
}

#[test]
fn only_what_requires_a_gradient_is_in_the_graph() -> Result<()> {
    let (q, k, v) =
        (values((1, 5, 2, 8), 1), Var::from_tensor(&values((1, 5, 2, 8), 2))?, values((1, 5, 2, 8), 3));
    let store = flash_attn(&q, &k, &v, SCALE, true)?.sum_all()?.backward()?;
    let need = materialised(&q, &k, &v, SCALE, Scores::CAUSAL)?.0.sum_all()?.backward()?;
    assert_close("dk", store.get(&k).unwrap(), need.get(&k).unwrap(), 5e-6);
    let out = flash_attn(&q, &k.detach(), &v, SCALE, true)?;
    assert!(!out.track_op());
    let (_, lse) = attention_with_lse(&q, &k.detach(), &v, &Options::causal(SCALE))?;
    assert!(!lse.track_op());
    Ok(())
}

#[test]
fn bounds_and_windows_of_any_size_are_taken_or_refused() -> Result<()> {
    let x = values((8, 4, 16), 1);
    let starts = Tensor::new(&[0u32, 3, 8], &Device::Cpu)?;
    let varlen =
        |max, left| flash_attn_varlen_windowed(&x, &x, &x, &starts, &starts, max, max, SCALE, left, Some(0));
    let need = varlen(8, None)?;
    for left in [8, 1 << 33, usize::MAX] {
        assert_close("left", &varlen(8, Some(left))?, &need, 0.0);
    }
    let error = varlen(usize::MAX, None).expect_err("more than an i32 holds").to_string();
    assert!(error.contains("seqlen") && error.contains("i32"), "{error}");
    // A window that ends left of a row's first key leaves it nothing.
    let x = x.unsqueeze(0)?;
    let none = flash_attn_windowed(&x, &x.narrow(1, 0, 2)?, &x.narrow(1, 0, 2)?, SCALE, Some(0), Some(0))?;
    let sums = none.abs()?.sum((0, 2, 3))?.to_vec1::<f32>()?;
    assert!(sums.iter().enumerate().all(|(row, sum)| (*sum > 0.0) == (row >= 6)), "{sums:?}");
    Ok(())
}

#[test]
fn slopes_of_half_types_and_of_each_sequence_serve_the_functions() -> Result<()> {
    let (q, k, v) = (values((2, 6, 4, 8), 1), values((2, 6, 2, 8), 2), values((2, 6, 2, 8), 3));
    let slopes = Tensor::new(&[[0.5f32, 0.25, 0.125, 1.0], [0.75, 0.0, 2.0, 0.5]], &Device::Cpu)?;
    let scores = Scores { slopes: Some(&slopes), ..Scores::CAUSAL };
    let need = materialised(&q, &k, &v, SCALE, scores)?.0;
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
        let out = flash_attn_alibi(&q, &k, &v, &slopes.to_dtype(dtype)?, SCALE, true)?;
        assert_close("slopes", &out, &need, 2e-6);
    }
    // A transposed table of them is copied.
    let turned = slopes.t()?.contiguous()?.t()?;
    assert_close("turned", &flash_attn_alibi(&q, &k, &v, &turned, SCALE, true)?, &need, 2e-6);
    Ok(())
}
