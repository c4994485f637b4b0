//! A sample of the planner's configurations, proven at awkward shapes.

use fa_core::counted;
use fa_emu::Emulator;
use fa_emu::prove::{Attempt, prove};
use fa_emu::sample::sample;
use fa_lab::record::today;

use super::args::EmulateArgs;
use crate::term::failure::Verdict;
use crate::term::output;
use crate::term::progress::Steps;

/// Says what was found in each kernel, and how many there were.
pub(super) fn sampled(args: &EmulateArgs, emulator: &Emulator) -> anyhow::Result<Verdict> {
    let day = args.day.clone().unwrap_or_else(today);
    let candidates = sample(&day, args.sample.unwrap_or(1) as usize);
    let mut steps = Steps::new(candidates.len());
    let (mut out, mut all, mut faulty) = (String::new(), 0, 0);
    let mut report = |attempt: &Attempt| {
        let name = format!("{} on {}", attempt.candidate.name, attempt.candidate.arch);
        all += 1;
        if !attempt.faults.is_empty() {
            faulty += 1;
            out += &format!("{name}\n");
            attempt.faults.iter().for_each(|fault| out += &format!("  {}\n", fault.replace('\n', "\n  ")));
        }
        steps.begin(name);
        steps.advance();
    };
    prove(emulator, candidates, args.workers(), None, &mut report)?;
    drop(steps);
    let count = counted(all, "kernel");
    out += &format!("{count} of the sample of {day}: {} proven, {faulty} with findings\n", all - faulty);
    output::print(&out)?;
    Ok(if faulty == 0 { Verdict::Good } else { Verdict::Bad })
}
