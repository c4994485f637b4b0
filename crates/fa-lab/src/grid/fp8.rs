//! Q, K and V in e4m3: lengths around tiles, long rows, descales of every form, sequences of their own
//! lengths.

use fa_core::{Alibi, DescaleForm, Descales, Dtype, Lengths, Mask, Problem, ScoreMod, Types};

use super::case::{Action, BASE, Case, case, case_of};
use super::paged::pages_of;
use super::varied::packed_of;
use crate::sequences::{Ragged, Sequences};

const FORMS: [DescaleForm; 3] = [DescaleForm::SequenceHead, DescaleForm::Head, DescaleForm::None];

const MASKS: [Mask; 4] = [Mask::FULL, Mask::CAUSAL, Mask::window(70, 9), Mask::causal_window(130)];

fn of(turn: usize, dims: (usize, usize)) -> Problem {
    let (heads_q, heads_kv) = [(4, 4), (6, 2), (4, 1)][turn % 3];
    BASE.with_heads(heads_q, heads_kv)
        .with_head_dims(dims.0, dims.1)
        .with_mask(MASKS[turn % 4])
        .with_types(Types::fp8(Dtype::Bf16))
        .with_descales(Descales::all(FORMS[turn % 3]))
}

pub(crate) fn fp8(repeat: usize) -> Vec<Case> {
    let dims = [(128, 128), (64, 64), (256, 256), (96, 96), (48, 112)];
    let lengths = [
        (200, 333),
        (256, 256),
        (129, 127),
        (64, 129),
        (130, 255),
        (1, 257),
        (257, 384),
        (113, 1000),
        (300, 70),
        (5, 0),
        (1, 4096),
        (64, 16384),
    ];
    let mut cases = Vec::new();
    for (turn, dims) in dims.into_iter().enumerate() {
        for (step, (seqlen_q, seqlen_k)) in lengths.into_iter().enumerate() {
            let problem = of(turn + step, dims).with_lengths(Lengths::uniform(2, seqlen_q, seqlen_k));
            cases.push(case("fp8", problem));
        }
        let queries = [100, 0, 1, 64, 257];
        for (step, keys) in [[130, 7, 0, 64, 300], [1, 500, 129, 0, 255]].into_iter().enumerate() {
            let Sequences { q, k } = packed_of(&queries, &keys, turn + step);
            let page = [16, 64, 1, 128, 5][turn];
            for (what, keys) in [("packed", k), ("paged", pages_of(&keys, page, turn as u64))] {
                let sequences = Sequences { q: q.clone(), k: keys };
                cases.push(case_of("fp8", what, of(turn + step, dims), sequences));
            }
            let used = Sequences { q: Ragged::padded(&queries, 260), k: Ragged::padded(&keys, 512) };
            cases.push(case_of("fp8", "used", of(turn + step, dims), used));
        }
    }
    let sloped = ScoreMod::NONE.with_alibi(Some(Alibi::PerSequenceHead)).with_sinks(true);
    let whole = of(0, (128, 128)).with_lengths(Lengths::uniform(2, 700, 900));
    cases.push(case("fp8", whole.with_score(sloped)));
    cases.push(case("fp8", of(1, (64, 64)).with_lengths(Lengths::uniform(2, 300, 500)).with_score(sloped)));
    // As Gemma 2 has it: a cap on scores beside windows, in groups of two.
    let capped = ScoreMod::softcap(50.0);
    let gemma = of(0, (256, 256)).with_heads(8, 4).with_lengths(Lengths::uniform(1, 300, 700));
    for mask in [Mask::CAUSAL, Mask::causal_window(130)] {
        cases.push(case("fp8", gemma.with_mask(mask).with_score(capped)));
    }
    let sharp = sloped.with_softcap(Some(3.0));
    cases.push(case("fp8", of(2, (64, 64)).with_lengths(Lengths::uniform(2, 200, 500)).with_score(sharp)));
    let cache = Sequences { q: Ragged::uniform(3, 2), k: pages_of(&[300, 0, 77], 16, 5) };
    cases.push(case_of("fp8", "softcap", of(1, (128, 128)).with_score(capped), cache));
    cases.push(Case { action: Action::Repeat(repeat), ..case("fp8", whole) });
    cases.push(Case { action: Action::Graph, ..case("fp8", whole.with_mask(Mask::CAUSAL)) });
    let lens = [2000, 1, 0, 300];
    for (turn, page) in [(0, 64), (1, 16)] {
        let cache = Sequences { q: Ragged::uniform(4, 2), k: pages_of(&lens, page, 3) };
        let launch = || case_of("fp8", "launch", of(turn, (128, 128)), cache.clone());
        cases.push(Case { action: Action::Repeat(repeat), ..launch() });
        cases.push(Case { action: Action::Relength, ..launch() });
        cases.push(Case { split: true, ..launch() });
    }
    cases
}
