//! The SM100 forward (tcgen05, tensor memory), for SM100 and SM103: assembled and emulated, never run on a
//! GPU. `fa plan` shows it by its shape ([`explore`]); the kernel of a shape is [`Sm100Tile::spec`].
//!
//! The shape is that of the published Blackwell forwards: one or two query tiles of 128 rows per CTA, scores
//! and outputs in tensor memory, one softmax thread per row, and warps that rescale O and store it, issue the
//! products, and load. P is packed into the upper half of the columns of S.

pub mod account;
pub mod candidates;
mod cost;
pub mod timeline;

use fa_core::{Arch, ArchLimits, Dtype, Family, KernelSpec, Problem, Sm100Fwd};
use serde::Serialize;

use crate::account::code::Code;
use crate::account::missing_code;
use crate::account::reason::Reason;
use crate::cost::predicted::StepClocks;
use crate::cost::{Cost, CostConstants};
use crate::kernels::planned::{Forward, ForwardTime, PlannedKernel, Time, Wanted};
use crate::occupancy::Occupancy;
use crate::plan::PlanError;
use crate::registers::Registers;
use crate::smem::SmemPlan;
use crate::timeline::lanes::Timeline;

pub use account::{HEAD_DIMS, Role, TmemPlan, TmemRegion};
pub use candidates::{Q_ROWS, Sm100Tile};

use account::Sm100Account;

/// A shape that fits, with what it takes and its predicted time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sm100Plan {
    /// The shape.
    pub tile: Sm100Tile,
    /// The kernel.
    pub spec: KernelSpec,
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
    /// Predicted time. The model's SM100 constants are assumptions: the kernel was never run on a GPU.
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

/// Plans `problem` for `arch`, by the rates of `board` or of the architecture's own, with all shapes that are
/// tried.
///
/// # Errors
/// [`PlanError`] for a problem that no shape computes, and for architectures without tensor memory.
pub fn explore(
    problem: &Problem,
    arch: Arch,
    constants: Option<CostConstants>,
    board: Option<ArchLimits>,
) -> Result<Sm100Set, PlanError> {
    problem.check()?;
    if problem.types.q == Dtype::E4m3 {
        return Err(PlanError::NoFp8 { family: Family::Sm100, pass: "forward" });
    }
    if !problem.types.q.is_half() {
        return Err(PlanError::Dtype(problem.types.q));
    }
    if problem.latent {
        let Problem { head_dim, head_dim_v, .. } = *problem;
        return Err(PlanError::Latent {
            family: fa_core::Family::Sm100,
            head_dim,
            head_dim_v,
            pass: "forward",
        });
    }
    if !arch.has_tcgen05() {
        return Err(PlanError::NoTensorMemory { arch });
    }
    let head_dim = padded("head_dim", problem.head_dim)?;
    let head_dim_v = padded("head_dim_v", problem.head_dim_v)?;
    // All shapes have the same code.
    let spec = candidates::candidates(head_dim, head_dim_v).next().map(|tile| tile.spec(problem));
    if let Some(what) = spec.as_ref().and_then(missing_code) {
        return Err(PlanError::NoCode { kernel: "sm100_fwd", what });
    }
    let constants = constants.unwrap_or(CostConstants::of(arch));
    let limits = board.unwrap_or(*arch.limits());
    let mut set = Sm100Set { plans: Vec::new(), rejected: Vec::new() };
    for tile in candidates::candidates(head_dim, head_dim_v) {
        match account::account(tile, &limits) {
            Ok(account) => {
                let cost = cost::predict(problem, &account, &limits, &constants);
                set.plans.push(Sm100Plan::of(problem, account, cost));
            }
            Err(reason) => set.rejected.push(Sm100Rejected { tile, reason }),
        }
    }
    set.plans.sort_by(|a, b| a.cost.seconds.total_cmp(&b.cost.seconds));
    Ok(set)
}

impl PlannedKernel for Sm100Fwd {
    fn head_dims(&self) -> &'static [u32] {
        &HEAD_DIMS
    }

    fn code(&self) -> Code {
        Code { varied: true, programs: false, ..Code::DENSE }
    }

    fn candidates<'a>(&self, wanted: Wanted<'a>) -> Box<dyn Iterator<Item = KernelSpec> + 'a> {
        let Wanted { problem, head_dim, head_dim_v, .. } = wanted;
        Box::new(candidates::candidates(head_dim, head_dim_v).map(|tile| tile.spec(problem)))
    }

    fn smem(&self, spec: &KernelSpec) -> SmemPlan {
        account::smem(&Sm100Tile::of(spec, self))
    }

    fn registers(&self, spec: &KernelSpec, _: Arch) -> Registers {
        account::registers(&Sm100Tile::of(spec, self))
    }

    fn time(&self) -> Time<'_> {
        Time::Forward(self)
    }

    fn timeline(&self, spec: &KernelSpec, copy: &dyn Fn(u32) -> f64, clocks: &StepClocks) -> Timeline {
        timeline::of_loads(&Sm100Tile::of(spec, self), copy, clocks)
    }
}

impl ForwardTime for Sm100Fwd {
    fn best_split(&self, forward: &Forward<'_>, _: f64) -> Option<Cost> {
        let Forward { problem, spec, work, limits, constants } = *forward;
        let account = account::account(Sm100Tile::of(spec, self), limits).ok()?;
        Some(cost::cost(problem, &account, work, limits, constants))
    }

    /// No bound is known.
    fn least_seconds(&self, _: &Forward<'_>) -> f64 {
        0.0
    }
}

fn padded(name: &'static str, value: usize) -> Result<u32, PlanError> {
    let extent = HEAD_DIMS.into_iter().find(|&extent| extent as usize >= value);
    let most = HEAD_DIMS[HEAD_DIMS.len() - 1];
    extent.filter(|_| value.is_multiple_of(8)).ok_or(PlanError::HeadDim { name, value, most })
}

impl Sm100Plan {
    fn of(problem: &Problem, account: Sm100Account, cost: Cost) -> Sm100Plan {
        let Sm100Account { tile, tmem, smem, roles, softmax_chunk, threads, occupancy } = account;
        let (spec, tile_m) = (tile.spec(problem), tile.tile_m());
        Sm100Plan { tile, spec, tile_m, tmem, smem, roles, softmax_chunk, threads, occupancy, cost }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fa_core::program::Program;
    use fa_core::{Lengths, Mask, ScoreMod, Side, Types};

    #[test]
    fn two_query_tiles_win_where_they_fit() {
        let problem = Problem::square(4, 16384, 32, 128, Mask::CAUSAL, Dtype::F16);
        for arch in [Arch::Sm100, Arch::Sm103] {
            let set = explore(&problem, arch, None, None).expect("plans");
            let best = &set.plans[0];
            assert_eq!((best.tile_m, best.tile.tile_n), (256, 128), "{arch}");
            assert!(
                best.cost.tflops > 918.0,
                "{arch}: a public tile compiler reaches 918, {}",
                best.cost.tflops
            );
            assert!(best.cost.tflops < arch.limits().peak_tensor_flops() / 1e12);
        }
        let wide = problem.with_head_dims(256, 256);
        let set = explore(&wide, Arch::Sm100, None, None).expect("plans");
        assert!(set.plans.iter().all(|plan| plan.tile.q_tiles == 1));
        assert!(matches!(explore(&problem, Arch::Sm90, None, None), Err(PlanError::NoTensorMemory { .. })));
        let latent = wide.with_head_dims(256, 128).with_softmax_scale(Some(0.1)).with_latent(true);
        assert!(matches!(explore(&latent, Arch::Sm100, None, None), Err(PlanError::Latent { .. })));
        let fp8 = problem.with_types(Types::fp8(Dtype::Bf16));
        assert!(matches!(explore(&fp8, Arch::Sm100, None, None), Err(PlanError::NoFp8 { .. })));
        let codes = problem.with_types(Types::same(Dtype::F16).with_kv(Dtype::Int8));
        let paged = problem.with_lengths(Lengths::of(4, Side::padded(1), Side::paged(16, 64, 256)));
        let bias = Program::parse("array a: f16[_]; s + a[k]").expect("a program").intern().expect("room");
        let program = problem.with_score(ScoreMod::NONE.with_program(Some(bias)));
        for (problem, lacks) in [(codes, "K and V in codes"), (paged, "keys in pages"), (program, "programs")]
        {
            let found = explore(&problem, Arch::Sm100, None, None);
            assert_eq!(found.err(), Some(PlanError::NoCode { kernel: "sm100_fwd", what: lacks }));
        }
    }
}
