//! The cases of the GPU's grid.

use fa_core::{Arch, KernelSpec};
use fa_emu::sweep::SEEDS;
use fa_emu::{Emulator, Options, Trial};
use fa_lab::grid::Extent;
use serde::Serialize;

use super::args::EmulateArgs;
use super::report::{Run, summary};
use crate::term::failure::{InputError, Verdict};
use crate::term::output;
use crate::term::progress::{self, Steps};

/// The cases of the GPU's grid for this kernel, each under every seed.
pub(super) fn grid(
    args: &EmulateArgs,
    emulator: &Emulator,
    spec: &KernelSpec,
    arch: Arch,
) -> anyhow::Result<Verdict> {
    let headers = args.headers()?;
    let unit = progress::spinner("compiling the kernel", || emulator.unit(spec, arch, &headers))?;
    let cases = fa_lab::grid::of_spec("emulated", &spec.to_string(), spec, Extent::Quick);
    let seeds = if args.seeds.is_empty() { &SEEDS[..] } else { &args.seeds };
    let mut steps = Steps::new(cases.len());
    let mut runs = Vec::new();
    for case in &cases {
        steps.begin(case.problem_name());
        let trial = Trial::of_case(case).ok_or_else(|| {
            InputError::Usage(format!("{} lies as no case of a configuration does", case.name()))
        })?;
        for &seed in seeds {
            let options = Options { sms: args.sms_for(spec), step_limit: args.steps, ..Options::seed(seed) };
            let proof = trial.run(&unit, &options)?;
            runs.push((case.name(), summary(&unit, &case.problem, args.sms_for(spec), seed, proof)));
        }
        steps.advance();
    }
    drop(steps);
    let passed = runs.iter().all(|(_, run)| run.passed);
    if args.json {
        let report: Vec<_> = runs.iter().map(|(case, run)| CaseRun { case, run }).collect();
        output::print_json(&report)?;
    } else {
        let mut out = format!("kernel   {spec} on {arch}\n");
        for (case, run) in &runs {
            out += &format!(
                "{case}, seed {}: {}\n",
                run.seed,
                if run.passed { "nothing found" } else { "FOUND" }
            );
            for fault in &run.faults {
                out += &format!("  {}\n", fault.replace('\n', "\n  "));
            }
        }
        output::print(&out)?;
    }
    Ok(if passed { Verdict::Good } else { Verdict::Bad })
}

#[derive(Debug, Serialize)]
struct CaseRun<'a> {
    case: &'a str,
    #[serde(flatten)]
    run: &'a Run,
}
