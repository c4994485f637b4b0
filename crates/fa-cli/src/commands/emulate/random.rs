//! Kernels and problems drawn at random.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use fa_core::counted;
use fa_cpu::threads::together;
use fa_emu::Emulator;
use fa_emu::random::{Tried, attempt, draw, kernel_of};
use fa_kernels::Headers;
use fa_lab::log::{self, Lines, Log};

use super::args::EmulateArgs;
use crate::term::destinations::target;
use crate::term::failure::{InputError, Verdict};
use crate::term::output;
use crate::term::progress::Steps;

pub(super) fn random(args: &EmulateArgs, emulator: &Emulator) -> anyhow::Result<Verdict> {
    let seed = match args.seeds[..] {
        [] => 1,
        [seed] => seed,
        [..] => {
            let message = "--random draws by one --seed; run it once for each";
            return Err(InputError::Usage(message.into()).into());
        }
    };
    let named = |turn: &u64| args.kernels.iter().any(|own| own == kernel_of(*turn));
    let wanted = |turn: &u64| args.kernels.is_empty() || named(turn);
    let (from, count) = (u64::from(args.from.unwrap_or(0)), args.random.unwrap_or(1) as usize);
    let turns: Vec<u64> = (from..).filter(wanted).take(count).collect();
    if let Some(path) = &args.log {
        // Refused before anything is drawn; a folder is not made.
        target(path, &[])?;
    }
    let mut known = args.log.as_deref().map_or_else(|| Ok(Vec::new()), known)?;
    let log = args.log.as_deref().map(Log::open).transpose()?;
    known.retain(|tried| tried.seed == seed && turns.contains(&tried.turn));
    let done: BTreeSet<u64> = known.iter().map(|tried| tried.turn).collect();
    let left: Vec<u64> = turns.into_iter().filter(|turn| !done.contains(turn)).collect();
    let shared = Mutex::new((Steps::new(left.len()), log, known));
    let (next, headers) = (AtomicU64::new(0), Headers::embedded());
    let work = || -> anyhow::Result<()> {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(&turn) = usize::try_from(index).ok().and_then(|index| left.get(index)) else {
                return Ok(());
            };
            let Some(drawn) = draw(seed, turn) else { continue };
            if let Ok(mut shared) = shared.lock() {
                shared.0.begin(format!("{turn}: {} {}", drawn.spec, drawn.arch));
            }
            let tried = attempt(emulator, (seed, turn), &drawn, &headers)?;
            let Ok(mut shared) = shared.lock() else { return Ok(()) };
            let (steps, log, all) = &mut *shared;
            steps.advance();
            if let Some(log) = log {
                log.add(std::slice::from_ref(&tried))?;
            }
            all.push(tried);
        }
    };
    together(args.workers(), work).into_iter().collect::<anyhow::Result<()>>()?;
    let (_, _, tried) = shared.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    output::print(&text(&tried))?;
    Ok(if tried.iter().all(|own| own.faults.is_empty()) { Verdict::Good } else { Verdict::Bad })
}

/// What a log says was tried.
fn known(path: &Path) -> anyhow::Result<Vec<Tried>> {
    let Lines { results, others } = log::read(path)?;
    if results.is_empty() && others > 0 {
        let lines = counted(others, "line");
        let message = format!("--log {}: it has {lines}, none of such a log: name another", path.display());
        return Err(InputError::Usage(message).into());
    }
    Ok(results)
}

/// A line for each of the kernels, and what was found, with how to run it again.
fn text(tried: &[Tried]) -> String {
    let mut of: BTreeMap<&str, Vec<&Tried>> = BTreeMap::new();
    tried.iter().for_each(|own| of.entry(own.family()).or_default().push(own));
    let mut table = output::table(&["kernel", "drawn", "different", "problems", "runs", "minutes", "found"]);
    for (kernel, own) in &of {
        let names: BTreeSet<&str> = own.iter().map(|tried| tried.kernel.as_str()).collect();
        let sum = |count: fn(&Tried) -> usize| own.iter().map(|tried| count(tried)).sum::<usize>();
        table.add_row([
            (*kernel).to_owned(),
            own.len().to_string(),
            names.len().to_string(),
            sum(|tried| tried.problems).to_string(),
            sum(|tried| tried.runs).to_string(),
            format!("{:.1}", own.iter().map(|tried| tried.seconds).sum::<f64>() / 60.0),
            sum(|tried| tried.faults.len()).to_string(),
        ]);
    }
    let mut out = output::table_text(&table);
    let faulty: Vec<&Tried> = tried.iter().filter(|own| !own.faults.is_empty()).collect();
    for own in &faulty {
        let Tried { seed, turn, kernel, arch, origin, .. } = own;
        let _ =
            writeln!(out, "{kernel} on {arch} ({origin}): fa emulate --random 1 --from {turn} --seed {seed}");
        for fault in &own.faults {
            let _ = writeln!(out, "  {}", fault.replace('\n', "\n  "));
        }
    }
    let _ = writeln!(out, "{}, {} with findings", counted(tried.len(), "kernel"), faulty.len());
    out
}
