//! What passes launch, as data.

use fa_core::spec::{Scheduler, TileOrder};
use fa_core::{
    Alibi, Arch, Dtype, Extras, Kernel, KernelSpec, Lengths, Mask, Problem, Reads, ScoreMod, Sm80Bwd,
    Sm90Bwd, Sm90Fwd, TensorLayout,
};
use fa_kernels::launch::{Addresses, Launches, Params, Part, Step};
use fa_kernels::{Error, RawExtras, RawTensor, smem_bytes};

use crate::{launches_of, sm80_spec, sm90_spec};

pub(crate) const SMS: u32 = 132;

pub(crate) fn problem() -> Problem {
    Problem::square(3, 1000, 8, 64, Mask::CAUSAL, Dtype::Bf16).with_heads_kv(2)
}

pub(crate) fn backward_spec(deterministic: bool) -> KernelSpec {
    KernelSpec {
        kernel: Kernel::Sm90Bwd(Sm90Bwd { deterministic, tile_m: 64, tile_n: 128, ..Sm90Bwd::default() }),
        ..sm90_spec()
    }
}

/// Every tensor packed, at an address of its own.
pub(crate) fn tensors(launches: &Launches) -> Vec<RawTensor> {
    let raw = |(i, tensor): (usize, &fa_kernels::launch::Tensor)| {
        let shape = &tensor.shape;
        let strides = TensorLayout::Bshd.strides(shape.seqlen, shape.heads, shape.dim);
        RawTensor { address: (i as u64 + 1) << 32, strides }
    };
    launches.tensors.iter().enumerate().map(raw).collect()
}

pub(crate) fn entries(launches: &Launches) -> Vec<(&'static str, u32)> {
    let name = |step: &Step| match step {
        Step::Clear(_) => ("clear", 0),
        Step::ClearGradient => ("clear the gradient", 0),
        Step::Plan(launch) | Step::Launch(launch) => (launch.entry, launch.grid),
    };
    launches.steps.iter().map(name).collect()
}

#[test]
fn a_forward_is_one_launch_of_a_cta_for_each_tile() {
    let spec = sm80_spec();
    let launches = launches_of(&spec, &problem(), Arch::Sm80, 108).unwrap();
    let m_blocks = 1000usize.div_ceil(spec.tile().0 as usize) as u32;
    assert_eq!(entries(&launches), [("fa_kernel", 3 * 8 * m_blocks)]);
    let Step::Launch(launch) = launches.steps[0] else { panic!("{:?}", launches.steps) };
    assert_eq!((launch.threads, launch.smem, launch.cluster), (spec.threads(), smem_bytes(&spec), 1));
    assert!(!launch.takes_maps && launches.workspace.bytes == 0);
    let names: Vec<_> = launches.tensors.iter().map(|t| (t.shape.name, t.is_output)).collect();
    assert_eq!(names, [("q", false), ("k", false), ("v", false), ("out", true)]);
}

#[test]
fn persistent_kernels_fill_the_sms_with_whole_clusters() {
    let full = problem().with_mask(Mask::FULL);
    for (scheduler, cluster_m, expected, workspace) in [
        (Scheduler::Dynamic, 1, SMS, 8),
        (Scheduler::Static, 2, SMS, 0),
        (Scheduler::PerTile, 2, 24 * 1000u32.div_ceil(128).next_multiple_of(2), 0),
    ] {
        let kernel = Sm90Fwd { scheduler, cluster_m, tile_m: 128, num_wg: 2, ..Sm90Fwd::default() };
        let spec =
            KernelSpec { kernel: Kernel::Sm90Fwd(kernel), mask: fa_core::MaskKind::Full, ..sm90_spec() };
        let launches = launches_of(&spec, &full, Arch::Sm90, SMS + (cluster_m - 1)).unwrap();
        assert_eq!(entries(&launches), [("fa_kernel", expected)], "{scheduler:?}");
        assert_eq!(launches.workspace.bytes, workspace, "{scheduler:?}");
        assert!(launches.workspace.starts_zero);
    }
}

#[test]
fn packed_heads_are_an_axis_of_the_map_of_q() {
    let kernel = Sm90Fwd { pack_gqa: true, tile_m: 128, tile_n: 128, num_wg: 2, ..Sm90Fwd::default() };
    let spec = KernelSpec { kernel: Kernel::Sm90Fwd(kernel), ..sm90_spec() };
    let launches = launches_of(&spec, &problem(), Arch::Sm90, SMS).unwrap();
    let tensors = tensors(&launches);
    let at =
        Addresses { tensors: &tensors, lse: None, workspace: Some(1 << 40), extras: RawExtras::default() };
    let maps: Vec<_> = launches.maps(&at).collect();
    let (row, seq) = (64, 8 * 64);
    assert_eq!(maps.iter().map(|map| map.tensor).collect::<Vec<_>>(), ["q", "k", "v"]);
    assert_eq!((maps[0].shape.rank, maps[0].shape.dims), (5, [64, 4, 1000, 2, 3]));
    assert_eq!(maps[0].shape.strides, [1, row, seq, 4 * row, 1000 * seq]);
    assert_eq!(maps[0].shape.tile, [64, 4, 32, 1, 1]);
    assert_eq!((maps[1].shape.rank, maps[1].shape.dims), (4, [64, 1000, 2, 3, 1]));
    assert_eq!(maps[1].shape.tile, [64, 128, 1, 1, 1]);
    let Params::Forward(params) = launches.params(&at) else { panic!("a forward") };
    assert_eq!((params.q.data.0, params.out.data.0, params.lse.0), (1 << 32, 4 << 32, 0));
    assert_eq!(params.k.strides.seq, 2 * 64);

    // 25 queries of five heads in 128 rows, the last three idle: 40 tiles of 1,000 queries, not 39.1.
    let fives = problem().with_heads_q(10);
    let launches = launches_of(&spec, &fives, Arch::Sm90, SMS).unwrap();
    let maps: Vec<_> = launches.maps(&at).collect();
    assert_eq!(maps[0].shape.tile, [64, 5, 25, 1, 1]);
    let Params::Forward(params) = launches.params(&at) else { panic!("a forward") };
    assert_eq!((params.tile_queries, params.m_blocks, params.num_tiles), (25, 40, 40 * 2 * 3));
}

#[test]
fn a_backward_with_few_tiles_of_keys_splits_heads_and_has_four_launches() {
    let spec = backward_spec(false);
    let launches = launches_of(
        &spec,
        &problem().with_lengths(Lengths::uniform(1, problem().lengths.max_q(), problem().lengths.max_k())),
        Arch::Sm90,
        SMS,
    )
    .unwrap();
    let (m_tiles, n_tiles) = (8 * 1000u32.div_ceil(64), 2 * 1000u32.div_ceil(128));
    let tensors = tensors(&launches);
    let at = Addresses {
        tensors: &tensors,
        lse: Some(1 << 41),
        workspace: Some(1 << 40),
        extras: RawExtras::default(),
    };
    launches.check(&at).unwrap();
    let Params::Backward(params) = launches.params(&at) else { panic!("a backward") };
    let splits = params.head_splits as u32;
    assert!(splits > 1, "16 tiles of keys leave most of {SMS} SMs without work");
    assert_eq!(
        entries(&launches),
        [
            ("fa_preprocess", m_tiles),
            ("fa_kernel", n_tiles * splits),
            ("fa_postprocess", m_tiles),
            ("fa_postprocess_kv", n_tiles),
        ]
    );
    let parts = launches.workspace;
    let address = |part: Option<Part>| part.map_or(0, |part| (1 << 40) + part.offset as u64);
    assert_eq!(params.lse_log2.0, address(parts.lse_log2));
    assert_eq!(params.dv_accum.0, address(parts.dv_accum));
    assert_eq!((params.dq_semaphores.0, params.tile_counter.0), (0, 0));
    assert_eq!((params.dq.data.0, params.dv.data.0), (6 << 32, 8 << 32));
    assert_eq!(launches.maps(&at).len(), 4);
}

/// A bias is declared aligned where its rows are, and one that is declared so and is not is refused.
#[test]
fn aligned_rows_are_found_and_others_refused() {
    use fa_core::program::Program;
    use fa_kernels::Error;
    use fa_kernels::launch::{RawArray, RawProgram};
    let of = |text: &str| Program::parse(text).unwrap().intern().unwrap();
    let text = "array bias: bf16[_, _, _] grad; score = s + bias[h, q, k];";
    let aligned = of(&text.replace("grad;", "grad aligned;"));
    let mut problem = problem();
    let (queries, keys) = (problem.lengths.max_q() as i64, problem.lengths.max_k());
    problem.score.program = Some(of(text));
    let declared = problem.with_score(problem.score.with_program(Some(aligned)));
    let mut spec = backward_spec(false);
    spec.score.program = Some(aligned);
    let launches = launches_of(&spec, &declared, Arch::Sm90, SMS).unwrap();
    let pitch = keys.next_multiple_of(8) as i64;
    for (is_aligned, address, strides, extent) in [
        (true, 1 << 50, [queries * pitch, pitch, 1], keys),
        (true, 1 << 50, [8, 0, 1], keys + 1),
        (false, (1 << 50) + 8, [queries * pitch, pitch, 1], keys),
        (false, 1 << 50, [queries * (pitch + 2), pitch + 2, 1], keys),
        (false, 1 << 50, [4, pitch, 1], keys),
        (false, 1 << 50, [queries * pitch, pitch, 2], keys),
        (false, 1 << 50, [queries * pitch, pitch, 1], keys - 1),
    ] {
        let [head, query, key] = strides;
        let mut given = RawProgram::default();
        given.arrays[0] = RawArray {
            address,
            strides: [head, query, key, 0],
            extents: [problem.heads_q as i32, queries as i32, extent as i32, 1],
        };
        let found = given.with_aligned_rows(problem);
        assert_eq!(found.score.program, if is_aligned { Some(aligned) } else { problem.score.program });
        let tensors = tensors(&launches);
        let at = Addresses {
            tensors: &tensors,
            lse: Some(1 << 41),
            workspace: Some(1 << 40),
            extras: RawExtras { program: Some(given), ..RawExtras::default() },
        };
        let refused = matches!(launches.check(&at), Err(Error::Unaligned { name }) if name == "bias");
        assert_eq!(refused, !is_aligned, "{strides:?}, {extent}");
    }
}

/// Of each form of a bias what computes its gradient, and whether something is cleared for it.
#[test]
fn the_gradient_of_a_bias_is_stored_summed_or_recomputed() {
    use fa_core::program::Program;
    use fa_kernels::launch::RawProgram;
    let text = "array bias: bf16[_, _, _, _] grad; score = s + bias[b, h, q, k];";
    let program = Program::parse(text).unwrap().intern().unwrap();
    let mut spec = backward_spec(false);
    spec.score.program = Some(program);
    let mut problem = problem();
    problem.score.program = Some(program);
    let of = |mask: Mask, extents: [i32; 4], is_narrow: bool, has_room: bool| {
        let problem = problem.with_mask(mask);
        let spec = KernelSpec { mask: fa_core::MaskKind::of(&mask), ..spec.clone() };
        let launches = launches_of(&spec, &problem, Arch::Sm90, SMS).unwrap();
        let mut given = RawProgram::default();
        given.arrays[0].address = 1 << 50;
        given.arrays[0].extents = extents;
        given.gradients[0] = 1 << 51;
        given.is_narrow[0] = is_narrow;
        let wants_room = launches.room_bytes(&given) > 0;
        given.room = if has_room { 1 << 52 } else { 0 };
        let tensors = tensors(&launches);
        let at = Addresses {
            tensors: &tensors,
            lse: Some(1 << 41),
            workspace: Some(1 << 40),
            extras: RawExtras { program: Some(given), ..RawExtras::default() },
        };
        launches.check(&at).unwrap();
        let maps: Vec<_> = launches.maps(&at).collect();
        assert_eq!(maps.len(), 5);
        let taken = launches.steps.iter().filter(|step| launches.takes(step, &at));
        let names: Vec<&str> = taken
            .filter_map(|step| match step {
                Step::Launch(launch) => {
                    launch.entry.starts_with("fa_array").then(|| launches.launch_at(launch, &at).entry)
                }
                Step::ClearGradient => Some("clear"),
                Step::Clear(_) | Step::Plan(_) => None,
            })
            .collect();
        (names, maps[4].address, wants_room)
    };
    let (own, shared) = ([3, 8, 1000, 1000], [1, 8, 1000, 1000]);
    let own_map = |names: &[&'static str], address, wants| (names.to_vec(), address, wants);
    assert_eq!(of(Mask::FULL, own, true, false), own_map(&[], 1 << 51, false));
    assert_eq!(of(Mask::CAUSAL, own, true, true), own_map(&["clear"], 1 << 51, false));
    assert_eq!(of(Mask::FULL, shared, true, true), own_map(&["fa_array_sum"], 1 << 52, true));
    assert_eq!(of(Mask::CAUSAL, shared, true, true), own_map(&["clear", "fa_array_sum"], 1 << 52, true));
    let recomputed = ["fa_array_gradient_0"];
    assert_eq!(of(Mask::FULL, shared, true, false), own_map(&recomputed, 1 << 32, true));
    assert_eq!(of(Mask::FULL, own, false, false), own_map(&recomputed, 1 << 32, true));
    assert_eq!(of(Mask::FULL, [3, 8, 1, 1000], true, true), own_map(&recomputed, 1 << 32, false));
    // Of a longer array the part that is read, which several sequences or heads may share.
    assert_eq!(of(Mask::FULL, [4, 9, 1001, 1008], true, false), own_map(&[], 1 << 51, false));
    assert_eq!(of(Mask::FULL, [4, 9, 1000, 1001], true, false), own_map(&recomputed, 1 << 32, true));
    assert_eq!(of(Mask::FULL, [1, 24, 1000, 1000], true, true), own_map(&["fa_array_sum"], 1 << 52, true));
}

/// The gradient of an array that kernels read a part of, or nothing, is set to zero first, in its whole
/// length; a part that is too short is refused.
#[test]
fn gradients_of_what_is_not_read_are_set_to_zero() {
    use fa_core::program::Program;
    use fa_kernels::Error;
    use fa_kernels::launch::RawProgram;
    let text = "array other: f16[_, _] grad; array t: f32[_, _] grad; array u: bf16[_] grad; \
                array v: i32[_]; score = s * t[h, q] + u[b];";
    let program = Program::parse(text).unwrap().intern().unwrap();
    let mut spec = backward_spec(false);
    spec.score.program = Some(program);
    let mut problem = problem();
    problem.score.program = Some(program);
    let of = |lengths: Lengths, t: [i32; 2], u: i32| {
        let launches = launches_of(&spec, &problem.with_lengths(lengths), Arch::Sm90, SMS).unwrap();
        let mut given = RawProgram::default();
        for (slot, extents) in [[5, 7], t, [u, 1], [4, 1]].into_iter().enumerate() {
            given.arrays[slot].address = 1 << 50;
            given.arrays[slot].extents = [extents[0], extents[1], 1, 1];
        }
        for slot in 0..3 {
            given.gradients[slot] = (51 + slot as u64) << 32;
        }
        (given.is_narrow[0], given.is_narrow[2]) = (true, true);
        let tensors = tensors(&launches);
        let at = |given| Addresses {
            tensors: &tensors,
            lse: Some(1 << 41),
            workspace: Some(1 << 40),
            extras: RawExtras { program: Some(given), ..RawExtras::default() },
        };
        let other = RawProgram { gradients: std::array::from_fn(|slot| u64::from(slot == 3) << 50), ..given };
        assert!(matches!(launches.check(&at(other)), Err(Error::UnusedExtra { .. })));
        let at = at(given);
        launches.check(&at)?;
        let grids = launches.steps.iter().filter(|step| launches.takes(step, &at)).filter_map(|step| {
            let Step::Launch(launch) = step else { return None };
            launch.entry.starts_with("fa_array").then(|| launches.launch_at(launch, &at).grid)
        });
        Ok::<_, Error>((launches.unread(&at).collect::<Vec<_>>(), grids.collect::<Vec<_>>()))
    };
    let (uniform, other) = (Lengths::uniform(3, 1000, 1000), (51 << 32, 5 * 7 * 2));
    assert_eq!(of(uniform, [8, 1000], 3).unwrap(), (vec![other], vec![8 * 16, 3]));
    assert_eq!(of(uniform, [1, 1000], 1).unwrap(), (vec![other], vec![16, 1]));
    let longer = [other, (52 << 32, 9 * 1030 * 4), (53 << 32, 4 * 2)];
    assert_eq!(of(uniform, [9, 1030], 4).unwrap(), (longer.to_vec(), vec![8 * 16, 3]));
    assert_eq!(of(Lengths::uniform(0, 1000, 1000), [9, 1030], 4).unwrap(), (longer.to_vec(), vec![8 * 16]));
    assert_eq!(of(Lengths::uniform(3, 0, 9), [9, 1030], 4).unwrap(), (longer.to_vec(), vec![3]));
    let short = of(uniform, [8, 999], 3);
    assert!(matches!(short, Err(Error::GradientExtent { axis: 1, extent: 999, len: 1000, .. })));
}

#[test]
fn a_persistent_backward_has_a_cta_for_each_sm_and_a_counter() {
    let spec = |deterministic| {
        let mut spec = backward_spec(deterministic);
        let Kernel::Sm90Bwd(kernel) = &mut spec.kernel else { panic!("a backward") };
        kernel.persistent = true;
        spec
    };
    let tiles = 3 * 2 * 1000u32.div_ceil(128);
    for deterministic in [false, true] {
        for (sms, expected) in [(4, 4), (tiles + 1, tiles)] {
            let launches = launches_of(&spec(deterministic), &problem(), Arch::Sm90, sms).unwrap();
            let main = entries(&launches)[1];
            assert_eq!(main.0, "fa_kernel");
            let Params::Backward(params) = launches.params(&Addresses {
                tensors: &tensors(&launches),
                lse: Some(1 << 41),
                workspace: Some(1 << 40),
                extras: RawExtras::default(),
            }) else {
                panic!("a backward")
            };
            assert_eq!(main.1, (expected * params.head_splits as u32).min(sms));
            let counter = launches.workspace.tile_counter.expect("tiles are drawn");
            assert_eq!(params.tile_counter.0, (1 << 40) + counter.offset as u64);
            assert!(counter.offset + counter.bytes <= launches.workspace.bytes);
        }
    }
}

#[test]
fn a_backward_of_whole_keys_has_no_sums_of_dq_to_convert() {
    let mut spec = backward_spec(false);
    let Kernel::Sm90Bwd(kernel) = &mut spec.kernel else { panic!("a backward") };
    (kernel.whole_keys, kernel.dq_via_smem, kernel.dq_swap_ab) = (true, false, false);
    let short = problem().with_lengths(Lengths::uniform(3, 100, 128));
    let launches = launches_of(&spec, &short, Arch::Sm90, SMS).unwrap();
    let names: Vec<&str> = entries(&launches).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names[..2], ["fa_preprocess", "fa_kernel"]);
    assert!(!names.contains(&"fa_postprocess"));
    assert_eq!(launches.workspace.dq_accum, None);
    let error = launches_of(&spec, &problem(), Arch::Sm90, SMS).expect_err("1000 keys").to_string();
    assert!(error.contains("whole_keys"), "{error}");
}

#[test]
fn without_queries_a_deterministic_backward_clears_its_counter_itself() {
    let none = problem()
        .with_lengths(Lengths::uniform(problem().lengths.sequences(), 0, problem().lengths.max_k()))
        .with_mask(Mask::FULL);
    let spec = KernelSpec { mask: fa_core::MaskKind::Full, ..backward_spec(true) };
    let launches = launches_of(&spec, &none, Arch::Sm90, SMS).unwrap();
    let counter = launches.workspace.tile_counter.expect("tiles are drawn");
    assert_eq!(launches.steps[0], Step::Clear(counter));
    assert_eq!(entries(&launches).len(), 2);
    // The maps of Q and dO are of K's and V's memory.
    let tensors = tensors(&launches);
    let at =
        Addresses { tensors: &tensors, lse: Some(0), workspace: Some(1 << 40), extras: RawExtras::default() };
    launches.check(&at).unwrap();
    let addresses: Vec<u64> = launches.maps(&at).map(|map| map.address >> 32).collect();
    assert_eq!(addresses, [2, 2, 3, 3]);
}

#[test]
fn nothing_to_compute_is_nothing_to_launch() {
    for spec in [sm80_spec(), sm90_spec()] {
        let launches = launches_of(
            &spec,
            &problem().with_lengths(Lengths::uniform(
                0,
                problem().lengths.max_q(),
                problem().lengths.max_k(),
            )),
            Arch::Sm90,
            SMS,
        )
        .unwrap();
        assert_eq!((launches.steps.len(), launches.maps(&empty()).len()), (0, 0));
    }
}

fn empty() -> Addresses<'static> {
    Addresses { tensors: &[], lse: None, workspace: None, extras: RawExtras::default() }
}

#[test]
fn what_a_call_lacks_is_named() {
    let kernel = Kernel::Sm80Bwd(Sm80Bwd { tile_order: TileOrder::Natural, ..Sm80Bwd::default() });
    let launches = launches_of(&KernelSpec { kernel, ..sm80_spec() }, &problem(), Arch::Sm80, 108).unwrap();
    let mut tensors = tensors(&launches);
    let lacks =
        Addresses { tensors: &tensors, lse: Some(1 << 41), workspace: None, extras: RawExtras::default() };
    assert!(
        matches!(launches.check(&lacks), Err(Error::NoWorkspace { need }) if need == launches.workspace.bytes)
    );
    let odd = Addresses { workspace: Some(8), ..lacks };
    assert!(matches!(launches.check(&odd), Err(Error::Address { tensor: "workspace", align: 16, .. })));
    tensors[6].strides.seq = 0;
    let shared = Addresses {
        tensors: &tensors,
        lse: Some(1 << 41),
        workspace: Some(1 << 40),
        extras: RawExtras::default(),
    };
    assert!(matches!(launches.check(&shared), Err(Error::Stride { tensor: "dk", axis: "seq", .. })));
}

/// What the device code does not have is refused by name before anything is launched.
#[test]
fn what_no_device_code_computes_is_refused() {
    let square = problem().lengths;
    let (batch, q, k) = (square.sequences(), square.max_q(), square.max_k());
    let lengths = Lengths::packed(batch, batch * q, batch * k, q, k);
    let sinks = problem().score.with_sinks(true);
    for plain in [sm80_spec(), sm90_spec(), backward_spec(false)] {
        for (problem, need) in [
            (problem().with_lengths(lengths), "lengths on the device"),
            (problem().with_score(sinks), "sinks"),
        ] {
            let of = |spec: &KernelSpec| launches_of(spec, &problem, Arch::Sm90, SMS);
            assert!(matches!(of(&plain), Err(Error::Mismatch { .. })), "{need}");
            let (score, reads) = (problem.score.kind(), Reads::of(&problem));
            let able = KernelSpec { score, reads, ..plain.clone() };
            match of(&able) {
                Ok(_) => (),
                Err(Error::NoCode { kernel, what }) => {
                    assert_eq!((kernel, what), (plain.kernel.name(), need));
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}

#[test]
fn slopes_and_sinks_reach_the_kernels_and_their_gradient_is_one_launch_more() {
    let score = ScoreMod::NONE.with_alibi(Some(Alibi::PerSequenceHead)).with_sinks(true);
    let problem = problem().with_score(score);
    let inputs = Extras { alibi_slopes: Some(1 << 42), sinks: Some(1 << 43), ..Extras::NONE };
    let extras = RawExtras { inputs, ..RawExtras::default() };

    let forward = KernelSpec { score: score.kind(), ..sm80_spec() };
    let launches = launches_of(&forward, &problem, Arch::Sm80, SMS).unwrap();
    let tensors = tensors(&launches);
    let at = Addresses { tensors: &tensors, lse: None, workspace: None, extras };
    launches.check(&at).unwrap();
    let Params::Forward(params) = launches.params(&at) else { panic!() };
    assert_eq!((params.mods.alibi_slopes.0, params.mods.sinks.0), (1 << 42, 1 << 43));
    assert_eq!((params.mods.alibi_stride, params.mods.dsinks.0), (8, 0));
    let without = Addresses { extras: RawExtras::default(), ..at };
    assert!(matches!(launches.check(&without), Err(Error::MissingExtra { name: "alibi_slopes", need: 24 })));
    let plain = launches_of(&sm80_spec(), &problem.with_score(ScoreMod::NONE), Arch::Sm80, SMS);
    assert!(matches!(plain.unwrap().check(&at), Err(Error::UnusedExtra { name: "alibi_slopes" })));

    let backward = KernelSpec { score: score.kind(), ..backward_spec(false) };
    let launches = launches_of(&backward, &problem, Arch::Sm90, SMS).unwrap();
    assert_eq!(entries(&launches).last(), Some(&("fa_dsinks", 8)));
    assert!(
        !entries(
            &launches_of(&backward_spec(false), &problem.with_score(ScoreMod::NONE), Arch::Sm90, SMS)
                .unwrap()
        )
        .iter()
        .any(|(entry, _)| *entry == "fa_dsinks")
    );
    let tensors = self::tensors(&launches);
    let extras = RawExtras { dsinks: Some(1 << 44), ..extras };
    let at = Addresses { tensors: &tensors, lse: Some(1 << 41), workspace: Some(1 << 40), extras };
    launches.check(&at).unwrap();
    let Params::Backward(params) = launches.params(&at) else { panic!() };
    assert_eq!((params.mods.sinks.0, params.mods.dsinks.0), (1 << 43, 1 << 44));
}

#[test]
fn first_sums_of_dq_are_stored_and_said_by_semaphores_of_several_tiles() {
    let stores = |spec: &KernelSpec, lengths| {
        let launches = launches_of(spec, &problem().with_lengths(lengths), Arch::Sm90, SMS).unwrap();
        let (tensors, extras) = (tensors(&launches), RawExtras::default());
        let at = Addresses { tensors: &tensors, lse: Some(1 << 41), workspace: Some(1 << 40), extras };
        let Params::Backward(params) = launches.params(&at) else { panic!("a backward") };
        (params.stores_dq, launches.workspace.dq_semaphores.is_some())
    };
    let mut spec = backward_spec(false);
    let Kernel::Sm90Bwd(kernel) = &mut spec.kernel else { panic!("{spec}") };
    kernel.tile_order = TileOrder::LongestFirst;
    assert_eq!(stores(&spec, Lengths::uniform(3, 1000, 1000)), (1, true));
    assert_eq!(stores(&spec, Lengths::uniform(3, 100, 128)), (1, false));
    assert_eq!(stores(&spec, Lengths::uniform(3, 1000, 999)), (0, false));
    assert_eq!(stores(&backward_spec(false), Lengths::uniform(3, 1000, 1000)), (0, false));
}

#[test]
fn tiles_of_keys_are_ordered_behind_their_lists() {
    use fa_core::program::Program;
    let program = Program::parse("mask = k <= q or k < 300;").unwrap().intern().unwrap();
    let listed = |deterministic, tile_order, lengths: Lengths| {
        let mut spec = KernelSpec { mask: fa_core::MaskKind::Full, ..backward_spec(deterministic) };
        let Kernel::Sm90Bwd(kernel) = &mut spec.kernel else { panic!("{spec}") };
        kernel.tile_order = tile_order;
        spec.score.program = Some(program);
        spec.reads.varied = !lengths.is_uniform();
        let mut problem = problem().with_lengths(lengths).with_mask(Mask::FULL);
        problem.score.program = Some(program);
        let launches = launches_of(&spec, &problem, Arch::Sm90, SMS).unwrap();
        let order = entries(&launches).into_iter().find(|(name, _)| *name == "fa_order");
        let tiles = launches.workspace.map_tiles.expect("a map").bytes / 4;
        (entries(&launches).into_iter().map(|(name, _)| name).collect::<Vec<_>>(), order, tiles)
    };
    let (longest, square) = (TileOrder::LongestFirst, Lengths::uniform(3, 1000, 1000));
    let (names, order, tiles) = listed(false, longest, square);
    let all = ["fa_preprocess", "fa_map", "fa_lists", "fa_order", "fa_mask_bits", "fa_kernel"];
    assert_eq!(names[..6], all);
    // One map of 16 tiles of queries and 8 of keys, whose order is a warp's.
    assert_eq!((order, tiles), (Some(("fa_order", 1)), 16 * 8 + 8));
    for (deterministic, order) in [(true, longest), (false, TileOrder::Natural)] {
        let (names, _, tiles) = listed(deterministic, order, square);
        assert!(!names.contains(&"fa_order") && names.contains(&"fa_lists"), "{names:?}");
        assert_eq!(tiles, 16 * 8);
    }
    // Packed: an order of the tiles of all sequences, of which there are 3 more at most than whole ones.
    let (_, order, tiles) = listed(false, longest, Lengths::packed(3, 2000, 2000, 1000, 1000));
    let most = Lengths::packed(3, 2000, 2000, 1000, 1000).most_tiles_k(128);
    assert_eq!((order, tiles), (Some(("fa_order", 1)), 3 * 16 * 8 + most));
    // Lists are of states that are made, also where a batch of no rows says that it may have some.
    let (names, ..) = listed(false, longest, Lengths::packed(3, 0, 2000, 1000, 1000));
    assert_eq!(names[..4], ["fa_plan", "fa_map", "fa_lists", "fa_order"]);
}
