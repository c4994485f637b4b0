//! What the compiler refuses although the register account has room: a correction to the model, taken from the compiler.
//!
//! The assembler shares out registers by its own order of instructions, and near the limit it spills a few of them (4 to 500
//! bytes) for some block widths and not for their neighbours: no count of live values tells which. `fa validate
//! --all-configs` compiles the configurations of this list as well and says which of them a compiler has come to build.

use fa_core::{KernelSpec, MaskKind, Sm90Fwd};

/// Configurations of a head dim that spill under NVRTC 13.0, by `tile_n`.
struct Refused {
    num_wg: u32,
    pv_is_rs: bool,
    overlap_wg: bool,
    head_dims: (u32, u32),
    /// Without a mask.
    full: &'static [u32],
    /// With one.
    masked: &'static [u32],
}

const fn refused(
    num_wg: u32,
    pv_is_rs: bool,
    overlap_wg: bool,
    head_dims: (u32, u32),
    full: &'static [u32],
    masked: &'static [u32],
) -> Refused {
    Refused { num_wg, pv_is_rs, overlap_wg, head_dims, full, masked }
}

/// In the order of the fields: warp groups, P from registers, overlap, head dims.
const REFUSED: &[Refused] = &[
    refused(1, true, true, (64, 64), &[176, 192, 208, 224, 240, 256], &[176, 192, 208, 224, 240, 256]),
    refused(1, true, true, (96, 96), &[176, 192, 224, 240], &[176, 192, 208, 224, 240]),
    refused(1, true, true, (128, 128), &[160, 208], &[160, 176, 208]),
    refused(1, true, true, (128, 64), &[176, 192, 208, 224, 240, 256], &[176, 192, 208, 224, 240, 256]),
    refused(1, true, true, (64, 128), &[160, 208], &[160, 176, 208]),
    refused(1, true, true, (192, 128), &[160], &[160]),
    refused(1, true, true, (192, 192), &[128], &[128]),
    refused(2, true, true, (64, 64), &[176, 192, 224, 240], &[176, 192, 208, 224, 240]),
    refused(2, true, true, (96, 96), &[160, 176, 208, 224], &[160, 176, 208, 224]),
    refused(2, true, true, (128, 128), &[144, 192], &[160, 192]),
    refused(2, true, true, (128, 64), &[176, 192, 224, 240], &[176, 192, 208, 224, 240]),
    refused(2, true, true, (64, 128), &[144, 192], &[160, 192]),
    refused(2, true, true, (192, 192), &[], &[112]),
    refused(3, true, true, (64, 64), &[], &[96, 112]),
    refused(3, true, true, (128, 64), &[], &[96, 112]),
    refused(3, true, true, (64, 128), &[], &[80]),
    refused(3, false, true, (64, 64), &[192], &[160, 192]),
    refused(3, false, true, (96, 96), &[160], &[]),
    refused(3, false, true, (128, 128), &[128], &[128]),
    refused(3, false, true, (64, 128), &[128], &[]),
    refused(3, false, true, (192, 192), &[64], &[]),
    refused(3, false, false, (64, 64), &[160, 176, 192], &[176, 192]),
    refused(3, false, false, (96, 96), &[128, 144, 160], &[160]),
    refused(3, false, false, (128, 128), &[128], &[]),
    refused(3, false, false, (64, 128), &[128], &[]),
    refused(3, false, false, (192, 192), &[64], &[]),
];

/// Whether the compiler is known to refuse the kernel: bf16 without a soft cap was tried, and stands for the others.
pub fn known(spec: &KernelSpec, kernel: &Sm90Fwd) -> bool {
    REFUSED.iter().any(|entry| {
        let widths = if spec.mask == MaskKind::Full { entry.full } else { entry.masked };
        (entry.num_wg, entry.pv_is_rs, entry.overlap_wg)
            == (kernel.num_wg, kernel.pv_is_rs, kernel.overlap_wg)
            && entry.head_dims == (spec.head_dim, spec.head_dim_v)
            && widths.contains(&kernel.tile_n)
    })
}
