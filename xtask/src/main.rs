//! Tasks of the workspace: `cargo xtask TASK`.
//!
//! - `ci`, `runner`, `passed`: all checks and tests, and which of them need not run again.
//! - `build`, `validate`: hand their flags to `fa`; `search`: lists tiles by the planner's guide.
//! - `packages`, `notices`: what would be published, built from it alone, and what of others is in it.
//! - `candle`, `python`, `toolkit`: what is tested with, or fetched from, elsewhere.
//! - `codegen`, `device`, `size`: generated headers, the format of CUDA sources, the program's size.
//! - `imports`, `lines`, `notebook`: tests of the whole tree, on `rust_tokens`.
//! - `workspace`: the workspace's folder, and cargo run in it.

mod build;
mod candle;
mod ci;
mod codegen;
mod device;
#[cfg(test)]
mod imports;
#[cfg(test)]
mod lines;
#[cfg(test)]
mod notebook;
mod notices;
mod packages;
mod passed;
mod python;
mod runner;
#[cfg(test)]
mod rust_tokens;
mod search;
mod size;
mod toolkit;
mod validate;
mod workspace;

use std::process::ExitCode;

use clap::Parser;

/// Tasks of the workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum Task {
    Build(build::Args),
    Candle(candle::Args),
    Ci(ci::Args),
    Codegen(codegen::Args),
    Device(device::Args),
    Notices(notices::Args),
    Package(packages::Args),
    Python(python::Args),
    Search(search::Args),
    Size(size::Args),
    Toolkit(toolkit::Args),
    Validate(validate::Args),
}

fn main() -> ExitCode {
    if let Some(cargo) = std::env::var_os(python::CARGO_BEHIND) {
        return python::stand_for_cargo(&cargo);
    }
    let done = match Task::parse() {
        Task::Build(args) => build::run(&args),
        Task::Candle(args) => candle::run(&args),
        Task::Ci(args) => ci::run(&args),
        Task::Codegen(args) => codegen::run(&args),
        Task::Device(args) => device::run(&args),
        Task::Notices(args) => notices::run(&args),
        Task::Package(args) => packages::run(&args),
        Task::Python(args) => python::run(&args),
        Task::Search(args) => search::run(args),
        Task::Size(args) => size::run(&args),
        Task::Toolkit(args) => toolkit::run(&args),
        Task::Validate(args) => validate::run(&args),
    };
    let Err(error) = done else { return ExitCode::SUCCESS };
    eprintln!("error: {error:#}");
    match error.downcast_ref::<workspace::FaEnded>() {
        Some(ended) => ExitCode::from(ended.code),
        None if error.is::<workspace::BadInput>() => ExitCode::from(2),
        None => ExitCode::FAILURE,
    }
}
