//! The order of the SM80-class forward's main loop, as its device code has it.

use fa_core::{KernelSpec, Sm80Fwd};

use crate::cost::predicted::StepClocks;
use crate::timeline::lanes::{Activity, Timeline};
use crate::timeline::parts::{MOST_LANES, products, shares};
use crate::timeline::schedule::{STEPS, Schedule, Unit};

/// The timeline of a kernel whose step takes `clocks`; `copy` gives the clocks in which an SM loads so many
/// elements.
pub(crate) fn timeline(
    spec: &KernelSpec,
    k: &Sm80Fwd,
    copy: &dyn Fn(u32) -> f64,
    clocks: &StepClocks,
) -> Timeline {
    let ctas = clocks.resident.min(MOST_LANES) as usize;
    let warps = (f64::from(k.num_warps) / 4.0).clamp(1.0, (MOST_LANES / ctas as f64).max(1.0)) as usize;
    let (s_share, v_share) = shares(spec.head_dim, spec.head_dim_v);
    let count = (ctas * warps) as f64;
    let stages = k.stages as usize;
    let mut plan = Schedule::default();
    let mut anchor = 0;
    for cta in 0..ctas {
        let copies = plan.lane(format!("CTA {cta}: cp.async"));
        let lanes: Vec<usize> =
            (0..warps).map(|w| plan.lane(format!("CTA {cta}: warps {} to {}", 4 * w, 4 * w + 3))).collect();
        if cta == 0 {
            anchor = lanes[0];
        }
        let mut done: Vec<Vec<usize>> = Vec::new();
        for step in 0..STEPS {
            // A buffer is filled again when all warps are through with it; with one, when they need it.
            let free: Vec<usize> = match step.checked_sub(stages.saturating_sub(1).max(1)) {
                Some(before) => done[before].clone(),
                None => Vec::new(),
            };
            let tile = copy(k.tile_n * (spec.head_dim + spec.head_dim_v));
            let load = plan.task(copies, Unit::Copy, (Activity::Load, "K, V", step), tile, free);
            let step_done: Vec<usize> = lanes
                .iter()
                .map(|&lane| {
                    let name = (Activity::Exposed, "barrier", step);
                    let needs = done.last().cloned().unwrap_or_default().into_iter().chain([load]);
                    plan.task(lane, Unit::Own, name, clocks.exposed, needs);
                    let product = |share: f64| products(clocks) * share / count;
                    plan.task(lane, Unit::Tensor, (Activity::Product, "S", step), product(s_share), []);
                    let name = (Activity::Softmax, "softmax", step);
                    plan.task(lane, Unit::Softmax, name, clocks.exp / count, []);
                    plan.task(lane, Unit::Tensor, (Activity::Product, "P V", step), product(v_share), [])
                })
                .collect();
            done.push(step_done);
        }
    }
    plan.timeline(anchor, clocks)
}
