//! Values at the ends of each type's range, on every path: few queries and panels, f32 and 16 bits, every
//! instruction set.

use fa_core::{Alibi, Dtype, Lengths, Mask, Problem, ScoreMod, Types};
use fa_cpu::{Element, Extras, reference};
use half::{bf16, f16};

use crate::inputs::{Inputs, Views};
use crate::tiled::{Expected, Results, check_against, describe, isas};
use fa_cpu::tiled::Options;

/// One query, few, a panel and more, against fewer and more keys than a split has.
const LENGTHS: [(usize, usize); 5] = [(1, 40), (1, 700), (3, 600), (40, 130), (130, 70)];
const MASKS: [Mask; 4] = [Mask::FULL, Mask::CAUSAL, Mask::window(20, 3), Mask::causal_window(600)];

fn problem((queries, keys): (usize, usize), mask: Mask, dtype: Dtype) -> Problem {
    let square = Problem::square(1, 1, 4, 24, mask, dtype);
    square.with_lengths(Lengths::uniform(1, queries, keys)).with_heads_kv(2).with_head_dim_v(16)
}

fn all<T: Element>(
    dtype: Dtype,
    with_backward: bool,
    mut change: impl FnMut(&str, &mut Inputs<T>, &Problem) -> bool,
    names: &[&str],
) {
    let mut failures = vec![];
    for (turn, (lengths, mask)) in LENGTHS.into_iter().flat_map(|l| MASKS.map(|mask| (l, mask))).enumerate() {
        for name in names {
            let problem = problem(lengths, mask, dtype);
            let mut inputs = Inputs::<T>::random(&problem, turn as u64);
            if !change(name, &mut inputs, &problem) {
                continue;
            }
            let expected = Expected::compute(&problem, &inputs, with_backward);
            for isa in isas() {
                let name = format!("{name}: {}", describe(&problem));
                failures.extend(check_against(&name, &problem, &inputs, &expected, isa));
            }
        }
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

/// Infinities and NaN, seen or hidden, at the first, a middle and the last key.
fn not_finite<T: Element>(dtype: Dtype) {
    let names =
        ["k inf first", "k -inf mid", "k nan last", "v inf first", "v nan mid", "v -inf last", "q nan mid"];
    all::<T>(
        dtype,
        false,
        |name, inputs, problem| {
            let value = match name {
                _ if name.contains("nan") => f64::NAN,
                _ if name.contains("-inf") => f64::NEG_INFINITY,
                _ => f64::INFINITY,
            };
            let (values, row) = match &name[..1] {
                "k" => (&mut inputs.k, 2 * problem.head_dim),
                "v" => (&mut inputs.v, 2 * problem.head_dim_v),
                _ => (&mut inputs.q, 4 * problem.head_dim),
            };
            let rows = values.len() / row;
            let at = if name.ends_with("first") {
                0
            } else if name.ends_with("mid") {
                rows / 2
            } else {
                rows - 1
            };
            values[at * row + 5] = T::from_f64(value);
            true
        },
        &names,
    );
}

#[test]
fn infinities_and_nan_are_where_the_oracle_has_them_in_every_type() {
    not_finite::<f32>(Dtype::F32);
    not_finite::<f16>(Dtype::F16);
    not_finite::<bf16>(Dtype::Bf16);
}

/// Keys that hold -inf and queries that are positive: every score is -inf, no key is seen.
#[test]
fn rows_whose_scores_are_all_minus_infinity_are_rows_without_keys() {
    fn check<T: Element>(dtype: Dtype) {
        for lengths in LENGTHS {
            let problem = problem(lengths, Mask::FULL, dtype);
            let mut inputs = Inputs::<T>::random(&problem, 3);
            inputs.q.iter_mut().for_each(|value| *value = T::from_f64(value.to_f64().abs() + 0.1));
            inputs.k.iter_mut().for_each(|value| *value = T::from_f64(f64::NEG_INFINITY));
            let Views { q, k, v, .. } = inputs.views(&problem);
            let exact = reference::forward(&problem, &q, &k, &v).unwrap();
            assert!(exact.lse.iter().all(|&lse| lse == f64::NEG_INFINITY));
            for isa in isas() {
                let options = Options { isa: Some(isa), threads: None };
                let results = Results::compute(options, &problem, &inputs, false);
                let name = format!("{isa}: {}", describe(&problem));
                assert!(results.lse.iter().all(|&lse| lse == f32::NEG_INFINITY), "LSE of {name}");
                assert!(results.out.iter().all(|value| value.to_f64() == 0.0), "O of {name}");
            }
        }
    }
    check::<f32>(Dtype::F32);
    check::<f16>(Dtype::F16);
    check::<bf16>(Dtype::Bf16);
}

/// Tensors of the type's largest and smallest numbers, one of them at a time.
#[test]
fn large_and_tiny_values_keep_the_rule() {
    fn check<T: Element>(dtype: Dtype, large: f64, tiny: f64) {
        all::<T>(
            dtype,
            true,
            |name, inputs, _| {
                let scale = if name.ends_with("large") { large } else { tiny };
                let values = match name.split(' ').next() {
                    Some("q") => &mut inputs.q,
                    Some("k") => &mut inputs.k,
                    Some("v") => &mut inputs.v,
                    _ => &mut inputs.dout,
                };
                values.iter_mut().for_each(|value| *value = T::from_f64(value.to_f64() * scale));
                true
            },
            &["q tiny", "k tiny", "v large", "v tiny", "dout large", "dout tiny"],
        );
    }
    check::<f32>(Dtype::F32, 1e15, 1e-20);
    check::<f16>(Dtype::F16, 1e3, 1e-3);
    check::<bf16>(Dtype::Bf16, 1e15, 1e-20);
}

/// V of subnormal numbers: nothing is flushed to 0 where sums are f32.
#[test]
fn subnormal_values_survive_f32_sums() {
    for lengths in LENGTHS {
        let problem = problem(lengths, Mask::FULL, Dtype::F32);
        let problem = problem.with_types(Types::same(Dtype::F32));
        let mut inputs = Inputs::<f32>::random(&problem, 9);
        inputs.v.fill(3e-41);
        for isa in isas() {
            let options = Options { isa: Some(isa), threads: None };
            let out = Results::compute(options, &problem, &inputs, false).out;
            // Sums of P up to 1 times one number that has 14 bits left.
            assert!(out.iter().all(|&value| (value - 3e-41).abs() < 1e-42), "{isa}: {}", describe(&problem));
        }
    }
}

/// Values near the type's largest number: sums of P V before they are normalised are beyond f32, O is not.
#[test]
fn values_near_the_largest_give_the_mean_of_them() {
    fn check<T: Element>(dtype: Dtype, largest: f64, rounding: f64) {
        for (lengths, mask) in LENGTHS.into_iter().flat_map(|lengths| MASKS.map(|mask| (lengths, mask))) {
            let problem = problem(lengths, mask, dtype);
            let mut inputs = Inputs::<T>::random(&problem, 11);
            for (index, value) in inputs.v.iter_mut().enumerate() {
                let sign = if value.to_f64() < 0.0 && index % 16 > 7 { -1.0 } else { 1.0 };
                *value = T::from_f64(sign * largest * (1.0 - (index % 7) as f64 / 64.0));
            }
            let Views { q, k, v, .. } = inputs.views(&problem);
            let exact = reference::forward(&problem, &q, &k, &v).unwrap();
            for isa in isas() {
                let options = Options { isa: Some(isa), threads: None };
                let out = Results::compute(options, &problem, &inputs, false).out;
                for (got, want) in out.iter().map(|value| value.to_f64()).zip(&exact.out) {
                    let apart = (got - want).abs();
                    assert!(
                        apart <= rounding * largest,
                        "{isa}: {}: {got:e}, exactly {want:e}",
                        describe(&problem)
                    );
                }
            }
        }
    }
    check::<f32>(Dtype::F32, f64::from(f32::MAX), 2e-6);
    check::<bf16>(Dtype::Bf16, f64::from(bf16::MAX), 1e-2);
}

/// Slopes and sinks up to f32's largest number, among ordinary ones.
fn edges(heads: usize) -> [(Vec<f32>, Vec<f32>); 3] {
    let of = |values: [f32; 4]| (0..heads).map(|head| values[head % 4]).collect::<Vec<f32>>();
    [
        (of([3e38, 0.5, 1e30, 1e10]), of([3e38, -3e38, 0.5, 2.4e38])),
        (of([f32::MAX, 2.4e38, 1e5, 0.0]), of([f32::MAX, f32::MIN, -2.4e38, f32::NEG_INFINITY])),
        (of([1e36, 3e3, 1e20, 2e38]), of([1e10, -1e10, 2e38, -2e38])),
    ]
}

/// Outputs, LSE and gradients with slopes and sinks at the ends of f32's range: those of the oracle, and no
/// NaN.
#[test]
fn slopes_and_sinks_up_to_the_largest_number() {
    fn check<T: Element>(dtype: Dtype) {
        for (turn, (lengths, mask)) in
            LENGTHS.into_iter().flat_map(|lengths| MASKS.map(|mask| (lengths, mask))).enumerate()
        {
            for (slopes, sinks) in edges(4) {
                for (alibi, has_sinks) in [(true, false), (false, true), (true, true)] {
                    let score =
                        ScoreMod::NONE.with_alibi(alibi.then_some(Alibi::PerHead)).with_sinks(has_sinks);
                    let problem = problem(lengths, mask, dtype).with_score(score);
                    let rows = 4 * lengths.0;
                    let dlse: Vec<f32> = (0..rows).map(|row| (row % 7) as f32 / 4.0 - 0.75).collect();
                    let extras = Extras {
                        alibi_slopes: alibi.then_some(&slopes[..]),
                        sinks: has_sinks.then_some(&sinks[..]),
                        dlse: Some(&dlse),
                        ..Extras::NONE
                    };
                    let inputs = Inputs::<T>::random(&problem, turn as u64);
                    let Views { q, k, v, dout } = inputs.views(&problem);
                    let forward = Extras { dlse: None, ..extras };
                    let exact = reference::forward_extras(&problem, &forward, &q, &k, &v).unwrap();
                    let wanted = reference::backward_extras(&problem, &extras, &q, &k, &v, &dout).unwrap();
                    for isa in isas() {
                        let name = format!("{isa}, {}, {slopes:?}, {sinks:?}", describe(&problem));
                        let options = Options { isa: Some(isa), threads: None };
                        let got = Results::of(options, &problem, &extras, &inputs, true);
                        check_edges(&name, &problem, &got, &exact, &wanted);
                    }
                }
            }
        }
    }
    check::<f32>(Dtype::F32);
    check::<f16>(Dtype::F16);
    check::<bf16>(Dtype::Bf16);
}

/// Rows whose keys' exponents are within f32 are the oracle's. The others hold no NaN.
fn check_edges<T: Element>(
    name: &str,
    problem: &Problem,
    got: &Results<T>,
    exact: &reference::Forward,
    wanted: &reference::Gradients,
) {
    let (queries, dim) = (problem.lengths.max_q(), problem.head_dim_v);
    let room = if problem.types.q == Dtype::F32 { 1e-4 } else { 0.06 };
    let mut all_within = true;
    for (row, (&lse, &want)) in got.lse.iter().zip(&exact.lse).enumerate() {
        let (head, query) = (row / queries, row % queries);
        // A probability needs an LSE with its fractions.
        let within = want.abs() < 1e5 || want > 0.0 || want == f64::NEG_INFINITY;
        all_within &= within;
        if want.abs() < 2.3e38 || want > 0.0 || want == f64::NEG_INFINITY {
            let near = f64::from(lse) == want || (f64::from(lse) - want).abs() <= 1e-3 + 2e-6 * want.abs();
            assert!(near, "{name}: the LSE of query {query}, head {head} is {lse}, not {want}");
        }
        for column in 0..dim {
            let at = (query * problem.heads_q + head) * dim + column;
            let (got, want) = (got.out[at].to_f64(), exact.out[at]);
            let near = (got - want).abs() <= room * (1.0 + want.abs());
            assert!(got.is_finite() && (near || !within), "{name}: O of {query}, {head}: {got}, not {want}");
        }
    }
    for (tensor, got, want) in
        [("dq", &got.dq, &wanted.dq), ("dk", &got.dk, &wanted.dk), ("dv", &got.dv, &wanted.dv)]
    {
        let largest = want.iter().fold(1f64, |max, value| max.max(value.abs()));
        for (index, (got, want)) in got.iter().zip(want).enumerate() {
            let (got, near) = (got.to_f64(), (got.to_f64() - want).abs() <= room * largest);
            assert!(got.is_finite() && (near || !all_within), "{name}: {tensor}[{index}]: {got}, not {want}");
        }
    }
    for (head, (&got, &want)) in got.dsinks.iter().zip(&wanted.dsinks).enumerate() {
        let near = (f64::from(got) - want).abs() <= room * (4.0 + want.abs());
        assert!(got.is_finite() && (near || !all_within), "{name}: dsinks[{head}]: {got}, not {want}");
    }
}

/// Every score near the lowest that f32 has, all of a row alike: O is the mean of the values that a row sees.
#[test]
fn scores_near_the_lowest_of_f32_are_scores() {
    fn check<T: Element>(dtype: Dtype) {
        for (lengths, mask) in LENGTHS.into_iter().flat_map(|lengths| MASKS.map(|mask| (lengths, mask))) {
            // Products of 2^(a + b) and 24 of them: exponents to -3.3e38.
            for (q, k) in [(1.0, 60), (1.25, 61), (1.25, 58), (1.9, 40), (1.3, 15)] {
                let problem = problem(lengths, mask, dtype).with_softmax_scale(Some(1.0));
                let mut inputs = Inputs::<T>::random(&problem, 5);
                let side = 2f64.powi(k);
                inputs.q.fill(T::from_f64(q * side));
                inputs.k.fill(T::from_f64(-side));
                let Views { q, k, v, .. } = inputs.views(&problem);
                let exact = reference::forward(&problem, &q, &k, &v).unwrap();
                for isa in isas() {
                    let name = format!("{isa}: {}, scores {:e}", describe(&problem), exact.lse[0]);
                    let options = Options { isa: Some(isa), threads: None };
                    let got = Results::compute(options, &problem, &inputs, false);
                    for (row, (&lse, &want)) in got.lse.iter().zip(&exact.lse).enumerate() {
                        let lse = f64::from(lse);
                        let near = lse == want || (lse - want).abs() <= 1e-5 * want.abs();
                        assert!(near, "{name}: the LSE of {row} is {lse}, not {want}");
                    }
                    let room = if dtype == Dtype::F32 { 1e-5 } else { 0.03 };
                    for (got, want) in got.out.iter().zip(&exact.out) {
                        let (got, near) = (got.to_f64(), (got.to_f64() - want).abs() <= room);
                        assert!(near, "{name}: O is {got}, not {want}");
                    }
                }
            }
        }
    }
    check::<f32>(Dtype::F32);
    check::<bf16>(Dtype::Bf16);
}
