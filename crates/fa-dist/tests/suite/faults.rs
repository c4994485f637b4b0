//! Ranks that end, stall, lose or damage messages, or do something else: a typed error on every survivor, in
//! time.

use std::time::{Duration, Instant};

use fa_core::{Mask, Pass, TensorLayout};
use fa_cpu::tiled::BackwardInputs;
use fa_cpu::{Extras, TensorMut, TensorRef};
use fa_dist::program::Op;
use fa_dist::{
    Error, Fault, FaultKind, HostAttention, Layout, MemoryOptions, MemoryTransport, Order, Scheme, ShardPlan,
};

use crate::cases::{plans, problem};
use crate::oracle::{inputs, rank};

fn view(values: &[f32], rows: usize) -> TensorRef<'_, f32> {
    TensorRef::packed("x", values, [1, rows, 4, 8], TensorLayout::Bshd).unwrap()
}

fn view_mut(values: &mut [f32], rows: usize) -> TensorMut<'_, f32> {
    TensorMut::packed("x", values, [1, rows, 4, 8], TensorLayout::Bshd).unwrap()
}

/// What each rank answers when `fault` happens.
fn answers(plan: &ShardPlan, fault: Fault) -> Vec<Option<Error>> {
    let inputs = inputs::<f32>(plan.problem());
    let deadline = Duration::from_millis(400);
    let options = MemoryOptions { deadline, faults: vec![fault], ..MemoryOptions::default() };
    let begun = Instant::now();
    let found = MemoryTransport::run(plan.world(), &options, |transport| {
        rank(plan, transport, Order::Listed, &inputs, &Extras::NONE).err()
    });
    assert!(begun.elapsed() < Duration::from_secs(20), "a rank hung");
    found
}

#[test]
fn a_rank_that_ends_is_named_by_all_others_at_every_stage() {
    let problem = problem(1, (32, 32), (4, 4), Mask::CAUSAL);
    for plan in plans(&problem, 3) {
        let exchanges = |pass| {
            let program = plan.program(1, pass).unwrap();
            program.steps.iter().filter(|step| matches!(step.op, Op::Exchange { .. })).count()
        };
        for exchange in 0..exchanges(Pass::Forward) + exchanges(Pass::BACKWARD) {
            let found = answers(&plan, Fault { rank: 1, exchange, kind: FaultKind::Die });
            for (r, error) in found.into_iter().enumerate() {
                // A rank that needs nothing more of it may have ended well.
                match error {
                    Some(Error::PeerLost { rank: 1, .. }) => {}
                    None if r != 1 => {}
                    other => panic!("{} rank {r} at {exchange}: {other:?}", plan.scheme().name()),
                }
            }
        }
        let first = answers(&plan, Fault { rank: 1, exchange: 0, kind: FaultKind::Die });
        assert!(first.iter().any(|error| matches!(error, Some(Error::PeerLost { rank: 1, .. }))));
    }
}

#[test]
fn lost_swapped_and_cut_messages_are_found() {
    let problem = problem(1, (32, 32), (4, 4), Mask::CAUSAL);
    for plan in plans(&problem, 2) {
        for kind in [FaultKind::Drop, FaultKind::Swap, FaultKind::Truncate] {
            let found = answers(&plan, Fault { rank: 0, exchange: 0, kind });
            let found = found[1].as_ref().unwrap_or_else(|| panic!("{kind:?} passed unseen"));
            assert!(
                matches!(found, Error::Mismatch { rank: 0, .. } | Error::Deadline { .. }),
                "{kind:?}: {found}"
            );
        }
    }
}

#[test]
fn a_rank_that_stalls_is_waited_for_until_the_deadline() {
    let problem = problem(1, (32, 32), (4, 4), Mask::CAUSAL);
    let plan = ShardPlan::new(&problem, 2, Scheme::Gather, Layout::Zigzag).unwrap();
    let stall = |ms| Fault { rank: 0, exchange: 0, kind: FaultKind::Stall(Duration::from_millis(ms)) };
    assert!(answers(&plan, stall(50)).iter().all(Option::is_none));
    let late = answers(&plan, stall(1500));
    let Some(Error::Deadline { after, doing }) = &late[1] else { panic!("{late:?}") };
    assert_eq!((*after, doing.as_str()), (Duration::from_millis(400), "receiving from rank 0"));
}

/// A rank that gives a tensor of another shape, in the forward or in the backward, is named by the others
/// well before the deadline.
#[test]
fn a_rank_that_fails_alone_is_named_by_all_others() {
    let problem = problem(1, (32, 32), (4, 4), Mask::CAUSAL);
    for plan in plans(&problem, 3) {
        let (rows, width) = (plan.queries().rows(1), 4 * 8);
        for in_backward in [false, true] {
            let begun = Instant::now();
            let found = MemoryTransport::run(3, &MemoryOptions::default(), |transport| {
                let mut own = HostAttention::new(&plan, transport)?;
                let is_bad = own.rank() == 1;
                let rows = plan.queries().rows(own.rank());
                let data = vec![0.5f32; rows * width];
                let x = view(&data, rows);
                let (mut out, mut lse) = (data.clone(), vec![0.0; 4 * rows]);
                let short = if is_bad && !in_backward { rows - 1 } else { rows };
                let q = view(&data[..short * width], short);
                own.forward([q, x, x], &mut view_mut(&mut out, rows), &mut lse, &Extras::NONE)?;
                let short = if is_bad { rows - 1 } else { rows };
                let (out, dout) = (view(&out, rows), view(&data[..short * width], short));
                let given = BackwardInputs { q: x, k: x, v: x, out, lse: &lse, dout };
                let [mut dq, mut dk, mut dv] = [(); 3].map(|()| data.clone());
                let mut to = [&mut dq, &mut dk, &mut dv].map(|to| view_mut(to, rows));
                own.backward(&given, to.each_mut(), None, &Extras::NONE)
            });
            let name = plan.scheme().name();
            assert!(begun.elapsed() < Duration::from_secs(20), "{name}: a rank waited for the deadline");
            let Err(Error::Tensor { tensor: "q" | "dout", need, .. }) = &found[1] else {
                panic!("{name}: {:?}", found[1]);
            };
            assert!(need.contains(&rows.to_string()), "{name}: {need}");
            for other in [0, 2] {
                // One that needs nothing more of it may have ended well.
                let is_told = match &found[other] {
                    Err(Error::PeerLost { rank: 1, why: Some(why), .. }) => why.contains(need),
                    other => other.is_ok(),
                };
                assert!(is_told, "{name} rank {other}: {:?}", found[other]);
            }
            assert!([0, 2].iter().any(|other| found[*other].is_err()), "{name}: nobody was told");
        }
    }
}

/// A rank that finds a message that is none of its own, that waits for too long or that panics says so.
#[test]
fn the_others_learn_why_a_rank_has_failed() {
    let problem = problem(1, (48, 48), (6, 6), Mask::CAUSAL);
    let plan = ShardPlan::new(&problem, 3, Scheme::Ring, Layout::Zigzag).unwrap();
    let late = FaultKind::Stall(Duration::from_millis(1500));
    // Who fails of it, and what that rank says.
    for (kind, said) in
        [(FaultKind::Truncate, "all ranks need the same call"), (late, "took more than 400ms")]
    {
        let found = answers(&plan, Fault { rank: 0, exchange: 0, kind });
        let first = found.iter().position(|error| {
            matches!(error, Some(Error::Mismatch { rank: 0, .. } | Error::Deadline { .. }))
        });
        let first = first.unwrap_or_else(|| panic!("{found:?}"));
        for (rank, error) in found.iter().enumerate().filter(|(rank, _)| *rank != first) {
            match error {
                Some(Error::PeerLost { why: Some(why), .. }) => assert!(why.contains(said), "{rank}: {why}"),
                // Those that wait for the same find out by themselves.
                Some(Error::Mismatch { .. } | Error::Deadline { .. }) => {}
                other => panic!("{kind:?} rank {rank}: {other:?}"),
            }
        }
        let told = |error: &Option<Error>| matches!(error, Some(Error::PeerLost { .. }));
        assert!(found.iter().any(told), "{kind:?}: {found:?}");
    }
    let ranks = MemoryTransport::connect(2, &MemoryOptions::default());
    let plan = ShardPlan::new(&problem, 2, Scheme::Gather, Layout::Zigzag).unwrap();
    let [error, _] = std::thread::scope(|scope| {
        let started = ranks.into_iter().map(|transport| {
            let plan = &plan;
            scope.spawn(move || {
                let inputs = inputs::<f32>(plan.problem());
                if fa_dist::HostTransport::rank(&transport) == 1 {
                    // As a bug in the caller's code between two calls.
                    let own = HostAttention::new(plan, transport).unwrap();
                    std::panic::resume_unwind(Box::new(own.rank()));
                }
                rank(plan, transport, Order::Listed, &inputs, &Extras::NONE).err()
            })
        });
        let started: Vec<_> = started.collect();
        let ended: Vec<_> = started.into_iter().map(|rank| rank.join().unwrap_or(None)).collect();
        <[_; 2]>::try_from(ended).unwrap_or_else(|_| unreachable!("two ranks"))
    });
    let said = error.unwrap().to_string();
    assert!(said.contains("rank 1 is lost while") && said.contains("its thread panicked"), "{said}");
}

#[test]
fn ranks_with_other_plans_are_told_so() {
    let base = problem(1, (32, 32), (4, 4), Mask::CAUSAL);
    let plan = |problem, scheme| ShardPlan::new(&problem, 2, scheme, Layout::Zigzag).unwrap();
    let others = [
        plan(problem(1, (40, 40), (4, 4), Mask::CAUSAL), Scheme::Gather),
        plan(problem(1, (32, 32), (4, 2), Mask::CAUSAL), Scheme::Gather),
        plan(problem(1, (32, 32), (4, 4), Mask::FULL), Scheme::Gather),
        plan(base, Scheme::Ring),
        plan(base, Scheme::Gather).with_stages(2).unwrap(),
    ];
    for other in others {
        let ours = plan(base, Scheme::Gather);
        let found = MemoryTransport::run(2, &MemoryOptions::default(), |transport| {
            let own = if fa_dist::HostTransport::rank(&transport) == 0 { &ours } else { &other };
            HostAttention::new(own, transport).err()
        });
        for error in found {
            assert!(matches!(error, Some(Error::Mismatch { .. })), "{error:?}");
        }
    }
    // The first that finds out ends before others have sent theirs.
    for world in [3, 8] {
        let plan = |len| {
            let problem = problem(1, (len, len), (8, 8), Mask::CAUSAL);
            ShardPlan::new(&problem, world, Scheme::Gather, Layout::Zigzag).unwrap()
        };
        let (ours, theirs) = (plan(64), plan(63));
        let found = MemoryTransport::run(world, &MemoryOptions::default(), |transport| {
            let is_last = fa_dist::HostTransport::rank(&transport) + 1 == world;
            HostAttention::new(if is_last { &theirs } else { &ours }, transport).err()
        });
        assert!(found.iter().all(|error| matches!(error, Some(Error::Mismatch { .. }))), "{found:?}");
    }
    let three = MemoryTransport::connect(3, &MemoryOptions::default()).remove(0);
    let error = HostAttention::new(&plan(base, Scheme::Gather), three).err().unwrap().to_string();
    assert!(error.contains("world = 3: use the 2 ranks of the plan"), "{error}");
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let base = problem(1, (32, 32), (6, 3), Mask::CAUSAL);
    let refused =
        |world, scheme| ShardPlan::new(&base, world, scheme, Layout::Zigzag).unwrap_err().to_string();
    assert!(refused(2, Scheme::Ulysses).contains("6 query heads and 3 K/V heads, which 2 does not divide"));
    assert!(refused(0, Scheme::Gather).contains("world = 0: use 1 to 1024"));
    assert!(refused(65, Scheme::Ring).contains("up to 260 partial results: use gather, or at most 64 ranks"));
    let plan = ShardPlan::new(&base, 2, Scheme::Decode, Layout::Contiguous).unwrap();
    assert!(plan.program(2, Pass::Forward).unwrap_err().to_string().contains("rank = 2: use 0 to 1"));
    assert!(plan.program(0, Pass::BACKWARD).unwrap_err().to_string().contains("gradients: use gather"));
}
