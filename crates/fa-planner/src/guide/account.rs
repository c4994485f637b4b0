//! What a guide configuration really takes of an SM: with barriers and row statistics, which the guide's sums
//! leave out.

use fa_core::spec::{Scheduler, TileOrder};
use fa_core::{Arch, Dtype, Kernel, KernelSpec, MaskKind, Reads, ScoreKind, Sm90Fwd, Types};
use serde::Serialize;

use crate::head_dims::HeadDims;
use crate::kernels::{sm90_bwd, sm90_fwd};
use crate::occupancy::{Occupancy, register_ceiling};
use crate::registers::SetMaxNReg;
use crate::smem::SmemPlan;

use super::bwd::BwdConfig;
use super::fwd::FwdConfig;
use super::kernel::kernel_of;
use super::mma::WG_THREADS;
use super::search::HEAD_DIM_GRANULE;
use super::smem;

/// A CTA's share of an SM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Account {
    /// Shared memory, buffer by buffer.
    pub smem: SmemPlan,
    /// Bytes of it that a CTA may use.
    pub smem_limit: u32,
    /// Registers per thread by role.
    pub setmaxnreg: SetMaxNReg,
    /// Threads: the MMA warpgroups and one that loads and stores.
    pub threads: u32,
    /// CTAs per SM by shared memory, registers and threads.
    pub occupancy: Occupancy,
}

/// The account of a forward, with the guide's stages and the scheduler that takes the most memory.
pub fn fwd(dims: HeadDims, config: &FwdConfig) -> Account {
    let HeadDims { head_dim, head_dim_v } = dims.padded(HEAD_DIM_GRANULE);
    let kernel = Sm90Fwd {
        tile_m: config.tile_m,
        tile_n: config.tile_n,
        num_wg: config.num_wg,
        pv_is_rs: config.pv_is_rs,
        overlap_wg: config.overlap_wg,
        q_stages: 1,
        kv_stages: smem::KV_STAGES,
        ping_pong: false,
        scheduler: Scheduler::Dynamic,
        tile_order: TileOrder::Natural,
        cluster_m: 1,
        exp_poly_of_16: 0,
        rescale_threshold: 0,
        pack_gqa: false,
        gather: false,
        blocks_per_sm: 1,
    };
    let spec = spec(head_dim, head_dim_v, Kernel::Sm90Fwd(kernel.clone()));
    of(sm90_fwd::account::smem(&spec, &kernel), config.num_wg)
}

/// The account of a backward.
pub fn bwd(dims: HeadDims, config: &BwdConfig) -> Account {
    let HeadDims { head_dim, head_dim_v } = dims.padded(HEAD_DIM_GRANULE);
    let kernel = kernel_of(config);
    let spec = spec(head_dim, head_dim_v, Kernel::Sm90Bwd(kernel.clone()));
    of(sm90_bwd::account::smem(&spec, &kernel), config.num_wg)
}

fn spec(head_dim: u32, head_dim_v: u32, kernel: Kernel) -> KernelSpec {
    KernelSpec {
        types: Types::same(Dtype::Bf16),
        head_dim,
        head_dim_v,
        mask: MaskKind::Full,
        score: ScoreKind::NONE,
        reads: Reads::UNIFORM,
        split: false,
        kernel,
    }
}

fn of(smem: SmemPlan, num_wg: u32) -> Account {
    let limits = Arch::Sm90.limits();
    let threads = WG_THREADS * (num_wg + 1);
    // The launch gives every thread an even share of the registers, which setmaxnreg redistributes.
    let occupancy = Occupancy::of(limits, smem.total, register_ceiling(limits, threads, 1), threads);
    let setmaxnreg = SetMaxNReg::of(num_wg);
    Account { smem, smem_limit: limits.smem_per_block, setmaxnreg, threads, occupancy }
}

#[cfg(test)]
mod tests {
    use super::super::search::{Tiles, search};
    use super::*;
    use crate::guide::mode::Mode;

    /// Tensor buffers of a plan: all that the guide adds up.
    fn tensors(plan: &SmemPlan, names: &[&str]) -> u32 {
        names.iter().filter_map(|name| plan.buffer(name)).map(|buffer| buffer.size).sum()
    }

    #[test]
    fn all_that_the_guide_admits_fits_with_barriers_and_row_statistics() {
        for head_dim in (32..=256).step_by(32) {
            for head_dim_v in (32..=256).step_by(32) {
                let dims = HeadDims { head_dim, head_dim_v };
                let found = search(dims, Mode::Both, &Tiles::default()).expect("in range");
                for config in &found.fwd {
                    let account = fwd(dims, config);
                    // The guide stages O in Q's memory, and counts the larger of the two.
                    let larger_o = config.tile_m * head_dim_v.saturating_sub(head_dim) * 2;
                    let sum = tensors(&account.smem, &["q", "k", "v", "p"]) + larger_o;
                    check(dims, &account, sum, config.smem_bytes, config.num_wg);
                }
                for config in &found.bwd {
                    let account = bwd(dims, config);
                    let names = ["q", "k", "v", "do", "p", "ds", "dq"];
                    let sum = tensors(&account.smem, &names);
                    check(dims, &account, sum, config.smem_bytes, config.num_wg);
                    let lse = account.smem.buffer("lse").map(|b| b.size);
                    assert_eq!(lse, Some(config.do_stage * config.tile_m * 4));
                }
            }
        }
    }

    fn check(dims: HeadDims, account: &Account, tensors: u32, guide: u32, num_wg: u32) {
        assert_eq!(tensors, guide, "{dims}: {account:?}");
        assert!(account.smem.total <= account.smem_limit, "{dims}: {account:?}");
        assert_eq!(account.threads, 128 * (num_wg + 1));
        assert!(account.occupancy.blocks() >= 1);
        assert!(account.setmaxnreg.of_threads(128 * (num_wg + 1)) <= 65536);
        for (i, buffer) in account.smem.buffers.iter().enumerate() {
            assert!(buffer.offset.is_multiple_of(buffer.align));
            let before = account.smem.buffers[..i].iter().filter(|_| buffer.alias_of.is_none());
            assert!(before.map(|b| b.offset + b.size).all(|end| end <= buffer.offset), "{buffer:?} overlaps");
        }
    }
}
