//! The map of tiles: what fits, how fast it is predicted to be, and which limit rejects the rest.

use fa_core::Problem;
use fa_planner::account::Reason;
use fa_planner::guide::reject::Reason as GuideReason;
use fa_planner::guide::why;
use fa_planner::report::Tried;
use fa_planner::{HeadDims, Mode};
use svg::Node;
use svg::node::element::{Group as Together, Rectangle, SVG};

use crate::draw::diagram::{INK, MUTED, RULE, centered, diagram, ending, rect, text, tip};
use crate::plan::tried::{Group, Shown, prediction};

/// What the map shows.
pub const ABOUT: &str = "Every tile that was tried, keys per step across. Blue cells fit and hold the \
                         predicted TFLOP/s of the best kernel with that tile; the others break the named \
                         limit, by the least amount shown. Hover over a cell for its kernel.";

const CELL: (f64, f64) = (58.0, 26.0);
const LEFT: f64 = 256.0;
const TOP: f64 = 58.0;
/// Light to dark blue.
const BLUES: [&str; 6] = ["#e6f0fa", "#c3dcf1", "#93c1e5", "#5b9fd3", "#2c7abd", "#0b5394"];
/// From here on white text is the more readable one.
const DARK_FROM: usize = 3;

/// A rejected cell: its limit, as a colour and in words, so that neither has to be read alone.
struct LimitStyle {
    name: &'static str,
    fill: &'static str,
}

const LIMITS: [LimitStyle; 5] = [
    LimitStyle { name: "registers", fill: "#fbdcc4" },
    LimitStyle { name: "smem", fill: "#e9dcf2" },
    LimitStyle { name: "occupancy", fill: "#fdf0c4" },
    LimitStyle { name: "tmem", fill: "#cfe8dc" },
    LimitStyle { name: "other", fill: "#e4e6ea" },
];

fn limit_style(kind: &str) -> &'static LimitStyle {
    LIMITS.iter().find(|style| style.name == kind).unwrap_or(&LIMITS[LIMITS.len() - 1])
}

/// One cell: what is in it, its colour and its tooltip.
struct Cell {
    text: String,
    fill: &'static str,
    ink: &'static str,
    tip: String,
    best: bool,
    /// The limit that it breaks, for the legend.
    limit: Option<&'static LimitStyle>,
}

impl Cell {
    fn fits(text: String, shade: usize, tip: String, best: bool) -> Cell {
        let ink = if shade >= DARK_FROM { "#ffffff" } else { INK };
        Cell { text, fill: BLUES[shade], ink, tip, best, limit: None }
    }

    fn rejected(text: String, kind: &str, tip: String) -> Cell {
        let limit = limit_style(kind);
        Cell { text, fill: limit.fill, ink: INK, tip, best: false, limit: Some(limit) }
    }
}

/// The forward's map.
pub fn forward_map(forward: &Tried) -> String {
    let (fits, misses) = (forward.fits(), forward.misses());
    let mut groups: Vec<Group> =
        fits.iter().map(|f| f.group.clone()).chain(misses.iter().map(|m| m.group.clone())).collect();
    groups.sort();
    groups.dedup();
    let mut columns: Vec<u32> =
        fits.iter().map(|f| f.tile_n).chain(misses.iter().map(|m| m.tile_n)).collect();
    columns.sort_unstable();
    columns.dedup();
    // `fits` is in order of time, so the first of a cell is its best.
    let best_of = |group: &Group, tile_n: u32| {
        fits.iter().enumerate().find(|(_, fit)| fit.group == *group && fit.tile_n == tile_n)
    };
    let shown: Vec<f64> = groups
        .iter()
        .flat_map(|group| columns.iter().filter_map(|&tile_n| best_of(group, tile_n)))
        .map(|(_, fit)| fit.cost.tflops)
        .collect();
    let (low, high) =
        (shown.iter().copied().fold(f64::INFINITY, f64::min), shown.iter().copied().fold(0.0, f64::max));

    let cell = |group: &Group, tile_n: u32| {
        if let Some((rank, fit)) = best_of(group, tile_n) {
            let tip = format!("#{} {}\n{}\n{}", rank + 1, fit.name, fit.knobs, prediction(fit.cost));
            return Some(Cell::fits(
                format!("{:.0}", fit.cost.tflops),
                shade(fit.cost.tflops, low, high),
                tip,
                rank == 0,
            ));
        }
        let here = misses.iter().filter(|m| m.group == *group && m.tile_n == tile_n);
        let nearest = here.min_by(|a, b| a.reason.excess().total_cmp(&b.reason.excess()))?;
        let tip = format!("{}\n{}", nearest.name, nearest.reason);
        Some(Cell::rejected(excess(nearest.reason), nearest.reason.kind(), tip))
    };
    let rows: Vec<(String, Vec<Option<Cell>>)> = groups
        .iter()
        .map(|group| (group.label.clone(), columns.iter().map(|&tile_n| cell(group, tile_n)).collect()))
        .collect();
    let headers: Vec<String> = columns.iter().map(u32::to_string).collect();
    let scale = (!fits.is_empty()).then(|| format!("fits, {low:.0} to {high:.0} TFLOP/s"));
    draw("Tile map", "tile_n: keys per step", &headers, &rows, scale.as_deref())
}

/// The backward's map by the guide's model: how many layouts of each tile fit.
///
/// # Errors
/// Head dims out of the planner's range, which the plan before has refused already.
pub fn backward_map(problem: &Problem) -> anyhow::Result<String> {
    let dims = HeadDims {
        head_dim: u32::try_from(problem.head_dim)?,
        head_dim_v: u32::try_from(problem.head_dim_v)?,
    };
    let Some(found) = why::why(dims, Mode::Bwd, &[])?.bwd else { return Ok(String::new()) };
    let mut sides: Vec<(u32, u32)> = found
        .feasible
        .iter()
        .map(|c| (c.tile_m, c.tile_n))
        .chain(found.rejected.iter().map(|r| (r.spec.tile_m, r.spec.tile_n)))
        .collect();
    sides.sort_unstable();
    sides.dedup();
    let column = |pick: fn(&(u32, u32)) -> u32| {
        let mut values: Vec<u32> = sides.iter().map(pick).collect();
        values.sort_unstable();
        values.dedup();
        values
    };
    let (all_m, all_n) = (column(|s| s.0), column(|s| s.1));
    let count = |m: u32, n: u32| found.feasible.iter().filter(|c| (c.tile_m, c.tile_n) == (m, n)).count();
    let most = sides.iter().map(|&(m, n)| count(m, n)).max().unwrap_or(0) as f64;
    let best = found.feasible.first().map(|c| (c.tile_m, c.tile_n));
    let cell = |m: u32, n: u32| {
        let first = found.feasible.iter().find(|c| (c.tile_m, c.tile_n) == (m, n));
        if let Some(first) = first {
            let tip = format!(
                "{}\n{} of {} registers, {:.1} KiB of shared memory",
                first.spec(),
                first.total_regs,
                first.reg_limit,
                f64::from(first.smem_bytes) / 1024.0
            );
            let fitting = count(m, n);
            let is_best = best == Some((m, n));
            return Some(Cell::fits(fitting.to_string(), shade(fitting as f64, 0.0, most), tip, is_best));
        }
        // Budgets say more than shapes: many layouts of a tile have no whole instructions.
        let here = || found.rejected.iter().filter(|r| (r.spec.tile_m, r.spec.tile_n) == (m, n));
        let nearest = here()
            .filter(|r| !matches!(r.reason, GuideReason::MmaShape { .. }))
            .min_by_key(|r| r.reason.shortfall())
            .or_else(|| here().next())?;
        let (kind, text) = match nearest.reason {
            GuideReason::RegOverflow { need, have } => ("registers", format!("R +{}", need - have)),
            GuideReason::SmemOverflow { need, have } => {
                ("smem", format!("S +{}K", (need - have).div_ceil(1024)))
            }
            GuideReason::MmaShape { .. } => ("other", "shape".to_owned()),
        };
        let tip = format!("{}\n{}", nearest.spec, nearest.reason);
        Some(Cell::rejected(text, kind, tip))
    };
    let rows: Vec<(String, Vec<Option<Cell>>)> = all_m
        .iter()
        .map(|&m| (format!("tile_m {m} queries per step"), all_n.iter().map(|&n| cell(m, n)).collect()))
        .collect();
    let headers: Vec<String> = all_n.iter().map(u32::to_string).collect();
    let scale = (most > 0.0).then(|| format!("fits, up to {most:.0} layouts"));
    Ok(draw("Backward tile map", "tile_n: key rows of a block", &headers, &rows, scale.as_deref()))
}

/// `R +40`: the limit's letter and the amount by which it is missed.
fn excess(reason: &Reason) -> String {
    match reason {
        Reason::Registers { need, have } => format!("R +{}", need - have),
        Reason::Code { .. } => "code".to_owned(),
        Reason::Spills { .. } => "spills".to_owned(),
        Reason::Smem { need, have } => format!("S +{}K", (need - have).div_ceil(1024)),
        Reason::Occupancy { need, have, .. } => format!("O {have}/{need}"),
        Reason::Tmem { need, have } => format!("T +{}", need - have),
        Reason::Rule(_) | Reason::Problem { .. } => "rule".to_owned(),
    }
}

fn shade(value: f64, low: f64, high: f64) -> usize {
    let share = if high > low { (value - low) / (high - low) } else { 1.0 };
    ((share * BLUES.len() as f64) as usize).min(BLUES.len() - 1)
}

fn draw(
    label: &str,
    columns_label: &str,
    headers: &[String],
    rows: &[(String, Vec<Option<Cell>>)],
    scale: Option<&str>,
) -> String {
    let width = (LEFT + CELL.0 * headers.len() as f64 + 8.0).max(1000.0);
    let bottom = TOP + CELL.1 * rows.len() as f64;
    let mut drawing = diagram(width, bottom + 48.0, label);
    drawing.append(text((LEFT, 18.0), columns_label).set("fill", MUTED));
    for (i, header) in headers.iter().enumerate() {
        let x = LEFT + CELL.0 * (i as f64 + 0.5);
        drawing.append(centered((x, TOP - 12.0), header).set("font-weight", 600));
    }
    // The best cell is drawn last, so that no neighbour covers its outline.
    let mut outline = None;
    let mut limits: Vec<&'static LimitStyle> = Vec::new();
    for (r, (name, cells)) in rows.iter().enumerate() {
        let y = TOP + CELL.1 * r as f64;
        drawing.append(ending((LEFT - 12.0, y + 17.0), name));
        for (c, cell) in cells.iter().enumerate() {
            let Some(cell) = cell else { continue };
            let x = LEFT + CELL.0 * c as f64;
            let place = [x + 1.0, y + 1.0, CELL.0 - 2.0, CELL.1 - 2.0];
            let area = rect(place).set("rx", 2).set("fill", cell.fill).set("stroke", RULE);
            let content = centered((x + CELL.0 / 2.0, y + 17.0), &cell.text).set("fill", cell.ink);
            drawing.append(
                Together::new()
                    .add(area.set("stroke-width", 0.5).add(tip(&cell.tip)))
                    .add(content.set("font-size", 11.5).set("pointer-events", "none")),
            );
            if cell.best {
                outline = Some(place);
            }
            if let Some(limit) =
                cell.limit.filter(|limit| !limits.iter().any(|known| known.name == limit.name))
            {
                limits.push(limit);
            }
        }
    }
    if let Some(place) = outline {
        drawing.append(frame(place).set("stroke-width", 2.5).set("pointer-events", "none"));
    }
    legend(&mut drawing, bottom + 30.0, scale, &limits, outline.is_some());
    drawing.to_string()
}

/// Around the first choice.
fn frame(place: [f64; 4]) -> Rectangle {
    rect(place).set("rx", 2).set("fill", "none").set("stroke", INK)
}

fn legend(drawing: &mut SVG, y: f64, scale: Option<&str>, limits: &[&LimitStyle], best: bool) {
    let mut x = 8.0;
    // Widths of texts are estimated: 6.4 pixels a character at this size.
    let width_of = |text: &str| 6.4 * text.chars().count() as f64;
    let name = |x: f64, name: &str| text((x, y), name).set("fill", MUTED);
    if let Some(text) = scale {
        for blue in BLUES {
            drawing.append(rect([x, y - 11.0, 12.0, 14.0]).set("fill", blue));
            x += 12.0;
        }
        drawing.append(name(x + 6.0, text));
        x += 6.0 + width_of(text) + 22.0;
    }
    if best {
        drawing.append(frame([x, y - 11.0, 16.0, 14.0]).set("stroke-width", 2));
        drawing.append(name(x + 22.0, "first choice"));
        x += 22.0 + width_of("first choice") + 22.0;
    }
    for style in limits {
        let text = match style.name {
            "registers" => "R: registers over",
            "smem" => "S: KiB of SMEM over",
            "occupancy" => "O: blocks per SM got/asked",
            "tmem" => "T: TMEM columns over",
            _ => "no whole instructions, or another rule",
        };
        let key = rect([x, y - 11.0, 16.0, 14.0]).set("rx", 2).set("fill", style.fill);
        drawing.append(key.set("stroke", RULE));
        drawing.append(name(x + 22.0, text));
        x += 22.0 + width_of(text) + 22.0;
    }
}
