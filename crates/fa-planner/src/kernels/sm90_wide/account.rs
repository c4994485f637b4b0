//! What the SM90 forward for wide heads takes of an SM: shared memory, buffer by buffer, and registers.

use fa_core::program::AheadForm;
use fa_core::{KernelSpec, Sm90Wide};

use crate::registers::{Registers, SetMaxNReg};
use crate::smem::{SmemPlan, TILE_ALIGN};

/// Tile extents of the head dim of Q and K: whole panels, of 64 columns.
pub const HEAD_DIMS: [u32; 9] = [64, 128, 192, 256, 320, 384, 448, 512, 576];

/// The same of V and O, whose columns two warpgroups share in whole panels.
pub const HEAD_DIMS_V: [u32; 4] = [128, 256, 384, 512];

/// The kernel's `SharedStorage`, in declaration order (T is the 16-bit type, tiles are `[hd / 64][rows][64]`
/// panels):
///
/// - `q` `[tile_m, hd]` T, `k` `[kv_stages][tile_n, hd]` T, `v` `[kv_stages][tile_n, hdv]` T, which in the
///   latent form is a part of `k`, and `p` `[tile_m, tile_n]` T;
/// - where K and V are codes, which producers hold in registers until a tile is free, `descales`
///   `[kv_stages][2][tile_n]` f32;
/// - `factor` `[tile_m]` f32: O's factors, from the leader to the follower;
/// - mbarriers `q_full`, `q_empty`, `k_full`, `k_empty`, `v_full`, `v_empty`, the latter four per stage.
pub fn smem(spec: &KernelSpec, kernel: &Sm90Wide) -> SmemPlan {
    let bytes = spec.elem_bytes();
    let Sm90Wide { tile_m, tile_n, kv_stages, latent, .. } = *kernel;
    let mut plan = SmemPlan::default();
    plan.push("q", tile_m * spec.head_dim * bytes, TILE_ALIGN);
    plan.push("k", kv_stages * tile_n * spec.head_dim * bytes, TILE_ALIGN);
    if !latent {
        plan.push("v", kv_stages * tile_n * spec.head_dim_v * bytes, TILE_ALIGN);
    }
    plan.push("p", tile_m * tile_n * bytes, TILE_ALIGN);
    if spec.reads_codes() {
        plan.push("descales", kv_stages * 2 * tile_n * 4, 128);
    }
    plan.push("factor", tile_m * 4, 128);
    plan.push_mbarriers("q_full", 1);
    plan.push_mbarriers("q_empty", 1);
    let of_v: &[&str] = if latent { &[] } else { &["v_full", "v_empty"] };
    for &name in ["k_full", "k_empty"].iter().chain(of_v) {
        plan.push_mbarriers(name, kv_stages);
    }
    plan.round_up(TILE_ALIGN)
}

/// Registers in addition to the accumulators and P: those of the SM90 forward with P as a register operand
/// and one product after the other.
const OVERHEAD: u32 = 28;

/// Registers of addresses beside what a program reads ahead.
const ADDRESSES: u32 = 4;

/// Registers of what a program reads before the scores are there, in addition to those of P: with products
/// one after the other P is made when they are used up.
fn ahead(spec: &KernelSpec, kernel: &Sm90Wide, p: u32) -> u32 {
    let Some(ahead) = spec.score.program.and_then(|program| program.ahead()) else { return 0 };
    // Pairs of f32 have twice the registers in flight: what needs 240 of 240 without more of them spills.
    let addresses = if ahead.form == AheadForm::Keys { ADDRESSES * ahead.bytes / 2 } else { ADDRESSES };
    match ahead.registers(kernel.tile_n / 2, kernel.pack_gqa) {
        0 => 0,
        words if kernel.overlap => words + addresses,
        words => (words + addresses).saturating_sub(p),
    }
}

/// The split of registers where producers hold the codes of a tile, or of half of one, before it is free:
/// those that the follower, which has no scores, does without.
const WITH_CODES: SetMaxNReg = SetMaxNReg { mma: 208, producer: 136, follower: Some(160) };

/// Predicted registers of a thread of the leader, which holds S and P beside its half of O's columns.
pub fn registers(spec: &KernelSpec, kernel: &Sm90Wide) -> Registers {
    let (s, p, o) = (kernel.tile_n / 2, kernel.tile_n / 4, spec.head_dim_v / 4);
    let other = OVERHEAD + ahead(spec, kernel, p);
    let split = if spec.reads_codes() {
        WITH_CODES
    } else if kernel.gather {
        SetMaxNReg::with_gather(2)
    } else {
        SetMaxNReg::with_lengths(2, spec.reads.varied)
    };
    Registers { s, p, o, q: 0, other, total: s + p + o + other, limit: split.mma, setmaxnreg: Some(split) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fa_core::{Arch, Dtype, Kernel, MaskKind, Reads, ScoreKind, Types};

    fn spec((head_dim, head_dim_v): (u32, u32), kernel: &Sm90Wide) -> KernelSpec {
        KernelSpec {
            types: Types::same(Dtype::Bf16),
            head_dim,
            head_dim_v,
            mask: MaskKind::Full,
            score: ScoreKind::NONE,
            reads: Reads::UNIFORM,
            split: false,
            kernel: Kernel::Sm90Wide(kernel.clone()),
        }
    }

    #[test]
    fn two_tiles_of_latents_and_one_of_wide_keys_fit() {
        let latent = Sm90Wide { latent: true, kv_stages: 2, ..Sm90Wide::default() };
        let plan = smem(&spec((576, 512), &latent), &latent);
        let at = |plan: &SmemPlan, name: &str| plan.buffer(name).map(|b| (b.offset, b.size));
        assert_eq!(at(&plan, "k"), Some((73_728, 147_456)));
        assert_eq!((at(&plan, "v"), at(&plan, "p")), (None, Some((221_184, 8_192))));
        assert_eq!((at(&plan, "factor"), at(&plan, "q_full")), (Some((229_376, 256)), Some((229_632, 8))));
        assert_eq!(plan.total, 225 * 1024);
        let plain = Sm90Wide::default();
        let plan = smem(&spec((512, 512), &plain), &plain);
        assert_eq!((at(&plan, "v"), plan.total), (Some((131_072, 65_536)), 201 * 1024));
        let limit = Arch::Sm90.limits().smem_per_block;
        assert!(plan.total < limit && 225 * 1024 < limit);
        assert_eq!(registers(&spec((576, 512), &latent), &latent).total, 204);
        // A bias of f32 is read before the scores, in registers that P takes afterwards.
        let biased = |tile_n, overlap| {
            let kernel = Sm90Wide { tile_n, overlap, ..plain.clone() };
            let bias = fa_core::program::Program::parse("array t: f32[_, _]; score = s + t[q, k];").unwrap();
            let score = ScoreKind { program: Some(bias.intern().unwrap()), ..ScoreKind::NONE };
            registers(&KernelSpec { score, ..spec((512, 512), &kernel) }, &kernel).total
        };
        assert_eq!([biased(64, false), biased(64, true), biased(32, true)], [204 + 24, 204 + 40, 180 + 24]);
        // In codes as well, with the descales of their rows.
        let types = Types::same(Dtype::Bf16).with_kv(Dtype::E4m3);
        let coded = KernelSpec { types, ..spec((576, 512), &latent) };
        let plan = smem(&coded, &latent);
        assert_eq!((at(&plan, "descales"), plan.total), (Some((229_376, 1024)), 226 * 1024));
        let registers = registers(&coded, &latent);
        assert_eq!((registers.total, registers.setmaxnreg), (204, Some(WITH_CODES)));
    }
}
