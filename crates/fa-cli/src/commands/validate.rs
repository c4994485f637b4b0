//! `fa validate`: is what the GPU computes right?

pub(crate) mod args;
mod configs;
mod sanitize;

use std::fmt::Write;

use fa_core::counted;
use fa_lab::record::{self, Provenance, State};
use fa_lab::validate::{self, Report};

use crate::commands::worker;
use crate::term::failure::Verdict;
use crate::term::{output, progress};

use args::ValidateArgs;

/// Runs the command: a bad verdict when a case fails.
///
/// # Errors
/// Without a driver, a GPU or a compiler, and for bad input.
pub(crate) fn command(args: &ValidateArgs) -> anyhow::Result<Verdict> {
    if args.check_records {
        return check_records(args);
    }
    let options = args.options()?;
    let program = worker::program()?;
    if args.sanitize {
        return sanitize::command(args, &options, &program);
    }
    if args.all_configs {
        return configs::command(args, &options, &program);
    }
    let report = validate::run(&options, &program, &mut progress::steps())?;
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
    for (kernel, cases) in report.passed_over.iter().take(MOST) {
        let _ = writeln!(text, "passed over {} in {cases} cases: {}", kernel.kernel, kernel.fault);
    }
    if report.passed_over.len() > MOST {
        let _ = writeln!(text, "and {} more passed over; --json lists all", report.passed_over.len() - MOST);
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
                "{}: run `fa validate --record` on a GPU, or list in {} with the reason\n",
                counted(unknown, "kernel"),
                args.results.join(record::UNVALIDATED).display()
            )
        };
        output::print(&(output::table_text(&table) + &advice))?;
    }
    Ok(if unknown == 0 { Verdict::Good } else { Verdict::Bad })
}
