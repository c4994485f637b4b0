//! Ranks that copy out of one another's memory: whatever their streams do first, every rank ends with what
//! messages would have brought it, and nobody waits for ever.

use std::collections::HashMap;

use fa_core::program::Program as Scores;
use fa_core::{Lengths, Mask, Pass};
use fa_dist::program::{Buffer, Lane, Op, Program, View};
use fa_dist::pulls::{Act, Pull, READY, Rooms, TAKEN, acts};
use fa_dist::{Error, Layout, Scheme, ShardPlan};
use proptest::prelude::*;

use crate::cases::{MASKS, plans, problem};

fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ b.wrapping_add(0x94d0_49bb_1331_11eb);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^ (z >> 27)
}

/// A rank's memory in words of 4 bytes, as all elements are here: its program's own, and the tensors.
#[derive(Clone, PartialEq)]
struct Memory {
    own: Vec<u64>,
    tensors: HashMap<Buffer, Vec<u64>>,
}

impl Memory {
    fn new(program: &Program) -> Memory {
        let drawn = |(buffer, shape): &(Buffer, fa_dist::program::Shape)| {
            let words = 0..shape.elements() as u64;
            let seed = mix(program.rank as u64, shape.elements() as u64);
            (*buffer, words.map(|word| mix(seed, word)).collect())
        };
        let tensors = program.tensors.iter().map(drawn).collect();
        Memory { own: vec![0; Rooms::of(program).bytes.div_ceil(4)], tensors }
    }

    /// The words of a view, in the order of its buffer.
    fn words<'a>(&'a mut self, program: &Program, view: &View) -> Vec<&'a mut u64> {
        let rooms = Rooms::of(program);
        let shape = program.shape(view.buffer);
        let strides = shape.order.strides(shape.rows, shape.heads, shape.dim);
        let (all, first) = match self.tensors.get_mut(&view.buffer) {
            Some(tensor) => (tensor, 0),
            None => {
                let Buffer::Scratch(number) = view.buffer else {
                    panic!("the pass has no {:?}", view.buffer)
                };
                (&mut self.own, rooms.offsets[number] / 4)
            }
        };
        let mut wanted = vec![false; all.len()];
        for (b, row) in (0..shape.batch).flat_map(|b| view.rows.clone().map(move |row| (b, row))) {
            for head in view.heads.clone() {
                let at = first + strides.offset(b, row, head, 0) as usize;
                wanted[at..at + shape.dim].fill(true);
            }
        }
        all.iter_mut().zip(wanted).filter_map(|(word, is_wanted)| is_wanted.then_some(word)).collect()
    }

    /// What an op writes depends on all that it reads.
    fn apply(&mut self, program: &Program, number: usize) {
        let op = &program.steps[number].op;
        let mut hash = number as u64;
        for view in op.reads() {
            hash = self.words(program, view).into_iter().fold(hash, |hash, word| mix(hash, *word));
        }
        for view in op.writes() {
            for (index, word) in self.words(program, view).into_iter().enumerate() {
                *word = mix(hash, index as u64);
            }
        }
    }
}

/// Calls one after the other.
const CALLS: usize = 2;

/// What ranks end with that send messages.
fn by_messages(programs: &[Program]) -> Vec<Memory> {
    let mut memory: Vec<Memory> = programs.iter().map(Memory::new).collect();
    let mut mail: HashMap<(usize, usize), Vec<u64>> = HashMap::new();
    let (mut next, mut sent) = (vec![0; programs.len()], vec![false; programs.len()]);
    let ends = |rank: usize| programs[rank].steps.len() * CALLS;
    while (0..programs.len()).any(|rank| next[rank] < ends(rank)) {
        let before = (next.clone(), sent.clone());
        for (rank, program) in programs.iter().enumerate() {
            if next[rank] == ends(rank) {
                continue;
            }
            let number = next[rank] % program.steps.len();
            let Op::Exchange { sends, recvs } = &program.steps[number].op else {
                memory[rank].apply(program, number);
                next[rank] += 1;
                continue;
            };
            for (peer, view) in sends.iter().filter(|_| !sent[rank]) {
                let words = memory[rank].words(program, view).into_iter().map(|word| *word);
                mail.entry((rank, *peer)).or_default().extend(words);
            }
            sent[rank] = true;
            let mut need: HashMap<usize, usize> = HashMap::new();
            recvs.iter().for_each(|(peer, view)| *need.entry(*peer).or_default() += program.bytes(view) / 4);
            if need.iter().any(|(peer, count)| mail.get(&(*peer, rank)).map_or(0, Vec::len) < *count) {
                continue;
            }
            for (peer, view) in recvs {
                let words = memory[rank].words(program, view);
                let come: Vec<u64> = match mail.get_mut(&(*peer, rank)) {
                    Some(own) => own.drain(..words.len()).collect(),
                    None => Vec::new(),
                };
                words.into_iter().zip(come).for_each(|(word, come)| *word = come);
            }
            (next[rank], sent[rank]) = (next[rank] + 1, false);
        }
        assert!(before != (next.clone(), sent.clone()), "messages that nobody sends");
    }
    memory
}

/// One thing that a stream does at once.
#[derive(Clone, Copy)]
enum Unit {
    Step(usize),
    Act(usize, Act),
}

/// A rank's two streams.
struct Streams {
    /// What each does in a call, and of which step that is the last.
    lanes: [Vec<(Unit, Option<usize>)>; 2],
    at: [usize; 2],
    done: Vec<bool>,
    call: usize,
}

impl Streams {
    fn new(program: &Program, acts: &[Vec<Act>]) -> Streams {
        let lane = |lane: Lane| {
            let of = |number: usize| -> Vec<Unit> {
                let is_exchange = matches!(program.steps[number].op, Op::Exchange { .. });
                let own = acts[number].iter().flat_map(|act| rows(number, *act));
                if is_exchange { own.collect() } else { vec![Unit::Step(number)] }
            };
            let own = (0..program.steps.len()).filter(|number| program.steps[*number].lane == lane);
            own.flat_map(|number| {
                let units = of(number);
                let last = units.len().saturating_sub(1);
                units.into_iter().enumerate().map(move |(i, unit)| (unit, (i == last).then_some(number)))
            })
            .collect()
        };
        let done = acts.iter().zip(&program.steps);
        let is_empty = |(acts, step): (&Vec<Act>, &fa_dist::program::Step)| {
            acts.is_empty() && matches!(step.op, Op::Exchange { .. })
        };
        let (lanes, done) = ([lane(Lane::Compute), lane(Lane::Transfer)], done.map(is_empty).collect());
        Streams { lanes, at: [0; 2], done, call: 0 }
    }
}

/// A copy as one of each of its rows: what others write meanwhile would be seen.
fn rows(number: usize, act: Act) -> Vec<Unit> {
    let Act::Copy(peer, pull) = act else { return vec![Unit::Act(number, act)] };
    let row = |row: usize| Pull {
        from: pull.from + row * pull.pitches[0],
        to: pull.to + row * pull.pitches[1],
        rows: 1,
        ..pull
    };
    (0..pull.rows).map(|number_of| Unit::Act(number, Act::Copy(peer, row(number_of)))).collect()
}

/// What ranks end with whose streams do one thing after the other, in an order by a seed; of acts those that
/// are `kept`. `None` where ranks wait for one another.
fn by_copies(programs: &[Program], seed: u64, kept: fn(&Act) -> bool) -> Option<Vec<Memory>> {
    let world = programs.len();
    let mut memory: Vec<Memory> = programs.iter().map(Memory::new).collect();
    let all: Vec<Vec<Vec<Act>>> = (0..world).map(|rank| acts(programs, rank).unwrap()).collect();
    let keep = |acts: Vec<Act>| acts.into_iter().filter(kept).collect::<Vec<_>>();
    let all: Vec<Vec<Vec<Act>>> = all.into_iter().map(|own| own.into_iter().map(keep).collect()).collect();
    let mut streams: Vec<Streams> =
        (0..world).map(|rank| Streams::new(&programs[rank], &all[rank])).collect();
    let mut words: HashMap<(usize, usize), u32> = HashMap::new();
    let (mut random, mut idle) = (seed, 0);
    while idle < 4 * world * world + 64 {
        random = mix(random, 1);
        let first = random as usize % (2 * world);
        let moved = (0..2 * world).map(|next| (first + next) % (2 * world)).find(|&own| {
            let (rank, lane) = (own / 2, own % 2);
            let Streams { lanes, at, done, call } = &mut streams[rank];
            let Some((unit, last)) = lanes[lane].get(at[lane]).copied() else { return false };
            let (Unit::Step(number) | Unit::Act(number, _)) = unit;
            if *call == CALLS || programs[rank].steps[number].after.is_some_and(|after| !done[after]) {
                return false;
            }
            let word = |from, to| words.get(&(from, to)).copied().unwrap_or(0);
            match unit {
                Unit::Step(number) => memory[rank].apply(&programs[rank], number),
                Unit::Act(_, Act::Ready(to)) => drop(words.insert((rank, to), READY)),
                Unit::Act(_, Act::Taken(from)) => drop(words.insert((from, rank), TAKEN)),
                Unit::Act(_, Act::AwaitReady(from)) if word(from, rank) & READY == 0 => return false,
                Unit::Act(_, Act::AwaitTaken(to)) if word(rank, to) & TAKEN == 0 => return false,
                Unit::Act(_, Act::AwaitReady(_) | Act::AwaitTaken(_)) => {}
                Unit::Act(_, Act::Copy(peer, pull)) => {
                    let words = |at: usize| at / 4..(at + pull.width) / 4;
                    let row = memory[peer].own[words(pull.from)].to_vec();
                    memory[rank].own[words(pull.to)].copy_from_slice(&row);
                }
            }
            at[lane] += 1;
            last.into_iter().for_each(|number| done[number] = true);
            true
        });
        idle = if moved.is_some() { 0 } else { idle + 1 };
        for (rank, own) in streams.iter_mut().enumerate() {
            // A call begins and ends both streams.
            let is_over = (0..2).all(|lane| own.at[lane] == own.lanes[lane].len());
            if is_over && own.call < CALLS {
                let call = own.call + 1;
                *own = Streams { call, ..Streams::new(&programs[rank], &all[rank]) };
            }
        }
        if streams.iter().all(|own| own.call == CALLS) {
            return Some(memory);
        }
    }
    None
}

fn check(plan: &ShardPlan, pass: Pass, seed: u64) {
    let programs: Vec<Program> = (0..plan.world()).map(|rank| plan.program(rank, pass).unwrap()).collect();
    for program in &programs {
        let lanes = program.steps.iter().filter(|step| matches!(step.op, Op::Exchange { .. }));
        let lanes: Vec<Lane> = lanes.map(|step| step.lane).collect();
        assert!(lanes.windows(2).all(|pair| pair[0] == pair[1]), "the turns of a word are one stream's");
    }
    let want = by_messages(&programs);
    for seed in [seed, seed + 1] {
        let found = by_copies(&programs, seed, |_| true).expect("ranks wait for one another");
        assert!(found == want, "{plan:?} by seed {seed}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn copies_bring_what_messages_would(
        world in 1usize..6,
        queries in 0usize..22,
        more in -4isize..8,
        heads in prop::sample::select(vec![(1, 1), (4, 2), (4, 4), (6, 3)]),
        batch in 1usize..3,
        mask in prop::sample::select(MASKS.to_vec()),
        has_dlse in any::<bool>(),
        seed in any::<u32>(),
    ) {
        let keys = queries.saturating_add_signed(more);
        let problem = problem(batch, (queries, keys), heads, mask);
        for plan in plans(&problem, world) {
            let plan = plan.with_dlse(has_dlse);
            for pass in [Pass::Forward, Pass::BACKWARD] {
                check(&plan, pass, seed.into());
            }
        }
        if let Ok(plan) = ShardPlan::new(&problem, world, Scheme::Decode, Layout::Contiguous) {
            check(&plan, Pass::Forward, seed.into());
        }
    }
}

/// What has exchanges of its own, or hides some of them.
#[test]
fn copies_bring_packed_sequences_gradients_of_arrays_and_what_masks_leave() {
    let one = problem(1, (40, 40), (4, 2), Mask::CAUSAL);
    let scored = |problem: &fa_core::Problem, text: &str| {
        let program = Scores::parse(text).unwrap().intern().unwrap();
        problem.with_score(problem.score.with_program(Some(program)))
    };
    let learned = scored(&one, "array bias: f32[_, _] grad; score = s + bias[h, k];");
    let documents = scored(&one, "mask = q // 7 == k // 7;");
    let starts = [0, 5, 5, 33, 40];
    let packed = one.with_lengths(Lengths::packed(4, 40, 40, 28, 28));
    let sinks = packed.with_score(packed.score.with_sinks(true));
    for world in [2, 3] {
        for plan in plans(&learned, world) {
            check(&plan.with_arrays(&[[4, 40, 1, 1]]).unwrap(), Pass::BACKWARD, 1);
        }
        for plan in plans(&documents, world) {
            check(&plan, Pass::Forward, 2);
            check(&plan, Pass::BACKWARD, 3);
        }
        for scheme in [Scheme::Gather, Scheme::Ring] {
            let plan = ShardPlan::packed(&sinks, &starts, world, scheme, Layout::Zigzag).unwrap();
            check(&plan, Pass::BACKWARD, 4);
        }
    }
}

/// Without one of the waits some order shows other memory.
#[test]
fn ranks_need_both_waits() {
    let problem = problem(1, (40, 40), (4, 2), Mask::CAUSAL);
    let plan = ShardPlan::new(&problem, 3, Scheme::Ring, Layout::Zigzag).unwrap();
    let programs: Vec<Program> = (0..3).map(|rank| plan.program(rank, Pass::BACKWARD).unwrap()).collect();
    let want = by_messages(&programs);
    let kinds: [fn(&Act) -> bool; 2] =
        [|act| !matches!(act, Act::AwaitReady(_)), |act| !matches!(act, Act::AwaitTaken(_))];
    for kept in kinds {
        let is_off = |seed| by_copies(&programs, seed, kept).is_none_or(|found| found != want);
        assert!((0..40).any(is_off), "a wait that is left out is seen");
    }
}

#[test]
fn many_pieces_are_few_copies() {
    let problem = problem(1, (64, 64), (8, 4), Mask::CAUSAL);
    for (scheme, most) in [(Scheme::Gather, 4), (Scheme::Ulysses, 6), (Scheme::Ring, 4)] {
        let plan = ShardPlan::new(&problem, 2, scheme, Layout::Zigzag).unwrap().with_stages(1).unwrap();
        let programs = [0, 1].map(|rank| plan.program(rank, Pass::Forward).unwrap());
        let first = acts(&programs, 1).unwrap().into_iter().find(|acts| !acts.is_empty()).unwrap();
        let copies = first.iter().filter(|act| matches!(act, Act::Copy(..))).count();
        assert!((1..=most).contains(&copies), "{}: {first:?}", scheme.name());
    }
}

#[test]
fn programs_of_other_plans_are_refused() {
    let plan = |len: usize| {
        let problem = problem(1, (len, len), (4, 2), Mask::FULL);
        ShardPlan::new(&problem, 2, Scheme::Gather, Layout::Zigzag).unwrap()
    };
    let programs = [plan(32).program(0, Pass::Forward).unwrap(), plan(40).program(1, Pass::Forward).unwrap()];
    for rank in [0, 1] {
        let error = acts(&programs, rank).unwrap_err();
        assert!(matches!(error, Error::Mismatch { rank: other, .. } if other == 1 - rank), "{error}");
    }
}
