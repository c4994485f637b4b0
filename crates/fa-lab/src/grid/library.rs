//! The cases of the forward by the library's own choice of kernel, of lengths that the host knows.

use fa_core::{Dtype, Lengths, Mask, Problem, ScoreMod, Types};
use fa_cpu::grid::{BATCHES, HEAD_DIMS, HEADS, PADDED_HEAD_DIMS, SHAPES};

use super::case::{Action, Arrangement, BASE, Case, DTYPES, Extent, MASKS, Values, case};

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
                let problem = Problem {
                    lengths: Lengths::uniform(batch, seqlen_q, seqlen_k),
                    heads_q,
                    heads_kv,
                    head_dim,
                    head_dim_v,
                    mask,
                    types: Types::same(DTYPES[turn / 5 % 2]),
                    ..BASE
                };
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
                let problem = Problem {
                    lengths: Lengths::uniform(BASE.lengths.sequences(), seqlen_q, seqlen_k),
                    head_dim,
                    head_dim_v,
                    mask,
                    types: Types::same(dtype),
                    ..BASE
                };
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
                let problem = Problem {
                    heads_q,
                    heads_kv,
                    lengths: Lengths::uniform(BASE.lengths.sequences(), seqlen_q, seqlen_k),
                    mask,
                    types: Types::same(dtype),
                    ..BASE
                };
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
        Mask { left: Some(50), right: None },
        Mask { left: None, right: Some(40) },
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
            let problem = Problem {
                lengths: Lengths::uniform(BASE.lengths.sequences(), seqlen_q, seqlen_k),
                mask,
                head_dim,
                head_dim_v,
                ..BASE
            };
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
        let problem = Problem {
            lengths: Lengths::uniform(BASE.lengths.sequences(), 200, 333),
            mask,
            types: Types::same(dtype),
            ..BASE
        };
        for cap in [1.0, 5.0, 50.0] {
            cases.push(case("softcap", Problem { score: ScoreMod::softcap(cap), ..problem }));
        }
        for scale in [1e-6, 0.3, 1.0, 4.0] {
            cases.push(case("scale", Problem { softmax_scale: Some(scale), ..problem }));
        }
        let both = Problem { softmax_scale: Some(1.0), score: ScoreMod::softcap(3.0), ..problem };
        cases.push(case("softcap", Problem { head_dim: 64, head_dim_v: 64, ..both }));
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
                let problem = Problem {
                    lengths: Lengths::uniform(BASE.lengths.sequences(), 700, 900),
                    heads_q: 2,
                    heads_kv: 2,
                    head_dim,
                    head_dim_v,
                    mask,
                    types: Types::same(dtype),
                    ..BASE
                };
                cases.push(Case { values, ..case("values", problem) });
            }
        }
    }
    // Scores near the lowest of f32. Their gradients are not defined: an LSE of that size has no fractions.
    for mask in [Mask::CAUSAL, Mask::FULL, Mask::window(70, 9)] {
        for head_dim in [64, 128, 256] {
            let problem = Problem {
                lengths: Lengths::uniform(1, 200, 333),
                heads_q: 4,
                heads_kv: 2,
                head_dim,
                head_dim_v: head_dim,
                mask,
                softmax_scale: Some(1.0),
                ..BASE
            };
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
        Problem {
            lengths: Lengths::uniform(BASE.lengths.sequences(), 113, 203),
            heads_q: 6,
            heads_kv: 3,
            ..BASE
        },
        Problem { head_dim: 72, head_dim_v: 40, mask: Mask::FULL, types: Types::same(Dtype::F16), ..BASE },
    ];
    if full {
        problems.push(Problem {
            head_dim: 256,
            head_dim_v: 256,
            lengths: Lengths::uniform(BASE.lengths.sequences(), 300, BASE.lengths.max_k()),
            ..BASE
        });
        problems.push(Problem {
            head_dim: 192,
            lengths: Lengths::uniform(BASE.lengths.sequences(), BASE.lengths.max_q(), 999),
            mask: Mask::window(100, 3),
            ..BASE
        });
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
        let problem = Problem { mask, ..BASE };
        cases.extend(
            [
                Problem {
                    lengths: Lengths::uniform(problem.lengths.sequences(), problem.lengths.max_q(), 0),
                    ..problem
                },
                Problem {
                    lengths: Lengths::uniform(problem.lengths.sequences(), 0, problem.lengths.max_k()),
                    ..problem
                },
                Problem {
                    lengths: Lengths::uniform(0, problem.lengths.max_q(), problem.lengths.max_k()),
                    ..problem
                },
                Problem { lengths: Lengths::uniform(problem.lengths.sequences(), 0, 0), ..problem },
                Problem { lengths: Lengths::uniform(1, 1, 1), heads_q: 1, heads_kv: 1, ..problem },
                // Whole tiles of queries without a key.
                Problem { lengths: Lengths::uniform(problem.lengths.sequences(), 1000, 5), ..problem },
                // Many more tiles than blocks, nearly all of them empty: a pipeline's phase must not flip in
                // them.
                Problem { lengths: Lengths::uniform(9, 3000, 40), heads_q: 6, heads_kv: 3, ..problem },
            ]
            .map(|problem| case("empty", problem)),
        );
    }
    cases
}

/// Counts and offsets beyond what 16 and 32 bits hold.
fn sizes(full: bool) -> Vec<Case> {
    let small = Problem { lengths: Lengths::uniform(8300, 17, 33), heads_q: 2, heads_kv: 2, ..BASE };
    let mut cases = vec![
        case("sizes", Problem { head_dim: 64, head_dim_v: 64, ..small }),
        case(
            "sizes",
            Problem { lengths: Lengths::uniform(1, 65, 65), heads_q: 3000, heads_kv: 1000, ..BASE },
        ),
        Case {
            arrangement: Arrangement::FarBatch,
            ..case(
                "sizes",
                Problem {
                    lengths: Lengths::uniform(BASE.lengths.sequences(), 200, BASE.lengths.max_k()),
                    ..BASE
                },
            )
        },
    ];
    if full {
        let far = Problem {
            lengths: Lengths::uniform(1, BASE.lengths.max_q(), 128),
            heads_q: 2,
            heads_kv: 2,
            ..BASE
        };
        cases.push(Case { arrangement: Arrangement::FarKeys, ..case("sizes", far) });
        let narrow = Problem { head_dim: 64, head_dim_v: 64, mask: Mask::FULL, ..BASE };
        cases.push(Case { arrangement: Arrangement::FarBatch, ..case("sizes", narrow) });
        let long = Problem { lengths: Lengths::uniform(1, 16, 4 << 20), heads_q: 1, heads_kv: 1, ..narrow };
        cases.push(case("sizes", long));
        cases.push(case("sizes", Problem { mask: Mask::CAUSAL, ..long }));
    }
    cases
}

fn actions(repeat: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    let ragged = Problem { lengths: Lengths::uniform(BASE.lengths.sequences(), 1111, 1111), ..BASE };
    for problem in [
        ragged,
        Problem { mask: Mask::FULL, head_dim: 64, head_dim_v: 64, ..ragged },
        Problem { head_dim: 256, head_dim_v: 256, types: Types::same(Dtype::F16), ..ragged },
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
                    cases.iter().any(|case| case.problem.types.qkv == dtype && f(&case.problem))
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
