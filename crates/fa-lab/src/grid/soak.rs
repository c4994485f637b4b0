//! Random problems, reproducible by their seed.

use fa_core::{Alibi, DescaleForm, Descales, Dtype, Family, Lengths, Mask, Pass, Problem, ScoreMod, Types};
use fa_planner::plan::head_dims;

use super::case::{self, Action, Arrangement, Case, Values, case_of};
use super::paged::PAGES;
use crate::random::Random;
use crate::sequences::{Ragged, Sequences, Store};

/// Problem number `turn` of the sequence of `seed` with its gradients: fewer heads, and every other one
/// deterministic.
pub fn gradients(seed: u64, turn: u64, family: Family) -> Case {
    let mut case = in_16_bits(seed, turn, family);
    let (group, heads_kv) = (case.problem.group_size().min(4), case.problem.heads_kv.min(2));
    (case.problem.heads_q, case.problem.heads_kv) = (group * heads_kv, heads_kv);
    // Keys in pages have no gradients.
    if case.problem.lengths.page().is_some() {
        let k = case.sequences().k.contiguous();
        let sequences = Sequences { k, ..case.sequences() };
        case.problem.lengths = sequences.lengths();
        case.sequences = Some(sequences);
    }
    if case.action == Action::Relength {
        case.action = Action::Once;
    }
    let deterministic = turn / 2 % 2 == 1 || case.action != Action::Once;
    Case { pass: Pass::Backward { deterministic }, ..case }
}

/// Problem number `turn` of the sequence of `seed`, for kernels of `family`: every second one has different
/// lengths, pages, slopes or sinks, or several of these. Of families that compute them some have K and V in
/// 8 bits, some Q as well, and some keys that begin with their values.
pub fn case(seed: u64, turn: u64, family: Family) -> Case {
    let case = in_16_bits(seed, turn, family);
    let random = &mut Random::new(seed.wrapping_mul(0xc2b2_ae35) ^ turn);
    random.bits();
    match (family, random.below(8)) {
        (Family::Sm80 | Family::Sm90, 0 | 1) => with_codes(case, random),
        (Family::Sm90, 2) => in_fp8(case, random),
        (Family::Sm90, 3) => latent(random),
        (Family::Sm80 | Family::Sm90 | Family::Sm100, _) => case,
    }
}

/// `case` with rows of codes of this type: of whole 16 bytes, and each in its own place.
fn of_bytes(case: Case, dtype: Dtype) -> Case {
    let whole = 16 * dtype.per_element();
    let [head_dim, head_dim_v] =
        [case.problem.head_dim, case.problem.head_dim_v].map(|dim| dim.next_multiple_of(whole));
    let is_apart = matches!(case.arrangement, Arrangement::Bshd | Arrangement::Bhsd | Arrangement::Gap(_));
    let arrangement = if is_apart { case.arrangement } else { Arrangement::Bhsd };
    Case { arrangement, problem: case.problem.with_head_dims(head_dim, head_dim_v), ..case }
}

/// `case` with K and V in codes.
fn with_codes(case: Case, random: &mut Random) -> Case {
    let kv = random.of(&Dtype::CODES);
    let case = of_bytes(case, kv);
    let forms = [DescaleForm::None, DescaleForm::Head, DescaleForm::SequenceHead, DescaleForm::TokenHead];
    let descales = Descales::new(random.of(&forms), random.of(&forms));
    let types = case.problem.types.with_kv(kv);
    Case { problem: case.problem.with_types(types).with_descales(descales), ..case }
}

/// `case` with Q, K and V in e4m3.
fn in_fp8(case: Case, random: &mut Random) -> Case {
    let case = of_bytes(case, Dtype::E4m3);
    let form = random.of(&[DescaleForm::None, DescaleForm::Head, DescaleForm::SequenceHead]);
    let problem = case.problem.with_types(Types::fp8(Dtype::Bf16)).with_descales(Descales::all(form));
    let action = if case.action == Action::Relength { Action::Once } else { case.action };
    Case { values: Values::Normal, action, problem, ..case }
}

/// A few queries on a cache of latent rows, in pages or in one piece.
fn latent(random: &mut Random) -> Case {
    let batch = random.of(&[1, 2, 5, 12]);
    let most = 1 + random.below(12_000 / batch);
    let lens: Vec<usize> = (0..batch).map(|_| random.below(most + 1)).collect();
    let queries = random.of(&[1, 1, 2, 4]);
    let k = match random.below(3) {
        0 => Ragged::padded(&lens, most),
        _ => {
            let (page, spare) = (random.of(&PAGES), random.below(5));
            Ragged::paged(&lens, page, spare, random)
        }
    };
    let dims = random.of(&[(576, 512), (576, 512), (512, 512), (320, 256)]);
    let problem = case::BASE
        .with_heads(random.of(&[8, 16, 32, 64, 128]), 1)
        .with_head_dims(dims.0, dims.1)
        .with_latent(true)
        .with_softmax_scale(Some(1.0 / f64::from(dims.0 as u32).sqrt()))
        .with_types(Types::same(random.of(&[Dtype::Bf16, Dtype::F16])))
        .with_mask(random.of(&[Mask::CAUSAL, Mask::FULL]));
    let action = random.of(&[Action::Once, Action::Once, Action::Once, Action::Repeat(20)]);
    let sequences = Sequences { q: Ragged::uniform(batch, queries), k };
    Case { action, ..case_of("soak", "", problem, sequences) }
}

/// Problem number `turn` of the sequence of `seed` in 16 bits.
fn in_16_bits(seed: u64, turn: u64, family: Family) -> Case {
    if turn.is_multiple_of(2) {
        return dense(seed, turn / 2, family);
    }
    varied(dense(seed, turn, family), &mut Random::new(seed.wrapping_mul(0x85eb_ca6b) ^ turn))
}

/// `case` with different lengths and layouts of its sequences.
fn varied(case: Case, random: &mut Random) -> Case {
    random.bits();
    let most_sequences = random.of(&[1, 4, 12, 40, 300]);
    let batch = 1 + random.below(most_sequences);
    let most = case.problem.lengths.max_q().max(case.problem.lengths.max_k()).clamp(1, 40_000 / batch + 1);
    let lens = |random: &mut Random| -> Vec<usize> {
        let of = |random: &mut Random| match random.below(8) {
            0 => 0,
            1 => 1,
            2 => 64 * random.below(most / 64 + 1),
            _ => random.below(most + 1),
        };
        (0..batch).map(|_| of(random)).collect()
    };
    let decodes = random.below(3) == 0;
    let (q_lens, k_lens) = (lens(random), lens(random));
    let q = match (decodes, random.below(4)) {
        (true, 0) => Ragged::packed(&vec![1 + random.below(16); batch], random.below(9)),
        (true, _) => Ragged::uniform(batch, 1 + random.below(16)),
        (false, 0) => Ragged::padded(&q_lens, most + random.below(9)),
        (false, 1) => Ragged::packed_in(&q_lens, &slots(&q_lens, random), random.below(40)),
        (false, _) => Ragged::packed(&q_lens, random.below(40)),
    };
    let k = match random.below(5) {
        0 => Ragged::padded(&k_lens, most + random.below(9)),
        1 => Ragged::packed_in(&k_lens, &slots(&k_lens, random), random.below(40)),
        2 => Ragged::packed(&k_lens, random.below(40)),
        _ => {
            let (page, spare) = (random.of(&PAGES), random.below(5));
            Ragged::paged(&k_lens, page, spare, random)
        }
    };
    let looser = |rows: Ragged, random: &mut Random| {
        if matches!(rows.store(), Store::Padded { .. }) {
            return rows;
        }
        let max = rows.side().max();
        rows.bounded(max + random.below(3) * random.below(300))
    };
    let sequences = Sequences { q: looser(q, random), k: looser(k, random) };
    let score = case
        .problem
        .score
        .with_alibi((random.below(4) == 0).then(|| random.of(&[Alibi::PerHead, Alibi::PerSequenceHead])))
        .with_sinks(random.below(3) == 0);
    let is_shared = matches!(case.arrangement, Arrangement::SharedBatch | Arrangement::SharedHeads);
    let arrangement = if is_shared { Arrangement::Gap(8) } else { case.arrangement };
    let values = if arrangement == case.arrangement { case.values } else { Values::Normal };
    let action = match (case.action, random.below(12)) {
        (Action::Once, 0) => Action::Relength,
        (action, _) => action,
    };
    let problem = case.problem.with_score(score);
    Case { arrangement, values, action, ..case_of("soak", "", problem, sequences) }
}

/// Slots for sequences, some of them larger than the sequence.
fn slots(lens: &[usize], random: &mut Random) -> Vec<usize> {
    lens.iter().map(|len| len + random.below(3) * random.below(30)).collect()
}

/// Problem number `turn` of the sequence of `seed` of lengths that the host knows.
fn dense(seed: u64, turn: u64, family: Family) -> Case {
    let mut random = Random::new(seed.wrapping_mul(0x9e37_79b9) ^ turn);
    // The first few bits of neighbouring seeds differ already, but not independent of the turn.
    random.bits();
    let most = *head_dims(family).last().expect("a family has head dims") as usize;
    let common = [64, 96, 128, 192, 256];
    let head_dim = if random.below(3) > 0 { random.of(&common) } else { 8 * (1 + random.below(most / 8)) };
    let head_dim_v = match random.below(4) {
        0 => random.of(&common),
        1 => 8 * (1 + random.below(most / 8)),
        _ => head_dim,
    };
    let length = |random: &mut Random| match random.below(8) {
        0 => random.below(4),
        1 | 2 => 1 + random.below(64),
        3 | 4 => 64 * (1 + random.below(16)) - 1 + random.below(3),
        _ => 1 + random.below(2500),
    };
    let (seqlen_q, seqlen_k) = (length(&mut random), length(&mut random));
    let heads_kv = 1 + random.below(4);
    let heads_q = heads_kv * random.of(&[1, 1, 2, 3, 4, 8]);
    let side = |random: &mut Random| match random.below(3) {
        0 => None,
        _ => Some(random.below(300) as u32),
    };
    let mask = match random.below(5) {
        0 | 1 => Mask::CAUSAL,
        2 | 3 => Mask::FULL,
        _ => Mask::band(side(&mut random), side(&mut random)),
    };
    let softcap = (random.below(8) == 0).then(|| random.of(&[1.0, 10.0, 50.0]));
    let softmax_scale = (random.below(6) == 0).then(|| random.of(&[0.01, 0.2, 1.0]));
    let arrangement = random.of(&[
        Arrangement::Bshd,
        Arrangement::Bshd,
        Arrangement::Bhsd,
        Arrangement::Gap(8),
        Arrangement::BhsdGap(16),
        Arrangement::SharedBatch,
        Arrangement::SharedHeads,
    ]);
    let problem = Problem::new(
        Lengths::uniform(random.of(&[1, 1, 2, 3, 9]), seqlen_q, seqlen_k),
        (heads_q, heads_kv),
        (head_dim, head_dim_v),
        Types::same(random.of(&[Dtype::Bf16, Dtype::F16])),
    )
    .with_mask(mask)
    .with_score(ScoreMod::NONE.with_softcap(softcap))
    .with_softmax_scale(softmax_scale);
    // Broadcast tensors repeat their one row, head or entry.
    let values = if matches!(arrangement, Arrangement::SharedBatch | Arrangement::SharedHeads) {
        Values::Normal
    } else {
        random.of(&[Values::Normal, Values::Normal, Values::Rising, Values::Falling, Values::Spikes])
    };
    let action = if random.below(16) == 0 { Action::Repeat(20) } else { Action::Once };
    Case { arrangement, values, action, ..case::case("soak", problem) }
}

#[cfg(test)]
mod tests {
    use fa_core::Arch;
    use fa_planner::plan::{PlanOptions, best};

    use super::*;

    #[test]
    fn random_problems_are_valid_and_vary() {
        let cases: Vec<Case> = (0..500).map(|turn| case(1, turn, Family::Sm90)).collect();
        for case in &cases {
            case.problem.check().unwrap_or_else(|error| panic!("{}: {error}", case.name()));
            let widest = if case.problem.latent { 576 } else { 256 };
            assert!(case.problem.head_dim <= widest && case.problem.head_dim_v.is_multiple_of(8));
        }
        let names: std::collections::HashSet<String> = cases.iter().map(Case::name).collect();
        assert!(names.len() > 490, "{}", names.len());
        let of = |f: &dyn Fn(&Case) -> bool| cases.iter().filter(|case| f(case)).count();
        for (what, found) in [
            ("packed", of(&|c| c.sequences().q.cu().is_some() && c.sequences().k.cu().is_some())),
            ("pages", of(&|c| c.problem.lengths.page().is_some())),
            ("used", of(&|c| c.problem.lengths.q().used)),
            ("empty", of(&|c| (0..c.sequences().count()).any(|b| c.sequences().q.len(b) == 0))),
            ("alibi", of(&|c| c.problem.score.alibi.is_some())),
            ("sinks in pages", of(&|c| c.problem.score.sinks && c.problem.lengths.page().is_some())),
            ("other lengths", of(&|c| c.action == Action::Relength)),
            ("dense", of(&|c| c.sequences.is_none())),
            ("codes", of(&|c| c.problem.types.kv.is_code() && !c.problem.types.is_fp8())),
            ("a descale of each row", of(&|c| c.problem.descales.k == DescaleForm::TokenHead)),
            ("fp8", of(&|c| c.problem.types.is_fp8())),
            ("latent", of(&|c| c.problem.latent)),
        ] {
            assert!(found > 4, "{what}: {found}");
        }
        assert!(cases.iter().all(|case| case.sequences().lengths() == case.problem.lengths));
        assert_ne!(case(2, 0, Family::Sm90).name(), cases[0].name());
        assert!(cases.iter().any(|case| case.problem.mask.left.is_some()));
        assert!(cases.iter().any(|case| case.problem.lengths.max_k() == 0));
    }

    /// Pages whose boxes no fp8 kernel loads are refused by name, and skipped.
    #[test]
    fn what_is_drawn_in_8_bits_or_with_latent_keys_has_a_plan() {
        for (family, arch) in [(Family::Sm90, Arch::Sm90), (Family::Sm80, Arch::Sm80)] {
            let special = |case: &Case| case.problem.types.kv.is_code() || case.problem.latent;
            for case in (0..160).map(|turn| case(5, turn, family)).filter(special) {
                let paged_fp8 = case.problem.types.is_fp8() && case.problem.lengths.page().is_some();
                let plan = best(&case.problem, arch, &PlanOptions::default());
                assert!(plan.is_ok() || paged_fp8, "{}: {}", case.name(), plan.unwrap_err());
            }
        }
    }

    #[test]
    fn gradients_of_queries_without_keys_have_a_dout_of_their_own() {
        let mut padded = 0;
        for case in (0..600).map(|turn| gradients(31, turn, Family::Sm90)) {
            let sequences = case.sequences();
            if sequences.k.total() > 0 || sequences.q.total() == 0 {
                continue;
            }
            let inputs = case.inputs::<half::bf16>();
            let placement = crate::tensors::dout_placement(&inputs.placements);
            assert_eq!(placement, inputs.placements[3], "{}", case.name());
            let dout = crate::tensors::random_dout(&inputs, 1);
            let row = case.problem.heads_q * case.problem.head_dim_v;
            assert_eq!(dout.len(), sequences.q.total() * row);
            padded += usize::from(
                matches!(sequences.q.store(), Store::Padded { len } if *len > sequences.q.len(0)),
            );
        }
        assert!(padded > 0, "queries with room behind them");
    }

    #[test]
    fn random_gradients_are_of_both_kinds_and_all_ratios_of_heads() {
        let cases: Vec<Case> = (0..500).map(|turn| gradients(1, turn, Family::Sm80)).collect();
        for deterministic in [false, true] {
            for (group, heads_kv) in [(1, 1), (1, 2), (2, 2), (4, 1), (4, 2)] {
                let found = cases.iter().any(|case| {
                    let p = &case.problem;
                    case.pass == Pass::Backward { deterministic }
                        && (p.group_size(), p.heads_kv) == (group, heads_kv)
                        && (p.lengths.max_q() != p.lengths.max_k())
                        && p.lengths.page().is_none()
                });
                assert!(found, "{group} on {heads_kv}, {deterministic}");
            }
        }
        // Only deterministic gradients repeat their bits.
        let repeats = cases.iter().filter(|case| case.action != Action::Once);
        assert!(repeats.clone().count() > 10);
        assert!(repeats.clone().all(|case| case.pass == Pass::Backward { deterministic: true }));
    }
}
