//! `fa validate`: is what the GPU computes right?

pub(crate) mod args;
mod configs;
mod sanitize;

use std::fmt::Write;

use fa_lab::record::Provenance;
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
    args.headers.choose()?;
    let options = args.options()?;
    let program = worker::program()?;
    if args.sanitize {
        return sanitize::command(args, &options, &program);
    }
    if args.all_configs {
        return configs::command(args, &options, &program);
    }
    let report = validate::run(&options, &program, &mut progress::steps())?;
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
        "{verdict}: {} of {cases} cases passed, {} skipped, in {:.1} s",
        report.groups.iter().map(|group| group.passed).sum::<usize>(),
        report.skipped.len(),
        report.seconds
    );
    text
}
