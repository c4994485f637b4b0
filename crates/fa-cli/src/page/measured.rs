//! What records have measured of the planned shape, beside what the model predicts for the same kernels.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use fa_core::{Arch, KernelSpec, Lengths, Mask, Pass, Problem, Reads, ScoreKind};
use fa_lab::ledger::{self, Ledger, Tier};
use fa_lab::summary::RateRow;
use fa_lab::{message, summary};
use fa_planner::cost::{CostConstants, predict};
use serde::Deserialize;

use crate::draw::diagram::escape;
use crate::page::view::{Unit, View};
use crate::plan::tried::Shape;
use crate::term::failure::InputError;
use crate::term::output::plain;

const INTO_STRING: &str = "writing to a string cannot fail";

/// What the table shows.
pub(crate) const ABOUT: &str = "Rows of the records with this pass, head dim, mask and type. The error is \
    the model's: its time for the very kernel that was measured, against the median that was measured. \
    Where a record has not the length of every sequence, or its pages, nothing is predicted.";

/// A record of `fa bench --marks`, as far as it is needed here.
#[derive(Deserialize)]
struct Record {
    commit: String,
    date: String,
    gpu: String,
    arch: Arch,
    kernels: Vec<RecordKernel>,
    rows: Vec<RateRow>,
}

#[derive(Deserialize)]
struct RecordKernel {
    name: String,
    spec: serde_json::Value,
}

/// A measured row with the prediction for its kernel.
pub(crate) struct Measured {
    /// The problem; of sequences of different lengths, or keys in pages, one of as many of the longest.
    pub problem: Problem,
    pass: Pass,
    name: Option<String>,
    kernel: String,
    reads: Reads,
    seconds: f64,
    /// By the model, in seconds; nothing where the row does not say all of its problem.
    predicted: Option<f64>,
    /// As the row has it: 10^12 operations a second, 10^9 bytes a second.
    rates: [f64; 2],
    /// The fastest other library, and its TFLOP/s.
    peer: Option<(String, f64)>,
    /// The record: file, commit, day, GPU.
    source: String,
    arch: Arch,
}

impl Measured {
    /// Operations in a second, in 10^12.
    pub(crate) fn tflops(&self) -> f64 {
        self.rates[0]
    }

    pub(crate) fn rate(&self, unit: Unit) -> f64 {
        match unit {
            Unit::Tflops => self.tflops(),
            Unit::Bytes => self.rates[1],
        }
    }

    /// The model's error: above 0 where it is too slow.
    pub(crate) fn error(&self) -> Option<f64> {
        Some(self.predicted? / self.seconds - 1.0)
    }

    /// Whether it is this problem.
    pub(crate) fn exact(&self, problem: &Problem) -> bool {
        self.predicted.is_some() && self.problem == *problem
    }

    /// Whether it is this problem at some length.
    pub(crate) fn same_but_for_length(&self, problem: &Problem) -> bool {
        let (own, square) = (&self.problem, |p: &Problem| p.lengths.max_q() == p.lengths.max_k());
        // Whatever the record has not said may differ.
        self.predicted.is_some()
            && problem.lengths.is_uniform()
            && own.lengths.sequences() == problem.lengths.sequences()
            && square(own) == square(problem)
            && (square(own) || own.lengths.max_q() == problem.lengths.max_q())
            && (own.with_lengths(problem.lengths)) == *problem
    }
}

/// All rows of the records below a folder that the model can predict.
#[derive(Default)]
pub(crate) struct Records {
    rows: Vec<Measured>,
    /// Names of kernels that ran, by architecture.
    ran: Vec<(Arch, String)>,
    /// Names of kernels with the registers of a thread and the bytes that were spilled, as compiled.
    compiled: Vec<(Arch, String, u32, u32)>,
}

/// A record of `fa validate --all-configs`, one configuration a row.
#[derive(Deserialize)]
struct Validated {
    arch: Arch,
    rows: Vec<Config>,
}

#[derive(Deserialize)]
struct Config {
    kernel: String,
    registers: Option<u32>,
    spills: Option<u32>,
}

/// The problem of a row, taken to be of equal lengths; nothing where it has changes of scores that the row
/// does not say.
fn problem_of(row: &RateRow, spec: &KernelSpec) -> Option<Problem> {
    let mask = match row.mask.as_str() {
        "full" => Mask::FULL,
        "causal" => Mask::CAUSAL,
        window => {
            Mask::causal_window(window.strip_prefix("causal+window(")?.strip_suffix(')')?.parse().ok()?)
        }
    };
    if spec.score != ScoreKind::default() {
        return None;
    }
    let square = Problem::square(row.batch, 1, row.heads_q, row.head_dim, mask, row.dtype);
    let problem = square
        .with_lengths(Lengths::uniform(row.batch, row.seqlen_q, row.seqlen_k))
        .with_heads_kv(row.heads_kv)
        .with_head_dim_v(row.head_dim_v);
    problem.check().is_ok().then_some(problem)
}

/// The mask as far as it hides anything: from a single query, the last, no key is hidden as a later one.
fn visible(problem: &Problem) -> Mask {
    problem.mask.with_right(problem.mask.right.filter(|_| problem.lengths.max_q() > 1))
}

/// How far apart two problems are: the factor between their lengths, which the rate depends on most, and a
/// quarter of that between their heads and sequences; in hundredths of an octave.
fn distance(one: &Problem, other: &Problem) -> u64 {
    let octaves = |a: usize, b: usize| (a.max(1) as f64 / b.max(1) as f64).log2().abs();
    let lengths = octaves(one.lengths.max_k(), other.lengths.max_k());
    let queries = octaves(one.lengths.max_q(), other.lengths.max_q());
    let heads = |p: &Problem| p.lengths.sequences().saturating_mul(p.heads_q);
    let rest = octaves(heads(one), heads(other)) + octaves(one.group_size(), other.group_size());
    (100.0 * (lengths.max(queries) + rest / 4.0)) as u64
}

/// The files of a folder with this beginning that are JSON, by name.
fn json_files(folder: &Path, begin: &str) -> Result<Vec<PathBuf>, InputError> {
    let unreadable =
        |error: std::io::Error| InputError::Usage(format!("--records {}: {error}", folder.display()));
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(begin) && name.ends_with(".json") {
            paths.push(entry.path());
        }
    }
    paths.sort();
    Ok(paths)
}

fn parse<T: serde::de::DeserializeOwned>(path: &Path, command: &str) -> Result<T, InputError> {
    summary::read(path, command).map_err(|error| InputError::Usage(message(&error)))
}

impl Records {
    /// Reads the records of a folder: `marks*.json`, below it those of `configs/`, and the
    /// ledger of proofs.
    ///
    /// # Errors
    /// [`InputError`] when the folder cannot be read, or a file in it is not a record.
    pub(crate) fn read(folder: &Path) -> Result<Records, InputError> {
        let mut records = Records::default();
        for path in json_files(folder, "marks")? {
            let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            records.add(&parse(&path, "fa bench")?, &file);
        }
        let below = folder.join("configs");
        for path in if below.is_dir() { json_files(&below, "")? } else { Vec::new() } {
            let Validated { arch, rows } = parse(&path, "fa validate")?;
            for row in rows {
                if let (Some(registers), Some(spills)) = (row.registers, row.spills) {
                    records.compiled.push((arch, row.kernel.clone(), registers, spills));
                }
                records.ran.push((arch, row.kernel));
            }
        }
        let said = |error: fa_lab::Error| InputError::Usage(format!("--records: {error}"));
        let ledger = Ledger::read(&folder.join("proof.ron")).map_err(said)?;
        let ran = |unit: &ledger::Unit| {
            let row = ledger.units.get(&unit.key());
            row.is_some_and(|row| row.entries.values().flat_map(|own| ledger.tiers(own)).any(Tier::is_on_gpu))
        };
        if !ledger.units.is_empty() {
            let all = ledger::units().map_err(said)?;
            let specs =
                all.iter().filter(|unit| ran(unit)).filter_map(|unit| Some((unit.arch, unit.spec()?)));
            records.ran.extend(specs.map(|(arch, spec)| (arch, spec.to_string())));
        }
        Ok(records)
    }

    /// Registers of a thread and bytes spilled of a compiled kernel.
    pub(crate) fn compiled(&self, kernel: &str, arch: Arch) -> Option<(u32, u32)> {
        let found = self.compiled.iter().find(|(on, name, ..)| *on == arch && name == kernel);
        found.map(|&(_, _, registers, spills)| (registers, spills))
    }

    /// Adds the rows of a record's text.
    #[cfg(test)]
    pub(crate) fn add_text(&mut self, text: &str, file: &str) -> serde_json::Result<()> {
        self.add(&serde_json::from_str(text)?, file);
        Ok(())
    }

    fn add(&mut self, record: &Record, file: &str) {
        self.ran.extend(record.kernels.iter().map(|kernel| (record.arch, kernel.name.clone())));
        let constants = CostConstants::of(record.arch);
        let source = format!(
            "{file}, {} on {}, commit {}",
            record.date.get(..10).unwrap_or(&record.date),
            record.gpu,
            record.commit.get(..7).unwrap_or(&record.commit)
        );
        for row in record.rows.iter().filter(|row| row.error.is_none() && row.ms_median > 0.0) {
            let kernel = record.kernels.iter().find(|kernel| kernel.name == row.spec);
            // Specs of older versions may have other fields.
            let spec =
                kernel.and_then(|kernel| serde_json::from_value::<KernelSpec>(kernel.spec.clone()).ok());
            let Some(spec) = spec else { continue };
            let pass = spec.kernel.pass();
            let Some(problem) = problem_of(row, &spec) else { continue };
            // Rows do not record which lengths a kernel reads on the device.
            let whole = !spec.reads.varied && !spec.reads.paged;
            let seconds = row.ms_median / 1e3;
            let bytes = (row.unit == "TB/s").then_some(1e3 * row.rate);
            let rates = if whole {
                [problem.flops(pass) / seconds / 1e12, problem.bytes(pass) / seconds / 1e9]
            } else {
                [row.tflops.unwrap_or(f64::NAN), bytes.unwrap_or(f64::NAN)]
            };
            let faster = row.peers.iter().max_by(|a, b| a.1.total_cmp(b.1));
            self.rows.push(Measured {
                problem,
                pass,
                name: row.name.clone(),
                kernel: row.spec.clone(),
                reads: spec.reads,
                seconds,
                predicted: whole.then(|| predict(&problem, &spec, record.arch, &constants).seconds),
                rates,
                peer: faster.map(|(name, rate)| (name.clone(), *rate)),
                source: source.clone(),
                arch: record.arch,
            });
        }
    }

    /// Whether some record has a kernel on an architecture.
    pub(crate) fn ran(&self, kernel: &str, arch: Arch) -> bool {
        self.ran.iter().any(|(on, name)| *on == arch && name == kernel)
    }

    /// Takes the rows with the view's pass, architecture, head dims, mask and type, exact ones first, then
    /// the nearest.
    pub(crate) fn of<'a>(&'a self, view: &View) -> Vec<&'a Measured> {
        let problem = view.problem();
        let family = view.fits.first().map_or("", |fit| fit.name.split('_').next().unwrap_or(""));
        let (varied, paged) = match view.fits.first().map(|fit| fit.shape) {
            Some(Shape::Kernel(spec)) => (spec.reads.varied, spec.reads.paged),
            Some(Shape::Sm100(_)) | None => (false, false),
        };
        let like = |row: &&Measured| {
            let own = &row.problem;
            row.pass == view.pass
                && row.arch == view.planned.arch
                && row.kernel.starts_with(family)
                && (own.head_dim, own.head_dim_v) == (problem.head_dim, problem.head_dim_v)
                && visible(own) == visible(problem)
                && own.types == problem.types
                && (own.lengths.max_q() == 1) == (problem.lengths.max_q() == 1)
                && row.rate(view.unit).is_finite()
                && (row.predicted.is_some() || row.reads.varied == varied && row.reads.paged == paged)
        };
        let mut rows: Vec<&Measured> = self.rows.iter().filter(like).collect();
        rows.sort_by_key(|row| {
            let own = &row.problem.lengths;
            let other_form = (row.reads.varied, row.reads.paged) != (varied, paged);
            (!row.exact(problem), other_form, distance(&row.problem, problem), own.max_k(), own.sequences())
        });
        rows
    }

    /// The model's errors over all rows of the view's pass, family and architecture.
    fn errors(&self, view: &View) -> Vec<f64> {
        let family = view.fits.first().map_or("", |fit| fit.name.split('-').next().unwrap_or(""));
        let like = |row: &&Measured| row.arch == view.planned.arch && row.kernel.starts_with(family);
        let errors = self.rows.iter().filter(like).filter_map(|row| Some(row.error()?.abs()));
        let mut errors: Vec<f64> = errors.collect();
        errors.sort_by(f64::total_cmp);
        errors
    }

    /// The table, and what the records say of the model as a whole.
    pub(crate) fn table(&self, view: &View) -> String {
        const SHOWN: usize = 14;
        let rows = self.of(view);
        let mut html = String::new();
        let mut sources: Vec<&str> = Vec::new();
        for row in rows.iter().take(SHOWN) {
            let most = if row.reads.varied || row.reads.paged { "at most " } else { "" };
            let shape = format!(
                "{} of {most}{}, heads {}",
                row.problem.lengths.sequences(),
                fa_lab::shape::pair(row.problem.lengths.max_q(), row.problem.lengths.max_k(), 'x'),
                fa_lab::shape::pair(row.problem.heads_q, row.problem.heads_kv, ':')
            );
            let peer = row.peer.as_ref().map_or("-".to_owned(), |(name, rate)| {
                format!("{name} {rate:.0}, {:.2}", row.tflops() / rate)
            });
            let source = sources.iter().position(|known| *known == row.source).unwrap_or_else(|| {
                sources.push(&row.source);
                sources.len() - 1
            });
            writeln!(
                html,
                "<tr{}><td class=\"about\">{shape}{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td \
                 class=\"n\">{}</td><td class=\"peer\">{}</td><td class=\"w\"><code>{}</code></td><td \
                 class=\"n\">[{}]</td></tr>",
                if row.exact(view.problem()) { " class=\"here\"" } else { "" },
                row.name.as_ref().map_or(String::new(), |name| format!(" ({})", escape(name))),
                plain(row.rate(view.unit)),
                row.predicted.map_or("-".to_owned(), |time| plain(row.rate(view.unit) * row.seconds / time)),
                row.error().map_or("-".to_owned(), |error| format!("{:+.1} %", 100.0 * error)),
                escape(&peer),
                escape(&row.kernel),
                source + 1
            )
            .expect(INTO_STRING);
        }
        let mut out = String::new();
        if rows.is_empty() {
            out += "<p>No record has this pass, head dim, mask and type on this architecture.</p>\n";
        } else {
            if !rows[0].exact(view.problem()) {
                out += "<p>No record has this very shape; the nearest:</p>\n";
            }
            let more = match rows.len().saturating_sub(SHOWN) {
                0 => String::new(),
                more => format!("And {more} more, farther away. "),
            };
            let sources: String = sources
                .iter()
                .enumerate()
                .map(|(index, source)| format!("[{}] {}. ", index + 1, escape(source)))
                .collect();
            write!(
                out,
                "<div class=\"scroll\" tabindex=\"0\"><table \
                 class=\"sorts stacks\">\n<tr><th>Shape</th><th class=\"n\">Measured, \
                 {0}</th><th class=\"n\">Predicted</th><th class=\"n\">Error of time</th><th>Best \
                 peer, ratio</th><th class=\"w\">Kernel</th><th \
                 class=\"n\">Record</th></tr>\n{html}</table></div>\n<p class=\"note\">{more}{sources}</p>\n",
                view.unit_name()
            )
            .expect(INTO_STRING);
        }
        let errors = self.errors(view);
        if !errors.is_empty() {
            writeln!(
                out,
                "<p class=\"note\">Over all {} rows of these kernels in the records the model's time is \
                 off by {:.1} \
                 % at the median and {:.1} % at the most.</p>",
                errors.len(),
                100.0 * errors[errors.len() / 2],
                100.0 * errors[errors.len() - 1]
            )
            .expect(INTO_STRING);
        }
        out
    }
}
