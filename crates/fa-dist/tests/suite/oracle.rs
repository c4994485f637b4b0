//! P ranks on the CPU beside the oracle on the whole problem.

use std::thread;

use fa_core::lengths::Side;
use fa_core::{DescaleForm, Descales, Dtype, Lengths, Mask, Pass, Problem, TensorLayout, Types};
use fa_cpu::compare::compare;
use fa_cpu::tiled::{self, BackwardInputs};
use fa_cpu::{Arguments, Element, Extras, TensorMut, TensorRef, check, reference};
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
}

fn view<T>(values: &[T], shape: [usize; 4]) -> TensorRef<'_, T> {
    TensorRef::packed("x", values, shape, TensorLayout::Bshd).unwrap()
}

fn view_mut<T>(values: &mut [T], shape: [usize; 4]) -> TensorMut<'_, T> {
    TensorMut::packed("x", values, shape, TensorLayout::Bshd).unwrap()
}

/// The rows of a rank, of `[batch, rows, heads, dim]`.
fn scatter<T: Clone>(shards: &Shards, rank: usize, whole: &[T], [batch, rows, h, d]: [usize; 4]) -> Vec<T> {
    let width = h * d;
    (0..batch).flat_map(|b| shards.scatter(rank, &whole[b * rows * width..][..rows * width], width)).collect()
}

fn gather<T: Clone>(
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
fn forward_alone(given: Arguments<'_>) -> Arguments<'_> {
    Arguments { extras: Extras { dlse: None, ..given.extras }, ..given }
}

/// One rank's results: O, LSE, dQ, dK, dV, and the gradient of the sinks.
type Own<T> = (Vec<T>, Vec<f32>, [Vec<T>; 3], Vec<f32>);

/// Whether a plan has gradients.
fn has_gradients(plan: &ShardPlan) -> bool {
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
        own.backward(&given, to.each_mut(), problem.score.sinks.then_some(&mut dsinks), arguments)?;
    }
    Ok((out, lse, gradients, dsinks))
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
    };
    for (r, own) in ranks.into_iter().enumerate() {
        let (out, lse, gradients, dsinks) = own.unwrap_or_else(|error| panic!("rank {r}: {error}"));
        if plan.scheme() == Scheme::Decode {
            (all.out, all.lse) = (out, lse);
            continue;
        }
        all.dsinks.iter_mut().zip(dsinks).for_each(|(sum, own)| *sum += own);
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
fn alone<'a, T: Wire + Default>(
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
    tiled::backward_extras(Default::default(), problem, extras, &given, dq, dk, dv, own).unwrap();
    Results { out, lse, gradients, dsinks }
}

/// Ranks are as near to the oracle as one process is: within the tolerance of one kernel.
fn check_plan<'a, T: Wire + Default>(
    plan: &ShardPlan,
    given: impl Into<Arguments<'a>>,
    order: Order,
) -> Results<T> {
    let given = given.into();
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
fn decode_merges_what_ranks_hold() {
    for world in [1, 2, 5, 16] {
        for (queries, mask) in [(1, Mask::CAUSAL), (3, Mask::CAUSAL), (2, Mask::FULL)] {
            for keys in [100, 7] {
                let problem = problem(2, (queries, keys), (8, 2), mask);
                for layout in [Layout::Contiguous, Layout::Zigzag] {
                    if let Ok(plan) = ShardPlan::new(&problem, world, Scheme::Decode, layout) {
                        check_plan::<f32>(&plan, &Extras::NONE, Order::Listed);
                    }
                }
            }
        }
    }
}

#[test]
fn decode_takes_the_cache_of_each_rank() {
    // Pages of a rank, and keys in use of each sequence on each.
    let (page, pages, most) = (4, 7, 12);
    let used = [[12, 3], [5, 0], [0, 0], [9, 1]];
    for (queries, mask) in [(1, Mask::CAUSAL), (3, Mask::FULL)] {
        for is_paged in [true, false] {
            let side = if is_paged { Side::paged(page, pages, most) } else { Side::padded(most).with_used() };
            let score = fa_core::ScoreMod::NONE.with_sinks(true);
            let local = problem(2, (queries, most), (4, 2), mask)
                .with_lengths(Lengths::of(2, Side::padded(queries), side))
                .with_score(score);
            let sinks = [0.5, -0.25, 0.125, 0.0625];
            let plan = ShardPlan::new(&local, used.len(), Scheme::Decode, Layout::Contiguous).unwrap();
            let q = values::<f32>(2 * queries * 4 * 8, 1);
            let q_shape = [2, queries, 4, 8];
            let kv_shape = check::k_shape(&local);
            let table = [6, 0, 3, 1, 5, 2];
            let caches: Vec<[Vec<f32>; 2]> = (0..used.len() as u64)
                .map(|rank| [10, 20].map(|seed| values(kv_shape.iter().product(), seed + rank)))
                .collect();
            let found = MemoryTransport::run(used.len(), &MemoryOptions::default(), |transport| {
                let mut own = HostAttention::new(&plan, transport)?;
                let rank = own.rank();
                let extras = Extras {
                    seqused_k: Some(&used[rank]),
                    page_table: is_paged.then_some(&table),
                    sinks: Some(&sinks),
                    ..Extras::NONE
                };
                let [k, v] = caches[rank].each_ref().map(|cache| view(cache, kv_shape));
                let (mut out, mut lse) = (vec![0.0f32; q.len()], vec![0.0; 2 * 4 * queries]);
                own.forward([view(&q, q_shape), k, v], &mut view_mut(&mut out, q_shape), &mut lse, &extras)?;
                Ok::<_, Error>((out, lse))
            });
            // All keys of all ranks, sequence by sequence.
            for b in 0..2 {
                let count: usize = used.iter().map(|own| own[b] as usize).sum();
                let whole = [0, 1].map(|which| {
                    let mut all = Vec::new();
                    for (rank, own) in used.iter().enumerate() {
                        for row in 0..own[b] as usize {
                            let (at, within) = match is_paged {
                                true => (table[b * 3 + row / page] as usize, row % page),
                                false => (b, row),
                            };
                            let first = (at * kv_shape[1] + within) * 2 * 8;
                            all.extend_from_slice(&caches[rank][which][first..first + 2 * 8]);
                        }
                    }
                    all
                });
                let one = problem(1, (queries, count), (4, 2), Mask::FULL).with_score(score);
                let [k, v] = whole.each_ref().map(|all| view(all, [1, count, 2, 8]));
                let own_q = view(&q[b * queries * 32..][..queries * 32], [1, queries, 4, 8]);
                let extras = Extras { sinks: Some(&sinks), ..Extras::NONE };
                let exact = reference::forward_extras(&one, &extras, &own_q, &k, &v).unwrap();
                for result in &found {
                    let (out, lse) = result.as_ref().unwrap();
                    let near = |own: &[f32], exact: &[f64]| {
                        own.iter().zip(exact).all(|(own, exact)| (f64::from(*own) - exact).abs() < 1e-5)
                    };
                    assert!(near(&out[b * queries * 32..][..queries * 32], &exact.out));
                    assert!(near(&lse[b * queries * 4..][..queries * 4], &exact.lse));
                }
            }
        }
    }
    let cache = Lengths::of(1, Side::padded(3), Side::paged(4, 8, 16));
    let local = problem(1, (3, 16), (4, 2), Mask::CAUSAL).with_lengths(cache);
    let refused = |scheme| ShardPlan::new(&local, 2, scheme, Layout::Contiguous).unwrap_err().to_string();
    assert!(refused(Scheme::Decode).contains("3 queries under the mask causal on caches: decode one query"));
    assert!(refused(Scheme::Gather).contains("keys in pages of 4 rows: use decode, or pack"));
}

/// Caches of codes: each rank's beside one process that has all of them in a row.
#[test]
fn decode_takes_caches_of_codes() {
    let (most, used) = (12, [[12, 3], [5, 0], [9, 1]]);
    for codes in [Dtype::E4m3, Dtype::Int8, Dtype::Int4] {
        let types = Types::same(Dtype::Bf16).with_kv(codes);
        let form = DescaleForm::SequenceHead;
        let of = |keys: usize| {
            let lengths = Lengths::of(2, Side::padded(1), Side::padded(keys).with_used());
            let plain = problem(2, (1, keys), (4, 2), Mask::CAUSAL).with_head_dim(32).with_head_dim_v(32);
            plain.with_types(types).with_descales(Descales::new(form, form)).with_lengths(lengths)
        };
        let (local, whole) = (of(most), of(most * used.len()));
        let plan = ShardPlan::new(&local, used.len(), Scheme::Decode, Layout::Contiguous).unwrap();
        let q = values::<half::bf16>(2 * 4 * 32, 1);
        let shape = check::k_shape(&local);
        // Bytes that are numbers of every type.
        let bytes = |seed: u64| -> Vec<u8> {
            let count = shape.iter().product();
            values::<f32>(count, seed).into_iter().map(|x| (x.abs() * 64.0) as u8 + 16).collect()
        };
        let caches: Vec<[Vec<u8>; 2]> =
            (0..used.len() as u64).map(|rank| [bytes(10 + rank), bytes(20 + rank)]).collect();
        let descales = [0.25, 0.5, 0.125, 0.0625];
        let given = |used| Extras {
            seqused_k: Some(used),
            k_descale: Some(&descales),
            v_descale: Some(&descales),
            ..Extras::NONE
        };
        let found = MemoryTransport::run(used.len(), &MemoryOptions::default(), |transport| {
            let mut own = HostAttention::new(&plan, transport)?;
            let rank = own.rank();
            let [k, v] = caches[rank].each_ref().map(|cache| view(cache, shape));
            let (mut out, mut lse) = (vec![half::bf16::ZERO; q.len()], vec![0.0; 8]);
            let (q, to) = (view(&q, [2, 1, 4, 32]), &mut view_mut(&mut out, [2, 1, 4, 32]));
            let refused = own.forward([q, q, q], to, &mut lse, &given(&used[rank])).unwrap_err().to_string();
            assert!(refused.contains("k is no codes, the plan needs"), "{refused}");
            own.forward_on_codes(q, [k, v], to, &mut lse, &given(&used[rank]))?;
            Ok::<_, Error>((out, lse))
        });
        let width = shape[2] * shape[3];
        let all = [0, 1].map(|which| {
            let mut all = vec![0; 2 * most * used.len() * width];
            for b in 0..2 {
                let mut row = b * most * used.len();
                for (rank, own) in used.iter().enumerate() {
                    let count = own[b] as usize;
                    let from = &caches[rank][which][b * most * width..][..count * width];
                    all[row * width..][..from.len()].copy_from_slice(from);
                    row += count;
                }
            }
            all
        });
        let [k, v] = all.each_ref().map(|all| view(all, check::k_shape(&whole)));
        let lengths = [0, 1].map(|b| used.iter().map(|own| own[b]).sum());
        let q = view(&q, [2, 1, 4, 32]);
        let exact = reference::forward_extras(&whole, &given(&lengths), &q, &k, &v).unwrap();
        for (out, lse) in found.into_iter().map(Result::unwrap) {
            let near = |own: f64, exact: &f64| (own - exact).abs() < 0.02 * (1.0 + exact.abs());
            assert!(out.iter().zip(&exact.out).all(|(own, exact)| near(own.to_f64(), exact)), "{codes}");
            assert!(lse.iter().zip(&exact.lse).all(|(own, exact)| near(f64::from(*own), exact)), "{codes}");
        }
        let refused = ShardPlan::new(
            &problem(1, (1, 40), (4, 2), Mask::CAUSAL).with_types(types),
            2,
            Scheme::Decode,
            Layout::Contiguous,
        )
        .unwrap_err()
        .to_string();
        assert!(refused.contains("decode on caches of codes with lengths in use"), "{refused}");
    }
}

#[test]
fn ulysses_takes_packed_sequences() {
    let starts = [0, 5, 5, 30, 41];
    let square = problem(1, (41, 41), (4, 2), Mask::CAUSAL);
    let packed = square.with_lengths(Lengths::packed(4, 41, 41, 25, 25));
    let extras = Extras { cu_seqlens_q: Some(&starts), cu_seqlens_k: Some(&starts), ..Extras::NONE };
    for world in [1, 2, 4] {
        for plan in plans(&packed, world) {
            assert_eq!(plan.scheme(), Scheme::Ulysses);
            check_plan::<f32>(&plan, &extras, Order::Listed);
        }
    }
    let latent = problem(1, (1, 9), (4, 1), Mask::FULL).with_head_dim(24).with_latent(true);
    let latent = latent.with_softmax_scale(Some(0.2));
    let refused = ShardPlan::new(&latent, 2, Scheme::Decode, Layout::Contiguous).unwrap_err().to_string();
    assert!(refused.contains("does not compute latent problems"), "{refused}");
    for (scheme, part) in [
        (Scheme::Ring, "packed sequences of unknown starts: use ShardPlan::packed, or ulysses"),
        (
            Scheme::Decode,
            "decode over 2 ranks does not compute packed sequences: use gather, ulysses or ring",
        ),
        (Scheme::Gather, "packed sequences of unknown starts: use ShardPlan::packed, or ulysses"),
    ] {
        let refused = ShardPlan::new(&packed, 2, scheme, Layout::Zigzag).unwrap_err().to_string();
        assert!(refused.contains(part), "{refused}");
    }
}

#[test]
fn packed_sequences_are_dealt_as_one() {
    let slopes = [0.5, 0.25, 0.125, 0.0625];
    for starts in [&[0, 5, 5, 30, 41][..], &[0, 41], &[0, 1, 2, 41], &[0, 20, 41, 41], &[0, 0, 0]] {
        let total = starts[starts.len() - 1] as usize;
        let longest = starts.windows(2).map(|pair| (pair[1] - pair[0]) as usize).max().unwrap();
        let extras = Extras { cu_seqlens_q: Some(starts), cu_seqlens_k: Some(starts), ..Extras::NONE };
        for mask in [Mask::CAUSAL, Mask::FULL, Mask::causal_window(7)] {
            let one = problem(1, (total, total), (4, 2), mask);
            let lengths = Lengths::packed(starts.len() - 1, total, total, longest, longest);
            let packed = one.with_lengths(lengths);
            let alibi = packed.with_score(one.score.with_alibi(Some(fa_core::Alibi::PerHead)));
            let sinks = packed.with_score(one.score.with_sinks(true));
            let of_slopes = Extras { alibi_slopes: Some(&slopes), ..extras };
            let of_sinks = Extras { sinks: Some(&slopes), ..extras };
            for (problem, extras) in [(packed, extras), (alibi, of_slopes), (sinks, of_sinks)] {
                for (scheme, layout) in [
                    (Scheme::Gather, Layout::Zigzag),
                    (Scheme::Gather, Layout::Contiguous),
                    (Scheme::Ring, Layout::Zigzag),
                    (Scheme::Ring, Layout::Contiguous),
                    (Scheme::Ulysses, Layout::Contiguous),
                ] {
                    for world in [1, 2, 3, 4] {
                        let is_refused = scheme == Scheme::Ulysses && world == 3
                            || problem.score.alibi.is_some()
                                && mask == Mask::FULL
                                && scheme == Scheme::Gather;
                        match ShardPlan::packed(&problem, starts, world, scheme, layout) {
                            Ok(plan) => {
                                assert!(!is_refused);
                                check_plan::<f32>(&plan.with_tiles(1, 4), &extras, Order::Seeded(3));
                            }
                            Err(error) => assert!(is_refused, "{error}"),
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn more_parts_than_a_launch_merges_are_merged_in_groups() {
    for (world, scheme, lengths, mask) in [
        (7, Scheme::Ring, (90, 90), Mask::window(40, 30)),
        (18, Scheme::Ring, (80, 80), Mask::CAUSAL),
        (40, Scheme::Decode, (2, 300), Mask::CAUSAL),
    ] {
        let score = fa_core::ScoreMod::NONE.with_sinks(true);
        let sinks = [0.5, 0.25, -0.125, 0.0625];
        let extras = Extras { sinks: Some(&sinks), ..Extras::NONE };
        let problem = problem(1, lengths, (4, 2), mask).with_score(score);
        let plan = ShardPlan::new(&problem, world, scheme, Layout::Zigzag).unwrap();
        check_plan::<f32>(&plan, &extras, Order::Listed);
        let refused = ShardPlan::new(&problem, 65, scheme, Layout::Zigzag).unwrap_err().to_string();
        assert!(refused.contains("up to 260 partial results: use gather, or at most 64 ranks"), "{refused}");
    }
}

#[test]
fn packed_sequences_that_contradict_themselves_are_refused() {
    let square = problem(1, (41, 41), (4, 2), Mask::CAUSAL);
    let packed = square.with_lengths(Lengths::packed(3, 41, 41, 25, 25));
    let plan = |problem: &Problem, starts: &[i32], scheme| {
        ShardPlan::packed(problem, starts, 2, scheme, Layout::Zigzag).map(drop).unwrap_err().to_string()
    };
    for starts in [&[0, 5, 30][..], &[0, 5, 30, 40], &[0, 30, 5, 41], &[1, 5, 30, 41], &[0, 5, 35, 41]] {
        let refused = plan(&packed, starts, Scheme::Gather);
        let part = "the plan needs 4 values that ascend from 0 to the 41 rows, by at most 25";
        assert!(refused.contains(&format!("starts is {starts:?}, {part}")), "{refused}");
    }
    let starts = [0, 5, 30, 41];
    assert!(plan(&square, &starts, Scheme::Gather).contains("packed queries and keys"));
    assert!(plan(&packed, &starts, Scheme::Decode).contains("packed sequences: use gather, ulysses or ring"));
    let window = packed.with_mask(Mask::window(3, 3));
    assert!(plan(&window, &starts, Scheme::Gather).contains("use ulysses, or a causal or full mask"));
    let given = Extras { cu_seqlens_q: Some(&starts), cu_seqlens_k: Some(&starts), ..Extras::NONE };
    let known = ShardPlan::packed(&packed, &starts, 1, Scheme::Gather, Layout::Zigzag).unwrap();
    let inputs = inputs::<f32>(&packed);
    let alone = MemoryTransport::connect(1, &MemoryOptions::default()).remove(0);
    let refused = rank(&known, alone, Order::Listed, &inputs, &given).unwrap_err().to_string();
    assert!(refused.contains("cu_seqlens of a call: leave them out"), "{refused}");
}

#[test]
fn slopes_and_sinks_go_with_their_heads() {
    let slopes = [0.5, 0.25, 0.125, 0.0625];
    let square = problem(1, (40, 40), (4, 2), Mask::CAUSAL);
    let score = square.score.with_alibi(Some(fa_core::Alibi::PerHead));
    let extras = Extras { alibi_slopes: Some(&slopes), ..Extras::NONE };
    for mask in [Mask::CAUSAL, Mask::FULL, Mask::window(9, 5), Mask::CAUSAL.with_offset(-2)] {
        for score in [score, score.with_softcap(Some(2.0))] {
            let alibi = square.with_score(score).with_mask(mask);
            assert_eq!(plans(&alibi, 2).len(), 6);
            for plan in [plans(&alibi, 2), plans(&alibi, 3)].concat() {
                check_plan::<f32>(&plan, &extras, Order::Listed);
            }
        }
    }
    let sinks = square.with_score(square.score.with_sinks(true));
    let extras = Extras { sinks: Some(&slopes), ..Extras::NONE };
    plans(&sinks, 2).iter().for_each(|plan| drop(check_plan::<f32>(plan, &extras, Order::Listed)));
    for world in [1, 3, 4] {
        for mask in [Mask::FULL, Mask::causal_window(3), Mask::CAUSAL] {
            let sinks = sinks.with_mask(mask);
            plans(&sinks, world)
                .iter()
                .for_each(|plan| drop(check_plan::<f32>(plan, &extras, Order::Listed)));
        }
        let decode = sinks.with_lengths(Lengths::uniform(1, 2, 40));
        let decode = ShardPlan::new(&decode, world, Scheme::Decode, Layout::Contiguous).unwrap();
        check_plan::<f32>(&decode, &extras, Order::Listed);
    }
    let unseen = sinks.with_mask(Mask::CAUSAL.with_offset(-2));
    for scheme in [Scheme::Gather, Scheme::Ring] {
        let refused = ShardPlan::new(&unseen, 2, scheme, Layout::Zigzag).unwrap_err().to_string();
        assert!(refused.contains("sinks where queries see no key: use ulysses"), "{refused}");
    }
    plans(&unseen, 2).iter().for_each(|plan| drop(check_plan::<f32>(plan, &extras, Order::Listed)));
}

#[test]
fn programs_see_the_numbers_of_the_whole() {
    let texts = [
        "mask = (q - k) % 3 == 0;",
        "array slope: f32[_]; scalar c: f32; score = s - slope[h] * f32(q + off - k) + c * f32(hk * k);",
        "array bias: f32[_, _, _, _]; score = s + bias[b, h, q, k];",
        "scalar w: i32; let d = q + off - k; mask = 0 <= d < w; score = s + 0.01 * f32(sk - sq + q);",
    ];
    for text in texts {
        let program = fa_core::program::Program::parse(text).unwrap().intern().unwrap();
        for (lengths, heads, mask) in [
            ((40, 40), (4, 2), Mask::FULL),
            ((40, 40), (4, 4), Mask::CAUSAL),
            ((24, 33), (4, 2), Mask::causal_window(9)),
        ] {
            let plain = problem(2, lengths, heads, mask);
            let score = plain.score.with_program(Some(program));
            let dropout = fa_core::Dropout::new(0.3, 7, 11).unwrap();
            for score in [score, dropout.of(score).unwrap(), dropout.of(plain.score).unwrap()] {
                let problem = plain.with_score(score);
                let drawn = fa_core::program::OwnedInputs::drawn(&problem, 5).unwrap();
                let inputs = drawn.view(&score.program.unwrap()).unwrap();
                let given = Arguments { program: Some(&inputs), ..Arguments::default() };
                for world in [1, 2, 3, 4] {
                    let all = plans(&problem, world);
                    assert!(all.iter().any(|plan| plan.scheme() == Scheme::Gather));
                    assert!(all.iter().any(|plan| plan.scheme() == Scheme::Ring));
                    assert!(all.iter().all(|plan| !plan.same_bits()));
                    for plan in all {
                        check_plan::<f32>(&plan.with_tiles(8, 8), given, Order::Listed);
                    }
                }
            }
        }
    }
}

#[test]
fn the_gradient_of_the_lse_is_that_of_each_rows_rank() {
    for (lengths, heads, mask) in [
        ((40, 40), (4, 2), Mask::CAUSAL),
        ((37, 37), (4, 4), Mask::window(5, 3)),
        ((24, 33), (4, 2), Mask::FULL),
    ] {
        let problem = problem(2, lengths, heads, mask);
        let dlse = values::<f32>(2 * heads.0 * lengths.0, 9);
        let extras = Extras { dlse: Some(&dlse), ..Extras::NONE };
        for world in [1, 2, 3, 4] {
            for plan in plans(&problem, world) {
                check_plan::<f32>(&plan.with_dlse(true), &extras, Order::Seeded(1));
            }
        }
        let plan = ShardPlan::new(&problem, 1, Scheme::Ring, Layout::Zigzag).unwrap();
        for (plan, extras, part) in [
            (plan.clone(), &extras, "dlse) in this call: use ShardPlan::with_dlse"),
            (plan.with_dlse(true), &Extras::NONE, "a backward without dlse: give it"),
        ] {
            let alone = MemoryTransport::connect(1, &MemoryOptions::default()).remove(0);
            let inputs = inputs::<f32>(&problem);
            let refused = rank(&plan, alone, Order::Listed, &inputs, extras).unwrap_err().to_string();
            assert!(refused.contains(part), "{refused}");
        }
    }
}

#[test]
fn programs_that_ranks_do_not_compute_are_refused() {
    let square = problem(1, (40, 40), (4, 2), Mask::CAUSAL);
    let of = |text: &str| {
        let program = fa_core::program::Program::parse(text).unwrap().intern().unwrap();
        square.with_score(square.score.with_program(Some(program)))
    };
    let own = of("mask = (q - k) % 4 == 0;");
    let dropped = fa_core::Dropout::new(0.5, 1, 0).unwrap().of(square.score).unwrap();
    let lengths = Lengths::packed(2, 40, 40, 20, 20);
    let refused = |problem: &Problem, scheme| {
        ShardPlan::new(problem, 2, scheme, Layout::Zigzag).unwrap_err().to_string()
    };
    let decode =
        |problem: Problem| refused(&problem.with_lengths(Lengths::uniform(1, 1, 40)), Scheme::Decode);
    assert!(decode(own).contains("a program of masks or scores: use gather, ulysses or ring"));
    assert!(decode(square.with_score(dropped)).contains("dropout: use gather, ulysses or ring"));
    let packed = own.with_lengths(lengths);
    for scheme in [Scheme::Gather, Scheme::Ring] {
        let refused =
            ShardPlan::packed(&packed, &[0, 20, 40], 2, scheme, Layout::Zigzag).unwrap_err().to_string();
        assert!(
            refused.contains("a program of masks or scores, of packed sequences: use ulysses"),
            "{refused}"
        );
    }
    let learned = of("array bias: f32[_, _, _, _] grad; score = s + bias[b, h, q, k];");
    let plan = ShardPlan::new(&learned, 2, Scheme::Gather, Layout::Zigzag).unwrap();
    let refused = plan.program(0, Pass::BACKWARD).unwrap_err().to_string();
    assert!(refused.contains("the gradient of the array bias of a program: declare it"), "{refused}");
    // What does not fit the program of the whole is said of that, not of a part's.
    let plan =
        ShardPlan::new(&of("scalar c: f32; score = s + c;"), 1, Scheme::Gather, Layout::Zigzag).unwrap();
    let alone = MemoryTransport::connect(1, &MemoryOptions::default()).remove(0);
    let inputs = inputs::<f32>(&square);
    let refused = rank(&plan, alone, Order::Listed, &inputs, &Extras::NONE).unwrap_err().to_string();
    assert!(refused.contains("1") && !refused.contains("fa_part"), "{refused}");
}

#[test]
fn what_a_call_leaves_out_is_named() {
    let square = problem(1, (40, 40), (4, 2), Mask::CAUSAL);
    let inputs = inputs::<f32>(&square);
    let score = square.score;
    for (score, part) in [
        (score.with_sinks(true), "sinks is not given, the plan needs 4 elements"),
        (
            score.with_alibi(Some(fa_core::Alibi::PerHead)),
            "alibi_slopes is not given, the plan needs 4 elements",
        ),
    ] {
        for plan in plans(&square.with_score(score), 1) {
            let alone = MemoryTransport::connect(1, &MemoryOptions::default()).remove(0);
            let refused = rank(&plan, alone, Order::Listed, &inputs, &Extras::NONE).unwrap_err().to_string();
            assert!(refused.contains(part), "{refused}");
        }
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
