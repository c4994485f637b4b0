//! What the SM80-class forward takes of an SM: its shared memory, buffer by buffer, and its registers.

use fa_core::{ArchLimits, KernelSpec, MaskKind, Sm80Fwd};

use crate::occupancy::{WARP, register_ceiling};
use crate::registers::Registers;
use crate::smem::{SmemBuffer, SmemPlan};

/// Tile extents of the head dims; a problem's are padded to the next.
pub const HEAD_DIMS: [u32; 9] = [32, 64, 80, 96, 128, 160, 192, 224, 256];

/// Alignment of every buffer: a full sweep over the 32 banks.
pub const ALIGN: u32 = 128;

/// Registers of a thread for K and V fragments, row maxima and sums, addresses and loop state. With a tenth
/// of S, for P on its way to operands, this value best separates the configurations that spill from those
/// that do not, of 1,044 at head dims 64 and 128 (`fa validate --family sm80 --all-configs`).
const OVERHEAD: u32 = 56;

/// Further registers of a thread that adds ALiBi: its rows' positions and slopes. Of 97 first choices for
/// dense and packed keys this value separates those that spill from those that do not, but for three.
const ALIBI: u32 = 11;

/// The same of one that reads lengths on the device; under a causal mask the compiler finds room for them.
const LENGTHS: u32 = 2;

/// The same of one that looks pages up under a mask: at head dim 256 what needs 236 without them spills, and
/// what needs 228 does not.
const PAGES: u32 = 20;

/// The shared memory of a CTA. T is the 16-bit type; tiles are swizzled panels of at most 64 columns, or
/// plain rows with the swizzle off, without padding:
///
/// - `q` `[tile_m, hd]` T;
/// - `k` `[stages][tile_n, hd]` T and `v` `[stages][tile_n, hdv]` T;
/// - where K and V are codes, before these `k_codes` `[stages][tile_n, hd]`, `v_codes`
///   `[stages][tile_n, hdv]`, of int4 half as many bytes, and `descales` `[stages][2][tile_n]` f32; `k` and
///   `v` then have one stage.
///
/// The epilogue uses none: O goes from registers to global memory. With Q in registers, `q` overlays the end
/// of K's and V's memory: it is read before those stages are filled, and the first K, at the other end, does
/// not wait for it.
///
/// With the keys of a step divided among the warps, see `divided_smem`.
pub fn smem(spec: &KernelSpec, kernel: &Sm80Fwd) -> SmemPlan {
    if kernel.divide_keys {
        return divided_smem(spec, kernel);
    }
    let bytes = spec.elem_bytes();
    let q = kernel.tile_m * spec.head_dim * bytes;
    let rows = kernel.stages * kernel.tile_n;
    let tile_rows = if spec.reads_codes() { kernel.tile_n } else { rows };

    let mut plan = SmemPlan::default();
    if !kernel.q_in_regs {
        plan.push("q", q, ALIGN);
    }
    if spec.reads_codes() {
        let stored = |head_dim| rows * head_dim / spec.types.kv.per_element() as u32;
        plan.push("k_codes", stored(spec.head_dim), ALIGN);
        plan.push("v_codes", stored(spec.head_dim_v), ALIGN);
        plan.push("descales", rows * 2 * 4, ALIGN);
    }
    plan.push("k", tile_rows * spec.head_dim * bytes, ALIGN);
    plan.push("v", tile_rows * spec.head_dim_v * bytes, ALIGN);
    if kernel.q_in_regs {
        let offset = plan.total.saturating_sub(q);
        plan.buffers.push(SmemBuffer {
            name: "q".into(),
            size: q,
            offset,
            align: ALIGN,
            alias_of: Some("v".into()),
        });
        plan.total = plan.total.max(offset + q);
    }
    plan.round_up(ALIGN)
}

/// The shared memory of a CTA whose warps divide the keys: `q`, then `kv` `[stages][warp]`, of each warp its
/// keys of K and of V as they are stored, and where these are codes `descales` `[stages][2][tile_n]` f32. The
/// warps' results, O `[warp][tile_m, hdv + 8]` and maxima and sums `[2][warp][tile_m]`, all f32, overlay the
/// stages at the end.
fn divided_smem(spec: &KernelSpec, kernel: &Sm80Fwd) -> SmemPlan {
    let mut plan = SmemPlan::default();
    plan.push("q", kernel.tile_m * spec.head_dim * spec.elem_bytes(), ALIGN);
    let rows = kernel.stages * kernel.tile_n;
    let kv = spec.types.kv;
    let first = plan.total;
    let elements = kv.elements((spec.head_dim + spec.head_dim_v) as usize) * kv.bytes();
    plan.push("kv", rows * elements as u32, ALIGN);
    if spec.reads_codes() {
        plan.push("descales", rows * 2 * 4, ALIGN);
    }
    let results = kernel.num_warps * kernel.tile_m * (spec.head_dim_v + 8 + 2) * 4;
    plan.buffers.push(SmemBuffer {
        name: "results".into(),
        size: results,
        offset: first,
        align: ALIGN,
        alias_of: Some("kv".into()),
    });
    plan.total = plan.total.max(first + results);
    plan.round_up(ALIGN)
}

/// Predicted registers of a thread, and the ceiling that the launch bounds give the compiler on an SM of
/// `limits`.
///
/// A warp holds `tile_m / num_warps` rows of S and O in f32 over its 32 lanes, and of Q packed in pairs if it
/// keeps Q, or all rows where the warps divide the keys. P takes the registers of S: four accumulators become
/// two operand registers as P V proceeds.
pub fn registers(spec: &KernelSpec, kernel: &Sm80Fwd, limits: &ArchLimits) -> Registers {
    let threads = WARP * kernel.num_warps;
    let s = kernel.tile_m * kernel.tile_n / threads;
    let threads_of_rows = if kernel.divide_keys { WARP } else { threads };
    let o = kernel.tile_m * spec.head_dim_v / threads_of_rows;
    let q = if kernel.q_in_regs { kernel.tile_m * spec.head_dim / 2 / threads_of_rows } else { 0 };
    let of_rows = match (spec.reads.paged, spec.reads.varied) {
        // A warp that copies its own keys looks up one of them in each lane.
        _ if kernel.divide_keys => 0,
        (true, _) if spec.mask != MaskKind::Full => PAGES,
        (false, true) if spec.mask != MaskKind::Causal => LENGTHS,
        _ => 0,
    };
    let other = OVERHEAD + s / 10 + of_rows + if spec.score.alibi { ALIBI } else { 0 };
    Registers {
        s,
        p: 0,
        o,
        q,
        other,
        total: s + o + q + other,
        limit: register_ceiling(limits, threads, kernel.blocks_per_sm),
        setmaxnreg: None,
    }
}

#[cfg(test)]
mod tests {
    use fa_core::{Arch, Division, Dtype, Kernel, Mask, Problem};

    use super::super::candidates::candidates;
    use super::*;

    fn spec(
        head_dims: (u32, u32),
        tile: (u32, u32),
        num_warps: u32,
        stages: u32,
        q_in_regs: bool,
    ) -> KernelSpec {
        let problem = Problem::square(1, 1024, 1, 64, Mask::FULL, Dtype::F16);
        let mut spec = candidates(&problem, head_dims.0, head_dims.1, Division::PLANNED)
            .next()
            .expect("there are candidates");
        let Kernel::Sm80Fwd(kernel) = &mut spec.kernel else { panic!("an SM80 kernel") };
        (kernel.tile_m, kernel.tile_n) = tile;
        (kernel.num_warps, kernel.stages, kernel.q_in_regs) = (num_warps, stages, q_in_regs);
        spec
    }

    fn kernel(spec: &KernelSpec) -> &Sm80Fwd {
        let Kernel::Sm80Fwd(kernel) = &spec.kernel else { panic!("an SM80 kernel") };
        kernel
    }

    #[test]
    fn shared_memory_by_hand() {
        // (head dims, tile, stages, Q in registers) -> (offsets of q, k, v), total
        for ((dims, tile, stages, in_regs), offsets, total) in [
            (((128, 128), (128, 64), 1, false), [0, 32 << 10, 48 << 10], 64 << 10),
            (((128, 128), (64, 64), 2, true), [48 << 10, 0, 32 << 10], 64 << 10),
            (((128, 128), (128, 32), 1, true), [0, 0, 8 << 10], 32 << 10),
            (((128, 128), (128, 64), 2, true), [32 << 10, 0, 32 << 10], 64 << 10),
            (((64, 64), (128, 128), 2, false), [0, 16 << 10, 48 << 10], 80 << 10),
            (((32, 256), (128, 32), 1, false), [0, 8 << 10, 10 << 10], 26 << 10),
            (((192, 128), (128, 64), 1, false), [0, 48 << 10, 72 << 10], 88 << 10),
        ] {
            let spec = spec(dims, tile, 4, stages, in_regs);
            let plan = smem(&spec, kernel(&spec));
            let found = ["q", "k", "v"].map(|name| plan.buffer(name).map(|b| b.offset));
            assert_eq!((found, plan.total), (offsets.map(Some), total), "{spec}");
        }
    }

    #[test]
    fn buffers_that_live_together_do_not_meet() {
        let problem = Problem::square(1, 1024, 1, 64, Mask::FULL, Dtype::F16);
        for (hd, hdv) in [(32, 256), (64, 64), (192, 128), (256, 256)] {
            for spec in candidates(&problem, hd, hdv, Division::PLANNED) {
                let plan = smem(&spec, kernel(&spec));
                let own: Vec<_> = plan.buffers.iter().filter(|b| b.alias_of.is_none()).collect();
                for pair in own.windows(2) {
                    assert!(pair[0].offset + pair[0].size <= pair[1].offset, "{spec}");
                }
                for b in &plan.buffers {
                    assert!(b.offset % b.align == 0 && b.offset + b.size <= plan.total, "{spec}: {b:?}");
                }
                assert_eq!(plan.total % ALIGN, 0);
            }
        }
    }

    #[test]
    fn published_tiles_fit_the_register_account() {
        // FlashAttention-2's forward tiles: (head dim, tile, warps) -> registers
        for (hd, tile, warps, total) in [
            (64, (128, 128), 4, 128 + 64 + 56 + 12),
            (128, (128, 64), 4, 64 + 128 + 56 + 6),
            (192, (128, 64), 8, 32 + 96 + 56 + 3),
            (256, (128, 64), 8, 32 + 128 + 56 + 3),
        ] {
            let spec = spec((hd, hd), tile, warps, 1, false);
            let regs = registers(&spec, kernel(&spec), Arch::Sm80.limits());
            assert_eq!(regs.total, total, "{spec}");
            // This project's kernel spills at 128 x 128: it keeps more of K and V in registers ahead of the
            // products.
            assert_eq!(regs.total <= regs.limit, tile.1 < 128, "{spec}: {regs:?}");
        }
        // A public kernel for the RTX 5090: 64 x 64, four warps, Q in registers.
        let spec = spec((128, 128), (64, 64), 4, 2, true);
        assert_eq!(registers(&spec, kernel(&spec), Arch::Sm120.limits()).total, 32 + 64 + 32 + 56 + 3);
    }
}
