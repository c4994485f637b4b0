//! Decode: queries on every rank, keys spread over ranks, one exchange of (O, LSE).

use fa_core::Pass;

use super::calls::calls;
use super::{Packed, Parts, nothing, others, outside};
use crate::plan::ShardPlan;
use crate::program::{Buffer, Builder, Lane, Op, Program, View};
use crate::shard::Placed;

/// What a rank does. All ranks end with the same result, merged in the order of ranks.
pub(crate) fn forward(plan: &ShardPlan, rank: usize) -> Program {
    let tensors = plan.tensors(rank, Pass::Forward.is_backward());
    let mut builder = Builder::new((rank, plan.world()), plan.problem().types.q, tensors);
    let mut packed = Packed::new();
    let (heads, kv) = (0..plan.problem().heads_q, 0..plan.problem().heads_kv);
    let rows = 0..plan.queries().len();
    let placed = [Placed { local: 0, range: rows.clone() }];
    let [out_shape, lse_shape] = [Buffer::Out, Buffer::Lse].map(|buffer| builder.shape(buffer));
    // All that a rank sends lies together, and is one message.
    let room = |builder: &mut Builder, is_first: bool| {
        let out = if is_first { builder.scratch(out_shape) } else { builder.behind(out_shape) };
        [out, builder.behind(lse_shape)]
    };
    let mut parts: Vec<Vec<[View; 2]>> = vec![Vec::new(); plan.world()];
    for (owner, parts) in parts.iter_mut().enumerate().filter(|_| plan.is_cache() && !rows.is_empty()) {
        let [out, lse] = room(&mut builder, parts.is_empty()).map(|buffer| builder.whole(buffer));
        parts.push([out.clone(), lse.clone()]);
        if owner == rank {
            let [q, k, v] = [Buffer::Q, Buffer::K, Buffer::V].map(|buffer| builder.whole(buffer));
            let part = plan.cache_part();
            builder.push(Lane::Compute, Op::Forward { part, q, k, v, out, lse });
        }
    }
    for (owner, parts) in parts.iter_mut().enumerate().filter(|_| !plan.is_cache()) {
        for call in calls(plan, &placed, owner) {
            let (own, keys) = (&call.rows, &call.keys);
            let [out, lse] = room(&mut builder, parts.is_empty());
            parts.push([builder.whole(out), builder.whole(lse)]);
            if owner != rank {
                continue;
            }
            let to = View::of(lse, own, &heads);
            let own_lse = packed.of(&mut builder, &to);
            builder.push(
                Lane::Compute,
                Op::Forward {
                    part: call.part(plan, &heads, kv.len()),
                    q: View::of(Buffer::Q, own, &heads),
                    k: View::of(Buffer::K, keys, &kv),
                    v: View::of(Buffer::V, keys, &kv),
                    out: View::of(out, own, &heads),
                    lse: own_lse.clone(),
                },
            );
            if own_lse != to {
                builder.copy(Lane::Compute, own_lse, to);
            }
            for unseen in outside(&rows, own) {
                builder.push(Lane::Compute, Op::Nothing { to: View::of(lse, &unseen, &heads) });
                // Sent as it is: what the rows of O hold has to be something.
                let to = View::of(out, &unseen, &heads);
                builder.push(Lane::Compute, Op::Sum { parts: Vec::new(), to });
            }
        }
    }
    let (mut sends, mut recvs) = (Vec::new(), Vec::new());
    for (next, last) in others(plan, rank) {
        let views = |of: usize| parts[of].iter().flatten().cloned();
        sends.extend(views(rank).map(|view| (next, view)));
        recvs.extend(views(last).map(|view| (last, view)));
    }
    if !rows.is_empty() {
        // Nothing hides this exchange: it stays on the caller's stream.
        builder.push(Lane::Compute, Op::Exchange { sends, recvs });
    }
    let all: Vec<[View; 2]> = parts.into_iter().flatten().collect();
    if all.is_empty() {
        nothing(&mut builder, &rows, &heads);
    } else {
        let mut parts = Parts::new(all.len());
        all.into_iter().for_each(|part| parts.push(&mut builder, part));
        parts.merge(&mut builder, plan.problem().score.sinks);
    }
    builder.finish()
}
