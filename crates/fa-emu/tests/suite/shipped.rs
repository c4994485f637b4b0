//! Every shipped spec at awkward shapes under three seeds. Kernels that the committed record or an earlier
//! run has proven, by the hash of their code and of the machine, are not run again.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use fa_emu::Emulator;
use fa_emu::record::{Candidate, Record, prove};
use fa_emu::sample::sample;
use fa_emu::shipped::shipped;
use fa_lab::record::today;

use crate::emulator;
use crate::known::ONLY;

/// Kernels that were proven when they were committed: `fa emulate --shipped` writes it.
const COMMITTED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/results/emulated.ron");

#[test]
fn every_shipped_kernel_is_right_and_without_a_finding() {
    let Some(emulator) = emulator("every_shipped_kernel_is_right_and_without_a_finding") else { return };
    let candidates = shipped().expect("they are valid");
    assert!(candidates.len() > 60, "{}", candidates.len());
    check(emulator, candidates);
}

/// A few of the planner's other configurations, others each day.
#[test]
fn a_sample_of_the_planners_configurations_is_right_and_without_a_finding() {
    let test = "a_sample_of_the_planners_configurations_is_right_and_without_a_finding";
    let Some(emulator) = emulator(test) else { return };
    let day = std::env::var("FA_EMU_DAY").unwrap_or_else(|_| today());
    eprintln!("the sample of {day}: FA_EMU_DAY={day} draws it again");
    check(emulator, sample(&day, 3));
}

/// Runs the candidates that no record knows; panics with all that is found.
fn check(emulator: &Emulator, mut candidates: Vec<Candidate>) {
    let only = std::env::var(ONLY).unwrap_or_default();
    candidates.retain(|candidate| candidate.name.contains(&only));
    let stamps = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated.ron");
    let records = [Record::read(Path::new(COMMITTED)).unwrap(), Record::read(&stamps).unwrap_or_default()];
    let workers = std::thread::available_parallelism().map_or(1, |count| count.get());
    let attempts = prove(emulator, candidates, &records, workers, &|attempt| {
        if !attempt.known {
            let (compiled, ran) = attempt.took;
            let candidate = &attempt.candidate;
            eprintln!("{} {}: compiled in {compiled:.1?}, ran {ran:.1?}", candidate.name, candidate.arch);
        }
    });
    let attempts = attempts.unwrap_or_else(|error| panic!("{error}"));
    let proven: Vec<_> = attempts.iter().filter_map(|attempt| attempt.proven.clone()).collect();
    static STAMPS: Mutex<()> = Mutex::new(());
    let _one_writer = STAMPS.lock().unwrap_or_else(PoisonError::into_inner);
    Record::read(&stamps).unwrap_or_default().write(&stamps, &proven).unwrap();
    let faults: Vec<String> = attempts
        .iter()
        .flat_map(|attempt| attempt.faults.iter().map(|fault| (&attempt.candidate, fault)))
        .map(|(candidate, fault)| format!("{} on {}: {fault}", candidate.name, candidate.arch))
        .collect();
    assert!(faults.is_empty(), "{}", faults.join("\n\n"));
}
