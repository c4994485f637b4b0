//! Configurations of the SM80-class backward that the compiler is known to spill although the register
//! account has room.
//!
//! Taken from `fa build --all-configs --mode bwd --family sm80 --arch sm90 [--deterministic]` with NVRTC
//! 13.0, compiled for bf16 without a soft cap, which stands for the others. They spill 4 to 40 bytes, by no
//! rule in their parameters.

use fa_core::{Arch, KernelSpec, MaskKind, Sm80Bwd};

/// Whether the compiler is known to spill the kernel.
pub fn known(spec: &KernelSpec, kernel: &Sm80Bwd, arch: Arch) -> bool {
    if arch != Arch::Sm90 {
        return false;
    }
    let Sm80Bwd { tile_m, tile_n, num_warps, q_stages, do_stages, .. } = *kernel;
    let kind = (spec.head_dim, spec.head_dim_v, (tile_m, tile_n), num_warps);
    let stages = (q_stages, do_stages);
    if known_served(spec, kernel) {
        return true;
    }
    if kernel.deterministic {
        return match kind {
            (96, 96, (64, 64), 4) | (96, 96, (64, 128), 8) => do_stages == 1,
            (128, 128, (128, 64), 8) => stages == (3, 2),
            (128, 128, (32, 64), 4) => stages != (3, 2),
            (64, 128, (128, 64), 8) => q_stages == 2,
            (256, 256, (32, 32), 4) => true,
            _ => false,
        };
    }
    match kind {
        (64, 64, (128, 128), 8) => stages == (2, 2),
        (96, 96, (64, 128), 8) | (128, 128, (64, 64), 4) => do_stages == 1,
        (256, 256, (32, 64), 8) => stages == (2, 1),
        (256, 256, (32, 32), 4) => stages != (3, 2),
        (64, 128, (64, 128), 8) => true,
        _ => false,
    }
}

/// The same of kernels that read lengths on the device or change scores beside a cap, 4 to 96 bytes, where
/// those that do neither fit. Other numbers of stages do not spill.
fn known_served(spec: &KernelSpec, kernel: &Sm80Bwd) -> bool {
    let Sm80Bwd { tile_m, tile_n, num_warps, q_stages, do_stages, deterministic, .. } = *kernel;
    let (varied, score) = (spec.reads.varied, spec.score);
    match (spec.head_dim.max(spec.head_dim_v), (tile_m, tile_n), num_warps, (q_stages, do_stages)) {
        (256, (64, 64), 8, (2, 1)) => varied && !deterministic,
        (256, (32, 64), 8, (3, 2)) => varied && deterministic && (score.alibi || score.sinks),
        (128, (64, 128), 8, (2 | 3, 1)) => !varied && !deterministic && score.alibi,
        (128, (32, 64), 4, (3, 2)) => varied && deterministic && spec.mask == MaskKind::Window,
        _ => false,
    }
}
