//! `fa build --best`: the planner's best few kernels for every kind of problem, and what the compiler makes
//! of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Context;
use fa_core::{Arch, KernelSpec, counted};
use fa_cpu::threads::together;
use fa_kernels::Headers;
use fa_lab::best::{self, Said};
use fa_planner::refusals::Refusals;

use super::args::BuildArgs;
use crate::term::failure::Verdict;
use crate::term::output;
use crate::term::progress::Steps;

/// Runs the command: a bad verdict when one of the kernels does not compile cleanly.
///
/// # Errors
/// Without a compiler, and for a file that cannot be read or written.
pub(crate) fn command(args: &BuildArgs, count: usize) -> anyhow::Result<Verdict> {
    let compiler = args.compiler()?;
    let path = best::file(&args.results, &compiler)?;
    // Clean kernels are noted as well, for a run that goes on where another was stopped.
    let progress = args.state.join(path.file_name().unwrap_or_default());
    let mut known = best::read(&path)?;
    known.extend(best::read(&progress)?);
    let names: BTreeSet<&str> = known.iter().map(|own| own.kernel.as_str()).collect();
    let named = |own: &(Arch, KernelSpec)| best::name(own.0, &own.1);
    let wanted = |name: &str| args.filter.as_deref().is_none_or(|part| name.contains(part));
    let kinds = args.random.map_or_else(best::kinds, |drawn| best::drawn(usize::from(drawn), args.seed));
    let all: Vec<_> = best::best(&kinds, count, args.refusals.is_some())
        .into_iter()
        .filter(|own| wanted(&named(own)))
        .collect();
    let left: Vec<_> = all.iter().filter(|own| !names.contains(named(own).as_str())).collect();
    std::fs::create_dir_all(&args.state).with_context(|| args.state.display().to_string())?;
    let file = std::fs::File::options().append(true).create(true).open(&progress);
    let file = file.with_context(|| format!("{}: progress cannot be written there", progress.display()))?;
    let shared = Mutex::new((Steps::new(left.len()), file, Vec::new()));
    let (next, headers) = (AtomicUsize::new(0), Headers::current()?);
    let work = || -> anyhow::Result<()> {
        while let Some(spec) = left.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Ok(mut shared) = shared.lock() {
                shared.0.begin(named(spec));
            }
            let said = best::compile(&compiler, spec, &headers)?;
            let Ok(mut shared) = shared.lock() else { return Ok(()) };
            let (steps, file, new) = &mut *shared;
            writeln!(file, "{said}").with_context(|| progress.display().to_string())?;
            new.push(said);
            steps.advance();
        }
        Ok(())
    };
    let cores = std::thread::available_parallelism().map_or(1, |count| count.get());
    together(args.threads.map_or(cores, usize::from), work).into_iter().collect::<anyhow::Result<()>>()?;
    let (_, _, new) = shared.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    best::keep(&path, &new)?;
    let of: BTreeMap<&str, &Said> = known.iter().chain(&new).map(|own| (own.kernel.as_str(), own)).collect();
    let said: Vec<(&Said, bool)> = all
        .iter()
        .filter_map(|own| Some((*of.get(named(own).as_str())?, Refusals::shipped().has(&own.1, own.0))))
        .collect();
    let is_faulty = |own: &&(&Said, bool)| own.0.verdict != best::Verdict::Clean && !own.1;
    let faulty: Vec<&Said> = said.iter().filter(is_faulty).map(|own| own.0).collect();
    let mut text = String::new();
    for own in &faulty {
        let _ = writeln!(text, "{own}");
    }
    if let Some(file) = &args.refusals {
        let said: Vec<Said> = said.iter().map(|own| own.0.clone()).collect();
        let name = compiler.version()?.replace("nvrtc", "NVRTC");
        let have = fa_lab::refusals::update(file, &name, &kinds, &said)?;
        let _ = writeln!(text, "{} in {}", counted(have, "refusal"), file.display());
    }
    let _ = writeln!(
        text,
        "{} among the best {count} of {} kinds of problems by {}, {} compiled now, {} not clean; {}",
        counted(said.len(), "kernel"),
        kinds.len(),
        compiler.version()?,
        new.len(),
        faulty.len(),
        path.display()
    );
    output::print(&text)?;
    Ok(if faulty.is_empty() { Verdict::Good } else { Verdict::Bad })
}
