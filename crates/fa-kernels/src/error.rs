//! What can go wrong between a spec and a launch.

use std::path::{Path, PathBuf};

use fa_core::{Arch, SpecError};

/// An error of this crate. Each says what was asked, what the limit is and what would work.
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
    /// The spec is not valid, or not for this architecture.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// No compiler was found.
    #[error(
        "no {library} found (looked in {tried}): run `cargo xtask toolkit` in the fa workspace, or `pip install \
         nvidia-cuda-nvrtc`, or set {variable} to it"
    )]
    NoCompiler {
        /// What was looked for.
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
        /// Where the whole log lies, when a folder is writable.
        log_file: Option<PathBuf>,
    },
    /// The kernel compiles into something that must not ship.
    #[error("{name} for {target} is refused: {fault}{at}", at = at(.log_file))]
    Refused {
        /// The spec's name.
        name: String,
        /// The target.
        target: String,
        /// Why.
        fault: String,
        /// Where the whole log lies, when a folder is writable.
        log_file: Option<PathBuf>,
    },
}

impl Error {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Error {
        Error::Io { path: path.to_owned(), source }
    }
}

fn at(log_file: &Option<PathBuf>) -> String {
    log_file.as_ref().map_or(String::new(), |path| format!(" (log: {})", path.display()))
}
