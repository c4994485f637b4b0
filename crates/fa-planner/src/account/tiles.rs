//! The number of tiles of queries that a problem is cut into.

use fa_core::Problem;
use fa_core::spec::tile_queries;

/// Tiles of `rows` query rows over all heads and sequences, each with all of its keys; with `packed` the
/// heads of a group share a tile. Saturates.
pub(crate) fn query_tiles(problem: &Problem, rows: u32, packed: bool) -> usize {
    let heads = if packed { problem.heads_kv } else { problem.heads_q };
    let queries = tile_queries(rows, packed, problem.group_size()).max(1);
    let of_head = problem.lengths.max_q().div_ceil(queries);
    of_head.saturating_mul(heads).saturating_mul(problem.lengths.sequences())
}
