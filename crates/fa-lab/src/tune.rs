//! Measures kernels for a problem, and stores the winner where the library finds it.
//!
//! Workers measure, so that a kernel that breaks its context breaks nothing else. Measurements are written as
//! they come, and not repeated as long as the kernels' sources are unchanged.

pub mod candidates;
pub mod draw;
pub mod judge;
pub mod measured;
pub mod report;
mod supervise;
mod wanted;
pub(crate) mod worker;

use std::path::PathBuf;
use std::sync::Mutex;

use fa_attn::device::Gpu;
use fa_attn::tune::{TuneKey, Tuned, TunedEntry};
use fa_core::{Family, KernelSpec};

use fa_kernels::{Compiler, CompilerKind, Headers, Source, smem_bytes};
use rayon::prelude::*;

use crate::device;
use crate::error::Result;
use crate::progress::{Progress, Step};
use crate::record::{Provenance, fingerprint, without_logs};
use crate::runner::Turns;
use crate::worker::Program;

use candidates::Candidate;
use measured::{Measured, Notebook, Outcome};
use report::Report;

pub use wanted::Wanted;

/// Where the problems come from.
#[derive(Clone, Debug, PartialEq)]
pub enum Problems {
    /// The caller names them.
    Given(Vec<Wanted>),
    /// Drawn at random for this GPU.
    Drawn(draw::Drawing),
}

/// What to tune.
#[derive(Clone, Debug)]
pub struct Options {
    /// The problems.
    pub problems: Problems,
    /// Number of tiles to try, the planner's best first; as many variants of the best ones are tried as well.
    pub candidates: usize,
    /// The kernels to try in place of the planner's; none for those.
    pub specs: Vec<KernelSpec>,
    /// How often each kernel runs.
    pub turns: Turns,
    /// Whether to measure again what has been measured.
    pub fresh: bool,
    /// The table for the winners; measurements go to a file next to it.
    pub table: PathBuf,
}

/// Measures the candidates of every problem and writes each winner to the table as it is found.
///
/// # Errors
/// No usable GPU or compiler, problems that no kernel computes, files that cannot be used, workers that
/// cannot be started.
pub fn run(options: &Options, worker: &Program, progress: &mut Progress<'_>) -> Result<Report> {
    let Options { turns, table, .. } = options;
    // A table that cannot be read is not overwritten.
    Tuned::read(table)?;
    let gpu = device::open()?;
    let provenance = Provenance::new(&gpu)?;
    let name = provenance.device.gpu.clone();
    let arch = gpu.arch();
    let (wanted, seed) = match &options.problems {
        Problems::Given(wanted) => (wanted.clone(), None),
        Problems::Drawn(drawing) => (drawing.draw(arch)?, Some(drawing.seed)),
    };
    let mut notebook = Notebook::open(&table.with_extension("measured.jsonl"))?;
    let mut lists: Vec<(Wanted, Vec<Candidate>)> = Vec::new();
    for wanted in wanted {
        let family = wanted.family.unwrap_or(Family::native(arch));
        let found = if options.specs.is_empty() {
            candidates::of(&wanted.problem, arch, family, wanted.pass, options.candidates)?
        } else {
            candidates::given(&wanted.problem, arch, &options.specs)?
        };
        let family = found.first().map_or(family, |first| first.spec.kernel.family());
        lists.push((Wanted { family: Some(family), ..wanted }, found));
    }
    let faults = compile(&gpu, &lists, progress)?;
    // The workers need its memory.
    drop(gpu);

    progress(Step::Total(lists.len()));
    let mut results: Vec<Measured> = Vec::new();
    for (wanted, candidates) in lists {
        let Wanted { problem, pass, .. } = wanted;
        progress(Step::Begin(format!(
            "N {} hd {} {}",
            problem.lengths.max_k(),
            problem.head_dim,
            problem.mask
        )));
        let mut found: Vec<Outcome> = Vec::new();
        for candidate in &candidates {
            let sources = fingerprint(&candidate.spec, arch)?;
            let fault = faults.iter().find(|(spec, _)| *spec == candidate.spec);
            let known = notebook.find(&name, &problem, &candidate.spec, &sources).filter(|_| !options.fresh);
            found.push(Outcome {
                ms: known.and_then(|known| known.ms),
                again_ms: known.and_then(|known| known.again_ms),
                error: fault
                    .map(|(_, why)| why.clone())
                    .or_else(|| known.and_then(|known| known.error.clone())),
                sources,
            });
        }
        if found.iter().any(|found| found.ms.is_none() && found.error.is_none()) {
            // Only times of the same run are compared, so all candidates run.
            supervise::measure(&problem, &candidates, &mut found, *turns, worker)?;
            notebook.add(&name, &problem, &candidates, &found)?;
        }
        let result = Measured { wanted, candidates, found };
        if let Some((spec, ms)) = result.best() {
            let entry = TunedEntry {
                key: TuneKey::of(&problem),
                spec: spec.clone(),
                splits: None,
                tflops: (problem.flops(pass) / (ms * 1e9) * 10.0).round() / 10.0,
                code: None,
            };
            // Engines that tune may have added winners meanwhile.
            Tuned::change(table, |tuned| tuned.set(&name, entry))?.1?;
        }
        results.push(result);
        progress(Step::Done);
    }
    Ok(Report::new(provenance, *turns, seed, &results))
}

/// Compiles every candidate into the cache, on all cores; returns the faults of those that do not compile
/// cleanly.
fn compile(
    gpu: &Gpu,
    lists: &[(Wanted, Vec<Candidate>)],
    progress: &mut Progress<'_>,
) -> Result<Vec<(KernelSpec, String)>> {
    let mut specs: Vec<&KernelSpec> = Vec::new();
    for candidate in lists.iter().flat_map(|(_, candidates)| candidates) {
        if !specs.contains(&&candidate.spec) {
            specs.push(&candidate.spec);
        }
    }
    let compiler = Compiler::find(CompilerKind::Nvrtc)?;
    let (arch, headers, cache) = (gpu.arch(), Headers::current()?, gpu.kernels.cache());
    progress(Step::Total(specs.len()));
    let progress = Mutex::new(progress);
    let compile = |spec: &&KernelSpec| {
        if let Ok(mut progress) = progress.lock() {
            progress(Step::Begin(format!("compiling {spec}")));
            progress(Step::Done);
        }
        let programs = Source::programs(spec, arch, Some(smem_bytes(spec)), &headers);
        let error = programs.and_then(|programs| cache.get_all(&compiler, spec, &programs)).err()?;
        Some(((*spec).clone(), without_logs(&error.to_string())))
    };
    Ok(specs.par_iter().filter_map(compile).collect())
}
