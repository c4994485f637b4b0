//! Synchronising statements removed one at a time, and those whose removal nothing notices.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use fa_cpu::threads::together;
use fa_emu::Emulator;
use fa_emu::mutate::{self, Statement};
use fa_emu::removals::{Keys, Removal, Removals, Survivor, survivors};
use fa_emu::sweep::Trials;
use fa_kernels::Headers;

use super::args::EmulateArgs;
use crate::term::failure::{InputError, Verdict};
use crate::term::output;
use crate::term::progress::Steps;

/// The file of removals tried so far: those of all kernels, unless another file is named.
const TRIED: &str = "target/removals.ron";

/// The list of removals that are known to go unnoticed, unless another file is named.
const SURVIVORS: &str = "docs/results/emulation-survivors.ron";

pub(super) fn mutations(
    args: &EmulateArgs,
    emulator: &Emulator,
    kernels: Vec<(&'static str, Vec<mutate::Subject>)>,
) -> anyhow::Result<Verdict> {
    if let Some(named) = &args.survivors {
        std::fs::metadata(named).map_err(InputError::read(named))?;
    }
    let known = survivors(list(args))?;
    let file = args.tried.clone().or_else(|| args.spec.is_none().then(|| PathBuf::from(TRIED)));
    let removals = Mutex::new(file.as_deref().map_or_else(|| Ok(Removals::default()), Removals::read)?);
    let (all, new) = (Mutex::new(Vec::new()), Mutex::new(0usize));
    let jobs = jobs(args, &kernels)?;
    if let (true, Some(text)) = (jobs.is_empty(), &args.statement) {
        let message = format!("--statement {text}: no synchronising statement stands at such a place");
        return Err(InputError::Usage(message).into());
    }
    let steps = Mutex::new(Steps::new(jobs.len()));
    let jobs = Mutex::new(jobs.into_iter().rev().collect::<Vec<_>>());
    let trials = Trials::default();
    let work = || -> anyhow::Result<()> {
        loop {
            let Some((kernel, statement)) = lock(&jobs).pop() else { return Ok(()) };
            let subjects = &kernels[kernel].1;
            let keys = Keys::of(subjects, &statement)?;
            let before = lock(&removals).of(&statement, &keys).map(|own| own.noticed.clone());
            let noticed = match before {
                Some(noticed) => noticed,
                None => {
                    lock(&steps).begin(format!("{}:{}", statement.file, statement.line));
                    let found = mutate::noticed(emulator, subjects, &statement, &trials)?;
                    let by = found.as_ref().and_then(|(subject, _)| keys.subjects[*subject].clone());
                    let key = by.unwrap_or_else(|| keys.all());
                    let noticed = found.map(|(_, text)| text);
                    let Statement { file: header, text, occurrence, .. } = statement.clone();
                    let removal = Removal { file: header, text, occurrence, key, noticed: noticed.clone() };
                    let mut removals = lock(&removals);
                    removals.add(removal);
                    if let Some(file) = &file {
                        removals.write(file)?;
                    }
                    *lock(&new) += 1;
                    noticed
                }
            };
            lock(&steps).advance();
            lock(&all).push((statement, noticed));
        }
    };
    together(args.workers(), work).into_iter().collect::<anyhow::Result<()>>()?;
    drop(steps);
    let (mut all, new) = (std::mem::take(&mut *lock(&all)), *lock(&new));
    all.sort();
    print(args, &known, &all, new)
}

/// The file of that list.
fn list(args: &EmulateArgs) -> &Path {
    args.survivors.as_deref().unwrap_or(Path::new(SURVIVORS))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The statements that were asked for, each with the kernel that it is tried on. A header that two kernels
/// share is that of the first.
fn jobs(
    args: &EmulateArgs,
    kernels: &[(&'static str, Vec<mutate::Subject>)],
) -> anyhow::Result<Vec<(usize, Statement)>> {
    let asked = |statement: &Statement| {
        let place = format!("{}:{}", statement.file, statement.line);
        args.statement.as_ref().is_none_or(|text| place.contains(text))
    };
    let mut jobs: Vec<(usize, Statement)> = Vec::new();
    for (index, (_, subjects)) in kernels.iter().enumerate() {
        for subject in subjects {
            let source = fa_emu::source(&subject.spec, subject.arch, &Headers::embedded())?;
            for statement in mutate::statements(&source).into_iter().filter(asked) {
                if !jobs.iter().any(|(_, other)| *other == statement) {
                    jobs.push((index, statement));
                }
            }
        }
    }
    Ok(jobs)
}

/// What became of each removal; `new` of them have been tried now.
fn print(
    args: &EmulateArgs,
    known: &[Survivor],
    all: &[(Statement, Option<String>)],
    new: usize,
) -> anyhow::Result<Verdict> {
    let mut out = String::new();
    let (mut survivors, mut unexplained) = (0, 0);
    for (statement, noticed) in all {
        let place = format!("{}:{}", statement.file, statement.line);
        let said = match noticed {
            Some(by) => by.clone(),
            None => {
                survivors += 1;
                let reason = known.iter().find(|own| own.is_of(statement)).map(|own| own.reason.as_str());
                unexplained += usize::from(reason.is_none());
                format!("NOT NOTICED: {}", reason.unwrap_or("no reason is listed"))
            }
        };
        out += &format!("{place:<24} {}  {said}\n", statement.text);
    }
    let of_list: Vec<_> = known
        .iter()
        .filter(|own| all.iter().any(|(statement, noticed)| own.is_of(statement) && noticed.is_some()))
        .collect();
    for own in &of_list {
        out += &format!("listed in {} but noticed: {} {}\n", list(args).display(), own.file, own.text);
    }
    let count = all.len();
    out += &format!(
        "{} of {count} removals noticed, {unexplained} of the other {survivors} without a listed reason; \
         {new} tried now, {} before\n",
        count - survivors,
        count - new
    );
    output::print(&out)?;
    Ok(if unexplained == 0 && of_list.is_empty() { Verdict::Good } else { Verdict::Bad })
}
