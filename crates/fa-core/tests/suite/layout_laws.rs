//! The layout algebra by its laws: every operation against the function it is defined by, at every index of
//! every layout of a small domain, then on random nested layouts.

use std::collections::{BTreeMap, BTreeSet};

use fa_core::layout::{IntTuple, Layout, LayoutError};
use proptest::prelude::*;

fn layout(text: &str) -> Layout {
    text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))
}

/// All offsets in index order, by a definition of its own: digits of the index, first mode fastest.
fn offsets(layout: &Layout) -> Vec<u64> {
    let extents = layout.shape().flatten();
    let strides = layout.stride().flatten();
    let mut table = vec![0];
    for (extent, stride) in extents.into_iter().zip(strides) {
        table = (0..extent).flat_map(|i| table.iter().map(move |o| o + i * stride)).collect();
    }
    table
}

fn histogram(offsets: impl IntoIterator<Item = u64>) -> BTreeMap<u64, usize> {
    let mut counts = BTreeMap::new();
    for offset in offsets {
        *counts.entry(offset).or_default() += 1;
    }
    counts
}

fn is_injective(offsets: &[u64]) -> bool {
    offsets.iter().collect::<BTreeSet<_>>().len() == offsets.len()
}

/// Every flat layout of up to `rank` modes over these extents and strides.
fn family(rank: usize, extents: &[u64], strides: &[u64]) -> Vec<Layout> {
    let single: Vec<(u64, u64)> =
        extents.iter().flat_map(|&e| strides.iter().map(move |&s| (e, s))).collect();
    let mut all = Vec::new();
    let mut longest: Vec<Vec<(u64, u64)>> = vec![Vec::new()];
    for _ in 0..rank {
        longest = longest
            .iter()
            .flat_map(|head| single.iter().map(move |&mode| [head.as_slice(), &[mode]].concat()))
            .collect();
        all.extend(longest.iter().map(|modes| Layout::from_modes(modes).unwrap()));
    }
    all
}

/// 1 to 3 modes with broken, overlapping, padded, broadcast and trivial strides among them: 11,796 layouts.
fn unary_domain() -> Vec<Layout> {
    let mut all = family(2, &[1, 2, 3, 4, 6], &[0, 1, 2, 3, 4, 5, 6, 8, 12]);
    all.extend(family(3, &[2, 3, 4], &[0, 1, 2, 3, 4, 8, 12]));
    all.extend(
        ["((2,2),(2,2)):((1,4),(2,8))", "((1,2),3):((7,1),2)", "(((2,3)),4):(((4,8)),1)"]
            .iter()
            .map(|t| layout(t)),
    );
    all
}

/// 362 layouts, so that all pairs are 131,044.
fn pair_domain() -> Vec<Layout> {
    let mut all = family(2, &[2, 3, 4], &[0, 1, 2, 3, 4, 6]);
    all.extend(family(1, &[1, 6, 8, 12, 24], &[1, 2, 3, 4]));
    all
}

#[test]
fn domains_are_as_large_as_they_say() {
    assert_eq!((unary_domain().len(), pair_domain().len()), (11_796, 362));
}

fn check_coalesce(a: &Layout) {
    let c = a.coalesce();
    assert_eq!(offsets(&c), offsets(a), "{a} -> {c}");
    assert_eq!((c.size(), c.cosize()), (a.size(), a.cosize()), "{a} -> {c}");
    assert_eq!(c, c.coalesce(), "coalesce is idempotent: {a}");
    assert!(c.depth() <= 1 && c.flat().len() <= a.flat().len(), "{a} -> {c}");
    let by_mode = a.coalesce_modes();
    assert_eq!(offsets(&by_mode), offsets(a), "{a} -> {by_mode}");
    assert_eq!(by_mode.rank(), a.rank(), "{a} -> {by_mode}");
}

fn check_compose(a: &Layout, b: &Layout) -> bool {
    let outer = offsets(a);
    let inner = offsets(b);
    match a.compose(b) {
        Ok(c) => {
            let want: Vec<u64> = inner.iter().map(|&i| outer[i as usize]).collect();
            assert_eq!(offsets(&c), want, "{a} o {b} = {c}");
            assert!(b.shape().compatible(c.shape()), "{a} o {b} = {c}");
            true
        }
        Err(LayoutError::OutOfDomain { .. }) => {
            assert!(b.cosize() > a.size(), "{a} o {b} was refused as out of domain");
            false
        }
        Err(_) => false,
    }
}

fn check_complement(a: &Layout, bound: u64) -> bool {
    let own = offsets(a);
    let Ok(c) = a.complement(bound) else {
        return false;
    };
    let starts = offsets(&c);
    assert!(starts.windows(2).all(|w| w[0] < w[1]), "{c} is not increasing (complement of {a})");
    let distinct: BTreeSet<u64> = own.iter().copied().collect();
    let mut covered = BTreeSet::new();
    for start in &starts {
        for offset in &distinct {
            assert!(covered.insert(start + offset), "{a} and {c} meet at {}", start + offset);
        }
    }
    assert!((0..bound).all(|o| covered.contains(&o)), "{a} and {c} leave gaps below {bound}");
    true
}

fn check_right_inverse(a: &Layout) {
    let r = a.right_inverse();
    for j in 0..r.size() {
        assert_eq!(a.at(r.at(j).unwrap()), Ok(j), "{a} after {r}");
    }
    let own = offsets(a);
    let bijective = is_injective(&own) && a.cosize() == a.size();
    assert_eq!(r.size() == a.size(), bijective, "{a}: {r}");
}

fn check_divide(a: &Layout, tile: &Layout) -> bool {
    let Ok(d) = a.logical_divide(tile) else {
        return false;
    };
    assert_eq!(d.rank(), 2, "{a} / {tile} = {d}");
    assert_eq!(histogram(offsets(&d)), histogram(offsets(a)), "{a} / {tile} = {d}");
    let own = offsets(a);
    let in_tile: Vec<u64> = offsets(tile).iter().map(|&i| own[i as usize]).collect();
    assert_eq!(offsets(&d.modes()[0]), in_tile, "{a} / {tile} = {d}");
    true
}

fn check_product(a: &Layout, by: &Layout) -> bool {
    let Ok(p) = a.logical_product(by) else {
        return false;
    };
    let modes = p.modes();
    assert_eq!(modes.len(), 2, "{a} x {by} = {p}");
    assert_eq!(&modes[0], a);
    assert_eq!(p.size(), a.size() * by.size(), "{a} x {by} = {p}");
    assert!(by.shape().compatible(modes[1].shape()), "{a} x {by} = {p}");
    let starts = offsets(&a.complement(a.size() * by.cosize()).unwrap());
    let want: Vec<u64> = offsets(by).iter().map(|&j| starts[j as usize]).collect();
    assert_eq!(offsets(&modes[1]), want, "{a} x {by} = {p}");
    if is_injective(&offsets(a)) && is_injective(&offsets(by)) {
        assert!(is_injective(&offsets(&p)), "{a} x {by} = {p}");
    }
    true
}

#[test]
fn evaluation_agrees_with_the_definition() {
    for a in unary_domain() {
        let table = offsets(&a);
        assert_eq!(table.len() as u64, a.size(), "{a}");
        assert_eq!(table.iter().max().map(|m| m + 1), Some(a.cosize()), "{a}");
        for (i, &offset) in table.iter().enumerate() {
            let coord = a.coord_of(i as u64).unwrap();
            assert_eq!(a.at(i as u64), Ok(offset), "{a} at {i}");
            assert_eq!(a.at_coord(&coord), Ok(offset), "{a} at {coord}");
            assert!(coord.congruent(a.shape()), "{coord} in {a}");
        }
        let size = a.size();
        assert_eq!(a.at(size), Err(LayoutError::OutOfDomain { index: size, size }), "{a}");
        assert!(a.coord_of(size).is_err() && a.at_coord(&IntTuple::Int(size)).is_err(), "{a}");
    }
}

#[test]
fn unary_laws_hold_over_the_whole_domain() {
    let (mut complements, mut total) = (0, 0);
    for a in unary_domain() {
        check_coalesce(&a);
        check_right_inverse(&a);
        for bound in [1, 5, 12, 24, 48] {
            complements += usize::from(check_complement(&a, bound));
            total += 1;
        }
    }
    assert!(complements * 8 > total, "only {complements} of {total} complements were admitted");
}

#[test]
fn binary_laws_hold_over_all_pairs() {
    let domain = pair_domain();
    let (mut composed, mut divided, mut multiplied) = (0, 0, 0);
    for a in &domain {
        for b in &domain {
            composed += usize::from(check_compose(a, b));
            divided += usize::from(check_divide(a, b));
            multiplied += usize::from(check_product(a, b));
        }
    }
    // The laws say nothing about what is refused: keep the admitted share from falling unnoticed.
    assert!(composed > 10_000 && divided > 1_000 && multiplied > 5_000, "{composed} {divided} {multiplied}");
}

/// Nothing that a shape and a stride of one mode can express is refused but for CuTe's divisibility
/// conditions.
#[test]
fn composition_with_one_mode_is_refused_only_for_divisibility() {
    for a in family(3, &[2, 3, 4], &[1, 2, 5, 12]) {
        let outer = a.coalesce().flat();
        for extent in 1..=12 {
            for stride in 0..=12 {
                let b = Layout::from_modes(&[(extent, stride)]).unwrap();
                let admitted = check_compose(&a, &b);
                let in_domain = b.cosize() <= a.size();
                let within_first_mode = b.cosize() <= outer[0].extent;
                assert!(admitted || !within_first_mode, "{a} o {b}");
                assert!(in_domain || !admitted, "{a} o {b}");
            }
        }
    }
}

#[test]
fn composition_is_associative_where_both_sides_exist() {
    let domain = family(2, &[2, 4], &[1, 2, 4, 8]);
    let mut seen = 0;
    for a in &domain {
        for b in &domain {
            let Ok(ab) = a.compose(b) else { continue };
            for c in &domain {
                let (Ok(bc), Ok(left)) = (b.compose(c), ab.compose(c)) else { continue };
                let Ok(right) = a.compose(&bc) else { continue };
                assert_eq!(offsets(&left), offsets(&right), "{a} o {b} o {c}");
                seen += 1;
            }
        }
    }
    assert!(seen > 500, "{seen}");
}

/// Worked examples with the results written out.
#[test]
fn worked_examples() {
    let compose = |a: &str, b: &str| layout(a).compose(&layout(b)).map(|c| c.to_string());
    assert_eq!(compose("20:2", "(5,4):(4,1)").as_deref(), Ok("(5,4):(8,2)"));
    assert_eq!(compose("(6,2):(8,2)", "(4,3):(3,1)").as_deref(), Ok("((2,2),3):((24,2),8)"));
    assert_eq!(compose("(10,2):(16,4)", "(5,4):(1,5)").as_deref(), Ok("(5,(2,2)):(16,(80,4))"));
    assert_eq!(compose("(8,64):(64,1)", "(8,8):(1,8)").as_deref(), Ok("(8,8):(64,1)"));
    assert_eq!(compose("(4,6):(1,10)", "3:3"), Err(LayoutError::StrideIndivisible { stride: 3, extent: 4 }));
    assert_eq!(compose("(4,6):(1,10)", "6:1"), Err(LayoutError::ExtentIndivisible { extent: 6, steps: 4 }));
    assert_eq!(compose("(4,8):(8,1)", "(2,2):(2,2)"), Err(LayoutError::Carry { reach: 4, extent: 4 }));
    assert_eq!(compose("4:1", "5:1"), Err(LayoutError::OutOfDomain { index: 4, size: 4 }));

    let complement = |a: &str, bound| layout(a).complement(bound).map(|c| c.to_string());
    assert_eq!(complement("4:1", 24).as_deref(), Ok("6:4"));
    assert_eq!(complement("6:4", 24).as_deref(), Ok("4:1"));
    assert_eq!(complement("4:2", 24).as_deref(), Ok("(2,3):(1,8)"));
    assert_eq!(complement("(2,4):(1,6)", 24).as_deref(), Ok("3:2"));
    assert_eq!(complement("(4,6):(1,4)", 24).as_deref(), Ok("1:0"));
    assert_eq!(complement("(2,2):(2,3)", 24), Err(LayoutError::NotComplementable { stride: 3, covered: 4 }));

    let divide = |a: &str, t: &str| layout(a).logical_divide(&layout(t)).map(|d| d.to_string());
    assert_eq!(divide("(4,2,3):(2,1,8)", "4:2").as_deref(), Ok("((2,2),(2,3)):((4,1),(2,8))"));
    assert_eq!(divide("10:1", "4:1"), Err(LayoutError::NotATiling { tile: "4:1".to_owned(), size: 10 }));
    let product = |a: &str, b: &str| layout(a).logical_product(&layout(b)).map(|p| p.to_string());
    assert_eq!(product("(2,2):(4,1)", "6:1").as_deref(), Ok("((2,2),(2,3)):((4,1),(2,8))"));
    assert_eq!(product("(2,5):(5,1)", "(3,4):(1,3)").as_deref(), Ok("((2,5),(3,4)):((5,1),(10,30))"));
    let inverse = |a: &str| layout(a).right_inverse().to_string();
    assert_eq!(inverse("(4,8):(8,1)"), "(8,4):(4,1)");
    assert_eq!(inverse("(4,8):(1,5)"), "4:1");
    assert_eq!(inverse("4:2"), "1:0");
}

/// A 128x128 tile of 16-bit elements as two 64-wide panels, each built of 8x64 atoms, in terms of products;
/// and its 16x16 blocks by division.
#[test]
fn attention_tile_by_products_and_division() {
    let atom = Layout::row_major(&[8, 64]).unwrap();
    let tile = atom.blocked_product(&Layout::col_major(&[16, 2]).unwrap()).unwrap();
    assert_eq!(tile.to_string(), "(128,(64,2)):(64,(1,8192))");
    for row in 0..128 {
        for col in 0..128 {
            assert_eq!(tile.at_modes(&[row, col]), Ok(col / 64 * 8192 + row * 64 + col % 64));
        }
    }
    let raked = atom.raked_product(&Layout::col_major(&[16, 2]).unwrap()).unwrap();
    assert_eq!(raked.at_modes(&[1, 0]), Ok(512), "neighbouring rows lie in different copies");
    assert_eq!(histogram(offsets(&raked)), histogram(offsets(&tile)));

    let sixteen = Layout::from_modes(&[(16, 1)]).unwrap();
    let blocks = tile.zipped_divide(&[sixteen.clone(), sixteen.clone()]).unwrap();
    let tiled = tile.tiled_divide(&[sixteen.clone(), sixteen.clone()]).unwrap();
    assert_eq!((blocks.rank(), tiled.rank()), (2, 3));
    for (row, col) in (0..128).flat_map(|r| (0..128).map(move |c| (r, c))) {
        let (within, block) = (row % 16 + col % 16 * 16, row / 16 + col / 16 * 8);
        let want = tile.at_modes(&[row, col]);
        assert_eq!(blocks.at_modes(&[within, block]), want);
        assert_eq!(tiled.at_modes(&[within, row / 16, col / 16]), want);
    }
    assert_eq!(tile.zipped_divide(&[sixteen]), Err(LayoutError::RankMismatch { have: 1, need: 2 }));
}

/// Paired products keep each block coordinate at its copy: entry ((i, j)) of mode k is block i of copy j.
#[test]
fn paired_products_over_all_pairs() {
    let domain = family(2, &[2, 3, 4], &[1, 2, 4]);
    let mut seen = 0;
    for (a, by) in domain.iter().flat_map(|a| domain.iter().map(move |b| (a, b))) {
        let (Ok(blocked), Ok(raked), Ok(plain)) =
            (a.blocked_product(by), a.raked_product(by), a.logical_product(by))
        else {
            continue;
        };
        let starts = &plain.modes()[1];
        let extents = |l: &Layout| l.modes().iter().map(Layout::size).collect::<Vec<_>>();
        let (block, grid) = (extents(a), extents(by));
        for (i, j) in (0..a.size()).flat_map(|i| (0..by.size()).map(move |j| (i, j))) {
            let split = |index: u64, extents: &[u64]| {
                extents
                    .iter()
                    .scan(index, |rest, e| {
                        let digit = *rest % e;
                        *rest /= e;
                        Some(digit)
                    })
                    .collect::<Vec<_>>()
            };
            let (bi, gj) = (split(i, &block), split(j, &grid));
            let coords = |inner: &[u64], extents: &[u64], outer: &[u64]| -> Vec<u64> {
                inner.iter().zip(extents).zip(outer).map(|((i, e), o)| i + e * o).collect()
            };
            let want = a.at(i).unwrap() + starts.at(j).unwrap();
            assert_eq!(blocked.at_modes(&coords(&bi, &block, &gj)), Ok(want), "{a} x {by} = {blocked}");
            assert_eq!(raked.at_modes(&coords(&gj, &grid, &bi)), Ok(want), "{a} x {by} = {raked}");
        }
        seen += 1;
    }
    assert!(seen > 500, "{seen}");
}

#[test]
fn notation_round_trips_and_is_the_serde_form() {
    for text in ["1:0", "(4,8):(8,1)", "((2,4),64):((64,512),1)", "(4):(1)"] {
        assert_eq!(layout(text).to_string(), text);
        let json = serde_json::to_string(&layout(text)).unwrap();
        assert_eq!(json, format!("\"{text}\""));
        assert_eq!(serde_json::from_str::<Layout>(&json).unwrap(), layout(text));
        let ron = ron::to_string(&layout(text)).unwrap();
        assert_eq!(ron::from_str::<Layout>(&ron).unwrap(), layout(text));
    }
    assert_eq!(layout(" ( 4 , 8 ) : ( 8 , 1 ) "), layout("(4,8):(8,1)"));
    assert_eq!("(4,(2,8))".parse::<IntTuple>().unwrap().flatten(), [4, 2, 8]);
}

#[test]
fn bad_input_is_refused_by_name() {
    use LayoutError::*;
    let refuse = |text: &str| text.parse::<Layout>().unwrap_err();
    for text in
        ["", "4", "4:", ":1", "(4,8):(8,1", "(4,8):(8,1))", "(,):(1)", "4:-1", "4:x", "4:1 2", "4 : 1 é"]
    {
        assert!(matches!(refuse(text), Parse { .. }), "{text}: {}", refuse(text));
    }
    assert!(matches!(refuse("99999999999999999999:1"), Parse { .. }));
    assert!(matches!(refuse("(4,8):(8)"), NotCongruent { .. }));
    assert!(matches!(refuse("(4,8):8"), NotCongruent { .. }));
    assert!(matches!(refuse("(4,0):(8,1)"), ZeroExtent { .. }));
    assert_eq!(refuse(&format!("{0}4{1}:{0}1{1}", "(".repeat(17), ")".repeat(17))), TooDeep);
    assert_eq!(refuse(&"(".repeat(1_000_000)), TooDeep);
    assert!(matches!(refuse("(4294967296,4294967296):(1,1)"), Overflow { .. }));
    assert!(matches!(refuse("3:18446744073709551615"), Overflow { .. }));
    assert!(matches!(refuse("(2,2):(18446744073709551615,1)"), Overflow { .. }));
    assert_eq!(Layout::new(IntTuple::Tuple(vec![]), IntTuple::Tuple(vec![])), Err(EmptyTuple));
    assert_eq!(Layout::concat(&[]), Err(EmptyTuple));
    assert!(Layout::row_major(&[u64::MAX, 2]).is_err() && Layout::col_major(&[0]).is_err());
    assert!(serde_json::from_str::<Layout>("\"(4,0):(8,1)\"").is_err());

    let a = layout("((2,4),8):((1,2),8)");
    assert_eq!(a.at_modes(&[3]), Err(RankMismatch { have: 1, need: 2 }));
    assert_eq!(a.at_modes(&[8, 0]), Err(OutOfDomain { index: 8, size: 8 }));
    assert_eq!(a.at_coord(&"((0,1,2),0)".parse().unwrap()), Err(RankMismatch { have: 3, need: 2 }));
    assert_eq!(a.at_coord(&"(0,(0,1))".parse().unwrap()), Err(RankMismatch { have: 2, need: 1 }));
    assert_eq!(a.at_coord(&"((0,4),0)".parse().unwrap()), Err(OutOfDomain { index: 4, size: 4 }));
    assert_eq!(a.at_coord(&"(5,3)".parse().unwrap()), a.at_coord(&"((1,2),3)".parse().unwrap()));
}

/// Extremes of 64 bits: every operation returns, and what it returns is right.
#[test]
fn huge_layouts_do_not_overflow() {
    let max = u64::MAX;
    for text in [
        "18446744073709551615:1",
        "2:18446744073709551614",
        "(2,2):(9223372036854775807,9223372036854775807)",
        "(4294967296,4294967295):(1,4294967296)",
        "1:18446744073709551615",
        "18446744073709551615:0",
    ] {
        let a = layout(text);
        assert_eq!(a.at(a.size() - 1), Ok(a.cosize() - 1), "{text}");
        assert_eq!(a.coalesce().at(a.size() - 1), Ok(a.cosize() - 1), "{text}");
        let r = a.right_inverse();
        assert_eq!(a.at(r.at(r.size() - 1).unwrap()), Ok(r.size() - 1), "{text}");
        for other in [&a, &layout("2:1"), &layout("3:2"), &layout("2:4294967296")] {
            if let Ok(c) = a.compose(other) {
                let last = other.size() - 1;
                assert_eq!(c.at(last), a.at(other.at(last).unwrap()), "{a} o {other}");
            }
            for result in [a.logical_divide(other), a.logical_product(other), a.blocked_product(other)] {
                assert!(result.is_err() || result.unwrap().size() >= a.size());
            }
        }
        for bound in [0, 1, 2, max] {
            if let Ok(c) = a.complement(bound) {
                assert!(c.at(c.size() - 1).is_ok(), "{a}");
            }
        }
    }
}

/// Random nested layouts, mostly of divisible extents so that the operations meet admissible input.
fn nested() -> impl Strategy<Value = Layout> {
    let mode = (
        prop::sample::select(vec![1u64, 2, 2, 3, 4, 4, 6, 8]),
        prop::sample::select(vec![0u64, 1, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64]),
    )
        .prop_map(|m| Layout::from_modes(&[m]).unwrap());
    mode.prop_recursive(3, 5, 3, |inner| {
        prop::collection::vec(inner, 1..4).prop_map(|modes| Layout::concat(&modes).unwrap())
    })
    .prop_filter("small enough to enumerate", |l| l.size() <= 2048)
}

/// Compact layouts in random order of modes: bijections, on which most operations are defined.
fn compact() -> impl Strategy<Value = Layout> {
    prop::collection::vec(prop::sample::select(vec![1u64, 2, 3, 4, 8]), 1..5)
        .prop_flat_map(|extents| {
            let order: Vec<usize> = (0..extents.len()).collect();
            (Just(extents), Just(order).prop_shuffle())
        })
        .prop_map(|(extents, order)| {
            let mut modes: Vec<_> = extents.iter().map(|&e| (e, 0)).collect();
            let mut next = 1;
            for i in order {
                modes[i].1 = next;
                next *= modes[i].0;
            }
            Layout::from_modes(&modes).unwrap()
        })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2000, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn random_nested_layouts_obey_the_laws(a in nested(), b in nested(), bound in 1u64..200) {
        check_coalesce(&a);
        check_right_inverse(&a);
        check_complement(&a, bound);
        check_compose(&a, &b);
        check_divide(&a, &b);
        if a.size() * b.size() <= 1 << 16 {
            check_product(&a, &b);
        }
        prop_assert_eq!(a.to_string().parse::<Layout>().unwrap(), a);
    }

    #[test]
    fn random_compact_layouts_obey_the_laws(a in compact(), b in nested()) {
        prop_assert_eq!(a.right_inverse().size(), a.size());
        prop_assert_eq!(a.compose(&a.right_inverse()).map(|c| c.coalesce()),
            Layout::from_modes(&[(a.size(), u64::from(a.size() > 1))]));
        check_compose(&a, &b);
        check_divide(&a, &b);
        prop_assert!(check_complement(&a, 2 * a.size()));
        check_product(&a, &b);
    }

    #[test]
    fn random_text_never_panics(text in "[0-9(),: ]{0,40}") {
        let _ = text.parse::<Layout>();
    }
}
