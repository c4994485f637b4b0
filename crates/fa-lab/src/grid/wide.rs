//! Masks and changes of scores of the caller's own in heads of more than 256 columns, and of latents:
//! forwards alone, as no kernel computes their gradients.

use fa_core::{Alibi, Lengths, Mask, Problem, ScoreMod, Types};

use super::case::{Action, BASE, Case, DTYPES, case, case_of};
use super::codes::coded;
use super::dropout::dropped;
use super::paged::pages_of;
use super::programs::{LOWEST, PROGRAMS, changed_by, score};
use crate::sequences::{Ragged, Sequences};

/// The group of these cases.
pub(super) const WIDE_PROGRAMS: &str = "wide programs";

/// Head dims, the widest first.
const DIMS: [(usize, usize); 6] = [(512, 512), (320, 256), (576, 512), (264, 72), (384, 384), (64, 512)];

/// A program that differs between K/V heads.
const BY_KV_HEAD: &str = "array w: f32[_]; mask = (q + k + hk) % 3 != 0; score = s * w[hk];";

/// Case `turn` of a change of scores, whose lengths the host knows.
fn of(turn: usize, what: &'static str, own: ScoreMod, mask: Mask) -> Case {
    let (seqlen_q, seqlen_k) = [(200, 333), (256, 256), (130, 77), (1, 500), (64, 700)][turn % 5];
    let (head_dim, head_dim_v) = DIMS[turn % 6];
    let (heads_q, heads_kv) = [(4, 4), (6, 2), (4, 1)][turn % 3];
    let problem = BASE
        .with_lengths(Lengths::uniform(2, seqlen_q, seqlen_k))
        .with_heads(heads_q, heads_kv)
        .with_head_dims(head_dim, head_dim_v)
        .with_mask(mask)
        .with_types(Types::same(DTYPES[turn / 2 % 2]))
        .with_score(own);
    Case { what, ..case(WIDE_PROGRAMS, problem) }
}

/// Latents of so many query and K/V heads: of more than 64 heads a group is divided into parts.
fn latent(turn: usize, heads: (usize, usize), own: ScoreMod) -> Problem {
    of(turn, "", own, Mask::CAUSAL)
        .problem
        .with_head_dims(576, 512)
        .with_heads(heads.0, heads.1)
        .with_latent(true)
        .with_softmax_scale(Some(0.07))
}

/// All of them, in the order of the list of programs; then rows of the lowest number, what stands beside a
/// program, dropout, latents, and lengths on the device.
pub(super) fn wide_programs(repeat: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for (turn, (what, text, is_causal)) in PROGRAMS.into_iter().enumerate() {
        cases.push(of(turn, what, score(text), if is_causal { Mask::CAUSAL } else { Mask::FULL }));
    }
    for (turn, text) in LOWEST.into_iter().enumerate() {
        cases.push(of(turn, "lowest rows", score(text), [Mask::FULL, Mask::CAUSAL, Mask::FULL][turn]));
    }
    let capped = |own: ScoreMod| own.with_softcap(Some(20.0)).with_alibi(Some(Alibi::PerHead));
    let sinks = |index: usize| changed_by(index).1.with_sinks(true);
    cases.push(of(0, "documents beside a cap", capped(sinks(1)), Mask::CAUSAL));
    cases.push(of(1, "neighbours in a window", changed_by(7).1, Mask::window(90, 20)));
    cases.push(of(2, "sinks", sinks(8), Mask::FULL));
    cases.push(of(3, "sinks in a window", sinks(17), Mask::causal_window(130)));

    let bias = score("array bias: bf16[_, _, _]; mask = (q + k) % 5 != 0; score = s + bias[h, q, k];");
    cases.push(of(0, "dropout", dropped(ScoreMod::NONE, 0), Mask::FULL));
    cases.push(of(1, "dropout", dropped(ScoreMod::NONE, 1), Mask::CAUSAL));
    cases.push(of(2, "dropout beside a bias", dropped(bias, 2), Mask::FULL));
    cases.push(of(4, "dropout beside a cap", dropped(capped(ScoreMod::NONE), 3), Mask::CAUSAL));

    let tokens = |queries| Lengths::uniform(2, queries, 300);
    for (turn, (index, heads)) in
        [(0, (128, 1)), (1, (16, 1)), (8, (128, 1)), (12, (64, 1))].into_iter().enumerate()
    {
        let (what, own) = changed_by(index);
        let problem = latent(turn, heads, own).with_lengths(tokens(1 + turn));
        cases.push(Case { what, ..case(WIDE_PROGRAMS, problem) });
    }
    let divided = latent(1, (160, 2), score(BY_KV_HEAD)).with_lengths(tokens(3));
    cases.push(Case { what: "parts of two groups", ..case(WIDE_PROGRAMS, divided) });
    cases.extend(varied());
    cases.extend(on_codes());

    let base = |index: usize| of(0, PROGRAMS[index].0, changed_by(index).1, Mask::FULL);
    let mut whole = base(3);
    whole.problem = whole.problem.with_lengths(Lengths::uniform(2, 700, 700));
    cases.push(Case { action: Action::Repeat(repeat), ..whole });
    cases.push(Case { action: Action::Graph, ..base(0) });
    cases
}

/// Packed, in pages that TMA and threads load, and divided among CTAs.
fn varied() -> Vec<Case> {
    let packed = || {
        let (q, k) = ([70, 0, 200, 1], [90, 40, 200, 333]);
        Sequences { q: Ragged::packed(&q, 2), k: Ragged::packed(&k, 0) }
    };
    let mut cases = Vec::new();
    let mut add = |turn: usize, index: usize, sequences: Sequences, split: bool| {
        let (what, own) = changed_by(index);
        let problem = of(turn, what, own, Mask::CAUSAL).problem;
        cases.push(Case { split, ..case_of(WIDE_PROGRAMS, what, problem, sequences) });
    };
    for (turn, index) in [0, 2, 8, 13].into_iter().enumerate() {
        add(turn, index, packed(), false);
    }
    for (turn, (index, page)) in [(4, 16), (9, 64), (11, 3), (8, 1)].into_iter().enumerate() {
        let cache = pages_of(&[700, 33, 0, 250], page, 1);
        add(turn, index, Sequences { q: Ragged::uniform(4, 1 + turn), k: cache }, turn % 2 == 0);
    }
    let long = Sequences { q: Ragged::uniform(1, 1), k: Ragged::packed(&[9000], 0) };
    add(0, 6, long, true);
    let cache = Sequences { q: Ragged::uniform(3, 2), k: pages_of(&[300, 65, 500], 64, 1) };
    let problem = latent(0, (128, 1), changed_by(4).1);
    cases.push(case_of(WIDE_PROGRAMS, "padding of latents", problem, cache));
    cases
}

/// Programs beside K and V in codes, by their places in the list.
const ON_CODES: [(usize, &str); 7] = [
    (1, "documents on codes"),
    (4, "padding on codes"),
    (6, "stripes on codes"),
    (8, "bias on codes"),
    (9, "shared bias on codes"),
    (12, "cap on codes"),
    (13, "gain on codes"),
];

/// Heads apart and latents, of lengths that the host knows and in pages, whole and divided among CTAs.
fn on_codes() -> Vec<Case> {
    let mut cases = Vec::new();
    for (turn, (index, what)) in ON_CODES.into_iter().enumerate() {
        let own = changed_by(index).1;
        let apart = of(turn % 2, "", own, [Mask::CAUSAL, Mask::FULL][turn / 2 % 2]).problem;
        let latent = latent(turn, [(16, 1), (128, 1)][turn % 2], own);
        for (problem, turn) in [(apart, turn), (latent, turn + 1)] {
            let problem = coded(turn, problem);
            let cache = pages_of(&[700, 33, 0, 250], [64, 1, 16][turn % 3], turn as u64);
            let tokens = Sequences { q: Ragged::uniform(4, 1 + turn % 2), k: cache };
            if turn % 2 == 0 {
                cases.push(Case { split: turn % 4 == 0, ..case_of(WIDE_PROGRAMS, what, problem, tokens) });
            } else {
                let lengths = Lengths::uniform(2, [130, 3, 64][turn % 3], 333);
                cases.push(Case { what, ..case(WIDE_PROGRAMS, problem.with_lengths(lengths)) });
            }
        }
    }
    cases
}
