//! What the SM90 backward takes of an SM: its shared memory, buffer by buffer, and its registers.

use fa_core::spec::operand_columns;
use fa_core::{KernelSpec, Sm90Bwd};

use crate::guide::kernel::guide_spec;
use crate::guide::mma::BwdMmas;
use crate::guide::regs;
use crate::head_dims::HeadDims;
use crate::kernels::copies_ahead;
use crate::registers::{Registers, SetMaxNReg};
use crate::smem::{SmemPlan, TILE_ALIGN};

/// Tile extents of the head dims for which the products of some tile can be divided among warpgroups.
pub const HEAD_DIMS: [u32; 7] = [32, 64, 80, 96, 128, 192, 256];

/// Alignment of row statistics: a 128-byte line, more than the 16 bytes that bulk copies need.
const ROW_STAT_ALIGN: u32 = 128;

/// The backward's `BwdStorage`, in declaration order (T is the 16-bit type; of operands, `hd` and `hdv` are
/// [`operand_columns`]):
///
/// - `q` `[q_stages][tile_m, hd]` T, `k` `[tile_n, hd]` T, `v` `[tile_n, hdv]` T, whose memory transposed dK
///   and dV reuse in the epilogue;
/// - `do` `[do_stages][tile_m, hdv]` T, `p` (unless P and dS are register operands) and `ds`
///   `[pds_stages][tile_m, tile_n]` T;
/// - `dq` `[tile_m, hd / dq_slices]` f32 with `dq_via_smem`: the tile that a bulk reduction adds to device
///   memory;
/// - `lse` and `dpsum` `[do_stages][tile_m]` f32, which arrive with dO;
/// - where a program's array is copied `ahead` `[tile_m][tile_n]` of 16 bits, unless S is transposed with 8
///   more columns for each warpgroup that shares its rows;
/// - mbarriers `k_full`, `v_full`, then `q_full`, `q_empty`, `do_full`, `do_empty`, one of each per stage;
///   with `persistent` also `k_empty`, `v_empty`, `drawn_full` and `drawn_empty`, and the tile that was
///   `drawn`, with its sequence's lengths where they are on the device; and a `ticket`, the number of a
///   deterministic CTA's tile. Warpgroups synchronise with each other and with the warps that add dQ by named
///   barriers, which take no memory.
pub fn smem(spec: &KernelSpec, kernel: &Sm90Bwd) -> SmemPlan {
    let [hd, hdv] = [spec.head_dim, spec.head_dim_v].map(operand_columns);
    let Sm90Bwd { tile_m, tile_n, q_stages, do_stages, pds_stages, .. } = *kernel;
    let bytes = spec.elem_bytes();
    let mut plan = SmemPlan::default();
    plan.push("q", q_stages * tile_m * hd * bytes, TILE_ALIGN);
    for (operand, gradient, size) in [("k", "dk", tile_n * hd * bytes), ("v", "dv", tile_n * hdv * bytes)] {
        plan.push(operand, size, TILE_ALIGN);
        if kernel.dkv_swap_ab {
            plan.alias_last(gradient, size);
        }
    }
    plan.push("do", do_stages * tile_m * hdv * bytes, TILE_ALIGN);
    let scores = pds_stages * tile_m * tile_n * bytes;
    if !kernel.mma_dkv_is_rs {
        plan.push("p", scores, TILE_ALIGN);
    }
    plan.push("ds", scores, TILE_ALIGN);
    if kernel.dq_via_smem {
        plan.push("dq", tile_m * spec.head_dim * 4 / kernel.dq_slices.max(1), TILE_ALIGN);
    }
    plan.push("lse", do_stages * tile_m * 4, ROW_STAT_ALIGN);
    plan.push("dpsum", do_stages * tile_m * 4, ROW_STAT_ALIGN);
    if copies_ahead(spec) {
        let beside = kernel.num_wg / kernel.atom_layout_m_sdp.max(1);
        let pad = if kernel.sdp_swap_ab { 0 } else { 8 * beside };
        plan.push("ahead", tile_m * (tile_n + pad) * 2, ROW_STAT_ALIGN);
    }
    plan.push_mbarriers("k_full", 1);
    plan.push_mbarriers("v_full", 1);
    for (name, stages) in
        [("q_full", q_stages), ("q_empty", q_stages), ("do_full", do_stages), ("do_empty", do_stages)]
    {
        plan.push_mbarriers(name, stages);
    }
    if kernel.persistent {
        for name in ["k_empty", "v_empty", "drawn_full", "drawn_empty"] {
            plan.push_mbarriers(name, 1);
        }
        plan.push("drawn", if spec.reads.varied { 88 } else { 48 }, 8);
    }
    plan.push("ticket", 4, 4);
    plan.round_up(TILE_ALIGN)
}

/// Further registers of a thread that reads lengths on the device, at the head dim whose producers take some
/// of the others' registers: there wgmma is serialised in all kernels that need 232 without them (C7512), and
/// in none that need 224.
const LENGTHS: u32 = 8;

/// Predicted registers of an MMA thread and their limit, by the guide's sum: dK and dV, and S with dP or a
/// slice of dQ.
pub fn registers(spec: &KernelSpec, kernel: &Sm90Bwd) -> Registers {
    let dims = HeadDims { head_dim: spec.head_dim, head_dim_v: spec.head_dim_v };
    let mmas = BwdMmas::new(dims, &guide_spec(kernel));
    // As `sm90/bwd_layout.cuh` sets them.
    let is_tight = spec.reads.varied && spec.head_dim > 192;
    let split = SetMaxNReg::with_lengths(kernel.num_wg, is_tight);
    let accumulators =
        regs::bwd(mmas.sdp.regs(), mmas.dk.regs(), mmas.dv.regs(), mmas.dq.regs() / kernel.dq_slices.max(1));
    let own = SetMaxNReg::of(kernel.num_wg).mma - regs::limit(kernel.num_wg);
    let other = own + if is_tight { LENGTHS } else { 0 };
    Registers {
        s: 2 * mmas.sdp.regs(),
        p: 0,
        o: mmas.dk.regs() + mmas.dv.regs(),
        q: mmas.dq.regs() / kernel.dq_slices.max(1),
        other,
        total: accumulators + other,
        limit: split.mma,
        setmaxnreg: Some(split),
    }
}
