//! What the functions refuse, as the text of a candle error.

use candle_core::{DType, Device, Result, Tensor};

/// What the functions refuse. They return candle's error type, which carries these as
/// [`candle_core::Error::Wrapped`].
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The problem contradicts itself: heads, head dims, a scale or a cap.
    #[error(transparent)]
    Problem(#[from] fa_core::ProblemError),
    /// What the CPU's kernels refuse: a starting point or a page outside the tensor.
    #[error("{}", as_arguments(.0))]
    Cpu(#[from] fa_cpu::CpuError),
    /// What a GPU's kernels refuse, a head dim, a stride or a type, and what fails below them.
    #[cfg(feature = "cuda")]
    #[error("{}", as_arguments(.0))]
    Gpu(#[from] fa_attn::Error),
    /// Keys in pages have no room in their row of the table.
    #[error(
        "seqlens_k gives sequence {sequence} {keys} keys: its row of block_table has room for 0 to {room}"
    )]
    PagedLength {
        /// The sequence.
        sequence: usize,
        /// Its keys.
        keys: i32,
        /// What its pages hold.
        room: usize,
    },
    /// A tensor has another number of axes than its place asks for.
    #[error("{tensor} has the shape {shape:?}: it must be {need}")]
    Shape {
        /// The tensor.
        tensor: &'static str,
        /// Its shape.
        shape: Vec<usize>,
        /// What it must be.
        need: String,
    },
    /// A tensor's elements are of a type that its place does not take.
    #[error("{tensor} holds {got:?}: it must be {need}")]
    Dtype {
        /// The tensor.
        tensor: &'static str,
        /// Its type.
        got: DType,
        /// What would work.
        need: String,
    },
    /// A tensor lies on another device than Q.
    #[error("{tensor} is on {got:?} and q on {need:?}: move it there by `to_device`")]
    Device {
        /// The tensor.
        tensor: &'static str,
        /// Its device.
        got: Device,
        /// That of Q.
        need: Device,
    },
    /// A device that no kernel runs on.
    #[error(
        "{device} tensors: attention runs on the CPU and, with this crate's feature `cuda`, on CUDA devices"
    )]
    Backend {
        /// Its kind.
        device: &'static str,
    },
    /// `page_block_size` is not that of the cache.
    #[error("page_block_size is {got}, k is (pages, page_block_size, heads, dim) with pages of {need}")]
    PageSize {
        /// The argument.
        got: usize,
        /// The tensor's.
        need: usize,
    },
    /// A gradient that nothing computes was asked for.
    #[error("{tensor} requires a gradient, which is not computed: {instead}")]
    NoGradient {
        /// The tensor.
        tensor: &'static str,
        /// What would work.
        instead: &'static str,
    },
    /// The text of a program is none.
    #[error("program: {0}")]
    Program(#[from] fa_core::program::ProgramError),
    /// The process has as many programs as it keeps.
    #[error(transparent)]
    Programs(#[from] fa_core::program::TableFull),
    /// What a program is given is not what it reads.
    #[error("program: `{name}` {problem}")]
    ProgramInput {
        /// The array or scalar.
        name: String,
        /// What is wrong with it, and what would work.
        problem: String,
    },
    /// The backward found no LSE of its forward.
    #[error("the backward has no LSE of a forward: call backward on the output of the forward")]
    NoForward,
    /// Dropout of tensors on a GPU.
    #[error("dropout of tensors on a GPU is not computed here: {instead}")]
    DropoutOnGpu {
        /// What works.
        instead: &'static str,
    },
}

/// A message of the crates below, in which arguments have their names here.
fn as_arguments(error: &impl std::fmt::Display) -> String {
    const NAMES: [(&str, &str); 5] = [
        ("cu_seqlens_", "seqlens_"),
        ("seqused_", "used_"),
        ("page_table", "block_table"),
        ("the page table", "block_table"),
        ("the problem's bound", "max_seqlen"),
    ];
    NAMES.into_iter().fold(error.to_string(), |text, (name, argument)| text.replace(name, argument))
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> candle_core::Error {
        candle_core::Error::wrap(error)
    }
}

#[cfg(feature = "cuda")]
impl From<fa_kernels::Error> for Error {
    fn from(error: fa_kernels::Error) -> Error {
        Error::Gpu(error.into())
    }
}

/// What the crates below refuse, as a candle error.
pub(crate) fn refused(error: impl Into<Error>) -> candle_core::Error {
    error.into().into()
}

/// A tensor that is on the device of `q`.
pub(crate) fn same_device(name: &'static str, tensor: &Tensor, q: &Tensor) -> Result<()> {
    if tensor.device().same_device(q.device()) {
        return Ok(());
    }
    let (got, need) = (tensor.device().clone(), q.device().clone());
    Err(Error::Device { tensor: name, got, need }.into())
}
