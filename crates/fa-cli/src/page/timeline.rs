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
    let mut html = legend(&timeline, view.backward());
    html += "<div class=\"scroll\" tabindex=\"0\"><div class=\"lanes\">\n";
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
    let note = note(view, fit, &timeline);
    writeln!(html, "<div class=\"ticks\">{ticks}</div>\n</div></div>\n<p class=\"note\">{note}</p>")
        .expect(INTO_STRING);
    html
}

/// The colours of what the lanes show.
fn legend(timeline: &Timeline, is_backward: bool) -> String {
    let mut html = String::from("<div class=\"legend\">");
    for (activity, words) in [
        (Activity::Load, "copy"),
        (Activity::Product, "matrix product"),
        (Activity::Softmax, if is_backward { "P and dS" } else { "softmax" }),
        (Activity::Add, "addition to device memory"),
        (Activity::Exposed, "barriers, shuffles, latency"),
        (Activity::Wait, "waits"),
    ] {
        if timeline.lanes.iter().any(|lane| lane.spans.iter().any(|span| span.activity == activity)) {
            write!(html, "<span><i class=\"{}\"></i>{words}</span>", class(activity)).expect(INTO_STRING);
        }
    }
    html + "</div>\n"
}

/// How the lanes' step compares with the one that the plan's time was computed with.
fn note(view: &View, fit: &Fit, timeline: &Timeline) -> String {
    let (cost, clocks) = (fit.cost, &fit.cost.step);
    let steps = cost.steps / cost.tiles.max(1.0);
    let short = if steps < 2.0 {
        format!(
            "<b>This problem has {} a tile, so that none of its steps is steady</b>: the lanes are those of \
             longer rows. ",
            if steps <= 1.0 { "one step".to_owned() } else { format!("{steps:.1} steps") }
        )
    } else {
        String::new()
    };
    // Clocks in which device memory delivers what the CTAs of an SM read and write for a step of each.
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
    format!(
        "{short}In this order a step takes {:.0} clocks, with the tensor cores busy {:.0} % of them.{memory} \
         For the SM alone the calibrated model says {:.0}: tensor cores {:.0}, softmax {:.0}, shared memory \
         {:.0}, not hidden {:.0}, of {} on the SM. It counts what the order does not show: pipes that are \
         not filled, and strained registers.",
        timeline.step,
        100.0 * timeline.tensor_busy,
        timeline.predicted,
        clocks.tensor,
        clocks.exp,
        clocks.smem,
        clocks.exposed,
        if clocks.resident == 1.0 { "one CTA".to_owned() } else { format!("{:.0} CTAs", clocks.resident) }
    )
}

fn span(html: &mut String, span: &Span, timeline: &Timeline) {
    let share = |clocks: f64| 100.0 * clocks / timeline.clocks;
    let clocks = span.end - span.begin;
    let what = if span.label.is_empty() { "waits" } else { &*span.label };
    let tip = format!("{what}: clock {:.0} to {:.0} ({clocks:.0})", span.begin, span.end);
    let waits = span.activity == Activity::Wait;
    let labels = if waits { wait_labels(&span.label) } else { bar_labels(&[&span.label]) };
    write!(
        html,
        "<span class=\"sp {}\" style=\"left:{:.2}%;width:{:.2}%\" tabindex=\"0\" \
         data-tip=\"{}\">{labels}</span>",
        class(span.activity),
        share(span.begin),
        share(clocks),
        escape(&tip),
    )
    .expect(INTO_STRING);
}

/// What a wait is for, in a word and with its lane, as far as its bar has room: `for S`, `for S of
/// warpgroup 0`.
fn wait_labels(because: &str) -> String {
    let (verb, what) = match because.split_once(" are busy with ") {
        Some((unit, what)) => (unit.trim_start_matches("the ").to_owned() + ":", what),
        None => ("for".to_owned(), because.trim_start_matches("waits for ")),
    };
    let lane = what.split(": ").next().unwrap_or(what);
    let long = format!("{verb} {lane}");
    let short = format!("for {}", what.split(" of ").next().unwrap_or(what));
    if because.is_empty() { String::new() } else { bar_labels(&[&short, &long]) }
}

/// Room of a label in a bar: most characters, and the class that shows it from so much width on.
const ROOM: [usize; 6] = [4, 6, 9, 14, 22, 38];

/// Labels from short to long, of which the longest shows that its bar has room for.
pub(crate) fn bar_labels(labels: &[&str]) -> String {
    let mut html = String::new();
    let room =
        |label: &str| ROOM.iter().position(|&most| label.chars().count() <= most).unwrap_or(ROOM.len() - 1);
    for (index, label) in labels.iter().enumerate() {
        // Hidden where the next one has room.
        let until = labels.get(index + 1).map(|next| room(next));
        match until {
            Some(longer) if longer == room(label) => {}
            Some(longer) => {
                write!(html, "<b class=\"l{} u{longer}\">{}</b>", room(label), escape(label))
                    .expect(INTO_STRING);
            }
            None => write!(html, "<b class=\"l{}\">{}</b>", room(label), escape(label)).expect(INTO_STRING),
        }
    }
    html
}
