//! Why a forward divides the keys of its tiles among several CTAs, or does not.

use fa_core::{Arch, ArchLimits, KernelSpec, Problem};
use fa_planner::cost::{CostConstants, predict_on};
use fa_planner::divide;
use fa_planner::divide::kv_splits;
use fa_planner::plan::Plan;

use crate::term::output::si;

/// FLOPs per byte below which moving keys and values limits a problem, as in decode.
const FEW_FLOPS: f64 = 128.0;

/// Whether the forward is limited by reading keys and values: few operations for each byte.
pub(crate) fn moves_bytes(problem: &Problem) -> bool {
    problem.flops_forward() < FEW_FLOPS * problem.bytes_forward()
}

/// The number of splits of a forward's plan and the reason for it, in a line; nothing where splitting does
/// not apply.
pub(crate) fn reason(plan: &Plan, problem: &Problem, (arch, limits): (Arch, &ArchLimits)) -> Option<String> {
    let sms = limits.sms;
    let cost = &plan.cost;
    let many = |count: f64, noun: &str| format!("{count:.0} {noun}{}", if count == 1.0 { "" } else { "s" });
    if plan.spec.split && !problem.lengths.is_uniform() {
        return Some(format!(
            "at most {} CTAs share the keys of a tile, by the lengths on the device",
            kv_splits(problem, &plan.spec, arch, sms),
        ));
    }
    if cost.splits == 1 {
        let text = || format!("none: {} on {sms} SMs", many(cost.tiles, "tile"));
        return moves_bytes(problem).then(text);
    }
    let whole = KernelSpec { split: false, ..plan.spec.clone() };
    let whole = predict_on(problem, &whole, (arch, limits), &CostConstants::of(arch));
    let combined = match divide(problem, &plan.spec, arch, sms, Some(cost.splits)).cluster {
        1 => "with the combine kernel".to_owned(),
        all if all == cost.splits => format!("in clusters of {all}, which combine them"),
        some => format!("in clusters of {some}, with the combine kernel"),
    };
    Some(format!(
        "{} CTAs share the keys of a tile: {} on {sms} SMs would take {}, {} take {} {combined}",
        cost.splits,
        many(whole.tiles, "tile"),
        si(whole.seconds, "s"),
        many(cost.tiles, "part"),
        si(cost.seconds, "s"),
    ))
}
