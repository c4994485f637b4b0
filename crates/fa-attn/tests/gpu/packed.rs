//! Packed sequences, lengths in use, keys in pages, slopes and sinks: both families against the oracle, with
//! NaN in all that belongs to no sequence; one captured graph and one plan for many launches.

use std::sync::Arc;

use fa_attn::device::{DeviceBackward, DeviceExtras, DeviceForward, DeviceTensor, Gpu, Placement, shapes};
use fa_attn::{
    Alibi, Backend, Dtype, Engine, Extras, Family, Lengths, Mask, OwnedExtras, Problem, ScoreMod, Side,
    Tensor, TensorLayout, bf16,
};
use fa_cpu::batch::Batch;
use fa_cpu::reference::{self, low_precision};
use fa_cpu::{TensorRef, compare};
use fa_kernels::cudarc::driver::CudaStream;

use crate::{bind_backward, bind_forward, gpu};

pub(crate) const SQUARE: Problem = Problem::square(1, 1, 2, 128, Mask::CAUSAL, Dtype::Bf16).with_heads_q(8);

/// Problems with their extras.
pub(crate) fn problems() -> Vec<(&'static str, Problem, OwnedExtras)> {
    let score = ScoreMod::NONE.with_softcap(Some(20.0)).with_alibi(Some(Alibi::PerHead)).with_sinks(true);
    let with = |extras: &OwnedExtras| OwnedExtras {
        alibi_slopes: Some((0..8).map(|head| 0.5f32.powi(head + 1)).collect()),
        sinks: Some((0..8).map(|head| head as f32 - 3.0).collect()),
        ..extras.clone()
    };
    let packed = OwnedExtras {
        cu_seqlens_q: Some(vec![0, 300, 300, 301, 430, 558]),
        cu_seqlens_k: Some(vec![0, 320, 340, 340, 700, 828]),
        ..OwnedExtras::default()
    };
    let lengths = Lengths::packed(5, 570, 830, 300, 400);
    let used = OwnedExtras {
        seqused_q: Some(vec![0, 200, 129]),
        seqused_k: Some(vec![77, 0, 250]),
        ..OwnedExtras::default()
    };
    let padded = Lengths::of(3, Side::padded(200).with_used(), Side::padded(256).with_used());
    let narrow = SQUARE.with_head_dims(64, 64);
    let paged = |queries: usize, page: usize| {
        let (columns, pages) = (400usize.div_ceil(page), 3 * 400usize.div_ceil(page));
        // Shuffled by a stride that shares no factor with the pages; entries out of use name none.
        let used = [400usize, 1, 123];
        let entry = |i: usize| {
            let (sequence, column) = (i / columns, i % columns);
            let in_use = column * page < used[sequence];
            if in_use { ((i * 7919 + 3) % pages) as i32 } else { -1 }
        };
        let extras = OwnedExtras {
            seqused_k: Some(used.map(|n| n as i32).to_vec()),
            page_table: Some((0..3 * columns).map(entry).collect()),
            ..OwnedExtras::default()
        };
        let lengths = Lengths::of(3, Side::padded(queries), Side::paged(page, pages, columns * page));
        (SQUARE.with_lengths(lengths), extras)
    };
    let mut problems = vec![
        ("packed", SQUARE.with_lengths(lengths), packed.clone()),
        ("packed, full", SQUARE.with_lengths(lengths).with_mask(Mask::FULL), packed.clone()),
        ("packed, window", SQUARE.with_lengths(lengths).with_mask(Mask::window(60, 9)), packed.clone()),
        ("packed, scores", narrow.with_lengths(lengths).with_score(score), with(&packed)),
        ("used", SQUARE.with_lengths(padded), used.clone()),
        ("used, scores", narrow.with_lengths(padded).with_score(score).with_mask(Mask::FULL), with(&used)),
        (
            "scores",
            SQUARE.with_lengths(Lengths::uniform(2, 300, 320)).with_score(score),
            with(&OwnedExtras::default()),
        ),
    ];
    for (name, queries, page) in [
        ("decode, page 16", 1, 16),
        ("decode, page 3", 4, 3),
        ("prefill, page 64", 150, 64),
        ("page 1", 1, 1),
    ] {
        let (problem, extras) = paged(queries, page);
        problems.push((name, problem, extras));
    }
    let (problem, extras) = paged(1, 16);
    problems.push(("decode, scores", problem.with_score(score), with(&extras)));
    problems
}

/// Values of Q, K, V and dO, NaN in rows that belong to no sequence.
pub(crate) fn values(problem: &Problem, extras: &Extras<'_>) -> [Vec<bf16>; 4] {
    let batch = Batch::new(problem, extras).unwrap();
    let [q, k, v, out] = shapes(problem);
    let rows = |[entries, seqlen, ..]: [usize; 4], keys: bool| {
        let mut rows = vec![false; entries * seqlen];
        for (index, sequence) in batch.sequences.iter().enumerate() {
            for row in 0..if keys { sequence.k.len } else { sequence.q.len } {
                let (entry, position) =
                    if keys { batch.key(index, row) } else { (sequence.q.batch, sequence.q.first + row) };
                rows[entry * seqlen + position] = true;
            }
        }
        rows
    };
    let fill = |shape: [usize; 4], keys: bool, seed: f64| -> Vec<bf16> {
        let rows = rows(shape, keys);
        let row = shape[2] * shape[3];
        let value = |i: usize| if rows[i / row] { ((i as f64 + 1.0) * seed).sin() * 1.5 } else { f64::NAN };
        (0..shape.iter().product()).map(|i| bf16::from_f64(value(i))).collect()
    };
    [fill(q, false, 0.37), fill(k, true, 0.73), fill(v, true, 0.59), fill(out, false, 0.91)]
}

fn views<'a>(problem: &Problem, values: &'a [Vec<bf16>; 4]) -> [TensorRef<'a, bf16>; 4] {
    let names = ["q", "k", "v", "dout"];
    let shapes = shapes(problem);
    [0, 1, 2, 3].map(|i| TensorRef::packed(names[i], &values[i], shapes[i], TensorLayout::Bshd).unwrap())
}

/// Tensors on the GPU, with extras.
fn forward_tensors(
    stream: &Arc<CudaStream>,
    problem: &Problem,
    extras: &Extras<'_>,
    values: &[Vec<bf16>; 4],
    workspace: usize,
) -> DeviceForward<bf16> {
    let placements = shapes(problem).map(|shape| Placement::packed(shape, TensorLayout::Bshd));
    let [q, k, v, _] = values.each_ref().map(Vec::as_slice);
    let mut tensors = DeviceForward::place(stream, problem, workspace, [q, k, v], &placements).unwrap();
    tensors.extras = DeviceExtras::upload(stream, extras).unwrap();
    tensors
}

fn check_forward(
    what: &str,
    problem: &Problem,
    extras: &Extras<'_>,
    values: &[Vec<bf16>; 4],
    found: (&[bf16], &[f32]),
) {
    let [q, k, v, _] = views(problem, values);
    let exact = reference::forward_extras(problem, extras, &q, &k, &v).unwrap();
    let low = low_precision::forward_extras(problem, extras, &q, &k, &v).unwrap();
    let shape @ [entries, seqlen, heads, _] = shapes(problem)[3];
    let out = compare::compare(shape, Dtype::Bf16, found.0, &exact.out, Some(&low.out)).unwrap();
    let out = out.allowing(exact.out_noise);
    assert!(out.passed(), "{what}: {out}");
    let lse = compare::compare_lse([entries, heads, seqlen], Dtype::Bf16, found.1, &exact.lse).unwrap();
    assert!(lse.passed(), "{what}: LSE {lse}");
}

/// The families that have kernels here.
fn families(gpu: &Gpu) -> impl Iterator<Item = Family> {
    let arch = gpu.arch();
    Family::ALL.into_iter().filter(move |family| family.runs_on(arch))
}

#[test]
#[ignore = "needs a GPU"]
fn every_family_computes_what_the_oracle_does() {
    let gpu = gpu();
    let stream = &gpu.stream;
    for (name, problem, extras) in problems() {
        let extras = extras.view();
        let values = values(&problem, &extras);
        for family in families(&gpu) {
            let what = format!("{name}, {family}");
            let forward =
                bind_forward(&gpu, &problem, Some(family)).unwrap_or_else(|error| panic!("{what}: {error}"));
            let mut tensors = forward_tensors(stream, &problem, &extras, &values, forward.workspace_bytes());
            tensors.run(&forward, stream).unwrap_or_else(|error| panic!("{what}: {error}"));
            let output = tensors.read(stream).unwrap();
            check_forward(&what, &problem, &extras, &values, (&output.out, &output.lse));
            if problem.lengths.page().is_some() {
                continue;
            }
            let exact = {
                let [q, k, v, dout] = views(&problem, &values);
                let exact = reference::backward_extras(&problem, &extras, &q, &k, &v, &dout).unwrap();
                let low = low_precision::backward_extras(&problem, &extras, &q, &k, &v, &dout).unwrap();
                (exact, low)
            };
            for deterministic in [false, true] {
                let what = format!("{what}, deterministic {deterministic}");
                let backward = bind_backward(&gpu, &problem, deterministic, Some(family))
                    .unwrap_or_else(|error| panic!("{what}: {error}"));
                let [.., out] = shapes(&problem).map(|shape| Placement::packed(shape, TensorLayout::Bshd));
                let dout = DeviceTensor::place(stream, &values[3], out).unwrap();
                let mut gradients = DeviceBackward::new(stream, &backward, &tensors, dout).unwrap();
                gradients.run(&tensors, &backward, stream).unwrap_or_else(|error| panic!("{what}: {error}"));
                let found = gradients.read(stream).unwrap();
                let (exact, low) = &exact;
                let expected = [
                    (&exact.dq, &low.dq, exact.dq_noise),
                    (&exact.dk, &low.dk, exact.dk_noise),
                    (&exact.dv, &low.dv, exact.dv_noise),
                ];
                for (i, (exact, low, noise)) in expected.into_iter().enumerate() {
                    let found = compare::compare(
                        shapes(&problem)[i],
                        Dtype::Bf16,
                        &found.values[i],
                        exact,
                        Some(low),
                    )
                    .unwrap();
                    let found = found.allowing(noise);
                    assert!(found.passed(), "{what}, {}: {found}", ["dq", "dk", "dv"][i]);
                }
                let Some(dsinks) = &gradients.dsinks else { continue };
                let dsinks = stream.clone_dtoh(dsinks).unwrap();
                let shape = [1, 1, 1, dsinks.len()];
                let found =
                    compare::compare(shape, Dtype::Bf16, &dsinks, &exact.dsinks, Some(&low.dsinks)).unwrap();
                let found = found.allowing(exact.dsinks_noise);
                assert!(found.passed(), "{what}, dsinks: {found}");
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn the_engine_gives_on_the_gpu_what_it_gives_on_the_cpu() {
    let gpu = Engine::with(Backend::Gpu).unwrap();
    for (name, problem, extras) in problems() {
        let extras = extras.view();
        let values = values(&problem, &extras);
        let shapes = shapes(&problem);
        let [q, k, v] = [0, 1, 2].map(|i| Tensor::new(shapes[i], values[i].clone()).unwrap());
        let output = gpu.forward(&problem, [&q, &k, &v], &extras).unwrap_or_else(|e| panic!("{name}: {e}"));
        check_forward(name, &problem, &extras, &values, (&output.out.data, &output.lse));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn one_graph_serves_whatever_lengths_and_pages_there_are() {
    let gpu = gpu();
    let stream = &gpu.context().new_stream().unwrap();
    let (_, problem, extras) = problems().into_iter().find(|(name, ..)| *name == "decode, page 16").unwrap();
    for family in families(&gpu) {
        let forward = bind_forward(&gpu, &problem, Some(family)).unwrap();
        // Every page holds values: which are used changes.
        let mut values = values(&problem, &extras.view());
        for (tensor, seed) in [(1, 0.73), (2, 0.59)] {
            let fill = |(i, value): (usize, &mut bf16)| *value = bf16::from_f64((i as f64 * seed).sin());
            values[tensor].iter_mut().enumerate().for_each(fill);
        }
        let bytes = forward.workspace_bytes();
        let mut tensors = forward_tensors(stream, &problem, &extras.view(), &values, bytes);
        // SAFETY: the tensors outlive the graph.
        let graph = unsafe { tensors.capture(&forward, stream) }.unwrap();
        for step in 0..20i32 {
            let mut now = extras.clone();
            let table = now.page_table.as_mut().unwrap();
            let pages = table.len() as i32;
            table.iter_mut().enumerate().for_each(|(i, page)| *page = (i as i32 * 17 + step * 5) % pages);
            now.seqused_k = Some(vec![(step * 37) % 401, (step * 101 + 400) % 401, step]);
            tensors.extras.update(stream, &now.view()).unwrap();
            tensors.poison(stream).unwrap();
            graph.launch().unwrap();
            let output = tensors.read(stream).unwrap();
            let what = format!("{family}, step {step}");
            check_forward(&what, &problem, &now.view(), &values, (&output.out, &output.lse));
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn one_plan_serves_all_layers_and_changes_no_bit() {
    let gpu = gpu();
    let stream = &gpu.stream;
    for (name, problem, extras) in problems() {
        let extras = extras.view();
        let values = values(&problem, &extras);
        for family in families(&gpu) {
            let forward = bind_forward(&gpu, &problem, Some(family)).unwrap();
            assert_eq!(forward.plan_bytes() > 0, !problem.lengths.is_uniform(), "{name}, {family}");
            let bytes = forward.workspace_bytes();
            let mut layers = [0, 1].map(|_| forward_tensors(stream, &problem, &extras, &values, bytes));
            layers[0].run(&forward, stream).unwrap();
            let expected = layers[0].read(stream).unwrap();
            let mut shared = DeviceExtras::upload(stream, &extras).unwrap();
            shared.make_plan(&forward, stream).unwrap();
            for layer in &mut layers {
                layer.poison(stream).unwrap();
                layer.run_with(&forward, &shared, stream).unwrap();
                assert!(layer.read(stream).unwrap().same_bits(&expected), "{name}, {family}");
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn pages_that_do_not_exist_are_counted_and_never_read() {
    let gpu = gpu();
    let stream = &gpu.stream;
    let (_, problem, extras) = problems().into_iter().find(|(name, ..)| *name == "decode, page 16").unwrap();
    let values = values(&problem, &extras.view());
    for family in families(&gpu) {
        let forward = bind_forward(&gpu, &problem, Some(family)).unwrap();
        let bytes = forward.workspace_bytes();
        let mut tensors = forward_tensors(stream, &problem, &extras.view(), &values, bytes);
        tensors.count_page_faults(stream).unwrap();
        tensors.run(&forward, stream).unwrap();
        assert_eq!(tensors.page_faults(stream).unwrap(), 0, "{family}");
        let mut wrong = extras.clone();
        wrong.page_table.as_mut().unwrap()[1] = i32::MAX;
        tensors.extras.update(stream, &wrong.view()).unwrap();
        tensors.run(&forward, stream).unwrap();
        assert!(tensors.page_faults(stream).unwrap() > 0, "{family}");
        let output = tensors.read(stream).unwrap();
        assert!(
            output.out.iter().all(|value| value.to_f32().is_finite()),
            "{family}: keys of no page read as zeros"
        );
        // The host's way checks them before.
        let engine = Engine::with(Backend::Gpu).unwrap();
        let shapes = shapes(&problem);
        let [q, k, v] = [0, 1, 2].map(|i| Tensor::new(shapes[i], values[i].clone()).unwrap());
        let error = engine.forward(&problem, [&q, &k, &v], &wrong.view()).unwrap_err();
        assert!(error.to_string().contains("entry 1 of sequence 0"), "{error}");
    }
}
