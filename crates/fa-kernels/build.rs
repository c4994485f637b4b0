//! Lists the CUDA headers and the shipped specs, so that they are compiled into the library.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

fn main() -> io::Result<()> {
    let root = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(std::env::var("OUT_DIR").expect("cargo sets it"));
    embed(&root, "cuda", "cuh", &out.join("headers.rs"))?;
    embed(&root, "specs", "ron", &out.join("specs.rs"))?;
    if std::env::var_os("CARGO_FEATURE_BUNDLE").is_some() {
        bundle(&root, &out.join("bundle.rs"))?;
    }
    Ok(())
}

/// Writes the manifest's text and an array of `(file, bytes)` of the cubins that it names, of the bundle at
/// FA_BUNDLE, or `dist/`.
fn bundle(root: &Path, to: &Path) -> io::Result<()> {
    println!("cargo::rerun-if-env-changed=FA_BUNDLE");
    let folder = std::env::var_os("FA_BUNDLE").map_or_else(|| root.join("../../dist"), PathBuf::from);
    let folder = folder.canonicalize().unwrap_or(folder);
    println!("cargo::rerun-if-changed={}", folder.display());
    let manifest = folder.join("manifest.json");
    if !manifest.is_file() {
        println!("cargo::warning=no bundle in {}: run `cargo xtask build` first", folder.display());
        return fs::write(to, "(\"\", &[])");
    }
    let mut files = Vec::new();
    list(&folder, "cubin", &mut files)?;
    // Those of builds before stay in the folder.
    let named = fs::read_to_string(&manifest)?;
    files.retain(|file| named.contains(&format!("\"{}\"", name_below(&folder, file))));
    files.sort();
    let mut text = format!("(include_str!({manifest:?}), &[\n");
    for file in files {
        text += &format!("({:?}, include_bytes!({file:?})),\n", name_below(&folder, &file));
    }
    fs::write(to, text + "])")
}

fn name_below(folder: &Path, file: &Path) -> String {
    let name = file.strip_prefix(folder).expect("listed under it").to_str().expect("names are ASCII");
    name.replace('\\', "/")
}

/// Writes an array of `(path under folder, text)` of the files of the folder `name` that end in `extension`,
/// in the order of their paths. A library without any would build and know no kernel: that is an error.
fn embed(root: &Path, name: &str, extension: &str, to: &Path) -> io::Result<()> {
    let folder = &root.join(name);
    // Relative to the package: a workspace that has it by another path would build it again, and this one too
    // then.
    println!("cargo::rerun-if-changed={name}");
    let mut files = Vec::new();
    list(folder, extension, &mut files)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", folder.display())))?;
    if files.is_empty() {
        return Err(io::Error::other(format!("{} holds no .{extension} file", folder.display())));
    }
    files.sort();
    let mut text = String::from("&[\n");
    for file in files {
        text += &format!("({:?}, include_str!({file:?})),\n", name_below(folder, &file));
    }
    fs::write(to, text + "]")
}

fn list(folder: &Path, extension: &str, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            list(&path, extension, files)?;
        } else if path.extension().is_some_and(|e| e == extension) {
            files.push(path);
        }
    }
    Ok(())
}
