//! The time of an SM90 forward: wgmma fed from shared memory, overlapped by softmax of other warpgroups
//! (ping-pong) or of the same one (the next step's products).

use fa_core::spec::{Scheduler, operand_columns};
use fa_core::{ArchLimits, KernelSpec, MaskKind, Problem, Sm90Fwd};

use crate::account::clusters::combines_in_clusters;
use crate::account::pages::page_part;
use crate::cost::constants::CostConstants;
use crate::cost::core::{KernelModel, Launch, overlap, resident_blocks};
use crate::cost::memory::Memory;
use crate::cost::scores::{f32_lanes, score_costs, softmax_clocks};
use crate::kernels::planned::Forward;
use crate::work::Queue;

use super::account::accumulators;

/// The forward of `problem`, cut into the tiles of `kernel`.
pub(crate) fn launch<'a>(
    kernel: &'a Sm90Fwd,
    forward: &Forward<'a>,
) -> Launch<'a, impl Fn(f64) -> f64 + use<'a>> {
    let Forward { problem, spec, work, limits, constants } = *forward;
    let resident = resident_blocks(work.tiles, kernel.blocks_per_sm, limits);
    let (mut model, step) = model(problem, spec, kernel, limits, constants, resident);
    let assigned = kernel.scheduler == Scheduler::Static && !is_one_step(problem, kernel.tile_n);
    if assigned && work.tiles > 0.0 {
        let waiting = 1.0 - (f64::from(limits.sms) / work.tiles).min(1.0);
        model.start += UNEVEN * waiting * (model.tile + work.steps() / work.tiles * step);
    }
    let step = move |on_sm: f64| {
        if on_sm == resident { step } else { self::model(problem, spec, kernel, limits, constants, on_sm).1 }
    };
    Launch { problem, tile: (kernel.tile_m, kernel.tile_n), work, model, step, limits, constants }
}

/// Share of a tile by which SMs with equal numbers of equal tiles finish at different times: without a
/// queue, one that is ahead takes no tiles from others.
const UNEVEN: f64 = 0.1;

/// Clocks of TMA for a box, however small: an SM loads 28 boxes of one row in a microsecond (NB-058).
const BOX_CLOCKS: f64 = 60.0;

/// Codes that the producer's four warps convert in a clock: some three integer instructions each,
/// of which an SM issues 64 in a clock.
const CODES_PER_CLOCK: f64 = 16.0;

/// Clocks of TMA for a row of a head dim that is no multiple of 32 bytes, whatever its length: where tiles
/// begin between sectors (NB-066), where K's alone begin on one, and where K's and V's do (NB-158).
const SLOW_ROW_CLOCKS: [f64; 3] = [16.5, 15.0, 14.0];

/// How well they overlap the products and exponentials of a step, an exponent as in [`overlap`], with two
/// buffers of K and V and with three.
const SLOW_ROW_OVERLAP: [f64; 2] = [2.0, 3.0];

/// The same with three buffers where warpgroups skip tiles of keys: one waits while another computes, so that
/// all of a step is hidden (NB-155).
const SLOW_ROW_OVERLAP_SKIPPING: f64 = 12.0;

/// Whether all queries and keys are one step of a tile at head dim 64, whose tiles are so short that a draw
/// takes longer than what they wait for: assigned tiles are 4 % faster with 128 of both and 9 % with 64. At
/// head dim 128 they are 4 to 6 % slower (NB-194).
pub(super) fn is_one_step(problem: &Problem, tile_n: u32) -> bool {
    let (lengths, dims) = (&problem.lengths, [problem.head_dim, problem.head_dim_v]);
    lengths.max_q().max(lengths.max_k()) <= tile_n as usize && dims == [64, 64]
}

/// Whether the problem's head dims are no multiples of 32-byte sectors, as 72 and 88 are not: TMA takes such
/// rows at half its rate or less.
pub(super) fn slow_rows(problem: &Problem) -> bool {
    let bytes = problem.types.kv.bytes();
    let by_tma = !problem.types.kv.is_code();
    by_tma && [problem.head_dim, problem.head_dim_v].iter().any(|dim| !(dim * bytes).is_multiple_of(32))
}

/// Key tiles in the mean that a warpgroup skips which has `below` others below it, whose rows see 64 keys
/// more each, or the positions of 64 rows where the heads of a group are packed.
fn skipped(problem: &Problem, kernel: &Sm90Fwd, below: u32) -> f64 {
    let rows_of_position = if kernel.pack_gqa { problem.group_size().max(1) } else { 1 };
    let keys = 64.0 * f64::from(below) / rows_of_position as f64;
    // Tiles of queries that end with a tile of keys: whole tiles alone are skipped.
    let aligned = problem.lengths.is_uniform() && problem.lengths.is_square() && !kernel.pack_gqa;
    if aligned && kernel.tile_m.is_multiple_of(kernel.tile_n) {
        return (keys / f64::from(kernel.tile_n)).floor();
    }
    keys / f64::from(kernel.tile_n)
}

/// How many of K's and V's tiles begin on a sector (`sm90/fwd_shift.cuh`): none unless all rows of a head
/// begin alike, as they do with an even number of heads.
fn begun_on_sectors(problem: &Problem, k: &Sm90Fwd) -> usize {
    match problem.heads_kv.is_multiple_of(2) {
        true => 1 + usize::from(k.shifts_values()),
        false => 0,
    }
}

/// Clocks of TMA for the slow rows of a step: those of its keys, and a share of the tile's queries.
fn slow_row_clocks(problem: &Problem, k: &Sm90Fwd, rows: f64) -> f64 {
    if !slow_rows(problem) {
        return 0.0;
    }
    let keys = problem.lengths.mean_k().max(1) as f64;
    let steps = (keys / f64::from(k.tile_n)).ceil();
    SLOW_ROW_CLOCKS[begun_on_sectors(problem, k)] * (2.0 * keys / f64::from(k.cluster_m.max(1)) + rows)
        / steps
}

/// TMA boxes of a step: panels of K and V, for keys in pages times the parts of pages that a tile is made of.
/// None where threads copy the rows.
fn boxes(problem: &Problem, spec: &KernelSpec, kernel: &Sm90Fwd) -> f64 {
    if kernel.gather || spec.reads_codes() {
        return 0.0;
    }
    let panels = spec.head_dim.div_ceil(64) + spec.head_dim_v.div_ceil(64);
    let parts =
        problem.lengths.page().map_or(1, |page| kernel.tile_n as usize / page_part(page, kernel.tile_n));
    f64::from(panels) * parts as f64
}

/// The bytes that an SM must have in flight, as seconds of its share of the device memory's bandwidth: 64 KiB
/// on an H100 (NB-150).
const IN_FLIGHT_S: f64 = 2.6e-6;

/// The same for pages, whose boxes are issued later: 96 KiB.
const IN_FLIGHT_PAGED_S: f64 = 3.9e-6;

/// Bytes and keys of a step up to which parts of whole steps are about as long as a plan on the device wants
/// them, and what each key more adds to device memory's time: 40 sequences of 3,000 keys, 16:2 heads of 128
/// columns, take 43.6 us by 192 keys, 39.8 by 128 and 40.1 by 96 (NB-197). A third of that is taken: where
/// tiles are not divided, no width is known to be slower.
const COARSE_STEP: (f64, f64) = (64.0 * 1024.0, 128.0);
const COARSE_PARTS: f64 = 0.0005;

/// How the kernel reads device memory where it reads each key once, for a single tile of `rows` rows: by what
/// is in flight, all buffers of K and V. Measured for kernels with one warpgroup, whose products do not hold
/// the loads up.
fn memory(problem: &Problem, spec: &KernelSpec, k: &Sm90Fwd, rows: usize, limits: &ArchLimits) -> Memory {
    if k.num_wg > 1 || rows > k.tile_m as usize {
        return Memory::Throttled;
    }
    let row = f64::from(spec.head_dim + spec.head_dim_v) * spec.types.kv.bytes_per_number();
    let step_bytes = f64::from(k.tile_n) * row;
    let stages = if spec.reads_codes() { k.code_stages(spec) } else { k.kv_stages };
    let in_flight = f64::from(k.blocks_per_sm * stages) * step_bytes;
    let paged = problem.lengths.page().is_some();
    let seconds = if paged { IN_FLIGHT_PAGED_S } else { IN_FLIGHT_S };
    let enough = seconds * limits.hbm_bytes_per_s / f64::from(limits.sms);
    let planned = spec.reads.varied;
    let (bytes, keys) = COARSE_STEP;
    let is_coarse = planned && spec.split && step_bytes > bytes && f64::from(k.tile_n) > keys;
    let coarse = if is_coarse { COARSE_PARTS * (f64::from(k.tile_n) - keys) } else { 0.0 };
    Memory::Fed { in_flight: in_flight / enough, step_bytes, paged, planned, coarse }
}

/// f32 instructions per element of a soft cap by a polynomial ([`KernelSpec::near_cap`]).
const NEAR_CAP_OPS: f64 = 3.5;

/// Share of the predicted products and exponentials that 192x64 takes at head dim 192-128: it is ahead of
/// 128x128 by 1 to 4 % in eight of eight pairs without packed heads, which were predicted alike (NB-195).
const TALL: f64 = 0.98;

/// How well the steps of CTAs that share an SM overlap what one of them alone waits for, as in [`overlap`],
/// and what they take more for being in one another's way: 64x64 by three CTAs gains 2 to 45 % at head dim 64
/// (NB-199).
const SHARED: (f64, f64) = (4.0, 1.08);

/// The kernel with `resident` CTAs on an SM, and the clocks of a step, overlap and latency included.
fn model(
    problem: &Problem,
    spec: &KernelSpec,
    k: &Sm90Fwd,
    limits: &ArchLimits,
    c: &CostConstants,
    resident: f64,
) -> (KernelModel, f64) {
    let [tile_m, tile_n, num_wg] = [k.tile_m, k.tile_n, k.num_wg].map(f64::from);
    let [hd, hdv] = [spec.head_dim, spec.head_dim_v].map(f64::from);
    let scores = tile_m * tile_n;
    let tensor = 2.0 * scores * (hd + hdv) / limits.tensor_flops / c.tensor_efficiency;

    // wgmma reads A (64 rows a warpgroup) and B from shared memory; TMA writes what it reads.
    let bytes = f64::from(spec.elem_bytes());
    let p_bytes = if k.pv_is_rs { 0.0 } else { scores * bytes };
    let reads = num_wg * ((64.0 + tile_n) * hd + tile_n * hdv) * bytes + p_bytes;
    let stored = f64::from(operand_columns(spec.head_dim) + operand_columns(spec.head_dim_v));
    let writes = tile_n * stored * bytes + p_bytes;
    // Codes are written and read once more before they are converted.
    let code_bytes = spec.types.kv.bytes_per_number();
    let staged = if spec.reads_codes() { 2.0 * tile_n * stored * code_bytes } else { 0.0 };
    let smem = (reads + writes + staged) / limits.smem_bytes;

    let poly = f64::from(k.exp_poly_of_16) / 16.0;
    let lazy = k.rescale_threshold > 0;
    let rescale = hdv / tile_n * if lazy { c.rescale_left } else { 1.0 };
    let (mut cap_mufu, mut cap_ops) = score_costs(spec.score, c);
    if spec.score.softcap {
        (cap_mufu, cap_ops) = if k.near_cap(spec) { (0.0, NEAR_CAP_OPS) } else { (2.0, cap_ops) };
    }
    let ops = c.sm90_softmax_ops[usize::from(lazy)] + rescale + poly * c.poly_ops + cap_ops;
    let exp = scores * softmax_clocks(limits, 1.0 - poly + cap_mufu, ops);

    let group = (k.num_wg.clamp(1, 3) - 1) as usize;
    let ping_pong = if k.ping_pong { c.sm90_ping_pong } else { 0.0 };
    let exponent = c.sm90_overlap[group][usize::from(k.overlap_wg)] + ping_pong;
    // Shared memory feeds the tensor cores directly: the two overlap but for their burstiness.
    let products = overlap([tensor, smem], 4.0);
    let accumulators = accumulators(spec, k);
    let masked = spec.mask != MaskKind::Full;
    let soft = c.sm90_soft_regs[group] - if masked && k.num_wg < 3 { c.sm90_mask_regs } else { 0 };
    // TMA takes the boxes of a step one after another, whatever else the step does.
    let copies = boxes(problem, spec, k) * BOX_CLOCKS;
    let rows_of_tile = problem.lengths.mean_q() as f64;
    let slow = slow_row_clocks(problem, k, rows_of_tile / (rows_of_tile / tile_m).ceil().max(1.0));
    let strain = 1.0 + c.sm90_strain * f64::from(accumulators.saturating_sub(soft));
    let exposed = c.sm90_step + if k.pv_is_rs { 0.0 } else { c.sm90_p_store };
    let hidden = overlap([products, exp], exponent);
    let outside = match k.scheduler {
        Scheduler::PerTile => c.sm90_block,
        Scheduler::Static | Scheduler::Dynamic if k.q_stages == 1 => c.sm90_tile + c.sm90_q_wait,
        Scheduler::Static | Scheduler::Dynamic => c.sm90_tile,
    };
    // A warpgroup skips the key tiles that only the rows of the warpgroups below it see (64 keys less for
    // each), and the whole tile if it has no rows. It goes on to the next tile meanwhile, as far ahead of the
    // slowest as K and V have buffers (NB-138).
    let rows = problem.lengths.mean_q() * if k.pack_gqa { problem.group_size() } else { 1 };
    let skips = k.skips_blocks(spec.mask);
    let (passed, busy) = if skips {
        let groups = rows.div_ceil(k.tile_m as usize) * k.num_wg as usize;
        let ahead = f64::from(k.kv_stages - 1);
        let skipped: f64 = (0..k.num_wg).map(|below| skipped(problem, k, below).min(ahead)).sum();
        (skipped / num_wg, rows.div_ceil(64) as f64 / groups.max(1) as f64)
    } else {
        (0.0, 1.0)
    };
    let staggered = skips && k.kv_stages > 2;
    let model = KernelModel {
        head_dim: spec.head_dim,
        head_dim_v: spec.head_dim_v,
        sharing: f64::from(k.cluster_m.max(1)),
        queue: Queue::of(k.scheduler == Scheduler::Static, k.tile_order),
        resident,
        tensor: resident * tensor,
        exp: resident * exp,
        smem: resident * smem,
        mask: resident * scores * c.sm90_mask_ops / f32_lanes(limits),
        exposed,
        // Nothing hides the first step's S and the last step's P V, nor a tile's first slow rows, where the
        // others are as good as hidden.
        tile: (outside + products + exp - hidden * (1.0 + passed)).max(0.0)
            + if staggered { slow } else { 0.0 },
        second: 0.0,
        // The second warpgroup starts behind the first one's first scores.
        start: 0.0,
        // Q, K and V of the first step are asked for by all SMs at once.
        first: (tile_m * hd + tile_n * (hd + hdv)) * bytes / c.sm90_first_bytes,
        rows: tile_m.min(rows as f64),
        in_clusters: combines_in_clusters(problem, spec),
        memory: memory(problem, spec, k, rows, limits),
    };
    // Loads hide behind the products, not behind what a step waits for.
    let is_tall = (k.num_wg, k.tile_n, spec.head_dim, spec.head_dim_v) == (3, 64, 192, 128) && !k.pack_gqa;
    let work = hidden * strain * busy * if is_tall { TALL } else { 1.0 };
    let step = if slow == 0.0 {
        work + exposed
    } else if staggered {
        overlap([work + exposed, slow], SLOW_ROW_OVERLAP_SKIPPING)
    } else {
        overlap([work, slow], SLOW_ROW_OVERLAP[usize::from(k.kv_stages > 2)]) + exposed
    };
    let conversion = if spec.reads_codes() { tile_n * stored / CODES_PER_CLOCK } else { 0.0 };
    let step = step.max(copies).max(conversion);
    if resident <= 1.0 {
        return (model, step);
    }
    // While one waits the others compute, as warpgroups of one CTA do.
    let exponent = c.sm90_overlap[(resident as usize).clamp(1, 3) - 1][usize::from(k.overlap_wg)];
    let together = SHARED.1 * resident * strain * overlap([products, exp], exponent).max(copies);
    (model, overlap([together, step], SHARED.0))
}
