//! Errors and verdicts that end the program, with their exit codes.

use std::io;
use std::path::{Path, PathBuf};

use fa_attn::atomic_file::WriteError;
use fa_core::problem::ProblemError;
use fa_core::spec::SpecError;
use fa_cpu::CpuError;
use fa_lab::{asks_too_much, engine_is_asked_too_much};
use fa_planner::plan::PlanError;
use fa_planner::report::ReportError;

/// How a command that ran to its end judges what it saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Exit code 0.
    Good,
    /// Exit code 1: outputs differ, no plan exists, and the like.
    Bad,
}

/// Exit code of a failure that is not the user's, and of a negative verdict.
pub(crate) const EXIT_FAILURE: u8 = 1;
/// Exit code of bad input and bad usage.
pub(crate) const EXIT_BAD_INPUT: u8 = 2;

/// Input or usage that the user has to mend; exit code 2.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InputError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file is no safetensors file, or contradicts itself.
    #[error("{} is not a valid safetensors file: {reason}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong, with the numbers.
        reason: String,
    },
    /// A tensor that is needed is not there.
    #[error("{} has no tensor '{name}': it has {have}", path.display())]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The names that are there.
        have: String,
    },
    /// A tensor's element type is not supported, or differs from its neighbours'.
    #[error("tensor '{name}' holds {got}: {need}")]
    Dtype {
        /// The tensor.
        name: String,
        /// Its element type as the file names it.
        got: String,
        /// What would work.
        need: String,
    },
    /// A tensor's shape does not fit.
    #[error("tensor '{name}' has shape {got:?}: {need}")]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape.
        got: Vec<usize>,
        /// What would work.
        need: String,
    },
    /// The output cannot be written where it was asked for.
    #[error("cannot write {}: {reason}", path.display())]
    Target {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// Options that contradict each other or ask for what is not there.
    #[error("{0}")]
    Usage(String),
}

/// Standard output is closed or full.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to standard output")]
pub(crate) struct StdoutError(#[source] pub(crate) io::Error);

impl From<WriteError> for InputError {
    fn from(WriteError { path, source }: WriteError) -> InputError {
        InputError::Target { path, reason: source.to_string() }
    }
}

impl InputError {
    /// A [`InputError::Read`] about `path`, for `map_err`.
    pub(crate) fn read(path: &Path) -> impl FnOnce(io::Error) -> InputError + '_ {
        move |source| InputError::Read { path: path.to_owned(), source }
    }
}

/// The exit code for an error: 2 when anything in its chain is the user's to mend, otherwise 1.
pub(crate) fn exit_code(error: &anyhow::Error) -> u8 {
    let bad_input = error.chain().any(|cause| {
        cause.downcast_ref().is_some_and(asks_too_much)
            || cause.downcast_ref().is_some_and(fa_lab::Error::is_request)
            || cause.downcast_ref().is_some_and(engine_is_asked_too_much)
            || matches!(cause.downcast_ref(), Some(fa_emu::Error::Kernels(error)) if asks_too_much(error))
            || matches!(cause.downcast_ref(), Some(fa_emu::Error::Record { .. }))
            || cause.is::<InputError>()
            || cause.is::<PlanError>()
            || cause.is::<ReportError>()
            || cause.is::<ProblemError>()
            || cause.is::<SpecError>()
            || cause.is::<CpuError>()
    });
    if bad_input { EXIT_BAD_INPUT } else { EXIT_FAILURE }
}

/// Whether the reader of our standard output has closed it (`fa plan | head`), which is no failure. A pipe to
/// a process of our own that has ended is one.
pub(crate) fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let broken = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref().is_some_and(|StdoutError(error)| error.kind() == io::ErrorKind::BrokenPipe)
    };
    error.chain().any(broken)
}

/// An error and its causes in one line; a cause that its effect already quotes is not said twice.
pub(crate) fn message(error: &anyhow::Error) -> String {
    fa_lab::message(error.as_ref())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_said_once() {
        let source = || io::Error::other("it is gone");
        let read = InputError::Read { path: "x".into(), source: source() };
        assert_eq!(message(&anyhow::Error::from(read)), "cannot read x: it is gone");
        let wrapped = anyhow::Error::from(source()).context("cannot start\n2 threads");
        assert_eq!(message(&wrapped), "cannot start 2 threads: it is gone");
        let named = InputError::Usage("no layout \u{1b}[2Jx".to_owned());
        assert_eq!(message(&named.into()), "no layout \\u{1b}[2Jx");
        assert_eq!(exit_code(&wrapped), EXIT_FAILURE);
        assert_eq!(exit_code(&InputError::Usage("no".into()).into()), EXIT_BAD_INPUT);
    }

    #[test]
    fn a_closed_pipe_is_found_below_its_context() {
        let of = |kind: io::ErrorKind| anyhow::Error::from(StdoutError(io::Error::from(kind)));
        assert!(is_closed_pipe(&of(io::ErrorKind::BrokenPipe).context("of a plan")));
        assert!(!is_closed_pipe(&of(io::ErrorKind::StorageFull)));
        // A worker or a peer that is gone.
        let gone =
            anyhow::Error::from(io::Error::from(io::ErrorKind::BrokenPipe)).context("the peers are gone");
        assert!(!is_closed_pipe(&gone));
        assert!(!is_closed_pipe(&anyhow::anyhow!("cannot write")));
    }
}
