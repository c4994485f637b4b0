//! The exact shared memory of the SM90 kernels, buffer by buffer, beside the guide's sum of tensor buffers.

use fa_core::spec::Scheduler;
use fa_core::{KernelSpec, Sm90Bwd, Sm90Fwd};

use crate::smem::{SmemPlan, TILE_ALIGN};

/// Alignment of the rows' statistics: a 128-byte line, above the 16 bytes that bulk copies ask for.
const ROW_STAT_ALIGN: u32 = 128;

/// The forward's `SharedStorage`, in declaration order (T is the 16-bit type, tiles are `[hd / 64][rows][64]` panels):
///
/// - `q` `[q_stages][tile_m, hd]` T (O goes from registers straight to device memory);
/// - `k` `[kv_stages][tile_n, hd]` T, `v` `[kv_stages][tile_n, hdv]` T, `p` `[tile_m, tile_n]` T unless P stays in registers;
/// - mbarriers `q_full`, `q_empty`, `k_full`, `k_empty`, `v_full`, `v_empty`, one of each per stage;
/// - with the dynamic scheduler `sched_full`, `sched_empty` (mbarriers) and `tile_slot` (4 x i32).
///
/// Stages need no padding between them: with rows in multiples of 16 a stage is a whole number of atoms of whichever
/// swizzle its row width allows. The total is a multiple of 1024.
pub fn fwd(spec: &KernelSpec, kernel: &Sm90Fwd) -> SmemPlan {
    let bytes = spec.dtype.bytes() as u32;
    let Sm90Fwd { tile_m, tile_n, q_stages, kv_stages, .. } = *kernel;
    let mut plan = SmemPlan::default();
    plan.push("q", q_stages * tile_m * spec.head_dim * bytes, TILE_ALIGN);
    plan.push("k", kv_stages * tile_n * spec.head_dim * bytes, TILE_ALIGN);
    plan.push("v", kv_stages * tile_n * spec.head_dim_v * bytes, TILE_ALIGN);
    if !kernel.pv_is_rs {
        plan.push("p", tile_m * tile_n * bytes, TILE_ALIGN);
    }
    plan.push_mbarriers("q_full", q_stages);
    plan.push_mbarriers("q_empty", q_stages);
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

/// The backward's `BwdStorage`, in declaration order (T is the 16-bit type):
///
/// - `q` `[q_stages][tile_m, hd]` T, `k` `[tile_n, hd]` T, `v` `[tile_n, hdv]` T, which transposed dK and dV reuse on their way out;
/// - `do` `[do_stages][tile_m, hdv]` T, `p` (unless P and dS are register operands) and `ds` `[pds_stages][tile_m, tile_n]` T;
/// - `dq` `[tile_m, hd / dq_slices]` f32 with `dq_via_smem`: the tile that the bulk copy engine adds to device memory;
/// - `lse` and `dpsum` `[do_stages][tile_m]` f32, which arrive with dO;
/// - mbarriers `k_full`, `v_full`, then `q_full`, `q_empty`, `do_full`, `do_empty`, one of each per stage; and a `ticket`. What the
///   warp groups say to each other and to the warps that add dQ goes through named barriers, which take no memory.
pub fn bwd(hd: u32, hdv: u32, kernel: &Sm90Bwd) -> SmemPlan {
    let Sm90Bwd { tile_m, tile_n, q_stages, do_stages, pds_stages, .. } = *kernel;
    let mut plan = SmemPlan::default();
    plan.push("q", q_stages * tile_m * hd * 2, TILE_ALIGN);
    for (operand, gradient, size) in [("k", "dk", tile_n * hd * 2), ("v", "dv", tile_n * hdv * 2)] {
        plan.push(operand, size, TILE_ALIGN);
        if kernel.dkv_swap_ab {
            plan.alias_last(gradient, size);
        }
    }
    plan.push("do", do_stages * tile_m * hdv * 2, TILE_ALIGN);
    let scores = pds_stages * tile_m * tile_n * 2;
    if !kernel.mma_dkv_is_rs {
        plan.push("p", scores, TILE_ALIGN);
    }
    plan.push("ds", scores, TILE_ALIGN);
    if kernel.dq_via_smem {
        plan.push("dq", tile_m * hd * 4 / kernel.dq_slices.max(1), TILE_ALIGN);
    }
    plan.push("lse", do_stages * tile_m * 4, ROW_STAT_ALIGN);
    plan.push("dpsum", do_stages * tile_m * 4, ROW_STAT_ALIGN);
    plan.push_mbarriers("k_full", 1);
    plan.push_mbarriers("v_full", 1);
    for (name, stages) in
        [("q_full", q_stages), ("q_empty", q_stages), ("do_full", do_stages), ("do_empty", do_stages)]
    {
        plan.push_mbarriers(name, stages);
    }
    plan.push("ticket", 4, 4);
    plan.round_up(TILE_ALIGN)
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Kernel, MaskKind};

    use super::*;
    use crate::smem::sm90_fwd_smem;

    /// Offsets and total by hand, for a 128x176 forward at head dim 128 and for one with all that can be there.
    #[test]
    fn forward_storage_is_laid_out_as_declared() {
        let kernel = Sm90Fwd {
            tile_m: 128,
            tile_n: 176,
            num_wg: 2,
            pv_is_rs: true,
            q_stages: 1,
            kv_stages: 2,
            scheduler: Scheduler::Static,
            ..Sm90Fwd::default()
        };
        let spec = KernelSpec {
            dtype: Dtype::Bf16,
            head_dim: 128,
            head_dim_v: 128,
            mask: MaskKind::Full,
            softcap: false,
            kernel: Kernel::Sm90Fwd(kernel.clone()),
        };
        let offsets = |plan: &SmemPlan| -> Vec<(String, u32)> {
            plan.buffers.iter().map(|b| (b.name.to_string(), b.offset)).collect()
        };
        let plan = sm90_fwd_smem(&spec).expect("an SM90 forward");
        let mut expected: Vec<(String, u32)> = Vec::new();
        let mut expect = |name: &str, offset| expected.push((name.into(), offset));
        let barriers = 32768 + 2 * 90112;
        expect("q", 0);
        expect("k", 32768);
        expect("v", 32768 + 90112);
        for (name, offset) in
            [("q_full", 0), ("q_empty", 8), ("k_full", 16), ("k_empty", 32), ("v_full", 48), ("v_empty", 64)]
        {
            expect(name, barriers + offset);
        }
        assert_eq!(offsets(&plan), expected);
        assert_eq!(plan.total, barriers + 1024);

        let kernel =
            Sm90Fwd { tile_n: 64, kv_stages: 1, pv_is_rs: false, scheduler: Scheduler::Dynamic, ..kernel };
        let spec = KernelSpec { head_dim: 64, kernel: Kernel::Sm90Fwd(kernel), ..spec };
        let plan = sm90_fwd_smem(&spec).expect("an SM90 forward");
        let at = |name: &str| plan.buffer(name).map(|b| (b.offset, b.size));
        assert_eq!((at("q"), at("k")), (Some((0, 16384)), Some((16384, 8192))));
        assert_eq!((at("v"), at("p")), (Some((24576, 16384)), Some((40960, 16384))));
        assert_eq!((at("sched_full"), at("sched_empty")), (Some((57344 + 48, 8)), Some((57344 + 56, 8))));
        assert_eq!((at("tile_slot"), plan.total), (Some((57344 + 64, 16)), 57344 + 1024));
    }
}
