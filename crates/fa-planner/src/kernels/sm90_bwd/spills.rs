//! Configurations of the SM90 backward that the compiler is known to spill although the register account has
//! room.
//!
//! Taken from `fa build --all-configs --mode bwd` and `fa build --best` with NVRTC 13.0.

use fa_core::{Arch, KernelSpec, MaskKind, ScoreKind, Sm90Bwd};

/// Whether the compiler is known to spill the kernel.
pub fn known(spec: &KernelSpec, kernel: &Sm90Bwd, _: Arch) -> bool {
    let masked = spec.mask != MaskKind::Full;
    if kernel.persistent && drawn(spec, kernel) {
        return true;
    }
    // dQ in slices, one Q buffer, under a mask: 16 to 96 bytes at head dim 256, which stands for all that the
    // guide lacks.
    if kernel.dq_slices == 2 && kernel.q_stages == 1 && masked && matches!(kernel.tile_m, 64 | 128) {
        return true;
    }
    // Lengths on the device at head dim 256, dQ in slices, beside other scarce registers: 52 to 436 bytes.
    if spec.reads.varied && (kernel.tile_m, kernel.tile_n) == (64, 80) && kernel.dq_slices == 2 {
        let two_in_dq = kernel.atom_layout_m_dq == 2;
        let ScoreKind { softcap, alibi, .. } = spec.score;
        return spec.head_dim == 256
            && (softcap || (two_in_dq && (masked || alibi)) || (alibi && masked && kernel.deterministic));
    }
    // ALiBi in a window, P and dS from registers: 8 bytes stored, 44 loaded.
    if spec.score.alibi && spec.mask == MaskKind::Window && kernel.mma_dkv_is_rs && spec.head_dim == 64 {
        return (kernel.tile_m, kernel.tile_n) == (128, 128);
    }
    // A soft cap and slopes beside lengths on the device: 28 to 1,130 bytes.
    if spec.reads.varied && spec.score.softcap && spec.score.alibi && kernel.tile_n == 128 {
        match (spec.head_dim, spec.head_dim_v) {
            (64, 64) if kernel.tile_m == 128 => return true,
            (128, 128) if masked || kernel.deterministic => return true,
            _ => {}
        }
    }
    // The producer of deterministic kernels, which has 24 registers, while it waits for its turn
    // with lengths on the device: 4 bytes.
    if spec.reads.varied && kernel.deterministic && spec.mask == MaskKind::Causal {
        let small = (kernel.tile_m, kernel.tile_n) == (64, 64);
        if small && matches!((spec.head_dim, spec.head_dim_v), (96, 96) | (192, 192)) {
            return true;
        }
    }
    match (spec.head_dim, spec.head_dim_v) {
        // 208 accumulators in the one tile that there is: 8 to 1,524 bytes.
        (80, 80) => spec.score.softcap,
        (256, 256) if kernel.q_stages == 1 => spills_beside_one_q_buffer(kernel, masked),
        // 208 accumulators, S and dQ transposed, P through shared memory: 20 to 28 bytes. Without a mask two
        // that also transpose dK do not spill.
        (128, 128) => {
            (kernel.tile_m, kernel.tile_n) == (80, 128)
                && !kernel.mma_dkv_is_rs
                && kernel.sdp_swap_ab
                && kernel.dq_swap_ab
                && kernel.atom_layout_m_sdp == 1
                && (masked || !kernel.dkv_swap_ab || kernel.atom_layout_n_dkv == 2)
        }
        // 16 to 32 bytes; their neighbours do not spill.
        (128, 64) if masked && kernel.dq_swap_ab && kernel.atom_layout_m_sdp == 1 => {
            let layout =
                (kernel.dkv_swap_ab, kernel.atom_layout_n_dkv, kernel.atom_layout_m_dq, kernel.mma_dkv_is_rs);
            match (kernel.tile_m, kernel.tile_n) {
                (96, 128) => matches!(layout, (true, 2, 2, false) | (false, 1, 2, false)),
                (112, 128) => layout == (false, 2, 2, true),
                _ => false,
            }
        }
        _ => false,
    }
}

/// Head dim 256, whose dQ is added from registers, with one Q buffer: 12 to 92 bytes. With two buffers no
/// kernel spills.
fn spills_beside_one_q_buffer(kernel: &Sm90Bwd, masked: bool) -> bool {
    let two_in_dq = kernel.atom_layout_m_dq == 2;
    match (kernel.tile_m, masked) {
        (80, true) if kernel.dq_slices == 1 => kernel.atom_layout_n_dkv == 1,
        (80, true) => two_in_dq,
        (_, true) => true,
        (80, false) => kernel.dq_slices == 2 && kernel.dkv_swap_ab && two_in_dq,
        (96 | 112, false) => kernel.dkv_swap_ab,
        (128, false) => {
            kernel.dkv_swap_ab && !kernel.sdp_swap_ab && kernel.atom_layout_m_sdp != kernel.atom_layout_n_dkv
        }
        _ => false,
    }
}

/// CTAs that draw tiles, up to head dim 128, whatever the mask and the type: 64 to 188 bytes. With one tile
/// a CTA none of these spills.
fn drawn(spec: &KernelSpec, kernel: &Sm90Bwd) -> bool {
    let rows_of_dq_cut = kernel.atom_layout_m_dq > 1;
    // dQ from registers: 48 to 88 bytes.
    if !kernel.dq_via_smem && (kernel.tile_m, kernel.tile_n) == (128, 128) {
        return spec.head_dim_v == 64;
    }
    if !kernel.dq_via_smem && (kernel.tile_m, kernel.tile_n) == (112, 128) {
        return (spec.head_dim, spec.head_dim_v) == (128, 64);
    }
    match ((spec.head_dim, spec.head_dim_v), (kernel.tile_m, kernel.tile_n)) {
        ((64, 64), (128, 128)) => !kernel.dq_swap_ab && !rows_of_dq_cut,
        ((128, 128), (64 | 80, 128)) | ((64, 128), (112, 128)) | ((128, 64), (96, 128)) => {
            kernel.dq_swap_ab && rows_of_dq_cut
        }
        _ => false,
    }
}
