//! The order of the SM90 backward's main loop, as its device code has it.

use fa_core::{KernelSpec, Sm90Bwd};

use crate::cost::predicted::StepClocks;
use crate::timeline::lanes::{Activity, Timeline};
use crate::timeline::parts::five;
use crate::timeline::schedule::{STEPS, Schedule, Unit};

/// The timeline of a kernel whose step takes `clocks`; `copy` gives the clocks in which an SM loads so many
/// elements.
pub(crate) fn timeline(
    spec: &KernelSpec,
    k: &Sm90Bwd,
    copy: &dyn Fn(u32) -> f64,
    clocks: &StepClocks,
) -> Timeline {
    let groups = k.num_wg as usize;
    let (by_qk, by_v) = five(spec, clocks);
    let of_group = |clocks: f64| clocks / f64::from(k.num_wg);
    let mut plan = Schedule::default();
    let producer = plan.lane("producer: TMA");
    let lanes: Vec<(usize, usize)> = (0..groups)
        .map(|g| (plan.lane(format!("warpgroup {g}: wgmma")), plan.lane(format!("warpgroup {g}: P, dS"))))
        .collect();
    let adder = plan.lane(match (k.whole_keys, k.dq_via_smem) {
        (true, _) => "dQ: stores",
        (false, true) => "dQ's warps: bulk add",
        (false, false) => "dQ: atomics",
    });
    let (mut dk, mut dv): (Vec<Vec<usize>>, Vec<Vec<usize>>) = (Vec::new(), Vec::new());
    let mut added: Vec<usize> = Vec::new();
    for step in 0..STEPS {
        let freed = |of: &[Vec<usize>], stages: u32| {
            step.checked_sub(stages as usize).map_or(Vec::new(), |before| of[before].clone())
        };
        let (q_free, do_free) = (freed(&dk, k.q_stages), freed(&dv, k.do_stages));
        let load = |name| (Activity::Load, name, step);
        let product = |name| (Activity::Product, name, step);
        let q = plan.task(producer, Unit::Copy, load("Q"), copy(k.tile_m * spec.head_dim), q_free);
        let dout = plan.task(producer, Unit::Copy, load("dO"), copy(k.tile_m * spec.head_dim_v), do_free);
        let exchanged: Vec<usize> = (0..groups)
            .map(|g| {
                let (wgmma, pipes) = lanes[g];
                let before = dk.last().map(|own: &Vec<usize>| own[g]);
                let needs = before.into_iter().chain([q]);
                let s = plan.task(wgmma, Unit::Tensor, product("S"), of_group(by_qk), needs);
                let dp = plan.task(wgmma, Unit::Tensor, product("dP"), of_group(by_v), [dout]);
                // The model has one term for both.
                let half = of_group(clocks.exp) / 2.0;
                plan.task(pipes, Unit::Softmax, (Activity::Softmax, "P", step), half, [s]);
                let ds = (Activity::Softmax, "dS", step);
                plan.task(pipes, Unit::Softmax, ds, half, [dp]);
                plan.task(pipes, Unit::Own, (Activity::Exposed, "exchange", step), clocks.exposed, [])
            })
            .collect();
        let mut own_dv = Vec::new();
        let mut own_dk = Vec::new();
        let mut own_dq = Vec::new();
        for &(wgmma, _) in &lanes {
            let needs = exchanged.iter().copied();
            own_dv.push(plan.task(wgmma, Unit::Tensor, product("dV"), of_group(by_v), needs));
            let buffer = added.last().copied();
            own_dq.push(plan.task(wgmma, Unit::Tensor, product("dQ"), of_group(by_qk), buffer));
            own_dk.push(plan.task(wgmma, Unit::Tensor, product("dK"), of_group(by_qk), []));
        }
        // Of f32, unless they are whole.
        let width = if k.whole_keys { 1.0 } else { 4.0 / f64::from(spec.elem_bytes()) };
        let bytes = copy(k.tile_m * spec.head_dim) * width;
        added.push(plan.task(adder, Unit::Copy, (Activity::Add, "dQ", step), bytes, own_dq));
        dv.push(own_dv);
        dk.push(own_dk);
    }
    plan.timeline(lanes[0].0, clocks)
}
