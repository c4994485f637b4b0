//! Predicted times: by resource, and by sequence length.

use fa_core::{Lengths, Pass, Problem};
use fa_planner::cost::{Bottleneck, Cost, CostConstants, predict};
use fa_planner::report::{PlanFamily, Planned, Tried};
use svg::Node;

use crate::draw::chart::{Chart, Series};
use crate::draw::diagram::{INK, MUTED, RULE, centered, diagram, ending, line, rect, text, tip};
use crate::plan::tried::Shown;
use crate::term::output::si;

/// What the bars show.
pub const ABOUT_TERMS: &str = "Time that each resource alone would take. They overlap, so the kernel takes \
    longer than the longest of them and less than their sum; the longest is what it waits for.";

/// What the lines show.
pub const ABOUT_SWEEP: &str = "The best kernel at every length, and the first choice for this problem at \
    every length; the other dimensions stay as they are. The dotted line is the board's peak.";

/// Lengths of the sweep: powers of two around what models use.
const SEQLENS: [usize; 8] = [256, 512, 1024, 2048, 4096, 8192, 16384, 32768];

/// A resource in words.
pub fn resource(term: Bottleneck) -> &'static str {
    match term {
        Bottleneck::Tensor => "tensor cores",
        Bottleneck::Exp => "softmax",
        Bottleneck::Smem => "shared memory",
        Bottleneck::L2 => "L2 cache",
        Bottleneck::Hbm => "device memory",
        Bottleneck::Waves => "idle SMs",
        Bottleneck::Latency => "launch, latency",
    }
}

/// Bars of a cost's terms.
pub fn terms(cost: &Cost) -> String {
    const LEFT: f64 = 130.0;
    const WIDTH: f64 = 640.0;
    const ROW: f64 = 26.0;
    let rows: Vec<(&str, f64, bool)> = cost
        .terms
        .named()
        .into_iter()
        .map(|(term, seconds)| (resource(term), seconds, term == cost.bottleneck))
        .collect();
    let longest = rows.iter().map(|(_, s, _)| *s).fold(cost.seconds, f64::max);
    let height = ROW * rows.len() as f64 + 40.0;
    let mut drawing = diagram(LEFT + WIDTH + 190.0, height, "Time by resource");
    for (i, (name, seconds, bottleneck)) in rows.iter().enumerate() {
        let y = 26.0 + ROW * i as f64;
        let width = (WIDTH * seconds / longest).max(1.0);
        let fill = if *bottleneck { "#b34700" } else { "#93c1e5" };
        let label = format!("{}{}", si(*seconds, "s"), if *bottleneck { ", the bottleneck" } else { "" });
        drawing.append(ending((LEFT - 10.0, y + 14.0), *name));
        let bar = rect([LEFT, y, width, ROW - 7.0]).set("rx", 2).set("fill", fill);
        drawing.append(bar.add(tip(format!("{name}: {}", si(*seconds, "s")))));
        // Inside long bars, so that no label runs into the line of the whole.
        let (label, ink) = if width > 180.0 {
            (ending((LEFT + width - 8.0, y + 14.0), label), if *bottleneck { "#ffffff" } else { INK })
        } else {
            (text((LEFT + width + 8.0, y + 14.0), label), MUTED)
        };
        drawing.append(label.set("fill", ink).set("pointer-events", "none"));
    }
    let x = LEFT + WIDTH * cost.seconds / longest;
    drawing.append(line([LEFT, 20.0, LEFT, height - 8.0]).set("stroke", RULE));
    let end = line([x, 20.0, x, height - 8.0]).set("stroke", INK);
    drawing.append(end.set("stroke-width", 1.5).set("stroke-dasharray", "3 3"));
    let total = format!("whole kernel {}", si(cost.seconds, "s"));
    drawing.append(centered((x, 13.0), total).set("font-weight", 600));
    drawing.to_string()
}

/// Lines of the best kernel's rate by length, and of this one's.
///
/// # Errors
/// When a length has no plan although this problem has, which would be the planner's fault.
pub fn sweep(planned: &Planned, forward: &Tried) -> anyhow::Result<String> {
    let problem = &planned.problem;
    let square = problem.lengths.max_q() == problem.lengths.max_k();
    let mut lengths: Vec<usize> = SEQLENS.into();
    lengths.push(problem.lengths.max_k().max(1));
    lengths.sort_unstable();
    lengths.dedup();
    let at = |seqlen: usize| Problem {
        lengths: Lengths::uniform(
            problem.lengths.sequences(),
            if square { seqlen } else { problem.lengths.max_q() },
            seqlen,
        ),
        ..*problem
    };
    let family = match forward {
        Tried::Kernels(_) => None,
        Tried::Sm100(_) => Some(PlanFamily::Sm100),
    };
    let constants = CostConstants::of(planned.arch);
    let mut best = Vec::new();
    let mut this = Vec::new();
    for seqlen in lengths {
        let problem = at(seqlen);
        // Past the addressable sizes there is nothing to predict.
        if problem.check().is_err() {
            continue;
        }
        let explored =
            Tried::explore(&problem, planned.arch, family.or(first_family(forward)), Pass::Forward)?;
        if let Some(fit) = explored.best() {
            best.push((seqlen as f64, fit.cost.tflops));
        }
        if let Tried::Kernels(set) = forward
            && let Some(first) = set.plans.first()
        {
            this.push((seqlen as f64, predict(&problem, &first.spec, planned.arch, &constants).tflops));
        }
    }
    let mut series =
        vec![Series { label: "best at each length".to_owned(), points: best, color: 0, dashed: false }];
    if !this.is_empty() {
        series.push(Series { label: "first choice here".to_owned(), points: this, color: 1, dashed: true });
    }
    let peak = planned.arch.limits().peak_tensor_flops() / 1e12;
    let chart = Chart {
        title: String::new(),
        x_label: if square { "queries and keys per sequence" } else { "keys per sequence" },
        y_label: "TFLOP/s",
        ceiling: Some((peak, format!("peak {peak:.0}"))),
        series,
    };
    chart.into_svg()
}

/// The family of the kernels in a set.
fn first_family(forward: &Tried) -> Option<PlanFamily> {
    match forward {
        Tried::Kernels(set) => set.plans.first().map(|plan| PlanFamily::Kernels(plan.spec.kernel.family())),
        Tried::Sm100(_) => Some(PlanFamily::Sm100),
    }
}
