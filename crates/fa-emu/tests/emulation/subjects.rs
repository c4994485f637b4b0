//! The configurations of the mutation run are valid, clean, and run.

use std::path::Path;

use fa_emu::mutate::{Statement, statements};
use fa_emu::removals::survivors;
use fa_emu::subjects::subjects;
use fa_emu::sweep::Trials;
use fa_emu::{Options, source};
use fa_kernels::Headers;

use crate::emulator;

#[test]
#[ignore = "emulation"]
fn the_subjects_of_the_mutation_run_are_without_a_finding() {
    let emulator = emulator();
    let trials = Trials::default();
    for (name, subjects) in subjects() {
        for subject in subjects {
            let unit = emulator.unit(&subject.spec, subject.arch, &Headers::embedded()).unwrap();
            let proof =
                trials.get(&subject.case, &subject.spec).run(&unit, &Options::of(&subject.spec, 2)).unwrap();
            assert!(proof.passed(), "{name} {}:\n{}", subject.spec, proof.faults().join("\n"));
        }
    }
}

#[test]
fn removals_that_nothing_notices_are_of_present_statements_and_have_reasons() {
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results");
    let survivors = survivors(&results.join("emulation-survivors.ron")).unwrap();
    let mut all: Vec<Statement> = Vec::new();
    for (_, subjects) in subjects() {
        for subject in subjects {
            all.extend(statements(&source(&subject.spec, subject.arch, &Headers::embedded()).unwrap()));
        }
    }
    for own in &survivors {
        assert!(
            all.iter().any(|statement| own.is_of(statement)),
            "{}: no statement {} {}",
            own.file,
            own.text,
            own.occurrence
        );
        assert!(own.reason.len() > 20, "{}: {}", own.text, own.reason);
    }
}
