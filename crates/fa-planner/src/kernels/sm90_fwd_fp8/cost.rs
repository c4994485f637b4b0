//! The time of an SM90 forward of e4m3 tensors: products at twice the rate of 16 bits, so that shared memory,
//! exponentials and issue slots each take about as long. What the SM90 forward's constants say of overlap
//! is not fitted to it; its first choices are those that an H200 has measured as fastest (NB-175).

use fa_core::spec::Scheduler;
use fa_core::{ArchLimits, KernelSpec, Problem, Sm90FwdFp8};

use crate::cost::constants::CostConstants;
use crate::cost::core::{KernelModel, Launch, overlap};
use crate::cost::memory::Memory;
use crate::cost::scores::{f32_lanes, score_costs, softmax_clocks};
use crate::kernels::planned::Forward;
use crate::work::Queue;

use super::account::registers;

/// The forward of `problem`, cut into the tiles of `kernel`.
pub(crate) fn launch<'a>(
    kernel: &'a Sm90FwdFp8,
    forward: &Forward<'a>,
) -> Launch<'a, impl Fn(f64) -> f64 + use<'a>> {
    let Forward { problem, spec, work, limits, constants } = *forward;
    let (model, step) = model(problem, spec, kernel, limits, constants);
    let step = move |_on_sm: f64| step;
    Launch { problem, tile: (kernel.tile_m, kernel.tile_n), work, model, step, limits, constants }
}

/// How many times as fast as on 16 bits the tensor cores are.
const TENSOR_RATE: f64 = 2.0;

/// f32 instructions per element for packing P: two of four numbers each, and a merge.
const PACK_OPS: f64 = 0.75;

/// Registers of the computing threads, beyond which the compiler's schedule suffers, below their limit.
const SPARE: u32 = 8;

/// The kernel, and the clocks of a step, overlap and latency included.
fn model(
    problem: &Problem,
    spec: &KernelSpec,
    k: &Sm90FwdFp8,
    limits: &ArchLimits,
    c: &CostConstants,
) -> (KernelModel, f64) {
    let [tile_m, tile_n, num_wg] = [k.tile_m, k.tile_n, k.num_wg].map(f64::from);
    let [hd, hdv] = [spec.head_dim, spec.head_dim_v].map(f64::from);
    let scores = tile_m * tile_n;
    let tensor = 2.0 * scores * (hd + hdv) / (TENSOR_RATE * limits.tensor_flops) / c.tensor_efficiency;

    // wgmma reads Q (64 rows a warpgroup), K and V; TMA writes K and V; the transposition reads and writes V.
    let reads = num_wg * ((64.0 + tile_n) * hd + tile_n * hdv) + tile_n * hdv;
    let writes = tile_n * (hd + 2.0 * hdv);
    let smem = (reads + writes) / limits.smem_bytes;

    let poly = f64::from(k.exp_poly_of_16) / 16.0;
    let sums = hdv / tile_n;
    // Of a soft cap an exponential and a reciprocal.
    let (_, cap_ops) = score_costs(spec.score, c);
    let cap_mufu = if spec.score.softcap { 2.0 } else { 0.0 };
    let ops = c.sm90_softmax_ops[0] + PACK_OPS + sums + poly * c.poly_ops + cap_ops;
    let exp = scores * softmax_clocks(limits, 1.0 - poly + cap_mufu, ops);

    let group = (k.num_wg.clamp(1, 3) - 1) as usize;
    let ping_pong = if k.ping_pong { c.sm90_ping_pong } else { 0.0 };
    let exponent = c.sm90_overlap[group][usize::from(k.overlap_wg)] + ping_pong;
    let products = overlap([tensor, smem], 4.0);
    let own = registers(spec, k);
    let strain = 1.0 + c.sm90_strain * f64::from((own.total + SPARE).saturating_sub(own.limit));
    let hidden = overlap([products, exp], exponent);
    let outside = match k.scheduler {
        Scheduler::PerTile => c.sm90_block,
        Scheduler::Static | Scheduler::Dynamic if k.q_stages == 1 => c.sm90_tile + c.sm90_q_wait,
        Scheduler::Static | Scheduler::Dynamic => c.sm90_tile,
    };
    let rows = problem.lengths.mean_q() * if k.pack_gqa { problem.group_size() } else { 1 };
    let model = KernelModel {
        head_dim: spec.head_dim,
        head_dim_v: spec.head_dim_v,
        sharing: 1.0,
        queue: Queue::of(k.scheduler == Scheduler::Static, k.tile_order),
        resident: 1.0,
        tensor,
        exp,
        smem,
        mask: scores * c.sm90_mask_ops / f32_lanes(limits),
        exposed: c.sm90_step,
        // Nothing hides the first step's S and the last step's P V.
        tile: (outside + products + exp - hidden).max(0.0),
        second: 0.0,
        start: 0.0,
        first: (tile_m * hd + tile_n * (hd + hdv)) / c.sm90_first_bytes,
        rows: tile_m.min(rows as f64),
        in_clusters: false,
        memory: Memory::Throttled,
    };
    (model, hidden * strain + c.sm90_step)
}
