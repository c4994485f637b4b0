//! The SM90 forwards for wide heads that are tried for a problem.

use fa_core::spec::TileOrder;
use fa_core::{Arch, Division, KernelSpec, MaskKind, Problem, Reads, Sm90Wide};

use super::account::smem;
use crate::account::pages::gathers;
use crate::kernels::{packings, split_choices};

/// Query rows of a tile, and keys where threads copy the rows of pages.
const TILE: u32 = 64;

/// Keys of a step, and whether the next step's S is issued before its P V.
const STEPS: [(u32, bool); 3] = [(64, false), (64, true), (32, true)];

/// Those of latents, of which overlapping products hold two tiles: on an H200 they are slower, by 28 % of 128
/// heads and 17 % of 16. In codes the first is tried: shorter steps read all of Q for fewer keys (NB-209),
/// but have room for what programs read.
const LATENT_STEPS: [(u32, bool); 2] = [(64, false), (32, false)];

/// The least extent of latents: a panel for each warp that loads pages.
const LEAST_LATENT: u32 = 256;

/// The most buffers of keys that are tried: more are not in flight at once.
const MOST_STAGES: u32 = 4;

/// Every kernel that is tried for `problem`, in order: steps, heads of a group packed or not, keys in one
/// piece or shared by several CTAs.
pub fn candidates(
    problem: &Problem,
    head_dim: u32,
    head_dim_v: u32,
    division: Division,
) -> impl Iterator<Item = KernelSpec> {
    let problem = *problem;
    // Of latent rows, the further columns of K have panels of their own behind V's.
    let head_dims = if problem.latent {
        let head_dim_v = head_dim_v.max(LEAST_LATENT);
        [head_dim_v + (problem.head_dim_k() as u32).next_multiple_of(64), head_dim_v]
    } else {
        [head_dim, head_dim_v]
    };
    let parts = head_parts(problem.group_size());
    let tiled = problem.with_heads_kv(problem.heads_kv.saturating_mul(parts as usize));
    let codes = problem.types.kv.is_code();
    let alike = MaskKind::of(&problem.mask) == MaskKind::Full
        && !Reads::of(&problem).varied
        && !problem.score.kind().masks();
    let has_program = problem.score.program.is_some();
    let steps = match (problem.latent, codes && !has_program) {
        (true, true) => &LATENT_STEPS[..1],
        (true, false) => &LATENT_STEPS,
        (false, _) => &STEPS[..],
    };
    steps.iter().flat_map(move |&(tile_n, overlap)| {
        packings(&tiled, TILE, division).iter().flat_map(move |&pack_gqa| {
            let counted = if pack_gqa { tiled } else { problem };
            split_choices(&counted, TILE, tile_n, pack_gqa, division).iter().filter_map(move |&split| {
                let kernel = Sm90Wide {
                    tile_n,
                    latent: problem.latent,
                    overlap,
                    tile_order: if alike { TileOrder::Natural } else { TileOrder::LongestFirst },
                    pack_gqa,
                    head_parts: if pack_gqa { parts } else { 1 },
                    gather: !codes && gathers(&problem, tile_n, (head_dims[0], head_dims[1])),
                    ..Sm90Wide::default()
                };
                let copies = kernel.gather && tile_n < TILE;
                let of = |kernel: Sm90Wide| KernelSpec {
                    split,
                    ..KernelSpec::for_problem(&problem, head_dims, kernel)
                };
                let fits = |kv_stages: &u32| {
                    let kernel = Sm90Wide { kv_stages: *kv_stages, ..kernel.clone() };
                    smem(&of(kernel.clone()), &kernel).total <= Arch::Sm90.limits().smem_per_block
                };
                let kv_stages = (1..=MOST_STAGES).rev().find(fits).unwrap_or(1);
                (!copies).then(|| of(Sm90Wide { kv_stages, ..kernel.clone() }))
            })
        })
    })
}

/// The fewest equal parts of `group` heads of which each fits a tile.
fn head_parts(group: usize) -> u32 {
    let fits = |parts: &usize| group.is_multiple_of(*parts) && group / parts <= TILE as usize;
    (1..=group.max(1)).find(fits).and_then(|parts| u32::try_from(parts).ok()).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_divided_into_equal_parts_that_fit() {
        for (group, parts) in [(1, 1), (16, 1), (64, 1), (126, 2), (128, 2), (96, 2), (130, 5), (67, 67)] {
            assert_eq!(head_parts(group), parts, "{group}");
        }
    }
}
