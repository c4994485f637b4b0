//! The time of the SM100 forward. The constants are assumptions: the kernel was never run on a GPU.

use fa_core::{ArchLimits, MaskKind, Problem};

use crate::cost::constants::CostConstants;
use crate::cost::core::{KernelModel, Launch, overlap, resident_blocks};
use crate::cost::memory::Memory;
use crate::cost::predicted::Cost;
use crate::cost::scores::{f32_lanes, softmax_clocks};
use crate::work::{Queue, Work};

use super::account::Sm100Account;
use super::candidates::Q_ROWS;

/// Predicts the forward of `problem` by a shape that fits its GPU.
pub(super) fn predict(
    problem: &Problem,
    account: &Sm100Account,
    limits: &ArchLimits,
    constants: &CostConstants,
) -> Cost {
    let work = Work::of(problem, account.tile.tile_m(), account.tile.tile_n, false);
    cost(problem, account, &work, limits, constants)
}

/// The same with the tiles that `problem` is cut into.
pub(super) fn cost(
    problem: &Problem,
    account: &Sm100Account,
    work: &Work,
    limits: &ArchLimits,
    constants: &CostConstants,
) -> Cost {
    let (tile_m, tile_n) = (account.tile.tile_m(), account.tile.tile_n);
    let resident = resident_blocks(work.tiles, 1, limits);
    let (model, _) = model(account, problem, resident, limits, constants);
    let step = |on_sm: f64| self::model(account, problem, on_sm, limits, constants).1;
    Launch { problem, tile: (tile_m, tile_n), work, model, step, limits, constants }.cost(1)
}

/// The kernel with `resident` CTAs on an SM, and the clocks of a step, overlap and latency included.
fn model(
    account: &Sm100Account,
    problem: &Problem,
    resident: f64,
    limits: &ArchLimits,
    c: &CostConstants,
) -> (KernelModel, f64) {
    let tile = &account.tile;
    let [q_tiles, tile_n, hd, hdv] =
        [tile.q_tiles, tile.tile_n, tile.head_dim, tile.head_dim_v].map(f64::from);
    let rows = q_tiles * f64::from(Q_ROWS);
    let scores = rows * tile_n;
    let tensor = resident * 2.0 * scores * (hd + hdv) / limits.tensor_flops / c.tensor_efficiency;
    // Q K^T reads both operands from shared memory, P V only V; TMA writes K and V.
    let bytes = 2.0;
    let reads = rows * hd + q_tiles * tile_n * (hd + hdv);
    let smem = resident * (reads + tile_n * (hd + hdv)) * bytes / limits.smem_bytes;
    // Scores that do not fit the registers are read twice: once for the maximum, once for the exponentials.
    let passes = if account.softmax_chunk < tile.tile_n { 1.0 } else { 0.0 };
    let (cap_mufu, cap_ops) = if problem.score.softcap.is_some() { (1.0, c.softcap_ops) } else { (0.0, 0.0) };
    let ops = c.softmax_ops + c.sm100_poly * c.poly_ops + cap_ops + passes;
    let exp = resident * scores * softmax_clocks(limits, 1.0 - c.sm100_poly + cap_mufu, ops);
    let products = overlap([tensor, smem], 4.0);
    let in_turn = q_tiles * resident >= 2.0;
    let exponent = c.sm100_overlap[usize::from(in_turn)];
    let hidden = overlap([products, exp], exponent);
    // A ring of fewer than three buffers cannot prefetch while K and V of a step are in use.
    let wait = if tile.kv_stages < 3 { 0.5 * c.load_latency / resident } else { 0.0 };
    let exposed = c.sm100_step + wait;
    let model = KernelModel {
        head_dim: tile.head_dim,
        head_dim_v: tile.head_dim_v,
        sharing: 1.0,
        queue: if MaskKind::of(&problem.mask) == MaskKind::Full { Queue::Fixed } else { Queue::LongestFirst },
        resident,
        tensor,
        exp,
        smem,
        mask: resident * scores * c.mask_ops / f32_lanes(limits),
        exposed,
        tile: c.sm100_tile + products + exp - hidden,
        second: 0.0,
        start: 0.0,
        first: 0.0,
        rows,
        in_clusters: false,
        memory: Memory::Throttled,
    };
    (model, hidden + exposed)
}
