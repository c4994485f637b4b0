//! Registers of a thread, by use and by role.

use serde::Serialize;

/// Registers per thread of the threads that compute, as predicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Registers {
    /// Score accumulators.
    pub s: u32,
    /// P as operand fragments, where they live beside the scores.
    pub p: u32,
    /// Output accumulators.
    pub o: u32,
    /// Q fragments, where they are kept.
    pub q: u32,
    /// Addresses, row statistics, other fragments: an allowance.
    pub other: u32,
    /// Sum of the above.
    pub total: u32,
    /// What a thread may have.
    pub limit: u32,
    /// How setmaxnreg shares the registers out, on kernels with roles.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub setmaxnreg: Option<SetMaxNReg>,
}

/// Registers per thread by role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SetMaxNReg {
    /// Of the warp groups that issue matrix products.
    pub mma: u32,
    /// Of the warp group that loads.
    pub producer: u32,
}

/// The registers that setmaxnreg gives each role, by number of MMA warp groups (1, 2, 3): FlashAttention-3's split.
pub const SETMAXNREG: [SetMaxNReg; 3] = [
    SetMaxNReg { mma: 256, producer: 56 },
    SetMaxNReg { mma: 240, producer: 24 },
    SetMaxNReg { mma: 160, producer: 32 },
];

impl SetMaxNReg {
    /// The split for `num_wg` MMA warpgroups; outside 1 to 3 that of the nearest.
    pub const fn of(num_wg: u32) -> SetMaxNReg {
        match num_wg {
            0 | 1 => SETMAXNREG[0],
            2 => SETMAXNREG[1],
            _ => SETMAXNREG[2],
        }
    }
}
