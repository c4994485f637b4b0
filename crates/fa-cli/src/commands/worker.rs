//! `fa worker`, hidden: the process that works on the GPU for `fa validate` and `fa tune`.

use anyhow::Context;
use fa_lab::Program;

use crate::term::failure::Verdict;

/// Its name on the command line.
const NAME: &str = "worker";

/// This program as a worker.
///
/// # Errors
/// When the system does not report the path of this program.
pub(crate) fn program() -> anyhow::Result<Program> {
    let executable = std::env::current_exe().context("cannot find this program to start it again")?;
    Ok(Program { executable, arguments: vec![NAME.to_owned()] })
}

/// Does the job on standard input.
///
/// # Errors
/// No job, no usable GPU, and what the GPU reports.
pub(crate) fn command() -> anyhow::Result<Verdict> {
    fa_lab::serve(std::io::stdin().lock())?;
    Ok(Verdict::Good)
}
