//! Gradients through candle's autodiff, against those of the materialised path.

use candle_core::{DType, Device, Result, Tensor, Var};
use fa_candle::*;

use crate::materialised::{Scores, assert_close, assert_gradients, attention as materialised, values, vars};

const SCALE: f32 = 0.3;

/// Gradients of `inputs` of a sum of `out` weighed by `weights`.
fn gradients(out: &Tensor, weights: &Tensor, inputs: &[&Var]) -> Result<Vec<Tensor>> {
    let store = (out * weights)?.sum_all()?.backward()?;
    Ok(inputs.iter().map(|input| store.get(input).expect("a gradient").clone()).collect())
}

#[test]
fn gradients_follow_the_materialised_path() -> Result<()> {
    let [q, k, v] = &vars([(2, 13, 6, 16), (2, 21, 2, 16), (2, 21, 2, 16)]);
    let slopes = Tensor::new(&[0.5f32, 0.25, 0.125, 1.0, 0.75, 0.0], &Device::Cpu)?;
    let weights = values((2, 13, 6, 16), 20);
    let plain = Scores::default();
    for scores in [
        plain,
        Scores::CAUSAL,
        Scores { left: Some(4), right: Some(1), ..plain },
        Scores { softcap: Some(0.8), slopes: Some(&slopes), ..Scores::CAUSAL },
    ] {
        let options = Options::full(SCALE)
            .with_window_size_left(scores.left)
            .with_window_size_right(scores.right)
            .with_softcap(scores.softcap)
            .with_alibi_slopes(scores.slopes);
        let got = gradients(&attention(q, k, v, &options)?, &weights, &[q, k, v])?;
        let need = gradients(&materialised(q, k, v, SCALE, scores)?.0, &weights, &[q, k, v])?;
        assert_gradients("padded", &got, &need, 5e-6);
        let deterministic = options.with_deterministic(true);
        let again = gradients(&attention(q, k, v, &deterministic)?, &weights, &[q, k, v])?;
        assert_gradients("deterministic", &again, &got, 0.0);
    }
    Ok(())
}

#[test]
fn sinks_get_a_gradient() -> Result<()> {
    let [q, k, v] = &vars([(2, 9, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)]);
    let sinks = &Var::from_tensor(&values(4, 30))?;
    let weights = values((2, 9, 4, 8), 31);
    let out = attention(q, k, v, &Options::causal(SCALE).with_sinks(Some(sinks)))?;
    let need = materialised(q, k, v, SCALE, Scores { sinks: Some(sinks), ..Scores::CAUSAL })?.0;
    assert_close("out", &out, &need, 2e-6);
    let need = gradients(&need, &weights, &[q, k, v, sinks])?;
    // One graph may be gone through more than once.
    for _ in 0..2 {
        assert_gradients("sinks", &gradients(&out, &weights, &[q, k, v, sinks])?, &need, 5e-6);
    }
    // Sinks that need none are constants.
    let out = attention(q, k, v, &Options::causal(SCALE).with_sinks(Some(&sinks.detach())))?;
    assert_gradients("constant sinks", &gradients(&out, &weights, &[q, k, v])?, &need[..3], 5e-6);
    // Where only they do, the others are.
    let [q, k, v] = [q, k, v].map(|var| var.detach());
    let out = attention(&q, &k, &v, &Options::causal(SCALE).with_sinks(Some(sinks)))?;
    assert_close("dsinks", &gradients(&out, &weights, &[sinks])?[0], &need[3], 5e-6);
    Ok(())
}

#[test]
fn half_types_and_sinks_of_a_half_type_get_gradients_of_their_type() -> Result<()> {
    let [q, k, v] =
        vars([(1, 9, 4, 8), (1, 9, 2, 8), (1, 9, 2, 8)]).map(|var| var.to_dtype(DType::BF16).unwrap());
    let [q, k, v] = [&q, &k, &v].map(|x| Var::from_tensor(x).unwrap());
    let sinks = Var::from_tensor(&values(4, 30).to_dtype(DType::BF16)?)?;
    let weights = values((1, 9, 4, 8), 31).to_dtype(DType::BF16)?;
    let out = attention(&q, &k, &v, &Options::causal(SCALE).with_sinks(Some(&sinks)))?;
    let got = gradients(&out, &weights, &[&q, &k, &v, &sinks])?;
    assert!(got.iter().all(|gradient| gradient.dtype() == DType::BF16));
    let [q, k, v, sinks] =
        [&q, &k, &v, &sinks].map(|x| Var::from_tensor(&x.to_dtype(DType::F32).unwrap()).unwrap());
    let exact = materialised(&q, &k, &v, SCALE, Scores { sinks: Some(&sinks), ..Scores::CAUSAL })?.0;
    let need = gradients(&exact, &weights.to_dtype(DType::F32)?, &[&q, &k, &v, &sinks])?;
    assert_gradients("bf16", &got, &need, 0.03);
    Ok(())
}

#[test]
fn gradients_go_on_through_views_and_projections() -> Result<()> {
    // A fused projection, of which Q, K and V are strided views, and an output transposed back.
    let x = &Var::from_tensor(&values((2, 11, 3 * 2 * 8), 40))?;
    let weights = values((2, 2, 11, 8), 41);
    let parts = |x: &Tensor| -> Result<[Tensor; 3]> {
        let x = x.reshape((2, 11, 3, 2, 8))?;
        let part = |i| x.narrow(2, i, 1)?.squeeze(2);
        Ok([part(0)?, part(1)?, part(2)?])
    };
    let [q, k, v] = parts(x)?;
    let got = gradients(&flash_attn(&q, &k, &v, SCALE, true)?.transpose(1, 2)?, &weights, &[x])?;
    let need = materialised(&q, &k, &v, SCALE, Scores::CAUSAL)?.0.transpose(1, 2)?;
    assert_close("fused", &got[0], &gradients(&need, &weights, &[x])?[0], 5e-6);
    // A sum's gradient is broadcast.
    let got = flash_attn(&q, &k, &v, SCALE, true)?.sum_all()?.backward()?;
    let need = materialised(&q, &k, &v, SCALE, Scores::CAUSAL)?.0.sum_all()?.backward()?;
    assert_close("sum", got.get(x).unwrap(), need.get(x).unwrap(), 5e-6);
    Ok(())
}

#[test]
fn packed_gradients_are_those_of_each_sequence_and_zero_elsewhere() -> Result<()> {
    let vars = vars([(1, 12, 4, 8), (1, 14, 2, 8), (1, 14, 2, 8)]);
    let [q, k, v] = vars.each_ref().map(|var| var.squeeze(0).unwrap());
    let seqlens_q = Tensor::new(&[0u32, 4, 12], &Device::Cpu)?;
    let seqlens_k = Tensor::new(&[0u32, 5, 13], &Device::Cpu)?;
    let weights = values((12, 4, 8), 50);
    let inputs = vars.each_ref();
    let out = flash_attn_varlen(&q, &k, &v, &seqlens_q, &seqlens_k, 8, 8, SCALE, true)?;
    let got = gradients(&out, &weights, &inputs)?;
    let one = |at_q, len_q, at_k, len_k| -> Result<Tensor> {
        let [q, k, v] = &vars;
        let (q, k, v) = (q.narrow(1, at_q, len_q)?, k.narrow(1, at_k, len_k)?, v.narrow(1, at_k, len_k)?);
        materialised(&q, &k, &v, SCALE, Scores::CAUSAL)?.0.squeeze(0)
    };
    let need = Tensor::cat(&[one(0, 4, 0, 5)?, one(4, 8, 5, 8)?], 0)?;
    assert_close("out", &out, &need, 2e-6);
    assert_gradients("packed", &got, &gradients(&need, &weights, &inputs)?, 5e-6);
    assert_eq!(got[1].narrow(1, 13, 1)?.abs()?.sum_all()?.to_scalar::<f32>()?, 0.0);
    Ok(())
}

#[test]
fn threads_may_go_through_one_graph_at_once() -> Result<()> {
    let [q, k, v] = &vars([(1, 33, 4, 8), (1, 33, 2, 8), (1, 33, 2, 8)]);
    let sinks = &Var::from_tensor(&values(4, 30))?;
    let out = &attention(q, k, v, &Options::causal(SCALE).with_sinks(Some(sinks)))?;
    let weights: Vec<Tensor> = (0..4).map(|seed| values((1, 33, 4, 8), 60 + seed)).collect();
    let need = weights
        .iter()
        .map(|weights| gradients(out, weights, &[q, k, v, sinks]))
        .collect::<Result<Vec<_>>>()?;
    std::thread::scope(|scope| {
        for (weights, need) in weights.iter().zip(&need) {
            scope.spawn(move || {
                for _ in 0..20 {
                    let got = gradients(out, weights, &[q, k, v, sinks]).unwrap();
                    assert_gradients("threads", &got, need, 0.0);
                }
            });
        }
    });
    Ok(())
}
