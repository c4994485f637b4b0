//! How many CTAs share the query heads of a K/V head in the backward: launch and cost model take the same
//! number.

use fa_core::Problem;

/// Parts that the query heads of a K/V head are split into: as few as fill `sms` SMs with tiles of `tile_n`
/// keys.
///
/// 1 for a deterministic backward, whose sums have a fixed order, and for empty problems.
pub fn head_splits(problem: &Problem, tile_n: u32, deterministic: bool, sms: u32) -> usize {
    let group = problem.group_size().max(1);
    let tiles = problem
        .seqlen_k
        .div_ceil(tile_n as usize)
        .saturating_mul(problem.heads_kv)
        .saturating_mul(problem.batch);
    if deterministic || tiles == 0 || problem.seqlen_q == 0 {
        return 1;
    }
    (sms as usize).div_ceil(tiles).clamp(1, group)
}
