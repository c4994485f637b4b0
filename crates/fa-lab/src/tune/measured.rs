//! Measurements, in memory and in a file that survives an interruption.

use std::path::Path;

use fa_core::{KernelSpec, Problem};
use serde::{Deserialize, Serialize};

use super::candidates::Candidate;
use super::wanted::Wanted;
use crate::error::Result;
use crate::log::{self, Log};

/// The measurement of one candidate.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Median milliseconds of a launch.
    pub ms: Option<f64>,
    /// A second measurement, for the fastest and the planner's first choice.
    pub again_ms: Option<f64>,
    /// The error, if nothing was measured.
    pub error: Option<String>,
    /// Hash of the kernel's sources.
    pub sources: String,
}

/// A problem's candidates and their measurements, in the same order.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The problem, with its pass and family.
    pub wanted: Wanted,
    /// The candidates.
    pub candidates: Vec<Candidate>,
    /// Their measurements.
    pub found: Vec<Outcome>,
}

impl Measured {
    /// Whether the fastest were measured again, in which case the second measurements are compared.
    fn is_again(&self) -> bool {
        self.found.iter().any(|found| found.again_ms.is_some())
    }

    /// The milliseconds by which kernel `index` is compared with others.
    pub fn ms(&self, index: usize) -> Option<f64> {
        let found = self.found.get(index)?;
        if self.is_again() { found.again_ms } else { found.ms }
    }

    /// The fastest and its milliseconds.
    pub fn best(&self) -> Option<(&KernelSpec, f64)> {
        let times = self.candidates.iter().enumerate();
        let times = times.filter_map(|(index, candidate)| Some((&candidate.spec, self.ms(index)?)));
        times.min_by(|a, b| a.1.total_cmp(&b.1))
    }
}

/// One line of the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Note {
    gpu: String,
    problem: Problem,
    spec: KernelSpec,
    sources: String,
    /// Median milliseconds.
    pub ms: Option<f64>,
    /// The same measured again.
    #[serde(default)]
    pub again_ms: Option<f64>,
    /// The error, if nothing was measured.
    pub error: Option<String>,
}

/// The file of all measurements.
#[derive(Debug)]
pub struct Notebook {
    notes: Vec<Note>,
    log: Log,
}

impl Notebook {
    /// Reads what is there; a line that was cut off is left out.
    ///
    /// # Errors
    /// When the file cannot be read or written.
    pub fn open(path: &Path) -> Result<Notebook> {
        Ok(Notebook { notes: log::read(path)?.results, log: Log::open(path)? })
    }

    /// The newest measurement of this kernel, with these sources, on this problem.
    pub fn find(&self, gpu: &str, problem: &Problem, spec: &KernelSpec, sources: &str) -> Option<&Note> {
        self.notes.iter().rev().find(|note| {
            note.gpu == gpu && note.problem == *problem && note.spec == *spec && note.sources == sources
        })
    }

    /// Adds the measurements of a problem's candidates.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn add(
        &mut self,
        gpu: &str,
        problem: &Problem,
        candidates: &[Candidate],
        found: &[Outcome],
    ) -> Result<()> {
        let note = |(candidate, found): (&Candidate, &Outcome)| Note {
            gpu: gpu.to_owned(),
            problem: *problem,
            spec: candidate.spec.clone(),
            sources: found.sources.clone(),
            ms: found.ms,
            again_ms: found.again_ms,
            error: found.error.clone(),
        };
        let known = self.notes.len();
        self.notes.extend(candidates.iter().zip(found).map(note));
        self.log.add(&self.notes[known..])
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use fa_core::{Arch, Dtype, Family, Mask, Pass};

    use super::super::candidates;
    use super::*;

    #[test]
    fn notes_survive_and_a_line_that_was_cut_off_does_no_harm() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("deep/notes.jsonl");
        let problem = Problem::square(1, 1024, 8, 64, Mask::CAUSAL, Dtype::F16);
        let all =
            candidates::of(&problem, Arch::Sm90, Family::Sm90, Pass::Forward, 2).expect("there are plans");
        let found: Vec<Outcome> = (0..all.len())
            .map(|i| Outcome {
                ms: (i != 1).then_some(1.5 + i as f64),
                sources: "abc".to_owned(),
                ..Outcome::default()
            })
            .collect();
        Notebook::open(&path).expect("opened").add("GPU", &problem, &all, &found).expect("noted");
        let text = fs::read_to_string(&path).expect("read");
        fs::write(&path, format!("{text}{}", &text[..50])).expect("cut off");
        let mut notebook = Notebook::open(&path).expect("opened again");
        assert_eq!(notebook.notes.len(), all.len());
        let find =
            |notebook: &Notebook, sources| notebook.find("GPU", &problem, &all[0].spec, sources).cloned();
        assert_eq!(find(&notebook, "abc").and_then(|note| note.ms), Some(1.5));
        assert_eq!(find(&notebook, "abd"), None);
        notebook.add("GPU", &problem, &all[..1], &found[2..3]).expect("noted");
        let notebook = Notebook::open(&path).expect("opened again");
        assert_eq!(find(&notebook, "abc").and_then(|note| note.ms), Some(3.5));
        let wanted = Wanted { problem, family: Some(Family::Sm90), pass: Pass::Forward };
        let mut measured = Measured { wanted, candidates: all.clone(), found };
        assert_eq!(measured.best(), Some((&all[0].spec, 1.5)));
        // The fastest of the first measurement was so by chance.
        (measured.found[0].again_ms, measured.found[2].again_ms) = (Some(3.75), Some(3.5));
        assert_eq!(measured.best(), Some((&all[2].spec, 3.5)));
    }
}
