//! The time of an SM80-class backward: modelled as the SM90 one, with mma.sync, all operands through
//! ldmatrix, and as many CTAs as an SM holds.

use fa_core::{Arch, ArchLimits, KernelSpec, MaskKind, Pass, Problem, Sm80Bwd};

use crate::cost::constants::CostConstants;
use crate::cost::core::{overlap, resident_blocks};
use crate::cost::cuts::Cuts;
use crate::cost::gpu::Gpu;
use crate::cost::head_splits::{BackwardRates, Split};
use crate::cost::predicted::{Cost, StepClocks, Terms};
use crate::cost::scores::{f32_lanes, slope_costs, softmax_clocks};
use crate::occupancy::{Occupancy, WARP};
use crate::work::{Queue, TileClass, Work};

use super::account::{bytes_read, registers, smem};

/// Registers of a thread that the compiler adds, if any are left, for each panel of 64 columns after a tile's
/// first.
const PANEL_REGISTERS: u32 = 20;

/// How much longer a step on a diagonal or a window's edges takes to test its mask than the instructions of
/// the test alone (NB-067, NB-097, NB-107, NB-126).
const MASK_TEST: f64 = 5.5;

/// How much longer the resources of a step are busy in CTAs of four warps whose threads hold `MANY_SCORES`
/// scores: 128x64 at head dim 64 and 64x128 at 32 are behind their predictions by 6 to 11 %, 128x128 of eight
/// warps, whose threads hold as many, is not (NB-126, NB-138).
const CROWDED: f64 = 1.12;

/// Half of the registers of a thread.
const MANY_SCORES: u32 = 128;

/// Whether the scores of a tile crowd the registers of four warps.
fn is_crowded(kernel: &Sm80Bwd) -> bool {
    let scores = kernel.tile_m * kernel.tile_n / (WARP * (kernel.num_warps / 2).max(1));
    kernel.num_warps == 4 && scores >= MANY_SCORES
}

/// Schedulers of an SM, each with its lanes and special-function units. A warp's is its number in the CTA,
/// modulo these.
const SCHEDULERS: u32 = 4;

/// Clocks of both groups of warps on the SM's lanes, which each alone would keep busy for `of_p` and `of_ds`.
/// A group of two warps runs on two of the four schedulers, in every CTA on the same two (NB-148).
fn on_schedulers(kernel: &Sm80Bwd, of_p: f64, of_ds: f64) -> f64 {
    let group = kernel.num_warps / 2;
    if group < SCHEDULERS {
        of_p.max(of_ds) * f64::from(SCHEDULERS) / f64::from(group.max(1))
    } else {
        of_p + of_ds
    }
}

/// CTAs that an SM holds: at least those that the launch bounds promise, and more where there is room.
fn blocks(spec: &KernelSpec, kernel: &Sm80Bwd, arch: Arch) -> u32 {
    let regs = registers(spec, kernel, arch);
    let panels = spec.head_dim.max(spec.head_dim_v).div_ceil(64);
    let taken = (regs.total + PANEL_REGISTERS * (panels - 1)).min(regs.limit);
    let bytes = smem(spec, kernel).total;
    Occupancy::of(arch.limits(), bytes, taken, WARP * kernel.num_warps).blocks().max(kernel.blocks_per_sm)
}

/// Share of mma.sync's peak that a step reaches: 320 TFLOP/s of 613 where all heads have their own K and V
/// (head dim 128).
const TENSOR_EFFICIENCY: f64 = 0.52;

/// What the number of CTAs that share a group's heads is chosen by.
pub(crate) fn rates(limits: &ArchLimits, c: &CostConstants) -> BackwardRates {
    BackwardRates {
        tensor_flops: limits.tensor_flops * c.mma_sync_rate * TENSOR_EFFICIENCY,
        cta: c.sm80_bwd_block,
    }
}

/// Predicts the backward of `problem` by `kernel`, preprocess and postprocess included. The clocks of a step
/// are those in which every CTA on an SM makes one step.
pub(crate) fn predict(
    problem: &Problem,
    spec: &KernelSpec,
    kernel: &Sm80Bwd,
    gpu: Gpu<'_>,
    cuts: &mut Cuts,
) -> Cost {
    let Gpu { arch, limits, constants: c } = gpu;
    let [tile_m, tile_n, warps] = [kernel.tile_m, kernel.tile_n, kernel.num_warps].map(f64::from);
    let [hd, hdv] = [spec.head_dim, spec.head_dim_v].map(f64::from);
    let scores = tile_m * tile_n;
    let sms = f64::from(limits.sms);
    let (split, work) = cuts.of_keys(problem, spec, rates(limits, c), limits);
    let resident = resident_blocks(work.tiles, blocks(spec, kernel, arch), limits);

    let rate = limits.tensor_flops * c.mma_sync_rate * c.tensor_efficiency * c.sm80_bwd_tensor;
    let tensor = 2.0 * scores * (3.0 * hd + 2.0 * hdv) / rate;
    // Operands and P, read; P (with a soft cap twice) and dS stored; Q and dO copied in.
    let loads = 2.0 * tile_m * (hd + hdv);
    let stored = if spec.score.softcap { 6.0 } else { 4.0 } * scores;
    let bytes = f64::from(bytes_read(spec, kernel)) + stored + loads;
    let smem = bytes / limits.smem_bytes;
    let (cap_mufu, cap_ops) = slope_costs(spec.score, c);
    let [ops_p, ops_ds] = c.sm80_bwd_ops;
    let of_p = scores * softmax_clocks(limits, 1.0 + cap_mufu, ops_p + cap_ops);
    let of_ds = scores * softmax_clocks(limits, 0.0, ops_ds);
    let exp = on_schedulers(kernel, of_p, of_ds);
    let exposed = c.sm80_step
        // The wait for the next Q also waits for the next dO.
        + if kernel.q_stages == 2 && kernel.do_stages == 2 { c.sm80_bwd_wait } else { 0.0 }
        + tile_m * hd * 4.0 / c.sm80_bwd_add_bytes
        + if kernel.deterministic { c.bwd_turn } else { 0.0 };
    let crowded = if is_crowded(kernel) { CROWDED } else { 1.0 };
    // Clocks of a step where an SM holds so many CTAs.
    let step = |on_sm: f64| {
        let per_scheduler = on_sm * warps / 4.0;
        // A scheduler with a single warp issues nothing while that warp waits for its products or for the
        // other half.
        let alone = (2.0 / per_scheduler).max(1.0).powf(c.sm80_bwd_alone);
        // With few warps little overlaps a product but its own loads.
        let exponent = 1.0 + c.sm80_overlap * per_scheduler / (per_scheduler + 2.0);
        crowded * overlap([on_sm * tensor * alone, on_sm * exp, on_sm * smem], exponent) + exposed
    };

    // Half of the warps compute P and test its mask.
    let of_mask = if spec.mask == MaskKind::Full { 1.0 } else { MASK_TEST };
    let mask = of_mask * scores * c.mask_ops / f32_lanes(limits);
    // With parts, dK and dV are added to f32 accumulators in the L2, by all resident blocks at once.
    let added = split.added / c.sm80_bwd_atomic_bytes;
    // A CTA computes nothing until its first Q and dO are there.
    let first = c.sm80_bwd_rows * tile_m * (hd + hdv) / (128.0 * 256.0);
    let length = |class: &TileClass, on_sm: f64| {
        c.sm80_bwd_block + first + class.steps * step(on_sm) + on_sm * (added + class.masked * mask)
    };
    let is_assigned = spec.mask == MaskKind::Full && !spec.score.masks();
    let queue = Queue::of(is_assigned, kernel.tile_order);
    let (total, end) = work.makespan_shared(sms, resident, queue, length);
    // As in the SM90 backward: the smaller a tile of keys, the more often Q and dO are read and dQ is added
    // to, and parts of dK and dV are added by all CTAs at the same rate.
    let traffic = work.steps() * (loads + c.bwd_add_weight * tile_m * hd * 4.0);
    let parts = work.tiles * split.added / c.sm80_bwd_part_bytes;
    let clocks = traffic / (limits.l2_bytes_per_clock * c.l2_efficiency) + parts;
    let l2 = clocks / (limits.clock_ghz * 1e9 * c.clock);
    Launches {
        tensor,
        exp,
        smem,
        l2,
        exposed: exposed / resident,
        total: total / resident,
        end,
        work,
        split,
        flops_per_step: 2.0 * scores * (3.0 * hd + 2.0 * hdv),
        step: StepClocks {
            resident,
            tensor: resident * tensor,
            exp: resident * exp,
            smem: resident * smem,
            exposed,
            total: step(resident),
        },
    }
    .cost(problem, [hd, hdv], limits, c)
}

/// Where the time of an SM80-class backward goes: clocks of a step, or of the whole.
struct Launches<'a> {
    tensor: f64,
    exp: f64,
    smem: f64,
    /// Seconds that the L2 alone would take.
    l2: f64,
    exposed: f64,
    /// Clocks of all tiles, one after the other.
    total: f64,
    /// Clocks until the last SM is done.
    end: f64,
    work: &'a Work,
    /// Its accumulators of dK and dV, and what the L2 has lost.
    split: Split,
    flops_per_step: f64,
    /// Of all resident CTAs.
    step: StepClocks,
}

impl Launches<'_> {
    /// The cost, preprocess and postprocess included.
    fn cost(&self, problem: &Problem, [hd, hdv]: [f64; 2], limits: &ArchLimits, c: &CostConstants) -> Cost {
        let Launches { tensor, exp, smem, l2, exposed, total, end, work, split, flops_per_step, step } =
            *self;
        let sms = f64::from(limits.sms);
        let clock = limits.clock_ghz * 1e9 * c.clock;
        let power = work.steps() * flops_per_step / (limits.peak_tensor_flops() * c.power_cap);
        let bandwidth = limits.hbm_bytes_per_s * c.hbm_efficiency;
        let busy = overlap([end / clock, power, l2], 5.0);
        // What the L2 loses between two uses comes from device memory while the products go on.
        let missed = split.missed / bandwidth;
        let main = overlap([busy, missed], c.sm80_bwd_missed);

        // Preprocess reads O and dO and zeroes the accumulators; postprocess reads them and writes dQ, with
        // parts also dK and dV.
        let rows = problem.rows();
        let accumulators = rows * hd * 4.0;
        let (qkv, out) = (problem.types.q.bytes() as f64, problem.types.out.bytes() as f64);
        let around = rows * (2.0 * hdv * out + hd * qkv) + 2.0 * accumulators + 2.5 * split.sums;
        let hbm = (around + problem.bytes_backward()) / bandwidth + missed;
        // Parts of dK and dV are added up by a launch of their own.
        let launches = if split.parts > 1 { 4.0 } else { 3.0 };
        let outer = around / bandwidth + launches * c.launch_s;
        let seconds = main + outer;
        let alone = |clocks: f64| work.steps() / sms * clocks / clock;
        let terms = Terms {
            tensor: alone(tensor).max(power),
            exp: alone(exp),
            smem: alone(smem),
            l2,
            hbm,
            waves: (end - total / sms) / clock,
            latency: outer + (work.steps() * exposed + work.tiles * c.sm80_bwd_block) / sms / clock,
        };
        Cost::of(problem, Pass::BACKWARD, (work, 1), seconds, terms, sms * step.resident, step)
    }
}
