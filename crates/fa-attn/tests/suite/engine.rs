//! The engine where there is no GPU to count on: every backend of the CPU, layouts, and what is refused.

use fa_core::program::{Inputs, Program};
use fa_core::{ScoreMod, Types};
use std::num::NonZeroUsize;

use fa_attn::{
    Backend, BackwardTensors, CpuOptions, Dtype, Element, Engine, Error, Extras, ForwardTensors, Gradients,
    Isa, KvRef, Lengths, Mask, Output, Pass, Problem, Side, Tensor, TensorLayout, Tuning, bf16, f16,
    problem_of,
};

const PROBLEM: Problem = Problem::square(2, 37, 2, 16, Mask::CAUSAL, Dtype::F32).with_heads_q(4);

/// Constants of a program decide when a problem is bound.
#[test]
fn a_band_and_a_cap_of_a_program_are_the_built_in_ones() {
    let program = Program::parse("mask = 0 <= q + off - k < 9; score = 3.0 * tanh(s / 3.0);").unwrap();
    let program = program.intern().unwrap();
    let own = PROBLEM.with_mask(Mask::FULL).with_score(ScoreMod::NONE.with_program(Some(program)));
    let named = PROBLEM.with_mask(Mask::causal_window(8)).with_score(ScoreMod::softcap(3.0));
    let [q, k, v, dout] = tensors::<f32>(TensorLayout::Bshd);
    let engine = Engine::with(Backend::Cpu(CpuOptions::default())).unwrap();
    let inputs = Inputs::new(&program, Vec::new(), Vec::new()).unwrap();
    let found = [own, named].map(|problem| {
        let (forward, backward) = engine.bind_both(&problem, false).unwrap();
        assert_eq!(forward.problem(), &problem);
        let mut output = Output::new(&problem, TensorLayout::Bshd).unwrap();
        let mut gradients = Gradients::new(&problem, TensorLayout::Bshd).unwrap();
        let views = || [q.view("q").unwrap(), k.view("k").unwrap(), v.view("v").unwrap()];
        // What the program reads is given, though nothing is.
        let program = problem.score.program.map(|_| &inputs);
        let tensors = ForwardTensors::of(views(), &mut output, Extras::NONE).unwrap();
        forward.run(ForwardTensors { program, ..tensors }).unwrap();
        let tensors = BackwardTensors::of(views(), &output, &dout, &mut gradients, Extras::NONE).unwrap();
        backward.run(BackwardTensors { program, ..tensors }).unwrap();
        (output.out.data, output.lse, gradients.dq.data, gradients.dk.data, gradients.dv.data)
    });
    assert_eq!(found[0], found[1]);
}

fn tensor<T: Element>(shape: [usize; 4], layout: TensorLayout, seed: f64) -> Tensor<T> {
    let [_, seqlen, heads, dim] = shape;
    let strides = layout.strides(seqlen, heads, dim);
    let mut tensor = Tensor::filled(shape, layout, T::default());
    for b in 0..shape[0] {
        for s in 0..seqlen {
            for h in 0..heads {
                for d in 0..dim {
                    let index = ((b * seqlen + s) * heads + h) * dim + d;
                    let value = (index as f64 * seed).sin();
                    tensor.data[strides.offset(b, s, h, d) as usize] = T::from_f64(value);
                }
            }
        }
    }
    tensor
}

/// Q, K, V and dO of [`PROBLEM`].
fn tensors<T: Element>(layout: TensorLayout) -> [Tensor<T>; 4] {
    let Problem { heads_q, heads_kv, head_dim, head_dim_v, .. } = PROBLEM;
    let (batch, seqlen_q, seqlen_k) =
        (PROBLEM.lengths.sequences(), PROBLEM.lengths.max_q(), PROBLEM.lengths.max_k());
    [
        tensor([batch, seqlen_q, heads_q, head_dim], layout, 0.37),
        tensor([batch, seqlen_k, heads_kv, head_dim], layout, 0.71),
        tensor([batch, seqlen_k, heads_kv, head_dim_v], layout, 0.13),
        tensor([batch, seqlen_q, heads_q, head_dim_v], layout, 0.59),
    ]
}

fn both<T: Element>(backend: Backend, layout: TensorLayout) -> (Output<T>, Gradients<T>) {
    let engine = Engine::with(backend).unwrap();
    let [q, k, v, dout] = tensors::<T>(layout);
    assert_eq!(problem_of(&q, &k, &v, Mask::CAUSAL).unwrap(), PROBLEM.with_types(Types::same(T::dtype())));
    let output = engine.attention(&q, &k, &v, Mask::CAUSAL).unwrap();
    let gradients = engine.gradients([&q, &k, &v], Mask::CAUSAL, &output, &dout).unwrap();
    (output, gradients)
}

/// Equal but for rounding; exact bounds are fa-cpu's matter, here it is what goes where.
fn check<T: Element>(found: &Tensor<T>, expected: &Tensor<T>, what: &str) {
    assert_eq!((found.shape, found.layout), (expected.shape, expected.layout), "{what}");
    let limit = 8.0 * T::dtype().unit_roundoff() + 1e-5;
    for (index, (found, expected)) in found.data.iter().zip(&expected.data).enumerate() {
        let off = (found.to_f64() - expected.to_f64()).abs();
        assert!(off <= limit, "{what}: {found:?} for {expected:?} at {index}");
    }
}

fn agree<T: Element>() {
    let threads = NonZeroUsize::new(2);
    for layout in [TensorLayout::Bshd, TensorLayout::Bhsd] {
        let (exact, exact_gradients) = both::<T>(Backend::Reference { threads }, layout);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()).map(Some).chain([None]) {
            let what = format!("{} {layout} {isa:?}", T::dtype());
            let (output, gradients) =
                both::<T>(Backend::Cpu(CpuOptions::default().with_isa(isa).with_threads(threads)), layout);
            check(&output.out, &exact.out, &what);
            let far = |(a, b): (&f32, &f32)| (a - b).abs() > 1e-3;
            assert!(!output.lse.iter().zip(&exact.lse).any(far), "{what}");
            check(&gradients.dq, &exact_gradients.dq, &what);
            check(&gradients.dk, &exact_gradients.dk, &what);
            check(&gradients.dv, &exact_gradients.dv, &what);
        }
    }
}

#[test]
fn backends_layouts_and_types_agree() {
    agree::<f32>();
    agree::<f16>();
    agree::<bf16>();
}

#[test]
fn a_call_says_what_runs_and_runs_again() {
    let cpu = CpuOptions::default().with_isa(Some(Isa::Portable)).with_threads(NonZeroUsize::new(3));
    let engine = Engine::with(Backend::Cpu(cpu)).unwrap();
    assert!(engine.gpu().is_none());
    let call = engine.bind(&PROBLEM, Pass::Forward).unwrap();
    let report = call.report();
    assert_eq!((report.backend, report.isa, report.threads), ("cpu", Some("portable"), Some(3)));
    assert_eq!(report.text(), "cpu, portable, 3 threads");
    assert_eq!((report.kernel, report.gpu_passed_over, call.spec()), (None, None, None));
    assert_eq!((call.problem(), call.pass(), call.is_on_gpu()), (&PROBLEM, Pass::Forward, false));
    // Threads beyond the cores get no work.
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get).min(3);
    assert!(
        call.cpu_plan().unwrap().is_some_and(|plan| plan.isa == Isa::Portable && plan.threads == threads)
    );
    let [q, k, v, _] = tensors::<f32>(TensorLayout::Bshd);
    let run = || {
        let mut output = Output::<f32>::new(&PROBLEM, TensorLayout::Bshd).unwrap();
        let inputs = [q.view("q").unwrap(), k.view("k").unwrap(), v.view("v").unwrap()];
        call.run(ForwardTensors::of(inputs, &mut output, Extras::NONE).unwrap()).unwrap();
        output
    };
    assert_eq!(run(), run());
}

#[test]
fn what_does_not_fit_is_refused_with_its_numbers() {
    let engine = Engine::with(Backend::Cpu(CpuOptions::default())).unwrap();
    let [q, k, v, _] = tensors::<f32>(TensorLayout::Bshd);
    let refused = |error: Error, part: &str| {
        let text = error.to_string();
        assert!(text.contains(part), "{text} does not say {part}");
    };
    refused(Tensor::new([1, 2, 3, 4], vec![0f32; 23]).unwrap_err(), "needs 24 elements, the data has 23");
    refused(Tensor::new([usize::MAX; 4], vec![0f32; 23]).unwrap_err(), "the data has 23");
    let attention = |q, k, v| engine.attention::<f32>(q, k, v, Mask::FULL).unwrap_err();
    refused(attention(&q, &q, &v), "v is [batch, seqlen, heads, dim] = [2, 37, 2, 16]");
    let short = Tensor::filled([2, 36, 2, 16], TensorLayout::Bshd, 0f32);
    refused(attention(&q, &k, &short), "seqlen and heads are those of k, so [2, 37, 2, 16]");
    let heads = Tensor::filled([2, 37, 3, 16], TensorLayout::Bshd, 0f32);
    refused(attention(&q, &heads, &heads), "heads_q = 4 is not a multiple of heads_kv = 3");

    // Of a problem that is not the tensors', no memory is taken.
    let huge = PROBLEM.with_lengths(Lengths::uniform(1 << 20, 1 << 20, 1 << 20));
    huge.check().unwrap();
    let forward = engine.forward(&huge, [&q, &k, &v], &Extras::NONE);
    refused(forward.unwrap_err(), "q is [batch, seqlen, heads, dim]");
    let small = Output::<f32>::new(&PROBLEM, TensorLayout::Bshd).unwrap();
    let backward = engine.backward(&huge, [&q, &k, &v], &Extras::NONE, &small, &small.out);
    refused(backward.unwrap_err(), "q is [batch, seqlen, heads, dim]");

    let pages = Lengths::of(2, Side::padded(37), Side::paged(16, 6, 37));
    let paged = engine.bind(&PROBLEM.with_lengths(pages), Pass::BACKWARD);
    refused(paged.unwrap_err(), "pages");

    let call = engine.bind(&PROBLEM, Pass::BACKWARD).unwrap();
    let mut output = Output::<f32>::new(&PROBLEM, TensorLayout::Bshd).unwrap();
    let forward = |output: &mut Output<f32>| {
        call.run(ForwardTensors {
            q: KvRef::Same(q.view("q")?),
            k: KvRef::Same(k.view("k")?),
            v: KvRef::Same(v.view("v")?),
            out: output.out.view_mut("out")?,
            lse: &mut output.lse,
            extras: Extras::NONE,
            program: None,
        })
    };
    refused(forward(&mut output).unwrap_err(), "the call computes the backward");
    let halves = engine.bind(&PROBLEM.with_types(Types::same(Dtype::F16)), Pass::Forward).unwrap();
    let inputs = [q.view("q").unwrap(), k.view("k").unwrap(), v.view("v").unwrap()];
    let error = halves.run(ForwardTensors::of(inputs, &mut output, Extras::NONE).unwrap());
    refused(error.unwrap_err(), "computes in f16, its tensors hold f32");
    assert!(output.out.data.iter().all(|value| value.is_nan()), "nothing is written on a refusal");
    refused(engine.bind(&PROBLEM.with_heads_kv(3), Pass::Forward).unwrap_err(), "heads_kv = 3");
    if let Some(isa) = Isa::ALL.into_iter().find(|isa| !isa.is_available()) {
        let cpu = CpuOptions::default().with_isa(Some(isa)).with_threads(None);
        let error = Engine::with(Backend::Cpu(cpu)).unwrap_err();
        refused(error, &format!("this CPU has no {isa}: it has portable"));
    }
}

#[test]
fn the_cpu_has_nothing_to_tune_and_says_so() {
    let backends = [Backend::Cpu(CpuOptions::default()), Backend::Reference { threads: None }];
    for backend in backends {
        let engine = Engine::with(backend).expect("a CPU");
        let error = engine.set_tuning(Tuning::ON_FIRST_USE).expect_err("there is no choice");
        assert!(matches!(error, Error::NothingToTune { .. }), "{error}");
        assert!(error.to_string().contains("nothing to tune"), "{error}");
        engine.set_tuning(Tuning::Off).expect("it is off");
        assert!(engine.finish_tuning().is_empty());
    }
}
