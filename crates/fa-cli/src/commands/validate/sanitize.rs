//! `fa validate --sanitize`: a small part of the grid under the tools of compute-sanitizer.

use fa_lab::Program;
use fa_lab::validate::Options;
use fa_lab::validate::sanitize::{self, Finding};

use super::args::ValidateArgs;
use crate::term::failure::Verdict;
use crate::term::output;

/// Runs the command: a bad verdict when a tool finds something.
///
/// # Errors
/// Without a GPU or compute-sanitizer.
pub(crate) fn command(args: &ValidateArgs, options: &Options, program: &Program) -> anyhow::Result<Verdict> {
    let report = sanitize::run(options, program)?;
    if args.json {
        output::print_json(&report)?;
    } else {
        output::print(&text(&report.tools))?;
    }
    Ok(if report.passed { Verdict::Good } else { Verdict::Bad })
}

fn text(findings: &[Finding]) -> String {
    let mut table = output::table(&["tool", "verdict", "s", "summary"]);
    for finding in findings {
        let verdict = if finding.clean { "clean" } else { "NOT CLEAN" };
        let seconds = format!("{:.0}", finding.seconds);
        table.add_row([finding.tool, verdict, &seconds, &finding.summary]);
    }
    let mut text = output::table_text(&table);
    for finding in findings {
        for line in &finding.first {
            text += &format!("{}: {line}\n", finding.tool);
        }
    }
    text
}
