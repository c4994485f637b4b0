//! The SM90 backwards that are tried for a problem.
//!
//! Two sets. First the tuning guide's: every tile, swap and atom layout that its model admits
//! ([`crate::guide::search`]), with its stages, and also with a second buffer of P and dS where shared memory
//! has room. Second, for head dims where the guide has none (256): shared memory does not hold the f32 tile
//! of dQ in addition to the operands, so dQ goes from registers to device memory by vector atomics, in slices
//! if its accumulators do not fit, and Q and dO may have a single buffer.

use fa_core::spec::TileOrder;
use fa_core::{Arch, Kernel, KernelSpec, Mask, MaskKind, Problem, ScoreKind, Sm90Bwd};

use crate::account::stored::storing_heads;
use crate::guide::candidates::{self, BWD_TILES};
use crate::guide::kernel::{kernel_of, kernel_of_spec};
use crate::guide::search::bwd_of_extents;
use crate::head_dims::HeadDims;
use crate::kernels::backward_order;
use crate::refusals::Refusals;

use super::account::{registers, smem};

/// Every SM90 backward that is tried for `problem`: the guide's in its order, each followed by its variant
/// with two buffers of P and dS; beyond the guide's head dims those without a buffer of dQ.
pub fn candidates(
    problem: &Problem,
    head_dim: u32,
    head_dim_v: u32,
    deterministic: bool,
) -> impl Iterator<Item = KernelSpec> {
    let tile_order = backward_order(problem, deterministic);
    let posed = *problem;
    let spec_of = move |kernel: Sm90Bwd| {
        let spec = |persistent| {
            let kernel = Sm90Bwd { tile_order, deterministic, persistent, ..kernel.clone() };
            KernelSpec::for_problem(&posed, [head_dim, head_dim_v], kernel)
        };
        let drawn = spec(true);
        if gains_by_drawing(&drawn, &kernel, &posed) {
            with_direct_sums(&posed, &drawn).unwrap_or(drawn)
        } else {
            spec(false)
        }
    };
    let guide = bwd_of_extents(HeadDims { head_dim, head_dim_v });
    let kernels = if guide.is_empty() {
        beyond_the_guide().collect()
    } else {
        guide
            .iter()
            .map(kernel_of)
            .flat_map(|kernel| {
                let both = Sm90Bwd { pds_stages: 2, ..kernel.clone() };
                let has_room = |kernel: &Sm90Bwd| fits_at_all(&spec_of(kernel.clone()));
                let one = (gains_by_one_dout(&both, problem, deterministic) || !has_room(&both))
                    .then(|| Sm90Bwd { do_stages: 1, ..both.clone() });
                [Some(kernel), one, Some(both)].into_iter().flatten()
            })
            .collect::<Vec<_>>()
    };
    let others = kernels.into_iter().map(spec_of).filter(move |spec| !is_too_tall(spec, &posed));
    let whole = (!deterministic).then(|| with_whole_keys(problem, [head_dim, head_dim_v], tile_order));
    whole.flatten().into_iter().chain(others).filter(fits_at_all)
}

/// The most queries for which a tile of all keys is tried: in longer sequences nothing hides its stores of
/// dQ, and the sum of all tiles' dQ in bulk is hidden.
const WHOLE_QUERIES: usize = 128;

/// The kernel whose CTAs have all keys of a sequence and store dQ in 16 bits, for short sequences of equal
/// lengths, whose time is that of their bytes: f32 sums of dQ are 4 of 13 tensors' worth of them. Of the
/// tiles that were measured those of 64 queries are the fastest, except for 128 queries at head dim 32
/// (NB-182).
fn with_whole_keys(problem: &Problem, dims: [u32; 2], tile_order: TileOrder) -> Option<KernelSpec> {
    let queries = problem.lengths.max_q();
    let (tile_m, atom_layout_m_dq) = match dims {
        [32, 32] if queries > 64 => (128, 2),
        [32, 32] | [64, 64] | [128, 128] => (64, 1),
        _ => return None,
    };
    let kernel = Sm90Bwd {
        tile_m,
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
        atom_layout_m_dq,
        mma_dkv_is_rs: true,
        dq_via_smem: false,
        dq_slices: 1,
        tile_order,
        deterministic: false,
        persistent: true,
        whole_keys: true,
    };
    let spec = KernelSpec::for_problem(problem, dims, kernel);
    let gains = queries <= WHOLE_QUERIES && suits_drawing(&spec, problem);
    let is_right = spec.check().is_ok() && spec.serves(problem).is_ok();
    (gains && is_right && !Refusals::shipped().has(&spec, Arch::Sm90)).then_some(spec)
}

/// The most queries for which CTAs draw tiles, up to head dim 64 and to 128: in longer sequences a tile's
/// start and end count for nothing, and CTAs of one tile each were faster by up to 5 % (NB-101). Under a
/// window these are its own (NB-172).
const DRAWN_QUERIES: [usize; 2] = [2048, 4096];

/// Whether CTAs of kernels like `spec` are fast at `problem` when they draw tiles. Deterministic kernels gain
/// nothing by it. Packed batches gain whatever their lengths, which differ from CTA to CTA: 3 to 21 %, with
/// windows too, in 20 of 22 batches drawn at random (NB-174).
fn suits_drawing(spec: &KernelSpec, problem: &Problem) -> bool {
    let lengths = &problem.lengths;
    let (dim, queries) = (spec.head_dim.max(spec.head_dim_v), lengths.mean_q().min(in_window(&problem.mask)));
    dim <= 128
        && queries <= DRAWN_QUERIES[usize::from(dim > 64)]
        && spec.score == ScoreKind::NONE
        && !spec.traits().pass.deterministic()
}

/// Whether `drawn`, the spec of `kernel` whose CTAs draw tiles, is tried in place of the one whose CTAs do
/// not, for `problem`. Some that the compiler spills do not when their CTAs have one tile each.
fn gains_by_drawing(drawn: &KernelSpec, kernel: &Sm90Bwd, problem: &Problem) -> bool {
    suits_drawing(drawn, problem)
        && kernel.mma_dkv_is_rs
        && kernel.dq_via_smem
        && drawn.check().is_ok()
        && !Refusals::shipped().has(drawn, Arch::Sm90)
}

/// The queries that see a key under a window.
fn in_window(mask: &Mask) -> usize {
    match (mask.left, mask.right) {
        (Some(left), Some(right)) => (left as usize).saturating_add(right as usize).saturating_add(1),
        _ => usize::MAX,
    }
}

/// The fewest queries of a window for which [`TALL`] is tried at head dim 128: drawn by CTAs it spills, and
/// else 64x128 drawn by CTAs is 14 % faster with 1,024 queries, but 3 % slower with 4,096 (NB-172).
const TALL_QUERIES: usize = 2048;
const TALL: (u32, u32) = (80, 128);

/// Whether `spec` has that tile where tiles of 64 queries are drawn instead.
fn is_too_tall(spec: &KernelSpec, problem: &Problem) -> bool {
    (spec.mask, spec.head_dim, spec.tile()) == (MaskKind::Window, 128, TALL)
        && in_window(&problem.mask) < TALL_QUERIES
        && suits_drawing(spec, problem)
}

/// Most steps of a CTA's tile, of a group's heads together, for which dQ is added from registers.
const DIRECT_STEPS: usize = 2;

/// Whether a CTA's tile has so few steps that adding dQ takes as long in bulk as from registers.
pub(super) fn has_few_steps(problem: &Problem, kernel: &Sm90Bwd) -> bool {
    let steps = problem.lengths.max_q().div_ceil(kernel.tile_m as usize).saturating_mul(problem.group_size());
    steps <= DIRECT_STEPS
}

/// `drawn` without the buffer of dQ, where adding dQ from registers gains and the compiler is not known to
/// spill it: with a step or two, nothing hides the way of the bulk addition. Where CTAs draw tiles and all
/// sums are added to zeros, it is faster by 2 to 11 %; where a tile's first sums are stored, for which the
/// buffer is needed, it is slower (NB-155).
fn with_direct_sums(problem: &Problem, drawn: &KernelSpec) -> Option<KernelSpec> {
    let Kernel::Sm90Bwd(kernel) = &drawn.kernel else { return None };
    let gains = problem.mask.is_full()
        && problem.lengths.is_uniform()
        && has_few_steps(problem, kernel)
        && storing_heads(drawn, problem, Arch::Sm90, Arch::Sm90.limits().sms).is_none();
    let direct = Sm90Bwd { dq_via_smem: false, ..kernel.clone() };
    let spec = KernelSpec { kernel: Kernel::Sm90Bwd(direct.clone()), ..drawn.clone() };
    (gains && !Refusals::shipped().has(&spec, Arch::Sm90)).then_some(spec)
}

/// The fewest queries from which one buffer of dO is faster than two under a causal mask: at head dims to 32,
/// whose steps are shorter, and above (NB-109, NB-171).
const ONE_DOUT_QUERIES: [usize; 2] = [3072, 1024];

/// Whether `kernel` is tried with one buffer of dO as well, which comes first of the two: they are predicted
/// alike. Under a causal mask it is faster by 0.5 to 5 % in the largest tiles of head dims 64 and 96, under
/// others by nothing or slower (NB-109).
fn gains_by_one_dout(kernel: &Sm90Bwd, problem: &Problem, deterministic: bool) -> bool {
    let tile = (problem.head_dim.max(problem.head_dim_v), (kernel.tile_m, kernel.tile_n));
    MaskKind::of(&problem.mask) == MaskKind::Causal
        && matches!(tile, (..=64, (128, 128)) | (65..=96, (64, 128)))
        && problem.lengths.max_q() >= ONE_DOUT_QUERIES[usize::from(tile.0 > 32)]
        && problem.lengths.is_uniform()
        && problem.score.kind() == ScoreKind::NONE
        && !deterministic
}

/// The guide's tiles and layouts without a buffer for dQ, with every number of Q and dO buffers, dQ whole and
/// in slices.
fn beyond_the_guide() -> impl Iterator<Item = Sm90Bwd> {
    let stages = [(2, 2), (2, 1), (1, 1)];
    candidates::bwd(&BWD_TILES, &BWD_TILES).into_iter().flat_map(move |spec| {
        stages.into_iter().flat_map(move |(q_stages, do_stages)| {
            [1, 2].into_iter().map(move |dq_slices| Sm90Bwd {
                q_stages,
                do_stages,
                dq_slices,
                dq_via_smem: false,
                ..kernel_of_spec(&spec)
            })
        })
    })
}

/// Variants that break a shape rule or a limit are dropped without a reason: the guide's search explains its
/// rejections.
fn fits_at_all(spec: &KernelSpec) -> bool {
    let Kernel::Sm90Bwd(kernel) = &spec.kernel else { return false };
    let regs = || registers(spec, kernel);
    spec.check().is_ok()
        && regs().total <= regs().limit
        && smem(spec, kernel).total <= Arch::Sm90.limits().smem_per_block
}
