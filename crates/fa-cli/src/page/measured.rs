//! What records have measured of the planned shape, beside what the model predicts for the same kernels.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use fa_core::{Arch, Dtype, KernelSpec, Lengths, Mask, Pass, Problem, ScoreKind};
use fa_planner::cost::{CostConstants, predict};
use serde::Deserialize;

use crate::draw::diagram::escape;
use crate::page::view::{Unit, View};
use crate::term::failure::InputError;

const INTO_STRING: &str = "writing to a string cannot fail";

/// What the table shows.
pub(crate) const ABOUT: &str = "Rows of the records with this pass, head dim, mask and type. The error is \
    the model's: its time for the very kernel that was measured, against the median that was measured.";

/// A record of `fa bench --marks`, as far as it is needed here.
#[derive(Deserialize)]
struct Record {
    commit: String,
    date: String,
    gpu: String,
    arch: Arch,
    kernels: Vec<RecordKernel>,
    rows: Vec<RecordRow>,
}

#[derive(Deserialize)]
struct RecordKernel {
    name: String,
    spec: serde_json::Value,
}

#[derive(Deserialize)]
struct RecordRow {
    kind: String,
    /// Of rows whose shape is not all that they say.
    name: Option<String>,
    batch: usize,
    heads_q: usize,
    heads_kv: usize,
    seqlen_q: usize,
    seqlen_k: usize,
    head_dim: usize,
    head_dim_v: usize,
    mask: String,
    dtype: Dtype,
    spec: String,
    ms_median: f64,
    #[serde(default)]
    error: Option<String>,
    #[serde(default)]
    peers: std::collections::BTreeMap<String, f64>,
}

/// A measured row with the prediction for its kernel.
pub(crate) struct Measured {
    pub problem: Problem,
    pass: Pass,
    name: Option<String>,
    kernel: String,
    seconds: f64,
    predicted: f64,
    /// The fastest other library, and its TFLOP/s.
    peer: Option<(String, f64)>,
    /// The record: file, commit, day, GPU.
    source: String,
    arch: Arch,
}

impl Measured {
    /// Operations in a second, in 10^12.
    pub(crate) fn tflops(&self) -> f64 {
        self.problem.flops(self.pass) / self.seconds / 1e12
    }

    pub(crate) fn rate(&self, unit: Unit) -> f64 {
        match unit {
            Unit::Tflops => self.tflops(),
            Unit::Bytes => self.problem.bytes(self.pass) / self.seconds / 1e9,
        }
    }

    /// The model's error: above 0 where it is too slow.
    pub(crate) fn error(&self) -> f64 {
        self.predicted / self.seconds - 1.0
    }

    /// Whether it is this problem.
    pub(crate) fn exact(&self, problem: &Problem) -> bool {
        self.problem == *problem
    }

    /// Whether it is this problem at some length.
    pub(crate) fn same_but_for_length(&self, problem: &Problem) -> bool {
        let (own, square) = (&self.problem, |p: &Problem| p.lengths.max_q() == p.lengths.max_k());
        own.lengths.sequences() == problem.lengths.sequences()
            && square(own) == square(problem)
            && (square(own) || own.lengths.max_q() == problem.lengths.max_q())
            && (Problem { lengths: problem.lengths, ..*own }) == *problem
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

/// A record of `fa validate`, with one configuration a row or a list of shipped kernels.
#[derive(Deserialize)]
struct Validated {
    arch: Arch,
    #[serde(default)]
    rows: Vec<Config>,
    #[serde(default)]
    kernels: Vec<Shipped>,
}

#[derive(Deserialize)]
struct Config {
    kernel: String,
    registers: Option<u32>,
    spills: Option<u32>,
}

#[derive(Deserialize)]
struct Shipped {
    name: String,
}

/// The problem of a row, where the row says all of it.
fn problem_of(row: &RecordRow, spec: &KernelSpec) -> Option<Problem> {
    let mask = match row.mask.as_str() {
        "full" => Mask::FULL,
        "causal" => Mask::CAUSAL,
        window => {
            Mask::causal_window(window.strip_prefix("causal+window(")?.strip_suffix(')')?.parse().ok()?)
        }
    };
    if spec.reads.varied || spec.reads.paged || spec.score != ScoreKind::default() {
        return None;
    }
    let square = Problem::square(row.batch, 1, row.heads_q, row.head_dim, mask, row.dtype);
    let problem = Problem {
        lengths: Lengths::uniform(row.batch, row.seqlen_q, row.seqlen_k),
        heads_kv: row.heads_kv,
        head_dim_v: row.head_dim_v,
        ..square
    };
    problem.check().is_ok().then_some(problem)
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

fn parse<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, InputError> {
    let said = |error: &dyn std::fmt::Display| InputError::Usage(format!("{}: {error}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| said(&error))?;
    serde_json::from_str(&text).map_err(|error| said(&format!("no record: {error}")))
}

impl Records {
    /// Reads the records of a folder: `marks*.json`, and below it those of `configs/` and `validate/`.
    ///
    /// # Errors
    /// [`InputError`] when the folder cannot be read, or a file in it is not a record.
    pub(crate) fn read(folder: &Path) -> Result<Records, InputError> {
        let mut records = Records::default();
        for path in json_files(folder, "marks")? {
            let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            records.add(&parse(&path)?, &file);
        }
        for below in ["configs", "validate"].map(|name| folder.join(name)).iter().filter(|path| path.is_dir())
        {
            for path in json_files(below, "")? {
                let Validated { arch, rows, kernels } = parse(&path)?;
                records.ran.extend(kernels.into_iter().map(|kernel| (arch, kernel.name)));
                for row in rows {
                    if let (Some(registers), Some(spills)) = (row.registers, row.spills) {
                        records.compiled.push((arch, row.kernel.clone(), registers, spills));
                    }
                    records.ran.push((arch, row.kernel));
                }
            }
        }
        Ok(records)
    }

    /// Registers of a thread and bytes spilled of a compiled kernel.
    pub(crate) fn compiled(&self, kernel: &str, arch: Arch) -> Option<(u32, u32)> {
        let found = self.compiled.iter().find(|(on, name, ..)| *on == arch && name == kernel);
        found.map(|&(_, _, registers, spills)| (registers, spills))
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
            let pass = if row.kind == "bwd" { Pass::BACKWARD } else { Pass::Forward };
            let kernel = record.kernels.iter().find(|kernel| kernel.name == row.spec);
            // Specs of older versions may have other fields.
            let spec =
                kernel.and_then(|kernel| serde_json::from_value::<KernelSpec>(kernel.spec.clone()).ok());
            let Some(spec) = spec else { continue };
            let Some(problem) = problem_of(row, &spec) else { continue };
            let faster = row.peers.iter().max_by(|a, b| a.1.total_cmp(b.1));
            self.rows.push(Measured {
                problem,
                pass,
                name: row.name.clone(),
                kernel: row.spec.clone(),
                seconds: row.ms_median / 1e3,
                predicted: predict(&problem, &spec, record.arch, &constants).seconds,
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

    /// Takes the rows with the view's pass, architecture, head dims, mask and type, exact ones first, then by
    /// length.
    pub(crate) fn of<'a>(&'a self, view: &View) -> Vec<&'a Measured> {
        let problem = view.problem();
        let family = view.fits.first().map_or("", |fit| fit.name.split('_').next().unwrap_or(""));
        let like = |row: &&Measured| {
            let own = &row.problem;
            row.pass.is_backward() == view.backward()
                && row.arch == view.planned.arch
                && row.kernel.starts_with(family)
                && (own.head_dim, own.head_dim_v) == (problem.head_dim, problem.head_dim_v)
                && own.mask == problem.mask
                && own.types == problem.types
                && (own.lengths.max_q() == 1) == (problem.lengths.max_q() == 1)
        };
        let mut rows: Vec<&Measured> = self.rows.iter().filter(like).collect();
        rows.sort_by_key(|row| {
            (!row.exact(problem), row.problem.lengths.max_k(), row.problem.lengths.sequences())
        });
        rows
    }

    /// The model's errors over all rows of the view's pass, family and architecture.
    fn errors(&self, view: &View) -> Vec<f64> {
        let family = view.fits.first().map_or("", |fit| fit.name.split('-').next().unwrap_or(""));
        let like = |row: &&Measured| row.arch == view.planned.arch && row.kernel.starts_with(family);
        let mut errors: Vec<f64> = self.rows.iter().filter(like).map(|row| row.error().abs()).collect();
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
            let shape = format!(
                "{} of {}, heads {}",
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
                "<tr{}><td>{shape}{}</td><td class=\"n\">{:.0}</td><td class=\"n\">{:.0}</td><td \
                 class=\"n\">{:+.1} %</td><td>{}</td><td class=\"w\"><code>{}</code></td><td \
                 class=\"n\">[{}]</td></tr>",
                if row.exact(view.problem()) { " class=\"here\"" } else { "" },
                row.name.as_ref().map_or(String::new(), |name| format!(" ({})", escape(name))),
                row.rate(view.unit),
                row.rate(view.unit) * row.seconds / row.predicted,
                100.0 * row.error(),
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
            let sources: String = sources
                .iter()
                .enumerate()
                .map(|(index, source)| format!("[{}] {}. ", index + 1, escape(source)))
                .collect();
            write!(
                out,
                "<div class=\"scroll\" tabindex=\"0\"><table \
                 class=\"sorts\">\n<tr><th>Shape</th><th class=\"n\">Measured, \
                 {0}</th><th class=\"n\">Predicted</th><th class=\"n\">Error of time</th><th>Best \
                 peer, ratio</th><th class=\"w\">Kernel</th><th></th></tr>\n{html}</table></div>\n<p \
                 class=\"note\">{sources}</p>\n",
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
