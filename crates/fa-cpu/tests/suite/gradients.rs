//! The oracle's gradients against central finite differences of its forward, all in f64.

use fa_core::{Dtype, Lengths, Mask, Problem, ScoreMod, Types};
use fa_cpu::reference;
use proptest::prelude::*;

use crate::inputs::{Inputs, assert_close};

/// Half the distance between the two points of a difference: the error is about its square plus 1e-16 over
/// it.
const STEP: f64 = 1e-5;
const TOLERANCE: f64 = 1e-8;

/// `sum(O * dO)`.
fn loss(problem: &Problem, inputs: &Inputs<f64>) -> f64 {
    let views = inputs.views(problem);
    let forward = reference::forward(problem, &views.q, &views.k, &views.v).unwrap();
    forward.out.iter().zip(&inputs.dout).map(|(out, dout)| out * dout).sum()
}

fn differences(
    problem: &Problem,
    inputs: &Inputs<f64>,
    select: fn(&mut Inputs<f64>) -> &mut Vec<f64>,
) -> Vec<f64> {
    let mut inputs = inputs.clone();
    (0..select(&mut inputs).len())
        .map(|index| {
            let value = select(&mut inputs)[index];
            let mut at = |point: f64| {
                select(&mut inputs)[index] = point;
                loss(problem, &inputs)
            };
            let slope = (at(value + STEP) - at(value - STEP)) / (2.0 * STEP);
            at(value);
            slope
        })
        .collect()
}

pub fn masks() -> impl Strategy<Value = Mask> {
    let side = || prop_oneof![Just(None), (0u32..6).prop_map(Some)];
    (side(), side()).prop_map(|(left, right)| Mask { left, right })
}

prop_compose! {
    fn problems()(
        batch in 1usize..3, seqlen_q in 1usize..6, seqlen_k in 1usize..6,
        heads_kv in 1usize..3, group in 1usize..3, head_dim in 1usize..5, head_dim_v in 1usize..4,
        mask in masks(),
        softmax_scale in prop_oneof![Just(None), (-1.5f64..1.5).prop_map(Some)],
        softcap in prop_oneof![Just(None), (0.5f64..5.0).prop_map(Some)],
    ) -> Problem {
        Problem {
            lengths: Lengths::uniform(batch, seqlen_q, seqlen_k), heads_q: heads_kv * group, heads_kv,
            head_dim, head_dim_v, mask, types: Types::same(Dtype::F32), softmax_scale,
            score: ScoreMod::softcap_or_none(softcap),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn gradients_are_what_finite_differences_say(problem in problems(), seed: u64) {
        let inputs = Inputs::<f64>::random(&problem, seed);
        let views = inputs.views(&problem);
        let gradients = reference::backward(&problem, &views.q, &views.k, &views.v, &views.dout).unwrap();
        assert_close("dq", &gradients.dq, &differences(&problem, &inputs, |inputs| &mut inputs.q), TOLERANCE);
        assert_close("dk", &gradients.dk, &differences(&problem, &inputs, |inputs| &mut inputs.k), TOLERANCE);
        assert_close("dv", &gradients.dv, &differences(&problem, &inputs, |inputs| &mut inputs.v), TOLERANCE);
    }
}
