//! Programs are executed on sets: every buffer holds, row by row and head by head, what has gone into it.
//! Each visible pair is computed once, every message finds its receiver, and nothing unwritten is read.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Range;

use fa_core::{Lengths, Mask, Pass, Problem};
use fa_dist::program::{Buffer, Lane, Op, Part, Program, View};
use fa_dist::{Layout, Scheme, ShardPlan};
use proptest::prelude::*;

use crate::cases::{MASKS, plans, problem};

/// The keys that row `i` sees, of packed sequences those of its own.
fn seen(mask: Mask, starts: Option<[&[i32]; 2]>, i: usize, (rows, keys): (usize, usize)) -> Range<usize> {
    let Some([q, k]) = starts else { return mask.keys(i, rows, keys) };
    let sequence = q.partition_point(|start| *start as usize <= i) - 1;
    let [own, others] = [q, k].map(|starts| starts[sequence] as usize..starts[sequence + 1] as usize);
    let found = mask.keys(i - own.start, own.len(), others.len());
    found.start + others.start..found.end + others.start
}

/// Where the sequences of a part begin.
fn starts(part: &Part) -> Option<[&[i32]; 2]> {
    part.starts.as_ref().map(|starts| starts.each_ref().map(Vec::as_slice))
}

/// What a row of a head of a buffer holds.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Held {
    /// A row of the caller's tensor: its position and head in the whole.
    Row(Buffer, usize, usize),
    /// O, LSE or dQ of a query's row and head over some keys.
    OverKeys(Buffer, usize, usize, BTreeSet<usize>),
    /// dK or dV of a key's row and head over some (query, query head).
    OverQueries(Buffer, usize, usize, BTreeSet<(usize, usize)>),
    /// Zeros, or -inf.
    Empty,
}

type Place = (Buffer, usize, usize);

struct Rank {
    program: Program,
    next: usize,
    sent: bool,
    held: HashMap<Place, Held>,
}

fn places(view: &View) -> impl Iterator<Item = Place> + '_ {
    view.rows.clone().flat_map(move |row| view.heads.clone().map(move |head| (view.buffer, row, head)))
}

impl Rank {
    fn new(plan: &ShardPlan, rank: usize, pass: Pass) -> Rank {
        let program = plan.program(rank, pass).unwrap();
        let mut held = HashMap::new();
        let mut fill = |buffer: Buffer, positions: Vec<usize>| {
            let heads = plan.shape(rank, buffer).heads;
            for (row, &position) in positions.iter().enumerate() {
                for head in 0..heads {
                    held.insert((buffer, row, head), Held::Row(buffer, position, head));
                }
            }
        };
        let own = if plan.scheme() == Scheme::Decode { 0 } else { rank };
        let queries: Vec<usize> = plan.queries().positions(own).collect();
        let keys: Vec<usize> = plan.keys().positions(rank).collect();
        fill(Buffer::Q, queries.clone());
        fill(Buffer::K, keys.clone());
        fill(Buffer::V, keys);
        if pass.is_backward() {
            for buffer in [Buffer::Out, Buffer::Lse, Buffer::Dout, Buffer::Dlse] {
                fill(buffer, queries.clone());
            }
        }
        Rank { program, next: 0, sent: false, held }
    }

    fn get(&self, place: Place) -> Held {
        self.held.get(&place).unwrap_or_else(|| panic!("{place:?} is read and was never written")).clone()
    }

    fn row(&self, place: Place, want: Buffer) -> (usize, usize) {
        match self.get(place) {
            Held::Row(buffer, position, head) if buffer == want => (position, head),
            other @ (Held::Row(..) | Held::OverKeys(..) | Held::OverQueries(..) | Held::Empty) => {
                panic!("{place:?} holds {other:?} where {want:?} is read")
            }
        }
    }

    fn set(&mut self, place: Place, held: Held) {
        self.held.insert(place, held);
    }

    fn apply(&mut self, op: &Op, whole: &Problem) {
        match op {
            Op::Sum { parts, to } => {
                let targets: Vec<Place> = places(to).collect();
                for (index, target) in targets.into_iter().enumerate() {
                    let mut sum = Held::Empty;
                    for part in parts {
                        let from = places(part).nth(index).expect("parts have the shape of their sum");
                        sum = add(sum, self.get(from));
                    }
                    self.set(target, sum);
                }
            }
            Op::Nothing { to } => places(to).for_each(|place| self.set(place, Held::Empty)),
            Op::Forward { part, q, k, v, out, lse } => {
                let group = part.problem.group_size();
                let (rows, keys) = (q.rows.len(), k.rows.len());
                let lengths = part.problem.lengths;
                let of_part = match part.starts {
                    None => (lengths.max_q(), lengths.max_k()),
                    Some(_) => (lengths.total_q(), lengths.total_k()),
                };
                assert_eq!(of_part, (rows, keys));
                assert_eq!((part.problem.heads_q, part.problem.heads_kv), (q.heads.len(), k.heads.len()));
                for h in 0..q.heads.len() {
                    for i in 0..rows {
                        let (position, head) =
                            self.row((q.buffer, q.rows.start + i, q.heads.start + h), Buffer::Q);
                        assert_eq!(head, part.heads.start + h);
                        let mut found = BTreeSet::new();
                        for j in seen(part.problem.mask, starts(part), i, (rows, keys)) {
                            let at = |view: &View| {
                                (view.buffer, view.rows.start + j, view.heads.start + h / group)
                            };
                            let key = self.row(at(k), Buffer::K);
                            assert_eq!(key, self.row(at(v), Buffer::V));
                            assert_eq!(key.1, head / whole.group_size(), "the K/V head of a query head");
                            assert!(found.insert(key.0), "a key twice");
                        }
                        let over = |buffer| match found.is_empty() {
                            true => Held::Empty,
                            false => Held::OverKeys(buffer, position, head, found.clone()),
                        };
                        self.set((out.buffer, out.rows.start + i, out.heads.start + h), over(Buffer::Out));
                        self.set((lse.buffer, lse.rows.start + i, lse.heads.start + h), over(Buffer::Lse));
                    }
                }
            }
            Op::Backward {
                part,
                inputs: [q, k, v, out, lse, dout],
                outputs: [dq, dk, dv],
                dsinks,
                dlse,
                ..
            } => {
                let group = part.problem.group_size();
                let (rows, keys) = (q.rows.len(), k.rows.len());
                let mut over_queries: HashMap<(usize, usize), BTreeSet<(usize, usize)>> = HashMap::new();
                for h in 0..q.heads.len() {
                    for i in 0..rows {
                        let at = |view: &View| (view.buffer, view.rows.start + i, view.heads.start + h);
                        let query = self.row(at(q), Buffer::Q);
                        for (view, buffer) in [(out, Buffer::Out), (lse, Buffer::Lse), (dout, Buffer::Dout)] {
                            assert_eq!(self.row(at(view), buffer), query);
                        }
                        if let Some(view) = dlse {
                            assert_eq!(self.row(at(view), Buffer::Dlse), query);
                        }
                        if let Some(view) = dsinks {
                            let at = (view.buffer, 0, view.heads.start + h);
                            assert_eq!((view.rows.clone(), query.1), (0..1, part.heads.start + h));
                            // The call writes its heads in full.
                            let known = if i == 0 { Held::Empty } else { self.get(at) };
                            let own = Held::OverQueries(Buffer::Dsinks, 0, query.1, BTreeSet::from([query]));
                            self.set(at, add(known, own));
                        }
                        let mut found = BTreeSet::new();
                        for j in seen(part.problem.mask, starts(part), i, (rows, keys)) {
                            let at = |view: &View| {
                                (view.buffer, view.rows.start + j, view.heads.start + h / group)
                            };
                            let key = self.row(at(k), Buffer::K);
                            assert_eq!(key, self.row(at(v), Buffer::V));
                            assert_eq!(key.1, query.1 / whole.group_size());
                            assert!(found.insert(key.0));
                            assert!(over_queries.entry((j, h / group)).or_default().insert(query));
                        }
                        let held = match found.is_empty() {
                            true => Held::Empty,
                            false => Held::OverKeys(Buffer::Dq, query.0, query.1, found),
                        };
                        self.set(at(dq), held);
                    }
                }
                for h in 0..k.heads.len() {
                    for j in 0..keys {
                        let at = |view: &View| (view.buffer, view.rows.start + j, view.heads.start + h);
                        let (position, head) = self.row(at(k), Buffer::K);
                        for (view, buffer) in [(dk, Buffer::Dk), (dv, Buffer::Dv)] {
                            let held = match over_queries.get(&(j, h)) {
                                Some(seen) => Held::OverQueries(buffer, position, head, seen.clone()),
                                None => Held::Empty,
                            };
                            self.set(at(view), held);
                        }
                    }
                }
            }
            Op::Merge { parts, out, lse, .. } => {
                for (index, to) in [out, lse].into_iter().enumerate() {
                    for (number, target) in places(to).collect::<Vec<_>>().into_iter().enumerate() {
                        let mut sum = Held::Empty;
                        for part in parts {
                            let [own, own_lse] =
                                [&part[index], &part[1]].map(|view| places(view).nth(number).unwrap());
                            // What a part without keys holds is not read.
                            if self.get(own_lse) != Held::Empty {
                                sum = add(sum, self.get(own));
                            }
                        }
                        self.set(target, sum);
                    }
                }
            }
            Op::Place { .. } => unreachable!("of arrays, which these programs have none of"),
            Op::Exchange { .. } => unreachable!("exchanges are the network's"),
        }
    }
}

/// The sum of two parts, which have nothing in common.
fn add(a: Held, b: Held) -> Held {
    match (a, b) {
        (Held::Empty, other) | (other, Held::Empty) => other,
        (Held::OverKeys(buffer, position, head, mut seen), Held::OverKeys(other, p, h, more)) => {
            assert_eq!((buffer, position, head), (other, p, h));
            assert!(more.into_iter().all(|key| seen.insert(key)), "a pair is added twice");
            Held::OverKeys(buffer, position, head, seen)
        }
        (Held::OverQueries(buffer, position, head, mut seen), Held::OverQueries(other, p, h, more)) => {
            assert_eq!((buffer, position, head), (other, p, h));
            assert!(more.into_iter().all(|query| seen.insert(query)), "a pair is added twice");
            Held::OverQueries(buffer, position, head, seen)
        }
        (a, b) => panic!("{a:?} and {b:?} have no sum"),
    }
}

/// Messages under way: their bytes, and what they hold.
type Mail = VecDeque<(usize, Vec<Held>)>;

/// Runs all ranks' programs; an exchange ends when its messages are there, and its own have been taken.
fn execute(plan: &ShardPlan, pass: Pass) -> Vec<Rank> {
    let world = plan.world();
    let mut ranks: Vec<Rank> = (0..world).map(|rank| Rank::new(plan, rank, pass)).collect();
    let mut mail: HashMap<(usize, usize), Mail> = HashMap::new();
    loop {
        let mut moved = false;
        for (r, rank) in ranks.iter_mut().enumerate() {
            let Some(step) = rank.program.steps.get(rank.next).cloned() else { continue };
            let Op::Exchange { sends, recvs } = &step.op else {
                rank.apply(&step.op, plan.problem());
                rank.next += 1;
                moved = true;
                continue;
            };
            if !rank.sent {
                for (peer, view) in sends {
                    let values = places(view).map(|place| rank.get(place)).collect();
                    let bytes = rank.program.pieces(*peer, view).iter().map(|piece| piece.bytes).sum();
                    mail.entry((r, *peer)).or_default().push_back((bytes, values));
                }
                rank.sent = true;
                moved = true;
            }
            let mut wanted: HashMap<usize, usize> = HashMap::new();
            recvs.iter().for_each(|(peer, _)| *wanted.entry(*peer).or_default() += 1);
            let there =
                wanted.iter().all(|(peer, count)| mail.get(&(*peer, r)).map_or(0, Mail::len) >= *count);
            if there {
                for (peer, view) in recvs {
                    let (bytes, values) = mail.get_mut(&(*peer, r)).unwrap().pop_front().unwrap();
                    let pieces = rank.program.pieces(*peer, view);
                    assert_eq!(bytes, pieces.iter().map(|piece| piece.bytes).sum::<usize>());
                    let targets: Vec<Place> = places(view).collect();
                    assert_eq!(targets.len(), values.len());
                    for (place, held) in targets.into_iter().zip(values) {
                        rank.set(place, held);
                    }
                }
                rank.next += 1;
                rank.sent = false;
                moved = true;
            }
        }
        if ranks.iter().all(|rank| rank.next == rank.program.steps.len()) {
            break;
        }
        assert!(
            moved,
            "ranks wait for one another: {:?}",
            ranks.iter().map(|rank| rank.next).collect::<Vec<_>>()
        );
    }
    assert!(mail.values().all(Mail::is_empty), "messages that nobody has received");
    ranks
}

/// Every result of every rank is over exactly what the mask shows.
fn check(plan: &ShardPlan, pass: Pass) {
    let problem = plan.problem();
    let (queries, keys) = (plan.queries().len(), plan.keys().len());
    let of_plan = plan.starts().map(|starts| [starts, starts]);
    let seen_by = |query: usize| seen(problem.mask, of_plan, query, (queries, keys));
    let ranks = execute(plan, pass);
    if problem.score.sinks && pass.is_backward() {
        for head in 0..problem.heads_q {
            let all =
                ranks.iter().fold(Held::Empty, |all, rank| add(all, rank.get((Buffer::Dsinks, 0, head))));
            let rows: BTreeSet<(usize, usize)> = (0..queries).map(|row| (row, head)).collect();
            let want = match rows.is_empty() {
                true => Held::Empty,
                false => Held::OverQueries(Buffer::Dsinks, 0, head, rows),
            };
            assert_eq!(all, want, "{plan:?}");
        }
    }
    for (r, rank) in ranks.into_iter().enumerate() {
        let own = if plan.scheme() == Scheme::Decode { 0 } else { r };
        let over_keys: &[Buffer] =
            if pass.is_backward() { &[Buffer::Dq] } else { &[Buffer::Out, Buffer::Lse] };
        for (row, position) in plan.queries().positions(own).enumerate() {
            for head in 0..problem.heads_q {
                let seen: BTreeSet<usize> = seen_by(position).collect();
                for &buffer in over_keys {
                    let want = match seen.is_empty() {
                        true => Held::Empty,
                        false => Held::OverKeys(buffer, position, head, seen.clone()),
                    };
                    assert_eq!(rank.get((buffer, row, head)), want, "{plan:?} rank {r}");
                }
            }
        }
        if !pass.is_backward() {
            continue;
        }
        let group = problem.group_size();
        for (row, position) in plan.keys().positions(r).enumerate() {
            for head in 0..problem.heads_kv {
                let seen: BTreeSet<(usize, usize)> = (0..queries)
                    .filter(|query| seen_by(*query).contains(&position))
                    .flat_map(|query| (head * group..(head + 1) * group).map(move |own| (query, own)))
                    .collect();
                for buffer in [Buffer::Dk, Buffer::Dv] {
                    let want = match seen.is_empty() {
                        true => Held::Empty,
                        false => Held::OverQueries(buffer, position, head, seen.clone()),
                    };
                    assert_eq!(rank.get((buffer, row, head)), want, "{plan:?} rank {r}");
                }
            }
        }
    }
}

/// Steps of two queues that touch the same memory are ordered by the waits.
fn check_waits(program: &Program) {
    let steps = &program.steps;
    let meets = |a: &View, b: &View| {
        let meet =
            |a: &std::ops::Range<usize>, b: &std::ops::Range<usize>| a.start.max(b.start) < a.end.min(b.end);
        a.buffer == b.buffer && meet(&a.rows, &b.rows) && meet(&a.heads, &b.heads)
    };
    for (late, step) in steps.iter().enumerate() {
        // All of the other queue that is done before this step.
        let known = steps[..=late]
            .iter()
            .filter(|other| other.lane == step.lane)
            .filter_map(|other| other.after)
            .max();
        for (early, other) in steps[..late].iter().enumerate().filter(|(_, other)| other.lane != step.lane) {
            let (reads, writes) = (step.op.reads(), step.op.writes());
            let theirs = (other.op.reads(), other.op.writes());
            let conflict =
                writes.iter().any(|own| theirs.0.iter().chain(&theirs.1).any(|view| meets(own, view)))
                    || reads.iter().any(|own| theirs.1.iter().any(|view| meets(own, view)));
            assert!(!conflict || known.is_some_and(|known| early <= known), "step {late} and {early} race");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn each_visible_pair_is_computed_once(
        world in 1usize..6,
        queries in 0usize..26,
        more in -4isize..8,
        heads in prop::sample::select(vec![(1, 1), (4, 2), (4, 4), (6, 3), (8, 1)]),
        mask in prop::sample::select(MASKS.to_vec()),
        square in any::<bool>(),
        has_dlse in any::<bool>(),
        tiles in prop::sample::select(vec![(1, 1), (2, 3)]),
    ) {
        let keys = if square { queries } else { queries.saturating_add_signed(more) };
        let problem = problem(1, (queries, keys), heads, mask);
        for plan in plans(&problem, world) {
            let plan = plan.with_tiles(tiles.0, tiles.1).with_dlse(has_dlse);
            for pass in [Pass::Forward, Pass::BACKWARD] {
                check(&plan, pass);
                (0..world).for_each(|rank| check_waits(&plan.program(rank, pass).unwrap()));
            }
        }
        if let Ok(plan) = ShardPlan::new(&problem, world, Scheme::Decode, Layout::Contiguous) {
            check(&plan, Pass::Forward);
        }
    }

    #[test]
    fn each_visible_pair_of_packed_sequences_is_computed_once(
        world in 1usize..6,
        cuts in prop::collection::vec(0usize..9, 1..6),
        heads in prop::sample::select(vec![(1, 1), (4, 2), (6, 3)]),
        mask in prop::sample::select(vec![Mask::FULL, Mask::CAUSAL, Mask::causal_window(3)]),
        tiles in prop::sample::select(vec![(1, 1), (2, 3)]),
        sinks in any::<bool>(),
    ) {
        let ends = (0..=cuts.len()).map(|count| cuts[..count].iter().sum::<usize>() as i32);
        let starts: Vec<i32> = ends.collect();
        let total: usize = cuts.iter().sum();
        let longest = cuts.iter().copied().max().unwrap_or(0);
        let lengths = Lengths::packed(cuts.len(), total, total, longest, longest);
        let one = problem(1, (total, total), heads, mask).with_lengths(lengths);
        let problem = one.with_score(one.score.with_sinks(sinks));
        for (scheme, layout) in [
            (Scheme::Gather, Layout::Zigzag),
            (Scheme::Ring, Layout::Zigzag),
            (Scheme::Ring, Layout::Contiguous),
        ] {
            let plan = ShardPlan::packed(&problem, &starts, world, scheme, layout).unwrap();
            let plan = plan.with_tiles(tiles.0, tiles.1);
            for pass in [Pass::Forward, Pass::BACKWARD] {
                check(&plan, pass);
                (0..world).for_each(|rank| check_waits(&plan.program(rank, pass).unwrap()));
            }
        }
    }

    #[test]
    fn zigzag_is_balanced_within_a_tile(
        world in 1usize..9,
        tiles in 1usize..40,
        tile in prop::sample::select(vec![1usize, 64, 128]),
    ) {
        let len = tiles * 2 * world * tile;
        let problem = problem(1, (len, len), (1, 1), Mask::CAUSAL);
        let plan = ShardPlan::new(&problem, world, Scheme::Gather, Layout::Zigzag).unwrap();
        let plan = plan.with_tiles(tile, tile);
        let pairs = |rank: usize| plan.queries().positions(rank).map(|row| row as u64 + 1).sum::<u64>();
        let all: Vec<u64> = (0..world).map(pairs).collect();
        prop_assert!(all.iter().all(|pairs| *pairs == all[0]), "{:?}", all);
    }
}

#[test]
fn stages_and_grouped_heads_move_the_same_bytes() {
    let problem = problem(1, (64, 64), (8, 4), Mask::CAUSAL);
    let plan = ShardPlan::new(&problem, 4, Scheme::Gather, Layout::Zigzag).unwrap();
    assert_eq!(plan.stages(), 4);
    let bytes = |plan: &ShardPlan| {
        check(plan, Pass::Forward);
        check(plan, Pass::BACKWARD);
        (0..4).map(|rank| plan.program(rank, Pass::Forward).unwrap().received()).collect::<Vec<_>>()
    };
    let staged = bytes(&plan);
    // Rank 0 sees all keys: three quarters of K and V come from others.
    assert_eq!(staged[0], 3 * 64 / 4 * 2 * 4 * 8 * 4);
    // Rank 3 sees the first five of eight chunks, and has one of them and none beyond.
    assert_eq!(staged[3], 3 * 8 * 2 * 4 * 8 * 4);
    for stages in [1, 2] {
        assert_eq!(bytes(&plan.clone().with_stages(stages).unwrap()), staged);
    }
    assert!(plan.clone().with_stages(3).unwrap_err().to_string().contains("divisor of the 4 K/V heads"));
    for stages in [1, 2, 4] {
        let world = 2;
        let problem = crate::cases::problem(2, (24, 24), (8, 8), Mask::CAUSAL);
        let plan = ShardPlan::new(&problem, world, Scheme::Ulysses, Layout::Zigzag).unwrap();
        check(&plan.clone().with_stages(stages).unwrap(), Pass::Forward);
        check(&plan.with_stages(stages).unwrap(), Pass::BACKWARD);
    }
}

#[test]
fn ranks_gradients_of_sinks_are_over_each_row_once() {
    for world in [1, 2, 3, 4] {
        for (len, heads, mask) in [
            (26, (8, 4), Mask::CAUSAL),
            (26, (4, 2), Mask::FULL),
            (3, (4, 4), Mask::CAUSAL),
            (20, (12, 12), Mask::causal_window(5)),
            (21, (4, 2), Mask::window(3, 4)),
            (30, (4, 4), Mask::CAUSAL),
        ] {
            // Ranges of rows meet those of several ranks' keys in parts where the lengths differ.
            let keys = if len == 30 { 41 } else { len };
            let problem = problem(1, (len, keys), heads, mask);
            let sinks = problem.with_score(problem.score.with_sinks(true));
            let all = plans(&sinks, world);
            assert!(all.len() >= 2);
            for plan in all {
                check(&plan, Pass::Forward);
                check(&plan, Pass::BACKWARD);
                (0..world).for_each(|rank| check_waits(&plan.program(rank, Pass::BACKWARD).unwrap()));
            }
        }
    }
}

#[test]
fn groups_of_parts_are_over_each_pair_once() {
    for (world, mask) in [(7, Mask::window(40, 30)), (18, Mask::CAUSAL)] {
        let problem = problem(1, (90, 90), (2, 1), mask);
        let plan = ShardPlan::new(&problem, world, Scheme::Ring, Layout::Zigzag).unwrap();
        for pass in [Pass::Forward, Pass::BACKWARD] {
            check(&plan, pass);
            (0..world).for_each(|rank| check_waits(&plan.program(rank, pass).unwrap()));
        }
        let merges = |rank: usize| {
            let program = plan.program(rank, Pass::Forward).unwrap();
            program.steps.iter().filter(|step| matches!(step.op, Op::Merge { .. })).count()
        };
        assert!((0..world).any(|rank| merges(rank) > 1), "{world}");
    }
}

#[test]
fn transfers_have_their_own_queue() {
    let problem = problem(1, (64, 64), (8, 4), Mask::CAUSAL);
    for plan in plans(&problem, 4) {
        let program = plan.program(0, Pass::Forward).unwrap();
        let exchanges = program.steps.iter().filter(|step| matches!(step.op, Op::Exchange { .. }));
        assert!(exchanges.into_iter().all(|step| step.lane == Lane::Transfer));
    }
}
