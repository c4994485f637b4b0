//! Dropout: alone, beside masks, biases with gradients, caps and ALiBi, in both passes.

use fa_core::{Alibi, Dropout, Lengths, Mask, Pass, Problem, ScoreMod, Types};

use super::case::{Action, BASE, Case, DTYPES, case, case_of};
use super::programs::score;
use crate::sequences::{Ragged, Sequences};

/// Dropout of some scores, with bits that differ from turn to turn.
pub(super) fn dropped(score: ScoreMod, turn: usize) -> ScoreMod {
    let p = [0.1, 0.5, 0.2][turn % 3];
    let made = Dropout::new(p, 0x0123_4567_89ab_cdef ^ turn as u64, 40 * turn as u64);
    made.and_then(|dropout| dropout.of(score)).expect("the grid's probabilities are probabilities")
}

/// What joins it, and the mask. Gradients of arrays are a backward's.
fn scores(gradient: &str) -> [(&'static str, ScoreMod, Mask); 6] {
    let bias =
        format!("array bias: bf16[_, _, _] {gradient}; mask = (q + k) % 5 != 0; score = s + bias[h, q, k];");
    [
        ("alone", ScoreMod::NONE, Mask::FULL),
        ("causal", ScoreMod::NONE, Mask::CAUSAL),
        ("window", ScoreMod::NONE, Mask::window(90, 0)),
        ("bias", score(&bias), Mask::FULL),
        ("cap", score("scalar c: f32; score = c * tanh(s / c);"), Mask::CAUSAL),
        ("softcap", ScoreMod::softcap(20.0).with_alibi(Some(Alibi::PerHead)), Mask::CAUSAL),
    ]
}

fn problems(gradient: &str) -> Vec<(&'static str, Problem)> {
    let lengths = [(200, 333), (256, 256), (130, 77)];
    let dims = [(128, 128), (64, 64), (96, 96), (256, 256)];
    let heads = [(4, 4), (6, 2), (4, 1)];
    let all = scores(gradient).into_iter().enumerate().flat_map(|(turn, (what, score, mask))| {
        (0..2).map(move |step| {
            let (seqlen_q, seqlen_k) = lengths[(turn + step) % 3];
            let (head_dim, head_dim_v) = dims[(turn + 2 * step) % 4];
            let (heads_q, heads_kv) = heads[(turn + step) % 3];
            let problem = BASE
                .with_lengths(Lengths::uniform(2, seqlen_q, seqlen_k))
                .with_heads(heads_q, heads_kv)
                .with_head_dims(head_dim, head_dim_v)
                .with_mask(mask)
                .with_types(Types::same(DTYPES[(turn + step) % 2]))
                .with_score(dropped(score, turn + step));
            (what, problem)
        })
    });
    all.collect()
}

/// Forwards.
pub(super) fn dropout(repeat: usize) -> Vec<Case> {
    let mut cases: Vec<Case> =
        problems("").into_iter().map(|(what, problem)| Case { what, ..case("dropout", problem) }).collect();
    let whole = of(0).with_lengths(Lengths::uniform(2, 700, 700));
    cases.push(Case { action: Action::Repeat(repeat), what: "alone", ..case("dropout", whole) });
    cases
}

fn of(turn: usize) -> Problem {
    BASE.with_head_dims(64, 64).with_mask(Mask::CAUSAL).with_score(dropped(ScoreMod::NONE, turn))
}

/// Backwards beside those of [`dropout`]: with the gradient of a bias, and the same bits in every run.
pub(super) fn dropout_gradients(repeat: usize) -> Vec<Case> {
    let pass = Pass::Backward { deterministic: true };
    let biased = problems("grad").into_iter().filter(|(what, _)| *what == "bias");
    let mut cases: Vec<Case> =
        biased.map(|(what, problem)| Case { what, pass, ..case("dropout", problem) }).collect();
    cases.push(Case { action: Action::Repeat(repeat), what: "causal", pass, ..case("dropout", of(1)) });
    cases
}

/// Packed sequences.
pub(super) fn varied_dropout() -> Vec<Case> {
    let (q, k) = (vec![70, 0, 200, 1], vec![90, 40, 200, 333]);
    let packed = || Sequences { q: Ragged::packed(&q, 2), k: Ragged::packed(&k, 0) };
    let names = ["packed", "packed, a half", "packed, a fifth"].into_iter().enumerate();
    names.map(|(turn, what)| case_of("dropout", what, of(turn), packed())).collect()
}
