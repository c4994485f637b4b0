//! The cases of the forward by the library's own choice of kernel, of lengths that the host knows.

use fa_core::{Dtype, Lengths, Mask, ScoreMod, Types};
use fa_cpu::grid::{BATCHES, HEAD_DIMS, HEADS, PADDED_HEAD_DIMS, SHAPES};

use super::case::{Action, Arrangement, BASE, Case, DTYPES, Extent, MASKS, Values, case};
use super::codes::codes;
use super::dropout::dropout;
use super::fp8::fp8;
use super::programs::programs;
use super::wide::wide_programs;

/// The cases of the library's own choice of kernel.
pub fn library(extent: Extent, repeat: usize) -> Vec<Case> {
    let full = extent == Extent::Full;
    let mut cases = shapes_and_dims(full);
    cases.extend(padded(full));
    cases.extend(heads());
    cases.extend(windows(full));
    cases.extend(scores());
    cases.extend(values());
    cases.extend(arrangements(full));
    cases.extend(empties());
    cases.extend(sizes(full));
    cases.extend(actions(repeat));
    cases.extend(programs(repeat));
    cases.extend(dropout(repeat));
    cases.extend(wide_programs(repeat));
    cases.extend(fp8(repeat));
    cases.extend(codes(extent, repeat));
    cases
}

/// Every shape with every mask; the other parameters cycle, so that all of them meet all kinds of shapes.
fn shapes_and_dims(full: bool) -> Vec<Case> {
    let mut cases = Vec::new();
    let mut turn = 0usize;
    for (index, (seqlen_q, seqlen_k)) in SHAPES.into_iter().enumerate() {
        // Quick takes two head dims for each shape, different ones for neighbouring shapes.
        let dims: Vec<(usize, usize)> =
            if full { HEAD_DIMS.into() } else { [0, 1].map(|i| HEAD_DIMS[(3 * index + 4 * i) % 8]).into() };
        for (head_dim, head_dim_v) in dims {
            for mask in MASKS {
                turn += 1;
                let (heads_q, heads_kv) = HEADS[turn / 2 % 5];
                let batch = if seqlen_q.max(seqlen_k) >= 1023 { 1 } else { BATCHES[turn / 3 % 3] };
                let problem = BASE
                    .with_lengths(Lengths::uniform(batch, seqlen_q, seqlen_k))
                    .with_heads(heads_q, heads_kv)
                    .with_head_dims(head_dim, head_dim_v)
                    .with_mask(mask)
                    .with_types(Types::same(DTYPES[turn / 5 % 2]));
                cases.push(case("shapes", problem));
            }
        }
    }
    cases
}

fn padded(full: bool) -> Vec<Case> {
    let mut cases = Vec::new();
    for (index, (head_dim, head_dim_v)) in PADDED_HEAD_DIMS.into_iter().enumerate() {
        for (turn, mask) in MASKS.into_iter().enumerate() {
            let lengths = [(113, 203), (256, 256), (300, 77)];
            let lengths = if full { &lengths[..] } else { &lengths[index % 2..=index % 2] };
            for &(seqlen_q, seqlen_k) in lengths {
                let dtype = DTYPES[(index + turn) % 2];
                let problem = BASE
                    .with_lengths(Lengths::uniform(BASE.lengths.sequences(), seqlen_q, seqlen_k))
                    .with_head_dims(head_dim, head_dim_v)
                    .with_mask(mask)
                    .with_types(Types::same(dtype));
                cases.push(case("padded", problem));
            }
        }
    }
    cases
}

fn heads() -> Vec<Case> {
    let mut cases = Vec::new();
    for (heads_q, heads_kv) in HEADS {
        for mask in MASKS {
            for (turn, (seqlen_q, seqlen_k)) in [(113, 203), (1, 300), (20, 500)].into_iter().enumerate() {
                let dtype = DTYPES[turn % 2];
                let problem = BASE
                    .with_heads(heads_q, heads_kv)
                    .with_lengths(Lengths::uniform(BASE.lengths.sequences(), seqlen_q, seqlen_k))
                    .with_mask(mask)
                    .with_types(Types::same(dtype));
                cases.push(case("heads", problem));
            }
        }
    }
    cases
}

fn windows(full: bool) -> Vec<Case> {
    let masks = [
        Mask::window(0, 0),
        Mask::window(64, 0),
        Mask::causal_window(33),
        Mask::window(70, 9),
        Mask::window(0, 100),
        Mask::band(Some(50), None),
        Mask::band(None, Some(40)),
        Mask::window(5000, 5000),
    ];
    let lengths = [(256, 256), (113, 203), (500, 128), (1, 400), (203, 1), (777, 1500)];
    let mut cases = Vec::new();
    for (index, mask) in masks.into_iter().enumerate() {
        for (turn, (seqlen_q, seqlen_k)) in lengths.into_iter().enumerate() {
            if !full && (index + turn) % 2 == 1 {
                continue;
            }
            let (head_dim, head_dim_v) =
                [(128, 128), (64, 64), (192, 128), (256, 256)][(index + turn) / 2 % 4];
            let problem = BASE
                .with_lengths(Lengths::uniform(BASE.lengths.sequences(), seqlen_q, seqlen_k))
                .with_mask(mask)
                .with_head_dims(head_dim, head_dim_v);
            cases.push(case("windows", problem));
        }
    }
    cases
}

/// Scores that are capped, flat, and large.
fn scores() -> Vec<Case> {
    let mut cases = Vec::new();
    for (turn, mask) in [Mask::CAUSAL, Mask::FULL, Mask::window(70, 9)].into_iter().enumerate() {
        let dtype = DTYPES[turn % 2];
        let problem = BASE
            .with_lengths(Lengths::uniform(BASE.lengths.sequences(), 200, 333))
            .with_mask(mask)
            .with_types(Types::same(dtype));
        for cap in [1.0, 5.0, 50.0] {
            cases.push(case("softcap", problem.with_score(ScoreMod::softcap(cap))));
        }
        for scale in [1e-6, 0.3, 1.0, 4.0] {
            cases.push(case("scale", problem.with_softmax_scale(Some(scale))));
        }
        let both = problem.with_softmax_scale(Some(1.0)).with_score(ScoreMod::softcap(3.0));
        cases.push(case("softcap", both.with_head_dims(64, 64)));
    }
    cases
}

fn values() -> Vec<Case> {
    let mut cases = Vec::new();
    let all = [Values::Rising, Values::Falling, Values::Spikes, Values::Equal, Values::Sharp];
    for (turn, values) in all.into_iter().enumerate() {
        for mask in MASKS {
            for (head_dim, head_dim_v) in [(64, 64), (128, 128), (256, 256)] {
                let dtype = DTYPES[turn % 2];
                let problem = BASE
                    .with_lengths(Lengths::uniform(BASE.lengths.sequences(), 700, 900))
                    .with_heads(2, 2)
                    .with_head_dims(head_dim, head_dim_v)
                    .with_mask(mask)
                    .with_types(Types::same(dtype));
                cases.push(Case { values, ..case("values", problem) });
            }
        }
    }
    // Scores near the lowest of f32. Their gradients are not defined: an LSE of that size has no fractions.
    for mask in [Mask::CAUSAL, Mask::FULL, Mask::window(70, 9)] {
        for head_dim in [64, 128, 256] {
            let problem = BASE
                .with_lengths(Lengths::uniform(1, 200, 333))
                .with_heads(4, 2)
                .with_head_dims(head_dim, head_dim)
                .with_mask(mask)
                .with_softmax_scale(Some(1.0));
            cases.push(Case { values: Values::Lowest, ..case("values", problem) });
        }
    }
    cases
}

fn arrangements(full: bool) -> Vec<Case> {
    let arrangements = [
        Arrangement::Bhsd,
        Arrangement::Gap(8),
        Arrangement::Gap(72),
        Arrangement::BhsdGap(8),
        Arrangement::SharedBatch,
        Arrangement::SharedHeads,
        Arrangement::SharedRows,
    ];
    let mut problems = vec![
        BASE.with_lengths(Lengths::uniform(BASE.lengths.sequences(), 113, 203)).with_heads(6, 3),
        BASE.with_head_dims(72, 40).with_mask(Mask::FULL).with_types(Types::same(Dtype::F16)),
    ];
    if full {
        problems.push(BASE.with_head_dims(256, 256).with_lengths(Lengths::uniform(
            BASE.lengths.sequences(),
            300,
            BASE.lengths.max_k(),
        )));
        problems.push(
            BASE.with_head_dim(192)
                .with_lengths(Lengths::uniform(BASE.lengths.sequences(), BASE.lengths.max_q(), 999))
                .with_mask(Mask::window(100, 3)),
        );
    }
    let mut cases = Vec::new();
    for problem in problems {
        cases.extend(arrangements.map(|arrangement| Case { arrangement, ..case("strides", problem) }));
    }
    cases
}

/// Lengths and counts of 0 and of 1.
fn empties() -> Vec<Case> {
    let mut cases = Vec::new();
    for mask in [Mask::CAUSAL, Mask::FULL, Mask::window(3, 3)] {
        let problem = BASE.with_mask(mask);
        cases.extend(
            [
                problem.with_lengths(Lengths::uniform(
                    problem.lengths.sequences(),
                    problem.lengths.max_q(),
                    0,
                )),
                problem.with_lengths(Lengths::uniform(
                    problem.lengths.sequences(),
                    0,
                    problem.lengths.max_k(),
                )),
                problem.with_lengths(Lengths::uniform(0, problem.lengths.max_q(), problem.lengths.max_k())),
                problem.with_lengths(Lengths::uniform(problem.lengths.sequences(), 0, 0)),
                problem.with_lengths(Lengths::uniform(1, 1, 1)).with_heads(1, 1),
                // Whole tiles of queries without a key.
                problem.with_lengths(Lengths::uniform(problem.lengths.sequences(), 1000, 5)),
                // Many more tiles than blocks, nearly all of them empty: a pipeline's phase must not flip in
                // them.
                problem.with_lengths(Lengths::uniform(9, 3000, 40)).with_heads(6, 3),
            ]
            .map(|problem| case("empty", problem)),
        );
    }
    cases
}

/// Counts and offsets beyond what 16 and 32 bits hold.
fn sizes(full: bool) -> Vec<Case> {
    let small = BASE.with_lengths(Lengths::uniform(8300, 17, 33)).with_heads(2, 2);
    let mut cases = vec![
        case("sizes", small.with_head_dims(64, 64)),
        case("sizes", BASE.with_lengths(Lengths::uniform(1, 65, 65)).with_heads(3000, 1000)),
        Case {
            arrangement: Arrangement::FarBatch,
            ..case(
                "sizes",
                BASE.with_lengths(Lengths::uniform(BASE.lengths.sequences(), 200, BASE.lengths.max_k())),
            )
        },
    ];
    if full {
        let far = BASE.with_lengths(Lengths::uniform(1, BASE.lengths.max_q(), 128)).with_heads(2, 2);
        cases.push(Case { arrangement: Arrangement::FarKeys, ..case("sizes", far) });
        let narrow = BASE.with_head_dims(64, 64).with_mask(Mask::FULL);
        cases.push(Case { arrangement: Arrangement::FarBatch, ..case("sizes", narrow) });
        let long = narrow.with_lengths(Lengths::uniform(1, 16, 4 << 20)).with_heads(1, 1);
        cases.push(case("sizes", long));
        cases.push(case("sizes", long.with_mask(Mask::CAUSAL)));
    }
    cases
}

fn actions(repeat: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    let ragged = BASE.with_lengths(Lengths::uniform(BASE.lengths.sequences(), 1111, 1111));
    for problem in [
        ragged,
        ragged.with_mask(Mask::FULL).with_head_dims(64, 64),
        ragged.with_head_dims(256, 256).with_types(Types::same(Dtype::F16)),
    ] {
        cases.push(Case { action: Action::Repeat(repeat), ..case("repeat", problem) });
        for action in [Action::Graph, Action::OwnStream, Action::Threads] {
            cases.push(Case { action, ..case("launch", problem) });
        }
    }
    cases
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use fa_core::Problem;

    use super::super::gradients::gradients;
    use super::super::serving::{serving, serving_gradients};
    use super::*;

    #[test]
    fn names_are_unique_and_problems_valid() {
        for extent in [Extent::Quick, Extent::Full] {
            let cases: Vec<Case> = [
                library(extent, 10),
                gradients(extent, 10),
                serving(extent, 10),
                serving_gradients(extent, 10),
            ]
            .concat();
            let names: HashSet<String> = cases.iter().map(Case::name).collect();
            let mut seen = HashSet::new();
            let twice: Vec<String> =
                cases.iter().map(Case::name).filter(|name| !seen.insert(name.clone())).collect();
            assert_eq!(names.len(), cases.len(), "{twice:?}");
            for case in &cases {
                case.problem.check().unwrap_or_else(|error| panic!("{}: {error}", case.name()));
            }
        }
    }

    #[test]
    fn every_shape_head_dim_and_ratio_of_heads_is_met_by_both_types() {
        for cases in [library(Extent::Full, 10), gradients(Extent::Full, 10)] {
            for dtype in DTYPES {
                let of = |f: &dyn Fn(&Problem) -> bool| {
                    cases.iter().any(|case| case.problem.types.q == dtype && f(&case.problem))
                };
                for (q, k) in SHAPES {
                    assert!(of(&|p| (p.lengths.max_q(), p.lengths.max_k()) == (q, k)), "{q}x{k} {dtype}");
                }
                for (d, dv) in HEAD_DIMS.into_iter().chain(PADDED_HEAD_DIMS) {
                    assert!(of(&|p| (p.head_dim, p.head_dim_v) == (d, dv)), "{d}-{dv} {dtype}");
                }
                for (q, kv) in HEADS {
                    assert!(of(&|p| (p.heads_q, p.heads_kv) == (q, kv)), "{q}:{kv} {dtype}");
                }
            }
        }
    }
}
