//! Packed sequences, lengths in use, keys in pages, slopes and sinks on every backend of the CPU.

use fa_attn::{
    Alibi, Append, AppendExtras, AppendTensors, Backend, CpuOptions, Dtype, Engine, Error, Extras, Gradients,
    Lengths, Mask, Output, OwnedExtras, Pass, Problem, ScoreMod, Side, Tensor, TensorLayout, f16, merge,
};
use fa_cpu::check::{k_shape, out_shape, q_shape, v_shape};

#[path = "../../examples/decode.rs"]
mod decode;

const SQUARE: Problem = Problem::square(1, 1, 2, 16, Mask::CAUSAL, Dtype::F32).with_heads_q(4);

fn engines() -> [Engine; 2] {
    let backends = [Backend::Cpu(CpuOptions::default()), Backend::Reference { threads: None }];
    backends.map(|backend| Engine::with(backend).unwrap())
}

fn tensor(shape: [usize; 4], layout: TensorLayout, seed: f64) -> Tensor<f32> {
    let [_, seqlen, heads, dim] = shape;
    let strides = layout.strides(seqlen, heads, dim);
    let mut tensor = Tensor::filled(shape, layout, 0.0);
    let mut at = 0.0;
    for (b, s) in (0..shape[0]).flat_map(|b| (0..seqlen).map(move |s| (b, s))) {
        for (h, d) in (0..heads).flat_map(|h| (0..dim).map(move |d| (h, d))) {
            at += 1.0;
            tensor.data[strides.offset(b, s, h, d) as usize] = (at * seed + seed).sin() as f32;
        }
    }
    tensor
}

/// Q, K, V and dO of a problem.
fn tensors(problem: &Problem, layout: TensorLayout) -> [Tensor<f32>; 4] {
    let shapes = [q_shape(problem), k_shape(problem), v_shape(problem), out_shape(problem)];
    let seeds = [0.37, 0.73, 0.59, 0.91];
    [0, 1, 2, 3].map(|i| tensor(shapes[i], layout, seeds[i]))
}

/// A problem with its extras, its name and whether it has gradients.
fn problems() -> Vec<(&'static str, Problem, OwnedExtras)> {
    let score = ScoreMod::NONE.with_softcap(Some(3.0)).with_alibi(Some(Alibi::PerHead)).with_sinks(true);
    let slopes = vec![0.5, 0.25, 0.125, 0.0625];
    let sinks = vec![-1.0, 0.0, 0.5, 2.0];
    let packed = OwnedExtras {
        cu_seqlens_q: Some(vec![0, 9, 9, 10, 40]),
        cu_seqlens_k: Some(vec![0, 20, 23, 23, 60]),
        ..OwnedExtras::default()
    };
    let with = |extras: &OwnedExtras| OwnedExtras {
        alibi_slopes: Some(slopes.clone()),
        sinks: Some(sinks.clone()),
        ..extras.clone()
    };
    let lengths = Lengths::packed(4, 43, 61, 30, 37);
    let window = Mask::window(5, 2);
    let used = OwnedExtras {
        seqused_q: Some(vec![0, 6, 11]),
        seqused_k: Some(vec![13, 0, 5]),
        ..OwnedExtras::default()
    };
    let padded = Lengths::of(3, Side::padded(11).with_used(), Side::padded(13).with_used());
    let paged = OwnedExtras {
        seqused_k: Some(vec![13, 0, 9]),
        page_table: Some(vec![5, 1, 0, 3, -1, -1, -1, -1, 2, 7, 4, 99]),
        ..OwnedExtras::default()
    };
    let pages = Lengths::of(3, Side::padded(2), Side::paged(4, 8, 16));
    vec![
        ("packed", SQUARE.with_lengths(lengths), packed.clone()),
        ("packed, scores", SQUARE.with_lengths(lengths).with_score(score), with(&packed)),
        ("packed, window", SQUARE.with_lengths(lengths).with_mask(window), packed),
        ("used", SQUARE.with_lengths(padded), used.clone()),
        ("used, scores", SQUARE.with_lengths(padded).with_score(score).with_mask(Mask::FULL), with(&used)),
        ("pages", SQUARE.with_lengths(pages), paged.clone()),
        ("pages, scores", SQUARE.with_lengths(pages).with_score(score), with(&paged)),
        (
            "scores",
            SQUARE.with_lengths(Lengths::uniform(2, 9, 12)).with_score(score),
            with(&Default::default()),
        ),
    ]
}

fn close(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let same = found == expected || found.is_nan() && expected.is_nan();
        assert!(same || (found - expected).abs() <= 2e-5, "{what}: {found} for {expected} at {at}");
    }
}

#[test]
fn backends_agree_and_leave_rows_of_no_sequence_alone() {
    for (name, problem, extras) in problems() {
        for layout in [TensorLayout::Bshd, TensorLayout::Bhsd] {
            let [q, k, v, dout] = tensors(&problem, layout);
            // Poison: NaN is what outputs hold before, and nothing else leaves NaN where both backends do.
            let run = |engine: &Engine| -> (Output<f32>, Option<Gradients<f32>>) {
                let extras = extras.view();
                let output = engine.forward(&problem, [&q, &k, &v], &extras).unwrap();
                let gradients = problem
                    .lengths
                    .page()
                    .is_none()
                    .then(|| engine.backward(&problem, [&q, &k, &v], &extras, &output, &dout).unwrap());
                (output, gradients)
            };
            let [(tiled, tiled_gradients), (exact, exact_gradients)] = engines().each_ref().map(run);
            close(&tiled.out.data, &exact.out.data, &format!("{name} {layout} out"));
            close(&tiled.lse, &exact.lse, &format!("{name} {layout} lse"));
            if let (Some(tiled), Some(exact)) = (tiled_gradients, exact_gradients) {
                close(&tiled.dq.data, &exact.dq.data, &format!("{name} {layout} dq"));
                close(&tiled.dk.data, &exact.dk.data, &format!("{name} {layout} dk"));
                close(&tiled.dv.data, &exact.dv.data, &format!("{name} {layout} dv"));
                assert_eq!(tiled.dsinks.is_some(), problem.score.sinks, "{name}");
                if let (Some(tiled), Some(exact)) = (tiled.dsinks, exact.dsinks) {
                    close(&tiled, &exact, &format!("{name} {layout} dsinks"));
                }
            }
        }
    }
}

#[test]
fn what_the_problem_names_must_be_there_and_nothing_else() {
    for engine in engines() {
        for (name, problem, extras) in problems() {
            let [q, k, v, _] = tensors(&problem, TensorLayout::Bshd);
            let refused = |extras: &Extras<'_>, part: &str| {
                let error = engine.forward(&problem, [&q, &k, &v], extras).unwrap_err();
                assert!(
                    matches!(error, Error::Cpu(_)) && error.to_string().contains(part),
                    "{name}: {error}"
                );
            };
            let given = extras.view();
            refused(&Extras::NONE, "is missing");
            let one = [1];
            match given.seqused_q {
                Some(_) => refused(&Extras { seqused_q: Some(&one), ..given }, "seqused_q"),
                None => refused(&Extras { seqused_q: Some(&one), ..given }, "seqused_q is given"),
            }
        }
        let paged = SQUARE.with_lengths(Lengths::of(3, Side::padded(2), Side::paged(4, 8, 16)));
        let [q, k, v, dout] = tensors(&paged, TensorLayout::Bshd);
        let extras = OwnedExtras::even(&paged);
        let output = engine.forward(&paged, [&q, &k, &v], &extras.view()).unwrap();
        let error = engine.backward(&paged, [&q, &k, &v], &extras.view(), &output, &dout).unwrap_err();
        assert!(error.to_string().contains("pages"), "{error}");
        let call = engine.bind(&paged, Pass::Forward).unwrap();
        assert_eq!(call.problem(), &paged);
    }
}

#[test]
fn parts_of_the_keys_merge_into_the_whole() {
    let engine = Engine::with(Backend::Cpu(CpuOptions::default())).unwrap();
    let whole = SQUARE.with_lengths(Lengths::uniform(2, 5, 30)).with_mask(Mask::FULL);
    for layout in [TensorLayout::Bshd, TensorLayout::Bhsd] {
        let [q, k, v, _] = tensors(&whole, layout);
        let part = |tensor: &Tensor<f32>, keys: std::ops::Range<usize>| {
            let [batch, seqlen, heads, dim] = tensor.shape;
            let shape = [batch, keys.len(), heads, dim];
            let (from, to) = (layout.strides(seqlen, heads, dim), layout.strides(keys.len(), heads, dim));
            let mut part = Tensor::filled(shape, layout, 0.0);
            for (b, s) in (0..batch).flat_map(|b| (0..keys.len()).map(move |s| (b, s))) {
                for (h, d) in (0..heads).flat_map(|h| (0..dim).map(move |d| (h, d))) {
                    let value = tensor.data[from.offset(b, keys.start + s, h, d) as usize];
                    part.data[to.offset(b, s, h, d) as usize] = value;
                }
            }
            part
        };
        let over = |keys: std::ops::Range<usize>| {
            let problem = whole.with_lengths(Lengths::uniform(2, 5, keys.len()));
            let (k, v) = (part(&k, keys.clone()), part(&v, keys));
            engine.forward(&problem, [&q, &k, &v], &Extras::NONE).unwrap()
        };
        let parts = [over(0..7), over(7..7), over(7..8), over(8..30)];
        let parts = parts.each_ref();
        let expected = engine.forward(&whole, [&q, &k, &v], &Extras::NONE).unwrap();
        let merged = merge(&parts, None).unwrap();
        close(&merged.out.data, &expected.out.data, "out");
        close(&merged.lse, &expected.lse, "lse");
        // A sink joins once, whatever the parts.
        let sinks = [3.0, -2.0, 0.0, f32::NEG_INFINITY];
        let with_sinks = whole.with_score(ScoreMod::NONE.with_sinks(true));
        let extras = Extras { sinks: Some(&sinks), ..Extras::NONE };
        let expected = engine.forward(&with_sinks, [&q, &k, &v], &extras).unwrap();
        let merged = merge(&parts, Some(&sinks)).unwrap();
        close(&merged.out.data, &expected.out.data, "out with sinks");
        close(&merged.lse, &expected.lse, "lse with sinks");
    }
    let output = Output::<f32>::new(&whole, TensorLayout::Bshd).unwrap();
    let other = Output::<f32>::new(&SQUARE, TensorLayout::Bshd).unwrap();
    assert!(matches!(merge::<f32>(&[], None), Err(Error::NothingToMerge)));
    let error = merge(&[&output, &other], None).unwrap_err().to_string();
    assert!(error.contains("[1, 1, 4, 16]") && error.contains("[2, 5, 4, 16]"), "{error}");
    assert!(merge(&[&output], Some(&[0.0; 3])).is_err());
}

#[test]
fn the_decoding_example_gives_what_its_keys_say() {
    let out = decode::step().unwrap();
    assert_eq!(out.shape, [3, 1, 8, 64]);
    assert!(out.data.iter().all(|value| value.to_f32().is_finite()));
}

#[test]
fn appends_are_the_same_through_the_engine_and_refusals_write_nothing() {
    let append = Append {
        sequences: 2,
        new: Side::packed(5, 4),
        cache: Side::paged(3, 6, 9),
        heads_kv: 1,
        head_dim: 32,
        head_dim_v: 16,
        dtype: Dtype::F16,
        codes: None,
        rotary: None,
    };
    let values = |shape: [usize; 4], seed: f32| {
        let count = shape.iter().product::<usize>();
        let data = (0..count).map(|i| f16::from_f32((i as f32 * seed).sin())).collect();
        Tensor::new(shape, data).expect("of the shape")
    };
    let (k_new, v_new) = (values(append.new_shape(32), 0.3), values(append.new_shape(16), 0.7));
    let (lengths, pages) = ([7, 0], [5, 0, 3, 1, 2, 4]);
    for engine in engines() {
        let (mut k, mut v) = (values(append.cache_shape(32), 0.1), values(append.cache_shape(16), 0.2));
        let before = (k.clone(), v.clone());
        let mut after = [0, 0];
        let mut run = |cu: Option<&[i32]>| {
            let mut extras = AppendExtras {
                cu_new: cu,
                seqused_k: Some(&lengths),
                page_table: Some(&pages),
                used_out: Some(&mut after),
                ..AppendExtras::default()
            };
            let mut tensors = AppendTensors {
                k_new: k_new.view("k_new").expect("a view"),
                v_new: v_new.view("v_new").expect("a view"),
                k_cache: k.view_mut("k_cache").expect("a view").into(),
                v_cache: v.view_mut("v_cache").expect("a view").into(),
                q: None,
                tables: None,
            };
            engine.append(&append, &mut extras, &mut tensors)
        };
        assert!(run(None).is_err_and(|error| error.to_string().contains("cu_new")));
        assert!(run(Some(&[0, 4, 3])).is_err_and(|error| error.to_string().contains("cu_new")));
        // The third and fourth of four new keys are beyond the nine that a sequence has room for.
        assert_eq!(run(Some(&[0, 4, 5])).expect("appended"), 2);
        assert_eq!(after, [11, 1]);
        let row = |tensor: &Tensor<f16>, row: usize| {
            let dim = tensor.shape[3];
            tensor.data[row * dim..(row + 1) * dim].to_vec()
        };
        // Position 7 of the first sequence is row 1 of its third page, position 0 of the second in page 1.
        for (from, page, to) in [(0, 3, 1), (1, 3, 2), (4, 1, 0)] {
            assert_eq!(row(&k, 3 * page + to), row(&k_new, from));
            assert_eq!(row(&v, 3 * page + to), row(&v_new, from));
        }
        let kept = (0..18).filter(|&at| ![10, 11, 3].contains(&at));
        assert!(
            kept.into_iter().all(|at| row(&k, at) == row(&before.0, at) && row(&v, at) == row(&before.1, at))
        );
    }
}
