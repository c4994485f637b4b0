//! What the SM90 forward takes of an SM: its shared memory, buffer by buffer, and its registers.

use fa_core::spec::{Scheduler, operand_columns};
use fa_core::{KernelSpec, Sm90Fwd};

use crate::kernels::copies_ahead;
use crate::registers::{Registers, SetMaxNReg};
use crate::smem::{SmemPlan, TILE_ALIGN};

/// Tile extents of the head dims: multiples of the k16 steps of wgmma.
pub const HEAD_DIMS: [u32; 10] = [32, 64, 80, 96, 112, 128, 160, 192, 224, 256];

/// The forward's `SharedStorage`, in declaration order (T is the 16-bit type, tiles are `[hd / 64][rows][64]`
/// panels, `hd` and `hdv` are [`operand_columns`]):
///
/// - `q` `[q_stages][tile_m, hd]` T (O goes from registers straight to device memory);
/// - `k` `[kv_stages][tile_n, hd]` T, `v` `[kv_stages][tile_n, hdv]` T, `p` `[tile_m, tile_n]` T unless P
///   stays in registers;
/// - where K and V are codes `k_codes` `[code_stages][tile_n, hd]`, `v_codes` `[code_stages][tile_n, hdv]`,
///   of int4 half as many bytes, and `descales` `[code_stages][2][tile_n]` f32;
/// - where a program's array is copied `ahead` `[tile_m][tile_n + 8]` of 16 bits: the pitch lets ldmatrix
///   find its rows in banks of their own;
/// - mbarriers `q_full`, `q_empty`, `k_full`, `k_empty`, `v_full`, `v_empty`, one of each per stage;
/// - with the dynamic scheduler `sched_full`, `sched_empty` (mbarriers) and `tile_slot` (4 x i32; 12 for
///   lengths on the device).
///
/// Stages need no padding between them: with rows in multiples of 16 a stage is a whole number of atoms of
/// whichever swizzle its row width allows. The total is a multiple of 1024.
pub fn smem(spec: &KernelSpec, kernel: &Sm90Fwd) -> SmemPlan {
    let bytes = spec.elem_bytes();
    let Sm90Fwd { tile_m, tile_n, q_stages, kv_stages, .. } = *kernel;
    let mut plan = SmemPlan::default();
    let [hd, hdv] = [spec.head_dim, spec.head_dim_v].map(operand_columns);
    plan.push("q", q_stages * tile_m * hd * bytes, TILE_ALIGN);
    plan.push("k", kv_stages * tile_n * hd * bytes, TILE_ALIGN);
    plan.push("v", kv_stages * tile_n * hdv * bytes, TILE_ALIGN);
    if !kernel.pv_is_rs {
        plan.push("p", tile_m * tile_n * bytes, TILE_ALIGN);
    }
    if spec.reads_codes() {
        let rows = kernel.code_stages(spec) * tile_n;
        let stored = |columns| rows * columns / spec.types.kv.per_element() as u32;
        plan.push("k_codes", stored(hd), CODE_ALIGN);
        plan.push("v_codes", stored(hdv), CODE_ALIGN);
        plan.push("descales", rows * 2 * 4, CODE_ALIGN);
    }
    if copies_ahead(spec) {
        plan.push("ahead", tile_m * (tile_n + 8) * 2, AHEAD_ALIGN);
    }
    plan.push_mbarriers("q_full", q_stages);
    plan.push_mbarriers("q_empty", q_stages);
    for name in ["k_full", "k_empty", "v_full", "v_empty"] {
        plan.push_mbarriers(name, kv_stages);
    }
    if kernel.scheduler == Scheduler::Dynamic {
        plan.push_mbarriers("sched_full", 1);
        plan.push_mbarriers("sched_empty", 1);
        plan.push("tile_slot", if spec.reads.varied { 12 * 4 } else { 4 * 4 }, 16);
    }
    plan.round_up(TILE_ALIGN)
}

/// Alignment of codes and their descales: a full sweep over the 32 banks.
const CODE_ALIGN: u32 = 128;

/// Alignment of what is copied ahead.
const AHEAD_ALIGN: u32 = 128;

/// Further registers where CTAs share an SM: what needs 104 of 104 or 88 of 88 without them is serialised
/// (C7512), what needs 116 of 120 is not.
const SHARED: u32 = 4;

/// Registers in addition to the accumulators, by number of MMA warpgroups: the tuning guide's overheads (24
/// and 32). A single warpgroup has the same 24 within the compiler's limit of 255.
const OVERHEAD: [u32; 3] = [24, 24, 32];

/// The same where P is a register operand without overlap. The guide counts no P there, but the compiler
/// cannot let S and P share registers while their products run (C7511, C7512); with P counted this overhead
/// separates what spills from what does not, for two warpgroups (212 of 240) and for three (132 of 160).
const OVERHEAD_IN_TURN: u32 = 28;

/// Further registers of a thread that adds ALiBi, where three warpgroups share them: of 160, what needs 152
/// without them does not spill, what needs 156 does.
const ALIBI: u32 = 8;

/// Accumulator registers per thread that are live at once: S, O, and P as a register operand. A P that goes
/// through shared memory is converted and stored piece by piece and never live as a whole: here the exact
/// account allows more than the guide (192 x 192 at head dim 64, which FlashAttention-3 ships).
pub fn accumulators(spec: &KernelSpec, kernel: &Sm90Fwd) -> u32 {
    let (s, p, o) = parts(spec, kernel);
    s + p + o
}

/// Registers of S, P and O per thread: a warpgroup holds 64 rows over 128 threads.
fn parts(spec: &KernelSpec, kernel: &Sm90Fwd) -> (u32, u32, u32) {
    let s = kernel.tile_n / 2;
    let p = if kernel.pv_is_rs { kernel.tile_n / 4 } else { 0 };
    (s, p, spec.head_dim_v / 2)
}

/// The same of one whose factors of scores are a tile's: of 144, what needs 144 without them spills.
const CODES: u32 = 4;

/// Registers that the compiler does without where three warpgroups leave more of them to the producers: 192 x
/// 80 at head dim 128 fits with every mask, soft cap and sinks, and with keys divided (NB-077).
const GATHER: u32 = 4;

/// Registers of addresses beside what a program reads ahead.
const ADDRESSES: u32 = 4;

/// Registers of what is read of a program's array in shared memory at a time.
const PART: u32 = 8;

/// Registers of what a program reads before the scores are there.
fn ahead(spec: &KernelSpec, kernel: &Sm90Fwd) -> u32 {
    let Some(ahead) = spec.score.program.and_then(|program| program.ahead()) else { return 0 };
    if ahead.is_copied() {
        return PART + ADDRESSES;
    }
    match ahead.registers(kernel.tile_n / 2, kernel.pack_gqa) {
        0 => 0,
        words => words + ADDRESSES,
    }
}

/// Predicted registers of an MMA thread and their limit.
pub fn registers(spec: &KernelSpec, kernel: &Sm90Fwd) -> Registers {
    let (s, p, o) = parts(spec, kernel);
    let group = (kernel.num_wg.clamp(1, 3) - 1) as usize;
    let split = if kernel.blocks_per_sm > 1 {
        SetMaxNReg::of_shared(kernel.num_wg.max(1), kernel.blocks_per_sm, spec.reads.varied)
    } else if spec.reads_codes() {
        SetMaxNReg::with_codes(kernel.num_wg, spec.head_dim_v)
    } else if kernel.gather {
        SetMaxNReg::with_gather(kernel.num_wg)
    } else {
        SetMaxNReg::with_lengths(kernel.num_wg, spec.reads.varied)
    };
    let own = if kernel.pv_is_rs && !kernel.overlap_wg { OVERHEAD_IN_TURN } else { OVERHEAD[group] };
    let alibi = if spec.score.alibi && kernel.num_wg == 3 { ALIBI } else { 0 };
    let codes = if spec.reads_codes() && kernel.num_wg == 3 { CODES } else { 0 };
    let shared = if kernel.blocks_per_sm > 1 { SHARED } else { 0 };
    let read = own + alibi + codes + shared + ahead(spec, kernel);
    let other = read - if kernel.gather && kernel.num_wg == 3 { GATHER } else { 0 };
    Registers {
        s,
        p,
        o,
        q: 0,
        other,
        total: s + p + o + other,
        // The allocation allows 256; an instruction can name 255.
        limit: split.mma.min(255),
        setmaxnreg: Some(split),
    }
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Kernel, MaskKind, Reads, ScoreKind, Types};

    use super::*;

    /// Offsets and total by hand, for a 128x176 forward at head dim 128 and for one with every buffer.
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
            types: Types::same(Dtype::Bf16),
            head_dim: 128,
            head_dim_v: 128,
            mask: MaskKind::Full,
            score: ScoreKind::NONE,
            reads: Reads::UNIFORM,
            split: false,
            kernel: Kernel::Sm90Fwd(kernel.clone()),
        };
        let offsets = |plan: &SmemPlan| -> Vec<(String, u32)> {
            plan.buffers.iter().map(|b| (b.name.to_string(), b.offset)).collect()
        };
        let plan = smem(&spec, &kernel);
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
        let spec = KernelSpec { head_dim: 64, kernel: Kernel::Sm90Fwd(kernel.clone()), ..spec };
        let plan = smem(&spec, &kernel);
        let at = |name: &str| plan.buffer(name).map(|b| (b.offset, b.size));
        assert_eq!((at("q"), at("k")), (Some((0, 16384)), Some((16384, 8192))));
        assert_eq!((at("v"), at("p")), (Some((24576, 16384)), Some((40960, 16384))));
        assert_eq!((at("sched_full"), at("sched_empty")), (Some((57344 + 48, 8)), Some((57344 + 56, 8))));
        assert_eq!((at("tile_slot"), plan.total), (Some((57344 + 64, 16)), 57344 + 1024));
    }
}
