//! Kernels compiled ahead: written by `cargo xtask build`, compiled into the library by the feature `bundle`,
//! so that a user then needs only the driver.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use fa_core::{Arch, KernelSpec};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::jit::hash::hash;
use crate::jit::report::Report;
use crate::jit::source::Source;

/// The manifest's name in a bundle's folder.
pub const MANIFEST: &str = "manifest.json";

/// `manifest.json`: the kernels of a bundle.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Name and version of the compiler.
    pub compiler: String,
    /// The kernels.
    pub kernels: Vec<BundledKernel>,
    /// The cubins of kernels without a spec: append, merge, dropout.
    pub others: Vec<BundledCubin>,
}

/// One kernel of a bundle.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BundledKernel {
    /// The spec's name.
    pub name: String,
    /// The spec.
    pub spec: KernelSpec,
    /// The architecture.
    pub arch: Arch,
    /// The cubins of its programs.
    pub cubins: Vec<BundledCubin>,
    /// Bytes of dynamic shared memory.
    pub smem: u32,
    /// What the compiler reported.
    pub report: Report,
}

/// The cubin of a program, which several kernels may share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BundledCubin {
    /// Its file in the bundle's folder: `ARCH/NAME.HASH.cubin`, by the kernel's name or an entry's, with the
    /// hash of the source.
    pub file: String,
    /// Its SHA-256.
    pub sha256: String,
    /// Hash of what it was compiled from, without flags and compiler: see [`source_hash`].
    pub source: String,
}

/// The built-in bundle: cubins by the hash of their source, and the manifest's kernels, which are read where
/// they are asked for.
#[derive(Debug, Default)]
pub struct Bundle {
    cubins: HashMap<&'static str, &'static [u8]>,
    manifest: &'static str,
    kernels: OnceLock<Vec<BundledKernel>>,
}

/// The manifest and the cubins by file name, each of which ends in the hash of its source
/// ([`BundledCubin::file`]); empty without the feature.
#[cfg(feature = "bundle")]
static EMBEDDED: (&str, &[(&str, &[u8])]) = include!(concat!(env!("OUT_DIR"), "/bundle.rs"));
#[cfg(not(feature = "bundle"))]
static EMBEDDED: (&str, &[(&str, &[u8])]) = ("", &[]);

impl Bundle {
    /// The bundle that the library was built with; empty without the feature.
    pub fn embedded() -> &'static Bundle {
        static BUNDLE: OnceLock<Bundle> = OnceLock::new();
        BUNDLE.get_or_init(|| {
            let (manifest, files) = EMBEDDED;
            Bundle::of(manifest, files)
        })
    }

    /// The bundle of a manifest's text and its files.
    fn of(manifest: &'static str, files: &[(&'static str, &'static [u8])]) -> Bundle {
        let cubins = files.iter().filter_map(|&(file, cubin)| Some((source_of(file)?, cubin)));
        Bundle { cubins: cubins.collect(), manifest, kernels: OnceLock::new() }
    }

    /// The cubins compiled from exactly these programs; `None` in a bundle of other sources.
    pub fn find_all(&self, programs: &[Source]) -> Option<Vec<&'static [u8]>> {
        programs.iter().map(|own| self.find(own)).collect()
    }

    /// The cubin compiled from exactly this program.
    pub fn find(&self, program: &Source) -> Option<&'static [u8]> {
        if self.cubins.is_empty() {
            return None;
        }
        self.cubins.get(source_hash(program).as_str()).copied()
    }

    /// The kernels of the manifest whose cubins are there.
    fn kernels(&self) -> &[BundledKernel] {
        self.kernels.get_or_init(|| {
            if self.manifest.is_empty() {
                return Vec::new();
            }
            let mut kernels = match serde_json::from_str::<Manifest>(self.manifest) {
                Ok(manifest) => manifest.kernels,
                Err(error) => {
                    tracing::error!(%error, "the built-in bundle's manifest cannot be read");
                    Vec::new()
                }
            };
            let has = |own: &BundledCubin| self.cubins.contains_key(own.source.as_str());
            kernels.retain(|kernel| kernel.cubins.iter().all(has));
            kernels
        })
    }

    /// The specs that it holds for `arch`.
    pub fn specs(&self, arch: Arch) -> impl Iterator<Item = &KernelSpec> {
        self.kernels().iter().filter(move |k| k.arch == arch).map(|k| &k.spec)
    }

    /// Number of kernels.
    pub fn len(&self) -> usize {
        self.kernels().len()
    }

    /// Whether it holds no kernels.
    pub fn is_empty(&self) -> bool {
        self.kernels().is_empty()
    }
}

impl Manifest {
    /// All cubins, those that kernels share as often as they are named.
    pub fn cubins(&self) -> impl Iterator<Item = &BundledCubin> {
        self.kernels.iter().flat_map(|kernel| &kernel.cubins).chain(&self.others)
    }

    /// Reads the manifest of the bundle in `folder` and checks every cubin against it.
    ///
    /// # Errors
    /// [`Error::BadBundle`].
    pub fn read(folder: &Path) -> Result<Manifest, Error> {
        let path = folder.join(MANIFEST);
        let bad = |path: &Path, reason: String| Error::BadBundle { path: path.to_owned(), reason };
        let text = fs::read_to_string(&path).map_err(|e| bad(&path, e.to_string()))?;
        let manifest: Manifest = serde_json::from_str(&text).map_err(|e| bad(&path, e.to_string()))?;
        for own in manifest.cubins() {
            let file = folder.join(&own.file);
            let cubin = fs::read(&file).map_err(|e| bad(&file, e.to_string()))?;
            if hash(&[&cubin]) != own.sha256 {
                return Err(bad(&file, "its checksum is not the manifest's".to_owned()));
            }
        }
        Ok(manifest)
    }
}

/// The hash of the source in a cubin's file name.
fn source_of(file: &str) -> Option<&str> {
    file.strip_suffix(".cubin")?.rsplit('.').next()
}

/// Hash of a source: its target, unit and headers. It identifies the code of a validation record or of a
/// bundled cubin.
pub fn source_hash(source: &Source) -> String {
    let headers = source.headers.iter().flat_map(|(name, text)| [name.as_str(), text]);
    let parts: Vec<&[u8]> =
        [source.target.as_str(), &source.unit].into_iter().chain(headers).map(str::as_bytes).collect();
    hash(&parts)
}
