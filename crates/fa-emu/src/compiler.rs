//! The host's C++ compiler and its results: the machine, and a unit for each kernel, cached by content.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use sha2::{Digest, Sha256};

use crate::error::Error;

/// Environment variable for the compiler's path.
pub const COMPILER_VARIABLE: &str = "CXX";

/// Environment variable for the cache folder of compiled machines and units.
pub const CACHE_VARIABLE: &str = "FA_EMULATOR_CACHE";

/// Compilers that are tried, in this order.
const NAMES: [&str; 4] = ["g++", "c++", "clang++", "g++-12"];

/// Digits of a key: 128 bits.
const KEY_DIGITS: usize = 32;

/// A C++ compiler and the cache folder of its results.
#[derive(Clone, Debug)]
pub struct Compiler {
    program: PathBuf,
    version: String,
    root: PathBuf,
}

impl Compiler {
    /// The compiler in the variable `CXX`, or the first of g++, c++ and clang++ on the path; results go to
    /// `root`.
    ///
    /// # Errors
    /// [`Error::NoCompiler`] and [`Error::Host`].
    pub fn find(root: &Path) -> Result<Compiler, Error> {
        if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
            let host = format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS);
            return Err(Error::Host { host });
        }
        let named = std::env::var_os(COMPILER_VARIABLE).filter(|name| !name.is_empty());
        let names: Vec<PathBuf> = match named {
            Some(name) => vec![name.into()],
            None => NAMES.iter().map(PathBuf::from).collect(),
        };
        for program in &names {
            let Ok(output) = Command::new(program).arg("--version").output() else { continue };
            if output.status.success() {
                let version = String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or("").to_owned();
                return Ok(Compiler { program: program.clone(), version, root: root.to_owned() });
            }
        }
        let tried: Vec<_> = names.iter().map(|name| name.display().to_string()).collect();
        Err(Error::NoCompiler { tried: tried.join(", ") })
    }

    /// The first line of the compiler's version.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The cache folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The shared library `name-KEY.so` of the sources `(name, text)`, of which `main` is compiled; from the
    /// cache, or compiled now. It appears whole or not at all.
    ///
    /// # Errors
    /// [`Error::Compile`] and [`Error::Io`].
    pub(crate) fn library(
        &self,
        name: &str,
        what: &str,
        sources: &[(String, String)],
        main: &str,
        flags: &[String],
    ) -> Result<PathBuf, Error> {
        let flags: Vec<String> = flags.iter().cloned().chain([march().to_owned()]).collect();
        let mut parts = vec![self.version.as_str(), main];
        parts.extend(flags.iter().map(String::as_str));
        for (name, text) in sources {
            parts.extend([name.as_str(), text.as_str()]);
        }
        let file = format!("{name}-{}.so", &hash(&parts)[..KEY_DIGITS]);
        let library = self.root.join(&file);
        if library.is_file() {
            return Ok(library);
        }
        let no_folder = |error: std::io::Error| Error::Folder {
            path: self.root.clone(),
            source: error.kind().into(),
            variable: CACHE_VARIABLE,
        };
        fs::create_dir_all(&self.root).map_err(no_folder)?;
        let folder = tempfile::Builder::new().prefix(".tmp-").tempdir_in(&self.root).map_err(no_folder)?;
        for (name, text) in sources {
            write(&folder.path().join(name), text)?;
        }
        let output = Command::new(&self.program)
            .current_dir(folder.path())
            .args(["-std=c++20", "-fPIC", "-shared", "-g1", "-w", "-fno-omit-frame-pointer"])
            .arg(format!("-ffile-prefix-map={}=.", folder.path().display()))
            .args(&flags)
            .args(["-I", ".", "-x", "c++", main, "-x", "none", "-o", "out.so"])
            .output()
            .map_err(|e| Error::io(&self.program, e))?;
        if !output.status.success() {
            let log = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(Error::Compile { compiler: self.version.clone(), what: what.to_owned(), log });
        }
        // Another process may have stored the same first.
        fs::rename(folder.path().join("out.so"), &library).map_err(|e| Error::io(&library, e))?;
        Ok(library)
    }
}

/// The folder in the variable `FA_EMULATOR_CACHE`, or `fa/emulator` in the user's cache folder.
pub(crate) fn default_root() -> Option<PathBuf> {
    let from = |variable: &str| std::env::var_os(variable).filter(|v| !v.is_empty()).map(PathBuf::from);
    from(CACHE_VARIABLE).or_else(|| {
        from("XDG_CACHE_HOME")
            .or_else(|| from("HOME").map(|home| home.join(".cache")))
            .map(|folder| folder.join("fa").join("emulator"))
    })
}

/// SHA-256 in hex over the parts and their lengths.
pub(crate) fn hash(parts: &[&str]) -> String {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Flags for the widest vectors of this CPU: f16 conversions need F16C to be fast.
#[cfg(target_arch = "x86_64")]
fn march() -> &'static str {
    if std::is_x86_feature_detected!("avx512vl") && std::is_x86_feature_detected!("avx512bw") {
        "-march=x86-64-v4"
    } else if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("f16c") {
        "-march=x86-64-v3"
    } else {
        "-march=x86-64-v2"
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn march() -> &'static str {
    "-march=native"
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    let parent = path.parent().unwrap_or(path);
    let write = || -> io::Result<()> {
        fs::create_dir_all(parent)?;
        fs::write(path, text)
    };
    write().map_err(|e| Error::io(path, e))
}
