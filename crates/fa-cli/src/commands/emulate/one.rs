//! One problem under every seed, and the timeline of one CTA.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use fa_attn::atomic_file::AtomicFile;
use fa_core::{Arch, KernelSpec};
use fa_emu::sweep::SEEDS;
use fa_emu::{Emulator, Options, Pace, Proof, Trial, Unit, timeline};

use super::args::EmulateArgs;
use super::case::{self, case};
use super::report::{Report, summary, text};
use crate::term::failure::{InputError, Verdict};
use crate::term::output;
use crate::term::progress::{self, Steps};

pub(super) fn one(
    args: &EmulateArgs,
    emulator: &Emulator,
    spec: &KernelSpec,
    arch: Arch,
    page: Option<&AtomicFile>,
) -> anyhow::Result<Verdict> {
    let case = case(args, spec)?;
    let problem = case.problem;
    let program = case::inputs(args, &problem)?;
    let headers = args.headers()?;
    let unit = progress::spinner("compiling the kernel", || emulator.unit(spec, arch, &headers))?;
    let trial = progress::spinner("computing in f64", || {
        Trial::with_inputs(&problem, spec.kernel.pass(), case.placement, &case.extras, program)
    });
    let seeds = if args.seeds.is_empty() { &SEEDS[..] } else { &args.seeds };
    let mut runs = Vec::new();
    for &seed in seeds {
        let proof = run(args, &unit, &trial, &Options::seed(seed))?;
        runs.push(summary(&unit, &problem, args.sms_for(spec), seed, proof.0));
    }
    if let Some(target) = page {
        // A schedule in which operations take as long as their size asks for.
        let seed = seeds[0];
        let pace = if args.seeds.is_empty() { Pace::Paced } else { Options::seed(seed).pace };
        let options = Options { pace, trace_cta: Some(args.cta), ..Options::seed(seed) };
        let (proof, ctas) = run(args, &unit, &trial, &options)?;
        if args.cta > 0 && args.cta >= ctas {
            let message = format!("--cta {}: the largest launch has {ctas} CTAs, numbered from 0", args.cta);
            return Err(InputError::Usage(message).into());
        }
        let words: Vec<String> =
            std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
        let command = format!("{}: fa {}", fa_lab::record::today(), words.join(" "));
        let lead = [crate::attention::describe(&problem), command];
        let page = timeline::page(&format!("{spec} on {arch}"), &lead, args.cta, &proof.outcome);
        target.write(|writer| writer.write_all(page.as_bytes())).map_err(InputError::from)?;
    }
    let passed = runs.iter().all(|run| run.passed);
    let report = Report {
        kernel: spec.to_string(),
        arch,
        fingerprint: unit.fingerprint().to_owned(),
        machine: fa_emu::version(),
        problem,
        runs,
        passed,
    };
    if args.json {
        output::print_json(&report)?
    } else {
        output::print(&text(&report, args.sms_for(spec), spec))?
    }
    Ok(if passed { Verdict::Good } else { Verdict::Bad })
}

/// A run, and the CTAs of its largest launch.
fn run(args: &EmulateArgs, unit: &Unit, trial: &Trial, options: &Options) -> anyhow::Result<(Proof, u32)> {
    let (steps, ctas) = (Mutex::new(Steps::new(0)), AtomicU32::new(0));
    let report = |done: u32, all: u32| {
        ctas.fetch_max(all, Ordering::Relaxed);
        if let Ok(mut steps) = steps.lock() {
            steps.begin(format!("CTA {done} of {all}"));
        }
    };
    let options = Options {
        sms: args.sms_for(unit.spec()),
        resident: 2,
        step_limit: args.steps,
        progress: Some(&report),
        ..*options
    };
    let proof = trial.run(unit, &options)?;
    Ok((proof, ctas.load(Ordering::Relaxed)))
}
