//! Backwards of sequences of different lengths: packed, padded in part, without queries, without keys, with
//! rows behind the last sequence that are NaN; deterministic and not, with heads in parts and without.

use fa_core::{Arch, Family, KernelSpec, Reads};
use fa_emu::sweep::{Case, Trials, cases};
use fa_emu::{Batch, Lie, Options};
use fa_kernels::Headers;
use fa_kernels::launch::Launches;
use fa_planner::divide;

use crate::emulator;
use crate::{BACKWARDS, backward};

fn spec(family: Family, mask: &str, deterministic: bool) -> KernelSpec {
    let kernel = backward(family, "LongestFirst", deterministic);
    let text = format!(
        "(dtype: bf16, head_dim: 64, head_dim_v: 64, mask: {mask}, softcap: false, varied: true, \
         kernel: {kernel})"
    );
    KernelSpec::from_ron(&text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// The batches of the sweep, with a shorter one for its longest, which shipped kernels are run on: still
/// longer than a tile of queries and two of keys and shorter, none on either side, one query, more keys than
/// queries.
fn batches(spec: &KernelSpec) -> Vec<Case> {
    let mut cases = cases(spec);
    let sequences = vec![(150, 150), (33, 33), (0, 0), (70, 70), (1, 150), (20, 0), (90, 290)];
    let batch = Batch { sequences, q: Lie::Packed, k: Lie::Packed, slack: 5 };
    cases[0].problem.lengths = batch.lengths();
    cases[0].extras = batch.extras(&cases[0].problem);
    // The LSE has a gradient.
    let rows = fa_cpu::check::lse_len(&cases[0].problem);
    cases[0].extras.dlse = Some((0..rows).map(|row| (row % 13) as f32 / 4.0 - 1.5).collect());
    // Single queries, of half as many heads.
    assert_eq!((cases[4].problem.lengths.q().max(), cases[4].problem.heads_q), (1, 8));
    cases[4].problem.heads_q = 4;
    cases
}

#[test]
#[ignore = "emulation"]
fn gradients_of_sequences_of_different_lengths_are_those_of_each() {
    let emulator = emulator();
    let trials = Trials::default();
    for family in BACKWARDS {
        for (mask, deterministic) in [("causal", true), ("full", false), ("window", true), ("causal", false)]
        {
            let spec = spec(family, mask, deterministic);
            assert_eq!(spec.reads, Reads { varied: true, paged: false });
            let unit = emulator.unit(&spec, Arch::Sm90, &Headers::embedded()).unwrap();
            let mut parts = 0;
            for (turn, case) in batches(&spec).into_iter().enumerate() {
                let trial = trials.get(&case, &spec);
                let mut bits = None;
                // Few SMs, and so many that the heads of a group are in parts: every schedule on the batch of
                // all kinds, the same bits in two of them on the others; else one after another.
                let schedules = [(0, 64), (1, 2), (2, 64)];
                for (number, (seed, sms)) in schedules.into_iter().enumerate() {
                    let is_one_of_two = deterministic && sms > 2;
                    if turn > 0 && !is_one_of_two && (deterministic || number != turn % 3) {
                        continue;
                    }
                    let plan = divide(&case.problem, &spec, Arch::Sm90, sms, None);
                    let launches = Launches::of(&plan, &case.problem, Arch::Sm90, sms).unwrap();
                    parts += usize::from(launches.workspace.dk_accum.is_some());
                    let options = Options { sms, resident: 3, ..Options::seed(seed) };
                    let proof = trial.run(&unit, &options).unwrap();
                    let problem = &case.problem;
                    assert!(proof.passed(), "{spec} {problem:?} seed {seed}:\n{}", proof.faults().join("\n"));
                    if deterministic && sms > 2 {
                        let first = bits.get_or_insert_with(|| proof.bits.clone());
                        assert_eq!(*first, proof.bits, "{spec} {problem:?} seed {seed}");
                    }
                }
            }
            assert!(parts > 0, "{spec}: no case has parts");
        }
    }
}

/// Wide rows, whose dQ is added from registers in slices, and tiles of 80 queries: shipped configurations.
#[test]
#[ignore = "emulation"]
fn packed_gradients_of_other_tiles_are_right() {
    let emulator = emulator();
    let trials = Trials::default();
    let files = ["sm90/hd256-causal-bf16-bwd.ron", "sm90/hd128-causal-bf16-bwd.ron"];
    for file in fa_kernels::specs::shipped().expect("they are valid") {
        if !files.contains(&file.path) {
            continue;
        }
        let reads = Reads { varied: true, paged: false };
        let spec = KernelSpec { reads, ..file.shipped.spec };
        let unit = emulator.unit(&spec, Arch::Sm90, &Headers::embedded()).unwrap();
        let all = cases(&spec);
        for case in [&all[0], &all[6]] {
            let proof = trials.get(case, &spec).run(&unit, &Options::seed(2)).unwrap();
            assert!(proof.passed(), "{spec} {:?}:\n{}", case.problem, proof.faults().join("\n"));
        }
    }
}
