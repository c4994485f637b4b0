//! What a chooser remembers: choices, and the tables of tuned kernels.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use fa_core::KernelSpec;

use super::asked::ChoiceKey;
use crate::error::Error;
use crate::tune::{Tables, TunedEntry};

/// Choices that are remembered at most, some 4 MB: lengths that never recur must not fill a server's memory.
pub(super) const REMEMBERED: usize = 4096;

/// What is remembered, shared by the callers' threads and the one that measures.
#[derive(Debug, Default)]
pub(super) struct Memory {
    choices: Mutex<Choices>,
    /// The tables of tuned kernels, read when the first choice is made.
    pub(super) tables: Mutex<Option<Tables>>,
    /// Winners added to them.
    pub(super) winners: AtomicU64,
}

impl Memory {
    pub(super) fn choices(&self) -> MutexGuard<'_, Choices> {
        lock(&self.choices)
    }

    /// What the tables say.
    pub(super) fn look<R>(&self, ask: impl FnOnce(&Tables) -> R) -> R {
        ask(lock(&self.tables).get_or_insert_with(Tables::read))
    }

    /// Drops the entries of a kernel until the tables are read again; returns whether there were any.
    pub(super) fn forget(&self, gpu: &str, spec: &KernelSpec) -> bool {
        lock(&self.tables).get_or_insert_with(Tables::read).forget(gpu, spec)
    }

    /// Uses the winner of a search from now on, and keeps it in the table at `path`.
    pub(super) fn keep(&self, path: &Path, gpu: &str, entry: TunedEntry) -> Result<(), Error> {
        let kept = lock(&self.tables).get_or_insert_with(Tables::read).keep(path, gpu, entry);
        // What was chosen before is chosen again, by the table.
        self.choices().forget_chosen();
        self.winners.fetch_add(1, Ordering::Release);
        kept
    }
}

/// A kernel that was chosen.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Choice {
    pub spec: KernelSpec,
    /// Parts of the keys of a forward's tile; `None` for as many as the planner takes.
    pub splits: Option<usize>,
}

impl From<KernelSpec> for Choice {
    fn from(spec: KernelSpec) -> Choice {
        Choice { spec, splits: None }
    }
}

/// Kernels by the key of a problem: a caller's preferences are kept for good, choices while there is room.
#[derive(Debug, Default)]
pub(super) struct Choices {
    pub(super) preferred: HashMap<ChoiceKey, Choice>,
    pub(super) chosen: HashMap<ChoiceKey, Choice>,
    /// How often what was chosen has been forgotten.
    pub(super) age: u64,
}

impl Choices {
    /// The kernel for the problem of `key`.
    pub(super) fn get(&self, key: &ChoiceKey) -> Option<&Choice> {
        self.preferred.get(key).or_else(|| self.chosen.get(key))
    }

    /// Keeps `choice`, which may be forgotten: it is chosen again at the cost of planning, a quarter of a
    /// millisecond. Not where choices were forgotten since it was looked for at `age`: it may be one of them.
    pub(super) fn remember(&mut self, age: u64, key: ChoiceKey, choice: Choice) {
        if age != self.age {
            return;
        }
        if self.chosen.len() >= REMEMBERED {
            self.chosen.clear();
        }
        self.chosen.insert(key, choice);
    }

    /// Forgets what was chosen, since tables say otherwise now.
    pub(super) fn forget_chosen(&mut self) {
        self.chosen.clear();
        self.age += 1;
    }

    /// Keeps `choice` for good.
    pub(super) fn prefer(&mut self, key: ChoiceKey, choice: Choice) {
        self.preferred.insert(key, choice);
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is behind them is whole whatever a panicking thread was doing.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
