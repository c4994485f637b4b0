//! The tiled forward and backward on every instruction set against the oracle.

use fa_core::{Dtype, Lengths, Mask, Problem, ScoreMod, Strides, TensorLayout, Types};
use half::{bf16, f16};

use super::*;
use crate::compare::{Comparison, compare, compare_lse};
use crate::{check, reference};

fn noise<T: Element>(seed: u64, len: usize) -> Vec<T> {
    let mut state = seed * 2 + 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    };
    // A sum of three is near enough to normal.
    (0..len).map(|_| T::from_f32(next() + next() + next())).collect()
}

fn packed<'a, T>(name: &'static str, data: &'a [T], shape: [usize; 4]) -> TensorRef<'a, T> {
    TensorRef::packed(name, data, shape, TensorLayout::Bshd).expect("made to fit")
}

fn packed_mut<'a, T>(name: &'static str, data: &'a mut [T], shape: [usize; 4]) -> TensorMut<'a, T> {
    TensorMut::packed(name, data, shape, TensorLayout::Bshd).expect("made to fit")
}

fn len(shape: [usize; 4]) -> usize {
    shape.iter().product()
}

/// Forward and backward of `problem` with noise as input, compared with the oracle.
fn check<T: Element + std::fmt::Debug>(problem: &Problem, options: Options) {
    let shapes = [check::q_shape(problem), check::k_shape(problem), check::v_shape(problem)];
    let out_shape = check::out_shape(problem);
    let data: Vec<Vec<T>> = shapes.iter().zip(1..).map(|(&shape, seed)| noise(seed, len(shape))).collect();
    let [q, k, v] = [0, 1, 2].map(|i| packed(["q", "k", "v"][i], &data[i], shapes[i]));
    let poison = T::from_f32(f32::NAN);

    let mut out = vec![poison; len(out_shape)];
    let mut lse = vec![f32::NAN; check::lse_len(problem)];
    let mut view = packed_mut("out", &mut out, out_shape);
    forward_with(options, problem, &q, &k, &v, &mut view, Some(&mut lse)).unwrap();
    let oracle = reference::forward(problem, &q, &k, &v).unwrap();
    let passed = |what: &str, comparison: Comparison| {
        assert!(comparison.passed(), "{what} of {problem:?} with {options:?}: {comparison}");
    };
    let dtype = problem.types.q;
    passed("out", compare::<T, T>(out_shape, dtype, &out, &oracle.out, None).unwrap());
    let lse_shape = [problem.lengths.sequences(), problem.heads_q, problem.lengths.max_q()];
    passed("lse", compare_lse(lse_shape, dtype, &lse, &oracle.lse).unwrap());

    let dout: Vec<T> = noise(4, len(out_shape));
    let dout = packed("dout", &dout, out_shape);
    let [mut dq, mut dk, mut dv] = shapes.map(|shape| vec![poison; len(shape)]);
    let inputs = BackwardInputs { q, k, v, out: packed("out", &out, out_shape), lse: &lse, dout };
    backward_with(
        options,
        problem,
        &inputs,
        &mut packed_mut("dq", &mut dq, shapes[0]),
        &mut packed_mut("dk", &mut dk, shapes[1]),
        &mut packed_mut("dv", &mut dv, shapes[2]),
    )
    .unwrap();
    let oracle = reference::backward(problem, &q, &k, &v, &dout).unwrap();
    // An output rounded to 16 bits enters delta, and with it dQ and dK.
    let rounding = if dtype == Dtype::F32 { 0.0 } else { dtype.unit_roundoff() };
    let largest = |values: &[f64]| values.iter().fold(0f64, |max, value| max.max(value.abs()));
    let noise = |terms: f64, values: &[f64]| terms.max(2.0 * rounding * largest(values).max(1.0));
    let compared = |shape, got: &[T], want: &[f64]| compare::<T, T>(shape, dtype, got, want, None).unwrap();
    let room = noise(oracle.dq_noise, &oracle.dq);
    passed("dq", compared(shapes[0], &dq, &oracle.dq).allowing(room));
    let room = noise(oracle.dk_noise, &oracle.dk);
    passed("dk", compared(shapes[1], &dk, &oracle.dk).allowing(room));
    passed("dv", compared(shapes[2], &dv, &oracle.dv).allowing(noise(0.0, &oracle.dv)));
}

const MASKS: [Mask; 9] = [
    Mask::FULL,
    Mask::CAUSAL,
    Mask::window(9, 4),
    Mask::causal_window(70),
    Mask::band(None, Some(40)),
    Mask::band(Some(3), None),
    Mask::CAUSAL.with_offset(-11),
    Mask::window(9, 4).with_offset(17),
    Mask::FULL.with_offset(5),
];

fn every_isa(check: impl Fn(Options)) {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        check(Options { isa: Some(isa), threads: None });
    }
}

fn base(sq: usize, sk: usize, mask: Mask) -> Problem {
    Problem::square(1, sq, 2, 40, mask, Dtype::F32).with_lengths(Lengths::uniform(1, sq, sk))
}

#[test]
fn lengths_and_masks() {
    every_isa(|options| {
        for (sq, sk) in
            [(1, 1), (3, 3), (64, 32), (1, 64), (64, 1), (128, 192), (113, 203), (203, 113), (300, 290)]
        {
            for mask in MASKS {
                check::<f32>(&base(sq, sk, mask), options);
            }
        }
    });
}

#[test]
fn panels_fit_the_count_of_queries() {
    every_isa(|options| {
        let kernels = super::kernels(options).unwrap();
        let (lanes, most) = (kernels.lanes(), kernels.panel());
        for queries in 1..5 * most {
            let panel = super::forward::panel_of(kernels, queries);
            assert!(panel <= most && panel.is_multiple_of(lanes));
            assert_eq!(queries.div_ceil(panel), queries.div_ceil(lanes).div_ceil(most / lanes), "{queries}");
        }
        // The last panel is as full as the first, where there are as few as two.
        let two = (most / lanes + 1) * lanes;
        assert_eq!(super::forward::panel_of(kernels, two), two.div_ceil(2).next_multiple_of(lanes));
        for queries in [two - 1, two, two + 1, 100] {
            for mask in [Mask::FULL, Mask::CAUSAL] {
                check::<f32>(&base(queries, 300, mask), options);
            }
        }
    });
}

#[test]
fn head_dims_and_groups() {
    every_isa(|options| {
        for (hd, hdv) in [(1, 1), (8, 5), (33, 17), (64, 64), (72, 128), (192, 128), (128, 256)] {
            for (heads_q, heads_kv) in [(2, 2), (6, 2), (5, 1)] {
                let problem = base(70, 81, Mask::CAUSAL)
                    .with_lengths(Lengths::uniform(2, 70, 81))
                    .with_heads(heads_q, heads_kv)
                    .with_head_dims(hd, hdv);
                check::<f32>(&problem, options);
            }
        }
    });
}

#[test]
fn sixteen_bit_types_scale_and_cap() {
    every_isa(|options| {
        for softcap in [None, Some(1.5)] {
            for softmax_scale in [None, Some(0.4), Some(-0.3), Some(0.0)] {
                let problem = base(130, 150, Mask::window(50, 9))
                    .with_score(ScoreMod::NONE.with_softcap(softcap))
                    .with_softmax_scale(softmax_scale);
                check::<f32>(&problem, options);
                check::<f16>(&problem.with_types(Types::same(Dtype::F16)), options);
                check::<bf16>(&problem.with_types(Types::same(Dtype::Bf16)), options);
            }
        }
    });
}

#[test]
fn empty_problems_write_what_there_is() {
    every_isa(|options| {
        for (batch, sq, sk) in [(0, 4, 4), (1, 0, 4), (1, 4, 0), (2, 0, 0)] {
            check::<f32>(&base(sq, sk, Mask::CAUSAL).with_lengths(Lengths::uniform(batch, sq, sk)), options);
        }
    });
}

#[test]
fn few_heads_on_many_threads_split_the_keys() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(5).build().unwrap();
    let split = || {
        for mask in MASKS {
            let problem = base(410, 530, mask).with_heads(4, 2);
            check::<f32>(&problem, Options::default());
            check::<f32>(&problem, Options { isa: None, threads: Some(3) });
            check::<bf16>(&problem.with_types(Types::same(Dtype::Bf16)), Options::default());
        }
    };
    pool.install(|| schedule::tests::with_cores(5, split));
}

/// Rows of a group go together where they are few; keys are split, and what is left of a head dim fills no
/// register.
#[test]
fn few_queries_of_every_number_and_group() {
    every_isa(|options| {
        for (queries, heads_q, heads_kv) in [
            (1, 3, 3),
            (2, 8, 1),
            (4, 6, 2),
            (5, 3, 1),
            (7, 2, 2),
            (8, 2, 1),
            (8, 8, 1),
            (9, 4, 1),
            (16, 2, 2),
        ] {
            for (hd, hdv) in [(64, 64), (40, 72), (3, 21)] {
                let shape = |mask| {
                    base(queries, 700, mask)
                        .with_lengths(Lengths::uniform(2, queries, 700))
                        .with_heads(heads_q, heads_kv)
                        .with_head_dims(hd, hdv)
                };
                check::<f32>(&shape(Mask::CAUSAL), options);
                check::<bf16>(&shape(Mask::FULL).with_types(Types::same(Dtype::Bf16)), options);
                check::<f16>(&shape(Mask::window(600, 0)).with_types(Types::same(Dtype::F16)), options);
            }
        }
    });
}

/// Heads that lie side by side are read together, as many as leave every thread something to do: their bits
/// are the same.
#[test]
fn few_queries_have_the_same_bits_on_any_number_of_threads() {
    let problem = base(3, 1300, Mask::CAUSAL).with_heads(12, 6);
    let shapes = [check::q_shape(&problem), check::k_shape(&problem), check::out_shape(&problem)];
    let (q, k) = (noise::<f32>(1, len(shapes[0])), noise::<f32>(2, len(shapes[1])));
    let (q, k) = (packed("q", &q, shapes[0]), packed("k", &k, shapes[1]));
    let run = |threads| {
        let mut out = vec![f32::NAN; len(shapes[2])];
        let options = Options { isa: None, threads: Some(threads) };
        let mut view = packed_mut("out", &mut out, shapes[2]);
        forward_with(options, &problem, &q, &k, &k, &mut view, None).unwrap();
        out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(5).build().unwrap();
    let alone = run(1);
    pool.install(|| {
        schedule::tests::with_cores(5, || assert!([2, 3, 5].into_iter().all(|n| run(n) == alone)))
    });
}

/// The forward with lengths, slopes and sinks on `threads` threads, as bits: O and LSE.
fn forward_bits<T: Element + Into<f32>>(
    problem: &Problem,
    extras: &Extras<'_>,
    data: &[Vec<T>; 3],
    options: Options,
) -> [Vec<u32>; 2] {
    let shapes = [check::q_shape(problem), check::k_shape(problem), check::v_shape(problem)];
    let [q, k, v] = [0, 1, 2].map(|i| packed(["q", "k", "v"][i], &data[i], shapes[i]));
    let out_shape = check::out_shape(problem);
    let (mut out, mut lse) = (vec![T::from_f32(7.0); len(out_shape)], vec![7.0; check::lse_len(problem)]);
    let mut view = packed_mut("out", &mut out, out_shape);
    forward_extras(options, problem, extras, &q, &k, &v, &mut view, Some(&mut lse)).unwrap();
    [
        out.into_iter().map(|value| value.into().to_bits()).collect(),
        lse.into_iter().map(f32::to_bits).collect(),
    ]
}

/// Where several threads share a unit of few queries and many keys, each has some of the keys: the result is
/// right and has the bits of one thread's.
#[test]
fn divided_keys_have_the_same_bits_on_any_number_of_threads() {
    fn same<T: Element + Into<f32> + std::fmt::Debug>(problem: &Problem, options: Options) {
        check::<T>(problem, options);
        let shapes = [check::q_shape(problem), check::k_shape(problem), check::v_shape(problem)];
        let data = [0, 1, 2].map(|i| noise::<T>(i as u64, len(shapes[i])));
        let run = |threads| {
            let options = Options { threads: Some(threads), ..options };
            forward_bits(problem, &Extras::NONE, &data, options)
        };
        let alone = run(1);
        assert!([2, 3, 5].into_iter().all(|threads| run(threads) == alone), "{problem:?} with {options:?}");
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(5).build().unwrap();
    let all = || {
        every_isa(|options| {
            for (mask, softcap) in [
                (Mask::FULL, None),
                (Mask::CAUSAL, Some(1.5)),
                (Mask::causal_window(900), None),
                (Mask::band(Some(3), None), None),
            ] {
                for (heads_q, keys) in [(6, 1300), (2, 2100)] {
                    let problem = base(25, keys, mask)
                        .with_heads(heads_q, heads_q / 2)
                        .with_score(ScoreMod::NONE.with_softcap(softcap));
                    let typed = |dtype| problem.with_types(Types::same(dtype));
                    same::<f16>(&typed(Dtype::F16), options);
                    same::<bf16>(&typed(Dtype::Bf16), options);
                    same::<f32>(&problem, options);
                }
            }
        });
    };
    pool.install(|| schedule::tests::with_cores(5, all));
}

/// With sinks, slopes, lengths and pages, and values that the mask hides and are not finite.
#[test]
fn divided_keys_of_every_form() {
    use fa_core::{Alibi, Side};
    fn one<T: Element + Into<f32> + std::fmt::Debug>(dtype: Dtype, mask: Mask, options: Options) {
        let (page, pages) = (48, 60);
        let problem = base(1, 1, mask)
            .with_lengths(Lengths::of(2, Side::packed(60, 40), Side::paged(page, pages, 1400)))
            .with_heads(4, 1)
            .with_score(ScoreMod::NONE.with_sinks(true).with_alibi(Some(Alibi::PerHead)))
            .with_types(Types::same(dtype));
        let columns = problem.lengths.table_columns();
        let table: Vec<i32> = (0..2 * columns).map(|i| (i * 7 % pages) as i32).collect();
        let extras = Extras {
            cu_seqlens_q: Some(&[0, 33, 57]),
            seqused_k: Some(&[1390, 1203]),
            page_table: Some(&table),
            alibi_slopes: Some(&[0.1, 0.0, 0.01, 0.002]),
            sinks: Some(&[1.0, -2.0, f32::NEG_INFINITY, 5.0]),
            ..Extras::NONE
        };
        let shapes = [check::q_shape(&problem), check::k_shape(&problem), check::v_shape(&problem)];
        let mut data = [0, 1, 2].map(|i| noise::<T>(i as u64, len(shapes[i])));
        // The last keys of the first sequence, which only its last queries see, where the mask is causal.
        let last = table[1385 / page] as usize * page + 1385 % page;
        data[2][last * 40..(last + 1) * 40].fill(T::from_f32(f32::INFINITY));
        let run =
            |threads| forward_bits(&problem, &extras, &data, Options { threads: Some(threads), ..options });
        let alone = run(1);
        assert!([2, 5].into_iter().all(|threads| run(threads) == alone), "{problem:?} with {options:?}");

        let [q, k, v] = [0, 1, 2].map(|i| packed(["q", "k", "v"][i], &data[i], shapes[i]));
        let oracle = reference::forward_extras(&problem, &extras, &q, &k, &v).unwrap();
        let owned = 57 * 4 * 40;
        let out: Vec<T> = alone[0][..owned].iter().map(|&bits| T::from_f32(f32::from_bits(bits))).collect();
        let compared = compare::<T, T>([1, 57, 4, 40], dtype, &out, &oracle.out[..owned], None).unwrap();
        assert!(compared.passed(), "{problem:?} with {options:?}: {compared}");
        assert!(alone[0][owned..].iter().all(|&bits| bits == 7f32.to_bits()), "rows of no sequence");
        for (of_head, exact) in alone[1].chunks(60).zip(oracle.lse.chunks(60)) {
            for (&bits, &want) in of_head.iter().zip(exact).take(57) {
                let got = f64::from(f32::from_bits(bits));
                assert!(got == want || (got - want).abs() < 0.01, "LSE {got} for {want}");
            }
        }
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(5).build().unwrap();
    let all = || {
        every_isa(|options| {
            for mask in [Mask::FULL, Mask::CAUSAL, Mask::window(700, 2)] {
                one::<f32>(Dtype::F32, mask, options);
                one::<f16>(Dtype::F16, mask, options);
                one::<bf16>(Dtype::Bf16, mask, options);
            }
        });
    };
    pool.install(|| schedule::tests::with_cores(5, all));
}

#[test]
fn any_strides() {
    // Q backwards in nothing but laid out dim-major, K broadcast over batch, V with gaps; O interleaved with
    // gaps.
    let problem = base(37, 45, Mask::CAUSAL).with_lengths(Lengths::uniform(2, 37, 45));
    let (q, k, v) =
        (noise::<f32>(1, 40 * 37 * 4), noise::<f32>(2, 45 * 2 * 40), noise::<f32>(3, 45 * 100 * 2));
    let strides = |[batch, seq, head, dim]: [i64; 4]| Strides { batch, seq, head, dim };
    let q = TensorRef::new("q", &q, [2, 37, 2, 40], strides([74, 1, 37, 148])).unwrap();
    let k = TensorRef::new("k", &k, [2, 45, 2, 40], strides([0, 80, 40, 1])).unwrap();
    let v = TensorRef::new("v", &v, [2, 45, 2, 40], strides([0, 200, 50, 1])).unwrap();
    let mut out = vec![f32::NAN; 2 * 37 * 2 * 40 * 2];
    let mut view = TensorMut::new("out", &mut out, [2, 37, 2, 40], strides([37 * 160, 160, 1, 2])).unwrap();
    forward(&problem, &q, &k, &v, &mut view, None).unwrap();
    let got = view.as_ref();
    let oracle = reference::forward(&problem, &q, &k, &v).unwrap();
    for (i, want) in oracle.out.iter().enumerate() {
        let got = got.at(i / (37 * 80), i / 80 % 37, i / 40 % 2, i % 40);
        assert!((f64::from(got) - want).abs() < 2e-6, "element {i}: {got} for {want}");
    }
}

#[test]
fn equal_inputs_give_equal_bits() {
    let problem = base(257, 300, Mask::CAUSAL);
    let shape = check::q_shape(&problem);
    let kv_shape = check::k_shape(&problem);
    let (q, k, v, dout) = (
        noise::<f32>(1, len(shape)),
        noise::<f32>(2, len(kv_shape)),
        noise::<f32>(3, len(kv_shape)),
        noise(4, len(shape)),
    );
    let run = || {
        let (q, k, v) = (packed("q", &q, shape), packed("k", &k, kv_shape), packed("v", &v, kv_shape));
        let (mut out, mut lse) = (vec![0f32; len(shape)], vec![0f32; check::lse_len(&problem)]);
        forward(&problem, &q, &k, &v, &mut packed_mut("out", &mut out, shape), Some(&mut lse)).unwrap();
        let (mut dq, mut dk, mut dv) = (q.data().to_vec(), k.data().to_vec(), v.data().to_vec());
        backward(
            &problem,
            &q,
            &k,
            &v,
            &packed("out", &out, shape),
            &lse,
            &packed("dout", &dout, shape),
            &mut packed_mut("dq", &mut dq, shape),
            &mut packed_mut("dk", &mut dk, kv_shape),
            &mut packed_mut("dv", &mut dv, kv_shape),
        )
        .unwrap();
        [out, lse, dq, dk, dv].concat().into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    let first = run();
    for _ in 0..20 {
        assert_eq!(run(), first);
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let problem = base(4, 4, Mask::FULL);
    let (data, mut out) = (vec![0f32; 320], vec![7f32; 320]);
    let shape = [1, 4, 2, 40];
    let view = packed("q", &data, shape);
    let mut to = packed_mut("out", &mut out, shape);
    let refused = forward(&problem, &view, &view, &view, &mut to, Some(&mut [0.0; 7]));
    assert_eq!(refused, Err(CpuError::Length { buffer: "lse", got: 7, need: 8 }));
    let missing = Isa::ALL.into_iter().find(|isa| !isa.is_available()).expect("no CPU has NEON and AVX2");
    let options = Options { isa: Some(missing), threads: None };
    assert_eq!(
        forward_with(options, &problem, &view, &view, &view, &mut to, None),
        Err(CpuError::Isa { wanted: missing, best: Isa::detect() })
    );
    assert_eq!(out, [7.0; 320]);
}

#[test]
fn f64_is_the_oracles() {
    let problem = base(4, 4, Mask::FULL);
    let shape = check::q_shape(&problem);
    let data = vec![0.5f64; len(shape)];
    let (view, lse) = (packed("q", &data, shape), vec![0.0; check::lse_len(&problem)]);
    let mut out = vec![0f64; len(shape)];
    let refused = forward(&problem, &view, &view, &view, &mut packed_mut("out", &mut out, shape), None);
    assert_eq!(refused, Err(CpuError::Dtype { got: None, need: Dtype::F32 }));
    assert_eq!(refused.unwrap_err().to_string(), "tensors hold f64, the problem's dtype is f32");
    let mut stores = [0; 3].map(|_| out.clone());
    let [mut dq, mut dk, mut dv] = stores.each_mut().map(|to| packed_mut("gradient", to, shape));
    let refused = backward(&problem, &view, &view, &view, &view, &lse, &view, &mut dq, &mut dk, &mut dv);
    assert_eq!(refused, Err(CpuError::Dtype { got: None, need: Dtype::F32 }));
}

#[test]
fn bf16_of_every_form() {
    every_isa(|options| {
        for (sq, sk) in [(1, 1), (31, 33), (1, 200), (128, 128), (130, 257), (300, 290)] {
            for mask in MASKS {
                check::<bf16>(&base(sq, sk, mask).with_types(Types::same(Dtype::Bf16)), options);
            }
        }
        for (hd, hdv) in [(1, 1), (33, 17), (64, 64), (72, 128), (192, 128), (128, 256)] {
            for (heads_q, heads_kv) in [(2, 2), (6, 2), (5, 1)] {
                let head_dims = base(70, 81, Mask::CAUSAL).with_head_dims(hd, hdv);
                let problem = head_dims
                    .with_lengths(Lengths::uniform(2, head_dims.lengths.max_q(), head_dims.lengths.max_k()))
                    .with_heads(heads_q, heads_kv)
                    .with_types(Types::same(Dtype::Bf16));
                check::<bf16>(&problem, options);
            }
        }
    });
}

#[test]
fn hidden_keys_and_values_may_hold_anything() {
    fn check_one<T: Element>(problem: &Problem, options: Options) {
        let shapes = [check::q_shape(problem), check::k_shape(problem), check::v_shape(problem)];
        let mut data: Vec<Vec<T>> =
            shapes.iter().zip(1..).map(|(&shape, seed)| noise(seed, len(shape))).collect();
        let row = |key: usize| key * 2 * 40..(key * 2 + 1) * 40;
        data[1][row(90)].fill(T::from_f32(f32::NAN));
        data[2][row(70)].fill(T::from_f32(f32::INFINITY));
        data[2][row(90)].fill(T::from_f32(f32::NAN));
        let [q, k, v] = [0, 1, 2].map(|i| packed(["q", "k", "v"][i], &data[i], shapes[i]));
        let mut out = vec![T::from_f32(0.0); len(shapes[0])];
        let mut view = packed_mut("out", &mut out, shapes[0]);
        forward_with(options, problem, &q, &k, &v, &mut view, None).unwrap();
        let oracle = reference::forward(problem, &q, &k, &v).unwrap();
        let comparison = compare::<T, T>(shapes[0], problem.types.q, &out, &oracle.out, None).unwrap();
        assert!(comparison.passed(), "{problem:?} with {options:?}: {comparison}");
    }
    every_isa(|options| {
        for mask in MASKS {
            let problem = base(120, 120, mask);
            check_one::<f32>(&problem, options);
            check_one::<bf16>(&problem.with_types(Types::same(Dtype::Bf16)), options);
        }
    });
}

/// A value that is not finite, in a tile that the mask hides from all queries, does not decide which path
/// computes a unit: whether one thread has the unit or several share it, the bits are those without it.
#[test]
fn hidden_values_change_no_bits_on_any_number_of_threads() {
    let problem = base(60, 600, Mask::window(20, 20))
        .with_lengths(Lengths::uniform(1, 60, 600))
        .with_types(Types::same(Dtype::Bf16));
    let shapes = [check::q_shape(&problem), check::k_shape(&problem), check::v_shape(&problem)];
    let clean = [0, 1, 2].map(|i| noise::<bf16>(i as u64, len(shapes[i])));
    let mut wild = clean.clone();
    // The queries see the keys from 520 on.
    wild[2][..shapes[2][2] * shapes[2][3]].fill(bf16::NAN);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(5).build().unwrap();
    let all = || {
        every_isa(|options| {
            let run = |data, threads| {
                let options = Options { threads: Some(threads), ..options };
                forward_bits(&problem, &Extras::NONE, data, options)
            };
            let alone = run(&clean, 1);
            for threads in [1, 2, 5] {
                assert!(run(&wild, threads) == alone, "{threads} threads with {options:?}");
            }
        });
    };
    pool.install(|| schedule::tests::with_cores(5, all));
}
