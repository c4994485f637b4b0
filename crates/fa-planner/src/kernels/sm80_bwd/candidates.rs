//! The SM80-class backwards that are tried for a problem, as far as they fit the SM's shared memory.

use std::cmp::Reverse;

use fa_core::{Arch, Kernel, KernelSpec, Problem, Sm80Bwd};

use crate::occupancy::WARP;

use crate::kernels::backward_order;

use super::account::{blocks_read, smem};

/// Queries per step that are tried.
pub const TILE_M: [u32; 3] = [32, 64, 128];

/// Keys of a CTA that are tried.
pub const TILE_N: [u32; 3] = [32, 64, 128];

/// Warps that are tried.
pub const WARPS: [u32; 2] = [4, 8];

/// Q and dO buffers that are tried. Where two are predicted alike the first is chosen: (3, 1) is faster than
/// (3, 2) by 1.4 % in the mean of 64 pairs (NB-075, NB-085).
pub const STAGES: [(u32, u32); 4] = [(3, 1), (3, 2), (2, 2), (2, 1)];

/// The number of warps along the rows for which shared-memory reads are least; of equals the largest, which
/// leaves a warp the fewest rows.
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

/// Accumulators of a thread (dK and its part of dQ) above which registers are left for two fragments of 16
/// keys at most.
const MANY_ACCUMULATORS: u32 = 176;

/// The number of warps along the keys in dK and dV: the one that reads least, or, where a thread has many
/// accumulators, one that leaves a warp few keys.
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

/// The split of dQ between the two halves of the warps, as even as fragments of 16 columns allow: columns of
/// the first half, and warps along the rows.
fn share_dq(tile_m: u32, head_dim: u32, group: u32) -> Option<(u32, u32)> {
    [head_dim / 32 * 16, head_dim / 64 * 32, 0].into_iter().find_map(|first| {
        let columns = [head_dim - first, first];
        Some((first, atoms(tile_m, &columns[..if first > 0 { 2 } else { 1 }], group)?))
    })
}

/// Every SM80-class backward that is tried for `problem` on `arch`: the tiles, warps and buffers that fit its
/// shared memory, each with the warp layouts that read least.
pub fn candidates(
    problem: &Problem,
    head_dim: u32,
    head_dim_v: u32,
    arch: Arch,
    deterministic: bool,
) -> impl Iterator<Item = KernelSpec> {
    let tile_order = backward_order(problem, deterministic);
    let problem = *problem;
    TILE_M
        .into_iter()
        .flat_map(|tile_m| TILE_N.into_iter().map(move |tile_n| (tile_m, tile_n)))
        .flat_map(|tile| WARPS.into_iter().map(move |warps| (tile, warps)))
        .flat_map(|block| STAGES.into_iter().map(move |stages| (block, stages)))
        .filter_map(move |(((tile_m, tile_n), num_warps), (q_stages, do_stages))| {
            let group = num_warps / 2;
            let (dq_first, atom_layout_m_dq) = share_dq(tile_m, head_dim, group)?;
            let kernel = Sm80Bwd {
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
            };
            Some(KernelSpec::for_problem(&problem, [head_dim, head_dim_v], kernel))
        })
        .filter(move |spec| {
            let Kernel::Sm80Bwd(kernel) = &spec.kernel else { return false };
            smem(spec, kernel).total <= arch.limits().smem_per_block
        })
}

#[cfg(test)]
mod tests {
    use super::*;

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
