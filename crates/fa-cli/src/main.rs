//! The program `fa`: plan, run, check and measure attention.
//!
//! - `cli`, `flags`: the command line; `commands`: one file for each command.
//! - `safetensors`, `attention`, `sequences`, `append`: files of tensors, and the problems that they pose.
//! - `compute`: runs such a problem.
//! - `plan`: presents plans; `page`: as an HTML page; `draw`: plots and diagrams as SVG.
//! - `term`: tables, progress, output files, failures.

mod append;
mod attention;
mod cli;
mod commands;
mod compute;
mod draw;
mod flags;
#[cfg(test)]
mod hostile_numbers;
mod kv_tensor;
mod named_rows;
mod names;
mod packed_rows;
mod page;
mod plan;
mod programs;
mod safetensors;
mod sequences;
mod term;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use clap::CommandFactory;

use crate::cli::{Cli, Command};
use crate::term::failure;
use crate::term::failure::{EXIT_FAILURE, StdoutError, Verdict};
use crate::term::stop;

fn main() -> ExitCode {
    let cli = match Cli::given() {
        Ok(cli) => cli,
        Err(error) => return explain(&error),
    };
    show_traces(cli.verbose);
    fa_cpu::threads::prepare_global_pool();
    stop::clean_up_when_told_to();
    match dispatch(cli.command) {
        Ok(Verdict::Good) => ExitCode::SUCCESS,
        Ok(Verdict::Bad) => ExitCode::from(EXIT_FAILURE),
        Err(error) if failure::is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // Standard error may be closed too; then nobody reads.
            let _ = writeln!(std::io::stderr(), "error: {}", failure::message(&error));
            ExitCode::from(failure::exit_code(&error))
        }
    }
}

/// Prints help, or what is wrong with the arguments.
fn explain(error: &clap::Error) -> ExitCode {
    match error.print() {
        Err(full) if !error.use_stderr() && full.kind() != std::io::ErrorKind::BrokenPipe => {
            let _ = writeln!(std::io::stderr(), "error: {}", failure::message(&StdoutError(full).into()));
            ExitCode::from(EXIT_FAILURE)
        }
        Ok(()) | Err(_) => ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(EXIT_FAILURE)),
    }
}

fn dispatch(command: Command) -> anyhow::Result<Verdict> {
    match command {
        Command::Run(args) => commands::run::command(&args),
        Command::Plan(args) => commands::plan::command(&args),
        Command::Check(args) => commands::check::command(&args),
        Command::CheckMod(args) => commands::check_mod::command(&args),
        Command::Bench(args) => commands::bench::command(&args),
        Command::Build(args) => commands::build::command(&args),
        Command::Validate(args) => commands::validate::command(&args),
        Command::Emulate(args) => commands::emulate::command(&args),
        Command::Tune(args) => commands::tune::command(&args),
        Command::Ladder(args) => commands::ladder::command(&args),
        Command::Prove(args) => commands::prove::command(&args),
        Command::Records(args) => commands::records::command(&args),
        Command::Doctor(args) => commands::doctor::command(&args),
        Command::Dist(args) => commands::dist::command(&args),
        Command::Worker => commands::worker::command(),
        Command::Completions(args) => commands::manual::completions(&args, Cli::command()),
        Command::Man(args) => commands::manual::man(&args, Cli::command()),
    }
}

fn show_traces(verbose: u8) {
    let level = match verbose {
        0 => return,
        1 => tracing::Level::INFO,
        2 => tracing::Level::DEBUG,
        _ => tracing::Level::TRACE,
    };
    let colours =
        std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|no| no.is_empty());
    tracing_subscriber::fmt().with_max_level(level).with_ansi(colours).with_writer(std::io::stderr).init();
}
