//! What tests and measurements vary in a kernel.

use fa_core::spec::{Scheduler, TileOrder};
use fa_core::{
    Arch, Kernel, Sm80Bwd, Sm80Fwd, Sm90Bwd, Sm90Fwd, Sm90FwdFp8, Sm90Wide, Sm100Fwd, each_kernel,
};

/// A kernel as the lab sees it.
pub(crate) trait LabKernel {
    /// The kernel with one knob changed, the most influential first; some may break a rule.
    fn variants(&self) -> Vec<Kernel>;

    /// Which device code `arch` compiles: architectures with equal values run the same.
    fn code_for(&self, _: Arch) -> u32 {
        0
    }

    /// The kernel without the code that only loads pages; `None` where no parameter stands for such code.
    fn without_pages(&self) -> Option<Kernel> {
        None
    }
}

/// The kernel of a spec.
pub(crate) fn of(kernel: &Kernel) -> &dyn LabKernel {
    each_kernel!(kernel, params => params)
}

/// `kernel` with each of `changes` alone.
fn changed<K: Clone + Into<Kernel>>(kernel: &K, changes: &[fn(&mut K)]) -> Vec<Kernel> {
    let with = |change: &fn(&mut K)| {
        let mut kernel = kernel.clone();
        change(&mut kernel);
        kernel.into()
    };
    changes.iter().map(with).collect()
}

fn other(order: TileOrder) -> TileOrder {
    match order {
        TileOrder::Natural => TileOrder::LongestFirst,
        TileOrder::LongestFirst => TileOrder::Natural,
    }
}

impl LabKernel for Sm80Fwd {
    fn variants(&self) -> Vec<Kernel> {
        changed(
            self,
            &[
                |k| k.q_in_regs = !k.q_in_regs,
                |k| k.stages += 1,
                |k| k.blocks_per_sm = k.blocks_per_sm.saturating_sub(1),
                |k| k.blocks_per_sm += 1,
                |k| k.tile_n += 16,
                |k| k.tile_n = k.tile_n.saturating_sub(16),
                |k| k.stages = k.stages.saturating_sub(1),
                |k| k.reverse_blocks = !k.reverse_blocks,
            ],
        )
    }
}

impl LabKernel for Sm80Bwd {
    fn variants(&self) -> Vec<Kernel> {
        changed(
            self,
            &[
                |k| k.q_stages = 5 - k.q_stages,
                |k| k.do_stages = 3 - k.do_stages,
                |k| k.tile_order = other(k.tile_order),
                |k| k.blocks_per_sm += 1,
                |k| k.blocks_per_sm = k.blocks_per_sm.saturating_sub(1),
            ],
        )
    }

    /// Vectors are added to device memory from 9.0 on.
    fn code_for(&self, arch: Arch) -> u32 {
        u32::from(arch.compute_capability().0 >= 9)
    }
}

impl LabKernel for Sm90Fwd {
    fn variants(&self) -> Vec<Kernel> {
        changed(
            self,
            &[
                |k| k.ping_pong = !k.ping_pong,
                |k| k.q_stages = 3 - k.q_stages,
                |k| {
                    let drawn = k.scheduler == Scheduler::Dynamic;
                    k.scheduler = if drawn { Scheduler::Static } else { Scheduler::Dynamic };
                },
                |k| k.tile_order = other(k.tile_order),
                |k| k.tile_n += 16,
                |k| k.tile_n = k.tile_n.saturating_sub(16),
                |k| k.kv_stages += 1,
                |k| k.cluster_m = 3 - k.cluster_m,
                |k| k.scheduler = Scheduler::PerTile,
                |k| k.blocks_per_sm += 1,
                |k| k.blocks_per_sm = k.blocks_per_sm.saturating_sub(1),
            ],
        )
    }

    fn without_pages(&self) -> Option<Kernel> {
        Some(Sm90Fwd { gather: false, ..self.clone() }.into())
    }
}

impl LabKernel for Sm90Wide {
    fn variants(&self) -> Vec<Kernel> {
        changed(
            self,
            &[
                |k| k.overlap = !k.overlap,
                |k| k.kv_stages += 1,
                |k| {
                    (k.tile_n, k.kv_stages) =
                        if k.tile_n == 64 { (32, 2 * k.kv_stages) } else { (64, k.kv_stages.div_ceil(2)) };
                },
                |k| {
                    let fixed = k.scheduler == Scheduler::Static;
                    k.scheduler = if fixed { Scheduler::PerTile } else { Scheduler::Static };
                },
                |k| k.tile_order = other(k.tile_order),
                |k| k.kv_stages = k.kv_stages.saturating_sub(1),
                |k| k.exp_poly_of_16 += 1,
            ],
        )
    }

    fn without_pages(&self) -> Option<Kernel> {
        Some(Sm90Wide { gather: false, ..self.clone() }.into())
    }
}

impl LabKernel for Sm90FwdFp8 {
    fn variants(&self) -> Vec<Kernel> {
        changed(
            self,
            &[
                |k| k.ping_pong = !k.ping_pong,
                |k| k.overlap_wg = !k.overlap_wg,
                |k| k.exp_poly_of_16 = 4 - k.exp_poly_of_16.min(4),
                |k| k.tile_n += 32,
                |k| k.tile_n = k.tile_n.saturating_sub(32),
                |k| k.v_stages = 3 - k.v_stages,
                |k| k.q_stages = 3 - k.q_stages,
                |k| k.kv_stages += 1,
                |k| k.tile_order = other(k.tile_order),
            ],
        )
    }
}

impl LabKernel for Sm100Fwd {
    fn variants(&self) -> Vec<Kernel> {
        changed(
            self,
            &[
                |k| k.tile_order = other(k.tile_order),
                |k| {
                    let fixed = k.scheduler == Scheduler::Static;
                    k.scheduler = if fixed { Scheduler::PerTile } else { Scheduler::Static };
                },
                |k| k.exp_poly_of_16 += 1,
                |k| k.exp_poly_of_16 = k.exp_poly_of_16.saturating_sub(1),
                |k| k.kv_stages += 1,
                |k| k.tile_n = k.tile_n.saturating_sub(32),
            ],
        )
    }
}

impl LabKernel for Sm90Bwd {
    fn variants(&self) -> Vec<Kernel> {
        changed(
            self,
            &[
                |k| k.pds_stages = 3 - k.pds_stages,
                |k| k.do_stages = 3 - k.do_stages,
                |k| k.q_stages = 3 - k.q_stages,
                |k| k.mma_dkv_is_rs = !k.mma_dkv_is_rs,
                |k| k.dq_via_smem = !k.dq_via_smem,
                |k| k.dq_slices = 3 - k.dq_slices,
                |k| k.persistent = !k.persistent,
                |k| {
                    k.whole_keys = !k.whole_keys;
                    k.dq_via_smem &= !k.whole_keys;
                },
                |k| k.tile_order = other(k.tile_order),
            ],
        )
    }
}
