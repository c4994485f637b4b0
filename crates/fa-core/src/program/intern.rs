//! Programs for the life of the process, so that a problem that names one can be copied.

use std::collections::HashMap;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::sync::{LazyLock, Mutex, PoisonError};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::whole::Program;

/// The most programs of a process. A program takes a few KB, and at most some 100 with all its derivatives: a
/// server that is sent programs without end keeps a bounded number and gets a typed error for others.
pub const MAX_INTERNED: usize = 4096;

static TABLE: LazyLock<Mutex<HashMap<String, &'static Program>>> = LazyLock::new(Mutex::default);

/// Of a program's text the array whose rows may be aligned, and the program in which they are.
type Aligned = HashMap<&'static str, Option<(usize, Interned)>>;

static ALIGNED: LazyLock<Mutex<Aligned>> = LazyLock::new(Mutex::default);

/// The process has [`MAX_INTERNED`] programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "this process has {MAX_INTERNED} programs, the most that it keeps; values that vary belong into scalars \
     and arrays, which need no other program"
)]
pub struct TableFull;

/// A program that stays: a copy is a pointer, and equal programs are the same one.
#[derive(Clone, Copy)]
pub struct Interned(&'static Program);

impl Program {
    /// The program for the life of the process.
    ///
    /// # Errors
    /// [`TableFull`] when it is not there and the table is full.
    pub fn intern(self) -> Result<Interned, TableFull> {
        let mut table = TABLE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(program) = table.get(&self.text) {
            return Ok(Interned(program));
        }
        if table.len() >= MAX_INTERNED {
            return Err(TableFull);
        }
        let program: &'static Program = Box::leak(Box::new(self));
        table.insert(program.text.clone(), program);
        Ok(Interned(program))
    }
}

impl Interned {
    /// The program.
    pub fn get(self) -> &'static Program {
        self.0
    }

    /// The array whose tiles kernels copy, by its place, and the program in which its rows are aligned;
    /// `None` where there is none, where they are, and where the process has [`MAX_INTERNED`] programs.
    pub fn with_aligned_rows(self) -> Option<(usize, Interned)> {
        let mut known = ALIGNED.lock().unwrap_or_else(PoisonError::into_inner);
        *known.entry(&self.0.text).or_insert_with(|| {
            let slot = self.copied_array().filter(|&slot| !self.arrays()[slot].aligned)?;
            Some((slot, self.aligned(slot).ok()?.intern().ok()?))
        })
    }
}

impl Deref for Interned {
    type Target = Program;

    fn deref(&self) -> &Program {
        self.0
    }
}

impl PartialEq for Interned {
    fn eq(&self, other: &Interned) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Eq for Interned {}

impl Hash for Interned {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl PartialOrd for Interned {
    fn partial_cmp(&self, other: &Interned) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Interned {
    fn cmp(&self, other: &Interned) -> std::cmp::Ordering {
        self.0.text.cmp(&other.0.text)
    }
}

impl fmt::Debug for Interned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Interned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self.0, f)
    }
}

impl Serialize for Program {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for Program {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Program, D::Error> {
        Program::parse(&String::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

impl Serialize for Interned {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Interned {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Interned, D::Error> {
        Program::deserialize(deserializer)?.intern().map_err(de::Error::custom)
    }
}
