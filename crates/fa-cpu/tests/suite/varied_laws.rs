//! Laws of packed and paged problems: what the layout is does not change a bit.

use std::ops::Range;

use fa_core::{Alibi, Dtype, Lengths, Mask, Problem, ScoreMod, TensorLayout, Types};
use fa_cpu::batch::Batch;
use fa_cpu::check::{k_shape, lse_len, out_shape, q_shape, v_shape};
use fa_cpu::merge::{add_sinks, merge};
use fa_cpu::tiled::Options;
use fa_cpu::{Element, Extras, OwnedExtras, TensorMut, reference};
use proptest::prelude::*;

use crate::gradients::masks;
use crate::inputs::{Inputs, Random, assert_close, bshd};
use crate::tiled::Results;
use crate::varied::{Lie, inputs, problem};

/// Rows of `from` one after the other.
fn rows<T: Copy>(from: &[T], rows: impl Iterator<Item = usize>, len: usize) -> Vec<T> {
    rows.flat_map(|row| &from[row * len..(row + 1) * len]).copied().collect()
}

/// One sequence of a problem as a dense problem of its own.
fn alone<T: Element>(
    problem: &Problem,
    owned: &OwnedExtras,
    inputs: &Inputs<T>,
    index: usize,
) -> (Problem, OwnedExtras, Inputs<T>, Range<usize>, Vec<usize>) {
    let extras = owned.view();
    let batch = Batch::new(problem, &extras).unwrap();
    let sequence = batch.sequences[index];
    let first = sequence.q.batch * q_shape(problem)[1] + sequence.q.first;
    let queries = first..first + sequence.q.len;
    let key = |key| {
        let (outer, inner) = batch.key(index, key);
        outer * k_shape(problem)[1] + inner
    };
    let keys: Vec<usize> = (0..sequence.k.len).map(key).collect();
    let len = |shape: [usize; 4]| shape[2] * shape[3];
    let inputs = Inputs {
        q: rows(&inputs.q, queries.clone(), len(q_shape(problem))),
        k: rows(&inputs.k, keys.iter().copied(), len(k_shape(problem))),
        v: rows(&inputs.v, keys.iter().copied(), len(v_shape(problem))),
        dout: rows(&inputs.dout, queries.clone(), len(out_shape(problem))),
    };
    let score = problem.score.with_alibi(problem.score.alibi.map(|_| Alibi::PerHead));
    let lengths = Lengths::uniform(1, sequence.q.len, sequence.k.len);
    let slopes = owned.alibi_slopes.as_ref().map(|slopes| match problem.score.alibi {
        Some(Alibi::PerSequenceHead) => slopes[index * problem.heads_q..][..problem.heads_q].to_vec(),
        _ => slopes.clone(),
    });
    let owned = OwnedExtras { alibi_slopes: slopes, sinks: owned.sinks.clone(), ..OwnedExtras::default() };
    (problem.with_lengths(lengths).with_score(score), owned, inputs, queries, keys)
}

fn bits<T: Element>(values: &[T]) -> Vec<u64> {
    values.iter().map(|value| value.to_f64().to_bits()).collect()
}

/// Each sequence of a problem gives the bits that it gives alone. The sums of dQ follow the number of threads
/// where a head's keys are split, so gradients are computed by one.
fn same_alone<T: Element>(problem: &Problem, owned: &OwnedExtras, seed: u64, with_backward: bool) {
    let inputs = inputs::<T>(problem, &owned.view(), seed);
    let options = Options { isa: None, threads: with_backward.then_some(1) };
    let whole = Results::of(options, problem, &owned.view(), &inputs, with_backward);
    let [_, seqlen, heads, _] = q_shape(problem);
    let len = |shape: [usize; 4]| shape[2] * shape[3];
    for index in 0..problem.lengths.sequences() {
        let (dense, dense_owned, dense_inputs, queries, keys) = alone(problem, owned, &inputs, index);
        let single = Results::of(options, &dense, &dense_owned.view(), &dense_inputs, with_backward);
        let of_q = |from: &[T], shape| bits(&rows(from, queries.clone(), len(shape)));
        let of_k = |from: &[T], shape| bits(&rows(from, keys.iter().copied(), len(shape)));
        assert_eq!(of_q(&whole.out, out_shape(problem)), bits(&single.out), "out of {problem:?}, {index}");
        let lse: Vec<f32> = (0..heads)
            .flat_map(|head| {
                let row = |row: usize| (row / seqlen * heads + head) * seqlen + row % seqlen;
                queries.clone().map(row).map(|at| whole.lse[at]).collect::<Vec<_>>()
            })
            .collect();
        assert_eq!(bits(&lse), bits(&single.lse), "lse of {problem:?}, {index}");
        if with_backward {
            assert_eq!(of_q(&whole.dq, q_shape(problem)), bits(&single.dq), "dq of {problem:?}, {index}");
            assert_eq!(of_k(&whole.dk, k_shape(problem)), bits(&single.dk), "dk of {problem:?}, {index}");
            assert_eq!(of_k(&whole.dv, v_shape(problem)), bits(&single.dv), "dv of {problem:?}, {index}");
        }
    }
}

fn scores() -> impl Strategy<Value = ScoreMod> {
    let cap = prop_oneof![Just(None), (0.5f64..5.0).prop_map(Some)];
    let alibi = prop_oneof![Just(None), Just(Some(Alibi::PerHead)), Just(Some(Alibi::PerSequenceHead))];
    (cap, alibi, any::<bool>()).prop_map(|(softcap, alibi, sinks)| {
        ScoreMod::NONE.with_softcap(softcap).with_alibi(alibi).with_sinks(sinks)
    })
}

fn lens() -> impl Strategy<Value = Vec<(usize, usize)>> {
    let len = || prop_oneof![1 => Just(0usize), 2 => 1usize..6, 2 => 1usize..150, 1 => 100usize..700];
    prop::collection::vec((len(), len()), 1..7)
}

prop_compose! {
    fn bases()(
        heads_kv in 1usize..3, group in 1usize..4, head_dim in 1usize..40, head_dim_v in 1usize..40,
        mask in prop_oneof![masks(), Just(Mask::FULL), Just(Mask::CAUSAL), Just(Mask::causal_window(60))],
        score in scores(), dtype in prop_oneof![Just(Dtype::F32), Just(Dtype::F16), Just(Dtype::Bf16)],
    ) -> Problem {
        Problem::square(1, 1, 1, 1, Mask::FULL, Dtype::F32)
            .with_heads(heads_kv * group, heads_kv)
            .with_head_dims(head_dim, head_dim_v)
            .with_mask(mask)
            .with_score(score)
            .with_types(Types::same(dtype))
    }
}

fn lies() -> impl Strategy<Value = Lie> {
    prop_oneof![Just(Lie::Padded), Just(Lie::Packed), Just(Lie::PackedUsed)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn packed_sequences_are_dense_problems_of_their_own(
        base in bases(), lens in lens(), q in lies(), k in lies(), seed: u64, with_backward: bool,
    ) {
        let (problem, owned) = problem(base, &lens, [q, k], seed);
        in_dtype!(base.types.q, T => same_alone::<T>(&problem, &owned, seed, with_backward));
    }

    #[test]
    fn shuffled_pages_are_a_contiguous_cache(
        base in bases(), lens in lens(), q in lies(),
        page in prop_oneof![Just(1usize), Just(16), Just(64), 1usize..40, Just(256)], seed: u64,
    ) {
        let (problem, owned) = problem(base, &lens, [q, Lie::Paged(page)], seed);
        in_dtype!(base.types.q, T => same_alone::<T>(&problem, &owned, seed, false));
    }

    /// Packed sequences of equal lengths are the dense batch, gradients on all threads included.
    #[test]
    fn equal_lengths_packed_are_the_dense_batch(
        base in bases(), batch in 1usize..4, q in 1usize..150, k in 1usize..300, seed: u64,
    ) {
        fn check<T: Element>(base: Problem, [batch, q, k]: [usize; 3], seed: u64) {
            let dense = base.with_lengths(Lengths::uniform(batch, q, k));
            let packed = base.with_lengths(Lengths::packed(batch, batch * q, batch * k, q, k));
            let (_, owned) = problem(base, &vec![(q, k); batch], [Lie::Padded; 2], seed);
            let cu = |len: usize| (0..=batch).map(|i| (i * len) as i32).collect::<Vec<i32>>();
            let (of_q, of_k) = (cu(q), cu(k));
            let plain = Extras { seqused_q: None, seqused_k: None, ..owned.view() };
            let extras = Extras { cu_seqlens_q: Some(&of_q), cu_seqlens_k: Some(&of_k), ..plain };
            let inputs = Inputs::<T>::random(&dense, seed);
            let a = Results::of(Options::default(), &dense, &plain, &inputs, true);
            let b = Results::of(Options::default(), &packed, &extras, &inputs, true);
            assert_eq!(bits(&a.out), bits(&b.out));
            for (a, b) in [(a.dq, b.dq), (a.dk, b.dk), (a.dv, b.dv)] {
                assert_eq!(bits(&a), bits(&b), "{packed:?}");
            }
            assert_eq!(a.dsinks, b.dsinks);
        }
        in_dtype!(base.types.q, T => check::<T>(base, [batch, q, k], seed));
    }

    /// Neither the number of threads nor that of splits on them is in the forward's bits.
    #[test]
    fn forwards_do_not_depend_on_threads(
        base in bases(), q in 1usize..70, k in 1usize..2000, seed: u64, threads in 1usize..4,
    ) {
        let (problem, owned) = problem(base, &[(q, k)], [Lie::Packed; 2], seed);
        let problem = problem.with_types(Types::same(Dtype::F32));
        let inputs = inputs::<f32>(&problem, &owned.view(), seed);
        let run = |threads| {
            let options = Options { isa: None, threads };
            let found = Results::of(options, &problem, &owned.view(), &inputs, false);
            (bits(&found.out), bits(&found.lse))
        };
        prop_assert_eq!(run(Some(threads)), run(None));
    }

    /// Keys in any parts, merged in any order, the sink added once, are the whole: in the oracle to its
    /// rounding.
    #[test]
    fn parts_merge_to_the_whole_with_the_sink_added_once(
        heads_kv in 1usize..3, group in 1usize..3, q in 1usize..5, k in 1usize..24, seed: u64,
        ends in prop::collection::vec(0f64..1.0, 0..5), hidden in any::<bool>(),
    ) {
        let score = ScoreMod::NONE.with_sinks(true);
        let square = Problem::square(2, q, heads_kv * group, 3, Mask::FULL, Dtype::F32);
        let lengths = Lengths::uniform(2, q, k);
        let problem = square.with_heads_kv(heads_kv).with_lengths(lengths).with_score(score);
        let mut random = Random::new(seed);
        let mut sinks: Vec<f32> = (0..problem.heads_q).map(|_| 3.0 * random.normal() as f32).collect();
        if hidden {
            sinks[0] = f32::NEG_INFINITY;
        }
        let extras = Extras { sinks: Some(&sinks), ..Extras::NONE };
        let inputs = Inputs::<f64>::random(&problem, seed);
        let views = inputs.views(&problem);
        let whole = reference::forward_extras(&problem, &extras, &views.q, &views.k, &views.v).unwrap();
        let mut ends: Vec<usize> = ends.iter().map(|end| (end * k as f64) as usize).chain([0, k]).collect();
        ends.sort_unstable();
        let mut out = vec![f64::NAN; whole.out.len()];
        let mut lse = vec![f64::NEG_INFINITY; lse_len(&problem)];
        let shape = out_shape(&problem);
        for part in ends.windows(2) {
            let keys = (0..2).flat_map(|b| (part[0]..part[1]).map(move |key| b * k + key));
            let (rows_k, rows_v) = (
                rows(&inputs.k, keys.clone(), heads_kv * problem.head_dim),
                rows(&inputs.v, keys, heads_kv * problem.head_dim_v),
            );
            let lengths = Lengths::uniform(2, q, part[1] - part[0]);
            let part = problem.with_lengths(lengths).with_score(ScoreMod::NONE);
            let (k, v) = (bshd("k", &rows_k, k_shape(&part)), bshd("v", &rows_v, v_shape(&part)));
            let part = reference::forward(&part, &views.q, &k, &v).unwrap();
            let mut to = TensorMut::packed("out", &mut out, shape, TensorLayout::Bshd).unwrap();
            merge(&mut to, &mut lse, &bshd("part", &part.out, shape), &part.lse).unwrap();
        }
        let mut to = TensorMut::packed("out", &mut out, shape, TensorLayout::Bshd).unwrap();
        add_sinks(&mut to, &mut lse, &sinks).unwrap();
        assert_close("out", &out, &whole.out, 1e-13);
        assert_close("lse", &lse, &whole.lse, 1e-14);
    }
}
