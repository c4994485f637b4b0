//! The merge kernel on the host: its unit, and calls with packed tensors.
#![allow(unsafe_code)]

use std::sync::Arc;

use fa_core::{Arch, TensorLayout};
use fa_kernels::{Headers, MERGE, MergeLaunch, RawMergeArgs, RawPartialResult, RawTensor, Source};

use crate::compiler::Compiler;
use crate::error::Error;
use crate::machine::{Access, Machine, Memory};
use crate::options::Options;
use crate::single::{Shape, Single};

/// The merge kernel that can be emulated.
#[derive(Debug)]
pub struct MergeUnit(Single);

/// A call: tensors in `layout`, as bytes of their types. `out` and `lse` are written.
#[derive(Clone, Debug, PartialEq)]
pub struct MergeCall {
    /// Of each part O, and LSE `[batch, heads, seqlen]`.
    pub parts: Vec<(Vec<u8>, Vec<f32>)>,
    /// The layout of the parts and the result.
    pub layout: TensorLayout,
    /// `[heads]`.
    pub sinks: Option<Vec<f32>>,
    /// The merged O.
    pub out: Vec<u8>,
    /// The merged LSE; empty where the parts are added up.
    pub lse: Vec<f32>,
}

impl MergeUnit {
    pub(crate) fn load(
        compiler: &Compiler,
        machine: Arc<Machine>,
        arch: Arch,
        headers: &Headers,
    ) -> Result<MergeUnit, Error> {
        let source = Source::merge(arch, headers)?;
        Ok(MergeUnit(Single::load(compiler, machine, arch, &source, MERGE)?))
    }

    /// Runs a call; returns the findings (races, accesses out of bounds, ...).
    ///
    /// # Errors
    /// Those of [`MergeLaunch::check`], and [`Error::Memory`].
    pub fn run(
        &self,
        launch: &MergeLaunch,
        call: &mut MergeCall,
        options: &Options<'_>,
    ) -> Result<Vec<String>, Error> {
        let run = self.0.start(options);
        let memory = |name: &str, bytes: &[u8], access| run.memory(name, bytes, access);
        let bytes_of =
            |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|value| value.to_ne_bytes()).collect() };
        let parts = call
            .parts
            .iter()
            .map(|(out, lse)| {
                let out = memory("a part's out", out, Access::Input)?;
                Ok((out, memory("a part's lse", &bytes_of(lse), Access::Input)?))
            })
            .collect::<Result<Vec<_>, Error>>()?;
        let sinks = call.sinks.as_deref().map(|sinks| memory("sinks", &bytes_of(sinks), Access::Input));
        let sinks = sinks.transpose()?;
        let out = memory("out", &call.out, Access::Unwritten)?;
        let lse = memory("lse", &bytes_of(&call.lse), Access::Unwritten)?;

        let adds = call.lse.is_empty();
        let [_, seqlen, heads, dim] = launch.merge().shape();
        let strides = call.layout.strides(seqlen, heads, dim);
        let raw: Vec<RawPartialResult> = parts
            .iter()
            .map(|(out, lse)| RawPartialResult {
                out: RawTensor { address: out.address(), strides },
                lse: if adds { 0 } else { lse.address() },
            })
            .collect();
        let args = RawMergeArgs {
            parts: &raw,
            out: RawTensor { address: out.address(), strides },
            lse: (!adds).then(|| lse.address()),
            sinks: sinks.as_ref().map(Memory::address),
        };
        launch.check(&args)?;
        if launch.grid == 0 {
            return Ok(Vec::new());
        }
        let params = launch.params(&args);
        let shape = Shape { grid: launch.grid, threads: launch.threads, smem: 0 };
        // SAFETY: the entry takes these parameters, and all that they point at has been named and lives on.
        let faults = unsafe { run.launch(&params, &shape) };
        call.out = out.bytes().to_vec();
        let float = |bytes: &[u8]| f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        call.lse = lse.bytes().chunks_exact(4).map(float).collect();
        Ok(faults)
    }
}
