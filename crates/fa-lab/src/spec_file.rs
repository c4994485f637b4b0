//! Kernels' specs read from files.

use std::path::Path;

use fa_core::{KernelSpec, Pass, ShippedSpec};

use crate::error::{Error, Result, read_text};

/// Reads a kernel's spec from a file: RON, or the JSON that the cache of compiled kernels has.
///
/// # Errors
/// [`Error::Read`] and [`Error::Request`] when the file cannot be read or holds no valid spec.
pub fn read_spec(path: &Path) -> Result<KernelSpec> {
    let text = read_text(path)?;
    if text.trim_start().starts_with('{') {
        let read = serde_json::from_str::<KernelSpec>(&text).map_err(|e| e.to_string());
        return read.map_err(|reason| Error::Request(format!("{}: {reason}", path.display())));
    }
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

#[cfg(test)]
mod tests {
    use fa_core::{Arch, Dtype, Mask, Problem};
    use fa_planner::plan::{PlanOptions, best};

    use super::*;

    #[test]
    fn specs_are_read_as_ron_and_as_the_caches_json() {
        let problem = Problem::square(1, 1024, 4, 128, Mask::CAUSAL, Dtype::Bf16);
        let spec = best(&problem, Arch::Sm90, &PlanOptions::default()).expect("there are plans").spec;
        let shipped = ShippedSpec { archs: vec![Arch::Sm90], spec: spec.clone() };
        let json = serde_json::to_string_pretty(&spec).expect("plain data");
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("spec");
        for text in [spec.to_ron(), shipped.to_ron(), json.clone()] {
            std::fs::write(&path, text).expect("written");
            assert_eq!(read_spec(&path).expect("a spec"), spec);
        }
        for (from, to, part) in [("\"tile_m\": ", "\"tile_m\": 1", "tile_m"), ("}", "", "EOF")] {
            std::fs::write(&path, json.replace(from, to)).expect("written");
            let error = read_spec(&path).expect_err("no valid spec").to_string();
            assert!(error.contains(part) && error.contains("spec: "), "{error}");
        }
    }
}
