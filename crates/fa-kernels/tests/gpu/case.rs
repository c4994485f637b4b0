//! One problem in one memory layout: tensors on the GPU, and the oracle's judgement.

use std::sync::Arc;

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{
    CudaGraph, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, ValidAsZeroBits,
};
use fa_core::{Dtype, Mask, Problem, Strides, TensorLayout};
use fa_cpu::check::{k_shape, lse_len, out_shape, q_shape, v_shape};
use fa_cpu::{TensorRef, compare, reference};
use fa_kernels::{
    Element, Error, Forward, ForwardArgs, Input, Kernels, Output, RawForwardArgs, RawTensor, cudarc,
};

/// What other problems differ from in a field or two.
pub const BASE: Problem = Problem::square(2, 300, 4, 128, Mask::CAUSAL, Dtype::Bf16);

/// [`BASE`] with three query heads on each K/V head.
pub const GQA: Problem = Problem { heads_q: 6, heads_kv: 2, ..BASE };

/// What both passes are tried on: every field that decides which kernel runs and how.
pub const PROBLEMS: [Problem; 12] = [
    BASE,
    Problem { mask: Mask::FULL, ..BASE },
    GQA,
    Problem { seqlen_q: 1, ..BASE },
    Problem { head_dim: 64, head_dim_v: 64, ..BASE },
    Problem { head_dim: 40, head_dim_v: 72, mask: Mask::FULL, ..BASE },
    Problem { head_dim: 192, ..BASE },
    Problem { head_dim: 256, head_dim_v: 256, ..BASE },
    Problem { mask: Mask::window(70, 9), ..BASE },
    Problem { softcap: Some(5.0), ..BASE },
    Problem { softmax_scale: Some(0.3), ..BASE },
    Problem { seqlen_k: 0, ..BASE },
];

/// A problem, how its tensors lie, and how many elements stand between their rows.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub problem: Problem,
    pub layout: TensorLayout,
    pub pad: usize,
}

/// Element types on both sides.
pub trait Both: Element + fa_cpu::Element + DeviceRepr + ValidAsZeroBits + PartialEq + Default {}
impl<T: Element + fa_cpu::Element + DeviceRepr + ValidAsZeroBits + PartialEq + Default> Both for T {}

/// A call's tensors, on the host and on the GPU.
pub struct Tensors<T> {
    host: [Vec<T>; 3],
    shapes: [[usize; 4]; 4],
    strides: [Strides; 4],
    inputs: [CudaSlice<T>; 3],
    out: CudaSlice<T>,
    lse: CudaSlice<f32>,
    workspace: CudaSlice<u8>,
}

impl Case {
    /// Runs the problem on NaN-poisoned outputs and compares with the oracle.
    pub fn check<T: Both>(&self, kernels: &Kernels) {
        let forward = kernels.forward(&self.problem).unwrap_or_else(|error| panic!("{self:?}: {error}"));
        let stream = kernels.context().default_stream();
        let mut tensors = Tensors::<T>::new(self, &forward, &stream);
        tensors.run(&forward, &stream).unwrap_or_else(|error| panic!("{self:?}: {error}"));
        tensors.verify(self, &stream);
    }

    /// Reproducible values, roughly normal, for the tensor of shape `i`, with NaN between rows: nobody may read it.
    pub fn values<T: Both>(&self, i: usize) -> Vec<T> {
        let mut state = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(i as u64 + 1);
        let mut normal = || {
            let mut sum = 0.0;
            for _ in 0..4 {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                sum += (state >> 40) as f64 / (1u64 << 24) as f64 - 0.5;
            }
            sum * 3f64.sqrt()
        };
        let shape = self.shapes()[i];
        let (strides, len) = self.strides(shape);
        let mut values = vec![T::from_f64(f64::NAN); len];
        for [b, s, h, d] in positions(shape) {
            values[strides.offset(b, s, h, d) as usize] = T::from_f64(normal());
        }
        values
    }

    /// Shapes `[batch, seqlen, heads, dim]` of q, k, v and out.
    pub fn shapes(&self) -> [[usize; 4]; 4] {
        let problem = &self.problem;
        [q_shape(problem), k_shape(problem), v_shape(problem), out_shape(problem)]
    }

    /// Strides of a tensor whose rows have `pad` elements more than are used, and the elements it takes.
    pub fn strides(&self, [batch, seqlen, heads, dim]: [usize; 4]) -> (Strides, usize) {
        let row = dim + self.pad;
        (self.layout.strides(seqlen, heads, row), (batch * seqlen * heads * row).max(1))
    }
}

impl<T: Both> Tensors<T> {
    /// The inputs of [`Case::values`] and poisoned outputs.
    pub fn new(case: &Case, forward: &Forward, stream: &Arc<CudaStream>) -> Tensors<T> {
        let shapes = case.shapes();
        let host = [0, 1, 2].map(|i| case.values(i));
        let rows = lse_len(&case.problem);
        let inputs = host.each_ref().map(|values| stream.clone_htod(values).unwrap());
        let out = stream.alloc_zeros(case.strides(shapes[3]).1).unwrap();
        let lse = stream.alloc_zeros(rows.max(1)).unwrap();
        let workspace = stream.alloc_zeros(forward.workspace_bytes().max(1)).unwrap();
        let strides = shapes.map(|shape| case.strides(shape).0);
        let mut tensors = Tensors { host, shapes, strides, inputs, out, lse, workspace };
        tensors.poison(stream);
        tensors
    }

    /// Fills the outputs with NaN.
    pub fn poison(&mut self, stream: &Arc<CudaStream>) {
        let out = vec![T::from_f64(f64::NAN); self.out.len()];
        stream.memcpy_htod(&out, &mut self.out).unwrap();
        stream.memcpy_htod(&vec![f32::NAN; self.lse.len()], &mut self.lse).unwrap();
    }

    /// A call through the safe face.
    pub fn run(&mut self, forward: &Forward, stream: &CudaStream) -> Result<(), Error> {
        let [q, k, v] = &self.inputs;
        let [qs, ks, vs, os] = self.strides;
        forward.run(
            stream,
            ForwardArgs {
                q: Input { data: q, strides: qs },
                k: Input { data: k, strides: ks },
                v: Input { data: v, strides: vs },
                out: Output { data: &mut self.out, strides: os },
                lse: Some(&mut self.lse),
                workspace: Some(&mut self.workspace),
            },
        )
    }

    /// A call with empty tensors of another type.
    pub fn run_as<U: Both>(&mut self, forward: &Forward, stream: &Arc<CudaStream>) -> Result<(), Error> {
        let [q, mut out] = [0, 1].map(|_| stream.alloc_zeros::<U>(1).unwrap());
        let [qs, ks, vs, os] = self.strides;
        forward.run(
            stream,
            ForwardArgs {
                q: Input { data: &q, strides: qs },
                k: Input { data: &q, strides: ks },
                v: Input { data: &q, strides: vs },
                out: Output { data: &mut out, strides: os },
                lse: None,
                workspace: None,
            },
        )
    }

    /// The addresses.
    pub fn raw(&mut self, stream: &CudaStream) -> RawForwardArgs {
        let strides = self.strides;
        let input =
            |i: usize| RawTensor { address: self.inputs[i].device_ptr(stream).0, strides: strides[i] };
        let (q, k, v) = (input(0), input(1), input(2));
        let out = RawTensor { address: self.out.device_ptr_mut(stream).0, strides: strides[3] };
        let lse = Some(self.lse.device_ptr_mut(stream).0);
        let workspace = Some(self.workspace.device_ptr_mut(stream).0);
        RawForwardArgs { q, k, v, out, lse, workspace }
    }

    /// O, packed `[batch, seqlen, heads, dim]`, and LSE.
    pub fn outputs(&self, stream: &Arc<CudaStream>) -> (Vec<T>, Vec<f32>) {
        let out = stream.clone_dtoh(&self.out).unwrap();
        let lse = stream.clone_dtoh(&self.lse).unwrap();
        stream.synchronize().unwrap();
        let at = |[b, s, h, d]: [usize; 4]| out[self.strides[3].offset(b, s, h, d) as usize];
        (positions(self.shapes[3]).map(at).collect(), lse)
    }

    /// O and LSE where they lie.
    pub fn into_outputs(self) -> (CudaSlice<T>, CudaSlice<f32>) {
        (self.out, self.lse)
    }

    /// Compares the outputs with the oracle.
    pub fn verify(&self, case: &Case, stream: &Arc<CudaStream>) {
        let problem = &case.problem;
        let view =
            |i: usize, name| TensorRef::new(name, &self.host[i], self.shapes[i], self.strides[i]).unwrap();
        let (q, k, v) = (view(0, "q"), view(1, "k"), view(2, "v"));
        let expected = reference::forward(problem, &q, &k, &v).unwrap();
        let low = reference::low_precision::forward(problem, &q, &k, &v).unwrap();
        let (out, lse) = self.outputs(stream);
        let shape = self.shapes[3];
        let found = compare::compare(shape, problem.dtype, &out, &expected.out, Some(&low.out)).unwrap();
        assert!(found.passed(), "{case:?}: {found}");
        let rows = [problem.batch, problem.heads_q, problem.seqlen_q];
        let found = compare::compare_lse(rows, problem.dtype, &lse, &expected.lse).unwrap();
        assert!(found.passed(), "{case:?}: LSE {found}");
    }
}

/// What `launch` puts on the stream, as a graph.
pub fn captured(stream: &Arc<CudaStream>, launch: impl FnOnce() -> Result<(), Error>) -> CudaGraph {
    stream.synchronize().unwrap();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    launch().unwrap();
    stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().expect("a graph was captured")
}

/// Every index into a shape, in packed order.
pub fn positions([batch, seqlen, heads, dim]: [usize; 4]) -> impl Iterator<Item = [usize; 4]> {
    (0..batch * seqlen * heads * dim)
        .map(move |i| [i / (seqlen * heads * dim), i / (heads * dim) % seqlen, i / dim % heads, i % dim])
}
