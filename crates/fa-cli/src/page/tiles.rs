//! The map of tiles: what fits, how fast it is predicted to be, and which limit rejects the rest; and for
//! each cell the account of its kernels.

use std::fmt::Write;

use fa_core::counted;

use crate::draw::diagram::escape;
use crate::page::rates::resource;
use crate::page::view::{Missed, View};
use crate::plan::kernels::Group;
use crate::plan::tried::{Fit, kib};
use crate::term::output::{plain, si};

/// A rejected cell's limit, as a colour and in words, so that neither has to be read alone.
const LIMITS: [(&str, &str); 5] = [
    ("registers", "R: registers over"),
    ("smem", "S: KiB of SMEM over"),
    ("occupancy", "O: blocks per SM got/asked"),
    ("tmem", "T: TMEM columns over"),
    ("other", "no whole instructions, known spills, or another rule"),
];

fn style(kind: &str) -> &'static str {
    LIMITS.iter().find(|(name, _)| *name == kind).map_or("other", |(name, _)| name)
}

/// Shades of cells that fit.
const SHADES: usize = 6;

/// What the map shows.
pub(crate) fn about(view: &View) -> String {
    let across = if view.backward() {
        "key rows of a block across, queries per step down"
    } else {
        "keys per step across"
    };
    format!(
        "Every tile that was tried, {across}. Blue cells fit and hold the predicted {} of the best kernel \
         with that tile; the others break the named limit, by the least amount shown. Choose a cell (or walk \
         with the arrow keys) for its account and its nearest neighbours that fit.",
        view.unit_name()
    )
}

/// A cell of the map.
struct Cell {
    row: usize,
    column: usize,
    /// Its kernels that fit, by rank from 0.
    fits: Vec<usize>,
    missed: Vec<usize>,
}

struct Map<'a> {
    view: &'a View<'a>,
    rows: Vec<Group>,
    /// Rows without a tile that is made of whole instructions.
    shapeless: Vec<Group>,
    columns: Vec<u32>,
    cells: Vec<Cell>,
}

/// The map with the accounts; and the styles that show the account of the chosen cell.
pub(crate) fn map(view: &View) -> (String, String) {
    let mut rows: Vec<Group> = view.fits.iter().map(|fit| fit.group.clone()).collect();
    rows.extend(view.missed.iter().map(|miss| miss.group.clone()));
    rows.sort();
    rows.dedup();
    let (rows, shapeless) = rows.into_iter().partition(|row| {
        let of_row = |miss: &&Missed| miss.group == *row && miss.excess.is_finite();
        view.fits.iter().any(|fit| fit.group == *row) || view.missed.iter().any(|miss| of_row(&miss))
    });
    let mut columns: Vec<u32> = view.fits.iter().map(|fit| fit.tile_n).collect();
    columns.extend(view.missed.iter().map(|miss| miss.tile_n));
    columns.sort_unstable();
    columns.dedup();
    let mut map = Map { view, rows, shapeless, columns, cells: Vec::new() };
    for (row, group) in map.rows.iter().enumerate() {
        for (column, tile_n) in map.columns.iter().enumerate() {
            let fits = view.fits.iter().enumerate().filter(|(_, f)| f.group == *group && f.tile_n == *tile_n);
            let missed =
                view.missed.iter().enumerate().filter(|(_, m)| m.group == *group && m.tile_n == *tile_n);
            let cell = Cell {
                row,
                column,
                fits: fits.map(|(index, _)| index).collect(),
                missed: missed.map(|(index, _)| index).collect(),
            };
            if !cell.fits.is_empty() || !cell.missed.is_empty() {
                map.cells.push(cell);
            }
        }
    }
    map.write()
}

impl Map<'_> {
    fn at(&self, row: usize, column: usize) -> Option<usize> {
        self.cells.iter().position(|cell| (cell.row, cell.column) == (row, column))
    }

    fn rate_of(&self, cell: &Cell) -> Option<f64> {
        cell.fits.first().map(|&rank| self.view.rate(self.view.fits[rank].cost))
    }

    fn nearest(&self, cell: &Cell) -> Option<&Missed> {
        let missed = cell.missed.iter().map(|&index| &self.view.missed[index]);
        missed.min_by(|a, b| a.excess.total_cmp(&b.excess))
    }

    fn write(&self) -> (String, String) {
        let (view, id) = (self.view, self.view.id());
        let rates = || self.cells.iter().filter_map(|cell| self.rate_of(cell));
        let (low, high) = (rates().fold(f64::INFINITY, f64::min), rates().fold(0.0, f64::max));
        let shade = |rate: f64| {
            let share = if high > low { (rate - low) / (high - low) } else { 1.0 };
            ((share * SHADES as f64) as usize).min(SHADES - 1)
        };
        let chosen = self.cells.iter().position(|cell| cell.fits.first() == Some(&0)).unwrap_or(0);
        let (mut html, mut accounts, mut styles) = (String::new(), String::new(), String::new());
        let across = if view.backward() { "tile_n: key rows of a block" } else { "tile_n: keys per step" };
        write!(
            html,
            "<div class=\"pane\" id=\"pane-{id}\" style=\"--n:{}\">\n<div>\n<div class=\"maprow \
             columns\"><div class=\"rowname note\">{across}<span class=\"narrow\"> (upper \
             number)</span></div><div class=\"cells head\">",
            self.columns.len()
        )
        .expect(INTO_STRING);
        for column in &self.columns {
            write!(html, "<span>{column}</span>").expect(INTO_STRING);
        }
        html.push_str("</div></div>\n");
        let mut limits: Vec<&str> = Vec::new();
        for (row, group) in self.rows.iter().enumerate() {
            write!(
                html,
                "<div class=\"maprow\"><div class=\"rowname\">{}</div><div class=\"cells\">",
                escape(&group.label)
            )
            .expect(INTO_STRING);
            for (column, tile_n) in self.columns.iter().enumerate() {
                let Some(index) = self.at(row, column) else {
                    html.push_str("<span class=\"none\"></span>");
                    continue;
                };
                let cell = &self.cells[index];
                let (class, text) = match (self.rate_of(cell), self.nearest(cell)) {
                    (Some(rate), _) => (format!("s{}", shade(rate)), plain(rate)),
                    (None, Some(nearest)) => {
                        let limit = style(nearest.kind);
                        if !limits.contains(&limit) {
                            limits.push(limit);
                        }
                        (format!("k-{limit}"), nearest.short.clone())
                    }
                    (None, None) => continue,
                };
                let best = if cell.fits.first() == Some(&0) { " best" } else { "" };
                let long = if text.len() > 6 { " long" } else { "" };
                let checked = if index == chosen { " checked=\"checked\"" } else { "" };
                write!(
                    html,
                    "<label class=\"cell {class}{best}{long}\"><input type=\"radio\" name=\"cell-{id}\" \
                     id=\"{id}{index}\" aria-label=\"{}, tile_n {tile_n}: {text}\"{checked}/>\
                     <i>{tile_n}</i>{text}</label>",
                    escape(&group.label)
                )
                .expect(INTO_STRING);
                writeln!(styles, "#pane-{id}:has(#{id}{index}:checked) #a{id}{index} {{ display: block; }}")
                    .expect(INTO_STRING);
                self.account(&mut accounts, index);
            }
            html.push_str("</div></div>\n");
        }
        html.push_str(&legend(view, (low, high), &limits));
        if !self.shapeless.is_empty() {
            let rows: Vec<&str> = self.shapeless.iter().map(|group| &*group.label).collect();
            let rows = escape(&rows.join("; "));
            writeln!(html, "<p class=\"note\">No tile of these is made of whole instructions: {rows}.</p>")
                .expect(INTO_STRING);
        }
        write!(html, "</div>\n<div aria-live=\"polite\">\n{accounts}</div>\n</div>\n").expect(INTO_STRING);
        (html, styles)
    }

    /// The account of a cell: of its best kernel, or of the nearest miss.
    fn account(&self, html: &mut String, index: usize) {
        let (view, cell, id) = (self.view, &self.cells[index], self.view.id());
        let first = cell.fits.first().map(|&rank| (rank, &view.fits[rank]));
        writeln!(html, "<div class=\"account\" id=\"a{id}{index}\">").expect(INTO_STRING);
        if let Some((rank, fit)) = first {
            html.push_str(&fit_account(view, rank, fit));
        } else if let Some(nearest) = self.nearest(cell) {
            html.push_str(&miss_account(nearest));
        }
        let neighbours = self.neighbours(cell);
        if !neighbours.is_empty() {
            html.push_str("<p class=\"note\" style=\"margin:0\">Nearest that fit:</p>\n<div class=\"near\">");
            for neighbour in neighbours {
                let other = &self.cells[neighbour];
                let rate = self.rate_of(other).unwrap_or(0.0);
                // Without work there is no rate to compare.
                let own = self.rate_of(cell).filter(|own| *own > 0.0);
                let against =
                    own.map_or(String::new(), |own| format!(", {:+.1} %", 100.0 * (rate / own - 1.0)));
                write!(
                    html,
                    "<label for=\"{id}{neighbour}\">{}, tile_n {}: {} {}{against}</label>",
                    escape(&self.rows[other.row].label),
                    self.columns[other.column],
                    plain(rate),
                    view.unit_name()
                )
                .expect(INTO_STRING);
            }
            html.push_str("</div>\n");
        }
        let rest: Vec<String> = (cell.fits.iter().skip(1).take(5).map(|&rank| {
            let fit = &view.fits[rank];
            format!("{}: {} {}", fit.knobs, plain(view.rate(fit.cost)), view.unit_name())
        }))
        .chain(self.rejected_by(cell))
        .collect();
        if !rest.is_empty() {
            write!(html, "<details><summary>Others with this tile</summary>\n<ul>").expect(INTO_STRING);
            for line in rest {
                write!(html, "<li>{}</li>", escape(&line)).expect(INTO_STRING);
            }
            html.push_str("</ul></details>\n");
        }
        html.push_str("</div>\n");
    }

    /// How many of a cell's candidates each limit rejects.
    fn rejected_by(&self, cell: &Cell) -> Vec<String> {
        let mut counts: Vec<(&str, usize)> = Vec::new();
        for miss in cell.missed.iter().map(|&index| &self.view.missed[index]) {
            match counts.iter_mut().find(|(kind, _)| *kind == miss.kind) {
                Some((_, count)) => *count += 1,
                None => counts.push((miss.kind, 1)),
            }
        }
        counts.iter().map(|(kind, count)| format!("{count} rejected by {kind}")).collect()
    }

    /// The nearest cells with a kernel that fits: to either side in the row, above and below.
    fn neighbours(&self, cell: &Cell) -> Vec<usize> {
        let fits = |index: &usize| !self.cells[*index].fits.is_empty();
        let (columns, rows) = (self.columns.len(), self.rows.len());
        let left = (0..cell.column).rev().find_map(|c| self.at(cell.row, c).filter(fits));
        let right = (cell.column + 1..columns).find_map(|c| self.at(cell.row, c).filter(fits));
        let above = (0..cell.row).rev().find_map(|r| self.at(r, cell.column).filter(fits));
        let below = (cell.row + 1..rows).find_map(|r| self.at(r, cell.column).filter(fits));
        [left, right, above, below].into_iter().flatten().collect()
    }
}

const INTO_STRING: &str = "writing to a string cannot fail";

fn check(text: &mut String, class: &str, line: &str) {
    write!(text, "<li class=\"{class}\">{}</li>", escape(line)).expect(INTO_STRING);
}

fn fit_account(view: &View, rank: usize, fit: &Fit) -> String {
    let limits = view.limits();
    let regs: u32 = fit.regs.iter().map(|(_, n)| n).sum();
    let mut checks = String::new();
    if regs > 0 {
        let parts: Vec<String> = fit.regs.iter().map(|(name, n)| format!("{name} {n}")).collect();
        let line = format!("registers: {regs} of {} per thread ({})", fit.reg_limit, parts.join(" + "));
        check(&mut checks, "yes", &line);
    }
    let smem = format!("shared memory: {} of {} KiB", kib(fit.smem.total), kib(limits.smem_per_block));
    check(&mut checks, "yes", &smem);
    let o = fit.occupancy;
    let per_sm = format!(
        "{} of {} threads per SM (SMEM allows {}, registers {}, threads {})",
        counted(fit.blocks_per_sm as usize, "block"),
        fit.threads,
        o.by_smem,
        o.by_registers,
        o.by_threads
    );
    check(&mut checks, "yes", &per_sm);
    let terms: Vec<String> = fit
        .cost
        .terms
        .named()
        .into_iter()
        .map(|(term, seconds)| format!("{} {}", resource(term), si(seconds, "s")))
        .collect();
    format!(
        "<h3>#{} of {}: <code>{}</code></h3>\n<p>{}. {} at {} {}, waits for {}.</p>\n<ul \
         class=\"checks\">{checks}</ul>\n<p class=\"note\">Alone: {}.</p>\n",
        rank + 1,
        view.fits.len(),
        escape(&fit.name),
        escape(&fit.knobs),
        si(fit.cost.seconds, "s"),
        plain(view.rate(fit.cost)),
        view.unit_name(),
        resource(fit.cost.bottleneck),
        escape(&terms.join(", "))
    )
}

/// The limits in the order in which they are checked, up to the one that is broken.
fn miss_account(miss: &Missed) -> String {
    const ORDER: [(&str, &str); 6] = [
        ("rule", "rules of the kernel, whole instructions"),
        ("registers", "registers"),
        ("spills", "known spills"),
        ("tmem", "tensor memory"),
        ("smem", "shared memory"),
        ("occupancy", "blocks per SM"),
    ];
    let broken = match miss.kind {
        "problem" | "code" | "other" => "rule",
        kind => kind,
    };
    let mut checks = String::new();
    let mut reached = true;
    for (kind, words) in ORDER {
        if kind == "tmem" && broken != "tmem" {
            continue;
        }
        if kind == broken {
            check(&mut checks, "no", &miss.reason);
            reached = false;
        } else if reached {
            check(&mut checks, "yes", words);
        } else {
            check(&mut checks, "open", &format!("{words}: not looked at"));
        }
    }
    format!(
        "<h3>Does not fit: <code>{}</code></h3>\n<p class=\"note\">The candidate of this tile that misses by \
         least; limits in the order in which they are checked.</p>\n<ul class=\"checks\">{checks}</ul>\n",
        escape(&miss.name)
    )
}

fn legend(view: &View, (low, high): (f64, f64), limits: &[&str]) -> String {
    let mut html = String::from("<div class=\"legend\">");
    if high > 0.0 {
        let shades: String = (0..SHADES).map(|shade| format!("<i class=\"s{shade}\"></i>")).collect();
        write!(
            html,
            "<span class=\"shades\">{shades}fits, {} {}</span><span><i style=\"border:2px \
             solid var(--ink)\"></i>first choice</span>",
            if low < high { format!("{} to {}", plain(low), plain(high)) } else { plain(high) },
            view.unit_name()
        )
        .expect(INTO_STRING);
    }
    for (name, words) in LIMITS.iter().filter(|(name, _)| limits.contains(name)) {
        write!(html, "<span><i class=\"k-{name}\"></i>{words}</span>").expect(INTO_STRING);
    }
    html + "</div>\n"
}
