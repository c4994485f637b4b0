//! Errors between a spec and a launch.

use std::path::{Path, PathBuf};

use cudarc::driver::DriverError;
use fa_core::program::ALIGNED_BYTES;
use fa_core::{AppendError, Arch, Dtype, MergeError, Mismatch, ProblemError, SpecError, Unserved};

use crate::Fault;
use crate::atomic_file::WriteError;

/// An error of this crate. Each states the request, the limit and what would work.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or folder could not be read or written.
    #[error("{path}: {source}", path = .path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A header that a kernel includes does not exist.
    #[error("{from} includes {name}, which is not among the kernels' headers")]
    MissingHeader {
        /// The header.
        name: String,
        /// Where it is included.
        from: String,
    },
    /// An array that a program declares `aligned` is not.
    #[error(
        "the program's array {name} is declared `aligned`, and its rows do not all begin on multiples of \
         {ALIGNED_BYTES} bytes with an element for each key, one behind the other: leave `aligned` out, or \
         pad and copy the array"
    )]
    Unaligned {
        /// The array.
        name: String,
    },
    /// An array of a program has no elements.
    #[error("the program's array {name} has no element along axis {axis}: give it one at least")]
    ProgramArray {
        /// The array.
        name: String,
        /// The axis.
        axis: usize,
    },
    /// The gradient of an array whose axis is shorter than what indexes it, and not of one element.
    #[error(
        "the gradient of the program's array {name}: its axis {axis} has {extent} elements; it takes {len} \
         or more, or 1 that all share"
    )]
    GradientExtent {
        /// The array.
        name: String,
        /// The axis.
        axis: usize,
        /// Its elements.
        extent: i32,
        /// What it is indexed by.
        len: usize,
    },
    /// The spec is not valid, or not for this architecture.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// No compiler was found.
    #[error(
        "no {library} found (looked in {tried}): {}, or set {variable} to it",
        match *library {
            "nvcc" => "compile by NVRTC, which needs no toolkit, or install a CUDA toolkit",
            _ => "run `cargo xtask toolkit` in the fa workspace, or `pip install nvidia-cuda-nvrtc`",
        }
    )]
    NoCompiler {
        /// The library or program that was looked for.
        library: &'static str,
        /// Where.
        tried: String,
        /// The environment variable that names it.
        variable: &'static str,
    },
    /// A compiler is there but cannot be used.
    #[error("{path} cannot be used: {reason}", path = .path.display())]
    BadCompiler {
        /// The library or program.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The compiler does not know the architecture.
    #[error("{compiler} does not compile for {arch}: use NVRTC {need} or newer")]
    ArchTooNew {
        /// The compiler and its version.
        compiler: String,
        /// The architecture.
        arch: Arch,
        /// The first version that knows it.
        need: &'static str,
    },
    /// The kernel does not compile.
    #[error("{name} does not compile for {target}{at}:\n{log}", at = at(.log_file))]
    Compile {
        /// The spec's name.
        name: String,
        /// The target.
        target: String,
        /// The compiler's messages.
        log: String,
        /// The file of the whole log, when a folder is writable.
        log_file: Option<PathBuf>,
    },
    /// The compiled kernel has a fault: it spills, its wgmma is serialised or its setmaxnreg ignored.
    #[error("{name} for {target} is refused: {fault}{at}", at = at(.log_file))]
    Refused {
        /// The spec's name.
        name: String,
        /// The target.
        target: String,
        /// Why.
        fault: Fault,
        /// The file of the whole log, when a folder is writable.
        log_file: Option<PathBuf>,
    },
    /// Others may have put kernels into the cache.
    #[error(
        "{path} is not used as kernel cache: {reason}, and a GPU would run what others have put there; \
         {advice}",
        path = .path.display()
    )]
    UntrustedCache {
        /// The cache's folder, or an entry's.
        path: PathBuf,
        /// Whose it is, or who may write to it.
        reason: String,
        /// What would work.
        advice: String,
    },
    /// A bundle of compiled kernels cannot be read.
    #[error("{path} is no bundle: {reason}; write one with `cargo xtask build`", path = .path.display())]
    BadBundle {
        /// Its manifest, or a file that it names.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// There is no CUDA driver.
    #[error("no CUDA driver (libcuda) found: install NVIDIA's driver, or use the CPU backend")]
    NoDriver,
    /// The driver is too old.
    #[error("the driver supports CUDA {}.{}, the kernels need {}.{}: update the \
             driver", have / 1000, have % 1000 / 10, need / 1000, need % 1000 / 10)]
    OldDriver {
        /// `1000 * major + 10 * minor`.
        have: i32,
        /// `1000 * major + 10 * minor`.
        need: i32,
    },
    /// The driver returned an error.
    #[error("{doing}: {source}")]
    Driver {
        /// The operation.
        doing: &'static str,
        /// Its answer.
        source: DriverError,
    },
    /// A sequence in a packed batch ends before it starts, or starts before the first row.
    #[error("{name}[{index}] is {value}, below {least}: starts ascend from 0")]
    Descending {
        /// The extra.
        name: &'static str,
        /// Its element.
        index: usize,
        /// Its value.
        value: i32,
        /// The element before it, or 0.
        least: i32,
    },
    /// The sequences of a packed batch have more rows than the problem.
    #[error("{name} ends at row {rows}, and the problem has {most}: bind a problem of {rows} rows or more")]
    Beyond {
        /// The extra.
        name: &'static str,
        /// The rows of all sequences.
        rows: usize,
        /// The rows of the problem.
        most: usize,
    },
    /// No kernel runs on the GPU.
    #[error(
        "compute capability {major}.{minor} is not supported: use a GPU of 8.0 or newer, or the CPU backend"
    )]
    Device {
        /// Major part.
        major: i32,
        /// Minor part.
        minor: i32,
    },
    /// The problem contradicts itself.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// A launch plan divides tiles as the kernel cannot.
    #[error("{name} = {value}: use {need}")]
    Division {
        /// `splits` or `cluster`.
        name: &'static str,
        /// Its value.
        value: usize,
        /// What would work.
        need: String,
    },
    /// The kernel's shared memory is more than a CTA has.
    #[error(
        "{name} does not fit {arch}: shared memory: needs {need} B of {have} B ({} B too many)",
        need - have
    )]
    SharedMemory {
        /// The spec's name.
        name: String,
        /// The architecture.
        arch: Arch,
        /// Bytes needed.
        need: u32,
        /// Bytes that a CTA may use.
        have: u32,
    },
    /// The kernel's device code does not have what its spec asks for.
    #[error("{what}: {kernel} has no device code for it; use a problem without it")]
    NoCode {
        /// The kernel.
        kernel: &'static str,
        /// What it lacks.
        what: &'static str,
    },
    /// A kernel does not compute the problem that it was asked to.
    #[error("{what}: the kernel computes {kernel}; the problem has {problem}")]
    Mismatch {
        /// What differs.
        what: &'static str,
        /// What the kernel computes.
        kernel: String,
        /// What was asked.
        problem: String,
    },
    /// Pages that a kernel cannot load.
    #[error("{}", Unserved::Page { page: *page, tile_n: *tile_n, head_dim: *head_dim, multiple: *multiple })]
    Page {
        /// Keys of a page.
        page: usize,
        /// Keys of the kernel's tiles.
        tile_n: u32,
        /// The kernel's head dim.
        head_dim: u32,
        /// What parts of a page are multiples of.
        multiple: usize,
    },
    /// A length exceeds the kernels' 32-bit counters.
    #[error("{}", Unserved::TooLong { name, value: *value, limit: *limit })]
    TooLong {
        /// What.
        name: &'static str,
        /// Its value.
        value: usize,
        /// The largest.
        limit: usize,
    },
    /// Something of a problem of codes that GPU kernels do not compute.
    #[error("{}", Unserved::Codes { dtype: *dtype, what, value: value.clone(), need })]
    Codes {
        /// Type of K and V.
        dtype: Dtype,
        /// The field.
        what: &'static str,
        /// Its value.
        value: String,
        /// What works.
        need: &'static str,
    },
    /// The softmax scale is outside the GPU kernels' range.
    #[error("{}", Unserved::Scale { scale: *scale })]
    Scale {
        /// The scale.
        scale: f64,
    },
    /// The soft cap is outside the GPU kernels' range.
    #[error("{}", Unserved::Softcap { softcap: *softcap, scale: *scale, limit: *limit })]
    Softcap {
        /// The soft cap.
        softcap: f64,
        /// The softmax scale.
        scale: f64,
        /// The largest soft cap.
        limit: f64,
    },
    /// A stride that the kernels do not support.
    #[error("the {axis} stride of {tensor} is {stride}: it must be {need}")]
    Stride {
        /// The tensor.
        tensor: &'static str,
        /// The axis.
        axis: &'static str,
        /// The stride in elements.
        stride: i64,
        /// What it must be.
        need: &'static str,
    },
    /// A tensor's address is not aligned for copies.
    #[error("{tensor} starts at {address:#x}: it must be a multiple of {align} bytes and not null")]
    Address {
        /// The tensor.
        tensor: &'static str,
        /// Its address.
        address: u64,
        /// What it must be a multiple of.
        align: u64,
    },
    /// A stream or a tensor belongs to another context than the kernel.
    #[error(
        "{name} is of a context on GPU {have}, the kernel of another one, on GPU {need}: call `Kernels::new` \
         once for each context, and keep its kernels to its own streams and tensors"
    )]
    Context {
        /// The stream or tensor.
        name: &'static str,
        /// Its GPU.
        have: usize,
        /// The kernel's.
        need: usize,
    },
    /// A buffer is too short for its shape and strides.
    #[error("{tensor} has {have} elements, its shape and strides need {need}")]
    TooShort {
        /// The tensor.
        tensor: &'static str,
        /// Elements that it has.
        have: u64,
        /// Elements that it needs.
        need: u64,
    },
    /// What is to be appended is not valid.
    #[error(transparent)]
    Append(#[from] AppendError),
    /// More heads, queries or words of bits than the dropout kernel counts.
    #[error("dropout of {count} heads, queries or words: at most {most}")]
    DropoutCount {
        /// How many there are.
        count: usize,
        /// The most.
        most: usize,
    },
    /// What is to be merged is not valid.
    #[error(transparent)]
    Merge(#[from] MergeError),
    /// A merge got more or fewer parts than it is bound to.
    #[error("{have} parts were given, the merge is bound to {need}")]
    Parts {
        /// Parts of the call.
        have: usize,
        /// Parts of the merge.
        need: usize,
    },
    /// An output and an input share memory.
    #[error("{tensor} is {with}, which others still read: give memory of its own")]
    SameMemory {
        /// What is written.
        tensor: &'static str,
        /// What is read.
        with: &'static str,
    },
    /// A call lacks a tensor that its problem has.
    #[error("{name} is missing: the problem needs {need} elements of it")]
    MissingExtra {
        /// Its field in `Extras`.
        name: &'static str,
        /// Elements.
        need: usize,
    },
    /// A call gives a tensor that its problem does not have.
    #[error("{name} was given, but the problem has none: leave it out, or state it in the problem")]
    UnusedExtra {
        /// Its field in `Extras`.
        name: &'static str,
    },
    /// A kernel needs a workspace and got none.
    #[error("this kernel needs a workspace of {need} bytes, zero before its first use")]
    NoWorkspace {
        /// Bytes.
        need: usize,
    },
    /// The driver does not take a tensor's shape and strides.
    #[error("TMA cannot read {tensor} as {shape}: {source}")]
    TensorMap {
        /// The tensor.
        tensor: &'static str,
        /// Lengths, strides and box.
        shape: String,
        /// The driver's answer.
        source: DriverError,
    },
}

impl From<WriteError> for Error {
    fn from(WriteError { path, source }: WriteError) -> Error {
        Error::Io { path, source }
    }
}

impl Error {
    /// Whether it is the fault of one kernel, which does not compile or not cleanly: another may be taken.
    pub fn is_of_kernel(&self) -> bool {
        matches!(self, Error::Compile { .. } | Error::Refused { .. })
    }

    pub(crate) fn driver(doing: &'static str, source: DriverError) -> Error {
        Error::Driver { doing, source }
    }

    pub(crate) fn io(path: &Path, source: std::io::Error) -> Error {
        Error::Io { path: path.to_owned(), source }
    }
}

impl From<Mismatch> for Error {
    fn from(Mismatch { what, kernel, problem }: Mismatch) -> Error {
        Error::Mismatch { what, kernel, problem }
    }
}

impl From<Unserved> for Error {
    fn from(unserved: Unserved) -> Error {
        match unserved {
            Unserved::Differs(mismatch) => mismatch.into(),
            Unserved::Page { page, tile_n, head_dim, multiple } => {
                Error::Page { page, tile_n, head_dim, multiple }
            }
            Unserved::TooLong { name, value, limit } => Error::TooLong { name, value, limit },
            Unserved::Codes { dtype, what, value, need } => Error::Codes { dtype, what, value, need },
            Unserved::Scale { scale } => Error::Scale { scale },
            Unserved::Softcap { softcap, scale, limit } => Error::Softcap { softcap, scale, limit },
        }
    }
}

fn at(log_file: &Option<PathBuf>) -> String {
    log_file.as_ref().map_or(String::new(), |path| format!(" (log: {})", path.display()))
}
