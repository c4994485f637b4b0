//! One problem in one memory layout, its values, and the oracle's judgement.

use fa_attn::device::{DeviceForward, DeviceOutput, Gpu, Half, Placement, shapes};
use fa_core::{Dtype, Lengths, Mask, Problem, ScoreMod, TensorLayout};
use fa_cpu::{TensorRef, compare, reference};
use fa_kernels::Forward;
use fa_kernels::cudarc::driver::CudaStream;
use std::sync::Arc;

use crate::bind_forward;

/// What other problems differ from in a field or two.
pub(crate) const BASE: Problem = Problem::square(2, 300, 4, 128, Mask::CAUSAL, Dtype::Bf16);

/// [`BASE`] with three query heads on each K/V head.
pub(crate) const GQA: Problem = BASE.with_heads(6, 2);

/// What both passes are tried on: every field that decides which kernel runs and how.
pub(crate) const PROBLEMS: [Problem; 12] = [
    BASE,
    BASE.with_mask(Mask::FULL),
    GQA,
    BASE.with_lengths(Lengths::uniform(BASE.lengths.sequences(), 1, BASE.lengths.max_k())),
    BASE.with_head_dims(64, 64),
    BASE.with_head_dims(40, 72).with_mask(Mask::FULL),
    BASE.with_head_dim(192),
    BASE.with_head_dims(256, 256),
    BASE.with_mask(Mask::window(70, 9)),
    BASE.with_score(ScoreMod::softcap(5.0)),
    BASE.with_softmax_scale(Some(0.3)),
    BASE.with_lengths(Lengths::uniform(BASE.lengths.sequences(), BASE.lengths.max_q(), 0)),
];

/// A problem, how its tensors lie, and how many elements stand between their rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub problem: Problem,
    pub layout: TensorLayout,
    pub pad: usize,
}

impl Case {
    /// Runs the problem on NaN-poisoned outputs and compares with the oracle.
    pub(crate) fn check<T: Half>(&self, gpu: &Gpu) {
        let forward =
            bind_forward(gpu, &self.problem, None).unwrap_or_else(|error| panic!("{self:?}: {error}"));
        let mut tensors = self.tensors::<T>(&forward, &gpu.stream);
        tensors.run(&forward, &gpu.stream).unwrap_or_else(|error| panic!("{self:?}: {error}"));
        self.verify(&tensors.read(&gpu.stream).unwrap());
    }

    /// Q, K and V of [`Case::values`] on the GPU, NaN between their rows (nobody may read it), and poisoned
    /// outputs.
    pub(crate) fn tensors<T: Half>(&self, forward: &Forward, stream: &Arc<CudaStream>) -> DeviceForward<T> {
        let host = [0, 1, 2].map(|i| self.values::<T>(i));
        let values = host.each_ref().map(Vec::as_slice);
        let bytes = forward.workspace_bytes();
        DeviceForward::place(stream, &self.problem, bytes, values, &self.placements()).unwrap()
    }

    /// Reproducible values, roughly normal, for Q, K, V or O, packed `[batch, seqlen, heads, dim]`.
    pub(crate) fn values<T: Half>(&self, i: usize) -> Vec<T> {
        normals(i, self.shapes()[i])
    }

    /// Shapes of Q, K, V and O.
    pub(crate) fn shapes(&self) -> [[usize; 4]; 4] {
        shapes(&self.problem)
    }

    /// Where Q, K, V and O lie: `pad` elements after each row.
    pub(crate) fn placements(&self) -> [Placement; 4] {
        self.shapes().map(|shape| Placement::padded(shape, self.layout, self.pad))
    }

    /// A view of values of [`Case::values`].
    pub(crate) fn view<'a, T>(&self, name: &'static str, values: &'a [T], i: usize) -> TensorRef<'a, T> {
        TensorRef::packed(name, values, self.shapes()[i], TensorLayout::Bshd).unwrap()
    }

    /// Compares the outputs with the oracle.
    pub(crate) fn verify<T: Half>(&self, output: &DeviceOutput<T>) {
        let problem = &self.problem;
        let host = [0, 1, 2].map(|i| self.values::<T>(i));
        let [q, k, v] =
            [(0, "q"), (1, "k"), (2, "v")].map(|(i, name)| self.view(name, host[i].as_slice(), i));
        let expected = reference::forward(problem, &q, &k, &v).unwrap();
        let low = reference::low_precision::forward(problem, &q, &k, &v).unwrap();
        let shape = self.shapes()[3];
        let found =
            compare::compare(shape, problem.types.q, &output.out, &expected.out, Some(&low.out)).unwrap();
        assert!(found.passed(), "{self:?}: {found}");
        let rows = [problem.lengths.sequences(), problem.heads_q, problem.lengths.max_q()];
        let found = compare::compare_lse(rows, problem.types.q, &output.lse, &expected.lse).unwrap();
        assert!(found.passed(), "{self:?}: LSE {found}");
        assert_eq!(output.strays, 0, "{self:?}: written between rows");
    }
}

/// As many values, roughly normal, as such a tensor has: the same for the same `turn`.
pub(crate) fn normals<T: Half>(turn: usize, shape: [usize; 4]) -> Vec<T> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(turn as u64 + 1);
    let mut normal = || {
        let mut sum = 0.0;
        for _ in 0..4 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            sum += (state >> 40) as f64 / (1u64 << 24) as f64 - 0.5;
        }
        sum * 3f64.sqrt()
    };
    (0..shape.iter().product()).map(|_| T::from_f64(normal())).collect()
}
