//! K and V in codes: which kernels are planned, in how much shared memory, and how fast.

use fa_core::{
    Arch, Dtype, Family, Kernel, Lengths, Mask, MaskKind, Pass, Problem, ScoreMod, Side, Sm80Fwd, Sm90Fwd,
    Types,
};
use fa_planner::account::{account, smem};
use fa_planner::plan::{Plan, PlanError, PlanOptions, best, families, plan};

/// `queries` of 32 heads on `keys` of 8 in each of `batch` sequences.
fn problem(batch: usize, queries: usize, keys: usize, head_dim: usize, kv: Dtype) -> Problem {
    Problem::square(1, 1, 32, head_dim, Mask::CAUSAL, Dtype::Bf16)
        .with_heads_kv(8)
        .with_lengths(Lengths::uniform(batch, queries, keys))
        .with_types(Types::same(Dtype::Bf16).with_kv(kv))
}

fn first(problem: &Problem, arch: Arch, family: Option<Family>) -> Plan {
    let options = PlanOptions::default().with_family(family);
    best(problem, arch, &options).unwrap_or_else(|error| panic!("{problem:?} on {arch}: {error}"))
}

#[test]
fn every_head_dim_has_a_kernel_that_fits() {
    for head_dim in [32, 64, 72, 80, 96, 128, 192, 256] {
        for kv in Dtype::CODES {
            if kv == Dtype::Int4 && head_dim % 32 != 0 {
                let error = plan(&problem(4, 1, 8192, head_dim, kv), Arch::Sm90, &PlanOptions::default());
                let text = error.unwrap_err().to_string();
                assert!(text.contains(&format!("head_dim = {head_dim}")) && text.contains("of 32"), "{text}");
                continue;
            }
            for (queries, keys) in [(1, 8192), (512, 8192), (4096, 4096)] {
                for (arch, family) in [
                    (Arch::Sm90, None),
                    (Arch::Sm80, None),
                    (Arch::Sm89, None),
                    (Arch::Sm100, None),
                    (Arch::Sm120, Some(Family::Sm80)),
                ] {
                    for page in [None, Some(1), Some(16)] {
                        let own = problem(4, queries, keys, head_dim, kv);
                        let cache = |page: usize| {
                            Lengths::of(
                                4,
                                Side::padded(queries),
                                Side::paged(page, 4 * keys / page + 1, keys),
                            )
                        };
                        let own = page.map_or(own, |page| own.with_lengths(cache(page)));
                        let plan = first(&own, arch, family);
                        assert_eq!(plan.spec.types, own.types, "{}", plan.spec);
                        assert_eq!(plan.spec.serves(&own), Ok(()), "{}", plan.spec);
                        assert!(plan.spec.traits().tensor_maps.len() < 2 && plan.spec.traits().copies_rows());
                        let divides = plan.spec.kernel.param("divide_keys")
                            == Some(fa_core::spec::ParamValue::Switch(true));
                        let names: &[&str] =
                            if divides { &["kv", "descales"] } else { &["k_codes", "v_codes", "descales"] };
                        assert!(names.iter().all(|name| plan.smem.buffer(name).is_some()), "{}", plan.spec);
                        // Wide heads leave no room for the warps' results where an SM has 99 KiB, and lanes
                        // read two steps of codes of 8 bits, or four of 4.
                        let is_odd = head_dim % (32 * kv.per_element()) != 0 && kv == Dtype::Int4;
                        assert!(
                            if divides { queries == 1 } else { queries > 1 || head_dim > 128 || is_odd },
                            "{}",
                            plan.spec
                        );
                        assert!(plan.smem.total <= arch.limits().smem_per_block);
                    }
                }
            }
        }
    }
}

/// All warps of the SM80 class convert codes; a prompt's products are worth the SM90 kernel.
#[test]
fn few_rows_over_codes_are_left_to_the_sm80_class() {
    for (queries, heads, kv, head_dim, family) in [
        (1, (32, 8), Dtype::E4m3, 128, Family::Sm80),
        (4, (32, 8), Dtype::Int8, 64, Family::Sm80),
        (16, (32, 8), Dtype::E4m3, 256, Family::Sm80),
        (17, (32, 8), Dtype::E4m3, 128, Family::Sm90),
        (512, (32, 8), Dtype::E4m3, 128, Family::Sm90),
        (1, (128, 1), Dtype::E4m3, 128, Family::Sm90),
        (1, (32, 8), Dtype::Bf16, 128, Family::Sm90),
    ] {
        let own = problem(64, queries, 4096, head_dim, kv).with_heads(heads.0, heads.1);
        let chosen = first(&own, Arch::Sm90, None).spec.kernel.family();
        assert_eq!(chosen, family, "{queries} queries of {heads:?} heads over {kv}");
        let others = families(&own, Pass::Forward, Arch::Sm90);
        assert!(others.contains(&Family::Sm80) && others.contains(&Family::Sm90), "the other one is left");
        let all = plan(&own, Arch::Sm90, &PlanOptions::default()).expect("plans");
        assert_eq!(all[0].spec, first(&own, Arch::Sm90, None).spec);
        assert_eq!(families(&own, Pass::Forward, Arch::Sm80), [Family::Sm80]);
    }
    let fp8 = problem(64, 1, 4096, 128, Dtype::E4m3).with_types(Types::fp8(Dtype::Bf16));
    assert_eq!(families(&fp8, Pass::Forward, Arch::Sm90), [Family::Sm90]);
    assert!(first(&fp8, Arch::Sm90, None).spec.kernel.computes_in_8_bits());
}

/// Latents and heads of more than 256 columns have kernels of SM90 alone, which convert codes to their tiles
/// of keys: latents to two of 64. Programs are computed there as well, by those whose registers have room.
#[test]
fn wide_heads_in_codes_have_plans_on_sm90() {
    let half = problem(8, 1, 4096, 512, Dtype::Bf16);
    let latent = half.with_head_dims(576, 512).with_heads(128, 1).with_latent(true);
    let latent = latent.with_softmax_scale(Some(0.07));
    let programs = [
        "k <= q + off",
        "array t: bf16[_, _]; score = s + t[q, k];",
        "array t: f32[_, _]; score = s + t[q, k];",
        "score = s - 0.1 * f32(abs(q + off - k));",
    ];
    for wide in [half, half.with_head_dims(320, 256), latent] {
        for kv in Dtype::CODES {
            let coded = problem(8, 1, 4096, 512, kv);
            let wide = wide.with_types(coded.types).with_descales(coded.descales);
            let best = first(&wide, Arch::Sm90, None);
            let Kernel::Sm90Wide(kernel) = &best.spec.kernel else { panic!("{}", best.spec) };
            assert!(!kernel.gather && best.smem.buffer("descales").is_some(), "{}", best.spec);
            for text in programs {
                let program = fa_core::program::Program::parse(text).unwrap().intern().unwrap();
                let changed = wide.with_score(ScoreMod::NONE.with_program(Some(program)));
                let best = first(&changed, Arch::Sm90, None);
                assert!(matches!(best.spec.kernel, Kernel::Sm90Wide(_)), "{}", best.spec);
                assert!(best.regs.total <= best.regs.limit, "{}: {:?}", best.spec, best.regs);
                let others = plan(&changed, Arch::Sm80, &PlanOptions::default());
                assert!(others.is_err(), "no kernel of SM80 has these head dims");
            }
        }
    }
}

/// On an H200, e4m3: 8 heads over 8k keys, causal, 2.37 ms by steps of 32 in turns with 1.85 by those of 64,
/// and 64 x 4k decoded 212 us with 184 (NB-219).
#[test]
fn heads_of_512_in_codes_take_one_tile_of_64_keys() {
    let codes = |batch, queries, keys| problem(batch, queries, keys, 512, Dtype::E4m3);
    let prefill = codes(1, 8192, 8192).with_heads(8, 4);
    for own in [prefill, codes(64, 1, 4096).with_heads(8, 1)] {
        let best = first(&own, Arch::Sm90, None).spec;
        let Kernel::Sm90Wide(kernel) = &best.kernel else { panic!("{best}") };
        assert_eq!((kernel.tile_n, kernel.overlap, kernel.kv_stages), (64, false, 1), "{best}");
    }
}

/// Decoding reads half the bytes, and takes little more than half the time where memory is the limit.
#[test]
fn decoding_a_cache_of_codes_is_faster() {
    for (arch, least) in [(Arch::Sm90, 1.5), (Arch::Sm80, 1.3)] {
        for head_dim in [64, 128] {
            let seconds = |kv| first(&problem(32, 1, 32 << 10, head_dim, kv), arch, None).cost.seconds;
            let gain = seconds(Dtype::Bf16) / seconds(Dtype::E4m3);
            assert!(gain > least && gain < 2.1, "{arch}, head dim {head_dim}: {gain}");
        }
    }
}

/// By hand: Q, a stage of codes, descales and one tile of each; on SM90 the stages of tiles and codes.
#[test]
fn shared_memory_by_hand() {
    let own = problem(1, 4096, 4096, 128, Dtype::E4m3);
    let of = |kernel: Kernel| fa_core::KernelSpec::for_problem(&own, [128, 128], kernel);
    let sm80 = Sm80Fwd { tile_m: 128, tile_n: 64, stages: 1, ..Sm80Fwd::default() };
    let plan = smem(&of(sm80.clone().into()));
    assert_eq!(plan.total, 32768 + 2 * 64 * 128 + 2 * 64 * 4 + 2 * 64 * 128 * 2);
    // Q in registers lies over the end of the tiles, which are written after it has been read.
    let plan = smem(&of(Sm80Fwd { q_in_regs: true, ..sm80 }.into()));
    assert_eq!(plan.total, 2 * 64 * 128 + 2 * 64 * 4 + 2 * 64 * 128 * 2);
    let sm90 = Sm90Fwd { tile_m: 128, tile_n: 128, kv_stages: 2, q_stages: 1, ..Sm90Fwd::default() };
    let plan = smem(&of(sm90.into()));
    let bars = 2 * 8 + 4 * 2 * 8;
    let codes = 2 * 128 * 256 + 2 * 2 * 128 * 4;
    assert_eq!(plan.total, (32768u32 + 2 * 2 * 128 * 128 * 2 + codes + bars).next_multiple_of(1024));
}

#[test]
fn what_no_kernel_does_with_codes_is_refused_by_name() {
    let own = problem(1, 128, 128, 64, Dtype::Int8);
    let error = plan(&own, Arch::Sm90, &PlanOptions::default().with_pass(Pass::BACKWARD)).unwrap_err();
    assert!(matches!(&error, PlanError::Problem(_)) && error.to_string().contains("int8"), "{error}");
    let options = PlanOptions::default().with_family(Some(Family::Sm100));
    let error = plan(&own, Arch::Sm100, &options).unwrap_err().to_string();
    assert!(error.contains("sm100_fwd has no device code for K and V in codes"), "{error}");
    let spec = |kernel: Kernel| fa_core::KernelSpec::for_problem(&own, [64, 64], kernel);
    for (kernel, part) in [
        (Sm90Fwd { gather: true, ..Sm90Fwd::default() }.into(), "gather"),
        (Sm90Fwd { cluster_m: 2, ..Sm90Fwd::default() }.into(), "cluster_m"),
        (Sm90Fwd { tile_n: 80, ..Sm90Fwd::default() }.into(), "a multiple of 32"),
        (Sm80Fwd { swizzle: false, ..Sm80Fwd::default() }.into(), "swizzle"),
    ] as [(Kernel, &str); 4]
    {
        let mut spec = spec(kernel);
        spec.mask = MaskKind::Full;
        let error = account(&spec, Arch::Sm90).unwrap_err().to_string();
        assert!(error.contains(part), "{error} does not name {part}");
    }
    // Soft caps by a polynomial have no descales.
    let capped = own.with_score(ScoreMod::softcap(30.0));
    let plan = first(&capped, Arch::Sm90, None);
    let Kernel::Sm90Fwd(kernel) = &plan.spec.kernel else { panic!("{}", plan.spec) };
    assert!(!kernel.near_cap(&plan.spec));
}
