//! Changes of scores besides a mask: ALiBi and sinks, alone and combined with everything else.

use fa_core::{Alibi, Lengths, Mask, ScoreMod};

use super::case::{Action, Case, Extent, MASKS, Values, case, case_of};
use super::paged::pages_of;
use super::varied::{ALL_MASKS, packed_of, turned};
use crate::sequences::{Ragged, Sequences};

/// Slopes for all sequences, or for each.
const ALIBIS: [Alibi; 2] = [Alibi::PerHead, Alibi::PerSequenceHead];

const NONE: ScoreMod = ScoreMod::NONE;

/// Dense problems with ALiBi.
pub(super) fn alibi(extent: Extent, repeat: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    let lengths = [(256, 256), (113, 203), (300, 77), (1, 400), (515, 515), (203, 1)];
    let most = if extent == Extent::Full { lengths.len() } else { 3 };
    for (index, mask) in ALL_MASKS.into_iter().enumerate() {
        for (turn, (q, k)) in lengths.into_iter().cycle().skip(index).take(most).enumerate() {
            let turn = index + turn;
            let softcap = (turn % 3 == 2).then_some(7.0);
            let score = NONE.with_softcap(softcap).with_alibi(Some(ALIBIS[turn % 2]));
            cases.push(case(
                "alibi",
                turned(turn, mask).with_lengths(Lengths::uniform(2, q, k)).with_score(score),
            ));
        }
    }
    let score = NONE.with_alibi(Some(Alibi::PerHead));
    let repeated = turned(0, Mask::CAUSAL).with_lengths(Lengths::uniform(2, 555, 555)).with_score(score);
    cases.push(Case { action: Action::Repeat(repeat), ..case("alibi", repeated) });
    cases
}

/// Dense problems with sinks.
pub(super) fn sinks(extent: Extent, repeat: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    let lengths = [(256, 256), (113, 203), (300, 77), (1, 400), (515, 515), (5, 0), (203, 1)];
    let most = if extent == Extent::Full { lengths.len() } else { 3 };
    let score = NONE.with_sinks(true);
    for (index, mask) in ALL_MASKS.into_iter().enumerate() {
        for (turn, (q, k)) in lengths.into_iter().cycle().skip(index).take(most).enumerate() {
            let turn = index + turn;
            let score = score.with_softcap((turn % 4 == 3).then_some(7.0));
            cases.push(case(
                "sinks",
                turned(turn, mask).with_lengths(Lengths::uniform(2, q, k)).with_score(score),
            ));
        }
    }
    // The shape of gpt-oss: more heads than a warp has lanes, and a window on every other layer.
    for mask in [Mask::CAUSAL, Mask::causal_window(127)] {
        let wide = turned(0, mask).with_heads(64, 8).with_head_dims(64, 64);
        cases.push(case("sinks", wide.with_lengths(Lengths::uniform(1, 300, 300)).with_score(score)));
        let many = wide.with_heads(130, 130);
        cases.push(case("sinks", many.with_lengths(Lengths::uniform(1, 40, 70)).with_score(score)));
    }
    let long = turned(0, Mask::CAUSAL).with_lengths(Lengths::uniform(2, 300, 700)).with_score(score);
    for values in [Values::Rising, Values::Falling, Values::Sharp, Values::Equal] {
        cases.push(Case { values, ..case("sinks", long) });
    }
    cases.push(Case { action: Action::Repeat(repeat), ..case("sinks", long) });
    cases
}

/// Slopes and sinks up to the largest number of f32, where every query is at one of the keys: at a distance
/// the exponents themselves would be beyond f32.
pub(super) fn edges(extent: Extent) -> Vec<Case> {
    let mut cases = Vec::new();
    for (turn, mask) in ALL_MASKS.into_iter().enumerate() {
        for (index, (q, k)) in [(200, 200), (113, 203), (1, 400)].into_iter().enumerate() {
            if extent == Extent::Quick && (turn + index) % 3 != 0 {
                continue;
            }
            for score in [
                NONE.with_alibi(Some(ALIBIS[index % 2])),
                NONE.with_sinks(true),
                NONE.with_alibi(Some(ALIBIS[turn % 2])).with_sinks(true),
            ] {
                let problem =
                    turned(turn + index, mask).with_lengths(Lengths::uniform(2, q, k)).with_score(score);
                cases.push(Case { values: Values::Edges, ..case("edges", problem) });
            }
        }
    }
    cases
}

/// The changes of scores that are met together.
const MIXES: [ScoreMod; 6] = [
    NONE.with_sinks(true),
    NONE.with_alibi(Some(Alibi::PerHead)),
    NONE.with_alibi(Some(Alibi::PerSequenceHead)).with_sinks(true),
    NONE.with_softcap(Some(7.0)).with_sinks(true),
    NONE.with_softcap(Some(7.0)).with_alibi(Some(Alibi::PerSequenceHead)),
    ScoreMod::NONE.with_softcap(Some(20.0)).with_alibi(Some(Alibi::PerHead)).with_sinks(true),
];

/// Everything combined: changes of scores on packed batches, caches and pages, split and not.
pub(super) fn mixed(extent: Extent) -> Vec<Case> {
    let mut cases = Vec::new();
    let (q, k) = ([300, 1, 0, 130, 64, 7], [300, 515, 40, 130, 0, 777]);
    for (index, score) in MIXES.into_iter().enumerate() {
        for (turn, mask) in ALL_MASKS.into_iter().enumerate() {
            if extent == Extent::Quick && (index + turn) % 2 == 1 {
                continue;
            }
            let turn = index + turn;
            let problem = turned(turn, mask).with_score(score);
            let packed = packed_of(&q, &k, turn);
            cases.push(case_of("mixed", "packed", problem, packed.clone()));
            let page = [16, 64, 1, 128][turn % 4];
            let sequences = Sequences { k: pages_of(&k, page, 7), ..packed };
            cases.push(case_of("mixed", "paged", problem, sequences));
            let decode = Ragged::uniform(6, [1, 3, 16][turn % 3]);
            let caches = [Ragged::padded(&k, 800), pages_of(&k, page, 8)];
            for (what, cache) in ["decode", "decode of pages"].into_iter().zip(caches) {
                let sequences = Sequences { q: decode.clone(), k: cache };
                let case = case_of("mixed", what, problem, sequences);
                cases.push(Case { split: true, ..case.clone() });
                cases.push(case);
            }
        }
    }
    for mask in MASKS {
        let score = NONE.with_alibi(Some(Alibi::PerHead)).with_sinks(true);
        let one = packed_of(&[515], &[515], 0);
        let case = case_of("mixed", "one sequence", turned(0, mask).with_score(score), one);
        cases.push(Case { action: Action::AsDense, ..case });
    }
    cases
}
