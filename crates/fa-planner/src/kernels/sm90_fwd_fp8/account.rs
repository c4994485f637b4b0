//! What the SM90 forward of e4m3 tensors takes of an SM: its shared memory, buffer by buffer, and its
//! registers.

use fa_core::spec::Scheduler;
use fa_core::{KernelSpec, MaskKind, Sm90FwdFp8};

use crate::registers::{Registers, SetMaxNReg};
use crate::smem::{SmemPlan, TILE_ALIGN};

/// Tile extents of the head dims: multiples of the k32 steps of wgmma on 8 bits.
pub const HEAD_DIMS: [u32; 6] = [64, 96, 128, 160, 192, 256];

/// The forward's `Fp8Storage`, in declaration order; elements are bytes:
///
/// - `q` `[q_stages][tile_m, hd]`;
/// - `k` `[kv_stages][tile_n, hd]`, `vt` (V transposed) `[kv_stages][hdv, tile_n]`, `v` (as it is loaded)
///   `[v_stages][tile_n, hdv]`;
/// - mbarriers `q_full`, `q_empty`, `k_full`, `k_empty`, `vt_full`, `vt_empty`, `v_full`, `v_empty`, one of
///   each per stage;
/// - with the dynamic scheduler `sched_full`, `sched_empty` (mbarriers) and `tile_slot` (4 x i32; 12 for
///   lengths on the device).
pub fn smem(spec: &KernelSpec, kernel: &Sm90FwdFp8) -> SmemPlan {
    let Sm90FwdFp8 { tile_m, tile_n, q_stages, kv_stages, v_stages, .. } = *kernel;
    let [hd, hdv] = [spec.head_dim, spec.head_dim_v];
    let mut plan = SmemPlan::default();
    plan.push("q", q_stages * tile_m * hd, TILE_ALIGN);
    plan.push("k", kv_stages * tile_n * hd, TILE_ALIGN);
    plan.push("vt", kv_stages * tile_n * hdv, TILE_ALIGN);
    plan.push("v", v_stages * tile_n * hdv, TILE_ALIGN);
    for (full, empty, stages) in [
        ("q_full", "q_empty", q_stages),
        ("k_full", "k_empty", kv_stages),
        ("vt_full", "vt_empty", kv_stages),
        ("v_full", "v_empty", v_stages),
    ] {
        plan.push_mbarriers(full, stages);
        plan.push_mbarriers(empty, stages);
    }
    if kernel.scheduler == Scheduler::Dynamic {
        plan.push_mbarriers("sched_full", 1);
        plan.push_mbarriers("sched_empty", 1);
        plan.push("tile_slot", if spec.reads.varied { 12 * 4 } else { 4 * 4 }, 16);
    }
    plan.round_up(TILE_ALIGN)
}

/// Registers in addition to the accumulators and P, without and with overlap.
const OVERHEAD: [u32; 2] = [28, 24];

/// The same of three warpgroups, which share fewer.
const OVERHEAD_OF_THREE: u32 = 20;

/// Further registers of a soft cap under overlap: of 232, what needs 232 without it spills 264 bytes in NVRTC
/// 13.0, of 255 what needs 252; without overlap 128 x 192 keeps its 212.
const SOFTCAP: u32 = 8;

/// The same of a mask at head dims above 64: of 232, what needs 232 without it spills 24 bytes in NVRTC 13.0.
const MASKED: u32 = 4;

/// The split of the registers: the producers transpose V, and need more with lengths on the device.
const fn split(num_wg: u32, varied: bool) -> SetMaxNReg {
    match (num_wg, varied) {
        (2, false) => SetMaxNReg { mma: 232, producer: 40, follower: None },
        (2, true) => SetMaxNReg { mma: 224, producer: 56, follower: None },
        (3, false) => SetMaxNReg { mma: 152, producer: 56, follower: None },
        (3, true) => SetMaxNReg { mma: 144, producer: 80, follower: None },
        _ => SetMaxNReg::of(num_wg),
    }
}

/// Registers of the products of a step, which f32 units add to O: of a slice of the columns; none where the
/// tensor cores add to O.
fn products(spec: &KernelSpec, kernel: &Sm90FwdFp8) -> u32 {
    if kernel.two_level { kernel.slice(spec.head_dim_v) / 2 } else { 0 }
}

/// Predicted registers of an MMA thread and their limit. Without overlap the scores of a step are gone when
/// its products come.
pub fn registers(spec: &KernelSpec, kernel: &Sm90FwdFp8) -> Registers {
    let (scores, products) = (kernel.tile_n / 2, products(spec, kernel));
    let s = if kernel.overlap_wg { scores + products } else { scores.max(products) };
    let (p, o) = (kernel.tile_n / 8, spec.head_dim_v / 2);
    let cap = if spec.score.softcap { SOFTCAP } else { 0 };
    let mask = if spec.mask == MaskKind::Full || spec.head_dim_v <= 64 { 0 } else { MASKED };
    let other = if kernel.overlap_wg { cap + mask } else { 0 }
        + match kernel.num_wg {
            3 => OVERHEAD_OF_THREE,
            _ => OVERHEAD[usize::from(kernel.overlap_wg)],
        };
    let own = split(kernel.num_wg, spec.reads.varied);
    Registers {
        s,
        p,
        o,
        q: 0,
        other,
        total: s + p + o + other,
        // The allocation allows 256; an instruction can name 255.
        limit: own.mma.min(255),
        setmaxnreg: Some(own),
    }
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Reads, ScoreKind, Types};

    use super::*;

    fn spec(head_dim: u32, kernel: &Sm90FwdFp8) -> KernelSpec {
        KernelSpec {
            types: Types::same(Dtype::E4m3).with_out(Dtype::Bf16),
            head_dim,
            head_dim_v: head_dim,
            mask: MaskKind::Full,
            score: ScoreKind::NONE,
            reads: Reads::UNIFORM,
            split: false,
            kernel: kernel.clone().into(),
        }
    }

    /// 128 x 192 at head dim 128 by hand: 16 of Q, 2 x 24 of K and of V transposed, 24 of V.
    #[test]
    fn storage_is_laid_out_as_declared() {
        let kernel = Sm90FwdFp8 { tile_n: 192, scheduler: Scheduler::Dynamic, ..Sm90FwdFp8::default() };
        let plan = smem(&spec(128, &kernel), &kernel);
        let at = |name: &str| plan.buffer(name).map(|b| (b.offset, b.size));
        let kib = 1024;
        assert_eq!((at("q"), at("k")), (Some((0, 16 * kib)), Some((16 * kib, 48 * kib))));
        assert_eq!((at("vt"), at("v")), (Some((64 * kib, 48 * kib)), Some((112 * kib, 24 * kib))));
        assert_eq!((at("q_full"), at("k_empty")), (Some((136 * kib, 8)), Some((136 * kib + 32, 16))));
        assert_eq!(
            (at("v_empty"), at("tile_slot")),
            (Some((136 * kib + 88, 8)), Some((136 * kib + 112, 16)))
        );
        assert_eq!(plan.total, 137 * kib);
    }

    #[test]
    fn products_take_the_place_of_scores_without_overlap() {
        let total = |head_dim, kernel: Sm90FwdFp8| registers(&spec(head_dim, &kernel), &kernel).total;
        let base = Sm90FwdFp8::default();
        assert_eq!(total(128, Sm90FwdFp8 { tile_n: 192, ..base.clone() }), 96 + 24 + 64 + 28);
        assert_eq!(
            total(128, Sm90FwdFp8 { tile_n: 128, overlap_wg: true, ..base.clone() }),
            128 + 16 + 64 + 24
        );
        assert_eq!(
            total(128, Sm90FwdFp8 { tile_n: 96, overlap_wg: true, ..base.clone() }),
            112 + 12 + 64 + 24
        );
        assert_eq!(total(256, Sm90FwdFp8 { tile_n: 96, ..base.clone() }), 48 + 12 + 128 + 28);
        assert_eq!(total(256, Sm90FwdFp8 { two_level: false, ..base }), 64 + 16 + 128 + 28);
    }

    #[test]
    fn a_soft_cap_under_overlap_takes_registers() {
        let total = |overlap_wg, softcap| {
            let kernel = Sm90FwdFp8 { tile_n: 128, overlap_wg, ..Sm90FwdFp8::default() };
            let mut spec = spec(128, &kernel);
            spec.score.softcap = softcap;
            let registers = registers(&spec, &kernel);
            (registers.total, registers.total <= registers.limit)
        };
        assert_eq!([total(true, false), total(true, true)], [(232, true), (240, false)]);
        assert_eq!(total(false, true), total(false, false));
    }
}
