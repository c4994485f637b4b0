//! What gradients should be, and whether they are: the f64 oracle and its low-precision twin, a K/V head with all of its query
//! heads at a time; all of them, or, where that would take long, the first, the last and some between.

use fa_core::{Problem, Strides};
use fa_cpu::compare::{self, Verdict};
use fa_cpu::reference::{self, low_precision};
use fa_cpu::{CpuError, TensorRef};
use rayon::prelude::*;

use super::oracle::Judgement;
use crate::cuda::{Gradients, Half, Inputs};
use crate::random::Random;

/// Operations of the backward (by [`Problem::flops_backward`]) that an oracle spends on a case at most, by and large.
const BUDGET: f64 = 2e9;

const NAMES: [&str; 3] = ["dQ", "dK", "dV"];

/// The expected gradients of some or all K/V heads.
pub struct GradientOracle<T> {
    /// Batch entry and K/V head.
    heads: Vec<(usize, usize)>,
    exact: [Vec<f64>; 3],
    low: [Vec<T>; 3],
    noise: [f64; 3],
}

/// One K/V head with its query heads as a problem of its own.
fn part(problem: &Problem) -> Problem {
    Problem { batch: 1, heads_q: problem.group_size(), heads_kv: 1, ..*problem }
}

/// Heads, sequence and dim of dQ, dK and dV of a part and of the whole.
fn shapes(problem: &Problem) -> [[usize; 4]; 3] {
    use fa_cpu::check::{k_shape, q_shape, v_shape};
    [q_shape(problem), k_shape(problem), v_shape(problem)]
}

impl<T: Half> GradientOracle<T> {
    /// Computes the oracle for `inputs` and `dout` (packed BSHD).
    ///
    /// # Errors
    /// Inputs that do not fit their problem.
    pub fn new(inputs: &Inputs<T>, dout: &[T], seed: u64) -> Result<GradientOracle<T>, CpuError> {
        let problem = &inputs.problem;
        let heads = choose(problem, seed);
        let computed: Vec<_> =
            heads.par_iter().map(|&head| expected(inputs, dout, head)).collect::<Result<_, CpuError>>()?;
        let mut oracle =
            GradientOracle { heads, exact: Default::default(), low: Default::default(), noise: [0.0; 3] };
        for (exact, low) in computed {
            let noise = [exact.dq_noise, exact.dk_noise, exact.dv_noise];
            for (i, values) in [exact.dq, exact.dk, exact.dv].into_iter().enumerate() {
                oracle.exact[i].extend(values);
                oracle.noise[i] = oracle.noise[i].max(noise[i]);
            }
            for (i, values) in [low.dq, low.dk, low.dv].into_iter().enumerate() {
                oracle.low[i].extend(values);
            }
        }
        Ok(oracle)
    }

    /// Compares what a backward wrote: the chosen heads by the rule of [`compare`], and of all others that they are written and
    /// that queries without a key and keys without a query have the gradient 0.
    ///
    /// # Errors
    /// Gradients that do not fit the problem.
    pub fn judge(&self, problem: &Problem, gradients: &Gradients<T>) -> Result<Judgement, CpuError> {
        let own = shapes(&part(problem));
        let mut faults = Vec::new();
        let mut figures = Vec::new();
        let mut worst: f64 = 0.0;
        for (i, whole) in shapes(problem).into_iter().enumerate() {
            let [_, seqlen, heads, dim] = own[i];
            let mut values = Vec::with_capacity(self.exact[i].len());
            for &(batch, head) in &self.heads {
                for s in 0..seqlen {
                    let from = ((batch * seqlen + s) * whole[2] + head * heads) * dim;
                    values.extend_from_slice(&gradients.values[i][from..from + heads * dim]);
                }
            }
            let shape = [self.heads.len(), seqlen, heads, dim];
            let found = compare::compare(shape, problem.dtype, &values, &self.exact[i], Some(&self.low[i]))?
                .allowing(self.noise[i]);
            if found.verdict != Verdict::Pass {
                let at = found.first_mismatch.or(found.worst);
                faults.push(format!("{}: {found}, at {at:?} of {} heads", NAMES[i], self.heads.len()));
            }
            let ratio = found.max_abs / found.tolerance;
            worst = worst.max(if ratio.is_finite() { ratio } else { 0.0 });
            figures.push(format!("{} {:.2e} of {:.2e}", NAMES[i], found.max_abs, found.tolerance));
            let missing = gradients.values[i]
                .par_chunks(dim.max(1))
                .position_first(|row| row.iter().any(|x| x.to_f32().is_nan()));
            if let Some(row) = missing {
                faults.push(format!(
                    "{} holds NaN in row {row} of [batch, seqlen, heads]: not written",
                    NAMES[i]
                ));
            }
        }
        faults.extend(alone(problem, &gradients.values));
        if gradients.strays > 0 {
            faults.push(format!("{} elements between the rows were written", gradients.strays));
        }
        let passed = faults.is_empty();
        let detail = if passed {
            format!("{}, {} heads", figures.join(", "), self.heads.len())
        } else {
            faults.join("; ")
        };
        Ok(Judgement { passed, ratio: worst, detail })
    }
}

/// The first query that sees no key, or key that no query sees, that has a gradient.
fn alone<T: Half>(problem: &Problem, gradients: &[Vec<T>; 3]) -> Option<String> {
    let Problem { seqlen_q, seqlen_k, mask, .. } = *problem;
    let blind = |row: usize| mask.keys(row, seqlen_q, seqlen_k).is_empty();
    let unseen = |key: usize| mask.m_blocks(key..key + 1, seqlen_q, seqlen_k, 1).is_empty();
    let is_alone: [&(dyn Fn(usize) -> bool + Sync); 3] = [&blind, &unseen, &unseen];
    shapes(problem).into_iter().enumerate().find_map(|(i, [_, seqlen, heads, dim])| {
        gradients[i].par_chunks(dim).enumerate().find_map_first(|(index, values)| {
            let (batch, row, head) = (index / heads / seqlen, index / heads % seqlen, index % heads);
            let fault = values.iter().any(|x| x.to_f32() != 0.0) && is_alone[i](row);
            fault.then(|| {
                format!("batch {batch} row {row} head {head} is in no pair and {} is not 0", NAMES[i])
            })
        })
    })
}

fn choose(problem: &Problem, seed: u64) -> Vec<(usize, usize)> {
    let Problem { batch, heads_kv, .. } = *problem;
    let all = batch * heads_kv;
    if all == 0 {
        return Vec::new();
    }
    let cost = part(problem).flops_backward() + 1e5;
    let affordable = (BUDGET / cost) as usize;
    if all <= affordable.max(1) {
        return (0..all).map(|i| (i / heads_kv, i % heads_kv)).collect();
    }
    let mut chosen = vec![0, all - 1];
    let mut random = Random::new(seed);
    chosen.extend((2..affordable.min(64)).map(|_| random.below(all)));
    // Where one head is beyond the budget, the last alone.
    if affordable < 2 {
        chosen.remove(0);
    }
    chosen.sort_unstable();
    chosen.dedup();
    chosen.into_iter().map(|i| (i / heads_kv, i % heads_kv)).collect()
}

/// Where a kernel may hold the weights of the forward when it rounds them, against the row's maximum; a factor of two changes nothing.
const HELD_AT: [f32; 3] = [1.0, 1.26, 1.587];

type Expected<T> = (reference::Gradients, low_precision::LowGradients<T>);

fn expected<T: Half>(
    inputs: &Inputs<T>,
    dout: &[T],
    (batch, head): (usize, usize),
) -> Result<Expected<T>, CpuError> {
    let whole = &inputs.problem;
    let own = part(whole);
    let view = |name, values, seqlen: usize, heads: usize, own_heads: usize, dim: usize| {
        let strides = Strides { batch: 0, seq: (heads * dim) as i64, head: dim as i64, dim: 1 };
        let from = (batch * seqlen * heads + head * own_heads) * dim;
        TensorRef::new(name, from_of(values, from), [1, seqlen, own_heads, dim], strides)
    };
    let (group, Problem { seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v, .. }) =
        (whole.group_size(), *whole);
    let q = view("q", &inputs.values[0], seqlen_q, heads_q, group, head_dim)?;
    let k = view("k", &inputs.values[1], seqlen_k, heads_kv, 1, head_dim)?;
    let v = view("v", &inputs.values[2], seqlen_k, heads_kv, 1, head_dim_v)?;
    let dout = view("dout", dout, seqlen_q, heads_q, group, head_dim_v)?;
    let exact = reference::backward(&own, &q, &k, &v, &dout)?;
    let draws: Vec<low_precision::LowGradients<T>> = HELD_AT
        .iter()
        .map(|&held| low_precision::backward_held_at(&own, &q, &k, &v, &dout, held))
        .collect::<Result<_, CpuError>>()?;
    let low = low_precision::LowGradients {
        dq: farthest(&exact.dq, draws.iter().map(|low| &low.dq[..])),
        dk: farthest(&exact.dk, draws.iter().map(|low| &low.dk[..])),
        dv: farthest(&exact.dv, draws.iter().map(|low| &low.dv[..])),
    };
    Ok((exact, low))
}

/// Of each element the draw that is farthest from `exact`.
fn farthest<'a, T: Half>(exact: &[f64], draws: impl Iterator<Item = &'a [T]> + Clone) -> Vec<T> {
    let off = |value: &T, exact: f64| (f64::from(value.to_f32()) - exact).abs();
    let at = |(index, &exact): (usize, &f64)| {
        let values = draws.clone().map(|draw| draw[index]);
        values.max_by(|a, b| off(a, exact).total_cmp(&off(b, exact))).expect("there are draws")
    };
    exact.iter().enumerate().map(at).collect()
}

/// What is behind an element; nothing where the tensor is empty.
fn from_of<T>(values: &[T], from: usize) -> &[T] {
    &values[from.min(values.len())..]
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Mask, TensorLayout};
    use half::bf16;

    use super::*;
    use crate::cuda::random_dout;

    #[test]
    fn the_low_precision_gradients_pass_and_a_wrong_element_does_not() {
        let base = Problem { heads_kv: 2, ..Problem::square(2, 37, 6, 16, Mask::CAUSAL, Dtype::Bf16) };
        for problem in [
            base,
            Problem { mask: Mask::FULL, seqlen_k: 20, head_dim_v: 8, ..base },
            Problem { seqlen_q: 50, ..base },
        ] {
            let inputs = Inputs::<bf16>::random(&problem, TensorLayout::Bshd, 5);
            let dout = random_dout::<bf16>(&inputs, 5);
            let oracle = GradientOracle::new(&inputs, &dout, 1).unwrap();
            let [q, k, v, out] = crate::cuda::shapes(&problem);
            let view =
                |name, values, shape| TensorRef::packed(name, values, shape, TensorLayout::Bshd).unwrap();
            let low = low_precision::backward(
                &problem,
                &view("q", &inputs.values[0], q),
                &view("k", &inputs.values[1], k),
                &view("v", &inputs.values[2], v),
                &view("dout", &dout, out),
            )
            .unwrap();
            let good = Gradients { values: [low.dq, low.dk, low.dv], strays: 0 };
            let found = oracle.judge(&problem, &good).unwrap();
            assert!(found.passed, "{problem:?}: {}", found.detail);
            for (tensor, name) in NAMES.iter().enumerate() {
                let mut bad = good.clone();
                let last = bad.values[tensor].len() - 1;
                bad.values[tensor][last] = bf16::from_f32(bad.values[tensor][last].to_f32() + 2.0);
                let found = oracle.judge(&problem, &bad).unwrap();
                assert!(!found.passed && found.detail.contains(name), "{}", found.detail);
                bad.values[tensor][last] = bf16::NAN;
                assert!(!oracle.judge(&problem, &bad).unwrap().passed);
            }
            assert!(!oracle.judge(&problem, &Gradients { strays: 1, ..good }).unwrap().passed);
        }
    }

    #[test]
    fn a_row_in_no_pair_has_no_gradient() {
        let square = Problem::square(1, 3, 1, 8, Mask::CAUSAL, Dtype::Bf16);
        // Queries 0 and 1 see no key; of a window of one, keys 0 and 1 are seen by no query.
        let blind = Problem { seqlen_q: 5, ..square };
        let unseen = Problem { seqlen_k: 5, mask: Mask::window(0, 0), ..square };
        for (problem, tensors) in [(blind, &[0][..]), (unseen, &[1, 2])] {
            let mut gradients = shapes(&problem).map(|shape| vec![bf16::ONE; shape.iter().product()]);
            tensors.iter().for_each(|&i| gradients[i][..2 * 8].fill(bf16::ZERO));
            assert_eq!(alone(&problem, &gradients), None);
            for &i in tensors {
                gradients[i][9] = bf16::ONE;
                let fault = alone(&problem, &gradients).unwrap();
                assert!(fault.contains("row 1") && fault.contains(NAMES[i]), "{fault}");
                gradients[i][9] = bf16::ZERO;
            }
        }
    }

    #[test]
    fn large_problems_are_judged_by_some_heads() {
        let problem = Problem::square(4, 1024, 16, 128, Mask::FULL, Dtype::Bf16);
        let heads = choose(&problem, 3);
        assert!(!heads.is_empty() && heads.len() < 16 && heads.contains(&(3, 15)));
        assert_eq!(choose(&Problem { batch: 0, ..problem }, 3), []);
    }
}
