//! Bank conflicts: known cases as data, closed forms over whole ranges of paddings, and a count by
//! definition.

use std::collections::{BTreeMap, BTreeSet};

use fa_core::layout::{Layout, LayoutError};
use fa_core::swizzle::{Swizzle, SwizzleError, SwizzleMode, SwizzledLayout};
use fa_planner::banks::{Access, BankError, Conflicts, SmemLayout, conflicts, survey};
use proptest::prelude::*;

const CP_ASYNC: Access = Access::CpAsync16 { lanes_per_row: 8 };
const COLUMN_WISE: Access = Access::Vector16 { lanes_per_row: 1 };

/// Every access of a 16-bit operand tile.
const ACCESSES: [Access; 10] = [
    CP_ASYNC,
    COLUMN_WISE,
    Access::Ldmatrix,
    Access::LdmatrixTrans,
    Access::Stmatrix,
    Access::FragmentA,
    Access::FragmentATrans,
    Access::FragmentB,
    Access::FragmentBTrans,
    Access::FragmentC,
];

fn plain(cols: u64) -> SmemLayout {
    SmemLayout::row_major(64, cols, 2).unwrap()
}

fn padded(cols: u64, pad: u64) -> SmemLayout {
    SmemLayout::padded(64, cols, pad, 2).unwrap()
}

fn swizzled(cols: u64) -> SmemLayout {
    SmemLayout::swizzled(64, cols, 2).unwrap()
}

/// Every phase of the access over the tile is `ways`-way.
fn check(smem: &SmemLayout, access: Access, ways: u64) -> Conflicts {
    let count = conflicts(smem, access).unwrap_or_else(|e| panic!("{access} on {}: {e}", smem.tile.layout));
    let at = format!("{access} on {} after {}", smem.tile.layout, smem.tile.swizzle);
    assert_eq!(count.ways, ways, "{at}");
    assert!(count.phases.iter().all(|p| p.wavefronts == ways), "{at}: {:?}", &count.phases[..4]);
    assert_eq!(count.wavefronts, ways * count.ideal_wavefronts, "{at}");
    assert_eq!(count.ideal_wavefronts, count.phases.len() as u64, "{at}");
    assert_eq!(count.is_free(), ways == 1, "{at}");
    assert_eq!(count.slowdown(), ways as f64, "{at}");
    count
}

#[test]
fn plain_rows_of_head_dim_128_are_8_way_for_ldmatrix() {
    let count = check(&plain(128), Access::Ldmatrix, 8);
    // 64x128 elements in blocks of 16x16: 32 instructions of 4 phases of 8 wavefronts.
    assert_eq!((count.instructions, count.ideal_wavefronts, count.wavefronts), (32, 128, 1024));
    assert!(count.phases.iter().all(|p| p.banks == 4), "all 8 rows lie in the same 4 banks");
    assert_eq!(count.bandwidth_share(), 1.0 / 8.0);
}

#[test]
fn plain_rows() {
    for access in [Access::Ldmatrix, Access::LdmatrixTrans, Access::Stmatrix] {
        for (cols, ways) in
            [(16, 2), (32, 4), (64, 8), (80, 2), (96, 4), (112, 2), (128, 8), (192, 8), (256, 8)]
        {
            check(&plain(cols), access, ways);
        }
    }
    // Without ldmatrix: 8 rows by 4 words for A and K, 4 rows by 4 words for V.
    for (access, ways) in [
        (Access::FragmentA, 8),
        (Access::FragmentB, 8),
        (Access::FragmentC, 8),
        (Access::FragmentATrans, 4),
        (Access::FragmentBTrans, 4),
        (COLUMN_WISE, 8),
    ] {
        check(&plain(128), access, ways);
        check(&plain(64), access, ways);
    }
    // Eight lanes along a row fill all banks whatever the stride.
    for cols in [64, 128, 192, 256] {
        check(&plain(cols), CP_ASYNC, 1);
        check(&plain(cols), Access::Vector16 { lanes_per_row: 8 }, 1);
    }
}

#[test]
fn swizzle_333_on_rows_of_64_elements_is_conflict_free() {
    let smem = SmemLayout {
        tile: SwizzledLayout {
            swizzle: Swizzle { bits: 3, base: 3, shift: 3 },
            offset: 0,
            layout: "(64,64):(64,1)".parse().unwrap(),
        },
        elem_bytes: 2,
    };
    assert_eq!(conflicts(&smem, Access::Ldmatrix), conflicts(&swizzled(64), Access::Ldmatrix));
    for access in ACCESSES {
        check(&smem, access, 1);
    }
}

/// What the kernels use, at every head dim: no access conflicts, transposed reads of V among them.
#[test]
fn widest_swizzle_is_conflict_free_for_every_head_dim() {
    for cols in (16..=256).step_by(16) {
        let smem = swizzled(cols);
        for access in ACCESSES {
            let fits = access != CP_ASYNC || cols % 64 == 0;
            if fits {
                check(&smem, access, 1);
            }
        }
        check(&smem, Access::cp_async_for(cols * 2), 1);
        check(&smem, Access::vector_for(cols * 2), 1);
    }
}

/// The swizzle works on 64-element panels: 3 bits xored in at 128-element rows keep the 8 rows apart only if
/// the source bits are those of the row.
#[test]
fn a_swizzle_must_take_its_bits_from_the_row() {
    let rows_of_128 = |swizzle| SmemLayout {
        tile: SwizzledLayout { swizzle, offset: 0, layout: "(64,128):(128,1)".parse().unwrap() },
        elem_bytes: 2,
    };
    // Bit 6 is a column here, so only two bits of the row remain: pairs of rows meet.
    check(&rows_of_128(Swizzle { bits: 3, base: 3, shift: 3 }), Access::Ldmatrix, 2);
    check(&rows_of_128(Swizzle { bits: 3, base: 3, shift: 4 }), Access::Ldmatrix, 1);
    // 64-byte swizzle on 128-byte rows: 4 places for 8 rows.
    let narrow = SwizzleMode::B64.on_bytes().scaled(2).unwrap();
    let smem = SmemLayout {
        tile: SwizzledLayout { swizzle: narrow, offset: 0, layout: "(64,64):(64,1)".parse().unwrap() },
        elem_bytes: 2,
    };
    assert!(!conflicts(&smem, Access::Ldmatrix).unwrap().is_free());
}

#[test]
fn narrower_panels_are_free_too() {
    for mode in SwizzleMode::ALL {
        let smem = SmemLayout::panels(64, 128, mode, 2).unwrap();
        for access in [Access::Ldmatrix, Access::LdmatrixTrans, Access::Stmatrix, Access::FragmentB] {
            check(&smem, access, 1);
        }
        assert_eq!(smem.bytes(), Some(64 * 128 * 2), "panels take no more than the elements");
    }
}

/// 16 bytes of padding shift each row by 4 banks, which costs space but no swizzle.
#[test]
fn padding_is_the_alternative() {
    for cols in [64, 128, 192, 256] {
        let smem = padded(cols, 8);
        assert_eq!(smem.bytes(), Some((63 * (cols + 8) + cols) * 2));
        for access in ACCESSES {
            check(&smem, access, 1);
        }
    }
    // ldmatrix rows are 16-byte aligned; plain 32-bit loads need no more than 4.
    let misaligned = BankError::Misaligned { access: Access::Ldmatrix, row: 1, col: 0, byte: 260, width: 16 };
    assert_eq!(conflicts(&padded(128, 2), Access::Ldmatrix), Err(misaligned));
    assert!(conflicts(&padded(128, 2), Access::FragmentB).is_ok());
}

/// For a row stride of `16 s` bytes, 8 rows fall on 8 / gcd(s, 8) places: gcd(s, 8)-way.
#[test]
fn every_padding_follows_the_closed_form() {
    for pad in (0..=256).step_by(8) {
        let chunks = (64 + pad) / 8;
        let gcd = [8, 4, 2, 1].into_iter().find(|g| chunks % g == 0).unwrap();
        check(&padded(64, pad), Access::Ldmatrix, gcd);
        check(&padded(64, pad), Access::LdmatrixTrans, gcd);
        check(&padded(64, pad), COLUMN_WISE, gcd);
    }
}

/// f32 accumulator pairs are 8 bytes per lane: half warps of 4 rows by 32 bytes.
#[test]
fn wide_accumulators_go_by_half_warps() {
    let tile = |cols, pad| SmemLayout::padded(64, cols, pad, 4).unwrap();
    let count = check(&tile(128, 0), Access::FragmentC, 4);
    assert_eq!((count.instructions, count.ideal_wavefronts), (4 * 16 * 2, 4 * 16 * 2 * 2));
    check(&tile(128, 8), Access::FragmentC, 1);
    check(&tile(128, 4), Access::FragmentC, 2);
    assert!(matches!(conflicts(&tile(128, 1), Access::FragmentC), Err(BankError::Misaligned { .. })));
}

/// Lanes that read the same word, or halves of one, do not conflict.
#[test]
fn equal_words_are_served_together() {
    let broadcast = SmemLayout {
        tile: SwizzledLayout { swizzle: Swizzle::NONE, offset: 0, layout: "(16,16):(0,1)".parse().unwrap() },
        elem_bytes: 2,
    };
    check(&broadcast, Access::FragmentBTrans, 1);
    let count = check(&broadcast, Access::Ldmatrix, 1);
    assert!(count.phases.iter().all(|p| p.banks == 4));
    // 32 lanes of 16 bits in 64 bytes: half of a wavefront is idle.
    assert_eq!(check(&swizzled(64), Access::FragmentBTrans, 1).bandwidth_share(), 0.5);
    assert_eq!(check(&swizzled(64), Access::Ldmatrix, 1).bandwidth_share(), 1.0);
}

/// Unlike phases are not averaged away: padded rows are free until a swizzle moves some of them onto others.
#[test]
fn the_worst_phase_is_found() {
    let uneven = SmemLayout {
        tile: SwizzledLayout {
            swizzle: Swizzle { bits: 1, base: 3, shift: 6 },
            offset: 0,
            layout: "(16,64):(72,1)".parse().unwrap(),
        },
        elem_bytes: 2,
    };
    let count = conflicts(&uneven, Access::Ldmatrix).unwrap();
    assert_eq!(count.ways, count.phases.iter().map(|p| p.wavefronts).max().unwrap());
    assert!(count.ways > 1 && count.wavefronts < count.ways * count.ideal_wavefronts);
    let worst = count.phases.iter().find(|p| p.wavefronts == count.ways).unwrap();
    assert!(worst.row < 16 && worst.col < 64 && worst.busiest_bank < 32);
}

#[test]
fn bank_of_an_element() {
    let smem = plain(128);
    assert_eq!((smem.rows(), smem.cols()), (64, 128));
    assert_eq!((smem.byte_of(1, 0), smem.bank_of(1, 0)), (Ok(256), Ok(0)));
    assert_eq!(smem.bank_of(0, 3), Ok(1));
    assert_eq!(swizzled(128).byte_of(0, 64), Ok(64 * 128), "the second panel follows the first");
    assert_eq!(swizzled(64).bank_of(1, 0), Ok(4), "row 1 moves by one 16-byte chunk");
    assert_eq!(smem.byte_of(64, 0), Err(BankError::Layout(LayoutError::OutOfDomain { index: 64, size: 64 })));
}

#[test]
fn survey_reports_every_access_or_the_reason() {
    let all = survey(&swizzled(128));
    assert_eq!(all.len(), 10);
    assert!(
        all.iter().all(|(access, count)| count.as_ref().is_ok_and(|c| c.is_free() && c.access == *access))
    );
    let bytes = survey(&SmemLayout::swizzled(64, 128, 1).unwrap());
    let (fine, refused): (Vec<_>, Vec<_>) = bytes.into_iter().partition(|(_, count)| count.is_ok());
    assert_eq!((fine.len(), refused.len()), (3, 7));
    assert_eq!(
        refused[0].1.as_ref().unwrap_err().to_string(),
        "ldmatrix.x4.trans takes elements of 2 bytes; the tile's have 1"
    );
    let json = serde_json::to_value(fine[0].1.as_ref().unwrap()).unwrap();
    assert_eq!(json["access"]["CpAsync16"]["lanes_per_row"], 8);
}

#[test]
fn bad_input_is_refused_by_name() {
    let refuse = |smem: &SmemLayout, access| conflicts(smem, access).unwrap_err();
    let raw = |layout: &str, swizzle, offset, elem_bytes| SmemLayout {
        tile: SwizzledLayout { swizzle, offset, layout: layout.parse().unwrap() },
        elem_bytes,
    };
    assert_eq!(
        refuse(&SmemLayout::row_major(24, 128, 2).unwrap(), Access::Ldmatrix).to_string(),
        "ldmatrix.x4 works on blocks of 16 x 16 elements; a tile of 24 x 128 has no whole number of them"
    );
    for lanes_per_row in [0, 3, 64, u64::MAX] {
        let error = refuse(&plain(128), Access::CpAsync16 { lanes_per_row });
        assert_eq!(error, BankError::Lanes { lanes: lanes_per_row });
    }
    assert!(matches!(
        refuse(&raw("(64,64):(1,64)", Swizzle::NONE, 0, 2), Access::Ldmatrix),
        BankError::Torn { .. }
    ));
    assert!(matches!(
        refuse(&raw("(64,64):(64,1)", Swizzle { bits: 2, base: 2, shift: 4 }, 0, 2), Access::Ldmatrix),
        BankError::Misaligned { row: 1, .. }
    ));
    assert!(matches!(
        refuse(&raw("(64,64):(64,1)", Swizzle::NONE, 4, 2), Access::Ldmatrix),
        BankError::Misaligned { byte: 8, .. }
    ));
    assert!(matches!(
        refuse(&raw("4096:1", Swizzle::NONE, 0, 2), Access::Ldmatrix),
        BankError::NotAMatrix { rank: 1, .. }
    ));
    assert!(matches!(
        refuse(&raw("(64,64):(64,1)", Swizzle::NONE, 0, 3), CP_ASYNC),
        BankError::ElemBytes { have: 3 }
    ));
    assert!(matches!(
        refuse(&raw("(64,64):(64,1)", Swizzle { bits: 3, base: 3, shift: 1 }, 0, 2), CP_ASYNC),
        BankError::Swizzle(SwizzleError::Overlap { .. })
    ));
    assert!(matches!(
        refuse(&raw("(64,64):(64,1)", Swizzle::NONE, u64::MAX - 4, 2), CP_ASYNC),
        BankError::Swizzle(_)
    ));
    for layout in ["(4096,4096):(4096,1)", "(4294967296,2147483648):(0,0)", "(2,2):(9223372036854775807,1)"] {
        assert!(
            matches!(refuse(&raw(layout, Swizzle::NONE, 0, 2), CP_ASYNC), BankError::TooLarge { .. }),
            "{layout}"
        );
    }
    assert_eq!(
        SmemLayout::swizzled(64, 100, 2),
        Err(BankError::Swizzle(SwizzleError::Row { row_bytes: 200 }))
    );
    assert!(
        SmemLayout::swizzled(64, u64::MAX, 2).is_err() && SmemLayout::padded(64, u64::MAX, 1, 2).is_err()
    );
    assert!(SmemLayout::panels(64, 64, SwizzleMode::B128, 0).is_err());
    assert!(SmemLayout::row_major(0, 64, 2).is_err());
    assert!(serde_json::from_str::<SmemLayout>(r#"{"tile":1,"elem_bytes":2,"colour":"red"}"#).is_err());
}

/// `ldmatrix` of one 8-row matrix after another, by definition: distinct words per bank, the most of any
/// bank.
fn ldmatrix_by_definition(smem: &SmemLayout) -> u64 {
    let mut total = 0;
    for (top, left) in
        (0..smem.rows()).step_by(8).flat_map(|r| (0..smem.cols()).step_by(8).map(move |c| (r, c)))
    {
        let mut words: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
        for (row, col) in (top..top + 8).flat_map(|r| (left..left + 8).map(move |c| (r, c))) {
            let word = smem.byte_of(row, col).unwrap() / 4;
            words.entry(word % 32).or_default().insert(word);
        }
        total += words.values().map(|w| w.len() as u64).max().unwrap();
    }
    total
}

/// What Nsight Compute counted on an H100 for the SM80-class forward (NB-032): B = 2, 8 heads, N = 1024, head
/// dim 128, f16, no mask, tiles of 64 x 64 over four warps, Q read from shared memory at every step.
#[test]
fn counts_are_those_of_the_gpu() {
    // Heads, tiles of queries, warps, and steps over tiles of keys.
    const WARP_STEPS: u64 = 2 * 8 * 16 * 4 * 16;
    let accesses = [
        (true, [Access::Ldmatrix, Access::Ldmatrix, Access::LdmatrixTrans]),
        (false, [Access::FragmentA, Access::FragmentB, Access::FragmentBTrans]),
    ];
    // Instructions, and wavefronts as plain rows and swizzled. The GPU's are 8 to 12 thousand above the
    // count, whatever the kernel: loads that meet the copies of other warps.
    let counted = [(1_179_648, 37_760_631, 4_726_263), (6_815_744, 37_760_587, 6_818_462)];
    for ((ldmatrix, [of_q, of_k, of_v]), (instructions, plain, swizzled)) in accesses.into_iter().zip(counted)
    {
        for (swizzle, measured) in [(false, plain), (true, swizzled)] {
            let tile = |rows| {
                let make = if swizzle { SmemLayout::swizzled } else { SmemLayout::row_major };
                make(rows, 128, 2).unwrap()
            };
            let counts = [(16, of_q), (64, of_k), (64, of_v)]
                .map(|(rows, access)| conflicts(&tile(rows), access).unwrap());
            let sum = |value: fn(&Conflicts) -> u64| WARP_STEPS * counts.iter().map(value).sum::<u64>();
            assert_eq!(sum(|count| count.instructions), instructions, "ldmatrix {ldmatrix}");
            let wavefronts = sum(|count| count.wavefronts);
            let over = measured as i64 - wavefronts as i64;
            assert!(
                (0..20_000).contains(&over),
                "ldmatrix {ldmatrix}, swizzle {swizzle}: {wavefronts}, GPU {measured}"
            );
        }
    }
    // Q once and K and V at every step, by cp.async.
    let copies = conflicts(&SmemLayout::swizzled(64, 128, 2).unwrap(), CP_ASYNC).unwrap();
    let tiles = 2 * 8 * 16 * (1 + 2 * 16);
    assert_eq!((tiles * copies.instructions, tiles * copies.wavefronts), (270_336, 1_081_344));
}

/// Blocks of 16 rows and columns, with `pad` times 8 elements after each row.
fn rows_of(row_blocks: u64, col_blocks: u64, pad: u64) -> Layout {
    Layout::from_modes(&[(row_blocks * 16, col_blocks * 16 + pad * 8), (col_blocks * 16, 1)]).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn counts_agree_with_the_definition(
        row_blocks in 1u64..5, col_blocks in 1u64..9, pad in 0u64..20, bits in 0u32..4, shift in 3i32..7,
    ) {
        let smem = SmemLayout {
            tile: SwizzledLayout {
                swizzle: Swizzle { bits, base: 3, shift },
                offset: 0,
                layout: rows_of(row_blocks, col_blocks, pad),
            },
            elem_bytes: 2,
        };
        let count = conflicts(&smem, Access::Ldmatrix).unwrap();
        prop_assert_eq!(count.wavefronts, ldmatrix_by_definition(&smem));
        prop_assert_eq!(count.bytes, smem.rows() * smem.cols() * 2);
        prop_assert!(count.ideal_wavefronts <= count.wavefronts && count.ways <= 8);
        for access in ACCESSES.into_iter().filter(|a| !matches!(a, Access::CpAsync16 { .. })) {
            if let Ok(count) = conflicts(&smem, access) {
                prop_assert!(count.phases.iter().all(|p| (1..=32).contains(&p.wavefronts)));
                prop_assert_eq!(count.bytes, smem.rows() * smem.cols() * 2);
            }
        }
    }
}
