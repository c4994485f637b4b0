//! The kernels that ship: the files `specs/<arch>/*.ron` of this package, compiled into the library.

use fa_core::{ShippedSpec, SpecError};

static FILES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/specs.rs"));

/// A shipped spec and its file, below `specs/`.
#[derive(Clone, Debug, PartialEq)]
pub struct ShippedFile {
    /// The file.
    pub path: &'static str,
    /// The spec and its architectures.
    pub shipped: ShippedSpec,
}

/// Every shipped spec, by file name.
///
/// # Errors
/// The first file that is no valid spec, and why.
pub fn shipped() -> Result<Vec<ShippedFile>, (&'static str, SpecError)> {
    let read = |&(path, text)| match ShippedSpec::from_ron(text) {
        Ok(shipped) => Ok(ShippedFile { path, shipped }),
        Err(error) => Err((path, error)),
    };
    FILES.iter().map(read).collect()
}
