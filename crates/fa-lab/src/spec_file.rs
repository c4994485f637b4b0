//! Kernels' specs read from files.

use std::path::Path;

use fa_core::{KernelSpec, Pass, PinnedSpec};

use crate::error::{Error, Result, read_text};

/// Reads a pinned kernel from a file: RON, or the JSON of a spec that the cache of compiled kernels has.
///
/// # Errors
/// [`Error::Read`] and [`Error::Request`] when the file cannot be read or holds no valid spec.
pub fn read_pinned(path: &Path) -> Result<PinnedSpec> {
    let text = read_text(path)?;
    let read = if text.trim_start().starts_with('{') {
        let read = serde_json::from_str::<KernelSpec>(&text).map_err(|e| e.to_string());
        let pinned = read.map(|spec| PinnedSpec { archs: Vec::new(), spec, splits: None });
        pinned.and_then(|pinned| pinned.check().map(|()| pinned).map_err(|e| e.to_string()))
    } else {
        PinnedSpec::from_ron(&text).map_err(|e| e.to_string())
    };
    read.map_err(|reason| Error::Request(format!("{}: {reason}", path.display())))
}

/// [`read_pinned`] where the division of work is not the file's to decide.
///
/// # Errors
/// As [`read_pinned`], and for a file that names splits.
pub fn read_spec(path: &Path) -> Result<KernelSpec> {
    let PinnedSpec { spec, splits, .. } = read_pinned(path)?;
    match splits {
        None => Ok(spec),
        Some(splits) => {
            let path = path.display();
            let text = format!("{path}: splits {splits} are for `fa bench --spec` only: leave them out here");
            Err(Error::Request(text))
        }
    }
}

/// [`read_spec`] for a kernel that has to compute `pass`, deterministic or not.
///
/// # Errors
/// As [`read_spec`], and for a kernel of the other pass.
pub fn read_spec_of(path: &Path, pass: Pass) -> Result<KernelSpec> {
    let spec = read_spec(path)?;
    check_pass(path, &spec, pass)?;
    Ok(spec)
}

/// [`read_pinned`] for a kernel that has to compute `pass`, deterministic or not.
///
/// # Errors
/// As [`read_pinned`], and for a kernel of the other pass.
pub fn read_pinned_of(path: &Path, pass: Pass) -> Result<PinnedSpec> {
    let pinned = read_pinned(path)?;
    check_pass(path, &pinned.spec, pass)?;
    Ok(pinned)
}

fn check_pass(path: &Path, spec: &KernelSpec, pass: Pass) -> Result<()> {
    let own = spec.kernel.pass();
    if own.is_backward() != pass.is_backward() {
        let (path, is, mode) = (path.display(), own.name(), own.short_name());
        return Err(Error::Request(format!("{path} is a kernel of the {is}: use --mode {mode}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use fa_core::{Arch, Dtype, Mask, Problem, ShippedSpec};
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
        let split =
            format!("(spec: {}, splits: Some(4))", KernelSpec { split: true, ..spec.clone() }.to_ron());
        std::fs::write(&path, split).expect("written");
        assert_eq!(read_pinned(&path).expect("a pinned kernel").splits, Some(4));
        let error = read_spec(&path).expect_err("not taken here").to_string();
        assert!(error.contains("splits 4 are for `fa bench --spec` only"), "{error}");
        for (from, to, part) in [("\"tile_m\": ", "\"tile_m\": 1", "tile_m"), ("}", "", "EOF")] {
            std::fs::write(&path, json.replace(from, to)).expect("written");
            let error = read_spec(&path).expect_err("no valid spec").to_string();
            assert!(error.contains(part) && error.contains("spec: "), "{error}");
        }
    }
}
