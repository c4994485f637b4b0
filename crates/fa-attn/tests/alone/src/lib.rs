//! The numbered examples of fa-attn as a program's modules, and what they compute on the CPU.
#![allow(unsafe_code)]
#![cfg(test)]

// Each example's `main` is a program's.
#[allow(dead_code)]
#[path = "../../../examples/08_eight_bit_cache.rs"]
mod eight_bit_cache;
#[allow(dead_code)]
#[path = "../../../examples/03_merging.rs"]
mod merging;
#[allow(dead_code)]
#[path = "../../../examples/01_packed_training.rs"]
mod packed_training;
#[allow(dead_code)]
#[path = "../../../examples/02_paged_serving.rs"]
mod paged_serving;
#[allow(dead_code)]
#[path = "../../../examples/05_spec_by_hand.rs"]
mod spec_by_hand;
#[allow(dead_code)]
#[path = "../../../examples/06_streams.rs"]
mod streams;
#[allow(dead_code)]
#[path = "../../../examples/04_tuning.rs"]
mod tuning;

use fa_attn::quantize::Codes;
use fa_attn::{Arch, CpuOptions, Dtype, Mask, Problem, Strides, Tensor, TensorLayout, TensorRef, errors};

#[test]
fn training_on_a_packed_batch_lowers_the_loss() {
    let losses = packed_training::train(20).unwrap();
    assert!(losses[0] > 0.5 && losses[20] < 0.8 * losses[0], "{losses:?}");
}

#[test]
fn a_cache_of_codes_stays_within_its_rounding() {
    let exact = eight_bit_cache::serve(20, None).unwrap();
    for (codes, most) in [(Codes::E4m3, 0.06), (Codes::Int8, 0.02), (Codes::Int4, 0.3)] {
        let far = eight_bit_cache::farthest(&eight_bit_cache::serve(20, Some(codes)).unwrap(), &exact);
        assert!(far > 0.0 && far < most, "{codes:?}: {far}");
    }
}

#[test]
fn every_step_of_serving_sees_the_keys_appended_before() {
    let outputs = paged_serving::on_cpu(3).unwrap();
    assert_eq!(outputs.len(), 3);
    // 3 requests of 8 heads of 64, all of them finite, and other ones in each step.
    for pair in outputs.windows(2) {
        assert_eq!(pair[0].len(), 3 * 8 * 64);
        assert!(pair[0].iter().all(|value| value.to_f32().abs() <= 1.0) && pair[0] != pair[1]);
    }
}

#[test]
fn a_shared_prefix_merged_is_attention_over_all_keys() {
    assert!(merging::difference().unwrap() < 1e-5);
}

#[test]
fn a_spec_by_hand_says_what_it_computes() {
    let spec = spec_by_hand::read().unwrap();
    let problem = Problem::square(2, 1000, 8, 64, Mask::CAUSAL, Dtype::Bf16);
    spec.serves(&problem).unwrap();
    let why = spec.serves(&problem.with_mask(Mask::FULL)).expect_err("another mask");
    assert!(matches!(why, errors::Unserved::Differs(_)), "{why:?}");
    assert_eq!(Arch::Sm90.name(), "sm90");
}

/// Rows of Q, K and V in one buffer.
#[test]
fn strides_are_free() {
    let (rows, heads, dim) = (10, 2, 32);
    let buffer: Vec<f32> = (0..rows * 3 * heads * dim).map(|i| (i as f32 * 0.3).sin()).collect();
    let strides = Strides { batch: 0, seq: (3 * heads * dim) as i64, head: dim as i64, dim: 1 };
    let part =
        |i: usize| TensorRef::new("qkv", &buffer[i * heads * dim..], [1, rows, heads, dim], strides).unwrap();
    let packed = |i: usize| {
        let view = part(i);
        let at = |n: usize| view.at(0, n / (heads * dim), n / dim % heads, n % dim);
        Tensor::new([1, rows, heads, dim], (0..rows * heads * dim).map(at).collect()).unwrap()
    };
    let engine = fa_attn::Engine::with(fa_attn::Backend::Cpu(CpuOptions::default())).unwrap();
    let problem = Problem::square(1, rows, heads, dim, Mask::CAUSAL, Dtype::F32);
    let mut output = fa_attn::Output::new(&problem, TensorLayout::Bshd).unwrap();
    let out = output.out.view_mut("out").unwrap();
    let tensors = fa_attn::ForwardTensors::new([part(0), part(1), part(2)], out, &mut output.lse);
    engine.bind(&problem, fa_attn::Pass::Forward).unwrap().run(tensors).unwrap();
    let whole = engine.attention(&packed(0), &packed(1), &packed(2), Mask::CAUSAL).unwrap();
    assert_eq!(output.out.data, whole.out.data);
}
