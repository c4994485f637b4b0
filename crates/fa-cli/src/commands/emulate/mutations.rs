//! Synchronising statements removed one at a time, and those that nothing misses.

use std::sync::Mutex;

use anyhow::Context;
use fa_emu::Emulator;
use fa_emu::mutate::{self, Statement};
use fa_emu::sweep::Trials;
use fa_kernels::Headers;
use serde::{Deserialize, Serialize};

use super::args::EmulateArgs;
use crate::term::failure::{InputError, Verdict};
use crate::term::output;
use crate::term::progress::Steps;

/// A removal that nothing notices, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Survivor {
    /// The header.
    file: String,
    /// The statement.
    text: String,
    /// Which of those of this text in the header, from 1.
    occurrence: usize,
    /// Why nothing notices its removal.
    reason: String,
}

impl Survivor {
    fn is(&self, statement: &Statement) -> bool {
        self.file == statement.file && self.text == statement.text && self.occurrence == statement.occurrence
    }
}

pub(super) fn mutations(
    args: &EmulateArgs,
    emulator: &Emulator,
    kernels: Vec<(&'static str, Vec<mutate::Subject>)>,
) -> anyhow::Result<Verdict> {
    let known: Vec<Survivor> = match std::fs::read_to_string(&args.survivors) {
        Ok(text) => ron::from_str(&text).with_context(|| args.survivors.display().to_string())?,
        Err(_) => Vec::new(),
    };
    let trials = Trials::default();
    let mut jobs = Vec::new();
    for (index, (_, subjects)) in kernels.iter().enumerate() {
        // A header that two kernels share is that of the first.
        let asked = |statement: &Statement| {
            let place = format!("{}:{}", statement.file, statement.line);
            args.statement.as_ref().is_none_or(|text| place.contains(text))
        };
        for subject in subjects {
            let source = fa_emu::source(&subject.spec, subject.arch, &Headers::embedded())?;
            for statement in mutate::statements(&source).into_iter().filter(asked) {
                if !jobs.iter().any(|(_, other): &(usize, Statement)| *other == statement) {
                    jobs.push((index, statement));
                }
            }
        }
    }
    let all = jobs.len();
    if let (0, Some(text)) = (all, &args.statement) {
        let message = format!("--statement {text}: no synchronising statement stands at such a place");
        return Err(InputError::Usage(message).into());
    }
    let (jobs, done) = (Mutex::new(jobs.into_iter().rev().collect::<Vec<_>>()), Mutex::new(Vec::new()));
    let steps = Mutex::new(Steps::new(all));
    let work = || -> anyhow::Result<()> {
        loop {
            let Some((kernel, statement)) = jobs.lock().map_or(None, |mut jobs| jobs.pop()) else {
                return Ok(());
            };
            let noticed = mutate::noticed(emulator, &kernels[kernel].1, &statement, &trials)?;
            if let Ok(mut steps) = steps.lock() {
                steps.begin(format!("{}:{}", statement.file, statement.line));
                steps.advance();
            }
            if let Ok(mut done) = done.lock() {
                done.push((statement, noticed));
            }
        }
    };
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..args.workers()).map(|_| scope.spawn(work)).collect();
        handles
            .into_iter()
            .try_for_each(|handle| handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    drop(steps);
    let mut done = done.into_inner().unwrap_or_default();
    done.sort();
    let mut out = String::new();
    let (mut survivors, mut unexplained) = (0, 0);
    for (statement, noticed) in &done {
        let place = format!("{}:{}", statement.file, statement.line);
        let said = match noticed {
            Some(by) => by.clone(),
            None => {
                survivors += 1;
                let reason = known.iter().find(|own| own.is(statement)).map(|own| own.reason.as_str());
                unexplained += usize::from(reason.is_none());
                format!("NOT NOTICED: {}", reason.unwrap_or("no reason is listed"))
            }
        };
        out += &format!("{place:<24} {}  {said}\n", statement.text);
    }
    let of_list: Vec<_> = known
        .iter()
        .filter(|own| done.iter().any(|(statement, noticed)| own.is(statement) && noticed.is_some()))
        .collect();
    for own in &of_list {
        out += &format!("listed in {} but noticed: {} {}\n", args.survivors.display(), own.file, own.text);
    }
    out += &format!(
        "{} of {all} removals noticed, {unexplained} of the other {survivors} without a listed reason\n",
        all - survivors
    );
    output::print(&out)?;
    Ok(if unexplained == 0 && of_list.is_empty() { Verdict::Good } else { Verdict::Bad })
}
