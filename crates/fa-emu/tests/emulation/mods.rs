//! ALiBi and sinks in all kernels: with soft caps and every mask, slopes that outgrow every maximum,
//! slopes below zero, sinks far above the scores and none at all, both up to f32's largest number; in
//! backwards with a gradient of the LSE.

use fa_core::{Alibi, Arch, KernelSpec, Lengths};
use fa_emu::sweep::{Case, Trials, sweep};
use fa_emu::{Placement, sweep};
use fa_kernels::Headers;

use crate::emulator;

pub(crate) const KERNELS: [&str; 13] = [
    // P from the current maximum until its sum shows that the scores have outgrown it.
    "Sm90Fwd((tile_m: 128, tile_n: 64, num_wg: 2, pv_is_rs: true, overlap_wg: true, q_stages: 1, kv_stages: \
     2, ping_pong: true, scheduler: Dynamic, tile_order: LongestFirst, cluster_m: 1, exp_poly_of_16: 4, \
     rescale_threshold: 8, pack_gqa: false))",
    "Sm90Fwd((tile_m: 192, tile_n: 64, num_wg: 3, pv_is_rs: true, overlap_wg: true, q_stages: 2, kv_stages: \
     2, ping_pong: true, scheduler: Static, tile_order: LongestFirst, cluster_m: 1, exp_poly_of_16: 0, \
     rescale_threshold: 8, pack_gqa: true))",
    "Sm90Fwd((tile_m: 64, tile_n: 64, num_wg: 1, pv_is_rs: false, overlap_wg: false, q_stages: 1, kv_stages: \
     2, ping_pong: false, scheduler: PerTile, tile_order: Natural, cluster_m: 1, exp_poly_of_16: 0, \
     rescale_threshold: 0, pack_gqa: true))",
    "Sm80Fwd((tile_m: 128, tile_n: 64, num_warps: 4, stages: 2, q_in_regs: false, blocks_per_sm: 1, \
     swizzle: true, ldmatrix: true, exp2: true, fast_math: true, loop_split: true, reverse_blocks: true))",
    "Sm80Fwd((tile_m: 64, tile_n: 64, num_warps: 4, stages: 1, q_in_regs: true, blocks_per_sm: 1, swizzle: \
     true, ldmatrix: true, exp2: false, fast_math: false, loop_split: false, reverse_blocks: false))",
    // S, and S^T with the operands swapped.
    "Sm90Bwd((tile_m: 64, tile_n: 128, num_wg: 2, q_stages: 2, do_stages: 2, pds_stages: 2, sdp_swap_ab: \
     true, dkv_swap_ab: false, dq_swap_ab: false, atom_layout_m_sdp: 1, atom_layout_n_dkv: 2, \
     atom_layout_m_dq: 1, mma_dkv_is_rs: true, dq_via_smem: true, dq_slices: 1, tile_order: LongestFirst, \
     deterministic: false))",
    "Sm90Bwd((tile_m: 128, tile_n: 64, num_wg: 2, q_stages: 2, do_stages: 1, pds_stages: 1, sdp_swap_ab: \
     false, dkv_swap_ab: false, dq_swap_ab: false, atom_layout_m_sdp: 2, atom_layout_n_dkv: 1, \
     atom_layout_m_dq: 2, mma_dkv_is_rs: false, dq_via_smem: false, dq_slices: 1, tile_order: Natural, \
     deterministic: true))",
    "Sm80Bwd((tile_m: 64, tile_n: 128, num_warps: 8, q_stages: 2, do_stages: 2, atom_layout_m_sdp: 2, \
     atom_layout_n_dkv: 4, atom_layout_m_dq: 2, dq_first: 0, blocks_per_sm: 1, tile_order: LongestFirst, \
     deterministic: false))",
    "Sm80Bwd((tile_m: 64, tile_n: 64, num_warps: 8, q_stages: 2, do_stages: 1, atom_layout_m_sdp: 2, \
     atom_layout_n_dkv: 2, atom_layout_m_dq: 2, dq_first: 32, blocks_per_sm: 1, tile_order: Natural, \
     deterministic: true))",
    "Sm90Fwd((tile_m: 128, tile_n: 128, num_wg: 2, pv_is_rs: true, overlap_wg: true, q_stages: 1, kv_stages: \
     2, ping_pong: true, scheduler: Static, tile_order: Natural, cluster_m: 1, exp_poly_of_16: 0, \
     rescale_threshold: 0, pack_gqa: false))",
    "Sm80Fwd((tile_m: 64, tile_n: 64, num_warps: 4, stages: 3, q_in_regs: true, blocks_per_sm: 1, swizzle: \
     true, ldmatrix: true, exp2: false, fast_math: true, loop_split: true, reverse_blocks: true))",
    "Sm100Fwd((tile_m: 256, tile_n: 128, q_tiles: 2, kv_stages: 3, scheduler: Static, tile_order: \
     LongestFirst, exp_poly_of_16: 2, rescale_threshold: 8))",
    "Sm100Fwd((tile_m: 128, tile_n: 64, q_tiles: 1, kv_stages: 2, scheduler: PerTile, tile_order: Natural, \
     exp_poly_of_16: 0, rescale_threshold: 0))",
];

fn spec(kernel: &str, mask: &str, [softcap, alibi, sinks]: [bool; 3]) -> KernelSpec {
    let text = format!(
        "(dtype: bf16, head_dim: 64, head_dim_v: 64, mask: {mask}, softcap: {softcap}, alibi: {alibi}, \
         sinks: {sinks}, kernel: {kernel})"
    );
    KernelSpec::from_ron(&text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// The cases of the sweep but for its longest, on which the shipped kernels' forms with slopes and sinks are
/// run, and some with values of their own.
fn cases(spec: &KernelSpec) -> Vec<Case> {
    let mut cases = sweep::cases(spec);
    cases.retain(|case| case.problem.lengths.max_q() < 300);
    let mut problem = cases[4].problem;
    problem.lengths = Lengths::uniform(2, 150, 270);
    problem.score.alibi = problem.score.alibi.map(|_| Alibi::PerSequenceHead);
    let mut strange = Case::of(&problem, Placement::PACKED);
    if let Some(slopes) = &mut strange.extras.alibi_slopes {
        let values = [2.0, -0.25, 0.0, 1e-4, -1.0, 0.5, 8.0, 1.0];
        slopes.iter_mut().zip(values.iter().cycle()).for_each(|(slope, &value)| *slope = value);
    }
    if let Some(sinks) = &mut strange.extras.sinks {
        let values = [90.0, -90.0, f32::NEG_INFINITY, 8.0];
        sinks.iter_mut().zip(values.iter().cycle()).for_each(|(sink, &value)| *sink = value);
    }
    if spec.kernel.is_backward() {
        // The LSE has a gradient.
        let rows = problem.lengths.sequences() * problem.lengths.max_q() * problem.heads_q;
        strange.extras.dlse = Some((0..rows).map(|row| (row % 13) as f32 / 4.0 - 1.5).collect());
    }
    let mut edges = strange.clone();
    cases.push(strange);
    if let Some(slopes) = &mut edges.extras.alibi_slopes {
        let values = [3e38, 1e10, 0.5, f32::MAX, 1e30, 2.4e38, 3e3, 1e36];
        slopes.iter_mut().zip(values.iter().cycle()).for_each(|(slope, &value)| *slope = value);
    }
    if let Some(sinks) = &mut edges.extras.sinks {
        let values = [3e38, -3e38, f32::MAX, 1e10];
        sinks.iter_mut().zip(values.iter().cycle()).for_each(|(sink, &value)| *sink = value);
    }
    cases.push(edges);
    cases
}

#[test]
#[ignore = "emulation"]
fn slopes_and_sinks_are_right_in_every_kernel() {
    let emulator = emulator();
    let trials = Trials::default();
    let kinds = [
        ("causal", [false, true, true]),
        ("full", [false, true, false]),
        ("window", [true, true, true]),
        ("causal", [true, true, false]),
        ("window", [false, false, true]),
    ];
    let mut faults = Vec::new();
    for (turn, kernel) in KERNELS.iter().enumerate() {
        for (kind, &(mask, score)) in kinds.iter().enumerate() {
            // Each kernel in three of the kinds: all are met by every family.
            if (turn + kind) % 5 > 2 {
                continue;
            }
            let spec = spec(kernel, mask, score);
            let unit = {
                let family = spec.kernel.family();
                let arch = if family.runs_on(Arch::Sm90) { Arch::Sm90 } else { family.archs()[0] };
                emulator.unit(&spec, arch, &Headers::embedded()).unwrap()
            };
            let verdict = sweep(&unit, &cases(&spec), &[2], &trials).unwrap();
            faults.extend(verdict.faults.into_iter().map(|fault| format!("{spec}\n{fault}")));
        }
    }
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n\n"));
}
