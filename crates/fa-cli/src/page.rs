//! The page that `fa plan --report` writes: one HTML file that needs nothing else.

mod banks;
mod memory;
mod rates;
mod tiles;

use std::fmt::Write;

use crate::attention;
use crate::draw::diagram::escape;
use crate::plan::tried::{Fit, Shown, bytes, kib};
use crate::term::output::si;
use fa_planner::report::{LimitReport, Planned, Tried};

const STYLE: &str = "
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f7f9; color: #1f2430; line-height: 1.5;
  font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 0 0 4px; }
p { margin: 0 0 12px; max-width: 80ch; }
.lead, .note { color: #5b6372; }
.note { font-size: 13.5px; }
.warning { background: #fff4d6; border: 1px solid #d9a800; border-radius: 8px; padding: 10px 14px; \
margin-top: 16px; }
section { background: #fff; border: 1px solid #d8dce3; border-radius: 8px; padding: 20px 24px; margin-top: \
20px; }
.scroll { overflow-x: auto; }
svg { display: block; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(138px, 1fr)); gap: 10px; margin-top: \
20px; }
.card { background: #fff; border: 1px solid #d8dce3; border-radius: 8px; padding: 12px 14px; }
.card b { display: block; font-size: 17px; white-space: nowrap; line-height: 1.3; font-variant-numeric: \
tabular-nums; }
.card span { color: #5b6372; font-size: 13px; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { text-align: left; color: #5b6372; font-weight: 600; border-bottom: 1px solid #b9c0cb; }
td, th { padding: 4px 18px 4px 0; white-space: nowrap; vertical-align: top; }
tr + tr td { border-top: 1px solid #eceef2; }
td.n, th.n { text-align: right; }
td.w { white-space: normal; }
code { font: 13px ui-monospace, 'Cascadia Mono', 'Liberation Mono', monospace; }
.pair { display: flex; flex-wrap: wrap; gap: 8px 40px; }
footer { margin-top: 24px; color: #5b6372; font-size: 13px; }
";

/// The whole page.
///
/// # Errors
/// When the planner cannot predict the other sequence lengths.
pub fn page(planned: &Planned) -> anyhow::Result<String> {
    let limits = planned.arch.limits();
    let title = format!("Attention plan: head dim {} on {}", head_dims(planned), planned.arch);
    let mut body = String::new();
    write!(
        body,
        "<h1>{}</h1>\n<p class=\"lead\">{}<br>{} ({}): {} SMs at {} GHz, {} dense 16-bit, {} device \
         memory</p>\n",
        escape(&title),
        escape(&attention::describe(&planned.problem)),
        planned.arch,
        escape(limits.board),
        limits.sms,
        limits.clock_ghz,
        si(limits.peak_tensor_flops(), "FLOP/s"),
        si(limits.hbm_bytes_per_s, "B/s"),
    )?;
    if let Some(no_kernel) = planned.no_kernel() {
        writeln!(body, "<p class=\"warning\"><b>Note:</b> {}.</p>", escape(&no_kernel))?;
    }
    if let Some(forward) = &planned.forward {
        forward_sections(&mut body, planned, forward)?;
    }
    if let Some(backward) = &planned.backward {
        let about = format!(
            "The backward's candidates by the SM90 block size guide's model: in each cell how many of the \
             layouts of that tile fit, the guide's first choice framed. The planner's by predicted time: {}.",
            backward.tried.best().map_or("none".to_owned(), |best| best.name)
        );
        if backward.guide.is_some() {
            section(&mut body, "Backward tiles", &about, &tiles::backward_map(&planned.problem)?);
        }
        let fits = backward.tried.fits();
        if !fits.is_empty() {
            section(&mut body, "The best backward kernels", "By predicted time.", &ranking(&fits, planned));
        }
    }
    Ok(format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
         content=\"width=device-width, \
         initial-scale=1\">\n<title>{}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n\
         <main>\n{body}<footer>Written by fa {}. Times and rates are predictions of the planner's cost \
         model.</footer>\n\
         </main>\n</body>\n</html>\n",
        escape(&title),
        env!("CARGO_PKG_VERSION"),
    ))
}

fn head_dims(planned: &Planned) -> String {
    let (qk, v) = (planned.problem.head_dim, planned.problem.head_dim_v);
    if qk == v { qk.to_string() } else { format!("{qk}-{v}") }
}

fn section(body: &mut String, title: &str, about: &str, content: &str) {
    write!(
        body,
        "<section>\n<h2>{}</h2>\n<p class=\"note\">{}</p>\n<div \
         class=\"scroll\">\n{content}</div>\n</section>\n",
        escape(title),
        escape(about)
    )
    .expect("writing to a string cannot fail");
}

fn forward_sections(body: &mut String, planned: &Planned, forward: &Tried) -> anyhow::Result<()> {
    let (fits, limits) = (forward.fits(), planned.arch.limits());
    let Some(best) = fits.first() else {
        section(
            body,
            "Nothing fits",
            "Every candidate breaks a limit; the nearest miss of each:",
            &misses(forward),
        );
        section(body, "Tiles", tiles::ABOUT, &tiles::forward_map(forward));
        return Ok(());
    };
    body.push_str(&cards(planned, best));
    section(body, "Tiles", tiles::ABOUT, &(tiles::forward_map(forward) + &misses(forward)));
    section(
        body,
        "Shared memory of the best kernel",
        "One block's buffers to scale, against what a block may use. Buffers in the lower lane reuse the \
         memory above them.",
        &memory::smem(best.smem, limits.smem_per_block),
    );
    if let Tried::Sm100(set) = forward
        && let Some(plan) = set.plans.first()
    {
        let about = "Columns of 32 bits on 128 lanes: scores, probabilities and outputs of the query tiles \
                     of one block.";
        section(
            body,
            "Tensor memory of the best shape",
            about,
            &memory::tmem(&plan.tmem, limits.tmem_columns),
        );
    }
    if !best.regs.is_empty() {
        let about = format!("Registers of a thread that computes, against its budget. {}", best.roles);
        section(body, "Register budget", about.trim_end(), &memory::registers(&best.regs, best.reg_limit));
    }
    section(body, "Bank conflicts", banks::ABOUT, &banks::of_best(best.tile_n, best.head_dim)?);
    section(body, "Where the time goes", rates::ABOUT_TERMS, &rates::terms(best.cost));
    section(body, "Predicted rate by sequence length", rates::ABOUT_SWEEP, &rates::sweep(planned, forward)?);
    section(body, "The best kernels", "By predicted time.", &ranking(&fits, planned));
    Ok(())
}

fn cards(planned: &Planned, best: &Fit) -> String {
    let limits = planned.arch.limits();
    let share = 100.0 * best.cost.tflops * 1e12 / limits.peak_tensor_flops();
    let regs: u32 = best.regs.iter().map(|(_, n)| n).sum();
    let mut cards = vec![
        (format!("{} x {}", best.tile_m, best.tile_n), "tile: queries x keys".to_owned()),
        (si(best.cost.seconds, "s"), "predicted time".to_owned()),
        (format!("{:.0} TFLOP/s", best.cost.tflops), format!("predicted, {share:.0} % of the board's peak")),
        (rates::resource(best.cost.bottleneck).to_owned(), "what it waits for most".to_owned()),
        (
            format!("{:.1} KiB", kib(best.smem.total)),
            format!("shared memory of {} KiB", kib(limits.smem_per_block)),
        ),
    ];
    if regs > 0 {
        cards.push((regs.to_string(), format!("registers of {} per thread", best.reg_limit)));
    }
    let waves = best.cost.tiles / best.cost.slots;
    cards.push((
        format!("{waves:.2}"),
        format!("waves: {} tiles on {} slots", best.cost.tiles, best.cost.slots),
    ));
    let card = |(value, name): &(String, String)| {
        format!("<div class=\"card\"><b>{}</b><span>{}</span></div>\n", escape(value), escape(name))
    };
    let cards: String = cards.iter().map(card).collect();
    format!(
        "<div class=\"cards\">\n{cards}</div>\n<p class=\"note\" style=\"margin-top:10px\">{}: \
         <code>{}</code></p>\n",
        escape(&best.knobs),
        escape(&best.name)
    )
}

fn misses(forward: &Tried) -> String {
    let limits = forward.limits();
    if limits.is_empty() {
        return String::new();
    }
    let row = |LimitReport { limit, count, nearest, reason }: &LimitReport| {
        format!(
            "<tr><td>{}</td><td class=\"n\">{count}</td><td><code>{}</code></td><td \
             class=\"w\">{}</td></tr>\n",
            escape(limit),
            escape(nearest),
            escape(&reason.to_string())
        )
    };
    let rows: String = limits.iter().map(row).collect();
    format!(
        "<table style=\"margin-top:12px\">\n<tr><th>Limit</th><th class=\"n\">Rejected</th><th>Nearest \
         miss</th><th>Why</th></tr>\n\
         {rows}</table>\n"
    )
}

fn ranking(fits: &[Fit], planned: &Planned) -> String {
    const SHOWN: usize = 12;
    let peak = planned.arch.limits().peak_tensor_flops() / 1e12;
    let mut rows = String::new();
    for (rank, fit) in fits.iter().take(SHOWN).enumerate() {
        let regs: u32 = fit.regs.iter().map(|(_, n)| n).sum();
        let regs = if regs > 0 { format!("{regs} / {}", fit.reg_limit) } else { "-".to_owned() };
        writeln!(
            rows,
            "<tr><td class=\"n\">{}</td><td class=\"n\">{} x {}</td><td>{}</td><td class=\"n\">{regs}</td>\
             <td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{:.0}</td>\
             <td class=\"n\">{:.0} %</td><td>{}</td></tr>",
            rank + 1,
            fit.tile_m,
            fit.tile_n,
            escape(&fit.knobs),
            bytes(fit.smem.total),
            fit.blocks_per_sm,
            si(fit.cost.seconds, "s"),
            fit.cost.tflops,
            100.0 * fit.cost.tflops / peak,
            rates::resource(fit.cost.bottleneck),
        )
        .expect("writing to a string cannot fail");
    }
    let more = fits.len().saturating_sub(SHOWN);
    let more =
        if more > 0 { format!("<p class=\"note\">and {more} more that fit</p>\n") } else { String::new() };
    format!(
        "<table>\n<tr><th class=\"n\">#</th><th class=\"n\">Tile</th><th>Knobs</th><th \
         class=\"n\">Registers</th>\
         <th class=\"n\">SMEM</th><th class=\"n\">Blocks/SM</th><th class=\"n\">Time</th><th \
         class=\"n\">TFLOP/s</th>\
         <th class=\"n\">Of peak</th><th>Waits for</th></tr>\n{rows}</table>\n{more}"
    )
}
