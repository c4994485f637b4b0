//! Splits of the keys: how many, and what that does to decode.

use fa_core::{
    Arch, Division, Dtype, Family, Kernel, KernelSpec, Lengths, Mask, Pass, Problem, Reads, Side, Sm80Fwd,
};
use fa_planner::account::{MAX_SPLITS, Reason, account};
use fa_planner::cost::{Cost, CostConstants, predict};
use fa_planner::divide::kv_splits;
use fa_planner::kernels::{sm80_fwd, sm90_fwd};
use fa_planner::plan::{PlanError, PlanOptions, explore};
use proptest::prelude::*;

use crate::problems;

/// One token for each of `batch` sequences of `keys` keys.
fn decode(batch: usize, heads_q: usize, heads_kv: usize, keys: usize) -> Problem {
    Problem::square(1, 1, 1, 128, Mask::FULL, Dtype::Bf16)
        .with_lengths(Lengths::uniform(batch, 1, keys))
        .with_heads(heads_q, heads_kv)
}

/// The candidate with the least predicted time of those that fit, whether there is device code for it or not.
fn best(problem: &Problem, arch: Arch) -> (KernelSpec, Cost) {
    let constants = CostConstants::of(arch);
    let specs: Vec<KernelSpec> = if arch == Arch::Sm90 {
        sm90_fwd::candidates::candidates(problem, 128, 128, Division::PLANNED).collect()
    } else {
        sm80_fwd::candidates::candidates(problem, 128, 128, Division::PLANNED).collect()
    };
    let fitting = specs.into_iter().filter(|spec| account(spec, arch).is_ok());
    let costs = fitting.map(|spec| {
        let cost = predict(problem, &spec, arch, &constants);
        (spec, cost)
    });
    costs.min_by(|a, b| a.1.seconds.total_cmp(&b.1.seconds)).expect("something fits")
}

/// Batch, heads and keys of a batch that decodes, with the rate in TB/s of the fastest other library.
const ROWS: [((usize, usize, usize, usize), f64); 8] = [
    ((1, 32, 8, 8 << 10), 1.38),
    ((1, 32, 8, 64 << 10), 2.55),
    ((8, 32, 8, 8 << 10), 2.56),
    ((64, 32, 8, 4 << 10), 2.95),
    ((8, 32, 8, 32 << 10), 2.93),
    ((1, 64, 8, 128 << 10), 2.78),
    ((1, 32, 1, 32 << 10), 0.84),
    ((128, 64, 8, 1 << 10), 2.76),
];

/// One tile for each K/V head leaves SMs idle; splits fill them, as far as the combine kernel pays.
#[test]
fn splits_fill_an_h100() {
    for ((batch, heads_q, heads_kv, keys), other) in ROWS {
        let problem = decode(batch, heads_q, heads_kv, keys);
        let (spec, cost) = best(&problem, Arch::Sm90);
        let splits = kv_splits(&problem, &spec, Arch::Sm90, 132);
        assert_eq!(splits, cost.splits, "{spec}");
        assert!(cost.tiles >= 64.0, "{batch} x {keys}: {} CTAs", cost.tiles);
        // Half of the SMs read at the full rate, if each has twice as much in flight.
        assert!((batch * heads_kv < 64) == (splits > 1), "{batch} x {keys}: {splits} splits");
        // One warpgroup: more would compute rows that do not exist.
        assert_eq!((spec.tile().0, spec.traits().packs_gqa), (64, true), "{spec}");
        let rate = problem.bytes_forward() / cost.seconds / 1e12;
        assert!(rate >= 0.97 * other, "{batch} x {keys}: {rate:.2} TB/s");
        // Twice the SMs take at least as many splits, a tenth of them no more.
        let of = |sms| kv_splits(&problem, &spec, Arch::Sm90, sms);
        assert!(of(264) >= splits && of(13) <= splits, "{} {splits} {}", of(13), of(264));
    }
}

/// The same for the SM80 class, whose CTAs share SMs.
#[test]
fn splits_fill_an_a100() {
    for ((batch, heads_q, heads_kv, keys), _) in ROWS {
        let problem = decode(batch, heads_q, heads_kv, keys);
        let (spec, cost) = best(&problem, Arch::Sm80);
        // Where all heads share one K/V head, more parts of a row take longer to combine (NB-150).
        let least = if heads_kv == 1 { 80.0 } else { 96.0 };
        assert!(
            cost.tiles >= least && spec.traits().packs_gqa,
            "{batch} x {keys}: {} CTAs, {spec}",
            cost.tiles
        );
        assert!(batch * heads_kv >= 108 || cost.splits > 1, "{batch} x {keys}: {spec}");
        let Kernel::Sm80Fwd(own) = &spec.kernel else { panic!("an SM80 kernel") };
        let kernel = Kernel::Sm80Fwd(Sm80Fwd { pack_gqa: false, ..own.clone() });
        let unpacked = KernelSpec { kernel, ..spec };
        let unpacked = predict(&problem, &unpacked, Arch::Sm80, &CostConstants::of(Arch::Sm80));
        let (slower, faster) = (unpacked.seconds, cost.seconds);
        assert!(slower > 1.5 * faster, "{batch} x {keys}: {slower} {faster}");
    }
}

/// Where lengths are on the device a sequence may be alone in the batch: it takes as many splits as one of
/// the most keys.
#[test]
fn sequences_of_unknown_length_have_the_splits_of_one_alone() {
    let alone = decode(1, 32, 8, 8192);
    let lengths = Lengths::of(64, Side::packed(64, 1), Side::paged(16, 64 * 512, 8192));
    let paged = alone.with_lengths(lengths);
    let (spec, cost) = best(&alone, Arch::Sm90);
    assert!(cost.splits >= 8);
    let varied = KernelSpec { reads: Reads::of(&paged), ..spec.clone() };
    let alike = alone.with_lengths(Lengths::of(1, Side::packed(1, 1), Side::paged(16, 512, 8192)));
    let splits = kv_splits(&paged, &varied, Arch::Sm90, 132);
    assert!(splits >= cost.splits && splits == kv_splits(&alike, &varied, Arch::Sm90, 132));
    let whole = KernelSpec { split: false, ..spec };
    assert_eq!(kv_splits(&alone, &whole, Arch::Sm90, 132), 1);
}

/// A batch that fills the GPU as long as its sequences are alike: the kernel can split keys all the same, for
/// when they are not.
#[test]
fn decode_of_unknown_lengths_can_split() {
    for (batch, page) in [(2, 16), (16, 64), (64, 1)] {
        let lengths =
            Lengths::of(batch, Side::packed(batch, 1), Side::paged(page, batch * 8192 / page, 8192));
        let paged = decode(batch, 32, 8, 8192).with_lengths(lengths);
        let (spec, _) = best(&paged, Arch::Sm90);
        assert!(spec.split && spec.reads == Reads { varied: true, paged: true }, "{spec}");
        let splits = kv_splits(&paged, &spec, Arch::Sm90, 132);
        assert!((12..=33).contains(&splits), "{batch}: {splits}, {spec}");
    }
}

/// TMA copies a part of a page at a time: pages of a key take longer than those of a tile, which take no
/// longer than keys in one piece.
#[test]
fn small_pages_take_longer() {
    let whole = decode(64, 32, 8, 8192);
    let (spec, _) = best(&whole, Arch::Sm90);
    let seconds = |page: usize| {
        let paged = Side::paged(page, 64 * 8192usize.div_ceil(page), 8192);
        let paged = whole.with_lengths(Lengths::of(64, Side::padded(1), paged));
        predict(&paged, &spec, Arch::Sm90, &CostConstants::of(Arch::Sm90)).seconds
    };
    let pages = [1, 2, 4, 8, 16, 64, 128].map(seconds);
    assert!(pages.windows(2).all(|pair| pair[0] >= pair[1]), "{pages:?}");
    assert!(pages[0] > 1.02 * pages[4], "{pages:?}");
    let contiguous = predict(&whole, &spec, Arch::Sm90, &CostConstants::of(Arch::Sm90)).seconds;
    assert!(pages[6] < 1.02 * contiguous, "{pages:?} {contiguous}");
}

/// One token of a window reads the keys of its window alone: 64 sequences of 8,192 keys took 50 us on an H100
/// with a window of 511 (NB-085).
#[test]
fn a_window_reads_what_it_sees() {
    let whole = decode(64, 32, 8, 8192);
    let window = whole.with_mask(Mask::causal_window(511));
    let [(_, all), (spec, seen)] = [whole, window].map(|problem| best(&problem, Arch::Sm90));
    assert!(all.seconds > 10.0 * seen.seconds, "{} {}", all.seconds, seen.seconds);
    assert!((40e-6..60e-6).contains(&seen.seconds), "{spec}: {}", seen.seconds);
    assert_eq!(spec.tile().0, 64, "{spec}");
}

/// A group of any number of heads is packed, into the narrowest tile that holds it, and K and V are read
/// once: 5 (Qwen2.5 14B and 32B), 7 (7B), 71 (Falcon 7B) as 4 and 8.
#[test]
fn groups_of_any_number_are_packed() {
    for group in [2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15, 16, 48, 71, 128] {
        let rows = if group <= 64 { 64 } else { 128 };
        let (spec, cost) = best(&decode(64, 8 * group, 8, 16_384), Arch::Sm90);
        assert!(spec.traits().packs_gqa && spec.tile().0 == rows, "{group}: {spec}");
        assert!(cost.bytes_per_s > 2.6e12, "{group}: {spec} {cost:?}");
        let (spec, cost) = best(&decode(64, 8 * group, 8, 16_384), Arch::Sm80);
        assert!(spec.traits().packs_gqa, "{group}: {spec}");
        let alike = best(&decode(64, 8 * group.next_power_of_two(), 8, 16_384), Arch::Sm80).1;
        assert!(cost.seconds < 1.02 * alike.seconds, "{group}: {spec} {} {}", cost.seconds, alike.seconds);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Problems of every kind are planned or refused by name, and splits stay within bounds.
    #[test]
    fn problems_of_every_kind_are_planned(problem in problems::every_kind(), sms in 1u32..200) {
        prop_assume!(problem.check().is_ok());
        let targets = [(Arch::Sm90, Family::Sm90), (Arch::Sm90, Family::Sm80), (Arch::Sm86, Family::Sm80)];
        for (arch, family) in targets {
            for pass in [Pass::Forward, Pass::BACKWARD, Pass::DETERMINISTIC_BACKWARD] {
                let options = PlanOptions::default().with_family(Some(family)).with_pass(pass);
                let set = match explore(&problem, arch, &options) {
                    Ok(set) => set,
                    Err(PlanError::PagedBackward { page }) => {
                        prop_assert_eq!(problem.lengths.page(), Some(page));
                        prop_assert!(pass.is_backward());
                        continue;
                    }
                    Err(error) => panic!("{error}"),
                };
                let (unserved, rejected): (Vec<_>, Vec<_>) =
                    set.rejected.iter().partition(|r| matches!(r.reason, Reason::Launch(_)));
                for r in unserved {
                    let error = r.spec.serves(&problem).err().map(Reason::from);
                    prop_assert_eq!(error.as_ref(), Some(&r.reason), "{}", r.spec);
                }
                let specs = set.plans.iter().map(|p| &p.spec).chain(rejected.iter().map(|r| &r.spec));
                for spec in specs.step_by(5).filter(|spec| account(spec, arch).is_ok()) {
                    prop_assert_eq!(spec.serves(&problem), Ok(()), "{}", spec);
                    let cost = predict(&problem, spec, arch, &CostConstants::of(arch));
                    prop_assert!(cost.seconds.is_finite() && cost.seconds > 0.0, "{}: {:?}", spec, cost);
                    let splits = kv_splits(&problem, spec, arch, sms);
                    let steps = problem.lengths.max_k().div_ceil(spec.tile().1 as usize).max(1);
                    prop_assert!((1..=MAX_SPLITS.min(steps)).contains(&splits), "{}: {}", spec, splits);
                    prop_assert!(spec.split || splits == 1);
                    prop_assert!((1..=MAX_SPLITS.min(steps)).contains(&cost.splits), "{}: {:?}", spec, cost);
                }
            }
        }
    }
}
