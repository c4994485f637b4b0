//! Staged all-gather of K and V by heads: no merge, the bits of one GPU.
//!
//! The gradients of K and V go the other way, in f32, and their owner adds them up in the order of ranks.

use std::ops::Range;

use fa_core::{Pass, TensorLayout};
use fa_cpu::check;

use super::arrays::Arrays;
use super::sums::{Term, sum};
use super::{Packed, dlse, joined, nothing, others, outside};
use crate::block::Block;
use crate::plan::ShardPlan;
use crate::program::{Buffer, Builder, Cell, Lane, Op, Program, Shape, View};
use crate::shard::{Placed, overlap};

/// What one rank's queries see: a block for each of its ranges.
fn blocks(plan: &ShardPlan, rank: usize) -> Vec<(Placed, Option<Block>)> {
    let all = 0..plan.keys().len();
    let placed = plan.queries().placed(rank).into_iter();
    placed.map(|placed| (placed.clone(), plan.block(placed.range, all.clone()))).collect()
}

/// Keys that a rank's queries see.
fn needed(plan: &ShardPlan, rank: usize) -> Vec<Range<usize>> {
    joined(blocks(plan, rank).into_iter().filter_map(|(_, block)| Some(block?.keys)).collect())
}

/// The keys that `owner` holds and `reader` needs, range by range.
fn shared(plan: &ShardPlan, owner: usize, reader: usize) -> Vec<Range<usize>> {
    let needed = needed(plan, reader);
    let own = plan.keys().ranges(owner).into_iter();
    own.flat_map(|own| needed.iter().filter_map(move |need| overlap(&own, need)).collect::<Vec<_>>())
        .collect()
}

/// The rank's own numbers of rows of the whole, which are of one of its ranges.
fn local(placed: &[Placed], rows: &Range<usize>) -> Range<usize> {
    let own = placed.iter().find(|own| overlap(&own.range, rows).is_some());
    own.map_or(0..0, |own| own.locals(rows))
}

/// Stages whose keys are there or on their way: with three, one is fetched while kernels of the one before
/// it run, and needs no memory that these read.
const SLOTS: usize = 3;

struct Gather<'a> {
    plan: &'a ShardPlan,
    rank: usize,
    builder: Builder,
    /// The rank's own K and V, packed to be sent.
    own: [Buffer; 2],
    /// K and V of stages in turn.
    gathered: Vec<[Buffer; 2]>,
    packed: Packed,
    packed_dlse: Packed,
}

impl<'a> Gather<'a> {
    fn new(plan: &'a ShardPlan, rank: usize, pass: Pass) -> Gather<'a> {
        let tensors = plan.tensors(rank, pass.is_backward());
        let mut builder = Builder::new((rank, plan.world()), plan.problem().types.q, tensors);
        let gathered = (0..plan.stages().min(SLOTS)).map(|_| staged(plan, &mut builder, Cell::Own)).collect();
        // What others need, all heads at once: later, kernels of attention hold every SM.
        let placed = plan.keys().placed(rank);
        let sent = others(plan, rank).flat_map(|(next, _)| shared(plan, rank, next));
        let sent = joined(sent.map(|rows| local(&placed, &rows)).collect());
        let own = [Buffer::K, Buffer::V].map(|from| {
            let shape = builder.shape(from);
            let to = builder.scratch(Shape { order: TensorLayout::Bhsd, ..shape });
            for rows in &sent {
                let [from, to] = [from, to].map(|buffer| View::of(buffer, rows, &(0..shape.heads)));
                builder.copy(Lane::Transfer, from, to);
            }
            to
        });
        let mut gather =
            Gather { plan, rank, builder, own, gathered, packed: Packed::new(), packed_dlse: Packed::new() };
        (0..plan.stages().min(SLOTS - 1)).for_each(|stage| gather.gather(stage));
        gather
    }

    /// The keys and values of a stage to their places in the sequence: others' by transfers, under which the
    /// rank's own are copied.
    fn gather(&mut self, stage: usize) {
        let (plan, rank) = (self.plan, self.rank);
        let to = self.gathered[stage % self.gathered.len()];
        let (_, kv) = plan.stage_heads(stage);
        let staged = 0..kv.len();
        let placed = plan.keys().placed(rank);
        let sends = others(plan, rank).flat_map(|(next, _)| {
            let ranges = shared(plan, rank, next).into_iter();
            let of =
                |rows: Range<usize>| self.own.map(|from| (next, View::of(from, &local(&placed, &rows), &kv)));
            ranges.flat_map(of).collect::<Vec<_>>()
        });
        let recvs = others(plan, rank).flat_map(|(_, last)| {
            let ranges = shared(plan, last, rank).into_iter();
            ranges.flat_map(|rows| to.map(|to| (last, View::of(to, &rows, &staged)))).collect::<Vec<_>>()
        });
        let exchange = Op::Exchange { sends: sends.collect(), recvs: recvs.collect() };
        self.builder.push(Lane::Transfer, exchange);
        for rows in shared(plan, rank, rank) {
            for (from, to) in [Buffer::K, Buffer::V].into_iter().zip(to) {
                let from = View::of(from, &local(&placed, &rows), &kv);
                self.builder.copy(Lane::Compute, from, View::of(to, &rows, &staged));
            }
        }
    }

    /// The gather of a later stage, before the kernels of `stage` take all SMs.
    fn gather_ahead(&mut self, stage: usize) {
        let ahead = stage + SLOTS - 1;
        if ahead < self.plan.stages() {
            self.gather(ahead);
        }
    }

    fn forward(&mut self, stage: usize) {
        let (plan, builder) = (self.plan, &mut self.builder);
        let [k, v] = self.gathered[stage % self.gathered.len()];
        let (heads, kv) = plan.stage_heads(stage);
        // The last rows see the most: they come first, so that the short ones fill the end.
        for (placed, block) in blocks(plan, self.rank).into_iter().rev() {
            let all = placed.locals(&placed.range);
            let Some(block) = block else {
                nothing(builder, &all, &heads);
                continue;
            };
            let Block { rows, keys, mask, starts } = block;
            let part = plan.part((&rows, &keys), (mask, &starts), &heads, kv.len());
            let own = placed.locals(&rows);
            outside(&all, &own).iter().for_each(|rows| nothing(builder, rows, &heads));
            let to = View::of(Buffer::Lse, &own, &heads);
            let lse = self.packed.of(builder, &to);
            builder.push(
                Lane::Compute,
                Op::Forward {
                    part,
                    q: View::of(Buffer::Q, &own, &heads),
                    k: View::of(k, &keys, &(0..kv.len())),
                    v: View::of(v, &keys, &(0..kv.len())),
                    out: View::of(Buffer::Out, &own, &heads),
                    lse: lse.clone(),
                },
            );
            if lse != to {
                builder.copy(Lane::Compute, lse, to);
            }
        }
    }
}

/// K and V of all keys, for the heads of a stage.
fn staged(plan: &ShardPlan, builder: &mut Builder, cell: Cell) -> [Buffer; 2] {
    let problem = plan.problem();
    [problem.head_dim, problem.head_dim_v].map(|dim| {
        builder.scratch(Shape {
            batch: check::k_shape(problem)[0],
            rows: plan.keys().len(),
            heads: problem.heads_kv / plan.stages(),
            dim,
            cell,
            order: TensorLayout::Bhsd,
        })
    })
}

/// The forward of a rank.
pub(crate) fn forward(plan: &ShardPlan, rank: usize) -> Program {
    let mut gather = Gather::new(plan, rank, Pass::Forward);
    for stage in 0..plan.stages() {
        gather.gather_ahead(stage);
        gather.forward(stage);
    }
    gather.builder.finish()
}

/// Memory of the gradients of K and V.
struct Returns {
    /// Those of each of the rank's ranges of queries, in the kernel's type.
    parts: Vec<[Buffer; 2]>,
    /// Their sums over the rank's queries, twice.
    sums: Vec<[Buffer; 2]>,
    /// For each other rank its sums over the rank's own keys.
    received: Vec<(usize, [Buffer; 2])>,
    /// The gradient of the sinks over each of the rank's ranges of queries, and of all.
    dsinks: Option<(Vec<Buffer>, Buffer)>,
}

impl Gather<'_> {
    fn returns(&mut self) -> Returns {
        let (plan, builder) = (self.plan, &mut self.builder);
        let ranges = plan.queries().ranges(self.rank).len();
        let parts = (0..ranges).map(|_| staged(plan, builder, Cell::Own)).collect();
        let sums = (0..plan.stages().min(2)).map(|_| staged(plan, builder, Cell::F32)).collect();
        let rows = plan.keys().rows(self.rank);
        let own = |builder: &mut Builder| {
            staged(plan, builder, Cell::F32).map(|buffer| {
                let Buffer::Scratch(number) = buffer else { return buffer };
                builder.resize(number, rows);
                buffer
            })
        };
        let received = others(plan, self.rank).map(|(_, last)| (last, own(builder))).collect();
        let dsinks = plan.problem().score.sinks.then(|| {
            let shape = builder.shape(Buffer::Dsinks);
            // Sums are of whole vectors.
            let heads = shape.heads.next_multiple_of(8);
            let parts = (0..ranges).map(|_| {
                let part = builder.scratch(Shape { heads, ..shape });
                let to = builder.whole(part);
                builder.push(Lane::Compute, Op::Sum { parts: Vec::new(), to });
                part
            });
            let parts = parts.collect();
            (parts, builder.scratch(Shape { heads, ..shape }))
        });
        Returns { parts, sums, received, dsinks }
    }

    fn backward(&mut self, stage: usize, returns: &Returns, arrays: &mut Arrays) {
        let (plan, builder) = (self.plan, &mut self.builder);
        let [k, v] = self.gathered[stage % self.gathered.len()];
        let (heads, kv) = plan.stage_heads(stage);
        let staged = 0..kv.len();
        let mut terms: [Vec<Term>; 2] = [Vec::new(), Vec::new()];
        let parts = returns.parts.iter().enumerate();
        for ((placed, block), (number, parts)) in blocks(plan, self.rank).into_iter().zip(parts).rev() {
            let all = placed.locals(&placed.range);
            let zero = |builder: &mut Builder, rows: &Range<usize>| {
                let to = View::of(Buffer::Dq, rows, &heads);
                builder.push(Lane::Compute, Op::Sum { parts: Vec::new(), to });
            };
            let Some(block) = block else {
                zero(builder, &all);
                continue;
            };
            let Block { rows, keys, mask, starts } = block;
            let part = plan.part((&rows, &keys), (mask, &starts), &heads, kv.len());
            let dsinks = returns.dsinks.as_ref();
            let dsinks = dsinks.map(|(parts, _)| Box::new(View::of(parts[number], &(0..1), &heads)));
            let own = placed.locals(&rows);
            outside(&all, &own).iter().for_each(|rows| zero(builder, rows));
            let of = |buffer| View::of(buffer, &own, &heads);
            let lse = self.packed.of(builder, &of(Buffer::Lse));
            if lse != of(Buffer::Lse) {
                builder.copy(Lane::Compute, of(Buffer::Lse), lse.clone());
            }
            let dlse = dlse(plan, builder, &mut self.packed_dlse, &own, &heads);
            let keyed = |buffer| View::of(buffer, &keys, &staged);
            builder.push(
                Lane::Compute,
                Op::Backward {
                    part: part.clone(),
                    dsinks,
                    dlse,
                    inputs: [of(Buffer::Q), keyed(k), keyed(v), of(Buffer::Out), lse, of(Buffer::Dout)],
                    outputs: [of(Buffer::Dq), keyed(parts[0]), keyed(parts[1])],
                    darrays: arrays.of_call(&part),
                },
            );
            arrays.add(builder, &part);
            for (terms, &buffer) in terms.iter_mut().zip(parts) {
                terms.push(Term { rows: keys.clone(), buffer, first: keys.start });
            }
        }
        let sums = returns.sums[stage % returns.sums.len()];
        for (terms, to) in terms.iter().zip(sums) {
            for rows in needed(plan, self.rank) {
                sum(builder, Lane::Compute, terms, &staged, &rows, (to, rows.start, &staged));
            }
        }
    }

    /// Sums go to the owners of the keys, who add them up.
    fn give_back(&mut self, stage: usize, returns: &Returns) {
        let (plan, rank, builder) = (self.plan, self.rank, &mut self.builder);
        let sums = returns.sums[stage % returns.sums.len()];
        let (_, kv) = plan.stage_heads(stage);
        let staged = 0..kv.len();
        let sends = others(plan, rank).flat_map(|(next, _)| {
            let ranges = shared(plan, next, rank).into_iter();
            ranges.flat_map(|rows| sums.map(|sum| (next, View::of(sum, &rows, &staged)))).collect::<Vec<_>>()
        });
        let placed = plan.keys().placed(rank);
        let recvs = returns.received.iter().flat_map(|(last, received)| {
            let ranges = shared(plan, rank, *last).into_iter();
            let of = |rows: Range<usize>| {
                received.map(|to| (*last, View::of(to, &local(&placed, &rows), &staged)))
            };
            ranges.flat_map(of).collect::<Vec<_>>()
        });
        let exchange = Op::Exchange { sends: sends.collect(), recvs: recvs.collect() };
        builder.push(Lane::Transfer, exchange);
        for (which, to) in [Buffer::Dk, Buffer::Dv].into_iter().enumerate() {
            let mut terms = Vec::new();
            for from in 0..plan.world() {
                let received = returns.received.iter().find(|(rank, _)| *rank == from);
                for rows in shared(plan, rank, from) {
                    terms.push(match received {
                        Some((_, buffers)) => {
                            let first = local(&placed, &rows).start;
                            Term { rows, buffer: buffers[which], first }
                        }
                        None => Term { first: rows.start, rows, buffer: sums[which] },
                    });
                }
            }
            for own in &placed {
                sum(builder, Lane::Transfer, &terms, &staged, &own.range, (to, own.local, &kv));
            }
        }
    }
}

/// The backward of a rank.
pub(crate) fn backward(plan: &ShardPlan, rank: usize) -> Program {
    let mut gather = Gather::new(plan, rank, Pass::BACKWARD);
    let returns = gather.returns();
    let mut arrays = Arrays::new(plan, &mut gather.builder);
    for stage in 0..plan.stages() {
        gather.gather_ahead(stage);
        gather.backward(stage, &returns, &mut arrays);
        gather.give_back(stage, &returns);
    }
    let builder = &mut gather.builder;
    if let Some((parts, sum)) = &returns.dsinks {
        let parts = parts.iter().map(|part| builder.whole(*part)).collect();
        let whole = builder.whole(*sum);
        builder.push(Lane::Compute, Op::Sum { parts, to: whole });
        let to = builder.whole(Buffer::Dsinks);
        builder.copy(Lane::Compute, View { buffer: *sum, ..to.clone() }, to);
    }
    arrays.finish(plan, rank, builder);
    gather.builder.finish()
}
