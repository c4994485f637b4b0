//! The eleven functions of candle-flash-attn.

use candle_core::{DType, Device, Result, Tensor};
use fa_candle::*;

use crate::materialised::{Scores, assert_close, attention, values};

const SCALE: f32 = 0.3;

/// Q, K and V with grouped heads, and fewer queries than keys.
fn inputs() -> [Tensor; 3] {
    [values((2, 23, 6, 16), 1), values((2, 37, 2, 16), 2), values((2, 37, 2, 16), 3)]
}

fn slopes() -> Tensor {
    Tensor::new(&[0.5f32, 0.25, 0.125, 1.0, 0.75, 0.0], &Device::Cpu).unwrap()
}

#[test]
fn padded_functions_follow_the_materialised_ones() -> Result<()> {
    let [q, k, v] = &inputs();
    let slopes = &slopes();
    let windows = Scores { left: Some(5), right: Some(2), ..Scores::default() };
    let biased = |scores| Scores { slopes: Some(slopes), ..scores };
    let check = |what, out: Result<Tensor>, scores| -> Result<()> {
        assert_close(what, &out?, &attention(q, k, v, SCALE, scores)?.0, 2e-6);
        Ok(())
    };
    check("full", flash_attn(q, k, v, SCALE, false), Scores::default())?;
    check("causal", flash_attn(q, k, v, SCALE, true), Scores::CAUSAL)?;
    check("window", flash_attn_windowed(q, k, v, SCALE, Some(5), Some(2)), windows)?;
    check("alibi", flash_attn_alibi(q, k, v, slopes, SCALE, true), biased(Scores::CAUSAL))?;
    let out = flash_attn_alibi_windowed(q, k, v, slopes, SCALE, Some(5), Some(2));
    check("alibi, window", out, biased(windows))?;
    let capped = Scores { softcap: Some(0.7), ..windows };
    let out = flash_attn_alibi_windowed_softcap(q, k, v, Some(slopes), SCALE, Some(5), Some(2), 0.7);
    check("alibi, window, cap", out, biased(capped))?;
    let out = flash_attn_alibi_windowed_softcap(q, k, v, None, SCALE, None, None, 0.0);
    check("a cap of 0 is none", out, Scores::default())
}

#[test]
fn windows_wider_than_the_sequence_have_no_limit() -> Result<()> {
    let [q, k, v] = &inputs();
    let full = flash_attn(q, k, v, SCALE, false)?;
    for [left, right] in [[Some(37), Some(37)], [Some(1 << 40), Some(usize::MAX)], [Some(36), Some(22)]] {
        assert_close("wide", &flash_attn_windowed(q, k, v, SCALE, left, right)?, &full, 0.0);
    }
    let causal = flash_attn(q, k, v, SCALE, true)?;
    assert_close("left", &flash_attn_windowed(q, k, v, SCALE, Some(1000), Some(0))?, &causal, 0.0);
    // More queries than keys: the first rows see nothing, and are zero.
    let (few_k, few_v) = (k.narrow(1, 0, 9)?, v.narrow(1, 0, 9)?);
    let out = flash_attn(q, &few_k, &few_v, SCALE, true)?;
    assert_close("rows without keys", &out, &attention(q, &few_k, &few_v, SCALE, Scores::CAUSAL)?.0, 2e-6);
    assert_eq!(out.narrow(1, 0, 14)?.abs()?.sum_all()?.to_scalar::<f32>()?, 0.0);
    Ok(())
}

#[test]
fn functions_of_the_third_generation_are_those_of_the_second() -> Result<()> {
    let [q, k, v] = &inputs();
    let slopes = &slopes();
    let same = |what, out: Result<Tensor>, expected: Result<Tensor>| -> Result<()> {
        assert_close(what, &out?, &expected?, 0.0);
        Ok(())
    };
    let starts = |of: &[u32]| Tensor::new(of, &Device::Cpu);
    let (at_q, at_k) = (&starts(&[0, 9, 23])?, &starts(&[0, 20, 37])?);
    let (q1, k1, v1) = (&q.narrow(0, 0, 1)?, &k.narrow(0, 0, 1)?, &v.narrow(0, 0, 1)?);
    let (q1, k1, v1) = (&q1.squeeze(0)?, &k1.squeeze(0)?, &v1.squeeze(0)?);
    for pack in [false, true] {
        for causal in [false, true] {
            let out = v3::flash_attn(q, k, v, SCALE, causal, pack);
            same("full", out, flash_attn(q, k, v, SCALE, causal))?;
            let out = v3::flash_attn_alibi(q, k, v, slopes, SCALE, causal, pack);
            same("alibi", out, flash_attn_alibi(q, k, v, slopes, SCALE, causal))?;
            let out = v3::flash_attn_varlen(q1, k1, v1, at_q, at_k, 14, 20, SCALE, causal, pack);
            same("varlen", out, flash_attn_varlen(q1, k1, v1, at_q, at_k, 14, 20, SCALE, causal))?;
            let out =
                v3::flash_attn_varlen_alibi(q1, k1, v1, slopes, at_q, at_k, 14, 20, SCALE, causal, pack);
            let expected = flash_attn_varlen_alibi(q1, k1, v1, slopes, at_q, at_k, 14, 20, SCALE, causal);
            same("varlen, alibi", out, expected)?;
        }
        let (left, right) = (Some(5), Some(2));
        let out = v3::flash_attn_windowed(q, k, v, SCALE, left, right, pack);
        same("window", out, flash_attn_windowed(q, k, v, SCALE, left, right))?;
        let out = v3::flash_attn_alibi_windowed(q, k, v, slopes, SCALE, left, right, pack);
        same("alibi, window", out, flash_attn_alibi_windowed(q, k, v, slopes, SCALE, left, right))?;
        let out = v3::flash_attn_varlen_windowed(q1, k1, v1, at_q, at_k, 14, 20, SCALE, left, right, pack);
        let expected = flash_attn_varlen_windowed(q1, k1, v1, at_q, at_k, 14, 20, SCALE, left, right);
        same("varlen, window", out, expected)?;
        let out = v3::flash_attn_varlen_alibi_windowed(
            q1, k1, v1, slopes, at_q, at_k, 14, 20, SCALE, left, right, pack,
        );
        let expected =
            flash_attn_varlen_alibi_windowed(q1, k1, v1, slopes, at_q, at_k, 14, 20, SCALE, left, right);
        same("varlen, alibi, window", out, expected)?;
    }
    Ok(())
}

#[test]
fn strides_are_taken_as_they_lie() -> Result<()> {
    // One tensor of (batch, heads, seqlen, 3 dim), as fused projections give.
    let fused = values((2, 4, 19, 48), 4);
    let part = |i: usize| fused.narrow(3, 16 * i, 16).unwrap().transpose(1, 2).unwrap();
    let [q, k, v] = [part(0), part(1), part(2)];
    let packed = [q.contiguous()?, k.contiguous()?, v.contiguous()?];
    let expected = flash_attn(&packed[0], &packed[1], &packed[2], SCALE, true)?;
    assert_close("strided", &flash_attn(&q, &k, &v, SCALE, true)?, &expected, 0.0);
    // Keys that all sequences share, broadcast.
    let shared = packed[1].narrow(0, 0, 1)?;
    let broadcast = shared.broadcast_as(q.shape())?;
    let copied = Tensor::cat(&[&shared, &shared], 0)?;
    let expected = flash_attn(&q, &copied, &copied, SCALE, false)?;
    assert_close("broadcast", &flash_attn(&q, &broadcast, &broadcast, SCALE, false)?, &expected, 0.0);
    Ok(())
}

#[test]
fn half_types_are_rounded_once() -> Result<()> {
    let [q, k, v] = inputs();
    for (dtype, bound) in [(DType::F16, 5e-4), (DType::BF16, 4e-3)] {
        let [q, k, v] = [&q, &k, &v].map(|x| x.to_dtype(dtype).unwrap());
        let out = flash_attn(&q, &k, &v, SCALE, true)?;
        assert_eq!((out.dtype(), out.dims()), (dtype, q.dims()));
        let [q, k, v] = [&q, &k, &v].map(|x| x.to_dtype(DType::F32).unwrap());
        assert_close("half", &out, &attention(&q, &k, &v, SCALE, Scores::CAUSAL)?.0, bound);
    }
    Ok(())
}

#[test]
fn v_may_have_rows_of_its_own_length() -> Result<()> {
    let [q, k, _] = &inputs();
    let v = values((2, 37, 2, 24), 5);
    let out = flash_attn(q, k, &v, SCALE, false)?;
    assert_close("head dims", &out, &attention(q, k, &v, SCALE, Scores::default())?.0, 2e-6);
    Ok(())
}

#[test]
fn any_head_dim_runs_on_the_cpu() -> Result<()> {
    for dim in [5, 264, 512] {
        let x = values((1, 7, 2, dim), dim as u64);
        let out = flash_attn(&x, &x, &x, 0.1, true)?;
        assert_close("head dim", &out, &attention(&x, &x, &x, 0.1, Scores::CAUSAL)?.0, 2e-6);
    }
    Ok(())
}
