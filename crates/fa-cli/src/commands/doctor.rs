//! `fa doctor`: what works on this machine, and what to do about what does not.

mod time;

use std::fmt::Write;

use fa_attn::doctor::{Check, Status, checks};
use serde::Serialize;

use crate::term::failure::Verdict;
use crate::term::output;
use clap::Args;

/// `fa doctor`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  fa doctor\n  fa doctor --json\n  fa doctor --time")]
pub(crate) struct DoctorArgs {
    /// Measure start-up on the GPU instead, with a warm and with an empty cache, and the host time of a call
    #[arg(long)]
    pub time: bool,
    /// Start up once and report how long it took: what --time runs in a separate process
    #[arg(long, hide = true, requires = "time", conflicts_with = "notices")]
    pub start: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Print the licences and copyright notices of the third-party crates in this program instead
    #[arg(long, conflicts_with_all = ["time", "json"])]
    pub notices: bool,
}

/// Written by `cargo xtask notices`.
const NOTICES: &str = include_str!("../../THIRD-PARTY.txt");

/// What is printed.
#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    checks: Vec<Check>,
}

/// Runs the command: a bad verdict when something is broken; what is merely missing is not.
///
/// # Errors
/// When standard output is closed; with `--time` also for want of a GPU.
pub(crate) fn command(args: &DoctorArgs) -> anyhow::Result<Verdict> {
    if args.start {
        return time::start();
    }
    if args.time {
        return time::command(args.json);
    }
    if args.notices {
        output::print(NOTICES)?;
        return Ok(Verdict::Good);
    }
    let checks = checks();
    let broken = checks.iter().any(|check| check.status == Status::Broken);
    let report = Report { version: env!("CARGO_PKG_VERSION"), checks };
    if args.json {
        output::print_json(&report)?
    } else {
        output::print(&text(&report))?
    }
    Ok(if broken { Verdict::Bad } else { Verdict::Good })
}

fn text(report: &Report) -> String {
    let mut text = format!("fa {}\n", report.version);
    for check in &report.checks {
        let mark = match check.status {
            Status::Ok => "ok",
            Status::Missing => "--",
            Status::Broken => "BAD",
        };
        writeln!(text, "{mark:<4}{:<14}{}", check.name, check.found)
            .expect("writing to a string cannot fail");
        if let Some(advice) = &check.advice {
            writeln!(text, "{:<18}{advice}", "").expect("writing to a string cannot fail");
        }
    }
    text
}
