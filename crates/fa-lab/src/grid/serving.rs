//! The cases of attention in serving: sequences of different lengths, pages, decoding, ALiBi and sinks.

use fa_core::{Pass, SideRows};

use super::append::{append, append_codes};
use super::case::{Action, Case, Extent};
use super::dropout::varied_dropout;
use super::known::known;
use super::merge::merge;
use super::paged::{paged, split};
use super::programs::varied_programs;
use super::scores::{alibi, edges, mixed, sinks};
use super::varied::{packed, used};

/// The cases of the forward.
pub fn serving(extent: Extent, repeat: usize) -> Vec<Case> {
    let mut cases = packed(extent, repeat);
    cases.extend(used(extent));
    cases.extend(paged(extent, repeat));
    cases.extend(split(extent, repeat));
    cases.extend(alibi(extent, repeat));
    cases.extend(sinks(extent, repeat));
    cases.extend(edges(extent));
    cases.extend(mixed(extent));
    cases.extend(known());
    cases.extend(varied_programs());
    cases.extend(varied_dropout());
    cases.extend(append(extent));
    cases.extend(append_codes(extent));
    cases.extend(merge());
    cases
}

/// Pairs of one head beyond which a head's gradients take the oracle seconds.
const LONG: f64 = (1 << 20) as f64;

/// The cases of gradients: those of the forward that have gradients, with fewer heads where sequences are
/// long. Repeated cases are deterministic, and so is every second of the others.
pub fn serving_gradients(extent: Extent, repeat: usize) -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    let of_forward = serving(extent, repeat).into_iter().filter(|case| {
        let paged = matches!(case.problem.lengths.k().rows, SideRows::Paged { .. });
        !paged && !case.split && case.is_attention() && case.action != Action::Relength
    });
    for (turn, mut case) in of_forward.enumerate() {
        let long = case.sequences().pairs(&case.problem.mask) > LONG;
        let p = &mut case.problem;
        if long {
            (p.heads_q, p.heads_kv) = if p.heads_q == p.heads_kv { (2, 2) } else { (4, 2) };
        }
        let deterministic = turn % 2 == 1 || matches!(case.action, Action::Repeat(_) | Action::AsDense);
        cases.push(Case { pass: Pass::Backward { deterministic }, ..case });
    }
    cases
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use fa_core::Mask;

    use super::super::paged::PAGES;
    use super::*;
    use crate::sequences::Store;

    fn both() -> [Vec<Case>; 2] {
        [serving(Extent::Full, 10), serving_gradients(Extent::Full, 10)]
    }

    #[test]
    fn sequences_are_those_of_their_problems() {
        for case in both().concat() {
            let sequences = case.sequences();
            assert_eq!(sequences.lengths(), case.problem.lengths, "{}", case.name());
            assert_eq!(sequences.q.sequences(), sequences.k.sequences(), "{}", case.name());
        }
    }

    #[test]
    fn zero_lengths_meet_both_sides_all_masks_and_both_passes() {
        for cases in both() {
            for mask in super::super::varied::ALL_MASKS {
                for side in [0, 1] {
                    let found = cases.iter().any(|case| {
                        let sequences = case.sequences();
                        let (own, other) = match side {
                            0 => (&sequences.q, &sequences.k),
                            _ => (&sequences.k, &sequences.q),
                        };
                        let empty = |b: usize| own.len(b) == 0 && other.len(b) > 0;
                        case.problem.mask == mask && (0..sequences.count()).any(empty)
                    });
                    assert!(found, "{mask}, side {side}");
                }
            }
        }
    }

    #[test]
    fn every_page_size_meets_prefill_decode_splits_and_the_same_bits() {
        let [forward, backward] = both();
        let page_of = |case: &Case| case.problem.lengths.page();
        for page in PAGES {
            let of = |f: &dyn Fn(&Case) -> bool| forward.iter().any(|c| page_of(c) == Some(page) && f(c));
            assert!(of(&|c| c.problem.lengths.max_q() == 1), "decode, {page}");
            assert!(of(&|c| c.problem.lengths.max_q() > 100), "prefill, {page}");
            assert!(of(&|c| c.action == Action::AsContiguous), "the same bits, {page}");
        }
        for page in [1, 16, 24, 64] {
            assert!(forward.iter().any(|c| page_of(c) == Some(page) && c.split), "splits, {page}");
        }
        assert!(backward.iter().all(|case| page_of(case).is_none() && !case.split));
    }

    #[test]
    fn tables_are_shuffled_and_their_rest_is_garbage() {
        let tables: Vec<(Vec<i32>, usize)> = serving(Extent::Full, 10)
            .iter()
            .filter_map(|case| {
                let sequences = case.sequences();
                let Store::Paged { table, pages, .. } = sequences.k.store() else { return None };
                Some((table.clone(), *pages))
            })
            .collect();
        let shuffled =
            |(table, _): &&(Vec<i32>, usize)| table.windows(2).any(|two| two[1] != two[0].wrapping_add(1));
        assert!(tables.iter().filter(shuffled).count() > 30);
        let garbage = |(table, pages): &&(Vec<i32>, usize)| {
            table.iter().any(|&page| page < 0 || page as usize >= *pages)
        };
        assert!(tables.iter().filter(garbage).count() > 30);
    }

    #[test]
    fn batches_go_from_one_to_thousands_in_both_passes() {
        for cases in both() {
            for batch in [1, 32, 993, 1025, 8300] {
                assert!(cases.iter().any(|case| case.sequences().count() == batch), "{batch}");
            }
            let few = |case: &Case| case.sequences().q.total() < case.sequences().count();
            assert!(cases.iter().filter(|case| few(case)).count() > 3, "fewer queries than sequences");
        }
    }

    #[test]
    fn changes_of_scores_go_with_everything() {
        let [forward, backward] = both();
        let of = |cases: &[Case], f: &dyn Fn(&Case) -> bool| cases.iter().any(f);
        for mask in [Mask::CAUSAL, Mask::FULL] {
            for (what, found) in [
                ("sinks", of(&backward, &|c| c.problem.score.sinks && c.problem.mask == mask)),
                ("alibi", of(&backward, &|c| c.problem.score.alibi.is_some() && c.problem.mask == mask)),
                ("packed", of(&backward, &|c| c.what == "packed" && c.problem.mask == mask)),
                ("split", of(&forward, &|c| c.group == "mixed" && c.split && c.problem.mask == mask)),
                ("paged", of(&forward, &|c| c.what == "paged" && c.problem.mask == mask)),
            ] {
                assert!(found, "{what} {mask}");
            }
        }
        let kinds: HashSet<_> =
            forward.iter().filter(|c| c.group == "mixed").map(|c| format!("{:?}", c.problem.score)).collect();
        assert_eq!(kinds.len(), 7);
    }

    #[test]
    fn gradients_of_both_kinds_meet_every_group() {
        let [_, backward] = both();
        for deterministic in [false, true] {
            for group in ["packed", "used", "alibi", "sinks", "edges", "mixed", "known"] {
                let pass = Pass::Backward { deterministic };
                assert!(backward.iter().any(|c| c.group == group && c.pass == pass), "{group} {pass:?}");
            }
        }
    }

    #[test]
    fn every_reported_number_is_a_case() {
        let cases = serving(Extent::Quick, 10);
        for number in [
            "1254", "1537", "1619", "1661", "2167", "2470", "2515", "2550", "2562", "2568", "2662", "2762",
            "2793",
        ] {
            let found = cases.iter().any(|case| case.group == "known" && case.what.starts_with(number));
            assert!(found, "{number}");
        }
    }

    #[test]
    fn the_quick_part_is_small_and_has_every_group() {
        let count = |cases: &[Case], group: &str| cases.iter().filter(|case| case.group == group).count();
        let (quick, full) = (serving(Extent::Quick, 10), serving(Extent::Full, 10));
        for group in [
            "packed", "used", "paged", "split", "alibi", "sinks", "edges", "mixed", "known", "append",
            "merge",
        ] {
            assert!(count(&quick, group) > 5 && count(&quick, group) <= count(&full, group), "{group}");
        }
        assert!(quick.len() < 500 && full.len() < 1100, "{} and {}", quick.len(), full.len());
    }
}
