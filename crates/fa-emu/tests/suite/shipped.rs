//! Every shipped spec at awkward shapes under three seeds. Kernels that the committed record or an earlier run has proven, by the hash of
//! their code and of the machine, are not run again.

use std::path::Path;

use fa_emu::record::{Candidate, Record, prove};
use fa_emu::sweep::distinct;

use crate::emulator;

/// Kernels that were proven when they were committed: `fa emulate --shipped` writes it.
const COMMITTED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/results/emulated.ron");

#[test]
fn every_shipped_kernel_is_right_and_without_a_finding() {
    let Some(emulator) = emulator("every_shipped_kernel_is_right_and_without_a_finding") else { return };
    let only = std::env::var("FA_EMU_ONLY").unwrap_or_default();
    let mut candidates = Vec::new();
    for file in fa_kernels::specs::shipped().expect("they are valid") {
        let spec = file.shipped.spec;
        for arch in distinct(&spec, &file.shipped.archs) {
            candidates.push(Candidate { name: file.path.to_owned(), spec: spec.clone(), arch });
        }
    }
    assert!(candidates.len() > 60, "{}", candidates.len());
    candidates.retain(|candidate| candidate.name.contains(&only));
    let stamps = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated.ron");
    let records = [Record::read(Path::new(COMMITTED)), Record::read(&stamps)];
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
    Record::read(&stamps).write(&stamps, &proven).unwrap();
    let faults: Vec<String> = attempts
        .iter()
        .flat_map(|attempt| attempt.faults.iter().map(|fault| (&attempt.candidate, fault)))
        .map(|(candidate, fault)| format!("{} on {}: {fault}", candidate.name, candidate.arch))
        .collect();
    assert!(faults.is_empty(), "{}", faults.join("\n\n"));
}
