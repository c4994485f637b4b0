//! First choices over the shapes that people run and no record has: no cliffs, no absurd tiles.

use fa_core::{Arch, Dtype, Family, KernelSpec, Lengths, Mask, Pass, Problem};
use fa_planner::plan::{Plan, PlanOptions, best, plan};

/// What a shape of length `n` is.
#[derive(Clone, Copy, Debug)]
enum Shape {
    /// Queries and keys.
    Square,
    /// One query on `n` keys.
    Decode,
    /// At most 512 queries on `n` keys.
    Chunk,
}

impl Shape {
    fn lengths(self, batch: usize, n: usize) -> Lengths {
        match self {
            Shape::Square => Lengths::uniform(batch, n, n),
            Shape::Decode => Lengths::uniform(batch, 1, n),
            Shape::Chunk => Lengths::uniform(batch, n.min(512), n),
        }
    }
}

const KINDS: [(Shape, Pass); 4] = [
    (Shape::Square, Pass::Forward),
    (Shape::Decode, Pass::Forward),
    (Shape::Chunk, Pass::Forward),
    (Shape::Square, Pass::BACKWARD),
];

/// Each a little longer than the one before, or twice as long, from one token to 128k.
const LENGTHS: [usize; 24] = [
    1, 2, 17, 63, 64, 65, 128, 129, 255, 256, 257, 511, 512, 513, 1000, 1025, 2048, 2049, 4097, 8192, 16_383,
    32_769, 65_536, 131_072,
];

/// Each combination of head dims, heads, batch and mask that `keep` takes, by number.
fn problems(keep: impl Fn(usize) -> bool) -> Vec<Problem> {
    let mut all = Vec::new();
    for head_dims in [(32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)] {
        for heads_kv in [32, 8, 1] {
            for batch in [1, 7, 64, 512] {
                for mask in [Mask::FULL, Mask::CAUSAL, Mask::causal_window(512)] {
                    for dtype in [Dtype::Bf16, Dtype::F16] {
                        let square = Problem::square(batch, 1, 32, head_dims.0, mask, dtype);
                        all.push(square.with_heads_kv(heads_kv).with_head_dim_v(head_dims.1));
                    }
                }
            }
        }
    }
    all.into_iter().enumerate().filter(|(number, _)| keep(*number)).map(|(_, problem)| problem).collect()
}

fn first(problem: &Problem, arch: Arch, pass: Pass) -> Plan {
    let options = PlanOptions::default().with_pass(pass);
    best(problem, arch, &options).unwrap_or_else(|error| panic!("{arch} {pass:?} {problem:?}: {error}"))
}

#[test]
fn the_best_is_the_first_of_all() {
    for (number, arch) in [Arch::Sm80, Arch::Sm89, Arch::Sm90].into_iter().enumerate() {
        for problem in problems(|at| at % 61 == 9 * number) {
            for (shape, pass) in KINDS {
                for n in [1, 65, 257, 1000, 8192] {
                    let lengths = shape.lengths(problem.lengths.sequences(), n);
                    let packed = Lengths::packed(3, 3 * n, 3 * n, n + n / 2, n + n / 2);
                    for lengths in if n == 257 { vec![lengths, packed] } else { vec![lengths] } {
                        let problem = problem.with_lengths(lengths);
                        for family in [Family::Sm80, Family::native(arch)] {
                            let options = PlanOptions::default().with_pass(pass).with_family(Some(family));
                            let all = plan(&problem, arch, &options).expect("plans");
                            assert_eq!(best(&problem, arch, &options).as_ref(), Ok(&all[0]), "{problem:?}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn longer_problems_take_no_less_and_tiles_suit_the_rows() {
    for (number, arch) in [Arch::Sm80, Arch::Sm86, Arch::Sm89, Arch::Sm90].into_iter().enumerate() {
        // A thirty-first of the problems, others on each architecture.
        for problem in problems(|at| at % 31 == 7 * number) {
            for (shape, pass) in KINDS {
                let mut before: Option<(usize, Plan)> = None;
                for n in LENGTHS {
                    let batch = problem.lengths.sequences();
                    let problem = problem.with_lengths(shape.lengths(batch, n));
                    let plan = first(&problem, arch, pass);
                    let name = format!("{arch} {pass:?} {shape:?} {problem:?}: {}", plan.spec);
                    let seconds = plan.cost.seconds;
                    assert!(seconds.is_finite() && seconds > 0.0, "{name}: {seconds}");
                    if pass == Pass::Forward {
                        let group = if plan.spec.traits().packs_gqa { problem.group_size() } else { 1 };
                        let rows = (problem.lengths.max_q() * group).next_multiple_of(64);
                        assert!(plan.spec.tile().0 as usize <= rows.max(64), "{name}");
                    }
                    if let Some((shorter, was)) = &before {
                        // A length that does not fill its last tile of keys tests a mask there, and one that
                        // lets heads be packed saves steps: up to a quarter.
                        let growth = seconds / was.cost.seconds;
                        assert!(growth > 0.75, "{name} at {growth:.2} of {} for {shorter}", was.spec);
                        // One more row than a tile holds is a second tile; then no tile has all keys, so that
                        // dQ is summed in f32.
                        let is_whole = |spec: &KernelSpec| spec.backward().is_some_and(|own| own.whole_keys);
                        let most = if is_whole(&was.spec) && !is_whole(&plan.spec) { 3.0 } else { 2.2 };
                        assert!(
                            n > shorter + 2 || *shorter < 17 || growth < most,
                            "{name}: {growth:.2} times"
                        );
                    }
                    before = Some((n, plan));
                }
            }
        }
    }
}
