//! Tiles and their lengths: a problem cut into tiles, and the time that a GPU's slots take for them.

use std::collections::BTreeMap;
use std::ops::Range;

use fa_core::Problem;
use fa_core::program::{Interned, Program, Tile, TileState};
use fa_core::spec::{TileOrder, tile_queries};

/// A problem's query tiles, sorted into classes.
#[derive(Clone, Debug, PartialEq)]
pub struct Work {
    /// Tiles over all heads and sequences.
    pub tiles: f64,
    /// Classes of similar tiles, over all heads and sequences.
    pub classes: Vec<TileClass>,
    /// The tile with the most steps.
    pub longest: TileClass,
}

/// Tiles of the same length, or neighbours of similar length.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TileClass {
    /// How many, over all heads and sequences.
    pub count: f64,
    /// Steps of `tile_n` keys of one tile, on average.
    pub steps: f64,
    /// Those of them that test a mask.
    pub masked: f64,
}

/// The order in which CTAs take tiles, as far as it affects the end of the launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// The longest first, from one queue.
    LongestFirst,
    /// From one queue (or the hardware's), the longest of a head last.
    ShortestFirst,
    /// From one queue, the longest of each head first.
    LongestFirstPerHead,
    /// Assigned statically by number.
    Fixed,
}

impl Queue {
    /// Of tiles that are assigned, or else drawn in this order.
    pub(crate) fn of(is_assigned: bool, order: TileOrder) -> Queue {
        if is_assigned {
            return Queue::Fixed;
        }
        match order {
            TileOrder::LongestFirst => Queue::LongestFirst,
            TileOrder::Natural => Queue::ShortestFirst,
        }
    }
}

/// At most so many kinds of tiles, or runs of neighbouring ones, are distinguished.
const CLASSES: usize = 64;

/// At most so many tiles of a run are counted, evenly spaced.
const SAMPLES: usize = 32;

impl Work {
    /// Cuts `problem` into tiles of `tile_m` rows and steps of `tile_n` keys (0 counts as 1). With `packed`,
    /// the rows of a K/V head's query heads lie together, of as many queries as fit the tile.
    ///
    /// Where lengths are on the device every sequence counts as one of mean length, and the longest tile is
    /// that of a sequence with the most queries and keys.
    pub fn of(problem: &Problem, tile_m: u32, tile_n: u32, packed: bool) -> Work {
        let group = if packed { problem.group_size() } else { 1 };
        let heads = problem.lengths.sequences() as f64 * (problem.heads_q / group) as f64;
        let queries = tile_queries(tile_m, packed, group).max(1);
        let tile_n = tile_n.max(1) as usize;
        let tiles = |seqlen_q: usize| seqlen_q.div_ceil(queries);
        // Tiles that fit listed blocks visit no others.
        let lists = |program: &Interned| program.mask_lists_blocks();
        let program = problem.score.program.filter(lists);
        let count = |tile: usize, seqlen_q: usize, seqlen_k: usize| {
            let rows = tile * queries..((tile + 1) * queries).min(seqlen_q);
            let range = problem.mask.n_blocks(rows.clone(), seqlen_q, seqlen_k, tile_n);
            match program {
                Some(program) => {
                    let keys = |at: usize| at * tile_n..((at + 1) * tile_n).min(seqlen_k);
                    let part = |at: usize| (rows.clone(), keys(at));
                    left_by((program.get(), problem), range.begin..range.end, [seqlen_q, seqlen_k], part)
                }
                None => (range.len(), range.masked()),
            }
        };
        let (mean_q, mean_k) = (problem.lengths.mean_q(), problem.lengths.mean_k());
        let alike = problem.mask.is_full() && program.is_none();
        let work = Work::cut(alike, tiles(mean_q), heads, |tile| count(tile, mean_q, mean_k));
        work.with_longest(problem, |max_q, max_k| {
            (tiles(max_q) > 0).then(|| count(tiles(max_q) - 1, max_q, max_k))
        })
    }

    /// What [`Work::of`] has at least, without a look at its tiles: as many, and as many steps as `pairs`
    /// visible pairs of a query head fill, the same in each tile.
    pub(crate) fn at_least(
        problem: &Problem,
        (tile_m, tile_n): (u32, u32),
        packed: bool,
        pairs: f64,
    ) -> Work {
        let group = if packed { problem.group_size() } else { 1 };
        let sequences = problem.lengths.sequences() as f64;
        let queries = tile_queries(tile_m, packed, group).max(1);
        let of_head = problem.lengths.mean_q().div_ceil(queries);
        let tiles = sequences * (problem.heads_q / group) as f64 * of_head as f64;
        let pairs = sequences * problem.heads_q as f64 * pairs;
        let scores = (queries * group) as f64 * f64::from(tile_n);
        let steps = pairs / scores / tiles.max(1.0) * (1.0 - 1e-9);
        let class = TileClass { count: tiles, steps, masked: 0.0 };
        Work { tiles, classes: vec![class], longest: TileClass { count: 1.0, ..class } }
    }

    /// Cuts the backward of `problem` into tiles of `tile_n` keys and steps of `tile_m` queries. A tile loops
    /// over the queries of one of `splits` parts of its K/V head's query heads: equal parts, but for a last
    /// one that has what is left.
    pub fn of_keys(problem: &Problem, tile_m: u32, tile_n: u32, splits: usize) -> Work {
        let group = problem.group_size().max(1);
        let share = group.div_ceil(splits.max(1));
        let whole = Work::of_key_heads(problem, (tile_m, tile_n), group / share, share);
        match group % share {
            0 => whole,
            left => whole.and(Work::of_key_heads(problem, (tile_m, tile_n), 1, left)),
        }
    }

    /// Those of `parts` parts of `walks` query heads each.
    fn of_key_heads(problem: &Problem, (tile_m, tile_n): (u32, u32), parts: usize, walks: usize) -> Work {
        let heads = problem.lengths.sequences() as f64 * (problem.heads_kv * parts) as f64;
        let (tile_m, tile_n) = (tile_m.max(1) as usize, tile_n.max(1) as usize);
        // How many tiles a mask leaves that reads arrays is known on the device only.
        let is_known = |program: &Interned| {
            program.mask().is_some() && (!program.mask_reads_arrays() || program.mask_lists_blocks())
        };
        let program = problem.score.program.filter(is_known);
        let count = |tile: usize, seqlen_q: usize, seqlen_k: usize| {
            let keys = tile * tile_n..((tile + 1) * tile_n).min(seqlen_k);
            let range = problem.mask.m_blocks(keys.clone(), seqlen_q, seqlen_k, tile_m);
            let (steps, masked) = match program {
                Some(program) => {
                    let rows = |at: usize| at * tile_m..((at + 1) * tile_m).min(seqlen_q);
                    let part = |at: usize| (rows(at), keys.clone());
                    left_by((program.get(), problem), range.begin..range.end, [seqlen_q, seqlen_k], part)
                }
                None => (range.len(), range.masked()),
            };
            (walks * steps, walks * masked)
        };
        let (mean_q, mean_k) = (problem.lengths.mean_q(), problem.lengths.mean_k());
        let alike = problem.mask.is_full() && program.is_none();
        let work = Work::cut(alike, mean_k.div_ceil(tile_n), heads, |tile| count(tile, mean_q, mean_k));
        work.with_longest(problem, |max_q, max_k| (max_k > 0).then(|| count(0, max_q, max_k)))
    }

    /// Both, `self` with the longest tile.
    fn and(mut self, other: Work) -> Work {
        self.tiles += other.tiles;
        self.classes.extend(other.classes);
        self
    }

    /// The same work, whose longest tile is at least that of a sequence with the most queries and keys, which
    /// are those of all sequences at most.
    fn with_longest(
        mut self,
        problem: &Problem,
        count: impl FnOnce(usize, usize) -> Option<(usize, usize)>,
    ) -> Work {
        if problem.lengths.is_uniform() || self.tiles == 0.0 {
            return self;
        }
        let lengths = &problem.lengths;
        let most = (lengths.max_q().min(lengths.reach_q()), lengths.max_k().min(lengths.reach_k()));
        if let Some((steps, masked)) = count(most.0, most.1)
            && steps as f64 > self.longest.steps
        {
            self.longest = TileClass { count: 1.0, steps: steps as f64, masked: masked as f64 };
        }
        self
    }

    /// The same steps with the keys of every tile divided among `parts` CTAs, as evenly as whole steps can
    /// be: fewer parts for tiles of fewer steps.
    pub fn in_parts(&self, parts: usize) -> Work {
        if parts <= 1 {
            return self.clone();
        }
        let mut tiles = 0.0;
        let mut classes = Vec::with_capacity(2 * self.classes.len());
        for class in &self.classes {
            let own = own_parts(parts, class);
            tiles += class.count * own;
            // Of `own` parts some have one step more.
            let each = (class.steps / own).floor();
            let more = class.steps - each * own;
            let masked = class.masked / own;
            for (share, steps) in [(own - more, each), (more, each + 1.0)] {
                if share > 0.0 {
                    classes.push(TileClass { count: class.count * share, steps, masked: masked.min(steps) });
                }
            }
        }
        Work { tiles, classes, longest: self.longest_part(parts) }
    }

    /// The longest tile of [`Work::in_parts`].
    pub(crate) fn longest_part(&self, parts: usize) -> TileClass {
        let own = own_parts(parts, &self.longest);
        TileClass {
            count: 1.0,
            steps: (self.longest.steps / own).ceil(),
            masked: (self.longest.masked / own).ceil(),
        }
    }

    /// The longest part of the longest tile, as a multiple of an equal share of it.
    pub(crate) fn unevenness(&self, parts: usize) -> f64 {
        let own = own_parts(parts, &self.longest);
        self.longest_part(parts).steps * own / self.longest.steps.max(1.0)
    }

    /// The tiles of [`Work::in_parts`].
    pub(crate) fn tiles_in_parts(&self, parts: usize) -> f64 {
        self.classes.iter().map(|class| class.count * own_parts(parts, class)).sum()
    }

    /// Sorts a head's `m_tiles` tiles into classes: equal tiles where there are few kinds, else runs of
    /// neighbours. `count` gives a tile's steps and those of them that test a mask.
    /// With `alike` the first tile stands for all.
    fn cut(alike: bool, m_tiles: usize, heads: f64, count: impl Fn(usize) -> (usize, usize)) -> Work {
        let counted = if alike { m_tiles.min(1) } else { m_tiles };
        let tiles = heads * m_tiles as f64;
        if counted <= CLASSES * SAMPLES {
            let mut kinds: BTreeMap<(usize, usize), usize> = BTreeMap::new();
            (0..counted).for_each(|tile| *kinds.entry(count(tile)).or_default() += 1);
            if kinds.len() <= CLASSES {
                let share = tiles / counted.max(1) as f64;
                let class = |(&(steps, masked), &n): (&(usize, usize), &usize)| TileClass {
                    count: share * n as f64,
                    steps: steps as f64,
                    masked: masked as f64,
                };
                let classes: Vec<TileClass> = kinds.iter().map(class).collect();
                let longest =
                    classes.last().map_or(TileClass::default(), |&most| TileClass { count: 1.0, ..most });
                return Work { tiles, classes, longest };
            }
        }
        let mut most = (0, 0);
        let classes = (0..CLASSES)
            .map(|run| {
                let (begin, end) = (run * m_tiles / CLASSES, (run + 1) * m_tiles / CLASSES);
                let samples = (end - begin).min(SAMPLES);
                let (steps, masked) = (0..samples)
                    .map(|sample| count(begin + sample * (end - begin) / samples))
                    .inspect(|tile| most = most.max(*tile))
                    .fold((0, 0), |sum, tile| (sum.0 + tile.0, sum.1 + tile.1));
                let mean = |sum: usize| sum as f64 / samples as f64;
                TileClass { count: heads * (end - begin) as f64, steps: mean(steps), masked: mean(masked) }
            })
            .collect();
        let longest = TileClass { count: 1.0, steps: most.0 as f64, masked: most.1 as f64 };
        Work { tiles, classes, longest }
    }

    /// Steps over all tiles.
    pub fn steps(&self) -> f64 {
        self.classes.iter().map(|c| c.count * c.steps).sum()
    }

    /// Steps over all tiles that test a mask.
    pub fn masked(&self) -> f64 {
        self.classes.iter().map(|c| c.count * c.masked).sum()
    }

    /// Total length of all tiles and the time that `slots` slots take for them, in the unit of `length`.
    ///
    /// For a longest-first queue this is the largest of the even share, the longest tile and, for every `k`,
    /// `k` times the shortest of the `(k - 1) * slots + 1` longest tiles (some slot must take `k` of those):
    /// exact for equal tiles, a lower bound else. Other orders add the expected spread between the ends of
    /// slots, a share of the longest tile.
    pub fn makespan(&self, slots: f64, queue: Queue, length: impl Fn(&TileClass) -> f64) -> (f64, f64) {
        self.makespan_shared(slots, 1.0, queue, |class, _| length(class))
    }

    /// The same on `sms` SMs that hold `resident` tiles each. `length` is a tile's where the SM holds so
    /// many: what is left after the last whole wave runs on SMs with fewer tiles, and faster.
    pub fn makespan_shared(
        &self,
        sms: f64,
        resident: f64,
        queue: Queue,
        length: impl Fn(&TileClass, f64) -> f64,
    ) -> (f64, f64) {
        let slots = sms * resident;
        let mut classes: Vec<(f64, &TileClass)> =
            self.classes.iter().map(|class| (length(class, resident), class)).collect();
        classes.sort_by(|a, b| b.0.total_cmp(&a.0));
        let total: f64 = classes.iter().map(|(len, class)| len * class.count).sum();
        let Some((shortest, _)) = classes.last().filter(|_| total > 0.0) else {
            return (0.0, 0.0);
        };
        let longest = length(&self.longest, resident);
        let mut seen = 0.0;
        let mut end = longest.max(total / slots);
        for (len, class) in &classes {
            seen += class.count;
            // Whole waves before that of the class's last tile, beside which shorter tiles run too.
            let whole = ((seen - 1.0) / slots).floor().max(0.0);
            let beside = ((self.tiles - whole * slots) / sms).ceil().clamp(1.0, resident);
            end = end.max(whole * len + length(class, beside));
        }
        let spread = match queue {
            Queue::LongestFirst => 0.0,
            Queue::LongestFirstPerHead => 0.15,
            Queue::Fixed => 0.25,
            Queue::ShortestFirst => 0.5,
        };
        let apart = spread * (longest - shortest) * (1.0 - (slots / self.tiles).min(1.0));
        (total, end.max(total / slots + apart))
    }
}

/// The steps of `range` that a program's mask leaves, whatever its scalars are, and those of them that it
/// parts, where `part` says which queries and keys a step has; counted among [`SAMPLES`], evenly spaced.
fn left_by(
    (program, problem): (&Program, &Problem),
    range: Range<usize>,
    [seqlen_q, seqlen_k]: [usize; 2],
    part: impl Fn(usize) -> (Range<usize>, Range<usize>),
) -> (usize, usize) {
    let int = |x: usize| i32::try_from(x).unwrap_or(i32::MAX);
    let ints = |x: Range<usize>| int(x.start)..int(x.end);
    let last = [problem.lengths.sequences(), problem.heads_q, problem.heads_kv].map(|n| int(n).max(1) - 1);
    let samples = range.len().min(SAMPLES);
    let (mut seen, mut parted) = (0, 0);
    for sample in 0..samples {
        let (rows, keys) = part(range.start + sample * range.len() / samples);
        // A mask may name sequence and head: the last stand for all but the first.
        let states = [[0; 3], last].map(|[b, h, hk]| {
            let (q, k) = (ints(rows.clone()), ints(keys.clone()));
            let [sq, sk] = [int(seqlen_q), int(seqlen_k)];
            program.tile_state_by_guess(&Tile { b, h, hk, q, k, sq, sk, off: sk.wrapping_sub(sq) })
        });
        let is_seen = states.iter().any(|&state| state != TileState::Empty);
        seen += usize::from(is_seen);
        parted += usize::from(is_seen && states.iter().any(|&state| state != TileState::Full));
    }
    let of_all = |count: usize| (count * range.len()).div_ceil(samples.max(1));
    (of_all(seen), of_all(parted))
}

/// Parts of a tile that is divided among `parts` CTAs at most, each of which has a step.
fn own_parts(parts: usize, class: &TileClass) -> f64 {
    (parts as f64).min(class.steps.floor()).max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fa_core::{Dtype, Lengths, Mask};

    fn lengths(classes: &[(f64, f64)]) -> Work {
        let classes =
            classes.iter().map(|&(count, steps)| TileClass { count, steps, masked: 0.0 }).collect::<Vec<_>>();
        let longest =
            *classes.iter().max_by(|a, b| a.steps.total_cmp(&b.steps)).unwrap_or(&TileClass::default());
        Work { tiles: classes.iter().map(|c| c.count).sum(), classes, longest }
    }

    #[test]
    fn equal_tiles_take_whole_waves() {
        for (tiles, slots, waves) in
            [(1.0, 132.0, 1.0), (132.0, 132.0, 1.0), (133.0, 132.0, 2.0), (8.0, 3.0, 3.0)]
        {
            for queue in [Queue::LongestFirst, Queue::Fixed, Queue::ShortestFirst] {
                let (_, end) = lengths(&[(tiles, 5.0)]).makespan(slots, queue, |c| c.steps);
                assert_eq!(end, 5.0 * waves, "{tiles} tiles on {slots} slots");
            }
        }
    }

    #[test]
    fn the_longest_tile_and_the_even_share_bound_the_end() {
        let work = lengths(&[(1.0, 100.0), (10.0, 1.0)]);
        assert_eq!(work.makespan(4.0, Queue::LongestFirst, |c| c.steps), (110.0, 100.0));
        let work = lengths(&[(4.0, 4.0), (4.0, 3.0), (4.0, 2.0), (4.0, 1.0)]);
        assert_eq!(work.makespan(2.0, Queue::LongestFirst, |c| c.steps).1, 20.0);
        assert!(work.makespan(2.0, Queue::ShortestFirst, |c| c.steps).1 > 20.0);
        assert_eq!(lengths(&[]).makespan(2.0, Queue::Fixed, |c| c.steps), (0.0, 0.0));
    }

    #[test]
    fn causal_work_is_counted_by_tile() {
        let problem = Problem::square(2, 512, 4, 64, Mask::CAUSAL, Dtype::F16);
        let work = Work::of(&problem, 128, 128, false);
        assert_eq!((work.tiles, work.steps(), work.masked()), (32.0, 8.0 * 10.0, 8.0 * 4.0));
        let full = Work::of(&problem.with_mask(Mask::FULL), 128, 96, false);
        assert_eq!((full.tiles, full.steps(), full.masked()), (32.0, 32.0 * 6.0, 32.0));
    }

    #[test]
    fn runs_of_tiles_keep_the_sum() {
        for (tiles, tolerance) in [(100u32, 1e-12), (1024, 1e-12), (8192, 1e-3)] {
            let problem = Problem::square(1, 128 * tiles as usize, 1, 64, Mask::CAUSAL, Dtype::F16);
            let exact = f64::from(tiles) * f64::from(tiles + 1) / 2.0;
            let work = Work::of(&problem, 128, 128, false);
            assert!((work.steps() / exact - 1.0).abs() < tolerance, "{} for {exact}", work.steps());
            assert_eq!(work.classes.iter().map(|c| c.count).sum::<f64>(), work.tiles);
        }
    }

    #[test]
    fn tiles_of_few_kinds_are_told_apart_however_many_there_are() {
        // All tiles of a window see 11 key tiles, except the first two and a last one of a single row.
        let mask = Mask::causal_window(193);
        for (seqlen, others) in [(12_769, 2.0), (12_801, 3.0)] {
            let work = Work::of(&Problem::square(1, seqlen, 1, 64, mask, Dtype::F16), 128, 32, false);
            let alike: f64 = work.classes.iter().filter(|c| c.steps == 11.0).map(|c| c.count).sum();
            assert_eq!(alike, seqlen.div_ceil(128) as f64 - others, "{work:?}");
            assert_eq!((work.tiles, work.longest.steps), (alike + others, 11.0));
        }
    }

    #[test]
    fn tiles_of_keys_under_a_program_are_those_that_its_mask_leaves() {
        let square = Problem::square(2, 8192, 8, 128, Mask::FULL, Dtype::Bf16);
        let of = |text: &str| {
            let program = Program::parse(text).unwrap().intern().unwrap();
            let score = fa_core::ScoreMod::NONE.with_program(Some(program));
            Work::of_keys(&square.with_score(score), 80, 128, 1)
        };
        let full = Work::of_keys(&square, 80, 128, 1);
        let causal = Work::of_keys(&square.with_mask(Mask::CAUSAL), 80, 128, 1);
        for text in ["mask = k <= q;", "mask = k <= q and (q - k) % 4 == 0;"] {
            let work = of(text);
            assert!((work.steps() / causal.steps() - 1.0).abs() < 0.04, "{text}: {}", work.steps());
            assert!((work.longest.steps / causal.longest.steps - 1.0).abs() < 0.04, "{text}");
        }
        for text in [
            "array doc: i32[_]; mask = k <= q and doc[q] == doc[k];",
            "array keep: bits[_, _]; mask = keep[b, k];",
        ] {
            let work = of(text);
            assert_eq!((work.tiles, work.steps()), (full.tiles, full.steps()), "{text}");
        }
        let near = of("mask = abs(q // 64 - k // 64) <= 6 and abs(q % 64 - k % 64) <= 6;");
        assert!(near.longest.steps < 20.0 && near.steps() > 8.0 * near.tiles, "{near:?}");
    }

    #[test]
    fn parts_keep_the_steps_and_shorten_the_longest() {
        let problem = Problem::square(2, 5000, 4, 64, Mask::CAUSAL, Dtype::F16);
        for seqlen in [1, 100, 5000, 40_000] {
            let whole = Work::of(&problem.with_lengths(Lengths::uniform(2, seqlen, seqlen)), 64, 96, false);
            for parts in [1, 2, 3, 7, 1000] {
                let work = whole.in_parts(parts);
                assert!((work.steps() / whole.steps() - 1.0).abs() < 1e-9, "{seqlen} in {parts}");
                let count: f64 = work.classes.iter().map(|c| c.count).sum();
                assert!((count / work.tiles - 1.0).abs() < 1e-9);
                assert!(work.tiles >= whole.tiles && work.tiles <= whole.tiles * parts as f64);
                let most = (whole.longest.steps / parts as f64).ceil().max(1.0);
                assert_eq!(work.longest.steps, most, "{seqlen} in {parts}");
                assert!(work.classes.iter().all(|c| c.masked <= c.steps));
            }
        }
        let one = Work::of(&problem.with_lengths(Lengths::uniform(1, 1, 640)), 64, 64, false);
        let counts: Vec<_> = one.in_parts(4).classes.iter().map(|c| (c.count, c.steps)).collect();
        assert_eq!(counts, [(8.0, 2.0), (8.0, 3.0)]);
    }

    #[test]
    fn what_is_left_after_whole_waves_runs_on_emptier_sms() {
        // Two tiles on an SM take 10 each, one alone 6.
        let length = |class: &TileClass, on_sm: f64| class.steps * if on_sm > 1.0 { 10.0 } else { 6.0 };
        for (tiles, end) in [(4.0, 6.0), (8.0, 10.0), (9.0, 16.0), (12.0, 16.0), (13.0, 20.0), (16.0, 20.0)] {
            let resident = if tiles > 4.0 { 2.0 } else { 1.0 };
            let work = lengths(&[(tiles, 1.0)]);
            assert_eq!(work.makespan_shared(4.0, resident, Queue::LongestFirst, length).1, end, "{tiles}");
        }
        // Four long tiles beside four short ones.
        let end = |work: &Work| work.makespan_shared(4.0, 2.0, Queue::LongestFirst, length).1;
        assert_eq!(end(&lengths(&[(4.0, 2.0), (4.0, 1.0)])), 20.0);
        // A wave of middle ones of which some begin later, beside shorter ones.
        assert_eq!(end(&lengths(&[(10.0, 2.0), (6.0, 1.9)])), 40.0);
    }

    #[test]
    fn packed_work_is_that_of_the_mean_with_the_longest_at_the_bound() {
        let problem = Problem::square(1, 1, 4, 64, Mask::CAUSAL, Dtype::F16);
        let packed = problem.with_lengths(Lengths::packed(8, 4096, 4096, 2048, 2048));
        let mean = problem.with_lengths(Lengths::uniform(8, 512, 512));
        let (work, even) = (Work::of(&packed, 128, 128, false), Work::of(&mean, 128, 128, false));
        assert_eq!((work.tiles, work.steps(), work.longest.steps), (even.tiles, even.steps(), 16.0));
        let (work, even) = (Work::of_keys(&packed, 64, 128, 1), Work::of_keys(&mean, 64, 128, 1));
        assert_eq!((work.tiles, work.steps(), work.longest.steps), (even.tiles, even.steps(), 32.0));
        let none = problem.with_lengths(Lengths::packed(8, 0, 4096, 0, 2048));
        assert_eq!(Work::of(&none, 128, 128, false).tiles, 0.0);
    }

    #[test]
    fn the_backward_is_cut_along_the_keys() {
        let problem = Problem::square(2, 512, 4, 64, Mask::CAUSAL, Dtype::F16).with_heads_kv(2);
        let work = Work::of_keys(&problem, 64, 128, 1);
        // Each of 4 key tiles sees 2 query tiles per 128 queries from its own position on, for 2 query heads.
        assert_eq!((work.tiles, work.steps()), (16.0, 4.0 * 2.0 * (8.0 + 6.0 + 4.0 + 2.0)));
        let split = Work::of_keys(&problem, 64, 128, 2);
        assert_eq!((split.tiles, split.steps()), (32.0, work.steps()));
        // Three query heads in two parts are two and one; five in four are two, two, one and none.
        for (group, parts, tiles) in [(3, 2, 2.0), (5, 4, 3.0), (7, 3, 3.0), (8, 8, 8.0)] {
            let problem = problem.with_heads(group, 1);
            let (whole, split) =
                (Work::of_keys(&problem, 64, 128, 1), Work::of_keys(&problem, 64, 128, parts));
            assert_eq!(
                (split.tiles / whole.tiles, split.steps()),
                (tiles, whole.steps()),
                "{group} in {parts}"
            );
            let share = group.div_ceil(parts) as f64 / group as f64;
            assert_eq!(split.longest.steps, whole.longest.steps * share);
        }
    }

    #[test]
    fn packing_folds_a_group_into_the_rows() {
        let decode = Problem::square(2, 4096, 32, 128, Mask::CAUSAL, Dtype::F16)
            .with_lengths(Lengths::uniform(2, 1, 4096))
            .with_heads_kv(8);
        let (apart, packed) = (Work::of(&decode, 64, 128, false), Work::of(&decode, 64, 128, true));
        assert_eq!((apart.tiles, packed.tiles), (64.0, 16.0));
        assert_eq!(packed.classes[0].steps, 32.0);
    }
}
