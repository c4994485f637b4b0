//! The SM80-class forwards that are tried for a problem.

use fa_core::{Division, KernelSpec, MaskKind, Problem, Sm80Fwd};

use crate::kernels::{has_idle_warps, packings, split_choices};

/// Query rows and warps of a CTA that are tried: 16 or 32 rows per warp.
pub const TILE_M: [(u32, u32); 4] = [(64, 4), (128, 4), (128, 8), (256, 8)];

/// Keys per step that are tried.
pub const TILE_N: [u32; 7] = [32, 48, 64, 80, 96, 112, 128];

/// K/V buffers in flight that are tried. Where as many CTAs fit an SM with three as with two, which the model
/// predicts alike, three are as fast in long problems and up to 9 % faster in tiles of a few steps (NB-097).
pub const STAGES: [u32; 3] = [1, 3, 2];

/// Resident CTAs per SM that are tried, without a mask.
pub const BLOCKS_PER_SM: [u32; 4] = [1, 2, 3, 4];

/// The same of four warps with 128 rows under a mask. The compiler has 255 registers for one CTA as for two,
/// and under a causal mask the promise of two is 0.7 % faster in the mean of 64 pairs, of 64 rows slower in
/// each of five (NB-097, NB-138).
const MASKED_BLOCKS_PER_SM: [u32; 4] = [2, 1, 3, 4];

/// Rows of a CTA whose warps divide the keys, in order.
const DIVIDED_TILE_M: [u32; 2] = [16, 32];

/// Warps of such a CTA, keys of each in a step, stages and CTAs per SM that are tried. Eight warps, and more
/// CTAs than these, were slower (NB-176).
const DIVIDED: [(u32, u32, u32, u32); 8] = [
    (4, 32, 3, 2),
    (4, 32, 2, 2),
    (4, 32, 2, 3),
    (4, 32, 3, 3),
    (4, 32, 3, 4),
    (4, 16, 3, 2),
    (4, 16, 3, 3),
    (4, 16, 2, 2),
];

/// Every SM80-class forward that is tried for `problem`, with all of the kernel's optimisation steps on.
///
/// In order: those whose warps divide the keys, for a few rows over K and V in codes, then rows and warps,
/// keys per step, stages, Q in registers or not, CTAs per SM, heads of a group packed or not, keys in one
/// piece or shared by several CTAs.
pub fn candidates(
    problem: &Problem,
    head_dim: u32,
    head_dim_v: u32,
    division: Division,
) -> impl Iterator<Item = KernelSpec> {
    divided(problem, [head_dim, head_dim_v], division).chain(whole(problem, head_dim, head_dim_v, division))
}

/// Forwards whose warps divide the keys, where the rows of each K/V head fit one tile of them.
fn divided(
    problem: &Problem,
    head_dims: [u32; 2],
    division: Division,
) -> impl Iterator<Item = KernelSpec> + use<> {
    let problem = *problem;
    let mask = MaskKind::of(&problem.mask);
    let group = problem.group_size().max(1);
    let pack_gqa = group > 1 && division.pack_gqa != Some(false);
    let rows = problem.lengths.max_q().max(1) * if pack_gqa { group } else { 1 };
    // Lanes read the codes of two contraction steps, or of four of 4 bits.
    let whole = 32 * problem.types.kv.per_element() as u32;
    let is_served = problem.types.kv.is_code() && head_dims.iter().all(|dim| dim % whole == 0);
    let tile_m = DIVIDED_TILE_M.into_iter().find(|&tile_m| is_served && rows <= tile_m as usize);
    tile_m.into_iter().flat_map(move |tile_m| {
        let both = [true, false].into_iter();
        both.flat_map(|q_in_regs| DIVIDED.into_iter().map(move |own| (q_in_regs, own))).flat_map(
            move |(q_in_regs, (num_warps, keys, stages, blocks_per_sm))| {
                let tile_n = num_warps * keys;
                let choices = split_choices(&problem, tile_m, tile_n, pack_gqa, division);
                choices.iter().map(move |&split| {
                    let kernel = Sm80Fwd {
                        tile_m,
                        tile_n,
                        num_warps,
                        stages,
                        q_in_regs,
                        blocks_per_sm,
                        reverse_blocks: mask != MaskKind::Full,
                        pack_gqa,
                        divide_keys: true,
                        ..Sm80Fwd::default()
                    };
                    KernelSpec { split, ..KernelSpec::for_problem(&problem, head_dims, kernel) }
                })
            },
        )
    })
}

/// Forwards whose warps have rows of their own.
fn whole(
    problem: &Problem,
    head_dim: u32,
    head_dim_v: u32,
    division: Division,
) -> impl Iterator<Item = KernelSpec> {
    let mask = MaskKind::of(&problem.mask);
    let problem = *problem;
    TILE_M
        .into_iter()
        .flat_map(|rows| TILE_N.into_iter().map(move |tile_n| (rows, tile_n)))
        .flat_map(|tile| STAGES.into_iter().map(move |stages| (tile, stages)))
        .flat_map(|pipe| [false, true].into_iter().map(move |q_in_regs| (pipe, q_in_regs)))
        .flat_map(move |block| {
            let (((rows, _), _), _) = block;
            let masked = rows == (128, 4) && mask != MaskKind::Full;
            let counts = if masked { MASKED_BLOCKS_PER_SM } else { BLOCKS_PER_SM };
            counts.into_iter().map(move |blocks| (block, blocks))
        })
        .flat_map(move |candidate| {
            let ((((rows, tile_n), _), _), _) = candidate;
            // Whole tiles of one head stay in question: packed rows are gathered.
            let packings = packings(&problem, rows.0, division);
            let is_open = division.pack_gqa.is_none() && packings.contains(&true);
            let both: &[bool] = if is_open { &[false, true] } else { packings };
            let has_rows = move |pack_gqa: &&bool| !has_idle_warps(&problem, rows.0, **pack_gqa);
            both.iter().filter(has_rows).flat_map(move |&pack_gqa| {
                let choices = split_choices(&problem, rows.0, tile_n, pack_gqa, division);
                choices.iter().map(move |&split| (candidate, pack_gqa, split))
            })
        })
        .map(move |(candidate, pack_gqa, split)| {
            let (((((tile_m, num_warps), tile_n), stages), q_in_regs), blocks_per_sm) = candidate;
            let kernel = Sm80Fwd {
                tile_m,
                tile_n,
                num_warps,
                stages,
                q_in_regs,
                blocks_per_sm,
                swizzle: true,
                ldmatrix: true,
                exp2: true,
                fast_math: true,
                loop_split: true,
                reverse_blocks: mask != MaskKind::Full,
                pack_gqa,
                exact_div: false,
                divide_keys: false,
            };
            KernelSpec { split, ..KernelSpec::for_problem(&problem, [head_dim, head_dim_v], kernel) }
        })
}
