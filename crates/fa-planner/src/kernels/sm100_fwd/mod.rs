//! Planning for SM100 and SM103 (tcgen05, tensor memory). There is no kernel yet, so a plan is data of its own.
//!
//! The shape is that of the published Blackwell forwards: one or two query tiles of 128 rows per block, their scores and
//! outputs in tensor memory, one softmax thread per row, and further warps that rescale O, issue the products, load and
//! store. P is packed into the upper half of its scores' columns.

use fa_core::{Arch, ArchLimits, Dtype, MaskKind, Problem};
use serde::Serialize;

use crate::cost::core::{KernelModel, evaluate, f32_lanes, overlap, resident_blocks, softmax_clocks};
use crate::cost::{Cost, CostConstants, Queue, Work};
use crate::occupancy::{Occupancy, WARP, register_ceiling};
use crate::plan::{PlanError, Reason};
use crate::smem::{SmemPlan, TILE_ALIGN};

/// Rows of a query tile: the lanes of tensor memory.
pub const Q_ROWS: u32 = 128;

/// Tile extents of the head dims.
pub const HEAD_DIMS: [u32; 5] = [64, 96, 128, 192, 256];

/// Keys per step that are tried; a 16-bit product of 128 rows has N in multiples of 16 up to 256.
pub const TILE_N: [u32; 6] = [64, 96, 128, 160, 192, 256];

/// K/V buffers that are tried: K and V take turns in one ring.
pub const STAGES: [u32; 5] = [2, 3, 4, 5, 6];

/// Registers of a softmax thread beside the scores that it holds.
const SOFTMAX_OVERHEAD: u32 = 40;

/// A softmax thread reads scores in pieces of at most this many columns.
const LARGEST_CHUNK: u32 = 128;

/// The smallest piece that still hides tensor memory's latency.
const SMALLEST_CHUNK: u32 = 32;

/// A kernel shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Sm100Tile {
    /// Tile extent of the head dim of Q and K.
    pub head_dim: u32,
    /// Tile extent of the head dim of V and O.
    pub head_dim_v: u32,
    /// Query tiles of 128 rows that a block works on in turn: 1 or 2.
    pub q_tiles: u32,
    /// Keys per step.
    pub tile_n: u32,
    /// K/V buffers in flight.
    pub kv_stages: u32,
    /// Resident blocks per SM.
    pub blocks_per_sm: u32,
}

/// A range of tensor memory columns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TmemRegion {
    /// What lies there.
    pub name: &'static str,
    /// First column.
    pub begin: u32,
    /// Columns (32 bits on each of 128 lanes).
    pub columns: u32,
    /// The region whose columns this one reuses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alias_of: Option<&'static str>,
}

/// Tensor memory of a block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TmemPlan {
    /// Every region.
    pub regions: Vec<TmemRegion>,
    /// Columns that are used.
    pub used: u32,
    /// Columns that are allocated: a power of two from 32 (PTX ISA, tcgen05.alloc).
    pub allocated: u32,
}

/// Warps with one task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Role {
    /// The task.
    pub name: &'static str,
    /// Warps.
    pub warps: u32,
    /// Registers of a thread after setmaxnreg.
    pub regs: u32,
}

/// A shape that fits, with what it takes and its predicted time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sm100Plan {
    /// The shape.
    pub tile: Sm100Tile,
    /// Query rows of a block.
    pub tile_m: u32,
    /// Tensor memory.
    pub tmem: TmemPlan,
    /// Shared memory, buffer by buffer.
    pub smem: SmemPlan,
    /// Warps and their registers.
    pub roles: Vec<Role>,
    /// Score columns that a softmax thread holds at once.
    pub softmax_chunk: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Blocks per SM by each resource.
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
    if !matches!(problem.dtype, Dtype::F16 | Dtype::Bf16) {
        return Err(PlanError::Dtype(problem.dtype));
    }
    if !arch.has_tcgen05() {
        return Err(PlanError::NoTensorMemory { arch });
    }
    let head_dim = padded("head_dim", problem.head_dim)?;
    let head_dim_v = padded("head_dim_v", problem.head_dim_v)?;
    let constants = constants.unwrap_or(CostConstants::of(arch));
    let mut set = Sm100Set { plans: Vec::new(), rejected: Vec::new() };
    for tile in candidates(head_dim, head_dim_v) {
        match account(tile, arch.limits()) {
            Ok(account) => set.plans.push(account.into_plan(problem, arch, &constants)),
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

/// Every shape that is tried: query tiles, keys per step, stages (most first), blocks per SM.
pub fn candidates(head_dim: u32, head_dim_v: u32) -> impl Iterator<Item = Sm100Tile> {
    [2, 1]
        .into_iter()
        .flat_map(|q_tiles| TILE_N.into_iter().map(move |tile_n| (q_tiles, tile_n)))
        .flat_map(|tile| STAGES.into_iter().rev().map(move |stages| (tile, stages)))
        .flat_map(|pipe| [1, 2].into_iter().map(move |blocks| (pipe, blocks)))
        .map(move |(((q_tiles, tile_n), kv_stages), blocks_per_sm)| Sm100Tile {
            head_dim,
            head_dim_v,
            q_tiles,
            tile_n,
            kv_stages,
            blocks_per_sm,
        })
}

/// Tensor memory of a block: scores of every query tile, then outputs; P in the upper half of its scores.
pub fn tmem(tile: &Sm100Tile) -> TmemPlan {
    const S: [&str; 2] = ["s0", "s1"];
    const P: [&str; 2] = ["p0", "p1"];
    const O: [&str; 2] = ["o0", "o1"];
    let mut regions = Vec::new();
    let mut used = 0;
    for index in 0..tile.q_tiles.min(2) as usize {
        regions.push(TmemRegion { name: S[index], begin: used, columns: tile.tile_n, alias_of: None });
        let half = tile.tile_n / 2;
        regions.push(TmemRegion {
            name: P[index],
            begin: used + half,
            columns: half,
            alias_of: Some(S[index]),
        });
        used += tile.tile_n;
    }
    for name in O.into_iter().take(tile.q_tiles as usize) {
        regions.push(TmemRegion { name, begin: used, columns: tile.head_dim_v, alias_of: None });
        used += tile.head_dim_v;
    }
    TmemPlan { regions, used, allocated: used.next_power_of_two().max(32) }
}

/// Shared memory of a block (16-bit elements): Q tiles, reused by O in the epilogue; one ring of buffers that hold a tile
/// of K or V each; row maxima and sums on their way from softmax to correction; mbarriers; the tensor memory address.
pub fn smem(tile: &Sm100Tile) -> SmemPlan {
    let rows = tile.q_tiles * Q_ROWS;
    let mut plan = SmemPlan::default();
    plan.push("q", rows * tile.head_dim * 2, TILE_ALIGN);
    plan.alias_last("o", rows * tile.head_dim_v * 2);
    plan.push("kv", tile.kv_stages * tile.tile_n * tile.head_dim.max(tile.head_dim_v) * 2, TILE_ALIGN);
    plan.push("scale", rows * 4 * 2, 128);
    for name in ["q_full", "q_empty", "s_full", "p_full", "o_full", "scale_full", "scale_empty"] {
        plan.push_mbarriers(name, tile.q_tiles);
    }
    plan.push_mbarriers("kv_full", tile.kv_stages);
    plan.push_mbarriers("kv_empty", tile.kv_stages);
    plan.push("tmem_base", 4, 16);
    plan.round_up(TILE_ALIGN)
}

/// Warps by task, with the registers that are left for softmax once the others have theirs.
fn roles(tile: &Sm100Tile, limits: &ArchLimits) -> Vec<Role> {
    let softmax_warps = 4 * tile.q_tiles;
    let warps = softmax_warps + 8;
    let launch = register_ceiling(limits, warps * WARP, tile.blocks_per_sm);
    // One block of two query tiles has 128 registers a thread on average; more threads must make do with less.
    let (correction, other) = if launch >= 128 { (80, 48) } else { (64, 24) };
    let left = (launch * warps).saturating_sub(4 * correction + 4 * other) / softmax_warps;
    vec![
        Role { name: "softmax", warps: softmax_warps, regs: (left / 8 * 8).min(192) },
        Role { name: "correction", warps: 4, regs: correction },
        Role { name: "mma", warps: 1, regs: other },
        Role { name: "epilogue", warps: 1, regs: other },
        Role { name: "load", warps: 1, regs: other },
        Role { name: "spare", warps: 1, regs: other },
    ]
}

struct Sm100Account {
    tile: Sm100Tile,
    tmem: TmemPlan,
    smem: SmemPlan,
    roles: Vec<Role>,
    softmax_chunk: u32,
    threads: u32,
    occupancy: Occupancy,
}

fn account(tile: Sm100Tile, limits: &ArchLimits) -> Result<Sm100Account, Reason> {
    let tmem = tmem(&tile);
    if tmem.used > limits.tmem_columns {
        return Err(Reason::Tmem { need: tmem.used, have: limits.tmem_columns });
    }
    let smem = smem(&tile);
    if smem.total > limits.smem_per_block {
        return Err(Reason::Smem { need: smem.total, have: limits.smem_per_block });
    }
    let roles = roles(&tile, limits);
    let softmax = roles[0].regs;
    let mut softmax_chunk = tile.tile_n.min(LARGEST_CHUNK);
    while softmax_chunk > SMALLEST_CHUNK && softmax_chunk + SOFTMAX_OVERHEAD > softmax {
        softmax_chunk /= 2;
    }
    if softmax_chunk + SOFTMAX_OVERHEAD > softmax {
        return Err(Reason::Registers { need: softmax_chunk + SOFTMAX_OVERHEAD, have: softmax });
    }
    let threads = WARP * roles.iter().map(|role| role.warps).sum::<u32>();
    let launch = register_ceiling(limits, threads, tile.blocks_per_sm);
    let occupancy = Occupancy::of(limits, smem.total, launch, threads).with_tmem(limits, tmem.allocated);
    let (limiter, have) = occupancy.tightest();
    if have < tile.blocks_per_sm {
        return Err(Reason::Occupancy { need: tile.blocks_per_sm, have, limiter });
    }
    Ok(Sm100Account { tile, tmem, smem, roles, softmax_chunk, threads, occupancy })
}

impl Sm100Account {
    fn into_plan(self, problem: &Problem, arch: Arch, constants: &CostConstants) -> Sm100Plan {
        let tile_m = self.tile.q_tiles * Q_ROWS;
        let work = Work::of(problem, tile_m, self.tile.tile_n, false);
        let model = model(&self, problem, &work, arch.limits(), constants);
        let cost = evaluate(problem, tile_m, self.tile.tile_n, &work, &model, arch.limits(), constants);
        let Sm100Account { tile, tmem, smem, roles, softmax_chunk, threads, occupancy } = self;
        Sm100Plan { tile, tile_m, tmem, smem, roles, softmax_chunk, threads, occupancy, cost }
    }
}

fn model(
    account: &Sm100Account,
    problem: &Problem,
    work: &Work,
    limits: &ArchLimits,
    c: &CostConstants,
) -> KernelModel {
    let tile = &account.tile;
    let resident = resident_blocks(work, tile.blocks_per_sm, limits);
    let [q_tiles, tile_n, hd, hdv] =
        [tile.q_tiles, tile.tile_n, tile.head_dim, tile.head_dim_v].map(f64::from);
    let rows = q_tiles * f64::from(Q_ROWS);
    let scores = rows * tile_n;
    let tensor = resident * 2.0 * scores * (hd + hdv) / limits.tensor_flops / c.tensor_efficiency;
    // Q K^T reads both operands from shared memory, P V only V; TMA writes K and V.
    let bytes = 2.0;
    let reads = rows * hd + q_tiles * tile_n * (hd + hdv);
    let smem = resident * (reads + tile_n * (hd + hdv)) * bytes / limits.smem_bytes;
    // Scores that do not fit the registers are read twice and their maximum taken apart.
    let passes = if account.softmax_chunk < tile.tile_n { 1.0 } else { 0.0 };
    let (cap_mufu, cap_ops) = if problem.softcap.is_some() { (1.0, c.softcap_ops) } else { (0.0, 0.0) };
    let ops = c.softmax_ops + c.sm100_poly * c.poly_ops + cap_ops + passes;
    let exp = resident * scores * softmax_clocks(limits, 1.0 - c.sm100_poly + cap_mufu, ops);
    let products = overlap([tensor, smem], 4.0);
    let in_turn = q_tiles * resident >= 2.0;
    let exponent = c.sm100_overlap[usize::from(in_turn)];
    let hidden = overlap([products, exp], exponent);
    // A ring of fewer than three buffers cannot load ahead while K and V of a step are in use.
    let wait = if tile.kv_stages < 3 { 0.5 * c.load_latency / resident } else { 0.0 };
    let exposed = c.sm100_step + wait;
    KernelModel {
        head_dim: tile.head_dim,
        head_dim_v: tile.head_dim_v,
        sharing: 1.0,
        queue: if MaskKind::of(&problem.mask) == MaskKind::Full { Queue::Fixed } else { Queue::LongestFirst },
        resident,
        tensor,
        exp,
        smem,
        step: hidden + exposed,
        mask: resident * scores * c.mask_ops / f32_lanes(limits),
        exposed,
        tile: c.sm100_tile + products + exp - hidden,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::occupancy::Limiter;
    use fa_core::Mask;

    fn tile(
        head_dims: (u32, u32),
        q_tiles: u32,
        tile_n: u32,
        kv_stages: u32,
        blocks_per_sm: u32,
    ) -> Sm100Tile {
        let (head_dim, head_dim_v) = head_dims;
        Sm100Tile { head_dim, head_dim_v, q_tiles, tile_n, kv_stages, blocks_per_sm }
    }

    #[test]
    fn the_published_tensor_memory_map() {
        let map = tmem(&tile((128, 128), 2, 128, 3, 1));
        let found: Vec<_> = map.regions.iter().map(|r| (r.name, r.begin, r.begin + r.columns - 1)).collect();
        let expected = [
            ("s0", 0, 127),
            ("p0", 64, 127),
            ("s1", 128, 255),
            ("p1", 192, 255),
            ("o0", 256, 383),
            ("o1", 384, 511),
        ];
        assert_eq!(found, expected);
        assert_eq!((map.used, map.allocated), (512, 512));
        assert_eq!(tmem(&tile((64, 64), 1, 96, 3, 1)).allocated, 256);
    }

    #[test]
    fn limits_reject_with_need_and_have() {
        let limits = Arch::Sm100.limits();
        let reason = |tile| account(tile, limits).map(|a| a.threads).expect_err("must not fit");
        assert_eq!(reason(tile((256, 256), 2, 128, 2, 1)), Reason::Tmem { need: 768, have: 512 });
        assert_eq!(
            reason(tile((128, 128), 1, 128, 3, 2)),
            Reason::Occupancy { need: 2, have: 1, limiter: Limiter::Smem }
        );
        assert!(matches!(reason(tile((128, 128), 2, 128, 6, 1)), Reason::Smem { .. }));
        assert_eq!(
            reason(tile((64, 64), 2, 128, 2, 2)),
            Reason::Occupancy { need: 2, have: 1, limiter: Limiter::Tmem }
        );
    }

    #[test]
    fn published_choices_fit() {
        let limits = Arch::Sm100.limits();
        // 256 x 128 at one block per SM, 128 x 128 at two.
        let one = account(tile((128, 128), 2, 128, 3, 1), limits).expect("256x128");
        assert_eq!((one.threads, one.roles[0].regs, one.softmax_chunk), (512, 192, 128));
        let two = account(tile((128, 128), 1, 128, 2, 2), limits).expect("128x128 twice");
        assert_eq!((two.threads, two.occupancy.blocks()), (384, 2));
        assert!((176..=192).contains(&one.roles[0].regs) && (64..=88).contains(&one.roles[1].regs));
    }

    #[test]
    fn registers_of_the_roles_fit_the_launch() {
        let limits = Arch::Sm100.limits();
        for shape in candidates(128, 128) {
            if let Ok(account) = account(shape, limits) {
                let held: u32 = account.roles.iter().map(|r| r.warps * WARP * r.regs).sum();
                assert!(held * shape.blocks_per_sm <= limits.regs_per_sm, "{shape:?}");
            }
        }
    }

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
