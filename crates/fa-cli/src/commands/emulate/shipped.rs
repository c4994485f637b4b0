//! Kernels proven at awkward shapes: the shipped ones, and a sample of the planner's.

use std::path::Path;
use std::sync::Mutex;

use fa_core::counted;
use fa_emu::Emulator;
use fa_emu::record::{Attempt, Candidate, Record, prove};
use fa_emu::sample::sample;
use fa_lab::record::today;

use super::args::EmulateArgs;
use crate::commands::build;
use crate::term::failure::Verdict;
use crate::term::output;
use crate::term::progress::Steps;

pub(super) fn shipped(args: &EmulateArgs, emulator: &Emulator) -> anyhow::Result<Verdict> {
    let candidates =
        fa_emu::shipped::shipped().map_err(|(path, error)| anyhow::anyhow!("{path}: {error}"))?;
    let record = Record::read(&args.record)?;
    // It is written when all kernels are proven.
    let folder = args.record.parent().filter(|folder| !folder.as_os_str().is_empty());
    build::probe(folder.unwrap_or(Path::new(".")))?;
    let attempts = attempts(args, emulator, candidates, std::slice::from_ref(&record))?;
    let proven: Vec<_> = attempts.iter().filter_map(|attempt| attempt.proven.clone()).collect();
    if !proven.is_empty() {
        record.write(&args.record, &proven)?;
    }
    verdict(&attempts, &format!(" and written to {}", args.record.display()))
}

pub(super) fn sampled(args: &EmulateArgs, emulator: &Emulator) -> anyhow::Result<Verdict> {
    let day = args.day.clone().unwrap_or_else(today);
    let candidates = sample(&day, args.sample.unwrap_or(1) as usize);
    let attempts = attempts(args, emulator, candidates, &[])?;
    verdict(&attempts, &format!(" of the sample of {day}"))
}

fn attempts(
    args: &EmulateArgs,
    emulator: &Emulator,
    candidates: Vec<Candidate>,
    records: &[Record],
) -> anyhow::Result<Vec<Attempt>> {
    let steps = Mutex::new(Steps::new(candidates.len()));
    let report = |attempt: &Attempt| {
        if let Ok(mut steps) = steps.lock() {
            steps.begin(format!("{} {}", attempt.candidate.name, attempt.candidate.arch));
            steps.advance();
        }
    };
    Ok(prove(emulator, candidates, records, args.workers(), &report)?)
}

/// Says what was found in each kernel, and how many there were.
fn verdict(attempts: &[Attempt], proven_where: &str) -> anyhow::Result<Verdict> {
    let mut out = String::new();
    let faulty: Vec<_> = attempts.iter().filter(|attempt| !attempt.faults.is_empty()).collect();
    for attempt in &faulty {
        out += &format!("{} on {}\n", attempt.candidate.name, attempt.candidate.arch);
        for fault in &attempt.faults {
            out += &format!("  {}\n", fault.replace('\n', "\n  "));
        }
    }
    let proven = attempts.iter().filter(|attempt| attempt.proven.is_some()).count();
    let known = attempts.iter().filter(|attempt| attempt.known).count();
    out += &format!(
        "{}: {proven} proven now{proven_where}, {known} known before, {} with findings\n",
        counted(attempts.len(), "kernel"),
        faulty.len()
    );
    output::print(&out)?;
    Ok(if faulty.is_empty() { Verdict::Good } else { Verdict::Bad })
}
