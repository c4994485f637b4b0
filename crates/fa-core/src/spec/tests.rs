//! Tests of specs: their text, their checks, and which problems they serve.

use super::*;
use crate::{Alibi, Dtype, Lengths, Mask, Problem, ScoreMod};

fn sm80() -> KernelSpec {
    KernelSpec {
        types: Types::same(Dtype::F16),
        head_dim: 128,
        head_dim_v: 128,
        mask: MaskKind::Causal,
        score: ScoreKind::NONE,
        reads: Reads::UNIFORM,
        split: false,
        kernel: Kernel::Sm80Fwd(Sm80Fwd { tile_m: 128, tile_n: 64, ..Sm80Fwd::default() }),
    }
}

fn sm90() -> KernelSpec {
    KernelSpec {
        kernel: Kernel::Sm90Fwd(Sm90Fwd {
            tile_m: 128,
            tile_n: 176,
            ping_pong: true,
            scheduler: Scheduler::Static,
            ..Sm90Fwd::default()
        }),
        ..sm80()
    }
}

fn backward() -> KernelSpec {
    KernelSpec {
        kernel: Kernel::Sm90Bwd(Sm90Bwd {
            tile_m: 64,
            tile_n: 128,
            num_wg: 2,
            q_stages: 2,
            do_stages: 2,
            pds_stages: 2,
            sdp_swap_ab: true,
            dkv_swap_ab: false,
            dq_swap_ab: false,
            atom_layout_m_sdp: 1,
            atom_layout_n_dkv: 2,
            atom_layout_m_dq: 1,
            mma_dkv_is_rs: true,
            dq_via_smem: true,
            dq_slices: 1,
            tile_order: TileOrder::LongestFirst,
            deterministic: false,
            persistent: false,
            whole_keys: false,
        }),
        ..sm80()
    }
}

#[test]
fn backward_shapes_follow_the_tensor_cores() {
    let refused = |change: fn(&mut Sm90Bwd), part: &str| {
        let mut spec = backward();
        let Kernel::Sm90Bwd(kernel) = &mut spec.kernel else { panic!("a backward") };
        change(kernel);
        let error = spec.check().expect_err("must be refused").to_string();
        assert!(error.contains(part), "{error} does not name {part}");
    };
    assert_eq!(backward().check(), Ok(()));
    refused(|k| k.tile_m = 80, "dQ: [80, 128]");
    refused(|k| k.sdp_swap_ab = false, "mma_dkv_is_rs");
    refused(|k| k.atom_layout_n_dkv = 3, "atom_layout_n_dkv = 3: must be 1 or num_wg = 2");
    refused(|k| k.dq_slices = 2, "dq_slices = 2");
    refused(|k| k.q_stages = 3, "q_stages = 3");
    refused(|k| k.tile_n = 144, "tile_n = 144");
    let room = "pds_stages * tile_m = 64 is below the head dim 128";
    refused(|k| (k.persistent, k.pds_stages) = (true, 1), room);
}

#[test]
fn tiles_of_all_keys_are_refused_what_they_do_not_compute() {
    let whole = |change: fn(&mut KernelSpec, &mut Sm90Bwd)| {
        let mut spec = backward();
        let Kernel::Sm90Bwd(kernel) = spec.kernel.clone() else { panic!("a backward") };
        let mut kernel = Sm90Bwd { whole_keys: true, dq_via_smem: false, dq_swap_ab: false, ..kernel };
        change(&mut spec, &mut kernel);
        KernelSpec { kernel: Kernel::Sm90Bwd(kernel), ..spec }
    };
    for change in [
        (|_, k| k.dq_via_smem = true) as fn(&mut KernelSpec, &mut Sm90Bwd),
        |_, k| k.dq_swap_ab = true,
        |_, k| k.deterministic = true,
        |spec, _| spec.mask = MaskKind::Window,
        |spec, _| spec.reads.varied = true,
        |spec, _| spec.score.program = crate::program::Program::parse("s * 2").unwrap().intern().ok(),
    ] {
        let error = whole(change).check().expect_err("must be refused").to_string();
        assert!(error.contains("whole_keys needs"), "{error}");
    }
    for mask in [Mask::FULL, Mask::CAUSAL] {
        let mut spec = whole(|_, _| ());
        spec.mask = MaskKind::of(&mask);
        assert_eq!(spec.check(), Ok(()));
        assert!(KernelSpec::from_ron(&spec.to_ron()).is_ok_and(|read| read == spec));
        let (wide, dtype) = (spec.tile().1 as usize, spec.types.q);
        let of = |queries, keys| {
            let problem = Problem::square(3, 1, 2, spec.head_dim as usize, mask, dtype);
            spec.serves(&problem.with_lengths(Lengths::uniform(3, queries, keys)))
        };
        for (queries, keys) in [(1, 1), (1, wide), (wide, wide), (0, 5)] {
            assert_eq!(of(queries, keys), Ok(()), "{mask} {queries} {keys}");
        }
        assert_eq!(of(300, 9).is_ok(), mask.is_full());
        for (queries, keys) in [(64, wide + 1), (5, 0)] {
            let error = of(queries, keys).expect_err("must be refused");
            assert_eq!(error.what(), "whole_keys", "{error}");
        }
    }
}

#[test]
fn ctas_that_share_an_sm_have_their_products_registers() {
    let of = |blocks_per_sm, change: fn(&mut KernelSpec, &mut Sm90Fwd)| {
        let mut spec = KernelSpec { head_dim: 64, head_dim_v: 64, ..sm90() };
        let alone = Sm90Fwd { num_wg: 1, tile_m: 64, tile_n: 64, ..Sm90Fwd::default() };
        let mut kernel = Sm90Fwd { blocks_per_sm, ..alone };
        change(&mut spec, &mut kernel);
        KernelSpec { kernel: Kernel::Sm90Fwd(kernel), ..spec }
    };
    for blocks in 1..=4 {
        let spec = of(blocks, |_, _| ());
        assert_eq!(spec.check(), Ok(()));
        assert_eq!(spec.traits().blocks_per_sm, blocks);
        assert_eq!(spec.to_ron().contains("blocks_per_sm"), blocks > 1);
        assert!(KernelSpec::from_ron(&spec.to_ron()).is_ok_and(|read| read == spec));
    }
    assert_eq!(of(3, |_, k| k.tile_n = 96).check(), Ok(()));
    assert_eq!(of(2, |_, k| k.tile_n = 128).check(), Ok(()));
    for (blocks, change, part) in [
        (5, (|_, _| ()) as fn(&mut KernelSpec, &mut Sm90Fwd), "blocks_per_sm = 5"),
        (0, |_, _| (), "blocks_per_sm = 0"),
        (2, |spec, k| (spec.mask, k.cluster_m) = (MaskKind::Full, 2), "needs cluster_m = 1"),
        (2, |_, k| (k.num_wg, k.tile_m) = (3, 192), "num_wg of 1 or 2"),
        (2, |spec, k| (spec.reads, k.gather) = (Reads { varied: true, paged: true }, true), "gather = false"),
        (2, |spec, _| (spec.types.kv, spec.reads.varied) = (Dtype::E4m3, true), "blocks_per_sm = 1"),
        (3, |_, k| k.tile_n = 128, "leaves a thread 80 registers, too few for a product of 128"),
        (3, |spec, _| spec.head_dim_v = 128, "use at most 96"),
        (4, |_, k| k.tile_n = 80, "use at most 64"),
    ] {
        let error = of(blocks, change).check().expect_err(part).to_string();
        assert!(error.contains(part), "{error} does not name {part}");
    }
}

#[test]
fn columns_of_a_head_dim_are_divided_in_blocks_of_16() {
    let of = |change: fn(&mut Sm90Bwd)| {
        let mut spec = KernelSpec { head_dim: 80, head_dim_v: 80, ..backward() };
        let Kernel::Sm90Bwd(kernel) = &mut spec.kernel else { panic!("a backward") };
        change(kernel);
        spec.check().map_err(|error| error.to_string())
    };
    let divided = "dQ: each of 2 warpgroups takes 40 of 80 columns, which have to be a multiple of 16; \
                   divide its rows (atom layout 2) or use a wider head dim";
    assert_eq!(of(|_| ()), Err(divided.to_owned()));
    assert_eq!(of(|k| (k.tile_m, k.atom_layout_m_dq) = (128, 2)), Ok(()));
}

#[test]
fn persistence_is_left_out_of_texts_where_it_is_off() {
    let with = |persistent| {
        let mut spec = backward();
        let Kernel::Sm90Bwd(kernel) = &mut spec.kernel else { panic!("a backward") };
        kernel.persistent = persistent;
        assert_eq!(spec.check(), Ok(()));
        (spec.to_ron(), spec.to_string())
    };
    let ((off, name), (on, name_on)) = (with(false), with(true));
    assert!(!off.contains("persistent") && name_on == format!("{name}-pt"));
    assert!(KernelSpec::from_ron(&on).is_ok_and(|read| read.to_ron() == on));
}

fn backward_sm80() -> KernelSpec {
    KernelSpec {
        kernel: Kernel::Sm80Bwd(Sm80Bwd {
            tile_m: 64,
            tile_n: 128,
            num_warps: 8,
            q_stages: 3,
            do_stages: 2,
            atom_layout_m_sdp: 2,
            atom_layout_n_dkv: 2,
            atom_layout_m_dq: 2,
            dq_first: 64,
            blocks_per_sm: 1,
            tile_order: TileOrder::LongestFirst,
            deterministic: false,
        }),
        ..sm80()
    }
}

#[test]
fn warps_of_the_sm80_backward_take_whole_blocks() {
    let refused = |change: fn(&mut Sm80Bwd), part: &str| {
        let mut spec = backward_sm80();
        let Kernel::Sm80Bwd(kernel) = &mut spec.kernel else { panic!("a backward") };
        change(kernel);
        let error = spec.check().expect_err("must be refused").to_string();
        assert!(error.contains(part), "{error} does not name {part}");
    };
    assert_eq!(backward_sm80().check(), Ok(()));
    refused(|k| k.atom_layout_m_sdp = 8, "atom_layout_m_sdp = 8");
    refused(|k| k.dq_first = 24, "dQ: [64, 104] cannot be cut into 2 x 2 warps");
    refused(|k| k.atom_layout_n_dkv = 3, "atom_layout_n_dkv = 3: must be a divisor of num_warps / 2 = 4");
    refused(|k| k.q_stages = 1, "q_stages = 1");
    refused(|k| k.num_warps = 7, "num_warps = 7");
    refused(|k| k.dq_first = 128, "dq_first = 128: must be less than the head dim, 128");
    refused(|k| k.tile_n = 144, "tile_n = 144");
}

#[test]
fn ron_reads_back_what_it_wrote() {
    for spec in [sm80(), sm90(), backward(), backward_sm80()] {
        assert_eq!(KernelSpec::from_ron(&spec.to_ron()), Ok(spec.clone()));
        let shipped = ShippedSpec { archs: vec![Arch::Sm90], spec };
        assert_eq!(ShippedSpec::from_ron(&shipped.to_ron()), Ok(shipped));
    }
}

#[test]
fn a_pinned_kernel_may_name_its_splits() {
    let split = KernelSpec { split: true, ..sm90() };
    let bare = split.to_ron();
    let read = |text: &str| PinnedSpec::from_ron(text).map(|pinned| (pinned.archs.len(), pinned.splits));
    assert_eq!(read(&bare), Ok((0, None)));
    assert_eq!(read(&format!("(spec: {bare}, splits: Some(8))")), Ok((0, Some(8))));
    assert_eq!(read(&format!("(archs: [sm90], spec: {bare}, splits: 8)")), Ok((1, Some(8))));
    let refused = |text: &str, part: &str| {
        let error = read(text).expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    };
    refused(&format!("(spec: {bare}, splits: 0)"), "splits = 0: must be at least 1");
    refused(&format!("(spec: {}, splits: 2)", sm90().to_ron()), "divides no keys");
    refused(&format!("(spec: {bare}, splits: 2, parts: 3)"), "parts");
    refused(&format!("(archs: [sm80], spec: {bare})"), "does not run on sm80");
    refused(&bare.replace("split: true", "splits: 3"), "splits");
    refused(&bare.replace("tile_n: ", "tile_n: 1"), "tile_n");
}

#[test]
fn unknown_fields_and_bad_values_are_refused() {
    let text = sm80().to_ron();
    let refused = |text: &str, part: &str| {
        let error = KernelSpec::from_ron(text).expect_err("must be refused").to_string();
        assert!(error.contains(part), "{error} does not name {part}");
    };
    refused(&text.replace("stages", "stagez"), "stagez");
    refused(&text.replace("softcap: false", "softcap: false, bias: true"), "bias");
    refused(&text.replace("tile_n: 64", "tile_n: 60"), "tile_n = 60");
    refused(&text.replace("tile_n: 64", "tile_n: -1"), "not a kernel spec");
    refused(&text.replace("dtype: f16", "dtype: e4m3, out_dtype: Some(bf16)"), "dtype e4m3");
    refused(&sm90().to_ron().replace("tile_m: 128", "tile_m: 192"), "64 * num_wg = 128");
}

#[test]
fn wgmma_kernels_ship_for_sm90_only() {
    let shipped = ShippedSpec { archs: vec![Arch::Sm90, Arch::Sm80], spec: sm90() };
    assert!(matches!(
        ShippedSpec::from_ron(&shipped.to_ron()),
        Err(SpecError::Arch { arch: Arch::Sm80, .. })
    ));
}

#[test]
fn a_spec_serves_what_its_kernel_computes() {
    let base = Problem::square(2, 1024, 4, 128, Mask::CAUSAL, Dtype::F16);
    let differs = |spec: &KernelSpec, problem: Problem, what: &str| {
        assert_eq!(spec.serves(&problem).expect_err("it differs").what(), what);
    };
    for spec in [sm80(), sm90(), backward(), backward_sm80()] {
        assert_eq!(spec.serves(&base), Ok(()));
        assert_eq!(spec.serves(&base.with_head_dims(104, 8).with_heads_kv(2)), Ok(()));
        differs(&spec, base.with_types(Types::same(Dtype::Bf16)), "dtype");
        differs(&spec, base.with_head_dim(136), "head_dim");
        differs(&spec, base.with_head_dim_v(100), "head_dim_v");
        differs(&spec, base.with_mask(Mask::FULL), "mask");
        differs(&spec, base.with_score(ScoreMod::softcap(1.0)), "softcap");
        let window = KernelSpec { mask: MaskKind::Window, ..spec };
        assert_eq!(window.serves(&base.with_mask(Mask::window(3, 4))), Ok(()));
    }
}

#[test]
fn packed_heads_must_fit_the_tile() {
    let kernels = [
        Kernel::Sm90Fwd(Sm90Fwd { tile_m: 128, pack_gqa: true, ..Sm90Fwd::default() }),
        Kernel::Sm80Fwd(Sm80Fwd { tile_m: 128, pack_gqa: true, ..Sm80Fwd::default() }),
    ];
    let of = |heads_q, heads_kv| {
        Problem::square(1, 64, 1, 128, Mask::CAUSAL, Dtype::F16).with_heads(heads_q, heads_kv)
    };
    for kernel in kernels {
        let packed = KernelSpec { kernel, ..sm90() };
        assert_eq!(packed.serves(&of(8, 1)), Ok(()));
        // 21, 25, 18 and one query with all their heads, and rows of no query behind them.
        for (group, queries) in [(6, 21), (5, 25), (7, 18), (71, 1), (128, 1)] {
            assert_eq!(packed.serves(&of(group, 1)), Ok(()));
            assert_eq!(packed.traits().tile_queries(group), queries);
        }
        let error = packed.serves(&of(129, 1)).expect_err("more heads than rows").to_string();
        assert!(error.contains("129 query heads") && error.contains("tile_m = 128"), "{error}");
        assert!(packed.serves(&of(6, 0)).is_err());
        assert!(packed.to_string().ends_with("-pack") && packed.to_ron().contains("pack_gqa: true"));
        assert_eq!(KernelSpec::from_ron(&packed.to_ron()), Ok(packed));
    }
    assert_eq!(sm90().serves(&of(6, 1)), Ok(()));
    assert_eq!(sm90().traits().tile_queries(6), sm90().tile().0 as usize);
}

#[test]
fn names_tell_the_switches() {
    assert_eq!(sm80().to_string(), "sm80_fwd-f16-hd128-causal-128x64-w4-s2-b1-swz-ldm-exp2-fast-split-rev");
    assert_eq!(sm90().to_string(), "sm90_fwd-f16-hd128-causal-128x176-rs-ovl-s2-pp-static");
    assert_eq!(backward().to_string(), "sm90_bwd-f16-hd128-causal-64x128-wg2-s222-swapS-a121-rs-lpt");
    assert_eq!(backward_sm80().to_string(), "sm80_bwd-f16-hd128-causal-64x128-w8-s32-a222-q64-b1-lpt");
}

#[test]
fn every_default_is_valid() {
    let ordered = Kernel::defaults().map(|kernel| kernel.name());
    let names = ["sm80_fwd", "sm90_fwd", "sm80_bwd", "sm90_bwd", "sm100_fwd", "sm90_wide", "sm90_fwd_fp8"];
    assert_eq!(ordered, names);
    for kernel in Kernel::defaults() {
        let types =
            if kernel.computes_in_8_bits() { Types::fp8(Dtype::Bf16) } else { Types::same(Dtype::F16) };
        let dim = if matches!(kernel, Kernel::Sm90Wide(_)) { 128 } else { 64 };
        let spec =
            KernelSpec { types, mask: MaskKind::Causal, head_dim: dim, head_dim_v: dim, kernel, ..sm80() };
        assert_eq!(spec.check(), Ok(()), "{spec}");
        let other = if types.is_fp8() { Types::same(Dtype::F16) } else { Types::fp8(Dtype::Bf16) };
        let error = KernelSpec { types: other, ..spec.clone() }.check().expect_err("another type");
        assert!(matches!(error, SpecError::Dtype { .. }), "{error}");
        let mut all = Kernel::all_of(spec.kernel.family(), spec.kernel.pass(), types);
        assert!(all.any(|kernel| kernel == spec.kernel));
    }
}

#[test]
fn parameters_are_those_of_the_text_in_its_order() {
    for spec in [sm80(), sm90(), backward(), backward_sm80()] {
        let text = spec.to_ron();
        let mut rest = text.as_str();
        // Of the parameters of all kernels, those that came later are written where they are on.
        let mut later = vec!["varied", "paged", "alibi", "sinks", "split"];
        if matches!(spec.kernel, Kernel::Sm80Fwd(_)) {
            later.extend(["pack_gqa", "exact_div", "divide_keys"]);
        }
        if matches!(spec.kernel, Kernel::Sm90Fwd(_)) {
            later.extend(["gather", "blocks_per_sm"]);
        }
        if matches!(spec.kernel, Kernel::Sm90Bwd(_)) {
            later.extend(["persistent", "whole_keys"]);
        }
        let written = |param: &Param| !later.contains(&param.name) || param.value == ParamValue::Switch(true);
        let params: Vec<Param> = spec.params().into_iter().filter(written).collect();
        assert_eq!(params.len(), spec.params().len() - later.len());
        for param in &params {
            let line = format!("{}: {},", param.name, param.value);
            let at = rest.find(&line).unwrap_or_else(|| panic!("{line} is not in {rest}"));
            rest = &rest[at + line.len()..];
            assert!(param.doc.iter().all(|line| line.starts_with(' ')), "{}: {:?}", param.name, param.doc);
        }
        assert_eq!(text.matches(": ").count(), params.len() + 1, "the kernel itself is no parameter: {text}");
    }
    assert_eq!(sm90().kernel.param("scheduler").map(|value| value.to_string()), Some("Static".into()));
    assert_eq!(sm90().kernel.param("num_warps"), None);
}

#[test]
fn text_is_flat() {
    let text = "\
(
    dtype: f16,
    head_dim: 128,
    head_dim_v: 128,
    mask: causal,
    softcap: false,
    kernel: Sm80Fwd((
        tile_m: 128,
        tile_n: 64,
        num_warps: 4,
        stages: 2,
        q_in_regs: false,
        blocks_per_sm: 1,
        swizzle: true,
        ldmatrix: true,
        exp2: true,
        fast_math: true,
        loop_split: true,
        reverse_blocks: true,
    )),
)";
    assert_eq!(sm80().to_ron(), text);
    let json = r#"{"dtype":"f16","head_dim":128,"head_dim_v":128,"mask":"causal","softcap":false,"#;
    let spec = serde_json::to_string(&sm90()).unwrap();
    assert!(spec.starts_with(&format!(r#"{json}"kernel":{{"Sm90Fwd":{{"#)), "{spec}");
    assert_eq!(serde_json::from_str::<KernelSpec>(&spec).unwrap(), sm90());
    let capped = KernelSpec { score: ScoreKind { softcap: true, ..ScoreKind::NONE }, ..sm80() };
    assert_eq!(capped.to_ron(), text.replace("softcap: false", "softcap: true"));
    let named = KernelSpec::from_ron(&format!("KernelSpec{text}"));
    assert_eq!(named, Ok(sm80()));
}

#[test]
fn another_type_of_o_is_refused() {
    let mixed = KernelSpec { types: Types::same(Dtype::F16).with_out(Dtype::F32), ..sm80() };
    let error = KernelSpec::from_ron(&mixed.to_ron()).expect_err("nothing writes it").to_string();
    assert!(error.contains("out_dtype is f32 and dtype is f16"), "{error}");
}

/// A forward with everything on that reads and scores can have.
fn all_on() -> KernelSpec {
    KernelSpec {
        score: ScoreKind { softcap: true, alibi: true, sinks: true, ..ScoreKind::NONE },
        reads: Reads { varied: true, paged: true },
        split: true,
        ..sm90()
    }
}

#[test]
fn what_is_on_is_in_text_name_and_parameters() {
    let spec = all_on();
    assert_eq!(spec.check(), Ok(()));
    assert_eq!(
        spec.to_string(),
        "sm90_fwd-f16-hd128-causal-softcap-alibi-sinks-varlen-paged-split-128x176-rs-ovl-s2-pp-static"
    );
    let json = serde_json::to_string(&spec).unwrap();
    let on = r#""mask":"causal","softcap":true,"varied":true,"paged":true,"alibi":true,"sinks":true,"#;
    assert!(json.contains(&format!(r#"{on}"split":true,"kernel":"#)), "{json}");
    assert_eq!(serde_json::from_str::<KernelSpec>(&json).unwrap(), spec);
    assert_eq!(KernelSpec::from_ron(&spec.to_ron()), Ok(spec.clone()));
    let names: Vec<_> = spec.params().iter().map(|param| param.name).take(10).collect();
    let first = ["dtype", "head_dim", "head_dim_v", "mask", "softcap", "varied", "paged"];
    assert_eq!(names[..7], first);
    assert_eq!(names[7..], ["alibi", "sinks", "split"]);
    let text = spec.to_ron();
    // (Rows that threads copy and CTAs that share an SM are later than specs on disk as well, and off here.)
    let later = ["gather", "blocks_per_sm"];
    for param in spec.params().into_iter().filter(|param| !later.contains(&param.name)) {
        assert!(text.contains(&format!("{}: {},", param.name, param.value)), "{}: {text}", param.name);
    }
}

#[test]
fn what_does_not_go_together_is_refused() {
    let refused = |spec: KernelSpec, parts: [&str; 2]| {
        let error = spec.check().expect_err("must be refused").to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error} does not name {parts:?}");
        assert!(KernelSpec::from_ron(&spec.to_ron()).is_err());
    };
    let varied = Reads { varied: true, paged: false };
    let paged = Reads { varied: true, paged: true };
    for kernel in [backward(), backward_sm80()] {
        assert_eq!(KernelSpec { reads: varied, ..kernel.clone() }.check(), Ok(()));
        refused(KernelSpec { reads: paged, ..kernel.clone() }, ["paged", "backward"]);
        refused(KernelSpec { split: true, ..kernel }, ["split", "backward"]);
    }
    refused(KernelSpec { reads: Reads { varied: false, paged: true }, ..sm80() }, ["paged", "varied"]);
    let cluster = Kernel::Sm90Fwd(Sm90Fwd { cluster_m: 2, ..Sm90Fwd::default() });
    let cluster = KernelSpec { mask: MaskKind::Full, kernel: cluster, ..sm90() };
    assert_eq!(cluster.check(), Ok(()));
    refused(KernelSpec { reads: varied, ..cluster.clone() }, ["cluster_m = 2 and varied", "cluster_m = 1"]);
    refused(KernelSpec { split: true, ..cluster }, ["cluster_m = 2 and split", "cluster_m = 1"]);
}

#[test]
fn a_spec_serves_the_lengths_and_scores_that_it_has_code_for() {
    use crate::lengths::Side;
    let base = Problem::square(2, 1024, 4, 128, Mask::CAUSAL, Dtype::F16);
    let packed = base.with_lengths(Lengths::packed(2, 2048, 2048, 1100, 1100));
    let lengths = Lengths::of(2, Side::padded(1), Side::padded(1024).with_used());
    let used = base.with_lengths(lengths);
    let lengths = Lengths::of(2, Side::packed(2, 1), Side::paged(16, 128, 1024));
    let paged = base.with_lengths(lengths);
    let with = |alibi, sinks| base.with_score(ScoreMod::NONE.with_alibi(alibi).with_sinks(sinks));
    let differs = |spec: &KernelSpec, problem: &Problem| spec.serves(problem).expect_err("it differs").what();
    for plain in [sm80(), sm90()] {
        let score = |alibi, sinks| ScoreKind { alibi, sinks, ..ScoreKind::NONE };
        let varied = KernelSpec { reads: Reads { varied: true, paged: false }, ..plain.clone() };
        let pages = KernelSpec { reads: Reads { varied: true, paged: true }, ..plain.clone() };
        for split in [false, true] {
            let as_told = |spec: &KernelSpec| KernelSpec { split, ..spec.clone() };
            assert_eq!(as_told(&plain).serves(&base), Ok(()));
            assert_eq!(as_told(&varied).serves(&packed), Ok(()));
            assert_eq!(as_told(&varied).serves(&used), Ok(()));
            assert_eq!(as_told(&pages).serves(&paged), Ok(()));
        }
        assert_eq!(differs(&plain, &packed), "varied");
        assert_eq!(differs(&plain, &used), "varied");
        assert_eq!(differs(&varied, &base), "varied");
        assert_eq!(differs(&varied, &paged), "paged");
        assert_eq!(differs(&pages, &packed), "paged");
        assert_eq!(differs(&plain, &with(Some(Alibi::PerHead), false)), "alibi");
        assert_eq!(differs(&plain, &with(None, true)), "sinks");
        let both = KernelSpec { score: score(true, true), ..plain };
        assert_eq!(both.serves(&with(Some(Alibi::PerSequenceHead), true)), Ok(()));
        assert_eq!(differs(&both, &with(None, true)), "alibi");
        assert_eq!(differs(&both, &with(Some(Alibi::PerHead), false)), "sinks");
    }
}

#[test]
fn numbers_out_of_range_are_refused_and_no_panic() {
    let mut specs: Vec<KernelSpec> =
        Kernel::defaults().into_iter().map(|kernel| KernelSpec { kernel, ..sm80() }).collect();
    for spec in &mut specs {
        match &mut spec.kernel {
            Kernel::Sm80Fwd(Sm80Fwd { num_warps: many, .. })
            | Kernel::Sm80Bwd(Sm80Bwd { num_warps: many, .. })
            | Kernel::Sm90Fwd(Sm90Fwd { num_wg: many, .. })
            | Kernel::Sm90FwdFp8(Sm90FwdFp8 { num_wg: many, .. })
            | Kernel::Sm90Bwd(Sm90Bwd { num_wg: many, .. })
            | Kernel::Sm100Fwd(Sm100Fwd { q_tiles: many, .. })
            | Kernel::Sm90Wide(Sm90Wide { head_parts: many, .. }) => *many = u32::MAX,
        }
        // Wide heads have one count of threads.
        let threads = if matches!(spec.kernel, Kernel::Sm90Wide(_)) { 384 } else { u32::MAX };
        assert_eq!(spec.threads(), threads);
        assert!(spec.check().is_err() && !spec.to_string().is_empty());
    }
}

#[test]
fn wide_heads_have_whole_panels_and_their_parts_fit_a_tile() {
    let of = |head_dims: (u32, u32), kernel: &Sm90Wide| {
        let (head_dim, head_dim_v) = head_dims;
        KernelSpec { head_dim, head_dim_v, kernel: Kernel::Sm90Wide(kernel.clone()), ..sm80() }
    };
    let base = Sm90Wide::default();
    let latent = Sm90Wide { latent: true, pack_gqa: true, ..base.clone() };
    let parts = Sm90Wide { head_parts: 2, ..latent.clone() };
    assert_eq!((of((512, 512), &base).check(), of((576, 512), &parts).check()), (Ok(()), Ok(())));
    for (head_dims, kernel, part) in [
        ((80, 256), base.clone(), "a multiple of 64"),
        ((576, 576), base.clone(), "128, 256, 384 or 512"),
        ((640, 512), base.clone(), "from 16 to 576"),
        ((256, 512), latent.clone(), "head_dim of head_dim_v or more"),
        ((512, 512), Sm90Wide { head_parts: 2, ..base.clone() }, "head_parts = 2 needs pack_gqa"),
        ((512, 512), Sm90Wide { scheduler: Scheduler::Dynamic, ..base.clone() }, "use PerTile or Static"),
    ] {
        let error = of(head_dims, &kernel).check().expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    }
    let decode = |heads: usize| {
        Problem::square(1, 1, heads, 576, Mask::FULL, sm80().types.q)
            .with_heads_kv(1)
            .with_head_dim_v(512)
            .with_latent(true)
            .with_softmax_scale(Some(0.0721))
    };
    let serves = |kernel: &Sm90Wide, problem: &Problem| {
        let spec = KernelSpec { mask: MaskKind::Full, ..of((576, 512), kernel) };
        spec.serves(problem).map_err(|error| error.what())
    };
    assert_eq!((serves(&latent, &decode(64)), serves(&parts, &decode(128))), (Ok(()), Ok(())));
    assert_eq!(serves(&latent, &decode(128)), Err("pack_gqa"));
    assert_eq!(serves(&parts, &decode(63)), Err("head_parts"));
    assert_eq!(serves(&base, &decode(1)), Err("latent"));
    assert_eq!(serves(&latent, &decode(16).with_latent(false)), Err("latent"));
    assert_eq!(serves(&latent, &decode(16).with_head_dims(576, 448)), Err("head_dim - head_dim_v"));
    // Tiles are counted in the heads of the parts.
    assert_eq!(parts.traits().tiled(&decode(128)).heads_kv, 2);
}

#[test]
fn sm100_tiles_fit_tensor_memory_and_are_of_128_queries() {
    let of = |head_dims: (u32, u32), kernel: Sm100Fwd| {
        let (head_dim, head_dim_v) = head_dims;
        KernelSpec { head_dim, head_dim_v, kernel: Kernel::Sm100Fwd(kernel), ..sm80() }.check()
    };
    let base = Sm100Fwd::default();
    assert_eq!(of((192, 128), base.clone()), Ok(()));
    let single = Sm100Fwd { q_tiles: 1, tile_m: 128, ..base.clone() };
    assert_eq!(of((256, 256), single), Ok(()));
    for (head_dims, kernel, part) in [
        ((256, 256), base.clone(), "768 columns of tensor memory"),
        ((64, 64), Sm100Fwd { tile_m: 128, ..base.clone() }, "128 * q_tiles = 256"),
        ((80, 64), base.clone(), "a multiple of 32"),
        ((64, 64), Sm100Fwd { tile_n: 160, ..base.clone() }, "from 32 to 128"),
        ((64, 64), Sm100Fwd { scheduler: Scheduler::Dynamic, ..base }, "use PerTile or Static"),
    ] {
        let error = of(head_dims, kernel).expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    }
}
