//! The kernels, one folder each, with the same files in each:
//!
//! - `candidates` enumerates the configurations that are tried for a problem, without judging them;
//! - `account` adds up shared memory and registers;
//! - `cost` predicts the time;
//! - `timeline` draws the order of its main loop.
//!
//! A folder implements `planned::PlannedKernel` with these; the rest of the planner asks through that trait
//! and names no kernel.

pub(crate) mod folder;
pub(crate) mod planned;
pub mod sm100_fwd;
pub mod sm80_bwd;
pub mod sm80_fwd;
pub mod sm90_bwd;
pub mod sm90_fwd;
pub mod sm90_fwd_fp8;
pub mod sm90_wide;

pub use planned::unbound;

use fa_core::program::{Ahead, AheadForm, Deps};
use fa_core::spec::{TileOrder, tile_queries};
use fa_core::{Division, KernelSpec, MaskKind, Problem};

/// Tiles up to which splits of the keys are tried where a sequence's queries fit a tile (decode): some four
/// for each SM of a large GPU. More tiles fill it.
const SPLIT_TILES: usize = 512;

/// The same where they need several tiles, as a prefill chunk does: half of the SMs of a large GPU. 16 to 64
/// tiles take 1.1 to 4.2 times as long without splits (NB-166); 96 and more, which leave few SMs idle, lost a
/// fifth by them (NB-058).
const SPLIT_TILES_OF_CHUNKS: usize = 66;

/// The same of latents, whose heads are a tile or more for each token, with few tokens of a sequence: all SMs
/// of a large GPU. Two tokens of 24 sequences with up to 5,000 keys, 96 tiles, take 152 us whole (the longest
/// 141) and 86 in parts; 160 tiles of 40 sequences 125 and 148 (NB-224).
const SPLIT_TILES_OF_LATENTS: usize = 132;
const FEW_TOKENS: usize = 8;

/// Whether forwards with tiles of `tile_m` rows and `tile_n` keys are tried in which several CTAs share a
/// tile's keys (`split`): with and without where there are few tiles, and they take more than one step.
///
/// A caller's `division` leaves no choice. Where single tiles have their keys counted on the device, splits
/// come first and win ties: at any time one sequence may have most of the keys, and only splits then keep the
/// SMs busy. (Chunks would pay for the combine kernel where the model divides nothing.) Chunks of packed keys
/// are not split: a batch of one such sequence has the bits of a dense one, which the parts that the device
/// chooses for each tile would not give.
fn split_choices(
    problem: &Problem,
    tile_m: u32,
    tile_n: u32,
    packed: bool,
    division: Division,
) -> &'static [bool] {
    let lengths = &problem.lengths;
    let group = if packed { problem.group_size().max(1) } else { 1 };
    let queries = tile_queries(tile_m, packed, group).max(1);
    let tiles = lengths.most_tiles_q(queries as u32).saturating_mul(problem.heads_q / group);
    let is_chunk = lengths.max_q() > queries;
    let most = match is_chunk {
        false => SPLIT_TILES,
        true if lengths.k().is_packed() => 0,
        true if problem.latent && lengths.max_q() <= FEW_TOKENS => SPLIT_TILES_OF_LATENTS,
        true => SPLIT_TILES_OF_CHUNKS,
    };
    let steps = lengths.max_k().div_ceil(tile_n.max(1) as usize);
    match division.splits {
        Some(parts) if steps > 1 && parts > 1 => return &[true],
        Some(_) => return &[false],
        None => {}
    }
    if steps <= 1 || tiles > most {
        &[false]
    } else if !lengths.k().is_uniform() && !is_chunk {
        &[true, false]
    } else {
        &[false, true]
    }
}

/// The order of the tiles of a backward of `problem`: longest first where lengths differ, also by a program's
/// mask, and natural for a deterministic backward, whose tiles add to dQ in the order of their numbers.
fn backward_order(problem: &Problem, deterministic: bool) -> TileOrder {
    let alike = problem.mask.is_full() && !problem.score.kind().masks();
    if alike || deterministic { TileOrder::Natural } else { TileOrder::LongestFirst }
}

/// Whether a tile of `tile_m` rows, a multiple of 64, has no queries in its last 64 in any sequence, where a
/// narrower one holds as many: an SM90 warpgroup, or half the warps of an SM80-class CTA, would be idle.
/// Narrower tiles do as well with fewer registers (NB-085), and what the model knows of warpgroups side by
/// side does not hold of one alone.
fn has_idle_warps(problem: &Problem, tile_m: u32, packed: bool) -> bool {
    let group = if packed { problem.group_size().max(1) } else { 1 };
    let rows = problem.lengths.max_q().max(1).saturating_mul(group);
    (64..tile_m as usize).step_by(64).any(|narrower| rows <= narrower)
}

/// Whether a program reads an element once for the pairs of one distance, which rows of one head have.
fn shares_distances(problem: &Problem) -> bool {
    let ahead = problem.score.program.and_then(|program| program.ahead());
    ahead.is_some_and(|ahead| matches!(ahead.form, AheadForm::Distances { .. }))
}

/// Whether a program finds numbers of the query head for each tile of keys, as ALiBi's slopes. A thread whose
/// two rows are of two heads finds twice as many, after a division by the group (NB-214).
fn finds_heads(problem: &Problem) -> bool {
    problem.score.program.is_some_and(|program| {
        let of_head = program.score().is_some_and(|score| program.deps(score).has(Deps::HEAD));
        of_head && program.ahead().is_none()
    })
}

/// Whether a program reads an array whose elements the SM90 class copies to shared memory a tile ahead.
fn copies_ahead(spec: &KernelSpec) -> bool {
    spec.score.program.and_then(|program| program.ahead()).is_some_and(Ahead::is_copied)
}

/// Whether to pack the query heads of a K/V head into the rows of a tile (`pack_gqa`). Packing pays where it
/// needs fewer tiles. In a window both ways are tried: a packed tile has fewer queries, which see fewer keys.
/// A packed tile holds whole groups: TMA loads a box of (group, queries), and rows behind it stay idle.
/// A caller's `division` leaves no choice.
fn packings(problem: &Problem, tile_m: u32, division: Division) -> &'static [bool] {
    let group = problem.group_size();
    let packed = tile_queries(tile_m, true, group);
    let tiles = |queries: usize| problem.lengths.mean_q().div_ceil(queries);
    if group <= 1 {
        return &[false];
    }
    match division.pack_gqa {
        Some(true) if packed == 0 => return &[],
        Some(true) => return &[true],
        Some(false) => return &[false],
        None => {}
    }
    if packed == 0 || (shares_distances(problem) && problem.lengths.mean_q() >= tile_m as usize) {
        &[false]
    } else if MaskKind::of(&problem.mask) == MaskKind::Window {
        &[false, true]
    } else if finds_heads(problem) && 16 * tiles(packed) > 15 * group * tiles(tile_m as usize) {
        // Packing spares too few tiles.
        &[false]
    } else if tiles(packed) < group * tiles(tile_m as usize) {
        &[true]
    } else {
        &[false]
    }
}
