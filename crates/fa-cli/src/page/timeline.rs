//! The timeline of two steady steps of an SM, by the model.

use std::fmt::Write;

use fa_planner::kernels::sm100_fwd;
use fa_planner::timeline::{Activity, Span, Timeline, of_kernel};

use crate::draw::diagram::escape;
use crate::page::view::View;
use crate::plan::tried::{Fit, Shape};

const INTO_STRING: &str = "writing to a string cannot fail";

/// What the lanes show.
pub(crate) const ABOUT: &str = "Two steady steps of one SM in the order of the kernel's main loop, each \
    part as long as the cost model says and the tensor cores and softmax pipes doing one thing at a time. \
    Numbers behind names count steps; hatched: waiting, and for what.";

fn class(activity: Activity) -> &'static str {
    match activity {
        Activity::Load => "load",
        Activity::Product => "product",
        Activity::Softmax => "softmax",
        Activity::Add => "add",
        Activity::Exposed => "exposed",
        Activity::Wait => "wait",
    }
}

/// The lanes of a kernel.
pub(crate) fn steps(view: &View, fit: &Fit) -> String {
    let arch = view.planned.arch;
    let timeline = match fit.shape {
        Shape::Kernel(spec) => of_kernel(spec, arch, &fit.cost.step),
        Shape::Sm100(plan) => sm100_fwd::timeline::timeline(&plan.tile, arch, &fit.cost.step),
    };
    let mut html = String::from("<div class=\"legend\">");
    for (activity, words) in [
        (Activity::Load, "copy"),
        (Activity::Product, "matrix product"),
        (Activity::Softmax, if view.backward() { "P and dS" } else { "softmax" }),
        (Activity::Add, "addition to device memory"),
        (Activity::Exposed, "barriers, shuffles, latency"),
        (Activity::Wait, "waits"),
    ] {
        if timeline.lanes.iter().any(|lane| lane.spans.iter().any(|span| span.activity == activity)) {
            write!(html, "<span><i class=\"{}\"></i>{words}</span>", class(activity)).expect(INTO_STRING);
        }
    }
    html += "</div>\n";
    for lane in &timeline.lanes {
        write!(
            html,
            "<div class=\"lane\"><div class=\"rowname\">{} <b>{:.0} %</b></div><div class=\"track2\">",
            escape(&lane.name),
            100.0 * lane.busy
        )
        .expect(INTO_STRING);
        lane.spans.iter().for_each(|own| span(&mut html, own, &timeline));
        html += "</div></div>\n";
    }
    let ticks: String = (0..=4)
        .map(|tick| {
            let unit = if tick == 4 { " clocks" } else { "" };
            format!("<span>{:.0}{unit}</span>", timeline.clocks * f64::from(tick) / 4.0)
        })
        .collect();
    let clocks = &fit.cost.step;
    // Clocks in which device memory delivers what the CTAs of an SM read and write for a step of each.
    let cost = fit.cost;
    let memory_clocks =
        cost.terms.hbm * view.limits().clock_ghz * 1e9 * cost.slots.min(cost.tiles) / cost.steps.max(1.0);
    let memory = if memory_clocks > clocks.total {
        format!(
            " Device memory delivers a step's data to each SM in {memory_clocks:.0} clocks, and so long a \
             step takes: copies are drawn as the L2 would deliver them."
        )
    } else {
        String::new()
    };
    write!(
        html,
        "<div class=\"ticks\">{ticks}</div>\n<p class=\"note\">In this order a step takes {:.0} clocks, \
         with the \
         tensor cores busy {:.0} % of them.{memory} For the SM alone the calibrated model says {:.0}: \
         tensor cores {:.0}, softmax {:.0}, \
         shared memory {:.0}, not hidden {:.0}, of {} on the SM. It counts what the order does not \
         show: pipes that are not filled, and strained registers.</p>\n",
        timeline.step,
        100.0 * timeline.tensor_busy,
        timeline.predicted,
        clocks.tensor,
        clocks.exp,
        clocks.smem,
        clocks.exposed,
        if clocks.resident == 1.0 { "one CTA".to_owned() } else { format!("{:.0} CTAs", clocks.resident) }
    )
    .expect(INTO_STRING);
    html
}

fn span(html: &mut String, span: &Span, timeline: &Timeline) {
    let share = |clocks: f64| 100.0 * clocks / timeline.clocks;
    let label = if span.activity == Activity::Wait { "" } else { &*span.label };
    let room = match label.chars().count() {
        0..=4 => 0,
        5..=9 => 1,
        _ => 2,
    };
    let clocks = span.end - span.begin;
    let what = if span.label.is_empty() { "waits" } else { &*span.label };
    let tip = format!("{what}: clock {:.0} to {:.0} ({clocks:.0})", span.begin, span.end);
    write!(
        html,
        "<span class=\"sp {}\" style=\"left:{:.2}%;width:{:.2}%\" tabindex=\"0\" data-tip=\"{}\"><b \
         class=\"l{room}\">{}</b></span>",
        class(span.activity),
        share(span.begin),
        share(clocks),
        escape(&tip),
        escape(label)
    )
    .expect(INTO_STRING);
}
