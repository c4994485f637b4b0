//! Registers of a thread, by use and by role.

use serde::Serialize;

/// Predicted registers of a thread that computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Registers {
    /// Score accumulators; of a backward those of S and dP.
    pub s: u32,
    /// P as operand fragments, where they are live together with the scores.
    pub p: u32,
    /// Output accumulators; of a backward those of dK and dV.
    pub o: u32,
    /// Q fragments, where they are kept; of a backward dQ's accumulators, live after S and dP.
    pub q: u32,
    /// An allowance for addresses, row statistics and other fragments.
    pub other: u32,
    /// The most that are live at once: of a forward the sum of the above.
    pub total: u32,
    /// Registers that a thread may have.
    pub limit: u32,
    /// The registers of each role, on kernels that use setmaxnreg.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub setmaxnreg: Option<SetMaxNReg>,
}

/// Registers per thread by role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SetMaxNReg {
    /// Of the consumer warpgroups, which issue the matrix products.
    pub mma: u32,
    /// Of the producer warpgroup, which loads.
    pub producer: u32,
    /// Of the last consumer warpgroup, where it needs fewer than the others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub follower: Option<u32>,
}

/// Registers of each role after setmaxnreg, by number of MMA warpgroups (1, 2, 3): FlashAttention-3's split.
pub const SETMAXNREG: [SetMaxNReg; 3] = [
    SetMaxNReg { mma: 256, producer: 56, follower: None },
    SetMaxNReg { mma: 240, producer: 24, follower: None },
    SetMaxNReg { mma: 160, producer: 32, follower: None },
];

/// Registers of an SM.
const REGISTERS: u32 = 1 << 16;

impl SetMaxNReg {
    /// Registers of a CTA of `threads`.
    pub const fn of_threads(self, threads: u32) -> u32 {
        let others = (threads / 128).saturating_sub(2) * self.mma;
        let last = match self.follower {
            Some(follower) => follower,
            None => self.mma,
        };
        128 * (others + last + self.producer)
    }

    /// The split for `num_wg` MMA warpgroups, clamped to 1 to 3.
    pub const fn of(num_wg: u32) -> SetMaxNReg {
        match num_wg {
            0 | 1 => SETMAXNREG[0],
            2 => SETMAXNREG[1],
            _ => SETMAXNREG[2],
        }
    }

    /// The split of a kernel that reads lengths on the device: its producers hold a few more.
    pub const fn with_lengths(num_wg: u32, varied: bool) -> SetMaxNReg {
        match (num_wg, varied) {
            (2, true) => SetMaxNReg { mma: 232, producer: 40, follower: None },
            _ => SetMaxNReg::of(num_wg),
        }
    }

    /// The split of a forward of which `blocks` CTAs share an SM: of an equal part of its registers.
    pub const fn of_shared(num_wg: u32, blocks: u32, varied: bool) -> SetMaxNReg {
        let groups = num_wg + 1;
        let producer = if varied { 40 } else { 24 };
        let part = REGISTERS / (128 * groups * blocks) / 8 * 8 * groups;
        SetMaxNReg { mma: part.saturating_sub(producer) / num_wg / 8 * 8, producer, follower: None }
    }

    /// The split of a forward whose producers convert codes.
    pub const fn with_codes(num_wg: u32, head_dim_v: u32) -> SetMaxNReg {
        match num_wg {
            2 if head_dim_v > 128 => SetMaxNReg { mma: 216, producer: 72, follower: None },
            2 => SetMaxNReg { mma: 208, producer: 88, follower: None },
            3 => SetMaxNReg { mma: 144, producer: 80, follower: None },
            _ => SetMaxNReg { producer: 96, ..SetMaxNReg::of(num_wg) },
        }
    }

    /// The split of a forward whose producers copy the rows of pages.
    pub const fn with_gather(num_wg: u32) -> SetMaxNReg {
        match num_wg {
            2 => SetMaxNReg { mma: 224, producer: 56, follower: None },
            3 => SetMaxNReg { mma: 152, producer: 56, follower: None },
            _ => SetMaxNReg { producer: 96, ..SetMaxNReg::of(num_wg) },
        }
    }
}
