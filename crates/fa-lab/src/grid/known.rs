//! Problems on which other libraries hung, failed or were wrong, each by the number of its report in
//! FlashAttention's tracker (or PyTorch's).

use fa_core::{Lengths, Mask, Problem};

use super::case::{Action, BASE, Case, case, case_of};
use super::paged::pages_of;
use crate::random::Random;
use crate::sequences::{Ragged, Sequences};

fn packed(what: &'static str, problem: Problem, q: &[usize], k: &[usize]) -> Case {
    let sequences = Sequences { q: Ragged::packed(q, 0), k: Ragged::packed(k, 0) };
    case_of("known", what, problem, sequences)
}

/// Problems of the forward, and problems whose gradients failed as well.
pub(super) fn known() -> Vec<Case> {
    let grouped = BASE.with_heads(8, 2);
    let wide = BASE.with_head_dims(256, 256).with_heads(2, 2);
    let mut random = Random::new(2550);
    let mut drawn =
        |count: usize, most: usize| (0..count).map(|_| 1 + random.below(most)).collect::<Vec<usize>>();
    let mut cases = vec![
        packed("1254: a sequence without queries hangs the backward", BASE, &[0, 100, 0], &[64, 100, 300]),
        packed("2562: a sequence without queries at head dim 256", wide, &[64, 0, 200], &[64, 128, 200]),
        packed("2568: the first sequence is empty at head dim 256", wide, &[0, 130], &[0, 130]),
        packed("1537: sequences without queries among single ones", BASE, &[1, 0, 1, 0], &[9, 70, 300, 1]),
        packed(
            "1619: fewer queries than sequences, grouped heads",
            grouped,
            &[1, 0, 0, 0, 0],
            &[5, 60, 1, 90, 7],
        ),
        packed("2470: sequences without keys", BASE, &[64, 100, 3], &[0, 100, 0]),
        packed("2515: no queries at all", BASE, &[0, 0], &[100, 3]),
        case("known", BASE.with_lengths(Lengths::uniform(2, 0, 128))),
        case("known", BASE.with_lengths(Lengths::uniform(2, 128, 0))),
        packed("2470: no keys at all, grouped heads", grouped, &[30, 0, 2], &[0, 0, 0]),
    ];
    // Rows behind the last sequence hold NaN, in inputs and in gradients: they are neither read nor written.
    for problem in [BASE, grouped, BASE.with_mask(Mask::FULL)] {
        let lens = [100, 7, 193];
        let sequences = Sequences { q: Ragged::packed(&lens, 150), k: Ragged::packed(&lens, 150) };
        cases.push(case_of("known", "1661: rows behind the last sequence", problem, sequences));
        let slots = [128, 64, 256];
        let sequences =
            Sequences { q: Ragged::packed_in(&lens, &slots, 64), k: Ragged::packed_in(&lens, &slots, 64) };
        cases.push(case_of("known", "2167: rows behind those in use", problem, sequences));
    }
    // A preprocess that pads to other tiles than the backward: offsets are wrong from the second on.
    let lens = [65, 129, 1, 191, 64, 127];
    cases.push(packed("tiles of the preprocess: offsets of later sequences", BASE, &lens, &lens));
    cases.push(packed("tiles of the preprocess, grouped heads", grouped, &lens, &lens));
    // The problem has bounds, not lengths: a kernel is bound once for all of them.
    for max in [300, 301, 4096] {
        let rows = || Ragged::packed(&[300, 20], 0).bounded(max);
        let sequences = Sequences { q: rows(), k: rows() };
        cases.push(case_of("known", "2762: another bound", BASE, sequences));
    }
    let lens = drawn(12, 900);
    let q = || Ragged::packed(&[1, 3, 1, 1, 2, 1, 1, 4, 1, 1, 1, 5], 0);
    let paged = Sequences { q: q(), k: pages_of(&lens, 16, 2550) };
    cases.push(Case { split: true, ..case_of("known", "2550: packed, paged and split", grouped, paged) });
    let plain = Sequences { q: q(), k: Ragged::padded(&lens, 1000) };
    cases.push(Case { split: true, ..case_of("known", "2793: packed queries on a cache", grouped, plain) });
    // Tiles times heads exceed 2^31 if a bound is taken for a length.
    let bound = |lens: &[usize]| Ragged::packed(lens, 0).bounded(1 << 24);
    let long = Sequences { q: bound(&[70, 3]), k: bound(&[70, 300]) };
    cases.push(case_of("known", "2662: a bound of 2^24 rows", grouped, long));
    let repeated = packed("races of single queries", BASE, &[1; 64], &drawn(64, 200));
    cases.push(Case { action: Action::Repeat(100), ..repeated });
    cases
}
