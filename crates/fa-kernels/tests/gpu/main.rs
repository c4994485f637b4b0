//! Tests on a GPU, not run unless asked for: `cargo test -p fa-kernels --test gpu -- --ignored`.
//!
//! Numerics over the whole grid are `fa validate`'s; here are the promises of the library's face.
#![allow(unsafe_code)]

mod backward;
mod case;

use std::sync::Arc;

use fa_core::spec::Scheduler;
use fa_core::{Dtype, Kernel, Mask, Problem, TensorLayout};
use fa_kernels::{Cache, Error, Headers, Kernels, RawForwardArgs, RawTensor, driver};
use half::{bf16, f16};

use case::{BASE, Case, GQA, PROBLEMS, Tensors, captured};

fn kernels() -> Arc<Kernels> {
    let context = driver::context(0).unwrap_or_else(|error| panic!("{error}"));
    Arc::new(Kernels::new(&context).unwrap_or_else(|error| panic!("{error}")))
}

#[test]
#[ignore = "needs a GPU"]
fn outputs_are_right_and_wholly_written() {
    let kernels = kernels();
    let more = [
        Problem { seqlen_q: 77, ..GQA },
        Problem { seqlen_q: 500, ..BASE },
        Problem { mask: Mask::causal_window(33), seqlen_q: 128, ..BASE },
    ];
    for problem in PROBLEMS.into_iter().chain(more) {
        for layout in [TensorLayout::Bshd, TensorLayout::Bhsd] {
            Case { problem, layout, pad: 0 }.check::<bf16>(&kernels);
        }
        Case { problem: Problem { dtype: Dtype::F16, ..problem }, layout: TensorLayout::Bshd, pad: 24 }
            .check::<f16>(&kernels);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn runs_are_bit_equal() {
    let kernels = kernels();
    let case = Case {
        problem: Problem { seqlen_q: 1111, seqlen_k: 1111, ..BASE },
        layout: TensorLayout::Bshd,
        pad: 0,
    };
    let forward = kernels.forward(&case.problem).unwrap();
    let stream = kernels.context().default_stream();
    let mut tensors = Tensors::<bf16>::new(&case, &forward, &stream);
    tensors.run(&forward, &stream).unwrap();
    let first = tensors.outputs(&stream);
    for _ in 0..1000 {
        tensors.poison(&stream);
        tensors.run(&forward, &stream).unwrap();
        assert!(tensors.outputs(&stream) == first);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_captured_run_gives_the_same_result_when_replayed() {
    let kernels = kernels();
    let case = Case { problem: BASE, layout: TensorLayout::Bshd, pad: 0 };
    let forward = kernels.forward(&case.problem).unwrap();
    let stream = kernels.context().new_stream().unwrap();
    let mut tensors = Tensors::<bf16>::new(&case, &forward, &stream);
    tensors.run(&forward, &stream).unwrap();
    let expected = tensors.outputs(&stream);

    let raw = tensors.raw(&stream);
    // SAFETY: the tensors outlive the graph, and nothing else uses them meanwhile.
    let graph = captured(&stream, || unsafe { forward.run_raw(&stream, &raw) });
    for _ in 0..3 {
        tensors.poison(&stream);
        graph.launch().unwrap();
        assert!(tensors.outputs(&stream) == expected);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn two_threads_with_a_stream_each_get_right_answers_at_once() {
    let kernels = kernels();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let kernels = &kernels;
            scope.spawn(move || {
                let mask = if thread % 2 == 0 { Mask::CAUSAL } else { Mask::FULL };
                let problem = Problem { mask, seqlen_q: 400 + 100 * thread, seqlen_k: 900, ..BASE };
                let case = Case { problem, layout: TensorLayout::Bshd, pad: 0 };
                let forward = kernels.forward(&problem).unwrap();
                let stream = kernels.context().new_stream().unwrap();
                let mut tensors = Tensors::<bf16>::new(&case, &forward, &stream);
                for _ in 0..20 {
                    tensors.poison(&stream);
                    tensors.run(&forward, &stream).unwrap();
                }
                tensors.verify(&case, &stream);
            });
        }
    });
}

#[test]
#[ignore = "needs a GPU"]
fn what_does_not_fit_is_refused_before_anything_is_launched() {
    let kernels = kernels();
    let case = Case { problem: BASE, layout: TensorLayout::Bshd, pad: 0 };
    let forward = kernels.forward(&case.problem).unwrap();
    let stream = kernels.context().default_stream();
    let mut tensors = Tensors::<bf16>::new(&case, &forward, &stream);
    let raw = tensors.raw(&stream);
    let refused = |args: RawForwardArgs, part: &str| {
        // SAFETY: refused, or run on the whole tensors above.
        let text = unsafe { forward.run_raw(&stream, &args) }.expect_err("must be refused").to_string();
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

    let wrong_type = tensors.run_as::<f16>(&forward, &stream).unwrap_err().to_string();
    assert!(wrong_type.contains("dtype"), "{wrong_type}");
    let f32_problem = Problem { dtype: Dtype::F32, ..BASE };
    assert!(kernels.forward(&f32_problem).unwrap_err().to_string().contains("use f16 or bf16"));
    let wide = Problem { head_dim: 264, ..BASE };
    assert!(kernels.forward(&wide).unwrap_err().to_string().contains("head_dim = 264"));
    let negative = Problem { softmax_scale: Some(-1.0), ..BASE };
    assert!(matches!(kernels.forward(&negative), Err(Error::Scale { .. })));
    let spec = forward.kernel().spec.clone();
    let headless = Problem { heads_kv: 0, ..BASE };
    assert!(matches!(kernels.prefer(&headless, spec.clone()), Err(Error::Problem(_))));
    let full = Problem { mask: Mask::FULL, ..BASE };
    assert!(matches!(kernels.forward_with(&full, &spec), Err(Error::Mismatch { what: "mask", .. })));
    if let Kernel::Sm90Fwd(own) = &spec.kernel
        && own.scheduler == Scheduler::Dynamic
    {
        refused(RawForwardArgs { workspace: None, ..raw }, "workspace of 8 bytes");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn the_driver_agrees_with_the_plan() {
    let kernels = kernels();
    for mask in [Mask::CAUSAL, Mask::FULL] {
        let forward = kernels.forward(&Problem { mask, ..BASE }).unwrap();
        let kernel = forward.kernel();
        let plan = fa_planner::plan::account(&kernel.spec, kernel.arch).unwrap();
        assert_eq!(kernel.smem, plan.smem.total);
        assert!(kernel.blocks_per_sm().unwrap() >= plan.blocks_per_sm, "{}", kernel.spec);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn an_unwritable_cache_still_gives_kernels() {
    let context = driver::context(0).unwrap();
    let kernels = Kernels::with(&context, Cache::open(None, 0), Headers::embedded()).unwrap();
    Case { problem: BASE, layout: TensorLayout::Bhsd, pad: 0 }.check::<bf16>(&kernels);
}
