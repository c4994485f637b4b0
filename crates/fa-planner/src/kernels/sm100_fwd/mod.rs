//! The SM100 forward (tcgen05, tensor memory), for SM100 and SM103. No kernel exists yet, so a plan is a
//! shape, not a spec.
//!
//! The shape is that of the published Blackwell forwards: one or two query tiles of 128 rows per CTA, scores
//! and outputs in tensor memory, one softmax thread per row, and warps that rescale O, issue the products,
//! load and store. P is packed into the upper half of the columns of S.

pub mod account;
pub mod candidates;
mod cost;
pub mod timeline;

use fa_core::{Arch, Problem};
use serde::Serialize;

use crate::account::reason::Reason;
use crate::cost::{Cost, CostConstants};
use crate::occupancy::Occupancy;
use crate::plan::PlanError;
use crate::smem::SmemPlan;

pub use account::{HEAD_DIMS, Role, TmemPlan, TmemRegion};
pub use candidates::{Q_ROWS, Sm100Tile};

use account::Sm100Account;

/// A shape that fits, with what it takes and its predicted time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sm100Plan {
    /// The shape.
    pub tile: Sm100Tile,
    /// Query rows of a CTA.
    pub tile_m: u32,
    /// Tensor memory.
    pub tmem: TmemPlan,
    /// Shared memory, buffer by buffer.
    pub smem: SmemPlan,
    /// Warps and their registers.
    pub roles: Vec<Role>,
    /// Score columns that a softmax thread holds at once.
    pub softmax_chunk: u32,
    /// Threads of a CTA.
    pub threads: u32,
    /// CTAs per SM by each resource.
    pub occupancy: Occupancy,
    /// Predicted time. The model's SM100 constants are assumptions: no kernel has been measured against them.
    pub cost: Cost,
}

/// A shape that does not fit.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sm100Rejected {
    /// The shape.
    pub tile: Sm100Tile,
    /// The first limit that it breaks.
    pub reason: Reason,
}

/// All that was tried.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sm100Set {
    /// What fits, by predicted time, best first.
    pub plans: Vec<Sm100Plan>,
    /// What does not.
    pub rejected: Vec<Sm100Rejected>,
}

/// Plans `problem` for `arch`, with all shapes that are tried.
///
/// # Errors
/// [`PlanError`] for a problem that no shape computes, and for architectures without tensor memory.
pub fn explore(
    problem: &Problem,
    arch: Arch,
    constants: Option<CostConstants>,
) -> Result<Sm100Set, PlanError> {
    problem.check()?;
    if !problem.types.qkv.is_half() {
        return Err(PlanError::Dtype(problem.types.qkv));
    }
    if !arch.has_tcgen05() {
        return Err(PlanError::NoTensorMemory { arch });
    }
    let head_dim = padded("head_dim", problem.head_dim)?;
    let head_dim_v = padded("head_dim_v", problem.head_dim_v)?;
    let constants = constants.unwrap_or(CostConstants::of(arch));
    let mut set = Sm100Set { plans: Vec::new(), rejected: Vec::new() };
    for tile in candidates::candidates(head_dim, head_dim_v) {
        match account::account(tile, arch.limits()) {
            Ok(account) => {
                let cost = cost::predict(problem, &account, arch, &constants);
                set.plans.push(Sm100Plan::of(account, cost));
            }
            Err(reason) => set.rejected.push(Sm100Rejected { tile, reason }),
        }
    }
    set.plans.sort_by(|a, b| a.cost.seconds.total_cmp(&b.cost.seconds));
    Ok(set)
}

fn padded(name: &'static str, value: usize) -> Result<u32, PlanError> {
    let extent = HEAD_DIMS.into_iter().find(|&extent| extent as usize >= value);
    extent.filter(|_| value.is_multiple_of(8)).ok_or(PlanError::HeadDim { name, value })
}

impl Sm100Plan {
    fn of(account: Sm100Account, cost: Cost) -> Sm100Plan {
        let Sm100Account { tile, tmem, smem, roles, softmax_chunk, threads, occupancy } = account;
        Sm100Plan { tile, tile_m: tile.tile_m(), tmem, smem, roles, softmax_chunk, threads, occupancy, cost }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fa_core::{Dtype, Mask};

    #[test]
    fn two_query_tiles_win_where_they_fit() {
        let problem = Problem::square(4, 16384, 32, 128, Mask::CAUSAL, Dtype::F16);
        for arch in [Arch::Sm100, Arch::Sm103] {
            let set = explore(&problem, arch, None).expect("plans");
            let best = &set.plans[0];
            assert_eq!((best.tile_m, best.tile.tile_n), (256, 128), "{arch}");
            assert!(
                best.cost.tflops > 918.0,
                "{arch}: a public tile compiler reaches 918, {}",
                best.cost.tflops
            );
            assert!(best.cost.tflops < arch.limits().peak_tensor_flops() / 1e12);
        }
        let wide = Problem { head_dim: 256, head_dim_v: 256, ..problem };
        let set = explore(&wide, Arch::Sm100, None).expect("plans");
        assert!(set.plans.iter().all(|plan| plan.tile.q_tiles == 1));
        assert!(matches!(explore(&problem, Arch::Sm90, None), Err(PlanError::NoTensorMemory { .. })));
    }
}
