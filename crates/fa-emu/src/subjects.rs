//! Configurations of the kernels that together reach every branch of their code.

use fa_core::{Arch, Kernel, KernelSpec, Lengths, Mask, Problem};
use fa_lab::grid::problem_of;
use fa_lab::ledger::forms;

use crate::case::Case;
use crate::extras::{Batch, Lie};
use crate::mutate::Subject;
use crate::placement::Placement;

/// Kernel parameters, head dim and mask, and `(queries, query heads, K/V heads)`.
type Texts = &'static [(&'static str, (u32, &'static str), (usize, usize, usize))];

const SM80_FWD: Texts = &[
    (
        "Sm80Fwd((tile_m: 128, tile_n: 96, num_warps: 4, stages: 2, q_in_regs: false, blocks_per_sm: 1, \
         swizzle: true, ldmatrix: true, exp2: true, fast_math: true, loop_split: true, reverse_blocks: \
         true))",
        (64, "causal"),
        (600, 1, 1),
    ),
    (
        "Sm80Fwd((tile_m: 128, tile_n: 64, num_warps: 4, stages: 1, q_in_regs: true, blocks_per_sm: 1, \
         swizzle: true, ldmatrix: true, exp2: true, fast_math: true, loop_split: true, reverse_blocks: \
         true))",
        (64, "causal"),
        (600, 1, 1),
    ),
    (
        "Sm80Fwd((tile_m: 64, tile_n: 64, num_warps: 4, stages: 3, q_in_regs: true, blocks_per_sm: 1, \
         swizzle: true, ldmatrix: true, exp2: true, fast_math: true, loop_split: true, reverse_blocks: \
         true))",
        (64, "causal"),
        (400, 1, 1),
    ),
];

const SM90_FWD: Texts = &[
    (
        "Sm90Fwd((tile_m: 128, tile_n: 128, num_wg: 2, pv_is_rs: true, overlap_wg: true, q_stages: 1, \
         kv_stages: 2, ping_pong: true, scheduler: Dynamic, tile_order: LongestFirst, cluster_m: 1, \
         exp_poly_of_16: 4, rescale_threshold: 8, pack_gqa: false))",
        (64, "causal"),
        (900, 2, 2),
    ),
    (
        "Sm90Fwd((tile_m: 128, tile_n: 64, num_wg: 2, pv_is_rs: false, overlap_wg: false, q_stages: 1, \
         kv_stages: 2, ping_pong: true, scheduler: Dynamic, tile_order: LongestFirst, cluster_m: 1, \
         exp_poly_of_16: 0, rescale_threshold: 0, pack_gqa: false))",
        (64, "causal"),
        (700, 1, 1),
    ),
    (
        "Sm90Fwd((tile_m: 192, tile_n: 64, num_wg: 3, pv_is_rs: true, overlap_wg: true, q_stages: 2, \
         kv_stages: 2, ping_pong: true, scheduler: Static, tile_order: LongestFirst, cluster_m: 1, \
         exp_poly_of_16: 0, rescale_threshold: 0, pack_gqa: true))",
        (64, "causal"),
        (300, 3, 1),
    ),
    (
        "Sm90Fwd((tile_m: 128, tile_n: 128, num_wg: 2, pv_is_rs: true, overlap_wg: true, q_stages: 1, \
         kv_stages: 2, ping_pong: true, scheduler: Static, tile_order: Natural, cluster_m: 2, \
         exp_poly_of_16: 0, rescale_threshold: 8, pack_gqa: false))",
        (64, "full"),
        (600, 1, 1),
    ),
];

const SM80_BWD: Texts = &[
    (
        "Sm80Bwd((tile_m: 64, tile_n: 128, num_warps: 8, q_stages: 2, do_stages: 2, atom_layout_m_sdp: 2, \
         atom_layout_n_dkv: 4, atom_layout_m_dq: 2, dq_first: 0, blocks_per_sm: 1, tile_order: LongestFirst, \
         deterministic: false))",
        (64, "causal"),
        (600, 1, 1),
    ),
    (
        "Sm80Bwd((tile_m: 64, tile_n: 128, num_warps: 8, q_stages: 2, do_stages: 1, atom_layout_m_sdp: 2, \
         atom_layout_n_dkv: 4, atom_layout_m_dq: 2, dq_first: 32, blocks_per_sm: 1, tile_order: \
         LongestFirst, deterministic: true))",
        (64, "causal"),
        (600, 1, 1),
    ),
    (
        "Sm80Bwd((tile_m: 64, tile_n: 128, num_warps: 8, q_stages: 3, do_stages: 2, atom_layout_m_sdp: 2, \
         atom_layout_n_dkv: 4, atom_layout_m_dq: 2, dq_first: 0, blocks_per_sm: 1, tile_order: Natural, \
         deterministic: true))",
        (64, "causal"),
        (500, 2, 1),
    ),
];

const SM90_BWD: Texts = &[
    (
        "Sm90Bwd((tile_m: 128, tile_n: 128, num_wg: 2, q_stages: 2, do_stages: 2, pds_stages: 2, \
         sdp_swap_ab: true, dkv_swap_ab: false, dq_swap_ab: false, atom_layout_m_sdp: 1, atom_layout_n_dkv: \
         2, atom_layout_m_dq: 2, mma_dkv_is_rs: true, dq_via_smem: true, dq_slices: 1, tile_order: \
         LongestFirst, deterministic: false))",
        (64, "causal"),
        (600, 1, 1),
    ),
    (
        "Sm90Bwd((tile_m: 128, tile_n: 128, num_wg: 2, q_stages: 2, do_stages: 1, pds_stages: 1, \
         sdp_swap_ab: true, dkv_swap_ab: false, dq_swap_ab: false, atom_layout_m_sdp: 1, atom_layout_n_dkv: \
         2, atom_layout_m_dq: 2, mma_dkv_is_rs: false, dq_via_smem: true, dq_slices: 1, tile_order: \
         LongestFirst, deterministic: true))",
        (64, "causal"),
        (600, 1, 1),
    ),
    (
        "Sm90Bwd((tile_m: 64, tile_n: 128, num_wg: 2, q_stages: 2, do_stages: 2, pds_stages: 2, \
         sdp_swap_ab: true, dkv_swap_ab: false, dq_swap_ab: false, atom_layout_m_sdp: 1, atom_layout_n_dkv: \
         2, atom_layout_m_dq: 1, mma_dkv_is_rs: true, dq_via_smem: false, dq_slices: 1, tile_order: Natural, \
         deterministic: true))",
        (64, "causal"),
        (500, 1, 1),
    ),
    (
        "Sm90Bwd((tile_m: 64, tile_n: 80, num_wg: 2, q_stages: 2, do_stages: 1, pds_stages: 1, \
         sdp_swap_ab: false, dkv_swap_ab: true, dq_swap_ab: true, atom_layout_m_sdp: 1, atom_layout_n_dkv: \
         1, atom_layout_m_dq: 1, mma_dkv_is_rs: false, dq_via_smem: false, dq_slices: 2, tile_order: \
         Natural, deterministic: false))",
        (256, "causal"),
        (250, 1, 1),
    ),
    (
        "Sm90Bwd((tile_m: 128, tile_n: 128, num_wg: 2, q_stages: 2, do_stages: 2, pds_stages: 1, \
         sdp_swap_ab: true, dkv_swap_ab: false, dq_swap_ab: false, atom_layout_m_sdp: 1, atom_layout_n_dkv: \
         2, atom_layout_m_dq: 2, mma_dkv_is_rs: true, dq_via_smem: true, dq_slices: 1, tile_order: \
         LongestFirst, deterministic: false, persistent: true))",
        (64, "causal"),
        (500, 3, 3),
    ),
];

const SM100_FWD: Texts = &[
    (
        "Sm100Fwd((tile_m: 256, tile_n: 128, q_tiles: 2, kv_stages: 4, scheduler: Static, tile_order: \
         LongestFirst, exp_poly_of_16: 2, rescale_threshold: 0))",
        (64, "causal"),
        (900, 2, 2),
    ),
    (
        "Sm100Fwd((tile_m: 128, tile_n: 64, q_tiles: 1, kv_stages: 2, scheduler: PerTile, tile_order: \
         Natural, exp_poly_of_16: 0, rescale_threshold: 8))",
        (64, "full"),
        (400, 2, 1),
    ),
];

/// The kernels with their configurations, on an SM90 target where they run there.
///
/// # Panics
/// When a configuration is no valid spec any more.
pub fn subjects() -> Vec<(&'static str, Vec<Subject>)> {
    let all = [
        ("sm80_fwd", SM80_FWD),
        ("sm90_fwd", SM90_FWD),
        ("sm80_bwd", SM80_BWD),
        ("sm90_bwd", SM90_BWD),
        ("sm100_fwd", SM100_FWD),
    ];
    all.into_iter()
        .map(|(name, texts)| {
            let of_text = texts.iter().map(|(kernel, kind, lengths)| subject(kernel, *kind, *lengths));
            let mut subjects: Vec<Subject> = of_text.collect();
            // The last form has every feature; keys of the others are not divided, so that stages wrap
            // around.
            let mut of_first = forms(&subjects[0].spec);
            let last = of_first.pop();
            of_first.retain(|(_, spec)| spec.reads.varied);
            let gathered = last.iter().filter_map(|(_, spec)| gathered(spec)).collect::<Vec<_>>();
            let of_first = of_first.into_iter().chain(last).map(|(_, spec)| spec);
            subjects.extend(of_first.chain(gathered).map(varied));
            subjects.extend(in_cluster(&subjects[0].spec));
            (name, subjects)
        })
        .collect()
}

/// The same kernel with producers that copy rows, for pages that boxes of TMA do not divide. Keys are not
/// divided, so that stages wrap around.
fn gathered(spec: &KernelSpec) -> Option<KernelSpec> {
    let mut spec = spec.clone();
    let Kernel::Sm90Fwd(kernel) = &mut spec.kernel else { return None };
    kernel.gather = true;
    spec.split = false;
    Some(spec)
}

/// The kernel with keys that CTAs of a cluster share.
fn in_cluster(spec: &KernelSpec) -> Option<Subject> {
    let Kernel::Sm90Fwd(_) = spec.kernel else { return None };
    let mut spec = KernelSpec { split: true, ..spec.clone() };
    spec.score.sinks = true;
    let problem = problem_of(&spec, Lengths::uniform(1, 100, 520), (1, 1));
    Some(Subject { arch: Arch::Sm90, case: Case::of(&problem, Placement::PACKED), spec })
}

/// A form with variable lengths, pages, slopes, sinks and splits, as far as its kernel has them.
fn varied(spec: KernelSpec) -> Subject {
    let sequences = vec![(300, 300), (77, 140), (0, 9), (1, 600), (40, 0), (129, 129)];
    let page = if spec.traits().copies_rows() { 7 } else { 16 };
    let k = if spec.reads.paged { Lie::Paged(page) } else { Lie::Packed };
    let batch = Batch { sequences, q: Lie::Packed, k, slack: 5 };
    let lengths = if spec.reads.varied { batch.lengths() } else { Lengths::uniform(1, 300, 300) };
    let problem = problem_of(&spec, lengths, (2, 1));
    let case = if spec.reads.varied {
        Case { problem, placement: Placement::PACKED, extras: batch.extras(&problem) }
    } else {
        Case::of(&problem, Placement::PACKED)
    };
    Subject { arch: arch_of(&spec), spec, case }
}

fn subject(
    kernel: &str,
    (head_dim, mask): (u32, &str),
    (seqlen, heads_q, heads_kv): (usize, usize, usize),
) -> Subject {
    let text = format!(
        "(dtype: bf16, head_dim: {head_dim}, head_dim_v: {head_dim}, mask: {mask}, softcap: false, kernel: \
         {kernel})"
    );
    let spec = KernelSpec::from_ron(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
    let problem = Problem::square(
        1,
        1,
        1,
        head_dim as usize,
        if mask == "full" { Mask::FULL } else { Mask::CAUSAL },
        spec.types.q,
    )
    .with_lengths(Lengths::uniform(1, seqlen, seqlen))
    .with_heads(heads_q, heads_kv);
    Subject { arch: arch_of(&spec), spec, case: Case::of(&problem, Placement::PACKED) }
}

/// SM90, or where the kernel does not run there the first architecture that it runs on.
fn arch_of(spec: &KernelSpec) -> Arch {
    let family = spec.kernel.family();
    if family.runs_on(Arch::Sm90) { Arch::Sm90 } else { family.archs()[0] }
}
