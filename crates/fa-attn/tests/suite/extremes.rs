//! Problems of absurd sizes: computed, or refused by an error that names the limit. None panics, allocates
//! what no tensor of the problem holds, or goes through rows that do not exist.

use fa_attn::program::{ArrayData, ArrayView, Inputs, Program};
use fa_attn::{
    Backend, BackwardTensors, CpuOptions, Dtype, Engine, Error, Extras, Gradients, Lengths, Mask, Output,
    Pass, Problem, ScoreMod, Side, Tensor, TensorLayout,
};
use fa_core::{Arch, ProblemError};
use fa_kernels::launch::Launches;
use fa_planner::divide;
use fa_planner::plan::{PlanOptions, best};

fn engine() -> Engine {
    Engine::with(Backend::Cpu(CpuOptions::default())).expect("the CPU")
}

/// A tensor without elements, of any shape.
fn empty(shape: [usize; 4]) -> Tensor<f32> {
    Tensor::new(shape, Vec::new()).expect("no elements")
}

/// Results without a row may claim rows of any width and any other lengths, as arrays any extents.
#[test]
fn merges_and_arrays_of_absurd_sizes_are_refused_or_empty() {
    for shape in [[1, 0, 2, usize::MAX], [usize::MAX, 4, 0, 1 << 62], [1 << 40, 1 << 40, 0, 8]] {
        let part = Output { out: empty(shape), lse: Vec::new() };
        let merged = fa_attn::merge(&[&part, &part], None).expect("no rows");
        assert_eq!((merged.out.shape, merged.lse.len()), (shape, 0));
    }
    let part = Output { out: empty([1 << 40, 1 << 40, 1, 0]), lse: Vec::new() };
    assert!(matches!(fa_attn::merge(&[&part], None), Err(Error::Cpu(_))));
    let program = Program::parse("array t: f32[_, _]; score = s + t[q, k];").expect("parsed");
    for extents in [[1 << 62, 8], [usize::MAX, usize::MAX], [1 << 40, 1 << 31]] {
        let array = ArrayView::contiguous(ArrayData::F32(&[0.5; 16]), &extents);
        assert!(Inputs::new(&program, vec![array], Vec::new()).is_err(), "{extents:?}");
    }
}

/// V without a row may claim rows of any width, and the output has as many columns.
#[test]
fn an_output_wider_than_memory_is_refused() {
    let engine = engine();
    let q = Tensor::filled([1, 1, 1, 8], TensorLayout::Bshd, 1f32);
    let k = empty([1, 0, 1, 8]);
    let error = engine.attention(&q, &k, &empty([1, 0, 1, 1 << 40]), Mask::FULL).expect_err("2^42 bytes");
    let wide = ProblemError::TooMany { name: "head_dim_v", value: 1 << 40, limit: 1 << 16 };
    assert!(matches!(&error, Error::Problem(found) if *found == wide), "{error}");
    // The widest that is allowed, in more rows than memory holds.
    let rows = Problem::square(1, 1, 1, 1, Mask::FULL, Dtype::F32)
        .with_lengths(Lengths::uniform(1 << 31, 1, 0))
        .with_head_dims(1, 1 << 16);
    assert_eq!(rows.check(), Ok(()));
    let error = Output::<f32>::new(&rows, TensorLayout::Bshd).expect_err("2^49 bytes");
    let text = error.to_string();
    assert!(matches!(error, Error::Memory { tensor: "out", bytes } if bytes == 1 << 49), "{text}");
    assert!(text.contains("out takes 562949953421312 bytes"), "{text}");
    assert!(Gradients::<f32>::new(&rows.with_head_dim(1 << 16), TensorLayout::Bshd).is_err());
}

/// Tensors without elements that claim as many rows, heads or sequences as are allowed.
#[test]
fn what_has_no_rows_takes_no_time() {
    let engine = engine();
    let most = 1 << 47;
    for (q, k) in [
        ([most, 0, 1, 1], [most, 0, 1, 1]),
        ([0, most, 1, 1], [0, most, 1, 1]),
        ([0, 7, 1 << 20, 8], [0, most >> 20, 1, 8]),
        ([1, 0, 1 << 20, 1 << 16], [1, 0, 1, 1 << 16]),
        ([1, 0, 1 << 20, 8], [1, 3, 1, 8]),
        ([1 << 27, 0, 1 << 20, 1], [1 << 27, 0, 1 << 20, 1]),
    ] {
        let zeros = |shape: [usize; 4]| Tensor::filled(shape, TensorLayout::Bshd, 0f32);
        let (q, k) = (empty(q), zeros(k));
        let output = engine.attention(&q, &k, &k, Mask::CAUSAL).expect("an empty output");
        assert_eq!((output.out.shape, output.out.data.len()), (q.shape, 0));
        let gradients =
            engine.gradients([&q, &k, &k], Mask::CAUSAL, &output, &output.out).expect("gradients");
        assert!(gradients.dk.data.iter().chain(&gradients.dv.data).all(|&value| value == 0.0));
    }
}

/// Numbers in a reproducible order.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }

    fn of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    fn length(&mut self) -> usize {
        let all = [0, 1, 3, 64, 1000, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 33, 1 << 47, 1 << 63, usize::MAX];
        // Mostly lengths that there may be.
        let known = if self.below(4) > 0 { 6 } else { all.len() };
        self.of(&all[..known])
    }

    fn problem(&mut self) -> Problem {
        let mut side = |paged: bool| {
            let side = match self.below(if paged { 3 } else { 2 }) {
                0 => Side::padded(self.length()),
                1 => Side::packed(self.length(), self.length()),
                _ => Side::paged(self.length(), self.length(), self.length()),
            };
            if self.below(3) == 0 { side.with_used() } else { side }
        };
        let (q, k) = (side(false), side(true));
        let lengths = Lengths::of(self.length(), q, k);
        let heads_kv = self.of(&[1, 2, 8, 1 << 10, 1 << 20, 1 << 40, usize::MAX]);
        let window = |random: &mut Random| random.of(&[None, Some(0), Some(1), Some(100), Some(u32::MAX)]);
        Problem::square(1, 1, 1, 8, Mask::FULL, self.of(&[Dtype::Bf16, Dtype::F16, Dtype::F32]))
            .with_lengths(lengths)
            .with_heads(heads_kv.saturating_mul(self.of(&[1, 1, 4, 1 << 10, 1 << 20])), heads_kv)
            .with_head_dims(
                self.of(&[8, 64, 128, 256, 264, 1 << 16, 1 << 40, usize::MAX]),
                self.of(&[8, 64, 128, 256, 1 << 16, 1 << 40, usize::MAX]),
            )
            .with_mask(Mask::band(window(self), window(self)))
            .with_score(ScoreMod::NONE.with_sinks(self.below(4) == 0))
    }
}

/// What is valid is planned, launched and counted without overflow: of these the tests' build panics.
#[test]
fn problems_of_any_size_are_planned_or_refused() {
    let (engine, mut random) = (engine(), Random(17));
    let (mut valid, mut planned) = (0, 0);
    for _ in 0..20_000 {
        let problem = random.problem();
        let checked = problem.check();
        for pass in [Pass::Forward, Pass::BACKWARD, Pass::Backward { deterministic: true }] {
            assert_eq!(engine.bind(&problem, pass).is_ok(), {
                checked.is_ok() && !(pass.is_backward() && problem.lengths.page().is_some())
            });
            assert!(problem.flops(pass) >= 0.0 && problem.bytes(pass) >= 0.0);
        }
        valid += usize::from(checked.is_ok());
        let (arch, pass) = random.of(&[(Arch::Sm80, 0), (Arch::Sm90, 0), (Arch::Sm80, 1), (Arch::Sm90, 1)]);
        let pass = if pass == 0 { Pass::Forward } else { Pass::BACKWARD };
        let Ok(plan) = best(&problem, arch, &PlanOptions::default().with_pass(pass)) else {
            continue;
        };
        assert_eq!(checked, Ok(()), "{problem:?}");
        plan.spec.serves(&problem).expect("what is planned");
        // A launch may refuse a workspace of absurd size, and does so by an error.
        planned += usize::from(
            Launches::of(&divide(&problem, &plan.spec, arch, 132, None), &problem, arch, 132).is_ok(),
        );
    }
    assert!(valid > 1000 && planned > 100, "{valid} problems are valid, {planned} were planned");
}

/// Rows that two tensors share take no memory, a length in use takes no row.
#[test]
fn more_sequences_than_rows_are_computed() {
    let engine = engine();
    let batch = 70_000;
    let lengths = Lengths::of(batch, Side::packed(3, 2), Side::packed(5, 5));
    let problem = Problem::square(1, 1, 2, 8, Mask::FULL, Dtype::F32).with_lengths(lengths);
    let mut starts = vec![3; batch + 1];
    starts[..3].copy_from_slice(&[0, 1, 3]);
    let keys: Vec<i32> = (0..=batch as i32).map(|at| at.min(5)).collect();
    let extras = Extras { cu_seqlens_q: Some(&starts), cu_seqlens_k: Some(&keys), ..Extras::NONE };
    let q = Tensor::filled([1, 3, 2, 8], TensorLayout::Bshd, 1f32);
    let k = Tensor::filled([1, 5, 2, 8], TensorLayout::Bshd, 1f32);
    let output = engine.forward(&problem, [&q, &k, &k], &extras).expect("three rows");
    assert!(output.out.data.iter().all(|&value| value == 1.0));
    let mut gradients = Gradients::new(&problem, TensorLayout::Bshd).expect("eight rows");
    let tensors = BackwardTensors::of(
        [q.view("q").expect("q"), k.view("k").expect("k"), k.view("v").expect("v")],
        &output,
        &output.out,
        &mut gradients,
        extras,
    );
    let call = engine.bind(&problem, Pass::BACKWARD).expect("a backward");
    call.run(tensors.expect("tensors")).expect("gradients");
    assert!(gradients.dv.data.iter().all(|&value| value.is_finite()));
}
