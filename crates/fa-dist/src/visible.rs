//! What the mask of a program leaves of queries and keys: found by the states of tiles, which are proven by
//! ranges of values without a look at every pair.

use std::cell::Cell;
use std::ops::Range;

use fa_core::program::{Deps, Program, Tile, TileState, Value};
use fa_core::{Mask, Problem};

/// The side of the smallest tile that is told from its neighbours, as a kernel's.
const TILE: usize = 128;

/// The most tiles along a side of what is counted first: those of longer sides are larger.
const TILES: usize = 128;

/// The most states that a count looks at, for each sequence and head. A mask that is clear of most tiles, as
/// documents are, takes few: its tiles are halved until there are as many.
const MOST_STATES: usize = 1 << 16;

/// The most tiles of keys of which the first and the last are found.
const MOST_TILES: usize = 1024;

/// The most sequences and heads that are looked at one by one.
const MOST_CELLS: usize = 64;

/// The mask of a program over queries and keys that it counts itself.
pub(crate) struct Seen<'a> {
    program: &'static Program,
    scalars: &'a [Option<Value>],
    /// Sequence, query head and K/V head of what is looked at.
    cells: Vec<[i32; 3]>,
    lengths: (usize, usize),
    off: i64,
}

impl<'a> Seen<'a> {
    /// What the program of `problem` sees, by the values of its scalars that are known; `None` where it has
    /// no mask, or one of too many sequences and heads apart, and of sequences that are packed.
    pub(crate) fn of(problem: &Problem, scalars: &'a [Option<Value>]) -> Option<Seen<'a>> {
        let program = problem.score.program?.get();
        let deps = program.deps(program.mask()?);
        let (batch, heads) = (problem.lengths.sequences(), problem.heads_q);
        let sequences = if deps.has(Deps::BATCH) { batch } else { batch.min(1) };
        let heads = if deps.has(Deps::HEAD) { heads } else { heads.min(1) };
        if sequences * heads > MOST_CELLS || !problem.lengths.is_uniform() {
            return None;
        }
        let group = problem.group_size().max(1);
        let of_head = |b: usize, h: usize| [b, h, h / group].map(|number| number as i32);
        let cells = (0..sequences).flat_map(|b| (0..heads).map(move |h| of_head(b, h))).collect();
        let lengths = (problem.lengths.max_q(), problem.lengths.max_k());
        let off = lengths.1 as i64 - lengths.0 as i64 + problem.mask.offset;
        Some(Seen { program, scalars, cells, lengths, off })
    }

    /// The state of rows and keys, at least one of each, in a sequence and head.
    fn state_of(&self, [b, h, hk]: [i32; 3], rows: &Range<usize>, keys: &Range<usize>) -> TileState {
        let of = |range: &Range<usize>| range.start as i32..range.end as i32;
        let (sq, sk) = (self.lengths.0 as i32, self.lengths.1 as i32);
        let tile = Tile { b, h, hk, q: of(rows), k: of(keys), sq, sk, off: self.off as i32 };
        self.program.tile_state_of_any(self.scalars, &tile)
    }

    /// Whether no query of any sequence and head sees a key.
    fn is_empty(&self, rows: &Range<usize>, keys: &Range<usize>) -> bool {
        self.cells.iter().all(|cell| self.state_of(*cell, rows, keys) == TileState::Empty)
    }

    /// The keys that rows may see, from the first to the last, by whole tiles of at least `tile` keys but for
    /// the ends; `None` where there are none.
    pub(crate) fn keys(&self, rows: &Range<usize>, keys: &Range<usize>, tile: usize) -> Option<Range<usize>> {
        let tile = tile.max(1) * keys.end.div_ceil(tile.max(1)).div_ceil(MOST_TILES).max(1);
        let of = |tiles: Range<usize>| (tiles.start * tile).max(keys.start)..(tiles.end * tile).min(keys.end);
        // Few rows at a time, so that ranges tell more.
        let step = rows.len().div_ceil(8).max(TILE);
        let parts: Vec<Range<usize>> =
            rows.clone().step_by(step).map(|row| row..(row + step).min(rows.end)).collect();
        let is_empty = |tiles: Range<usize>| {
            let keys = of(tiles);
            parts.iter().all(|rows| self.is_empty(rows, &keys))
        };
        let all = keys.start / tile..keys.end.div_ceil(tile);
        let [first, last] = [true, false].map(|is_first| border(all.clone(), &is_empty, is_first));
        Some(of(first?..last? + 1))
    }

    /// Visible tiles under `mask` as well, as a share of those that the mask alone leaves.
    pub(crate) fn share(&self, mask: Mask) -> f64 {
        let (rows, keys) = self.lengths;
        if rows == 0 || keys == 0 {
            return 1.0;
        }
        let mut sides = [rows, keys].map(|len| TILE.max(len.div_ceil(TILES).next_multiple_of(TILE)));
        loop {
            let states = Cell::new(0);
            let share = Grid { seen: self, mask, sides, states: &states }.share();
            // Tiles of half the sides are four times as many at most.
            if sides == [TILE; 2] || 4 * states.get() > MOST_STATES * self.cells.len() {
                return share;
            }
            sides = sides.map(|side| TILE.max((side / 2).next_multiple_of(TILE)));
        }
    }
}

/// The first of some tiles that is not empty, or else the last, by halves.
fn border(tiles: Range<usize>, is_empty: &dyn Fn(Range<usize>) -> bool, is_first: bool) -> Option<usize> {
    if tiles.is_empty() || is_empty(tiles.clone()) {
        return None;
    }
    if tiles.len() == 1 {
        return Some(tiles.start);
    }
    let middle = tiles.start + tiles.len() / 2;
    let (low, high) = (tiles.start..middle, middle..tiles.end);
    let (near, far) = if is_first { (low, high) } else { (high, low) };
    border(near, is_empty, is_first).or_else(|| border(far, is_empty, is_first))
}

/// Tiles of queries and keys.
struct Grid<'a> {
    seen: &'a Seen<'a>,
    mask: Mask,
    sides: [usize; 2],
    /// How many states were looked at.
    states: &'a Cell<usize>,
}

impl Grid<'_> {
    /// Visible tiles of all sequences and heads as a share of those that the mask leaves.
    fn share(&self) -> f64 {
        let (rows, keys) = self.seen.lengths;
        let tiles = [rows.div_ceil(self.sides[0]), keys.div_ceil(self.sides[1])];
        let all = self.under_mask(&(0..tiles[0]), &(0..tiles[1]));
        let cells = &self.seen.cells;
        let found: usize = cells.iter().map(|cell| self.count(*cell, 0..tiles[0], 0..tiles[1])).sum();
        if all == 0 { 1.0 } else { found as f64 / (all * cells.len()) as f64 }
    }

    fn rows(&self, tiles: &Range<usize>) -> Range<usize> {
        tiles.start * self.sides[0]..(tiles.end * self.sides[0]).min(self.seen.lengths.0)
    }

    fn keys(&self, tiles: &Range<usize>) -> Range<usize> {
        tiles.start * self.sides[1]..(tiles.end * self.sides[1]).min(self.seen.lengths.1)
    }

    /// Tiles that the mask leaves.
    fn under_mask(&self, rows: &Range<usize>, keys: &Range<usize>) -> usize {
        let (len_q, len_k) = self.seen.lengths;
        let of_row = |row: usize| {
            let rows = self.rows(&(row..row + 1));
            let ends = [rows.start, rows.end - 1].map(|row| self.mask.keys(row, len_q, len_k));
            let (first, end) = (ends[0].start.min(ends[1].start), ends[0].end.max(ends[1].end));
            let of_row = first / self.sides[1]..end.div_ceil(self.sides[1]);
            if first >= end {
                0
            } else {
                of_row.end.min(keys.end).saturating_sub(of_row.start.max(keys.start))
            }
        };
        rows.clone().map(of_row).sum()
    }

    /// Those of them of which the program leaves something.
    fn count(&self, cell: [i32; 3], rows: Range<usize>, keys: Range<usize>) -> usize {
        let under = self.under_mask(&rows, &keys);
        if under == 0 {
            return 0;
        }
        self.states.set(self.states.get() + 1);
        match self.seen.state_of(cell, &self.rows(&rows), &self.keys(&keys)) {
            TileState::Empty => 0,
            TileState::Full => under,
            TileState::Partial if rows.len() == 1 && keys.len() == 1 => 1,
            TileState::Partial if rows.len() >= keys.len() => {
                let middle = rows.start + rows.len() / 2;
                let halves = [rows.start..middle, middle..rows.end];
                halves.into_iter().map(|rows| self.count(cell, rows, keys.clone())).sum()
            }
            TileState::Partial => {
                let middle = keys.start + keys.len() / 2;
                let halves = [keys.start..middle, middle..keys.end];
                halves.into_iter().map(|keys| self.count(cell, rows.clone(), keys)).sum()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fa_core::program::{Inputs, Point, Precision};
    use fa_core::{Dtype, Lengths};

    const TEXTS: [&str; 5] = [
        "mask = q // 300 == k // 300;",
        "mask = k < 130 or q - k < 200;",
        "mask = (q + h) // 256 != k // 256;",
        "mask = k % 3 != 1;",
        "mask = k > 5000;",
    ];

    fn of(text: &str, len: (usize, usize), mask: Mask) -> Problem {
        let problem = Problem::square(1, len.0, 2, 64, mask, Dtype::F32);
        let problem = problem.with_lengths(Lengths::uniform(1, len.0, len.1));
        let program = Program::parse(text).unwrap().intern().unwrap();
        problem.with_score(problem.score.with_program(Some(program)))
    }

    /// Whether some head's query sees a key.
    fn sees(problem: &Problem, q: usize, k: usize) -> bool {
        let program = problem.score.program.unwrap();
        let inputs = Inputs::new(&program, Vec::new(), Vec::new()).unwrap();
        let (sq, sk) = (problem.lengths.max_q() as i32, problem.lengths.max_k() as i32);
        (0..problem.heads_q as i32).any(|h| {
            let at = Point { s: 0.0, b: 0, h, hk: h, q: q as i32, k: k as i32, sq, sk, off: sk - sq };
            program.eval(&inputs, &at, Precision::F64).visible
        })
    }

    /// No key that a row sees is left out, and of documents and prefixes few that none sees are kept.
    #[test]
    fn keys_are_those_from_the_first_to_the_last_that_is_seen() {
        let len = (1000, 1200);
        for text in TEXTS {
            let problem = of(text, len, Mask::FULL);
            let seen = Seen::of(&problem, &[]).unwrap();
            for rows in [0..1000, 0..250, 250..500, 613..1000] {
                for keys in [0..1200, 100..700, 600..1200] {
                    let found = seen.keys(&rows, &keys, 64);
                    let of_row = |row: usize| keys.clone().filter(move |key| sees(&problem, row, *key));
                    let all: Vec<usize> = rows.clone().flat_map(of_row).collect();
                    let want = all.iter().min().zip(all.iter().max());
                    let (Some((first, last)), Some(found)) = (want, &found) else {
                        assert!(want.is_none() && found.is_none(), "{text} {rows:?} {keys:?} {found:?}");
                        continue;
                    };
                    assert!(
                        found.contains(first) && found.contains(last),
                        "{text} {rows:?} {keys:?} {found:?}"
                    );
                    assert!(found.start + 64 > *first && found.end <= last + 64, "{text} {found:?} {want:?}");
                }
            }
        }
    }

    #[test]
    fn shares_are_of_the_tiles_that_masks_leave() {
        let share_of = |text: &str, len: usize, mask| {
            let problem = of(text, (len, len), mask);
            Seen::of(&problem, &[]).unwrap().share(mask)
        };
        let share = |text: &str, mask| share_of(text, 4096, mask);
        // Four of 16 squares; under a causal mask four triangles of 36 tiles of the 528.
        assert_eq!(share("mask = q // 1024 == k // 1024;", Mask::FULL), 0.25);
        assert_eq!(share("mask = q // 1024 == k // 1024;", Mask::CAUSAL), 4.0 * 36.0 / 528.0);
        assert_eq!(share("mask = k % 3 != 1;", Mask::CAUSAL), 1.0);
        assert_eq!(share("mask = k > 5000;", Mask::FULL), 0.0);
        // Short documents of long sequences: 256 triangles of ten tiles, of 1,024 rows of tiles.
        let documents = share_of("mask = q // 512 == k // 512;", 1 << 17, Mask::CAUSAL);
        assert_eq!(documents, 2560.0 / (512.0 * 1025.0));
        // Half of the heads see nothing.
        assert_eq!(share("mask = h == 1;", Mask::FULL), 0.5);
        // Of scalars without a value anything is possible.
        assert_eq!(share("scalar w: i32; mask = q - k < w;", Mask::CAUSAL), 1.0);
    }
}
