//! Sums over millions of keys or queries: f32 would lose their last digits one by one.

use fa_core::{Dtype, Lengths, Mask, Problem, Strides, Types};
use fa_cpu::simd::Isa;
use fa_cpu::tiled::{BackwardInputs, Options, backward_with, forward_with};
use fa_cpu::{Element, TensorMut, TensorRef};
use half::{bf16, f16};

use crate::tiled::isas;

const DIMS: usize = 4;

fn problem(queries: usize, keys: usize, dtype: Dtype) -> Problem {
    let lengths = Lengths::uniform(1, queries, keys);
    Problem::square(1, 1, 1, DIMS, Mask::FULL, dtype).with_lengths(lengths).with_types(Types::same(dtype))
}

/// So many rows that are all the same one.
fn repeated<'a, T>(name: &'static str, row: &'a [T], rows: usize) -> TensorRef<'a, T> {
    let strides = Strides { batch: 0, seq: 0, head: 0, dim: 1 };
    TensorRef::new(name, row, [1, rows, 1, DIMS], strides).unwrap()
}

fn written<'a, T>(data: &'a mut [T], rows: usize) -> TensorMut<'a, T> {
    let strides = Strides { batch: 0, seq: DIMS as i64, head: 0, dim: 1 };
    TensorMut::new("output", data, [1, rows, 1, DIMS], strides).unwrap()
}

fn rows<T: Element>() -> [Vec<T>; 3] {
    [[0.5, 0.25, -1.0, 0.125], [0.3, -0.7, 0.2, 0.9], [0.1, -0.3, 0.7, 1.1]]
        .map(|row: [f64; DIMS]| row.iter().map(|&value| T::from_f64(value)).collect())
}

fn dot<T: Element>(a: &[T], b: &[T]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a.to_f64() * b.to_f64()).sum()
}

/// O is the one value, LSE the one score and the logarithm of the number of keys.
fn equal_keys<T: Element>(isa: Isa, queries: usize, keys: usize, dtype: Dtype) {
    let problem = problem(queries, keys, dtype);
    let [q, k, v] = rows::<T>();
    let mut out = vec![T::from_f64(f64::NAN); queries * DIMS];
    let mut lse = vec![f32::NAN; queries];
    let options = Options { isa: Some(isa), threads: None };
    let (q, k) = (repeated("q", &q, queries), repeated("k", &k, keys));
    let to = &mut written(&mut out, queries);
    forward_with(options, &problem, &q, &k, &repeated("v", &v, keys), to, Some(&mut lse)).unwrap();
    let exact = problem.scale() * dot(q.data(), k.data()) + (keys as f64).ln();
    // In f32 what 500 equal terms lose at most, each rounded the same way. P is rounded to 16 bits where bf16
    // is multiplied, V and O are in any case.
    let tolerance = if dtype == Dtype::F32 { 2e-5 } else { 5e-3 };
    let name = format!("{isa} {dtype} {queries} x {keys}");
    for (got, want) in out.iter().zip(v.iter().cycle()) {
        let (got, want) = (got.to_f64(), want.to_f64());
        assert!((got / want - 1.0).abs() < tolerance, "{name}: O is {got} for {want}");
    }
    for &got in &lse {
        assert!((f64::from(got) - exact).abs() < 1e-5, "{name}: LSE is {got} for {exact}");
    }
}

/// One query splits its keys, forty are panels.
#[test]
fn of_millions_of_equal_keys_the_value_stays() {
    for isa in isas() {
        let vectors = isa != Isa::Portable;
        for (queries, keys) in [(1, if vectors { 30_000_000 } else { 9_000_001 }), (40, 4_000_003)] {
            equal_keys::<f32>(isa, queries, keys, Dtype::F32);
        }
        equal_keys::<bf16>(isa, 1, 9_000_001, Dtype::Bf16);
        equal_keys::<bf16>(isa, 40, 2_000_003, Dtype::Bf16);
        equal_keys::<f16>(isa, 1, 9_000_001, Dtype::F16);
    }
}

/// Keys of two kinds: the larger score comes last, so that all stretches but one are scaled down.
#[test]
fn stretches_are_merged_under_the_largest_score() {
    let (half, queries) = (200_000, 40);
    let problem = problem(queries, 2 * half, Dtype::F32);
    let mut random = crate::inputs::Random::new(5);
    let mut draw = |rows: usize| -> Vec<f32> { (0..rows * DIMS).map(|_| random.normal() as f32).collect() };
    let (q, mut k, v) = (draw(queries), draw(2 * half), draw(2 * half));
    k[half * DIMS..].iter_mut().for_each(|value| *value *= 3.0);
    let view = |name, data, rows| {
        let strides = Strides { batch: 0, seq: DIMS as i64, head: 0, dim: 1 };
        TensorRef::new(name, data, [1, rows, 1, DIMS], strides).unwrap()
    };
    let (q, k, v) = (view("q", &q, queries), view("k", &k, 2 * half), view("v", &v, 2 * half));
    let exact = fa_cpu::reference::forward(&problem, &q, &k, &v).unwrap();
    for isa in isas() {
        let (mut out, mut lse) = (vec![f32::NAN; queries * DIMS], vec![f32::NAN; queries]);
        let options = Options { isa: Some(isa), threads: None };
        forward_with(options, &problem, &q, &k, &v, &mut written(&mut out, queries), Some(&mut lse)).unwrap();
        for (got, want) in out.iter().zip(&exact.out).chain(lse.iter().zip(&exact.lse)) {
            assert!((f64::from(*got) - want).abs() < 2e-5 * (1.0 + want.abs()), "{isa}: {got} for {want}");
        }
    }
}

/// Of equal queries dV is one query's as many times: three keys, which all of them see alike.
#[test]
fn of_a_million_equal_queries_the_gradient_is_as_many_times_ones() {
    const KEYS: usize = 3;
    fn check<T: Element>(isa: Isa, queries: usize, dtype: Dtype, tolerance: f64) {
        let problem = problem(queries, KEYS, dtype);
        let [q, k, v] = rows::<T>();
        let dout: Vec<T> = [0.7, -0.1, 0.3, 1.3].iter().map(|&value| T::from_f64(value)).collect();
        let lse = vec![(problem.scale() * dot(&q, &k) + (KEYS as f64).ln()) as f32; queries];
        let zero = || T::from_f64(f64::NAN);
        let (mut dq, mut dk, mut dv) =
            (vec![zero(); queries * DIMS], vec![zero(); KEYS * DIMS], vec![zero(); KEYS * DIMS]);
        let inputs = BackwardInputs {
            q: repeated("q", &q, queries),
            k: repeated("k", &k, KEYS),
            v: repeated("v", &v, KEYS),
            out: repeated("out", &v, queries),
            lse: &lse,
            dout: repeated("dout", &dout, queries),
        };
        let options = Options { isa: Some(isa), threads: None };
        let (to_dk, to_dv) = (&mut written(&mut dk, KEYS), &mut written(&mut dv, KEYS));
        backward_with(options, &problem, &inputs, &mut written(&mut dq, queries), to_dk, to_dv).unwrap();
        for (got, dout) in dv.iter().zip(dout.iter().cycle()) {
            let (got, want) = (got.to_f64(), dout.to_f64() * queries as f64 / KEYS as f64);
            assert!((got / want - 1.0).abs() < tolerance, "{isa} {dtype}: dV is {got} for {want}");
        }
    }
    for isa in isas() {
        check::<f32>(isa, 1_000_001, Dtype::F32, 2e-5);
        check::<bf16>(isa, 1_000_001, Dtype::Bf16, 6e-3);
    }
}
