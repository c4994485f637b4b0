//! Masks and changes of scores of the caller's own in all kernels: masks by rows, by bits and by formulas,
//! some of which leave rows and columns without any key; biases, changes that are additive and others; per
//! head, per sequence, and with packed heads, lengths on the device, pages and splits.

use fa_core::program::{OwnedArray, OwnedData, OwnedInputs, Program};
use fa_core::{Arch, Dtype, Family, KernelSpec, Lengths, Mask, MaskKind, Problem, Reads, ScoreMod};
use fa_cpu::OwnedExtras;
use fa_emu::sweep;
use fa_emu::sweep::{Case, Trials, sweep};
use fa_emu::{Options, Placement, Trial};
use fa_kernels::Headers;

use crate::emulator;
use crate::mods::KERNELS;

/// A program, and the mask that it is combined with.
pub(crate) const PROGRAMS: [(&str, &str); 9] = [
    ("full", "mask = (q - k) % 4 == 0 or k < 3;"),
    (
        "causal",
        "array first: i32[_, _, _]; array last: i32[_, _]; mask = first[b, h, q] <= k and k < last[b, q];",
    ),
    ("full", "array bias: bf16[_, _, _, _] grad; score = s + bias[b, h, q, k];"),
    ("causal", "array keep: bits[_, _]; scalar cap: f32; mask = keep[b, k]; score = cap * tanh(s / cap);"),
    ("window", "array gain: f32[_] grad; score = s * gain[h] - 0.0625 * f32(abs(q + off - k));"),
    ("causal", "array id: u8[_, _]; mask = id[b, q // 40] == id[b, k // 40];"),
    (
        "full",
        "array bias: f32[_, _] grad; mask = q // 64 == k // 64 + 1; \
         score = select(k % 7 == 3, -inf, s + bias[h, k]);",
    ),
    (
        "window",
        "array keep: bool[_, _, _]; array t: f16[_, _]; mask = keep[b, h, k]; score = s + t[h, q - k + 16];",
    ),
    // More arrays than most programs have.
    (
        "causal",
        "array aa: f32[_] grad; array ab: f32[_]; array ac: f32[_, _] grad; array ad: i32[_]; \
         array ae: f32[_]; array af: f32[_]; array ag: f32[_, _]; array ah: u8[_]; array ai: f32[_, _] grad; \
         array aj: f16[_]; \
         array keep: bool[_, _]; scalar cap: f32; mask = keep[b, k] or ad[q] < 3; \
         score = s * (1.0 + 0.1 * aa[h]) + ab[k] + ac[b, q] * ae[h] + af[q] + ag[h, k] + ai[h, k] \
         + aj[q - k + 16] + 0.01 * f32(ah[k]) + cap;",
    ),
];

fn spec(kernel: &str, mask: &str, program: &str) -> KernelSpec {
    spec_of((64, 64), kernel, mask, program)
}

/// A kernel of these tile extents of the head dims.
pub(crate) fn spec_of(
    (head_dim, head_dim_v): (u32, u32),
    kernel: &str,
    mask: &str,
    program: &str,
) -> KernelSpec {
    let text = format!(
        "(dtype: bf16, head_dim: {head_dim}, head_dim_v: {head_dim_v}, mask: {mask}, softcap: false, kernel: \
         {kernel})"
    );
    let mut spec = KernelSpec::from_ron(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
    let program = Program::parse(program).unwrap_or_else(|error| panic!("{program}: {error}"));
    spec.score.program = Some(program.intern().unwrap());
    spec
}

/// Tiles of keys that are no multiple of 64, and warpgroups with 40 queries of a tile of 80.
const BIASED: [&str; 3] = [
    "Sm90Fwd((tile_m: 128, tile_n: 80, num_wg: 2, pv_is_rs: true, overlap_wg: true, q_stages: 1, kv_stages: \
     2, ping_pong: true, scheduler: Dynamic, tile_order: LongestFirst, cluster_m: 1, exp_poly_of_16: 0, \
     rescale_threshold: 8, pack_gqa: true))",
    "Sm90Bwd((tile_m: 80, tile_n: 64, num_wg: 2, q_stages: 2, do_stages: 2, pds_stages: 2, sdp_swap_ab: \
     true, dkv_swap_ab: true, dq_swap_ab: true, atom_layout_m_sdp: 2, atom_layout_n_dkv: 2, \
     atom_layout_m_dq: 2, mma_dkv_is_rs: false, dq_via_smem: true, dq_slices: 1, tile_order: Natural, \
     deterministic: true))",
    "Sm90Bwd((tile_m: 80, tile_n: 128, num_wg: 2, q_stages: 2, do_stages: 2, pds_stages: 2, sdp_swap_ab: \
     true, dkv_swap_ab: false, dq_swap_ab: true, atom_layout_m_sdp: 1, atom_layout_n_dkv: 2, \
     atom_layout_m_dq: 2, mma_dkv_is_rs: true, dq_via_smem: true, dq_slices: 1, tile_order: LongestFirst, \
     deterministic: false))",
];

/// The cases of the sweep that are short: an interpreter computes what is expected. Of masks whose kind an
/// offset leaves alone, one has an offset, which `off` counts in.
fn cases(spec: &KernelSpec) -> Vec<Case> {
    let mut cases = sweep::cases(spec);
    cases.retain(|case| case.problem.lengths.max_q() < 180 && case.problem.lengths.max_k() < 300);
    let count = cases.len();
    let mut cases: Vec<Case> = cases.into_iter().step_by((count / 4).max(1)).collect();
    if let Some(last) = cases.last_mut().filter(|_| spec.mask != MaskKind::Causal) {
        last.problem.mask = last.problem.mask.with_offset(3);
    }
    cases
}

/// A kernel under a program, on short cases, with what is wrong.
pub(crate) fn faults(spec: &KernelSpec, trials: &Trials) -> Vec<String> {
    let unit =
        emulator().unit(spec, Arch::Sm90, &Headers::embedded()).unwrap_or_else(|e| panic!("{spec}: {e}"));
    let verdict = sweep(&unit, &cases(spec), &[2], trials).unwrap();
    assert!(verdict.runs > 0, "{spec} ran nothing");
    verdict
        .faults
        .into_iter()
        .map(|fault| format!("{spec}\n{}\n{fault}", spec.score.program.unwrap()))
        .collect()
}

fn check(kernels: &[usize], step: usize) {
    let trials = Trials::default();
    let mut found = Vec::new();
    for (turn, &kernel) in kernels.iter().enumerate() {
        for (index, (mask, program)) in PROGRAMS.iter().enumerate() {
            if (turn + index) % step == 0 {
                found.extend(faults(&spec(KERNELS[kernel], mask, program), &trials));
            }
        }
    }
    assert!(found.is_empty(), "{} faults:\n{}", found.len(), found.join("\n\n"));
}

#[test]
#[ignore = "emulation"]
fn programs_are_right_in_sm90_forwards() {
    check(&[0, 1, 2, 9], 4);
}

#[test]
#[ignore = "emulation"]
fn programs_are_right_in_sm80_forwards() {
    check(&[3, 4, 10], 3);
}

/// By first numbers and steps, and where the factor is too large for that.
#[test]
#[ignore = "emulation"]
fn products_with_distances_are_right() {
    let trials = Trials::default();
    let mut found = Vec::new();
    for score in ["slope[h] * f32(k - q)", "-(0.25 * f32(q + off - k))", "16.0 * f32(k - q)"] {
        let program = format!("array slope: f32[_]; score = s + {score};");
        for kernel in [KERNELS[1], KERNELS[5]] {
            found.extend(faults(&spec(kernel, "causal", &program), &trials));
        }
    }
    assert!(found.is_empty(), "{} faults:\n{}", found.len(), found.join("\n\n"));
}

#[test]
#[ignore = "emulation"]
fn biases_are_right_in_tiles_of_any_size() {
    let trials = Trials::default();
    let bias = "array bias: bf16[_, _, _]; score = s + bias[h, q, k];";
    let found: Vec<String> =
        BIASED.into_iter().flat_map(|kernel| faults(&spec(kernel, "causal", bias), &trials)).collect();
    assert!(found.is_empty(), "{} faults:\n{}", found.len(), found.join("\n\n"));
}

/// What a bias's array may be for 2 heads, 90 queries and 144 keys: its strides, and its keys. Rows begin on
/// 16 bytes, one for each query and one for all; on 4 and on 2; one row is for all queries, on 2 bytes; keys
/// are apart; keys are missing. The first two are aligned.
const ARRAYS: [([i64; 3], i32); 7] = [
    ([90 * 144, 144, 1], 144),
    ([144, 0, 1], 144),
    ([90 * 146, 146, 1], 144),
    ([90 * 145, 145, 1], 144),
    ([145, 0, 1], 144),
    ([90 * 288, 288, 2], 144),
    ([90 * 144, 144, 1], 100),
];

#[test]
#[ignore = "emulation"]
fn biases_are_right_however_they_lie() {
    let kernels: Vec<_> = BIASED.into_iter().chain([1, 2, 5, 6].map(|index| KERNELS[index])).collect();
    let any = kernels.iter().map(|kernel| (kernel, "", &ARRAYS[..]));
    let aligned = kernels.iter().map(|kernel| (kernel, " aligned", &ARRAYS[..2]));
    for (kernel, how, arrays) in any.chain(aligned) {
        let program = format!("array bias: bf16[_, _, _]{how}; score = s + bias[h, q, k];");
        let spec = spec(kernel, "full", &program);
        let unit = emulator().unit(&spec, Arch::Sm90, &Headers::embedded()).unwrap();
        let mut problem = sweep::cases(&spec)[0].problem;
        problem.lengths = Lengths::uniform(1, 90, 144);
        problem = problem.with_heads(2, if spec.kernel.is_backward() { 2 } else { 1 });
        let Case { placement, extras, .. } = Case::of(&problem, Placement::PACKED);
        for &([head, query, key], keys) in arrays {
            let mut inputs = OwnedInputs::drawn(&problem, 1).unwrap();
            let elements =
                (0..2 * 90 * 288).map(|i: u32| 0x3f80 | (i.wrapping_mul(40503) >> 9 & 0x807f) as u16);
            inputs.arrays[0] = OwnedArray {
                data: OwnedData::Bf16(elements.collect()),
                strides: [head, query, key, 0],
                extents: [2, 90, keys, 1],
            };
            let trial = Trial::with_inputs(&problem, spec.kernel.pass(), placement, &extras, Some(inputs));
            let proof = trial.run(&unit, &Options::seed(2)).unwrap();
            let faults = proof.faults().join("\n");
            assert!(proof.passed(), "{spec}, strides {head}, {query}, {key}, {keys} keys:\n{faults}");
        }
    }
}

#[test]
#[ignore = "emulation"]
fn programs_are_right_in_sm90_backwards() {
    check(&[5, 6], 2);
}

/// The gradient of a bias of its own for each sequence and head is that of the scores, which the main kernel
/// stores; of one that sequences or heads share, and where rows are not whole multiples of 16 bytes, they
/// are summed. -inf hides, and NaN where the mask hides has no influence.
#[test]
#[ignore = "emulation"]
fn gradients_of_biases_are_stored_or_summed() {
    let bias = "array bias: bf16[_, _, _, _] grad; score = s + bias[b, h, q, k];";
    let grouped = "array bias: bf16[_, _, _] grad; score = s + bias[hk, q, k];";
    let masked =
        "array bias: bf16[_, _, _, _] grad; mask = q // 64 == k // 64 + 1; score = s + bias[h, b, q, k];";
    let persistent = KERNELS[6];
    for (kernel, mask, program, (queries, keys), heads, shared, entry) in [
        (BIASED[2], "full", bias, (90, 144), (2, 2), [false, false, false], "fa_kernel"),
        (BIASED[2], "causal", bias, (150, 136), (2, 1), [false, false, false], "fa_kernel"),
        (BIASED[2], "window", masked, (150, 200), (2, 2), [false, false, false], "fa_kernel"),
        (BIASED[2], "full", bias, (90, 144), (2, 2), [true, false, false], "fa_array_sum"),
        (BIASED[2], "causal", bias, (90, 139), (4, 2), [true, true, false], "fa_array_sum"),
        (BIASED[2], "causal", bias, (90, 139), (2, 2), [false, false, false], "fa_array_sum"),
        (BIASED[2], "full", grouped, (70, 144), (4, 2), [true, false, false], "fa_array_sum"),
        (persistent, "causal", bias, (200, 144), (2, 2), [false, false, false], "fa_kernel"),
        (BIASED[1], "full", bias, (90, 144), (2, 2), [true, false, false], "fa_array_sum"),
        (BIASED[1], "causal", bias, (90, 144), (2, 2), [false, false, false], "fa_kernel"),
        // A row of the bias for all queries.
        (BIASED[2], "full", bias, (90, 144), (2, 2), [false, false, true], "fa_array_gradient_0"),
    ] {
        let spec = spec(kernel, mask, program);
        let unit = emulator().unit(&spec, Arch::Sm90, &Headers::embedded()).unwrap();
        let mut problem = sweep::cases(&spec)[0].problem.with_heads(heads.0, heads.1);
        // Of more than eight sums a thread has eight under way.
        let batch = if program == bias && shared[0] && keys == 144 { 9 } else { 2 };
        problem.lengths = Lengths::uniform(batch, queries, keys);
        let Case { placement, extras, .. } = Case::of(&problem, Placement::PACKED);
        let mut inputs = OwnedInputs::drawn(&problem, 1).unwrap();
        let (own, axes) = (&mut inputs.arrays[0], if program == grouped { 3 } else { 4 });
        let mut extents = [batch, heads.0, queries, keys].map(|len| len as i32);
        if program == masked {
            extents.swap(0, 1);
        }
        if program == grouped {
            extents = [heads.1 as i32, queries as i32, keys as i32, 1];
        } else {
            for axis in (0..3).filter(|&axis| shared[axis]) {
                extents[axis] = 1;
            }
        }
        let mut strides = [0i64; 4];
        let mut len = 1;
        for axis in (0..axes).rev() {
            strides[axis] = len;
            len *= i64::from(extents[axis]);
        }
        let element = |i: i64| {
            let (query, key) = (i / keys as i64 % queries as i64, i % keys as i64);
            let is_hidden = mask == "causal" && key > query + keys as i64 - queries as i64;
            match (is_hidden, i % 11) {
                (true, _) => 0x7fc0,
                (false, 5) => 0xff80,
                (false, _) => 0x3f80 | (i.wrapping_mul(40503) >> 9 & 0x807f) as u16,
            }
        };
        *own = OwnedArray { data: OwnedData::Bf16((0..len).map(element).collect()), strides, extents };
        let trial = Trial::with_inputs(&problem, spec.kernel.pass(), placement, &extras, Some(inputs));
        let proof = trial.run(&unit, &Options::seed(2)).unwrap();
        let faults = proof.faults().join("\n");
        let case = format!("{spec}, {program}, {queries} x {keys}, shared {shared:?}");
        assert!(proof.passed(), "{case}:\n{faults}");
        assert!(proof.values.iter().any(|(name, _)| *name == "darray"), "{case}");
        let launched = proof.outcome.launches.iter().any(|launch| launch.entry.starts_with("fa_array"));
        let found = proof.outcome.launches.iter().any(|launch| launch.entry == entry);
        assert!(found && launched == (entry != "fa_kernel"), "{case}: {:?}", proof.outcome.launches);
    }
}

/// The gradient of an array that goes on behind its indices is zero there, as is all of that of an array that
/// no score follows, however the rest is computed.
#[test]
#[ignore = "emulation"]
fn gradients_of_what_is_not_read_are_zeros() {
    let bias =
        "array bias: bf16[_, _, _, _] grad; array other: f16[_, _] grad; score = s + bias[b, h, q, k];";
    let parts = "array t: f32[_, _] grad; array u: f16[_, _] grad; array v: f32[_] grad; \
                 array other: f32[_, _, _] grad; mask = k <= q + 9 or other[b, h, k] > 9.0; \
                 score = s * t[h, q] + u[b, k] + v[hk];";
    for (kernel, mask, program, (queries, keys), batch, entry) in [
        (BIASED[2], "full", bias, (90, 144), 3, "fa_kernel"),
        (BIASED[2], "causal", bias, (150, 139), 3, "fa_kernel"),
        (BIASED[2], "causal", bias, (90, 136), 1, "fa_array_sum"),
        (BIASED[1], "full", bias, (90, 139), 1, "fa_array_sum"),
        (BIASED[2], "causal", parts, (90, 139), 3, "fa_array_gradient_2"),
        (KERNELS[7], "causal", parts, (70, 100), 4, "fa_array_gradient_1"),
        (KERNELS[8], "full", bias, (70, 90), 3, "fa_array_gradient_0"),
    ] {
        let spec = spec(kernel, mask, program);
        let arch = if spec.kernel.family() == Family::Sm90 { Arch::Sm90 } else { Arch::Sm80 };
        let unit = emulator().unit(&spec, arch, &Headers::embedded()).unwrap();
        let mut problem = sweep::cases(&spec)[0].problem.with_heads(4, 2);
        problem.lengths = Lengths::uniform(2, queries, keys);
        let Case { placement, extras, .. } = Case::of(&problem, Placement::PACKED);
        // Arrays of this many sequences, of which one may be for all, and of more heads, queries and keys.
        let mut longer = problem.with_heads(6, 3);
        longer.lengths = Lengths::uniform(batch, queries + 75, keys.next_multiple_of(8) + 72);
        let mut inputs = OwnedInputs::drawn(&longer, 1).unwrap();
        let is_summed = entry == "fa_array_sum";
        let own = &mut inputs.arrays[0];
        if is_summed {
            // Sums are of arrays with as many queries and keys as there are.
            let (queries, keys) = (queries as i32, keys as i32);
            own.extents = [1, 6, queries, keys];
            own.strides = [0, i64::from(queries * keys), i64::from(keys), 1];
        }
        let trial = Trial::with_inputs(&problem, spec.kernel.pass(), placement, &extras, Some(inputs));
        let proof = trial.run(&unit, &Options::seed(2)).unwrap();
        let case = format!("{spec}, {program}, {queries} x {keys}");
        assert!(proof.passed(), "{case}:\n{}", proof.faults().join("\n"));
        let launches = &proof.outcome.launches;
        assert!(launches.iter().any(|launch| launch.entry == entry), "{case}: {launches:?}");
        let is_recomputed = launches.iter().any(|launch| launch.entry.starts_with("fa_array_gradient"));
        assert_eq!(is_recomputed, entry.starts_with("fa_array_gradient"), "{case}: {launches:?}");
        assert!(proof.values.iter().any(|(name, _)| *name == "darray"), "{case}");
    }
}

#[test]
#[ignore = "emulation"]
fn programs_are_right_in_sm80_backwards() {
    check(&[7, 8], 2);
}

#[test]
#[ignore = "emulation"]
fn programs_are_right_with_lengths_on_the_device() {
    let trials = Trials::default();
    let mut found = Vec::new();
    for (turn, &kernel) in [0, 2, 3, 5, 6, 8].iter().enumerate() {
        let (mask, program) = PROGRAMS[[1, 6, 3, 7, 4, 5][turn]];
        let mut own = spec(KERNELS[kernel], mask, program);
        let backward = own.kernel.is_backward();
        own.reads = Reads { varied: true, paged: !backward && turn % 2 == 0 };
        own.split = !backward && turn == 2;
        found.extend(faults(&own, &trials));
    }
    assert!(found.is_empty(), "{} faults:\n{}", found.len(), found.join("\n\n"));
}

/// Rows whose scores are all the lowest number have no gradients on GPUs, and change no other's: they are as
/// rows that see no key. (An LSE of that size has no room for the number of keys; the CPU has the gradients
/// of a uniform softmax.)
#[test]
#[ignore = "emulation"]
fn rows_of_the_lowest_number_have_no_gradients() {
    let emulator = emulator();
    // Deterministic kernels of both families, whose bits are the same from run to run.
    for kernel in [KERNELS[6], KERNELS[8]] {
        let spec = spec(kernel, "full", "array bias: f32[_, _]; score = s + bias[b, q];");
        let arch = if spec.kernel.family() == Family::Sm90 { Arch::Sm90 } else { Arch::Sm80 };
        let unit = emulator.unit(&spec, arch, &Headers::embedded()).unwrap_or_else(|error| panic!("{error}"));
        let square = Problem::square(2, 1, 2, 64, Mask::FULL, Dtype::Bf16).with_heads_kv(1);
        let score = ScoreMod::NONE.with_program(spec.score.program);
        let problem = square.with_lengths(Lengths::uniform(2, 100, 130)).with_score(score);
        let outcome = |lowest: f32| {
            let mut inputs = OwnedInputs::drawn(&problem, 1).expect("a program");
            let OwnedData::F32(bias) = &mut inputs.arrays[0].data else { panic!("f32") };
            [3, 40, 64, 99, 107, 199].into_iter().for_each(|row| bias[row] = lowest);
            let extras = OwnedExtras::NONE;
            let pass = spec.kernel.pass();
            let trial = Trial::with_inputs(&problem, pass, Placement::PACKED, &extras, Some(inputs));
            trial.run(&unit, &Options::seed(4)).unwrap()
        };
        let hidden = outcome(f32::NEG_INFINITY);
        assert!(hidden.passed(), "{spec}:\n{}", hidden.faults().join("\n"));
        let lowest = outcome(f32::MIN);
        assert!(lowest.outcome.clean(), "{spec}:\n{}", lowest.faults().join("\n"));
        assert!(lowest.bits == hidden.bits, "{spec}: gradients of rows without keys differ");
        let dq = &lowest.outcome.outputs[0];
        assert!(dq[3 * 2 * 64..4 * 2 * 64].iter().all(|&bits| bits & 0x7fff == 0), "{spec}: dQ of row 3");
    }
}
