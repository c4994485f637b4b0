//! Registers per thread of an MMA warp group.

/// Registers that setmaxnreg gives the MMA warp groups and the loading warp group; `None` for a count of MMA warp groups
/// that no split of the 64 Ki registers is published for.
pub const fn setmaxnreg(num_wg: u32) -> Option<RegSplit> {
    match num_wg {
        1 => Some(RegSplit { mma: 256, producer: 56 }),
        2 => Some(RegSplit { mma: 240, producer: 24 }),
        3 => Some(RegSplit { mma: 160, producer: 32 }),
        _ => None,
    }
}

/// How setmaxnreg splits the registers of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegSplit {
    /// Per thread of an MMA warp group.
    pub mma: u32,
    /// Per thread of the loading warp group.
    pub producer: u32,
}

/// The guide's budget for accumulators and P per thread: setmaxnreg's 240 or 160 less 24 or 32 for everything else.
pub const fn limit(num_wg: u32) -> u32 {
    if num_wg <= 2 { 240 - 24 } else { 160 - 32 }
}

/// Forward: S and O, and with overlap P beside the next S (16-bit, two values to a register).
pub const fn fwd(regs_s: u32, regs_p: u32, regs_o: u32, overlap_wg: bool) -> u32 {
    regs_s + regs_o + if overlap_wg { regs_p } else { 0 }
}

/// Backward: S and dP together, or dQ that takes their place, beside dK and dV, which live through the whole walk.
pub fn bwd(regs_sdp: u32, regs_dk: u32, regs_dv: u32, regs_dq: u32) -> u32 {
    (2 * regs_sdp).max(regs_dq) + regs_dk + regs_dv
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_fit_the_register_file() {
        for num_wg in 1..=3 {
            let split = setmaxnreg(num_wg).expect("published");
            assert!(128 * (num_wg * split.mma + split.producer) <= 65536, "{num_wg} warp groups");
            assert!(
                split.mma.is_multiple_of(8)
                    && split.producer.is_multiple_of(8)
                    && split.producer >= 24
                    && split.mma <= 256
            );
        }
        assert_eq!((setmaxnreg(0), setmaxnreg(4)), (None, None));
        assert_eq!((limit(2), limit(3)), (216, 128));
    }
}
