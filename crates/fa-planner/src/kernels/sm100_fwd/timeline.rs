//! The order of the SM100 forward's main loop.

use fa_core::Arch;

use super::candidates::Sm100Tile;
use crate::cost::constants::CostConstants;
use crate::cost::predicted::StepClocks;
use crate::timeline::lanes::{Activity, Timeline};
use crate::timeline::parts::{MOST_LANES, products, shares};
use crate::timeline::schedule::{STEPS, Schedule, Unit};

/// The timeline of a tile whose step takes `clocks` on `arch`.
pub fn timeline(tile: &Sm100Tile, arch: Arch, clocks: &StepClocks) -> Timeline {
    let bytes_per_clock = CostConstants::of(arch).sm_bytes_per_clock;
    of_loads(tile, &|elements| f64::from(2 * elements) / bytes_per_clock, clocks)
}

/// The same where `copy` gives the clocks in which an SM loads so many elements.
pub(super) fn of_loads(tile: &Sm100Tile, copy: &dyn Fn(u32) -> f64, clocks: &StepClocks) -> Timeline {
    // Tiles of queries on the SM, of one CTA or two.
    let tiles = (f64::from(tile.q_tiles) * clocks.resident).min(MOST_LANES) as usize;
    let (s_share, v_share) = shares(tile.head_dim, tile.head_dim_v);
    let mut plan = Schedule::default();
    let load = plan.lane("load warp: TMA");
    let mma = plan.lane("MMA warp: tcgen05");
    let pipes: Vec<usize> = (0..tiles).map(|t| plan.lane(format!("softmax warps {t}"))).collect();
    let of_tile = |clocks: f64| clocks / tiles as f64;
    let bytes = |dim: u32| copy(tile.tile_n * dim);
    // K and V share a ring: `kv_stages` tiles of either.
    let mut uses: Vec<Vec<usize>> = Vec::new();
    let mut softmax: Vec<Vec<usize>> = Vec::new();
    let mut v_before = None;
    for step in 0..STEPS {
        let free = |used: usize, uses: &[Vec<usize>]| {
            used.checked_sub(tile.kv_stages as usize).and_then(|at| uses.get(at).cloned()).unwrap_or_default()
        };
        let k = plan.task(
            load,
            Unit::Copy,
            (Activity::Load, "K", step),
            bytes(tile.head_dim),
            free(2 * step, &uses),
        );
        let (mut of_k, mut of_v, mut of_step) = (Vec::new(), Vec::new(), Vec::new());
        for t in 0..tiles {
            let clocks_of = |share: f64| of_tile(products(clocks) * share);
            if let Some(v) = v_before {
                let needs = [softmax[step - 1][t], v];
                let name = (Activity::Product, "P V", step - 1);
                of_v.push(plan.task(mma, Unit::Tensor, name, clocks_of(v_share), needs));
            }
            let s = plan.task(mma, Unit::Tensor, (Activity::Product, "S", step), clocks_of(s_share), [k]);
            of_k.push(s);
            plan.task(pipes[t], Unit::Own, (Activity::Exposed, "barriers", step), clocks.exposed, [s]);
            let name = (Activity::Softmax, "softmax", step);
            of_step.push(plan.task(pipes[t], Unit::Softmax, name, of_tile(clocks.exp), []));
        }
        if step > 0 {
            uses.push(of_v);
        }
        uses.push(of_k);
        softmax.push(of_step);
        let v = (Activity::Load, "V", step);
        v_before = Some(plan.task(load, Unit::Copy, v, bytes(tile.head_dim_v), free(2 * step + 1, &uses)));
    }
    plan.timeline(mma, clocks)
}
