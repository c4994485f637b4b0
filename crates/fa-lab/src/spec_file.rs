//! Kernels' specs read from files.

use std::path::Path;

use fa_core::{KernelSpec, ShippedSpec};

use crate::term::failure::{InputError, read_text};

/// Reads a kernel's spec from a file.
///
/// # Errors
/// [`InputError`] when it cannot be read or is none.
pub fn read_spec(path: &Path) -> Result<KernelSpec, InputError> {
    let text = read_text(path)?;
    // Files under specs/ name their architectures beside the spec; `fa plan --format ron` gives the bare spec.
    let spec = ShippedSpec::from_ron(&text).map(|shipped| shipped.spec).or_else(|shipped_error| {
        KernelSpec::from_ron(&text).map_err(|e| if text.contains("archs") { shipped_error } else { e })
    });
    spec.map_err(|e| InputError::Usage(format!("{}: {e}", path.display())))
}

/// [`read_spec`] for a kernel that has to be of the backward, or of the forward.
///
/// # Errors
/// As [`read_spec`], and for a kernel of the other pass.
pub fn read_spec_of(path: &Path, backward: bool) -> Result<KernelSpec, InputError> {
    let spec = read_spec(path)?;
    if spec.kernel.is_backward() != backward {
        let (is, mode) = if backward { ("the forward", "fwd") } else { ("the backward", "bwd") };
        return Err(InputError::Usage(format!("{} is a kernel of {is}: use --mode {mode}", path.display())));
    }
    Ok(spec)
}
