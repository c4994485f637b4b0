//! Kernels' specs read from files.

use std::path::Path;

use fa_core::{KernelSpec, Pass, ShippedSpec};

use crate::error::{Error, Result, read_text};

/// Reads a kernel's spec from a file.
///
/// # Errors
/// [`Error::Read`] and [`Error::Request`] when the file cannot be read or holds no valid spec.
pub fn read_spec(path: &Path) -> Result<KernelSpec> {
    let text = read_text(path)?;
    // Files under specs/ name their architectures next to the spec; `fa plan --format spec` gives the
    // bare spec.
    let spec = ShippedSpec::from_ron(&text).map(|shipped| shipped.spec).or_else(|shipped_error| {
        KernelSpec::from_ron(&text).map_err(|e| if text.contains("archs") { shipped_error } else { e })
    });
    spec.map_err(|e| Error::Request(format!("{}: {e}", path.display())))
}

/// [`read_spec`] for a kernel that has to compute `pass`, deterministic or not.
///
/// # Errors
/// As [`read_spec`], and for a kernel of the other pass.
pub fn read_spec_of(path: &Path, pass: Pass) -> Result<KernelSpec> {
    let spec = read_spec(path)?;
    let own = spec.kernel.pass();
    if own.is_backward() != pass.is_backward() {
        let (path, is, mode) = (path.display(), own.name(), own.short_name());
        return Err(Error::Request(format!("{path} is a kernel of the {is}: use --mode {mode}")));
    }
    Ok(spec)
}
