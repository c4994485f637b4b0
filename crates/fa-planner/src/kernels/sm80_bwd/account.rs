//! What the SM80-class backward takes of an SM: its shared memory, its registers, and what a step reads.

use fa_core::{Arch, KernelSpec, MaskKind, Sm80Bwd};

use crate::kernels::sm80_fwd::account::ALIGN;
use crate::occupancy::{WARP, register_ceiling};
use crate::registers::Registers;
use crate::smem::SmemPlan;

/// Registers of a thread for operands, the statistics of its rows, addresses and loop state.
const OVERHEAD: u32 = 60;

/// Further registers while S or dP is live, where CTAs wait for the dQ semaphore.
const TURNS: u32 = 8;

/// From this many accumulators of dK or dV on, a thread needs ...
const FULL_ACCUMULATORS: u32 = 128;

/// ... so many more registers on architectures other than 9.0.
const ELSEWHERE: u32 = 8;

/// The shared memory of a CTA. T is the 16-bit type; tiles are swizzled panels of at most 64 columns:
///
/// - `q` `[q_stages][tile_m, hd]` T, `do` `[do_stages][tile_m, hdv]` T, `k` `[tile_n, hd]` T, `v` `[tile_n,
///   hdv]` T;
/// - `p` and `ds` `[tile_m, tile_n]` T, with a soft cap or a program that has a slope or weights `p` twice:
///   P times the weights, and P times the slope;
/// - `lse` `[q_stages][tile_m]` and `dpsum` `[do_stages][tile_m]` f32, which come with Q and dO;
/// - `tile`, `range` and `step`: six, four and four 32-bit words with the CTA's work and the progress of its
///   warps.
pub fn smem(spec: &KernelSpec, kernel: &Sm80Bwd) -> SmemPlan {
    let Sm80Bwd { tile_m, tile_n, .. } = *kernel;
    let (hd, hdv) = (spec.head_dim, spec.head_dim_v);
    let (align, bytes) = (ALIGN, spec.elem_bytes());
    let mut plan = SmemPlan::default();
    plan.push("q", kernel.q_stages * tile_m * hd * bytes, align);
    plan.push("do", kernel.do_stages * tile_m * hdv * bytes, align);
    plan.push("k", tile_n * hd * bytes, align);
    plan.push("v", tile_n * hdv * bytes, align);
    let sloped = spec.score.softcap || spec.score.has_slope() || spec.score.weighs();
    plan.push("p", if sloped { 2 } else { 1 } * tile_m * tile_n * bytes, align);
    plan.push("ds", tile_m * tile_n * bytes, align);
    plan.push("lse", kernel.q_stages * tile_m * 4, align);
    plan.push("dpsum", kernel.do_stages * tile_m * 4, align);
    let varied = spec.reads.varied;
    plan.push("tile", if varied { 10 * 4 } else { 6 * 4 }, 4);
    plan.push("range", 4 * 4, 4);
    plan.push("step", 4 * 4, 8);
    if varied {
        // Before it is the place of `descending`.
        plan.push("descending", 4, 4);
        plan.push("seqlen", 6 * 4, 4);
    } else if kernel.deterministic && spec.mask == MaskKind::Causal {
        plan.push("descending", 4, 4);
    }
    plan.round_up(align)
}

/// Predicted registers of a thread, and the ceiling that the launch bounds give the compiler. Each half of
/// the warps keeps dK or dV throughout, and in addition S or dP or its part of dQ.
pub fn registers(spec: &KernelSpec, kernel: &Sm80Bwd, arch: Arch) -> Registers {
    let limits = arch.limits();
    let threads = WARP * kernel.num_warps;
    let group = threads / 2;
    let s = kernel.tile_m * kernel.tile_n / group;
    let o = kernel.tile_n * spec.head_dim.max(spec.head_dim_v) / group;
    let q = kernel.tile_m * kernel.dq_first.max(spec.head_dim - kernel.dq_first) / group;
    // Fragments of dQ's A operand are held for two contraction steps; the allowance covers two fragments.
    let dq_fragments = kernel.tile_m / kernel.atom_layout_m_dq / 16;
    // Measured: with so many accumulators the compiler needs more on all architectures but 9.0.
    let elsewhere = if arch != Arch::Sm90 && o >= FULL_ACCUMULATORS { ELSEWHERE } else { 0 };
    let overhead = OVERHEAD + elsewhere;
    let other = overhead + if kernel.deterministic { TURNS } else { 0 };
    Registers {
        s,
        p: 0,
        o,
        q,
        other,
        total: o + (s + other).max(q + overhead + 8 * dq_fragments.saturating_sub(2)),
        limit: register_ceiling(limits, threads, kernel.blocks_per_sm),
        setmaxnreg: None,
    }
}

/// 16 x 16 fragments of operands that all warps read in a contraction step of a `[rows, columns]` product
/// with `atoms` warps along its rows; `None` where a warp would not get whole fragments.
pub(super) fn blocks_read(rows: u32, columns: u32, warps: u32, atoms: u32) -> Option<u32> {
    let across = warps / atoms;
    (rows.is_multiple_of(16 * atoms) && columns.is_multiple_of(16 * across))
        .then(|| (rows * across + columns * atoms) / 16)
}

/// Bytes of shared memory that the products of a step read, and dS reads of P.
pub(super) fn bytes_read(spec: &KernelSpec, kernel: &Sm80Bwd) -> u32 {
    let Sm80Bwd { tile_m, tile_n, num_warps, dq_first, .. } = *kernel;
    let (hd, hdv) = (spec.head_dim, spec.head_dim_v);
    let reads = |rows, columns, contraction, atoms| {
        blocks_read(rows, columns, num_warps / 2, atoms).map_or(0, |blocks| blocks * contraction / 16 * 512)
    };
    let dq = |columns| if columns > 0 { reads(tile_m, columns, tile_n, kernel.atom_layout_m_dq) } else { 0 };
    reads(tile_m, tile_n, hd + hdv, kernel.atom_layout_m_sdp)
        + reads(tile_n, hd, tile_m, kernel.atom_layout_n_dkv)
        + reads(tile_n, hdv, tile_m, kernel.atom_layout_n_dkv)
        + dq(dq_first)
        + dq(hd - dq_first)
        + 2 * tile_m * tile_n
}
