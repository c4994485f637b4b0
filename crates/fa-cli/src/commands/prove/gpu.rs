//! Tiers on a GPU.

use fa_core::Arch;
use fa_lab::Program;
use fa_lab::device::{self, DeviceInfo};
use fa_lab::grid::Extent;
use fa_lab::ledger::{self, Group, Standing, Tier};
use fa_lab::validate::{self, CaseResult, Cases, Kind, Options, Resume, Status, sanitize};

use super::Session;
use crate::commands::worker;
use crate::term::progress;

/// Seconds of the budget that are kept for the end of a run.
const END: u64 = 10;

/// Where the cases that a GPU has judged are kept.
const STATE: &str = "target/prove.jsonl";

/// Seconds of random problems for each kernel.
const SOAK_SECONDS: u32 = 300;

/// Seconds after which a case counts as hung.
const WATCHDOG: u32 = 60;

impl Session<'_> {
    /// The units that a tier would run, as far as that can be said without a GPU.
    pub(super) fn due(&self, tier: Tier) -> anyhow::Result<Vec<String>> {
        let keys = |all: Vec<&Standing>| all.into_iter().map(|own| own.unit.key()).collect::<Vec<_>>();
        Ok(match tier {
            Tier::Emulated => keys(self.due_emulated()),
            Tier::Quick | Tier::Grid => {
                let arch = device::open().map_or(Arch::Sm90, |gpu| gpu.arch());
                let of = |group| keys(ledger::due(&self.ledger, &self.standings, group, (tier, arch), false));
                Group::on(arch).into_iter().flat_map(of).collect()
            }
            Tier::Suite | Tier::Soak | Tier::Sanitized | Tier::Waived => Vec::new(),
        })
    }

    /// Runs the cases of units that have changed; whether all are right and none is left.
    pub(super) fn grid(&mut self, tier: Tier) -> anyhow::Result<bool> {
        let info = DeviceInfo::of(&device::open()?)?;
        let program = worker::program()?;
        let mut good = true;
        for group in Group::on(info.arch) {
            let due = ledger::due(&self.ledger, &self.standings, group, (tier, info.arch), self.args.again);
            if due.is_empty() {
                continue;
            }
            if self.until().is_some_and(|until| std::time::Instant::now() >= until) {
                eprintln!("{}: left for the next call", group.name());
                good = false;
                continue;
            }
            let due: Vec<Standing> = due.into_iter().cloned().collect();
            let extent = if tier == Tier::Grid { Extent::Full } else { Extent::Quick };
            let (results, is_whole) = self.cases(group, &due, (tier, extent), &info, &program)?;
            let failed = results.iter().filter(|result| result.status == Status::Failed).count();
            let due: Vec<&Standing> = due.iter().collect();
            // A library's choice that is wrong is a fault of the kernels, whichever ships.
            let is_judged = tier == Tier::Quick || (is_whole && failed == 0);
            let judged =
                if is_judged { ledger::judged(&due, &results, extent, info.sms)? } else { Vec::new() };
            let passed = results.iter().filter(|result| result.status == Status::Passed).count();
            if !judged.is_empty() {
                let on = on(&info);
                let id = self.ledger.add(&Session::run_of(tier, &group.name(), on, passed));
                judged.iter().for_each(|(own, entries)| own.note(&mut self.ledger, Some((&id, entries))));
                self.write()?;
            }
            eprintln!(
                "{}: {} of {} units judged, {passed} cases right, {failed} wrong{}",
                group.name(),
                judged.len(),
                due.len(),
                if is_whole { "" } else { ", others left for the next call" }
            );
            good &= is_whole && failed == 0 && judged.len() == due.len();
        }
        Ok(good)
    }

    fn cases(
        &self,
        group: Group,
        due: &[Standing],
        (tier, extent): (Tier, Extent),
        info: &DeviceInfo,
        program: &Program,
    ) -> anyhow::Result<(Vec<CaseResult>, bool)> {
        let keys: Vec<String> = due.iter().map(|own| own.unit.key()).collect();
        let library = tier == Tier::Grid && self.args.only.is_empty();
        let options = self.options(group, Cases::Units { keys, extent, library });
        // Cases of other code, of another judge or on another GPU are none of these.
        let codes: Vec<String> =
            due.iter().map(|own| format!("{}{}{:?}", own.tokens, own.launches, own.entries)).collect();
        let of = format!("{tier} {} {} {} {}", group.name(), ledger::JUDGE, info.gpu, ledger::digest(&codes));
        let end = std::time::Duration::from_secs(END);
        let until = self.until().map(|until| until.checked_sub(end).unwrap_or(until));
        let state = self.args.state.clone().unwrap_or_else(|| STATE.into());
        let resume = Resume { until, state: Some(state), of };
        let (results, is_whole) = validate::run_cases(&options, program, &resume, &mut progress::steps())?;
        for result in results.iter().filter(|result| result.status != Status::Passed).take(25) {
            eprintln!("{:?} {} [{}]: {}", result.status, result.name, result.kernel, result.detail);
        }
        Ok((results, is_whole))
    }

    /// Random problems, or sanitizers, which run the library's own choices: for every kernel; whether all is
    /// right.
    pub(super) fn around(&mut self, tier: Tier) -> anyhow::Result<bool> {
        let info = DeviceInfo::of(&device::open()?)?;
        let program = worker::program()?;
        let mut good = true;
        for group in Group::on(info.arch) {
            let name = group.name();
            if !self.args.takes(&name) && !self.any_of(&name) {
                continue;
            }
            if self.until().is_some_and(|until| std::time::Instant::now() >= until) {
                eprintln!("{name}: left for the next call");
                good = false;
                continue;
            }
            let (passed, cases, said) = if tier == Tier::Sanitized {
                let report = sanitize::run(&self.options(group, Cases::Sanitize), &program)?;
                let said: Vec<String> =
                    report.tools.iter().map(|tool| format!("{}: {}", tool.tool, tool.summary)).collect();
                (report.passed, report.tools.len(), said)
            } else {
                let seconds = self.args.seconds.unwrap_or(SOAK_SECONDS);
                let cases = Cases::Soak { seconds, seed: self.args.seed.unwrap_or(1) };
                let report = validate::run(&self.options(group, cases), &program, &mut progress::steps())?;
                let said = report.failed.iter().map(|result| format!("{}: {}", result.name, result.detail));
                (report.passed, report.groups.iter().map(|own| own.passed).sum(), said.collect())
            };
            said.iter().for_each(|line| eprintln!("{name}: {line}"));
            let what = if tier == Tier::Sanitized { "tools" } else { "cases" };
            eprintln!("{name}: {}, {cases} {what}", if passed { "right" } else { "NOT RIGHT" });
            good &= passed;
            if passed {
                let id = self.ledger.add(&Session::run_of(tier, &name, on(&info), cases));
                for own in ledger::due(&self.ledger.clone(), &self.standings, group, (tier, info.arch), true)
                {
                    let entries: Vec<&str> = own.entries.keys().map(String::as_str).collect();
                    own.note(&mut self.ledger, Some((&id, &entries)));
                }
                self.write()?;
            }
        }
        Ok(good)
    }

    /// Whether a unit that was asked for is of this kernel.
    fn any_of(&self, kernel: &str) -> bool {
        let of = |own: &Standing| own.unit.spec().is_some_and(|spec| spec.kernel.name() == kernel);
        self.standings.iter().any(of)
    }

    fn options(&self, group: Group, cases: Cases) -> Options {
        Options {
            family: Some(group.family),
            pass: group.pass,
            cases,
            groups: Vec::new(),
            kind: Kind::default(),
            filter: None,
            watchdog: self.args.watchdog.unwrap_or(WATCHDOG),
        }
    }
}

fn on(info: &DeviceInfo) -> String {
    format!("{}, driver {}", info.gpu, info.driver.as_deref().unwrap_or("unknown"))
}
