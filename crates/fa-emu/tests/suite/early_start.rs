//! Launches that start before the one before them has ended: every entry among them waits for it before it
//! touches what that one may write, and an entry that does not wait is found.

use fa_core::{Arch, Dtype, KernelSpec, Lengths, Mask, Problem};
use fa_emu::{Options, Placement, Trial, source};
use fa_kernels::Headers;

use crate::faults::spec;
use crate::known::unless_known;

const WAIT: &str = "    wait_for_prior_grid();\n";

/// The findings of `spec` without its `nth` wait; `None` where it has fewer.
fn without_wait(spec: &KernelSpec, nth: usize, test: &str) -> Option<String> {
    let emulator = crate::emulator(test)?;
    let mut source = source(spec, Arch::Sm90, &Headers::embedded()).unwrap();
    let (at, _) = source.unit.match_indices(WAIT).nth(nth)?;
    source.unit.replace_range(at..at + WAIT.len(), "");
    let unit = emulator.unit_of(spec, Arch::Sm90, &source).unwrap();
    let (heads_q, lengths) = match spec.split {
        true => (1, Lengths::uniform(1, 16, 1200)),
        false => (4, Lengths::uniform(1, 150, 150)),
    };
    let problem = Problem { heads_q, lengths, ..Problem::square(1, 1, 1, 64, Mask::CAUSAL, Dtype::Bf16) };
    let trial = Trial::new(&problem, spec.kernel.pass(), Placement::PACKED);
    let proof = trial.run(&unit, &Options { sms: 64, ..Options::seed(1) }).unwrap();
    Some(proof.faults().join("\n"))
}

#[test]
fn an_entry_that_does_not_wait_for_the_grid_before_is_found() {
    let test = "an_entry_that_does_not_wait_for_the_grid_before_is_found";
    let Some(_running) = unless_known(test) else { return };
    let split = KernelSpec { split: true, ..spec("sm90_fwd", &[]) };
    // A backward's main kernel, its two postprocess kernels (the second where heads are split); the combine
    // kernel.
    for (spec, waits) in [(spec("sm90_bwd", &[]), 3), (spec("sm80_bwd", &[]), 3), (split, 1)] {
        let unit = source(&spec, Arch::Sm90, &Headers::embedded()).unwrap().unit;
        assert_eq!(unit.matches(WAIT).count(), waits, "{spec}");
        for nth in 0..waits {
            let Some(found) = without_wait(&spec, nth, test) else { return };
            assert!(found.contains("before the prior grid's end"), "{spec}, wait {nth}: {found:?}");
        }
    }
}
