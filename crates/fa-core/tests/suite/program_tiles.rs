//! Tile states and intervals against every pair.

use fa_core::program::{Inputs, Point, Precision, Program, Tile, TileState};

use crate::masks::{Arrays, MASKS};
use crate::random::{Random, random_program};
use crate::values::Values;

/// The state of `tile` by every pair.
fn counted(program: &Program, inputs: &Inputs<'_>, tile: &Tile) -> TileState {
    let Tile { b, h, hk, sq, sk, off, .. } = *tile;
    let (mut seen, mut hidden) = (false, false);
    for (q, k) in tile.q.clone().flat_map(|q| tile.k.clone().map(move |k| (q, k))) {
        let point = Point { s: 0.0, b, h, hk, q, k, sq, sk, off };
        if program.eval(inputs, &point, Precision::F32).visible { seen = true } else { hidden = true }
    }
    match (seen, hidden) {
        (true, true) => TileState::Partial,
        (true, false) => TileState::Full,
        (false, _) => TileState::Empty,
    }
}

/// Tiles of a sequence, the last of each side cut off.
fn tiles(sq: i32, sk: i32, rows: i32, columns: i32, b: i32, h: i32) -> Vec<Tile> {
    let ranges = |length: i32, step: i32| {
        (0..length).step_by(step as usize).map(move |at| at..(at + step).min(length))
    };
    ranges(sq, rows)
        .flat_map(|q| ranges(sk, columns).map(move |k| (q.clone(), k)))
        .map(|(q, k)| Tile { b, h, hk: h / 2, q, k, sq, sk, off: sk - sq })
        .collect()
}

#[test]
fn states_of_users_masks_are_those_of_their_pairs() {
    let arrays = Arrays::new();
    for mask in &MASKS {
        let program = Program::parse(mask.text).unwrap_or_else(|error| panic!("{}: {error}", mask.name));
        let inputs = arrays.inputs(&program, mask.scalars);
        let (mut tight, mut total) = (0, 0);
        for (sq, sk) in [(77, 77), (1, 113), (53, 101), (101, 53), (80, 80)] {
            for (rows, columns, b, h) in [(16, 24, 0, 0), (64, 16, 1, 3), (7, 5, 0, 1)] {
                for tile in tiles(sq, sk, rows, columns, b, h) {
                    let (found, expected) =
                        (program.tile_state(&inputs, &tile), counted(&program, &inputs, &tile));
                    total += 1;
                    tight += i32::from(found == expected);
                    if found != expected {
                        assert_eq!(found, TileState::Partial, "{}: {tile:?} is {expected:?}", mask.name);
                    }
                }
            }
        }
        assert!(tight * 10 >= total * 9, "{}: {tight} of {total} states found", mask.name);
    }
}

#[test]
fn states_of_random_masks_are_never_wrong() {
    let (mut proven, mut total) = (0, 0);
    for seed in 0..1000 {
        let program = Program::parse(&random_program(seed)).unwrap();
        let values = Values::new(seed);
        let inputs = values.inputs(&program);
        let mut random = Random(seed);
        let [sq, sk] = [1, 2].map(|_| 1 + random.below(40) as i32);
        for tile in tiles(sq, sk, 8, 8, random.below(2) as i32, random.below(4) as i32) {
            let (found, expected) = (program.tile_state(&inputs, &tile), counted(&program, &inputs, &tile));
            assert!(
                found == expected || found == TileState::Partial,
                "{found:?}, is {expected:?}: {tile:?}\n{program}"
            );
            proven += i32::from(found != TileState::Partial);
            total += 1;
        }
    }
    assert!(proven * 3 > total, "{proven} of {total} proven");
}

/// The keys that query `q` sees, by every key.
fn counted_row(program: &Program, inputs: &Inputs<'_>, point: &Point) -> Vec<std::ops::Range<i32>> {
    let mut found: Vec<std::ops::Range<i32>> = Vec::new();
    for k in 0..point.sk {
        if program.eval(inputs, &Point { k, ..*point }, Precision::F32).visible {
            match found.last_mut() {
                Some(last) if last.end == k => last.end = k + 1,
                _ => found.push(k..k + 1),
            }
        }
    }
    found
}

#[test]
fn intervals_are_the_visible_keys() {
    let arrays = Arrays::new();
    for mask in &MASKS {
        let program = Program::parse(mask.text).unwrap();
        let inputs = arrays.inputs(&program, mask.scalars);
        let mut all = true;
        for (sq, sk, b, h) in [(77, 77, 0, 0), (1, 113, 1, 1), (53, 101, 0, 3), (101, 53, 1, 2)] {
            for q in 0..sq {
                let point = Point { s: 0.0, b, h, hk: h / 2, q, k: 0, sq, sk, off: sk - sq };
                let expected = counted_row(&program, &inputs, &point);
                match program.row_intervals(&inputs, &point) {
                    Some(found) => assert_eq!(found, expected, "{}: {point:?}", mask.name),
                    None => all = false,
                }
            }
        }
        assert_eq!(all, mask.intervals, "{}: every row is of at most two intervals", mask.name);
    }
    let mut found = 0;
    for seed in 0..1000 {
        let program = Program::parse(&random_program(seed)).unwrap();
        let values = Values::new(seed);
        let inputs = values.inputs(&program);
        let mut random = Random(seed);
        for _ in 0..8 {
            let [b, h, q, sq, sk] = [2, 4, 40, 60, 60].map(|end| random.below(end) as i32);
            let point = Point { s: 0.0, b, h, hk: h / 2, q, k: 0, sq: sq + 1, sk: sk + 1, off: sk - sq };
            if let Some(own) = program.row_intervals(&inputs, &point) {
                assert_eq!(own, counted_row(&program, &inputs, &point), "{point:?}\n{program}");
                found += 1;
            }
        }
    }
    assert!(found > 3000, "{found} rows of random programs");
    // Chunks without end: no list of pieces is made.
    let program = Program::parse("q // 8 == k // 8 and k <= q").unwrap();
    let inputs = Inputs::new(&program, vec![], vec![]).unwrap();
    let point = Point { q: 1_000_003, sq: 1 << 20, sk: 1 << 20, ..Point::default() };
    let expected: Vec<_> = std::iter::once(1_000_000..1_000_004).collect();
    assert_eq!(program.row_intervals(&inputs, &point), Some(expected));
}

#[test]
fn pairs_of_a_run_are_seen_alike() {
    let runs = |text: &str| Program::parse(text).unwrap().mask_runs();
    assert_eq!(runs("array x: u8[_, _]; mask = x[q // 128, k // 64] != 0;"), [128, 64]);
    assert_eq!(runs("array x: bits[_, _]; mask = x[(q >> 4) // 3, k >> 2];"), [48, 4]);
    assert_eq!(runs("mask = q // 12 == k // 8 or q // 18 == 3;"), [6, 8]);
    assert_eq!(runs("array x: bool[_, _]; mask = x[b, k];"), [1 << 15, 1]);
    assert_eq!(runs("mask = k <= q + off;"), [1, 1]);
    let (mut all, mut some) = (0, 0);
    for seed in 0..2000 {
        let program = Program::parse(&random_program(seed)).unwrap();
        let [of_q, of_k] = program.mask_runs().map(|run| run as i32);
        if program.mask().is_none() || (of_q, of_k) == (1, 1) {
            continue;
        }
        let values = Values::new(seed);
        let inputs = values.inputs(&program);
        let mut random = Random(seed);
        for _ in 0..20 {
            let [b, h, q, k] = [2, 4, 60, 60].map(|end| random.below(end) as i32);
            let sees = |q, k| {
                let point = Point { s: 0.0, b, h, hk: h / 2, q, k, sq: 60, sk: 70, off: 10 };
                program.eval(&inputs, &point, Precision::F32).visible
            };
            assert_eq!(sees(q, k), sees(q / of_q * of_q, k / of_k * of_k), "{q} {k}\n{program}");
            all += 1;
            some += i32::from(of_q > 1 && of_q < 100 || of_k > 1 && of_k < 100);
        }
    }
    assert!(all > 1000 && some > 20, "{some} of {all}");
}

#[test]
fn lists_of_blocks_are_guessed() {
    let program = Program::parse("array x: u8[_, _]; mask = x[q // 128, k // 128] != 0;").unwrap();
    assert!(program.mask_lists_blocks());
    let count = |rows: i32, columns: i32| {
        let tiles = tiles(4096, 4096, rows, columns, 0, 0);
        let of = |state| tiles.iter().filter(|tile| program.tile_state_by_guess(tile) == state).count();
        let all = tiles.len() as f64;
        [TileState::Empty, TileState::Partial, TileState::Full].map(|state| of(state) as f64 / all)
    };
    let [empty, partial, _] = count(128, 128);
    assert!(partial == 0.0 && (0.6..0.73).contains(&empty), "{empty} {partial}");
    let [empty, partial, _] = count(192, 80);
    assert!(partial > 0.3 && empty < 0.4, "{empty} {partial}");
    // What each pair has of its own is no list.
    let pairs = Program::parse("array x: bits[_, _]; mask = x[q, k];").unwrap();
    assert!(!pairs.mask_lists_blocks());
}
