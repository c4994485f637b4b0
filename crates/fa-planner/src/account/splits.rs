//! How many CTAs share the query heads of a K/V head in the backward: a launch decision that the cost model knows.

use fa_core::Problem;

/// Query heads of a K/V head are divided into as few tiles as fill the GPU: how many parts.
///
/// 1 where the order of sums must not depend on it, and where there is nothing to sum.
pub fn head_splits(problem: &Problem, tile_n: u32, deterministic: bool, sms: u32) -> usize {
    let group = problem.group_size().max(1);
    let tiles = problem
        .lengths
        .max_k()
        .div_ceil(tile_n as usize)
        .saturating_mul(problem.heads_kv)
        .saturating_mul(problem.lengths.sequences());
    if deterministic || tiles == 0 || problem.lengths.max_q() == 0 {
        return 1;
    }
    (sms as usize).div_ceil(tiles).clamp(1, group)
}
