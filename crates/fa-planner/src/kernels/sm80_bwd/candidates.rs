//! The SM80-class backward (mma.sync, cp.async, ldmatrix): its shared memory, its registers, and what is tried.
//!
//! It runs on every architecture from 8.0 on; what fits differs by the SM's shared memory.

use std::cmp::Reverse;

use fa_core::{Arch, Kernel, KernelSpec, MaskKind, Problem, Sm80Bwd};

use crate::occupancy::{WARP, register_ceiling};
use crate::smem::SmemPlan;

use crate::account::{Registers, smem as smem_of};
use crate::kernels::sm90_bwd::candidates::tile_order;

/// Queries per step that are tried.
pub const TILE_M: [u32; 3] = [32, 64, 128];

/// Keys of a block that are tried.
pub const TILE_N: [u32; 3] = [32, 64, 128];

/// Warps that are tried.
pub const WARPS: [u32; 2] = [4, 8];

/// Q and dO buffers that are tried.
pub const STAGES: [(u32, u32); 3] = [(3, 2), (2, 2), (2, 1)];

/// Registers of a thread for operands, the statistics of its rows, addresses and loop state.
const OVERHEAD: u32 = 60;

/// More of them beside S or dP where blocks take turns.
const TURNS: u32 = 8;

/// Accumulators of dK or dV of a thread from which on there is a lack of registers,
const FULL_ACCUMULATORS: u32 = 128;

/// and the registers that are lacking.
const ELSEWHERE: u32 = 8;

/// The shared memory of a block. T is the 16-bit type; tiles are swizzled panels of at most 64 columns:
///
/// - `q` `[q_stages][tile_m, hd]` T, `do` `[do_stages][tile_m, hdv]` T, `k` `[tile_n, hd]` T, `v` `[tile_n, hdv]` T;
/// - `p` and `ds` `[tile_m, tile_n]` T, with a soft cap `p` twice: the weights, and what they give times the cap's slope;
/// - `lse` `[q_stages][tile_m]` and `dpsum` `[do_stages][tile_m]` f32, which come with Q and dO;
/// - `tile`, `range` and `step`: six, four and four 32-bit words that say what the block is to do and where its warps are.
pub fn smem(spec: &KernelSpec, kernel: &Sm80Bwd) -> SmemPlan {
    let Sm80Bwd { tile_m, tile_n, .. } = *kernel;
    let (hd, hdv) = (spec.head_dim, spec.head_dim_v);
    let align = crate::kernels::sm80_fwd::candidates::ALIGN;
    let mut plan = SmemPlan::default();
    plan.push("q", kernel.q_stages * tile_m * hd * 2, align);
    plan.push("do", kernel.do_stages * tile_m * hdv * 2, align);
    plan.push("k", tile_n * hd * 2, align);
    plan.push("v", tile_n * hdv * 2, align);
    plan.push("p", if spec.softcap { 2 } else { 1 } * tile_m * tile_n * 2, align);
    plan.push("ds", tile_m * tile_n * 2, align);
    plan.push("lse", kernel.q_stages * tile_m * 4, align);
    plan.push("dpsum", kernel.do_stages * tile_m * 4, align);
    plan.push("tile", 6 * 4, 4);
    plan.push("range", 4 * 4, 4);
    plan.push("step", 4 * 4, 8);
    plan.round_up(align)
}

/// Predicted registers of a thread, and the ceiling that the launch bounds give the compiler: of each half of the warps dK or dV all
/// the time, S or dP or its part of dQ beside it.
pub fn registers(spec: &KernelSpec, kernel: &Sm80Bwd, arch: Arch) -> Registers {
    let limits = arch.limits();
    let threads = WARP * kernel.num_warps;
    let group = threads / 2;
    let s = kernel.tile_m * kernel.tile_n / group;
    let o = kernel.tile_n * spec.head_dim.max(spec.head_dim_v) / group;
    let q = kernel.tile_m * kernel.dq_first.max(spec.head_dim - kernel.dq_first) / group;
    // Of dQ's left operand fragments of two contraction steps are held, more than the allowance covers where a warp has many.
    let dq_fragments = kernel.tile_m / kernel.atom_layout_m_dq / 16;
    // Learned from the compiler: beside so many accumulators it wants more on all architectures but 9.0.
    let elsewhere = if arch != Arch::Sm90 && o >= FULL_ACCUMULATORS { ELSEWHERE } else { 0 };
    let overhead = OVERHEAD + elsewhere;
    let other = overhead + if kernel.deterministic { TURNS } else { 0 };
    Registers {
        s,
        p: 0,
        o,
        q,
        other,
        total: o + (s + other).max(q + overhead + 8 * dq_fragments.saturating_sub(2)),
        limit: register_ceiling(limits, threads, kernel.blocks_per_sm),
        setmaxnreg: None,
    }
}

/// Whether the compiler is known to spill although the register account has room (NVRTC 13.0, bf16 without a soft cap, which stands for
/// the others): a correction taken from `fa build --all-configs --mode bwd --family sm80 --arch sm90 [--deterministic]`. 4 to 40 bytes,
/// by no count of registers that we see.
pub fn is_refused(spec: &KernelSpec, kernel: &Sm80Bwd, arch: Arch) -> bool {
    if arch != Arch::Sm90 {
        return false;
    }
    let Sm80Bwd { tile_m, tile_n, num_warps, q_stages, do_stages, .. } = *kernel;
    let kind = (spec.head_dim, spec.head_dim_v, (tile_m, tile_n), num_warps);
    let stages = (q_stages, do_stages);
    if kernel.deterministic {
        return match kind {
            (96, 96, (64, 64), 4) | (96, 96, (64, 128), 8) => stages == (2, 1),
            (128, 128, (128, 64), 8) => stages == (3, 2),
            (128, 128, (32, 64), 4) | (64, 128, (128, 64), 8) => q_stages == 2,
            (256, 256, (32, 32), 4) => true,
            _ => false,
        };
    }
    match kind {
        (64, 64, (128, 128), 8) => stages == (2, 2),
        (96, 96, (64, 128), 8) | (128, 128, (64, 64), 4) | (256, 256, (32, 64), 8) => stages == (2, 1),
        (256, 256, (32, 32), 4) => q_stages == 2,
        (64, 128, (64, 128), 8) => true,
        _ => false,
    }
}

/// 16 x 16 blocks of operands that all warps read in a contraction step of a `[rows, columns]` product, `atoms` of them along its rows;
/// `None` where a warp would not get whole ones.
fn blocks_read(rows: u32, columns: u32, warps: u32, atoms: u32) -> Option<u32> {
    let across = warps / atoms;
    (rows.is_multiple_of(16 * atoms) && columns.is_multiple_of(16 * across))
        .then(|| (rows * across + columns * atoms) / 16)
}

/// The warps along the rows that read least; of equals the most, for which a warp has the fewest rows.
fn atoms(rows: u32, columns: &[u32], warps: u32) -> Option<u32> {
    (0..=warps.ilog2())
        .map(|power| 1 << power)
        .filter_map(|atoms| {
            let reads = columns
                .iter()
                .map(|&columns| blocks_read(rows, columns, warps, atoms))
                .sum::<Option<u32>>()?;
            Some((reads, Reverse(atoms)))
        })
        .min()
        .map(|(_, Reverse(atoms))| atoms)
}

/// Accumulators of a thread, of dK and its part of dQ, beside which there are no registers for more than two fragments of 16 keys.
const MANY_ACCUMULATORS: u32 = 176;

/// The warps along the keys in dK and dV: those that read least, but for warps with many accumulators such that own few keys.
fn atoms_dkv(tile: (u32, u32), head_dims: (u32, u32), group: u32, dq: u32) -> Option<u32> {
    let (tile_m, tile_n) = tile;
    let accumulators = (tile_n * head_dims.0.max(head_dims.1) + tile_m * dq) / (WARP * group);
    let least = atoms(tile_n, &[head_dims.0, head_dims.1], group)?;
    let few = (tile_n / 32).clamp(1, group);
    let fits = |columns| blocks_read(tile_n, columns, group, few).is_some();
    Some(if accumulators > MANY_ACCUMULATORS && few > least && fits(head_dims.0) && fits(head_dims.1) {
        few
    } else {
        least
    })
}

/// How dQ is shared among the halves of the warps, as evenly as blocks of 16 columns allow: the first half's columns, and the warps
/// along the rows.
fn share_dq(tile_m: u32, head_dim: u32, group: u32) -> Option<(u32, u32)> {
    [head_dim / 32 * 16, head_dim / 64 * 32, 0].into_iter().find_map(|first| {
        let columns = [head_dim - first, first];
        Some((first, atoms(tile_m, &columns[..if first > 0 { 2 } else { 1 }], group)?))
    })
}

/// Bytes of shared memory that a step's products read, and dS of P.
pub(crate) fn bytes_read(spec: &KernelSpec, kernel: &Sm80Bwd) -> u32 {
    let Sm80Bwd { tile_m, tile_n, num_warps, dq_first, .. } = *kernel;
    let (hd, hdv) = (spec.head_dim, spec.head_dim_v);
    let reads = |rows, columns, contraction, atoms| {
        blocks_read(rows, columns, num_warps / 2, atoms).map_or(0, |blocks| blocks * contraction / 16 * 512)
    };
    let dq = |columns| if columns > 0 { reads(tile_m, columns, tile_n, kernel.atom_layout_m_dq) } else { 0 };
    reads(tile_m, tile_n, hd + hdv, kernel.atom_layout_m_sdp)
        + reads(tile_n, hd, tile_m, kernel.atom_layout_n_dkv)
        + reads(tile_n, hdv, tile_m, kernel.atom_layout_n_dkv)
        + dq(dq_first)
        + dq(hd - dq_first)
        + 2 * tile_m * tile_n
}

/// Every SM80-class backward that is tried for `problem` on `arch`: tiles, warps and buffers that fit, each with the warp layouts that
/// read least.
pub fn candidates(
    problem: &Problem,
    head_dim: u32,
    head_dim_v: u32,
    arch: Arch,
    deterministic: bool,
) -> impl Iterator<Item = KernelSpec> {
    let mask = MaskKind::of(&problem.mask);
    let tile_order = tile_order(mask, deterministic);
    let (dtype, softcap) = (problem.dtype, problem.softcap.is_some());
    TILE_M
        .into_iter()
        .flat_map(|tile_m| TILE_N.into_iter().map(move |tile_n| (tile_m, tile_n)))
        .flat_map(|tile| WARPS.into_iter().map(move |warps| (tile, warps)))
        .flat_map(|block| STAGES.into_iter().map(move |stages| (block, stages)))
        .filter_map(move |(((tile_m, tile_n), num_warps), (q_stages, do_stages))| {
            let group = num_warps / 2;
            let (dq_first, atom_layout_m_dq) = share_dq(tile_m, head_dim, group)?;
            let kernel = Kernel::Sm80Bwd(Sm80Bwd {
                tile_m,
                tile_n,
                num_warps,
                q_stages,
                do_stages,
                atom_layout_m_sdp: atoms(tile_m, &[tile_n], group)?,
                atom_layout_n_dkv: atoms_dkv(
                    (tile_m, tile_n),
                    (head_dim, head_dim_v),
                    group,
                    head_dim - dq_first,
                )?,
                atom_layout_m_dq,
                dq_first,
                blocks_per_sm: 1,
                tile_order,
                deterministic,
            });
            Some(KernelSpec { dtype, head_dim, head_dim_v, mask, softcap, kernel })
        })
        .filter(move |spec| smem_of(spec).total <= arch.limits().smem_per_block)
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Family, Mask, Pass};

    use super::*;
    use crate::plan::{PlanOptions, explore, plan};

    fn options(deterministic: bool) -> PlanOptions {
        PlanOptions {
            family: Some(Family::Sm80),
            pass: Pass::Backward { deterministic },
            ..PlanOptions::default()
        }
    }

    fn best(head_dim: usize, arch: Arch, deterministic: bool) -> KernelSpec {
        let problem = Problem::square(2, 8192, 16, head_dim, Mask::CAUSAL, Dtype::Bf16);
        plan(&problem, arch, &options(deterministic)).expect("plans").swap_remove(0).spec
    }

    #[test]
    fn every_head_dim_has_a_plan_wherever_the_kernel_runs() {
        for arch in [Arch::Sm80, Arch::Sm86, Arch::Sm89, Arch::Sm90, Arch::Sm100, Arch::Sm120] {
            for head_dim in [64, 96, 128, 192, 256] {
                for deterministic in [false, true] {
                    let spec = best(head_dim, arch, deterministic);
                    assert_eq!(spec.check(), Ok(()));
                    assert!(smem_of(&spec).total <= arch.limits().smem_per_block, "{spec}");
                }
            }
        }
    }

    #[test]
    fn the_tiles_measured_fastest_come_first() {
        assert_eq!(best(128, Arch::Sm90, false).tile(), (64, 128));
        assert_eq!(best(64, Arch::Sm90, false).tile(), (128, 128));
    }

    #[test]
    fn what_spills_on_9_0_is_no_plan_there() {
        let problem = Problem::square(8, 2048, 32, 64, Mask::CAUSAL, Dtype::Bf16);
        let reason = |arch| {
            let set = explore(&problem, arch, &options(false)).expect("plans");
            let of_it = |spec: &KernelSpec| spec.to_string().contains("-128x128-w8-s22-");
            let planned = set.plans.iter().any(|plan| of_it(&plan.spec));
            let rejected = set.rejected.iter().find(|rejected| of_it(&rejected.spec));
            (planned, rejected.map(|rejected| rejected.reason.kind()))
        };
        assert_eq!(reason(Arch::Sm90), (false, Some("spills")));
        assert_eq!(reason(Arch::Sm80), (true, None));
    }

    #[test]
    fn both_halves_share_dq() {
        assert_eq!(share_dq(64, 128, 4), Some((64, 2)));
        assert_eq!(share_dq(64, 96, 4), Some((48, 4)));
        assert_eq!(share_dq(64, 16, 4), Some((0, 4)), "one block of 16 columns cannot be shared");
        assert_eq!(share_dq(32, 96, 4), Some((32, 2)), "two warps across want blocks of 32");
    }

    #[test]
    fn warps_are_cut_into_squares() {
        assert_eq!(atoms(64, &[128], 8), Some(2));
        assert_eq!(atoms_dkv((64, 64), (256, 256), 4, 128), Some(2), "one row of warps reads less");
        assert_eq!(atoms_dkv((64, 128), (128, 128), 4, 64), Some(2));
        assert_eq!(atoms(64, &[128], 4), Some(2), "as little as one row of warps, and fewer rows of each");
        assert_eq!(atoms(128, &[128, 64], 8), Some(4));
        assert_eq!(atoms(64, &[96], 8), Some(4), "three blocks of 16 a warp, not one and a half");
        assert_eq!(atoms(32, &[32], 8), None, "four blocks for eight warps");
    }
}
