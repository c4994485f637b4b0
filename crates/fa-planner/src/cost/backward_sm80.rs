//! The time of an SM80-class backward: as the SM90 one's, by mma.sync, whose operands all pass through ldmatrix.

use fa_core::spec::TileOrder;
use fa_core::{Arch, KernelSpec, MaskKind, Problem, Sm80Bwd};

use crate::plan::backward_sm80::bytes_read;

use super::backward::{Launches, head_splits};
use super::schedule::{Queue, TileClass, Work};
use super::{Cost, CostConstants, overlap, softmax_clocks};

/// Predicts the backward of `problem` by `kernel`, the launches before and after it included.
pub(super) fn predict(
    problem: &Problem,
    spec: &KernelSpec,
    kernel: &Sm80Bwd,
    arch: Arch,
    c: &CostConstants,
) -> Cost {
    let limits = arch.limits();
    let [tile_m, tile_n, warps] = [kernel.tile_m, kernel.tile_n, kernel.num_warps].map(f64::from);
    let [hd, hdv] = [spec.head_dim, spec.head_dim_v].map(f64::from);
    let scores = tile_m * tile_n;

    let rate = limits.tensor_flops * c.mma_sync_rate * c.tensor_efficiency;
    let tensor = 2.0 * scores * (3.0 * hd + 2.0 * hdv) / rate;
    // Operands and P, read; P and dS stored; Q and dO copied in.
    let bytes = f64::from(bytes_read(spec, kernel)) + 4.0 * scores + 2.0 * tile_m * (hd + hdv);
    let smem = bytes / limits.smem_bytes;
    let (cap_mufu, cap_ops) = if spec.softcap { (2.0, c.softcap_ops + 3.0) } else { (0.0, 0.0) };
    let exp = scores * softmax_clocks(limits, 1.0 + cap_mufu, c.bwd_ops + cap_ops);
    // With few warps little runs beside a product but its own loads.
    let per_scheduler = warps / 4.0;
    let exponent = 1.0 + c.sm80_overlap * per_scheduler / (per_scheduler + 2.0);
    let exposed = c.sm80_step
        + if kernel.q_stages == 2 { c.bwd_second_barrier } else { 0.0 }
        + if kernel.do_stages == 1 { c.bwd_second_barrier } else { 0.0 }
        + if kernel.deterministic { c.bwd_turn } else { 0.0 };
    let step = overlap([tensor, exp, smem], exponent) + exposed;

    let splits = head_splits(problem, kernel.tile_n, kernel.deterministic, limits.sms);
    let work = Work::of_keys(problem, kernel.tile_m, kernel.tile_n, splits);
    let mask = scores * c.mask_ops / super::f32_lanes(limits);
    let length = |class: &TileClass| c.bwd_block + class.steps * step + class.masked * mask;
    let queue = match (spec.mask, kernel.tile_order) {
        (MaskKind::Full, _) => Queue::Fixed,
        (_, TileOrder::LongestFirst) => Queue::LongestFirst,
        (_, TileOrder::Natural) => Queue::ShortestFirst,
    };
    let (total, end) = work.makespan(f64::from(limits.sms), queue, length);
    Launches {
        tensor,
        exp,
        smem,
        l2: 0.0,
        exposed,
        total,
        end,
        work: &work,
        flops_per_step: 2.0 * scores * (3.0 * hd + 2.0 * hdv),
    }
    .cost(problem, [hd, hdv], limits, c)
}
