//! Candidates and register account of the SM90 backward, as the planner offers them for a problem.
//!
//! Two sets. The tuning guide's: every tile, swap and atom layout that its model admits ([`crate::guide::search`]), with its
//! stages, and with a second buffer of P and dS where there is room. And ours, for head dims where the guide has nothing (256):
//! there the f32 tile of dQ does not fit beside the operands, so that dQ goes from registers to device memory by vector
//! atomics, in slices where its accumulators would not fit, and Q and dO may have one buffer only.

use fa_core::spec::TileOrder;
use fa_core::{Arch, Kernel, KernelSpec, MaskKind, Problem, Sm90Bwd};

use crate::guide::bwd::{BwdConfig, BwdMmas};
use crate::guide::candidates::{self, BWD_TILES, BwdSpec};
use crate::guide::regs;
use crate::guide::search::{Tiles, search};
use crate::{HeadDims, Mode};

use crate::account::{Registers, smem};
use crate::kernels::sm90_fwd::candidates::SETMAXNREG;

/// The order of a backward's tiles under `mask`: longest first where their lengths differ; tiles that add to dQ in a fixed
/// order go by their numbers.
pub(crate) fn tile_order(mask: MaskKind, deterministic: bool) -> TileOrder {
    if mask == MaskKind::Full || deterministic { TileOrder::Natural } else { TileOrder::LongestFirst }
}

/// A guide configuration as the kernel's parameters.
pub fn kernel_of(config: &BwdConfig) -> Sm90Bwd {
    Sm90Bwd {
        q_stages: config.q_stage,
        do_stages: config.do_stage,
        pds_stages: config.pds_stage,
        mma_dkv_is_rs: config.mma_dkv_is_rs,
        ..kernel_of_spec(&config.spec())
    }
}

fn kernel_of_spec(spec: &BwdSpec) -> Sm90Bwd {
    Sm90Bwd {
        tile_m: spec.tile_m,
        tile_n: spec.tile_n,
        num_wg: spec.num_wg,
        q_stages: 1,
        do_stages: 1,
        pds_stages: 1,
        sdp_swap_ab: spec.sdp_swap_ab,
        dkv_swap_ab: spec.dkv_swap_ab,
        dq_swap_ab: spec.dq_swap_ab,
        atom_layout_m_sdp: spec.atom_layout_m_sdp,
        atom_layout_n_dkv: spec.atom_layout_n_dkv,
        atom_layout_m_dq: spec.atom_layout_m_dq,
        mma_dkv_is_rs: spec.mma_dkv_is_rs(),
        dq_via_smem: true,
        dq_slices: 1,
        tile_order: TileOrder::Natural,
        deterministic: false,
    }
}

/// The guide's view of a kernel.
pub fn guide_spec(kernel: &Sm90Bwd) -> BwdSpec {
    BwdSpec {
        tile_m: kernel.tile_m,
        tile_n: kernel.tile_n,
        num_wg: kernel.num_wg,
        sdp_swap_ab: kernel.sdp_swap_ab,
        dkv_swap_ab: kernel.dkv_swap_ab,
        dq_swap_ab: kernel.dq_swap_ab,
        atom_layout_m_sdp: kernel.atom_layout_m_sdp,
        atom_layout_n_dkv: kernel.atom_layout_n_dkv,
        atom_layout_m_dq: kernel.atom_layout_m_dq,
    }
}

/// Predicted registers of an MMA thread and their limit, by the guide's sum: S and dP together, or a slice of dQ in their place,
/// beside dK and dV.
pub fn registers(spec: &KernelSpec, kernel: &Sm90Bwd) -> Registers {
    let dims = HeadDims { head_dim: spec.head_dim, head_dim_v: spec.head_dim_v };
    let mmas = BwdMmas::new(dims, &guide_spec(kernel));
    let split = SETMAXNREG[(kernel.num_wg.clamp(1, 3) - 1) as usize];
    let accumulators =
        regs::bwd(mmas.sdp.regs(), mmas.dk.regs(), mmas.dv.regs(), mmas.dq.regs() / kernel.dq_slices.max(1));
    let other = split.mma - regs::limit(kernel.num_wg);
    Registers {
        s: 2 * mmas.sdp.regs(),
        p: 0,
        o: mmas.dk.regs() + mmas.dv.regs(),
        q: mmas.dq.regs() / kernel.dq_slices.max(1),
        other,
        total: accumulators + other,
        limit: split.mma,
        setmaxnreg: Some(split),
    }
}

/// Whether the compiler is known to refuse the kernel although the register account has room (NVRTC 13.0, bf16 without a soft
/// cap, which stands for the others): a correction taken from `fa build --all-configs --mode bwd`.
pub fn is_refused(spec: &KernelSpec, kernel: &Sm90Bwd) -> bool {
    let masked = spec.mask != MaskKind::Full;
    // Sliced beside a single Q buffer, under a mask: 16 to 96 bytes at head dim 256, which stands for the others beyond the guide.
    if kernel.dq_slices == 2 && kernel.q_stages == 1 && masked && matches!(kernel.tile_m, 64 | 128) {
        return true;
    }
    match (spec.head_dim, spec.head_dim_v) {
        (256, 256) if kernel.q_stages == 1 => spills_beside_one_q_buffer(kernel, masked),
        // 208 accumulators with S and dQ transposed and P through shared memory: 20 to 28 bytes. Without a mask two that
        // transpose dK as well are built.
        (128, 128) => {
            (kernel.tile_m, kernel.tile_n) == (80, 128)
                && !kernel.mma_dkv_is_rs
                && kernel.sdp_swap_ab
                && kernel.dq_swap_ab
                && kernel.atom_layout_m_sdp == 1
                && (masked || !kernel.dkv_swap_ab || kernel.atom_layout_n_dkv == 2)
        }
        // 16 to 32 bytes, where their neighbours have none.
        (128, 64) if masked && kernel.dq_swap_ab && kernel.atom_layout_m_sdp == 1 => {
            let layout =
                (kernel.dkv_swap_ab, kernel.atom_layout_n_dkv, kernel.atom_layout_m_dq, kernel.mma_dkv_is_rs);
            match (kernel.tile_m, kernel.tile_n) {
                (96, 128) => matches!(layout, (true, 2, 2, false) | (false, 1, 2, false)),
                (112, 128) => layout == (false, 2, 2, true),
                _ => false,
            }
        }
        _ => false,
    }
}

/// Of head dim 256, whose dQ is added from registers, with a single Q buffer: 12 to 92 bytes. With two every kernel compiles cleanly.
fn spills_beside_one_q_buffer(kernel: &Sm90Bwd, masked: bool) -> bool {
    let two_in_dq = kernel.atom_layout_m_dq == 2;
    match (kernel.tile_m, masked) {
        (80, true) if kernel.dq_slices == 1 => kernel.atom_layout_n_dkv == 1,
        (80, true) => two_in_dq,
        (_, true) => true,
        (80, false) => kernel.dq_slices == 2 && kernel.dkv_swap_ab && two_in_dq,
        (96 | 112, false) => kernel.dkv_swap_ab,
        (128, false) => {
            kernel.dkv_swap_ab && !kernel.sdp_swap_ab && kernel.atom_layout_m_sdp != kernel.atom_layout_n_dkv
        }
        _ => false,
    }
}

/// Every SM90 backward that is tried for `problem`: the guide's in its order, each followed by its variant, or ours.
pub fn candidates(
    problem: &Problem,
    head_dim: u32,
    head_dim_v: u32,
    deterministic: bool,
) -> impl Iterator<Item = KernelSpec> {
    let mask = MaskKind::of(&problem.mask);
    let tile_order = tile_order(mask, deterministic);
    let (dtype, softcap) = (problem.dtype, problem.softcap.is_some());
    let spec_of = move |kernel: Sm90Bwd| {
        let kernel = Kernel::Sm90Bwd(Sm90Bwd { tile_order, deterministic, ..kernel });
        KernelSpec { dtype, head_dim, head_dim_v, mask, softcap, kernel }
    };
    let dims = HeadDims { head_dim, head_dim_v };
    let guide = search(dims, Mode::Bwd, &Tiles::default()).map_or_else(|_| Vec::new(), |found| found.bwd);
    let kernels = if guide.is_empty() {
        beyond_the_guide().collect()
    } else {
        guide
            .iter()
            .map(kernel_of)
            .flat_map(|kernel| [kernel.clone(), Sm90Bwd { pds_stages: 2, ..kernel }])
            .collect::<Vec<_>>()
    };
    kernels.into_iter().map(spec_of).filter(fits_at_all)
}

/// Our space: the guide's tiles and layouts without a buffer for dQ, with every number of buffers, dQ whole and in slices.
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

/// Variants that break a shape rule or a limit are no news; the guide's own search explains its rejections.
fn fits_at_all(spec: &KernelSpec) -> bool {
    let Kernel::Sm90Bwd(kernel) = &spec.kernel else { return false };
    let regs = || registers(spec, kernel);
    spec.check().is_ok()
        && regs().total <= regs().limit
        && smem(spec).total <= Arch::Sm90.limits().smem_per_block
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Mask, Pass};

    use super::*;
    use crate::plan::{PlanOptions, explore, plan};

    fn options(deterministic: bool) -> PlanOptions {
        PlanOptions { pass: Pass::Backward { deterministic }, ..PlanOptions::default() }
    }

    #[test]
    fn all_of_the_guide_is_offered() {
        // Six of the 142 at head dim 128 are known to spill under a mask.
        for (head_dim, head_dim_v, guide, spilling) in
            [(64, 64, 128, 0), (128, 128, 142, 6), (192, 192, 18, 0), (192, 128, 18, 0)]
        {
            let problem =
                Problem { head_dim_v, ..Problem::square(2, 2048, 4, head_dim, Mask::CAUSAL, Dtype::Bf16) };
            let set = explore(&problem, Arch::Sm90, &options(false)).expect("plans");
            let is_guide = |spec: &KernelSpec| {
                let Kernel::Sm90Bwd(kernel) = &spec.kernel else { panic!("a backward: {spec}") };
                kernel.pds_stages == 1 && kernel.dq_via_smem
            };
            assert_eq!(
                set.plans.iter().filter(|plan| is_guide(&plan.spec)).count(),
                guide - spilling,
                "{head_dim}-{head_dim_v}"
            );
            assert!(set.rejected.iter().all(|rejected| rejected.reason.kind() == "spills"));
            assert_eq!(set.rejected.len(), spilling);
        }
    }

    #[test]
    fn head_dim_256_has_plans_of_our_own() {
        for (head_dim, head_dim_v) in [(256, 256), (200, 256), (256, 200)] {
            let problem =
                Problem { head_dim_v, ..Problem::square(2, 2048, 4, head_dim, Mask::FULL, Dtype::F16) };
            let best = &plan(&problem, Arch::Sm90, &options(true)).expect("plans")[0];
            let Kernel::Sm90Bwd(kernel) = &best.spec.kernel else { panic!("a backward") };
            assert!(!kernel.dq_via_smem && kernel.deterministic);
            assert!(best.smem.total <= 232_448 && best.regs.total <= best.regs.limit);
        }
    }

    #[test]
    fn deterministic_tiles_are_numbered_as_their_turns_are() {
        let problem = Problem::square(1, 1024, 2, 128, Mask::CAUSAL, Dtype::Bf16);
        for (deterministic, order) in [(true, TileOrder::Natural), (false, TileOrder::LongestFirst)] {
            let plans = plan(&problem, Arch::Sm90, &options(deterministic)).expect("plans");
            for plan in plans {
                let Kernel::Sm90Bwd(kernel) = &plan.spec.kernel else { panic!("a backward") };
                assert_eq!((kernel.deterministic, kernel.tile_order), (deterministic, order));
            }
        }
    }
}
