//! K and V in codes: the oracle against itself on decoded tensors, the tiled implementation against the
//! oracle, and what other implementations get wrong.

use fa_core::quantize::{Codes, Scales, amax, reciprocal};
use fa_core::{
    Alibi, Append, CacheCodes, DescaleForm, Descales, Dtype, Extra, Lengths, Mask, Pass, Problem, Rotary,
    RotaryPairs, ScoreMod, Side, TensorLayout, Types,
};
use fa_cpu::append::{CacheMut, append};
use fa_cpu::batch::Batch;
use fa_cpu::check::{k_shape, lse_len, out_shape, q_shape, v_shape};
use fa_cpu::compare::{compare, compare_lse};
use fa_cpu::reference::{self, low_precision};
use fa_cpu::simd::Isa;
use fa_cpu::tiled::{Options, forward_extras};
use fa_cpu::{AppendExtras, AppendTensors, CpuError, Element, Extras, OwnedExtras, Table, TensorMut};
use half::{bf16, f16};

use crate::inputs::{Inputs, Random, bshd};
use crate::varied::{Lie, MASKS, inputs, problem, rows_of};

/// Q, and K and V in codes.
struct Case<T> {
    problem: Problem,
    extras: OwnedExtras,
    q: Vec<T>,
    k: Vec<u8>,
    v: Vec<u8>,
}

impl<T: Element> Case<T> {
    /// Random codes and descales; those of no sequence's rows are NaN.
    fn random((problem, mut extras): (Problem, OwnedExtras), seed: u64) -> Case<T> {
        let codes = Codes::of(problem.types.kv).unwrap();
        let plain = problem.with_descales(Descales::NONE);
        let given = inputs::<T>(&plain, &extras.view(), seed);
        let [_, owned] = rows_of(&plain, &extras.view());
        let mut random = Random::new(seed + 1);
        // The byte of rows that no sequence has: NaN, or the lowest codes.
        let poison = match codes {
            Codes::E4m3 | Codes::E5m2 => 0x7F,
            Codes::Int8 => 0x80,
            Codes::Int4 => 0x88,
        };
        let spread = if codes == Codes::Int4 { 3.0 } else { 40.0 };
        let mut draw = |shape: [usize; 4]| -> Vec<u8> {
            let row = shape[2] * shape[3];
            let mut code = |at: usize| match owned[at / row] {
                true => {
                    let values = [(); 2].map(|()| random.normal() as f32);
                    let mut bytes = codes.pack(&values[..codes.per_byte()], codes.largest() / spread);
                    bytes.next().unwrap()
                }
                false => poison,
            };
            (0..shape.iter().product()).map(&mut code).collect()
        };
        let (k, v) = (draw(k_shape(&problem)), draw(v_shape(&problem)));
        let mut descale = |extra: Extra, form: DescaleForm| {
            let need = extra.need(&problem, Pass::Forward)?;
            let heads = problem.heads_kv;
            let one = |at: usize| match form == DescaleForm::TokenHead && !owned[at / heads] {
                true => f32::NAN,
                false => (0.5 * spread / codes.largest()) * (0.25 + random.uniform() as f32),
            };
            Some((0..need.len).map(one).collect())
        };
        extras.k_descale = descale(Extra::KDescale, problem.descales.k);
        extras.v_descale = descale(Extra::VDescale, problem.descales.v);
        Case { problem, extras, q: given.q, k, v }
    }

    fn exact(&self) -> reference::Forward {
        let Case { problem, extras, q, k, v } = self;
        let q = bshd("q", q, q_shape(problem));
        let (k, v) = (bshd("k", k, k_shape(problem)), bshd("v", v, v_shape(problem)));
        reference::forward_extras(problem, &extras.view(), &q, &k, &v).unwrap()
    }

    fn tiled(&self, isa: Option<Isa>) -> (Vec<T>, Vec<f32>) {
        let Case { problem, extras, q, k, v } = self;
        let q = bshd("q", q, q_shape(problem));
        let (k, v) = (bshd("k", k, k_shape(problem)), bshd("v", v, v_shape(problem)));
        let shape = out_shape(problem);
        let mut out = vec![T::from_f64(f64::NAN); shape.iter().product()];
        let mut lse = vec![f32::NAN; lse_len(problem)];
        let mut to = TensorMut::packed("out", &mut out, shape, fa_core::TensorLayout::Bshd).unwrap();
        let options = Options { isa, threads: None };
        forward_extras(options, problem, &extras.view(), &q, &k, &v, &mut to, Some(&mut lse)).unwrap();
        (out, lse)
    }

    /// K and V in f64, and the problem of those.
    fn decoded(&self) -> (Problem, OwnedExtras, [Vec<f64>; 3]) {
        let Case { problem, extras, q, k, v } = self;
        let codes = Codes::of(problem.types.kv).unwrap();
        let batch = Batch::new(problem, &extras.view()).unwrap();
        let of = |bits: &[u8], shape: [usize; 4], form, descales: &Option<Vec<f32>>| {
            let [_, rows, heads, dim] = shape;
            let mut numbers = vec![f64::NAN; bits.len() * codes.per_byte()];
            for (s, sequence) in batch.sequences.iter().enumerate() {
                for (key, h) in (0..sequence.k.len).flat_map(|key| (0..heads).map(move |h| (key, h))) {
                    let (outer, inner) = batch.key(s, key);
                    let row = (outer * rows + inner) * heads + h;
                    let descale = match form {
                        DescaleForm::None => 1.0,
                        DescaleForm::Head => descales.as_ref().unwrap()[h],
                        DescaleForm::SequenceHead => descales.as_ref().unwrap()[s * heads + h],
                        DescaleForm::TokenHead => descales.as_ref().unwrap()[row],
                    };
                    let of_row = codes.numbers(&bits[row * dim..][..dim]);
                    let to = numbers[row * dim * codes.per_byte()..].iter_mut();
                    of_row.zip(to).for_each(|(number, to)| *to = f64::from(number) * f64::from(descale));
                }
            }
            numbers
        };
        let k = of(k, k_shape(problem), problem.descales.k, &extras.k_descale);
        let v = of(v, v_shape(problem), problem.descales.v, &extras.v_descale);
        let plain = problem.with_types(Types::same(problem.types.q)).with_descales(Descales::NONE);
        let extras = OwnedExtras { k_descale: None, v_descale: None, ..extras.clone() };
        (plain, extras, [q.iter().map(|value| value.to_f64()).collect(), k, v])
    }

    /// The oracle is that of decoded tensors, and every instruction set is within its tolerance.
    fn check(&self) {
        let Case { problem, .. } = self;
        let exact = self.exact();
        let (plain, extras, [q, k, v]) = self.decoded();
        let views = [("q", &q, q_shape(&plain)), ("k", &k, k_shape(&plain)), ("v", &v, v_shape(&plain))];
        let [q, k, v] = views.map(|(name, values, shape)| bshd(name, values, shape));
        let whole = reference::forward_extras(&plain, &extras.view(), &q, &k, &v).unwrap();
        let bits = |values: &[f64]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&exact.out), bits(&whole.out), "{problem:?}");
        assert_eq!(bits(&exact.lse), bits(&whole.lse), "{problem:?}");
        let (dtype, shape) = (problem.types.q, out_shape(problem));
        let low = {
            let q = bshd("q", &self.q, q_shape(problem));
            let (k, v) = (bshd("k", &self.k, k_shape(problem)), bshd("v", &self.v, v_shape(problem)));
            low_precision::forward_extras(problem, &self.extras.view(), &q, &k, &v).unwrap()
        };
        let [batch, seqlen, heads, _] = q_shape(problem);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let (out, lse) = self.tiled(Some(isa));
            let verdict = compare(shape, dtype, &out, &exact.out, Some(&low.out)).unwrap();
            let verdict = verdict.allowing(exact.out_noise);
            assert!(verdict.passed(), "out of {problem:?} with {isa}: {verdict}");
            let verdict = compare_lse([batch, heads, seqlen], dtype, &lse, &exact.lse).unwrap();
            assert!(verdict.passed(), "lse of {problem:?} with {isa}: {verdict}");
        }
    }
}

pub(crate) const SCORES: [ScoreMod; 4] = [
    ScoreMod::NONE,
    ScoreMod::NONE.with_sinks(true),
    ScoreMod::NONE.with_alibi(Some(Alibi::PerHead)),
    ScoreMod::NONE.with_softcap(Some(2.5)).with_alibi(Some(Alibi::PerSequenceHead)).with_sinks(true),
];

pub(crate) const LENS: [&[(usize, usize)]; 3] = [
    &[(0, 0), (5, 7), (0, 9), (64, 64), (3, 0), (33, 130), (1, 1)],
    &[(1, 200), (1, 0), (1, 77), (1, 700), (1, 1)],
    &[(70, 300), (130, 33)],
];

#[test]
fn caches_of_every_layout_and_form_are_within_tolerance() {
    let lies = [Lie::Padded, Lie::Packed, Lie::PackedUsed, Lie::Paged(16), Lie::Paged(5), Lie::Paged(1)];
    let mut turn = 0;
    for lens in LENS {
        for lie in lies {
            for (k, v) in [(0, 1), (1, 2), (2, 3), (3, 0), (3, 3)] {
                let [k, v] = [k, v].map(|form: usize| DescaleForm::ALL[form]);
                let q = [Dtype::F16, Dtype::Bf16, Dtype::F32][turn % 3];
                let base = Problem::square(1, 1, 4, [64, 40, 24][turn % 3], MASKS[turn % 7], q)
                    .with_heads_kv([2, 1, 4][turn % 3])
                    .with_head_dim_v([64, 72, 8][turn / 2 % 3])
                    .with_types(Types::same(q).with_kv(Dtype::CODES[(turn + turn / 3) % 3]))
                    .with_descales(Descales::new(k, v))
                    .with_score(SCORES[turn % 4]);
                let of_q = if turn % 2 == 0 { Lie::Packed } else { Lie::Padded };
                let made = problem(base, lens, [of_q, lie], turn as u64);
                match q {
                    Dtype::F16 => Case::<f16>::random(made, turn as u64).check(),
                    Dtype::Bf16 => Case::<bf16>::random(made, turn as u64).check(),
                    Dtype::F32 | Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2 => {
                        Case::<f32>::random(made, turn as u64).check()
                    }
                }
                turn += 1;
            }
        }
    }
}

fn small(kv: Dtype, descales: Descales) -> Problem {
    let types = Types::same(Dtype::Bf16).with_kv(kv);
    let lengths = Lengths::uniform(2, 9, 150);
    Problem::square(2, 9, 4, 32, Mask::CAUSAL, Dtype::Bf16)
        .with_heads_kv(2)
        .with_lengths(lengths)
        .with_types(types)
        .with_descales(descales)
}

/// The same bits as on a cache of Q's type that holds what the codes stand for, which is exact.
#[test]
fn results_have_the_bits_of_a_decoded_cache() {
    let forms = [DescaleForm::None, DescaleForm::Head];
    for (kv, form) in Dtype::CODES.into_iter().flat_map(|kv| forms.map(|form| (kv, form))) {
        for queries in [1, 9, 64] {
            let base = small(kv, Descales::both(form)).with_lengths(Lengths::uniform(2, queries, 150));
            let mut case = Case::<bf16>::random((base, OwnedExtras::NONE), 7);
            // Powers of two, so that descaled values are elements of bf16 as well.
            for descales in [&mut case.extras.k_descale, &mut case.extras.v_descale] {
                *descales = (form == DescaleForm::Head).then(|| vec![0.25, 2.0]);
            }
            let (plain, extras, [_, k, v]) = case.decoded();
            let [k, v] = [k, v].map(|values| values.into_iter().map(bf16::from_f64).collect::<Vec<_>>());
            let (q, k, v) = (
                bshd("q", &case.q, q_shape(&plain)),
                bshd("k", &k, k_shape(&plain)),
                bshd("v", &v, v_shape(&plain)),
            );
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                // 16-bit products take no codes.
                if matches!(isa, Isa::Amx | Isa::Avx512Bf16) && queries > 1 {
                    continue;
                }
                let mut out = vec![bf16::NAN; case.q.len()];
                let mut lse = vec![f32::NAN; lse_len(&plain)];
                let shape = out_shape(&plain);
                let mut to = TensorMut::packed("out", &mut out, shape, fa_core::TensorLayout::Bshd).unwrap();
                let options = Options { isa: Some(isa), threads: None };
                forward_extras(options, &plain, &extras.view(), &q, &k, &v, &mut to, Some(&mut lse)).unwrap();
                assert_eq!((out, lse), case.tiled(Some(isa)), "{kv}, {form}, {queries} queries, {isa}");
            }
        }
    }
}

/// flashinfer#1023: descales that are accepted and not applied. Doubling K's is doubling the softmax scale,
/// and doubling V's doubles O, each exactly.
#[test]
fn each_descale_is_applied() {
    for form in [DescaleForm::Head, DescaleForm::SequenceHead, DescaleForm::TokenHead] {
        for kv in Dtype::CODES {
            let base = small(kv, Descales::both(form));
            let case = Case::<f32>::random(
                (base.with_types(Types::same(Dtype::F32).with_kv(kv)), OwnedExtras::NONE),
                3,
            );
            let doubled = |values: &Option<Vec<f32>>| {
                Some(values.as_ref().unwrap().iter().map(|value| 2.0 * value).collect::<Vec<_>>())
            };
            let with = |extras: OwnedExtras, problem: Problem| {
                let Case { q, k, v, .. } = &case;
                Case { problem, extras, q: q.clone(), k: k.clone(), v: v.clone() }.tiled(None)
            };
            let plain = case.tiled(None);
            let k_descale = doubled(&case.extras.k_descale);
            let of_k = with(OwnedExtras { k_descale, ..case.extras.clone() }, case.problem);
            let scaled = case.problem.with_softmax_scale(Some(2.0 * case.problem.scale()));
            assert_eq!(of_k, with(case.extras.clone(), scaled), "{form}, {kv}");
            assert_ne!(of_k.0, plain.0);
            let v_descale = doubled(&case.extras.v_descale);
            let of_v = with(OwnedExtras { v_descale, ..case.extras.clone() }, case.problem);
            assert_eq!(of_v.0, plain.0.iter().map(|value| 2.0 * value).collect::<Vec<_>>(), "{form}, {kv}");
            assert_eq!(of_v.1, plain.1, "LSE says nothing of V");
        }
    }
}

/// flashinfer#2595: tiny descales gave NaN. 0 for V is an O of 0, and for K uniform weights.
#[test]
fn tiny_descales_and_0_give_numbers() {
    for form in [DescaleForm::Head, DescaleForm::TokenHead] {
        for (of_k, of_v) in [(0.0, 1.0), (1e-23, 1.0), (1.0, 0.0), (1.0, 1e-23), (1.0, 2.0), (0.0, 1e30)] {
            let base = small(Dtype::E4m3, Descales::both(form));
            let mut case = Case::<bf16>::random((base, OwnedExtras::NONE), 11);
            for (descales, value) in [(&mut case.extras.k_descale, of_k), (&mut case.extras.v_descale, of_v)]
            {
                descales.as_mut().unwrap().fill(value);
            }
            case.check();
            let (out, lse) = case.tiled(None);
            assert!(out.iter().all(|value| value.is_finite()), "{form}, {of_k}, {of_v}");
            if of_v == 0.0 {
                assert!(out.iter().all(|&value| value == bf16::ZERO));
            }
            if of_k == 0.0 {
                // The last query of the first head sees 150 keys.
                assert!((lse[8] - 150f32.ln()).abs() < 1e-5);
            }
        }
    }
}

/// mlx#4135: NaN codes that become numbers. Each code is in a key of its own: rows that see a NaN are NaN,
/// others are what the oracle says. NaN of rows that no query sees changes nothing (vllm#57716).
#[test]
fn every_code_is_read_and_nan_reaches_those_who_see_it() {
    for kv in Dtype::CODES {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let types = Types::same(Dtype::F32).with_kv(kv);
            let base = Problem::square(1, 1, 1, 16, Mask::causal_window(0), Dtype::F32)
                .with_lengths(Lengths::uniform(1, 256, 256))
                .with_types(types);
            let own = Codes::of(kv).unwrap();
            // Query i sees key i alone, whose bytes are all i: O is V's codes.
            let codes: Vec<u8> = (0..=255).flat_map(|byte| vec![byte; kv.elements(16)]).collect();
            let ones: Vec<u8> = (0..256).flat_map(|_| own.pack(&[1.0; 16], 1.0)).collect();
            let q: Vec<f32> = vec![0.25; 256 * 16];
            let numbers: Vec<f32> = own.numbers(&codes).collect();
            let same = |got: f32, want: f32| got == want || got.is_nan() && want.is_nan();
            let of_v = Case {
                problem: base,
                extras: OwnedExtras::NONE,
                q: q.clone(),
                k: ones.clone(),
                v: codes.clone(),
            };
            let (out, _) = of_v.tiled(Some(isa));
            for (got, want) in out.iter().zip(&numbers) {
                assert!(same(*got, *want), "{kv} with {isa}: {got} for {want}");
            }
            let of_k = Case { problem: base, extras: OwnedExtras::NONE, q, k: codes, v: ones };
            let (out, lse) = of_k.tiled(Some(isa));
            for ((row, &lse), key) in out.chunks(16).zip(&lse).zip(numbers.chunks(16)) {
                let number = key.iter().sum::<f32>() / 16.0;
                // Of e5m2: a score of -inf hides its key, and of inf there is no difference.
                let want = match number {
                    f32::NEG_INFINITY => 0.0,
                    _ if number < f32::INFINITY => 1.0,
                    _ => f32::NAN,
                };
                assert!(row.iter().all(|&value| same(value, want)), "{kv} with {isa}: {row:?} for {number}");
                if number.is_infinite() {
                    continue;
                }
                assert_eq!(lse.is_nan(), number.is_nan(), "{kv} with {isa}: {lse} for {number}");
                let score = number * 0.25 * 16.0 / 4.0;
                assert!(
                    number.is_nan() || (lse - score).abs() <= score.abs().max(1.0) * 1e-6,
                    "{kv}: {lse}, {score}"
                );
            }
        }
    }
}

/// Changing a token's V, or its descale, changes nothing of the rows before it (TransformerEngine#3248).
#[test]
fn later_tokens_do_not_leak_into_earlier_rows() {
    let lengths = Lengths::uniform(1, 40, 40);
    let base = small(Dtype::E4m3, Descales::both(DescaleForm::TokenHead)).with_lengths(lengths);
    let case = Case::<bf16>::random((base, OwnedExtras::NONE), 5);
    let before = case.tiled(None).0;
    let (mut v, mut extras) = (case.v.clone(), case.extras.clone());
    v[30 * 2 * 32..].fill(0x7E);
    extras.v_descale.as_mut().unwrap()[30 * 2..].fill(1e6);
    let after = Case { v, extras, q: case.q.clone(), k: case.k.clone(), problem: base }.tiled(None).0;
    let row = 4 * 32;
    assert_eq!(before[..30 * row], after[..30 * row]);
    assert_ne!(before[30 * row..], after[30 * row..]);
}

#[test]
fn what_is_not_computed_is_refused_by_name() {
    let problem = small(Dtype::E4m3, Descales::both(DescaleForm::Head));
    let case = Case::<bf16>::random((problem, OwnedExtras::NONE), 1);
    let plain = Inputs::<bf16>::random(&problem, 2);
    let views = plain.views(&problem);
    let (k, v) = (bshd("k", &case.k, k_shape(&problem)), bshd("v", &case.v, v_shape(&problem)));
    let extras = case.extras.view();
    let refused = |found: Result<reference::Forward, CpuError>| found.unwrap_err().to_string();
    let given = |extras: &Extras<'_>| reference::forward_extras(&problem, extras, &views.q, &k, &v);
    assert_eq!(refused(given(&Extras::NONE)), "k_descale is missing: the problem names it");
    let short = Extras { v_descale: Some(&[1.0]), ..extras };
    assert_eq!(refused(given(&short)), "v_descale holds 1 values, the problem needs 2");
    let same = reference::forward_extras(&problem, &extras, &views.q, &views.k, &views.v);
    assert_eq!(refused(same), "tensors hold bf16, the problem's dtype is e4m3");
    let of_bf16 = problem.with_types(Types::same(Dtype::Bf16)).with_descales(Descales::NONE);
    let codes = reference::forward_extras(&of_bf16, &Extras::NONE, &views.q, &k, &v);
    assert!(refused(codes).starts_with("K and V hold codes, the problem's kv_dtype is bf16"));
    let backward = reference::backward(&problem, &views.q, &views.k, &views.v, &views.dout);
    let error = backward.unwrap_err().to_string();
    assert!(error.contains("K and V in codes have no gradients"), "{error}");
}

/// A quantised tensor read with its descales is within half a code's step of what it was.
#[test]
fn quantised_tensors_come_back() {
    let shape = [2, 30, 2, 32];
    let mut random = Random::new(9);
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| random.normal() as f32).collect();
    for (scales, form) in [
        (Scales::Head, DescaleForm::Head),
        (Scales::SequenceHead, DescaleForm::SequenceHead),
        (Scales::TokenHead, DescaleForm::TokenHead),
    ] {
        for kv in Dtype::CODES {
            let made = Codes::of(kv).unwrap().quantize(&values, shape, scales);
            let problem = small(kv, Descales::both(form)).with_lengths(Lengths::uniform(2, 1, 30));
            let extras = OwnedExtras {
                k_descale: Some(made.descales.clone()),
                v_descale: Some(made.descales),
                ..OwnedExtras::NONE
            };
            let q = Inputs::<bf16>::random(&problem, 1).q;
            let case = Case { problem, extras, q, k: made.codes.clone(), v: made.codes };
            let [_, k, _] = case.decoded().2;
            let error =
                k.iter().zip(&values).map(|(k, value)| (k - f64::from(*value)).abs()).fold(0.0, f64::max);
            let most = values.iter().fold(0f32, |most, value| most.max(value.abs()));
            let step = kv.unit_roundoff();
            assert!(error <= f64::from(most) * step * 1.001, "{scales:?}, {kv}: {error}");
            case.check();
        }
    }
}

/// An append to codes writes what quantising the cache of an append to 16 bits gives (the rotated keys too),
/// and touches no other row of codes and descales (sglang#30815).
#[test]
fn appended_rows_are_those_of_a_16_bit_cache_quantised() {
    const DIM: usize = 32;
    let table = [3, 1, 0, 4];
    let (before, mut after) = ([3, 0], [0, 0]);
    let rotary =
        Rotary { dim: 16, pairs: RotaryPairs::Halves, positions: 16, table: Dtype::F32, queries: None };
    let plain = Append {
        sequences: 2,
        new: Side::padded(5),
        cache: Side::paged(4, 5, 8),
        heads_kv: 2,
        head_dim: DIM,
        head_dim_v: DIM,
        dtype: Dtype::Bf16,
        codes: None,
        rotary: Some(rotary),
    };
    let mut random = Random::new(4);
    let mut draw =
        |count: usize| -> Vec<bf16> { (0..count).map(|_| bf16::from_f64(2.0 * random.normal())).collect() };
    let (of_new, of_cache) = (plain.new_shape(DIM), plain.cache_shape(DIM));
    let [k_new, v_new] = [(); 2].map(|()| draw(of_new.iter().product()));
    let angles: Vec<f32> = (0..16 * 8).map(|i| (i as f32 * 0.7).sin()).collect();
    let mut halves = [(); 2].map(|()| vec![bf16::ZERO; of_cache.iter().product()]);
    let layout = TensorLayout::Bshd;
    let mut run = |what: &Append, caches: [CacheMut<'_, bf16>; 2], descales: [Option<&mut [f32]>; 2]| {
        let [k_descale, v_descale] = descales;
        let mut extras = AppendExtras {
            seqused_k: Some(&before),
            page_table: Some(&table),
            used_out: Some(&mut after),
            k_descale,
            v_descale,
            ..AppendExtras::default()
        };
        let [k_cache, v_cache] = caches;
        let mut tensors = AppendTensors {
            k_new: bshd("k_new", &k_new, of_new),
            v_new: bshd("v_new", &v_new, of_new),
            k_cache,
            v_cache,
            q: None,
            tables: Some([Table::F32(&angles), Table::F32(&angles)]),
        };
        append(what, &mut extras, &mut tensors)
    };
    let caches = halves.each_mut().map(|cache| TensorMut::packed("cache", cache, of_cache, layout).unwrap());
    assert_eq!(run(&plain, caches.map(CacheMut::from), [None, None]), Ok(0));
    // Rows of the cache that are written: 5 of each sequence.
    let place =
        |sequence: usize, position: usize| table[sequence * 2 + position / 4] as usize * 4 + position % 4;
    let written: Vec<(usize, usize)> =
        (0..5).flat_map(|t| [(0, place(0, 3 + t)), (1, place(1, t))]).collect();
    for form in DescaleForm::ALL {
        for kind in Codes::ALL {
            let descales = Descales::both(form);
            let what = Append { codes: Some(CacheCodes { kind, descales }), ..plain };
            let (of_codes, bytes) = (what.cache_shape(DIM), DIM / kind.per_byte());
            let mut bits = [(); 2].map(|()| vec![9u8; of_codes.iter().product()]);
            let given: Option<Vec<f32>> = what
                .descale_shape(form)
                .map(|shape| (0..shape.iter().product()).map(|i: usize| 0.01 * (i + 1) as f32).collect());
            let mut own = [given.clone(), given.clone()];
            let caches =
                bits.each_mut().map(|cache| TensorMut::packed("cache", cache, of_codes, layout).unwrap());
            let of_call = own.each_mut().map(Option::as_deref_mut);
            assert_eq!(run(&what, caches.map(CacheMut::from), of_call), Ok(0));
            for ((bits, own), halves) in bits.iter().zip(&own).zip(&halves) {
                for row in 0..20 {
                    let sequence = written.iter().find(|(_, at)| *at == row).map(|(sequence, _)| *sequence);
                    for head in 0..2 {
                        let at = row * 2 + head;
                        let codes = &bits[at * bytes..][..bytes];
                        let Some(sequence) = sequence else {
                            assert!(codes.iter().all(|&code| code == 9));
                            if form == DescaleForm::TokenHead {
                                assert_eq!(own.as_ref().unwrap()[at], given.as_ref().unwrap()[at]);
                            }
                            continue;
                        };
                        let values: Vec<f32> = halves[at * DIM..][..DIM].iter().map(|v| v.to_f32()).collect();
                        let descale = match form {
                            DescaleForm::None => 1.0,
                            DescaleForm::Head => given.as_ref().unwrap()[head],
                            DescaleForm::SequenceHead => given.as_ref().unwrap()[sequence * 2 + head],
                            DescaleForm::TokenHead => kind.descale(amax(&values)),
                        };
                        let expected: Vec<u8> = kind.pack(&values, reciprocal(descale)).collect();
                        assert_eq!(codes, expected, "{form}, {kind:?}, row {row}");
                        if form == DescaleForm::TokenHead {
                            assert_eq!(own.as_ref().unwrap()[at], descale);
                        }
                    }
                }
            }
        }
    }
}
