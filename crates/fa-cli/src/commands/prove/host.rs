//! Tiers that need no GPU: the emulation of units, and its tests.

use std::process::{Command, Stdio};

use anyhow::Context;
use fa_emu::Emulator;
use fa_emu::prove::{Attempt, Candidate, prove};
use fa_lab::ledger::{self, Standing, Tier};
use fa_lab::record;

use super::{Session, absolute};
use crate::term::progress::{self, Steps};

impl Session<'_> {
    /// Units that have to be emulated.
    pub(super) fn due_emulated(&self) -> Vec<&Standing> {
        let is_due = |own: &&Standing| {
            let is_spec = own.unit.is_proven && own.unit.spec().is_some();
            is_spec
                && own.is_known()
                && (self.args.again
                    || own.without(&self.ledger, Tier::is_emulated).any(|entry| own.is_emulated(entry)))
        };
        self.standings.iter().filter(is_due).collect()
    }

    /// Emulates units that have changed; whether all are proven.
    pub(super) fn emulated(&mut self) -> anyhow::Result<bool> {
        let due: Vec<Standing> = self.due_emulated().into_iter().cloned().collect();
        let emulator = progress::spinner("compiling the machine", Emulator::new)?;
        let candidate = |own: &Standing| {
            let (name, arch) = (own.unit.name.clone(), own.unit.arch);
            own.unit.spec().map(|spec| Candidate { name, spec: spec.clone(), arch })
        };
        let candidates = due.iter().filter_map(candidate).collect();
        let on = format!("machine {}", fa_emu::version());
        let (workers, until) = (self.args.workers(), self.until());
        let mut steps = Steps::new(due.len());
        let (mut proven, mut failed) = (0, None);
        let mut report = |attempt: &Attempt| {
            let Candidate { name, arch, .. } = &attempt.candidate;
            steps.begin(format!("{name} on {arch}"));
            steps.advance();
            for fault in &attempt.faults {
                eprintln!("{name} on {arch}: {fault}");
            }
            let own = due.iter().find(|own| own.unit.name == *name && own.unit.arch == *arch);
            let (Some(own), true) = (own, attempt.faults.is_empty()) else { return };
            proven += 1;
            let id = self.ledger.add(&Session::run_of(Tier::Emulated, "", on.clone(), attempt.runs));
            let entries: Vec<&str> =
                own.launched.keys().copied().filter(|entry| own.is_emulated(entry)).collect();
            own.note(&mut self.ledger, Some((&id, &entries)));
            // A run that is stopped keeps what it has proven.
            failed = self.ledger.write(&self.file).err().or(failed.take());
        };
        prove(&emulator, candidates, workers, until, &mut report)?;
        drop(steps);
        match failed {
            Some(error) => Err(error.into()),
            None => Ok(proven == due.len()),
        }
    }

    /// Runs the tests of the emulation, all of them; whether they pass.
    pub(super) fn suite(&mut self) -> anyhow::Result<bool> {
        let root = absolute(&self.root())?;
        let inputs = ledger::suite_inputs(&root)?;
        let arguments = ["test", "-p", "fa-emu", "--test", "emulation", "--", "--ignored"];
        let mut cargo = Command::new("cargo");
        cargo.args(arguments).current_dir(&root).stderr(Stdio::inherit());
        let output = cargo.output().context("cargo does not start")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        eprint!("{text}");
        let passed =
            text.lines().filter(|line| line.starts_with("test ") && line.ends_with("... ok")).count();
        if !output.status.success() || passed == 0 {
            return Ok(false);
        }
        let on = format!("machine {}", fa_emu::version());
        let id = self.ledger.add(&Session::run_of(Tier::Suite, "", on, passed));
        for own in self.standings.iter().filter(|own| own.unit.is_proven && own.unit.spec().is_none()) {
            let entries: Vec<&str> = own.entries.keys().map(String::as_str).collect();
            own.note(&mut self.ledger, Some((&id, &entries)));
        }
        self.ledger.suite = ledger::Suite { inputs, by: id };
        eprintln!("{passed} tests of the emulation passed on {}", record::today());
        Ok(true)
    }
}
