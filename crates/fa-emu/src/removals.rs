//! Removals of synchronising statements that have been tried, and what noticed them, by the hash of all that
//! the result depends on, so that a stopped run can be resumed.

use std::path::Path;

use fa_kernels::Headers;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::compiler::hash;
use crate::emulator::source;
use crate::error::Error;
use crate::machine::version;
use crate::mutate::{STEP_LIMIT, Statement, Subject, without};
use crate::ron_file;
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
    /// The key of the subject that noticed it, or of all subjects where none did.
    pub key: String,
    /// The first line of the finding; `None` where nothing noticed it.
    pub noticed: Option<String>,
}

impl Removal {
    /// Whether it is the removal of this statement, in any version of the sources.
    pub fn is_of(&self, statement: &Statement) -> bool {
        statement.is(&self.file, &self.text, self.occurrence)
    }
}

/// A removal that goes unnoticed, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Survivor {
    /// The header.
    pub file: String,
    /// The statement.
    pub text: String,
    /// Which of those of this text in the header, from 1.
    pub occurrence: usize,
    /// Why its removal goes unnoticed.
    pub reason: String,
}

impl Survivor {
    /// Whether it is the removal of this statement, in any version of the sources.
    pub fn is_of(&self, statement: &Statement) -> bool {
        statement.is(&self.file, &self.text, self.occurrence)
    }
}

/// The removals that a file lists as going unnoticed; none where there is no file.
///
/// # Errors
/// [`Error::Record`] for a file that cannot be read or is no such list.
pub fn survivors(path: &Path) -> Result<Vec<Survivor>, Error> {
    ron_file::read(path)
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
    /// [`Error::Record`] for a file that cannot be read or is not a list of removals.
    pub fn read(path: &Path) -> Result<Removals, Error> {
        ron_file::read(path)
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
        ron_file::write(path, self)
    }

    /// The removal of `statement` that was tried on these subjects; of one that was noticed, on one of them.
    pub fn of(&self, statement: &Statement, keys: &Keys) -> Option<&Removal> {
        let holds = |own: &Removal| match own.noticed {
            Some(_) => keys.subjects.iter().flatten().any(|key| *key == own.key),
            None => own.key == keys.all(),
        };
        self.tried.iter().find(|own| own.is_of(statement) && holds(own))
    }
}

/// Hashes of all that decides whether the removal of a statement is noticed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    /// Of each subject: the code that is left of it, its problem, the machine, the seeds; `None` for one
    /// that does not have the statement.
    pub subjects: Vec<Option<String>>,
}

impl Keys {
    /// Those of the removal of `statement` from `subjects`.
    ///
    /// # Errors
    /// Those of the specs.
    pub fn of(subjects: &[Subject], statement: &Statement) -> Result<Keys, Error> {
        let key = |subject: &Subject| -> Result<Option<String>, Error> {
            let source = source(&subject.spec, subject.arch, &Headers::embedded())?;
            if !source.headers.iter().any(|(name, _)| *name == statement.file) {
                return Ok(None);
            }
            let left = without(&source, statement).fingerprint();
            let tried = json!([subject.arch, subject.case.data(), SEEDS, STEP_LIMIT]).to_string();
            Ok(Some(hash(&[&version(), &left, &tried])[..32].to_owned()))
        };
        Ok(Keys { subjects: subjects.iter().map(key).collect::<Result<_, _>>()? })
    }

    /// Of all subjects together.
    pub fn all(&self) -> String {
        let keys: Vec<&str> = self.subjects.iter().flatten().map(String::as_str).collect();
        hash(&keys)[..32].to_owned()
    }
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
    fn removals_are_known_for_the_very_code_and_subjects() {
        let (_, of_kernel) = &subjects()[0];
        let first = &of_kernel[0];
        let source = source(&first.spec, first.arch, &Headers::embedded()).unwrap();
        let [one, other, ..] = &statements(&source)[..] else { panic!("the kernel synchronises") };
        let keys = Keys::of(of_kernel, one).unwrap();
        assert_eq!(keys, Keys::of(of_kernel, one).unwrap());
        let fewer = Keys::of(&of_kernel[..1], one).unwrap();
        let (others, own) = (Keys::of(of_kernel, other).unwrap(), |key: String, noticed: Option<&str>| {
            let Statement { file, text, occurrence, .. } = one.clone();
            Removals {
                tried: vec![Removal { file, text, occurrence, key, noticed: noticed.map(str::to_owned) }],
            }
        });
        let noticed = own(keys.subjects[0].clone().unwrap(), Some("deadlock"));
        assert!(noticed.of(one, &keys).is_some() && noticed.of(one, &fewer).is_some());
        assert!(noticed.of(one, &others).is_none() && noticed.of(other, &keys).is_none());
        // A new subject may notice what no other did.
        let survived = own(fewer.all(), None);
        assert!(survived.of(one, &fewer).is_some() && survived.of(one, &keys).is_none());
    }
}
