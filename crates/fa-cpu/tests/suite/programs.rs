//! Masks, biases and changes of scores by programs: the tiled path against the oracle in each form of a
//! batch, and the oracle against what has a name of its own.

use fa_core::program::{BiasElement, Interned, OwnedArray, OwnedData, OwnedInputs, Program, Standard};
use fa_core::{Dtype, Lengths, Mask, Problem, ScoreMod, TensorLayout, Types};
use fa_cpu::check::{k_shape, lse_len, out_shape, q_shape, v_shape};
use fa_cpu::compare::{compare, compare_lse};
use fa_cpu::reference::{self, low_precision};
use fa_cpu::tiled::{BackwardInputs, Options, backward_program, forward_extras};
use fa_cpu::{Arguments, Element, OwnedExtras, TensorMut};

use crate::inputs::{Inputs, Views, assert_close, bshd};
use crate::varied::{Lie, inputs, problem};

/// Queries and keys of sequences, some without any.
const LENS: [(usize, usize); 4] = [(13, 29), (0, 5), (7, 0), (31, 17)];

fn interned(text: &str) -> Interned {
    let program = Program::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
    program.intern().unwrap()
}

fn scored(text: &str) -> ScoreMod {
    ScoreMod::NONE.with_program(Some(interned(text)))
}

/// The programs that need no text, and a general one of each kind; the mask that joins them.
fn programs() -> Vec<(String, Mask)> {
    let bias = |element| Standard::Bias { element, gradient: true }.text();
    let own = |text: &str| text.to_owned();
    vec![
        (Standard::Rows.text(), Mask::FULL),
        (Standard::TwoRows.text(), Mask::CAUSAL),
        (Standard::Bits.text(), Mask::FULL),
        (Standard::Chunk.text(), Mask::CAUSAL.with_offset(3)),
        (bias(BiasElement::F32), Mask::FULL),
        (bias(BiasElement::F16), Mask::CAUSAL),
        (bias(BiasElement::Bf16), Mask::window(9, 2)),
        (own("scalar c: f32; score = c * tanh(s / c);"), Mask::FULL),
        (own("array w: f32[_] grad; score = s * w[h] - 0.0625 * f32(abs(q + off - k));"), Mask::CAUSAL),
        (own("array t: f32[_, _] grad; mask = k % 3 != 1; score = s + t[hk, k];"), Mask::FULL),
        (own("array t: f32[_, _] grad; score = s + t[h, min(max(q + off - k, 0), 7)];"), Mask::FULL),
        (
            own("array t: f32[_, _] grad; score = s + t[h, k]; weight = select((q + k) % 3 == h, 0.0, 1.5);"),
            Mask::FULL,
        ),
    ]
}

/// What a backend makes of a problem.
struct Found {
    out: Vec<f64>,
    lse: Vec<f64>,
    gradients: [Vec<f64>; 3],
    darrays: Vec<Vec<f64>>,
}

/// What the tiled path makes of it, with NaN in what it does not write.
fn tiled<T: Element>(problem: &Problem, arguments: &Arguments<'_>, inputs: &Inputs<T>) -> Found {
    fn writable<T: Element>(data: &mut [T], shape: [usize; 4]) -> TensorMut<'_, T> {
        TensorMut::packed("output", data, shape, TensorLayout::Bshd).unwrap()
    }
    let Views { q, k, v, dout } = inputs.views(problem);
    let poisoned = |shape: [usize; 4]| vec![T::from_f64(f64::NAN); shape.iter().product()];
    let (mut out, mut lse) = (poisoned(out_shape(problem)), vec![f32::NAN; lse_len(problem)]);
    let mut to = writable(&mut out, out_shape(problem));
    let options = Options::default();
    forward_extras(options, problem, arguments, &q, &k, &v, &mut to, Some(&mut lse)).unwrap();
    let [mut dq, mut dk, mut dv] = [q_shape(problem), k_shape(problem), v_shape(problem)].map(poisoned);
    let of_out = bshd("out", &out, out_shape(problem));
    let given = BackwardInputs { q, k, v, out: of_out, lse: &lse, dout };
    let mut darrays = Vec::new();
    let (to_dq, to_dk, to_dv) = (
        &mut writable(&mut dq, q_shape(problem)),
        &mut writable(&mut dk, k_shape(problem)),
        &mut writable(&mut dv, v_shape(problem)),
    );
    let sums = Some(&mut darrays);
    backward_program(options, problem, arguments, &given, to_dq, to_dk, to_dv, None, sums).unwrap();
    let wide = |values: Vec<T>| values.into_iter().map(T::to_f64).collect();
    let single = |values: Vec<f32>| values.into_iter().map(f64::from).collect();
    Found {
        out: wide(out),
        lse: single(lse),
        gradients: [dq, dk, dv].map(wide),
        darrays: darrays.into_iter().map(single).collect(),
    }
}

/// The tiled path against the oracle, by the tolerance rule; rows of no sequence stay NaN in both.
pub(crate) fn check<T: Element + std::fmt::Debug>(problem: &Problem, owned: &OwnedExtras, seed: u64) {
    let plain = problem.with_score(ScoreMod::NONE);
    let inputs = inputs::<T>(&plain, &owned.view(), seed);
    let program = problem.score.program.unwrap();
    let mut drawn = OwnedInputs::drawn(problem, seed).unwrap();
    hide_some(&mut drawn);
    let own = drawn.view(&program).unwrap();
    let arguments = Arguments { extras: owned.view(), program: Some(&own), ..Arguments::default() };
    let Views { q, k, v, dout } = inputs.views(problem);
    let exact = reference::forward_extras(problem, arguments, &q, &k, &v).unwrap();
    let low = low_precision::forward_extras(problem, arguments, &q, &k, &v).unwrap();
    let of_exact = reference::backward_extras(problem, arguments, &q, &k, &v, &dout).unwrap();
    let of_low = low_precision::backward_extras(problem, arguments, &q, &k, &v, &dout).unwrap();
    let got = tiled(problem, &arguments, &inputs);
    let dtype = problem.types.q;
    let tensor = |what: &str, shape, got: &[f64], exact: &[f64], low: &[T], noise: f64| {
        let got: Vec<T> = got.iter().map(|&value| T::from_f64(value)).collect();
        // An output rounded to 16 bits enters dS.
        let rounding = if dtype == Dtype::F32 { 1e-6 } else { 2.0 * dtype.unit_roundoff() };
        let largest = exact.iter().filter(|x| x.is_finite()).fold(1f64, |max, x| max.max(x.abs()));
        let found = compare(shape, dtype, &got, exact, Some(low)).unwrap();
        let found = found.allowing(noise.max(rounding * largest));
        assert!(found.passed(), "{what} of {problem:?} under {program}: {found}");
    };
    tensor("out", out_shape(problem), &got.out, &exact.out, &low.out, exact.out_noise);
    let [batch, seqlen, heads, _] = q_shape(problem);
    let lse: Vec<f32> = got.lse.iter().map(|&value| value as f32).collect();
    let found = compare_lse([batch, heads, seqlen], dtype, &lse, &exact.lse).unwrap();
    assert!(found.passed(), "lse of {problem:?} under {program}: {found}");
    let [dq, dk, dv] = &got.gradients;
    tensor("dq", q_shape(problem), dq, &of_exact.dq, &of_low.dq, of_exact.dq_noise);
    tensor("dk", k_shape(problem), dk, &of_exact.dk, &of_low.dk, of_exact.dk_noise);
    tensor("dv", v_shape(problem), dv, &of_exact.dv, &of_low.dv, of_exact.dv_noise);
    assert_eq!(got.darrays.len(), program.arrays().len());
    for ((decl, got), exact) in program.arrays().iter().zip(&got.darrays).zip(&of_exact.darrays) {
        assert_eq!(got.is_empty(), !decl.gradient, "{}", decl.name);
        let rounding = if dtype == Dtype::F32 { 1e-5 } else { 8.0 * dtype.unit_roundoff() };
        assert_close(&format!("gradient of {} under {program}", decl.name), got, exact, rounding);
        assert!(got.iter().all(|value| value.is_finite()), "{}", decl.name);
    }
}

/// Every ninth element of a bias hides its key, and all of the first thirty do.
fn hide_some(drawn: &mut OwnedInputs) {
    let hides = |at: usize| at.is_multiple_of(9) || at < 30;
    for array in drawn.arrays.iter_mut().filter(|array| array.extents.iter().all(|&extent| extent > 0)) {
        match &mut array.data {
            OwnedData::F32(data) if data.len() > 1000 => {
                data.iter_mut()
                    .enumerate()
                    .filter(|(at, _)| hides(*at))
                    .for_each(|(_, x)| *x = f32::NEG_INFINITY);
            }
            OwnedData::F16(data) if data.len() > 1000 => {
                data.iter_mut().enumerate().filter(|(at, _)| hides(*at)).for_each(|(_, x)| *x = 0xfc00);
            }
            OwnedData::Bf16(data) if data.len() > 1000 => {
                data.iter_mut().enumerate().filter(|(at, _)| hides(*at)).for_each(|(_, x)| *x = 0xff80);
            }
            OwnedData::F32(_)
            | OwnedData::F16(_)
            | OwnedData::Bf16(_)
            | OwnedData::I32(_)
            | OwnedData::U8(_)
            | OwnedData::Bool(_)
            | OwnedData::Bits(_) => {}
        }
    }
}

#[test]
fn programs_are_as_the_oracle_has_them_in_every_form_of_a_batch() {
    for (turn, (text, mask)) in programs().iter().enumerate() {
        let heads = [(4, 2), (3, 3), (4, 1)][turn % 3];
        let base = Problem::new(Lengths::uniform(2, 29, 37), heads, (16, 8), Types::same(Dtype::F32))
            .with_mask(*mask)
            .with_score(scored(text));
        let seed = turn as u64;
        check::<f32>(&base, &OwnedExtras::NONE, seed);
        check::<half::bf16>(&base.with_types(Types::same(Dtype::Bf16)), &OwnedExtras::NONE, seed);
        for lies in [[Lie::Packed, Lie::Packed], [Lie::Padded, Lie::PackedUsed]] {
            let (varied, owned) = problem(base, &LENS, lies, seed);
            check::<f32>(&varied, &owned, seed);
        }
    }
}

#[test]
fn tiles_that_a_program_leaves_empty_partial_and_whole_are_as_the_oracle_has_them() {
    let bias = Standard::Bias { element: BiasElement::F32, gradient: true }.text();
    for (turn, (text, mask)) in [
        ("mask = q // 80 == k // 80;", Mask::FULL),
        ("array t: f32[_, _] grad; mask = k <= q; score = s + t[h, max(q - k, 0)];", Mask::window(150, 40)),
        ("array r: f32[_, _] grad; array c: f32[_] grad; score = s * sigmoid(r[h, q]) + c[k];", Mask::CAUSAL),
        ("array w: f32[_] grad; mask = k % 160 < 130 or q > 200; score = w[b] * tanh(s * 0.5);", Mask::FULL),
        (bias.as_str(), Mask::CAUSAL.with_offset(-60)),
    ]
    .into_iter()
    .enumerate()
    {
        let problem = Problem::new(Lengths::uniform(2, 230, 330), (2, 1), (16, 16), Types::same(Dtype::F32))
            .with_mask(mask)
            .with_score(scored(text));
        check::<f32>(&problem, &OwnedExtras::NONE, turn as u64);
    }
}

#[test]
fn rows_under_the_lowest_bias_have_the_probabilities_of_their_scores() {
    let text = "array m: f32[_, _]; score = s + m[q, k];";
    let problem = Problem::new(Lengths::uniform(1, 4, 6), (2, 1), (8, 8), Types::same(Dtype::F32))
        .with_score(scored(text));
    let inputs = Inputs::<f32>::random(&problem, 9);
    let Views { q, k, v, dout } = inputs.views(&problem);
    let program = problem.score.program.unwrap();
    let mut drawn = OwnedInputs::drawn(&problem, 9).unwrap();
    for lowest in [f32::MIN, -1e9] {
        let OwnedData::F32(bias) = &mut drawn.arrays[0].data else { panic!("a bias of f32") };
        let columns = bias.len() / 4;
        bias[..columns].fill(lowest);
        let own = drawn.view(&program).unwrap();
        let arguments = Arguments { program: Some(&own), ..Arguments::default() };
        let got = tiled(&problem, &arguments, &inputs);
        // Beside 1e9 an f32 score is nothing, as in every f32 softmax: the row is the mean.
        let single =
            reference::low_precision::backward_extras(&problem, arguments, &q, &k, &v, &dout).unwrap();
        let means = |dim: usize| (0..6).map(|key| f64::from(inputs.v[key * 8 + dim])).sum::<f64>() / 6.0;
        let mean: Vec<f64> = (0..8).map(means).collect();
        assert_close("the mean", &got.out[..8], &mean, 1e-5);
        let dv: Vec<f64> = single.dv.iter().map(|&value| f64::from(value)).collect();
        assert_close(&format!("dv beside {lowest}"), &got.gradients[2], &dv, 1e-4);
    }
}

/// The oracle's forward and gradients of a program, the bits of a given `problem`.
fn oracle(problem: &Problem, drawn: Option<&OwnedInputs>, inputs: &Inputs<f64>) -> Found {
    let own = drawn.zip(problem.score.program).map(|(drawn, program)| drawn.view(&program).unwrap());
    let arguments = Arguments { program: own.as_ref(), ..Arguments::default() };
    let Views { q, k, v, dout } = inputs.views(problem);
    let forward = reference::forward_extras(problem, arguments, &q, &k, &v).unwrap();
    let found = reference::backward_extras(problem, arguments, &q, &k, &v, &dout).unwrap();
    Found {
        out: forward.out,
        lse: forward.lse,
        gradients: [found.dq, found.dk, found.dv],
        darrays: found.darrays,
    }
}

fn assert_same(what: &str, got: &Found, want: &Found) {
    assert_close(what, &got.out, &want.out, 1e-12);
    assert_close(what, &got.lse, &want.lse, 1e-12);
    for (got, want) in got.gradients.iter().zip(&want.gradients) {
        assert_close(what, got, want, 1e-12);
    }
}

#[test]
fn a_program_is_what_it_says_where_that_has_a_name() {
    let base = Problem::new(Lengths::uniform(2, 11, 17), (4, 2), (8, 8), Types::same(Dtype::F32));
    let inputs = Inputs::<f64>::random(&base, 3);
    let moved = |mask: Mask| mask.with_offset(-2);
    for (text, with_program, named) in [
        ("score = 2.0 * tanh(s / 2.0);", Mask::FULL, base.with_score(ScoreMod::softcap(2.0))),
        ("mask = k <= q + off;", Mask::FULL, base.with_mask(Mask::CAUSAL)),
        ("mask = -2 <= k - q - off <= 3;", Mask::FULL, base.with_mask(Mask::window(2, 3))),
        ("mask = k <= q + off;", moved(Mask::FULL), base.with_mask(moved(Mask::CAUSAL))),
        ("mask = -2 <= k - q - off <= 3;", moved(Mask::FULL), base.with_mask(moved(Mask::window(2, 3)))),
        ("score = 0.5 * s;", Mask::FULL, base.with_softmax_scale(Some(0.5 * base.scale()))),
    ] {
        let own = base.with_mask(with_program).with_score(scored(text));
        let drawn = OwnedInputs::drawn(&own, 0);
        assert_same(text, &oracle(&own, drawn.as_ref(), &inputs), &oracle(&named, None, &inputs));
    }
}

#[test]
fn what_lies_at_hidden_places_has_no_influence() {
    let text = "array t: f32[_, _] grad; mask = k % 3 != 1 and q != 2; score = s * 2.0 + t[q, k];";
    let problem = Problem::new(Lengths::uniform(1, 9, 14), (2, 1), (8, 4), Types::same(Dtype::F32))
        .with_score(scored(text));
    let clean = Inputs::<f64>::random(&problem, 5);
    let drawn = OwnedInputs::drawn(&problem, 5).unwrap();
    let (mut dirty, mut wild) = (clean.clone(), drawn.clone());
    for key in (0..14).filter(|key| key % 3 == 1) {
        dirty.k[key * 8..][..8].fill(f64::NAN);
        dirty.v[key * 4..][..4].fill(f64::INFINITY);
    }
    let OwnedData::F32(bias) = &mut wild.arrays[0].data else { panic!("a bias of f32") };
    let hidden = |at: usize| at % 14 % 3 == 1 || at / 14 == 2;
    bias.iter_mut().enumerate().filter(|(at, _)| hidden(*at)).for_each(|(_, value)| *value = f32::NAN);
    let (want, got) = (oracle(&problem, Some(&drawn), &clean), oracle(&problem, Some(&wild), &dirty));
    assert_same("hidden places", &got, &want);
    assert_close("the bias's gradient", &got.darrays[0], &want.darrays[0], 1e-12);
    assert!(got.darrays[0].iter().enumerate().all(|(at, &value)| hidden(at) == (value == 0.0)));
    // The query without a key.
    assert_eq!(got.out[2 * 2 * 4..][..8], [0.0; 8]);
    assert_eq!([got.lse[2], got.lse[9 + 2]], [f64::NEG_INFINITY; 2]);
    assert_eq!(got.gradients[0][2 * 2 * 8..][..16], [0.0; 16]);
    let single: Inputs<f32> = Inputs {
        q: dirty.q.iter().map(|&x| x as f32).collect(),
        k: dirty.k.iter().map(|&x| x as f32).collect(),
        v: dirty.v.iter().map(|&x| x as f32).collect(),
        dout: dirty.dout.iter().map(|&x| x as f32).collect(),
    };
    let program = wild.view(&problem.score.program.unwrap()).unwrap();
    let arguments = Arguments { program: Some(&program), ..Arguments::default() };
    let found = tiled(&problem, &arguments, &single);
    assert_close("tiled", &found.out, &want.out, 1e-5);
    assert_close("tiled", &found.darrays[0], &want.darrays[0], 1e-5);
    found
        .gradients
        .iter()
        .zip(&want.gradients)
        .for_each(|(got, want)| assert_close("tiled", got, want, 1e-5));
}

#[test]
fn the_gradient_of_an_array_is_zero_where_there_is_no_sequence() {
    let starts =
        OwnedExtras { cu_seqlens_q: Some(vec![0]), cu_seqlens_k: Some(vec![0]), ..OwnedExtras::NONE };
    let forms = [
        (Lengths::uniform(0, 3, 4), OwnedExtras::NONE),
        (Lengths::uniform(0, 0, 0), OwnedExtras::NONE),
        (Lengths::packed(0, 0, 0, 0, 0), starts),
    ];
    for (lengths, owned) in forms {
        let problem = Problem::new(lengths, (2, 1), (8, 8), Types::same(Dtype::F32))
            .with_score(scored("array t: f32[_] grad; array u: f32[_]; score = s + t[h] * u[h];"));
        let program = problem.score.program.unwrap();
        let array = |values| OwnedArray {
            data: OwnedData::F32(values),
            strides: [1, 0, 0, 0],
            extents: [2, 1, 1, 1],
        };
        let drawn =
            OwnedInputs { arrays: vec![array(vec![1.0, 2.0]), array(vec![3.0, 4.0])], scalars: vec![] };
        let own = drawn.view(&program).unwrap();
        let arguments = Arguments { extras: owned.view(), program: Some(&own), ..Arguments::default() };
        let found = tiled(&problem, &arguments, &Inputs::<f32>::random(&problem, 1));
        assert_eq!(found.darrays, [vec![0.0, 0.0], vec![]], "{lengths:?}");
    }
}
