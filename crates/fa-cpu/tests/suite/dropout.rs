//! Dropout: the oracle against attention written out with the bits of each place, gradients against finite
//! differences, and the tiled path against the oracle.

use fa_core::program::OwnedInputs;
use fa_core::{Dropout, Dtype, Lengths, Mask, Problem, ScoreMod, Types};
use fa_cpu::reference;
use fa_cpu::{Arguments, OwnedExtras};

use crate::inputs::{Inputs, Views, assert_close};
use crate::programs::check;
use crate::varied::{Lie, problem};

/// A tensor of the inputs.
type Of = fn(&mut Inputs<f64>) -> &mut Vec<f64>;

fn dropped(problem: Problem, p: f64, seed: u64) -> Problem {
    let dropout = Dropout::new(p, seed, 11).unwrap();
    problem.with_score(dropout.of(problem.score).unwrap())
}

/// O of each query by its definition, and sum(O * dO).
fn dense(problem: &Problem, inputs: &Inputs<f64>) -> (Vec<f64>, f64) {
    let Problem { lengths, heads_q, head_dim, head_dim_v, mask, .. } = *problem;
    let dropout = problem.score.dropout.unwrap();
    let (rows, keys, group) = (lengths.max_q(), lengths.max_k(), problem.group_size());
    let (mut out, mut loss) = (vec![0.0; lengths.sequences() * rows * heads_q * head_dim_v], 0.0);
    for b in 0..lengths.sequences() {
        for h in 0..heads_q {
            for q in 0..rows {
                let at_q = ((b * rows + q) * heads_q + h) * head_dim;
                let at_k = |k: usize| (b * keys + k) * problem.heads_kv + h / group;
                let seen: Vec<usize> = mask.keys(q, rows, keys).collect();
                let score = |&k: &usize| {
                    let dot: f64 =
                        (0..head_dim).map(|d| inputs.q[at_q + d] * inputs.k[at_k(k) * head_dim + d]).sum();
                    (dot * problem.scale()).exp()
                };
                let exps: Vec<f64> = seen.iter().map(score).collect();
                let sum: f64 = exps.iter().sum();
                for (&k, exp) in seen.iter().zip(&exps) {
                    let kept = dropout.kept().keeps(b * heads_q + h, q, k);
                    let p = if kept { exp / sum * f64::from(dropout.factor()) } else { 0.0 };
                    for d in 0..head_dim_v {
                        let at = ((b * rows + q) * heads_q + h) * head_dim_v + d;
                        let term = p * inputs.v[at_k(k) * head_dim_v + d];
                        out[at] += term;
                        loss += term * inputs.dout[at];
                    }
                }
            }
        }
    }
    (out, loss)
}

#[test]
fn the_oracle_is_attention_with_the_bits_of_each_place() {
    for (turn, (mask, heads, lens, p)) in [
        (Mask::FULL, (2, 1), (19, 41), 0.1),
        (Mask::CAUSAL, (3, 3), (37, 35), 0.5),
        (Mask::window(6, 1), (4, 2), (9, 70), 0.9),
    ]
    .into_iter()
    .enumerate()
    {
        let plain = Problem::new(Lengths::uniform(2, lens.0, lens.1), heads, (8, 4), Types::same(Dtype::F32))
            .with_mask(mask);
        let problem = dropped(plain, p, 70 + turn as u64);
        let inputs = Inputs::<f64>::random(&plain, turn as u64);
        let drawn = OwnedInputs::drawn(&problem, 0).unwrap();
        let own = drawn.view(&problem.score.program.unwrap()).unwrap();
        let arguments = Arguments { program: Some(&own), ..Arguments::default() };
        let Views { q, k, v, dout } = inputs.views(&plain);
        let forward = reference::forward_extras(&problem, arguments, &q, &k, &v).unwrap();
        let (out, _) = dense(&problem, &inputs);
        assert_close("out", &forward.out, &out, 1e-12);
        // The LSE is that without dropout.
        assert_close("lse", &forward.lse, &reference::forward(&plain, &q, &k, &v).unwrap().lse, 1e-12);

        let found = reference::backward_extras(&problem, arguments, &q, &k, &v, &dout).unwrap();
        let tensors: [(&str, &[f64], Of); 3] = [
            ("dq", &found.dq, |inputs| &mut inputs.q),
            ("dk", &found.dk, |inputs| &mut inputs.k),
            ("dv", &found.dv, |inputs| &mut inputs.v),
        ];
        for (name, gradient, of) in tensors {
            for at in (0..gradient.len()).step_by(gradient.len() / 7) {
                let moved = |by: f64| {
                    let mut inputs = inputs.clone();
                    of(&mut inputs)[at] += by;
                    dense(&problem, &inputs).1
                };
                let difference = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                assert!(
                    (gradient[at] - difference).abs() < 1e-7,
                    "{name}[{at}]: {} {difference}",
                    gradient[at]
                );
            }
        }
    }
}

#[test]
fn tiles_drop_what_the_oracle_drops() {
    const LENS: [(usize, usize); 4] = [(13, 29), (0, 5), (7, 0), (31, 17)];
    for (turn, mask) in [Mask::FULL, Mask::CAUSAL, Mask::window(9, 2)].into_iter().enumerate() {
        let heads = [(4, 2), (3, 3), (4, 1)][turn];
        let scores = [ScoreMod::NONE, ScoreMod::softcap(2.0), ScoreMod::NONE];
        let base = Problem::new(Lengths::uniform(2, 129, 137), heads, (16, 8), Types::same(Dtype::F32))
            .with_mask(mask)
            .with_score(scores[turn]);
        let base = dropped(base, [0.1, 0.5, 0.2][turn], turn as u64);
        check::<f32>(&base, &OwnedExtras::NONE, 3);
        check::<half::bf16>(&base.with_types(Types::same(Dtype::Bf16)), &OwnedExtras::NONE, 4);
        let (varied, owned) = problem(base, &LENS, [Lie::Packed, Lie::Packed], 5);
        check::<f32>(&varied, &owned, 6);
    }
}
