//! The order of the SM90 forward's main loop, as its device code has it.

use fa_core::{KernelSpec, Sm90Fwd};

use crate::cost::predicted::StepClocks;
use crate::timeline::lanes::{Activity, Timeline};
use crate::timeline::parts::{products, shares};
use crate::timeline::schedule::{STEPS, Schedule, Unit};

/// The timeline of a kernel whose step takes `clocks`; `copy` gives the clocks in which an SM loads so many
/// elements.
pub(crate) fn timeline(
    spec: &KernelSpec,
    k: &Sm90Fwd,
    copy: &dyn Fn(u32) -> f64,
    clocks: &StepClocks,
) -> Timeline {
    let groups = k.num_wg as usize;
    let stages = k.kv_stages as usize;
    let (s_share, v_share) = shares(spec.head_dim, spec.head_dim_v);
    let of_group = |clocks: f64| clocks / f64::from(k.num_wg);
    let mut plan = Schedule::default();
    let producer = plan.lane("producer: TMA");
    let lanes: Vec<(usize, usize)> = (0..groups)
        .map(|g| (plan.lane(format!("warpgroup {g}: wgmma")), plan.lane(format!("warpgroup {g}: softmax"))))
        .collect();
    // Tasks of every step: loads of K and V, and by warpgroup S, the softmax and P V.
    let mut k_loads: Vec<usize> = Vec::new();
    let mut v_loads: Vec<usize> = Vec::new();
    let mut s: Vec<Vec<usize>> = vec![Vec::new(); groups];
    let mut softmax: Vec<Vec<usize>> = vec![Vec::new(); groups];
    let mut pv: Vec<Vec<usize>> = vec![Vec::new(); groups];
    for step in 0..STEPS {
        let freed = |of: &[Vec<usize>]| -> Vec<usize> {
            step.checked_sub(stages).map_or(Vec::new(), |before| of.iter().map(|own| own[before]).collect())
        };
        let load = |name| (Activity::Load, name, step);
        let (k_clocks, v_clocks) = (copy(k.tile_n * spec.head_dim), copy(k.tile_n * spec.head_dim_v));
        k_loads.push(plan.task(producer, Unit::Copy, load("K"), k_clocks, freed(&s)));
        if !k.overlap_wg {
            v_loads.push(plan.task(producer, Unit::Copy, load("V"), v_clocks, freed(&pv)));
        }
        for g in 0..groups {
            let (wgmma, pipes) = lanes[g];
            let last = |of: &[usize]| of.last().copied();
            // With overlap a step's S is issued with the P of the step before at hand, before its P V.
            let ready = if k.overlap_wg { last(&softmax[g]) } else { last(&pv[g]) };
            // Ping-pong: after the products of the warpgroup before this one.
            let turn = if !k.ping_pong {
                None
            } else if g > 0 {
                if k.overlap_wg { last(&pv[g - 1]) } else { last(&s[g - 1]) }
            } else {
                let before = &pv[groups - 1];
                if k.overlap_wg { last(before) } else { last(&s[groups - 1]) }
            };
            let needs = [Some(k_loads[step]), ready, turn].into_iter().flatten();
            let name = (Activity::Product, "S", step);
            let own = plan.task(wgmma, Unit::Tensor, name, of_group(products(clocks) * s_share), needs);
            s[g].push(own);
            if k.overlap_wg && step > 0 {
                let needs = [v_loads[step - 1], softmax[g][step - 1]];
                let name = (Activity::Product, "P V", step - 1);
                let own = plan.task(wgmma, Unit::Tensor, name, of_group(products(clocks) * v_share), needs);
                pv[g].push(own);
            }
            let name = (Activity::Exposed, "barriers", step);
            let needs = (k.overlap_wg && step > 1).then(|| pv[g][step - 2]);
            let waits =
                plan.task(pipes, Unit::Own, name, clocks.exposed, needs.into_iter().chain([s[g][step]]));
            let name = (Activity::Softmax, "softmax", step);
            softmax[g].push(plan.task(pipes, Unit::Softmax, name, of_group(clocks.exp), [waits]));
            if !k.overlap_wg {
                let needs = [v_loads[step], softmax[g][step]];
                let name = (Activity::Product, "P V", step);
                let own = plan.task(wgmma, Unit::Tensor, name, of_group(products(clocks) * v_share), needs);
                pv[g].push(own);
            }
        }
        // A single buffer of V is free after the P V that this step has issued.
        if k.overlap_wg {
            v_loads.push(plan.task(producer, Unit::Copy, load("V"), v_clocks, freed(&pv)));
        }
    }
    plan.timeline(lanes[0].0, clocks)
}
