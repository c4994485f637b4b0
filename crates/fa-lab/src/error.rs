//! Errors of the lab.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use fa_attn::atomic_file::WriteError;
use fa_core::ProblemError;
use fa_core::spec::SpecError;
use fa_cpu::CpuError;
use fa_kernels::cudarc::driver::DriverError;
use fa_planner::plan::PlanError;

/// A result of the lab.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the lab.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Options that contradict each other or ask for what is not there; the text says what would work.
    #[error("{0}")]
    Request(String),
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// Compiling, loading or launching a kernel, or the driver itself.
    #[error(transparent)]
    Kernels(#[from] fa_kernels::Error),
    /// There is no CUDA driver, for work that needs a GPU.
    #[error(
        "no CUDA driver (libcuda) found: install NVIDIA's driver on a machine with a GPU of 8.0 or newer"
    )]
    NoDriver,
    /// No kernel runs on the GPU, for work that needs one.
    #[error("compute capability {major}.{minor} is not supported: use a GPU of 8.0 or newer")]
    OldGpu {
        /// Major part.
        major: i32,
        /// Minor part.
        minor: i32,
    },
    /// The driver, asked directly.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The CPU oracle.
    #[error(transparent)]
    Oracle(#[from] CpuError),
    /// The planner has no kernel.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A problem that contradicts itself.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// A spec that contradicts itself.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The file system, or a process's standard streams.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Any other error of the engine.
    #[error(transparent)]
    Engine(fa_attn::Error),
    /// A value without a JSON form, or text that is not what it should be.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// A case that cannot be tried on this GPU.
    #[error("{0}")]
    NotTried(String),
    /// A worker process that cannot be started or is lost; the text ends with its last lines of standard
    /// error.
    #[error("{0}")]
    Worker(String),
    /// The helper that times other libraries.
    #[error("{0}")]
    Peers(String),
    /// A record or a shipped spec that cannot be used.
    #[error("{0}")]
    Record(String),
    /// An error with what was being done.
    #[error("{doing}")]
    While {
        /// What was being done.
        doing: String,
        /// The error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl Error {
    /// An [`Error::Read`] about `path`, for `map_err`.
    pub fn read(path: &Path) -> impl FnOnce(io::Error) -> Error + '_ {
        move |source| Error::Read { path: path.to_owned(), source }
    }

    /// Whether the request was at fault, rather than its execution.
    pub fn is_request(&self) -> bool {
        match self {
            Error::Request(_)
            | Error::Read { .. }
            | Error::Write(_)
            | Error::Oracle(_)
            | Error::Plan(_)
            | Error::Problem(_)
            | Error::Spec(_) => true,
            Error::Kernels(error) => asks_too_much(error),
            Error::Engine(error) => engine_is_asked_too_much(error),
            Error::NoDriver
            | Error::OldGpu { .. }
            | Error::Driver(_)
            | Error::Io(_)
            | Error::Json(_)
            | Error::NotTried(_)
            | Error::Worker(_)
            | Error::Peers(_)
            | Error::Record(_)
            | Error::While { .. } => false,
        }
    }
}

impl From<fa_attn::Error> for Error {
    #[expect(
        clippy::wildcard_enum_match_arm,
        reason = "all errors are the engine's but those with a variant here"
    )]
    fn from(error: fa_attn::Error) -> Error {
        match error {
            fa_attn::Error::Kernels(error) => Error::Kernels(error),
            fa_attn::Error::Plan(error) => Error::Plan(error),
            fa_attn::Error::Problem(error) => Error::Problem(error),
            fa_attn::Error::Cpu(error) => Error::Oracle(error),
            other => Error::Engine(other),
        }
    }
}

/// `error` without the advice to use the CPU instead, for work that needs a GPU.
pub(crate) fn gpu_only(error: fa_attn::Error) -> Error {
    use fa_kernels::Error::{Device, NoDriver};
    if let fa_attn::Error::Kernels(NoDriver) = error {
        Error::NoDriver
    } else if let fa_attn::Error::Kernels(Device { major, minor }) = error {
        Error::OldGpu { major, minor }
    } else {
        error.into()
    }
}

/// Whether fa-kernels refuses its arguments, rather than failing to run them.
pub fn asks_too_much(error: &fa_kernels::Error) -> bool {
    use fa_kernels::Error::{
        Division, Mismatch, NoCode, Page, Problem, Scale, SharedMemory, Softcap, Spec, TooLong,
    };
    matches!(
        error,
        Division { .. }
            | Mismatch { .. }
            | NoCode { .. }
            | Page { .. }
            | Problem(_)
            | Scale { .. }
            | SharedMemory { .. }
            | Softcap { .. }
            | Spec(_)
            | TooLong { .. }
    )
}

/// Whether the engine refuses its arguments, rather than failing to run them.
pub fn engine_is_asked_too_much(error: &fa_attn::Error) -> bool {
    use fa_attn::Error::{
        BadTuned, BindOption, Captured, Cpu, Dtype, Isa, Kernels, Length, Memory, NoTunedTable, NoneAhead,
        NothingToMerge, NothingToTune, Pass, Plan, Problem, Read, Shape, Threads, TuningBudget, TuningFailed,
        TuningMemory, TuningOption, Write,
    };
    match error {
        BadTuned { .. }
        | BindOption { .. }
        | Captured
        | Cpu(_)
        | Dtype { .. }
        | Isa { .. }
        | Length { .. }
        | Memory { .. }
        | NoTunedTable
        | NothingToMerge
        | NothingToTune { .. }
        | Plan(_)
        | Problem(_)
        | Shape { .. }
        | TuningOption { .. } => true,
        Kernels(error) => asks_too_much(error),
        NoneAhead { compiler, .. } => asks_too_much(compiler),
        Pass { .. }
        | Read { .. }
        | Threads { .. }
        | TuningBudget { .. }
        | TuningFailed { .. }
        | TuningMemory { .. }
        | Write(_) => false,
    }
}

/// An error and its causes in one line; a cause that is already quoted is not repeated. Control characters,
/// which names and layouts from a file may hold, are escaped.
pub fn message(error: &(dyn std::error::Error + 'static)) -> String {
    let mut message = String::new();
    let mut next = Some(error);
    while let Some(cause) = next {
        let text = cause.to_string().replace('\n', " ");
        if message.is_empty() {
            message = text;
        } else if !message.contains(&text) {
            message = format!("{message}: {text}");
        }
        next = cause.source();
    }
    let shown = |c: char| if c.is_control() { c.escape_default().collect() } else { c.to_string() };
    message.chars().map(shown).collect()
}

/// The longest text file that is read: a spec or a problem takes a thousandth of it.
const MAX_TEXT_BYTES: u64 = 1 << 20;

/// The longest record that is read: those of the most problems that `fa tune` draws take as much.
const MAX_RECORD_BYTES: u64 = 128 << 20;

/// Reads a spec, a problem or a list: text of at most 1 MiB.
///
/// # Errors
/// [`Error::Read`].
pub fn read_text(path: &Path) -> Result<String> {
    read_at_most(path, MAX_TEXT_BYTES)
}

/// Reads what this program wrote, a line or more for each thing that it measured: text of at most 128 MiB.
///
/// # Errors
/// [`Error::Read`].
pub fn read_record(path: &Path) -> Result<String> {
    read_at_most(path, MAX_RECORD_BYTES)
}

fn read_at_most(path: &Path, bytes: u64) -> Result<String> {
    let read = || {
        let mut text = String::new();
        let taken = File::open(path)?.take(bytes + 1).read_to_string(&mut text)?;
        if taken as u64 > bytes {
            return Err(io::Error::other(format!("it is longer than {bytes} bytes")));
        }
        Ok(text)
    };
    read().map_err(Error::read(path))
}

/// Adds what was being done to an error.
pub(crate) trait Context<T> {
    /// Wraps an error in [`Error::While`].
    fn context(self, doing: impl Into<String>) -> Result<T>;
}

impl<T, E: std::error::Error + Send + Sync + 'static> Context<T> for std::result::Result<T, E> {
    fn context(self, doing: impl Into<String>) -> Result<T> {
        self.map_err(|source| Error::While { doing: doing.into(), source: Box::new(source) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_advice_names_a_backend_that_validate_tune_and_ladder_lack() {
        let without = |error: fa_kernels::Error| gpu_only(fa_attn::Error::Kernels(error)).to_string();
        for error in [fa_kernels::Error::NoDriver, fa_kernels::Error::Device { major: 7, minor: 5 }] {
            assert!(error.to_string().contains("CPU"), "the engine has one: {error}");
            let text = without(error);
            assert!(!text.contains("CPU") && text.contains("8.0 or newer"), "{text}");
        }
        let old = fa_kernels::Error::OldDriver { have: 11000, need: 12000 };
        assert_eq!(without(old), fa_kernels::Error::OldDriver { have: 11000, need: 12000 }.to_string());
    }

    #[test]
    fn causes_are_said_once() {
        let gone = || io::Error::other("it is gone");
        assert_eq!(message(&Error::Read { path: "x".into(), source: gone() }), "cannot read x: it is gone");
        let wrapped = Err::<(), _>(gone()).context("cannot start\na worker").unwrap_err();
        assert_eq!(message(&wrapped), "cannot start a worker: it is gone");
        assert!(!wrapped.is_request() && Error::Request("no".into()).is_request());
    }

    #[test]
    fn records_may_be_longer_than_specs() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), " ".repeat(MAX_TEXT_BYTES as usize + 1)).expect("written");
        let refused = message(&read_text(file.path()).unwrap_err());
        assert!(refused.ends_with("it is longer than 1048576 bytes"), "{refused}");
        assert_eq!(read_record(file.path()).expect("text").len(), MAX_TEXT_BYTES as usize + 1);
    }
}
