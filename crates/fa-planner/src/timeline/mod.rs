//! The order of a steady step: who loads, multiplies, computes the softmax and waits for what.
//!
//! Every part of a step takes the clocks of the cost model ([`StepClocks`](crate::cost::StepClocks)) and runs
//! as soon as what it needs is there and its unit is free: the tensor cores and the softmax pipes of an SM do
//! one thing at a time. That is the ideal of the kernel's order. The model's own step
//! ([`Timeline::predicted`]) is calibrated by measurement and mostly longer.

pub(crate) mod lanes;
pub(crate) mod parts;
pub(crate) mod schedule;

use std::cell::Cell;

use fa_core::{Arch, KernelSpec};

use crate::cost::constants::CostConstants;
use crate::cost::core::Cost;
use crate::kernels::planned;

pub use lanes::{Activity, Lane, Span, Timeline};
use schedule::STEPS;

/// The timeline of a kernel whose launch costs `cost` on `arch`.
pub fn of_kernel(spec: &KernelSpec, arch: Arch, cost: &Cost) -> Timeline {
    let kernel = planned::of(&spec.kernel);
    let loaded = Cell::new(0.0);
    let at = |bytes_per_clock: f64| {
        let copy = |elements: u32| {
            let bytes = f64::from(elements * spec.elem_bytes());
            loaded.set(loaded.get() + bytes);
            bytes / bytes_per_clock
        };
        kernel.timeline(spec, &copy, &cost.step)
    };
    let timeline = at(CostConstants::of(arch).sm_bytes_per_clock);
    let rate = copy_rate(arch, cost, loaded.get() / STEPS as f64);
    // Of what a backward reads and writes in device memory its loop loads the smaller part.
    let timeline = if spec.kernel.is_backward() { timeline } else { at(rate) };
    timeline.fed(cost.memory_clocks(arch))
}

/// Bytes a clock at which an SM's copies come, of which a step has so many: what the SM takes, or less where
/// device memory has less for each SM.
pub(crate) fn copy_rate(arch: Arch, cost: &Cost, step_bytes: f64) -> f64 {
    let own = CostConstants::of(arch).sm_bytes_per_clock;
    let memory = cost.memory_clocks(arch);
    if memory > 0.0 { own.min(step_bytes / memory) } else { own }
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Kernel, Mask, Pass, Problem};

    use super::lanes::Activity;
    use super::parts::products;
    use super::*;
    use crate::cost::core::StepClocks;
    use crate::kernels::sm100_fwd;
    use crate::plan::{PlanOptions, explore};

    fn problem(head_dim: usize, mask: Mask) -> Problem {
        Problem::square(4, 4096, 16, head_dim, mask, Dtype::Bf16)
    }

    fn check(name: &str, timeline: &Timeline, clocks: &StepClocks) {
        assert!(timeline.step.is_finite() && timeline.step > 0.0, "{name}: {timeline:?}");
        // No order is faster than the busiest unit.
        let least = clocks.tensor.max(clocks.exp);
        assert!(timeline.step >= 0.99 * least, "{name}: {} of {least}", timeline.step);
        let most = products(clocks) + clocks.exp + 8.0 * clocks.exposed + 4000.0;
        assert!(timeline.step <= most, "{name}: {} of {most}", timeline.step);
        for lane in &timeline.lanes {
            assert!(lane.busy <= 1.0 + 1e-9, "{name}: {lane:?}");
            let ends = lane.spans.windows(2).all(|pair| pair[0].end <= pair[1].begin + 1e-6);
            assert!(ends, "{name}: {lane:?}");
            let inside = |span: &super::lanes::Span| span.begin >= 0.0 && span.end <= timeline.clocks + 1e-6;
            assert!(lane.spans.iter().all(inside), "{name}: {lane:?}");
            let waits = lane.spans.iter().filter(|span| span.activity == Activity::Wait);
            assert!(
                waits.clone().all(|span| span.begin == 0.0 || !span.label.is_empty()),
                "{name}: {lane:?}"
            );
        }
        let products = timeline.lanes.iter().flat_map(|lane| &lane.spans);
        assert!(products.filter(|span| span.activity == Activity::Product).count() >= 2, "{name}");
    }

    #[test]
    fn every_kernel_that_fits_has_a_timeline_within_its_model() {
        for arch in [Arch::Sm80, Arch::Sm90] {
            for pass in [Pass::Forward, Pass::BACKWARD] {
                for (head_dim, mask) in [(64, Mask::FULL), (128, Mask::CAUSAL), (256, Mask::CAUSAL)] {
                    let options = PlanOptions { pass, ..PlanOptions::default() };
                    let set = explore(&problem(head_dim, mask), arch, &options).expect("plans");
                    for plan in &set.plans {
                        let timeline = of_kernel(&plan.spec, arch, &plan.cost);
                        check(&plan.spec.to_string(), &timeline, &plan.cost.step);
                    }
                }
            }
        }
        let set = sm100_fwd::explore(&problem(128, Mask::CAUSAL), Arch::Sm100, None).expect("plans");
        for plan in &set.plans {
            check(
                "sm100",
                &sm100_fwd::timeline::timeline(&plan.tile, Arch::Sm100, &plan.cost),
                &plan.cost.step,
            );
        }
    }

    #[test]
    fn overlap_shortens_the_step_and_ping_pong_keeps_the_order() {
        let set = explore(&problem(128, Mask::CAUSAL), Arch::Sm90, &PlanOptions::default()).expect("plans");
        let of = |overlap: bool| {
            let plan = set.plans.iter().find(|plan| {
                let Kernel::Sm90Fwd(k) = &plan.spec.kernel else { return false };
                (k.tile_n, k.num_wg, k.pv_is_rs, k.overlap_wg) == (64, 2, true, overlap)
            });
            let plan = plan.expect("both fit");
            of_kernel(&plan.spec, Arch::Sm90, &plan.cost)
        };
        let (with, without) = (of(true), of(false));
        assert!(with.step < without.step && with.tensor_busy > without.tensor_busy, "{with:?} {without:?}");
        let best = &set.plans[0];
        let timeline = of_kernel(&best.spec, Arch::Sm90, &best.cost);
        let names: Vec<&str> = timeline.lanes.iter().map(|lane| &*lane.name).collect();
        assert_eq!(names[..3], ["producer: TMA", "warpgroup 0: wgmma", "warpgroup 0: softmax"]);
        assert!(timeline.tensor_busy > 0.5 && timeline.tensor_busy <= 1.0 + 1e-9, "{timeline:?}");
    }
    /// A query on many keys: the loop goes at the pace of device memory, and the whole of it takes the time
    /// that is predicted.
    #[test]
    fn copies_of_decode_come_at_the_pace_of_device_memory() {
        let lengths = fa_core::Lengths::uniform(64, 1, 8192);
        let decode = Problem { lengths, heads_kv: 8, ..problem(128, Mask::FULL) };
        for arch in [Arch::Sm80, Arch::Sm90] {
            let set = explore(&decode, arch, &PlanOptions::default()).expect("plans");
            let (spec, cost) = (&set.plans[0].spec, &set.plans[0].cost);
            let timeline = of_kernel(spec, arch, cost);
            let memory = cost.memory_clocks(arch);
            assert!(memory > 1.5 * cost.step.total, "{spec}: {memory} beside {:?}", cost.step);
            assert_eq!(timeline.memory, memory);
            assert!((timeline.step / memory - 1.0).abs() < 0.1, "{spec}: {} of {memory}", timeline.step);
            assert!(timeline.tensor_busy < 0.6, "{spec}: {timeline:?}");
            let clock = arch.limits().clock_ghz * 1e9;
            let all = timeline.step * cost.steps / cost.slots.min(cost.tiles) / clock;
            assert!((0.75..1.1).contains(&(all / cost.seconds)), "{spec}: {all} of {}", cost.seconds);
        }
        // Prefill is not held up.
        let set = explore(&problem(128, Mask::CAUSAL), Arch::Sm90, &PlanOptions::default()).expect("plans");
        let cost = &set.plans[0].cost;
        assert!(cost.memory_clocks(Arch::Sm90) < 0.5 * cost.step.total, "{cost:?}");
    }
}
