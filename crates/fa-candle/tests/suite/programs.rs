//! Masks, biases and programs against candle's own operations, with gradients.

use candle_core::{DType, Device, IndexOp, Result, Tensor, Var};
use fa_candle::*;

use crate::materialised::{Scores, assert_close, attention as materialised, values, vars};

const SCALE: f32 = 0.3;
const BATCH: usize = 2;
const HEADS: usize = 6;

type Dims = [usize; 4];

/// What a call is given beside Q `(2, queries, 6, 8)` and K and V of `heads_kv` heads.
#[derive(Clone, Copy)]
struct Case {
    queries: usize,
    keys: usize,
    heads_kv: usize,
    mask: Option<(Mask, Dims)>,
    bias: Option<(DType, Dims)>,
    causal: bool,
    sinks: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Mask {
    /// u8.
    Seen,
    /// 0 or -inf.
    Added,
}

const PLAIN: Case =
    Case { queries: 13, keys: 21, heads_kv: 2, mask: None, bias: None, causal: false, sinks: false };

const CASES: [Case; 12] = [
    Case { mask: Some((Mask::Seen, [2, 6, 13, 21])), ..PLAIN },
    Case { mask: Some((Mask::Seen, [2, 1, 1, 21])), ..PLAIN },
    Case { mask: Some((Mask::Seen, [1, 6, 13, 1])), causal: true, ..PLAIN },
    Case { mask: Some((Mask::Added, [1, 1, 13, 21])), causal: true, sinks: true, ..PLAIN },
    Case { bias: Some((DType::F32, [2, 6, 13, 21])), ..PLAIN },
    Case { bias: Some((DType::F32, [1, 6, 13, 21])), heads_kv: 6, causal: true, ..PLAIN },
    Case { bias: Some((DType::F32, [2, 1, 1, 21])), heads_kv: 1, sinks: true, ..PLAIN },
    Case { bias: Some((DType::F64, [1, 1, 13, 1])), ..PLAIN },
    Case { bias: Some((DType::BF16, [1, 6, 1, 1])), queries: 1, ..PLAIN },
    Case { bias: Some((DType::F16, [1, 6, 37, 67])), queries: 37, keys: 67, ..PLAIN },
    // NaN where the mask hides keys.
    Case { mask: Some((Mask::Seen, [2, 6, 13, 21])), bias: Some((DType::F32, [2, 6, 13, 21])), ..PLAIN },
    Case { mask: Some((Mask::Added, [2, 1, 13, 21])), bias: Some((DType::F32, [1, 6, 13, 21])), ..PLAIN },
];

/// Whether each key is seen: 4 of 5, and no key by the query of row 2.
fn seen(dims: Dims, seed: u64) -> Vec<bool> {
    let random = values(dims.iter().product::<usize>(), seed).to_vec1::<f32>().unwrap();
    let row = |at: usize| at / dims[3] % dims[2];
    random.iter().enumerate().map(|(at, x)| *x > -0.6 && (dims[2] == 1 || row(at) != 2)).collect()
}

fn tensor<T: candle_core::WithDType>(values: Vec<T>, dims: Dims) -> Tensor {
    Tensor::from_vec(values, &dims, &Device::Cpu).unwrap()
}

/// Gradients of `inputs` of a sum of `out` weighed by `weights`.
fn gradients(out: &Tensor, weights: &Tensor, inputs: &[&Var]) -> Result<Vec<Tensor>> {
    let store = (out * weights)?.sum_all()?.backward()?;
    Ok(inputs.iter().map(|input| store.get(input).expect("a gradient").clone()).collect())
}

fn check(at: usize, case: &Case) -> Result<()> {
    let Case { queries, keys, heads_kv, .. } = *case;
    let [q, k, v] =
        &vars([(BATCH, queries, HEADS, 8), (BATCH, keys, heads_kv, 8), (BATCH, keys, heads_kv, 16)]);
    let flags = case.mask.map(|(_, dims)| seen(dims, 70));
    let mask = case.mask.zip(flags.clone()).map(|((kind, dims), seen)| match kind {
        Mask::Seen => tensor(seen.into_iter().map(|seen| 3 * u8::from(seen)).collect(), dims),
        Mask::Added => {
            tensor(seen.into_iter().map(|seen| if seen { 0f32 } else { f32::NEG_INFINITY }).collect(), dims)
        }
    });
    let mut visible = case.mask.zip(flags.clone()).map(|((_, dims), seen)| {
        tensor(seen.into_iter().map(|seen| f32::from(u8::from(seen))).collect::<Vec<f32>>(), dims)
    });
    // One bias for the formula, where all is finite, and one with -inf and, behind the mask, NaN.
    let mut biases = None;
    if let Some((dtype, dims)) = case.bias {
        let finite = values(dims.to_vec(), 71).to_dtype(dtype)?;
        let rounded = finite.to_dtype(DType::F32)?;
        let hides = seen(dims, 72);
        let masked = case.mask.is_some_and(|(kind, of)| kind == Mask::Seen && of == dims);
        let flat = rounded.flatten_all()?.to_vec1::<f32>()?;
        let given = flat.iter().enumerate().map(|(at, &x)| match &flags {
            Some(seen) if masked && !seen[at] => f32::NAN,
            _ if dims[3] > 1 && !hides[at] => f32::NEG_INFINITY,
            _ => x,
        });
        let given = tensor(given.collect::<Vec<f32>>(), dims).to_dtype(dtype)?;
        if dims[3] > 1 {
            let own =
                tensor(hides.into_iter().map(|seen| f32::from(u8::from(seen))).collect::<Vec<f32>>(), dims);
            visible = Some(visible.map_or(Ok(own.clone()), |mask| mask.broadcast_mul(&own))?);
        }
        biases = Some((Var::from_tensor(&given)?, Var::from_tensor(&rounded)?));
    }
    let sinks = case.sinks.then(|| Var::from_tensor(&values(HEADS, 73))).transpose()?;
    let options = Options::full(SCALE)
        .with_window_size_right(case.causal.then_some(0))
        .with_mask(mask.as_ref())
        .with_bias(biases.as_ref().map(|(given, _)| given.as_tensor()))
        .with_sinks(sinks.as_deref());
    let scores = Scores {
        right: options.window_size_right,
        sinks: sinks.as_deref(),
        bias: biases.as_ref().map(|(_, finite)| finite.as_tensor()),
        visible: visible.as_ref(),
        ..Scores::default()
    };
    let (out, lse) = attention_with_lse(q, k, v, &options)?;
    let (need, need_lse) = materialised(q, k, v, SCALE, scores)?;
    assert_close(&format!("{at}: out"), &out, &need, 3e-6);
    assert_close(&format!("{at}: lse"), &lse, &need_lse, 3e-6);
    let weights = values((BATCH, queries, HEADS, 16), 74);
    let inputs: Vec<&Var> = [q, k, v].into_iter().chain(&sinks).collect();
    let (mut theirs, mut ours) = (inputs.clone(), inputs);
    if let Some((given, finite)) = &biases {
        ours.push(given);
        theirs.push(finite);
    }
    let got = gradients(&out, &weights, &ours)?;
    let need = gradients(&need, &weights, &theirs)?;
    for (index, (got, need)) in got.iter().zip(&need).enumerate() {
        let bounds = [(DType::BF16, 0.02), (DType::F16, 0.002)];
        let rounded = bounds.into_iter().find(|(dtype, _)| *dtype == got.dtype());
        let bound = rounded.map_or(1e-5, |(_, bound)| bound);
        assert_eq!(got.dtype(), ours[index].dtype());
        assert_close(&format!("{at}: gradient {index}"), got, need, bound);
    }
    Ok(())
}

#[test]
fn masks_and_biases_follow_the_materialised_path() -> Result<()> {
    CASES.iter().enumerate().try_for_each(|(at, case)| check(at, case))
}

#[test]
fn rows_without_keys_are_zero_and_nan_stays_in_its_row() -> Result<()> {
    let [q, k, v] = &vars([(1, 5, 2, 8), (1, 7, 2, 8), (1, 7, 2, 8)]);
    let mut numbers = vec![0f32; 5 * 7];
    numbers[7..14].fill(f32::NEG_INFINITY);
    numbers[3 * 7 + 2] = f32::NAN;
    let bias = Var::from_tensor(&tensor(numbers, [1, 1, 5, 7]))?;
    let (out, lse) = attention_with_lse(q, k, v, &Options::full(SCALE).with_bias(Some(&bias)))?;
    let rows = out.squeeze(0)?.flatten_from(1)?.to_vec2::<f32>()?;
    assert!(rows[1].iter().all(|x| *x == 0.0), "{:?}", rows[1]);
    assert!(rows[3].iter().all(|x| x.is_nan()), "{:?}", rows[3]);
    assert!(rows[0].iter().chain(&rows[2]).chain(&rows[4]).all(|x| x.is_finite() && *x != 0.0));
    assert_eq!(lse.i((0, 0, 1))?.to_scalar::<f32>()?, f32::NEG_INFINITY);
    let store = out.narrow(1, 1, 1)?.sum_all()?.backward()?;
    let dbias = store.get(&bias).expect("a gradient").i((0, 0, 1))?.to_vec1::<f32>()?;
    assert_eq!(dbias, [0.0; 7]);
    Ok(())
}

#[test]
fn a_gradient_of_lse_and_a_broadcast_view_reach_the_bias() -> Result<()> {
    let [q, k, v] = &vars([(2, 9, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)]);
    let bias = &Var::from_tensor(&values((4, 1, 9), 80))?;
    let weights = values((2, 4, 9), 81);
    let all = &bias.broadcast_as((2, 4, 9, 9))?;
    let need = materialised(q, k, v, SCALE, Scores { bias: Some(all), ..Scores::CAUSAL })?;
    let need = gradients(&need.1, &weights, &[q, k, bias])?;
    for given in [bias.as_tensor(), all] {
        let options = Options::causal(SCALE).with_bias(Some(given));
        let got = gradients(&attention_with_lse(q, k, v, &options)?.1, &weights, &[q, k, bias])?;
        for (name, (got, need)) in ["dq", "dk", "dbias"].iter().zip(got.iter().zip(&need)) {
            assert_close(name, got, need, 1e-5);
        }
    }
    Ok(())
}

#[test]
fn programs_read_tensors_and_numbers_and_give_gradients() -> Result<()> {
    let [q, k, v] = &vars([(2, 11, 4, 8), (2, 19, 2, 8), (2, 19, 2, 8)]);
    let slopes = &Var::from_tensor(&Tensor::new(&[0.5f32, 0.25, 0.125, 1.0], &Device::Cpu)?)?;
    let weights = values((2, 11, 4, 8), 90);
    let program = Program::new(
        "array slope: f32[_] grad; scalar left: i32;
         let distance = q + off - k;
         mask = 0 <= distance <= left;
         score = s - slope[h] * abs(distance);",
    )?
    .with_array("slope", slopes)
    .with_scalar("left", 100);
    for left in [7u32, 3] {
        let program = program.clone().with_scalar("left", left);
        let options = Options::full(SCALE).with_program(Some(&program));
        let scores = Scores { left: Some(left as usize), slopes: Some(slopes), ..Scores::CAUSAL };
        let need = materialised(q, k, v, SCALE, scores)?.0;
        let out = attention(q, k, v, &options)?;
        assert_close("out", &out, &need, 2e-6);
        let inputs = [q, k, v, slopes];
        let pairs = gradients(&out, &weights, &inputs)?.into_iter().zip(gradients(&need, &weights, &inputs)?);
        for (index, (got, need)) in pairs.enumerate() {
            assert_close(&format!("gradient {index}"), &got, &need, 2e-5);
        }
        // A mask and a bias come after it.
        let bias = &values((1, 1, 11, 19), 91);
        let flags = seen([2, 1, 1, 19], 92).into_iter().map(u8::from).collect();
        let seen = tensor(flags, [2, 1, 1, 19]);
        let visible = seen.to_dtype(DType::F32)?;
        let scores = Scores { bias: Some(bias), visible: Some(&visible), ..scores };
        let need = materialised(q, k, v, SCALE, scores)?.0;
        let out = attention(q, k, v, &options.with_mask(Some(&seen)).with_bias(Some(bias)))?;
        assert_close("with mask and bias", &out, &need, 2e-6);
    }
    Ok(())
}

/// By the values of scalars; an array that the program has beside them keeps its gradient.
#[test]
fn a_band_and_a_cap_are_the_built_in_ones() -> Result<()> {
    let [q, k, v] = &vars([(2, 11, 4, 8), (2, 19, 2, 8), (2, 19, 2, 8)]);
    let bias = &Var::from_tensor(&values((1, 1, 11, 19), 93))?;
    let text = "scalar c: f32; scalar w: i32; mask = 0 <= q + off - k < w; score = c * tanh(s / c);";
    let program = Program::new(text)?.with_scalar("c", 2.0).with_scalar("w", 5);
    let named = Options::causal(SCALE).with_window_size_left(Some(4)).with_softcap(Some(2.0));
    let out = attention(q, k, v, &Options::full(SCALE).with_program(Some(&program)))?;
    assert_eq!(bits(&out)?, bits(&attention(q, k, v, &named)?)?);
    let program = Program::new("k <= q + off")?;
    let found = [
        Options::full(SCALE).with_program(Some(&program)).with_bias(Some(bias)),
        Options::causal(SCALE).with_bias(Some(bias)),
    ];
    let weights = &values((2, 11, 4, 8), 91);
    let found = found.map(|options| {
        let out = attention(q, k, v, &options)?;
        gradients(&out, weights, &[q, k, v, bias])?.iter().map(bits).collect::<Result<Vec<_>>>()
    });
    let [own, named] = found;
    assert_eq!(own?, named?);
    Ok(())
}

fn bits(tensor: &Tensor) -> Result<Vec<u32>> {
    Ok(tensor.flatten_all()?.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect())
}

#[test]
fn every_element_type_is_read() -> Result<()> {
    let (q, k) = (values((1, 6, 2, 8), 1), values((1, 40, 2, 8), 2));
    let flags = seen([1, 1, 6, 40], 95);
    let bytes =
        tensor(flags.iter().map(|seen| u8::from(*seen)).collect(), [1, 1, 6, 40]).squeeze(0)?.squeeze(0)?;
    let need = attention(&q, &k, &k, &Options::full(SCALE).with_mask(Some(&bytes)))?;
    let words = flags.chunks(40).flat_map(|row| {
        row.chunks(32).map(|word| word.iter().rev().fold(0u32, |bits, seen| bits << 1 | u32::from(*seen)))
    });
    let bits = Tensor::from_vec(words.collect::<Vec<u32>>(), (6, 2), &Device::Cpu)?;
    for (text, tensor) in [
        ("array m: bits[_, _]; mask = m[q, k];", bits),
        ("array m: bool[_, _]; mask = m[q, k];", bytes.clone()),
        ("array m: u8[_, _]; mask = m[q, k] == 1;", bytes.clone()),
        ("array m: i32[_, _]; mask = m[q, k] == 1;", bytes.to_dtype(DType::U32)?),
        ("array m: i32[_, _]; mask = m[q, k] == 1;", bytes.to_dtype(DType::I32)?),
        ("array m: f32[_, _]; mask = m[q, k] == 1;", bytes.to_dtype(DType::F64)?),
        ("array m: f16[_, _]; mask = m[q, k] == 1;", bytes.to_dtype(DType::F16)?),
        ("array m: bf16[_, _]; mask = m[q, k] == 1;", bytes.to_dtype(DType::BF16)?),
        ("array m: bool[_, _]; mask = m[k, q];", bytes.t()?),
    ] {
        let program = Program::new(text)?.with_array("m", &tensor);
        let out = attention(&q, &k, &k, &Options::full(SCALE).with_program(Some(&program)))?;
        assert_close(text, &out, &need, 0.0);
    }
    Ok(())
}

#[test]
fn ranges_of_positions_see_each_other_beside_a_window() -> Result<()> {
    // Two sequences of 5 and 7 queries on 9 and 7 keys in pages of 4; empty ranges, and two that overlap.
    let (q, pages) = (values((12, 4, 8), 1), values((5, 4, 2, 8), 2));
    let starts = |ends: &[u32]| Tensor::new(ends, &Device::Cpu);
    let (seqlens_q, seqlens_k) = (&starts(&[0, 5, 12])?, &starts(&[0, 9, 16])?);
    let block_table = &Tensor::new(&[[1u32, 0, 4], [3, 2, 0]], &Device::Cpu)?;
    let ranges = [[[5i32, 8], [3, 3], [0, 0]], [[0, 4], [2, 6], [9, 1]]];
    let given = Tensor::new(&ranges, &Device::Cpu)?;
    let rows = Rows::Paged { seqlens_q, seqlens_k, block_table, max_seqlen_q: 7, max_seqlen_k: 9 };
    for (left, right) in [(None, Some(0)), (Some(2), Some(0)), (Some(1), Some(1)), (None, None)] {
        let out = flash_attn_varlen_paged_windowed(
            &q,
            &pages,
            &pages,
            seqlens_q,
            seqlens_k,
            block_table,
            Some(&given),
            7,
            9,
            SCALE,
            left,
            right,
            4,
            None,
        )?;
        let mut mask = vec![0u8; 2 * 7 * 9];
        for (sequence, offset) in [(0, 4), (1, 0)] {
            for (query, key) in (0..7).flat_map(|query| (0..9).map(move |key| (query, key))) {
                let at = query + offset;
                let beside = ranges[sequence].iter().any(|&[start, end]| {
                    let own = |x: usize| (start..end).contains(&(x as i32));
                    own(at) && own(key)
                });
                let window =
                    left.is_none_or(|left| key + left >= at) && right.is_none_or(|right| key <= at + right);
                mask[(sequence * 7 + query) * 9 + key] = u8::from(beside || window);
            }
        }
        let mask = tensor(mask, [2, 1, 7, 9]);
        let options = Options::full(SCALE).with_mask(Some(&mask)).with_rows(rows);
        let need = attention(&q, &pages, &pages, &options)?;
        assert_close(&format!("window {left:?}, {right:?}"), &out, &need, 1e-6);
    }
    // As many as there may be, all of them empty.
    let none = Tensor::zeros((2, 30, 2), DType::I32, &Device::Cpu)?;
    let windowed = |ranges: Option<&Tensor>| {
        let (table, left, right) = (block_table, Some(2), Some(1));
        flash_attn_varlen_paged_windowed(
            &q, &pages, &pages, seqlens_q, seqlens_k, table, ranges, 7, 9, SCALE, left, right, 4, None,
        )
    };
    assert_close("empty ranges", &windowed(Some(&none))?, &windowed(None)?, 1e-6);
    Ok(())
}

#[test]
fn indices_count_in_each_sequence_of_packed_paged_and_padded_rows() -> Result<()> {
    // Two sequences of 3 and 5 queries on 4 and 6 keys; a bias for each.
    let vars = vars([(1, 8, 4, 8), (1, 10, 2, 8), (1, 10, 2, 8)]);
    let bias = &Var::from_tensor(&values((2, 4, 5, 6), 100))?;
    let [q, k, v] = vars.each_ref().map(|var| var.squeeze(0).unwrap());
    let starts = |ends: &[u32]| Tensor::new(ends, &Device::Cpu);
    let (seqlens_q, seqlens_k) = (&starts(&[0, 3, 8])?, &starts(&[0, 4, 10])?);
    let packed = Rows::Packed { seqlens_q, seqlens_k, max_seqlen_q: 5, max_seqlen_k: 6 };
    let options = Options::causal(SCALE).with_bias(Some(bias));
    let out = attention(&q, &k, &v, &options.with_rows(packed))?;
    let weights = values((8, 4, 8), 101);
    let mut need = Vec::new();
    for (sequence, at_q, len_q, at_k, len_k) in [(0, 0, 3, 0, 4), (1, 3, 5, 4, 6)] {
        let [q, k, v] = &vars;
        let own = bias.narrow(0, sequence, 1)?.narrow(2, 0, len_q)?.narrow(3, 0, len_k)?;
        let (q, k, v) = (q.narrow(1, at_q, len_q)?, k.narrow(1, at_k, len_k)?, v.narrow(1, at_k, len_k)?);
        need.push(materialised(&q, &k, &v, SCALE, Scores { bias: Some(&own), ..Scores::CAUSAL })?.0);
    }
    let need = Tensor::cat(&need, 1)?.squeeze(0)?;
    assert_close("packed", &out, &need, 2e-6);
    let inputs = [&vars[0], &vars[1], &vars[2], bias];
    let pairs = gradients(&out, &weights, &inputs)?.into_iter().zip(gradients(&need, &weights, &inputs)?);
    for (index, (got, need)) in pairs.enumerate() {
        assert_close(&format!("packed: gradient {index}"), &got, &need, 1e-5);
    }
    // The same keys in pages of 2, which lie in another order.
    let order = starts(&[2, 3, 0, 1, 8, 9, 4, 5, 6, 7])?;
    let pages = |x: &Tensor| x.detach().index_select(&order, 0)?.reshape((5, 2, 2, 8));
    let block_table = &Tensor::new(&[[1u32, 0, 0], [3, 4, 2]], &Device::Cpu)?;
    let rows = Rows::Paged { seqlens_q, seqlens_k, block_table, max_seqlen_q: 5, max_seqlen_k: 6 };
    let fixed = &bias.detach();
    let out =
        attention(&q.detach(), &pages(&k)?, &pages(&v)?, &options.with_bias(Some(fixed)).with_rows(rows))?;
    assert_close("paged", &out, &need, 2e-6);
    // A mask of padding is what keys in use are.
    let (q, k) = (values((2, 4, 4, 8), 102), values((2, 6, 2, 8), 103));
    let used = &starts(&[6, 3])?;
    let mask = tensor((0..12).map(|at| u8::from(at % 6 < [6, 3][at / 6])).collect(), [2, 1, 1, 6]);
    let masked = attention(&q, &k, &k, &Options::full(SCALE).with_mask(Some(&mask)))?;
    let rows = Rows::Padded { used_q: None, used_k: Some(used) };
    assert_close("padded", &masked, &attention(&q, &k, &k, &Options::full(SCALE).with_rows(rows))?, 2e-6);
    // With both a bias' gradient is 0 at keys out of use.
    let bias = &Var::from_tensor(&values((2, 1, 1, 6), 104))?;
    let out = attention(&q, &k, &k, &Options::full(SCALE).with_rows(rows).with_bias(Some(bias)))?;
    let dbias = out.sqr()?.sum_all()?.backward()?.get(bias).expect("a gradient").squeeze(1)?.squeeze(1)?;
    let dbias = dbias.to_vec2::<f32>()?;
    assert!(dbias[1][3..].iter().all(|x| *x == 0.0) && dbias[1][..3].iter().all(|x| *x != 0.0), "{dbias:?}");
    Ok(())
}

#[test]
fn half_types_and_no_scores_are_taken() -> Result<()> {
    let half = |x: Tensor| x.to_dtype(DType::BF16);
    let (q, k) = (values((1, 7, 4, 16), 1), values((1, 7, 2, 16), 2));
    let bias = values((1, 4, 7, 7), 3);
    let (q, k, bias) = (half(q)?, half(k)?, half(bias)?);
    let out = attention(&q, &k, &k, &Options::causal(SCALE).with_bias(Some(&bias)))?;
    let [q, k, bias] = [q, k, bias].map(|x| x.to_dtype(DType::F32).unwrap());
    let need = materialised(&q, &k, &k, SCALE, Scores { bias: Some(&bias), ..Scores::CAUSAL })?.0;
    assert_close("bf16", &out, &need, 0.01);
    let none = Tensor::zeros((1, 0, 2, 16), DType::F32, &Device::Cpu)?;
    let mask = Tensor::zeros((1, 1, 7, 0), DType::U8, &Device::Cpu)?;
    let (out, lse) = attention_with_lse(&q, &none, &none, &Options::full(SCALE).with_mask(Some(&mask)))?;
    assert_eq!(out.abs()?.sum_all()?.to_scalar::<f32>()?, 0.0);
    assert_eq!(lse.max_all()?.to_scalar::<f32>()?, f32::NEG_INFINITY);
    Ok(())
}

#[test]
fn what_does_not_fit_is_named() -> Result<()> {
    let x = values((1, 8, 4, 16), 1);
    let options = Options::full(SCALE);
    #[track_caller]
    fn refused(result: Result<Tensor>, parts: &[&str]) {
        let text = result.expect_err("must be refused").to_string();
        for part in parts {
            assert!(text.contains(part), "'{text}' does not say '{part}'");
        }
    }
    let call = |options: &Options<'_>| attention(&x, &x, &x, options);
    let zeros = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, &Device::Cpu).unwrap();
    let of_mask = |dims: &[usize], dtype| call(&options.with_mask(Some(&zeros(dims, dtype))));
    let of_bias = |dims: &[usize], dtype| call(&options.with_bias(Some(&zeros(dims, dtype))));
    let shape = "(batch 1, heads 4, queries 8, keys 8)";
    refused(of_mask(&[1, 1, 8, 7], DType::U8), &["mask has the shape [1, 1, 8, 7]", shape]);
    refused(of_mask(&[1, 1, 1, 8, 8], DType::U8), &["mask has the shape [1, 1, 1, 8, 8]", shape]);
    refused(of_mask(&[2, 1, 8, 8], DType::U8), &["mask has the shape [2, 1, 8, 8]"]);
    refused(of_mask(&[8, 8], DType::U32), &["mask holds U32", "u8", "comparisons"]);
    refused(of_bias(&[8, 8], DType::U8), &["bias holds U8", "f32, f16 or bf16"]);
    refused(of_bias(&[3, 8, 8], DType::F32), &["bias has the shape [3, 8, 8]", shape]);
    let var = Var::from_tensor(&values((8, 8), 2))?;
    refused(call(&options.with_mask(Some(&var))), &["mask requires a gradient", "bias"]);
    refused(
        call(&options.with_bias(Some(&var.detach())).with_softcap(Some(2.0))),
        &["softcap", "program that changes scores"],
    );
    let text = "array t: f32[_]; scalar w: i32; mask = k // w == q // w; score = s + t[h];";
    let program = Program::new(text)?;
    let full = program.clone().with_array("t", &values(4, 3)).with_scalar("w", 4);
    call(&options.with_program(Some(&full)))?;
    let of = |program: &Program| call(&options.with_program(Some(program)));
    refused(of(&program), &["`t` is missing", "with_array"]);
    refused(of(&program.clone().with_array("t", &values(4, 3))), &["`w` is missing", "with_scalar"]);
    refused(of(&full.clone().with_array("u", &x)), &["`u` is no array", "t"]);
    refused(of(&full.clone().with_scalar("u", 1)), &["`u` is no scalar", "w"]);
    refused(of(&full.clone().with_scalar("w", 0.5)), &["`w` is 0.5", "i32"]);
    refused(of(&full.clone().with_scalar("w", 0)), &["`w` is 0", "positive"]);
    refused(of(&full.clone().with_scalar("w", f32::NAN)), &["`w` is NaN"]);
    refused(of(&full.clone().with_array("t", &values((4, 1), 3))), &["`t` has the shape [4, 1]", "1 axes"]);
    refused(of(&full.clone().with_array("t", &zeros(&[4], DType::U8))), &["`t` holds U8", "F32"]);
    refused(of(&full.clone().with_array("t", &zeros(&[0], DType::F32))), &["`t`", "no element"]);
    let slopes = Var::from_tensor(&values(4, 3))?;
    refused(of(&full.with_array("t", &slopes)), &["`t` requires a gradient", "grad"]);
    let own =
        Program::new("array fa_mask: f32[_]; score = s + fa_mask[h];")?.with_array("fa_mask", &values(4, 3));
    call(&options.with_program(Some(&own)))?;
    let mask = &zeros(&[8, 8], DType::F32);
    refused(call(&options.with_program(Some(&own)).with_mask(Some(mask))), &["fa_mask"]);
    let error = Program::new("mask = k <= qq;").expect_err("refused").to_string();
    assert!(error.contains("unknown name `qq`") && error.contains("column 13"), "{error}");
    Ok(())
}
