//! The time of an SM90 backward: three launches, of which the middle one walks tiles.
//!
//! A step's five products keep the tensor cores busy, their operands shared memory; softmax and the gradient of the scores run
//! partly beside them. The launches before and after move the f32 accumulators of dQ through device memory: at lengths below
//! 2,000 they and the main launch's own traffic take half of the time.

use fa_core::spec::TileOrder;
use fa_core::{Arch, ArchLimits, KernelSpec, MaskKind, Problem, Sm90Bwd};
use serde::{Deserialize, Serialize};

use crate::HeadDims;
use crate::account::panels::BwdPanels;
use crate::guide::bwd::BwdMmas;
use crate::guide::traffic;
use crate::kernels::sm90_bwd::candidates::guide_spec;

use crate::cost::{Cost, CostConstants, Terms, overlap, softmax_clocks};
use crate::cost::{Queue, TileClass, Work};

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

/// What the model of the SM90 backward assumes. "Clocks" are SM clocks, "per element" means per score.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sm90BwdConstants {
    /// Clock under this load as a share of the board's boost clock; the tensor cores issue at their full rate at it.
    pub clock: f64,
    /// f32 instructions per element of softmax and of the gradient of the scores.
    pub ops: f64,
    /// How well the products' shared-memory reads hide behind the tensor cores: the exponent `p` of
    /// `(a^p + b^p)^(1/p)`, 1 for one after the other.
    pub smem_overlap: f64,
    /// How well products and the rest hide behind each other, with 2 and with 3 MMA warp groups: such exponents.
    pub overlap: [f64; 2],
    /// Clocks of the copy engine for a row of a panel of Q or dO.
    pub copied_row: f64,
    /// Clocks of a step that nothing hides.
    pub step: f64,
    /// Clocks of a step that P through shared memory adds: dV waits for the exchange.
    pub p_store: f64,
    /// Clocks of a step that a single buffer of P and dS adds: a second barrier.
    pub second_barrier: f64,
    /// Clocks that S waits for Q with a single buffer of it, beside the copy itself.
    pub q_latency: f64,
    /// Clocks of a step that waiting for its turn to add to dQ takes a deterministic kernel.
    pub turn: f64,
    /// Bytes of dQ per clock that an SM adds to device memory by vector atomics.
    pub atomic_bytes: f64,
    /// Adding a byte of dQ keeps the L2 busy as long as reading so many bytes.
    pub add_weight: f64,
    /// Clocks of a block outside its steps.
    pub block: f64,
    /// Share of the time that idle SMs cost at the end of the main launch: the power that they leave speeds the others up.
    pub idle: f64,
    /// Share of device-memory bandwidth that the launch before reaches: O and dO read, accumulators zeroed.
    pub prepare_bandwidth: f64,
    /// The same of the launch after, where dQ's product is as it is meant and where it is transposed. It reads accumulators in the
    /// order that threads held them and writes rows.
    pub finish_bandwidth: [f64; 2],
    /// The same of the main launch.
    pub main_bandwidth: f64,
    /// How well the main launch's device-memory traffic hides behind the rest of it: an exponent as above.
    pub main_overlap: f64,
}

impl Sm90BwdConstants {
    /// Fitted to the rates in `tests/data/sm90-bwd-h100.txt`, by error and by how far the first choice is behind the best one
    /// measured; `turn` to deterministic runs at head dim 128.
    pub(crate) const H100: Sm90BwdConstants = Sm90BwdConstants {
        clock: 0.96,
        ops: 11.4,
        smem_overlap: 4.67,
        overlap: [1.82, 19.6],
        copied_row: 1.43,
        step: 134.0,
        p_store: 48.0,
        second_barrier: 131.0,
        q_latency: 1467.0,
        turn: 850.0,
        atomic_bytes: 48.2,
        add_weight: 2.17,
        block: 1790.0,
        idle: 0.47,
        prepare_bandwidth: 0.644,
        finish_bandwidth: [0.474, 0.611],
        main_bandwidth: 0.93,
        main_overlap: 3.44,
    };
}

/// Predicts the backward of `problem` by `kernel`, the launches before and after it included.
pub(crate) fn predict(
    problem: &Problem,
    spec: &KernelSpec,
    kernel: &Sm90Bwd,
    arch: Arch,
    constants: &CostConstants,
) -> Cost {
    let limits = arch.limits();
    let c = &constants.sm90_bwd;
    let [tile_m, tile_n] = [kernel.tile_m, kernel.tile_n].map(f64::from);
    let dims = HeadDims { head_dim: spec.head_dim, head_dim_v: spec.head_dim_v };
    let [hd, hdv] = [spec.head_dim, spec.head_dim_v].map(f64::from);
    let scores = tile_m * tile_n;
    let sms = f64::from(limits.sms);
    let clock = limits.clock_ghz * 1e9 * c.clock;

    let guide = guide_spec(kernel);
    let mmas = BwdMmas::new(dims, &guide);
    // The guide counts the f32 tile of dQ stored and read; without its buffer it is sent off from registers.
    let dq_tile = tile_m * hd * 4.0;
    let dq_bytes = if kernel.dq_via_smem { 0.0 } else { 2.0 * dq_tile };
    let panels = BwdPanels::of(dims, kernel);
    let loads = tile_m * (hd + hdv) * 2.0;
    let smem = (f64::from(traffic::bwd(dims, &guide, &mmas)) - dq_bytes + loads) / limits.smem_bytes;
    let tensor = 2.0 * scores * (3.0 * hd + 2.0 * hdv) / limits.tensor_flops;
    let (cap_mufu, cap_ops) = if spec.softcap { (2.0, constants.softcap_ops + 3.0) } else { (0.0, 0.0) };
    let exp = scores * softmax_clocks(limits, 1.0 + cap_mufu, c.ops + cap_ops);
    let products = overlap([tensor, smem], c.smem_overlap);
    let exposed = c.step
        + if kernel.mma_dkv_is_rs { 0.0 } else { c.p_store }
        + if kernel.pds_stages == 1 { c.second_barrier } else { 0.0 }
        // With one buffer the next Q is asked for when dK has read this one, and S waits for all of it.
        + if kernel.q_stages == 1 { c.q_latency + tile_m * hd * 2.0 / constants.sm_bytes_per_clock } else { 0.0 }
        + if kernel.dq_via_smem { 0.0 } else { dq_tile / c.atomic_bytes }
        + if kernel.deterministic { c.turn } else { 0.0 };
    let copies = c.copied_row * tile_m * (hd / f64::from(panels.q) + hdv / f64::from(panels.dout));
    let step = overlap([products, exp, copies], c.overlap[usize::from(kernel.num_wg == 3)]) + exposed;

    let splits = head_splits(problem, kernel.tile_n, kernel.deterministic, limits.sms);
    let work = Work::of_keys(problem, kernel.tile_m, kernel.tile_n, splits);
    // The test of a mask falls under the products.
    let length = |class: &TileClass| c.block + class.steps * step;
    let queue = match (spec.mask, kernel.tile_order) {
        (MaskKind::Full, _) => Queue::Fixed,
        (_, TileOrder::LongestFirst) => Queue::LongestFirst,
        (_, TileOrder::Natural) => Queue::ShortestFirst,
    };
    let (total, end) = work.makespan(sms, queue, length);
    let even = total / sms;
    let busy = (even + c.idle * (end - even)) / clock;
    // Q and dO come from the L2 at every step, and the f32 tile of dQ is added to what is there.
    let l2 = work.steps() * (loads + c.add_weight * dq_tile) / (limits.l2_bytes_per_clock * clock);

    let rows = problem.rows();
    let accumulators = rows * hd * 4.0;
    let hbm = (problem.bytes_backward() + accumulators) / (limits.hbm_bytes_per_s * c.main_bandwidth);
    let main = overlap([overlap([busy, l2], 8.0), hbm], c.main_overlap);
    let prepare = (rows * 2.0 * hdv * 2.0 + accumulators) / (limits.hbm_bytes_per_s * c.prepare_bandwidth);
    let finish = (rows * hd * 2.0 + accumulators)
        / (limits.hbm_bytes_per_s * c.finish_bandwidth[usize::from(kernel.dq_swap_ab)]);
    let outer = prepare + finish + 3.0 * constants.launch_s;

    let alone = |clocks: f64| work.steps() / sms * clocks / clock;
    let terms = Terms {
        tensor: alone(tensor),
        exp: alone(exp),
        smem: alone(smem),
        l2,
        hbm: hbm + prepare + finish,
        waves: c.idle * (end - even) / clock,
        latency: 3.0 * constants.launch_s + (work.steps() * exposed + work.tiles * c.block) / sms / clock,
    };
    cost_of(problem, &work, main + outer, terms, sms)
}

fn cost_of(problem: &Problem, work: &Work, seconds: f64, terms: Terms, slots: f64) -> Cost {
    Cost {
        seconds,
        tflops: problem.flops_backward() / seconds / 1e12,
        bottleneck: terms.largest(),
        terms,
        tiles: work.tiles,
        slots,
        steps: work.steps(),
        masked_steps: work.masked(),
    }
}

/// What the launches of an SM80-class backward take their time for; clocks of a step, or of the whole.
pub(crate) struct Launches<'a> {
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
            latency: outer + (work.steps() * exposed + work.tiles * c.sm80_bwd_block) / sms / clock,
        };
        cost_of(problem, work, seconds, terms, sms)
    }
}
