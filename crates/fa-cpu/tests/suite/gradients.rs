//! The oracle's gradients against central finite differences of its forward, all in f64.

use fa_core::{Alibi, Dtype, Lengths, Mask, Problem, ScoreMod, Types};
use fa_cpu::check::lse_len;
use fa_cpu::{CpuError, Extras, reference};
use proptest::prelude::*;

use crate::inputs::{Inputs, Random, assert_close};

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

fn differences(problem: &Problem, inputs: &Inputs<f64>, select: Select) -> Vec<f64> {
    let mut inputs = inputs.clone();
    let count = select(&mut inputs).len();
    differences_of(&mut inputs, count, select, |inputs| loss(problem, inputs))
}

/// Central differences of `loss` in each of `count` values.
fn differences_of(
    inputs: &mut Inputs<f64>,
    count: usize,
    select: Select,
    loss: impl Fn(&Inputs<f64>) -> f64,
) -> Vec<f64> {
    let slope = |index: usize| {
        let value = select(inputs)[index];
        let mut at = |point: f64| {
            select(inputs)[index] = point;
            loss(inputs)
        };
        let slope = (at(value + STEP) - at(value - STEP)) / (2.0 * STEP);
        select(inputs)[index] = value;
        slope
    };
    (0..count).map(slope).collect()
}

pub(crate) fn masks() -> impl Strategy<Value = Mask> {
    let side = || prop_oneof![Just(None), (0u32..6).prop_map(Some)];
    let offset = prop_oneof![3 => Just(0), 1 => -8i64..9];
    (side(), side(), offset).prop_map(|(left, right, offset)| Mask::band(left, right).with_offset(offset))
}

prop_compose! {
    fn problems()(
        batch in 1usize..3, seqlen_q in 1usize..6, seqlen_k in 1usize..6,
        heads_kv in 1usize..3, group in 1usize..3, head_dim in 1usize..5, head_dim_v in 1usize..4,
        mask in masks(),
        softmax_scale in prop_oneof![Just(None), (-1.5f64..1.5).prop_map(Some)],
        softcap in prop_oneof![Just(None), (0.5f64..5.0).prop_map(Some)],
    ) -> Problem {
        Problem::new(
            Lengths::uniform(batch, seqlen_q, seqlen_k),
            (heads_kv * group, heads_kv),
            (head_dim, head_dim_v),
            Types::same(Dtype::F32),
        )
        .with_mask(mask)
        .with_softmax_scale(softmax_scale)
        .with_score(ScoreMod::NONE.with_softcap(softcap))
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Rows that see nothing have none, whatever is given.
    #[test]
    fn gradients_through_the_lse_are_what_finite_differences_say(problem in problems(), seed: u64) {
        let mut inputs = Inputs::<f64>::random(&problem, seed);
        let mut random = Random::new(seed);
        let dlse: Vec<f32> = (0..lse_len(&problem)).map(|_| random.normal() as f32).collect();
        let extras = Extras { dlse: Some(&dlse), ..Extras::NONE };
        let views = inputs.views(&problem);
        let found =
            reference::backward_extras(&problem, &extras, &views.q, &views.k, &views.v, &views.dout).unwrap();
        let refused = reference::forward_extras(&problem, &extras, &views.q, &views.k, &views.v);
        prop_assert!(matches!(refused, Err(CpuError::Extra { name: "dlse", .. })), "a forward has none");
        assert_differences(&problem, &mut inputs, &extras, &found);
    }
}

/// One of the inputs.
type Select = fn(&mut Inputs<f64>) -> &mut Vec<f64>;

/// dQ, dK and dV are what [`loss_of`] says of small steps.
fn assert_differences(
    problem: &Problem,
    inputs: &mut Inputs<f64>,
    extras: &Extras<'_>,
    found: &reference::Gradients,
) {
    let fields: [(&str, &[f64], Select); 3] = [
        ("dq", &found.dq, |inputs| &mut inputs.q),
        ("dk", &found.dk, |inputs| &mut inputs.k),
        ("dv", &found.dv, |inputs| &mut inputs.v),
    ];
    for (name, gradient, select) in fields {
        let loss = |inputs: &Inputs<f64>| loss_of(problem, inputs, extras);
        let differences = differences_of(inputs, gradient.len(), select, loss);
        assert_close(name, gradient, &differences, TOLERANCE);
    }
}

/// `sum(O * dO)`, and of the rows that see something `sum(LSE * dLSE)`, with slopes and sinks.
fn loss_of(problem: &Problem, inputs: &Inputs<f64>, extras: &Extras<'_>) -> f64 {
    let views = inputs.views(problem);
    let alone = Extras { dlse: None, ..*extras };
    let forward = reference::forward_extras(problem, &alone, &views.q, &views.k, &views.v).unwrap();
    let of_out: f64 = forward.out.iter().zip(&inputs.dout).map(|(out, dout)| out * dout).sum();
    let of_lse = forward.lse.iter().zip(extras.dlse.unwrap_or(&[])).filter(|(lse, _)| lse.is_finite());
    of_out + of_lse.map(|(lse, &dlse)| lse * f64::from(dlse)).sum::<f64>()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// The gradients of the sinks too: these are f32, so their step is one that f32 holds exactly.
    #[test]
    fn gradients_with_slopes_and_sinks_are_what_finite_differences_say(problem in problems(), seed: u64) {
        let score = problem.score.with_alibi(Some(Alibi::PerSequenceHead)).with_sinks(true);
        let problem = problem.with_score(score);
        let mut random = Random::new(seed);
        let count = problem.lengths.sequences() * problem.heads_q;
        let slopes: Vec<f32> = (0..count).map(|_| random.uniform() as f32).collect();
        let eighths = (0..problem.heads_q).map(|_| (8.0 * random.normal()).round() as f32 / 8.0);
        let sinks: Vec<f32> = eighths.collect();
        let mut inputs = Inputs::<f64>::random(&problem, seed);
        let views = inputs.views(&problem);
        let eighths = (0..lse_len(&problem)).map(|_| (8.0 * random.normal()).round() as f32 / 8.0);
        let dlse: Vec<f32> = eighths.collect();
        let dlse = seed.is_multiple_of(2).then_some(&dlse[..]);
        let extras = Extras { alibi_slopes: Some(&slopes), sinks: Some(&sinks), dlse, ..Extras::NONE };
        let found =
            reference::backward_extras(&problem, &extras, &views.q, &views.k, &views.v, &views.dout).unwrap();
        assert_differences(&problem, &mut inputs, &extras, &found);
        const SINK_STEP: f32 = 1.0 / 4096.0;
        let differences: Vec<f64> = (0..sinks.len())
            .map(|head| {
                let at = |step: f32| {
                    let mut sinks = sinks.clone();
                    sinks[head] += step;
                    loss_of(&problem, &inputs, &Extras { sinks: Some(&sinks), ..extras })
                };
                (at(SINK_STEP) - at(-SINK_STEP)) / (2.0 * f64::from(SINK_STEP))
            })
            .collect();
        assert_close("dsinks", &found.dsinks, &differences, 1e-6);
    }
}
