//! Ulysses: shards of rows become shards of heads, and back.
//!
//! A rank computes whole sequences for its heads, with the kernels and the bits of one GPU. Where there are
//! fewer K/V heads than ranks, several ranks have the same, and their gradients are added up.

use std::ops::Range;

use fa_core::Pass;

use super::arrays::Arrays;
use super::others;
use crate::plan::ShardPlan;
use crate::program::{Buffer, Builder, Lane, Op, Part, Program, Shape, View};
use crate::shard::Shards;

/// Query heads and K/V heads that `rank` computes in a stage.
fn heads(plan: &ShardPlan, rank: usize, stage: usize) -> (Range<usize>, Range<usize>) {
    let (problem, group) = (plan.problem(), plan.problem().group_size());
    let size = problem.heads_q / plan.world() / plan.stages();
    let first = rank * problem.heads_q / plan.world() + stage * size;
    let q = first..first + size;
    (q.clone(), q.start / group..(q.end - 1) / group + 1)
}

/// A tensor of the whole sequence for the heads of a stage, stages, and room for what is sent and received.
struct Turned {
    /// The caller's tensor.
    local: Buffer,
    /// All rows, for each stage.
    whole: Vec<Buffer>,
    /// For each rank the local rows of its heads (to it), or of its rows (from it).
    boxes: Vec<Vec<Buffer>>,
    /// Whether the heads are those of K and V.
    is_kv: bool,
}

struct Ulysses<'a> {
    plan: &'a ShardPlan,
    rank: usize,
    builder: Builder,
}

impl<'a> Ulysses<'a> {
    fn new(plan: &'a ShardPlan, rank: usize, pass: Pass) -> Ulysses<'a> {
        let tensors = plan.tensors(rank, pass.is_backward());
        let builder = Builder::new((rank, plan.world()), plan.problem().types.q, tensors);
        Ulysses { plan, rank, builder }
    }

    fn shards(&self, is_kv: bool) -> &'a Shards {
        if is_kv { self.plan.keys() } else { self.plan.queries() }
    }

    fn turned(&mut self, local: Buffer, is_kv: bool) -> Turned {
        let shape = self.builder.shape(local);
        let (q, kv) = heads(self.plan, self.rank, 0);
        let count = if is_kv { kv.len() } else { q.len() };
        let rows = self.shards(is_kv).len();
        let stages = self.plan.stages();
        let whole =
            (0..stages).map(|_| self.builder.scratch(Shape { rows, heads: count, ..shape })).collect();
        let boxes = (0..stages).map(|_| {
            let own = |_| self.builder.scratch(Shape { heads: count, ..shape });
            (0..self.plan.world()).map(own).collect()
        });
        let boxes = boxes.collect();
        Turned { local, whole, boxes, is_kv }
    }

    fn heads_of(&self, turned: &Turned, rank: usize, stage: usize) -> Range<usize> {
        let (q, kv) = heads(self.plan, rank, stage);
        if turned.is_kv { kv } else { q }
    }

    /// Packs what is sent of a stage.
    fn pack(&mut self, tensors: &[&Turned], stage: usize) {
        let (plan, rank) = (self.plan, self.rank);
        for turned in tensors {
            let shards = self.shards(turned.is_kv);
            for to in (0..plan.world()).filter(|to| *to != rank) {
                let heads = self.heads_of(turned, to, stage);
                let from = View::of(turned.local, &(0..shards.rows(rank)), &heads);
                let to = self.builder.whole(turned.boxes[stage][to]);
                self.builder.copy(Lane::Transfer, from, to);
            }
            let own = self.heads_of(turned, rank, stage);
            for placed in shards.placed(rank) {
                let from = View::of(turned.local, &placed.locals(&placed.range), &own);
                let to = View::of(turned.whole[stage], &placed.range, &(0..own.len()));
                self.builder.copy(Lane::Transfer, from, to);
            }
        }
    }

    /// From shards of rows to shards of heads. All is packed at first: later, kernels of attention hold every
    /// SM.
    fn turn(&mut self, tensors: &[&Turned]) {
        (0..self.plan.stages()).for_each(|stage| self.pack(tensors, stage));
        (0..self.plan.stages()).for_each(|stage| self.send(tensors, stage));
    }

    fn send(&mut self, tensors: &[&Turned], stage: usize) {
        let (plan, rank) = (self.plan, self.rank);
        let (mut sends, mut recvs) = (Vec::new(), Vec::new());
        for (next, last) in others(plan, rank) {
            for turned in tensors {
                let shards = self.shards(turned.is_kv);
                let all = 0..self.heads_of(turned, rank, stage).len();
                for placed in shards.placed(rank).iter().filter(|placed| !placed.range.is_empty()) {
                    let view = View::of(turned.boxes[stage][next], &placed.locals(&placed.range), &all);
                    sends.push((next, view));
                }
                for range in shards.ranges(last).iter().filter(|range| !range.is_empty()) {
                    recvs.push((last, View::of(turned.whole[stage], range, &all)));
                }
            }
        }
        self.builder.push(Lane::Transfer, Op::Exchange { sends, recvs });
    }

    /// From shards of heads back to shards of rows; replicas of K/V heads are added up.
    fn turn_back(&mut self, tensors: &[&Turned], stage: usize) {
        let (plan, rank) = (self.plan, self.rank);
        let (mut sends, mut recvs) = (Vec::new(), Vec::new());
        for (next, last) in others(plan, rank) {
            for turned in tensors {
                let shards = self.shards(turned.is_kv);
                let all = 0..self.heads_of(turned, rank, stage).len();
                for range in shards.ranges(next).iter().filter(|range| !range.is_empty()) {
                    sends.push((next, View::of(turned.whole[stage], range, &all)));
                }
                for placed in shards.placed(rank).iter().filter(|placed| !placed.range.is_empty()) {
                    let to = View::of(turned.boxes[stage][last], &placed.locals(&placed.range), &all);
                    recvs.push((last, to));
                }
            }
        }
        self.builder.push(Lane::Transfer, Op::Exchange { sends, recvs });
        for turned in tensors {
            let shards = self.shards(turned.is_kv);
            // Ranks that computed the same heads, in ascending order; most heads have one.
            let mut done: Vec<Range<usize>> = Vec::new();
            for from in 0..plan.world() {
                let heads = self.heads_of(turned, from, stage);
                if done.contains(&heads) {
                    continue;
                }
                let replicas: Vec<usize> =
                    (0..plan.world()).filter(|other| self.heads_of(turned, *other, stage) == heads).collect();
                let all = 0..heads.len();
                for placed in shards.placed(rank) {
                    let local = placed.locals(&placed.range);
                    let part = |from: &usize| match *from == rank {
                        true => View::of(turned.whole[stage], &placed.range, &all),
                        false => View::of(turned.boxes[stage][*from], &local, &all),
                    };
                    let op = Op::Sum {
                        parts: replicas.iter().map(part).collect(),
                        to: View::of(turned.local, &local, &heads),
                    };
                    self.builder.push(Lane::Transfer, op);
                }
                done.push(heads);
            }
        }
    }

    fn all(&self, turned: &Turned, stage: usize) -> View {
        self.builder.whole(turned.whole[stage])
    }

    fn part(&self, stage: usize) -> Part {
        let (q, kv) = heads(self.plan, self.rank, stage);
        self.plan.heads_part(&q, kv.len())
    }
}

/// The forward of a rank.
pub(crate) fn forward(plan: &ShardPlan, rank: usize) -> Program {
    let mut turn = Ulysses::new(plan, rank, Pass::Forward);
    let inputs = [(Buffer::Q, false), (Buffer::K, true), (Buffer::V, true)]
        .map(|(own, is_kv)| turn.turned(own, is_kv));
    let results = [Buffer::Out, Buffer::Lse].map(|own| turn.turned(own, false));
    let [inputs_at, results_at] = [inputs.each_ref().to_vec(), results.each_ref().to_vec()];
    turn.turn(&inputs_at);
    for stage in 0..plan.stages() {
        let [q, k, v] = inputs.each_ref().map(|turned| turn.all(turned, stage));
        let [out, lse] = results.each_ref().map(|turned| turn.all(turned, stage));
        let op = Op::Forward { part: turn.part(stage), q, k, v, out, lse };
        turn.builder.push(Lane::Compute, op);
        turn.turn_back(&results_at, stage);
    }
    turn.builder.finish()
}

/// The backward of a rank.
pub(crate) fn backward(plan: &ShardPlan, rank: usize) -> Program {
    let mut turn = Ulysses::new(plan, rank, Pass::BACKWARD);
    let inputs = [
        (Buffer::Q, false),
        (Buffer::K, true),
        (Buffer::V, true),
        (Buffer::Out, false),
        (Buffer::Lse, false),
        (Buffer::Dout, false),
    ];
    let inputs = inputs.map(|(own, is_kv)| turn.turned(own, is_kv));
    let results = [(Buffer::Dq, false), (Buffer::Dk, true), (Buffer::Dv, true)];
    let results = results.map(|(own, is_kv)| turn.turned(own, is_kv));
    let dlse = plan.has_dlse().then(|| turn.turned(Buffer::Dlse, false));
    let results_at = results.each_ref().to_vec();
    let inputs_at: Vec<&Turned> = inputs.iter().chain(&dlse).collect();
    turn.turn(&inputs_at);
    let has_sinks = plan.problem().score.sinks;
    if has_sinks {
        // Those of the other ranks' heads.
        let to = turn.builder.whole(Buffer::Dsinks);
        turn.builder.push(Lane::Compute, Op::Sum { parts: Vec::new(), to });
    }
    let mut arrays = Arrays::new(plan, &mut turn.builder);
    for stage in 0..plan.stages() {
        let part = turn.part(stage);
        let dsinks = has_sinks.then(|| Box::new(View::of(Buffer::Dsinks, &(0..1), &part.heads)));
        let op = Op::Backward {
            part: part.clone(),
            dsinks,
            dlse: dlse.as_ref().map(|turned| Box::new(turn.all(turned, stage))),
            inputs: inputs.each_ref().map(|turned| turn.all(turned, stage)),
            outputs: results.each_ref().map(|turned| turn.all(turned, stage)),
            darrays: arrays.of_call(&part),
        };
        turn.builder.push(Lane::Compute, op);
        arrays.add(&mut turn.builder, &part);
        turn.turn_back(&results_at, stage);
    }
    arrays.finish(plan, rank, &mut turn.builder);
    turn.builder.finish()
}
