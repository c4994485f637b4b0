//! Laws of online softmax and of merging, on random rows with the values that break implementations.

use fa_core::{Dtype, Lengths, Mask, Problem, Strides, TensorLayout, Types};
use fa_cpu::check::{k_shape, lse_len, out_shape, v_shape};
use fa_cpu::compare::rounding_step;
use fa_cpu::merge::{merge, merge_row};
use fa_cpu::softmax::OnlineSoftmax;
use fa_cpu::{Element, Real, TensorMut, TensorRef, reference};
use half::{bf16, f16};
use proptest::prelude::*;

use crate::gradients::masks;
use crate::inputs::{Inputs, assert_close, bshd};

/// Softmax in two passes over the whole row, in f64: the average of the values and the LSE.
fn two_pass(row: &[(f64, f64)]) -> (f64, f64) {
    let max = row.iter().fold(f64::NEG_INFINITY, |max, &(score, _)| max.max(score));
    if max == f64::NEG_INFINITY {
        return (0.0, f64::NEG_INFINITY);
    }
    let sum: f64 = row.iter().map(|(score, _)| (score - max).exp()).sum();
    let sum_of_values: f64 = row.iter().map(|(score, value)| (score - max).exp() * value).sum();
    (sum_of_values / sum, max + sum.ln())
}

/// The same by [`OnlineSoftmax`] in `R`, piece after piece.
fn online<R: Real>(pieces: &[&[(f64, f64)]]) -> (R, R) {
    let (mut softmax, mut out) = (OnlineSoftmax::<R>::EMPTY, R::ZERO);
    for piece in pieces {
        let mut p: Vec<R> = piece.iter().map(|&(score, _)| R::from_f64(score)).collect();
        out *= softmax.absorb(&mut p);
        for (&p, &(_, value)) in p.iter().zip(*piece) {
            out += p * R::from_f64(value);
        }
    }
    (out * softmax.normaliser(), softmax.lse())
}

/// `items` cut at `cuts` (fractions of its length), in order.
fn cut<'a, A>(items: &'a [A], cuts: &[f64]) -> Vec<&'a [A]> {
    let mut ends: Vec<usize> = cuts.iter().map(|cut| (cut * items.len() as f64) as usize).collect();
    ends.push(items.len());
    ends.sort_unstable();
    let mut begin = 0;
    ends.into_iter().map(|end| &items[std::mem::replace(&mut begin, end)..end]).collect()
}

/// Scores that are f32 numbers: ordinary, and with -inf, huge, denormal and equal ones among them.
fn scores() -> impl Strategy<Value = f64> {
    prop_oneof![
        6 => (-30f32..30.0).prop_map(f64::from),
        2 => Just(f64::NEG_INFINITY),
        1 => Just(f64::from(1e-40f32)),
        1 => prop_oneof![Just(88.0), Just(89.0), Just(-104.0), Just(0.0)],
        1 => prop_oneof![Just(f64::from(1e30f32)), Just(f64::from(-1e30f32)), Just(f64::from(f32::MIN))],
    ]
}

fn rows(length: impl Into<prop::collection::SizeRange>) -> impl Strategy<Value = Row> {
    prop::collection::vec((scores(), (-4f32..4.0).prop_map(f64::from)), length)
}

/// Scores and values of a row.
type Row = Vec<(f64, f64)>;

/// A row and the same row shuffled, with positions to cut it at.
fn split_rows() -> impl Strategy<Value = (Row, Row, Vec<f64>)> {
    (rows(0..40), prop::collection::vec(0f64..1.0, 0..6))
        .prop_flat_map(|(row, cuts)| (Just(row.clone()), Just(row).prop_shuffle(), Just(cuts)))
}

/// A partial result: an output row and its LSE, which may be empty.
fn partials() -> impl Strategy<Value = ([f64; 3], f64)> {
    let lse = prop_oneof![4 => -40f64..40.0, 1 => Just(f64::NEG_INFINITY), 1 => -1e4f64..1e4];
    (prop::array::uniform3(-4f64..4.0), lse)
        .prop_map(|(out, lse)| if lse == f64::NEG_INFINITY { ([0.0; 3], lse) } else { (out, lse) })
}

fn merged(mut a: ([f64; 3], f64), b: ([f64; 3], f64)) -> ([f64; 3], f64) {
    merge_row(&mut a.0, &mut a.1, &b.0, b.1);
    a
}

fn assert_partials_close(a: ([f64; 3], f64), b: ([f64; 3], f64)) {
    assert_close("out", &a.0, &b.0, 1e-11);
    assert_close("lse", &[a.1], &[b.1], 1e-15);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_split_in_any_order_is_the_two_pass_softmax((row, shuffled, cuts) in split_rows()) {
        let (out, lse) = two_pass(&row);
        let pieces = cut(&shuffled, &cuts);
        let (online_out, online_lse) = online::<f64>(&pieces);
        assert_close("out", &[online_out], &[out], 1e-13);
        assert_close("lse", &[online_lse], &[lse], 1e-15);
        let (online_out, online_lse) = online::<f32>(&pieces);
        assert_close("out in f32", &[online_out.to_f64()], &[out], 1e-5);
        assert_close("lse in f32", &[online_lse.to_f64()], &[lse], 1e-6);
    }

    #[test]
    fn sixteen_bit_outputs_are_within_one_rounding((row, shuffled, cuts) in split_rows()) {
        fn check<T: Element>(dtype: Dtype, out: f64, online: f32) {
            // f32 sums of terms up to 4 leave an error of their own where they cancel.
            let step = rounding_step(dtype, out) + 1e-5;
            let rounded = T::from_f32(online).to_f64();
            assert!((rounded - out).abs() <= step, "{dtype}: {rounded} for {out}, step {step:e}");
        }
        let (out, _) = two_pass(&row);
        let (online, _) = online::<f32>(&cut(&shuffled, &cuts));
        check::<f16>(Dtype::F16, out, online);
        check::<bf16>(Dtype::Bf16, out, online);
    }

    #[test]
    fn states_join_as_if_one_had_seen_everything((row, shuffled, cuts) in split_rows()) {
        let joined = cut(&shuffled, &cuts).into_iter().fold(OnlineSoftmax::EMPTY, |mut joined, piece| {
            let mut part = OnlineSoftmax::<f64>::EMPTY;
            part.absorb(&mut piece.iter().map(|&(score, _)| score).collect::<Vec<_>>());
            joined.join(&part);
            joined
        });
        assert_close("lse", &[joined.lse()], &[two_pass(&row).1], 1e-15);
    }

    #[test]
    fn a_shift_of_all_scores_changes_only_the_lse(row in rows(1..30), shift in -1e3f64..1e3) {
        let shifted: Vec<(f64, f64)> = row.iter().map(|&(score, value)| (score + shift, value)).collect();
        let (out, lse) = online::<f64>(&[&row]);
        let (shifted_out, shifted_lse) = online::<f64>(&[&shifted]);
        assert_close("out", &[shifted_out], &[out], 1e-11);
        assert_close("lse", &[shifted_lse], &[lse + shift], 1e-14);
    }

    #[test]
    fn one_key_gives_its_value_and_its_score(row in rows(1)) {
        let [(score, value)] = row[..] else { unreachable!() };
        let expected = if score == f64::NEG_INFINITY { (0.0, score) } else { (value, score) };
        assert_eq!(online::<f64>(&[&row]), expected);
        assert_eq!(online::<f32>(&[&row]), (expected.0 as f32, expected.1 as f32));
    }

    #[test]
    fn merging_is_associative_and_commutative(a in partials(), b in partials(), c in partials()) {
        assert_partials_close(merged(a, merged(b, c)), merged(merged(a, b), c));
        assert_partials_close(merged(a, b), merged(b, a));
    }

    #[test]
    fn merging_has_an_identity(a in partials()) {
        let identity = ([0.0; 3], f64::NEG_INFINITY);
        assert_eq!(merged(a, identity), a);
        assert_eq!(merged(identity, a), a);
    }
}

prop_compose! {
    /// Small problems that see all keys.
    fn full_problems()(
        batch in 1usize..3, seqlen_q in 1usize..5, seqlen_k in 1usize..24,
        heads_kv in 1usize..3, group in 1usize..3, head_dim in 1usize..9, head_dim_v in 1usize..9,
    ) -> Problem {
        Problem::new(
            Lengths::uniform(batch, seqlen_q, seqlen_k),
            (heads_kv * group, heads_kv),
            (head_dim, head_dim_v),
            Types::same(Dtype::F32),
        )
    }
}

/// The keys `order` of a packed BSHD tensor.
fn reordered(data: &[f64], shape: [usize; 4], order: &[usize]) -> Vec<f64> {
    let row = shape[2] * shape[3];
    let keys = (0..shape[0]).flat_map(|b| order.iter().map(move |j| (b * shape[1] + j) * row));
    keys.flat_map(|begin| &data[begin..begin + row]).copied().collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Split over the keys, as decoding does: any keys in any parts, parts in any order, some of them empty.
    #[test]
    fn parts_of_the_keys_merge_to_the_whole(
        problem in full_problems(), seed: u64, cuts in prop::collection::vec(0f64..1.0, 0..5),
        order in Just((0..24).collect::<Vec<usize>>()).prop_shuffle(),
    ) {
        let inputs = Inputs::<f64>::random(&problem, seed);
        let views = inputs.views(&problem);
        let whole = reference::forward(&problem, &views.q, &views.k, &views.v).unwrap();
        let order: Vec<usize> = order.into_iter().filter(|&j| j < problem.lengths.max_k()).collect();
        let mut out = vec![0.0; whole.out.len()];
        let mut lse = vec![f64::NEG_INFINITY; lse_len(&problem)];
        for keys in cut(&order, &cuts) {
            let (sequences, queries) = (problem.lengths.sequences(), problem.lengths.max_q());
            let part = problem.with_lengths(Lengths::uniform(sequences, queries, keys.len()));
            let k = reordered(&inputs.k, k_shape(&problem), keys);
            let v = reordered(&inputs.v, v_shape(&problem), keys);
            let [k, v] = [bshd("k", &k, k_shape(&part)), bshd("v", &v, v_shape(&part))];
            let part = reference::forward(&part, &views.q, &k, &v).unwrap();
            let mut view =
                TensorMut::packed("out", &mut out, out_shape(&problem), TensorLayout::Bshd).unwrap();
            merge(&mut view, &mut lse, &bshd("part", &part.out, out_shape(&problem)), &part.lse).unwrap();
        }
        assert_close("out", &out, &whole.out, 1e-13);
        assert_close("lse", &lse, &whole.lse, 1e-14);
    }

    /// Adding one vector to every key adds a constant to each row of scores.
    #[test]
    fn moving_all_keys_changes_only_the_lse(problem in full_problems(), seed: u64, offset in -3f64..3.0) {
        let inputs = Inputs::<f64>::random(&problem, seed);
        let views = inputs.views(&problem);
        let moved: Vec<f64> = inputs.k.iter().map(|value| value + offset).collect();
        let moved = bshd("k", &moved, k_shape(&problem));
        let here = reference::forward(&problem, &views.q, &views.k, &views.v).unwrap();
        let there = reference::forward(&problem, &views.q, &moved, &views.v).unwrap();
        assert_close("out", &there.out, &here.out, 1e-12);
        let mut expected = here.lse.clone();
        for (index, lse) in expected.iter_mut().enumerate() {
            let (row, i) = (index / problem.lengths.max_q(), index % problem.lengths.max_q());
            let (b, h) = (row / problem.heads_q, row % problem.heads_q);
            let sum: f64 = (0..problem.head_dim).map(|d| views.q.at(b, i, h, d)).sum();
            *lse += problem.scale() * offset * sum;
        }
        assert_close("lse", &there.lse, &expected, 1e-13);
    }

    /// What is hidden takes no part even where it is NaN, and who sees nothing gets nothing.
    #[test]
    fn rows_that_see_nothing_are_zero_and_give_no_gradient(
        full in full_problems(), seqlen_q in 1usize..30, mask in masks(), seed: u64,
    ) {
        let lengths = Lengths::uniform(full.lengths.sequences(), seqlen_q, full.lengths.max_k());
        let problem = full.with_lengths(lengths).with_mask(mask);
        let (sq, sk) = (problem.lengths.max_q(), problem.lengths.max_k());
        let mut inputs = Inputs::<f64>::random(&problem, seed);
        let seen = |j: usize| (0..sq).any(|i| mask.visible(i, j, sq, sk));
        for (data, row) in [
            (&mut inputs.k, problem.heads_kv * problem.head_dim),
            (&mut inputs.v, problem.heads_kv * problem.head_dim_v),
        ] {
            for (position, key) in data.chunks_mut(row).enumerate() {
                if !seen(position % sk) {
                    key.fill(f64::NAN);
                }
            }
        }
        let views = inputs.views(&problem);
        let forward = reference::forward(&problem, &views.q, &views.k, &views.v).unwrap();
        let gradients = reference::backward(&problem, &views.q, &views.k, &views.v, &views.dout).unwrap();
        let blind = |i: usize| mask.keys(i, sq, sk).is_empty();
        for (index, &lse) in forward.lse.iter().enumerate() {
            prop_assert_eq!(lse == f64::NEG_INFINITY, blind(index % sq));
            prop_assert!(!lse.is_nan());
        }
        for (values, heads, dim) in [
            (&forward.out, problem.heads_q, problem.head_dim_v),
            (&gradients.dq, problem.heads_q, problem.head_dim),
        ] {
            for (position, row) in values.chunks(heads * dim).enumerate() {
                prop_assert!(row.iter().all(|value| value.is_finite()));
                prop_assert!(!blind(position % sq) || row.iter().all(|&value| value == 0.0));
            }
        }
        for (values, dim) in [(&gradients.dk, problem.head_dim), (&gradients.dv, problem.head_dim_v)] {
            for (position, row) in values.chunks(problem.heads_kv * dim).enumerate() {
                prop_assert!(row.iter().all(|value| value.is_finite()));
                prop_assert!(seen(position % sk) || row.iter().all(|&value| value == 0.0));
            }
        }
    }
}

/// Scores that are all -inf are keys that are not seen; one NaN or +inf in a row is that row's result.
#[test]
fn infinite_and_nan_inputs_stay_in_their_rows() {
    let problem = Problem::square(1, 3, 1, 1, Mask::FULL, Dtype::F32);
    let run = |q: [f32; 3]| {
        let (k, v) = ([1f32, 2.0, 3.0], [1f32, 2.0, 4.0]);
        let [q, k, v] = [("q", &q), ("k", &k), ("v", &v)].map(|(name, data)| bshd(name, data, [1, 3, 1, 1]));
        reference::forward(&problem, &q, &k, &v).unwrap()
    };
    let ordinary = run([0.5, 0.25, -1.0]);
    for (bad, out, lse) in [
        (f32::NEG_INFINITY, 0.0, f64::NEG_INFINITY),
        (f32::INFINITY, f64::NAN, f64::NAN),
        (f32::NAN, f64::NAN, f64::NAN),
    ] {
        let result = run([0.5, bad, -1.0]);
        let expected = |row: &[f64], value: f64| [row[0], value, row[2]];
        assert_close("out", &result.out, &expected(&ordinary.out, out), 0.0);
        assert_close("lse", &result.lse, &expected(&ordinary.lse, lse), 0.0);
    }
}

/// Strides say where an element lies, not what it is: a broadcast view is the tensor that it repeats.
#[test]
fn broadcast_strides_give_the_packed_result() {
    let problem = Problem::square(2, 4, 4, 3, Mask::CAUSAL, Dtype::F32)
        .with_heads_kv(2)
        .with_lengths(Lengths::uniform(2, 4, 5));
    let k_one_head: Vec<f32> = (0..2 * 5 * 3).map(|i| (i as f32 * 0.7).sin()).collect();
    let broadcast = Strides { batch: 15, seq: 3, head: 0, dim: 1 };
    let shape = k_shape(&problem);
    let k = TensorRef::new("k", &k_one_head, shape, broadcast).unwrap();
    let packed: Vec<f32> = k_one_head.chunks(3).flat_map(|row| [row, row]).flatten().copied().collect();
    let inputs = Inputs::<f32>::random(&problem, 7);
    let views = inputs.views(&problem);
    assert_eq!(
        reference::forward(&problem, &views.q, &k, &views.v).unwrap(),
        reference::forward(&problem, &views.q, &bshd("k", &packed, shape), &views.v).unwrap()
    );
}
