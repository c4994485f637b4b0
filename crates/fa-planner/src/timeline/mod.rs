//! The order of a steady step: who loads, multiplies, computes the softmax and waits for what.
//!
//! Every part of a step takes the clocks of the cost model ([`StepClocks`]) and runs
//! as soon as what it needs is there and its unit is free: the tensor cores and the softmax pipes of an SM do
//! one thing at a time. That is the ideal of the kernel's order. The model's own step
//! ([`Timeline::predicted`]) is calibrated by measurement and mostly longer.

pub(crate) mod lanes;
pub(crate) mod parts;
pub(crate) mod schedule;

use fa_core::{Arch, KernelSpec};

use crate::cost::constants::CostConstants;
use crate::cost::predicted::StepClocks;
use crate::kernels::planned;

pub use lanes::{Activity, Lane, Span, Timeline};

/// The timeline of a kernel whose step takes `clocks` on `arch`.
pub fn of_kernel(spec: &KernelSpec, arch: Arch, clocks: &StepClocks) -> Timeline {
    let bytes_per_clock = CostConstants::of(arch).sm_bytes_per_clock;
    let copy = |elements: u32| f64::from(elements * spec.elem_bytes()) / bytes_per_clock;
    planned::of(&spec.kernel).timeline(spec, &copy, clocks)
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Kernel, Mask, Pass, Problem, Sm90Fwd};

    use super::lanes::Activity;
    use super::parts::products;
    use super::*;
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
                    let options = PlanOptions::default().with_pass(pass);
                    let set = explore(&problem(head_dim, mask), arch, &options).expect("plans");
                    for plan in &set.plans {
                        let timeline = of_kernel(&plan.spec, arch, &plan.cost.step);
                        check(&plan.spec.to_string(), &timeline, &plan.cost.step);
                    }
                }
            }
        }
        let set = sm100_fwd::explore(&problem(128, Mask::CAUSAL), Arch::Sm100, None, None).expect("plans");
        for plan in &set.plans {
            check(
                "sm100",
                &sm100_fwd::timeline::timeline(&plan.tile, Arch::Sm100, &plan.cost.step),
                &plan.cost.step,
            );
        }
    }

    #[test]
    fn forwards_of_any_number_of_buffers_have_a_timeline() {
        let set = explore(&problem(128, Mask::CAUSAL), Arch::Sm90, &PlanOptions::default()).expect("plans");
        let best = &set.plans[0];
        let Kernel::Sm90Fwd(kernel) = &best.spec.kernel else { panic!("{}", best.spec) };
        for (kv_stages, overlap_wg) in [(1, true), (1, false), (2, false), (3, true), (4, true)] {
            let kernel = Sm90Fwd { kv_stages, overlap_wg, ..kernel.clone() };
            let spec = KernelSpec { kernel: kernel.into(), ..best.spec.clone() };
            check(&spec.to_string(), &of_kernel(&spec, Arch::Sm90, &best.cost.step), &best.cost.step);
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
            of_kernel(&plan.spec, Arch::Sm90, &plan.cost.step)
        };
        let (with, without) = (of(true), of(false));
        assert!(with.step < without.step && with.tensor_busy > without.tensor_busy, "{with:?} {without:?}");
        let best = &set.plans[0];
        let timeline = of_kernel(&best.spec, Arch::Sm90, &best.cost.step);
        let names: Vec<&str> = timeline.lanes.iter().map(|lane| &*lane.name).collect();
        assert_eq!(names[..3], ["producer: TMA", "warpgroup 0: wgmma", "warpgroup 0: softmax"]);
        assert!(timeline.tensor_busy > 0.5 && timeline.tensor_busy <= 1.0 + 1e-9, "{timeline:?}");
    }
}
