//! What a kernel takes of an SM: shared memory, tensor memory, registers of a thread and by role.

use std::fmt::Write;

use fa_core::Kernel;
use fa_planner::kernels::sm100_fwd::{Sm100Tile, TmemPlan, account};
use fa_planner::report::Tried;
use fa_planner::smem::SmemPlan;

use crate::draw::diagram::escape;
use crate::page::timeline::bar_labels;
use crate::page::view::View;
use crate::plan::tried::{Fit, Shape, bytes, kib};

const INTO_STRING: &str = "writing to a string cannot fail";
/// Fills of a bar's parts.
const FILLS: usize = 6;

/// A range of a memory.
struct Item {
    name: String,
    begin: u32,
    size: u32,
    tip: String,
}

/// A part of a bar, with the longest of some labels that its width has room for; labels from long to short.
pub(crate) fn part(class: &str, width: f64, labels: &[&str], tip: &str) -> String {
    let labels: Vec<&str> = labels.iter().rev().copied().collect();
    format!(
        "<span class=\"{class}\" style=\"width:{width:.3}%\" tabindex=\"0\" data-tip=\"{}\">{}</span>",
        escape(tip),
        bar_labels(&labels)
    )
}

/// Items to scale in one lane, those that reuse memory in lanes below.
fn lanes(items: &[(Item, bool)], limit: u32, text: fn(u32) -> String, unit: &str) -> String {
    let used = items.iter().map(|(item, _)| item.begin + item.size).max().unwrap_or(0);
    let full = f64::from(limit.max(used));
    let share = |amount: u32| 100.0 * f64::from(amount) / full;
    let lane = |reusing: bool, class: &str| {
        let (mut html, mut at, mut color) = (format!("<div class=\"bar{class}\">"), 0, 0);
        for (item, _) in items.iter().filter(|(_, alias)| *alias == reusing) {
            if item.begin > at {
                let gap = item.begin - at;
                html += &part("gap", share(gap), &[], &format!("{} not used here", text(gap)));
            }
            let label = format!("{} {}", item.name, text(item.size));
            html += &part(&format!("p{}", color % FILLS), share(item.size), &[&label, &item.name], &item.tip);
            color += 1;
            at = at.max(item.begin + item.size);
        }
        let free = limit.saturating_sub(at);
        if !reusing && free > 0 {
            html += &part("gap", share(free), &[&format!("free {}", text(free)), "free"], &text(free));
        }
        html + "</div>\n"
    };
    let mut html = lane(false, "");
    if items.iter().any(|(_, alias)| *alias) {
        html += &lane(true, " low");
    }
    writeln!(
        html,
        "<div class=\"scale\"><span>0</span><span>{} of {unit} used</span><span>limit {}</span></div>",
        text(used),
        text(limit)
    )
    .expect(INTO_STRING);
    html
}

/// The buffers of a block against `limit` bytes, as a drawing and a table.
pub(crate) fn smem(plan: &SmemPlan, limit: u32) -> String {
    let mut items: Vec<(Item, bool)> = plan
        .buffers
        .iter()
        .map(|b| {
            let reuse = b.alias_of.as_ref().map_or(String::new(), |owner| format!(", reuses {owner}"));
            let tip = format!("{}: {} at {}, aligned to {}{reuse}", b.name, bytes(b.size), b.offset, b.align);
            (Item { name: b.name.to_string(), begin: b.offset, size: b.size, tip }, b.alias_of.is_some())
        })
        .collect();
    // The end of the last buffer, up to what is asked for in whole.
    let used = items.iter().map(|(item, _)| item.begin + item.size).max().unwrap_or(0);
    let rest = plan.total.saturating_sub(used);
    if rest > 0 {
        let tip = format!("{} to the multiple that a block asks for", bytes(rest));
        items.push((Item { name: "rounding".to_owned(), begin: used, size: rest, tip }, false));
    }
    lanes(&items, limit, bytes_short, "shared memory") + &smem_table(plan)
}

/// Bytes with one digit after the point.
fn bytes_short(n: u32) -> String {
    if n < 1024 {
        bytes(n)
    } else if n.is_multiple_of(1024) {
        format!("{} KiB", n / 1024)
    } else {
        format!("{:.1} KiB", kib(n))
    }
}

/// The tensor memory of a block.
pub(crate) fn tmem(plan: &TmemPlan, columns: u32) -> String {
    let items: Vec<(Item, bool)> = plan
        .regions
        .iter()
        .map(|r| {
            let reuse = r.alias_of.map_or(String::new(), |owner| format!(", reuses {owner}"));
            let tip = format!("{}: {} columns from {}{reuse}", r.name, r.columns, r.begin);
            (Item { name: r.name.to_owned(), begin: r.begin, size: r.columns, tip }, r.alias_of.is_some())
        })
        .collect();
    lanes(&items, columns, |n| n.to_string(), "columns")
}

fn smem_table(plan: &SmemPlan) -> String {
    let mut rows = String::new();
    for b in &plan.buffers {
        let alias = b.alias_of.as_deref().map_or(String::new(), |owner| format!("reuses {}", escape(owner)));
        writeln!(
            rows,
            "<tr><td class=\"about\"><code>{}</code></td><td class=\"n\">{}</td><td class=\"n\">{}</td><td \
             class=\"n\">{}</td><td>{alias}</td></tr>",
            escape(&b.name),
            b.offset,
            b.size,
            b.align
        )
        .expect(INTO_STRING);
    }
    format!(
        "<details><summary>Buffers, offsets and alignment</summary>\n<div class=\"scroll\" \
         tabindex=\"0\"><table class=\"sorts stacks\">\n<tr><th>Buffer</th>\
         <th class=\"n\">Offset (B)</th><th class=\"n\">Size \
         (B)</th><th class=\"n\">Alignment (B)</th><th></th></tr>\n{rows}\
         <tfoot><tr><td>total</td><td></td><td \
         class=\"n\">{}</td><td></td><td></td></tr></tfoot>\n</table></div></details>\n",
        plan.total
    )
}

/// Registers by use against what a thread may have, and the register file by role.
pub(crate) fn registers(view: &View, fit: &Fit) -> String {
    let mut html = String::new();
    if !fit.regs.is_empty() {
        let total: u32 = fit.regs.iter().map(|(_, n)| n).sum();
        let full = f64::from(fit.reg_limit.max(total));
        let share = |n: u32| 100.0 * f64::from(n) / full;
        html += "<div class=\"bar\">";
        for (index, (name, n)) in fit.regs.iter().enumerate() {
            let tip = format!("{name}: {n}, {}", meaning(name));
            let label = format!("{name} {n}");
            html += &part(&format!("p{}", index % FILLS), share(*n), &[&label, &n.to_string()], &tip);
        }
        let free = fit.reg_limit.saturating_sub(total);
        if free > 0 {
            html += &part("gap", share(free), &[&format!("free {free}"), &free.to_string()], "free");
        }
        let names: Vec<String> =
            fit.regs.iter().map(|(name, n)| format!("{name}: {} ({n})", meaning(name))).collect();
        write!(
            html,
            "</div>\n<div class=\"scale\"><span>0</span><span>{total} predicted</span><span>limit \
             {}</span></div>\n<p class=\"note\">{}.</p>\n",
            fit.reg_limit,
            escape(&names.join("; "))
        )
        .expect(INTO_STRING);
    }
    html + &register_file(view, fit)
}

/// The registers of an SM by role: threads times registers.
fn register_file(view: &View, fit: &Fit) -> String {
    let all = view.limits().regs_per_sm;
    let own = match fit.shape {
        Shape::Kernel(spec) => match &spec.kernel {
            Kernel::Sm100Fwd(own) => Some(account::roles(&Sm100Tile::of(spec, own))),
            Kernel::Sm80Fwd(_)
            | Kernel::Sm80Bwd(_)
            | Kernel::Sm90Fwd(_)
            | Kernel::Sm90FwdFp8(_)
            | Kernel::Sm90Wide(_)
            | Kernel::Sm90Bwd(_) => None,
        },
        Shape::Sm100(plan) => Some(plan.roles.clone()),
    };
    let roles: Vec<(String, u32, u32)> = match (own, fit.shape) {
        (Some(roles), _) => {
            roles.iter().map(|role| (role.name.to_owned(), 32 * role.warps, role.regs)).collect()
        }
        (None, Shape::Sm100(_)) => Vec::new(),
        (None, Shape::Kernel(spec)) => {
            let Tried::Kernels(set) = view.tried else { return String::new() };
            let Some(plan) = set.plans.iter().find(|plan| plan.spec == *spec) else { return String::new() };
            match plan.regs.setmaxnreg {
                Some(split) => {
                    let last = split.follower.map(|regs| ("follower".to_owned(), 128, regs));
                    let others = fit.threads - 128 - last.as_ref().map_or(0, |last| last.1);
                    let first = [
                        ("producer".to_owned(), 128, split.producer),
                        ("warpgroups that compute".to_owned(), others, split.mma),
                    ];
                    first.into_iter().chain(last).collect()
                }
                None => {
                    let regs: u32 = fit.regs.iter().map(|(_, n)| n).sum();
                    (0..fit.blocks_per_sm).map(|cta| (format!("CTA {cta}"), fit.threads, regs)).collect()
                }
            }
        }
    };
    let mut html = String::from("<div class=\"bar\" style=\"height:30px\">");
    let mut used = 0;
    for (index, (name, threads, regs)) in roles.iter().enumerate() {
        let taken = threads * regs;
        used += taken;
        let tip = format!("{name}: {threads} threads of {regs} registers");
        let label = format!("{name} {threads} x {regs}");
        html += &part(
            &format!("p{}", index % FILLS),
            100.0 * f64::from(taken) / f64::from(all),
            &[&label, name, &regs.to_string()],
            &tip,
        );
    }
    let free = all.saturating_sub(used);
    if free > all / 200 {
        let width = 100.0 * f64::from(free) / f64::from(all);
        html += &part("gap", width, &["free"], &format!("{free} registers of the SM are free"));
    }
    let lines: Vec<String> = roles
        .iter()
        .map(|(name, threads, regs)| format!("{name}: {threads} threads x {regs} registers"))
        .collect();
    format!(
        "{html}</div>\n<div class=\"scale\"><span>0</span><span>register file by role</span><span>{all} \
         registers</span></div>\n<p class=\"note\">{}.</p>\n",
        escape(&lines.join("; "))
    )
}

fn meaning(part: &str) -> &str {
    match part {
        "S" => "score accumulators",
        "P" => "probabilities as operands",
        "O" => "output accumulators",
        "Q" => "query fragments",
        "S and dP, then dQ" => "accumulators of a step",
        "dK and dV" => "accumulators of all steps",
        _ => "addresses, row statistics, loop state",
    }
}
