//! Errors before a kernel runs. What goes wrong in a kernel is a [`crate::Finding`], not an error.

use std::path::{Path, PathBuf};

/// An error that keeps a kernel from being emulated.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No C++ compiler.
    #[error(
        "no C++ compiler: tried {tried}. The emulation compiles kernels with g++ 11 or clang++ 14 and later; \
         install one, or name it in the variable CXX"
    )]
    NoCompiler {
        /// The compilers that were looked for.
        tried: String,
    },
    /// A host that the machine has no fibers for.
    #[error("the emulation runs on x86-64 Linux, and this is {host}")]
    Host {
        /// The host.
        host: String,
    },
    /// The compiler refused the machine or a unit.
    #[error("{compiler} does not compile {what}:\n{log}")]
    Compile {
        /// The compiler.
        compiler: String,
        /// The machine, or the kernel by its spec.
        what: String,
        /// Its output.
        log: String,
    },
    /// A header of `cuda/ptx` without a twin.
    #[error("{header} has no host twin: write crates/fa-emu/host/{header}")]
    NoTwin {
        /// Its name.
        header: String,
    },
    /// The kernel's source, or a problem that the kernel does not compute.
    #[error(transparent)]
    Kernels(#[from] fa_kernels::Error),
    /// A tensor that is shorter than its shape and strides.
    #[error("{tensor} has {have} elements, and its shape and strides reach {need}")]
    TooShort {
        /// The tensor.
        tensor: &'static str,
        /// Elements that it has.
        have: usize,
        /// Elements that it needs.
        need: usize,
    },
    /// The cache folder cannot be created or written.
    #[error(
        "cannot keep compiled kernels in {path}: {source}; name a writable folder in the variable {variable}",
        path = path.display()
    )]
    Folder {
        /// The folder.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
        /// The variable that sets another folder.
        variable: &'static str,
    },
    /// A file or folder.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// Which one.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A record that cannot be read, or is something else.
    #[error("{path} is no record: {reason}; mend it, or name another file", path = path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A library that was compiled but does not load.
    #[error("{path} does not load: {source}", path = path.display())]
    Load {
        /// Its path.
        path: PathBuf,
        /// The loader's error.
        source: libloading::Error,
    },
    /// Host memory for a tensor.
    #[error("no memory for {bytes} bytes of {tensor}: emulate a smaller problem")]
    Memory {
        /// The tensor.
        tensor: String,
        /// Its size.
        bytes: usize,
    },
}

impl Error {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Error {
        Error::Io { path: path.to_owned(), source }
    }
}
