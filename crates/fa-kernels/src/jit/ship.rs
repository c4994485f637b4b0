//! Compiles a list of specs for their architectures and compares plan and result: `fa build`.

use std::collections::BTreeSet;
use std::path::Path;

use fa_core::quantize::Codes;
use fa_core::{Arch, KernelSpec, ShippedSpec};
use fa_planner::account::{Occupancy, account};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::jit::bundle::{BundledCubin, BundledKernel, MANIFEST, Manifest, source_hash};
use crate::jit::cache::Cache;
use crate::jit::compile::Compiler;
use crate::jit::entries::{DROPOUT, MERGE, append_entry, entries_of_programs};
use crate::jit::hash::hash;
use crate::jit::report::Report;
use crate::jit::source::Source;
use crate::{Error, Headers, atomic_file, smem_bytes};

/// One spec for one architecture, as planned and as compiled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The spec's name.
    pub name: String,
    /// The architecture.
    pub arch: Arch,
    /// Registers of a computing thread as predicted; 0 where the plan does not fit.
    pub planned_registers: u32,
    /// Registers of a thread that the plan allows.
    pub register_limit: u32,
    /// Dynamic shared memory in bytes. Planned and actual are equal: the unit asserts it.
    pub smem: u32,
    /// CTAs per SM that the plan counts on.
    pub planned_blocks: u32,
    /// CTAs per SM with the registers that the compiler used.
    pub actual_blocks: u32,
    /// What the compiler reported.
    pub report: Report,
    /// Bytes of the cubin.
    pub cubin_bytes: usize,
}

/// A spec that does not ship.
#[derive(Debug)]
pub struct Failure {
    /// The spec's name.
    pub name: String,
    /// The architecture.
    pub arch: Arch,
    /// Why: it does not fit, does not compile, spills, or has its wgmma serialised or setmaxnreg ignored.
    pub reason: String,
}

/// The result of a build.
#[derive(Debug, Default)]
pub struct Built {
    /// Specs that compiled without a fault and within their plan, in order.
    pub rows: Vec<Row>,
    /// Specs that failed.
    pub failures: Vec<Failure>,
    /// The kernels, for [`write_bundle`]; in the order of `rows`.
    kernels: Vec<(BundledKernel, Vec<Vec<u8>>)>,
    /// Kernels without a spec, for the same.
    others: Vec<(BundledCubin, Vec<u8>)>,
}

/// Compiles every spec for those of its architectures that are in `archs` (all, when empty), on all cores.
/// `progress` is called after each kernel, from any thread.
///
/// # Errors
/// [`Error::BadCompiler`] when the compiler cannot be used at all, and those of kernels without a spec. A
/// spec that fails is a [`Failure`], not an error.
pub fn build(
    specs: &[ShippedSpec],
    archs: &[Arch],
    compiler: &Compiler,
    cache: &Cache,
    headers: &Headers,
    progress: &(dyn Fn(&KernelSpec, Arch) + Sync),
) -> Result<Built, Error> {
    compiler.version()?;
    let wanted = |arch: &Arch| archs.is_empty() || archs.contains(arch);
    let jobs: Vec<(&KernelSpec, Arch)> = specs
        .iter()
        .flat_map(|shipped| shipped.archs.iter().copied().filter(wanted).map(|arch| (&shipped.spec, arch)))
        .collect();
    let results: Vec<Result<One, Failure>> = jobs
        .par_iter()
        .map(|&(spec, arch)| {
            let result = build_one(spec, arch, compiler, cache, headers);
            progress(spec, arch);
            result.map_err(|reason| Failure { name: spec.to_string(), arch, reason })
        })
        .collect();
    let mut built = Built::default();
    for result in results {
        match result {
            Ok(One { row, kernel, cubins }) => {
                built.rows.push(row);
                built.kernels.push((kernel, cubins));
            }
            Err(failure) => built.failures.push(failure),
        }
    }
    let archs: BTreeSet<Arch> = built.rows.iter().map(|row| row.arch).collect();
    for arch in archs {
        for (entry, source) in without_specs(arch, headers)? {
            let compiled = cache.get_named(compiler, entry, None, &source)?;
            built.others.push((bundled(arch, entry, &source, &compiled.cubin), compiled.cubin.clone()));
        }
    }
    Ok(built)
}

/// The sources of the kernels without a spec, by their entries.
fn without_specs(arch: Arch, headers: &Headers) -> Result<Vec<(&'static str, Source)>, Error> {
    let caches = [None, Some(Codes::E4m3), Some(Codes::Int4)].into_iter();
    let append = |codes| Source::append(codes, arch, headers).map(|source| (append_entry(codes), source));
    let others = [
        Source::merge(arch, headers).map(|source| (MERGE, source)),
        Source::dropout(arch, headers).map(|source| (DROPOUT, source)),
    ];
    caches.map(append).chain(others).collect()
}

/// The cubin of a program, by the name of its kernel or of its entry.
fn bundled(arch: Arch, name: &str, program: &Source, cubin: &[u8]) -> BundledCubin {
    let source = source_hash(program);
    BundledCubin { file: format!("{arch}/{name}.{source}.cubin"), sha256: hash(&[cubin]), source }
}

struct One {
    row: Row,
    kernel: BundledKernel,
    cubins: Vec<Vec<u8>>,
}

fn build_one(
    spec: &KernelSpec,
    arch: Arch,
    compiler: &Compiler,
    cache: &Cache,
    headers: &Headers,
) -> Result<One, String> {
    compiler.check_arch(arch).map_err(|e| e.to_string())?;
    let plan = account(spec, arch).map_err(|reason| format!("does not fit {arch}: {reason}"))?;
    let smem = smem_bytes(spec);
    let programs = Source::programs(spec, arch, Some(smem), headers).map_err(|e| e.to_string())?;
    let compiled = cache.get_all(compiler, spec, &programs).map_err(|e| e.to_string())?;
    let report = Report::of_all(compiled.iter().map(|own| &own.report));
    let blocks = Occupancy::of(arch.limits(), smem, report.registers, spec.threads()).blocks();
    if blocks < plan.blocks_per_sm {
        return Err(format!(
            "{} registers leave {blocks} blocks per SM on {arch}, the plan counts on {}",
            report.registers, plan.blocks_per_sm
        ));
    }
    let row = Row {
        name: spec.to_string(),
        arch,
        planned_registers: plan.regs.total,
        register_limit: plan.regs.limit,
        smem,
        planned_blocks: plan.blocks_per_sm,
        actual_blocks: blocks,
        report: report.clone(),
        cubin_bytes: compiled.iter().map(|own| own.cubin.len()).sum(),
    };
    let entries = entries_of_programs(spec);
    let cubins = compiled.iter().zip(&programs).enumerate().map(|(index, (own, program))| {
        // Of several kernels that share a program the file is one.
        let name = if index == 0 { row.name.as_str() } else { entries[index][0] };
        bundled(arch, name, program, &own.cubin)
    });
    let cubins = cubins.collect();
    let kernel = BundledKernel { name: row.name.clone(), spec: spec.clone(), arch, cubins, smem, report };
    Ok(One { row, kernel, cubins: compiled.iter().map(|own| own.cubin.clone()).collect() })
}

/// Writes the cubins of a build ([`BundledCubin::file`]) and then the manifest into `folder`, each in one
/// step.
///
/// # Errors
/// [`Error::Io`].
pub fn write_bundle(built: &Built, compiler: &Compiler, folder: &Path) -> Result<Manifest, Error> {
    for (kernel, cubins) in &built.kernels {
        for (own, cubin) in kernel.cubins.iter().zip(cubins) {
            atomic_file::write(&folder.join(&own.file), cubin)?;
        }
    }
    for (own, cubin) in &built.others {
        atomic_file::write(&folder.join(&own.file), cubin)?;
    }
    let kernels = built.kernels.iter().map(|(kernel, _)| kernel.clone()).collect();
    let others = built.others.iter().map(|(own, _)| own.clone()).collect();
    let manifest = Manifest { compiler: compiler.version()?, kernels, others };
    let text =
        serde_json::to_string_pretty(&manifest).expect("plain structs of numbers and names always serialise");
    let path = folder.join(MANIFEST);
    atomic_file::write(&path, text.as_bytes())?;
    Ok(manifest)
}
