//! The time of an SM80-class forward: mma.sync, whose operands pass through ldmatrix, in as many CTAs as an
//! SM holds.

use std::cell::OnceCell;

use fa_core::{ArchLimits, KernelSpec, MaskKind, Problem, Sm80Fwd};

use crate::account::combine::MAX_SPLITS;
use crate::cost::constants::CostConstants;
use crate::cost::core::{KernelModel, Launch, overlap, resident_blocks};
use crate::cost::kv_splits::{WAVES_GAIN, best_of};
use crate::cost::memory::Memory;
use crate::cost::predicted::{Bottleneck, Cost};
use crate::cost::scores::{f32_lanes, score_costs, softmax_clocks};
use crate::kernels::planned::{Forward, ForwardTime};
use crate::occupancy::{Occupancy, WARP};
use crate::work::Queue;

use super::account::{registers, smem};

impl ForwardTime for Sm80Fwd {
    /// With the keys of a tile divided, an SM has more CTAs than undivided tiles would fill it with, if that
    /// is faster by [`WAVES_GAIN`] (compute-bound rows were, by 17 to 24 %) and device memory is not the
    /// limit (decoding was slower, by 2 to 11 %; NB-173). CTAs whose warps divide the keys are as many as fit
    /// an SM: a few warps alone wait for one another's instructions (NB-176).
    fn best_split(&self, forward: &Forward<'_>, below: f64) -> Option<Cost> {
        let Forward { spec, work, limits, .. } = *forward;
        let blocks = blocks(spec, self, limits);
        let on_sm = |tiles: f64| resident_blocks(tiles, blocks, limits) as u32;
        let least = on_sm(work.tiles);
        let most = if spec.split { on_sm(work.tiles_in_parts(MAX_SPLITS)) } else { least };
        let best_of = |resident: u32, below: f64| {
            best_of(&launch(self, forward, f64::from(resident)), spec.split, below)
        };
        if self.divide_keys {
            return best_of(most, below);
        }
        let mut best = best_of(least, if most > least { below * WAVES_GAIN } else { below });
        for resident in least + 1..=most {
            let to_beat = best.as_ref().map_or(f64::INFINITY, |best| best.seconds / WAVES_GAIN);
            let is_better = |cost: &Cost| cost.seconds < to_beat && cost.bottleneck != Bottleneck::Hbm;
            best = best_of(resident, below.min(to_beat)).filter(is_better).or(best);
        }
        best
    }

    fn least_seconds(&self, forward: &Forward<'_>) -> f64 {
        let blocks = blocks(forward.spec, self, forward.limits);
        launch(self, forward, resident_blocks(forward.work.tiles, blocks, forward.limits)).at_least(1)
    }
}

/// The forward of `problem`, cut into the tiles of `kernel`, with so many CTAs on an SM.
fn launch<'a>(
    kernel: &'a Sm80Fwd,
    forward: &Forward<'a>,
    resident: f64,
) -> Launch<'a, impl Fn(f64) -> f64 + use<'a>> {
    let Forward { problem, spec, work, limits, constants } = *forward;
    let (model, full) = model(problem, spec, kernel, limits, constants, resident);
    // A last wave's emptier SMs have the same few numbers of CTAs for every number of splits.
    let fewer: [OnceCell<f64>; KNOWN] = [const { OnceCell::new() }; KNOWN];
    let step = move |on_sm: f64| {
        let clocks = || self::model(problem, spec, kernel, limits, constants, on_sm).1;
        if on_sm == resident {
            full
        } else {
            fewer.get(on_sm as usize).map_or_else(clocks, |known| *known.get_or_init(clocks))
        }
    };
    Launch { problem, tile: (kernel.tile_m, kernel.tile_n), work, model, step, limits, constants }
}

/// Numbers of CTAs on an SM, from 0, whose steps are remembered.
const KNOWN: usize = 9;

/// Keys of a step beyond which the compiler reads ahead more of K and V.
const WIDE: u32 = 88;

/// Registers of a thread that the compiler takes beyond the account where it is free to, in CTAs of four
/// warps: for operands read ahead, of Q and K the more the wider their rows, of K and V in steps of many
/// keys, and under a soft cap. Fitted to what it took for 205 kernels, not to their times (NB-138).
fn taken_freely(spec: &KernelSpec, k: &Sm80Fwd) -> u32 {
    if k.num_warps != 4 {
        return 0;
    }
    let of_output = k.tile_m * spec.head_dim_v / (WARP * k.num_warps);
    let capped = if spec.score.softcap { of_output.saturating_sub(16) / 4 } else { 0 };
    3 + spec.head_dim / 12 + 2 * k.tile_n.saturating_sub(WIDE) / 5 + capped
}

/// Clocks of an SM for each request to the L2 beyond one per 128 bytes, fitted to seeds 1 to 16 (NB-158).
const REQUEST_CLOCKS: f64 = 0.8;

/// Codes that an SM converts in a clock: some three integer instructions each, 64 of which it
/// issues.
const CODES_PER_CLOCK: f64 = 20.0;

/// The same where the warps divide the keys: in registers, between the products (NB-176).
const DIVIDED_CODES_PER_CLOCK: f64 = 28.0;

/// Requests to the L2 beyond one per 128 bytes by which cp.async copies a row of K or V: one for each block
/// of 128, 64 or 32 bytes, whichever the rows begin on. Where they begin in the middle of 32 bytes, as every
/// other head's do at head dims 72 and 88, it asks for both sectors of each two chunks (NB-157).
fn further_requests(row_bytes: usize) -> f64 {
    let block = 128.min(1 << row_bytes.trailing_zeros());
    let requests = match block {
        32.. => row_bytes as f64 / f64::from(block),
        _ => (row_bytes.div_ceil(32) + row_bytes.div_ceil(16)) as f64 / 2.0,
    };
    requests - row_bytes as f64 / 128.0
}

/// CTAs that an SM holds: those that the launch bounds promise, and more where there is room all the same.
fn blocks(spec: &KernelSpec, k: &Sm80Fwd, limits: &ArchLimits) -> u32 {
    let regs = registers(spec, k, limits);
    let smem = smem(spec, k).total;
    let taken = (regs.total + taken_freely(spec, k)).min(regs.limit);
    Occupancy::of(limits, smem, taken, WARP * k.num_warps).blocks().max(k.blocks_per_sm)
}

/// The kernel with `resident` CTAs on an SM, and the clocks of a step, overlap and latency included.
fn model(
    problem: &Problem,
    spec: &KernelSpec,
    k: &Sm80Fwd,
    limits: &ArchLimits,
    c: &CostConstants,
    resident: f64,
) -> (KernelModel, f64) {
    let [tile_m, tile_n, num_warps, stages] = [k.tile_m, k.tile_n, k.num_warps, k.stages].map(f64::from);
    let [hd, hdv] = [spec.head_dim, spec.head_dim_v].map(f64::from);
    let group = if k.pack_gqa { problem.group_size() } else { 1 };
    let scores = tile_m * tile_n;
    let warps_per_scheduler = resident * num_warps / 4.0;
    // A scheduler without a warp leaves its tensor core, special-function unit and lanes idle.
    let idle = (1.0 / warps_per_scheduler).max(1.0);
    let rate = limits.tensor_flops * c.mma_sync_rate * c.tensor_efficiency;
    // Warps without rows convert codes and do nothing else, unless all have all rows.
    let rows_of_warp = tile_m / num_warps;
    let used = tile_m.min((problem.lengths.mean_q() * group) as f64);
    let converts_alone = spec.reads_codes() && !k.divide_keys;
    let busy = if converts_alone { (used / rows_of_warp).ceil().max(1.0) / num_warps } else { 1.0 };
    let tensor = resident * idle * busy * 2.0 * scores * (hd + hdv) / rate;

    // Every warp reads all of K and V, and its rows of Q unless they are in registers; cp.async writes K and
    // V once. With the keys divided a warp reads its part of K and V as it is stored, and all rows of Q.
    let stored = problem.types.kv.bytes_per_number();
    let bytes = if k.divide_keys { stored } else { f64::from(spec.elem_bytes()) };
    let q_bytes = tile_m * hd * f64::from(spec.elem_bytes());
    let readers = if k.divide_keys { 1.0 } else { busy * num_warps };
    let q_reads = match (k.q_in_regs, k.divide_keys) {
        (true, _) => 0.0,
        (false, true) => num_warps * q_bytes,
        (false, false) => q_bytes,
    };
    let reads = readers * tile_n * (hd + hdv) * bytes + q_reads;
    let conflict = if k.swizzle { 1.0 } else { c.row_major_conflict };
    let loads = if k.ldmatrix { 1.0 } else { c.plain_loads };
    let writes = tile_n * (hd + hdv) * bytes;
    // Codes are written and read once more before they are converted.
    let staged = if converts_alone { 2.0 * tile_n * (hd + hdv) * stored } else { 0.0 };
    let smem = resident * (reads * conflict * loads + writes + staged) / limits.smem_bytes;

    let (cap_mufu, cap_ops) = score_costs(spec.score, c);
    let mut ops = c.sm80_softmax_ops + c.sm80_rescale * hdv / tile_n + cap_ops;
    ops += if k.exp2 { 0.0 } else { c.exp_ops };
    ops += if k.fast_math { 0.0 } else { c.denormal_ops };
    // With a separate loop for them, steps on a diagonal cost no more than others: warps skip what their rows
    // do not see. Those on a window's edges do (NB-067).
    let masked_everywhere = !k.loop_split && spec.mask != MaskKind::Full;
    let mask = resident * idle * scores * c.mask_ops / f32_lanes(limits);
    let exp = resident * idle * busy * scores * softmax_clocks(limits, 1.0 + cap_mufu, ops)
        + if masked_everywhere { mask } else { 0.0 }
        + match (spec.reads_codes(), k.divide_keys) {
            (false, _) => 0.0,
            (true, false) => resident * tile_n * (hd + hdv) / CODES_PER_CLOCK,
            (true, true) => resident * tile_n * (hd + hdv) / DIVIDED_CODES_PER_CLOCK,
        };

    let warps = warps_per_scheduler / (warps_per_scheduler + 2.0);
    let exponent = 1.0 + c.sm80_fwd_overlap * warps + c.sm80_apart * (resident - 1.0);
    // With one stage a copy is issued once its buffer is free, and all of K and V has to arrive before the
    // products go on, in an SM whose other CTAs run meanwhile.
    let wait = if stages < 2.0 && !spec.reads_codes() {
        (c.sm80_wait + writes / c.sm_bytes_per_clock) / resident
    } else {
        0.0
    };
    // Reading Q into registers is a step by itself, under which nothing runs; else each step reads it.
    let q_read = resident * q_bytes / limits.smem_bytes;
    let (in_step, in_tile) =
        if k.q_in_regs { (0.0, q_read + c.sm80_fwd_step) } else { (c.sm80_q_shown * q_read, 0.0) };
    let rows = (resident * c.sm80_rows + c.sm80_rows_alone) * tile_m * (hd + hdv) / (128.0 * 256.0);
    let packed = if k.pack_gqa { c.sm80_packed_row * tile_m } else { 0.0 };
    let row_bytes = |head_dim: usize| problem.types.kv.elements(head_dim) * problem.types.kv.bytes();
    let further =
        further_requests(row_bytes(problem.head_dim)) + further_requests(row_bytes(problem.head_dim_v));
    let requests = resident * tile_n * further * REQUEST_CLOCKS;
    let exposed = c.sm80_fwd_step / resident + wait + in_step + requests;
    let hidden = overlap([tensor, exp, smem], exponent);
    let model = KernelModel {
        head_dim: spec.head_dim,
        head_dim_v: spec.head_dim_v,
        sharing: 1.0,
        queue: if k.reverse_blocks { Queue::LongestFirstPerHead } else { Queue::ShortestFirst },
        resident,
        tensor,
        exp,
        smem,
        mask: if k.loop_split && spec.mask == MaskKind::Window { mask } else { 0.0 },
        exposed,
        tile: c.sm80_block + rows + packed + in_tile,
        // With three stages the second K and V are asked for together with the first, else by the first step.
        second: if stages < 3.0 { c.sm80_second } else { 0.0 },
        start: 0.0,
        first: 0.0,
        rows: tile_m.min((problem.lengths.mean_q() * group) as f64),
        in_clusters: false,
        memory: Memory::Throttled,
    };
    (model, hidden + exposed)
}

#[cfg(test)]
mod tests {
    use fa_core::{Arch, Dtype, Family, Lengths, Mask, ScoreMod};

    use super::*;
    use crate::plan::{PlanOptions, best};

    /// As a profiler counted them: requests where rows begin on 32 bytes (5.0 of 80, 3.0 of 96), else sectors
    /// (7.0 of 72, 8.5 of 88), which are more (NB-157).
    #[test]
    fn rows_that_begin_between_lines_take_more_requests() {
        for (head_dim, requests) in [(64, 1.0), (72, 7.0), (80, 5.0), (88, 8.5), (96, 3.0), (128, 2.0)] {
            let bytes = 2 * head_dim;
            assert_eq!(further_requests(bytes) + bytes as f64 / 128.0, requests, "{head_dim}");
        }
    }

    /// CTAs as NVRTC 13.0's registers leave room for: 167, 202, 182, 212 and 148 of a thread (NB-138).
    #[test]
    fn ctas_are_those_that_the_compilers_registers_leave_room_for() {
        for ((head_dims, softcap), (tile_n, stages), ctas) in [
            (([128, 128], false), (64, 1), 3),
            (([128, 128], true), (64, 1), 2),
            (([192, 128], false), (64, 1), 2),
            (([64, 64], false), (128, 2), 2),
            (([96, 96], false), (64, 2), 3),
        ] {
            let square = Problem::square(1, 1024, 1, head_dims[0] as usize, Mask::FULL, Dtype::Bf16);
            let score = if softcap { ScoreMod::softcap(30.0) } else { square.score };
            let problem = square.with_head_dim_v(head_dims[1] as usize).with_score(score);
            let kernel = Sm80Fwd { tile_m: 64, tile_n, num_warps: 4, stages, ..Sm80Fwd::default() };
            let spec = KernelSpec::for_problem(&problem, head_dims, kernel.clone());
            assert_eq!(blocks(&spec, &kernel, Arch::Sm90.limits()), ctas, "{spec}");
        }
    }

    /// As they were timed: two CTAs on an SM are 17 to 24 % faster where products are the limit, and slower
    /// where device memory or the combine kernel is (NB-173).
    #[test]
    fn split_ctas_lie_beside_one_another_where_products_are_the_limit() {
        for ((batch, queries, keys), heads, head_dim, mask, ctas) in [
            ((1, 327, 13_332), (12, 12), 88, Mask::CAUSAL, 2.0),
            ((1, 200, 6000), (16, 4), 128, Mask::CAUSAL, 2.0),
            ((2, 300, 9000), (8, 8), 64, Mask::FULL, 2.0),
            ((1, 12, 11_147), (32, 1), 64, Mask::CAUSAL, 1.0),
            ((1, 1, 65_536), (32, 8), 128, Mask::FULL, 1.0),
            ((4, 1, 16_384), (64, 8), 128, Mask::FULL, 1.0),
        ] {
            let square = Problem::square(batch, keys, heads.0, head_dim, mask, Dtype::Bf16);
            let lengths = Lengths::uniform(batch, queries, keys);
            let problem = square.with_lengths(lengths).with_heads_kv(heads.1);
            let options = PlanOptions::default().with_family(Some(Family::Sm80));
            let plan = best(&problem, Arch::Sm90, &options).expect("a plan");
            assert!(plan.spec.split && plan.cost.splits > 1, "{queries} x {keys}: {}", plan.spec);
            assert_eq!(plan.cost.step.resident, ctas, "{queries} x {keys}: {}", plan.spec);
        }
    }
}
