//! `fa validate`: is what the GPU computes right?

pub mod args;
mod cases;
mod configs;
mod gradients;
mod knobs;
mod oracle;
mod sanitize;
mod soak;
mod supervise;
mod worker;

use std::fmt::Write;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context;
use fa_core::{Arch, Family};
use fa_planner::plan::account;
use serde::Serialize;

use crate::cuda::Device;
use crate::record::{self, Fingerprint, Provenance, State};
use crate::spec_file::read_spec_of;
use crate::term::failure::{InputError, Verdict};
use crate::term::output;
use args::ValidateArgs;
use cases::{Action, Case, Extent};
use worker::{CaseResult, Status};

/// What is printed and recorded.
#[derive(Debug, Serialize)]
struct Report {
    kind: &'static str,
    passed: bool,
    #[serde(flatten)]
    provenance: Provenance,
    /// `sm80` or `sm90`: the kernels validated.
    family: String,
    seconds: f64,
    groups: Vec<Group>,
    /// Cases that are wrong, hang or crash.
    failed: Vec<CaseResult>,
    /// Cases that could not be tried here.
    skipped: Vec<CaseResult>,
    /// Shipped kernels that passed, by the hash of their sources.
    kernels: Vec<Fingerprint>,
}

/// The cases of one kind.
#[derive(Debug, Serialize)]
struct Group {
    group: String,
    cases: usize,
    passed: usize,
    failed: usize,
    skipped: usize,
    /// Kernels that ran.
    kernels: usize,
    /// The largest error as a share of its tolerance.
    worst: f64,
}

/// Runs the command: a bad verdict when a case fails.
///
/// # Errors
/// Without a driver, a GPU or a compiler, and for bad input.
pub fn command(args: &ValidateArgs) -> anyhow::Result<Verdict> {
    if args.check_records {
        return check_records(args);
    }
    if args.worker {
        return work(args);
    }
    args.pass()?;
    if let Some(path) = &args.spec {
        read_spec_of(path, args.mode)?;
    }
    // A machine without a GPU is told so at once; the context is given back before a worker opens its own.
    let arch = Device::open()?.kernels.arch();
    let family = args.arch.unwrap_or(Family::native(arch));
    let watchdog = Duration::from_secs(u64::from(args.watchdog));
    if args.sanitize {
        return sanitize::command(args, family, worker_command);
    }
    if args.all_configs {
        let work = |done| supervise::run(worker_command, watchdog, None, done);
        return configs::command(args, (family, arch), || Provenance::new(&Device::open()?), work);
    }
    let start = Instant::now();
    let deadline = args.soak.map(|seconds| start + Duration::from_secs(u64::from(seconds)));
    let results = supervise::run(worker_command, watchdog, deadline, Vec::new())?;
    if results.is_empty() {
        let filter = args.filter.as_deref().unwrap_or_default();
        return Err(InputError::Usage(format!("no case has '{filter}' in its name")).into());
    }
    let report = report(args, family, results, start.elapsed())?;
    if args.record && report.passed {
        let name = format!("{}{}-{}.json", report.family, args.suffix(), report.provenance.gpu_slug());
        let folder = if args.soak.is_some() { record::SOAKED } else { record::VALIDATED };
        let path = record::write(&args.results, folder, &name, &output::json_text(&report)?)?;
        eprintln!("wrote {}", path.display());
    } else if args.record {
        eprintln!("note: no record is written of a validation that failed");
    }
    if args.json {
        output::print_json(&report)?
    } else {
        output::print(&text(&report))?
    }
    Ok(if report.passed { Verdict::Good } else { Verdict::Bad })
}

/// This very command as a worker.
fn worker_command() -> anyhow::Result<Command> {
    let program = std::env::current_exe().context("cannot find this program to start it again")?;
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).arg("--worker");
    Ok(command)
}

fn work(args: &ValidateArgs) -> anyhow::Result<Verdict> {
    let family = args.arch;
    if let Some(seconds) = args.soak {
        worker::soak(args.seed, Duration::from_secs(u64::from(seconds)), family, args.mode)?;
        return Ok(Verdict::Good);
    }
    worker::run(|arch, family| chosen_cases(args, arch, family), family)?;
    Ok(Verdict::Good)
}

/// The cases that the flags ask for.
fn chosen_cases(args: &ValidateArgs, arch: Arch, family: Family) -> anyhow::Result<Vec<Case>> {
    let extent = if args.is_full() { Extent::Full } else { Extent::Quick };
    let repeat = args.repeat.unwrap_or(if args.is_full() { 1000 } else { 100 }) as usize;
    let mut chosen = if args.sanitize {
        sanitize::cases(args.mode)
    } else if args.all_configs {
        configs::cases(&crate::configs::list(&args.headdim, args.pass()?, family, arch)?)
    } else if let Some(path) = &args.spec {
        let spec = read_spec_of(path, args.mode)?;
        let mut cases = cases::of_spec("spec", &spec.to_string(), &spec, Extent::Full);
        let repeated = cases.iter().max_by_key(|case| case.problem.lengths.max_q().min(1024)).cloned();
        cases.extend(repeated.map(|case| Case { action: Action::Repeat(repeat), ..case }));
        cases
    } else {
        let library = if args.mode.is_backward() { cases::gradients } else { cases::library };
        let mut cases = library(extent, repeat);
        for (kernel, spec, archs) in record::shipped()? {
            let of_the_pass = spec.kernel.is_backward() == args.mode.is_backward();
            // Records know a kernel by its sources, whatever the target: one that ships for other architectures is validated where it runs.
            let runs = archs.contains(&arch) || account(&spec, arch).is_ok();
            if runs && spec.kernel.family() == family && of_the_pass {
                cases.extend(cases::of_spec("shipped", &kernel.file, &spec, extent));
            }
        }
        // A backward's switches are all configurations of the planner's: --all-configs.
        let knobs = if args.mode.is_backward() { Vec::new() } else { knobs::specs(family, arch) };
        for knob in knobs {
            cases.extend(cases::of_spec("knobs", &knob.name, &knob.spec, Extent::Quick));
        }
        cases
    };
    if let Some(filter) = &args.filter {
        chosen.retain(|case| case.name().contains(filter.as_str()));
    }
    Ok(chosen)
}

fn report(
    args: &ValidateArgs,
    family: Family,
    results: Vec<CaseResult>,
    time: Duration,
) -> anyhow::Result<Report> {
    let passed = results.iter().all(|result| result.status != Status::Failed);
    // A filter leaves out cases that a kernel would have to pass, as the other ways to choose cases do.
    let whole = args.filter.is_none() && args.spec.is_none() && args.soak.is_none();
    let kernels = if whole { passed_kernels(&results)? } else { Vec::new() };
    let mut report = Report {
        kind: if args.soak.is_some() { "soak" } else { "validate" },
        passed,
        provenance: Provenance::new(&Device::open()?)?,
        family: family.to_string(),
        seconds: time.as_secs_f64(),
        groups: groups(&results),
        failed: Vec::new(),
        skipped: Vec::new(),
        kernels,
    };
    for result in results {
        match result.status {
            Status::Passed => {}
            Status::Failed => report.failed.push(result),
            Status::Skipped => report.skipped.push(result),
        }
    }
    Ok(report)
}

/// Shipped kernels all of whose cases passed.
fn passed_kernels(results: &[CaseResult]) -> anyhow::Result<Vec<Fingerprint>> {
    let all_right = |kernel: &Fingerprint| {
        let own: Vec<&CaseResult> = results
            .iter()
            .filter(|result| {
                result.name.starts_with("shipped/") && result.name.ends_with(&format!(" by {}", kernel.file))
            })
            .collect();
        !own.is_empty() && own.iter().all(|result| result.status == Status::Passed)
    };
    Ok(record::shipped()?.into_iter().map(|(kernel, ..)| kernel).filter(all_right).collect())
}

fn groups(results: &[CaseResult]) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    let mut kernels: Vec<std::collections::HashSet<&str>> = Vec::new();
    let mut sorted: Vec<&CaseResult> = results.iter().collect();
    sorted.sort_by(|a, b| a.name.cmp(&b.name));
    for result in sorted {
        let name = result.name.split('/').next().unwrap_or_default();
        if groups.last().is_none_or(|group| group.group != name) {
            let group = name.to_owned();
            groups.push(Group { group, cases: 0, passed: 0, failed: 0, skipped: 0, kernels: 0, worst: 0.0 });
            kernels.push(Default::default());
        }
        let (Some(group), Some(kernels)) = (groups.last_mut(), kernels.last_mut()) else { continue };
        group.cases += 1;
        match result.status {
            Status::Passed => group.passed += 1,
            Status::Failed => group.failed += 1,
            Status::Skipped => group.skipped += 1,
        }
        if !result.kernel.is_empty() {
            kernels.insert(&result.kernel);
        }
        group.kernels = kernels.len();
        group.worst = group.worst.max(result.ratio);
    }
    groups
}

fn text(report: &Report) -> String {
    let Provenance { device, compiler, .. } = &report.provenance;
    let mut text = format!(
        "{} kernels on {}, driver {}, {compiler}\n",
        report.family,
        device.gpu,
        device.driver.as_deref().unwrap_or("unknown")
    );
    let mut table = output::table(&[
        "group",
        "cases",
        "passed",
        "failed",
        "skipped",
        "kernels",
        "worst error / tolerance",
    ]);
    for group in &report.groups {
        table.add_row([
            group.group.clone(),
            group.cases.to_string(),
            group.passed.to_string(),
            group.failed.to_string(),
            group.skipped.to_string(),
            group.kernels.to_string(),
            format!("{:.2}", group.worst),
        ]);
    }
    text += &output::table_text(&table);
    const MOST: usize = 25;
    for (what, list) in [("FAILED", &report.failed), ("skipped", &report.skipped)] {
        for result in list.iter().take(MOST) {
            let by = if result.kernel.is_empty() { String::new() } else { format!(" [{}]", result.kernel) };
            let _ = writeln!(text, "{what} {}{by}: {}", result.name, result.detail);
        }
        if list.len() > MOST {
            let _ = writeln!(text, "and {} more {what}; --json lists all", list.len() - MOST);
        }
    }
    let cases: usize = report.groups.iter().map(|group| group.cases).sum();
    let verdict = if report.passed { "all right" } else { "NOT RIGHT" };
    let _ = writeln!(
        text,
        "{verdict}: {} of {cases} cases passed, {} skipped, in {:.1} s; {} shipped kernels validated",
        report.groups.iter().map(|group| group.passed).sum::<usize>(),
        report.skipped.len(),
        report.seconds,
        report.kernels.len()
    );
    text
}

/// Compares the shipped kernels with the records: a bad verdict when one is neither validated nor excused.
fn check_records(args: &ValidateArgs) -> anyhow::Result<Verdict> {
    let standings = record::standings(&args.results)?;
    let unknown = standings.iter().filter(|standing| standing.state == State::Unknown).count();
    if args.json {
        output::print_json(&serde_json::json!({ "passed": unknown == 0, "kernels": standings }))?;
    } else {
        let mut table = output::table(&["kernel", "sources", "standing"]);
        for standing in &standings {
            let state = match &standing.state {
                State::Validated { record } => format!("validated: {record}"),
                State::Excused { reason } => format!("not validated: {reason}"),
                State::Unknown => "CHANGED since its last validation, or never validated".to_owned(),
            };
            table.add_row([&standing.kernel.file, &standing.kernel.sources[..12], &state]);
        }
        let advice = if unknown == 0 {
            String::new()
        } else {
            format!(
                "{unknown} kernels: run `fa validate --record` on a GPU, or name them in {} with the reason\n",
                args.results.join(record::UNVALIDATED).display()
            )
        };
        output::print(&(output::table_text(&table) + &advice))?;
    }
    Ok(if unknown == 0 { Verdict::Good } else { Verdict::Bad })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: ValidateArgs,
    }

    #[test]
    fn kernels_that_ship_for_other_architectures_are_validated_where_they_run() {
        let command = ["validate", "--mode", "bwd", "--arch", "sm80", "--quick"];
        let Line { args } = Line::parse_from(command);
        let validated = |arch, file: &str| {
            let cases = chosen_cases(&args, arch, Family::Sm80).expect("cases");
            cases.iter().any(|case| case.name().ends_with(&format!(" by {file}")))
        };
        let (small, large) = ("sm80/hd64-causal-bf16-99kb-bwd.ron", "sm80/hd64-causal-bf16-bwd.ron");
        assert!(validated(Arch::Sm90, small) && validated(Arch::Sm90, large));
        assert!(validated(Arch::Sm86, small) && !validated(Arch::Sm86, large), "163 KB do not fit");
    }
}
