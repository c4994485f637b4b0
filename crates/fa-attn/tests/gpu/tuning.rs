//! Tuning on first use: what the caller sees of it, and what stays.

use std::path::Path;
use std::time::{Duration, Instant};

use fa_attn::device::{BindOptions, Bound, Gpu};
use fa_attn::tune::Tuned;
use fa_attn::{Tuning, TuningOutcome};
use fa_core::{Dtype, Family, Mask, Pass, Problem, TensorLayout};
use fa_kernels::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use fa_kernels::{Cache, Headers, Kernels, driver};
use half::bf16;

use crate::case::Case;
use crate::{bind_forward, gpu};

const PROBLEM: Problem = Problem::square(2, 1111, 8, 128, Mask::CAUSAL, Dtype::Bf16);

const TUNING: Tuning = Tuning::OnFirstUse { candidates: 3, budget: Duration::from_secs(120) };

fn tuned_gpu(table: &Path) -> Gpu {
    let gpu = gpu();
    gpu.set_tuning_in(TUNING, table.to_owned()).expect("a table");
    gpu
}

/// Checks an outcome whose winner is on disk.
fn check(gpu: &Gpu, table: &Path, outcome: &TuningOutcome) {
    let TuningOutcome { problem, pass, family, tried, winner, error } = outcome;
    assert!(error.is_none(), "{error:?}");
    let measured = tried.iter().filter(|tried| tried.ms.is_some_and(|ms| ms > 0.0)).count();
    assert!(measured >= 2, "{tried:?}");
    let name = gpu.context().name().expect("a name");
    let kept = Tuned::read(table).expect("a table").find(&name, problem, *family, *pass);
    assert_eq!(&kept.map(|entry| entry.spec), winner);
}

#[test]
#[ignore = "needs a GPU"]
fn the_caller_sees_nothing_of_it_and_the_winner_is_used_and_kept() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let table = folder.path().join("tuned.json");
    let case = Case { problem: PROBLEM, layout: TensorLayout::Bshd, pad: 0 };
    let gpu = tuned_gpu(&table);
    let (stream, other) = (&gpu.stream, gpu.context().new_stream().expect("a stream"));

    let forward = bind_forward(&gpu, &PROBLEM, None).expect("bound");
    let mut tensors = case.tensors::<bf16>(&forward, stream);
    tensors.run(&forward, stream).expect("it runs");
    let first = tensors.read(stream).expect("read");
    case.verify(&first);
    // Launches, another bind and a capture while it is measured.
    for _ in 0..200 {
        tensors.poison(stream).expect("poisoned");
        tensors.run(&forward, stream).expect("it runs");
        assert!(tensors.read(stream).expect("read").same_bits(&first));
        // SAFETY: the tensors outlive the graph.
        let graph = unsafe { tensors.capture(&forward, &other) }.expect("captured");
        graph.launch().expect("launched");
        other.synchronize().expect("it ran");
        drop(bind_forward(&gpu, &PROBLEM, None).expect("bound again"));
    }
    let outcomes = gpu.finish_tuning();
    assert_eq!(outcomes.len(), 1, "{outcomes:?}");
    check(&gpu, &table, &outcomes[0]);
    assert_eq!(outcomes[0].family, Family::native(gpu.arch()));
    let winner = outcomes[0].winner.clone();
    let next = gpu.bind(&PROBLEM, Pass::Forward, &BindOptions::default()).expect("bound");
    assert_eq!(Some(next.spec()), winner.as_ref());
    case.check::<bf16>(&gpu);
    assert!(gpu.finish_tuning().is_empty(), "once");

    let later = tuned_gpu(&table);
    assert_eq!(
        Some(later.bind(&PROBLEM, Pass::Forward, &BindOptions::default()).expect("bound").spec()),
        winner.as_ref()
    );
    assert!(later.finish_tuning().is_empty(), "it is in the table");
}

#[test]
#[ignore = "needs a GPU"]
fn gradients_are_tuned_and_threads_at_once_have_them_tuned_once() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let table = folder.path().join("tuned.json");
    let gpu = tuned_gpu(&table);
    let pass = Pass::BACKWARD;
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| drop(gpu.bind(&PROBLEM, pass, &BindOptions::default()).expect("bound")));
        }
    });
    let outcomes = gpu.finish_tuning();
    assert_eq!(outcomes.len(), 1, "{pass:?}: {outcomes:?}");
    check(&gpu, &table, &outcomes[0]);
    let next = gpu.bind(&PROBLEM, pass, &BindOptions::default()).expect("bound");
    assert_eq!(Some(next.spec()), outcomes[0].winner.as_ref());
    assert!(matches!(next, Bound::Backward(_)));
}

#[test]
#[ignore = "needs a GPU"]
fn deterministic_gradients_and_pinned_forwards_keep_their_kernels() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let gpu = tuned_gpu(&folder.path().join("tuned.json"));
    let options = BindOptions::default().with_pinned(true);
    let bind = |pass, options: &BindOptions| gpu.bind(&PROBLEM, pass, options).expect("bound").spec().clone();
    let first = bind(Pass::Forward, &options);
    bind(Pass::DETERMINISTIC_BACKWARD, &BindOptions::default());
    assert!(gpu.finish_tuning().is_empty(), "neither is measured");
    bind(Pass::Forward, &BindOptions::default());
    assert_eq!(gpu.finish_tuning().len(), 1);
    assert_eq!(bind(Pass::Forward, &options), first);
}

/// By default a winner is there a second after the first bind where the cache has the kernels, and after five
/// where they are compiled; a candidate that was begun is finished.
#[test]
#[ignore = "needs a GPU"]
fn winners_come_within_the_budget() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let cache = folder.path().join("kernels");
    let problems = [
        (PROBLEM, Pass::Forward),
        (PROBLEM, Pass::BACKWARD),
        (Problem::square(2, 16_384, 32, 128, Mask::CAUSAL, Dtype::Bf16), Pass::BACKWARD),
        (Problem::square(1, 8192, 16, 64, Mask::FULL, Dtype::F16), Pass::Forward),
    ];
    for (state, limit) in [("cold", 7.0), ("warm", 1.5)] {
        let context = driver::context(0).expect("a GPU");
        let cache = Cache::open(Some(cache.clone()), 1 << 30);
        let gpu = Gpu::with(Kernels::with(&context, cache, Headers::embedded()).expect("kernels"));
        gpu.set_tuning_in(Tuning::ON_FIRST_USE, folder.path().join(format!("{state}.json")))
            .expect("a table");
        for (problem, pass) in problems {
            drop(gpu.bind(&problem, pass, &BindOptions::default()).expect("bound"));
            let begun = Instant::now();
            let outcomes = gpu.finish_tuning();
            let seconds = begun.elapsed().as_secs_f64();
            println!("{state} {problem:?} {pass:?}: {seconds:.2} s");
            assert_eq!(outcomes.len(), 1, "{outcomes:?}");
            assert!(seconds < limit, "{state} {problem:?} {pass:?}: {seconds} s");
            let measured = outcomes[0].tried.iter().filter(|tried| tried.ms.is_some()).count();
            assert!(measured >= 2 || state == "cold", "{state}: {outcomes:?}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn nothing_begins_in_a_capture() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut gpu = tuned_gpu(&folder.path().join("tuned.json"));
    gpu.stream = gpu.context().new_stream().expect("a stream");
    // Loaded before, as a module is not loaded within a capture.
    let warm = bind_forward(&gpu, &PROBLEM, None).expect("bound");
    assert_eq!(gpu.finish_tuning().len(), 1);
    drop(warm);
    let other = PROBLEM.with_mask(Mask::FULL);
    gpu.set_tuning(Tuning::Off).expect("off");
    drop(bind_forward(&gpu, &other, None).expect("bound"));
    gpu.set_tuning_in(TUNING, folder.path().join("other.ron")).expect("a table");

    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    gpu.stream.begin_capture(mode).expect("a capture");
    let bound = bind_forward(&gpu, &other, None);
    let ended = gpu.stream.end_capture(CUgraphInstantiate_flags(0));
    drop((bound.expect("bound"), ended.expect("the capture is whole")));
    assert!(gpu.finish_tuning().is_empty(), "not in a capture");
    drop(bind_forward(&gpu, &other, None).expect("bound"));
    assert_eq!(gpu.finish_tuning().len(), 1, "after it");
}
