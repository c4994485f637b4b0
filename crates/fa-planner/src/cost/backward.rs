//! The time of an SM90 backward: three launches, of which the middle one walks tiles.
//!
//! A step's five products keep the tensor cores busy, their operands shared memory; softmax and the gradient of the scores run
//! partly beside them. The launches before and after move the f32 accumulators of dQ through device memory.

use fa_core::spec::TileOrder;
use fa_core::{Arch, ArchLimits, KernelSpec, MaskKind, Problem, Sm90Bwd};

use crate::HeadDims;
use crate::plan::backward::guide_spec;
use crate::sm90::bwd::BwdMmas;
use crate::sm90::panels::BwdPanels;
use crate::sm90::traffic;

use super::schedule::{Queue, TileClass, Work};
use super::{Cost, CostConstants, Terms, overlap, softmax_clocks};

/// Query heads of a K/V head are divided into as few tiles as fill the GPU: how many parts.
///
/// 1 where the order of sums must not depend on it, and where there is nothing to sum.
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

/// Predicts the backward of `problem` by `kernel`, the launches before and after it included.
pub(super) fn predict(
    problem: &Problem,
    spec: &KernelSpec,
    kernel: &Sm90Bwd,
    arch: Arch,
    c: &CostConstants,
) -> Cost {
    let limits = arch.limits();
    let [tile_m, tile_n] = [kernel.tile_m, kernel.tile_n].map(f64::from);
    let dims = HeadDims { head_dim: spec.head_dim, head_dim_v: spec.head_dim_v };
    let [hd, hdv] = [spec.head_dim, spec.head_dim_v].map(f64::from);
    let scores = tile_m * tile_n;
    let sms = f64::from(limits.sms);

    let guide = guide_spec(kernel);
    let mmas = BwdMmas::new(dims, &guide);
    // The guide counts the f32 tile of dQ stored and read; without its buffer it is sent off from registers.
    let dq_bytes = if kernel.dq_via_smem { 0.0 } else { 2.0 * tile_m * hd * 4.0 };
    let panels = BwdPanels::of(dims, kernel);
    let loads = tile_m * (hd + hdv) * 2.0;
    let smem = (f64::from(traffic::bwd(dims, &guide, &mmas)) - dq_bytes + loads) / limits.smem_bytes;
    let tensor = 2.0 * scores * (3.0 * hd + 2.0 * hdv) / limits.tensor_flops / c.bwd_tensor;
    let (cap_mufu, cap_ops) = if spec.softcap { (2.0, c.softcap_ops + 3.0) } else { (0.0, 0.0) };
    let exp = scores * softmax_clocks(limits, 1.0 + cap_mufu, c.bwd_ops + cap_ops);
    let products = overlap([tensor, smem], c.bwd_smem_overlap);
    let exposed = c.bwd_step
        + if kernel.mma_dkv_is_rs { 0.0 } else { c.bwd_p_store }
        + if kernel.pds_stages == 1 { c.bwd_second_barrier } else { 0.0 }
        // With one buffer the next Q is asked for when dK has read this one, and S waits for all of it.
        + if kernel.q_stages == 1 { c.load_latency + tile_m * hd * 2.0 / c.sm_bytes_per_clock } else { 0.0 }
        + if kernel.dq_via_smem { 0.0 } else { tile_m * hd * 4.0 / c.bwd_atomic_bytes }
        + if kernel.do_stages == 1 { c.bwd_one_do_stage } else { 0.0 }
        + if kernel.deterministic { c.bwd_turn } else { 0.0 };
    let copies = c.bwd_copied_row * tile_m * (hd / f64::from(panels.q) + hdv / f64::from(panels.dout));
    let step = overlap([products, exp, copies], c.bwd_overlap[usize::from(kernel.num_wg == 3)]) + exposed;

    let splits = head_splits(problem, kernel.tile_n, kernel.deterministic, limits.sms);
    let work = Work::of_keys(problem, kernel.tile_m, kernel.tile_n, splits);
    let mask = scores * c.mask_ops / super::f32_lanes(limits);
    let length = |class: &TileClass| c.bwd_block + class.steps * step + class.masked * mask;
    let queue = match (spec.mask, kernel.tile_order) {
        (MaskKind::Full, _) => Queue::Fixed,
        (_, TileOrder::LongestFirst) => Queue::LongestFirst,
        (_, TileOrder::Natural) => Queue::ShortestFirst,
    };
    let (total, end) = work.makespan(sms, queue, length);
    let flops_per_step = 2.0 * scores * (3.0 * hd + 2.0 * hdv);
    // Q and dO come from the L2 at every step, and the f32 tile of dQ is added to what is there.
    let traffic = work.steps() * (loads + c.bwd_add_weight * tile_m * hd * 4.0);
    let clock = limits.clock_ghz * 1e9 * c.clock;
    let l2 = traffic / (limits.l2_bytes_per_clock * c.l2_efficiency * clock);
    Launches { tensor, exp, smem, l2, exposed, total, end, work: &work, flops_per_step }.cost(
        problem,
        [hd, hdv],
        limits,
        c,
    )
}

/// What a backward's launches take their time for; clocks of a step, or of the whole.
pub(super) struct Launches<'a> {
    pub tensor: f64,
    pub exp: f64,
    pub smem: f64,
    /// Seconds that the L2 alone would take.
    pub l2: f64,
    pub exposed: f64,
    /// Of all tiles, one after the other.
    pub total: f64,
    /// Of the last SM.
    pub end: f64,
    pub work: &'a Work,
    pub flops_per_step: f64,
}

impl Launches<'_> {
    /// The cost, with the launches before and after the main one.
    pub fn cost(
        &self,
        problem: &Problem,
        [hd, hdv]: [f64; 2],
        limits: &ArchLimits,
        c: &CostConstants,
    ) -> Cost {
        let Launches { tensor, exp, smem, l2, exposed, total, end, work, flops_per_step } = *self;
        let sms = f64::from(limits.sms);
        let clock = limits.clock_ghz * 1e9 * c.clock;
        let power = work.steps() * flops_per_step / (limits.peak_tensor_flops() * c.power_cap);
        let main = overlap([end / clock, power, l2], 8.0);

        // Before: O and dO read, the accumulators zeroed; after: they are read and dQ is written.
        let rows = problem.rows();
        let accumulators = rows * hd * 4.0;
        let around = rows * (2.0 * hdv * 2.0 + hd * 2.0) + 2.0 * accumulators;
        let hbm = (around + problem.bytes_backward()) / (limits.hbm_bytes_per_s * c.hbm_efficiency);
        let outer = around / (limits.hbm_bytes_per_s * c.hbm_efficiency) + 3.0 * c.launch_s;
        let seconds = main + outer;
        let alone = |clocks: f64| work.steps() / sms * clocks / clock;
        let terms = Terms {
            tensor: alone(tensor).max(power),
            exp: alone(exp),
            smem: alone(smem),
            l2,
            hbm,
            waves: (end - total / sms) / clock,
            latency: outer + (work.steps() * exposed + work.tiles * c.bwd_block) / sms / clock,
        };
        Cost {
            seconds,
            tflops: problem.flops_backward() / seconds / 1e12,
            bottleneck: terms.largest(),
            terms,
            tiles: work.tiles,
            slots: sms,
            steps: work.steps(),
            masked_steps: work.masked(),
        }
    }
}
