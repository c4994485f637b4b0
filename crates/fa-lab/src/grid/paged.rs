//! Keys in pages, and decoding: few queries with many keys, which several CTAs share.

use fa_core::{KernelSpec, Mask, ScoreMod};

use super::case::{Action, Arrangement, Case, Extent, MASKS, case, case_of};
use super::varied::{ALL_MASKS, lengths, turned};
use crate::random::Random;
use crate::sequences::{Ragged, Sequences};

/// Rows of a page: below, of and above what TMA boxes and tiles have.
pub(super) const PAGES: [usize; 8] = [1, 3, 8, 16, 24, 64, 128, 256];

/// Whether a kernel loads pages of this many keys: TMA boxes hold at least eight keys, a gather any number.
pub(super) fn loads_pages(spec: &KernelSpec, page: usize) -> bool {
    spec.traits().copies_rows() || page.is_multiple_of(8)
}

/// Keys of `lens` in shuffled pages, a few more than needed, with a bound that is not tight.
pub(super) fn pages_of(lens: &[usize], page: usize, seed: u64) -> Ragged {
    let mut random = Random::new(seed.wrapping_mul(31) + page as u64);
    let rows = Ragged::paged(lens, page, 3, &mut random);
    let max = rows.side().max();
    rows.bounded(max + 3 * page + 1)
}

/// Keys in pages.
pub(super) fn paged(extent: Extent, repeat: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    let lists = lengths();
    for (index, page) in PAGES.into_iter().enumerate() {
        let few = [Ragged::uniform(6, 1), Ragged::uniform(6, 5)];
        let cache = [700, 33, 0, 250, 1, 4 * page + 1];
        for (turn, q) in few.into_iter().enumerate() {
            let mask = if turn == 0 { MASKS[index % 2] } else { Mask::CAUSAL };
            let sequences = Sequences { q, k: pages_of(&cache, page, 1) };
            cases.push(case_of("paged", "decode", turned(index + turn, mask), sequences));
        }
        let turns = if extent == Extent::Full { lists.len() } else { 4 };
        for turn in 0..turns {
            let (what, q, k) = &lists[(3 * index + turn) % lists.len()];
            let mask = ALL_MASKS[(index + turn) % 4];
            let sequences = Sequences { q: Ragged::packed(q, turn % 3), k: pages_of(k, page, turn as u64) };
            let case = case_of("paged", what, turned(index + turn, mask), sequences);
            // Pages with heads before rows, and gaps: only strides differ.
            let arrangement = [Arrangement::Bshd, Arrangement::Bhsd, Arrangement::Gap(8)][(index + turn) % 3];
            cases.push(Case { arrangement, ..case });
        }
        let lens = [515, 64, 0, 130];
        let queries = [130, 1, 7, 64];
        for mask in MASKS {
            let sequences = Sequences { q: Ragged::packed(&queries, 0), k: pages_of(&lens, page, 2) };
            let case = case_of("paged", "as contiguous", turned(index % 4, mask), sequences);
            cases.push(Case { action: Action::AsContiguous, ..case });
        }
        let sequences = Sequences { q: Ragged::packed(&queries, 0), k: pages_of(&lens, page, 4) };
        let bad = case_of("paged", "bad entries", turned(index % 4, Mask::CAUSAL), sequences);
        cases.push(Case { action: Action::BadPages, ..bad });
        if index % 3 == 0 {
            let sequences = Sequences { q: Ragged::uniform(4, 3), k: pages_of(&lens, page, 2) };
            let case = || case_of("paged", "launch", turned(index % 4, Mask::CAUSAL), sequences.clone());
            for action in [Action::Repeat(repeat), Action::Relength, Action::Graph] {
                cases.push(Case { action, ..case() });
            }
        }
    }
    cases
}

/// Problems of decoding whose keys are split, whatever the planner would do.
pub(super) fn split(extent: Extent, repeat: usize) -> Vec<Case> {
    let splits = |case: Case| Case { split: true, ..case };
    let heads = [(8, 2), (10, 2), (7, 1), (4, 4), (32, 8), (3, 1), (8, 1), (6, 1)];
    let mut cases = Vec::new();
    let tokens: &[usize] = if extent == Extent::Full { &[1, 2, 3, 4, 7, 8, 15, 16] } else { &[1, 4, 16] };
    for (index, &tokens) in tokens.iter().enumerate() {
        for (turn, mask) in ALL_MASKS.into_iter().enumerate() {
            let (heads_q, heads_kv) = heads[(index + turn) % heads.len()];
            let problem = turned([0, 1, 2, 4][(index + turn) % 4], mask).with_heads(heads_q, heads_kv);
            let problem = match problem.group_size() * problem.heads_kv == heads_q {
                true => problem,
                false => problem.with_heads_q(heads_kv),
            };
            for (keys, cap) in [(2000 + 7 * index, None), (130, Some(9.0)), (3, None)] {
                let lengths = fa_core::Lengths::uniform(2, tokens, keys);
                let score = ScoreMod::NONE.with_softcap(cap);
                cases.push(splits(case("split", problem.with_lengths(lengths).with_score(score))));
            }
            // Lengths on the device: some have one split, some many, some none at all.
            let lens = [3000, 1, 0, 129, 777];
            let q = Ragged::uniform(5, tokens);
            let sides = [
                ("cache", Sequences { q: q.clone(), k: Ragged::padded(&lens, 3100) }),
                ("pages", Sequences { q: q.clone(), k: pages_of(&lens, [16, 1, 64, 24][turn], 3) }),
                (
                    "packed",
                    Sequences {
                        q: Ragged::packed(&[tokens, 0, tokens, 1, tokens], 2),
                        k: Ragged::packed(&lens, 9),
                    },
                ),
            ];
            for (what, sequences) in sides {
                cases.push(splits(case_of("split", what, problem, sequences)));
            }
        }
    }
    // More rows than a tile has, and a prefill's.
    for (queries, keys) in [(65, 1500), (200, 3000)] {
        for mask in MASKS {
            let lengths = fa_core::Lengths::uniform(1, queries, keys);
            cases.push(splits(case("split", turned(3, mask).with_lengths(lengths))));
        }
    }
    let lens = [2000, 1, 0, 300];
    for mask in MASKS {
        let dense = turned(3, mask).with_lengths(fa_core::Lengths::uniform(3, 1, 1777));
        let sequences = Sequences { q: Ragged::uniform(4, 2), k: pages_of(&lens, 16, 3) };
        let of_pages = || case_of("split", "launch", turned(3, mask), sequences.clone());
        for action in [Action::Repeat(repeat), Action::Graph] {
            cases.push(splits(Case { action, ..case("split", dense) }));
            cases.push(splits(Case { action, ..of_pages() }));
        }
        cases.push(splits(Case { action: Action::Relength, ..of_pages() }));
        cases.push(splits(Case { action: Action::AsContiguous, ..of_pages() }));
    }
    cases
}
