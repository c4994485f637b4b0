//! The plan of more sequences than its threads take at a time, and of more than it keeps: all rounds of its
//! lists, of tiles with and without divided keys, and of a backward.

use fa_core::{Arch, Mask, Problem, Reads};
use fa_emu::{Batch, Lie, Options, Placement, Trial};
use fa_kernels::Headers;

use crate::faults::spec;
use crate::known::unless_known;

#[test]
fn more_sequences_than_threads_of_the_plan_are_listed() {
    let Some(emulator) = unless_known("more_sequences_than_threads_of_the_plan_are_listed") else { return };
    // Nearly all are empty: they cost the plan a turn and the kernel nothing.
    let few = [(0, (70, 70)), (3, (1, 300)), (1023, (5, 5)), (1024, (150, 90)), (1099, (2, 40))];
    // A tile each, of which the plan keeps the first 9,216.
    let many =
        [(0, (7, 70)), (5000, (1, 300)), (9215, (5, 5)), (9216, (50, 290)), (9217, (1, 1)), (9299, (2, 40))];
    let batch_of = |count, some: &[(usize, (usize, usize))]| {
        let mut sequences = vec![(0, 0); count];
        some.iter().for_each(|&(at, sequence)| sequences[at] = sequence);
        Batch { sequences, q: Lie::Packed, k: Lie::Packed, slack: 3 }
    };
    let batches = [batch_of(1100, &few), batch_of(9300, &many)];
    let kinds = [
        ("sm90_fwd", false, 0),
        ("sm90_fwd", true, 0),
        ("sm80_bwd", false, 0),
        ("sm90_fwd", false, 1),
        ("sm90_fwd", true, 1),
    ];
    for (kernel, split, number) in kinds {
        let batch = &batches[number];
        let mut spec = spec(kernel, &[]);
        spec.reads = Reads { varied: true, paged: false };
        spec.split = split;
        let unit = emulator.unit(&spec, Arch::Sm90, &Headers::embedded()).unwrap();
        let problem = Problem {
            lengths: batch.lengths(),
            ..Problem::square(1, 1, 1, 64, Mask::CAUSAL, spec.types.qkv)
        };
        let extras = batch.extras(&problem);
        let trial = Trial::with(&problem, spec.kernel.pass(), Placement::PACKED, &extras);
        for seed in 0..3 {
            let proof = trial.run(&unit, &Options::of(&spec, seed)).unwrap();
            assert!(proof.passed(), "{spec} seed {seed}:\n{}", proof.faults().join("\n"));
        }
    }
}
