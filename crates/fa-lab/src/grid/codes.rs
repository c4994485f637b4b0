//! K and V in codes beside a Q of 16 bits: decoding from pages, splits, chunks, prefill, descales of every
//! form.

use fa_core::{Alibi, DescaleForm, Descales, Dtype, Lengths, Mask, Problem, ScoreMod, Types};

use super::case::{Action, Arrangement, BASE, Case, Extent, Values, case, case_of};
use super::paged::pages_of;
use super::programs::changed_by;
use super::varied::packed_of;
use crate::sequences::{Ragged, Sequences};

const TYPES: [(Dtype, Dtype); 4] = [
    (Dtype::Bf16, Dtype::E4m3),
    (Dtype::Bf16, Dtype::Int8),
    (Dtype::F16, Dtype::E4m3),
    (Dtype::F16, Dtype::Int8),
];

const FORMS: [Descales; 5] = [
    Descales::both(DescaleForm::TokenHead),
    Descales::both(DescaleForm::Head),
    Descales::new(DescaleForm::SequenceHead, DescaleForm::TokenHead),
    Descales::NONE,
    Descales::new(DescaleForm::TokenHead, DescaleForm::Head),
];

const MASKS: [Mask; 4] = [Mask::CAUSAL, Mask::FULL, Mask::causal_window(130), Mask::window(70, 9)];

/// The same of 4 bits.
const INT4: [(Dtype, Dtype); 2] = [(Dtype::Bf16, Dtype::Int4), (Dtype::F16, Dtype::Int4)];

/// The same in e5m2.
const E5M2: [(Dtype, Dtype); 2] = [(Dtype::Bf16, Dtype::E5m2), (Dtype::F16, Dtype::E5m2)];

fn of(types: &[(Dtype, Dtype)], turn: usize, head_dim: usize) -> Problem {
    let (heads_q, heads_kv) = [(8, 2), (4, 4), (6, 1)][turn % 3];
    let (q, kv) = types[turn % types.len()];
    BASE.with_heads(heads_q, heads_kv)
        .with_head_dims(head_dim, head_dim)
        .with_mask(MASKS[turn / 2 % 4])
        .with_types(Types::same(q).with_kv(kv))
        .with_descales(FORMS[turn % 5])
}

/// `problem` with K and V in codes, type and form of descales `turn` of all.
pub(super) fn coded(turn: usize, problem: Problem) -> Problem {
    let types = [TYPES, [INT4[0], INT4[1], E5M2[0], E5M2[1]]].concat();
    let (q, kv) = types[turn % types.len()];
    problem.with_types(Types::same(q).with_kv(kv)).with_descales(FORMS[turn % FORMS.len()])
}

/// The cases of the library's own choice of kernel; a third of them where not all are asked for.
pub(crate) fn codes(extent: Extent, repeat: usize) -> Vec<Case> {
    let mut cases = of_types(extent, repeat, &TYPES, [128, 64, 256, 96, 80]);
    cases.extend(of_types(extent, repeat, &INT4, [128, 64, 256, 96, 32]));
    cases.extend(of_types(extent, repeat, &E5M2, [128, 64, 256, 96, 80]));
    cases.extend(wide());
    cases
}

/// Latents, and heads of more than 256 columns: tokens on pages of any size, splits, chunks and prefill.
fn wide() -> Vec<Case> {
    let types = [TYPES, [INT4[0], INT4[1], E5M2[0], E5M2[1]]].concat();
    let latent = |turn: usize| {
        of(&types, turn, 576)
            .with_heads([16, 32, 8][turn % 3], 1)
            .with_head_dim_v(512)
            .with_latent(true)
            .with_softmax_scale(Some(0.07))
    };
    let apart = |turn: usize| {
        let (head_dim, head_dim_v) = [(512, 512), (320, 256)][turn % 2];
        of(&types, turn, head_dim).with_head_dim_v(head_dim_v).with_heads(8, 4)
    };
    let mut cases = Vec::new();
    for turn in 0..types.len() {
        for (problem, what) in [(latent(turn), "latent"), (apart(turn), "wide")] {
            let cache = pages_of(&[700, 33, 0, 250, 1], [64, 1, 16][turn % 3], turn as u64);
            let tokens = Sequences { q: Ragged::uniform(5, [1, 2, 4][turn % 3]), k: cache };
            cases.push(Case { split: turn % 2 == 0, ..case_of("codes", what, problem, tokens) });
            let Sequences { q, k } = packed_of(&[100, 0, 1, 64], &[130, 7, 0, 300], turn);
            cases.push(case_of("codes", what, problem, Sequences { q, k }));
            let (queries, keys) = [(130, 333), (1, 2049)][turn % 2];
            cases.push(Case {
                what,
                ..case("codes", problem.with_lengths(Lengths::uniform(2, queries, keys)))
            });
        }
    }
    cases
}

/// Programs over codes: masks, biases and formulas, whose scores have K's descale in them.
fn with_programs(of: &impl Fn(usize, usize) -> Problem) -> Vec<Case> {
    let mut cases = Vec::new();
    for (turn, index) in [2, 4, 6, 8, 12, 13, 15].into_iter().enumerate() {
        let (what, score) = changed_by(index);
        let lengths = Lengths::uniform(2, [130, 3][turn % 2], 333);
        let problem = of(turn, [128, 64][turn / 2 % 2]).with_score(score);
        cases.push(Case { what, ..case("codes", problem.with_lengths(lengths)) });
        let cache = pages_of(&[700, 33, 0, 250], [16, 1][turn % 2], turn as u64);
        let decoded = Sequences { q: Ragged::uniform(4, 1 + turn % 2), k: cache };
        cases.push(Case { split: turn % 2 == 0, ..case_of("codes", what, problem, decoded) });
    }
    cases
}

fn of_types(extent: Extent, repeat: usize, types: &[(Dtype, Dtype)], head_dims: [usize; 5]) -> Vec<Case> {
    let of = |turn, head_dim| of(types, turn, head_dim);
    let lengths = [(200, 333), (1, 257), (129, 127), (300, 70), (5, 0), (4, 1000), (1, 4096), (64, 16384)];
    let mut cases = Vec::new();
    for (turn, head_dim) in head_dims.into_iter().enumerate() {
        for (step, (seqlen_q, seqlen_k)) in lengths.into_iter().enumerate() {
            let problem = of(turn + step, head_dim).with_lengths(Lengths::uniform(2, seqlen_q, seqlen_k));
            let arrangement = [Arrangement::Bshd, Arrangement::Bhsd, Arrangement::Gap(8)][(turn + step) % 3];
            cases.push(Case { arrangement, ..case("codes", problem) });
        }
        for (step, page) in [16, 1, 64, 256, 17].into_iter().enumerate() {
            let cache = [700, 33, 0, 250, 1, 2049];
            for queries in [1, 3] {
                let sequences =
                    Sequences { q: Ragged::uniform(6, queries), k: pages_of(&cache, page, turn as u64) };
                let problem = of(turn + step + queries, head_dim);
                cases.push(case_of("codes", "decode", problem, sequences.clone()));
                cases.push(Case { split: true, ..case_of("codes", "split", problem, sequences) });
            }
        }
        let queries = [100, 0, 1, 64, 257];
        for (step, keys) in [[130, 7, 0, 64, 300], [1, 500, 129, 0, 255]].into_iter().enumerate() {
            let Sequences { q, k } = packed_of(&queries, &keys, turn + step);
            let problem = of(turn + step, head_dim);
            let page = [16, 64, 1, 128, 5][turn];
            for (what, keys) in [("packed", k), ("paged", pages_of(&keys, page, turn as u64))] {
                cases.push(case_of("codes", what, problem, Sequences { q: q.clone(), k: keys }));
            }
            let used = Sequences { q: Ragged::padded(&queries, 260), k: Ragged::padded(&keys, 512) };
            cases.push(case_of("codes", "used", problem, used));
        }
    }
    if extent != Extent::Full {
        cases = cases.into_iter().step_by(3).collect();
    }
    let whole = of(0, 128).with_lengths(Lengths::uniform(2, 700, 900));
    let changed =
        [ScoreMod::NONE.with_alibi(Some(Alibi::PerSequenceHead)).with_sinks(true), ScoreMod::softcap(9.0)];
    for (score, head_dim) in changed.into_iter().zip([128, 64]) {
        cases.push(case("codes", whole.with_score(score).with_head_dims(head_dim, head_dim)));
    }
    for values in [Values::Rising, Values::Falling, Values::Equal] {
        cases.push(Case { values, ..case("codes", whole) });
    }
    cases.extend(with_programs(&of));
    let lens = [2000, 1, 0, 300];
    let sequences = Sequences { q: Ragged::uniform(4, 2), k: pages_of(&lens, 16, 3) };
    let launch = |turn| case_of("codes", "launch", of(turn, 128), sequences.clone());
    cases.push(Case { action: Action::Repeat(repeat), ..launch(0) });
    cases.push(Case { action: Action::Graph, ..launch(1) });
    cases.push(Case { action: Action::Relength, ..launch(0) });
    cases.push(Case { action: Action::AsContiguous, ..launch(0) });
    cases
}
