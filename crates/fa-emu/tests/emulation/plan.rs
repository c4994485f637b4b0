//! The plan of more sequences than its threads take at a time, and of more than it keeps: all rounds of its
//! lists, of tiles with and without divided keys, and of a backward, by one CTA and by a cluster; and the
//! order of its lists.

use fa_core::{Arch, KernelSpec, Mask, Problem, Reads};
use fa_emu::{Batch, Emulator, Lie, Options, Placement, Trial, Unit, source};
use fa_kernels::Headers;

use crate::emulator;
use crate::faults::{inject, spec};

#[test]
#[ignore = "emulation"]
fn more_sequences_than_threads_of_the_plan_are_listed() {
    let emulator = emulator();
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
        ("sm90_bwd", false, 0),
        ("sm90_fwd", false, 1),
        ("sm90_fwd", true, 1),
    ];
    for (kernel, split, number) in kinds {
        let batch = &batches[number];
        let mut spec = spec(kernel, &[]);
        spec.split = split;
        let (unit, problem, trial) = trial_of(emulator, &mut spec, batch);
        for seed in 0..3 {
            let proof = trial.run(&unit, &Options::of(&spec, seed)).unwrap();
            assert!(proof.passed(), "{spec} seed {seed}:\n{}", proof.faults().join("\n"));
            let tiles = |length: usize| length.div_ceil(128);
            let tiles_of = |sequence: i32| {
                let (queries, keys) = batch.sequences[sequence as usize];
                (tiles(queries), tiles(keys))
            };
            let all: usize = batch.sequences.iter().map(|own| tiles(own.0)).sum();
            let plan = &proof.outcome.plan;
            if kernel == "sm90_fwd" {
                let items = list(plan, ITEMS, 0);
                // Those whose keys are divided come once for each part.
                let mut once = items.clone();
                once.sort_unstable();
                once.dedup();
                assert_eq!(once.len(), all, "{spec}");
                // The longest first: of whole sequences by the keys that the last query sees.
                let lengths = items.iter().map(|item| tiles_of(item.0).1);
                assert!(split || lengths.is_sorted_by(|a, b| a >= b), "{spec}: {items:?}");
            }
            if kernel == "sm90_bwd" {
                let of = |side: fn((usize, usize)) -> usize| {
                    let of_one = move |i: i32| (0..side(tiles_of(i)) as i32).map(move |block| (i, block));
                    (0..batch.sequences.len() as i32).flat_map(of_one).collect::<Vec<_>>()
                };
                assert_eq!(list(plan, M_TILES, 0), of(|own| own.0), "{spec}: in order");
                let mut n_tiles = list(plan, N_TILES, problem.lengths.most_tiles_q(128));
                n_tiles.sort_unstable();
                assert_eq!(n_tiles, of(|own| own.1), "{spec}");
            }
        }
    }
}

/// A plan by a cluster whose CTAs exchange counts, or end, too early: what is found.
#[test]
#[ignore = "emulation"]
fn a_cluster_that_waits_too_little_is_found() {
    let emulator = emulator();
    let mut sequences = vec![(0, 0); 1100];
    sequences[1099] = (2, 40);
    let batch = Batch { sequences, q: Lie::Packed, k: Lie::Packed, slack: 3 };
    let mut spec = spec("sm90_fwd", &[]);
    let (_, _, trial) = trial_of(emulator, &mut spec, &batch);
    let faults = [
        ("cluster_exchange();", "cluster_leave();", "data race"),
        ("cluster_exchange();", ";", "data race"),
        ("if (is_shared()) cluster_leave();", ";", "which has ended"),
    ];
    for (old, new, found) in faults {
        let mut source = source(&spec, Arch::Sm90, &Headers::embedded()).unwrap();
        inject(&mut source, ["attn/plan_cta.cuh", "", old, new]).unwrap();
        let unit = emulator.unit_of(&spec, Arch::Sm90, &source).unwrap();
        let finds = |seed| {
            let faults = trial.run(&unit, &Options::of(&spec, seed)).unwrap().faults();
            faults.iter().any(|fault| fault.contains(found))
        };
        assert!((0..40).any(finds), "{old} -> {new}: {found} is not found");
    }
}

/// The unit of the kernel's form that reads lengths on the device, and causal attention of a batch by it.
fn trial_of(emulator: &Emulator, spec: &mut KernelSpec, batch: &Batch) -> (Unit, Problem, Trial) {
    spec.reads = Reads { varied: true, paged: false };
    let unit = emulator.unit(spec, Arch::Sm90, &Headers::embedded()).unwrap();
    let one = Problem::square(1, 1, 1, 64, Mask::CAUSAL, spec.types.q);
    let problem = one.with_lengths(batch.lengths());
    let trial = Trial::with(&problem, spec.kernel.pass(), Placement::PACKED, &batch.extras(&problem));
    (unit, problem, trial)
}

/// Where a plan's header counts its lists (`PlanCount`).
const ITEMS: usize = 0;
const M_TILES: usize = 2;
const N_TILES: usize = 3;
const SLOTS: usize = 4;

/// The sequence and the block of each entry of a plan's list, which begins after `before` others.
fn list(plan: &[i32], count: usize, before: usize) -> Vec<(i32, i32)> {
    let entry = |i: usize| (plan[16 + 4 * i], plan[16 + 4 * i + 1]);
    (before..before + plan[count] as usize).map(entry).collect()
}

/// Up to 32 sequences of one tile each are listed by one warp, up to 256 by several (`attn/plan_few.cuh`).
#[test]
#[ignore = "emulation"]
fn few_sequences_of_one_tile_are_listed() {
    let emulator = emulator();
    let of_any: fn(usize) -> usize = |i| [300, 2000, 0, 128, 129, 700][i % 6];
    let of_one: fn(usize) -> usize = |i| [2000, 1950, 1999][i % 3];
    let listed = [(false, 32), (true, 32), (true, 33), (true, 90), (true, 5), (true, 3), (true, 1)];
    let of_any = listed.map(|(split, number)| (split, number, of_any));
    for (split, number, keys_of) in of_any.into_iter().chain([(true, 38, of_one)]) {
        // The third, and with 33 and more one, has no query; the rest 1 to 3.
        let queries = |i: usize| if i == 2 || i == 32 { 0 } else { 1 + i % 3 };
        let sequences: Vec<_> = (0..number).map(|i| (queries(i), keys_of(i))).collect();
        let batch = Batch { sequences, q: Lie::Packed, k: Lie::Packed, slack: 3 };
        let mut spec = spec("sm90_fwd", &[]);
        spec.split = split;
        let (unit, _, trial) = trial_of(emulator, &mut spec, &batch);
        let proof = trial.run(&unit, &Options { sms: 16, ..Options::of(&spec, 1) }).unwrap();
        assert!(proof.passed(), "{spec}, {number}:\n{}", proof.faults().join("\n"));
        let plan = &proof.outcome.plan;
        let steps = |sequence: i32| keys_of(sequence as usize).div_ceil(128) as i32;
        // Sequence, parts, and the part's length of each entry.
        let entry = |i: usize| {
            let (sequence, part, slot) = (plan[16 + 4 * i], plan[18 + 4 * i], plan[19 + 4 * i]);
            let parts = part >> 16;
            (sequence, parts, part & 0xffff, slot, (steps(sequence) + parts - 1) / parts)
        };
        let items: Vec<_> = (0..plan[ITEMS] as usize).map(entry).collect();
        assert!(items.is_sorted_by(|a, b| a.4 >= b.4), "the longest first: {items:?}");
        let mut parts: Vec<_> = items.iter().map(|item| (item.0, item.2)).collect();
        parts.sort_unstable();
        let of = |sequence: i32| items.iter().find(|item| item.0 == sequence).map_or(0, |item| item.1);
        let expected: Vec<_> =
            (0..number as i32).flat_map(|i| (0..of(i)).map(move |part| (i, part))).collect();
        assert_eq!(parts, expected, "each part once");
        let with_queries = (0..number).filter(|&i| queries(i) > 0);
        assert!(with_queries.clone().all(|i| of(i as i32) >= 1), "{items:?}");
        assert_eq!(items.iter().filter(|item| item.2 == 0).count(), with_queries.count());
        // Every divided part has a slot of its own, all of a tile in a row.
        let mut slots: Vec<_> = items.iter().filter(|item| item.1 > 1).map(|item| item.3).collect();
        slots.sort_unstable();
        assert_eq!(slots, (0..slots.len() as i32).collect::<Vec<_>>());
        assert_eq!(plan[SLOTS], slots.len() as i32);
        assert_eq!(split, plan[SLOTS] > 0, "{number} sequences on 16 SMs");
    }
}

#[test]
#[ignore = "emulation"]
fn tiles_of_a_packed_backward_are_listed_by_sequence() {
    let emulator = emulator();
    let lengths = [700, 130, 300, 300, 300];
    let sequences = lengths.map(|length| (length, length)).to_vec();
    let batch = Batch { sequences, q: Lie::Packed, k: Lie::Packed, slack: 3 };
    for deterministic in [false, true] {
        let mut spec = spec("sm90_bwd", &[("deterministic", if deterministic { "true" } else { "false" })]);
        let (unit, problem, trial) = trial_of(emulator, &mut spec, &batch);
        let proof = trial.run(&unit, &Options { sms: 4, resident: 4, ..Options::of(&spec, 1) }).unwrap();
        assert!(proof.passed(), "{spec}:\n{}", proof.faults().join("\n"));
        let n_tiles = list(&proof.outcome.plan, N_TILES, problem.lengths.most_tiles_q(128));
        let blocks: Vec<i32> = n_tiles.iter().map(|tile| tile.1).collect();
        if deterministic {
            assert_eq!(blocks, [5, 4, 3, 2, 1, 0, 2, 1, 0, 2, 1, 0, 2, 1, 0, 1, 0]);
        } else {
            assert_eq!(blocks, [0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1]);
        }
    }
}
