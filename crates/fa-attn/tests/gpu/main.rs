//! Tests on a GPU, not run unless asked for: `cargo test -p fa-attn --test gpu -- --ignored`.
//!
//! Numerics over the whole grid are `fa validate`'s; here are the promises of the library's interface.
#![allow(unsafe_code)]

mod backward;
mod biases;
mod case;
mod codes;
mod fp8;
mod gathered;
mod keeps;
mod packed;
mod tuning;

use fa_attn::device::{BindOptions, DeviceForward, DeviceGradients, DeviceOutput, Gpu};
use fa_attn::{Backend, Engine, Error, Output, Tensor, problem_of};
use fa_core::spec::Scheduler;
use fa_core::{
    Dtype, Family, Kernel, LaunchPlan, Lengths, Mask, Pass, Problem, TensorLayout, Types, Unserved,
};
use fa_kernels::{
    Backward, Cache, Error as KernelError, Forward, ForwardArgs, Headers, Input, Kernels, RawForwardArgs,
    RawTensor, driver,
};
use fa_planner::plan::PlanError;
use half::{bf16, f16};

use case::{BASE, Case, GQA, PROBLEMS};

fn gpu() -> Gpu {
    Gpu::open().unwrap_or_else(|error| panic!("{error}"))
}

/// The library's choice of a family for the forward.
fn bind_forward(gpu: &Gpu, problem: &Problem, family: Option<Family>) -> Result<Forward, Error> {
    gpu.bind(problem, Pass::Forward, &BindOptions::default().with_family(family))?.forward()
}

/// The library's choice of a family for the backward.
fn bind_backward(
    gpu: &Gpu,
    problem: &Problem,
    deterministic: bool,
    family: Option<Family>,
) -> Result<Backward, Error> {
    let options = BindOptions::default().with_family(family);
    gpu.bind(problem, Pass::Backward { deterministic }, &options)?.backward()
}

#[test]
#[ignore = "needs a GPU"]
fn outputs_are_right_and_wholly_written() {
    let gpu = gpu();
    let more = [
        GQA.with_lengths(Lengths::uniform(GQA.lengths.sequences(), 77, GQA.lengths.max_k())),
        BASE.with_lengths(Lengths::uniform(BASE.lengths.sequences(), 500, BASE.lengths.max_k())),
        BASE.with_mask(Mask::causal_window(33)).with_lengths(Lengths::uniform(
            BASE.lengths.sequences(),
            128,
            BASE.lengths.max_k(),
        )),
    ];
    for problem in PROBLEMS.into_iter().chain(more) {
        for layout in [TensorLayout::Bshd, TensorLayout::Bhsd] {
            Case { problem, layout, pad: 0 }.check::<bf16>(&gpu);
        }
        Case { problem: problem.with_types(Types::same(Dtype::F16)), layout: TensorLayout::Bshd, pad: 24 }
            .check::<f16>(&gpu);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn runs_are_bit_equal() {
    let gpu = gpu();
    let case = Case {
        problem: BASE.with_lengths(Lengths::uniform(BASE.lengths.sequences(), 1111, 1111)),
        layout: TensorLayout::Bshd,
        pad: 0,
    };
    let forward = bind_forward(&gpu, &case.problem, None).unwrap();
    let stream = &gpu.stream;
    let mut tensors = case.tensors::<bf16>(&forward, stream);
    tensors.run(&forward, stream).unwrap();
    let first = tensors.read(stream).unwrap();
    for _ in 0..1000 {
        tensors.poison(stream).unwrap();
        tensors.run(&forward, stream).unwrap();
        assert!(tensors.read(stream).unwrap().same_bits(&first));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_captured_run_gives_the_same_result_when_replayed() {
    let gpu = gpu();
    let case = Case { problem: BASE, layout: TensorLayout::Bshd, pad: 0 };
    let forward = bind_forward(&gpu, &case.problem, None).unwrap();
    let stream = &gpu.context().new_stream().unwrap();
    let mut tensors = case.tensors::<bf16>(&forward, stream);
    tensors.run(&forward, stream).unwrap();
    let expected = tensors.read(stream).unwrap();

    // SAFETY: the tensors outlive the graph.
    let graph = unsafe { tensors.capture(&forward, stream) }.unwrap();
    for _ in 0..3 {
        tensors.poison(stream).unwrap();
        graph.launch().unwrap();
        assert!(tensors.read(stream).unwrap().same_bits(&expected));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn two_threads_with_a_stream_each_get_right_answers_at_once() {
    let gpu = gpu();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let gpu = &gpu;
            scope.spawn(move || {
                let mask = if thread % 2 == 0 { Mask::CAUSAL } else { Mask::FULL };
                let problem = BASE.with_mask(mask).with_lengths(Lengths::uniform(
                    BASE.lengths.sequences(),
                    400 + 100 * thread,
                    900,
                ));
                let case = Case { problem, layout: TensorLayout::Bshd, pad: 0 };
                let forward = bind_forward(gpu, &problem, None).unwrap();
                let stream = &gpu.context().new_stream().unwrap();
                let mut tensors = case.tensors::<bf16>(&forward, stream);
                for _ in 0..20 {
                    tensors.poison(stream).unwrap();
                    tensors.run(&forward, stream).unwrap();
                }
                case.verify(&tensors.read(stream).unwrap());
            });
        }
    });
}

#[test]
#[ignore = "needs a GPU"]
fn what_does_not_fit_is_refused_before_anything_is_launched() {
    let gpu = gpu();
    let case = Case { problem: BASE, layout: TensorLayout::Bshd, pad: 0 };
    let forward = bind_forward(&gpu, &case.problem, None).unwrap();
    let stream = &gpu.stream;
    let mut tensors = case.tensors::<bf16>(&forward, stream);
    let raw = tensors.raw(stream);
    let refused = |args: RawForwardArgs, part: &str| {
        // SAFETY: refused, or run on the whole tensors above.
        let text = unsafe { forward.run_raw(stream, &args) }.expect_err("must be refused").to_string();
        assert!(text.contains(part), "{text} does not say {part}");
    };
    refused(RawForwardArgs { k: RawTensor { address: raw.k.address + 2, ..raw.k }, ..raw }, "k starts at");
    refused(RawForwardArgs { lse: Some(raw.k.address + 2), ..raw }, "lse starts at");
    let mut odd = raw;
    odd.v.strides.seq += 1;
    refused(odd, "seq stride of v");
    let mut overlapping = raw;
    overlapping.out.strides.seq = 128;
    refused(overlapping, "stride of out is 128");

    let wrong_type = run_as_f16(&gpu, &forward, &tensors).unwrap_err().to_string();
    assert!(wrong_type.contains("dtype"), "{wrong_type}");
    let f32_problem = BASE.with_types(Types::same(Dtype::F32));
    assert!(bind_forward(&gpu, &f32_problem, None).unwrap_err().to_string().contains("use f16 or bf16"));
    let wide = BASE.with_head_dim(584);
    assert!(bind_forward(&gpu, &wide, None).unwrap_err().to_string().contains("head_dim = 584"));
    let negative = BASE.with_softmax_scale(Some(-1.0));
    assert!(matches!(
        bind_forward(&gpu, &negative, None),
        Err(Error::Plan(PlanError::Unserved(Unserved::Scale { scale: -1.0 })))
    ));
    let spec = forward.kernel().spec.clone();
    let headless = BASE.with_heads_kv(0);
    assert!(matches!(gpu.prefer(&headless, spec.clone()), Err(Error::Problem(_))));
    let full = BASE.with_mask(Mask::FULL);
    assert!(matches!(
        gpu.kernels.forward(&full, &LaunchPlan::whole(spec.clone())),
        Err(KernelError::Mismatch { what: "mask", .. })
    ));
    if let Kernel::Sm90Fwd(own) = &spec.kernel
        && own.scheduler == Scheduler::Dynamic
    {
        refused(RawForwardArgs { workspace: None, ..raw }, "workspace of 8 bytes");
    }
}

/// A call with tensors of another type.
fn run_as_f16(
    gpu: &Gpu,
    forward: &fa_kernels::Forward,
    tensors: &DeviceForward<bf16>,
) -> Result<(), KernelError> {
    let [q, k, v, out] = tensors.placements().map(|placement| placement.strides);
    let [data, mut to] = [0, 1].map(|_| gpu.stream.alloc_zeros::<f16>(1).unwrap());
    let args = ForwardArgs {
        q: Input { data: &data, strides: q },
        k: Input { data: &data, strides: k },
        v: Input { data: &data, strides: v },
        out: fa_kernels::Output { data: &mut to, strides: out },
        lse: None,
        workspace: None,
        extras: fa_kernels::Extras::default(),
    };
    // SAFETY: it is refused.
    unsafe { forward.run(&gpu.stream, args) }
}

#[test]
#[ignore = "needs a GPU"]
fn the_driver_agrees_with_the_plan() {
    let gpu = gpu();
    for mask in [Mask::CAUSAL, Mask::FULL] {
        let forward = bind_forward(&gpu, &BASE.with_mask(mask), None).unwrap();
        let kernel = forward.kernel();
        let plan = fa_planner::account::account(&kernel.spec, kernel.arch).unwrap();
        assert_eq!(kernel.smem, plan.smem.total);
        assert!(kernel.blocks_per_sm().unwrap() >= plan.blocks_per_sm, "{}", kernel.spec);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn an_unwritable_cache_still_gives_kernels() {
    let context = driver::context(0).unwrap();
    let kernels = Kernels::with(&context, Cache::open(None, 0), Headers::embedded()).unwrap();
    Case { problem: BASE, layout: TensorLayout::Bhsd, pad: 0 }.check::<bf16>(&Gpu::with(kernels));
}

/// The engine's calls on host tensors: what the CPU gives, from the GPU, in either layout.
#[test]
#[ignore = "needs a GPU"]
fn host_tensors_go_there_and_back() {
    let engine = Engine::with(Backend::Gpu).unwrap();
    for problem in [
        BASE,
        GQA,
        BASE.with_lengths(Lengths::uniform(BASE.lengths.sequences(), BASE.lengths.max_q(), 0)),
        BASE.with_lengths(Lengths::uniform(BASE.lengths.sequences(), 0, BASE.lengths.max_k())),
    ] {
        let case = Case { problem, layout: TensorLayout::Bshd, pad: 0 };
        let [q, k, v, dout] =
            [0, 1, 2, 3].map(|i| Tensor::new(case.shapes()[i], case.values::<bf16>(i)).unwrap());
        assert_eq!(problem_of(&q, &k, &v, problem.mask).unwrap(), problem);
        let output = engine.attention(&q, &k, &v, problem.mask).unwrap();
        let Output { out, lse } = &output;
        case.verify(&DeviceOutput { out: out.data.clone(), lse: lse.clone(), strays: 0 });
        let gradients = engine.gradients([&q, &k, &v], problem.mask, &output, &dout).unwrap();
        let values = [gradients.dq.data, gradients.dk.data, gradients.dv.data];
        backward::verify(&case, &DeviceGradients { values, strays: 0 });
    }
    let (forward, backward) = engine.bind_both(&BASE, true).unwrap();
    for (call, pass) in [(&forward, Pass::Forward), (&backward, Pass::DETERMINISTIC_BACKWARD)] {
        let report = call.report();
        assert_eq!((report.backend, call.pass(), report.gpu_passed_over), ("cuda", pass, None));
        assert_eq!(report.kernel, call.spec().map(ToString::to_string));
        assert_eq!(call.spec().unwrap().kernel.pass(), pass);
    }
    // What the GPU does not compute goes to the CPU, which says so.
    let report = Engine::new()
        .unwrap()
        .bind(&BASE.with_types(Types::same(Dtype::F32)), Pass::Forward)
        .unwrap()
        .report();
    assert_eq!((report.backend, report.kernel), ("cpu", None));
    assert!(report.gpu_passed_over.unwrap().contains("use f16 or bf16"));
}
