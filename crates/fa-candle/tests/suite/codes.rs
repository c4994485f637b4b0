//! K and V, or Q as well, of candle's F8E4M3, and K and V in bytes of codes.

use candle_core::{DType, Device, Result, Tensor, Var};
use fa_candle::{Options, attention};
use fa_core::quantize::Codes;

use crate::materialised::{Scores, assert_close, attention as materialised, values};

const SCALE: f32 = 0.3;

#[test]
fn codes_are_multiplied_by_their_descales() -> Result<()> {
    let q = values((2, 5, 6, 16), 1);
    let [k, v] = [2, 3].map(|seed| values((2, 37, 2, 16), seed).affine(3.0, 0.0)?.to_dtype(DType::F8E4M3));
    let (k, v) = (k?, v?);
    let device = &Device::Cpu;
    let one = Tensor::new(&[0.25f32], device)?;
    let heads = Tensor::new(&[0.25f32, 0.5], device)?;
    let sequences = Tensor::new(&[[0.25f32, 0.5], [1.0, 0.125]], device)?;
    let rows = Tensor::rand(0.1f32, 0.5, (2, 37, 2), device)?;
    let spread = |descale: &Tensor| match descale.dims() {
        [2, 2] => descale.reshape((2, 1, 2, 1)),
        [2, 37, 2] => descale.unsqueeze(3),
        [n] => descale.reshape((1, 1, *n, 1)),
        dims => panic!("{dims:?}"),
    };
    for (of_k, of_v) in [(&one, &heads), (&heads, &sequences), (&sequences, &rows), (&rows, &one)] {
        let options = Options::causal(SCALE).with_k_descale(Some(of_k)).with_v_descale(Some(of_v));
        let out = attention(&q, &k, &v, &options)?;
        let decoded = |codes: &Tensor, descale| codes.to_dtype(DType::F32)?.broadcast_mul(&spread(descale)?);
        let need = materialised(&q, &decoded(&k, of_k)?, &decoded(&v, of_v)?, SCALE, Scores::CAUSAL)?.0;
        assert_close("codes", &out, &need, 1e-5);
    }
    Ok(())
}

#[test]
fn bytes_are_two_codes_each() -> Result<()> {
    let q = values((2, 5, 6, 16), 1);
    let device = &Device::Cpu;
    let shape = (2, 37, 2, 8);
    let [k, v] = [2u32, 3].map(|seed| {
        let bytes: Vec<u8> =
            (0..2 * 37 * 2 * 8).map(|i: u32| (i.wrapping_mul(2654435761 + 2 * seed) >> 9) as u8).collect();
        let numbers: Vec<f32> = Codes::Int4.numbers(&bytes).collect();
        Ok::<_, candle_core::Error>([
            Tensor::from_vec(bytes, shape, device)?,
            Tensor::from_vec(numbers, (2, 37, 2, 16), device)?,
        ])
    });
    let ([k4, k], [v4, v]) = (k?, v?);
    let rows = Tensor::rand(0.02f32, 0.2, (2, 37, 2), device)?;
    let options = Options::causal(SCALE).with_k_descale(Some(&rows)).with_v_descale(Some(&rows));
    let out = attention(&q, &k4, &v4, &options)?;
    let decoded = |numbers: &Tensor| numbers.broadcast_mul(&rows.unsqueeze(3)?);
    let need = materialised(&q, &decoded(&k)?, &decoded(&v)?, SCALE, Scores::CAUSAL)?.0;
    assert_close("codes", &out, &need, 1e-5);
    let error = attention(&q, &k4.narrow(3, 0, 4)?, &v4, &options).unwrap_err().to_string();
    assert!(error.contains("(2, 37, 2, 8)") || error.contains("[2, 37, 2, 8]"), "{error}");
    let fp8 = q.to_dtype(DType::F8E4M3)?;
    let error = attention(&fp8, &k4, &v4, &Options::causal(SCALE)).unwrap_err().to_string();
    assert!(error.contains("k holds U8") && error.contains("the type of q"), "{error}");
    Ok(())
}

#[test]
fn bytes_are_the_codes_that_options_name() -> Result<()> {
    let q = values((2, 5, 6, 16), 1);
    let device = &Device::Cpu;
    let shape = (2, 37, 2, 16);
    let descale = Tensor::new(&[0.02f32, 0.05], device)?;
    for codes in [Codes::Int8, Codes::E4m3] {
        let given = |seed: u32| {
            let bytes: Vec<u8> = (0..2 * 37 * 2 * 16)
                .map(|i: u32| {
                    codes.encode((i.wrapping_mul(2654435761 + 2 * seed) >> 20) as f32 / 16.0 - 128.0)
                })
                .collect();
            let numbers: Vec<f32> = codes.numbers(&bytes).collect();
            let decoded = Tensor::from_vec(numbers, shape, device)?;
            let decoded = decoded.broadcast_mul(&descale.reshape((1, 1, 2, 1))?)?;
            Ok::<_, candle_core::Error>([Tensor::from_vec(bytes, shape, device)?, decoded])
        };
        let ([k8, k], [v8, v]) = (given(2)?, given(3)?);
        let options = Options::causal(SCALE).with_k_descale(Some(&descale)).with_v_descale(Some(&descale));
        let out = attention(&q, &k8, &v8, &options.with_byte_codes(codes))?;
        let need = materialised(&q, &k, &v, SCALE, Scores::CAUSAL)?.0;
        assert_close("codes", &out, &need, 1e-5);
    }
    Ok(())
}

#[test]
fn fp8_tensors_give_bf16() -> Result<()> {
    let codes = |shape, seed| values(shape, seed).affine(3.0, 0.0)?.to_dtype(DType::F8E4M3);
    let (q, k, v) = (codes((2, 5, 6, 16), 1)?, codes((2, 37, 2, 16), 2)?, codes((2, 37, 2, 16), 3)?);
    let device = &Device::Cpu;
    let one = Tensor::new(&[0.25f32], device)?;
    let heads = Tensor::new(&[0.25f32, 0.5], device)?;
    let sequences = Tensor::new(&[[0.25f32, 0.5], [1.0, 0.125]], device)?;
    // Each of `heads` of a tensor, of which `group` share a descale.
    let decoded = |codes: &Tensor, descale: &Tensor, group: usize| {
        let (rows, given) = match descale.dims() {
            [rows, given] => (*rows, *given),
            dims => (1, dims[0]),
        };
        let each = descale.reshape((rows, 1, given, 1, 1))?;
        let (batch, len, heads, dim) = codes.dims4()?;
        let grouped = codes.to_dtype(DType::F32)?.reshape((batch, len, heads / group, group, dim))?;
        grouped.broadcast_mul(&each)?.reshape((batch, len, heads, dim))
    };
    for (of_q, of_k, of_v) in [(&one, &heads, &sequences), (&sequences, &one, &heads), (&heads, &one, &one)] {
        for softcap in [None, Some(2.0)] {
            let options = Options::causal(SCALE)
                .with_q_descale(Some(of_q))
                .with_k_descale(Some(of_k))
                .with_v_descale(Some(of_v))
                .with_softcap(softcap);
            let out = attention(&q, &k, &v, &options)?;
            assert_eq!(out.dtype(), DType::BF16);
            let (q, k, v) = (decoded(&q, of_q, 3)?, decoded(&k, of_k, 1)?, decoded(&v, of_v, 1)?);
            let scores = Scores { softcap, ..Scores::CAUSAL };
            let need = materialised(&q, &k, &v, SCALE, scores)?.0;
            let largest = need.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
            assert!(largest > 0.1, "{largest}");
            assert_close("fp8", &out, &need, largest / 256.0);
        }
    }
    Ok(())
}

#[test]
fn what_has_no_codes_or_no_gradients_is_refused_by_name() -> Result<()> {
    let q = values((1, 2, 2, 16), 1);
    let k = values((1, 3, 2, 16), 2);
    let codes = k.to_dtype(DType::F8E4M3)?;
    let descale = Tensor::new(&[0.25f32, 0.5, 1.0], &Device::Cpu)?;
    let options = Options::full(SCALE);
    let with_descale = options.with_v_descale(Some(&descale));
    let tracked = Var::from_tensor(&q)?;
    for (found, part) in [
        (attention(&q, &codes, &k, &options), "the type of k"),
        (attention(&q, &k, &k, &with_descale), "v_descale with K and V in f32"),
        (attention(&q, &codes, &codes, &with_descale), "v_descale"),
        (attention(&tracked, &codes, &codes, &options), "K and V in codes have no gradients"),
        (attention(&codes, &codes, &k, &options), "the type of q"),
        (attention(&codes, &k, &k, &options), "the type of q"),
        (attention(&q, &codes, &codes, &options.with_q_descale(Some(&descale))), "q_descale"),
    ] {
        let text = found.expect_err("must be refused").to_string();
        assert!(text.contains(part), "{text} does not say {part}");
    }
    Ok(())
}
