//! One engine that threads share, on problems of any size, one after the other.

use std::num::NonZeroUsize;
use std::thread;

use fa_attn::{
    Backend, CpuOptions, Dtype, Element, Engine, Lengths, Mask, Problem, Tensor, TensorLayout, Types, bf16,
    f16,
};

/// Any head dims, lengths from 0 on, both with every mask.
fn problems(dtype: Dtype) -> Vec<Problem> {
    const DIMS: [(usize, usize); 9] =
        [(1, 1), (2, 3), (7, 16), (17, 1), (64, 64), (127, 40), (256, 255), (511, 9), (512, 512)];
    const LENGTHS: [(usize, usize); 7] = [(1, 1), (0, 5), (5, 0), (1, 70), (33, 2), (16, 17), (40, 40)];
    const HEADS: [(usize, usize); 3] = [(1, 1), (4, 2), (6, 1)];
    const MASKS: [Mask; 4] = [Mask::FULL, Mask::CAUSAL, Mask::window(0, 0), Mask::window(9, 3)];
    let mut problems = vec![];
    for (i, (head_dim, head_dim_v)) in DIMS.into_iter().enumerate() {
        for (j, (queries, keys)) in LENGTHS.into_iter().enumerate() {
            let ((heads_q, heads_kv), mask) = (HEADS[(i + j) % 3], MASKS[(i + 3 * j) % 4]);
            problems.push(
                Problem::square(1, 1, 1, 1, mask, dtype)
                    .with_heads(heads_q, heads_kv)
                    .with_head_dims(head_dim, head_dim_v)
                    .with_mask(mask)
                    .with_lengths(Lengths::uniform(1 + j % 2, queries, keys))
                    .with_types(Types::same(dtype)),
            );
        }
    }
    problems
}

fn tensor<T: Element>(shape: [usize; 4], seed: f64) -> Tensor<T> {
    let mut tensor = Tensor::filled(shape, TensorLayout::Bshd, T::default());
    for (i, value) in tensor.data.iter_mut().enumerate() {
        *value = T::from_f64((i as f64 * seed).sin());
    }
    tensor
}

/// O, LSE, dQ, dK and dV.
fn results<T: Element>(engine: &Engine, problem: &Problem) -> [Vec<f64>; 5] {
    let (batch, rows, keys) = (problem.lengths.sequences(), problem.lengths.max_q(), problem.lengths.max_k());
    let q = tensor::<T>([batch, rows, problem.heads_q, problem.head_dim], 0.37);
    let k = tensor::<T>([batch, keys, problem.heads_kv, problem.head_dim], 0.71);
    let v = tensor::<T>([batch, keys, problem.heads_kv, problem.head_dim_v], 0.13);
    let dout = tensor::<T>([batch, rows, problem.heads_q, problem.head_dim_v], 0.59);
    let output = engine.attention(&q, &k, &v, problem.mask).unwrap();
    let gradients = engine.gradients([&q, &k, &v], problem.mask, &output, &dout).unwrap();
    let exact = |values: &[T]| values.iter().map(|value| value.to_f64()).collect::<Vec<_>>();
    let lse = output.lse.iter().map(|&lse| f64::from(lse)).collect();
    let [dq, dk, dv] = [&gradients.dq, &gradients.dk, &gradients.dv].map(|tensor| exact(&tensor.data));
    [exact(&output.out.data), lse, dq, dk, dv]
}

fn check<T: Element>(dtype: Dtype) {
    let engine = Engine::with(Backend::Cpu(CpuOptions::default())).unwrap();
    let oracle = Engine::with(Backend::Reference { threads: NonZeroUsize::new(1) }).unwrap();
    let problems = problems(dtype);
    let alone: Vec<_> = problems.iter().map(|problem| results::<T>(&engine, problem)).collect();
    for (problem, found) in problems.iter().zip(&alone) {
        for (name, (found, want)) in
            ["O", "LSE", "dQ", "dK", "dV"].iter().zip(found.iter().zip(&results::<T>(&oracle, problem)))
        {
            assert_eq!(found.len(), want.len());
            let largest = want.iter().filter(|want| want.is_finite()).fold(1.0, |a: f64, b| a.max(b.abs()));
            let limit = largest * (32.0 * dtype.unit_roundoff() + 2e-5);
            for (found, want) in found.iter().zip(want) {
                let equal = found == want || (found - want).abs() <= limit;
                assert!(equal, "{name} of {problem:?}: {found} for {want}");
            }
        }
    }
    // Each begins elsewhere, so that sizes meet.
    thread::scope(|scope| {
        for first in 0..4 {
            let (engine, problems, alone) = (&engine, &problems, &alone);
            scope.spawn(move || {
                for i in (0..problems.len()).map(|i| (i + 17 * first) % problems.len()) {
                    let found = results::<T>(engine, &problems[i]);
                    let same = |a: &[f64], b: &[f64]| {
                        a.iter().map(|x| x.to_bits()).eq(b.iter().map(|x| x.to_bits()))
                    };
                    let same = found.iter().zip(&alone[i]).all(|(a, b)| same(a, b));
                    assert!(same, "other bits beside other threads: {:?}", problems[i]);
                }
            });
        }
    });
}

#[test]
fn threads_share_an_engine_on_problems_of_any_size() {
    check::<f32>(Dtype::F32);
    check::<f16>(Dtype::F16);
    check::<bf16>(Dtype::Bf16);
}
