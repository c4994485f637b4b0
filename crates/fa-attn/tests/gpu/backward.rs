//! Gradients: right, wholly written from a poisoned workspace, captured in a graph, and bit-equal where that
//! is asked for.

use std::sync::Arc;

use fa_attn::device::{DeviceBackward, DeviceForward, DeviceGradients, DeviceTensor, Gpu, Half};
use fa_core::{Dtype, LaunchPlan, Lengths, ScoreMod, Strides, TensorLayout, Types};
use fa_cpu::check::lse_len;
use fa_cpu::{Extras, compare, reference};
use fa_kernels::cudarc::driver::CudaStream;
use fa_kernels::{Backward, Error, RawBackwardArgs, RawTensor};
use half::{bf16, f16};

use super::case::{BASE, Case, GQA, PROBLEMS};
use super::{bind_backward, bind_forward, gpu};

/// The device tensors of one backward call: those of our own forward, which has run, and dO with poisoned
/// gradients.
struct Tensors<T> {
    forward: DeviceForward<T>,
    backward: DeviceBackward<T>,
}

impl<T: Half> Tensors<T> {
    fn new(case: &Case, gpu: &Gpu, backward: &Backward, stream: &Arc<CudaStream>) -> Tensors<T> {
        let bound = bind_forward(gpu, &case.problem, None).unwrap();
        let mut forward = case.tensors::<T>(&bound, stream);
        forward.run(&bound, stream).unwrap();
        let dout = DeviceTensor::place(stream, &case.values(3), case.placements()[3]).unwrap();
        let backward = DeviceBackward::new(stream, backward, &forward, dout).unwrap();
        Tensors { forward, backward }
    }

    fn run(&mut self, backward: &Backward, stream: &CudaStream) -> Result<(), Error> {
        self.backward.run(&self.forward, backward, stream)
    }

    fn results(&self, stream: &Arc<CudaStream>) -> DeviceGradients<T> {
        let results = self.backward.read(stream).unwrap();
        assert_eq!(results.strays, 0, "written between rows");
        results
    }
}

pub(crate) fn verify<T: Half>(case: &Case, results: &DeviceGradients<T>) {
    verify_with(case, results, &Extras::NONE);
}

fn verify_with<T: Half>(case: &Case, results: &DeviceGradients<T>, extras: &Extras<'_>) {
    let host = [0, 1, 2, 3].map(|i| case.values::<T>(i));
    let [q, k, v, dout] =
        [(0, "q"), (1, "k"), (2, "v"), (3, "dout")].map(|(i, name)| case.view(name, host[i].as_slice(), i));
    let problem = &case.problem;
    let exact = reference::backward_extras(problem, extras, &q, &k, &v, &dout).unwrap();
    let low = reference::low_precision::backward_extras(problem, extras, &q, &k, &v, &dout).unwrap();
    let expected = [(exact.dq, low.dq), (exact.dk, low.dk), (exact.dv, low.dv)];
    for (i, (found, (exact, low))) in results.values.iter().zip(expected).enumerate() {
        let found = compare::compare(case.shapes()[i], problem.types.q, found, &exact, Some(&low)).unwrap();
        assert!(found.passed(), "{case:?}: gradient {i}: {found}");
    }
}

fn check<T: Half>(gpu: &Gpu, case: Case, deterministic: bool) {
    let backward = bind_backward(gpu, &case.problem, deterministic, None)
        .unwrap_or_else(|error| panic!("{case:?}: {error}"));
    let mut tensors = Tensors::<T>::new(&case, gpu, &backward, &gpu.stream);
    tensors.run(&backward, &gpu.stream).unwrap_or_else(|error| panic!("{case:?}: {error}"));
    verify(&case, &tensors.results(&gpu.stream));
}

#[test]
#[ignore = "needs a GPU"]
fn a_gradient_of_the_lse_joins_that_of_the_output() {
    let gpu = gpu();
    for problem in [BASE, GQA, BASE.with_score(ScoreMod::softcap(5.0))] {
        for deterministic in [false, true] {
            let case = Case { problem, layout: TensorLayout::Bshd, pad: 0 };
            let backward = bind_backward(&gpu, &problem, deterministic, None).unwrap();
            let mut tensors = Tensors::<bf16>::new(&case, &gpu, &backward, &gpu.stream);
            let dlse: Vec<f32> = (0..lse_len(&problem)).map(|row| (row % 13) as f32 / 4.0 - 1.5).collect();
            tensors.forward.extras.set_dlse(Some(gpu.stream.clone_htod(&dlse).unwrap()));
            tensors.run(&backward, &gpu.stream).unwrap();
            let extras = Extras { dlse: Some(&dlse), ..Extras::NONE };
            verify_with(&case, &tensors.results(&gpu.stream), &extras);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gradients_are_right_and_wholly_written() {
    let gpu = gpu();
    let more = [
        BASE.with_lengths(Lengths::uniform(1, BASE.lengths.max_q(), 130)).with_heads(8, 1),
        GQA.with_lengths(Lengths::uniform(GQA.lengths.sequences(), 500, GQA.lengths.max_k())),
        BASE.with_lengths(Lengths::uniform(BASE.lengths.sequences(), 0, BASE.lengths.max_k())),
        GQA.with_lengths(Lengths::uniform(GQA.lengths.sequences(), 0, GQA.lengths.max_k())),
    ];
    for problem in PROBLEMS.into_iter().chain(more) {
        for (layout, deterministic) in [(TensorLayout::Bshd, false), (TensorLayout::Bhsd, true)] {
            check::<bf16>(&gpu, Case { problem, layout, pad: 0 }, deterministic);
        }
        let problem = problem.with_types(Types::same(Dtype::F16));
        check::<f16>(&gpu, Case { problem, layout: TensorLayout::Bshd, pad: 24 }, false);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn deterministic_gradients_are_bit_equal() {
    let gpu = gpu();
    let stream = &gpu.stream;
    for seqlen_k in [1111, 2000] {
        let problem =
            BASE.with_lengths(Lengths::uniform(BASE.lengths.sequences(), 1111, seqlen_k)).with_heads_q(8);
        let case = Case { problem, layout: TensorLayout::Bshd, pad: 0 };
        let backward = bind_backward(&gpu, &problem, true, None).unwrap();
        let mut tensors = Tensors::<bf16>::new(&case, &gpu, &backward, stream);
        tensors.run(&backward, stream).unwrap();
        let first = tensors.results(stream);
        for _ in 0..100 {
            tensors.backward.poison(stream).unwrap();
            tensors.run(&backward, stream).unwrap();
            assert!(tensors.results(stream).same_bits(&first));
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_captured_backward_gives_the_same_result_when_replayed() {
    let gpu = gpu();
    let case = Case { problem: BASE, layout: TensorLayout::Bshd, pad: 0 };
    let backward = bind_backward(&gpu, &case.problem, true, None).unwrap();
    let stream = &gpu.context().new_stream().unwrap();
    let mut tensors = Tensors::<bf16>::new(&case, &gpu, &backward, stream);
    tensors.run(&backward, stream).unwrap();
    let expected = tensors.results(stream);

    // SAFETY: the tensors outlive the graph.
    let graph = unsafe { tensors.backward.capture(&tensors.forward, &backward, stream) }.unwrap();
    for _ in 0..3 {
        tensors.backward.poison(stream).unwrap();
        graph.launch().unwrap();
        assert!(tensors.results(stream).same_bits(&expected));
    }
}

/// Nothing is demanded of what is not there, nor of the thread that launches.
#[test]
#[ignore = "needs a GPU"]
fn without_queries_keys_get_zeros_from_any_thread() {
    let gpu = gpu();
    let case = Case {
        problem: BASE.with_lengths(Lengths::uniform(BASE.lengths.sequences(), 0, BASE.lengths.max_k())),
        layout: TensorLayout::Bshd,
        pad: 0,
    };
    for deterministic in [false, true] {
        let backward = bind_backward(&gpu, &case.problem, deterministic, None).unwrap();
        let stream = &gpu.context().new_stream().unwrap();
        let mut tensors = Tensors::<bf16>::new(&case, &gpu, &backward, stream);
        let mut raw = tensors.backward.raw(&tensors.forward, stream);
        for empty in [&mut raw.q, &mut raw.out, &mut raw.dout, &mut raw.dq] {
            *empty = RawTensor { address: 2, strides: Strides { batch: 1, seq: 3, head: 5, dim: 7 } };
        }
        raw.lse = 0;
        stream.synchronize().unwrap();
        std::thread::scope(|scope| {
            // SAFETY: what has elements lies in the tensors above, which nothing else uses meanwhile.
            scope.spawn(|| unsafe { backward.run_raw(stream, &raw) }.unwrap());
        });
        let [_, dk, dv] = tensors.results(stream).values;
        assert!(dk.iter().chain(&dv).all(|&value| value == bf16::ZERO));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_backward_refuses_what_does_not_fit() {
    let gpu = gpu();
    let case = Case { problem: BASE, layout: TensorLayout::Bshd, pad: 0 };
    let backward = bind_backward(&gpu, &case.problem, false, None).unwrap();
    let stream = &gpu.stream;
    let mut tensors = Tensors::<bf16>::new(&case, &gpu, &backward, stream);
    let raw = tensors.backward.raw(&tensors.forward, stream);
    let refused = |args: RawBackwardArgs, part: &str| {
        // SAFETY: refused, or run on the whole tensors above.
        let text = unsafe { backward.run_raw(stream, &args) }.expect_err("must be refused").to_string();
        assert!(text.contains(part), "{text} does not say {part}");
    };
    refused(
        RawBackwardArgs { dout: RawTensor { address: raw.dout.address + 2, ..raw.dout }, ..raw },
        "dout starts at",
    );
    refused(RawBackwardArgs { workspace: 0, ..raw }, "workspace");
    for lse in [0, raw.lse + 2] {
        refused(RawBackwardArgs { lse, ..raw }, "lse starts at");
    }
    let mut odd = raw;
    odd.dk.strides.seq += 1;
    refused(odd, "seq stride of dk");
    let mut overlapping = raw;
    overlapping.dv.strides.head = 64;
    refused(overlapping, "head stride of dv is 64");

    tensors.backward.workspace = stream.alloc_zeros(16).unwrap();
    let short = tensors.run(&backward, stream).unwrap_err().to_string();
    assert!(short.contains("workspace"), "{short}");
    let forward = bind_forward(&gpu, &BASE, None).unwrap().kernel().spec.clone();
    assert!(matches!(
        gpu.kernels.backward(&BASE, &LaunchPlan::whole(forward)),
        Err(Error::Mismatch { what: "pass", .. })
    ));
    let spec = backward.kernel().spec.clone();
    assert!(matches!(
        gpu.kernels.forward(&BASE, &LaunchPlan::whole(spec)),
        Err(Error::Mismatch { what: "pass", .. })
    ));
}
