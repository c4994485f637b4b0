//! Sequences of different lengths: packed end to end, and used in part.

use fa_core::{Dtype, Mask, Problem, Types};

use super::case::{Action, Arrangement, BASE, Case, Extent, MASKS, Values, case_of};
use crate::random::Random;
use crate::sequences::{Ragged, Sequences};

/// Head dims, query and K/V heads, type.
type Width = ((usize, usize), (usize, usize), Dtype);

/// Head dims, heads and types that cases cycle through: tiles of every width, groups that are packed into
/// rows and not. Each width has one type, since each pair is a kernel to compile for every mask and way to
/// read rows.
const WIDTHS: [Width; 8] = [
    ((128, 128), (4, 4), Dtype::Bf16),
    ((64, 64), (8, 1), Dtype::Bf16),
    ((256, 256), (2, 2), Dtype::F16),
    ((128, 128), (8, 2), Dtype::Bf16),
    ((192, 128), (3, 3), Dtype::Bf16),
    ((72, 40), (6, 3), Dtype::F16),
    ((128, 128), (6, 1), Dtype::Bf16),
    ((64, 64), (4, 2), Dtype::Bf16),
];

/// The masks that cases cycle through.
pub(super) const ALL_MASKS: [Mask; 4] =
    [Mask::CAUSAL, Mask::FULL, Mask::causal_window(70), Mask::window(40, 11)];

/// The problem of turn `turn`: width, heads and type; its lengths are those of the sequences.
pub(super) fn turned(turn: usize, mask: Mask) -> Problem {
    let ((head_dim, head_dim_v), (heads_q, heads_kv), dtype) = WIDTHS[turn % WIDTHS.len()];
    let types = Types::same(dtype);
    BASE.with_heads(heads_q, heads_kv).with_head_dims(head_dim, head_dim_v).with_mask(mask).with_types(types)
}

/// Queries and keys of each sequence.
pub(super) type Lens = (&'static str, Vec<usize>, Vec<usize>);

/// Lists of lengths: drawn, uneven, at the edges of tiles, and with nothing on one side or both.
pub(super) fn lengths() -> Vec<Lens> {
    let mut random = Random::new(15);
    let mut drawn =
        |count: usize, most: usize| -> Vec<usize> { (0..count).map(|_| random.below(most)).collect() };
    let edges = vec![127, 128, 129, 63, 64, 65, 1, 191, 255];
    let reversed = |lens: &[usize]| lens.iter().rev().copied().collect::<Vec<_>>();
    let uneven = vec![1500, 700, 300, 128, 64, 77, 1, 0, 33];
    vec![
        ("drawn", drawn(9, 400), drawn(9, 500)),
        ("alike", drawn(7, 600), Vec::new()),
        ("uneven", uneven.clone(), Vec::new()),
        ("uneven, other keys", uneven.clone(), reversed(&uneven)),
        ("edges", edges.clone(), reversed(&edges)),
        ("one", vec![515], vec![515]),
        ("one long", vec![1], vec![1111]),
        ("no queries in some", vec![0, 0, 5, 0, 130, 0], vec![7, 300, 9, 0, 1, 64]),
        ("no keys in some", vec![7, 300, 9, 0, 1, 64], vec![0, 0, 5, 0, 130, 0]),
        ("nothing at all", vec![0, 0, 0], vec![0, 0, 0]),
        ("no query at all", vec![0, 0, 0], vec![3, 200, 0]),
        ("no key at all", vec![3, 200, 0], vec![0, 0, 0]),
        ("fewer queries than sequences", vec![1, 0, 0, 0, 1, 0, 0, 0], drawn(8, 300)),
        ("tokens", vec![1; 40], drawn(40, 200)),
    ]
    .into_iter()
    .map(|(what, q, k)| if k.is_empty() { (what, q.clone(), q) } else { (what, q, k) })
    .collect()
}

/// Sequences of `q` and `k` rows end to end, with rows of no sequence behind and a bound that is not tight on
/// every other turn.
pub(super) fn packed_of(q: &[usize], k: &[usize], turn: usize) -> Sequences {
    let behind = if turn.is_multiple_of(2) { 0 } else { 37 };
    let side = |lens: &[usize]| {
        let rows = Ragged::packed(lens, behind);
        let max = rows.side().max();
        rows.bounded(if turn.is_multiple_of(2) { max.max(1) } else { max + 100 })
    };
    Sequences { q: side(q), k: side(k) }
}

/// Packed batches.
pub(super) fn packed(extent: Extent, repeat: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for (index, (what, q, k)) in lengths().into_iter().enumerate() {
        let turns = if extent == Extent::Full { 4 } else { 2 };
        for (turn, mask) in ALL_MASKS.into_iter().cycle().skip(index % 2).take(turns).enumerate() {
            let turn = index + 3 * turn;
            let case = case_of("packed", what, turned(turn, mask), packed_of(&q, &k, turn));
            let arrangement = [Arrangement::Bshd, Arrangement::Bshd, Arrangement::Bhsd, Arrangement::Gap(8)];
            cases.push(Case { arrangement: arrangement[turn % 4], ..case });
        }
    }
    for (values, mask) in [Values::Rising, Values::Falling, Values::Sharp].into_iter().zip(ALL_MASKS) {
        let lens = [300, 1, 700, 129];
        let case = case_of("packed", "values", turned(0, mask), packed_of(&lens, &lens, 1));
        cases.push(Case { values, ..case });
    }
    cases.extend(many(extent));
    let lens = [700, 33, 0, 250, 1, 128];
    for mask in MASKS {
        let case = || case_of("packed", "launch", turned(3, mask), packed_of(&lens, &lens, 1));
        for action in [Action::Repeat(repeat), Action::Graph, Action::OwnStream, Action::Threads] {
            cases.push(Case { action, ..case() });
        }
        cases.push(Case { action: Action::Relength, ..case() });
        // One sequence is what a dense kernel computes.
        for (turn, (q, k)) in [(515, 515), (300, 777), (1, 900)].into_iter().enumerate() {
            let one = case_of("packed", "one sequence", turned(turn, mask), packed_of(&[q], &[k], 0));
            cases.push(Case { action: Action::AsDense, ..one });
        }
    }
    cases
}

/// Batches of many sequences: beyond a warp, a CTA's threads and what 16 bits count.
fn many(extent: Extent) -> Vec<Case> {
    let batches: &[usize] = match extent {
        Extent::Emulated | Extent::Quick => &[33, 1025, 8300],
        Extent::Full => &[31, 32, 33, 255, 993, 1024, 1025, 4096, 8300],
    };
    let mut cases = Vec::new();
    for (turn, &batch) in batches.iter().enumerate() {
        let mut random = Random::new(batch as u64);
        let mut lens = |most: usize| (0..batch).map(|_| random.below(most)).collect::<Vec<usize>>();
        let (q, k) = (lens(if batch > 1000 { 12 } else { 60 }), lens(if batch > 1000 { 40 } else { 150 }));
        let narrow = turned(turn % 2, MASKS[turn % 2]).with_heads(2, 1);
        cases.push(case_of("packed", "many", narrow, packed_of(&q, &k, turn)));
    }
    cases
}

/// Sequences that use a part of their slots: padded batches, and packed slots.
pub(super) fn used(extent: Extent) -> Vec<Case> {
    let room = |lens: &[usize]| lens.iter().copied().max().unwrap_or(0) + 19;
    let slots = |lens: &[usize]| lens.iter().map(|len| len + len % 23).collect::<Vec<usize>>();
    let mut cases = Vec::new();
    for (index, (what, q, k)) in lengths().into_iter().enumerate() {
        if q.len() == 40 || extent == Extent::Quick && index % 2 == 1 {
            continue;
        }
        let mask = ALL_MASKS[index % 4];
        let sides = [
            // Keys of a cache, of which each sequence has filled a part, and full queries.
            (Ragged::uniform(k.len(), 20), Ragged::padded(&k, room(&k))),
            (Ragged::padded(&q, room(&q)), Ragged::padded(&k, room(&k))),
            (Ragged::packed(&q, 5), Ragged::padded(&k, room(&k))),
            (Ragged::packed_in(&q, &slots(&q), 3), Ragged::packed_in(&k, &slots(&k), 40)),
        ];
        for (turn, (q, k)) in sides.into_iter().enumerate() {
            let turn = index + turn;
            let case = case_of("used", what, turned(turn, mask), Sequences { q, k });
            let arrangement = [Arrangement::Bshd, Arrangement::Bhsd, Arrangement::Gap(8)][turn % 3];
            cases.push(Case { arrangement, ..case });
        }
    }
    let lens = [700, 33, 0, 250, 1, 128];
    let sequences = || Sequences { q: Ragged::uniform(6, 70), k: Ragged::padded(&lens, 720) };
    for mask in MASKS {
        let case = case_of("used", "launch", turned(3, mask), sequences());
        cases.push(Case { action: Action::Relength, ..case });
    }
    cases
}
