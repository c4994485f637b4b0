//! The exact shared memory of the SM90 kernels, buffer by buffer, beside the guide's sum of tensor buffers.

use fa_core::spec::Scheduler;
use fa_core::{KernelSpec, Sm90Fwd};

use crate::smem::{SmemPlan, TILE_ALIGN};

/// The forward's `SharedStorage`, in declaration order (T is the 16-bit type, tiles are `[hd / 64][rows][64]` panels):
///
/// - `q` `[tile_m, hd]` T, reused by `o` `[tile_m, hdv]` T in the epilogue;
/// - `k` `[kv_stages][tile_n, hd]` T, `v` `[kv_stages][tile_n, hdv]` T, `p` `[tile_m, tile_n]` T unless P stays in registers;
/// - mbarriers `q_full`, `q_empty`, then `k_full`, `k_empty`, `v_full`, `v_empty`, one of each per stage;
/// - with the dynamic scheduler `sched_full`, `sched_empty` (mbarriers) and `tile_slot` (4 x i32).
///
/// Stages need no padding between them: with rows in multiples of 16 a stage is a whole number of atoms of whichever
/// swizzle its row width allows. The total is a multiple of 1024.
pub fn fwd(spec: &KernelSpec, kernel: &Sm90Fwd) -> SmemPlan {
    let bytes = spec.dtype.bytes() as u32;
    let Sm90Fwd { tile_m, tile_n, kv_stages, .. } = *kernel;
    let mut plan = SmemPlan::default();
    plan.push("q", tile_m * spec.head_dim * bytes, TILE_ALIGN);
    plan.alias_last("o", tile_m * spec.head_dim_v * bytes);
    plan.push("k", kv_stages * tile_n * spec.head_dim * bytes, TILE_ALIGN);
    plan.push("v", kv_stages * tile_n * spec.head_dim_v * bytes, TILE_ALIGN);
    if !kernel.pv_is_rs {
        plan.push("p", tile_m * tile_n * bytes, TILE_ALIGN);
    }
    plan.push_mbarriers("q_full", 1);
    plan.push_mbarriers("q_empty", 1);
    for name in ["k_full", "k_empty", "v_full", "v_empty"] {
        plan.push_mbarriers(name, kv_stages);
    }
    if kernel.scheduler == Scheduler::Dynamic {
        plan.push_mbarriers("sched_full", 1);
        plan.push_mbarriers("sched_empty", 1);
        plan.push("tile_slot", 4 * 4, 16);
    }
    plan.round_up(TILE_ALIGN)
}
