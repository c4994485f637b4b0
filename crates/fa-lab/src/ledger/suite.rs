//! What the tests of the emulation depend on.

use std::collections::BTreeMap;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

/// The machine, the kernels, who launches them, the oracle, the cases and their inputs.
const SOURCES: [&str; 13] = [
    "crates/fa-core/src",
    "crates/fa-cpu/src",
    "crates/fa-emu",
    "crates/fa-kernels/cuda",
    "crates/fa-kernels/specs",
    "crates/fa-kernels/src",
    "crates/fa-lab/src/grid.rs",
    "crates/fa-lab/src/grid",
    "crates/fa-lab/src/mods.rs",
    "crates/fa-lab/src/random.rs",
    "crates/fa-lab/src/sequences",
    "crates/fa-lab/src/sequences.rs",
    "crates/fa-planner/src/account",
];

/// What of those they do not depend on: other CPU code and its tests, what is said of a run.
const APART: [&str; 4] = [
    "crates/fa-cpu/src/simd/tests.rs",
    "crates/fa-cpu/src/tiled",
    "crates/fa-emu/src/timeline.rs",
    "crates/fa-kernels/src/jit/cubin.rs",
];

/// A hash of the sources of the workspace at `root` that the tests of the emulation depend on, without lines
/// that are comments.
///
/// # Errors
/// A folder without them.
pub fn inputs(root: &Path) -> Result<String> {
    let mut texts = BTreeMap::new();
    for path in SOURCES {
        gather(root, path, &mut texts)?;
    }
    let mut hash = Sha256::new();
    for (name, text) in &texts {
        hash.update(format!("{name} {}\n{text}", text.len()));
    }
    Ok(hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect())
}

/// The code of a file, or of all files in a folder, by their paths from `root`.
fn gather(root: &Path, name: &str, texts: &mut BTreeMap<String, String>) -> Result<()> {
    let place = root.join(name);
    if APART.contains(&name) {
        return Ok(());
    }
    if place.is_dir() {
        for entry in std::fs::read_dir(&place).map_err(Error::read(&place))? {
            let file = entry?.file_name();
            gather(root, &format!("{name}/{}", file.to_string_lossy()), texts)?;
        }
        return Ok(());
    }
    let text = std::fs::read(&place).map_err(Error::read(&place))?;
    let text = String::from_utf8_lossy(&text);
    let code = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//"));
    texts.insert(name.to_owned(), code.collect::<Vec<_>>().join("\n"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_there_and_comments_do_not_count() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        assert_eq!(inputs(&root).unwrap().len(), 16);
        assert!(APART.iter().all(|own| root.join(own).exists()));
        let folder = tempfile::tempdir().unwrap();
        let read = |text: &str| {
            std::fs::create_dir_all(folder.path().join("a/b")).unwrap();
            std::fs::write(folder.path().join("a/b/c.rs"), text).unwrap();
            let mut texts = BTreeMap::new();
            gather(folder.path(), "a", &mut texts).unwrap();
            texts
        };
        let first = read("fn a() {}\n");
        assert_eq!(first.keys().collect::<Vec<_>>(), ["a/b/c.rs"]);
        assert_eq!(first, read("// What it does.\n\n    fn a() {}\n"));
        assert_ne!(first, read("fn a() { b() }\n"));
        assert!(inputs(folder.path()).is_err(), "no workspace");
    }
}
