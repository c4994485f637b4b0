//! What a shape of the SM100 forward takes of an SM: tensor memory, shared memory, and registers by role.

use fa_core::ArchLimits;
use serde::Serialize;

use crate::account::reason::Reason;
use crate::occupancy::{Occupancy, WARP, register_ceiling};
use crate::registers::{Registers, SetMaxNReg};
use crate::smem::{SmemPlan, TILE_ALIGN};

use super::candidates::{Q_ROWS, Sm100Tile};

/// Tile extents of the head dims.
pub const HEAD_DIMS: [u32; 5] = [64, 96, 128, 192, 256];

/// Registers of a softmax thread in addition to the scores that it holds.
const SOFTMAX_OVERHEAD: u32 = 40;

/// Scores that a softmax thread turns into P at a time.
const PIECE: u32 = 32;

/// A range of tensor memory columns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TmemRegion {
    /// The tensor in it.
    pub name: &'static str,
    /// First column.
    pub begin: u32,
    /// Columns (32 bits on each of 128 lanes).
    pub columns: u32,
    /// The region whose columns this one reuses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alias_of: Option<&'static str>,
}

/// Tensor memory of a CTA.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TmemPlan {
    /// Every region.
    pub regions: Vec<TmemRegion>,
    /// Columns that are used.
    pub used: u32,
    /// Columns that are allocated: a power of two from 32 (PTX ISA, tcgen05.alloc).
    pub allocated: u32,
}

/// Warps with one role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Role {
    /// The role.
    pub name: &'static str,
    /// Warps.
    pub warps: u32,
    /// Registers of a thread after setmaxnreg.
    pub regs: u32,
}

/// Tensor memory of a CTA: scores of every query tile, then outputs; P in the upper half of its scores.
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

/// The forward's `SharedStorage`, in declaration order: Q tiles; one ring of K and V tiles; what softmax
/// tells the correction to multiply rows with; mbarriers; the address of tensor memory. O goes from tensor
/// memory straight to device memory.
pub fn smem(tile: &Sm100Tile) -> SmemPlan {
    let rows = tile.q_tiles * Q_ROWS;
    let mut plan = SmemPlan::default();
    plan.push("q", rows * tile.head_dim * 2, TILE_ALIGN);
    plan.push("kv", tile.kv_stages * tile.tile_n * tile.head_dim.max(tile.head_dim_v) * 2, TILE_ALIGN);
    plan.push("scale", rows * 4, 128);
    for name in ["q_full", "q_empty", "s_full", "p_full", "o_full", "scale_full", "scale_empty"] {
        plan.push_mbarriers(name, tile.q_tiles);
    }
    plan.push_mbarriers("kv_full", tile.kv_stages);
    plan.push_mbarriers("kv_empty", tile.kv_stages);
    plan.push("tensor", 4, 16);
    plan.round_up(TILE_ALIGN)
}

/// Registers of a softmax thread, a correction thread and the others, after setmaxnreg.
const REGISTERS: [u32; 3] = [184, 80, 64];

/// Warps by role, in the order of their numbers.
pub fn roles(tile: &Sm100Tile) -> Vec<Role> {
    let [softmax, correction, other] = REGISTERS;
    vec![
        Role { name: "softmax", warps: 4 * tile.q_tiles, regs: softmax },
        Role { name: "correction", warps: 4, regs: correction },
        Role { name: "products", warps: 1, regs: other },
        Role { name: "load", warps: 1, regs: other },
        Role { name: "spare", warps: 2, regs: other },
    ]
}

/// Predicted registers of a softmax thread: a row of S, and the piece of P that it is packing.
pub fn registers(tile: &Sm100Tile) -> Registers {
    let (s, p) = (tile.tile_n, PIECE / 2);
    let [softmax, _, other] = REGISTERS;
    Registers {
        s,
        p,
        o: 0,
        q: 0,
        other: SOFTMAX_OVERHEAD,
        total: s + p + SOFTMAX_OVERHEAD,
        limit: softmax,
        setmaxnreg: Some(SetMaxNReg { mma: softmax, producer: other, follower: None }),
    }
}

pub(super) struct Sm100Account {
    pub tile: Sm100Tile,
    pub tmem: TmemPlan,
    pub smem: SmemPlan,
    pub roles: Vec<Role>,
    pub softmax_chunk: u32,
    pub threads: u32,
    pub occupancy: Occupancy,
}

pub(super) fn account(tile: Sm100Tile, limits: &ArchLimits) -> Result<Sm100Account, Reason> {
    let tmem = tmem(&tile);
    if tmem.used > limits.tmem_columns {
        return Err(Reason::Tmem { need: tmem.used, have: limits.tmem_columns });
    }
    let smem = smem(&tile);
    if smem.total > limits.smem_per_block {
        return Err(Reason::Smem { need: smem.total, have: limits.smem_per_block });
    }
    let roles = roles(&tile);
    let regs = registers(&tile);
    if regs.total > regs.limit {
        return Err(Reason::Registers { need: regs.total, have: regs.limit });
    }
    let threads = WARP * roles.iter().map(|role| role.warps).sum::<u32>();
    let launch = register_ceiling(limits, threads, 1);
    let occupancy = Occupancy::of(limits, smem.total, launch, threads).with_tmem(limits, tmem.allocated);
    let softmax_chunk = tile.tile_n;
    Ok(Sm100Account { tile, tmem, smem, roles, softmax_chunk, threads, occupancy })
}

#[cfg(test)]
mod tests {
    use fa_core::Arch;

    use super::super::candidates::candidates;
    use super::*;

    fn tile((head_dim, head_dim_v): (u32, u32), q_tiles: u32, tile_n: u32, kv_stages: u32) -> Sm100Tile {
        Sm100Tile { head_dim, head_dim_v, q_tiles, tile_n, kv_stages }
    }

    #[test]
    fn the_published_tensor_memory_map() {
        let map = tmem(&tile((128, 128), 2, 128, 3));
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
        assert_eq!(tmem(&tile((64, 64), 1, 96, 3)).allocated, 256);
    }

    #[test]
    fn limits_reject_with_need_and_have() {
        let limits = Arch::Sm100.limits();
        let reason = |tile| account(tile, limits).map(|a| a.threads).expect_err("must not fit");
        assert_eq!(reason(tile((256, 256), 2, 128, 2)), Reason::Tmem { need: 768, have: 512 });
        assert!(matches!(reason(tile((128, 128), 2, 128, 6)), Reason::Smem { .. }));
    }

    #[test]
    fn the_published_choice_fits() {
        let one = account(tile((128, 128), 2, 128, 5), Arch::Sm100.limits()).expect("256x128");
        assert_eq!((one.threads, one.roles[0].regs, one.softmax_chunk), (512, 184, 128));
        assert_eq!(one.smem.total, 2 * 32768 + 5 * 32768 + 2048);
    }

    #[test]
    fn registers_of_the_roles_fit_the_launch() {
        let limits = Arch::Sm100.limits();
        for shape in candidates(128, 128) {
            if let Ok(account) = account(shape, limits) {
                let held: u32 = account.roles.iter().map(|r| r.warps * WARP * r.regs).sum();
                assert!(held <= limits.regs_per_sm, "{shape:?}");
            }
        }
    }
}
