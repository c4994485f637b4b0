//! What gradients should be, and whether they are: the f64 oracle and its low-precision twin, a K/V head with
//! all of its query heads at a time; all of them, or, where that would take long, the first, the last and
//! some between.

use std::sync::OnceLock;

use fa_attn::device::{DeviceGradients, Half};
use fa_core::{Problem, Strides};
use fa_cpu::compare::{self, Verdict};
use fa_cpu::reference::{self, low_precision};
use fa_cpu::{CpuError, TensorRef};
use rayon::prelude::*;

use super::forward::Judgement;
use super::heads::part;
use crate::random::Random;
use crate::tensors::Inputs;

/// Operations of the backward (by [`Problem::flops_backward`]) that an oracle spends on a case at most,
/// roughly.
const BUDGET: f64 = 2e9;

const NAMES: [&str; 3] = ["dQ", "dK", "dV"];

/// The expected gradients of some or all K/V heads.
pub struct GradientOracle<T> {
    /// Batch entry and K/V head.
    heads: Vec<(usize, usize)>,
    exact: [Vec<f64>; 3],
    /// The first draw of [`HELD_AT`], which nearly every kernel is within the tolerance of.
    low: [Vec<T>; 3],
    /// The worst of all draws, where the first has not been enough.
    worst: OnceLock<[Vec<T>; 3]>,
    noise: [f64; 3],
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
        let heads = choose(&inputs.problem, seed);
        let computed: Vec<_> = heads
            .par_iter()
            .map(|&head| {
                let head = Head::of(inputs, dout, head)?;
                Ok((head.exact()?, head.low(HELD_AT[0])?))
            })
            .collect::<Result<_, CpuError>>()?;
        let mut oracle = GradientOracle {
            heads,
            exact: Default::default(),
            low: Default::default(),
            worst: OnceLock::new(),
            noise: [0.0; 3],
        };
        for (exact, low) in computed {
            let noise = [exact.dq_noise, exact.dk_noise, exact.dv_noise];
            for (i, values) in [exact.dq, exact.dk, exact.dv].into_iter().enumerate() {
                oracle.exact[i].extend(values);
                oracle.noise[i] = oracle.noise[i].max(noise[i]);
            }
            for (i, values) in low.into_iter().enumerate() {
                oracle.low[i].extend(values);
            }
        }
        Ok(oracle)
    }

    /// Of each element the draw that is farthest from the exact value.
    fn worst(&self, inputs: &Inputs<T>, dout: &[T]) -> Result<&[Vec<T>; 3], CpuError> {
        if let Some(known) = self.worst.get() {
            return Ok(known);
        }
        let mut worst = self.low.clone();
        for held in &HELD_AT[1..] {
            let draws: Vec<[Vec<T>; 3]> = self
                .heads
                .par_iter()
                .map(|&head| Head::of(inputs, dout, head)?.low(*held))
                .collect::<Result<_, CpuError>>()?;
            for (i, worst) in worst.iter_mut().enumerate() {
                let draw = draws.iter().flat_map(|draw| &draw[i]);
                for ((worst, &value), &exact) in worst.iter_mut().zip(draw).zip(&self.exact[i]) {
                    let off = |value: T| (f64::from(value.to_f32()) - exact).abs();
                    if off(value) > off(*worst) {
                        *worst = value;
                    }
                }
            }
        }
        Ok(self.worst.get_or_init(|| worst))
    }

    /// Compares what a backward wrote: the chosen heads by the rule of [`compare`], and of all others that
    /// they are written and that queries without a key and keys without a query have the gradient 0. `inputs`
    /// and `dout` are those of [`GradientOracle::new`].
    ///
    /// # Errors
    /// Gradients that do not fit the problem.
    pub fn judge(
        &self,
        inputs: &Inputs<T>,
        dout: &[T],
        gradients: &DeviceGradients<T>,
    ) -> Result<Judgement, CpuError> {
        let problem = &inputs.problem;
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
            let compare = |low: &[T]| -> Result<_, CpuError> {
                let found = compare::compare(shape, problem.types.qkv, &values, &self.exact[i], Some(low))?;
                Ok(found.allowing(self.noise[i]))
            };
            let mut found = compare(&self.low[i])?;
            if found.verdict != Verdict::Pass {
                found = compare(&self.worst(inputs, dout)?[i])?;
            }
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
    let Problem { mask, .. } = *problem;
    let (seqlen_q, seqlen_k) = (problem.lengths.max_q(), problem.lengths.max_k());
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
    let Problem { heads_kv, .. } = *problem;
    let batch = problem.lengths.sequences();
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

/// Where a kernel may scale the probabilities when it rounds them, against the row's maximum; a factor of two
/// changes nothing.
const HELD_AT: [f32; 3] = [1.0, 1.26, 1.587];

/// One K/V head with its query heads.
struct Head<'a, T> {
    problem: Problem,
    q: TensorRef<'a, T>,
    k: TensorRef<'a, T>,
    v: TensorRef<'a, T>,
    dout: TensorRef<'a, T>,
}

impl<'a, T: Half> Head<'a, T> {
    fn of(
        inputs: &'a Inputs<T>,
        dout: &'a [T],
        (batch, head): (usize, usize),
    ) -> Result<Head<'a, T>, CpuError> {
        let whole = &inputs.problem;
        let view = |name, values, seqlen: usize, heads: usize, own_heads: usize, dim: usize| {
            let strides = Strides { batch: 0, seq: (heads * dim) as i64, head: dim as i64, dim: 1 };
            let from = (batch * seqlen * heads + head * own_heads) * dim;
            TensorRef::new(name, from_of(values, from), [1, seqlen, own_heads, dim], strides)
        };
        let Problem { lengths, heads_q, heads_kv, head_dim, head_dim_v, .. } = *whole;
        let (group, seqlen_q, seqlen_k) = (whole.group_size(), lengths.max_q(), lengths.max_k());
        Ok(Head {
            problem: part(whole),
            q: view("q", &inputs.values[0], seqlen_q, heads_q, group, head_dim)?,
            k: view("k", &inputs.values[1], seqlen_k, heads_kv, 1, head_dim)?,
            v: view("v", &inputs.values[2], seqlen_k, heads_kv, 1, head_dim_v)?,
            dout: view("dout", dout, seqlen_q, heads_q, group, head_dim_v)?,
        })
    }

    fn exact(&self) -> Result<reference::Gradients, CpuError> {
        reference::backward(&self.problem, &self.q, &self.k, &self.v, &self.dout)
    }

    fn low(&self, held: f32) -> Result<[Vec<T>; 3], CpuError> {
        let Head { problem, q, k, v, dout } = self;
        let low = low_precision::backward_held_at(problem, q, k, v, dout, held)?;
        Ok([low.dq, low.dk, low.dv])
    }
}

/// What is behind an element; nothing where the tensor is empty.
fn from_of<T>(values: &[T], from: usize) -> &[T] {
    &values[from.min(values.len())..]
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Lengths, Mask, TensorLayout};
    use half::bf16;

    use super::*;
    use crate::tensors::random_dout;

    #[test]
    fn the_low_precision_gradients_pass_and_a_wrong_element_does_not() {
        let base = Problem { heads_kv: 2, ..Problem::square(2, 37, 6, 16, Mask::CAUSAL, Dtype::Bf16) };
        for problem in [
            base,
            Problem {
                mask: Mask::FULL,
                lengths: Lengths::uniform(base.lengths.sequences(), base.lengths.max_q(), 20),
                head_dim_v: 8,
                ..base
            },
            Problem { lengths: Lengths::uniform(base.lengths.sequences(), 50, base.lengths.max_k()), ..base },
        ] {
            let inputs = Inputs::<bf16>::random(&problem, TensorLayout::Bshd, 5);
            let dout = random_dout::<bf16>(&inputs, 5);
            let oracle = GradientOracle::new(&inputs, &dout, 1).unwrap();
            let [q, k, v, out] = fa_attn::device::shapes(&problem);
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
            let good = DeviceGradients { values: [low.dq, low.dk, low.dv], strays: 0 };
            let found = oracle.judge(&inputs, &dout, &good).unwrap();
            assert!(found.passed, "{problem:?}: {}", found.detail);
            assert!(oracle.worst.get().is_none(), "the first draw is enough for itself");
            for (tensor, name) in NAMES.iter().enumerate() {
                let mut bad = good.clone();
                let last = bad.values[tensor].len() - 1;
                bad.values[tensor][last] = bf16::from_f32(bad.values[tensor][last].to_f32() + 2.0);
                let found = oracle.judge(&inputs, &dout, &bad).unwrap();
                assert!(!found.passed && found.detail.contains(name), "{}", found.detail);
                assert_farther(&oracle, tensor);
                bad.values[tensor][last] = bf16::NAN;
                assert!(!oracle.judge(&inputs, &dout, &bad).unwrap().passed);
            }
            assert!(!oracle.judge(&inputs, &dout, &DeviceGradients { strays: 1, ..good }).unwrap().passed);
        }
    }

    /// What failed was held to the worst of all draws, which is nowhere nearer than the first; somewhere
    /// farther, but in dV, which does not depend on O.
    fn assert_farther(oracle: &GradientOracle<bf16>, tensor: usize) {
        let worst = &oracle.worst.get().expect("it failed by the first draw")[tensor];
        let off = |value: bf16, exact: f64| (value.to_f64() - exact).abs();
        let both = worst.iter().zip(&oracle.low[tensor]).zip(&oracle.exact[tensor]);
        let further: Vec<f64> = both.map(|((&w, &l), &exact)| off(w, exact) - off(l, exact)).collect();
        assert!(further.iter().all(|&by| by >= 0.0));
        assert_eq!(further.iter().any(|&by| by > 0.0), tensor < 2);
    }

    #[test]
    fn a_row_in_no_pair_has_no_gradient() {
        let square = Problem::square(1, 3, 1, 8, Mask::CAUSAL, Dtype::Bf16);
        // Queries 0 and 1 see no key; of a window of one, keys 0 and 1 are seen by no query.
        let blind = Problem {
            lengths: Lengths::uniform(square.lengths.sequences(), 5, square.lengths.max_k()),
            ..square
        };
        let unseen = Problem {
            lengths: Lengths::uniform(square.lengths.sequences(), square.lengths.max_q(), 5),
            mask: Mask::window(0, 0),
            ..square
        };
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
        assert_eq!(
            choose(
                &Problem {
                    lengths: Lengths::uniform(0, problem.lengths.max_q(), problem.lengths.max_k()),
                    ..problem
                },
                3
            ),
            []
        );
    }
}
