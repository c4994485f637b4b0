//! Shared memory, tensor memory and registers, to scale.

use std::fmt::Write;

use fa_planner::kernels::sm100_fwd::TmemPlan;
use fa_planner::smem::SmemPlan;
use svg::Node;
use svg::node::element::{Rectangle, SVG};

use crate::draw::diagram::{INK, MUTED, RULE, centered, diagram, ending, escape, line, rect, text, tip};
use crate::plan::tried::bytes;

const WIDTH: f64 = 960.0;
const LEFT: f64 = 8.0;
const TOP: f64 = 34.0;
const LANE: f64 = 44.0;
/// Light fills under dark text.
const FILLS: [&str; 6] = ["#a9cfee", "#f7c9a3", "#a8dcc8", "#e6bfd6", "#f3dd9a", "#c9d0da"];
const LIMIT: &str = "#b3261e";

/// A range of a memory.
struct Item {
    name: String,
    begin: u32,
    size: u32,
    /// Reuses the memory of another.
    alias: bool,
    tip: String,
}

/// The buffers of a block against `limit` bytes, as a drawing and a table.
pub fn smem(plan: &SmemPlan, limit: u32) -> String {
    let items = plan.buffers.iter().map(|b| {
        let mut tip = format!("{}: {} at {}, aligned to {}", b.name, bytes(b.size), b.offset, b.align);
        if let Some(owner) = &b.alias_of {
            write!(tip, ", reuses {owner}").expect("writing to a string cannot fail");
        }
        Item { name: b.name.to_string(), begin: b.offset, size: b.size, alias: b.alias_of.is_some(), tip }
    });
    lanes("Shared memory layout", &items.collect::<Vec<_>>(), limit, &KIB) + &smem_table(plan)
}

/// The tensor memory of a block.
pub fn tmem(plan: &TmemPlan, columns: u32) -> String {
    let items = plan.regions.iter().map(|r| {
        let reuse = r.alias_of.map_or(String::new(), |owner| format!(", reuses {owner}"));
        let tip = format!("{}: {} columns from {}{reuse}", r.name, r.columns, r.begin);
        Item { name: r.name.to_owned(), begin: r.begin, size: r.columns, alias: r.alias_of.is_some(), tip }
    });
    lanes("Tensor memory layout", &items.collect::<Vec<_>>(), columns, &COLUMNS)
}

/// How a memory is counted.
struct Unit {
    /// Of the axis.
    name: &'static str,
    /// What the axis counts.
    divisor: f64,
    /// Axis ticks, in what it counts.
    step: f64,
    /// An amount as text.
    text: fn(u32) -> String,
}

const KIB: Unit = Unit { name: "KiB", divisor: 1024.0, step: 32.0, text: bytes };
const COLUMNS: Unit = Unit { name: "columns", divisor: 1.0, step: 64.0, text: |n| n.to_string() };

/// Items to scale in one lane, those that reuse memory in a second.
fn lanes(label: &str, items: &[Item], limit: u32, unit: &Unit) -> String {
    let used = items.iter().map(|item| item.begin + item.size).max().unwrap_or(0);
    let full = f64::from(limit.max(used));
    let x_of = |at: u32| LEFT + WIDTH * f64::from(at) / full;
    let second = if items.iter().any(|item| item.alias) { LANE * 0.7 + 6.0 } else { 0.0 };
    let bottom = TOP + LANE + second;
    let mut drawing = diagram(WIDTH + 3.0 * LEFT + 30.0, bottom + 34.0, label);
    drawing.append(whole(limit, full, format!("a block may use {}", (unit.text)(limit))));
    let mut color = 0;
    for item in items {
        let (x, end) = (x_of(item.begin), x_of(item.begin + item.size));
        let width = (end - x).max(1.5);
        let (y, height) = if item.alias { (TOP + LANE + 6.0, LANE * 0.7) } else { (TOP, LANE) };
        let place = rect([x, y, width, height]);
        let range = if item.alias {
            place.set("fill", "#ffffff").set("stroke", MUTED).set("stroke-dasharray", "4 3")
        } else {
            let fill = FILLS[color % FILLS.len()];
            color += 1;
            place.set("fill", fill).set("stroke", "#ffffff")
        };
        drawing.append(range.add(tip(&item.tip)));
        let label = format!("{} {}", item.name, (unit.text)(item.size));
        let name = if width > 6.8 * label.len() as f64 {
            label
        } else if width > 7.5 * item.name.len() as f64 {
            item.name.clone()
        } else {
            continue;
        };
        let place = (x + width / 2.0, y + height / 2.0 + 4.0);
        drawing.append(centered(place, name).set("pointer-events", "none"));
    }
    let free = limit.saturating_sub(used);
    if f64::from(free) / full > 0.07 {
        let place = ((x_of(used) + x_of(limit)) / 2.0, TOP + LANE / 2.0 + 4.0);
        let free = if unit.divisor > 1.0 {
            format!("{:.1} KiB", f64::from(free) / unit.divisor)
        } else {
            free.to_string()
        };
        drawing.append(centered(place, format!("free {free}")).set("fill", MUTED));
    }
    axis(&mut drawing, bottom + 4.0, full / unit.divisor, unit.step, unit.name);
    limit_line(&mut drawing, x_of(limit), bottom, &format!("limit {}", (unit.text)(limit)));
    drawing.to_string()
}

fn smem_table(plan: &SmemPlan) -> String {
    let mut rows = String::new();
    for b in &plan.buffers {
        let alias = b.alias_of.as_deref().map_or(String::new(), |owner| format!("reuses {}", escape(owner)));
        writeln!(
            rows,
            "<tr><td><code>{}</code></td><td class=\"n\">{}</td><td class=\"n\">{}</td><td \
             class=\"n\">{}</td><td>{alias}</td></tr>",
            escape(&b.name),
            b.offset,
            b.size,
            b.align
        )
        .expect("writing to a string cannot fail");
    }
    format!(
        "<table style=\"margin-top:10px\">\n<tr><th>Buffer</th><th class=\"n\">Offset (B)</th><th \
         class=\"n\">Size (B)</th>\
         <th class=\"n\">Alignment (B)</th><th></th></tr>\n{rows}<tr><td>total</td><td></td><td \
         class=\"n\">{}</td><td></td><td></td>\
         </tr>\n</table>\n",
        plan.total
    )
}

/// Registers by use against `limit`.
pub fn registers(parts: &[(&'static str, u32)], limit: u32) -> String {
    let total: u32 = parts.iter().map(|(_, n)| n).sum();
    let full = f64::from(limit.max(total));
    let x_of = |n: u32| LEFT + WIDTH * f64::from(n) / full;
    let bottom = TOP + LANE;
    let mut drawing = diagram(WIDTH + 3.0 * LEFT + 30.0, bottom + 34.0, "Register budget");
    drawing.append(whole(limit, full, format!("{limit} registers per thread")));
    let mut begin = 0;
    for (i, (name, n)) in parts.iter().enumerate() {
        let (x, width) = (x_of(begin), x_of(begin + n) - x_of(begin));
        let fill = FILLS[i % FILLS.len()];
        let part = rect([x, TOP, width, LANE]).set("fill", fill).set("stroke", "#ffffff");
        drawing.append(part.add(tip(format!("{}: {n}", meaning(name)))));
        let label = if width > 60.0 { format!("{name} {n}") } else { n.to_string() };
        let place = (x + width / 2.0, TOP + LANE / 2.0 + 4.0);
        drawing.append(centered(place, label).set("pointer-events", "none"));
        begin += n;
    }
    let free = limit.saturating_sub(total);
    if f64::from(free) / full > 0.05 {
        let x = (x_of(total) + x_of(limit)) / 2.0;
        drawing.append(centered((x, TOP + LANE / 2.0 + 4.0), format!("free {free}")).set("fill", MUTED));
    }
    axis(&mut drawing, bottom + 4.0, full, 32.0, "registers");
    limit_line(&mut drawing, x_of(limit), bottom, &format!("limit {limit}"));
    let names: Vec<String> =
        parts.iter().map(|(name, n)| format!("{name}: {} ({n})", meaning(name))).collect();
    format!("{drawing}\n<p class=\"note\" style=\"margin-top:6px\">{}</p>\n", escape(&names.join("; ")))
}

fn meaning(part: &str) -> &str {
    match part {
        "S" => "score accumulators",
        "P" => "probabilities as operands",
        "O" => "output accumulators",
        "Q" => "query fragments",
        _ => "addresses, row statistics, loop state",
    }
}

/// All of a memory, behind what is in it.
fn whole(limit: u32, full: f64, about: String) -> Rectangle {
    let place = [LEFT, TOP, WIDTH * f64::from(limit) / full, LANE];
    rect(place).set("fill", "#f6f7f9").set("stroke", RULE).add(tip(about))
}

fn axis(drawing: &mut SVG, y: f64, full: f64, step: f64, unit: &str) {
    let mut tick = 0.0;
    while tick <= full {
        let x = LEFT + WIDTH * tick / full;
        drawing.append(line([x, y - 4.0, x, y + 2.0]).set("stroke", MUTED));
        let place = (x, y + 15.0);
        let label = if tick == 0.0 {
            text(place, format!("0 {unit}"))
        } else {
            centered(place, format!("{tick:.0}"))
        };
        drawing.append(label.set("fill", MUTED).set("font-size", 11));
        tick += step;
    }
}

fn limit_line(drawing: &mut SVG, x: f64, bottom: f64, name: &str) {
    drawing.append(line([x, TOP - 8.0, x, bottom]).set("stroke", LIMIT).set("stroke-width", 2));
    drawing.append(ending((x + 1.0, TOP - 14.0), name).set("fill", INK).set("font-weight", 600));
}
