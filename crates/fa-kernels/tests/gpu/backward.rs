//! Gradients: right, wholly written from a poisoned workspace, captured in a graph, and bit-equal where that is asked for.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
use fa_core::{Dtype, Problem, Strides, TensorLayout};
use fa_cpu::{TensorRef, compare, reference};
use fa_kernels::{Backward, BackwardArgs, Error, Input, Kernels, Output, RawBackwardArgs, RawTensor, cudarc};
use half::{bf16, f16};

use super::case::{BASE, Both, Case, GQA, PROBLEMS, Tensors, captured, positions};
use super::kernels;

/// The tensors of one backward call: q, k, v, dout; out and lse of our own forward; dq, dk, dv.
struct Gradients<T> {
    host: [Vec<T>; 4],
    shapes: [[usize; 4]; 4],
    strides: [Strides; 4],
    inputs: [CudaSlice<T>; 4],
    out: CudaSlice<T>,
    lse: CudaSlice<f32>,
    gradients: [CudaSlice<T>; 3],
    workspace: CudaSlice<u8>,
}

impl<T: Both> Gradients<T> {
    fn new(case: &Case, kernels: &Kernels, backward: &Backward, stream: &Arc<CudaStream>) -> Gradients<T> {
        let forward = kernels.forward(&case.problem).unwrap();
        let mut tensors = Tensors::<T>::new(case, &forward, stream);
        tensors.run(&forward, stream).unwrap();
        let shapes = case.shapes();
        let host = [0, 1, 2, 3].map(|i| case.values::<T>(i));
        let inputs = host.each_ref().map(|values| stream.clone_htod(values).unwrap());
        let room = |i: usize| stream.alloc_zeros(case.strides(shapes[i]).1).unwrap();
        let (out, lse) = tensors.into_outputs();
        let mut made = Gradients {
            host,
            shapes,
            strides: shapes.map(|shape| case.strides(shape).0),
            inputs,
            out,
            lse,
            gradients: [room(0), room(1), room(2)],
            workspace: stream.alloc_zeros(backward.workspace_bytes().max(1)).unwrap(),
        };
        made.poison(stream);
        made
    }

    /// Fills the gradients and the workspace with NaN.
    fn poison(&mut self, stream: &Arc<CudaStream>) {
        for gradient in &mut self.gradients {
            let poison = vec![T::from_f64(f64::NAN); gradient.len()];
            stream.memcpy_htod(&poison, gradient).unwrap();
        }
        stream.memcpy_htod(&vec![0xffu8; self.workspace.len()], &mut self.workspace).unwrap();
    }

    fn run(&mut self, backward: &Backward, stream: &CudaStream) -> Result<(), Error> {
        let ([q, k, v, dout], [at_q, at_k, at_v, at_out]) = (&self.inputs, self.strides);
        let [dq, dk, dv] = &mut self.gradients;
        backward.run(
            stream,
            BackwardArgs {
                q: Input { data: q, strides: at_q },
                k: Input { data: k, strides: at_k },
                v: Input { data: v, strides: at_v },
                out: Input { data: &self.out, strides: at_out },
                lse: &self.lse,
                dout: Input { data: dout, strides: at_out },
                dq: Output { data: dq, strides: at_q },
                dk: Output { data: dk, strides: at_k },
                dv: Output { data: dv, strides: at_v },
                workspace: &mut self.workspace,
            },
        )
    }

    fn raw(&mut self, stream: &CudaStream) -> RawBackwardArgs {
        let at = self.strides;
        let input = |i: usize| RawTensor { address: self.inputs[i].device_ptr(stream).0, strides: at[i] };
        let (q, k, v, dout) = (input(0), input(1), input(2), input(3));
        let [dq, dk, dv] = [0, 1, 2]
            .map(|i| RawTensor { address: self.gradients[i].device_ptr_mut(stream).0, strides: at[i] });
        let out = RawTensor { address: self.out.device_ptr(stream).0, strides: at[3] };
        let lse = self.lse.device_ptr(stream).0;
        let workspace = self.workspace.device_ptr_mut(stream).0;
        RawBackwardArgs { q, k, v, out, lse, dout, dq, dk, dv, workspace }
    }

    /// dQ, dK and dV, packed `[batch, seqlen, heads, dim]`.
    fn results(&self, stream: &Arc<CudaStream>) -> [Vec<T>; 3] {
        [0, 1, 2].map(|i| {
            let values = stream.clone_dtoh(&self.gradients[i]).unwrap();
            let strides = self.strides[i];
            let mut inside = vec![false; values.len()];
            let packed = positions(self.shapes[i]).map(|[b, s, h, d]| {
                let at = strides.offset(b, s, h, d) as usize;
                inside[at] = true;
                values[at]
            });
            let packed = packed.collect();
            let stray = values.iter().zip(&inside).any(|(value, inside)| !inside && !value.to_f64().is_nan());
            assert!(!stray, "gradient {i}: written between rows");
            packed
        })
    }

    fn verify(&self, case: &Case, stream: &Arc<CudaStream>) {
        let view =
            |i: usize, name| TensorRef::new(name, &self.host[i], self.shapes[i], self.strides[i]).unwrap();
        let (q, k, v, dout) = (view(0, "q"), view(1, "k"), view(2, "v"), view(3, "dout"));
        let problem = &case.problem;
        let exact = reference::backward(problem, &q, &k, &v, &dout).unwrap();
        let low = reference::low_precision::backward(problem, &q, &k, &v, &dout).unwrap();
        let expected = [(exact.dq, low.dq), (exact.dk, low.dk), (exact.dv, low.dv)];
        for (i, (found, (exact, low))) in self.results(stream).iter().zip(expected).enumerate() {
            let found = compare::compare(self.shapes[i], problem.dtype, found, &exact, Some(&low)).unwrap();
            assert!(found.passed(), "{case:?}: gradient {i}: {found}");
        }
    }
}

fn check<T: Both>(kernels: &Kernels, case: Case, deterministic: bool) {
    let backward =
        kernels.backward(&case.problem, deterministic).unwrap_or_else(|error| panic!("{case:?}: {error}"));
    let stream = kernels.context().default_stream();
    let mut tensors = Gradients::<T>::new(&case, kernels, &backward, &stream);
    tensors.run(&backward, &stream).unwrap_or_else(|error| panic!("{case:?}: {error}"));
    tensors.verify(&case, &stream);
}

#[test]
#[ignore = "needs a GPU"]
fn gradients_are_right_and_wholly_written() {
    let kernels = kernels();
    let more = [
        Problem { batch: 1, heads_q: 8, heads_kv: 1, seqlen_k: 130, ..BASE },
        Problem { seqlen_q: 500, ..GQA },
        Problem { seqlen_q: 0, ..BASE },
        Problem { seqlen_q: 0, ..GQA },
    ];
    for problem in PROBLEMS.into_iter().chain(more) {
        for (layout, deterministic) in [(TensorLayout::Bshd, false), (TensorLayout::Bhsd, true)] {
            check::<bf16>(&kernels, Case { problem, layout, pad: 0 }, deterministic);
        }
        let problem = Problem { dtype: Dtype::F16, ..problem };
        check::<f16>(&kernels, Case { problem, layout: TensorLayout::Bshd, pad: 24 }, false);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn deterministic_gradients_are_bit_equal() {
    let kernels = kernels();
    let stream = kernels.context().default_stream();
    for seqlen_k in [1111, 2000] {
        let problem = Problem { seqlen_q: 1111, seqlen_k, heads_q: 8, ..BASE };
        let case = Case { problem, layout: TensorLayout::Bshd, pad: 0 };
        let backward = kernels.backward(&problem, true).unwrap();
        let mut tensors = Gradients::<bf16>::new(&case, &kernels, &backward, &stream);
        tensors.run(&backward, &stream).unwrap();
        let first = tensors.results(&stream);
        for _ in 0..100 {
            tensors.poison(&stream);
            tensors.run(&backward, &stream).unwrap();
            assert!(tensors.results(&stream) == first);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_captured_backward_gives_the_same_result_when_replayed() {
    let kernels = kernels();
    let case = Case { problem: BASE, layout: TensorLayout::Bshd, pad: 0 };
    let backward = kernels.backward(&case.problem, true).unwrap();
    let stream = kernels.context().new_stream().unwrap();
    let mut tensors = Gradients::<bf16>::new(&case, &kernels, &backward, &stream);
    tensors.run(&backward, &stream).unwrap();
    let expected = tensors.results(&stream);

    let raw = tensors.raw(&stream);
    // SAFETY: the tensors outlive the graph, and nothing else uses them meanwhile.
    let graph = captured(&stream, || unsafe { backward.run_raw(&stream, &raw) });
    for _ in 0..3 {
        tensors.poison(&stream);
        graph.launch().unwrap();
        assert!(tensors.results(&stream) == expected);
    }
}

/// Nothing is demanded of what is not there, nor of the thread that launches.
#[test]
#[ignore = "needs a GPU"]
fn without_queries_keys_get_zeros_from_any_thread() {
    let kernels = kernels();
    let case = Case { problem: Problem { seqlen_q: 0, ..BASE }, layout: TensorLayout::Bshd, pad: 0 };
    for deterministic in [false, true] {
        let backward = kernels.backward(&case.problem, deterministic).unwrap();
        let stream = kernels.context().new_stream().unwrap();
        let mut tensors = Gradients::<bf16>::new(&case, &kernels, &backward, &stream);
        let mut raw = tensors.raw(&stream);
        for empty in [&mut raw.q, &mut raw.out, &mut raw.dout, &mut raw.dq] {
            *empty = RawTensor { address: 2, strides: Strides { batch: 1, seq: 3, head: 5, dim: 7 } };
        }
        raw.lse = 0;
        stream.synchronize().unwrap();
        std::thread::scope(|scope| {
            // SAFETY: what has elements lies in the tensors above, which nothing else uses meanwhile.
            scope.spawn(|| unsafe { backward.run_raw(&stream, &raw) }.unwrap());
        });
        let [_, dk, dv] = tensors.results(&stream);
        assert!(dk.iter().chain(&dv).all(|&value| value == bf16::ZERO));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_backward_refuses_what_does_not_fit() {
    let kernels = kernels();
    let case = Case { problem: BASE, layout: TensorLayout::Bshd, pad: 0 };
    let backward = kernels.backward(&case.problem, false).unwrap();
    let stream = kernels.context().default_stream();
    let mut tensors = Gradients::<bf16>::new(&case, &kernels, &backward, &stream);
    let raw = tensors.raw(&stream);
    let refused = |args: RawBackwardArgs, part: &str| {
        // SAFETY: refused, or run on the whole tensors above.
        let text = unsafe { backward.run_raw(&stream, &args) }.expect_err("must be refused").to_string();
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

    tensors.workspace = stream.alloc_zeros(16).unwrap();
    let short = tensors.run(&backward, &stream).unwrap_err().to_string();
    assert!(short.contains("workspace"), "{short}");
    let forward = kernels.forward(&BASE).unwrap().kernel().spec.clone();
    assert!(matches!(kernels.backward_with(&BASE, &forward), Err(Error::Mismatch { what: "pass", .. })));
    let spec = backward.kernel().spec.clone();
    assert!(matches!(kernels.forward_with(&BASE, &spec), Err(Error::Mismatch { what: "pass", .. })));
}
