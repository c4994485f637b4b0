//! The SM80-class backward (mma.sync, cp.async, ldmatrix): its shared memory, its registers, and what is tried.
//!
//! It runs on every architecture from 8.0 on; what fits differs by the SM's shared memory.

use fa_core::spec::TileOrder;
use fa_core::{Arch, ArchLimits, Kernel, KernelSpec, MaskKind, Problem, Sm80Bwd};

use crate::occupancy::{WARP, register_ceiling};
use crate::smem::SmemPlan;

use super::BackwardOptions;
use super::account::{Registers, smem as smem_of};

/// Queries per step that are tried.
pub const TILE_M: [u32; 3] = [32, 64, 128];

/// Keys of a block that are tried.
pub const TILE_N: [u32; 3] = [32, 64, 128];

/// Warps that are tried.
pub const WARPS: [u32; 2] = [4, 8];

/// Q and dO buffers that are tried.
pub const STAGES: [(u32, u32); 3] = [(2, 2), (2, 1), (1, 1)];

/// Registers of a thread for operands, the statistics of its rows, addresses and loop state.
const OVERHEAD: u32 = 60;

/// More of them beside S and dP where blocks take turns.
const TURNS: u32 = 8;

/// The shared memory of a block. T is the 16-bit type; tiles are swizzled panels of at most 64 columns:
///
/// - `q` `[q_stages][tile_m, hd]` T, `do` `[do_stages][tile_m, hdv]` T, `k` `[tile_n, hd]` T, `v` `[tile_n, hdv]` T;
/// - `p` and `ds` `[tile_m, tile_n]` T;
/// - `tile` and `range`: six and four 32-bit words that say what the block is to do.
pub fn smem(spec: &KernelSpec, kernel: &Sm80Bwd) -> SmemPlan {
    let Sm80Bwd { tile_m, tile_n, .. } = *kernel;
    let (hd, hdv) = (spec.head_dim, spec.head_dim_v);
    let align = crate::sm80::ALIGN;
    let mut plan = SmemPlan::default();
    plan.push("q", kernel.q_stages * tile_m * hd * 2, align);
    plan.push("do", kernel.do_stages * tile_m * hdv * 2, align);
    plan.push("k", tile_n * hd * 2, align);
    plan.push("v", tile_n * hdv * 2, align);
    plan.push("p", tile_m * tile_n * 2, align);
    plan.push("ds", tile_m * tile_n * 2, align);
    plan.push("tile", 6 * 4, 4);
    plan.push("range", 4 * 4, 4);
    plan.round_up(align)
}

/// Predicted registers of a thread, and the ceiling that the launch bounds give the compiler: dK and dV all the time, S and dP
/// together or dQ beside them.
pub fn registers(spec: &KernelSpec, kernel: &Sm80Bwd, limits: &ArchLimits) -> Registers {
    let threads = WARP * kernel.num_warps;
    let s = 2 * kernel.tile_m * kernel.tile_n / threads;
    let o = kernel.tile_n * (spec.head_dim + spec.head_dim_v) / threads;
    let q = kernel.tile_m * spec.head_dim / threads;
    let other = OVERHEAD + if kernel.deterministic { TURNS } else { 0 };
    Registers {
        s,
        p: 0,
        o,
        q,
        other,
        total: o + (s + other).max(q + OVERHEAD),
        limit: register_ceiling(limits, threads, kernel.blocks_per_sm),
        setmaxnreg: None,
    }
}

/// 16 x 16 blocks of operands that all warps read in a contraction step of a `[rows, columns]` product, `atoms` of them along its rows;
/// `None` where a warp would not get whole ones.
fn blocks_read(rows: u32, columns: u32, warps: u32, atoms: u32) -> Option<u32> {
    let across = warps / atoms;
    (rows.is_multiple_of(16 * atoms) && columns.is_multiple_of(16 * across))
        .then(|| (rows * across + columns * atoms) / 16)
}

/// The warps along the rows that read least.
fn atoms(rows: u32, columns: &[u32], warps: u32) -> Option<u32> {
    (0..=warps.ilog2())
        .map(|power| 1 << power)
        .filter_map(|atoms| {
            let reads = columns
                .iter()
                .map(|&columns| blocks_read(rows, columns, warps, atoms))
                .sum::<Option<u32>>()?;
            Some((reads, atoms))
        })
        .min()
        .map(|(_, atoms)| atoms)
}

/// Bytes of shared memory that a step's products read.
pub(crate) fn bytes_read(spec: &KernelSpec, kernel: &Sm80Bwd) -> u32 {
    let Sm80Bwd { tile_m, tile_n, num_warps, .. } = *kernel;
    let (hd, hdv) = (spec.head_dim, spec.head_dim_v);
    let reads = |rows, columns, contraction, atoms| {
        blocks_read(rows, columns, num_warps, atoms).map_or(0, |blocks| blocks * contraction / 16 * 512)
    };
    reads(tile_m, tile_n, hd + hdv, kernel.atom_layout_m_sdp)
        + reads(tile_n, hd, tile_m, kernel.atom_layout_n_dkv)
        + reads(tile_n, hdv, tile_m, kernel.atom_layout_n_dkv)
        + reads(tile_m, hd, tile_n, kernel.atom_layout_m_dq)
}

/// Every SM80-class backward that is tried for `problem` on `arch`: tiles, warps and buffers that fit, each with the warp layouts that
/// read least.
pub fn candidates(
    problem: &Problem,
    head_dim: u32,
    head_dim_v: u32,
    arch: Arch,
    options: BackwardOptions,
) -> impl Iterator<Item = KernelSpec> {
    let mask = MaskKind::of(&problem.mask);
    let tile_order = if mask == MaskKind::Full || options.deterministic {
        TileOrder::Natural
    } else {
        TileOrder::LongestFirst
    };
    let (dtype, softcap) = (problem.dtype, problem.softcap.is_some());
    TILE_M
        .into_iter()
        .flat_map(|tile_m| TILE_N.into_iter().map(move |tile_n| (tile_m, tile_n)))
        .flat_map(|tile| WARPS.into_iter().map(move |warps| (tile, warps)))
        .flat_map(|block| STAGES.into_iter().map(move |stages| (block, stages)))
        .filter_map(move |(((tile_m, tile_n), num_warps), (q_stages, do_stages))| {
            let kernel = Kernel::Sm80Bwd(Sm80Bwd {
                tile_m,
                tile_n,
                num_warps,
                q_stages,
                do_stages,
                atom_layout_m_sdp: atoms(tile_m, &[tile_n], num_warps)?,
                atom_layout_n_dkv: atoms(tile_n, &[head_dim, head_dim_v], num_warps)?,
                atom_layout_m_dq: atoms(tile_m, &[head_dim], num_warps)?,
                blocks_per_sm: 1,
                tile_order,
                deterministic: options.deterministic,
            });
            Some(KernelSpec { dtype, head_dim, head_dim_v, mask, softcap, kernel })
        })
        .filter(move |spec| smem_of(spec).total <= arch.limits().smem_per_block)
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Mask};

    use super::super::{Family, PlanOptions, plan};
    use super::*;

    fn best(head_dim: usize, arch: Arch, deterministic: bool) -> KernelSpec {
        let problem = Problem::square(2, 8192, 16, head_dim, Mask::CAUSAL, Dtype::Bf16);
        let options = PlanOptions {
            family: Some(Family::Sm80),
            backward: Some(BackwardOptions { deterministic }),
            ..PlanOptions::default()
        };
        plan(&problem, arch, &options).expect("plans").swap_remove(0).spec
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
    fn warps_are_cut_into_squares() {
        assert_eq!(atoms(64, &[128], 8), Some(2));
        assert_eq!(atoms(128, &[128, 64], 8), Some(4));
        assert_eq!(atoms(64, &[96], 8), Some(4), "three blocks of 16 a warp, not one and a half");
        assert_eq!(atoms(32, &[32], 8), None, "four blocks for eight warps");
    }
}
