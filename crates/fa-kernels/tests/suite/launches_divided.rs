//! What forwards launch whose lengths are on the device, or whose keys are divided among CTAs.

use fa_core::{Arch, Dtype, KernelSpec, LaunchPlan, Lengths, Mask, Problem, Side};
use fa_kernels::RawExtras;
use fa_kernels::launch::{Addresses, Launches, Params, Step};
use fa_planner::divide::kv_splits;

use crate::launches::{self, SMS, backward_spec, entries, tensors};
use crate::{launches_in_parts, launches_of};

fn sm90_forward(flags: &str, kernel: &str) -> KernelSpec {
    let text = format!(
        "(dtype: bf16, head_dim: 128, head_dim_v: 128, mask: causal, softcap: false, {flags} kernel: \
         Sm90Fwd(({kernel})))"
    );
    KernelSpec::from_ron(&text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

const DECODE: &str = "tile_m: 64, tile_n: 128, num_wg: 1, pv_is_rs: true, overlap_wg: true, q_stages: 1, \
                      kv_stages: 2, ping_pong: false, scheduler: Static, tile_order: Natural, cluster_m: 1, \
                      exp_poly_of_16: 0, rescale_threshold: 8, pack_gqa: true";

#[test]
fn lengths_on_the_device_are_planned_first() {
    let spec = sm90_forward("varied: true,", &DECODE.replace("Static", "PerTile"));
    let problem = Problem::square(1, 1, 8, 128, Mask::CAUSAL, Dtype::Bf16)
        .with_lengths(Lengths::packed(5, 1000, 4000, 600, 900))
        .with_heads_kv(2);
    let launches = launches_of(&spec, &problem, Arch::Sm90, 132).unwrap();
    // 4000 rows of a K/V head in tiles of 64, and one tile for each sequence that is not full.
    assert_eq!(entries(&launches), [("fa_plan", 1), ("fa_kernel", (62 + 5) * 2)]);
    assert_eq!(launches.plan_bytes, 4 * (16 + 4 * 67));
    let names: Vec<_> = launches.extras.iter().map(|extra| (extra.name, extra.is_optional)).collect();
    assert_eq!(names, [("cu_seqlens_q", false), ("cu_seqlens_k", false), ("plan", true)]);
    let shape = |i: usize| {
        let shape = &launches.tensors[i].shape;
        (shape.batch, shape.seqlen, shape.heads)
    };
    assert_eq!((shape(0), shape(1)), ((1, 1000, 8), (1, 4000, 2)));
    // The step can be left out by calls that bring a plan.
    assert!(matches!(launches.steps[0], Step::Plan(_)));
    let nothing = problem.with_lengths(Lengths::packed(5, 0, 4000, 0, 900));
    assert_eq!(launches_of(&spec, &nothing, Arch::Sm90, 132).unwrap().steps, []);
}

#[test]
fn divided_keys_are_combined() {
    let spec = sm90_forward("split: true,", DECODE);
    let problem = Problem::square(1, 1, 32, 128, Mask::CAUSAL, Dtype::Bf16)
        .with_lengths(Lengths::uniform(1, 1, 8192))
        .with_heads_kv(8);
    let launches = launches_in_parts(&spec, &problem, Arch::Sm90, 132, Some(16)).unwrap();
    assert_eq!(entries(&launches), [("fa_kernel", 8 * 16), ("fa_combine", 32)]);
    let rows = 32 * 16;
    assert_eq!(launches.workspace.lse_partial.unwrap().bytes, 4 * rows);
    assert_eq!(launches.workspace.out_partial.unwrap().bytes, 4 * 128 * rows);
    assert_eq!((launches.workspace.plan, launches.plan_bytes), (None, 0));
    // Enough tiles without: no parts, no memory for them.
    let many = problem.with_lengths(Lengths::uniform(512, 1, 512));
    let launches = launches_of(&spec, &many, Arch::Sm90, 132).unwrap();
    assert_eq!((entries(&launches), launches.workspace.bytes), (vec![("fa_kernel", 132)], 0));
    // What the device decides has room for parts of all SMs, however long the sequences may be.
    let paged = sm90_forward("varied: true, paged: true, split: true,", DECODE);
    let lengths = Lengths::of(4, Side::packed(4, 1), Side::paged(16, 1 << 20, 1 << 20));
    let launches = launches_of(&paged, &problem.with_lengths(lengths), Arch::Sm90, 132).unwrap();
    let slots = 6 * 132 / 8 + 2;
    assert_eq!(launches.workspace.lse_partial.unwrap().bytes, 4 * slots * 8 * 4);
    assert_eq!(entries(&launches)[0], ("fa_plan", 1));
    assert_eq!(entries(&launches)[2].0, "fa_combine");
}

/// CTAs of the main kernel's clusters.
fn cluster(launches: &Launches) -> u32 {
    let Some(Step::Launch(main)) = launches.steps.first() else { panic!("a launch") };
    main.cluster
}

#[test]
fn clusters_combine_their_parts() {
    let spec = sm90_forward("split: true,", DECODE);
    let base = Problem::square(1, 1, 32, 128, Mask::CAUSAL, Dtype::Bf16).with_heads_kv(8);
    // Eight tiles by clusters of eight: no second kernel, and no memory between them.
    let problem = base.with_lengths(Lengths::uniform(1, 1, 8192));
    let launches = launches_of(&spec, &problem, Arch::Sm90, 132).unwrap();
    assert_eq!((entries(&launches), cluster(&launches)), (vec![("fa_kernel", 64)], 8));
    assert_eq!(launches.workspace.bytes, 0);
    // One tile by twelve clusters, whose results a second kernel combines.
    let alone = base.with_heads(32, 1).with_lengths(Lengths::uniform(1, 1, 32768));
    let launches = launches_in_parts(&spec, &alone, Arch::Sm90, 132, Some(96)).unwrap();
    assert_eq!((entries(&launches), cluster(&launches)), (vec![("fa_kernel", 96), ("fa_combine", 32)], 8));
    assert_eq!(launches.workspace.lse_partial.unwrap().bytes, 4 * 32 * 12);
    let packed = spec.clone();
    // Not where the GPU has no room for all clusters at once, nor where rows of O are wide.
    for (spec, sms) in [(spec.clone(), 72), (KernelSpec { head_dim: 256, head_dim_v: 256, ..spec }, 132)] {
        let dim = spec.head_dim as usize;
        let problem = problem.with_head_dims(dim, dim);
        let launches = launches_in_parts(&spec, &problem, Arch::Sm90, sms, Some(8)).unwrap();
        assert_eq!((cluster(&launches), entries(&launches)[1].0), (1, "fa_combine"));
    }
    // Several tiles of a head, with packed heads and without, have clusters of their own.
    let plain = sm90_forward("split: true,", &DECODE.replace("pack_gqa: true", "pack_gqa: false"));
    for (spec, queries, ctas) in [(&plain, 64, 3), (&plain, 65, 3), (&packed, 65, 3)] {
        let lengths = Lengths::uniform(1, queries, 8192);
        let problem = base.with_heads(4, 1).with_lengths(lengths);
        let launches = launches_in_parts(spec, &problem, Arch::Sm90, 132, Some(3)).unwrap();
        assert_eq!(cluster(&launches), ctas, "{spec}, {queries} queries");
    }
}

#[test]
fn keys_are_divided_as_the_caller_says() {
    let spec = sm90_forward("split: true,", DECODE);
    let base = Problem::square(1, 1, 32, 128, Mask::CAUSAL, Dtype::Bf16).with_heads_kv(8);
    let of = |spec: &KernelSpec, lengths, splits| {
        launches_in_parts(spec, &base.with_lengths(lengths), Arch::Sm90, 132, splits).unwrap()
    };
    let (_, tile_n) = spec.tile();
    let parts = |launches: &Launches| {
        let stored = launches.workspace.lse_partial.map_or(1, |part| part.bytes / (4 * 32));
        stored * cluster(launches) as usize
    };
    for splits in [1, 2, 3, 7] {
        assert_eq!(parts(&of(&spec, Lengths::uniform(1, 1, 8192), Some(splits))), splits);
    }
    // No more than there are steps, nor than the combine kernel holds.
    assert_eq!(parts(&of(&spec, Lengths::uniform(1, 1, 3 * tile_n as usize), Some(99))), 3);
    assert_eq!(parts(&of(&spec, Lengths::uniform(1, 1, 1 << 20), Some(999))), 256);
    assert_eq!(parts(&of(&spec, Lengths::uniform(1, 1, 0), Some(4))), 1);
    // Tiles of many queries are divided as well: 32 heads, 8 of them at a time.
    let long = of(&spec, Lengths::uniform(2, 999, 8192), Some(3));
    assert_eq!(entries(&long)[1].0, "fa_combine");
    // Of lengths on the device it is the most parts of a tile; the plan's room stays.
    let paged = sm90_forward("varied: true, paged: true, split: true,", DECODE);
    let lengths = Lengths::of(4, Side::packed(4, 1), Side::paged(16, 1 << 20, 1 << 20));
    let (planned, bounded) = (of(&paged, lengths, None), of(&paged, lengths, Some(5)));
    assert_eq!((planned.workspace, planned.plan_bytes), (bounded.workspace, bounded.plan_bytes));
    let tensors = tensors(&bounded);
    let at = Addresses { tensors: &tensors, lse: None, workspace: None, extras: RawExtras::default() };
    let Params::Forward(params) = bounded.params(&at) else { panic!("a forward") };
    assert_eq!(params.split.splits, 5);
}

/// Whatever the cost model would take.
#[test]
fn a_plan_is_launched_as_it_is_or_refused() {
    let spec = sm90_forward("split: true,", DECODE);
    let problem = Problem::square(1, 1, 32, 128, Mask::CAUSAL, Dtype::Bf16)
        .with_lengths(Lengths::uniform(1, 1, 8192))
        .with_heads_kv(8);
    let steps = 8192 / spec.tile().1 as usize;
    let of = |spec: &KernelSpec, splits, cluster| LaunchPlan { spec: spec.clone(), splits, cluster };
    for (splits, clusters) in [(1, 1), (2, 1), (2, 2), (8, 1), (8, 4), (8, 8), (steps, 1)] {
        let launches = Launches::of(&of(&spec, splits, clusters), &problem, Arch::Sm90, SMS).unwrap();
        let tensors = tensors(&launches);
        let at = Addresses { tensors: &tensors, lse: None, workspace: None, extras: RawExtras::default() };
        let Params::Forward(params) = launches.params(&at) else { panic!("a forward") };
        assert_eq!(
            (params.split.splits as usize, cluster(&launches) as usize),
            (splits / clusters, clusters)
        );
        assert_eq!(entries(&launches)[0], ("fa_kernel", SMS.min(8 * splits as u32)));
        assert_eq!(entries(&launches).len(), if splits > clusters { 2 } else { 1 });
    }
    let whole = KernelSpec { split: false, ..spec.clone() };
    let (back, grouped) = (backward_spec(false), launches::problem());
    let refusals = [
        (of(&spec, 0, 1), &problem, "splits = 0: use 1 to"),
        (of(&spec, steps + 1, 1), &problem, "splits = "),
        (of(&spec, 8, 3), &problem, "cluster = 3: use a divisor of 8"),
        (of(&spec, 16, 16), &problem, "cluster = 16: use a divisor of 16 splits up to 8"),
        (of(&spec, 8, 0), &problem, "cluster = 0: use a divisor"),
        (of(&whole, 2, 1), &problem, "splits = 2: use 1 to 1 for a kernel without splits"),
        (of(&back, 0, 1), &grouped, "splits = 0: use 1 to 4"),
        (of(&back, 5, 1), &grouped, "splits = 5: use 1 to 4"),
        (of(&back, 2, 2), &grouped, "cluster = 2: use 1"),
    ];
    for (plan, problem, part) in refusals {
        let error = Launches::of(&plan, problem, Arch::Sm90, SMS).map(|_| ()).expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    }
    // Clusters whose CTAs would take further tiles.
    let many = problem.with_lengths(Lengths::uniform(64, 1, 8192));
    let error = Launches::of(&of(&spec, 8, 8), &many, Arch::Sm90, SMS).expect_err("512 clusters").to_string();
    assert!(error.contains("cluster = 8: use 1 for more tiles than run at once"), "{error}");
}

#[test]
fn rows_of_no_sequence_launch_nothing() {
    let spec = sm90_forward("varied: true, paged: true, split: true,", DECODE);
    let base = Problem::square(1, 1, 8, 128, Mask::CAUSAL, Dtype::Bf16).with_heads_kv(1);
    for (sequences, most, is_empty) in [(0, 1, true), (3, 0, true), (1, 1, false)] {
        let lengths = Lengths::of(sequences, Side::packed(7, most), Side::paged(16, 1024, 16_384));
        let problem = base.with_lengths(lengths);
        let launches = launches_of(&spec, &problem, Arch::Sm90, 132).unwrap();
        assert_eq!(launches.steps.is_empty(), is_empty, "{sequences} sequences of {most} queries at most");
    }
}

#[test]
fn only_the_combination_starts_early() {
    let spec = sm90_forward("varied: true, paged: true, split: true,", DECODE);
    let lengths = Lengths::of(4, Side::packed(4, 1), Side::paged(16, 1024, 16_384));
    let base = Problem::square(1, 1, 8, 128, Mask::CAUSAL, Dtype::Bf16).with_heads_kv(1);
    let launches = launches_of(&spec, &base.with_lengths(lengths), Arch::Sm90, 132).unwrap();
    let early: Vec<_> = (launches.steps.iter())
        .map(|step| match step {
            Step::Plan(launch) | Step::Launch(launch) => (launch.entry, launch.starts_early),
            Step::Clear(_) | Step::ClearGradient => panic!("a forward clears nothing"),
        })
        .collect();
    assert_eq!(early, [("fa_plan", false), ("fa_kernel", false), ("fa_combine", true)]);
}

#[test]
fn few_tiles_are_planned_by_the_ctas_themselves_unless_a_call_brings_a_plan() {
    let spec = sm90_forward("varied: true, paged: true, split: true,", DECODE);
    let base = Problem::square(1, 1, 8, 128, Mask::CAUSAL, Dtype::Bf16).with_heads_kv(1);
    let launches_for = |spec: &KernelSpec, sequences: usize| {
        let lengths = Lengths::of(sequences, Side::packed(sequences, 1), Side::paged(16, 1024, 16_384));
        launches_of(spec, &base.with_lengths(lengths), Arch::Sm90, SMS).unwrap()
    };
    let plans = |launches: &Launches, plan: Option<u64>| {
        let at = Addresses {
            tensors: &tensors(launches),
            lse: None,
            workspace: Some(1 << 40),
            extras: RawExtras { plan, ..RawExtras::default() },
        };
        let Params::Forward(own) = launches.params(&at) else { panic!("a forward") };
        (launches.steps.iter().filter(|step| launches.takes(step, &at)).count(), own.params.plan.own_ints)
    };
    let few = launches_for(&spec, 256);
    let own_ints = (few.plan_bytes / 4).next_multiple_of(32) as i32;
    assert_eq!(plans(&few, None), (2, own_ints));
    assert_eq!(plans(&few, Some(1 << 41)), (2, 0));
    assert_eq!(few.workspace.plan.map(|part| part.bytes), Some(4 * own_ints as usize * SMS as usize));
    assert!(few.entries().eq(["fa_kernel", "fa_combine"]));
    let many = launches_for(&spec, 257);
    assert_eq!((plans(&many, None), plans(&many, Some(1 << 41))), ((3, 0), (2, 0)));
    assert_eq!(many.workspace.plan.map(|part| part.bytes), Some(many.plan_bytes));
    let whole = launches_for(&sm90_forward("varied: true, paged: true,", DECODE), 32);
    assert_eq!(plans(&whole, None), (2, 0));
}

#[test]
fn chunks_in_pages_have_the_parts_of_a_dense_launch() {
    let spec = sm90_forward("varied: true, paged: true, split: true,", DECODE);
    let base = Problem::square(1, 1, 8, 128, Mask::CAUSAL, Dtype::Bf16).with_heads_kv(1);
    for (queries, divided_alike) in [(512, true), (8, false)] {
        let lengths = Lengths::of(1, Side::packed(queries, queries), Side::paged(16, 1024, 16_384));
        let problem = base.with_lengths(lengths);
        let launches = launches_of(&spec, &problem, Arch::Sm90, 132).unwrap();
        let tensors = tensors(&launches);
        let at = Addresses { tensors: &tensors, lse: None, workspace: None, extras: RawExtras::default() };
        let Params::Forward(params) = launches.params(&at) else { panic!("a forward") };
        let dense = kv_splits(&problem, &spec, Arch::Sm90, 132);
        assert!(dense > 1 && params.split.splits >= dense as i32, "{queries} queries");
        // A decoding tile may have as many as the plan gives it.
        assert_eq!(params.split.splits == dense as i32, divided_alike, "{queries} queries: {dense}");
    }
}

#[test]
fn parts_of_pages_that_no_box_places_are_refused() {
    let text = sm90_forward("varied: true, paged: true,", DECODE).to_ron().replace("dim: 128", "dim: 96");
    let spec = KernelSpec::from_ron(&text.replace("dim_v: 128", "dim_v: 96")).unwrap();
    let with = |page: usize| {
        let lengths = Lengths::of(2, Side::padded(1), Side::paged(page, 64, 700));
        let problem = Problem::square(1, 1, 4, 96, Mask::CAUSAL, Dtype::Bf16).with_lengths(lengths);
        launches_of(&spec, &problem, Arch::Sm90, 132).map(|_| ())
    };
    // Rows of a panel are 64 bytes, and boxes start on 128.
    assert!(matches!(with(7), Err(fa_kernels::Error::Page { page: 7, head_dim: 96, multiple: 2, .. })));
    with(12).unwrap();
    with(64).unwrap();
    // A warp issues 32 boxes at most.
    let one = Err(fa_kernels::Error::Page { page: 1, tile_n: 128, head_dim: 128, multiple: 4 });
    let spec = sm90_forward("varied: true, paged: true,", DECODE);
    let lengths = Lengths::of(2, Side::padded(1), Side::paged(1, 700, 700));
    let problem = Problem::square(1, 1, 4, 128, Mask::CAUSAL, Dtype::Bf16).with_lengths(lengths);
    let refused = launches_of(&spec, &problem, Arch::Sm90, 132).map(|_| ());
    assert_eq!(format!("{refused:?}"), format!("{:?}", one as Result<(), _>));
    // Threads copy pages of any size.
    let gathers = spec.to_ron().replace("pack_gqa: true", "pack_gqa: true, gather: true");
    let gathers = KernelSpec::from_ron(&gathers).unwrap();
    launches_of(&gathers, &problem, Arch::Sm90, 132).unwrap();
}
