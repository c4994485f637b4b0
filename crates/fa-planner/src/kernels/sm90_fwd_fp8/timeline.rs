//! The order of the main loop, which is that of the SM90 forward.

use fa_core::{KernelSpec, Sm90Fwd, Sm90FwdFp8};

use crate::cost::predicted::StepClocks;
use crate::kernels::sm90_fwd;
use crate::timeline::lanes::Timeline;

/// The timeline of a kernel whose step takes `clocks`; `copy` gives the clocks in which an SM loads so many
/// elements.
pub(crate) fn timeline(
    spec: &KernelSpec,
    kernel: &Sm90FwdFp8,
    copy: &dyn Fn(u32) -> f64,
    clocks: &StepClocks,
) -> Timeline {
    let Sm90FwdFp8 { tile_m, tile_n, num_wg, overlap_wg, q_stages, kv_stages, ping_pong, .. } = *kernel;
    let alike =
        Sm90Fwd { tile_m, tile_n, num_wg, overlap_wg, q_stages, kv_stages, ping_pong, ..Sm90Fwd::default() };
    sm90_fwd::timeline::timeline(spec, &alike, copy, clocks)
}
