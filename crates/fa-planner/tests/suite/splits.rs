//! The number of parts of a K/V head's query heads beside measured rates (`data/splits-h100.txt`).
//! `cargo test -p fa-planner splits -- --nocapture` prints the table.

use fa_core::{Arch, Dtype, Family, Mask, Pass, Problem};
use fa_planner::divide::head_splits;
use fa_planner::plan::{PlanOptions, plan};

/// A problem and its measured `(parts, TFLOP/s)`.
struct Measured {
    line: &'static str,
    problem: Problem,
    rates: Vec<(usize, f64)>,
}

fn measured() -> Vec<Measured> {
    let lines = include_str!("../data/splits-h100.txt").lines().filter(|line| !line.starts_with('#'));
    lines.map(parse).collect()
}

fn parse(line: &'static str) -> Measured {
    let words: Vec<&str> = line.split(' ').collect();
    let number = |at: usize| words[at].parse::<usize>().expect("head_dim batch seqlen heads_q heads_kv");
    let mask = match words[5] {
        "full" => Mask::FULL,
        "causal" => Mask::CAUSAL,
        window => Mask::causal_window(window.trim_start_matches("window").parse().expect("keys to the left")),
    };
    let square = Problem::square(number(1), number(2), number(3), number(0), mask, Dtype::Bf16);
    let rate = |word: &&str| {
        let (parts, rate) = word.split_once(':').expect("parts:rate");
        (parts.parse().expect("a count"), rate.parse().expect("a rate"))
    };
    let problem = square.with_heads_kv(number(4));
    Measured { line, problem, rates: words[6..].iter().map(rate).collect() }
}

fn chosen(problem: &Problem, pass: Pass) -> usize {
    chosen_of(problem, pass, None)
}

fn chosen_of(problem: &Problem, pass: Pass, family: Option<Family>) -> usize {
    let options = PlanOptions::default().with_pass(pass).with_family(family);
    let first = plan(problem, Arch::Sm90, &options).expect("plans").swap_remove(0);
    head_splits(problem, &first.spec, Arch::Sm90, Arch::Sm90.limits().sms)
}

#[test]
fn the_chosen_parts_are_near_the_best_measured() {
    let mut logs = 0.0;
    let all = measured();
    for Measured { line, problem, rates } in &all {
        let parts = chosen(problem, Pass::BACKWARD);
        let best = rates.iter().map(|&(_, rate)| rate).fold(0.0, f64::max);
        // A number that was not measured counts as the worse of its neighbours.
        let below = rates.iter().rev().find(|(measured, _)| *measured <= parts);
        let above = rates.iter().find(|(measured, _)| *measured >= parts);
        let rate = [below, above].into_iter().flatten().map(|&(_, rate)| rate).fold(f64::MAX, f64::min);
        println!("{line}: {parts} parts, {:.3} of the best", rate / best);
        assert!(rate / best > 0.9, "{line}: {parts} parts");
        logs += (rate / best).ln();
    }
    let mean = (logs / all.len() as f64).exp();
    assert!(mean > 0.97, "geometric mean {mean:.3}");
}

/// Batch, queries, and query and K/V heads.
type Grouped = (usize, usize, (usize, usize));

/// Problems of head dim 128 under a causal mask, dense and packed, and the numbers of parts within 2 % of the
/// best of those measured on an H100 (NB-136).
const WHOLE_GROUPS: [(Grouped, &[usize]); 9] = [
    ((24, 1024, (32, 8)), &[1]),
    ((8, 1024, (32, 8)), &[1]),
    ((4, 1536, (32, 8)), &[1, 2, 4]),
    ((64, 512, (32, 8)), &[1]),
    ((4, 2048, (32, 4)), &[8]),
    ((4, 4096, (28, 4)), &[7]),
    ((2, 4096, (64, 8)), &[8]),
    ((2, 8192, (32, 8)), &[4]),
    ((1, 16384, (64, 8)), &[8]),
];

#[test]
fn short_groups_are_whole_and_long_ones_in_parts() {
    use fa_core::{Lengths, Side};
    for ((batch, queries, (heads_q, heads_kv)), best) in WHOLE_GROUPS {
        let square = Problem::square(batch, queries, heads_q, 128, Mask::CAUSAL, Dtype::Bf16);
        let dense = square.with_heads_kv(heads_kv);
        let side = || Side::packed(batch * queries, queries);
        let packed = dense.with_lengths(Lengths::of(batch, side(), side()));
        for problem in [dense, packed] {
            let parts = chosen(&problem, Pass::BACKWARD);
            assert!(best.contains(&parts), "{problem:?}: {parts} parts");
        }
    }
    // With the last section of before, one part made it slower by a third.
    let between = Problem::square(4, 1536, 32, 128, Mask::CAUSAL, Dtype::Bf16).with_heads_kv(8);
    assert_ne!(chosen(&between, Pass::BACKWARD), 1);
}

/// Packed batches: sequences, mean and longest, query and K/V heads, head dim, mask, and the numbers of parts
/// within 2 % of the best of those measured on an H200 (NB-193).
type Packed = ((usize, usize, usize), (usize, usize), usize, Mask, &'static [usize]);
const PACKED: [Packed; 9] = [
    ((93, 408, 731), (16, 2), 64, Mask::CAUSAL, &[1]),
    ((86, 507, 756), (32, 4), 128, Mask::CAUSAL, &[1]),
    ((33, 494, 756), (64, 8), 128, Mask::CAUSAL, &[1]),
    ((102, 211, 318), (14, 2), 64, Mask::CAUSAL, &[1]),
    ((94, 134, 226), (16, 2), 128, Mask::causal_window(511), &[1]),
    ((65, 341, 1175), (14, 2), 96, Mask::causal_window(1023), &[1]),
    ((41, 817, 3235), (28, 4), 128, Mask::CAUSAL, &[2, 4]),
    ((58, 813, 3327), (16, 2), 128, Mask::CAUSAL, &[2, 4]),
    ((35, 801, 14232), (16, 2), 128, Mask::CAUSAL, &[4, 8]),
];

#[test]
fn packed_groups_are_whole_unless_sequences_are_long() {
    use fa_core::{Lengths, Side};
    for ((batch, mean, longest), (heads_q, heads_kv), head_dim, mask, best) in PACKED {
        let side = || Side::packed(batch * mean, longest);
        let problem = Problem::square(batch, longest, heads_q, head_dim, mask, Dtype::Bf16)
            .with_heads_kv(heads_kv)
            .with_lengths(Lengths::of(batch, side(), side()));
        let parts = chosen(&problem, Pass::BACKWARD);
        assert!(best.contains(&parts), "{problem:?}: {parts} parts");
    }
}

/// Of the masks of `bench/mods.py`, two parts are faster than one and four where long lists stay beside short
/// ones (NB-201); few heads are divided further.
#[test]
fn listed_tiles_have_two_parts_unless_they_leave_the_gpu_idle() {
    use fa_core::ScoreMod;
    use fa_core::program::Program;
    let masked = |text: &str, (heads_q, heads_kv), batch| {
        let program = Program::parse(text).unwrap().intern().unwrap();
        let problem = Problem::square(batch, 8192, heads_q, 128, Mask::FULL, Dtype::Bf16)
            .with_heads_kv(heads_kv)
            .with_score(ScoreMod::NONE.with_program(Some(program)));
        chosen(&problem, Pass::BACKWARD)
    };
    let prefix = "mask = k <= q or k < 1024;";
    for text in [prefix, "mask = k <= q and (q - k) % 4 == 0;"] {
        assert_eq!(masked(text, (32, 8), 2), 2, "{text}");
    }
    let documents = "array doc: i32[_]; mask = k <= q and doc[q] == doc[k];";
    assert_eq!(masked(documents, (32, 8), 2), 1);
    assert!(masked(prefix, (8, 1), 1) > 2);
}

#[test]
fn single_heads_have_one_part() {
    for Measured { problem, .. } in measured() {
        let own = problem.with_heads_kv(problem.heads_q);
        assert_eq!(chosen(&own, Pass::DETERMINISTIC_BACKWARD), 1);
        assert_eq!(chosen(&problem.with_heads_kv(problem.heads_q), Pass::BACKWARD), 1);
    }
}

#[test]
fn deterministic_parts_are_as_many_as_a_group_has_heads_at_most() {
    let mut several = 0;
    for Measured { line, problem, .. } in measured() {
        let parts = chosen(&problem, Pass::DETERMINISTIC_BACKWARD);
        assert!((1..=problem.group_size()).contains(&parts), "{line}: {parts}");
        several += usize::from(parts > 1);
    }
    // 64:8 causal at N 4096 with one part ran at 278 TFLOP/s, of 532 with four parts in any order.
    assert!(several > 5, "{several}");
}

#[test]
fn the_sm80_class_fills_the_gpu_and_keeps_one_part_where_it_is_full() {
    let problem =
        |heads_kv, mask| Problem::square(1, 4096, 64, 128, mask, Dtype::Bf16).with_heads_kv(heads_kv);
    let parts = |heads_kv, mask| chosen_of(&problem(heads_kv, mask), Pass::BACKWARD, Some(Family::Sm80));
    // 32 tiles of 128 keys a K/V head: 256 CTAs of equal length on 132 SMs lose less than accumulators cost.
    assert_eq!(parts(8, Mask::FULL), 1);
    for mask in [Mask::FULL, Mask::CAUSAL] {
        // Cut by five, 160 CTAs took two rounds on 132 SMs: 219 and 169 TFLOP/s beside FA2's 294 and 266.
        let ctas = 32 * parts(1, mask);
        let rounds = ctas as f64 / 132.0;
        assert!(rounds / rounds.ceil() > 0.95, "{mask}: {ctas} CTAs");
    }
}

#[test]
fn a_packed_sequence_is_divided_as_a_dense_one() {
    use fa_core::{KernelSpec, Lengths, Reads, Side};
    for (heads_q, heads_kv) in [(8, 1), (6, 1), (32, 8)] {
        for (q, k) in [(300, 777), (515, 515), (1, 900), (4096, 4096)] {
            for mask in [Mask::FULL, Mask::CAUSAL] {
                let square = Problem::square(1, q, heads_q, 64, mask, Dtype::Bf16);
                let dense = square.with_heads_kv(heads_kv).with_lengths(Lengths::uniform(1, q, k));
                let options = PlanOptions::default().with_pass(Pass::DETERMINISTIC_BACKWARD);
                let spec = plan(&dense, Arch::Sm90, &options).expect("plans").swap_remove(0).spec;
                let parts = head_splits(&dense, &spec, Arch::Sm90, 132);
                for loose in [0, 100] {
                    let side = |len| Side::packed(len, len + loose);
                    let packed = dense.with_lengths(Lengths::of(1, side(q), side(k)));
                    let spec = KernelSpec { reads: Reads::of(&packed), ..spec.clone() };
                    assert_eq!(head_splits(&packed, &spec, Arch::Sm90, 132), parts, "{packed:?}");
                }
            }
        }
    }
}
