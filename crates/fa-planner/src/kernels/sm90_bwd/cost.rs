//! The time of an SM90 backward: preprocess, main kernel and postprocess.
//!
//! The five products of a step keep the tensor cores busy, and their operands shared memory; softmax and the
//! gradient of the scores overlap them in part. Preprocess and postprocess move the f32 accumulators of dQ
//! through device memory: at lengths below 2,000 they and the main kernel's own traffic take half of the
//! time.

use fa_core::spec::operand_columns;
use fa_core::{ArchLimits, KernelSpec, MaskKind, Pass, Problem, Sm90Bwd};

use crate::account::panels::BwdPanels;
use crate::account::stored::storing_heads;
use crate::cost::constants::CostConstants;
use crate::cost::core::overlap;
use crate::cost::cuts::Cuts;
use crate::cost::gpu::Gpu;
use crate::cost::head_splits::BackwardRates;
use crate::cost::predicted::{Cost, StepClocks, Terms};
use crate::cost::scores::{slope_costs, softmax_clocks};
use crate::guide::kernel::guide_spec;
use crate::guide::mma::BwdMmas;
use crate::guide::traffic;
use crate::head_dims::HeadDims;
use crate::work::{Queue, TileClass};

use super::candidates::has_few_steps;

/// Share of the tensor cores' peak that a step reaches.
const TENSOR_EFFICIENCY: f64 = 0.75;

/// Columns of panels that products read more slowly than others.
const NARROW: u32 = 16;

/// Clocks of a CTA outside its steps, as far as they count for the number of CTAs that share a group's heads.
const CTA: f64 = 2400.0;

/// What the number of CTAs that share a group's heads is chosen by.
pub(crate) fn rates(limits: &ArchLimits, _: &CostConstants) -> BackwardRates {
    BackwardRates { tensor_flops: limits.tensor_flops * TENSOR_EFFICIENCY, cta: CTA }
}

/// Predicts the backward of `problem` by `kernel`, preprocess and postprocess included.
pub(crate) fn predict(
    problem: &Problem,
    spec: &KernelSpec,
    kernel: &Sm90Bwd,
    gpu: Gpu<'_>,
    cuts: &mut Cuts,
) -> Cost {
    let Gpu { arch, limits, constants } = gpu;
    let c = &constants.sm90_bwd;
    let [tile_m, tile_n] = [kernel.tile_m, kernel.tile_n].map(f64::from);
    let dims = HeadDims { head_dim: spec.head_dim, head_dim_v: spec.head_dim_v };
    let [hd, hdv] = [spec.head_dim, spec.head_dim_v].map(f64::from);
    let scores = tile_m * tile_n;
    let sms = f64::from(limits.sms);
    let clock = limits.clock_ghz * 1e9 * c.clock;

    let guide = guide_spec(kernel);
    let mmas = BwdMmas::new(dims, &guide);
    // The guide counts a store and a read of the f32 tile of dQ; without its buffer dQ leaves from registers.
    let dq_tile = tile_m * hd * 4.0;
    let dq_bytes = if kernel.dq_via_smem { 0.0 } else { 2.0 * dq_tile };
    let panels = BwdPanels::of(spec, kernel);
    let bytes = f64::from(spec.elem_bytes());
    let loads = tile_m * (hd + hdv) * bytes;
    let [stored, stored_v] = [spec.head_dim, spec.head_dim_v].map(|dim| f64::from(operand_columns(dim)));
    let written = tile_m * (stored + stored_v) * bytes;
    let of_panels = [(panels.k, tile_n * hd), (panels.q, tile_m * hd), (panels.dout, tile_m * hdv)];
    let narrow =
        of_panels.iter().filter(|(columns, _)| *columns <= NARROW).map(|own| own.1 * bytes).sum::<f64>();
    let smem = (f64::from(traffic::bwd(dims, &guide, &mmas)) - dq_bytes + written + c.narrow * narrow)
        / limits.smem_bytes;
    let tensor = 2.0 * scores * (3.0 * hd + 2.0 * hdv) / limits.tensor_flops;
    let (cap_mufu, cap_ops) = slope_costs(spec.score, constants);
    let exp = scores * softmax_clocks(limits, 1.0 + cap_mufu, c.ops + cap_ops);
    let products = overlap([tensor, smem], c.smem_overlap);
    let q_load = tile_m * hd * bytes / constants.sm_bytes_per_clock;
    let exposed = c.step
        + if kernel.mma_dkv_is_rs { 0.0 } else { c.p_store }
        + if kernel.pds_stages == 1 { c.second_barrier } else { 0.0 }
        // With one buffer the load of the next Q starts when dK has read this one, and S waits for all of it.
        + if kernel.q_stages == 1 { c.q_latency + q_load } else { 0.0 }
        + if kernel.dq_via_smem || kernel.whole_keys || has_few_steps(problem, kernel) {
            0.0
        } else {
            dq_tile / c.atomic_bytes
        }
        + if kernel.dq_swap_ab { 0.0 } else { c.plain_dq }
        + if kernel.deterministic { c.turn } else { 0.0 };
    let copies = c.copied_row * tile_m * (stored / f64::from(panels.q) + stored_v / f64::from(panels.dout));
    let step = overlap([products, exp, copies], c.overlap[usize::from(kernel.num_wg == 3)]) + exposed;
    let (split, work) = cuts.of_keys(problem, spec, rates(limits, constants), limits);
    // A CTA computes nothing until its first Q and dO are there (NB-107). One that draws tiles loads those of
    // the next tile under the end of this one (NB-109).
    let waiting = if kernel.persistent { (sms / work.tiles.max(1.0)).min(1.0) } else { 1.0 };
    let outside = c.block + waiting * loads / constants.first_bytes;
    // The products hide the test of a mask.
    let added = split.added / c.atomic_bytes;
    let length = |class: &TileClass| outside + added + class.steps * step;
    let is_assigned = spec.mask == MaskKind::Full && !spec.score.masks();
    let queue = Queue::of(is_assigned, kernel.tile_order);
    let (total, end) = work.makespan(sms, queue, length);
    // In the first wave all SMs ask for K and V as well, and for all of it at once; those of the last wave
    // add their parts at once.
    let first = (tile_m + tile_n) * (hd + hdv) * bytes / constants.first_bytes;
    let last = split.added * work.tiles.min(sms) / c.part_bytes;
    let busy = (end + first + last) / clock;
    // Every step reads Q and dO from L2 and adds the f32 tile of dQ there, every tile its parts.
    let added_dq = if kernel.whole_keys { 0.0 } else { c.add_weight * dq_tile };
    let of_steps = work.steps() * (loads + added_dq) / limits.l2_bytes_per_clock;
    let l2 = (of_steps + work.tiles * split.added / c.part_bytes) / clock;

    let rows = problem.rows();
    let accumulators = if kernel.whole_keys { 0.0 } else { rows * hd * 4.0 };
    let hbm = (problem.bytes_backward() + accumulators + split.missed)
        / (limits.hbm_bytes_per_s * c.main_bandwidth);
    let main = overlap([overlap([busy, l2], 8.0), hbm], c.main_overlap);
    let stored = storing_heads(spec, problem, arch, limits.sms).is_some();
    let zeros = if stored { 0.0 } else { accumulators };
    let prepare =
        (rows * 2.0 * hdv * bytes + zeros + split.sums) / (limits.hbm_bytes_per_s * c.prepare_bandwidth);
    let converted = if kernel.whole_keys { 0.0 } else { rows * hd * bytes };
    let finish =
        (converted + accumulators + 1.5 * split.sums) / (limits.hbm_bytes_per_s * c.finish_bandwidth);
    // Parts of dK and dV are added up by a launch of their own.
    let launches = (3.0 + f64::from(split.parts > 1) - f64::from(kernel.whole_keys)) * constants.launch_s;
    let outer = prepare + finish + launches;

    let alone = |clocks: f64| work.steps() / sms * clocks / clock;
    let terms = Terms {
        tensor: alone(tensor),
        exp: alone(exp),
        smem: alone(smem),
        l2,
        hbm: hbm + prepare + finish,
        waves: (end - total / sms) / clock,
        latency: launches + (work.steps() * exposed + work.tiles * outside) / sms / clock,
    };
    let step = StepClocks { resident: 1.0, tensor, exp, smem, exposed, total: step };
    Cost::of(problem, Pass::BACKWARD, (work, 1), main + outer, terms, sms, step)
}
