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
    /// Its file in the bundle's folder.
    pub file: String,
    /// Its SHA-256.
    pub sha256: String,
    /// Hash of what it was compiled from, without flags and compiler: see [`source_hash`].
    pub source: String,
}

/// The built-in bundle: kernels, and cubins by the hash of their source.
#[derive(Debug, Default)]
pub struct Bundle {
    kernels: Vec<BundledKernel>,
    cubins: HashMap<String, &'static [u8]>,
}

/// The manifest and the cubins by file name, empty without the feature.
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
            if manifest.is_empty() {
                return Bundle::default();
            }
            match serde_json::from_str::<Manifest>(manifest) {
                Ok(manifest) => Bundle::of(manifest, files),
                Err(error) => {
                    tracing::error!(%error, "the built-in bundle's manifest cannot be read; kernels are \
                        compiled");
                    Bundle::default()
                }
            }
        })
    }

    /// The kernels of a manifest whose files exist and are complete.
    fn of(manifest: Manifest, files: &[(&str, &'static [u8])]) -> Bundle {
        let files: HashMap<&str, &'static [u8]> = files.iter().copied().collect();
        let mut cubins = HashMap::new();
        for own in manifest.kernels.iter().flat_map(|kernel| &kernel.cubins) {
            let cubin = files.get(own.file.as_str()).filter(|cubin| hash(&[cubin]) == own.sha256);
            if let Some(cubin) = cubin {
                cubins.insert(own.source.clone(), *cubin);
            }
        }
        let mut kernels = manifest.kernels;
        kernels.retain(|kernel| kernel.cubins.iter().all(|own| cubins.contains_key(&own.source)));
        Bundle { kernels, cubins }
    }

    /// The cubins compiled from exactly these programs; `None` in a bundle of other sources.
    pub fn find_all(&self, programs: &[Source]) -> Option<Vec<&'static [u8]>> {
        if self.kernels.is_empty() {
            return None;
        }
        programs.iter().map(|own| self.cubins.get(&source_hash(own)).copied()).collect()
    }

    /// The specs that it holds for `arch`.
    pub fn specs(&self, arch: Arch) -> impl Iterator<Item = &KernelSpec> {
        self.kernels.iter().filter(move |k| k.arch == arch).map(|k| &k.spec)
    }

    /// Number of kernels.
    pub fn len(&self) -> usize {
        self.kernels.len()
    }

    /// Whether it holds no kernels.
    pub fn is_empty(&self) -> bool {
        self.kernels.is_empty()
    }
}

impl Manifest {
    /// Reads the manifest of the bundle in `folder` and checks every cubin against it.
    ///
    /// # Errors
    /// [`Error::BadBundle`].
    pub fn read(folder: &Path) -> Result<Manifest, Error> {
        let path = folder.join(MANIFEST);
        let bad = |path: &Path, reason: String| Error::BadBundle { path: path.to_owned(), reason };
        let text = fs::read_to_string(&path).map_err(|e| bad(&path, e.to_string()))?;
        let manifest: Manifest = serde_json::from_str(&text).map_err(|e| bad(&path, e.to_string()))?;
        for own in manifest.kernels.iter().flat_map(|kernel| &kernel.cubins) {
            let file = folder.join(&own.file);
            let cubin = fs::read(&file).map_err(|e| bad(&file, e.to_string()))?;
            if hash(&[&cubin]) != own.sha256 {
                return Err(bad(&file, "its checksum is not the manifest's".to_owned()));
            }
        }
        Ok(manifest)
    }
}

/// Hash of a source: its target, unit and headers. It identifies the code of a validation record or of a
/// bundled cubin.
pub fn source_hash(source: &Source) -> String {
    let headers = source.headers.iter().flat_map(|(name, text)| [name.as_str(), text]);
    let parts: Vec<&[u8]> =
        [source.target.as_str(), &source.unit].into_iter().chain(headers).map(str::as_bytes).collect();
    hash(&parts)
}
