//! The ring: keys and values of one rank after the other, partial results merged by their LSE.
//!
//! A rank gets keys from their owner directly, and only those that its queries see. Gradients of K and V go
//! straight back to the owner, who adds them up in the order of the steps.

use std::ops::Range;

use fa_core::{Merge, Pass};

use super::arrays::Arrays;
use super::calls::{Call, calls};
use super::sums::{Term, sum};
use super::{Packed, Parts, dlse, joined, nothing, outside};
use crate::plan::ShardPlan;
use crate::program::{Buffer, Builder, Cell, Lane, Op, Program, Shape, View};
use crate::shard::{Placed, overlap};

/// Keys of `owner` that `reader` needs, by the owner's own numbers, cut where its ranges meet.
fn shared(plan: &ShardPlan, owner: usize, reader: usize) -> Vec<Range<usize>> {
    let seen = joined(steps(plan, reader, owner).into_iter().map(|call| call.keys).collect());
    let placed = plan.keys().placed(owner).into_iter();
    let cut = |placed: Placed| {
        let own = placed.locals(&placed.range);
        seen.iter().filter_map(|range| overlap(range, &own)).collect::<Vec<_>>()
    };
    placed.flat_map(cut).collect()
}

fn steps(plan: &ShardPlan, rank: usize, owner: usize) -> Vec<Call> {
    calls(plan, &plan.queries().placed(rank), owner)
}

/// The most keys of a rank.
fn most_keys(plan: &ShardPlan) -> usize {
    (0..plan.world()).map(|rank| plan.keys().rows(rank)).max().unwrap_or(0)
}

struct Ring<'a> {
    plan: &'a ShardPlan,
    rank: usize,
    builder: Builder,
    /// The rank's own K and V, packed to be sent.
    own: [Buffer; 2],
    /// Those of others, of steps in turn.
    others: Vec<[Buffer; 2]>,
    packed: Packed,
    packed_dlse: Packed,
}

impl<'a> Ring<'a> {
    fn new(plan: &'a ShardPlan, rank: usize, pass: Pass) -> Ring<'a> {
        let tensors = plan.tensors(rank, pass.is_backward());
        let mut builder = Builder::new((rank, plan.world()), plan.problem().types.q, tensors);
        let most = most_keys(plan);
        let room = |builder: &mut Builder, rows: Option<usize>| {
            [Buffer::K, Buffer::V].map(|buffer| {
                let shape = builder.shape(buffer);
                builder.scratch(Shape { rows: rows.unwrap_or(shape.rows), ..shape })
            })
        };
        let own = room(&mut builder, None);
        let others = (0..(plan.world() - 1).min(2)).map(|_| room(&mut builder, Some(most))).collect();
        for (from, to) in [Buffer::K, Buffer::V].into_iter().zip(own) {
            let (from, to) = (builder.whole(from), builder.whole(to));
            builder.copy(Lane::Transfer, from, to);
        }
        Ring { plan, rank, builder, own, others, packed: Packed::new(), packed_dlse: Packed::new() }
    }

    /// The rank whose keys are met at `step`, and the one that meets this rank's.
    fn peers(&self, step: usize) -> (usize, usize) {
        let world = self.plan.world();
        ((self.rank + world - step) % world, (self.rank + step) % world)
    }

    /// K and V at `step`.
    fn at(&self, step: usize) -> [Buffer; 2] {
        if step == 0 { self.own } else { self.others[(step - 1) % self.others.len()] }
    }

    fn fetch(&mut self, step: usize) {
        let (owner, reader) = self.peers(step);
        let heads = 0..self.plan.problem().heads_kv;
        let messages = |peer: usize, buffers: [Buffer; 2], ranges: Vec<Range<usize>>| {
            let of = |rows: Range<usize>| buffers.map(|buffer| (peer, View::of(buffer, &rows, &heads)));
            ranges.into_iter().flat_map(of).collect::<Vec<_>>()
        };
        let sends = messages(reader, self.own, shared(self.plan, self.rank, reader));
        let recvs = messages(owner, self.at(step), shared(self.plan, owner, self.rank));
        self.builder.push(Lane::Transfer, Op::Exchange { sends, recvs });
    }

    /// Memory like one of the caller's tensors.
    fn like(&mut self, buffer: Buffer, cell: Cell) -> Buffer {
        let shape = self.builder.shape(buffer);
        self.builder.scratch(Shape { cell, ..shape })
    }
}

/// The forward of a rank.
pub(crate) fn forward(plan: &ShardPlan, rank: usize) -> Program {
    let mut ring = Ring::new(plan, rank, Pass::Forward);
    let heads = 0..plan.problem().heads_q;
    let kv = 0..plan.problem().heads_kv;
    let rows = 0..plan.queries().rows(rank);
    let by_step: Vec<Vec<Call>> =
        (0..plan.world()).map(|step| steps(plan, rank, ring.peers(step).0)).collect();
    let count: usize = by_step.iter().map(Vec::len).sum();
    if plan.world() > 1 {
        ring.fetch(1);
    }
    // A single part is the result, unless sinks join it.
    let sinks = plan.problem().score.sinks;
    let is_result = count == 1 && !sinks;
    let (mut parts, mut pool, mut number) = (Parts::new(count), Vec::<[Buffer; 2]>::new(), 0);
    for (step, calls) in by_step.into_iter().enumerate() {
        if step > 0 && step + 1 < plan.world() {
            ring.fetch(step + 1);
        }
        let [k, v] = ring.at(step);
        for call in calls {
            let (own, keys) = (&call.rows, &call.keys);
            let slot = number % Merge::MAX_PARTS;
            number += 1;
            if slot == pool.len() {
                pool.push(match is_result {
                    true => [Buffer::Out, Buffer::Lse],
                    false => [ring.like(Buffer::Out, Cell::Own), ring.like(Buffer::Lse, Cell::F32)],
                });
            }
            let [out, lse] = pool[slot];
            let to = View::of(lse, own, &heads);
            let packed = ring.packed.of(&mut ring.builder, &to);
            ring.builder.push(
                Lane::Compute,
                Op::Forward {
                    part: call.part(plan, &heads, kv.len()),
                    q: View::of(Buffer::Q, own, &heads),
                    k: View::of(k, keys, &kv),
                    v: View::of(v, keys, &kv),
                    out: View::of(out, own, &heads),
                    lse: packed.clone(),
                },
            );
            if packed != to {
                ring.builder.copy(Lane::Compute, packed, to);
            }
            for unseen in outside(&rows, own) {
                match is_result {
                    true => nothing(&mut ring.builder, &unseen, &heads),
                    false => {
                        let to = View::of(lse, &unseen, &heads);
                        ring.builder.push(Lane::Compute, Op::Nothing { to });
                    }
                }
            }
            let part = [out, lse].map(|buffer| ring.builder.whole(buffer));
            parts.push(&mut ring.builder, part);
        }
    }
    match count {
        0 => nothing(&mut ring.builder, &rows, &heads),
        _ if is_result => {}
        _ => parts.merge(&mut ring.builder, sinks),
    }
    ring.builder.finish()
}

/// The calls of each step, and whether the gradient of the sinks over its rows is a call's: each row is one
/// call's alone, of which those with the most rows come first.
fn with_sinks(plan: &ShardPlan, by_step: Vec<Vec<Call>>) -> Vec<Vec<(Call, bool)>> {
    let mut covered: Vec<Range<usize>> = Vec::new();
    let mut of_step = |mut calls: Vec<Call>| -> Vec<(Call, bool)> {
        if !plan.problem().score.sinks {
            return calls.into_iter().map(|call| (call, false)).collect();
        }
        calls.sort_by_key(|call| std::cmp::Reverse(call.rows.len()));
        let mut all = Vec::new();
        for call in calls {
            let known: Vec<Range<usize>> =
                covered.iter().filter_map(|rows| overlap(rows, &call.rows)).collect();
            let mut pieces: Vec<(Range<usize>, bool)> =
                known.iter().map(|rows| (rows.clone(), false)).collect();
            let mut first = call.rows.start;
            for rows in known.iter().chain([&(call.rows.end..call.rows.end)]) {
                pieces.extend((first < rows.start).then_some((first..rows.start, true)));
                first = rows.end;
            }
            covered = joined(covered.iter().cloned().chain([call.rows.clone()]).collect());
            match &pieces[..] {
                [(_, is_new)] => all.push((call, *is_new)),
                _ => all
                    .extend(pieces.iter().filter_map(|(rows, is_new)| Some((call.of_rows(rows)?, *is_new)))),
            }
        }
        all
    };
    by_step.into_iter().map(&mut of_step).collect()
}

/// Memory of the gradients.
struct Gradients {
    dq: Buffer,
    /// dK and dV of the rank's own keys.
    sums: [Buffer; 2],
    /// What is returned of a step, and what comes back: of two steps in turn.
    rooms: Vec<[[Buffer; 2]; 2]>,
    /// dQ of a call, in the kernel's type and in that of sums. Of calls in turn: their own queue orders them.
    part: Buffer,
    wide: Buffer,
    /// dK and dV of each call of a step.
    pool: Vec<[Buffer; 2]>,
    /// The gradient of the sinks of a call, and of all: sums are of whole vectors.
    dsinks: Option<[Buffer; 2]>,
    arrays: Arrays,
}

impl Ring<'_> {
    fn gradients(&mut self) -> Gradients {
        let dq = self.like(Buffer::Dq, Cell::F32);
        let sums = [Buffer::Dk, Buffer::Dv].map(|buffer| self.like(buffer, Cell::F32));
        let whole = self.builder.whole(dq);
        self.builder.push(Lane::Compute, Op::Sum { parts: Vec::new(), to: whole });
        let rows = [most_keys(self.plan), self.plan.keys().rows(self.rank)];
        let builder = &mut self.builder;
        let mut room = |rows: usize| {
            [Buffer::Dk, Buffer::Dv].map(|buffer| {
                let shape = builder.shape(buffer);
                builder.scratch(Shape { cell: Cell::F32, rows, ..shape })
            })
        };
        let rooms = (0..2).map(|_| rows.map(&mut room)).collect();
        let [part, wide] = [Cell::Own, Cell::F32].map(|cell| self.like(Buffer::Dq, cell));
        let arrays = Arrays::new(self.plan, &mut self.builder);
        Gradients { dq, sums, rooms, part, wide, pool: Vec::new(), dsinks: None, arrays }
    }

    /// Zeros for the gradient of the sinks.
    fn no_dsinks(&mut self) -> [Buffer; 2] {
        [(); 2].map(|()| {
            let shape = self.builder.shape(Buffer::Dsinks);
            let buffer = self.builder.scratch(Shape { heads: shape.heads.next_multiple_of(8), ..shape });
            let to = self.builder.whole(buffer);
            self.builder.push(Lane::Compute, Op::Sum { parts: Vec::new(), to });
            buffer
        })
    }

    /// The gradients of a call, the one of this number in its step; its dK and dV are given back.
    fn differentiate(
        &mut self,
        (index, call, has_sinks): (usize, &Call, bool),
        [k, v]: [Buffer; 2],
        own: &mut Gradients,
    ) -> [Buffer; 2] {
        let (plan, heads, kv) = (self.plan, 0..self.plan.problem().heads_q, 0..self.plan.problem().heads_kv);
        let of = |buffer| View::of(buffer, &call.rows, &heads);
        let lse = self.packed.of(&mut self.builder, &of(Buffer::Lse));
        if lse != of(Buffer::Lse) {
            self.builder.copy(Lane::Compute, of(Buffer::Lse), lse.clone());
        }
        let dlse = dlse(plan, &mut self.builder, &mut self.packed_dlse, &call.rows, &heads);
        let keyed = |buffer| View::of(buffer, &call.keys, &kv);
        if index == own.pool.len() {
            let rows = most_keys(self.plan);
            own.pool.push([Buffer::Dk, Buffer::Dv].map(|buffer| {
                let shape = self.builder.shape(buffer);
                self.builder.scratch(Shape { rows, ..shape })
            }));
        }
        let parts = own.pool[index];
        let mut part = call.part(plan, &heads, kv.len());
        part.problem = part.problem.with_score(part.problem.score.with_sinks(has_sinks));
        let dsinks = own.dsinks.filter(|_| has_sinks);
        self.builder.push(
            Lane::Compute,
            Op::Backward {
                part: part.clone(),
                inputs: [of(Buffer::Q), keyed(k), keyed(v), of(Buffer::Out), lse, of(Buffer::Dout)],
                outputs: [of(own.part), keyed(parts[0]), keyed(parts[1])],
                dsinks: dsinks.map(|[part, _]| Box::new(View::of(part, &(0..1), &heads))),
                dlse,
                darrays: own.arrays.of_call(&part),
            },
        );
        own.arrays.add(&mut self.builder, &part);
        if let Some(buffers) = dsinks {
            let [part, to] = buffers.map(|buffer| self.builder.whole(buffer));
            self.builder.push(Lane::Compute, Op::Sum { parts: vec![to.clone(), part], to });
        }
        // Sums are of one type.
        self.builder.copy(Lane::Compute, of(own.part), of(own.wide));
        let op = Op::Sum { parts: vec![of(own.dq), of(own.wide)], to: of(own.dq) };
        self.builder.push(Lane::Compute, op);
        parts
    }

    /// dK and dV of a step: those of own keys are kept, others go to their owner while those that other ranks
    /// have of own keys come, and are added.
    fn give_back(&mut self, step: usize, terms: &[Vec<Term>; 2], own: &Gradients) {
        let (plan, rank, kv) = (self.plan, self.rank, 0..self.plan.problem().heads_kv);
        if step == 0 {
            let keys = 0..plan.keys().rows(rank);
            for (terms, to) in terms.iter().zip(own.sums) {
                sum(&mut self.builder, Lane::Compute, terms, &kv, &keys, (to, 0, &kv));
            }
            return;
        }
        let ((owner, reader), [returned, received]) = (self.peers(step), own.rooms[step % 2]);
        let back = shared(plan, owner, rank);
        for (terms, to) in terms.iter().zip(returned) {
            for rows in &back {
                sum(&mut self.builder, Lane::Compute, terms, &kv, rows, (to, rows.start, &kv));
            }
        }
        let messages = |peer: usize, buffers: [Buffer; 2], ranges: &[Range<usize>]| {
            let of = |rows: &Range<usize>| buffers.map(|buffer| (peer, View::of(buffer, rows, &kv)));
            ranges.iter().flat_map(of).collect::<Vec<_>>()
        };
        let come = shared(plan, rank, reader);
        let (sends, recvs) = (messages(owner, returned, &back), messages(reader, received, &come));
        self.builder.push(Lane::Transfer, Op::Exchange { sends, recvs });
        for (from, to) in received.into_iter().zip(own.sums) {
            for rows in &come {
                let [from, to] = [from, to].map(|buffer| View::of(buffer, rows, &kv));
                self.builder.push(Lane::Transfer, Op::Sum { parts: vec![to.clone(), from], to });
            }
        }
    }

    /// The sums as the caller has them.
    fn write(mut self, own: Gradients) -> Program {
        if let Some([_, sum]) = own.dsinks {
            let to = self.builder.whole(Buffer::Dsinks);
            self.builder.copy(Lane::Compute, View { buffer: sum, ..to.clone() }, to);
        }
        let lanes = [Lane::Compute, Lane::Transfer, Lane::Transfer];
        let pairs = [(own.dq, Buffer::Dq), (own.sums[0], Buffer::Dk), (own.sums[1], Buffer::Dv)];
        for ((from, to), lane) in pairs.into_iter().zip(lanes) {
            let [from, to] = [from, to].map(|buffer| self.builder.whole(buffer));
            self.builder.copy(lane, from, to);
        }
        own.arrays.finish(self.plan, self.rank, &mut self.builder);
        self.builder.finish()
    }
}

/// The backward of a rank.
pub(crate) fn backward(plan: &ShardPlan, rank: usize) -> Program {
    let mut ring = Ring::new(plan, rank, Pass::BACKWARD);
    let world = plan.world();
    let mut own = ring.gradients();
    if world > 1 {
        ring.fetch(1);
    }
    own.dsinks = plan.problem().score.sinks.then(|| ring.no_dsinks());
    let by_step = (0..world).map(|step| steps(plan, rank, ring.peers(step).0)).collect();
    for (step, calls) in with_sinks(plan, by_step).into_iter().enumerate() {
        if step > 0 && step + 1 < world {
            ring.fetch(step + 1);
        }
        let keys = ring.at(step);
        let mut terms: [Vec<Term>; 2] = [Vec::new(), Vec::new()];
        for (index, (call, has_sinks)) in calls.iter().enumerate() {
            let parts = ring.differentiate((index, call, *has_sinks), keys, &mut own);
            for (terms, buffer) in terms.iter_mut().zip(parts) {
                terms.push(Term { rows: call.keys.clone(), buffer, first: call.keys.start });
            }
        }
        ring.give_back(step, &terms, &own);
    }
    ring.write(own)
}
