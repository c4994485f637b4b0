//! Registers per thread of an MMA warpgroup.

/// The guide's budget for accumulators and P per thread: setmaxnreg's 240 or 160 less 24 or 32 for everything
/// else.
pub const fn limit(num_wg: u32) -> u32 {
    if num_wg <= 2 { 240 - 24 } else { 160 - 32 }
}

/// Forward: S and O, and with overlap also P while the next S is computed (16-bit, two values to a register).
pub const fn fwd(regs_s: u32, regs_p: u32, regs_o: u32, overlap_wg: bool) -> u32 {
    regs_s + regs_o + if overlap_wg { regs_p } else { 0 }
}

/// Backward: dK and dV, which live through the main loop, and S with dP or dQ, whichever is larger.
pub fn bwd(regs_sdp: u32, regs_dk: u32, regs_dv: u32, regs_dq: u32) -> u32 {
    (2 * regs_sdp).max(regs_dq) + regs_dk + regs_dv
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_counts_what_lives_together() {
        assert_eq!((limit(2), limit(3)), (216, 128));
        assert_eq!((fwd(96, 48, 64, true), fwd(96, 48, 64, false)), (208, 160));
        assert_eq!((bwd(40, 64, 64, 40), bwd(16, 64, 64, 40)), (208, 168));
    }
}
