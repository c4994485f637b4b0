//! Clusters of CTAs that share the keys of a tile's rows and combine their results in shared memory, without
//! the combine kernel.

use fa_core::{Kernel, KernelSpec, Problem};

use crate::account::tiles::query_tiles;

/// The most CTAs of a cluster on every GPU that has clusters (CUDA C++ Programming Guide, "Thread Block
/// Clusters").
pub const LARGEST_CLUSTER: usize = 8;

/// Columns between the rows of partial results in shared memory: `kPartialPadding` in
/// `sm90/fwd_combine.cuh`.
const PADDING: u32 = 8;

/// Parts from which a cluster is worth its time although their results still need the combine kernel: 96
/// parts by twelve clusters take 0.4 us less than 128 by none, 32 by 16 take longer (NB-164).
pub(crate) const MANY_PARTS: usize = 64;

/// Whether CTAs of `spec` can combine the parts of `problem`'s tiles in a cluster: SM90 forwards of equal
/// lengths and V of up to 128 columns (`kPartsInClusters` in `sm90/fwd_layout.cuh`), where the place of K and
/// V holds the results of a tile's rows.
pub fn combines_in_clusters(problem: &Problem, spec: &KernelSpec) -> bool {
    let Kernel::Sm90Fwd(kernel) = &spec.kernel else { return false };
    if !spec.split || spec.reads.varied || spec.head_dim_v > 128 {
        return false;
    }
    let of_query = if kernel.pack_gqa { problem.group_size() } else { 1 };
    let (tile_m, of_head) = (kernel.tile_m as usize, of_query.saturating_mul(problem.lengths.max_q()));
    let keys = kernel.kv_stages as usize * kernel.tile_n as usize;
    let room = keys.saturating_mul(((spec.head_dim + spec.head_dim_v) * spec.elem_bytes()) as usize);
    let row = 4 * (spec.head_dim_v + PADDING) as usize;
    of_head.min(tile_m).saturating_mul(row).saturating_add(4 * tile_m) <= room
}

/// CTAs of a cluster where `ctas` CTAs on `sms` SMs compute tiles in `parts` parts; 1 for no clusters. They
/// divide the parts of a tile evenly.
///
/// A cluster lies in one GPC, of which H100s have some with 16 SMs, some with 18 and some with fewer, so that
/// not all SMs have a place in clusters of more than two: 120 of 132 in clusters of 8, 102 in clusters of 6
/// (`cuOccupancyMaxActiveClusters` on one card). Three quarters of the SMs are counted on.
pub(crate) fn cluster_of(ctas: usize, parts: usize, sms: usize) -> usize {
    let fits = |cluster: &usize| {
        let places = if *cluster == 2 { sms } else { sms * 3 / 4 };
        parts.is_multiple_of(*cluster) && ctas <= places
    };
    match parts {
        0..=1 => 1,
        2..=LARGEST_CLUSTER => Some(parts).filter(fits).unwrap_or(1),
        MANY_PARTS.. => (LARGEST_CLUSTER / 2..=LARGEST_CLUSTER).rev().find(fits).unwrap_or(1),
        _ => 1,
    }
}

/// CTAs of a cluster that combine the parts of a tile's keys in shared memory, where each tile of `problem`
/// has `splits` of them; 1 where a combine kernel does it alone. With fewer than `splits` it combines the
/// results of clusters.
pub(crate) fn split_cluster(problem: &Problem, spec: &KernelSpec, sms: u32, splits: usize) -> usize {
    if !combines_in_clusters(problem, spec) {
        return 1;
    }
    let traits = spec.traits();
    let tiles = query_tiles(problem, traits.tile.0, traits.packs_gqa);
    cluster_of(tiles.saturating_mul(splits), splits, sms as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_have_places_and_divide_the_parts() {
        let of = |tiles: usize, parts: usize| cluster_of(tiles * parts, parts, 132);
        assert_eq!((of(8, 1), of(8, 8), of(16, 5), of(64, 2)), (1, 8, 5, 2));
        // No places: 16 tiles in 8 parts are 128 CTAs, 67 in two 134.
        assert_eq!((of(16, 8), of(67, 2)), (1, 1));
        // With the combine kernel after them, where there are many parts.
        assert_eq!((of(8, 12), of(4, 32), of(1, 96), of(1, 90), of(1, 128)), (1, 1, 8, 6, 1));
        for (ctas, parts, sms) in [(0, 0, 0), (usize::MAX, usize::MAX, 132), (7, 7, 1)] {
            assert_eq!(cluster_of(ctas, parts, sms), 1);
        }
    }
}
