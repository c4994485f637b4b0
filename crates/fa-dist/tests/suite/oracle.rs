//! P ranks on the CPU beside the oracle on the whole problem.

use std::thread;

use fa_core::{Dtype, Mask, Pass, Problem, TensorLayout, Types};
use fa_cpu::compare::compare;
use fa_cpu::tiled::BackwardInputs;
use fa_cpu::{Arguments, Element, Extras, TensorMut, TensorRef, check, reference, tiled};
use fa_dist::{
    Error, HostAttention, Layout, MemoryOptions, MemoryTransport, Order, Scheme, ShardPlan, Shards, Wire,
};

use crate::cases::{MASKS, plans, problem};

/// Values in [-1, 1), the same for the same seed.
pub(crate) fn values<T: Element>(len: usize, seed: u64) -> Vec<T> {
    let value = |i: usize| {
        let x = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ seed.wrapping_mul(0xff51_afd7_ed55_8ccd));
        T::from_f32(((x >> 40) as f32 / (1u64 << 23) as f32) - 1.0)
    };
    (0..len).map(value).collect()
}

/// Q, K, V and dO of a problem.
pub(crate) struct Inputs<T>([Vec<T>; 4]);

pub(crate) fn inputs<T: Element>(problem: &Problem) -> Inputs<T> {
    let shapes = [
        check::q_shape(problem),
        check::k_shape(problem),
        check::v_shape(problem),
        check::out_shape(problem),
    ];
    let mut seed = 0;
    Inputs(shapes.map(|shape| {
        seed += 1;
        values(shape.iter().product(), seed)
    }))
}

/// What all ranks computed, put together.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Results<T> {
    pub out: Vec<T>,
    pub lse: Vec<f32>,
    pub gradients: [Vec<T>; 3],
    pub dsinks: Vec<f32>,
    pub darrays: Vec<Vec<f32>>,
}

pub(crate) fn view<T>(values: &[T], shape: [usize; 4]) -> TensorRef<'_, T> {
    TensorRef::packed("x", values, shape, TensorLayout::Bshd).unwrap()
}

pub(crate) fn view_mut<T>(values: &mut [T], shape: [usize; 4]) -> TensorMut<'_, T> {
    TensorMut::packed("x", values, shape, TensorLayout::Bshd).unwrap()
}

/// The rows of a rank, of `[batch, rows, heads, dim]`.
pub(crate) fn scatter<T: Clone>(
    shards: &Shards,
    rank: usize,
    whole: &[T],
    [batch, rows, h, d]: [usize; 4],
) -> Vec<T> {
    let width = h * d;
    (0..batch).flat_map(|b| shards.scatter(rank, &whole[b * rows * width..][..rows * width], width)).collect()
}

pub(crate) fn gather<T: Clone>(
    shards: &Shards,
    rank: usize,
    own: &[T],
    [batch, rows, h, d]: [usize; 4],
    whole: &mut [T],
) {
    let (width, count) = (h * d, shards.rows(rank));
    for b in 0..batch {
        let to = &mut whole[b * rows * width..][..rows * width];
        shards.gather(rank, &own[b * count * width..][..count * width], width, to);
    }
}

/// What a forward takes of what both passes do.
pub(crate) fn forward_alone(given: Arguments<'_>) -> Arguments<'_> {
    Arguments { extras: Extras { dlse: None, ..given.extras }, ..given }
}

/// One rank's results: O, LSE, dQ, dK, dV, and the gradients of the sinks and of a program's arrays.
pub(crate) type Own<T> = (Vec<T>, Vec<f32>, [Vec<T>; 3], Vec<f32>, Vec<Vec<f32>>);

/// The plan with the gradients of the arrays that a call gives.
pub(crate) fn with_arrays(plan: &ShardPlan, given: &Arguments<'_>) -> ShardPlan {
    let Some(program) = given.program else { return plan.clone() };
    let extents: Vec<[i32; 4]> = program.arrays().iter().map(|view| view.extents).collect();
    plan.clone().with_arrays(&extents).unwrap()
}

/// Whether a plan has gradients.
pub(crate) fn has_gradients(plan: &ShardPlan) -> bool {
    plan.program(0, Pass::BACKWARD).is_ok()
}

pub(crate) fn rank<'a, T: Wire + Default>(
    plan: &ShardPlan,
    transport: MemoryTransport,
    order: Order,
    inputs: &Inputs<T>,
    extras: impl Into<Arguments<'a>>,
) -> Result<Own<T>, Error> {
    let problem = plan.problem();
    let mut own = HostAttention::new(plan, transport)?.with_order(order);
    let r = own.rank();
    let queries = if plan.scheme() == Scheme::Decode { 0 } else { r };
    let shapes = [
        check::q_shape(problem),
        check::k_shape(problem),
        check::v_shape(problem),
        check::out_shape(problem),
    ];
    let shards = [plan.queries(), plan.keys(), plan.keys(), plan.queries()];
    let of = [queries, r, r, queries];
    let local = [0, 1, 2, 3].map(|i| scatter(shards[i], of[i], &inputs.0[i], shapes[i]));
    let local_shape = [0, 1, 2, 3].map(|i| [shapes[i][0], shards[i].rows(of[i]), shapes[i][2], shapes[i][3]]);
    let [q, k, v, dout] = [0, 1, 2, 3].map(|i| view(&local[i], local_shape[i]));
    let mut out = vec![T::default(); local[3].len()];
    let mut lse = vec![0.0; shapes[0][0] * shapes[0][2] * shards[0].rows(queries)];
    let mut arguments: Arguments<'_> = extras.into();
    let (dlse, to) = (arguments.extras.dlse, &mut view_mut(&mut out, local_shape[3]));
    own.forward([q, k, v], to, &mut lse, forward_alone(arguments))?;
    let mut gradients = [0, 1, 2].map(|i| vec![T::default(); local[i].len()]);
    let mut dsinks = vec![0.0; if problem.score.sinks { problem.heads_q } else { 0 }];
    let mut darrays = Vec::new();
    if has_gradients(plan) {
        let given = BackwardInputs { q, k, v, out: view(&out, local_shape[3]), lse: &lse, dout };
        let [dq, dk, dv] = &mut gradients;
        let mut to =
            [view_mut(dq, local_shape[0]), view_mut(dk, local_shape[1]), view_mut(dv, local_shape[2])];
        let whole: Vec<f32> = dlse.map_or_else(Vec::new, |dlse| dlse.to_vec());
        // As O with a head dim of 1, heads before rows.
        let [batch, all, heads, _] = shapes[3];
        let by_row = |b: usize, row: usize, head: usize| whole[(b * heads + head) * all + row];
        let positions: Vec<usize> = shards[3].positions(queries).collect();
        let cells = (0..batch).flat_map(|b| (0..heads).map(move |head| (b, head)));
        let own_dlse: Vec<f32> = match whole.is_empty() {
            true => Vec::new(),
            false => {
                cells.flat_map(|(b, head)| positions.iter().map(move |row| by_row(b, *row, head))).collect()
            }
        };
        arguments.extras.dlse = dlse.map(|_| own_dlse.as_slice());
        let dsinks = problem.score.sinks.then_some(dsinks.as_mut_slice());
        let to_arrays = problem.score.program.is_some().then_some(&mut darrays);
        own.backward_program(&given, to.each_mut(), dsinks, to_arrays, arguments)?;
    }
    Ok((out, lse, gradients, dsinks, darrays))
}

/// Runs a plan on threads and puts the results together.
pub(crate) fn run<'a, T: Wire + Default>(
    plan: &ShardPlan,
    options: &MemoryOptions,
    order: Order,
    inputs: &Inputs<T>,
    extras: impl Into<Arguments<'a>>,
) -> Results<T> {
    let extras: Arguments<'_> = extras.into();
    let problem = plan.problem();
    let ranks =
        MemoryTransport::run(plan.world(), options, |transport| rank(plan, transport, order, inputs, extras));
    let shapes = [
        check::q_shape(problem),
        check::k_shape(problem),
        check::v_shape(problem),
        check::out_shape(problem),
    ];
    let empty = |i: usize| vec![T::default(); shapes[i].iter().product()];
    let [batch, rows, heads, _] = shapes[0];
    let mut all = Results {
        out: empty(3),
        lse: vec![0.0; batch * heads * rows],
        gradients: [empty(0), empty(1), empty(2)],
        dsinks: vec![0.0; if problem.score.sinks { heads } else { 0 }],
        darrays: Vec::new(),
    };
    for (r, own) in ranks.into_iter().enumerate() {
        let (out, lse, gradients, dsinks, darrays) = own.unwrap_or_else(|error| panic!("rank {r}: {error}"));
        if plan.scheme() == Scheme::Decode {
            (all.out, all.lse) = (out, lse);
            continue;
        }
        all.dsinks.iter_mut().zip(dsinks).for_each(|(sum, own)| *sum += own);
        if r == 0 {
            all.darrays = darrays;
        } else {
            // Of every rank those of the whole, with the same bits.
            assert!(all.darrays == darrays, "rank {r}");
        }
        gather(plan.queries(), r, &out, shapes[3], &mut all.out);
        // LSE has a row for each head: as a tensor of one head and `batch * heads` sequences.
        gather(plan.queries(), r, &lse, [batch * heads, rows, 1, 1], &mut all.lse);
        for (i, shards) in [plan.queries(), plan.keys(), plan.keys()].into_iter().enumerate() {
            gather(shards, r, &gradients[i], shapes[i], &mut all.gradients[i]);
        }
    }
    all
}

/// One process on the whole problem.
pub(crate) fn alone<'a, T: Wire + Default>(
    problem: &Problem,
    inputs: &Inputs<T>,
    extras: impl Into<Arguments<'a>>,
) -> Results<T> {
    let extras: Arguments<'_> = extras.into();
    let shapes = [
        check::q_shape(problem),
        check::k_shape(problem),
        check::v_shape(problem),
        check::out_shape(problem),
    ];
    let [q, k, v, dout] = [0, 1, 2, 3].map(|i| view(&inputs.0[i], shapes[i]));
    let mut out = vec![T::default(); inputs.0[3].len()];
    let mut lse = vec![0.0; check::lse_len(problem)];
    let to = &mut view_mut(&mut out, shapes[3]);
    tiled::forward_extras(Default::default(), problem, forward_alone(extras), &q, &k, &v, to, Some(&mut lse))
        .unwrap();
    let mut gradients = [0, 1, 2].map(|i| vec![T::default(); inputs.0[i].len()]);
    let given = BackwardInputs { q, k, v, out: view(&out, shapes[3]), lse: &lse, dout };
    let [dq, dk, dv] = &mut gradients;
    let [dq, dk, dv] = &mut [view_mut(dq, shapes[0]), view_mut(dk, shapes[1]), view_mut(dv, shapes[2])];
    let mut dsinks = vec![0.0; if problem.score.sinks { problem.heads_q } else { 0 }];
    let own = problem.score.sinks.then_some(dsinks.as_mut_slice());
    let mut darrays = Vec::new();
    let to_arrays = problem.score.program.is_some().then_some(&mut darrays);
    let options = Default::default();
    tiled::backward_program(options, problem, extras, &given, dq, dk, dv, own, to_arrays).unwrap();
    Results { out, lse, gradients, dsinks, darrays }
}

/// Ranks are as near to the oracle as one process is: within the tolerance of one kernel.
pub(crate) fn check_plan<'a, T: Wire + Default>(
    plan: &ShardPlan,
    given: impl Into<Arguments<'a>>,
    order: Order,
) -> Results<T> {
    let given = given.into();
    let plan = &with_arrays(plan, &given);
    let problem = plan.problem();
    let inputs = inputs::<T>(problem);
    // What the plan knows no call gives.
    let starts = if plan.starts().is_some() { None } else { given.extras.cu_seqlens_q };
    let extras = Extras { cu_seqlens_q: starts, cu_seqlens_k: starts, ..given.extras };
    let of_ranks = Arguments { extras, ..given };
    let found = run(plan, &MemoryOptions::default(), order, &inputs, of_ranks);
    let shapes = [
        check::q_shape(problem),
        check::k_shape(problem),
        check::v_shape(problem),
        check::out_shape(problem),
    ];
    let [q, k, v, dout] = [0, 1, 2, 3].map(|i| view(&inputs.0[i], shapes[i]));
    let exact = reference::forward_extras(problem, forward_alone(given), &q, &k, &v).unwrap();
    let dtype = problem.types.q;
    let one = alone(problem, &inputs, given);
    let name = format!("{} {:?} {}", plan.scheme().name(), plan.queries().layout(), problem.mask);
    let judge = |what: &str, shape: [usize; 4], own: &[T], exact: &[f64], alone: &[T]| {
        if own.is_empty() {
            return;
        }
        let verdict = compare::<T, T>(shape, dtype, own, exact, Some(alone)).unwrap();
        assert!(verdict.passed(), "{name}: {what}: {verdict}");
    };
    judge("out", shapes[3], &found.out, &exact.out, &one.out);
    for (own, exact) in found.lse.iter().zip(&exact.lse) {
        let near = f64::from(*own) == *exact || (f64::from(*own) - exact).abs() < 2e-5 * (1.0 + exact.abs());
        assert!(near, "{name}: LSE {own} is not {exact}");
    }
    if has_gradients(plan) {
        let exact = reference::backward_extras(problem, given, &q, &k, &v, &dout).unwrap();
        for (own, exact) in found.dsinks.iter().zip(&exact.dsinks) {
            let near = (f64::from(*own) - exact).abs() < 1e-4 * (1.0 + exact.abs());
            assert!(near, "{name}: dsinks {own} is not {exact}");
        }
        assert_eq!(found.dsinks.len(), exact.dsinks.len(), "{name}");
        assert_eq!(found.darrays.len(), exact.darrays.len(), "{name}");
        for (own, exact) in found.darrays.iter().zip(&exact.darrays) {
            assert_eq!(own.len(), exact.len(), "{name}");
            let largest = exact.iter().fold(0.0f64, |most, value| most.max(value.abs()));
            for (own, exact) in own.iter().zip(exact) {
                let near = (f64::from(*own) - exact).abs() < 1e-4 * (1.0 + largest);
                assert!(near, "{name}: darrays {own} is not {exact}");
            }
        }
        for (i, exact) in [exact.dq, exact.dk, exact.dv].iter().enumerate() {
            judge(["dq", "dk", "dv"][i], shapes[i], &found.gradients[i], exact, &one.gradients[i]);
        }
    }
    found
}

#[test]
fn ranks_compute_what_the_oracle_does() {
    for world in [1, 2, 3, 4] {
        for mask in MASKS {
            for (batch, len, heads) in [(1, (40, 40), (4, 4)), (2, (37, 37), (12, 4)), (1, (24, 33), (4, 1))]
            {
                let problem = problem(batch, len, heads, mask);
                for plan in plans(&problem, world) {
                    check_plan::<f32>(&plan, &Extras::NONE, Order::Listed);
                }
            }
        }
    }
}

#[test]
fn ranks_of_short_and_empty_sequences_do() {
    for len in [(0, 0), (1, 1), (3, 3), (5, 0), (0, 4)] {
        for mask in [Mask::FULL, Mask::CAUSAL] {
            let problem = problem(1, len, (4, 4), mask);
            for plan in plans(&problem, 4) {
                check_plan::<f32>(&plan, &Extras::NONE, Order::Listed);
            }
        }
    }
}

#[test]
fn every_order_of_two_queues_and_every_delay_gives_the_same_bits() {
    let problem = problem(1, (48, 48), (4, 4), Mask::CAUSAL);
    let inputs = inputs::<f32>(&problem);
    for plan in plans(&problem, 4) {
        let listed = run(&plan, &MemoryOptions::default(), Order::Listed, &inputs, &Extras::NONE);
        for seed in 0..6 {
            let options = MemoryOptions { delays: Some(seed), ..MemoryOptions::default() };
            let found = run(&plan, &options, Order::Seeded(seed), &inputs, &Extras::NONE);
            assert!(found == listed, "{} {seed}", plan.scheme().name());
        }
    }
}

/// What is merged nowhere has the bits of one process, as far as rows and keys are cut where its own tiles
/// begin.
#[test]
fn gather_and_ulysses_have_the_bits_of_one_process() {
    let heads = (4, 4);
    for mask in [Mask::CAUSAL, Mask::FULL, Mask::causal_window(70)] {
        let square = problem(1, (512, 512), heads, mask);
        let inputs = inputs::<f32>(&square);
        let one = alone(&square, &inputs, &Extras::NONE);
        for scheme in [Scheme::Gather, Scheme::Ulysses] {
            let plan = ShardPlan::new(&square, 2, scheme, Layout::Zigzag).unwrap().with_tiles(64, 64);
            assert!(plan.same_bits());
            let found = run(&plan, &MemoryOptions::default(), Order::Listed, &inputs, &Extras::NONE);
            assert!(found.out == one.out && found.lse == one.lse, "{mask} {}", scheme.name());
        }
    }
}

#[test]
fn halves_do_as_well() {
    let square = problem(1, (128, 128), (4, 2), Mask::CAUSAL);
    let halves = square.with_types(Types::same(Dtype::Bf16));
    for plan in plans(&halves, 2) {
        check_plan::<half::bf16>(&plan, &Extras::NONE, Order::Listed);
    }
    let halves = square.with_types(Types::same(Dtype::F16));
    for plan in plans(&halves, 4) {
        check_plan::<half::f16>(&plan, &Extras::NONE, Order::Listed);
    }
}

#[test]
fn ranks_may_be_threads_of_the_caller() {
    let problem = problem(1, (16, 16), (2, 2), Mask::CAUSAL);
    let plan = ShardPlan::new(&problem, 2, Scheme::Gather, Layout::Zigzag).unwrap();
    let inputs = inputs::<f32>(&problem);
    let ranks = MemoryTransport::connect(2, &MemoryOptions::default());
    thread::scope(|scope| {
        for transport in ranks {
            scope.spawn(|| rank(&plan, transport, Order::Listed, &inputs, &Extras::NONE).unwrap());
        }
    });
}
