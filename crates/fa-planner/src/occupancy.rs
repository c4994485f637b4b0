//! How many CTAs of a kernel an SM holds at once, and which resource limits them.
//!
//! The rules are those of the CUDA C++ Programming Guide ("Hardware Implementation", "Technical
//! Specifications per Compute Capability") and the occupancy calculator: shared memory is allocated in units
//! of 128 B after the system's reserve per CTA; registers are allocated to warps, in units of 256, from four
//! equal partitions.

use fa_core::ArchLimits;
use serde::Serialize;

/// Shared memory is allocated in multiples of this many bytes.
const SMEM_UNIT: u32 = 128;

/// Register files of an SM; a warp's registers all lie in one.
const PARTITIONS: u32 = 4;

/// Threads of a warp.
pub const WARP: u32 = 32;

/// The resource that an SM runs out of first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Limiter {
    /// Shared memory.
    Smem,
    /// Registers.
    Registers,
    /// Resident threads.
    Threads,
    /// Resident CTAs.
    Blocks,
    /// Tensor memory columns.
    Tmem,
}

impl std::fmt::Display for Limiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Limiter::Smem => "shared memory",
            Limiter::Registers => "registers",
            Limiter::Threads => "threads",
            Limiter::Blocks => "blocks",
            Limiter::Tmem => "tensor memory",
        })
    }
}

/// CTAs per SM by each resource alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Occupancy {
    /// By shared memory.
    pub by_smem: u32,
    /// By registers.
    pub by_registers: u32,
    /// By threads.
    pub by_threads: u32,
    /// By the limit on resident CTAs.
    pub by_blocks: u32,
    /// By tensor memory; `None` for kernels that use none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by_tmem: Option<u32>,
}

impl Occupancy {
    /// CTAs of `threads` threads with `regs` registers each and `smem` bytes that an SM of `limits` holds.
    pub fn of(limits: &ArchLimits, smem: u32, regs: u32, threads: u32) -> Occupancy {
        let warps = threads.div_ceil(WARP).max(1);
        let per_block = (smem + limits.smem_reserved_per_block).next_multiple_of(SMEM_UNIT);
        let per_warp = (regs.max(1) * WARP).next_multiple_of(limits.reg_alloc_unit);
        let resident_warps = limits.regs_per_sm / PARTITIONS / per_warp * PARTITIONS;
        Occupancy {
            by_smem: limits.smem_per_sm / per_block,
            by_registers: resident_warps / warps,
            by_threads: limits.threads_per_sm / (warps * WARP),
            by_blocks: limits.blocks_per_sm,
            by_tmem: None,
        }
    }

    /// The same with `columns` of tensor memory allocated per CTA.
    pub fn with_tmem(self, limits: &ArchLimits, columns: u32) -> Occupancy {
        Occupancy { by_tmem: Some(limits.tmem_columns / columns.max(1)), ..self }
    }

    /// The scarcest resource and the CTAs that it allows.
    pub fn tightest(&self) -> (Limiter, u32) {
        [
            (Limiter::Smem, self.by_smem),
            (Limiter::Registers, self.by_registers),
            (Limiter::Tmem, self.by_tmem.unwrap_or(u32::MAX)),
            (Limiter::Threads, self.by_threads),
            (Limiter::Blocks, self.by_blocks),
        ]
        .into_iter()
        .min_by_key(|(_, blocks)| *blocks)
        .expect("the list is not empty")
    }

    /// CTAs that are resident at once.
    pub fn blocks(&self) -> u32 {
        self.tightest().1
    }
}

/// The most registers that a thread may have so that `blocks` CTAs of `threads` threads are resident: the
/// ceiling that `__launch_bounds__(threads, blocks)` gives the compiler.
pub fn register_ceiling(limits: &ArchLimits, threads: u32, blocks: u32) -> u32 {
    let per_thread = limits.regs_per_sm / (threads * blocks).max(1);
    (per_thread / 8 * 8).min(limits.regs_per_thread)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fa_core::Arch;

    #[test]
    fn blocks_per_sm_follow_the_occupancy_calculator() {
        // (arch, smem bytes, registers, threads) -> (limiter, blocks)
        for ((arch, smem, regs, threads), expected) in [
            ((Arch::Sm80, 0, 32, 256), (Limiter::Registers, 8)),
            ((Arch::Sm80, 0, 255, 128), (Limiter::Registers, 2)),
            ((Arch::Sm80, 163 * 1024, 128, 128), (Limiter::Smem, 1)),
            ((Arch::Sm80, 64 * 1024, 128, 128), (Limiter::Smem, 2)),
            ((Arch::Sm86, 48 * 1024, 128, 128), (Limiter::Smem, 2)),
            ((Arch::Sm86, 49 * 1024, 128, 128), (Limiter::Smem, 2)),
            ((Arch::Sm86, 50 * 1024, 128, 128), (Limiter::Smem, 1)),
            ((Arch::Sm86, 1024, 24, 512), (Limiter::Threads, 3)),
            ((Arch::Sm86, 0, 16, 32), (Limiter::Blocks, 16)),
            ((Arch::Sm90, 227 * 1024, 168, 384), (Limiter::Smem, 1)),
            // 65536 / (168 * 128) is 3.05, and 12 warps of 168 registers lie three to a partition.
            ((Arch::Sm90, 1024, 168, 128), (Limiter::Registers, 3)),
            // 100 registers round up to 104: 4 warps of 3328 registers in each of four partitions.
            ((Arch::Sm90, 1024, 100, 512), (Limiter::Registers, 1)),
        ] {
            let occupancy = Occupancy::of(arch.limits(), smem, regs, threads);
            assert_eq!(occupancy.tightest(), expected, "{arch} {smem} {regs} {threads}: {occupancy:?}");
        }
    }

    #[test]
    fn the_ceiling_leaves_room_for_the_blocks_it_promises() {
        for arch in Arch::ALL {
            let limits = arch.limits();
            for warps in 1..=16 {
                for blocks in 1..=4 {
                    let regs = register_ceiling(limits, warps * WARP, blocks);
                    assert!(regs <= limits.regs_per_thread);
                    // Partitions hold whole warps: the ceiling is exact where the warps divide evenly.
                    if (warps * blocks).is_multiple_of(PARTITIONS) {
                        let held = Occupancy::of(limits, 0, regs, warps * WARP).by_registers;
                        assert!(held >= blocks, "{arch}: {held} of {blocks} blocks of {warps} warps");
                    }
                }
            }
        }
        assert_eq!(register_ceiling(Arch::Sm90.limits(), 384, 1), 168);
        assert_eq!(register_ceiling(Arch::Sm80.limits(), 128, 2), 255);
        assert_eq!(register_ceiling(Arch::Sm80.limits(), 128, 3), 168);
    }

    #[test]
    fn tensor_memory_is_a_limit_of_its_own() {
        let limits = Arch::Sm100.limits();
        let occupancy = Occupancy::of(limits, 1024, 64, 128).with_tmem(limits, 256);
        assert_eq!(occupancy.tightest(), (Limiter::Tmem, 2));
    }
}
