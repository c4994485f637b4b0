//! The entry point: a compiler, the machine, and kernels compiled for it.

use std::path::Path;
use std::sync::Arc;

use fa_core::quantize::Codes;
use fa_core::{Arch, KernelSpec};
use fa_kernels::{Headers, Source};

use crate::append::AppendUnit;
use crate::compiler::{Compiler, default_root};
use crate::dropout::DropoutUnit;
use crate::error::Error;
use crate::machine::Machine;
use crate::merge::MergeUnit;
use crate::unit::Unit;

/// A compiler and the machine that it has compiled.
#[derive(Clone, Debug)]
pub struct Emulator {
    compiler: Compiler,
    machine: Arc<Machine>,
}

impl Emulator {
    /// An emulator with the host's C++ compiler ([`crate::COMPILER_VARIABLE`]), which caches its results in
    /// the user's cache folder ([`crate::CACHE_VARIABLE`]).
    ///
    /// # Errors
    /// [`Error::NoCompiler`], [`Error::Host`], and those of compiling.
    pub fn new() -> Result<Emulator, Error> {
        let root = default_root().unwrap_or_else(|| std::env::temp_dir().join("fa-emulator"));
        Emulator::at(&root)
    }

    /// An emulator that caches its results in `root`.
    ///
    /// # Errors
    /// As [`Emulator::new`].
    pub fn at(root: &Path) -> Result<Emulator, Error> {
        let compiler = Compiler::find(root)?;
        let machine = Arc::new(Machine::load(&compiler)?);
        Ok(Emulator { compiler, machine })
    }

    /// The compiler.
    pub fn compiler(&self) -> &Compiler {
        &self.compiler
    }

    /// The kernel of `spec` for `arch`, compiled now or before.
    ///
    /// # Errors
    /// Those of the spec, [`Error::NoTwin`] and [`Error::Compile`].
    pub fn unit(&self, spec: &KernelSpec, arch: Arch, headers: &Headers) -> Result<Unit, Error> {
        self.unit_of(spec, arch, &source(spec, arch, headers)?)
    }

    /// The append kernel for `arch` and a cache of codes, or of elements, compiled now or before.
    ///
    /// # Errors
    /// As [`Emulator::unit`].
    pub fn append_unit(
        &self,
        codes: Option<Codes>,
        arch: Arch,
        headers: &Headers,
    ) -> Result<AppendUnit, Error> {
        AppendUnit::load(&self.compiler, self.machine.clone(), arch, headers, codes)
    }

    /// The merge kernel for `arch`, compiled now or before.
    ///
    /// # Errors
    /// As [`Emulator::unit`].
    pub fn merge_unit(&self, arch: Arch, headers: &Headers) -> Result<MergeUnit, Error> {
        MergeUnit::load(&self.compiler, self.machine.clone(), arch, headers)
    }

    /// The dropout kernel for `arch`, compiled now or before.
    ///
    /// # Errors
    /// As [`Emulator::unit`].
    pub fn dropout_unit(&self, arch: Arch, headers: &Headers) -> Result<DropoutUnit, Error> {
        DropoutUnit::load(&self.compiler, self.machine.clone(), arch, headers)
    }

    /// The kernel of a source that may differ from the spec's, such as one with an injected fault.
    ///
    /// # Errors
    /// As [`Emulator::unit`].
    pub fn unit_of(&self, spec: &KernelSpec, arch: Arch, source: &Source) -> Result<Unit, Error> {
        Unit::load(&self.compiler, self.machine.clone(), spec, arch, source)
    }
}

/// The source of `spec` for `arch`, which asserts the planner's account of shared memory.
///
/// # Errors
/// Those of the spec.
pub fn source(spec: &KernelSpec, arch: Arch, headers: &Headers) -> Result<Source, Error> {
    Ok(Source::new(spec, arch, Some(fa_planner::account::smem(spec).total), headers)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn a_folder_that_cannot_be_made_comes_with_the_variable_for_another() {
        match Emulator::at(Path::new("/proc/self/none")) {
            // Without a compiler there is nothing to cache.
            Err(Error::NoCompiler { .. } | Error::Host { .. }) => {}
            other => {
                let error = other.map(drop).expect_err("no folder can be made there").to_string();
                assert!(error.contains("/proc/self/none") && error.contains("FA_EMULATOR_CACHE"), "{error}");
            }
        }
    }
}
