//! Sequences of their own lengths, keys in pages, ALiBi and sinks: problems made at random, with everything
//! poisoned that belongs to no sequence.

use fa_core::{Alibi, Dtype, Lengths, Mask, Problem, ScoreMod, Side, TensorLayout, Types};
use fa_cpu::batch::{Batch, Span};
use fa_cpu::check::{k_shape, lse_len, out_shape, q_shape, v_shape};
use fa_cpu::compare::{compare, compare_lse};
use fa_cpu::reference::{self, Forward, Gradients, low_precision};
use fa_cpu::simd::Isa;
use fa_cpu::tiled::{Options, forward_extras};
use fa_cpu::{CpuError, Element, Extras, OwnedExtras, TensorMut};
use half::{bf16, f16};

use crate::inputs::{Inputs, Random, Views};
use crate::tiled::Results;

/// How the rows of a side lie.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Lie {
    /// As long as the longest, shortened by used lengths.
    Padded,
    /// End to end, with a gap before and behind.
    Packed,
    /// End to end, shortened by used lengths.
    PackedUsed,
    /// In pages of so many rows, shuffled.
    Paged(usize),
}

/// Lengths of a side whose sequences have `lens` rows.
fn side(lens: &[usize], lie: Lie, random: &mut Random) -> (Side, [Option<Vec<i32>>; 3]) {
    let ints = |values: &[usize]| Some(values.iter().map(|&value| value as i32).collect::<Vec<_>>());
    let longest = lens.iter().copied().max().unwrap_or(0);
    let ends = |first: usize, lens: &[usize]| {
        let mut ends = vec![first];
        lens.iter().for_each(|len| ends.push(ends.last().unwrap() + len));
        ends
    };
    match lie {
        Lie::Padded => (Side::padded(longest + 3).with_used(), [None, ints(lens), None]),
        Lie::Packed => {
            let cu = ends(2, lens);
            (Side::packed(cu.last().unwrap() + 5, longest + 1), [ints(&cu), None, None])
        }
        Lie::PackedUsed => {
            let slots: Vec<usize> = lens.iter().map(|len| len + 2).collect();
            let cu = ends(0, &slots);
            (Side::packed(*cu.last().unwrap(), longest + 2).with_used(), [ints(&cu), ints(lens), None])
        }
        Lie::Paged(page) => {
            let columns = (longest + 2).div_ceil(page);
            let pages = lens.iter().map(|len| len.div_ceil(page)).sum::<usize>() + 2;
            let mut free: Vec<usize> = (0..pages).collect();
            let mut table = vec![];
            for len in lens {
                for column in 0..columns {
                    if column < len.div_ceil(page) {
                        let at = random.bits() as usize % free.len();
                        table.push(free.swap_remove(at) as i32);
                    } else {
                        // Unused entries hold anything.
                        table.push([-1, i32::MAX, i32::MIN, 0][column % 4]);
                    }
                }
            }
            (Side::paged(page, pages, longest + 2), [None, ints(lens), Some(table)])
        }
    }
}

/// A problem over sequences of `(queries, keys)`.
pub(crate) fn problem(
    base: Problem,
    lens: &[(usize, usize)],
    lies: [Lie; 2],
    seed: u64,
) -> (Problem, OwnedExtras) {
    let mut random = Random::new(seed);
    let (q_lens, k_lens): (Vec<_>, Vec<_>) = lens.iter().copied().unzip();
    let (q, [cu_seqlens_q, seqused_q, _]) = side(&q_lens, lies[0], &mut random);
    let (k, [cu_seqlens_k, seqused_k, page_table]) = side(&k_lens, lies[1], &mut random);
    let slopes = base.score.alibi.map(|alibi| alibi.count(lens.len(), base.heads_q));
    let owned = OwnedExtras {
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        page_table,
        alibi_slopes: slopes.map(|count| (0..count).map(|_| 0.2 * random.uniform() as f32).collect()),
        sinks: base.score.sinks.then(|| (0..base.heads_q).map(|_| 2.0 * random.normal() as f32).collect()),
        ..OwnedExtras::NONE
    };
    (base.with_lengths(Lengths::of(lens.len(), q, k)), owned)
}

/// Whether each row of a side belongs to a sequence.
fn owned_rows(spans: impl Iterator<Item = Span>, [outer, inner]: [usize; 2]) -> Vec<bool> {
    let mut owned = vec![false; outer * inner];
    for Span { batch, first, len } in spans {
        owned[batch * inner + first..][..len].fill(true);
    }
    owned
}

/// Which rows of Q and of K belong to a sequence.
pub(crate) fn rows_of(problem: &Problem, extras: &Extras<'_>) -> [Vec<bool>; 2] {
    let batch = Batch::new(problem, extras).unwrap();
    let outer = |shape: [usize; 4]| [shape[0], shape[1]];
    let q = owned_rows(batch.sequences.iter().map(|sequence| sequence.q), outer(q_shape(problem)));
    let [pages, page] = outer(k_shape(problem));
    let mut k = vec![false; pages * page];
    for (index, sequence) in batch.sequences.iter().enumerate() {
        for key in 0..sequence.k.len {
            let (outer, inner) = batch.key(index, key);
            k[outer * page + inner] = true;
        }
    }
    [q, k]
}

/// Random tensors, NaN where no sequence has a row.
pub(crate) fn inputs<T: Element>(problem: &Problem, extras: &Extras<'_>, seed: u64) -> Inputs<T> {
    let mut inputs = Inputs::<T>::random(problem, seed);
    let [q, k] = rows_of(problem, extras);
    let poison = |data: &mut [T], owned: &[bool], shape: [usize; 4]| {
        for (row, _) in data.chunks_mut((shape[2] * shape[3]).max(1)).zip(owned).filter(|(_, owned)| !**owned)
        {
            row.fill(T::from_f64(f64::NAN));
        }
    };
    poison(&mut inputs.q, &q, q_shape(problem));
    poison(&mut inputs.dout, &q, out_shape(problem));
    poison(&mut inputs.k, &k, k_shape(problem));
    poison(&mut inputs.v, &k, v_shape(problem));
    inputs
}

/// Every instruction set of this CPU against the oracle, by the tolerance rule; NaN must be where the oracle
/// has it, in the rows of no sequence.
fn check<T: Element + std::fmt::Debug>(
    problem: &Problem,
    extras: &Extras<'_>,
    seed: u64,
    with_backward: bool,
) {
    let inputs = inputs::<T>(problem, extras, seed);
    let Views { q, k, v, dout } = inputs.views(problem);
    let dtype = problem.types.q;
    // Of half of the cases the LSE has a gradient too; rows of no sequence hold NaN there.
    let mut dlse: Vec<f32> = vec![f32::NAN; lse_len(problem)];
    let spans = Batch::new(problem, extras).unwrap();
    let [_, seqlen, heads, _] = q_shape(problem);
    for sequence in &spans.sequences {
        let Span { batch, first, len } = sequence.q;
        for (head, row) in (0..heads).flat_map(|head| (first..first + len).map(move |row| (head, row))) {
            dlse[(batch * heads + head) * seqlen + row] = (3 * row + head) as f32 % 7.0 / 4.0 - 0.75;
        }
    }
    let dlse = (with_backward && seed.is_multiple_of(2)).then_some(&dlse[..]);
    let of_backward = Extras { dlse, ..*extras };
    let exact: Forward = reference::forward_extras(problem, extras, &q, &k, &v).unwrap();
    let low = low_precision::forward_extras(problem, extras, &q, &k, &v).unwrap();
    let lse_shape = {
        let [batch, seqlen, heads, _] = q_shape(problem);
        [batch, heads, seqlen]
    };
    let gradients = with_backward.then(|| {
        let exact: Gradients = reference::backward_extras(problem, &of_backward, &q, &k, &v, &dout).unwrap();
        (exact, low_precision::backward_extras(problem, &of_backward, &q, &k, &v, &dout).unwrap())
    });
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let options = Options { isa: Some(isa), threads: None };
        let got = Results::of(options, problem, &of_backward, &inputs, with_backward);
        let tensor = |what: &str, shape, got: &[T], exact: &[f64], low: &[T], room: f64| {
            let verdict = compare(shape, dtype, got, exact, Some(low)).unwrap().allowing(room);
            assert!(verdict.passed(), "{what} of {problem:?} with {isa}: {verdict}");
        };
        tensor("out", out_shape(problem), &got.out, &exact.out, &low.out, exact.out_noise);
        let verdict = compare_lse(lse_shape, dtype, &got.lse, &exact.lse).unwrap();
        assert!(verdict.passed(), "lse of {problem:?} with {isa}: {verdict}");
        let Some((exact, low)) = &gradients else { continue };
        // An output rounded to 16 bits enters delta, and with it dQ and dK.
        let rounding = if dtype == Dtype::F32 { 0.0 } else { dtype.unit_roundoff() };
        let largest = |values: &[f64]| {
            values.iter().filter(|value| value.is_finite()).fold(1f64, |max, value| max.max(value.abs()))
        };
        let room = |noise: f64, values: &[f64]| noise.max(2.0 * rounding * largest(values));
        let (dq, dk, dv) = (room(exact.dq_noise, &exact.dq), room(exact.dk_noise, &exact.dk), exact.dv_noise);
        tensor("dq", q_shape(problem), &got.dq, &exact.dq, &low.dq, dq);
        tensor("dk", k_shape(problem), &got.dk, &exact.dk, &low.dk, dk);
        tensor("dv", v_shape(problem), &got.dv, &exact.dv, &low.dv, room(dv, &exact.dv));
        for (head, (&got, &want)) in got.dsinks.iter().zip(&exact.dsinks).enumerate() {
            let room = exact.dsinks_noise + 4.0 * rounding * largest(&exact.dsinks) * 8.0 + 1e-6;
            let near = (f64::from(got) - want).abs() <= room;
            assert!(near, "dsinks[{head}] of {problem:?} with {isa}: {got} for {want}, room {room:e}");
        }
    }
}

/// A row that sees no key has a sink's probability and an O of 0, whose gradient is nobody's business.
fn blind_rows_add_nothing_to_sinks<T: Element + PartialEq + std::fmt::Debug>(dtype: Dtype) {
    let problem = Problem::square(1, 1, 2, 16, Mask::CAUSAL, dtype)
        .with_lengths(Lengths::uniform(1, 70, 30))
        .with_score(ScoreMod::NONE.with_sinks(true));
    let extras = Extras { sinks: Some(&[0.5, -1.0]), ..Extras::NONE };
    let clean = inputs::<T>(&problem, &extras, 5);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let options = Options { isa: Some(isa), threads: Some(1) };
        let want = Results::of(options, &problem, &extras, &clean, true);
        for bad in [f64::NAN, f64::INFINITY] {
            let mut given = inputs::<T>(&problem, &extras, 5);
            // The first 40 queries come before the first key.
            given.dout[..40 * 2 * 16].fill(T::from_f64(bad));
            let got = Results::of(options, &problem, &extras, &given, true);
            assert_eq!(got.dsinks, want.dsinks, "{bad} with {isa}, {dtype}");
        }
    }
}

#[test]
fn gradients_of_blind_rows_do_not_leak_into_sinks() {
    blind_rows_add_nothing_to_sinks::<f32>(Dtype::F32);
    blind_rows_add_nothing_to_sinks::<f16>(Dtype::F16);
    blind_rows_add_nothing_to_sinks::<bf16>(Dtype::Bf16);
}

pub(crate) fn check_type(problem: &Problem, extras: &Extras<'_>, seed: u64, with_backward: bool) {
    in_dtype!(problem.types.q, T => check::<T>(problem, extras, seed, with_backward));
}

pub(crate) const MASKS: [Mask; 7] = [
    Mask::CAUSAL.with_offset(-6),
    Mask::causal_window(9).with_offset(13),
    Mask::FULL,
    Mask::CAUSAL,
    Mask::window(9, 4),
    Mask::causal_window(40),
    Mask::band(None, Some(20)),
];

const SCORES: [ScoreMod; 5] = [
    ScoreMod::NONE,
    ScoreMod::NONE.with_sinks(true),
    ScoreMod::NONE.with_alibi(Some(Alibi::PerHead)),
    ScoreMod::NONE.with_softcap(Some(2.5)).with_alibi(Some(Alibi::PerSequenceHead)).with_sinks(true),
    ScoreMod::NONE.with_softcap(Some(20.0)).with_sinks(true),
];

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

/// Zero-length sequences on either side, single rows, more queries than keys, tiles and their neighbours.
const LENS: [&[(usize, usize)]; 6] = [
    &[(0, 0), (5, 7), (0, 9), (64, 64), (3, 0), (33, 130), (1, 1), (130, 33)],
    &[(1, 200), (1, 0), (1, 77), (1, 600), (1, 1)],
    &[(2, 40), (4, 513), (0, 3), (3, 128)],
    &[(0, 0), (0, 0)],
    &[(128, 128), (128, 128), (128, 128)],
    &[(0, 5), (1, 5), (0, 0)],
];

fn base(turn: usize) -> Problem {
    let (heads_q, heads_kv) = [(2, 2), (4, 2), (3, 1), (8, 1)][turn % 4];
    let (head_dim, head_dim_v) = [(40, 40), (64, 32), (16, 24), (17, 9), (72, 72)][turn % 5];
    Problem::square(1, 1, 1, 1, Mask::FULL, Dtype::F32)
        .with_heads(heads_q, heads_kv)
        .with_head_dims(head_dim, head_dim_v)
        .with_mask(MASKS[turn % MASKS.len()])
        .with_types(Types::same(DTYPES[turn / 2 % 3]))
        .with_score(SCORES[turn % SCORES.len()])
}

#[test]
fn packed_and_shortened_sequences() {
    let lies = [Lie::Padded, Lie::Packed, Lie::PackedUsed];
    let mut turn = 0;
    for lens in LENS {
        for q in lies {
            for k in lies {
                // The masks, scores and types move on at different paces.
                for shift in [0, 1] {
                    let score = SCORES[(turn + 2 * shift) % SCORES.len()];
                    let (problem, owned) =
                        problem(base(turn + shift).with_score(score), lens, [q, k], turn as u64);
                    check_type(&problem, &owned.view(), turn as u64, true);
                }
                turn += 1;
            }
        }
    }
}

#[test]
fn keys_in_pages_of_any_size() {
    let mut turn = 0;
    for lens in LENS {
        for page in [1, 3, 16, 64, 128, 200] {
            for q in [Lie::Padded, Lie::Packed] {
                let score = SCORES[(turn / 2) % SCORES.len()];
                let (problem, owned) =
                    problem(base(turn).with_score(score), lens, [q, Lie::Paged(page)], turn as u64);
                check_type(&problem, &owned.view(), turn as u64, false);
                turn += 1;
            }
        }
    }
}

#[test]
fn slopes_and_sinks_on_dense_problems() {
    for (turn, score) in SCORES.into_iter().enumerate() {
        for (index, mask) in MASKS.into_iter().enumerate() {
            for lens in [[(70, 81); 2], [(200, 130); 2], [(1, 300); 2], [(60, 3); 2]] {
                let types = Types::same(DTYPES[(turn + index) % 3]);
                let dense = base(turn + index).with_mask(mask).with_score(score).with_types(types);
                let (_, owned) = problem(dense, &lens, [Lie::Padded; 2], turn as u64);
                let dense = dense.with_lengths(Lengths::uniform(2, lens[0].0, lens[0].1));
                let extras = Extras { seqused_q: None, seqused_k: None, ..owned.view() };
                check_type(&dense, &extras, index as u64, true);
            }
        }
    }
}

/// Thousands of sequences of a few rows.
#[test]
fn many_short_sequences() {
    let lens: Vec<(usize, usize)> = (0..8300).map(|i| (i % 4, (i / 3) % 5)).collect();
    for dtype in DTYPES {
        let base = base(1).with_types(Types::same(dtype)).with_head_dims(8, 4);
        let (problem, owned) = problem(base, &lens, [Lie::Packed; 2], 3);
        check_type(&problem, &owned.view(), 1, true);
    }
}

/// A row with an infinite score is NaN, and so is what it adds to its sink's gradient.
#[test]
fn sinks_beside_an_infinite_score_have_a_gradient_of_nan() {
    let problem =
        Problem::square(1, 20, 2, 8, Mask::FULL, Dtype::F32).with_score(ScoreMod::NONE.with_sinks(true));
    let extras = Extras { sinks: Some(&[0.5, -1.0]), ..Extras::NONE };
    let mut given = inputs::<f32>(&problem, &extras, 5);
    given.k[0] = f32::INFINITY;
    let Views { q, k, v, dout } = given.views(&problem);
    let want = reference::backward_extras(&problem, &extras, &q, &k, &v, &dout).unwrap().dsinks;
    assert!(want[0].is_nan() && want[1].is_finite(), "{want:?}");
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let options = Options { isa: Some(isa), threads: Some(1) };
        let got = Results::of(options, &problem, &extras, &given, true).dsinks;
        assert!(got[0].is_nan() && got[1].is_finite(), "{got:?} with {isa}");
    }
}

/// A soft cap makes a score of -inf one of minus the cap, in the backward too.
#[test]
fn infinite_keys_below_a_soft_cap_have_gradients() {
    for mask in [Mask::FULL, Mask::CAUSAL] {
        let problem = Problem::square(1, 20, 2, 8, mask, Dtype::F32).with_score(ScoreMod::softcap(2.0));
        let mut given = inputs::<f32>(&problem, &Extras::NONE, 5);
        given.k[0] = f32::INFINITY;
        let Views { q, k, v, dout } = given.views(&problem);
        let want = reference::backward_extras(&problem, &Extras::NONE, &q, &k, &v, &dout).unwrap().dv;
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let options = Options { isa: Some(isa), threads: Some(1) };
            let got = Results::compute(options, &problem, &given, true).dv;
            for (got, want) in got.iter().zip(&want) {
                assert!((f64::from(*got) - want).abs() < 1e-4, "{got} for {want} with {isa}, {mask}");
            }
        }
    }
}

/// A row that sees no key has the sink as its LSE and O = 0; sinks of -inf are as none.
#[test]
fn rows_that_see_nothing_keep_their_sink() {
    let score = ScoreMod::NONE.with_sinks(true);
    let base =
        Problem::square(1, 7, 2, 8, Mask::CAUSAL, Dtype::F32).with_score(score).with_mask(Mask::CAUSAL);
    let dense = base.with_lengths(Lengths::uniform(1, 7, 3));
    let sinks = [0.75, f32::NEG_INFINITY];
    let extras = Extras { sinks: Some(&sinks), ..Extras::NONE };
    let inputs = Inputs::<f32>::random(&dense, 5);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let options = Options { isa: Some(isa), threads: None };
        let got = Results::of(options, &dense, &extras, &inputs, true);
        for query in 0..4 {
            assert_eq!([got.lse[query], got.lse[7 + query]], sinks, "{isa}");
            assert!(got.out[query * 16..][..16].iter().all(|&value| value == 0.0), "{isa}");
            assert!(got.dq[query * 16..][..16].iter().all(|&value| value == 0.0), "{isa}");
        }
        assert_eq!(got.dsinks[1], 0.0, "{isa}");
        let without = dense.with_score(ScoreMod::NONE);
        let plain = Results::of(options, &without, &Extras::NONE, &inputs, true);
        assert_eq!(got.lse[7..], plain.lse[7..], "{isa}");
    }
}

#[test]
fn what_does_not_go_together_is_refused_before_a_write() {
    let (paged, owned) = problem(base(0), &[(2, 5), (1, 3)], [Lie::Packed, Lie::Paged(2)], 1);
    let paged = paged.with_score(ScoreMod::NONE).with_types(Types::same(Dtype::F32));
    let owned = OwnedExtras { sinks: None, alibi_slopes: None, ..owned };
    let inputs = inputs::<f32>(&paged, &owned.view(), 1);
    let Views { q, k, v, dout } = inputs.views(&paged);
    let mut out = vec![7f32; out_shape(&paged).iter().product()];
    let mut run = |extras: &Extras<'_>| {
        let mut to = TensorMut::packed("out", &mut out, out_shape(&paged), TensorLayout::Bshd).unwrap();
        let refused = forward_extras(Options::default(), &paged, extras, &q, &k, &v, &mut to, None);
        assert_eq!(reference::forward_extras(&paged, extras, &q, &k, &v).map(|_| ()), refused);
        assert!(out.iter().all(|&value| value == 7.0));
        refused.unwrap_err()
    };
    let extras = owned.view();
    assert_eq!(
        run(&Extras { seqused_k: None, ..extras }),
        CpuError::Extra { name: "seqused_k", asked: true },
        "keys in pages need lengths"
    );
    let table = vec![9; extras.page_table.unwrap().len()];
    assert!(matches!(run(&Extras { page_table: Some(&table), ..extras }), CpuError::Page { page: 9, .. }));
    assert!(matches!(
        run(&Extras { seqused_k: Some(&[5, 99]), ..extras }),
        CpuError::Beyond { value: 99, .. }
    ));
    let refused = reference::backward_extras(&paged, &extras, &q, &k, &v, &dout).unwrap_err();
    assert_eq!(refused, CpuError::PagedBackward);
}

/// The functions without extras take no problem that needs some.
#[test]
fn what_needs_extras_is_refused_without() {
    let dense = Problem::square(1, 3, 2, 4, Mask::FULL, Dtype::F32);
    let alibi = ScoreMod::NONE.with_alibi(Some(Alibi::PerHead));
    for (problem, name) in [
        (dense.with_lengths(Lengths::packed(1, 3, 3, 3, 3)), "cu_seqlens_q"),
        (dense.with_score(alibi), "alibi_slopes"),
        (dense.with_score(ScoreMod::NONE.with_sinks(true)), "sinks"),
    ] {
        let inputs = Inputs::<f32>::random(&problem, 1);
        let Views { q, k, v, dout } = inputs.views(&problem);
        let refused = CpuError::Extra { name, asked: true };
        assert_eq!(reference::forward(&problem, &q, &k, &v), Err(refused.clone()));
        assert_eq!(reference::backward(&problem, &q, &k, &v, &dout), Err(refused.clone()));
        let mut out = [7f32; 24];
        let mut to = TensorMut::packed("out", &mut out, out_shape(&problem), TensorLayout::Bshd).unwrap();
        assert_eq!(fa_cpu::tiled::forward(&problem, &q, &k, &v, &mut to, None), Err(refused));
        assert_eq!(out, [7.0; 24]);
    }
}

/// A cache with heads before rows of a page gives the bits of one with rows before heads.
#[test]
fn heads_may_lie_before_the_rows_of_a_page() {
    for lens in [&[(1, 70), (1, 33)][..], &[(40, 70), (9, 33)]] {
        let (paged, owned) = problem(base(1), lens, [Lie::Packed, Lie::Paged(16)], 2);
        let paged = paged.with_types(Types::same(Dtype::F32));
        let inputs = inputs::<f32>(&paged, &owned.view(), 2);
        let expected = Results::of(Options::default(), &paged, &owned.view(), &inputs, false);
        let heads_first = |data: &[f32], [pages, page, heads, dim]: [usize; 4]| {
            let at = |i: usize| {
                let (d, row, head) = (i % dim, i / dim % page, i / (dim * page) % heads);
                ((i / (dim * page * heads) * page + row) * heads + head) * dim + d
            };
            (0..pages * page * heads * dim).map(|i| data[at(i)]).collect::<Vec<f32>>()
        };
        let (k, v) = (heads_first(&inputs.k, k_shape(&paged)), heads_first(&inputs.v, v_shape(&paged)));
        let k = fa_cpu::TensorRef::packed("k", &k, k_shape(&paged), TensorLayout::Bhsd).unwrap();
        let v = fa_cpu::TensorRef::packed("v", &v, v_shape(&paged), TensorLayout::Bhsd).unwrap();
        let q = inputs.views(&paged).q;
        let mut out = vec![f32::NAN; expected.out.len()];
        let mut to = TensorMut::packed("out", &mut out, out_shape(&paged), TensorLayout::Bshd).unwrap();
        forward_extras(Options::default(), &paged, &owned.view(), &q, &k, &v, &mut to, None).unwrap();
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&out), bits(&expected.out));
    }
}
