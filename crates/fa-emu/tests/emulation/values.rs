//! Values of the kernels by the oracle's rule, under an eager, a lazy and a random schedule.

use fa_core::Problem;
use fa_emu::{Options, Placement, Trial};
use fa_kernels::Headers;

use crate::emulator;

/// Every shipped spec of a name part on one problem.
fn check(part: &str) {
    let emulator = emulator();
    let headers = Headers::embedded();
    let mut tried = 0;
    for file in fa_kernels::specs::shipped().expect("they are valid") {
        if file.path != part {
            continue;
        }
        let spec = &file.shipped.spec;
        let arch = file.shipped.archs[0];
        let unit = emulator.unit(spec, arch, &headers).unwrap_or_else(|error| panic!("{error}"));
        let problem =
            Problem { heads_kv: 2, ..Problem::square(1, 300, 4, 64, fa_core::Mask::CAUSAL, spec.types.qkv) };
        let pass = spec.kernel.pass();
        let trial = Trial::new(&problem, pass, Placement::PACKED);
        for seed in 0..3 {
            let started = std::time::Instant::now();
            let proof = trial.run(&unit, &Options::seed(seed)).unwrap();
            let faults = proof.faults();
            assert!(faults.is_empty(), "{} seed {seed}:\n{}", file.path, faults.join("\n"));
            eprintln!("{} seed {seed}: {:?} {:?}", file.path, started.elapsed(), proof.outcome.counters());
        }
        tried += 1;
    }
    assert_eq!(tried, 1, "{part}");
}

#[test]
#[ignore = "emulation"]
fn sm80_forward() {
    check("sm80/hd64-causal-bf16.ron");
}

#[test]
#[ignore = "emulation"]
fn sm90_forward() {
    check("sm90/hd64-causal-bf16.ron");
}

#[test]
#[ignore = "emulation"]
fn sm80_backward() {
    check("sm80/hd64-causal-bf16-bwd.ron");
}

#[test]
#[ignore = "emulation"]
fn sm90_backward() {
    check("sm90/hd64-causal-bf16-bwd.ron");
}
