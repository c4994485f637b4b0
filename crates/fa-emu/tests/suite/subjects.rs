//! The configurations of the mutation run are valid, clean, and run.

use fa_emu::Options;
use fa_emu::subjects::subjects;
use fa_emu::sweep::Trials;
use fa_kernels::Headers;

use crate::emulator;

#[test]
fn the_subjects_of_the_mutation_run_are_without_a_finding() {
    let Some(emulator) = emulator("the_subjects_of_the_mutation_run_are_without_a_finding") else { return };
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
