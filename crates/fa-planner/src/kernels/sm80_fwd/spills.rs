//! Configurations of the SM80-class forward that the compiler is known to spill although the register account
//! has room: some of those with a soft cap, 4 to 40 bytes, by no rule in their parameters, some of head dim
//! 80, and some with one buffer of K and V.
//!
//! Taken from 174 first choices with a soft cap, and with ALiBi beside it, at head dims 64 to 256, compiled
//! for sm_90 by NVRTC 13.0 (NB-108); of one buffer, from 20 without a soft cap (NB-138).

use fa_core::{Arch, KernelSpec, MaskKind, Reads, Sm80Fwd};

/// Whether the compiler is known to spill the kernel.
pub fn known(spec: &KernelSpec, kernel: &Sm80Fwd, arch: Arch) -> bool {
    if !spec.score.softcap {
        return known_uncapped(spec, kernel, arch);
    }
    let (mask, alibi) = (spec.mask, spec.score.alibi);
    let masked = mask != MaskKind::Full;
    // A warp of 128 rows of four and of 256 rows of eight has the same accumulators.
    let rows = kernel.tile_m / kernel.num_warps.max(1);
    match (spec.head_dim.max(spec.head_dim_v), (rows, kernel.tile_n), kernel.num_warps) {
        (64, (32, 112), 4) => mask != MaskKind::Window || alibi,
        (64, (32, 96), 4) => alibi && mask != MaskKind::Causal,
        (96, (32, 64), _) => alibi,
        (96, (32, 80), 4) => alibi && masked,
        (96, (32, 80), _) => alibi && mask == MaskKind::Causal,
        (96, (16, 96), 4) => alibi && mask == MaskKind::Window && kernel.blocks_per_sm == 3,
        (128, (32, 64), 4) => mask == MaskKind::Window,
        (128, (32, 48), 4) => alibi && mask == MaskKind::Window,
        (256, (16, 112), 8) => masked,
        _ => false,
    }
}

/// Head dim 80 by four warps of 32 rows, 20 to 180 bytes: 96 scores and 80 outputs of a thread, on 9.0 with
/// pages too; and there Q in registers beside a window and equal lengths.
fn known_uncapped(spec: &KernelSpec, kernel: &Sm80Fwd, arch: Arch) -> bool {
    let on_sm90 = arch == Arch::Sm90;
    let Reads { varied, paged } = spec.reads;
    let alibi = spec.score.alibi;
    if (on_sm90 || (spec.head_dim == 128 && !paged)) && has_one_crowded_buffer(spec, kernel) {
        return true;
    }
    let spills = match kernel.tile_n {
        96 if paged => on_sm90,
        96 => !alibi,
        64 => on_sm90 && kernel.q_in_regs && spec.mask == MaskKind::Window && !alibi && !varied,
        _ => false,
    };
    spills && spec.head_dim.max(spec.head_dim_v) == 80 && (kernel.tile_m, kernel.num_warps) == (128, 4)
}

/// One buffer of K and V, and 64 scores and 128 outputs of a thread, 24 to 124 bytes under every mask, packed
/// or not; on 8.x 76 to 348 bytes, but not in pages. With two buffers they fit, and narrower Q and K with one
/// do.
fn has_one_crowded_buffer(spec: &KernelSpec, kernel: &Sm80Fwd) -> bool {
    let tile = (kernel.tile_m, kernel.tile_n, kernel.num_warps, kernel.stages);
    tile == (128, 64, 4, 1) && spec.head_dim >= 128 && spec.head_dim_v == 128
}

#[cfg(test)]
mod tests {
    use fa_core::{Alibi, Arch, Dtype, Family, Kernel, Mask, Problem, ScoreMod};

    use super::*;
    use crate::account::Reason;
    use crate::plan::{PlanOptions, explore};

    #[test]
    fn a_soft_cap_beside_alibi_is_not_given_tiles_that_spill() {
        let square = Problem::square(64, 4096, 128, 88, Mask::window(u32::MAX, 3), Dtype::Bf16);
        let capped = ScoreMod::softcap(30.0);
        let sloped = capped.with_alibi(Some(Alibi::PerHead));
        let options = PlanOptions::default().with_family(Some(Family::Sm80));
        let tile = |spec: &KernelSpec| {
            let Kernel::Sm80Fwd(own) = &spec.kernel else { panic!("an SM80-class forward, not {spec}") };
            (own.tile_m, own.tile_n, own.num_warps)
        };
        for mask in [Mask::FULL, Mask::CAUSAL, square.mask] {
            for (score, spills) in [(sloped, true), (capped, false)] {
                let problem = square.with_mask(mask).with_score(score);
                let set = explore(&problem, Arch::Sm90, &options).expect("candidates");
                assert_eq!(set.plans.iter().all(|plan| tile(&plan.spec) != (128, 64, 4)), spills, "{mask}");
                let why = set.rejected.iter().find(|rejected| {
                    tile(&rejected.spec) == (128, 64, 4) && matches!(rejected.reason, Reason::Spills { .. })
                });
                // Under a causal mask some with a soft cap alone are listed by name (NB-138).
                assert_eq!(why.is_some(), spills || mask == Mask::CAUSAL, "{mask}");
            }
        }
    }
}
