//! Configurations of the SM90 forward that the compiler is known to spill although the register account has
//! room.
//!
//! ptxas allocates registers after its own scheduling, and near the limit it spills 4 to 500 bytes for some
//! `tile_n` and none for their neighbours: no count of live values predicts which. `fa validate
//! --all-configs` also compiles the configurations listed here, and reports those that a newer compiler no
//! longer spills.

use fa_core::{Arch, KernelSpec, MaskKind, Sm90Fwd};

/// Configurations of a pair of head dims that spill under NVRTC 13.0, by `tile_n`.
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

/// In the order of the fields: warpgroups, P from registers, overlap, head dims.
const REFUSED: &[Refused] = &[
    refused(1, true, true, (32, 32), &[208, 224, 240, 256], &[192, 208, 224, 240, 256]),
    refused(1, true, true, (64, 64), &[176, 192, 208, 224, 240, 256], &[176, 192, 208, 224, 240, 256]),
    refused(1, true, true, (80, 80), &[176, 192, 240], &[176, 192, 208, 224, 240]),
    refused(1, true, true, (96, 96), &[176, 192, 224, 240], &[176, 192, 208, 224, 240]),
    refused(1, true, true, (112, 112), &[176, 208], &[160, 176, 192, 208]),
    refused(1, true, true, (128, 128), &[160, 176, 208], &[160, 176, 208]),
    refused(1, true, true, (128, 64), &[176, 192, 208, 224, 240, 256], &[176, 192, 208, 224, 240, 256]),
    refused(1, true, true, (64, 128), &[160, 208], &[160, 176, 208]),
    refused(1, true, true, (160, 160), &[160], &[144]),
    refused(1, true, true, (192, 128), &[160], &[160]),
    refused(1, true, true, (192, 192), &[128], &[128]),
    refused(2, true, true, (32, 32), &[192, 208, 224, 240, 256], &[192, 208, 224, 240, 256]),
    refused(2, true, true, (64, 64), &[176, 192, 224, 240], &[176, 192, 208, 224, 240]),
    refused(2, true, true, (80, 80), &[176, 208, 224], &[176, 192, 208, 224]),
    refused(2, true, true, (96, 96), &[160, 176, 208, 224], &[160, 176, 208, 224]),
    refused(2, true, true, (112, 112), &[160, 192], &[160, 176, 192]),
    refused(2, true, true, (128, 128), &[144, 192], &[160, 192]),
    refused(2, true, true, (128, 64), &[176, 192, 224, 240], &[176, 192, 208, 224, 240]),
    refused(2, true, true, (64, 128), &[144, 192], &[160, 192]),
    refused(2, true, true, (160, 160), &[80, 128, 144], &[]),
    refused(2, true, true, (192, 192), &[], &[112]),
    refused(2, true, false, (160, 160), &[128, 144], &[]),
    refused(2, false, true, (160, 160), &[80, 112], &[]),
    refused(2, false, false, (160, 160), &[112], &[]),
    refused(3, true, true, (32, 32), &[], &[112, 128]),
    refused(3, true, true, (64, 64), &[112], &[96, 112]),
    refused(3, true, true, (80, 80), &[96], &[96, 112]),
    refused(3, true, true, (128, 64), &[], &[96, 112]),
    refused(3, true, true, (160, 160), &[64], &[64]),
    refused(3, true, true, (64, 128), &[], &[80]),
    refused(3, false, true, (32, 32), &[208, 224], &[208, 224]),
    refused(3, false, true, (64, 64), &[192], &[160, 192]),
    refused(3, false, true, (96, 96), &[160], &[]),
    refused(3, false, true, (128, 128), &[128], &[128]),
    refused(3, false, true, (64, 128), &[128], &[]),
    refused(3, false, true, (192, 192), &[64], &[]),
    refused(3, false, false, (32, 32), &[192, 208, 224], &[192, 208, 224]),
    refused(3, false, false, (64, 64), &[160, 176, 192], &[176, 192]),
    refused(3, false, false, (80, 80), &[160], &[]),
    refused(3, false, false, (96, 96), &[128, 144, 160], &[160]),
    refused(3, false, false, (112, 112), &[128], &[]),
    refused(3, false, false, (160, 160), &[96], &[]),
    refused(3, false, false, (128, 128), &[128], &[]),
    refused(3, false, false, (64, 128), &[128], &[]),
    refused(3, false, false, (192, 192), &[64], &[]),
];

/// Kernels for keys in pages that spill under NVRTC 13.0 although those for keys in one piece do not: one
/// warpgroup, P from registers, overlap, with a mask; by head dims, without ALiBi and with it.
const PAGED: [Paged; 4] = [
    Paged { head_dims: (64, 64), plain: &[], alibi: &[160] },
    Paged { head_dims: (96, 96), plain: &[160], alibi: &[160] },
    Paged { head_dims: (128, 128), plain: &[144], alibi: &[144, 192] },
    Paged { head_dims: (192, 192), plain: &[], alibi: &[112] },
];

/// Widths that spill with keys in pages, for a pair of head dims.
struct Paged {
    head_dims: (u32, u32),
    plain: &'static [u32],
    alibi: &'static [u32],
}

/// Whether a kernel for keys in pages, loaded by TMA, is known to spill. With a window also three warpgroups
/// with 64 keys a step, 16 bytes.
fn known_paged(spec: &KernelSpec, kernel: &Sm90Fwd) -> bool {
    if (kernel.num_wg, kernel.tile_n, spec.mask) == (3, 64, MaskKind::Window) {
        let wide = matches!((spec.head_dim, spec.head_dim_v), (80, 80) | (64 | 128 | 192, 128));
        return wide && kernel.pv_is_rs && kernel.overlap_wg && !kernel.gather;
    }
    let listed = || {
        let entry = PAGED.iter().find(|entry| entry.head_dims == (spec.head_dim, spec.head_dim_v));
        let widths = entry.map(|entry| if spec.score.alibi { entry.alibi } else { entry.plain });
        widths.is_some_and(|widths| widths.contains(&kernel.tile_n))
    };
    kernel.num_wg == 1 && kernel.pv_is_rs && kernel.overlap_wg && !kernel.gather && listed()
}

/// Kernels that copy the rows of pages and spill under NVRTC 13.0, 8 to 288 bytes, with overlap (NB-133): by
/// warpgroups, P from registers or not, head dims and `tile_n`. Their producers have more registers and their
/// consumers fewer than those of other kernels, so that narrower tiles spill, though the count has room.
fn known_gather(spec: &KernelSpec, kernel: &Sm90Fwd) -> bool {
    let masked = spec.mask != MaskKind::Full;
    let head_dims = (spec.head_dim, spec.head_dim_v);
    let spills = match (kernel.num_wg, kernel.pv_is_rs, head_dims, kernel.tile_n) {
        (1, true, (80, 80), 160) | (1, true, (64, 128), 144) => masked && spec.split,
        (1, true, (80, 80), 208) => !spec.split,
        (1, true, (128 | 192, 128), 144) => spec.split,
        (1, true, (96, 96), 160) => masked || spec.split,
        (3, false, (64, 64), 176) => masked,
        (2, true, (64, 64) | (80, 80) | (128, 64), 160)
        | (2, true, (96, 96), 144)
        | (2, true, (128, 128), 176)
        | (3, true, (80, 80), 112) => true,
        _ => false,
    };
    kernel.overlap_wg && spills
}

/// Kernels whose CTAs share a row's keys and that spill under NVRTC 13.0, 4 to 180 bytes, though their
/// neighbours and those that compute all keys do not: one warpgroup, P from registers; by overlap, head dims
/// and `tile_n`.
fn known_split(spec: &KernelSpec, kernel: &Sm90Fwd) -> bool {
    let masked = spec.mask != MaskKind::Full;
    let spills = match (kernel.overlap_wg, (spec.head_dim, spec.head_dim_v), kernel.tile_n) {
        (true, (96, 96), 160) => masked && (spec.reads.varied || spec.score.softcap),
        (true, (96, 96), 208) => !spec.reads.varied,
        (true, (128, 128), 144) => true,
        (true, (192, 128), 144) => masked && spec.reads.varied,
        (false, (128, 128), 176) => masked && !spec.reads.varied,
        _ => false,
    };
    kernel.num_wg == 1 && kernel.pv_is_rs && spills
}

/// Kernels whose CTAs combine their parts in a cluster, with more keys a step than fit: those above the
/// widest that was compiled without a spill, by warpgroups and head dims. They spill 4 to 744 bytes under
/// NVRTC 13.0 (NB-166).
fn known_clusters(spec: &KernelSpec, kernel: &Sm90Fwd) -> bool {
    let full = spec.mask == MaskKind::Full;
    let widest = match (kernel.num_wg, spec.head_dim, spec.head_dim_v) {
        (2, 32, 32) => 144,
        (2, 64 | 128 | 192, 128) if full => 112,
        (2, 64 | 96 | 128 | 192, 64..=128) => 128,
        (3, 32, 32) => 112,
        (3, 64 | 128, 64) => 96,
        (3, 80, 80) => 80,
        (3, 96 | 128 | 192, 96 | 128) => 64,
        (3, 64, 128) => 48,
        _ => return false,
    };
    let combines = spec.split && !spec.reads.varied;
    combines && (kernel.pv_is_rs || kernel.num_wg == 3) && kernel.tile_n > widest
}

/// Kernels that cap scores and spill under NVRTC 13.0, 16 to 24 bytes, though those that do not cap them fit:
/// three warpgroups, P through shared memory, overlap, with a mask; by head dims and `tile_n`.
fn known_softcap(spec: &KernelSpec, kernel: &Sm90Fwd) -> bool {
    let width = ((spec.head_dim, spec.head_dim_v), kernel.tile_n);
    let spills = spec.mask != MaskKind::Full && matches!(width, ((96, 96), 128 | 160));
    kernel.num_wg == 3 && !kernel.pv_is_rs && kernel.overlap_wg && spills
}

/// Kernels of head dims 160 and 224 that spill under NVRTC 13.0: two warpgroups at 224 with any `tile_n`, 28
/// to 124 bytes; at 160 some in a window, with divided keys or in pages, 4 to 48 bytes.
fn known_uncommon(spec: &KernelSpec, kernel: &Sm90Fwd) -> bool {
    match (kernel.num_wg, spec.head_dim, spec.head_dim_v) {
        (2, 224, 224) => true,
        (2, 160, 160) if kernel.pv_is_rs && kernel.overlap_wg => {
            let scored = spec.score.softcap || spec.score.alibi;
            match kernel.tile_n {
                64 => spec.mask == MaskKind::Window && scored,
                96 => spec.mask == MaskKind::Window,
                112 => spec.split || kernel.gather,
                _ => false,
            }
        }
        (3, 160, 160) => spec.reads.paged && !kernel.overlap_wg && kernel.tile_n == 64,
        _ => false,
    }
}

/// Whether the compiler is known to spill the kernel. The list was compiled for bf16 without a soft cap,
/// which stands for the others.
pub fn known(spec: &KernelSpec, kernel: &Sm90Fwd, _: Arch) -> bool {
    if (spec.reads.paged && known_paged(spec, kernel))
        || (kernel.gather && known_gather(spec, kernel))
        || (spec.split && known_split(spec, kernel))
        || known_clusters(spec, kernel)
        || known_uncommon(spec, kernel)
        || (spec.score.softcap && known_softcap(spec, kernel))
    {
        return true;
    }
    REFUSED.iter().any(|entry| {
        let widths = if spec.mask == MaskKind::Full { entry.full } else { entry.masked };
        (entry.num_wg, entry.pv_is_rs, entry.overlap_wg)
            == (kernel.num_wg, kernel.pv_is_rs, kernel.overlap_wg)
            && entry.head_dims == (spec.head_dim, spec.head_dim_v)
            && widths.contains(&kernel.tile_n)
    })
}

#[cfg(test)]
mod tests {
    use fa_core::spec::Scheduler;
    use fa_core::{Dtype, Kernel, Reads, ScoreKind, Types};

    use super::*;

    /// Pairs of neighbours that copy rows of pages, as compiled: the first spills, the second does not.
    #[test]
    fn wide_tiles_of_copied_rows_spill_and_their_neighbours_do_not() {
        let of =
            |num_wg: u32, pv_is_rs: bool, head_dims: (u32, u32), tile_n: u32, causal: bool, split: bool| {
                let kernel = Sm90Fwd {
                    tile_m: 64 * num_wg,
                    tile_n,
                    num_wg,
                    pv_is_rs,
                    overlap_wg: true,
                    scheduler: Scheduler::Dynamic,
                    gather: true,
                    ..Sm90Fwd::default()
                };
                let spec = KernelSpec {
                    types: Types::same(Dtype::Bf16),
                    head_dim: head_dims.0,
                    head_dim_v: head_dims.1,
                    mask: if causal { MaskKind::Causal } else { MaskKind::Full },
                    score: ScoreKind::NONE,
                    reads: Reads { varied: true, paged: true },
                    split,
                    kernel: Kernel::Sm90Fwd(kernel.clone()),
                };
                known(&spec, &kernel, Arch::Sm90)
            };
        for (num_wg, pv_is_rs, head_dims, [spills, fits], causal, split) in [
            (2, true, (80, 80), [160, 144], false, false),
            (2, true, (128, 64), [160, 144], true, false),
            (2, true, (64, 64), [160, 144], false, false),
            (3, false, (64, 64), [176, 144], true, false),
            (1, true, (80, 80), [160, 144], true, true),
            (1, true, (64, 128), [144, 128], true, true),
            (1, true, (192, 128), [144, 128], false, true),
        ] {
            let of = |tile_n| of(num_wg, pv_is_rs, head_dims, tile_n, causal, split);
            assert!(of(spills) && !of(fits), "{num_wg} warpgroups, {head_dims:?}: {spills}, {fits}");
        }
        // With all keys in one CTA the same width fits, and without a mask the other does.
        assert!(!of(1, true, (80, 80), 160, true, false) && !of(3, false, (64, 64), 176, false, false));
    }
}
