//! What an engine refuses, and what fails below it.

use std::path::PathBuf;
use std::time::Duration;

use fa_core::{Arch, Dtype, Pass, ProblemError, counted};
use fa_cpu::CpuError;
use fa_cpu::simd::Isa;
use fa_kernels::atomic_file::WriteError;
use fa_planner::plan::PlanError;

/// An error of this crate. Each says what was asked, what the limit is and what would work.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The problem contradicts itself.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// The CPU implementation refuses the call.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// Compiling, loading or launching a kernel fails.
    #[error(transparent)]
    Kernels(#[from] fa_kernels::Error),
    /// No kernel computes the problem.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// No compiler works, and the kernels compiled ahead do not compute the problem.
    #[error("none of the {have} kernels compiled ahead for {arch} computes this {}; {compiler}", pass.name())]
    NoneAhead {
        /// The GPU's architecture.
        arch: Arch,
        /// The pass.
        pass: Pass,
        /// Kernels compiled ahead for it.
        have: usize,
        /// Why the compiler does not work.
        compiler: Box<fa_kernels::Error>,
    },
    /// The CPU lacks an instruction set that was asked for.
    #[error("this CPU has no {wanted}: it has {}", names(.have))]
    Isa {
        /// The one asked for.
        wanted: Isa,
        /// Those that would work.
        have: Vec<Isa>,
    },
    /// The system gives no threads.
    #[error("cannot start {}: {reason}", counted(*.threads, "thread"))]
    Threads {
        /// How many were asked for.
        threads: usize,
        /// The system's answer.
        reason: String,
    },
    /// Options of a bind that contradict each other, or the pass.
    #[error("{option}: {reason}")]
    BindOption {
        /// The option.
        option: &'static str,
        /// What contradicts it, and what would work.
        reason: String,
    },
    /// A call was given tensors of the other pass.
    #[error("the call computes the {}, its tensors are those of the {}", bound.name(), given.name())]
    Pass {
        /// What the call is bound to.
        bound: Pass,
        /// What the tensors are of.
        given: Pass,
    },
    /// A call was given tensors of a type that it is not bound to.
    #[error("the call computes in {need}, its tensors hold {got}")]
    Dtype {
        /// The tensors' type.
        got: Dtype,
        /// The problem's.
        need: Dtype,
    },
    /// The host takes part in what a captured stream is to compute.
    #[error(
        "the stream is captured, and the host adds up gradients of arrays that are read twice, or at other \
         indices than b, h, hk, q and k: launch this backward outside the graph, or read the array once, at \
         these indices"
    )]
    Captured,
    /// A tensor's shape and its data differ in length.
    #[error("shape {shape:?} needs {need} elements, the data has {have}")]
    Length {
        /// `[batch, seqlen, heads, dim]`.
        shape: [usize; 4],
        /// The product; `usize::MAX` beyond.
        need: usize,
        /// Elements given.
        have: usize,
    },
    /// A result does not fit in memory.
    #[error("{tensor} takes {bytes} bytes, which the system does not give: split the batch")]
    Memory {
        /// The tensor.
        tensor: &'static str,
        /// Its size; `usize::MAX` beyond.
        bytes: usize,
    },
    /// A tensor's shape contradicts another's.
    #[error("{tensor} is [batch, seqlen, heads, dim] = {got:?}: {need}")]
    Shape {
        /// The tensor.
        tensor: &'static str,
        /// Its shape.
        got: [usize; 4],
        /// What it must be.
        need: String,
    },
    /// No partial result is given to be merged.
    #[error("nothing to merge: give at least one partial result")]
    NothingToMerge,
    /// Tuning is asked of an engine that runs no GPU kernels.
    #[error(
        "the {backend} has nothing to tune: tuning chooses among GPU kernels; leave it off, or use a \
         machine with a GPU of 8.0 or newer"
    )]
    NothingToTune {
        /// What computes instead.
        backend: &'static str,
    },
    /// An option of tuning is out of range.
    #[error("tuning: {name} is {value}, it must be {need}")]
    TuningOption {
        /// `candidates` or `budget`.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it must be.
        need: &'static str,
    },
    /// There is no path for the table of winners.
    #[error("tuning has no file for its winners: set FA_TUNED to a path, or HOME for the default")]
    NoTunedTable,
    /// The budget of tuning was spent before there was anything to compare.
    #[error(
        "tuning: {measured} of {candidates} kernels were measured within {budget:?}, it takes at least 2: \
         allow more time, or run `fa tune`"
    )]
    TuningBudget {
        /// The time allowed.
        budget: Duration,
        /// Kernels measured.
        measured: usize,
        /// Kernels to measure.
        candidates: usize,
    },
    /// No candidate of tuning could be measured.
    #[error("tuning: no kernel could be measured, the bound one because: {why}")]
    TuningFailed {
        /// Why the first could not.
        why: String,
    },
    /// The tensors that kernels are timed on would take too much of the GPU's memory.
    #[error(
        "tuning: {need} bytes of device memory are needed besides the caller's, {limit} are allowed (half of \
         what is free): tune when more is free, or run `fa tune`"
    )]
    TuningMemory {
        /// Bytes needed.
        need: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// A table of tuned kernels cannot be read.
    #[error(
        "{path} is not a table of tuned kernels: {reason}; remove it, or run `fa tune` again",
        path = .path.display()
    )]
    BadTuned {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A file cannot be read.
    #[error("{path}: {source}", path = .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

impl Error {
    /// An error of the driver, for `map_err`.
    pub(crate) fn driver(doing: &'static str) -> impl Fn(fa_kernels::cudarc::driver::DriverError) -> Error {
        move |source| Error::Kernels(fa_kernels::Error::Driver { doing, source })
    }
}

fn names(isas: &[Isa]) -> String {
    isas.iter().map(|isa| isa.name()).collect::<Vec<_>>().join(", ")
}
