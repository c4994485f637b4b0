//! Plans over many problems: what every plan must satisfy, how time grows, and what is refused.

use fa_core::{Arch, Dtype, Family, Kernel, Lengths, Mask, Pass, Problem, ScoreMod, Side, Types};
use fa_planner::account::{Reason, smem};
use fa_planner::cost::{Bottleneck, CostConstants, predict};
use fa_planner::plan::{Plan, PlanError, PlanOptions, best, explore, plan, plan_spec, sweep};
use proptest::prelude::*;

use crate::problems;

const BASE: Problem = Problem::square(4, 4096, 16, 128, Mask::CAUSAL, Dtype::Bf16);

fn families(arch: Arch) -> Vec<PlanOptions> {
    let all = if arch == Arch::Sm90 { vec![Family::Sm80, Family::Sm90] } else { vec![Family::Sm80] };
    all.into_iter().map(|family| PlanOptions::default().with_family(Some(family))).collect()
}

fn is_sound(problem: &Problem, arch: Arch, plan: &Plan) {
    let (spec, limits) = (&plan.spec, arch.limits());
    assert_eq!(spec.check(), Ok(()), "{spec}");
    assert_eq!(spec.check_arch(arch), Ok(()), "{spec}");
    assert_eq!(spec.serves(problem), Ok(()), "{spec}");
    assert_eq!(plan.smem, smem(spec), "{spec}");
    assert!(plan.smem.total <= limits.smem_per_block, "{spec}");
    assert!(plan.regs.total <= plan.regs.limit, "{spec}");
    assert!(plan.blocks_per_sm >= 1 && plan.blocks_per_sm <= plan.occupancy.blocks(), "{spec}");
    assert!(plan.threads * plan.blocks_per_sm <= limits.threads_per_sm, "{spec}");
    if let Some(split) = plan.regs.setmaxnreg {
        assert!(split.of_threads(plan.threads) <= limits.regs_per_sm, "{spec}: {split:?}");
    }
    let cost = &plan.cost;
    assert!(cost.seconds.is_finite() && cost.seconds > 0.0, "{spec}: {cost:?}");
    assert!(cost.tflops.is_finite() && cost.tflops * 1e12 <= limits.peak_tensor_flops(), "{spec}: {cost:?}");
    let named = cost.terms.named();
    assert!(named.iter().all(|(_, s)| s.is_finite() && *s >= 0.0), "{spec}: {cost:?}");
    let largest =
        named.iter().find(|(name, _)| *name == cost.bottleneck).expect("every bottleneck is a term").1;
    assert!(named.iter().all(|(_, s)| *s <= largest), "{spec}: {cost:?}");
    let busy = [cost.terms.tensor, cost.terms.l2, cost.terms.hbm];
    assert!(busy.iter().all(|s| *s <= cost.seconds), "{spec}: {cost:?}");
}

/// Few queries on a cache: of one length, of lengths on the device, in pages.
fn decode() -> impl Strategy<Value = Problem> {
    let keys = prop_oneof![0usize..700, 0usize..9000, 0usize..200_000];
    (problems::uniform(), prop_oneof![Just(1usize), 0usize..70], keys, 0usize..4).prop_map(
        |(problem, queries, keys, kind)| {
            let (batch, q) = (problem.lengths.sequences(), Side::padded(queries));
            let lengths = match kind {
                0 | 1 => Lengths::uniform(batch, queries, keys),
                2 => Lengths::of(batch, q, Side::padded(keys).with_used()),
                _ => Lengths::of(batch, q, Side::paged(16, batch * keys.div_ceil(16) + 1, keys).with_used()),
            };
            problem.with_lengths(lengths)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Leaving out what cannot be the best changes nothing of it.
    #[test]
    fn the_best_is_the_first_of_all(
        problem in prop_oneof![problems::uniform(), decode(), decode(), decode()],
        arch in prop::sample::select(Arch::ALL.to_vec()), is_backward in prop::bool::weighted(0.2),
    ) {
        let pass = if is_backward { Pass::BACKWARD } else { Pass::Forward };
        for options in families(arch) {
            let options = options.with_pass(pass);
            let first = plan(&problem, arch, &options).map(|mut plans| plans.swap_remove(0));
            prop_assert_eq!(best(&problem, arch, &options), first);
        }
    }

    #[test]
    fn every_plan_is_sound(
        problem in prop_oneof![problems::uniform(), decode()],
        arch in prop::sample::select(Arch::ALL.to_vec()),
    ) {
        for options in families(arch) {
            let set = explore(&problem, arch, &options).expect("a supported problem");
            set.plans.iter().for_each(|plan| is_sound(&problem, arch, plan));
            prop_assert!(set.plans.windows(2).all(|w| w[0].cost.seconds <= w[1].cost.seconds));
            for rejected in &set.rejected {
                let again = plan_spec(&problem, &rejected.spec, arch, &options);
                prop_assert_eq!(again.as_ref().err(), Some(&rejected.reason));
                prop_assert!(rejected.reason.excess() > 0.0);
            }
        }
    }

    /// Longer sequences take longer, with one kernel and with the best of all; only a length that happens to
    /// fill its last tile saves the test of a mask there, and more tiles can come out more even over the SMs:
    /// some percent.
    #[test]
    fn time_grows_with_length(
        problem in problems::uniform(), by in 1usize..3000, arch in prop::sample::select(Arch::ALL.to_vec()),
    ) {
        let (sequences, mut length) = (problem.lengths.sequences(), problem.lengths.max_q());
        let mut by = by;
        if !(problem.head_dim * problem.types.q.bytes()).is_multiple_of(32)
            || !(problem.head_dim_v * problem.types.q.bytes()).is_multiple_of(32)
        {
            // Where TMA is slow, only even numbers of tiles share their loads (NB-066): lengths of which all
            // tiles, of 64, 128 and 192 rows, are even in number.
            (length, by) = (length.next_multiple_of(768), by.next_multiple_of(768));
        }
        let short = problem.with_lengths(Lengths::uniform(sequences, length, length));
        let long = short.with_lengths(Lengths::uniform(sequences, length + by, length + by));
        for options in families(arch) {
            let (a, b) = (explore(&short, arch, &options).unwrap(), explore(&long, arch, &options).unwrap());
            if let (Some(a), Some(b)) = (a.plans.first(), b.plans.first()) {
                prop_assert!(b.cost.seconds >= 0.9 * a.cost.seconds, "{} {}: {:?} then \
                    {:?}", a.spec, b.spec, a.cost, b.cost);
            }
            let constants = CostConstants::of(arch);
            for plan in a.plans.iter().step_by(7) {
                let [a, b] = [short, long].map(|p| predict(&p, &plan.spec, arch, &constants).seconds);
                prop_assert!(b >= 0.9 * a, "{}: {a} then {b}", plan.spec);
            }
        }
    }
}

/// Through a window of one key a tile of 32 queries of six heads sees fewer keys than one of 192 queries of
/// one head, whether or not the rows fill fewer tiles (at 4,225 they do).
#[test]
fn narrow_windows_pack_the_heads_of_a_group() {
    let packs = |problem: &Problem| {
        let best = plan(problem, Arch::Sm90, &PlanOptions::default()).expect("plans").swap_remove(0);
        let Kernel::Sm90Fwd(kernel) = best.spec.kernel else { panic!("an SM90 kernel") };
        kernel.pack_gqa
    };
    let one_key = Problem::square(1, 4209, 6, 128, Mask::window(0, 0), Dtype::Bf16).with_heads_kv(1);
    assert!(packs(&one_key));
    assert!(packs(&one_key.with_lengths(Lengths::uniform(one_key.lengths.sequences(), 4225, 4225))));
    assert!(!packs(
        &BASE.with_lengths(Lengths::uniform(BASE.lengths.sequences(), 6144, 6144)).with_heads_kv(2)
    ));
}

/// Every forward that the tuning guide's model calls feasible also fits by the exact account, but for two
/// corrections: P as a register operand counts without overlap as well, and what the compiler is known to
/// spill is no plan.
#[test]
fn the_exact_account_accepts_what_the_guide_accepts() {
    for (hd, hdv) in [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (64, 256)] {
        let problem = BASE.with_head_dims(hd, hdv);
        let set = explore(&problem, Arch::Sm90, &PlanOptions::default()).expect("candidates");
        for rejected in &set.rejected {
            let Kernel::Sm90Fwd(k) = &rejected.spec.kernel else { panic!("SM90 kernels") };
            let (hd, hdv) = (hd as u32, hdv as u32);
            let p = if k.overlap_wg || k.pv_is_rs { k.tile_n / 4 } else { 0 };
            let budget = match (k.num_wg, k.pv_is_rs && !k.overlap_wg) {
                (2, false) => 216,
                (2, true) => 212,
                (_, _) => 128,
            };
            let tensors = 2 * (k.tile_m * hd.max(hdv) + 2 * k.tile_n * (hd + hdv))
                + if k.pv_is_rs { 0 } else { 2 * k.tile_m * k.tile_n };
            let feasible = k.tile_n / 2 + p + hdv / 2 <= budget && tensors <= 224 * 1024;
            let spills = matches!(rejected.reason, Reason::Spills { .. });
            assert!(
                !feasible || spills || k.num_wg == 1,
                "{} is rejected: {}",
                rejected.spec,
                rejected.reason
            );
        }
    }
}

#[test]
fn bottlenecks_follow_the_problem() {
    let named = |problem: &Problem| {
        plan(problem, Arch::Sm90, &PlanOptions::default()).expect("plans")[0].cost.bottleneck
    };
    assert_eq!(named(&BASE.with_mask(Mask::FULL)), Bottleneck::Tensor);
    assert_eq!(named(&BASE.with_head_dims(64, 64).with_score(ScoreMod::softcap(30.0))), Bottleneck::Exp);
    let decode = BASE
        .with_lengths(Lengths::uniform(64, 1, BASE.lengths.max_k()))
        .with_heads(32, 8)
        .with_mask(Mask::FULL);
    assert_eq!(named(&decode), Bottleneck::Hbm);
    // One token of one sequence leaves most SMs idle, unless CTAs share its keys.
    let one = decode.with_lengths(Lengths::uniform(1, decode.lengths.max_q(), 65536));
    assert_eq!(named(&one), Bottleneck::Hbm);
    let plans = plan(&one, Arch::Sm90, &PlanOptions::default()).expect("plans");
    let whole = plans.iter().find(|plan| !plan.spec.split).expect("a kernel without splits");
    assert_eq!(whole.cost.bottleneck, Bottleneck::Waves);
    assert!(plans[0].spec.split && whole.cost.seconds > 3.0 * plans[0].cost.seconds);
    assert_eq!(named(&BASE.with_lengths(Lengths::uniform(1, 64, 64)).with_heads(1, 1)), Bottleneck::Latency);
}

#[test]
fn empty_problems_cost_a_launch() {
    for problem in [
        BASE.with_lengths(Lengths::uniform(0, BASE.lengths.max_q(), BASE.lengths.max_k())),
        BASE.with_lengths(Lengths::uniform(BASE.lengths.sequences(), 0, BASE.lengths.max_k())),
    ] {
        for (arch, options) in
            Arch::ALL.into_iter().flat_map(|a| families(a).into_iter().map(move |o| (a, o)))
        {
            let best = plan(&problem, arch, &options).expect("plans").remove(0).cost;
            assert_eq!((best.tflops, best.tiles, best.bottleneck), (0.0, 0.0, Bottleneck::Latency));
            assert!(best.seconds < 10e-6, "{arch}: {best:?}");
        }
    }
}

/// Each of the SM80-class kernel's switches, turned off, costs time where its effect is felt.
#[test]
fn optimisation_steps_are_predicted_to_help() {
    let problem = Problem::square(4, 4096, 32, 128, Mask::CAUSAL, Dtype::F16);
    for arch in Arch::ALL {
        let options = PlanOptions::default().with_family(Some(Family::Sm80));
        let best = plan(&problem, arch, &options).expect("plans").remove(0);
        for step in ["swizzle", "ldmatrix", "exp2", "fast_math", "loop_split", "reverse_blocks"] {
            let mut spec = best.spec.clone();
            let Kernel::Sm80Fwd(kernel) = &mut spec.kernel else { panic!("an SM80 kernel") };
            match step {
                "swizzle" => kernel.swizzle = false,
                "ldmatrix" => kernel.ldmatrix = false,
                "exp2" => kernel.exp2 = false,
                "fast_math" => kernel.fast_math = false,
                "loop_split" => kernel.loop_split = false,
                _ => kernel.reverse_blocks = false,
            }
            let without = plan_spec(&problem, &spec, arch, &options).expect("it fits").cost.seconds;
            assert!(without > best.cost.seconds, "{arch}: {step} is predicted to cost time");
        }
    }
}

#[test]
fn the_shared_memory_of_the_part_decides_the_tile() {
    let options = PlanOptions::default().with_family(Some(Family::Sm80));
    for (arch, limit) in [(Arch::Sm80, 163), (Arch::Sm86, 99), (Arch::Sm90, 227), (Arch::Sm120, 99)] {
        let set = explore(&BASE.with_head_dims(256, 256), arch, &options).expect("candidates");
        let largest = set.plans.iter().map(|p| p.smem.total).max().expect("plans");
        assert!(largest <= limit * 1024 && largest > (limit - 64) * 1024, "{arch}: {largest}");
        let miss =
            set.nearest().into_iter().find(|limit| limit.limit == "smem").expect("some are too big").nearest;
        assert!(
            matches!(miss.reason, Reason::Smem { need, have } if need > have && have == limit * 1024),
            "{miss:?}"
        );
    }
}

#[test]
fn head_dims_between_powers_of_two_have_tiles_of_their_own() {
    for (head_dim, sm90, sm80) in [(72, 80, 80), (80, 80, 80), (88, 96, 96), (104, 112, 128), (152, 160, 160)]
    {
        let problem = Problem::square(4, 4096, 16, head_dim, Mask::FULL, Dtype::Bf16);
        for (family, extent) in [(Family::Sm90, sm90), (Family::Sm80, sm80)] {
            let options = PlanOptions::default().with_family(Some(family));
            let first = best(&problem, Arch::Sm90, &options).expect("a plan");
            assert_eq!((first.spec.head_dim, first.spec.head_dim_v), (extent, extent), "{head_dim} {family}");
        }
    }
}

#[test]
fn sweeps_keep_a_decode_problems_query() {
    let lengths = [512, 2048, 8192];
    let square = sweep(&BASE, Arch::Sm90, &PlanOptions::default(), &lengths).expect("plans");
    assert_eq!(square.iter().map(|(n, _)| *n).collect::<Vec<_>>(), lengths);
    assert!(square.windows(2).all(|w| w[0].1.cost.tflops < w[1].1.cost.tflops));
    let decode = BASE
        .with_lengths(Lengths::uniform(BASE.lengths.sequences(), 1, BASE.lengths.max_k()))
        .with_heads_kv(4);
    for (seqlen, plan) in sweep(&decode, Arch::Sm90, &PlanOptions::default(), &lengths).expect("plans") {
        let parts = 16.0 * plan.cost.splits as f64;
        assert_eq!(plan.cost.tiles, parts, "N = {seqlen}: one packed tile per K/V head, or its parts");
    }
}

#[test]
fn plans_serialise() {
    let best = plan(&BASE, Arch::Sm90, &PlanOptions::default()).expect("plans").remove(0);
    let json = serde_json::to_value(&best).expect("plain data");
    assert_eq!(json["cost"]["bottleneck"], "tensor");
    assert_eq!(json["smem"]["total"], best.smem.total);
    assert_eq!(json["regs"]["setmaxnreg"]["mma"], 240);
}

#[test]
fn refusals_say_what_works() {
    let options = PlanOptions::default();
    let wide = BASE.with_head_dim(264);
    for (problem, arch, options, part) in [
        (BASE.with_types(Types::same(Dtype::F32)), Arch::Sm90, options.clone(), "use f16 or bf16"),
        (
            BASE.with_types(Types::fp8(Dtype::Bf16)),
            Arch::Sm80,
            options.clone(),
            "of e4m3 tensors: the forward of sm90",
        ),
        (wide, Arch::Sm80, options.clone(), "head_dim = 264: GPU kernels take multiples of 8 from 8 to 256"),
        (BASE.with_head_dim(584), Arch::Sm90, options.clone(), "from 8 to 576"),
        (BASE.with_head_dims(64, 260), Arch::Sm80, options.clone(), "head_dim_v = 260"),
        (
            BASE.with_head_dims(512, 512),
            Arch::Sm90,
            options.clone().with_pass(Pass::BACKWARD),
            "head_dim = 512: GPU kernels take multiples of 8 from 8 to 256",
        ),
        (
            BASE.with_head_dims(576, 512).with_heads_kv(1).with_latent(true).with_softmax_scale(Some(0.07)),
            Arch::Sm80,
            options.clone(),
            "a latent problem (576-512",
        ),
        (BASE.with_head_dim(33), Arch::Sm90, options.clone(), "multiples of 8 from 8 to 576"),
        (BASE.with_head_dim(33), Arch::Sm80, options.clone(), "multiples of 8 from 8 to 256"),
        (BASE.with_heads_kv(3), Arch::Sm90, options.clone(), "heads_kv = 3"),
        (BASE, Arch::Sm80, PlanOptions::default().with_family(Some(Family::Sm90)), "do not run on sm80"),
    ] {
        let error = plan(&problem, arch, &options).expect_err("must be refused").to_string();
        assert!(error.contains(part), "{error} does not say {part}");
    }
    let none = PlanError::NoneFits {
        arch: Arch::Sm86,
        tried: 3,
        nearest: explore(&BASE, Arch::Sm86, &options).unwrap().rejected[..1].to_vec(),
    };
    assert!(none.to_string().contains("none of 3 kernels fits sm86"), "{none}");
}

#[test]
fn a_given_spec_must_serve_the_problem() {
    let spec = plan(&BASE, Arch::Sm90, &PlanOptions::default()).expect("plans").remove(0).spec;
    let refused = |problem: Problem, part: &str| {
        let reason =
            plan_spec(&problem, &spec, Arch::Sm90, &PlanOptions::default()).expect_err("must be refused");
        assert!(reason.to_string().contains(part), "{reason} does not name {part}");
    };
    refused(BASE.with_types(Types::same(Dtype::F16)), "dtype: the kernel computes bf16; the problem has f16");
    refused(BASE.with_head_dim(136), "head_dim: the kernel computes multiples of 8 up to 128");
    refused(BASE.with_mask(Mask::FULL), "mask: the kernel computes causal");
    refused(
        BASE.with_score(ScoreMod::softcap(1.0)),
        "softcap: the kernel computes no softcap; the problem has a softcap",
    );
    let latent = BASE.with_head_dim_v(64).with_latent(true).with_softmax_scale(Some(0.1));
    refused(latent, "latent: the kernel computes K and V of their own");
    let narrow = BASE.with_head_dims(104, 72);
    assert!(plan_spec(&narrow, &spec, Arch::Sm90, &PlanOptions::default()).is_ok());
    let elsewhere = plan_spec(&BASE, &spec, Arch::Sm80, &PlanOptions::default()).expect_err("no wgmma");
    assert!(elsewhere.to_string().contains("wgmma"), "{elsewhere}");
}

#[test]
fn packed_heads_that_do_not_fit_the_tile_are_never_planned() {
    let problem = BASE.with_heads(129, 1).with_lengths(Lengths::uniform(
        BASE.lengths.sequences(),
        1,
        BASE.lengths.max_k(),
    ));
    let mut spec = plan(&BASE, Arch::Sm90, &PlanOptions::default()).expect("plans").remove(0).spec;
    let Kernel::Sm90Fwd(kernel) = &mut spec.kernel else { panic!("an SM90 forward") };
    (kernel.num_wg, kernel.tile_m, kernel.pack_gqa) = (2, 128, true);
    assert_eq!(spec.check(), Ok(()));
    let rule = spec.serves(&problem).expect_err("129 do not fit 128");
    let planned = plan_spec(&problem, &spec, Arch::Sm90, &PlanOptions::default());
    assert_eq!(planned.map(|plan| plan.spec), Err(rule.into()));
    for mask in [Mask::CAUSAL, Mask::FULL, Mask::window(128, 0)] {
        let problem = problem.with_mask(mask);
        let set = explore(&problem, Arch::Sm90, &PlanOptions::default()).expect("plans");
        assert!(!set.plans.is_empty());
        for plan in &set.plans {
            let traits = plan.spec.traits();
            assert!(!traits.packs_gqa || traits.tile.0 >= 129, "{}", plan.spec);
        }
    }
}

/// Clusters share the loads of K and V where TMA is slow (NB-066), and only there.
#[test]
fn loads_are_shared_where_rows_begin_between_sectors() {
    for (batch, seqlen, head_dim, mask, cluster) in [
        (32, 729, 72, Mask::FULL, 2),
        (16, 1025, 88, Mask::FULL, 2),
        (32, 729, 80, Mask::FULL, 1),
        (32, 729, 96, Mask::FULL, 1),
        (32, 729, 72, Mask::CAUSAL, 1),
        // One tile a head.
        (32, 60, 72, Mask::FULL, 1),
    ] {
        let problem = Problem::square(batch, seqlen, 16, head_dim, mask, Dtype::Bf16);
        let best = plan(&problem, Arch::Sm90, &PlanOptions::default()).expect("plans").remove(0);
        assert_eq!(best.spec.traits().cluster, cluster, "{batch} x {seqlen}, {head_dim}: {}", best.spec);
    }
}

/// A bias of f32 in wide heads leaves no registers for overlap, and is read in steps of 64 keys. Rows of
/// several heads have a slope each, which a 170th of the tiles does not pay for.
#[test]
fn what_programs_read_decides_tiles() {
    let best = |problem: Problem, text: &str| {
        let program = fa_core::program::Program::parse(text).unwrap().intern().unwrap();
        let own = problem.with_score(ScoreMod::NONE.with_program(Some(program)));
        plan(&own, Arch::Sm90, &PlanOptions::default()).expect("plans").remove(0).spec
    };
    let problem = Problem::square(2, 8192, 16, 128, Mask::FULL, Dtype::Bf16);
    let wide = best(problem.with_head_dims(512, 512), "array t: f32[_, _]; score = s + t[q, k];");
    let Kernel::Sm90Wide(kernel) = &wide.kernel else { panic!("{wide}") };
    assert_eq!((kernel.tile_n, kernel.overlap), (64, false), "{wide}");
    for (queries, packs) in [(8192, false), (48, true)] {
        let problem = Problem::square(2, queries, 32, 128, Mask::CAUSAL, Dtype::Bf16).with_heads_kv(8);
        let slopes = best(problem, "array t: f32[_]; score = s + t[h] * f32(k - q);");
        let Kernel::Sm90Fwd(kernel) = &slopes.kernel else { panic!("{slopes}") };
        assert_eq!(kernel.pack_gqa, packs, "{slopes}");
    }
}

/// A few tokens of sequences of unlike lengths have a tile each, and the longest would end alone.
#[test]
fn keys_of_latents_are_divided_for_several_tokens() {
    let latent = BASE.with_head_dims(576, 512).with_heads(128, 1).with_latent(true);
    let latent = latent.with_softmax_scale(Some(0.07)).with_mask(Mask::CAUSAL);
    for (batch, tokens, split) in
        [(24, 1, true), (24, 2, true), (40, 2, false), (4, 8, true), (24, 100, false)]
    {
        let lengths = Lengths::of(batch, Side::padded(tokens), Side::paged(64, 735, 5056));
        let plans = plan(&latent.with_lengths(lengths), Arch::Sm90, &PlanOptions::default()).expect("plans");
        assert_eq!(plans[0].spec.split, split, "{batch} x {tokens}: {}", plans[0].spec);
    }
}

/// Of heads of more than 256 columns and of latents the leader has room for what a program reads, dropout's
/// bits as well.
#[test]
fn wide_heads_and_latents_take_programs() {
    let latent = BASE.with_head_dims(576, 512).with_heads(128, 1).with_latent(true);
    let latent = latent.with_softmax_scale(Some(0.07)).with_lengths(Lengths::uniform(64, 1, 4096));
    for problem in [BASE.with_head_dims(512, 512), BASE.with_head_dims(320, 256), latent] {
        for text in [
            "array first: i32[_, _]; mask = first[h, q] <= k;",
            "array t: f32[_, _, _, _]; score = s + t[b, h, q, k];",
            "array t: f16[_, _]; mask = (q + k) % 3 != 0; score = tanh(s) * t[h, q - k + off];",
            "array fa_kept: bits[_, _, _, _]; weight = select(fa_kept[b, h, q, k], 1.25, 0.0);",
        ] {
            let program = fa_core::program::Program::parse(text).unwrap().intern().unwrap();
            let own = problem.with_score(ScoreMod::NONE.with_program(Some(program)));
            let plans = plan(&own, Arch::Sm90, &PlanOptions::default()).expect("plans");
            for plan in plans {
                assert!(matches!(plan.spec.kernel, Kernel::Sm90Wide(_)), "{}", plan.spec);
                assert_eq!(plan.spec.score.program, Some(program));
                assert!(plan.regs.total <= plan.regs.limit, "{}: {:?}", plan.spec, plan.regs);
            }
        }
    }
}
