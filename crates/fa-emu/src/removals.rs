//! Which removals of synchronising statements have been tried, and what noticed them: kept by the hash of
//! all that the answer depends on, so that a run that was stopped goes on where it was.

use std::path::Path;

use fa_kernels::{Headers, atomic_file};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::compiler::hash;
use crate::emulator::source;
use crate::error::Error;
use crate::machine::version;
use crate::mutate::{STEP_LIMIT, Statement, Subject, without};
use crate::sweep::SEEDS;

/// A removal that has been tried.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Removal {
    /// The header.
    pub file: String,
    /// The statement.
    pub text: String,
    /// Which of those of this text in the header, from 1.
    pub occurrence: usize,
    /// [`key`] of what it was tried on.
    pub key: String,
    /// The first line of what noticed it; `None` where nothing did.
    pub noticed: Option<String>,
}

impl Removal {
    /// Whether it is the removal of this statement, of whatever sources.
    pub fn is_of(&self, statement: &Statement) -> bool {
        self.file == statement.file && self.text == statement.text && self.occurrence == statement.occurrence
    }
}

/// Removals that have been tried, one of each statement, in a file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removals {
    /// By header and statement.
    pub tried: Vec<Removal>,
}

impl Removals {
    /// Those of a file; none where there is no file.
    ///
    /// # Errors
    /// [`Error::Io`] for a file that cannot be read or is no list of removals.
    pub fn read(path: &Path) -> Result<Removals, Error> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Removals::default()),
            Err(error) => return Err(Error::io(path, error)),
        };
        ron::from_str(&text).map_err(|error| Error::io(path, std::io::Error::other(error)))
    }

    /// Adds one in place of an older one of the same statement.
    pub fn add(&mut self, removal: Removal) {
        let same = |own: &Removal| {
            own.file == removal.file && own.text == removal.text && own.occurrence == removal.occurrence
        };
        self.tried.retain(|own| !same(own));
        self.tried.push(removal);
        self.tried.sort();
    }

    /// Writes the file, which appears whole or not at all.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        let text = ron::ser::to_string_pretty(self, ron::ser::PrettyConfig::new().depth_limit(2));
        let text = text.expect("removals are plain data") + "\n";
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
        }
        atomic_file::write(path, text.as_bytes()).map_err(|e| Error::io(path, std::io::Error::other(e)))
    }

    /// The removal of `statement` that was tried with this key.
    pub fn of(&self, statement: &Statement, key: &str) -> Option<&Removal> {
        self.tried.iter().find(|own| own.key == key && own.is_of(statement))
    }
}

/// A hash of all that decides what notices the removal of `statement`: the code that is left of every
/// subject that has it, their problems, the machine, the seeds.
///
/// # Errors
/// Those of the specs.
pub fn key(subjects: &[Subject], statement: &Statement) -> Result<String, Error> {
    let mut tried = Vec::new();
    for subject in subjects {
        let source = source(&subject.spec, subject.arch, &Headers::embedded())?;
        if source.headers.iter().any(|(name, _)| *name == statement.file) {
            let left = without(&source, statement).fingerprint();
            tried.push(json!([left, subject.arch, subject.case.data()]));
        }
    }
    let tried = json!([tried, SEEDS, STEP_LIMIT]).to_string();
    Ok(hash(&[&version(), &tried])[..32].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mutate::statements;
    use crate::subjects::subjects;

    #[test]
    fn a_file_keeps_one_removal_of_a_statement() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("removals.ron");
        assert_eq!(Removals::read(&path).unwrap(), Removals::default());
        let removal = |occurrence: usize, key: &str| Removal {
            file: "sm90/fwd.cuh".into(),
            text: "cta_sync();".into(),
            occurrence,
            key: key.into(),
            noticed: (occurrence == 1).then(|| "deadlock".into()),
        };
        let mut removals = Removals::default();
        for own in [removal(1, "a"), removal(2, "a"), removal(1, "b")] {
            removals.add(own);
            removals.write(&path).unwrap();
        }
        assert_eq!(Removals::read(&path).unwrap(), removals);
        assert_eq!(removals.tried, [removal(1, "b"), removal(2, "a")]);
        std::fs::write(&path, "no removals").unwrap();
        assert!(Removals::read(&path).is_err());
    }

    #[test]
    fn a_key_is_of_the_statement_and_of_what_it_is_tried_on() {
        let (_, of_kernel) = &subjects()[0];
        let first = &of_kernel[0];
        let source = source(&first.spec, first.arch, &Headers::embedded()).unwrap();
        let [one, other, ..] = &statements(&source)[..] else { panic!("the kernel synchronises") };
        let all = key(of_kernel, one).unwrap();
        assert_eq!(all, key(of_kernel, one).unwrap());
        assert_ne!(all, key(of_kernel, other).unwrap());
        assert_ne!(all, key(&of_kernel[..1], one).unwrap());
    }
}
