//! Q, K and V in e4m3: the tiled implementation against the oracle, the oracle against itself on decoded
//! tensors, a kernel's roundings, and what other implementations get wrong.

use fa_core::quantize::{Codes, e4m3};
use fa_core::{DescaleForm, Descales, Dtype, Extra, Lengths, Mask, Pass, Problem, ScoreMod, Types};
use fa_cpu::batch::Batch;
use fa_cpu::check::{k_shape, lse_len, out_shape, q_shape, v_shape};
use fa_cpu::compare::{compare, compare_lse};
use fa_cpu::reference::fp8::{self, Accumulation, AsKernel};
use fa_cpu::reference::{self, Forward};
use fa_cpu::simd::Isa;
use fa_cpu::tiled::{BackwardInputs, Options, backward_with, forward_extras};
use fa_cpu::{CpuError, Element, KvRef, OwnedExtras, TensorMut, TensorRef};
use half::{bf16, f16};

use crate::codes::{LENS, SCORES};
use crate::inputs::{Random, bshd};
use crate::varied::{Lie, MASKS, problem, rows_of};

/// Q, K and V in e4m3.
#[derive(Clone)]
struct Case {
    problem: Problem,
    extras: OwnedExtras,
    q: Vec<u8>,
    k: Vec<u8>,
    v: Vec<u8>,
}

impl Case {
    /// Normally distributed codes and descales from 0.25 to 1.25; the codes of no sequence's rows are NaN.
    fn random((problem, mut extras): (Problem, OwnedExtras), seed: u64) -> Case {
        let [of_q, of_k] = rows_of(&problem.with_descales(Descales::NONE), &extras.view());
        let mut random = Random::new(seed);
        let mut draw = |shape: [usize; 4], owned: &[bool]| -> Vec<u8> {
            let row = shape[2] * shape[3];
            let mut code = |at: usize| match owned[at / row] {
                true => e4m3::encode(random.normal() as f32),
                false => e4m3::NAN,
            };
            (0..shape.iter().product()).map(&mut code).collect()
        };
        let q = draw(q_shape(&problem), &of_q);
        let (k, v) = (draw(k_shape(&problem), &of_k), draw(v_shape(&problem), &of_k));
        let mut descale = |extra: Extra| {
            let need = extra.need(&problem, Pass::Forward)?;
            Some((0..need.len).map(|_| 0.25 + random.uniform() as f32).collect())
        };
        extras.q_descale = descale(Extra::QDescale);
        extras.k_descale = descale(Extra::KDescale);
        extras.v_descale = descale(Extra::VDescale);
        Case { problem, extras, q, k, v }
    }

    fn views(&self) -> [TensorRef<'_, u8>; 3] {
        let Case { problem, q, k, v, .. } = self;
        [bshd("q", q, q_shape(problem)), bshd("k", k, k_shape(problem)), bshd("v", v, v_shape(problem))]
    }

    fn exact(&self) -> Forward {
        let [q, k, v] = self.views();
        let inputs: [KvRef<'_, f64>; 3] = [q, k, v].map(KvRef::Codes);
        reference::forward_extras(&self.problem, &self.extras.view(), inputs[0], inputs[1], inputs[2])
            .unwrap()
    }

    fn as_kernel(&self, how: Accumulation) -> AsKernel {
        let [q, k, v] = self.views();
        fp8::as_kernel(&self.problem, &self.extras.view(), &q, &k, &v, how).unwrap()
    }

    fn tiled<T: Element>(&self, isa: Option<Isa>) -> (Vec<T>, Vec<f32>) {
        let ([q, k, v], shape) = (self.views(), out_shape(&self.problem));
        let problem = self.problem.with_types(Types::fp8(T::DTYPE.unwrap()));
        let mut out = vec![T::from_f64(f64::NAN); shape.iter().product()];
        let mut lse = vec![f32::NAN; lse_len(&problem)];
        let mut to = TensorMut::packed("out", &mut out, shape, fa_core::TensorLayout::Bshd).unwrap();
        let options = Options { isa, threads: None };
        let extras = self.extras.view();
        forward_extras(options, &problem, &extras, &q, &k, &v, &mut to, Some(&mut lse)).unwrap();
        (out, lse)
    }

    /// The numbers of Q: codes times the descale of the K/V head that a query head reads.
    fn queries(&self) -> Vec<f64> {
        let Case { problem, extras, q, .. } = self;
        let ([_, rows, heads, dim], heads_kv) = (q_shape(problem), problem.heads_kv);
        let batch = Batch::new(problem, &extras.view()).unwrap();
        let mut numbers = vec![f64::NAN; q.len()];
        for (s, sequence) in batch.sequences.iter().enumerate() {
            let span = sequence.q;
            for (row, h) in (0..span.len).flat_map(|row| (0..heads).map(move |h| (row, h))) {
                let kv_head = h / (heads / heads_kv);
                let descale = match problem.descales.q {
                    DescaleForm::Head => extras.q_descale.as_ref().unwrap()[kv_head],
                    DescaleForm::SequenceHead => extras.q_descale.as_ref().unwrap()[s * heads_kv + kv_head],
                    DescaleForm::None | DescaleForm::TokenHead => 1.0,
                };
                let start = ((span.batch * rows + span.first + row) * heads + h) * dim;
                for at in start..start + dim {
                    numbers[at] = f64::from(e4m3::decode(q[at])) * f64::from(descale);
                }
            }
        }
        numbers
    }

    fn check_as<T: Element>(&self, exact: &Forward) {
        let (dtype, shape) = (T::DTYPE.unwrap(), out_shape(&self.problem));
        let [batch, seqlen, heads, _] = q_shape(&self.problem);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let (out, lse) = self.tiled::<T>(Some(isa));
            let verdict = compare::<T, f64>(shape, dtype, &out, &exact.out, None).unwrap();
            let verdict = verdict.allowing(exact.out_noise);
            assert!(verdict.passed(), "out of {:?} with {isa}: {verdict}", self.problem);
            let verdict = compare_lse([batch, heads, seqlen], Dtype::Bf16, &lse, &exact.lse).unwrap();
            assert!(verdict.passed(), "lse of {:?} with {isa}: {verdict}", self.problem);
        }
    }

    /// The oracle is that of decoded queries, and every instruction set is within the tolerance of the
    /// output's type; so is a kernel's arithmetic within that of fp8.
    fn check(&self) {
        let (Case { problem, extras, .. }, [_, k, v]) = (self, self.views());
        let exact = self.exact();
        let decoded = problem.with_types(Types::same(Dtype::F32).with_kv(Dtype::E4m3));
        let decoded = decoded.with_descales(problem.descales.with_q(DescaleForm::None));
        let numbers = self.queries();
        let q = bshd("q", &numbers, q_shape(problem));
        let without = OwnedExtras { q_descale: None, ..extras.clone() };
        let whole = reference::forward_extras(&decoded, &without.view(), &q, &k, &v).unwrap();
        let bits = |values: &[f64]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&exact.out), bits(&whole.out), "{problem:?}");
        assert_eq!(bits(&exact.lse), bits(&whole.lse), "{problem:?}");
        match problem.types.out {
            Dtype::F16 => self.check_as::<f16>(&exact),
            Dtype::Bf16 => self.check_as::<bf16>(&exact),
            Dtype::F32 | Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2 => {
                self.check_as::<f32>(&exact)
            }
        }
        let kernel = self.as_kernel(Accumulation::exact(32));
        let [batch, seqlen, heads, _] = q_shape(problem);
        let verdict = compare_lse([batch, heads, seqlen], Dtype::Bf16, &kernel.lse, &exact.lse).unwrap();
        assert!(verdict.passed(), "lse of {problem:?} as a kernel: {verdict}");
        let other = self.as_kernel(Accumulation { truncates: true, ..Accumulation::exact(64) });
        let verdict =
            compare(out_shape(problem), Dtype::Bf16, &other.out, &exact.out, Some(&kernel.out)).unwrap();
        let verdict = verdict.allowing(kernel.tolerance(&exact.out));
        assert!(verdict.passed(), "out of {problem:?} as a kernel: {verdict}");
    }
}

#[test]
fn every_layout_and_form_is_within_tolerance() {
    let lies = [Lie::Padded, Lie::Packed, Lie::PackedUsed, Lie::Paged(16), Lie::Paged(5), Lie::Paged(1)];
    let mut turn = 0;
    for lens in LENS {
        for lie in lies {
            for [q, k, v] in [[0, 0, 1], [1, 1, 2], [2, 2, 0], [2, 3, 3]] {
                let [q, k, v] = [q, k, v].map(|form: usize| DescaleForm::ALL[form]);
                let base = Problem::square(1, 1, 4, [64, 40, 24][turn % 3], MASKS[turn % 7], Dtype::E4m3)
                    .with_heads_kv([2, 1, 4][turn % 3])
                    .with_head_dim_v([64, 72, 8][turn / 2 % 3])
                    .with_types(Types::fp8(Dtype::COMPUTED[turn % 3]))
                    .with_descales(Descales::new(k, v).with_q(q))
                    .with_score(SCORES[turn % 4]);
                let of_q = if turn % 2 == 0 { Lie::Packed } else { Lie::Padded };
                Case::random(problem(base, lens, [of_q, lie], turn as u64), turn as u64).check();
                turn += 1;
            }
        }
    }
}

fn small(descales: Descales) -> Problem {
    Problem::square(2, 9, 4, 32, Mask::CAUSAL, Dtype::E4m3)
        .with_heads_kv(2)
        .with_lengths(Lengths::uniform(2, 9, 150))
        .with_types(Types::fp8(Dtype::F32))
        .with_descales(descales)
}

/// flashinfer#1023: descales that are accepted and not applied. Q's and K's are the softmax scale, V's the
/// size of O, each exactly, and LSE follows the former alone.
#[test]
fn each_descale_is_applied() {
    for form in [DescaleForm::Head, DescaleForm::SequenceHead] {
        let case = Case::random((small(Descales::all(form)), OwnedExtras::NONE), 3);
        let doubled = |values: &Option<Vec<f32>>| {
            Some(values.as_ref().unwrap().iter().map(|value| 2.0 * value).collect::<Vec<_>>())
        };
        let with = |extras: OwnedExtras| Case { extras, ..case.clone() }.tiled::<f32>(None);
        let plain = case.tiled::<f32>(None);
        let scaled = case.problem.with_softmax_scale(Some(2.0 * case.problem.scale()));
        let scaled = Case { problem: scaled, ..case.clone() }.tiled::<f32>(None);
        assert_ne!(scaled.0, plain.0);
        let q_descale = doubled(&case.extras.q_descale);
        assert_eq!(with(OwnedExtras { q_descale, ..case.extras.clone() }), scaled, "{form}");
        let k_descale = doubled(&case.extras.k_descale);
        assert_eq!(with(OwnedExtras { k_descale, ..case.extras.clone() }), scaled, "{form}");
        let v_descale = doubled(&case.extras.v_descale);
        let of_v = with(OwnedExtras { v_descale, ..case.extras.clone() });
        assert_eq!(of_v.0, plain.0.iter().map(|value| 2.0 * value).collect::<Vec<_>>(), "{form}");
        assert_eq!(of_v.1, plain.1, "LSE says nothing of V");
        // One sequence's and head's alone changes that one alone: heads 2 and 3 read K/V head 1.
        let mut one = case.extras.clone();
        let at = if form == DescaleForm::Head { 1 } else { 3 };
        one.q_descale.as_mut().unwrap()[at] = 9.0;
        let (out, _) = with(one);
        for (row, (got, before)) in out.chunks(32).zip(plain.0.chunks(32)).enumerate() {
            let reads = row % 4 >= 2 && (form == DescaleForm::Head || row / 4 >= 9);
            assert_eq!(got != before, reads, "{form}: row {row}");
        }
    }
}

/// flashinfer#2595: tiny descales gave NaN. 0 for V is an O of 0, and for Q or K uniform weights.
#[test]
fn tiny_descales_and_0_give_numbers() {
    for [of_q, of_k, of_v] in [
        [0.0, 1.0, 1.0],
        [1e-23, 1e-23, 1.0],
        [2f32.powi(-20), 2.0, 2.0],
        [1.0, 0.0, 1e30],
        [1.0, 1.0, 0.0],
        [1.0, 1.0, 1e-23],
        [2.0, 1.0, 2.0],
    ] {
        let mut case = Case::random((small(Descales::all(DescaleForm::SequenceHead)), OwnedExtras::NONE), 11);
        let extras = &mut case.extras;
        for (descales, value) in
            [(&mut extras.q_descale, of_q), (&mut extras.k_descale, of_k), (&mut extras.v_descale, of_v)]
        {
            descales.as_mut().unwrap().fill(value);
        }
        case.check();
        let (out, lse) = case.tiled::<f32>(None);
        assert!(out.iter().all(|value| value.is_finite()), "{of_q}, {of_k}, {of_v}");
        if of_v == 0.0 {
            assert!(out.iter().all(|&value| value == 0.0));
        }
        if of_q * of_k == 0.0 {
            // The last query of the first head sees 150 keys.
            assert!((lse[8] - 150f32.ln()).abs() < 1e-5);
        }
    }
}

/// mlx#4135: NaN codes that become numbers. Query i sees key i alone, each with a code of its own.
#[test]
fn every_code_of_q_is_read_and_nan_is_of_its_row() {
    let problem = Problem::square(1, 256, 1, 16, Mask::causal_window(0), Dtype::E4m3)
        .with_types(Types::fp8(Dtype::F32));
    let q: Vec<u8> = (0..=255u8).flat_map(|code| [code; 16]).collect();
    let ones = vec![e4m3::encode(1.0); 256 * 16];
    let case = Case { problem, extras: OwnedExtras::NONE, q, k: ones.clone(), v: ones };
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let (out, lse) = case.tiled::<f32>(Some(isa));
        for ((row, &lse), &number) in out.chunks(16).zip(&lse).zip(Codes::E4m3.table()) {
            let score = number * 16.0 / 4.0;
            assert_eq!((row[0].is_nan(), lse.is_nan()), (number.is_nan(), number.is_nan()), "{number}");
            assert!(number.is_nan() || row.iter().all(|&value| value == 1.0), "{row:?} for {number}");
            assert!(number.is_nan() || (lse - score).abs() <= score.abs() * 1e-6, "{lse}, {score}");
        }
    }
    let kernel = case.as_kernel(Accumulation::exact(128));
    for (row, &number) in kernel.out.chunks(16).zip(Codes::E4m3.table()) {
        assert!(row.iter().all(|value| if number.is_nan() { value.is_nan() } else { *value == 1.0 }));
    }
}

/// Dao-AILab/flash-attention#1294, #1232: packed sequences, some of them empty, are what each alone is.
#[test]
fn packed_sequences_are_what_each_alone_is() {
    let base = small(Descales::all(DescaleForm::SequenceHead));
    let lens = [(5, 70), (0, 0), (40, 40), (0, 9), (3, 0), (1, 129)];
    let case = Case::random(problem(base, &lens, [Lie::Packed, Lie::Packed], 2), 2);
    let (out, lse) = case.tiled::<f32>(None);
    let batch = Batch::new(&case.problem, &case.extras.view()).unwrap();
    let (of_q, of_k, total) = (4 * 32, 2 * 32, q_shape(&case.problem)[1]);
    for (s, sequence) in batch.sequences.iter().enumerate() {
        let (q, k) = (sequence.q, sequence.k);
        let of = |descales: &Option<Vec<f32>>| Some(descales.as_ref().unwrap()[2 * s..2 * s + 2].to_vec());
        let extras = OwnedExtras {
            q_descale: of(&case.extras.q_descale),
            k_descale: of(&case.extras.k_descale),
            v_descale: of(&case.extras.v_descale),
            ..OwnedExtras::NONE
        };
        let alone = Case {
            problem: base.with_lengths(Lengths::uniform(1, q.len, k.len)),
            extras,
            q: case.q[q.first * of_q..(q.first + q.len) * of_q].to_vec(),
            k: case.k[k.first * of_k..(k.first + k.len) * of_k].to_vec(),
            v: case.v[k.first * of_k..(k.first + k.len) * of_k].to_vec(),
        };
        let (alone, lse_alone) = alone.tiled::<f32>(None);
        assert_eq!(out[q.first * of_q..(q.first + q.len) * of_q], alone, "sequence {s}");
        for head in 0..4 {
            let of_head = &lse[head * total + q.first..][..q.len];
            assert_eq!(of_head, &lse_alone[head * q.len..][..q.len], "sequence {s}");
        }
    }
}

/// Scores N(0, 1) over many keys, and V 1 everywhere: O is 1.
fn long_sum(keys: usize, head_dim: usize) -> Case {
    let problem = Problem::square(1, 4, 1, head_dim, Mask::FULL, Dtype::E4m3)
        .with_lengths(Lengths::uniform(1, 4, keys))
        .with_head_dim_v(16)
        .with_types(Types::fp8(Dtype::F32));
    let mut case = Case::random((problem, OwnedExtras::NONE), keys as u64);
    case.v.fill(e4m3::encode(1.0));
    case
}

/// Dao-AILab/flash-attention#2250, vllm#23813: one accumulator of a tensor core over all keys loses what is
/// below its last bit: of a sum of 1 what an H200 is measured to leave. Emptied at each tile it does not.
#[test]
fn long_sums_need_two_levels() {
    for (keys, head_dim, left) in [(4096, 64, 0.942), (16384, 128, 0.757)] {
        let case = long_sum(keys, head_dim);
        let farthest = |out: &[f32]| out.iter().map(|value| (value - 1.0).abs()).fold(0.0, f32::max);
        let (out, _) = case.tiled::<f32>(None);
        assert!(farthest(&out) < 1e-5);
        let how = Accumulation { truncates: true, ..Accumulation::exact(128) };
        for two_levels in [Accumulation::exact(128), how] {
            let error = farthest(&case.as_kernel(two_levels).out);
            assert!(error <= 1.0 / 256.0, "{keys} keys, {two_levels:?}: {error}");
        }
        let one = case.as_kernel(Accumulation { two_level: false, ..how });
        let mean = one.out.iter().sum::<f32>() / one.out.len() as f32;
        assert!((mean - left).abs() < 0.015, "{keys} keys in one accumulator: {mean} for {left}");
    }
}

/// A first key that takes nearly all of the probability: tiles from the last to the first leave the others
/// theirs.
#[test]
fn a_dominant_first_key_leaves_the_sum_whole() {
    let base = long_sum(8192, 64);
    for above in [6.0, 8.0, 10.0, 12.0, 14.0f32] {
        let mut case = base.clone();
        // Column 0 of Q times that of K, over 8, adds `above` to key 0's scores.
        case.q.chunks_mut(64).for_each(|row| row[0] = e4m3::encode(16.0));
        case.k.chunks_mut(64).for_each(|row| row[0] = 0);
        case.k[0] = e4m3::encode(above / 2.0);
        let exact = case.as_kernel(Accumulation::exact(128)).out;
        for value in exact.into_iter().chain(case.tiled::<f32>(None).0) {
            assert!((value - 1.0).abs() <= 1.0 / 256.0, "{above} above: {value}");
        }
        // A tensor core cuts off the rest of the first key's own tile.
        let how = Accumulation { truncates: true, ..Accumulation::exact(128) };
        for value in case.as_kernel(how).out {
            assert!((value - 1.0).abs() <= 1.0 / 128.0, "{above} above: {value}");
        }
    }
}

/// Dao-AILab/flash-attention#2577: errors that jump where a tile begins. A kernel's arithmetic has much the
/// same error at any number of keys.
#[test]
fn errors_do_not_jump_where_a_tile_begins() {
    for keys in [1, 63, 127, 128, 129, 130, 255, 256, 257, 384, 512] {
        let problem = small(Descales::NONE).with_mask(Mask::FULL);
        let problem = problem.with_lengths(Lengths::uniform(2, 9, keys));
        let case = Case::random((problem, OwnedExtras::NONE), keys as u64);
        let exact = case.exact();
        let kernel = case.as_kernel(Accumulation::exact(128));
        let of =
            |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
        let error = of(&mut kernel.out.iter().zip(&exact.out).map(|(&a, b)| f64::from(a) - b));
        let relative = error / of(&mut exact.out.iter().copied());
        assert!(relative < 0.035, "{keys} keys: {relative}");
    }
}

/// Dao-AILab/flash-attention#1711: gradients in 16 bits from O and LSE of an fp8 forward.
#[test]
fn a_16_bit_backward_takes_the_output_of_an_fp8_forward() {
    let problem = small(Descales::NONE).with_lengths(Lengths::uniform(2, 40, 70));
    let case = Case::random((problem, OwnedExtras::NONE), 8);
    let (out, lse) = case.tiled::<bf16>(None);
    let decode =
        |codes: &[u8]| codes.iter().map(|&code| bf16::from_f32(e4m3::decode(code))).collect::<Vec<_>>();
    let [q, k, v] = [&case.q, &case.k, &case.v].map(|codes| decode(codes));
    let dout: Vec<bf16> = out.iter().rev().copied().collect();
    let half = problem.with_types(Types::same(Dtype::Bf16));
    let shapes = [q_shape(&half), k_shape(&half), v_shape(&half)];
    let inputs = BackwardInputs {
        q: bshd("q", &q, shapes[0]),
        k: bshd("k", &k, shapes[1]),
        v: bshd("v", &v, shapes[2]),
        out: bshd("out", &out, out_shape(&half)),
        lse: &lse,
        dout: bshd("dout", &dout, out_shape(&half)),
    };
    let mut found = shapes.map(|shape| vec![bf16::NAN; shape.iter().product()]);
    let [dq, dk, dv] = &mut found;
    let to = |name, data, shape| TensorMut::packed(name, data, shape, fa_core::TensorLayout::Bshd).unwrap();
    let (mut dq, mut dk, mut dv) =
        (to("dq", dq, shapes[0]), to("dk", dk, shapes[1]), to("dv", dv, shapes[2]));
    backward_with(Options::default(), &half, &inputs, &mut dq, &mut dk, &mut dv).unwrap();
    let exact = reference::backward(&half, &inputs.q, &inputs.k, &inputs.v, &inputs.dout).unwrap();
    for (found, (exact, shape)) in found.iter().zip([exact.dq, exact.dk, exact.dv].iter().zip(shapes)) {
        let verdict = compare::<bf16, f64>(shape, Dtype::Bf16, found, exact, None).unwrap();
        assert!(verdict.passed(), "{verdict}");
    }
}

/// A program computes what the option computes, over codes as over numbers.
#[test]
fn programs_see_descaled_scores() {
    let descales = Descales::all(DescaleForm::Head);
    let plain = Case::random((small(descales), OwnedExtras::NONE), 4);
    let program = fa_core::program::Program::parse("k <= q + off").unwrap();
    let own = plain.problem.with_mask(Mask::FULL);
    let own = own.with_score(ScoreMod::NONE.with_program(Some(program.intern().unwrap())));
    let own = Case { problem: own, ..plain.clone() };
    own.check();
    let (found, expected) = (own.tiled::<f32>(None), plain.tiled::<f32>(None));
    for (found, expected) in found.0.iter().zip(&expected.0) {
        assert!((found - expected).abs() < 1e-5, "{found}, {expected}");
    }
}

/// Any strides: Q broadcast over sequences, O with gaps.
#[test]
fn strides_are_followed() {
    let case = Case::random((small(Descales::NONE), OwnedExtras::NONE), 6);
    let mut repeated = case.clone();
    let half = repeated.q.len() / 2;
    repeated.q.copy_within(..half, half);
    let expected = repeated.tiled::<bf16>(None).0;
    let ([_, k, v], shape) = (case.views(), out_shape(&case.problem));
    let packed = fa_core::TensorLayout::Bshd.strides(shape[1], shape[2], shape[3]);
    let broadcast = fa_core::Strides { batch: 0, ..packed };
    let q = TensorRef::new("q", &case.q[..half], shape, broadcast).unwrap();
    let gaps = fa_core::TensorLayout::Bshd.strides(shape[1], shape[2], shape[3] + 5);
    let mut out = vec![bf16::NAN; shape[..3].iter().product::<usize>() * (shape[3] + 5)];
    let mut to = TensorMut::new("out", &mut out, shape, gaps).unwrap();
    let problem = case.problem.with_types(Types::fp8(Dtype::Bf16));
    forward_extras(Options::default(), &problem, &fa_cpu::Extras::NONE, &q, &k, &v, &mut to, None).unwrap();
    for (row, expected) in out.chunks(shape[3] + 5).zip(expected.chunks(shape[3])) {
        assert_eq!(row[..shape[3]], *expected);
        assert!(row[shape[3]..].iter().all(|value| value.is_nan()));
    }
}

#[test]
fn what_is_not_computed_is_refused_by_name() {
    let case = Case::random((small(Descales::all(DescaleForm::Head)), OwnedExtras::NONE), 1);
    let [q, k, v] = case.views();
    let shape = out_shape(&case.problem);
    let refused = |problem: &Problem, extras: &OwnedExtras| {
        let mut out = vec![7f32; shape.iter().product()];
        let mut to = TensorMut::packed("out", &mut out, shape, fa_core::TensorLayout::Bshd).unwrap();
        let found = forward_extras(Options::default(), problem, &extras.view(), &q, &k, &v, &mut to, None);
        assert!(out.iter().all(|&value| value == 7.0));
        found.unwrap_err().to_string()
    };
    let problem = case.problem;
    let without = OwnedExtras { q_descale: None, ..case.extras.clone() };
    assert_eq!(refused(&problem, &without), "q_descale is missing: the problem names it");
    let other = problem.with_types(Types::fp8(Dtype::Bf16));
    assert_eq!(refused(&other, &case.extras), "tensors hold f32, the problem's dtype is bf16");
    let half = problem.with_types(Types::same(Dtype::F32)).with_descales(Descales::NONE);
    assert_eq!(refused(&half, &OwnedExtras::NONE), "tensors hold e4m3, the problem's dtype is f32");
    let numbers = case.queries();
    let q = bshd("q", &numbers, q_shape(&problem));
    let found = reference::backward(&problem, &q, &q, &q, &q);
    let error = match found {
        Err(error @ CpuError::Problem(_)) => error.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(error.contains("fp8 Q, K and V have no gradients; dequantise them"), "{error}");
}
