//! The order of the SM80-class backward's main loop, as its device code has it.

use fa_core::{KernelSpec, Sm80Bwd};

use crate::cost::predicted::StepClocks;
use crate::timeline::lanes::{Activity, Timeline};
use crate::timeline::parts::five;
use crate::timeline::schedule::{STEPS, Schedule, Unit};

/// The timeline of a kernel whose step takes `clocks`; `copy` gives the clocks in which an SM loads so many
/// elements.
pub(crate) fn timeline(
    spec: &KernelSpec,
    k: &Sm80Bwd,
    copy: &dyn Fn(u32) -> f64,
    clocks: &StepClocks,
) -> Timeline {
    let ctas = clocks.resident.min(2.0) as usize;
    let (by_qk, by_v) = five(spec, clocks);
    let of_cta = |clocks: f64| clocks / ctas as f64;
    // dQ's share of the first group of warps, which computes it a step later.
    let first = f64::from(k.dq_first) / f64::from((spec.head_dim / 16).max(k.dq_first).max(1));
    let mut plan = Schedule::default();
    let mut anchor = 0;
    for cta in 0..ctas {
        let copies = plan.lane(format!("CTA {cta}: cp.async"));
        let one = plan.lane(format!("CTA {cta}: warps of S, dV"));
        let two = plan.lane(format!("CTA {cta}: warps of dP, dK"));
        if cta == 0 {
            anchor = one;
        }
        let (mut dk, mut dv): (Vec<usize>, Vec<usize>) = (Vec::new(), Vec::new());
        for step in 0..STEPS {
            let product = |name| (Activity::Product, name, step);
            let before = |of: &[usize], stages: u32| step.checked_sub(stages as usize).map(|at| of[at]);
            let (q_free, do_free) = (before(&dk, k.q_stages), before(&dv, k.do_stages));
            let load = |name| (Activity::Load, name, step);
            let q = plan.task(copies, Unit::Copy, load("Q"), copy(k.tile_m * spec.head_dim), q_free);
            let dout = copy(k.tile_m * spec.head_dim_v);
            let dout = plan.task(copies, Unit::Copy, load("dO"), dout, do_free);
            let ready = dv.last().copied().into_iter().chain([q]);
            plan.task(one, Unit::Tensor, product("S"), of_cta(by_qk), ready);
            let half = of_cta(clocks.exp) / 2.0;
            let p = plan.task(one, Unit::Softmax, (Activity::Softmax, "P", step), half, []);
            let name = (Activity::Exposed, "barriers", step);
            plan.task(one, Unit::Own, name, clocks.exposed, []);
            let ready = dk.last().copied().into_iter().chain([dout]);
            plan.task(two, Unit::Tensor, product("dP"), of_cta(by_v), ready);
            let ds = plan.task(two, Unit::Softmax, (Activity::Softmax, "dS", step), half, [p]);
            plan.task(two, Unit::Own, name, clocks.exposed, []);
            if k.dq_first > 0 {
                plan.task(one, Unit::Tensor, product("dQ"), of_cta(by_qk) * first, dk.last().copied());
            }
            dv.push(plan.task(one, Unit::Tensor, product("dV"), of_cta(by_v), [p]));
            if first < 1.0 {
                plan.task(two, Unit::Tensor, product("dQ"), of_cta(by_qk) * (1.0 - first), [ds]);
            }
            dk.push(plan.task(two, Unit::Tensor, product("dK"), of_cta(by_qk), [ds]));
        }
    }
    plan.timeline(anchor, clocks)
}
