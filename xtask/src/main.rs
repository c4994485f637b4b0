//! Tasks of the workspace: `cargo xtask TASK`.

mod build;
mod codegen;
mod toolkit;
mod workspace;

use clap::Parser;

/// Tasks of the workspace.
#[derive(Parser)]
enum Task {
    Build(build::Args),
    Codegen(codegen::Args),
    Toolkit(toolkit::Args),
}

fn main() -> anyhow::Result<()> {
    match Task::parse() {
        Task::Build(args) => build::run(&args),
        Task::Codegen(args) => codegen::run(&args),
        Task::Toolkit(args) => toolkit::run(&args),
    }
}
