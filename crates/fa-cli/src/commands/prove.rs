//! `fa prove`: what is proven, what a change has to prove again, and the runs that prove it. Nothing else
//! writes the ledger.

mod args;
mod gpu;
mod host;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use fa_attn::atomic_file;
use fa_core::counted;
use fa_kernels::Headers;
use fa_lab::device;
use fa_lab::ledger::{self, BLOCK, JUDGE, Ledger, Run, Same, Standing, Summary, Tier, Workshop};
use fa_lab::record;

pub(crate) use args::ProveArgs;

use crate::commands::build;
use crate::term::failure::{InputError, Verdict};
use crate::term::{output, progress};

/// The ledger below the folder of results.
const FILE: &str = "proof.ron";

/// Pages with a table of the ledger, from the folder of results.
const PAGES: [&str; 2] = ["README.md", "../../README.md"];

/// What a run works on.
struct Session<'a> {
    args: &'a ProveArgs,
    file: PathBuf,
    ledger: Ledger,
    standings: Vec<Standing>,
    began: Instant,
}

/// Runs the command: a bad verdict where something is wrong or was left, and of `--check` where something is
/// not proven.
///
/// # Errors
/// A ledger that cannot be read or written; for a tier on a GPU, no GPU.
pub(crate) fn command(args: &ProveArgs) -> anyhow::Result<Verdict> {
    args.check_flags()?;
    if !args.check && args.tier.is_some_and(runs_on_gpu) {
        // Before units are compiled, which takes minutes.
        device::open()?;
    }
    if !args.check {
        build::probe(&args.results)?;
    }
    let file = args.results.join(FILE);
    let ledger = Ledger::read(&file)?;
    let folder = args.kernels.clone().or_else(fa_kernels::cache::default_root);
    let workshop = Workshop::open(&folder.unwrap_or_else(|| std::env::temp_dir().join("fa-prove")));
    if let Err(error) = &workshop {
        eprintln!("note: {error}; what has other sources than the ledger is not known");
    }
    let workshop = match (&args.headers, workshop.ok()) {
        (Some(folder), Some(workshop)) => Some(workshop.of(Headers::from_dir(folder)?)),
        (Some(_), None) => {
            let message = "--headers needs a compiler: `cargo xtask toolkit` installs NVRTC";
            return Err(InputError::Usage(message.to_owned()).into());
        }
        (None, workshop) => workshop,
    };
    let units = ledger::units()?.into_iter().filter(|unit| args.takes(&unit.key())).collect::<Vec<_>>();
    if units.is_empty() {
        let message = format!(
            "--only {}: no unit's name contains it: `fa prove --check --json` lists them",
            args.only.join(",")
        );
        return Err(InputError::Usage(message).into());
    }
    if args.check && !file.is_file() {
        let message = format!("{}: no ledger is there: --results names its folder", file.display());
        return Err(InputError::Usage(message).into());
    }
    let compared = progress::spinner("comparing", || ledger::compare(&ledger, units, workshop.as_ref()));
    let mut session = Session { args, file, ledger, standings: compared?, began: Instant::now() };
    if session.ledger.units.is_empty()
        && let Some(workshop) = &workshop
    {
        session.ledger.compiler = workshop.version()?;
    }
    if args.check {
        return session.check();
    }
    session.move_on()?;
    let done = match args.tier {
        None => args.waive.as_deref().map_or(Ok(true), |reason| session.waive(reason))?,
        Some(Tier::Emulated) => session.emulated()?,
        Some(Tier::Suite) => session.suite()?,
        Some(Tier::Quick | Tier::Grid) => session.grid(args.tier.unwrap_or(Tier::Quick))?,
        Some(Tier::Soak | Tier::Sanitized) => session.around(args.tier.unwrap_or(Tier::Soak))?,
        Some(Tier::Waived) => false,
    };
    session.write()?;
    output::print(&session.text(&session.summary()))?;
    Ok(if done { Verdict::Good } else { Verdict::Bad })
}

/// Whether a tier's cases are launches.
fn runs_on_gpu(tier: Tier) -> bool {
    tier.is_on_gpu() || matches!(tier, Tier::Soak | Tier::Sanitized)
}

impl Session<'_> {
    /// When no more is begun.
    fn until(&self) -> Option<Instant> {
        self.args.budget.map(|seconds| self.began + Duration::from_secs(seconds))
    }

    fn run_of(tier: Tier, of: &str, on: String, cases: usize) -> Run {
        let commit = record::COMMIT.get(..12).unwrap_or(record::COMMIT).to_owned();
        let (of, judge) = (of.to_owned(), JUDGE.to_owned());
        Run { tier, of, date: record::today(), on, commit, judge, cases }
    }

    /// Sources that differ and code that does not: the ledger follows. Units that are gone leave it.
    fn move_on(&mut self) -> anyhow::Result<()> {
        if self.args.only.is_empty() {
            let keys: Vec<String> = self.standings.iter().map(|own| own.unit.key()).collect();
            self.ledger.units.retain(|key, _| keys.contains(key));
        }
        for own in &self.standings {
            // What no case launches cannot be judged, and holds nothing up.
            let holds = |(name, entry): (&String, &ledger::Entry)| {
                !entry.by.is_empty() || !own.launched.contains_key(name.as_str())
            };
            let is_same = own.same == Same::Compiled && own.entries.iter().all(holds);
            if is_same || (own.is_known() && !own.unit.is_proven) {
                own.note(&mut self.ledger, None);
            }
        }
        self.write()
    }

    fn waive(&mut self, reason: &str) -> anyhow::Result<bool> {
        let id = self.ledger.add(&Session::run_of(Tier::Waived, "", reason.to_owned(), 0));
        let open = |tier: Tier| tier.is_on_gpu() || tier == Tier::Waived;
        for own in self.standings.iter().filter(|own| own.is_known() && own.unit.is_proven) {
            let entries: Vec<String> = own.without(&self.ledger, open).map(str::to_owned).collect();
            let entries: Vec<&str> = entries.iter().map(String::as_str).collect();
            own.note(&mut self.ledger, Some((&id, &entries)));
        }
        Ok(true)
    }

    /// Writes the ledger and the tables of it.
    fn write(&mut self) -> anyhow::Result<()> {
        self.ledger.write(&self.file)?;
        let block = ledger::block(&self.ledger);
        for name in PAGES {
            let path = self.args.results.join(name);
            let Ok(page) = std::fs::read_to_string(&path) else { continue };
            if let Some(filled) = ledger::filled(&page, BLOCK, &block).filter(|filled| *filled != page) {
                atomic_file::write(&path, filled.as_bytes())?;
            }
        }
        Ok(())
    }

    /// What the ledger says of the units as they are.
    fn summary(&self) -> Summary {
        let mut standings = self.standings.clone();
        for own in &mut standings {
            let row = self.ledger.units.get(&own.unit.key());
            let fresh = row.filter(|row| row.tokens == own.tokens && row.launches == own.launches);
            if let Some(row) = fresh {
                own.entries.clone_from(&row.entries);
            }
        }
        ledger::summary(&self.ledger, &standings)
    }

    fn check(&self) -> anyhow::Result<Verdict> {
        let summary = self.summary();
        let suite = self.suite_holds();
        let due = match self.args.tier {
            Some(tier) => self.due(tier)?,
            None => Vec::new(),
        };
        let good = summary.open.is_empty() && summary.broken.is_empty() && due.is_empty();
        let good = if self.args.tier == Some(Tier::Suite) { suite } else { good };
        if self.args.json {
            output::print_json(&serde_json::json!({
                "good": good,
                "entries": summary.entries,
                "judged": summary.of,
                "open": summary.open,
                "idle": summary.idle,
                "unknown": summary.unknown,
                "moved": summary.moved,
                "broken": summary.broken,
                "due": due,
                "suite": suite,
                "units": self.standings,
            }))?;
        } else {
            let mut text = self.text(&summary);
            if let Some(tier) = self.args.tier.filter(|tier| *tier != Tier::Suite) {
                text += &format!("{} for the tier {tier}\n", counted(due.len(), "unit"));
                due.iter().for_each(|key| text += &format!("  {key}\n"));
            }
            output::print(&text)?;
        }
        Ok(if good { Verdict::Good } else { Verdict::Bad })
    }

    fn text(&self, summary: &Summary) -> String {
        let judged: Vec<String> = summary.of.iter().map(|(tier, count)| format!("{count} {tier}")).collect();
        let mut text = format!(
            "{} entries of {}: {}\n",
            summary.entries,
            counted(self.standings.len(), "unit"),
            if judged.is_empty() { "none judged".to_owned() } else { judged.join(", ") }
        );
        let lists = [
            ("with other sources and the same code", &summary.moved),
            ("skipped: other sources, and no compiler to see whether the code is another", &summary.unknown),
            ("NOT WITHIN ITS PLAN", &summary.broken),
            ("that no case launches", &summary.idle),
            ("OPEN", &summary.open),
        ];
        for (what, list) in lists.into_iter().filter(|(_, list)| !list.is_empty()) {
            text += &format!("{} {what}\n", list.len());
            list.iter().for_each(|own| text += &format!("  {own}\n"));
        }
        let suite = if self.suite_holds() { "passed on these sources" } else { "DUE: fa prove --tier suite" };
        text + &format!("tests of the emulation: {suite}\n")
    }

    /// The workspace that the folder of results is in.
    fn root(&self) -> PathBuf {
        self.args.results.join("../..")
    }

    fn suite_holds(&self) -> bool {
        ledger::suite_inputs(&self.root()).is_ok_and(|inputs| inputs == self.ledger.suite.inputs)
    }
}

/// `path` as another process finds it.
fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    std::fs::canonicalize(path).with_context(|| path.display().to_string())
}
