//! The dropout kernel on the host.
#![allow(unsafe_code)]

use std::sync::Arc;

use fa_core::Arch;
use fa_kernels::{DROPOUT, DropoutLaunch, Headers, RawKept, Source};

use crate::compiler::Compiler;
use crate::error::Error;
use crate::machine::{Access, Machine, Memory};
use crate::options::Options;
use crate::single::{Shape, Single};

/// The dropout kernel that can be emulated.
#[derive(Debug)]
pub struct DropoutUnit(Single);

impl DropoutUnit {
    pub(crate) fn load(
        compiler: &Compiler,
        machine: Arc<Machine>,
        arch: Arch,
        headers: &Headers,
    ) -> Result<DropoutUnit, Error> {
        let source = Source::dropout(arch, headers)?;
        Ok(DropoutUnit(Single::load(compiler, machine, arch, &source, DROPOUT)?))
    }

    /// Writes the bits; returns them with the findings (races, accesses out of bounds, ...). `state`: seed,
    /// offset and threshold in memory that the kernel reads, in place of the value.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn run(
        &self,
        launch: &DropoutLaunch,
        kept: fa_core::Kept,
        in_memory: bool,
        options: &Options<'_>,
    ) -> Result<(Vec<u32>, Vec<String>), Error> {
        let run = self.0.start(options);
        let bits = run.memory("bits", &vec![0; 4 * launch.len()], Access::Unwritten)?;
        let state = [kept.seed, kept.offset, kept.threshold.into()];
        let bytes: Vec<u8> = state.iter().flat_map(|word: &u64| word.to_ne_bytes()).collect();
        let state = in_memory.then(|| run.memory("state", &bytes, Access::Input)).transpose()?;
        let kept = state.as_ref().map(Memory::address).map_or(RawKept::Value(kept), RawKept::At);
        let params = launch.params(bits.address(), kept);
        let shape = Shape { grid: launch.grid, threads: launch.threads, smem: 0 };
        // SAFETY: the entry takes these parameters, and all that they point at has been named and lives on.
        let faults = unsafe { run.launch(&params, &shape) };
        let word = |bytes: &[u8]| u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        Ok((bits.bytes().chunks_exact(4).map(word).collect(), faults))
    }
}
