//! The cases of gradients.

use std::collections::HashSet;

use fa_core::{Dtype, Lengths, Mask, Pass, Problem, Types};

use super::case::{Action, BASE, Case, Extent, MASKS, Values, case};
use super::dropout::dropout_gradients;
use super::library::library;
use super::programs::{LOWEST_ROWS, array_gradients};
use super::wide::WIDE_PROGRAMS;

/// The cases of gradients by the library's own choice of kernel: those of the forward, with fewer heads for
/// long sequences and fewer columns for the longest, where the oracle takes seconds for the gradients of a
/// head. Repeated cases are deterministic, and so are two of seven others: no list of masks, head dims, heads
/// or lengths repeats after seven.
pub fn gradients(extent: Extent, repeat: usize) -> Vec<Case> {
    const LONG: usize = 1 << 19;
    const LONGEST: usize = 1 << 22;
    let pass = |deterministic| Pass::Backward { deterministic };
    let mut cases: Vec<Case> = library(extent, repeat)
        .into_iter()
        .filter(|case| case.action == Action::Once && case.values != Values::Lowest)
        .filter(|case| case.what != LOWEST_ROWS && case.group != WIDE_PROGRAMS)
        .filter(|case| case.problem.check_pass(Pass::BACKWARD).is_ok())
        .enumerate()
        .map(|(index, mut case)| {
            let p = &mut case.problem;
            let (batch, seqlen_q, seqlen_k) = (p.lengths.sequences(), p.lengths.max_q(), p.lengths.max_k());
            if seqlen_k >= LONGEST {
                p.lengths = Lengths::uniform(batch, 2, seqlen_k);
                (p.head_dim, p.head_dim_v) = (8, 8);
            } else if seqlen_q * seqlen_k > LONG {
                (p.heads_q, p.heads_kv) = if p.heads_q == p.heads_kv { (2, 2) } else { (4, 2) };
                p.lengths = Lengths::uniform(batch.min(1), seqlen_q, seqlen_k);
            }
            Case { pass: pass(2 * index % 7 < 2), ..case }
        })
        .collect();
    let one =
        BASE.with_lengths(Lengths::uniform(1, BASE.lengths.max_q(), BASE.lengths.max_k())).with_heads(2, 1);
    let mut repeated = Vec::new();
    for (seqlen_q, seqlen_k) in [(4224, 4224), (2000, 4000)] {
        repeated.extend(MASKS.map(|mask| {
            one.with_lengths(Lengths::uniform(one.lengths.sequences(), seqlen_q, seqlen_k)).with_mask(mask)
        }));
    }
    // Head dims differ in how they add to dQ.
    let ragged = one.with_lengths(Lengths::uniform(one.lengths.sequences(), 1111, 1111));
    repeated.push(ragged.with_head_dims(64, 64).with_mask(Mask::FULL));
    repeated.push(ragged.with_head_dims(256, 256).with_types(Types::same(Dtype::F16)));
    // Groups: their parts take turns at dK and dV as well.
    let grouped = ragged.with_heads_q(16);
    for (heads_kv, mask) in [(2, Mask::CAUSAL), (1, Mask::FULL), (4, Mask::window(300, 0))] {
        repeated.push(grouped.with_heads_kv(heads_kv).with_mask(mask));
    }
    cases.extend(repeated.into_iter().map(|problem| {
        let action = Action::Repeat(repeat);
        Case { action, pass: pass(true), ..case("repeat", problem) }
    }));
    let ragged = BASE.with_lengths(Lengths::uniform(BASE.lengths.sequences(), 555, 777)).with_heads(6, 3);
    for problem in [ragged, ragged.with_head_dims(64, 64).with_mask(Mask::FULL)] {
        for action in [Action::Graph, Action::OwnStream, Action::Threads] {
            for deterministic in [false, true] {
                cases.push(Case { action, pass: pass(deterministic), ..case("launch", problem) });
            }
        }
    }
    if extent == Extent::Full {
        // More than 2^31 numbers in dQ's accumulators, whose rows are as wide as the tile.
        let (head_dim, head_dim_v) = (40, 8);
        let wide = BASE.with_lengths(Lengths::uniform(520, 1 << 14, 64)).with_head_dims(head_dim, head_dim_v);
        let problem = wide.with_mask(Mask::FULL);
        cases.push(Case { pass: pass(false), ..case("sizes", problem) });
    }
    cases.extend(array_gradients(repeat));
    cases.extend(dropout_gradients(repeat));
    // Many query heads on one K/V head and few tiles of keys: heads are split over blocks.
    for (heads_q, heads_kv) in [(16, 1), (64, 2)] {
        for mask in MASKS {
            let problem = BASE
                .with_heads(heads_q, heads_kv)
                .with_lengths(Lengths::uniform(1, 500, 300))
                .with_mask(mask);
            cases.push(Case { pass: pass(false), ..case("head splits", problem) });
        }
    }
    // Short sequences of equal lengths, whose tiles have all keys: dQ is stored at once.
    for head_dim in [32, 64, 128] {
        for (seqlen, mask) in [(64, Mask::FULL), (128, Mask::CAUSAL), (77, Mask::CAUSAL)] {
            let problem = Problem::square(96, seqlen, 4, head_dim, mask, Dtype::Bf16);
            cases.push(Case { pass: pass(false), ..case("shapes", problem) });
            let shared = problem.with_heads_kv(2).with_types(Types::same(Dtype::F16));
            cases.push(Case { pass: pass(false), ..case("shapes", shared) });
        }
    }
    let mut seen = HashSet::new();
    cases.retain(|case| seen.insert(case.name()));
    cases
}

#[cfg(test)]
mod tests {
    use fa_cpu::grid::{BATCHES, HEAD_DIMS, HEADS, PADDED_HEAD_DIMS, SHAPES};

    use super::super::case::Arrangement;
    use super::*;

    #[test]
    fn gradients_of_both_kinds_meet_every_shape_head_dim_ratio_batch_and_mask() {
        let cases = gradients(Extent::Full, 10);
        for deterministic in [false, true] {
            let pass = Pass::Backward { deterministic };
            let of = |f: &dyn Fn(&Case) -> bool| cases.iter().any(|case| case.pass == pass && f(case));
            for mask in MASKS {
                for (q, k) in SHAPES {
                    let found = of(&|c| {
                        c.problem.mask == mask
                            && (c.problem.lengths.max_q(), c.problem.lengths.max_k()) == (q, k)
                    });
                    assert!(found, "{q}x{k} {mask} {pass:?}");
                }
                for (d, dv) in HEAD_DIMS {
                    let found = of(&|c| {
                        c.problem.mask == mask && (c.problem.head_dim, c.problem.head_dim_v) == (d, dv)
                    });
                    assert!(found, "{d}-{dv} {mask} {pass:?}");
                }
                for (q, kv) in HEADS {
                    let found =
                        of(&|c| c.problem.mask == mask && (c.problem.heads_q, c.problem.heads_kv) == (q, kv));
                    assert!(found, "{q}:{kv} {mask} {pass:?}");
                }
            }
            for (d, dv) in PADDED_HEAD_DIMS {
                let found = of(&|c| (c.problem.head_dim, c.problem.head_dim_v) == (d, dv));
                assert!(found, "{d}-{dv} {pass:?}");
            }
            for batch in BATCHES {
                assert!(of(&|c| c.problem.lengths.sequences() == batch), "batch {batch} {pass:?}");
            }
            for group in ["windows", "softcap", "scale", "values", "strides", "empty", "sizes", "launch"] {
                assert!(of(&|c| c.group == group), "{group} {pass:?}");
            }
        }
        // Offsets beyond 2^31: of rows, of keys, of accumulators; and millions of keys.
        for (what, found) in [
            ("far batch", cases.iter().any(|c| c.arrangement == Arrangement::FarBatch)),
            ("far keys", cases.iter().any(|c| c.arrangement == Arrangement::FarKeys)),
            ("accumulators", cases.iter().any(|c| c.problem.rows() * 64.0 > f64::from(1u32 << 31))),
            ("keys", cases.iter().any(|c| c.problem.lengths.max_k() == 4 << 20)),
        ] {
            assert!(found, "{what}");
        }
    }
}
