//! Pairs of SM80-class kernels whose order the model got wrong before NB-126, NB-138 or NB-148, each by the
//! mechanism that it lacked: measured on an H100, one on an H200, in the records of `fa tune --random`
//! (docs/results/tune).

use fa_core::{Arch, Dtype, Family, Lengths, Mask, Pass, Problem, ScoreMod};
use fa_planner::plan::{Plan, PlanOptions, explore};

/// Batch, query heads, K/V heads, queries, keys.
type Shape = [usize; 5];

fn plans([batch, heads_q, heads_kv, seqlen_q, seqlen_k]: Shape, square: Problem, pass: Pass) -> Vec<Plan> {
    let lengths = Lengths::uniform(batch, seqlen_q, seqlen_k);
    let problem = square.with_lengths(lengths).with_heads(heads_q, heads_kv);
    let options = PlanOptions::default().with_family(Some(Family::Sm80)).with_pass(pass);
    explore(&problem, Arch::Sm90, &options).expect("a supported problem").plans
}

fn problem(head_dim: usize, head_dim_v: usize, mask: Mask, dtype: Dtype) -> Problem {
    Problem::square(1, 1, 1, head_dim, mask, dtype).with_head_dim_v(head_dim_v)
}

/// Predicted milliseconds of the plan with this name.
fn predicted(plans: &[Plan], name: &str) -> f64 {
    let plan = plans.iter().find(|plan| plan.spec.to_string() == name);
    plan.unwrap_or_else(|| panic!("{name} is not planned")).cost.seconds * 1e3
}

/// The first is predicted before the second, as it was measured (milliseconds).
fn in_order(plans: &[Plan], faster: (&str, f64), slower: (&str, f64)) {
    let [first, second] = [faster.0, slower.0].map(|name| predicted(plans, name));
    assert!(faster.1 < slower.1, "{} was measured faster", faster.0);
    assert!(first < second, "{}: {first:.4} ms, {}: {second:.4} ms", faster.0, slower.0);
}

/// Seed 2, #16, and seed 9, #9: tiles of one or two steps.
#[test]
fn rows_of_a_forward_tile_take_time_beside_those_of_other_ctas() {
    let causal = plans([151, 4, 4, 128, 129], problem(192, 128, Mask::CAUSAL, Dtype::F16), Pass::Forward);
    in_order(
        &causal,
        ("sm80_fwd-f16-hd192-128-causal-64x48-w4-s1-b1-swz-ldm-exp2-fast-split-rev", 0.0441),
        ("sm80_fwd-f16-hd192-128-causal-128x48-w4-s2-b1-swz-ldm-exp2-fast-split-rev", 0.0466),
    );
    let window = problem(192, 128, Mask::causal_window(128), Dtype::Bf16);
    let window = plans([94, 32, 16, 191, 191], window, Pass::Forward);
    in_order(
        &window,
        ("sm80_fwd-bf16-hd192-128-window-64x32-w4-s2-b2-swz-ldm-exp2-fast-split-rev-pack", 0.2316),
        ("sm80_fwd-bf16-hd192-128-window-128x48-w4-s2-b2-swz-ldm-exp2-fast-split-rev-pack", 0.2488),
    );
}

/// Seed 11, #25: a soft cap's registers leave room for two CTAs where nothing promises three (NB-138).
#[test]
fn ctas_that_no_launch_bounds_promise_are_counted_by_what_the_compiler_takes() {
    let square = problem(128, 128, Mask::FULL, Dtype::Bf16);
    let capped = square.with_score(ScoreMod::softcap(30.0));
    in_order(
        &plans([6, 64, 64, 521, 521], capped, Pass::Forward),
        ("sm80_fwd-bf16-hd128-full-softcap-64x80-w4-s1-b3-swz-ldm-exp2-fast-split", 0.2406),
        ("sm80_fwd-bf16-hd128-full-softcap-64x48-w4-s2-b1-swz-ldm-exp2-fast-split", 0.2748),
    );
}

/// Seed 8, #10: two CTAs of four warps on an SM are faster than one of eight.
#[test]
fn ctas_of_a_backward_wait_for_their_first_queries_beside_one_another() {
    let short = plans([15, 4, 1, 153, 192], problem(128, 128, Mask::CAUSAL, Dtype::F16), Pass::BACKWARD);
    in_order(
        &short,
        ("sm80_bwd-f16-hd128-causal-32x64-w4-s31-a111-q64-b1-lpt", 0.0457),
        ("sm80_bwd-f16-hd128-causal-32x64-w8-s31-a222-q64-b1-lpt", 0.0503),
    );
}

/// Seed 9, #19: seven of ten steps test a mask.
#[test]
fn a_masked_step_of_a_backward_is_no_reason_for_small_tiles() {
    let short = plans([41, 40, 10, 237, 237], problem(32, 32, Mask::CAUSAL, Dtype::Bf16), Pass::BACKWARD);
    in_order(
        &short,
        ("sm80_bwd-bf16-hd32-causal-64x64-w4-s31-a222-q16-b1-lpt", 0.2216),
        ("sm80_bwd-bf16-hd32-causal-32x64-w4-s31-a122-q16-b1-lpt", 0.2644),
    );
}

/// Seed 6, #3, and seed 9, #11.
#[test]
fn four_warps_with_128_scores_a_thread_are_slower_than_eight() {
    let eight = "128x128-w8-s31-a244-q32-b1";
    let full = plans([4, 8, 8, 2880, 2880], problem(64, 64, Mask::FULL, Dtype::Bf16), Pass::BACKWARD);
    in_order(
        &full,
        (&format!("sm80_bwd-bf16-hd64-full-{eight}"), 0.6544),
        ("sm80_bwd-bf16-hd64-full-128x64-w4-s21-a222-q32-b1", 0.7095),
    );
    let window = problem(64, 64, Mask::causal_window(945), Dtype::Bf16);
    let window = plans([1, 28, 28, 5477, 5477], window, Pass::BACKWARD);
    in_order(
        &window,
        ("sm80_bwd-bf16-hd64-window-64x64-w4-s21-a222-q32-b1-lpt", 0.4733),
        ("sm80_bwd-bf16-hd64-window-128x64-w4-s21-a222-q32-b1-lpt", 0.5290),
    );
}

/// Seed 12, #17 (NB-148).
#[test]
fn a_second_step_waits_for_its_keys_with_fewer_than_three_buffers() {
    let full = plans([7, 24, 24, 192, 192], problem(128, 128, Mask::FULL, Dtype::Bf16), Pass::Forward);
    in_order(
        &full,
        ("sm80_fwd-bf16-hd128-full-64x64-w4-s3-qr-b1-swz-ldm-exp2-fast-split", 0.0240),
        ("sm80_fwd-bf16-hd128-full-64x96-w4-s2-b1-swz-ldm-exp2-fast-split", 0.0249),
    );
}

/// Seed 12, #33: 80 KB of K and V in a step (NB-148).
#[test]
fn one_buffer_waits_for_all_of_its_keys() {
    let long = plans([10, 32, 32, 128, 2167], problem(256, 256, Mask::CAUSAL, Dtype::Bf16), Pass::Forward);
    in_order(
        &long,
        ("sm80_fwd-bf16-hd256-causal-64x96-w4-s2-b1-swz-ldm-exp2-fast-split-rev", 0.3915),
        ("sm80_fwd-bf16-hd256-causal-64x80-w4-s1-b1-swz-ldm-exp2-fast-split-rev", 0.4103),
    );
}

/// Seed 9, #33 (NB-148).
#[test]
fn packed_rows_take_time_each() {
    let window = problem(64, 64, Mask::causal_window(256), Dtype::Bf16);
    in_order(
        &plans([4, 40, 1, 128, 814], window, Pass::Forward),
        ("sm80_fwd-bf16-hd64-window-64x96-w4-s3-qr-b2-swz-ldm-exp2-fast-split-rev", 0.0163),
        ("sm80_fwd-bf16-hd64-window-64x32-w4-s3-qr-b4-swz-ldm-exp2-fast-split-rev-pack", 0.0176),
    );
}

/// Seed 11, #2, and on an H200 seed 13, #3: of four warps the two that compute P have half of the SM's
/// special-function units, and a soft cap asks for three results of a score (NB-148).
#[test]
fn a_soft_cap_is_slower_in_backwards_of_four_warps() {
    let capped =
        |head_dim| problem(head_dim, head_dim, Mask::CAUSAL, Dtype::F16).with_score(ScoreMod::softcap(50.0));
    in_order(
        &plans([4, 64, 32, 247, 1920], capped(32), Pass::BACKWARD),
        ("sm80_bwd-f16-hd32-causal-softcap-32x128-w8-s31-a142-q0-b1-lpt", 0.3185),
        ("sm80_bwd-f16-hd32-causal-softcap-32x64-w4-s31-a122-q16-b1-lpt", 0.3494),
    );
    in_order(
        &plans([8, 8, 8, 1209, 1209], capped(64), Pass::BACKWARD),
        ("sm80_bwd-f16-hd64-causal-softcap-64x64-w8-s31-a224-q32-b1-lpt", 0.2159),
        ("sm80_bwd-f16-hd64-causal-softcap-32x128-w4-s31-a122-q32-b1-lpt", 0.2537),
    );
}
