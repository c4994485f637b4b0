//! `fa records`: what a machine with a GPU has to run when kernels have changed.

mod blocks;
mod tables;

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use fa_core::counted;
use fa_lab::campaign::{self, End, Options, Row, Wanted};
use fa_lab::{Program, device, record, summary};

use crate::term::failure::{InputError, Verdict};
use crate::term::{output, progress};

/// `fa records`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct RecordsArgs {
    /// Folder of the records
    #[arg(long, value_name = "DIR", default_value = "docs/results")]
    pub results: PathBuf,
    /// The GPU, as names of records of rates have it
    #[arg(long, value_name = "NAME", default_value = "h100", value_parser = part_of_a_file_name)]
    pub gpu: String,
    /// Folder for the progress and each step's output, from which a stopped run is resumed
    #[arg(long, value_name = "DIR", default_value = "target/records")]
    pub state: PathBuf,
    /// Time for all steps together; steps that would exceed it are left for the next run
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    #[arg(conflicts_with = "list")]
    pub budget: Option<u64>,
    /// Only steps whose names contain one of these, as in validate,marks-models
    #[arg(long, value_name = "TEXT,..", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Judge every kernel, even those whose code the grid has judged
    #[arg(long)]
    pub all: bool,
    /// Do not time other libraries
    #[arg(long)]
    pub no_peers: bool,
    /// Rerun steps that failed or were too slow
    #[arg(long, conflicts_with = "list")]
    pub again: bool,
    /// List what would run and what has run, and run nothing
    #[arg(long)]
    pub list: bool,
    /// Write a summary of each of these full records below --results, and run nothing
    #[arg(long, value_name = "RECORD.json", num_args = 1.., conflicts_with_all = OF_RUNS)]
    pub summarise: Vec<PathBuf>,
    /// Write the tables of README.md, docs/performance.md and docs/sources.md from the summaries, and run
    /// nothing
    #[arg(long, conflicts_with_all = OF_RUNS, conflicts_with = "summarise")]
    pub tables: bool,
    /// Only say which tables are out of date: exit code 1 if there are any
    #[arg(long, requires = "tables", conflicts_with_all = OF_RUNS, conflicts_with = "summarise")]
    pub check: bool,
}

/// Options of what runs on a GPU.
const OF_RUNS: [&str; 8] = ["gpu", "state", "budget", "only", "all", "no_peers", "again", "list"];

const EXAMPLES: &str = "\
Examples:
  fa records --list                          the steps, their commands, and what became of them
  fa records                                 all of them, in order
  fa records --budget 590                    as much as ten minutes hold; the next call goes on
  fa records --only prove-grid --all         the whole grid, also of kernels that it has judged
  fa records --only marks --again            rates whose measurement failed, once more
  fa records --summarise rates.json          the summary of a record that fa bench --json wrote
  fa records --tables                        the documents' tables, from the summaries

In order: the grid of every kernel whose code it has not judged, rates beside peers, rates of \
attention as it is served, random problems, sanitizers. Each step is a process of this program within a time \
limit; of rates a summary is kept, and the full record in the folder of the progress. Exit code 1 when a \
step failed or is left.";

fn part_of_a_file_name(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
    if text.is_empty() || !text.chars().all(plain) {
        return Err("file names have it: use letters, digits and '-', as in h100".to_owned());
    }
    Ok(text.to_owned())
}

/// Runs the command: a bad verdict where a step failed, was too slow or is left.
///
/// # Errors
/// Records that cannot be read, a folder that cannot be written, a filter that no step passes, no GPU for
/// steps to run on.
pub(crate) fn command(args: &RecordsArgs) -> anyhow::Result<Verdict> {
    if !args.summarise.is_empty() {
        for record in &args.summarise {
            let path = summary::keep(record, &args.results)?;
            output::note(&format!("wrote {}", path.display()));
        }
        return Ok(Verdict::Good);
    }
    if args.tables {
        return tables::command(&args.results, args.check);
    }
    let wanted = Wanted {
        results: &args.results,
        state: &args.state,
        gpu: &args.gpu,
        all: args.all,
        peers: !args.no_peers,
    };
    let mut steps = campaign::steps_for(&wanted)?;
    let names: Vec<String> = steps.iter().map(|step| step.name.clone()).collect();
    let is_wanted = |name: &str| args.only.is_empty() || args.only.iter().any(|part| name.contains(part));
    steps.retain(|step| is_wanted(&step.name));
    if steps.is_empty() {
        let (only, names) = (args.only.join(","), names.join(", "));
        let why = format!("--only {only}: no step contains it: {names}");
        return Err(InputError::Usage(why).into());
    }
    let options = Options {
        folder: args.state.clone(),
        build: format!("{} {}", env!("CARGO_PKG_VERSION"), record::COMMIT),
        budget: args.budget,
        again: args.again,
    };
    if args.list {
        let rows = campaign::known(&steps, &options)?;
        output::print(&table(&rows, true))?;
        return Ok(Verdict::Good);
    }
    // A step that fails for want of a GPU would count as run.
    device::open()?;
    let executable = std::env::current_exe().context("cannot find this program to start it again")?;
    let program = Program { executable, arguments: Vec::new() };
    let rows = campaign::run(&steps, &program, &options, &mut progress::steps())?;
    output::print(&table(&rows, false))?;
    let good = rows.iter().all(|(_, done)| done.as_ref().is_some_and(|done| done.end == End::Good));
    Ok(if good { Verdict::Good } else { Verdict::Bad })
}

/// A line for each step, and how many there are of each end.
fn table(rows: &[Row], with_commands: bool) -> String {
    const MOST: usize = 70;
    let last = if with_commands { "command" } else { "says" };
    let mut table = output::table(&["step", "ended", "seconds", "limit", last]);
    let mut count = [0usize; 4];
    for (step, done) in rows {
        let (end, which) = match done.as_ref().map(|done| done.end) {
            Some(End::Good) => ("good", 0),
            Some(End::Bad) => ("FAILED", 1),
            Some(End::Slow) => ("TOO SLOW", 2),
            None => ("left", 3),
        };
        count[which] += 1;
        let seconds = done
            .as_ref()
            .map_or_else(|| format!("({})", step.expected), |done| format!("{:.0}", done.seconds));
        let said = match (with_commands, done) {
            (true, _) => format!("fa {}", step.arguments.join(" ")),
            (false, Some(done)) => done.said.chars().take(MOST).collect(),
            (false, None) => String::new(),
        };
        table.add_row([step.name.clone(), end.to_owned(), seconds, step.limit.to_string(), said]);
    }
    let [good, bad, slow, left] = count;
    format!(
        "{}{}: {good} good, {bad} failed, {slow} too slow, {left} left\n",
        output::table_text(&table),
        counted(rows.len(), "step")
    )
}
