//! How long a kernel will take on a problem, and what it will wait for.
//!
//! A roofline with a schedule. A step (one tile of scores) keeps the tensor cores, the softmax pipes and shared memory
//! busy for so many clocks; how well they hide behind each other is an exponent `p` of `(a^p + b^p)^(1/p)`: 1 for one
//! after the other, infinity for perfect overlap. Steps add up to tiles, tiles are shared out over the SMs in whole
//! waves, and the whole is set against L2, device memory and the power limit. Masked tiles that the kernel skips cost
//! nothing, tiles on the edge cost whole.
//!
//! The model ranks candidates; its constants ([`CostConstants`]) are there to be calibrated.

mod constants;
mod correlation;
mod schedule;

use fa_core::spec::{Scheduler, TileOrder};
use fa_core::{Arch, ArchLimits, Kernel, KernelSpec, MaskKind, Problem, Sm80Fwd, Sm90Fwd, Traits};
use serde::Serialize;

use crate::kernels::{sm80_bwd, sm90_bwd};
use crate::occupancy::{Occupancy, WARP};

pub use crate::kernels::sm90_bwd::cost::{Sm90BwdConstants, head_splits};
pub use constants::CostConstants;
pub use correlation::rank_correlation;
pub use schedule::{Queue, TileClass, Work};

/// Predicted time of one forward.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Cost {
    /// Seconds per launch.
    pub seconds: f64,
    /// Rate in 10^12 operations per second, by the field's count ([`Problem::flops_forward`]).
    pub tflops: f64,
    /// The largest of `terms`.
    pub bottleneck: Bottleneck,
    /// Where the time goes.
    pub terms: Terms,
    /// Query tiles over all heads and sequences.
    pub tiles: f64,
    /// Tiles that the GPU works on at once.
    pub slots: f64,
    /// Steps over all tiles.
    pub steps: f64,
    /// Steps that test a mask.
    pub masked_steps: f64,
}

/// Seconds that each resource alone would take with all SMs evenly busy. They overlap, so they do not add up to the total.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Terms {
    /// Matrix products, at the rate that the power limit sustains.
    pub tensor: f64,
    /// Softmax: exponentials and the f32 instructions around them.
    pub exp: f64,
    /// Shared-memory traffic.
    pub smem: f64,
    /// L2 to SM traffic.
    pub l2: f64,
    /// Device-memory traffic.
    pub hbm: f64,
    /// SMs without a tile: a last wave that is not full, tiles of unequal length, fewer tiles than SMs.
    pub waves: f64,
    /// Launch, and clocks of tiles and steps that nothing hides.
    pub latency: f64,
}

/// What a kernel waits for most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Bottleneck {
    /// Matrix products.
    Tensor,
    /// Exponentials and the rest of softmax.
    Exp,
    /// Shared-memory bandwidth.
    Smem,
    /// L2 bandwidth.
    L2,
    /// Device-memory bandwidth.
    Hbm,
    /// Idle SMs.
    Waves,
    /// Launch and the latency of dependent steps.
    Latency,
}

impl Bottleneck {
    /// The name used in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Bottleneck::Tensor => "tensor",
            Bottleneck::Exp => "exp",
            Bottleneck::Smem => "smem",
            Bottleneck::L2 => "l2",
            Bottleneck::Hbm => "hbm",
            Bottleneck::Waves => "waves",
            Bottleneck::Latency => "latency",
        }
    }
}

impl Terms {
    /// Every term with the bottleneck that it stands for.
    pub const fn named(&self) -> [(Bottleneck, f64); 7] {
        [
            (Bottleneck::Tensor, self.tensor),
            (Bottleneck::Exp, self.exp),
            (Bottleneck::Smem, self.smem),
            (Bottleneck::L2, self.l2),
            (Bottleneck::Hbm, self.hbm),
            (Bottleneck::Waves, self.waves),
            (Bottleneck::Latency, self.latency),
        ]
    }

    pub(crate) fn largest(&self) -> Bottleneck {
        let named = self.named();
        named.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).map_or(Bottleneck::Latency, |(name, _)| name)
    }
}

/// A kernel as the schedule sees it: how its tiles are cut, and the clocks of a step on one SM.
///
/// Clocks are for the tiles of all resident blocks together: `resident` blocks make a step each in `step` clocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelModel {
    /// Extents that the tiles are padded to.
    pub head_dim: u32,
    pub head_dim_v: u32,
    /// Blocks that share one copy of K and V from L2.
    pub sharing: f64,
    pub queue: Queue,
    /// Blocks on an SM.
    pub resident: f64,
    pub tensor: f64,
    pub exp: f64,
    pub smem: f64,
    /// Clocks of a step, overlap and latency included.
    pub step: f64,
    /// Further clocks of a step that tests a mask.
    pub mask: f64,
    /// Of `step`, what nothing hides.
    pub exposed: f64,
    /// Clocks of a tile outside its steps.
    pub tile: f64,
}

/// Predicts the forward, or the backward, of `problem` by the kernel `spec` on `arch`.
///
/// An SM80-class kernel is taken to have as many blocks resident as its memory and registers let, an SM90 kernel one. The
/// spec is taken to be one that computes the problem and fits the GPU: [`crate::plan`] checks that.
pub fn predict(problem: &Problem, spec: &KernelSpec, arch: Arch, constants: &CostConstants) -> Cost {
    let Traits { tile: (tile_m, tile_n), packs_gqa, .. } = spec.traits();
    predict_work(problem, &Work::of(problem, tile_m, tile_n, packs_gqa), spec, arch, constants)
}

/// The same as [`predict`] for a problem that is already cut into the spec's tiles.
pub(crate) fn predict_work(
    problem: &Problem,
    work: &Work,
    spec: &KernelSpec,
    arch: Arch,
    constants: &CostConstants,
) -> Cost {
    let limits = arch.limits();
    let model = match &spec.kernel {
        Kernel::Sm90Bwd(kernel) => return sm90_bwd::cost::predict(problem, spec, kernel, arch, constants),
        Kernel::Sm80Bwd(kernel) => return sm80_bwd::cost::predict(problem, spec, kernel, arch, constants),
        Kernel::Sm80Fwd(kernel) => {
            let resident = resident_blocks(work, sm80_blocks(spec, kernel, limits), limits);
            sm80_model(spec, kernel, limits, constants, resident)
        }
        Kernel::Sm90Fwd(kernel) => sm90_model(problem, spec, kernel, limits, constants),
    };
    let (tile_m, tile_n) = spec.tile();
    evaluate(problem, tile_m, tile_n, work, &model, limits, constants)
}

/// Blocks that are on an SM when the tiles are spread over all SMs first.
pub(crate) fn resident_blocks(work: &Work, blocks_per_sm: u32, limits: &ArchLimits) -> f64 {
    (work.tiles / f64::from(limits.sms)).ceil().clamp(1.0, f64::from(blocks_per_sm))
}

/// `(sum x^p)^(1/p)`: between the sum (`p = 1`) and the largest (`p` to infinity).
pub(crate) fn overlap<const N: usize>(terms: [f64; N], p: f64) -> f64 {
    let largest = terms.iter().copied().fold(0.0, f64::max);
    if largest <= 0.0 {
        return 0.0;
    }
    largest * terms.iter().map(|x| (x / largest).powf(p)).sum::<f64>().powf(1.0 / p)
}

/// Clocks per score on the softmax pipes of an SM: special-function results and f32 instructions.
pub(crate) fn softmax_clocks(limits: &ArchLimits, mufu: f64, ops: f64) -> f64 {
    mufu / limits.mufu + ops / f32_lanes(limits)
}

/// f32 instructions per clock of an SM.
pub(crate) fn f32_lanes(limits: &ArchLimits) -> f64 {
    limits.fp32_flops / 2.0
}

fn sm90_model(
    problem: &Problem,
    spec: &KernelSpec,
    k: &Sm90Fwd,
    limits: &ArchLimits,
    c: &CostConstants,
) -> KernelModel {
    let [tile_m, tile_n, num_wg] = [k.tile_m, k.tile_n, k.num_wg].map(f64::from);
    let [hd, hdv] = [spec.head_dim, spec.head_dim_v].map(f64::from);
    let scores = tile_m * tile_n;
    let tensor = 2.0 * scores * (hd + hdv) / limits.tensor_flops / c.tensor_efficiency;

    // wgmma reads A (64 rows a warp group) and B from shared memory; TMA writes what it reads.
    let bytes = 2.0;
    let p_bytes = if k.pv_is_rs { 0.0 } else { scores * bytes };
    let reads = num_wg * ((64.0 + tile_n) * hd + tile_n * hdv) * bytes + p_bytes;
    let writes = tile_n * (hd + hdv) * bytes + p_bytes;
    let smem = (reads + writes) / limits.smem_bytes;

    let poly = f64::from(k.exp_poly_of_16) / 16.0;
    let lazy = k.rescale_threshold > 0;
    let rescale = hdv / tile_n * if lazy { c.rescale_left } else { 1.0 };
    let (cap_mufu, cap_ops) = if spec.softcap { (1.0, c.softcap_ops) } else { (0.0, 0.0) };
    let ops = c.sm90_softmax_ops[usize::from(lazy)] + rescale + poly * c.poly_ops + cap_ops;
    let exp = scores * softmax_clocks(limits, 1.0 - poly + cap_mufu, ops);

    let group = (k.num_wg.clamp(1, 3) - 1) as usize;
    let ping_pong = if k.ping_pong { c.sm90_ping_pong } else { 0.0 };
    let exponent = c.sm90_overlap[group][usize::from(k.overlap_wg)] + ping_pong;
    // Shared memory feeds the tensor cores directly: the two run side by side but for their burstiness.
    let products = overlap([tensor, smem], 4.0);
    let accumulators = crate::kernels::sm90_fwd::candidates::accumulators(spec, k);
    let masked = spec.mask != MaskKind::Full;
    let soft = c.sm90_soft_regs[group] - if masked && k.num_wg < 3 { c.sm90_mask_regs } else { 0 };
    let strain = 1.0 + c.sm90_strain * f64::from(accumulators.saturating_sub(soft));
    let exposed = c.sm90_step + if k.pv_is_rs { 0.0 } else { c.sm90_p_store };
    let hidden = overlap([products, exp], exponent);
    let outside = if k.scheduler == Scheduler::PerTile { c.sm90_block } else { c.sm90_tile };
    // A warp group passes over the blocks that only the rows of the groups below it see (64 keys less for each) and, where
    // it has no rows at all, over the whole tile.
    let (passed, busy) = if masked && (64..k.tile_m).contains(&k.tile_n) && k.kv_stages > 1 {
        let rows = problem.seqlen_q * if k.pack_gqa { problem.group_size() } else { 1 };
        let groups = rows.div_ceil(k.tile_m as usize) * k.num_wg as usize;
        (32.0 * (num_wg - 1.0) / tile_n, rows.div_ceil(64) as f64 / groups.max(1) as f64)
    } else {
        (0.0, 1.0)
    };
    KernelModel {
        head_dim: spec.head_dim,
        head_dim_v: spec.head_dim_v,
        sharing: f64::from(k.cluster_m.max(1)),
        queue: match (k.scheduler, k.tile_order) {
            (Scheduler::Static, _) => Queue::Fixed,
            (_, TileOrder::LongestFirst) => Queue::LongestFirst,
            (_, TileOrder::Natural) => Queue::ShortestFirst,
        },
        resident: 1.0,
        tensor,
        exp,
        smem,
        step: hidden * strain * busy + exposed,
        mask: scores * c.sm90_mask_ops / f32_lanes(limits),
        exposed,
        // The first step's scores and the last step's P V have nothing to hide behind.
        tile: (outside + products + exp - hidden * (1.0 + passed)).max(0.0),
    }
}

/// Blocks that an SM holds: at least those that the launch bounds promise, and more where there is room.
fn sm80_blocks(spec: &KernelSpec, k: &Sm80Fwd, limits: &ArchLimits) -> u32 {
    let regs = crate::kernels::sm80_fwd::candidates::registers(spec, k, limits);
    let smem = crate::kernels::sm80_fwd::candidates::smem(spec, k).total;
    Occupancy::of(limits, smem, regs.total.min(regs.limit), WARP * k.num_warps).blocks().max(k.blocks_per_sm)
}

fn sm80_model(
    spec: &KernelSpec,
    k: &Sm80Fwd,
    limits: &ArchLimits,
    c: &CostConstants,
    resident: f64,
) -> KernelModel {
    let [tile_m, tile_n, num_warps, stages] = [k.tile_m, k.tile_n, k.num_warps, k.stages].map(f64::from);
    let [hd, hdv] = [spec.head_dim, spec.head_dim_v].map(f64::from);
    let scores = tile_m * tile_n;
    let warps_per_scheduler = resident * num_warps / 4.0;
    // A scheduler without a warp leaves its tensor core, its special-function unit and its lanes idle.
    let idle = (1.0 / warps_per_scheduler).max(1.0);
    let rate = limits.tensor_flops * c.mma_sync_rate * c.tensor_efficiency;
    let tensor = resident * idle * 2.0 * scores * (hd + hdv) / rate;

    // Every warp reads all of K and V, and its own rows of Q unless it keeps them; cp.async writes K and V once.
    let bytes = 2.0;
    let q_reads = if k.q_in_regs { 0.0 } else { tile_m * hd * bytes };
    let reads = num_warps * tile_n * (hd + hdv) * bytes + q_reads;
    let conflict = if k.swizzle { 1.0 } else { c.row_major_conflict };
    let loads = if k.ldmatrix { 1.0 } else { c.plain_loads };
    let writes = tile_n * (hd + hdv) * bytes;
    let smem = resident * (reads * conflict * loads + writes) / limits.smem_bytes;

    let (cap_mufu, cap_ops) = if spec.softcap { (1.0, c.softcap_ops) } else { (0.0, 0.0) };
    let mut ops = c.sm80_softmax_ops + c.sm80_rescale * hdv / tile_n + cap_ops;
    ops += if k.exp2 { 0.0 } else { c.exp_ops };
    ops += if k.fast_math { 0.0 } else { c.denormal_ops };
    // In a loop of their own, masked steps cost no more than others: warps pass over what their rows do not see.
    let masked_everywhere = !k.loop_split && spec.mask != MaskKind::Full;
    let mask = resident * idle * scores * c.mask_ops / f32_lanes(limits);
    let exp = resident * idle * scores * softmax_clocks(limits, 1.0 + cap_mufu, ops)
        + if masked_everywhere { mask } else { 0.0 };

    let warps = warps_per_scheduler / (warps_per_scheduler + 2.0);
    let exponent = 1.0 + c.sm80_fwd_overlap * warps + c.sm80_apart * (resident - 1.0);
    // With one stage a copy is only issued when its buffer is free: a part of the wait shows, unless other blocks run.
    let wait = if stages < 2.0 { c.sm80_wait / resident } else { 0.0 };
    let exposed = c.sm80_fwd_step / resident + wait;
    let hidden = overlap([tensor, exp, smem], exponent);
    KernelModel {
        head_dim: spec.head_dim,
        head_dim_v: spec.head_dim_v,
        sharing: 1.0,
        queue: if k.reverse_blocks { Queue::LongestFirstPerHead } else { Queue::ShortestFirst },
        resident,
        tensor,
        exp,
        smem,
        step: hidden + exposed,
        mask: 0.0,
        exposed,
        tile: c.sm80_block,
    }
}

/// Puts the steps of a kernel together to the time of a problem.
pub(crate) fn evaluate(
    problem: &Problem,
    tile_m: u32,
    tile_n: u32,
    work: &Work,
    model: &KernelModel,
    limits: &ArchLimits,
    c: &CostConstants,
) -> Cost {
    let sms = f64::from(limits.sms);
    let clock = limits.clock_ghz * 1e9 * c.clock;
    let slots = sms * model.resident;
    let (steps, masked_steps) = (work.steps(), work.masked());

    // `resident` blocks take a step each in `step` clocks, so that is also how long a block takes for its own.
    let length = |class: &TileClass| model.tile + class.steps * model.step + class.masked * model.mask;
    let (total, end) = work.makespan(slots, model.queue, length);
    let (even, compute) = (total / slots / clock, end / clock);
    let alone = |clocks: f64| steps / slots * clocks / clock;

    let scores = f64::from(tile_m) * f64::from(tile_n);
    let width = f64::from(model.head_dim + model.head_dim_v);
    let power = steps * 2.0 * scores * width / (limits.peak_tensor_flops() * c.power_cap);
    let tensor = alone(model.tensor).max(power);

    let element = problem.dtype.bytes() as f64;
    let tile_bytes = f64::from(tile_m) * width * element;
    let l2_bytes = steps * f64::from(tile_n) * width * element / model.sharing + work.tiles * tile_bytes;
    let busy = work.tiles.min(sms).max(1.0);
    let l2_rate = (limits.l2_bytes_per_clock * c.l2_efficiency).min(busy * c.sm_bytes_per_clock) * clock;
    let l2 = l2_bytes / l2_rate;
    let hbm = hbm_bytes(problem, work, slots, limits, c) / (limits.hbm_bytes_per_s * c.hbm_efficiency);

    let chip = overlap([compute, power], 8.0);
    let busy_time = overlap([overlap([chip, l2], 6.0), hbm], 3.0);
    let seconds = busy_time + c.launch_s;
    let terms = Terms {
        tensor,
        exp: alone(model.exp),
        smem: alone(model.smem),
        l2,
        hbm,
        waves: compute - even,
        latency: c.launch_s + (steps * model.exposed + work.tiles * model.tile) / slots / clock,
    };
    let tflops = problem.flops_forward() / seconds / 1e12;
    Cost {
        seconds,
        tflops,
        bottleneck: terms.largest(),
        terms,
        tiles: work.tiles,
        slots,
        steps,
        masked_steps,
    }
}

/// Compulsory bytes, and K and V again for every wave of a head's tiles as far as they do not stay in L2.
fn hbm_bytes(problem: &Problem, work: &Work, slots: f64, limits: &ArchLimits, c: &CostConstants) -> f64 {
    let width = (problem.head_dim + problem.head_dim_v) as f64 * problem.dtype.bytes() as f64;
    if work.tiles == 0.0 {
        return 0.0;
    }
    let heads = problem.batch as f64 * problem.heads_kv as f64;
    let kv_head = problem.seqlen_k as f64 * width;
    if kv_head == 0.0 {
        return problem.bytes_forward();
    }
    let tiles_per_head = work.tiles / heads;
    let heads_at_once = (slots / tiles_per_head.max(1.0)).clamp(1.0, heads);
    let missing = (1.0 - limits.l2_bytes as f64 * c.l2_reuse / (heads_at_once * kv_head)).max(0.0);
    let passes = (tiles_per_head / slots).max(1.0);
    problem.bytes_forward() + missing * (passes - 1.0) * heads * kv_head
}
