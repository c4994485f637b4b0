//! The ledger of proofs: for every entry of every unit the hash of the code that a GPU executes, and the runs
//! that have judged it. `fa prove` writes it, from the runs that it has judged; all else compares.
//!
//! - `units`: what is proven, a kernel in one of its forms; `choices`: kernels that have to compile.
//! - `code`: hashes of code, launches and source tokens.
//! - `standing`: the present units next to the ledger.

mod choices;
mod code;
mod gpu;
mod page;
mod standing;
mod suite;
mod units;

use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::path::Path;

use fa_attn::atomic_file;
use fa_core::Arch;
use serde::{Deserialize, Serialize};

use crate::error::{Context, Error, Result, read_text};

pub use code::{Workshop, digest};
pub use gpu::{Group, due, judged};
pub use page::{BLOCK, block, filled};
pub use standing::{Same, Standing, Summary, compare, summary};
pub use suite::inputs as suite_inputs;
pub use units::{Subject, Unit, emulated_sms, forms, units};

/// A hash of the sources that judge a result: oracle, tolerances, cases and their inputs.
pub const JUDGE: &str = env!("FA_JUDGE");

/// How an entry has been judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// A person has said why no GPU has judged it.
    Waived,
    /// By emulation: values, races, bounds.
    Emulated,
    /// By the tests of the emulation.
    Suite,
    /// On a GPU, in less than a minute.
    Quick,
    /// By the whole grid, on a GPU.
    Grid,
    /// The library's choices for random problems, made of the same sources, on a GPU.
    Soak,
    /// The same under compute-sanitizer, for the grid's small cases.
    Sanitized,
}

impl Tier {
    /// Every tier.
    pub const ALL: [Tier; 7] =
        [Tier::Waived, Tier::Emulated, Tier::Suite, Tier::Quick, Tier::Grid, Tier::Soak, Tier::Sanitized];

    /// Its name on the command line and in the file.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Waived => "waived",
            Tier::Emulated => "emulated",
            Tier::Suite => "suite",
            Tier::Quick => "quick",
            Tier::Grid => "grid",
            Tier::Soak => "soak",
            Tier::Sanitized => "sanitized",
        }
    }

    /// Whether it proves an entry by emulation.
    pub fn is_emulated(self) -> bool {
        matches!(self, Tier::Emulated | Tier::Suite)
    }

    /// Whether it proves an entry on a GPU, case by case.
    pub fn is_on_gpu(self) -> bool {
        matches!(self, Tier::Quick | Tier::Grid)
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A run that has judged entries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// How.
    pub tier: Tier,
    /// The kernel, as in `sm90_fwd`, of a run on a GPU.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub of: String,
    /// The day, UTC.
    pub date: String,
    /// The GPU and its driver, the emulator's machine, or the reason of a waiver.
    pub on: String,
    /// The commit of the program that judged.
    pub commit: String,
    /// [`JUDGE`] of that program.
    pub judge: String,
    /// Cases that were right: none were wrong.
    pub cases: usize,
}

/// An entry of a unit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The hash of its code.
    pub code: String,
    /// The runs that have judged that code.
    pub by: Vec<String>,
}

/// A unit: a kernel in one form for one architecture.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// The hash of its source's tokens: while it is the same, nothing has to be compiled to know the code.
    pub tokens: String,
    /// The hash of what the library launches for its cases.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub launches: String,
    /// Registers of a thread on each architecture for which it compiles within its plan.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub registers: BTreeMap<Arch, u32>,
    /// Its entries; none of a kernel that only has to compile.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub entries: BTreeMap<String, Entry>,
}

/// The tests of the emulation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Suite {
    /// [`suite_inputs`] of the sources on which they all passed.
    pub inputs: String,
    /// The run; none before the first.
    pub by: String,
}

/// All proofs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ledger {
    /// The compiler whose code it is about, as in `nvrtc 13.0`.
    pub compiler: String,
    /// The runs, by the names that entries have for them.
    pub runs: BTreeMap<String, Run>,
    /// The tests of the emulation.
    pub suite: Suite,
    /// By [`Unit::key`].
    pub units: BTreeMap<String, Row>,
}

const HEAD: &str = "\
// What is proven: for every entry of every kernel in each of its forms the hash of its code and the runs that
// have judged that code. Written by `fa prove` alone, from runs that it has judged; docs/results/README.md.
";

impl Ledger {
    /// The ledger in a file; an empty one where there is no file.
    ///
    /// # Errors
    /// A file that cannot be read or is no ledger.
    pub fn read(path: &Path) -> Result<Ledger> {
        if !path.exists() {
            return Ok(Ledger::default());
        }
        let ledger: Ledger = ron::from_str(&read_text(path)?).context(path.display().to_string())?;
        let named =
            ledger.units.iter().flat_map(|(key, row)| row.entries.values().map(move |own| (key, own)));
        for (key, by) in named.flat_map(|(key, entry)| entry.by.iter().map(move |by| (key, by))) {
            if !ledger.runs.contains_key(by) {
                return Err(Error::Record(format!(
                    "{}: {key} names run {by}: there is none",
                    path.display()
                )));
            }
        }
        Ok(ledger)
    }

    /// Writes it, a line for each unit and run, without runs that judged nothing that is left.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&mut self, path: &Path) -> Result<()> {
        let units = &self.units;
        let suite = &self.suite.by;
        let is_named = |id: &String| {
            id == suite || units.values().flat_map(|row| row.entries.values()).any(|own| own.by.contains(id))
        };
        self.runs.retain(|id, _| is_named(id));
        Ok(atomic_file::write(path, self.text().as_bytes())?)
    }

    fn text(&self) -> String {
        fn one(value: &impl Serialize) -> String {
            ron::to_string(value).expect("plain data serialises")
        }
        let Ledger { compiler, runs, suite, units } = self;
        let mut text = format!("{HEAD}(\n    compiler: {},\n    runs: {{\n", one(compiler));
        for (id, run) in runs {
            let _ = writeln!(text, "        {}: {},", one(id), one(run));
        }
        let _ = write!(text, "    }},\n    suite: {},\n    units: {{\n", one(suite));
        for (key, row) in units {
            let _ = writeln!(text, "        {}: {},", one(key), one(row));
        }
        text + "    },\n)\n"
    }

    /// Adds a run, or its cases to one of the same day, program and machine, of which it is a further part:
    /// its name. Each run of the emulation's tests is a whole one and takes the place of the one before.
    pub fn add(&mut self, run: &Run) -> String {
        let same = |own: &Run| Run { cases: run.cases, ..own.clone() } == *run;
        if let Some((id, own)) = self.runs.iter_mut().find(|(_, own)| same(own)) {
            own.cases = run.cases + if run.tier == Tier::Suite { 0 } else { own.cases };
            return id.clone();
        }
        let of = |number: usize| format!("{}{number}", run.tier);
        let id = (1..).map(of).find(|id| !self.runs.contains_key(id)).expect("numbers do not end");
        self.runs.insert(id.clone(), run.clone());
        id
    }

    /// The tiers that have judged an entry's code.
    pub fn tiers<'a>(&'a self, entry: &'a Entry) -> impl Iterator<Item = Tier> + 'a {
        entry.by.iter().map(|id| self.runs[id].tier)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ledger_is_read_as_it_was_written_and_holds_no_idle_run() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("proof.ron");
        assert_eq!(Ledger::read(&path).unwrap(), Ledger::default());
        let run = |tier, date: &str| Run {
            tier,
            of: "sm90_fwd".into(),
            date: date.into(),
            on: "a \"GPU\"".into(),
            commit: "c".into(),
            judge: "j".into(),
            cases: 3,
        };
        let mut ledger = Ledger { compiler: "nvrtc 13.0".into(), ..Ledger::default() };
        let mut add = |date| ledger.add(&run(Tier::Grid, date));
        let (one, same, other) = (add("1"), add("1"), add("2"));
        assert_eq!((one.as_str(), one == same, other.as_str()), ("grid1", true, "grid2"));
        assert_eq!(ledger.runs["grid1"].cases, 6);
        let mut suite = |cases| ledger.add(&Run { cases, ..run(Tier::Suite, "1") });
        let (whole, again) = (suite(50), suite(51));
        assert_eq!((whole.as_str(), again.as_str(), ledger.runs["suite1"].cases), ("suite1", "suite1", 51));
        let entry = Entry { code: "0123".into(), by: vec![one] };
        let registers = BTreeMap::from([(Arch::Sm90, 168)]);
        let entries = BTreeMap::from([("fa_kernel".to_owned(), entry)]);
        let row = Row { tokens: "t".into(), launches: "l".into(), registers, entries };
        ledger.units.insert("sm90/a.ron varlen on sm90".into(), row);
        ledger.write(&path).unwrap();
        assert_eq!(ledger.runs.keys().collect::<Vec<_>>(), ["grid1"]);
        assert_eq!(Ledger::read(&path).unwrap(), ledger);
        // A name without a run, and a file that is no ledger, are not taken for fewer proofs.
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace("[\"grid1\"]", "[\"grid7\"]")).unwrap();
        assert!(Ledger::read(&path).unwrap_err().to_string().contains("names run grid7"));
        std::fs::write(&path, "(units: [").unwrap();
        assert!(Ledger::read(&path).unwrap_err().to_string().contains("proof.ron"));
    }
}
