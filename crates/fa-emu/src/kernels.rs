//! What the emulation expects of a kernel beyond the planner's numbers: [`of`] takes a spec to its kernel.

use fa_core::{Arch, Kernel, Problem, Sm80Bwd, Sm80Fwd, Sm90Bwd, Sm90Fwd, Sm100Fwd, each_kernel};

/// A kernel as the emulation sees it.
pub(crate) trait EmulatedKernel {
    /// Whether matrix loads and stores find its layout of shared memory without bank conflicts.
    fn is_conflict_free(&self) -> bool;

    /// Whether every warp computes every step of its tile: none skips those that its rows do not see.
    fn computes_whole_steps(&self, problem: &Problem) -> bool;

    /// Whether it loads every tile of queries of a CTA, also those that no sequence has or that see no key.
    fn loads_whole_tiles(&self) -> bool {
        true
    }

    /// Which code `arch` compiles: architectures with equal values run the same unit.
    fn variant(&self, arch: Arch) -> u32;
}

impl EmulatedKernel for Sm80Fwd {
    fn is_conflict_free(&self) -> bool {
        self.swizzle && self.ldmatrix
    }

    fn computes_whole_steps(&self, problem: &Problem) -> bool {
        !self.loop_split || problem.mask.is_full()
    }

    fn variant(&self, _: Arch) -> u32 {
        0
    }
}

impl EmulatedKernel for Sm90Fwd {
    /// Rows of 128 bytes spread over all banks.
    fn is_conflict_free(&self) -> bool {
        self.pv_is_rs || self.tile_n.is_multiple_of(64)
    }

    fn computes_whole_steps(&self, problem: &Problem) -> bool {
        let skips = self.tile_n < self.tile_m && self.kv_stages >= 2 && !problem.mask.is_full();
        !skips
    }

    fn variant(&self, _: Arch) -> u32 {
        0
    }
}

impl EmulatedKernel for Sm100Fwd {
    /// It has no matrix loads and stores by warps.
    fn is_conflict_free(&self) -> bool {
        true
    }

    /// Of two tiles of queries one may see fewer keys, or have no queries.
    fn computes_whole_steps(&self, _: &Problem) -> bool {
        self.q_tiles == 1
    }

    fn loads_whole_tiles(&self) -> bool {
        self.q_tiles == 1
    }

    fn variant(&self, _: Arch) -> u32 {
        0
    }
}

impl EmulatedKernel for Sm80Bwd {
    fn is_conflict_free(&self) -> bool {
        true
    }

    fn computes_whole_steps(&self, _: &Problem) -> bool {
        true
    }

    /// Vectors are added to device memory from 9.0 on.
    fn variant(&self, arch: Arch) -> u32 {
        u32::from(arch.compute_capability().0 >= 9)
    }
}

impl EmulatedKernel for Sm90Bwd {
    fn is_conflict_free(&self) -> bool {
        self.tile_m.is_multiple_of(64) && self.tile_n.is_multiple_of(64)
    }

    fn computes_whole_steps(&self, _: &Problem) -> bool {
        true
    }

    fn variant(&self, _: Arch) -> u32 {
        0
    }
}

/// The kernel of a spec.
pub(crate) fn of(kernel: &Kernel) -> &dyn EmulatedKernel {
    each_kernel!(kernel, params => params)
}
