//! A kernel's unit for the host: its source with the twins in place of `ptx/`, compiled and loaded.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fmt::Write;
use std::path::PathBuf;
use std::sync::Arc;

use fa_core::{Arch, KernelSpec};
use fa_kernels::Source;
use fa_planner::account::SmemPlan;
use libloading::Library;

use crate::compiler::Compiler;
use crate::error::Error;
use crate::machine::{Machine, open, sources_of};

/// A kernel that can be emulated. Shared by threads: each run has a session of its own.
#[derive(Debug)]
pub struct Unit {
    pub(crate) machine: Arc<Machine>,
    library: Library,
    pub(crate) path: PathBuf,
    pub(crate) spec: KernelSpec,
    pub(crate) arch: Arch,
    pub(crate) smem: SmemPlan,
    fingerprint: String,
}

impl Unit {
    pub(crate) fn load(
        compiler: &Compiler,
        machine: Arc<Machine>,
        spec: &KernelSpec,
        arch: Arch,
        source: &Source,
    ) -> Result<Unit, Error> {
        let smem = fa_planner::account::smem(spec);
        let files = files(source)?;
        let flags = flags(arch);
        let path = compiler.library("unit", &spec.to_string(), &files, "kernel.cu", &flags)?;
        let library = open(&path, false)?;
        let fingerprint = source.fingerprint();
        Ok(Unit { machine, library, path, spec: spec.clone(), arch, smem, fingerprint })
    }

    /// The spec.
    pub fn spec(&self) -> &KernelSpec {
        &self.spec
    }

    /// The architecture that it is compiled for.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// [`Source::fingerprint`] of the kernel.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// The buffers of shared memory, as the planner accounts for them.
    pub fn smem(&self) -> &SmemPlan {
        &self.smem
    }

    /// The function that calls `entry` with an array of pointers to its arguments.
    pub(crate) fn entry(&self, entry: &str) -> *const c_void {
        let name = format!("emu_{entry}");
        // SAFETY: its address is only passed on.
        let found = unsafe { self.library.get::<unsafe extern "C" fn()>(name.as_bytes()) };
        found.map_or(std::ptr::null(), |function| *function as *const c_void)
    }
}

/// Compiler flags of units for `arch`.
pub(crate) fn flags(arch: Arch) -> [String; 8] {
    let (major, minor) = arch.compute_capability();
    [
        "-O1",
        "-ffp-contract=off",
        "-fno-strict-aliasing",
        "-fsanitize=thread",
        "-nodefaultlibs",
        &format!("-D__CUDA_ARCH__={}", 100 * major + 10 * minor),
        "-include",
        "cuda.h",
    ]
    .map(str::to_owned)
}

/// The unit, the twins, and the headers shared with the device.
pub(crate) fn files(source: &Source) -> Result<Vec<(String, String)>, Error> {
    let own = |(name, text): (&str, &str)| (name.to_owned(), text.to_owned());
    let mut files: Vec<_> = sources_of("host/").map(own).collect();
    files.extend(sources_of("machine/").filter(|(name, _)| *name == "interface.h").map(own));
    for (name, text) in &source.headers {
        if !name.starts_with("ptx/") {
            files.push((name.clone(), text.clone()));
        } else if !files.iter().any(|(twin, _)| twin == name) {
            return Err(Error::NoTwin { header: name.clone() });
        }
    }
    let mut unit = source.unit.clone();
    for entry in entries(&source.unit) {
        let _ = write!(
            unit,
            "\nextern \"C\" void emu_{entry}(const void* const* arguments) {{ emu::call({entry}, arguments); \
             }}\n"
        );
    }
    files.push(("kernel.cu".into(), unit));
    files.sort();
    Ok(files)
}

/// Names of the `extern "C"` functions of a unit.
fn entries(unit: &str) -> Vec<&str> {
    unit.split("extern \"C\" __global__")
        .skip(1)
        .filter_map(|text| {
            let text = &text[..text.find("const __grid_constant__")?];
            text.trim_end().strip_suffix('(')?.split_whitespace().last()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_found() {
        let unit = "extern \"C\" __global__ void __launch_bounds__(256, 1)\n\
                    fa_kernel(const __grid_constant__ BwdParams params) {\n}\n\
                    extern \"C\" __global__ void __launch_bounds__(256)\nfa_finish(const __grid_constant__ \
                    BwdParams params) {\n}\n";
        assert_eq!(entries(unit), ["fa_kernel", "fa_finish"]);
    }

    #[test]
    fn every_header_of_ptx_has_a_twin_with_its_functions() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../fa-kernels/cuda/ptx");
        let functions = |text: &str, mark: &str| {
            let mut names: Vec<String> = text
                .lines()
                .filter(|line| !line.trim_start().starts_with("//"))
                .filter_map(|line| line.split_once(mark)?.1.split_once('('))
                .filter_map(|(head, _)| head.split_whitespace().last().map(str::to_owned))
                .collect();
            names.sort();
            names.dedup();
            names
        };
        for entry in std::fs::read_dir(folder).expect("the headers are here") {
            let path = entry.expect("it can be read").path();
            let name = format!("ptx/{}", path.file_name().expect("a file").to_string_lossy());
            let text = std::fs::read_to_string(&path).expect("it can be read");
            let (_, twin) = sources_of("host/").find(|(twin, _)| *twin == name).expect(&name);
            let twins = functions(twin, "EMU_INLINE ");
            for function in functions(&text, "__device__ __forceinline__ ") {
                assert!(twins.contains(&function), "{name}: no twin of {function}");
            }
        }
    }
}
