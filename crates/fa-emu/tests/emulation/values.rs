//! Values of the kernels by the oracle's rule, under an eager, a lazy and a random schedule.

use fa_core::{Dtype, Lengths, Mask, Problem};
use fa_cpu::OwnedExtras;
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
        let problem = Problem::square(1, 300, 4, 64, fa_core::Mask::CAUSAL, spec.types.q).with_heads_kv(2);
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

/// Every score of a row is -2^126, whose exponent of 2 is -1.2e38: O is the mean of the values that it sees.
/// One kernel of each family, in bf16.
#[test]
#[ignore = "emulation"]
fn scores_near_the_lowest_of_f32() {
    let emulator = emulator();
    let headers = Headers::embedded();
    let specs = fa_kernels::specs::shipped().expect("they are valid");
    let mut tried = 0;
    for file in specs {
        let spec = &file.shipped.spec;
        let is_wanted = [
            "sm80/hd64-causal-bf16.ron",
            "sm80/hd64-full-bf16.ron",
            "sm90/hd64-causal-bf16.ron",
            "sm90/hd64-full-bf16.ron",
            "sm100/hd64-causal-bf16.ron",
            "sm100/hd64-full-bf16.ron",
        ]
        .contains(&file.path);
        if !is_wanted {
            continue;
        }
        let unit = emulator.unit(spec, file.shipped.archs[0], &headers).unwrap_or_else(|e| panic!("{e}"));
        let mask = if spec.mask == fa_core::MaskKind::Causal { Mask::CAUSAL } else { Mask::FULL };
        let square = Problem::square(1, 1, 2, 64, mask, Dtype::Bf16);
        let lengths = Lengths::uniform(1, 150, 230);
        let problem = square.with_lengths(lengths).with_heads_kv(1).with_softmax_scale(Some(1.0));
        let of = |value: f32, heads: usize, rows: usize| {
            vec![half::bf16::from_f32(value).to_bits(); rows * heads * 64]
        };
        let side = 60f32.exp2();
        let v: Vec<u16> =
            (0..230 * 64).map(|at| half::bf16::from_f32((at / 64 % 7) as f32 + 1.0).to_bits()).collect();
        let values = [of(side, 2, 150), of(-side, 1, 230), v, of(1.0, 2, 150)];
        let pass = spec.kernel.pass();
        let trial = Trial::of_values(&problem, pass, Placement::PACKED, &OwnedExtras::NONE, &values);
        let proof = trial.run(&unit, &Options::seed(2)).unwrap();
        let faults = proof.faults();
        assert!(faults.is_empty(), "{}:\n{}", file.path, faults.join("\n"));
        tried += 1;
    }
    assert!(tried >= 4, "{tried} kernels");
}
