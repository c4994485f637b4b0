//! Finds NVRTC and nvcc in the usual locations, without loading anything.

use std::env;
use std::path::{Path, PathBuf};

use crate::Error;

/// The environment variable that names the NVRTC library (or its folder) to use, before every other location.
/// An empty value counts as unset; `none` means no compiler: only kernels that were compiled ahead run.
pub const NVRTC_VARIABLE: &str = "FA_NVRTC";

/// The environment variable that names the nvcc program to use.
pub const NVCC_VARIABLE: &str = "FA_NVCC";

/// The file of the NVRTC library: `FA_NVRTC`, then `CUDA_HOME`/`CUDA_PATH`, the loader's path, the active
/// virtual environment, the toolkit of `cargo xtask toolkit` and the Python packages of the user and the
/// system.
///
/// # Errors [`Error::NoCompiler`] with the locations searched, also where `FA_NVRTC` is `none`, and
/// [`Error::BadCompiler`] when `FA_NVRTC` names no library.
pub fn find_nvrtc() -> Result<PathBuf, Error> {
    let none = |tried: &str| Error::NoCompiler {
        library: "NVRTC",
        tried: tried.to_owned(),
        variable: NVRTC_VARIABLE,
    };
    if let Some(named) = path_in(NVRTC_VARIABLE) {
        if named.as_os_str() == "none" {
            return Err(none("nowhere, since FA_NVRTC is none"));
        }
        let found =
            if named.is_dir() { library_in(&named) } else { Some(named.clone()).filter(|p| p.is_file()) };
        return found.ok_or_else(|| Error::BadCompiler {
            path: named,
            reason: format!("{NVRTC_VARIABLE} names neither an NVRTC library nor a folder with one"),
        });
    }
    let folders = library_folders();
    folders.iter().find_map(|folder| library_in(folder)).ok_or_else(|| {
        none(
            "CUDA_HOME, CUDA_PATH, LD_LIBRARY_PATH, the system's library folders, VIRTUAL_ENV, \
             target/toolkit and Python's site-packages",
        )
    })
}

/// The path in an environment variable, unless it is unset or empty.
fn path_in(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// The nvcc program: `FA_NVCC`, then `CUDA_HOME`/`CUDA_PATH`, `PATH` and `/usr/local/cuda`.
///
/// # Errors
/// As [`find_nvrtc`].
pub fn find_nvcc() -> Result<PathBuf, Error> {
    let name = format!("nvcc{}", env::consts::EXE_SUFFIX);
    if let Some(named) = path_in(NVCC_VARIABLE) {
        return if named.is_file() {
            Ok(named)
        } else {
            Err(Error::BadCompiler { path: named, reason: format!("{NVCC_VARIABLE} names no program") })
        };
    }
    let mut folders: Vec<PathBuf> = cuda_homes().iter().map(|home| home.join("bin")).collect();
    folders.extend(path_list("PATH"));
    folders.push("/usr/local/cuda/bin".into());
    folders.into_iter().map(|folder| folder.join(&name)).find(|file| file.is_file()).ok_or(
        Error::NoCompiler {
            library: "nvcc",
            tried: "CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda".to_owned(),
            variable: NVCC_VARIABLE,
        },
    )
}

/// A binary tool of the CUDA toolkit (`nvdisasm`, `cuobjdump`) from `CUDA_HOME`, `PATH` or the workspace's
/// toolkit.
pub fn find_tool(name: &str) -> Option<PathBuf> {
    let mut folders: Vec<PathBuf> = toolkits().iter().map(|kit| kit.join("nvidia/cu13/bin")).collect();
    folders.extend(cuda_homes().iter().map(|home| home.join("bin")));
    folders.extend(path_list("PATH"));
    folders.into_iter().map(|f| f.join(format!("{name}{}", env::consts::EXE_SUFFIX))).find(|p| p.is_file())
}

fn library_folders() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for home in cuda_homes() {
        folders.extend([
            home.join("lib64"),
            home.join("lib"),
            home.join("bin"),
            home.join("targets/x86_64-linux/lib"),
        ]);
    }
    folders.extend(path_list("LD_LIBRARY_PATH"));
    let system = [
        "/usr/local/cuda/lib64",
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
    ];
    folders.extend(system.map(PathBuf::from));
    if let Some(env) = env::var_os("VIRTUAL_ENV").or_else(|| env::var_os("CONDA_PREFIX")) {
        folders.extend(wheel_folders(&PathBuf::from(env)));
    }
    folders.extend(toolkits().iter().flat_map(|kit| packages(kit)));
    let home = env::var_os("HOME").map(PathBuf::from);
    let pythons = home.map(|home| home.join(".local")).into_iter().chain(python_prefixes());
    folders.extend(pythons.flat_map(|prefix| wheel_folders(&prefix)));
    folders
}

fn cuda_homes() -> Vec<PathBuf> {
    ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os).map(PathBuf::from).collect()
}

fn path_list(variable: &str) -> Vec<PathBuf> {
    env::var_os(variable).map_or(Vec::new(), |list| {
        env::split_paths(&list).filter(|folder| !folder.as_os_str().is_empty()).collect()
    })
}

/// Prefixes of the Python programs on `PATH`: `PREFIX/bin/python3`, links resolved.
fn python_prefixes() -> Vec<PathBuf> {
    path_list("PATH")
        .into_iter()
        .filter_map(|folder| folder.join("python3").canonicalize().ok())
        .filter_map(|python| Some(python.parent()?.parent()?.to_owned()))
        .collect()
}

/// Library folders of NVIDIA's wheels in an installation: `lib/python3.*/{site,dist}-packages/nvidia/*/lib`.
fn wheel_folders(prefix: &Path) -> Vec<PathBuf> {
    subfolders(&prefix.join("lib"))
        .into_iter()
        .filter(|folder| folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3")))
        .flat_map(|python| [python.join("site-packages"), python.join("dist-packages")])
        .flat_map(|site| packages(&site))
        .collect()
}

/// `nvidia/*/lib` below a folder of Python packages, newest name (`cu13`) first.
fn packages(site: &Path) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> =
        subfolders(&site.join("nvidia")).into_iter().map(|package| package.join("lib")).collect();
    // cu13 (the layout since CUDA 13) before cuda_nvrtc (CUDA 12).
    folders.sort_by_key(|folder| !folder.to_string_lossy().contains("/cu1"));
    folders
}

/// The folders that `cargo xtask toolkit` fills: `toolkit` next to the build profile of this program, and
/// `target/toolkit` of the working directory or one above.
fn toolkits() -> Vec<PathBuf> {
    let program = env::current_exe().ok();
    let beside =
        program.iter().flat_map(|exe| exe.ancestors().skip(1).take(4)).map(|folder| folder.join("toolkit"));
    let here = env::current_dir().ok();
    let above = here.iter().flat_map(|dir| dir.ancestors()).map(|folder| folder.join("target/toolkit"));
    beside.chain(above).filter(|kit| kit.join("nvidia").is_dir()).collect()
}

fn subfolders(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(folder)
        .map(|entries| entries.filter_map(|e| Some(e.ok()?.path())).filter(|p| p.is_dir()).collect())
        .unwrap_or_default();
    found.sort();
    found
}

/// The NVRTC library of a folder; of several, the one with the highest version in its name.
fn library_in(folder: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?;
    entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter_map(|path| Some((version_in_name(path.file_name()?.to_str()?)?, path)))
        .max()
        .map(|(_, path)| path)
}

/// The version in `libnvrtc.so.13` or `nvrtc64_130_0.dll`; `None` for other files. A bare `libnvrtc.so` has
/// an empty one.
fn version_in_name(name: &str) -> Option<Vec<u32>> {
    let numbers = |text: &str, separator: char| {
        text.split(separator).filter(|part| !part.is_empty()).map(|part| part.parse().ok()).collect()
    };
    if let Some(rest) = name.strip_prefix("libnvrtc.so") {
        return numbers(rest, '.');
    }
    numbers(name.strip_prefix("nvrtc64_")?.strip_suffix(".dll")?, '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_told_from_its_builtins_and_variants() {
        assert_eq!(version_in_name("libnvrtc.so.13"), Some(vec![13]));
        assert_eq!(version_in_name("libnvrtc.so.12.9.86"), Some(vec![12, 9, 86]));
        assert_eq!(version_in_name("libnvrtc.so"), Some(vec![]));
        assert_eq!(version_in_name("nvrtc64_130_0.dll"), Some(vec![130, 0]));
        for other in
            ["libnvrtc-builtins.so.13.0", "libnvrtc.alt.so.13", "libnvrtc_static.a", "nvrtc64_130_0.alt.dll"]
        {
            assert_eq!(version_in_name(other), None, "{other}");
        }
    }
}
