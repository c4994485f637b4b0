//! Swizzles by their laws, each over whole periods.

use std::collections::BTreeSet;

use fa_core::layout::{Layout, LayoutError};
use fa_core::swizzle::{Swizzle, SwizzleError, SwizzleMode, SwizzledLayout};
use proptest::prelude::*;

/// Every admissible swizzle of at most 12 address bits.
fn domain() -> Vec<Swizzle> {
    let mut all = Vec::new();
    for bits in 0..=5u32 {
        for base in 0..=6u32 {
            for shift in -6..=6i32 {
                let swizzle = Swizzle { bits, base, shift };
                if swizzle.check().is_ok() && bits + base + shift.unsigned_abs() <= 12 {
                    all.push(swizzle);
                }
            }
        }
    }
    all
}

#[test]
fn laws_over_two_periods() {
    assert!(domain().len() > 250, "{}", domain().len());
    for swizzle in domain() {
        let period = swizzle.period().unwrap();
        let images: Vec<u64> = (0..2 * period).map(|o| swizzle.apply(o)).collect();
        let vector = swizzle.vector().unwrap_or(period);
        for (offset, &image) in images.iter().enumerate() {
            let offset = offset as u64;
            assert_eq!(swizzle.apply(image), offset, "{swizzle} is its own inverse");
            assert_eq!(image / period, offset / period, "{swizzle} keeps its periods");
            assert_eq!(image % vector, offset % vector, "{swizzle} keeps the place within a vector");
            assert_eq!(
                image / vector,
                swizzle.apply(offset / vector * vector) / vector,
                "{swizzle} keeps vectors together"
            );
            // The definition, bit by bit.
            let mut want = offset;
            let (source, target) = if swizzle.shift >= 0 {
                (swizzle.base + swizzle.shift.unsigned_abs(), swizzle.base)
            } else {
                (swizzle.base, swizzle.base + swizzle.shift.unsigned_abs())
            };
            for bit in 0..swizzle.bits {
                want ^= (offset >> (source + bit) & 1) << (target + bit);
            }
            assert_eq!(image, want, "{swizzle} at {offset}");
        }
        let distinct: BTreeSet<_> = images.iter().collect();
        assert_eq!(distinct.len(), images.len(), "{swizzle} is a bijection");
        assert_eq!(swizzle.bits == 0, images.iter().enumerate().all(|(o, &i)| o as u64 == i), "{swizzle}");
    }
}

/// Periods and vectors are the largest and smallest of their kind, not just some.
#[test]
fn period_and_vector_are_tight() {
    for swizzle in domain().into_iter().filter(|s| s.bits > 0) {
        let (period, vector) = (swizzle.period().unwrap(), swizzle.vector().unwrap());
        assert!(
            (0..period).any(|o| swizzle.apply(o) / (period / 2) != o / (period / 2))
                || (0..period / 2).any(|o| swizzle.apply(o + period / 2) - period / 2 != swizzle.apply(o)),
            "{swizzle}: half the period is one too"
        );
        let longer = 2 * vector;
        assert!(
            (0..period).any(|o| swizzle.apply(o) != swizzle.apply(o / longer * longer) + o % longer),
            "{swizzle}: runs of {longer} stay together"
        );
    }
}

/// 8 rows of `2^(M+B)` offsets: each column of chunks is spread over all chunks, which is what a swizzle is
/// for.
#[test]
fn every_column_of_chunks_is_spread() {
    for bits in 1..=4u32 {
        for base in 0..=4u32 {
            let swizzle = Swizzle { bits, base, shift: bits as i32 };
            let (rows, chunk) = (1u64 << bits, 1u64 << base);
            for column in 0..rows {
                let places: BTreeSet<u64> = (0..rows)
                    .map(|row| swizzle.apply(row * rows * chunk + column * chunk) / chunk % rows)
                    .collect();
                assert_eq!(places.len() as u64, rows, "{swizzle} column {column}");
            }
        }
    }
}

#[test]
fn bad_parameters_are_refused_and_never_panic() {
    let overlap = Swizzle { bits: 3, base: 4, shift: 2 };
    assert_eq!(overlap.check(), Err(SwizzleError::Overlap { swizzle: overlap }));
    assert_eq!(
        overlap.check().unwrap_err().to_string(),
        "Swizzle<3,4,2>: |shift| must be at least bits (3), or it would not be its own inverse"
    );
    assert!((0..1u64 << 9).any(|o| overlap.apply(overlap.apply(o)) != o), "the refusal has a reason");
    let wide = Swizzle { bits: 20, base: 24, shift: -20 };
    assert_eq!(wide.check(), Err(SwizzleError::TooWide { swizzle: wide }));
    for bits in [0, 1, 31, 32, 63, 64, 65, u32::MAX] {
        for base in [0, 1, 31, 63, 64, u32::MAX] {
            for shift in [i32::MIN, -64, -1, 0, 1, 63, 64, i32::MAX] {
                let swizzle = Swizzle { bits, base, shift };
                let _ = (swizzle.check(), swizzle.apply(u64::MAX), swizzle.period(), swizzle.vector());
                let _ = (swizzle.scaled(2), swizzle.to_string());
            }
        }
    }
    assert!(serde_json::from_str::<Swizzle>(r#"{"bits":3,"base":3,"shift":3,"extra":1}"#).is_err());
    let swizzle: Swizzle = ron::from_str("(bits: 3, base: 3, shift: 3)").unwrap();
    assert_eq!(swizzle, Swizzle { bits: 3, base: 3, shift: 3 });
}

#[test]
fn scaling_commutes_with_the_swizzle() {
    for mode in SwizzleMode::ALL {
        for unit in [1, 2, 4, 8, 16] {
            let bytes = mode.on_bytes();
            let units = bytes.scaled(unit).unwrap();
            for offset in 0..2048 / unit {
                assert_eq!(
                    units.apply(offset) * unit,
                    bytes.apply(offset * unit),
                    "{bytes} in units of {unit}"
                );
            }
        }
    }
    let on_halves = SwizzleMode::B128.on_bytes().scaled(2).unwrap();
    assert_eq!(on_halves, Swizzle { bits: 3, base: 3, shift: 3 });
    for unit in [0, 3, 32] {
        let swizzle = SwizzleMode::B64.on_bytes();
        assert_eq!(swizzle.scaled(unit), Err(SwizzleError::Unit { swizzle, unit }));
    }
}

#[test]
fn modes_permute_chunks_of_16_within_rows() {
    let names: Vec<String> = SwizzleMode::ALL.iter().map(|m| m.on_bytes().to_string()).collect();
    assert_eq!(names, ["Swizzle<3,4,3>", "Swizzle<2,4,3>", "Swizzle<1,4,3>", "Swizzle<0,0,0>"]);
    for mode in SwizzleMode::ALL {
        let swizzle = mode.on_bytes();
        assert_eq!(swizzle.check(), Ok(()));
        for byte in 0..4096 {
            let image = swizzle.apply(byte);
            assert_eq!(image / mode.row_bytes(), byte / mode.row_bytes(), "{mode:?}");
            assert_eq!(image % 16, byte % 16, "{mode:?}");
            let moved = swizzle.apply(byte + mode.alignment());
            assert_eq!(moved, image + mode.alignment(), "{mode:?} repeats");
        }
        if mode != SwizzleMode::None {
            assert_eq!(swizzle.period(), Some(mode.alignment()));
        }
    }
}

#[test]
fn widest_mode_divides_the_row() {
    for row_bytes in 0..=1024 {
        let chosen = SwizzleMode::widest(row_bytes);
        if row_bytes == 0 || row_bytes % 16 != 0 {
            assert_eq!(chosen, Err(SwizzleError::Row { row_bytes }));
            continue;
        }
        let chosen = chosen.unwrap();
        assert_eq!(row_bytes % chosen.row_bytes(), 0);
        for wider in SwizzleMode::ALL.into_iter().filter(|m| m.row_bytes() > chosen.row_bytes()) {
            assert_ne!(row_bytes % wider.row_bytes(), 0, "{row_bytes} bytes take {wider:?}");
        }
    }
    let by_head_dim = |head_dim: u64| SwizzleMode::widest(head_dim * 2);
    for (head_dim, mode) in [(64, SwizzleMode::B128), (96, SwizzleMode::B64), (80, SwizzleMode::B32)] {
        assert_eq!(by_head_dim(head_dim), Ok(mode), "head dim {head_dim}, 16 bits");
    }
    assert_eq!(by_head_dim(72), Ok(SwizzleMode::None));
}

#[test]
fn swizzled_layout_is_the_composition() {
    let layout = Layout::row_major(&[16, 64]).unwrap();
    let swizzle = Swizzle { bits: 3, base: 3, shift: 3 };
    for offset in [0, 8, 64, 512, 1000] {
        let view = SwizzledLayout { swizzle, offset, layout: layout.clone() };
        view.check().unwrap();
        let mut images = BTreeSet::new();
        for (row, col) in (0..16).flat_map(|r| (0..64).map(move |c| (r, c))) {
            let image = view.at_modes(&[row, col]).unwrap();
            assert_eq!(image, swizzle.apply(offset + row * 64 + col));
            assert_eq!(view.at(row + 16 * col), Ok(image));
            assert!(images.insert(image));
        }
        let span = view.span().unwrap();
        assert!(images.iter().all(|&i| i < span) && span.is_multiple_of(512));
        assert!(span < offset + 1024 + 512);
    }
    let view = SwizzledLayout { swizzle: Swizzle::NONE, offset: u64::MAX, layout };
    assert_eq!(view.check(), Err(SwizzleError::Overflow { offset: u64::MAX, cosize: 1024 }));
    assert_eq!(view.at(16), Err(LayoutError::Overflow { what: "an offset" }));
    assert_eq!(view.at_modes(&[16, 0]), Err(LayoutError::OutOfDomain { index: 16, size: 16 }));
    assert_eq!(view.span(), None);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2000, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn random_swizzles_are_involutions(bits in 0u32..20, base in 0u32..40, shift in -40i32..40, offset: u64) {
        let swizzle = Swizzle { bits, base, shift };
        if swizzle.check().is_ok() {
            prop_assert_eq!(swizzle.apply(swizzle.apply(offset)), offset);
        }
    }
}
