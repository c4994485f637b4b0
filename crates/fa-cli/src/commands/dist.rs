//! `fa dist`: attention over several GPUs, planned, checked and measured.

mod args;
mod found;
mod jobs;
mod memory;
mod parent;
mod predict;
mod rank;
mod tensors;

pub(crate) use args::DistArgs;
use args::{DistCommand, TransportName};

use crate::term::failure::Verdict;

/// Runs the command.
///
/// # Errors
/// Bad input, no GPU, and what a rank reports.
pub(crate) fn command(args: &DistArgs) -> anyhow::Result<Verdict> {
    match &args.command {
        DistCommand::Plan(args) => predict::plan(args),
        DistCommand::Check(args) if args.run.transport == TransportName::Memory => memory::check_on_cpu(args),
        DistCommand::Check(args) => parent::check(args),
        DistCommand::Bench(args) => parent::bench(args),
        DistCommand::Rank => rank::command(),
    }
}
