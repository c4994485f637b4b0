//! Gradients through LSE, alone and beside those of the output.

use candle_core::{Device, Result, Tensor, Var};
use fa_candle::*;

use crate::materialised::{Scores, assert_close, assert_gradients, attention as materialised, values, vars};

const SCALE: f32 = 0.3;

/// Gradients of weighed sums of both, or of LSE alone.
fn gradients((out, lse): &(Tensor, Tensor), of_out: bool, inputs: &[&Var]) -> Result<Vec<Tensor>> {
    let mut loss = (lse * values(lse.shape(), 80))?.sum_all()?;
    if of_out {
        loss = (loss + (out * values(out.shape(), 81))?.sum_all()?)?;
    }
    let store = loss.backward()?;
    Ok(inputs.iter().map(|x| store.get(x).cloned().unwrap_or_else(|| x.zeros_like().unwrap())).collect())
}

#[test]
fn they_follow_the_materialised_path() -> Result<()> {
    let [q, k, v] = &vars([(2, 13, 6, 16), (2, 21, 2, 16), (2, 21, 2, 24)]);
    let slopes = Tensor::new(&[0.5f32, 0.25, 0.125, 1.0, 0.75, 0.0], &Device::Cpu)?;
    let sinks = &Var::from_tensor(&values(6, 90))?;
    let plain = Scores::default();
    for scores in [
        plain,
        Scores { left: Some(4), right: Some(1), ..plain },
        Scores { softcap: Some(0.8), slopes: Some(&slopes), ..Scores::CAUSAL },
        Scores { sinks: Some(sinks), ..Scores::CAUSAL },
    ] {
        let options = Options::full(SCALE)
            .with_window_size_left(scores.left)
            .with_window_size_right(scores.right)
            .with_softcap(scores.softcap)
            .with_alibi_slopes(scores.slopes)
            .with_sinks(scores.sinks);
        let got = attention_with_lse(q, k, v, &options)?;
        let need = materialised(q, k, v, SCALE, scores)?;
        assert_close("lse", &got.1, &need.1, 2e-6);
        let mut inputs = vec![q, k, v];
        inputs.extend(scores.sinks.map(|_| sinks));
        for of_out in [false, true] {
            let need = gradients(&need, of_out, &inputs)?;
            assert_gradients("padded", &gradients(&got, of_out, &inputs)?, &need, 5e-6);
        }
    }
    Ok(())
}

#[test]
fn packed_sequences_have_theirs() -> Result<()> {
    let [q, k, v] = &vars([(1, 12, 4, 8), (1, 13, 2, 8), (1, 13, 2, 8)]);
    let starts = |ends: [u32; 3]| Tensor::new(&ends, &Device::Cpu);
    let (seqlens_q, seqlens_k) = (&starts([0, 4, 12])?, &starts([0, 5, 13])?);
    let rows = Rows::Packed { seqlens_q, seqlens_k, max_seqlen_q: 8, max_seqlen_k: 8 };
    let options = Options::causal(SCALE).with_rows(rows);
    let got = attention_with_lse(&q.squeeze(0)?, &k.squeeze(0)?, &v.squeeze(0)?, &options)?;
    let one = |at_q, len_q, at_k, len_k| -> Result<(Tensor, Tensor)> {
        let (q, k, v) = (q.narrow(1, at_q, len_q)?, k.narrow(1, at_k, len_k)?, v.narrow(1, at_k, len_k)?);
        let (out, lse) = materialised(&q, &k, &v, SCALE, Scores::CAUSAL)?;
        Ok((out.squeeze(0)?, lse.squeeze(0)?))
    };
    let (first, second) = (one(0, 4, 0, 5)?, one(4, 8, 5, 8)?);
    let need = (Tensor::cat(&[&first.0, &second.0], 0)?, Tensor::cat(&[&first.1, &second.1], 1)?);
    assert_close("lse", &got.1, &need.1, 2e-6);
    for of_out in [false, true] {
        let need = gradients(&need, of_out, &[q, k, v])?;
        assert_gradients("packed", &gradients(&got, of_out, &[q, k, v])?, &need, 5e-6);
    }
    Ok(())
}
