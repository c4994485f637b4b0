//! Masks and changes of scores of the caller's own: those that have a face of their own, and formulas.

use fa_core::program::Program;
use fa_core::{Lengths, Mask, Pass, Problem, ScoreMod, Types};

use super::case::{Action, BASE, Case, DTYPES, case, case_of};
use super::paged::pages_of;
use crate::sequences::{Ragged, Sequences};

/// What it is, its text, and whether the causal mask joins it.
pub(super) const PROGRAMS: [(&str, &str, bool); 20] = [
    (
        "rows",
        "array first: i32[_, _, _]; array last: i32[_, _]; mask = first[b, h, q] <= k and k < last[b, q];",
        false,
    ),
    ("documents", "array start: i32[_, _]; mask = start[b, q] <= k;", true),
    ("chunk", "mask = (q + off) // 100 == k // 100;", true),
    ("bits", "array keep: bits[_, _, _]; mask = keep[b, q, k];", false),
    ("padding", "array keep: bool[_, _]; mask = keep[b, k];", false),
    ("prefix", "array prefix: i32[_]; mask = k < prefix[b] or k <= q + off;", false),
    ("stripes", "mask = (q - k) % 4 == 0;", true),
    ("neighbours", "mask = abs(q % 16 - k % 16) <= 3 and abs(q // 16 - k // 16) <= 3;", false),
    ("bias", "array bias: bf16[_, _, _, _]; score = s + bias[b, h, q, k];", false),
    ("shared bias", "array bias: f32[_, _, _]; score = s + bias[h, q, k];", true),
    ("key bias", "array bias: f16[_, _]; score = s + bias[h, k];", false),
    ("table", "array t: f32[_, _]; score = s + t[h, min(max(q - k, 0), 31)];", true),
    ("cap", "scalar c: f32; score = c * tanh(s / c);", true),
    ("gain", "array w: f32[_]; score = s * w[h] - 0.0625 * f32(abs(q + off - k));", false),
    ("distances", "array t: f32[_, _]; score = s + t[h, q - k + sk];", true),
    ("opposite distances", "array t: bf16[_]; mask = (q + k) % 7 != 0; score = 2.0 * s - t[k - q];", false),
    ("wide bias", "array bias: f32[_, _, _]; score = s + tanh(bias[b, h, k]) + bias[b, q // 2, k];", false),
    // The lowest number as in masks of transformers, which hides no key where a row has nothing else.
    (
        "lowest keys",
        "array bias: f32[_, _]; score = s + select(k % 3 == 1, -3.4028235e38, select(k % 7 == 2, -inf, \
         bias[h, k]));",
        false,
    ),
    ("blocks", "array blocks: u8[_, _, _]; mask = blocks[h, q // 64, k // 48] % 3 == 1;", false),
    ("blocks of bits", "array blocks: bits[_, _]; mask = blocks[(q >> 4) >> 1, k // 32];", true),
];

/// Rows of nothing but the lowest number, by a program with rows, with pairs, and one that is not additive.
/// Their gradients are not defined, as those of [`super::case::Values::Lowest`].
pub(super) const LOWEST_ROWS: &str = "lowest rows";
pub(super) const LOWEST: [&str; 3] = [
    "score = s + select(q % 5 == 3, -3.4028235e38, 0.0);",
    "array bias: f32[_, _]; score = s + select(q % 5 == 3, -3.4028235e38, select(k % 7 == 2, -inf, \
     bias[q, k]));",
    "score = select(q % 5 == 3, -3.4028235e38, select(k % 7 == 2, -inf, tanh(s)));",
];

/// The change of scores of a text.
pub(super) fn score(text: &str) -> ScoreMod {
    let program = Program::parse(text).ok().and_then(|program| program.intern().ok());
    ScoreMod::NONE.with_program(Some(program.expect("the grid's programs are programs")))
}

/// Program `index` of the list: what it is, and the change of scores.
pub(super) fn changed_by(index: usize) -> (&'static str, ScoreMod) {
    let (what, text, _) = PROGRAMS[index];
    (what, score(text))
}

/// Of lengths that the host knows.
pub(super) fn programs(repeat: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    let lengths = [(200, 333), (256, 256), (130, 77), (1, 500)];
    let dims = [(128, 128), (64, 64), (96, 96), (256, 256), (192, 128), (32, 32)];
    let heads = [(4, 4), (6, 2), (4, 1)];
    for (turn, (what, text, is_causal)) in PROGRAMS.into_iter().enumerate() {
        for step in 0..2 {
            let (seqlen_q, seqlen_k) = lengths[(turn + step) % 4];
            let (head_dim, head_dim_v) = dims[(turn + 3 * step) % 6];
            let (heads_q, heads_kv) = heads[(turn + step) % 3];
            let problem = BASE
                .with_lengths(Lengths::uniform(2, seqlen_q, seqlen_k))
                .with_heads(heads_q, heads_kv)
                .with_head_dims(head_dim, head_dim_v)
                .with_mask(if is_causal { Mask::CAUSAL } else { Mask::FULL })
                .with_types(Types::same(DTYPES[(turn + step) % 2]))
                .with_score(score(text));
            cases.push(Case { what, ..case("programs", problem) });
        }
    }
    for (turn, text) in LOWEST.into_iter().enumerate() {
        let (head_dim, head_dim_v) = dims[turn];
        let problem = BASE
            .with_lengths(Lengths::uniform(1, 130, 300))
            .with_head_dims(head_dim, head_dim_v)
            .with_mask(if turn == 1 { Mask::CAUSAL } else { Mask::FULL })
            .with_types(Types::same(DTYPES[turn % 2]))
            .with_score(score(text));
        cases.push(Case { what: LOWEST_ROWS, ..case("programs", problem) });
    }
    let whole = of(3).with_lengths(Lengths::uniform(2, 700, 700));
    cases.push(Case { action: Action::Repeat(repeat), what: "bits", ..case("programs", whole) });
    cases.push(Case { action: Action::Graph, what: "rows", ..case("programs", of(0)) });
    cases
}

fn of(index: usize) -> Problem {
    BASE.with_head_dims(64, 64).with_mask(Mask::FULL).with_score(score(PROGRAMS[index].1))
}

/// Gradients of arrays, whose text and heads these are: by what a bias is broadcast over, with masks that
/// leave tiles empty, and of a change that is not additive.
const GRADIENTS: [(&str, &str, (usize, usize)); 7] = [
    ("dbias", "array bias: bf16[_, _, _, _] grad; score = s + bias[b, h, q, k];", (4, 4)),
    ("dbias of heads", "array bias: f32[_, _, _] grad; score = s + bias[h, q, k];", (6, 2)),
    ("dbias of pairs", "array bias: f16[_, _] grad; score = s + bias[q, k];", (4, 1)),
    ("dbias of keys", "array bias: f32[_, _] grad; score = s + bias[b, k];", (4, 4)),
    (
        "dbias of queries",
        "array bias: f32[_, _] grad; mask = k % 3 != 1; score = 2.0 * s + bias[hk, q];",
        (6, 2),
    ),
    ("dgain", "array gain: f32[_] grad; score = s * gain[h];", (4, 2)),
    (
        "masked dbias",
        "array bias: bf16[_, _, _] grad; mask = q // 96 == k // 96; score = s + bias[h, q, k];",
        (2, 2),
    ),
];

/// The gradients of arrays.
pub(super) fn array_gradients(repeat: usize) -> Vec<Case> {
    let lengths = [(200, 333), (256, 256), (130, 77)];
    let dims = [(64, 64), (128, 128), (96, 96)];
    let mut cases = Vec::new();
    for (turn, (what, text, (heads_q, heads_kv))) in GRADIENTS.into_iter().enumerate() {
        let ((seqlen_q, seqlen_k), (head_dim, head_dim_v)) = (lengths[turn % 3], dims[turn % 3]);
        let problem = BASE
            .with_lengths(Lengths::uniform(2, seqlen_q, seqlen_k))
            .with_heads(heads_q, heads_kv)
            .with_head_dims(head_dim, head_dim_v)
            .with_mask(if turn % 2 == 0 { Mask::CAUSAL } else { Mask::FULL })
            .with_types(Types::same(DTYPES[turn % 2]))
            .with_score(score(text));
        let pass = Pass::Backward { deterministic: turn % 3 == 0 };
        let action = if turn == 3 { Action::Repeat(repeat) } else { Action::Once };
        cases.push(Case { action, what, pass, ..case("programs", problem) });
    }
    cases
}

/// Of lengths on the device: packed, in pages, and divided among CTAs.
pub(super) fn varied_programs() -> Vec<Case> {
    let (q, k) = (vec![70, 0, 200, 1], vec![90, 40, 200, 333]);
    let packed = || Sequences { q: Ragged::packed(&q, 2), k: Ragged::packed(&k, 0) };
    let mut cases: Vec<Case> =
        [0, 2, 4, 8, 13].map(|i| case_of("programs", PROGRAMS[i].0, of(i), packed())).into();
    let cache = [700, 33, 0, 250];
    for (i, page) in [(4, 16), (9, 64), (11, 3)] {
        let sequences = Sequences { q: Ragged::uniform(4, 1), k: pages_of(&cache, page, 1) };
        let problem = of(i).with_heads(8, 2);
        cases.push(case_of("programs", PROGRAMS[i].0, problem, sequences));
    }
    let long = Sequences { q: Ragged::uniform(1, 1), k: Ragged::packed(&[9000], 0) };
    cases.push(Case { split: true, ..case_of("programs", "split", of(6), long) });
    cases
}
