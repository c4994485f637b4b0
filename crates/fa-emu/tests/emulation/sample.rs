//! A few of the planner's configurations that no spec ships with, at awkward shapes under three seeds.

use fa_emu::prove::prove;
use fa_emu::sample::sample;

use crate::emulator;

#[test]
#[ignore = "emulation"]
fn a_sample_of_the_planners_configurations_is_right_and_without_a_finding() {
    let workers = std::thread::available_parallelism().map_or(1, |count| count.get());
    let mut faults = Vec::new();
    let mut report = |attempt: &fa_emu::prove::Attempt| {
        let of = &attempt.candidate;
        faults.extend(attempt.faults.iter().map(|fault| format!("{} on {}: {fault}", of.name, of.arch)));
    };
    prove(emulator(), sample("the tests", 3), workers, None, &mut report)
        .unwrap_or_else(|error| panic!("{error}"));
    assert!(faults.is_empty(), "{}", faults.join("\n\n"));
}
