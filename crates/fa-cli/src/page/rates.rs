//! Predicted times and rates: by resource, by sequence length, under the roofs, and wave by wave.

use std::fmt::Write;

use fa_core::{Lengths, Problem, Side, SideRows, counted};
use fa_planner::cost::{Bottleneck, Cost, CostConstants, predict_on};
use fa_planner::report::{PlanFamily, Tried};

use crate::page::chart::{Axis, Line, Roof, chart};
use crate::page::measured::Measured;
use crate::page::view::{View, data};
use crate::plan::tried::{Fit, Shown};
use crate::term::output::{plain, si};

const INTO_STRING: &str = "writing to a string cannot fail";

/// What the bars show.
pub(crate) const ABOUT_TERMS: &str = "Time that each resource alone would take. They overlap, so the kernel \
    takes longer than the longest of them and less than their sum; the longest is what it waits for.";

/// What the lines show.
pub(crate) const ABOUT_SWEEP: &str = "The best kernel at every length, and the first choice for this \
    problem at every length; the other dimensions stay as they are, and packed rows and pages grow with the \
    length. Measured rates are those of records with the same shape but for the length.";

/// What the roofline shows.
pub(crate) const ABOUT_ROOFLINE: &str = "Rate over compulsory work for each byte of device memory: the \
    bandwidth, the tensor cores' peak, and what the power limit sustains. Along the line the length grows.";

/// Share of the peak from which on a chart shows it.
const NEAR_PEAK: f64 = 0.1;

/// Lengths of the sweep: powers of two around what models use.
const SEQLENS: [usize; 8] = [256, 512, 1024, 2048, 4096, 8192, 16384, 32768];

/// A resource in words.
pub(crate) fn resource(term: Bottleneck) -> &'static str {
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
pub(crate) fn terms(cost: &Cost) -> String {
    let longest = cost.terms.named().into_iter().map(|(_, s)| s).fold(cost.seconds, f64::max);
    let mut html = String::from("<div class=\"terms\">\n");
    let mut row = |name: &str, seconds: f64, class: &str| {
        writeln!(
            html,
            "<span class=\"{class}\">{name}</span><span class=\"track {class}\"><b \
             style=\"width:{:.2}%\"></b></span><span class=\"{class}\">{}</span>",
            100.0 * seconds / longest,
            si(seconds, "s")
        )
        .expect(INTO_STRING);
    };
    for (term, seconds) in cost.terms.named() {
        row(resource(term), seconds, if term == cost.bottleneck { "most" } else { "" });
    }
    row("whole kernel", cost.seconds, "whole");
    html + "</div>\n"
}

/// A problem of another length with the best plan there, and the first choice's cost.
pub(crate) struct At {
    seqlen: usize,
    problem: Problem,
    best: Cost,
    this: Option<Cost>,
}

/// Whether queries grow with the keys.
fn is_square(problem: &Problem) -> bool {
    problem.lengths.max_q() == problem.lengths.max_k()
}

/// The lengths of a problem whose longest sequence has `seqlen` keys, and as many queries where it is
/// `square`. Rows lie as they do, packed ones and pages in proportion.
fn at_length(lengths: &Lengths, seqlen: usize, square: bool) -> Lengths {
    let grown = |side: Side| {
        let grow = |rows: usize| {
            let rows = rows as u128 * seqlen as u128 / side.max().max(1) as u128;
            usize::try_from(rows).unwrap_or(usize::MAX).max(1)
        };
        let rows = match side.rows {
            SideRows::Padded { .. } => SideRows::Padded { len: seqlen },
            SideRows::Packed { total, .. } => SideRows::Packed { total: grow(total), max: seqlen },
            SideRows::Paged { page, pages, .. } => {
                let pages = grow(pages).max(seqlen.div_ceil(page.max(1)));
                SideRows::Paged { page, pages, max: seqlen }
            }
        };
        Side { rows, used: side.used }
    };
    let q = if square { grown(lengths.q()) } else { lengths.q() };
    Lengths::of(lengths.sequences(), q, grown(lengths.k()))
}

/// The plans at other lengths.
///
/// # Errors
/// When a length has no plan although this problem has, which would be the planner's fault.
pub(crate) fn sweep(view: &View) -> anyhow::Result<Vec<At>> {
    let problem = view.problem();
    let mut lengths: Vec<usize> = SEQLENS.into();
    lengths.push(problem.lengths.max_k().max(1));
    lengths.sort_unstable();
    lengths.dedup();
    let constants = CostConstants::of(view.planned.arch);
    let first = match view.tried {
        Tried::Kernels(set) => set.plans.first(),
        Tried::Sm100(_) => None,
    };
    let mut found = Vec::new();
    for seqlen in lengths {
        let lengths = at_length(&problem.lengths, seqlen, is_square(problem));
        let other = problem.with_lengths(lengths);
        // Past the addressable sizes there is nothing to predict.
        if other.check().is_err() {
            continue;
        }
        let on = (view.planned.arch, view.planned.board);
        let explored = Tried::explore(&other, on, family(view.tried), view.pass)?;
        let this = first.map(|plan| predict_on(&other, &plan.spec, (on.0, &view.limits()), &constants));
        if let Some(best) = explored.best().map(|fit| *fit.cost).or(this) {
            found.push(At { seqlen, problem: other, best, this });
        }
    }
    Ok(found)
}

/// The family of the kernels in a set.
fn family(tried: &Tried) -> Option<PlanFamily> {
    match tried {
        Tried::Kernels(set) => set.plans.first().map(|plan| PlanFamily::Kernels(plan.spec.kernel.family())),
        Tried::Sm100(_) => Some(PlanFamily::Sm100),
    }
}

/// The rate by length, predicted and measured.
pub(crate) fn by_length(view: &View, sweep: &[At], measured: &[&Measured]) -> String {
    let unit = view.unit_name();
    let point = |at: &At, cost: &Cost| {
        let rate = view.rate(cost);
        (at.seqlen as f64, rate, format!("{}: {} {unit}, {}", at.seqlen, plain(rate), si(cost.seconds, "s")))
    };
    let line = |name: &str, color, dashed, points| Line {
        name: name.to_owned(),
        color,
        dashed,
        joined: true,
        full: !dashed,
        points,
    };
    let mut lines = vec![
        line("best at each length", 0, false, sweep.iter().map(|at| point(at, &at.best)).collect()),
        line(
            "first choice here",
            1,
            true,
            sweep.iter().filter_map(|at| Some(point(at, at.this.as_ref()?))).collect(),
        ),
    ];
    let along = measured.iter().filter(|row| row.same_but_for_length(view.problem()));
    let points = along.map(|row| {
        let rate = row.rate(view.unit);
        (row.problem.lengths.max_k() as f64, rate, format!("measured: {} {unit}", plain(rate)))
    });
    lines.push(Line {
        name: "measured".to_owned(),
        color: 2,
        dashed: false,
        joined: false,
        full: true,
        points: points.collect(),
    });
    let peak = view.peak();
    let sizes = || sweep.iter().map(|at| at.seqlen as f64);
    let (low, high) = (sizes().fold(f64::INFINITY, f64::min), sizes().fold(1.0, f64::max));
    let square = is_square(view.problem());
    let x_label = if square { "queries and keys per sequence" } else { "keys per sequence" };
    let x = Axis::log(x_label, low.min(high), high, 2.0);
    // A peak far above the lines would flatten them.
    let most = lines.iter().flat_map(|line| &line.points).map(|point| point.1).fold(0.0, f64::max);
    let near = most > NEAR_PEAK * peak;
    let y = Axis::linear(unit, 1.02 * if near { peak } else { most });
    let roof = Roof { name: format!("peak {peak:.0} {unit}"), points: vec![(x.low, peak), (x.high, peak)] };
    let roofs = if near { vec![roof] } else { Vec::new() };
    let about = if view.backward() { "Backward rate" } else { "Forward rate" };
    chart(&format!("{about} by sequence length"), &x, &y, &roofs, &lines) + &sweep_table(view, sweep)
}

fn sweep_table(view: &View, sweep: &[At]) -> String {
    let mut rows = String::new();
    for at in sweep {
        let this = at.this.as_ref().map_or(String::from("-"), |cost| plain(view.rate(cost)));
        writeln!(
            rows,
            "<tr><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{this}</td><td \
             class=\"n\">{}</td></tr>",
            at.seqlen,
            plain(view.rate(&at.best)),
            data(at.best.seconds, &si(at.best.seconds, "s"))
        )
        .expect(INTO_STRING);
    }
    format!(
        "<details><summary>As a table</summary>\n<div class=\"scroll\" \
         tabindex=\"0\"><table class=\"sorts\"><tr><th \
         class=\"n\">Keys</th><th class=\"n\">Best, {0}</th><th class=\"n\">First choice here</th><th \
         class=\"n\">Time</th></tr>\n{rows}</table></div></details>\n",
        view.unit_name()
    )
}

/// The roofline: this problem, the same at other lengths, and what was measured.
pub(crate) fn roofline(view: &View, best: &Fit, sweep: &[At], measured: &[&Measured]) -> String {
    let limits = view.limits();
    let peak = limits.peak_tensor_flops_of(view.problem().types.q) / 1e12;
    let bandwidth = limits.hbm_bytes_per_s / 1e12;
    let sustained = peak * CostConstants::of(view.planned.arch).power_cap;
    let intensity = |problem: &Problem| problem.flops(view.pass) / problem.bytes(view.pass).max(1.0);
    let point = |problem: &Problem, tflops: f64, what: &str| {
        let at = intensity(problem);
        (at > 0.0 && tflops > 0.0)
            .then(|| (at, tflops, format!("{what}: {} FLOP/B, {} TFLOP/s", plain(at), plain(tflops))))
    };
    let others =
        sweep.iter().filter_map(|at| point(&at.problem, at.best.tflops, &format!("{} keys", at.seqlen)));
    let here = point(view.problem(), best.cost.tflops, "this problem");
    let rows = measured.iter().filter(|row| row.exact(view.problem()));
    let rows = rows.filter_map(|row| point(&row.problem, row.tflops(), "measured"));
    let line = |name: &str, color, joined, full, points: Vec<_>| Line {
        name: name.to_owned(),
        color,
        dashed: false,
        joined,
        full,
        points,
    };
    let lines = [
        line("predicted, by length", 0, true, false, others.collect()),
        line("this problem, predicted", 1, false, true, here.into_iter().collect()),
        line("measured", 2, false, true, rows.collect()),
    ];
    let all = || lines.iter().flat_map(|line| &line.points);
    let ridge = peak / bandwidth;
    let low = all().map(|p| p.0).fold(ridge / 8.0, f64::min);
    let high = all().map(|p| p.0).fold(ridge * 8.0, f64::max);
    let slowest = all().map(|p| p.1).fold(peak / 20.0, f64::min);
    let x = Axis::log("FLOP per byte of device memory", low, high, 10.0);
    let y = Axis::log("TFLOP/s", (slowest / 2.0).max(1e-6), peak, 10.0);
    let corner = |top: f64| {
        let from = (y.low / bandwidth).max(x.low);
        vec![(from, from * bandwidth), (top / bandwidth, top), (x.high, top)]
    };
    let roofs = [
        Roof {
            name: format!(
                "{}, {peak:.0} TFLOP/s ({sustained:.0} sustained)",
                si(limits.hbm_bytes_per_s, "B/s")
            ),
            points: corner(peak),
        },
        Roof { name: String::new(), points: vec![(sustained / bandwidth, sustained), (x.high, sustained)] },
    ];
    let at = intensity(view.problem());
    let bound = if at < ridge { "below" } else { "above" };
    format!(
        "{}<p class=\"note\">{} FLOP per byte, {bound} the ridge at {ridge:.0}: the roof there is {} \
         TFLOP/s, of which {} % are predicted. The power limit sustains {sustained:.0} TFLOP/s of the \
         peak.</p>\n",
        chart("Roofline", &x, &y, &roofs, &lines),
        plain(at),
        plain((at * bandwidth).min(peak)),
        plain(100.0 * best.cost.tflops / (at * bandwidth).min(peak).max(1e-9))
    )
}

/// SMs that are drawn one by one; more become a bar.
const DRAWN: f64 = 700.0;

/// Full waves and the last one.
pub(crate) fn waves(cost: &Cost) -> String {
    let (tiles, slots) = (cost.tiles.round(), cost.slots.round().max(1.0));
    let full = (tiles / slots).floor();
    let rest = tiles - full * slots;
    let last = if rest > 0.0 || full == 0.0 { rest } else { slots };
    let full = if rest > 0.0 || full == 0.0 { full } else { full - 1.0 };
    let mut html = String::new();
    let per_tile = cost.steps / cost.tiles.max(1.0);
    writeln!(
        html,
        "<p>{} on {}: {}, then {last:.0} of {slots:.0} ({:.0} %). {per_tile:.1} steps a tile on \
         average.</p>",
        counted(tiles as usize, "tile"),
        counted(slots as usize, "slot"),
        counted(full as usize, "full wave"),
        100.0 * last / slots
    )
    .expect(INTO_STRING);
    if slots <= DRAWN {
        write!(
            html,
            "<div class=\"slots\" style=\"--n:{}\" role=\"img\" aria-label=\"The last wave: {last:.0} of \
             {slots:.0} slots \
             have a \
             tile\">",
            squares_in_a_row(slots as usize)
        )
        .expect(INTO_STRING);
        for slot in 0..slots as usize {
            html += if (slot as f64) < last { "<i class=\"on\"></i>" } else { "<i></i>" };
        }
        html += "</div>\n";
    } else {
        html += "<div class=\"bar\">";
        html += &crate::page::memory::part("p0", 100.0 * last / slots, &["last wave"], "slots with a tile");
        html += "</div>\n";
    }
    let idle = cost.terms.waves;
    writeln!(
        html,
        "<p class=\"note\">A square is a slot (a CTA's place on an SM) in the last wave; filled: it has a \
         tile. \
         Tiles of unequal length end apart, and longest-first orders fill the gaps: by the model idle SMs \
         cost \
         {} of {}.</p>",
        si(idle, "s"),
        si(cost.seconds, "s")
    )
    .expect(INTO_STRING);
    html
}

/// Squares in a row of the drawing: full rows where the slots have a divisor of a good size.
fn squares_in_a_row(slots: usize) -> usize {
    const MOST: usize = 24;
    (MOST / 2..=MOST).rev().find(|n| slots.is_multiple_of(*n)).unwrap_or(MOST)
}

/// Query rows of a tile that a problem's mean sequence fills, of how many; nothing for a backward.
pub(crate) fn rows_in_use(view: &View, best: &Fit) -> Option<(f64, u32)> {
    use crate::plan::tried::Shape;
    if view.backward() {
        return None;
    }
    let problem = view.problem();
    let (heads, queries) = match best.shape {
        Shape::Kernel(spec) => {
            let (traits, group) = (spec.traits(), spec.traits().tiled(problem).group_size());
            (if traits.packs_gqa { group } else { 1 }, traits.tile_queries(group))
        }
        Shape::Sm100(_) => (1, best.tile_m as usize),
    };
    let rows = problem.lengths.mean_q() * heads;
    let tiles = problem.lengths.mean_q().div_ceil(queries.max(1)).max(1);
    Some((rows as f64 / tiles as f64, best.tile_m))
}
