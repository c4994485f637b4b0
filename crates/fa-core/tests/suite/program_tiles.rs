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
