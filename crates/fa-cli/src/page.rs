//! The page that `fa plan --report` writes: one HTML file that needs nothing else. Its one
//! script sorts tables; without it they stand in their own order.

mod banks;
mod chart;
mod events;
mod measured;
mod memory;
mod rates;
mod tiles;
mod timeline;
mod view;

use std::fmt::Write;

use fa_core::{Arch, Family, Pass, counted};
use fa_lab::record;

use crate::attention;
use crate::draw::diagram::escape;
use crate::plan::splits;
use crate::plan::tried::{Fit, Shape, Shown, bytes, kib};
use crate::term::output::{plain, si};
use fa_planner::report::{LimitReport, Planned, Tried};

pub(crate) use events::Emulated;
pub(crate) use measured::Records;
use view::{Unit, View, data};

const STYLE: &str = include_str!("page/style.css");
const SORT: &str = include_str!("page/sort.js");
const INTO_STRING: &str = "writing to a string cannot fail";

/// What a page shows beside the plan.
#[derive(Default)]
pub(crate) struct Beside {
    /// Measurements to compare with.
    pub records: Option<Records>,
    /// The answer to `--why`.
    pub why: Option<String>,
    /// Steps of the first choices as the emulation went through them.
    pub emulated: Option<Emulated>,
}

/// The whole page.
///
/// # Errors
/// When the planner cannot predict the other sequence lengths.
pub(crate) fn page(planned: &Planned, beside: &Beside) -> anyhow::Result<String> {
    let limits = planned.limits();
    let passes = match (&planned.forward, &planned.backward) {
        (Some(_), Some(_)) => "forward and backward, ",
        (None, Some(_)) => "backward, ",
        (_, None) => "forward, ",
    };
    let title = format!("Attention plan: {passes}head dim {} on {}", head_dims(planned), planned.arch);
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
    let made =
        format!("{}, commit {}", record::utc_now(), record::COMMIT.get(..12).unwrap_or(record::COMMIT));
    writeln!(body, "<p class=\"note\"><code>{}</code><br>{made}</p>", escape(&record::command_line()))?;
    let mut views = Vec::new();
    if let Some(forward) = &planned.forward {
        views.push(View::new(planned, Pass::Forward, forward, false)?);
    }
    if let Some(backward) = &planned.backward {
        // As deterministic as what was asked for: so are the kernels.
        let pass = match backward.tried.best().map(|best| best.shape) {
            Some(Shape::Kernel(spec)) => spec.kernel.pass(),
            Some(Shape::Sm100(_)) | None => Pass::BACKWARD,
        };
        views.push(View::new(planned, pass, &backward.tried, backward.guide.is_some())?);
    }
    let mut notes: Vec<String> = planned.never_run().into_iter().collect();
    notes.extend(views.iter().filter_map(|view| never_ran(view, beside.records.as_ref())));
    for note in notes {
        writeln!(body, "<p class=\"warning\"><b>Note:</b> {}.</p>", escape(&note))?;
    }
    if let Some(why) = &beside.why {
        let mut grid = String::new();
        let text =
            format!("<pre style=\"white-space:pre-wrap;overflow-wrap:anywhere\">{}</pre>", escape(why));
        section(&mut grid, "Why", "What became of the candidates that --why asks about.", &text, true);
        write!(body, "<div class=\"grid\">{grid}</div>")?;
    }
    let mut styles = String::new();
    for view in &views {
        if views.len() > 1 {
            let part = if view.backward() { "Backward" } else { "Forward" };
            writeln!(body, "<h2 class=\"part\">{part}</h2>")?;
        }
        pass_sections(&mut body, &mut styles, view, beside)?;
    }
    Ok(format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
         content=\"width=device-width, \
         initial-scale=1\">\n<title>{}</title>\n<style>\n{STYLE}{styles}</style>\n\
         <script type=\"module\">\n{SORT}</script>\n</head>\n\
         <body>\n<main>\n{body}<footer>Written by fa {}, {made}. Times and \
         rates are predictions of the \
         planner's cost model but where they are called measured.</footer>\n</main>\n</body>\n</html>\n",
        escape(&title),
        env!("CARGO_PKG_VERSION"),
    ))
}

fn head_dims(planned: &Planned) -> String {
    let (qk, v) = (planned.problem.head_dim, planned.problem.head_dim_v);
    if qk == v { qk.to_string() } else { format!("{qk}-{v}") }
}

/// That nothing shows the first choice to have run on such a GPU, where that is so.
fn never_ran(view: &View, records: Option<&Records>) -> Option<String> {
    let (best, records, arch) = (view.fits.first()?, records?, view.planned.arch);
    let Shape::Kernel(spec) = best.shape else { return None };
    if records.ran(&best.name, arch) {
        return None;
    }
    let others: Vec<&str> = Arch::ALL
        .iter()
        .filter(|other| **other != arch && records.ran(&best.name, **other))
        .map(|other| other.name())
        .collect();
    let shipped = fa_kernels::specs::shipped().unwrap_or_default();
    let shipped = shipped
        .iter()
        .find(|file| file.shipped.spec == *spec && file.shipped.archs.contains(&arch))
        .map(|file| format!(", ships as {} (compiled and emulated)", file.path));
    let ran =
        if others.is_empty() { String::new() } else { format!("; it has run on {}", others.join(", ")) };
    Some(format!(
        "no record has {} on {arch}: it is planned{}, and nothing here shows that it has run on such a \
         GPU{ran}",
        best.name,
        shipped.unwrap_or_default()
    ))
}

fn section(grid: &mut String, title: &str, about: &str, content: &str, wide: bool) {
    write!(
        grid,
        "<section{}>\n<h2>{}</h2>\n<p class=\"note\">{}</p>\n{content}</section>\n",
        if wide { " class=\"wide\"" } else { "" },
        escape(title),
        escape(about)
    )
    .expect(INTO_STRING);
}

fn pass_sections(body: &mut String, styles: &mut String, view: &View, beside: &Beside) -> anyhow::Result<()> {
    let (limits, records) = (view.limits(), beside.records.as_ref());
    let (map, chosen) = tiles::map(view);
    styles.push_str(&chosen);
    let tiles_title = if view.backward() { "Backward tiles" } else { "Tiles" };
    let mut grid = String::new();
    let Some(best) = view.fits.first() else {
        let about = "Every candidate breaks a limit; the nearest miss of each:";
        section(&mut grid, "Nothing fits", about, &misses(view.tried), true);
        section(&mut grid, tiles_title, &tiles::about(view), &map, true);
        write!(body, "<div class=\"grid\">\n{grid}</div>\n")?;
        return Ok(());
    };
    body.push_str(&cards(view, best));
    section(&mut grid, tiles_title, &tiles::about(view), &(map + &misses(view.tried)), true);
    let steps = timeline::steps(view, best);
    match &beside.emulated {
        None => {
            let how = format!("<p class=\"note\">{}</p>\n", escape(events::HOW));
            section(&mut grid, "A steady step", timeline::ABOUT, &(steps + &how), true);
        }
        Some(emulated) => {
            section(&mut grid, "A steady step", timeline::ABOUT, &steps, true);
            let own = if view.backward() { &emulated.backward } else { &emulated.forward };
            let shown = own.as_ref().map_or_else(
                || "<p>The problem's loop is too short to have steady steps.</p>\n".to_owned(),
                events::steps,
            );
            section(&mut grid, "A steady step, emulated", events::ABOUT, &shown, true);
        }
    }
    let measured = records.map_or(Vec::new(), |records| records.of(view));
    let sweep = rates::sweep(view)?;
    section(&mut grid, "Where the time goes", rates::ABOUT_TERMS, &rates::terms(best.cost), false);
    section(&mut grid, "Waves", "How full the last one is.", &rates::waves(best.cost), false);
    let by_length = rates::by_length(view, &sweep, &measured);
    section(&mut grid, "Predicted rate by sequence length", rates::ABOUT_SWEEP, &by_length, false);
    let roofline = rates::roofline(view, best, &sweep, &measured);
    section(&mut grid, "Roofline", rates::ABOUT_ROOFLINE, &roofline, false);
    if let Some(records) = records {
        section(&mut grid, "Predicted and measured", measured::ABOUT, &records.table(view), true);
    }
    section(
        &mut grid,
        "Shared memory of the best kernel",
        "One block's buffers to scale, against what a block may use. Buffers in the lower lane reuse the \
         memory above them.",
        &memory::smem(best.smem, limits.smem_per_block),
        false,
    );
    let roles = if best.roles.is_empty() { String::new() } else { format!("; {}", best.roles) };
    let about = format!("Registers of a thread that computes, against its budget{roles}.");
    let mut registers = memory::registers(view, best);
    if let Some((regs, spills)) = records.and_then(|r| r.compiled(&best.name, view.planned.arch)) {
        let launched = match best.shape {
            Shape::Kernel(spec) if spec.kernel.family() == Family::Sm90 => " as launched, before setmaxnreg",
            Shape::Kernel(_) | Shape::Sm100(_) => "",
        };
        let line = format!("Compiled, by a record: {regs} registers{launched}, {spills} bytes spilled.");
        writeln!(registers, "<p>{line}</p>")?;
    }
    section(&mut grid, "Register budget", about.trim_end(), &registers, false);
    match best.shape {
        Shape::Sm100(plan) => {
            let about = "Columns of 32 bits on 128 lanes: scores, probabilities and outputs of the query \
            tiles \
                         of one block.";
            let map = memory::tmem(&plan.tmem, limits.tmem_columns);
            section(&mut grid, "Tensor memory of the best shape", about, &map, false);
        }
        Shape::Kernel(spec) => {
            section(&mut grid, "Bank conflicts", banks::ABOUT, &banks::of_kernel(spec)?, true);
        }
    }
    let title = if view.backward() { "The best backward kernels" } else { "The best kernels" };
    section(&mut grid, title, "By predicted time.", &ranking(view), true);
    write!(body, "<div class=\"grid\">\n{grid}</div>\n")?;
    Ok(())
}

fn cards(view: &View, best: &Fit) -> String {
    let limits = view.limits();
    let cost = best.cost;
    let regs: u32 = best.regs.iter().map(|(_, n)| n).sum();
    let rate = view.rate(cost);
    let of_peak = 100.0 * rate / view.peak();
    let (across, tile) = if view.backward() {
        ("tile: queries of a step x keys of a block", format!("{} x {}", best.tile_m, best.tile_n))
    } else {
        ("tile: queries x keys", format!("{} x {}", best.tile_m, best.tile_n))
    };
    let mut cards = vec![(escape(&tile), across.to_owned())];
    cards.push((data(cost.seconds, &si(cost.seconds, "s")), "predicted time".to_owned()));
    let exact = if view.unit == Unit::Bytes { cost.bytes_per_s } else { cost.tflops };
    let what = if view.unit == Unit::Bytes { "memory's bandwidth" } else { "board's peak" };
    cards.push((
        data(exact, &format!("{} {}", plain(rate), view.unit_name())),
        format!("predicted, {} % of the {what}", plain(of_peak)),
    ));
    cards.push((escape(rates::resource(cost.bottleneck)), "what it waits for most".to_owned()));
    if let Some((rows, of)) = rates::rows_in_use(view, best) {
        cards.push((data(rows, &format!("{} of {of}", plain(rows))), "rows of a tile in use".to_owned()));
    }
    if view.unit == Unit::Bytes || cost.splits > 1 {
        cards.push((data(cost.splits, &cost.splits.to_string()), "splits: CTAs to a tile's keys".to_owned()));
    }
    cards.push((
        data(best.smem.total, &format!("{:.1} KiB", kib(best.smem.total))),
        format!("shared memory of {} KiB", kib(limits.smem_per_block)),
    ));
    if regs > 0 {
        cards.push((data(regs, &regs.to_string()), format!("registers of {} per thread", best.reg_limit)));
    }
    cards.push((
        data(cost.tiles, &format!("{:.2}", cost.tiles / cost.slots)),
        format!("waves: {} on {:.0} slots", counted(cost.tiles as usize, "tile"), cost.slots),
    ));
    let cards: String = cards
        .iter()
        .map(|(value, name)| {
            format!("<div class=\"card\"><b>{value}</b><span>{}</span></div>\n", escape(name))
        })
        .collect();
    let splits = match view.tried {
        Tried::Kernels(set) => set.plans.first().filter(|_| !view.backward()),
        Tried::Sm100(_) => None,
    };
    let splits =
        splits.and_then(|plan| splits::reason(plan, view.problem(), (view.planned.arch, &view.limits())));
    let splits = splits.map_or(String::new(), |reason| format!("<br>Splits: {}.", escape(&reason)));
    format!(
        "<div class=\"cards\">\n{cards}</div>\n<p class=\"note\" style=\"margin-top:10px\">{}: \
         <code>{}</code>{splits}</p>\n",
        escape(&best.knobs),
        escape(&best.name)
    )
}

fn misses(tried: &Tried) -> String {
    let limits = tried.limits();
    if limits.is_empty() {
        return String::new();
    }
    let row = |LimitReport { limit, count, nearest, reason }: &LimitReport| {
        format!(
            "<tr><td class=\"about\">{}</td><td class=\"n\">{count}</td><td \
             class=\"w\"><code>{}</code></td><td class=\"w\">{}</td></tr>\n",
            escape(limit),
            escape(nearest),
            escape(&reason.to_string())
        )
    };
    let rows: String = limits.iter().map(row).collect();
    format!(
        "<div class=\"scroll\" tabindex=\"0\"><table class=\"sorts stacks\" \
         style=\"margin-top:12px\">\n<tr><th>Limit</th><th \
         class=\"n\">Rejected</th><th class=\"w\">Nearest miss</th><th class=\"w\">Why</th></tr>\n\
         {rows}</table></div>\n"
    )
}

fn ranking(view: &View) -> String {
    const SHOWN: usize = 12;
    let mut rows = String::new();
    for (rank, fit) in view.fits.iter().take(SHOWN).enumerate() {
        let regs: u32 = fit.regs.iter().map(|(_, n)| n).sum();
        let regs = if regs > 0 { format!("{regs} / {}", fit.reg_limit) } else { "-".to_owned() };
        let rate = view.rate(fit.cost);
        writeln!(
            rows,
            "<tr><td class=\"n\">{}</td><td class=\"n\">{} x {}</td><td class=\"w\">{}</td><td \
             class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{} %</td><td>{}</td><td \
             class=\"n\">{regs}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td \
             class=\"n\">{}</td></tr>",
            rank + 1,
            fit.tile_m,
            fit.tile_n,
            escape(&fit.knobs),
            data(fit.cost.seconds, &si(fit.cost.seconds, "s")),
            plain(rate),
            plain(100.0 * rate / view.peak()),
            rates::resource(fit.cost.bottleneck),
            data(fit.smem.total, &bytes(fit.smem.total)),
            fit.blocks_per_sm,
            fit.cost.splits,
        )
        .expect(INTO_STRING);
    }
    let more = view.fits.len().saturating_sub(SHOWN);
    let more =
        if more > 0 { format!("<p class=\"note\">and {more} more that fit</p>\n") } else { String::new() };
    format!(
        "<div class=\"scroll\" tabindex=\"0\"><table class=\"sorts stacks\">\n<tr><th class=\"n\">#</th><th \
         class=\"n\">Tile</th><th class=\"w\">Knobs</th><th class=\"n\">Time</th><th class=\"n\">{}</th><th \
         class=\"n\">Of peak</th><th>Waits for</th><th class=\"n\">Registers</th><th \
         class=\"n\">SMEM</th><th \
         class=\"n\">Blocks/SM</th><th class=\"n\">Splits</th></tr>\n{rows}</table></div>\n{more}",
        view.unit_name()
    )
}
