//! The tiled implementation against the oracle by the tolerance rule: one `check`, many lists of cases.

use fa_core::{Dtype, Problem, TensorLayout};
use fa_cpu::check::{k_shape, lse_len, out_shape, q_shape, v_shape};
use fa_cpu::compare::{compare, compare_lse, rounding_step};
use fa_cpu::reference::{self, Forward, Gradients, low_precision};
use fa_cpu::simd::Isa;
use fa_cpu::tiled::{BackwardInputs, Options, backward_extras, forward_extras};
use fa_cpu::{Element, Extras, TensorMut};

use crate::inputs::{Inputs, Views, bshd};

/// What an implementation is measured by: the exact results and the low-precision ones.
pub(crate) struct Expected<T> {
    pub forward: Forward,
    pub low: low_precision::LowForward<T>,
    pub backward: Option<(Gradients, low_precision::LowGradients<T>)>,
}

impl<T: Element> Expected<T> {
    pub(crate) fn compute(problem: &Problem, inputs: &Inputs<T>, with_backward: bool) -> Self {
        let Views { q, k, v, dout } = inputs.views(problem);
        let backward = || {
            let exact = reference::backward(problem, &q, &k, &v, &dout).unwrap();
            (exact, low_precision::backward(problem, &q, &k, &v, &dout).unwrap())
        };
        Expected {
            forward: reference::forward(problem, &q, &k, &v).unwrap(),
            low: low_precision::forward(problem, &q, &k, &v).unwrap(),
            backward: with_backward.then(backward),
        }
    }
}

/// What the tiled implementation makes of a problem, packed BSHD.
#[derive(Clone, Debug)]
pub(crate) struct Results<T> {
    pub out: Vec<T>,
    pub lse: Vec<f32>,
    pub dq: Vec<T>,
    pub dk: Vec<T>,
    pub dv: Vec<T>,
    pub dsinks: Vec<f32>,
}

impl<T: Element> Results<T> {
    /// [`Results::of`] a problem without extras.
    pub(crate) fn compute(
        options: Options,
        problem: &Problem,
        inputs: &Inputs<T>,
        with_backward: bool,
    ) -> Self {
        Self::of(options, problem, &Extras::NONE, inputs, with_backward)
    }

    /// Every output is NaN before it is written. Without a backward the gradients are empty.
    pub(crate) fn of(
        options: Options,
        problem: &Problem,
        extras: &Extras<'_>,
        inputs: &Inputs<T>,
        with_backward: bool,
    ) -> Self {
        fn writable<T: Element>(data: &mut [T], shape: [usize; 4]) -> TensorMut<'_, T> {
            TensorMut::packed("output", data, shape, TensorLayout::Bshd)
                .expect("the data has the shape's length")
        }
        let Views { q, k, v, dout } = inputs.views(problem);
        let poisoned = |shape: [usize; 4]| vec![T::from_f64(f64::NAN); shape.iter().product()];
        let (mut out, mut lse) = (poisoned(out_shape(problem)), vec![f32::NAN; lse_len(problem)]);
        let mut to_out = writable(&mut out, out_shape(problem));
        let of_forward = Extras { dlse: None, ..*extras };
        forward_extras(options, problem, &of_forward, &q, &k, &v, &mut to_out, Some(&mut lse)).unwrap();
        if !with_backward {
            return Results { out, lse, dq: vec![], dk: vec![], dv: vec![], dsinks: vec![] };
        }
        let [mut dq, mut dk, mut dv] = [q_shape(problem), k_shape(problem), v_shape(problem)].map(poisoned);
        let mut dsinks = vec![f32::NAN; if problem.score.sinks { problem.heads_q } else { 0 }];
        let inputs = BackwardInputs { q, k, v, out: bshd("out", &out, out_shape(problem)), lse: &lse, dout };
        let (to_dq, to_dk, to_dv) = (
            &mut writable(&mut dq, q_shape(problem)),
            &mut writable(&mut dk, k_shape(problem)),
            &mut writable(&mut dv, v_shape(problem)),
        );
        let to_dsinks = problem.score.sinks.then_some(&mut dsinks[..]);
        backward_extras(options, problem, extras, &inputs, to_dq, to_dk, to_dv, to_dsinks).unwrap();
        Results { out, lse, dq, dk, dv, dsinks }
    }

    /// The bits of everything, to compare runs.
    pub(crate) fn bits(&self) -> Vec<u64> {
        let tensors = [&self.out, &self.dq, &self.dk, &self.dv].into_iter().flatten();
        let tensors = tensors.map(|value| value.to_f64().to_bits());
        tensors.chain(self.lse.iter().map(|lse| u64::from(lse.to_bits()))).collect()
    }

    /// One line for each tensor that breaks the rule: gradients, that of the worst of all draws.
    pub(crate) fn failures(
        &self,
        name: &str,
        problem: &Problem,
        inputs: &Inputs<T>,
        expected: &Expected<T>,
    ) -> Vec<String> {
        let failures = self.by_one_draw(name, problem, expected);
        let (Some((exact, _)), false) = (&expected.backward, failures.is_empty()) else { return failures };
        let Views { q, k, v, dout } = inputs.views(problem);
        let worst = low_precision::backward_worst(problem, &Extras::NONE, &q, &k, &v, &dout, exact).unwrap();
        let backward = Some((exact.clone(), worst));
        let (forward, low) = (expected.forward.clone(), expected.low.clone());
        self.by_one_draw(name, problem, &Expected { forward, low, backward })
    }

    /// The same by the low-precision gradients as they stand.
    pub(crate) fn by_one_draw(&self, name: &str, problem: &Problem, expected: &Expected<T>) -> Vec<String> {
        let dtype = problem.types.q;
        let lse_shape = [problem.lengths.sequences(), problem.heads_q, problem.lengths.max_q()];
        let of = |shape, ours: &[T], exact: &[f64], low: &[T], noise: f64| {
            compare(shape, dtype, ours, exact, Some(low)).unwrap().allowing(noise)
        };
        let (exact, low) = (&expected.forward, &expected.low);
        let mut found = vec![
            ("lse", compare_lse(lse_shape, dtype, &self.lse, &exact.lse).unwrap()),
            ("out", of(out_shape(problem), &self.out, &exact.out, &low.out, exact.out_noise)),
        ];
        if let Some((exact, low)) = &expected.backward {
            found.extend([
                ("dq", of(q_shape(problem), &self.dq, &exact.dq, &low.dq, exact.dq_noise)),
                ("dk", of(k_shape(problem), &self.dk, &exact.dk, &low.dk, exact.dk_noise)),
                ("dv", of(v_shape(problem), &self.dv, &exact.dv, &low.dv, exact.dv_noise)),
            ]);
        }
        let failed = found.into_iter().filter(|(_, comparison)| !comparison.passed());
        failed.map(|(tensor, comparison)| format!("{name} {tensor}: {comparison}")).collect()
    }
}

/// Instruction sets of this CPU.
pub(crate) fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

/// The rule, for given expectations, with one instruction set.
pub(crate) fn check_against<T: Element>(
    name: &str,
    problem: &Problem,
    inputs: &Inputs<T>,
    expected: &Expected<T>,
    isa: Isa,
) -> Vec<String> {
    let options = Options { isa: Some(isa), threads: None };
    let results = Results::compute(options, problem, inputs, expected.backward.is_some());
    results.failures(&format!("{name} {isa}"), problem, inputs, expected)
}

/// One problem on random inputs: the rule for every tensor, the exact zeros of rows that see nothing with it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub problem: Problem,
    pub with_backward: bool,
    /// Every instruction set that the CPU has, or only the best.
    pub all_isas: bool,
}

/// Runs the case in its dtype; one line for each broken tensor.
pub(crate) fn check(case: &Case) -> Vec<String> {
    fn typed<T: Element>(case: &Case) -> Vec<String> {
        let problem = &case.problem;
        let name = describe(problem);
        let seed = name.bytes().fold(7u64, |seed, byte| seed.wrapping_mul(31).wrapping_add(u64::from(byte)));
        let inputs = Inputs::<T>::random(problem, seed);
        let expected = Expected::compute(problem, &inputs, case.with_backward);
        let isas: Vec<Isa> = if case.all_isas { isas().collect() } else { vec![Isa::detect()] };
        isas.iter().flat_map(|&isa| check_against(&name, problem, &inputs, &expected, isa)).collect()
    }
    in_dtype!(case.problem.types.q, T => typed::<T>(case))
}

/// Runs all cases and fails with every broken one.
pub(crate) fn check_all(cases: impl IntoIterator<Item = Case>) {
    let (mut count, mut failures) = (0, Vec::new());
    for case in cases {
        count += 1;
        failures.extend(check(&case));
    }
    assert!(failures.is_empty(), "{} failures in {count} cases:\n{}", failures.len(), failures.join("\n"));
    assert!(count > 0);
}

pub(crate) fn describe(problem: &Problem) -> String {
    let Problem { heads_q, heads_kv, head_dim, head_dim_v, mask, .. } = problem;
    let (batch, seqlen_q, seqlen_k, dtype) =
        (problem.lengths.sequences(), problem.lengths.max_q(), problem.lengths.max_k(), problem.types.q);
    let cap = problem.score.softcap.map_or(String::new(), |cap| format!(" cap {cap}"));
    format!(
        "{dtype} b{batch} {seqlen_q}x{seqlen_k} h{heads_q}:{heads_kv} d{head_dim}-{head_dim_v} {mask}{cap} \
         scale {:.3}",
        problem.scale()
    )
}

/// Whether an instruction set's products take 16-bit numbers, so that the probabilities are rounded too.
fn rounds_p(isa: Isa, dtype: Dtype) -> bool {
    matches!(isa, Isa::Avx512Bf16 | Isa::Amx) && dtype == Dtype::Bf16
}

/// Every 16-bit output is the f64 result with one rounding: of itself, and of each probability where these
/// are rounded. f32 sums of values up to 4 leave a little of their own.
pub(crate) fn one_rounding_from_f64<T: Element>(problem: &Problem, inputs: &Inputs<T>) -> Vec<String> {
    let dtype = problem.types.q;
    let Views { q, k, v, .. } = inputs.views(problem);
    let exact = reference::forward(problem, &q, &k, &v).unwrap().out;
    let magnitudes: Vec<T> = inputs.v.iter().map(|value| T::from_f64(value.to_f64().abs())).collect();
    // sum_j P_ij |V_j|, of which rounded probabilities lose one rounding.
    let terms = reference::forward(problem, &q, &k, &bshd("v", &magnitudes, v_shape(problem))).unwrap().out;
    // A score's own rounding is relative to it, and what it loses P loses: scores of unit normal Q and K
    // spread by scale * sqrt(head dim), which is 1 where the problem sets no scale.
    let spread = (problem.scale().abs() * (problem.head_dim as f64).sqrt()).max(1.0);
    let of_sums = 4e-6 * (0.75 + 0.25 * spread);
    let mut failures = vec![];
    for isa in isas() {
        let options = Options { isa: Some(isa), threads: None };
        let out = Results::compute(options, problem, inputs, false).out;
        let of_p = if rounds_p(isa, dtype) { dtype.unit_roundoff() } else { 0.0 };
        for (index, ((out, &exact), &terms)) in out.iter().zip(&exact).zip(&terms).enumerate() {
            // f32 arithmetic loses a part of the terms too, whatever they cancel to.
            let room = rounding_step(dtype, exact) + of_p * terms + of_sums * terms.max(1.0);
            if (out.to_f64() - exact).abs() > room {
                let name = describe(problem);
                failures.push(format!("{name} {isa} out[{index}] is {} for {exact}: {room:e}", out.to_f64()));
            }
        }
    }
    failures
}
