//! Judges gradients: by the f64 oracle and its low-precision twin, one K/V head with all of its query heads
//! at a time; all heads, or, where that would take long, the first, the last and some between.

use std::sync::OnceLock;

use fa_attn::device::Half;
use fa_core::{Problem, Strides, program};
use fa_cpu::compare::{self, Verdict};
use fa_cpu::reference::{
    self,
    low_precision::{self, HELD_AT},
};
use fa_cpu::{Arguments, CpuError, Extras, TensorRef, Within};
use rayon::prelude::*;

use super::arrays::{self, ArrayGradients, Arrays};
use super::forward::Judgement;
use super::heads::{part, part_of};
use super::rows::extras;
use super::sinks::SinkGradients;
use crate::memory::Gradients;
use crate::random::Random;
use crate::sequences::{Ragged, Sequences};
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
    /// The first draw of [`HELD_AT`], within whose tolerance nearly every kernel is.
    low: [Vec<T>; 3],
    /// The worst of all draws, where the first has not been enough.
    worst: OnceLock<([Vec<T>; 3], Arrays)>,
    noise: [f64; 3],
    /// Of the program's arrays, where there are any and every head is computed.
    arrays: Option<ArrayGradients>,
    /// Of sinks, where there are any and every head is computed.
    sinks: Option<SinkGradients>,
}

/// Heads and dim of dQ, dK and dV.
fn widths(problem: &Problem) -> [[usize; 2]; 3] {
    let Problem { heads_q, heads_kv, head_dim, head_dim_v, .. } = *problem;
    [[heads_q, head_dim], [heads_kv, head_dim], [heads_kv, head_dim_v]]
}

/// The sequences' rows of dQ, dK and dV.
fn rows(sequences: &Sequences) -> [&Ragged; 3] {
    [&sequences.q, &sequences.k, &sequences.k]
}

impl<T: Half> GradientOracle<T> {
    /// Computes the oracle for `inputs` and `dout` (packed BSHD).
    ///
    /// # Errors
    /// Inputs that do not fit their problem.
    pub fn new(inputs: &Inputs<T>, dout: &[T], seed: u64) -> Result<GradientOracle<T>, CpuError> {
        let heads = choose(&inputs.problem, &inputs.sequences, seed);
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
            arrays: None,
            sinks: None,
        };
        let mut of_arrays = ArrayGradients::default();
        for (exact, low) in computed {
            let noise = [exact.dq_noise, exact.dk_noise, exact.dv_noise];
            for (i, values) in [exact.dq, exact.dk, exact.dv].into_iter().enumerate() {
                oracle.exact[i].extend(values);
                oracle.noise[i] = oracle.noise[i].max(noise[i]);
            }
            let (low, low_arrays) = low;
            for (i, values) in low.into_iter().enumerate() {
                oracle.low[i].extend(values);
            }
            of_arrays.noise.resize(exact.darrays.len(), 0.0);
            of_arrays.noise.iter_mut().zip(exact.darrays_noise).for_each(|(sum, own)| *sum += own);
            arrays::add(&mut of_arrays.exact, exact.darrays);
            arrays::add(&mut of_arrays.low, low_arrays);
        }
        let all = oracle.heads.len() == inputs.sequences.count() * inputs.problem.heads_kv;
        if of_arrays.exact.iter().any(|own| !own.is_empty()) && all {
            oracle.arrays = Some(of_arrays);
        }
        if inputs.problem.score.sinks && all {
            oracle.sinks = Some(SinkGradients::new(inputs, dout)?);
        }
        Ok(oracle)
    }

    /// Sequence, K/V head and row of a row of the chosen heads end to end.
    fn position(&self, of_rows: &Ragged, row: usize) -> (usize, usize, usize) {
        let mut left = row;
        for &(batch, head) in &self.heads {
            match left.checked_sub(of_rows.len(batch)) {
                Some(behind) => left = behind,
                None => return (batch, head, left),
            }
        }
        (0, 0, row)
    }

    /// Of each element the draw that is farthest from the exact value.
    fn worst(&self, inputs: &Inputs<T>, dout: &[T]) -> Result<&([Vec<T>; 3], Arrays), CpuError> {
        if let Some(known) = self.worst.get() {
            return Ok(known);
        }
        let mut worst = self.low.clone();
        let mut worst_arrays = self.arrays.as_ref().map_or_else(Vec::new, |arrays| arrays.low.clone());
        for held in &HELD_AT[1..] {
            let draws: Vec<([Vec<T>; 3], Arrays)> = self
                .heads
                .par_iter()
                .map(|&head| Head::of(inputs, dout, head)?.low(*held))
                .collect::<Result<_, CpuError>>()?;
            for (i, worst) in worst.iter_mut().enumerate() {
                let draw: Vec<T> = draws.iter().flat_map(|(draw, _)| &draw[i]).copied().collect();
                low_precision::keep_farther(worst, &draw, &self.exact[i])?;
            }
            if let Some(arrays) = &self.arrays {
                let mut sums = Vec::new();
                draws.into_iter().for_each(|(_, draw)| arrays::add(&mut sums, draw));
                arrays.keep_farther(&mut worst_arrays, &sums)?;
            }
        }
        Ok(self.worst.get_or_init(|| (worst, worst_arrays)))
    }

    /// Compares the gradients of a backward: the chosen heads by the rule of [`compare`]. All others must be
    /// written, and be 0 for queries without a key and keys without a query. `inputs` and `dout` are those of
    /// [`GradientOracle::new`].
    ///
    /// # Errors
    /// Gradients that do not fit the problem.
    pub fn judge(
        &self,
        inputs: &Inputs<T>,
        dout: &[T],
        gradients: &Gradients<T>,
    ) -> Result<Judgement, CpuError> {
        let problem = &inputs.problem;
        let own = widths(&part(problem));
        let mut faults = Vec::new();
        let mut figures = Vec::new();
        let mut worst: f64 = 0.0;
        for (i, [all_heads, dim]) in widths(problem).into_iter().enumerate() {
            let (heads, of_rows) = (own[i][0], rows(&inputs.sequences)[i]);
            let mut values = Vec::with_capacity(self.exact[i].len());
            for &(batch, head) in &self.heads {
                for row in of_rows.start(batch)..of_rows.start(batch) + of_rows.len(batch) {
                    let from = (row * all_heads + head * heads) * dim;
                    values.extend_from_slice(&gradients.values[i][from..from + heads * dim]);
                }
            }
            let shape = [1, values.len() / (heads * dim), heads, dim];
            let compare = |low: &[T]| -> Result<_, CpuError> {
                let found = compare::compare(shape, problem.types.q, &values, &self.exact[i], Some(low))?;
                Ok(found.allowing(self.noise[i]))
            };
            let mut found = compare(&self.low[i])?;
            if found.verdict != Verdict::Pass {
                found = compare(&self.worst(inputs, dout)?.0[i])?;
            }
            if found.verdict != Verdict::Pass {
                let at = found.first_mismatch.or(found.worst).map(|[_, row, head, column]| {
                    let (sequence, kv_head, row) = self.position(of_rows, row);
                    format!("batch {sequence} row {row} K/V head {kv_head} head {head} column {column}")
                });
                let at = at.unwrap_or_default();
                faults.push(format!("{}: {found}, at {at}; {} heads", NAMES[i], self.heads.len()));
            }
            let ratio = found.max_abs / found.tolerance;
            worst = worst.max(if ratio.is_finite() { ratio } else { 0.0 });
            figures.push(format!("{} {:.2e} of {:.2e}", NAMES[i], found.max_abs, found.tolerance));
            let missing = gradients.values[i]
                .par_chunks(dim.max(1))
                .position_first(|row| row.iter().any(|x| x.to_f32().is_nan()));
            if let Some(row) = missing {
                faults.push(format!("{} holds NaN in row {row} of [rows, heads]: not written", NAMES[i]));
            }
        }
        if let (Some(arrays), Some(program)) = (&self.arrays, problem.score.program) {
            for (slot, decl) in program.arrays().iter().enumerate() {
                let of = |low| arrays.compare(slot, problem.types.q, &gradients.darrays, low);
                let Some(mut found) = of(&arrays.low)? else { continue };
                if found.verdict != Verdict::Pass {
                    found = of(&self.worst(inputs, dout)?.1)?.unwrap_or(found);
                }
                let ratio = found.max_abs / found.tolerance;
                worst = worst.max(if ratio.is_finite() { ratio } else { 0.0 });
                match found.verdict {
                    Verdict::Pass => figures
                        .push(format!("d{} {:.2e} of {:.2e}", decl.name, found.max_abs, found.tolerance)),
                    Verdict::NonFiniteMismatch | Verdict::TooFar => {
                        faults.push(format!("d{}: {found}", decl.name))
                    }
                }
            }
        }
        if let Some(sinks) = &self.sinks {
            let (ratio, text) = sinks.judge(&gradients.dsinks);
            worst = worst.max(ratio);
            if ratio <= 1.0 { figures.push(text) } else { faults.push(text) }
        }
        faults.extend(alone(problem, &inputs.sequences, &gradients.values));
        if gradients.strays > 0 {
            faults.push(format!("{} elements that are no row's were written", gradients.strays));
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
fn alone<T: Half>(problem: &Problem, sequences: &Sequences, gradients: &[Vec<T>; 3]) -> Option<String> {
    let Problem { mask, .. } = *problem;
    let Sequences { q: of_q, k: of_k } = sequences;
    let blind = |b: usize, row: usize| mask.keys(row, of_q.len(b), of_k.len(b)).is_empty();
    let unseen = |b: usize, key: usize| mask.m_blocks(key..key + 1, of_q.len(b), of_k.len(b), 1).is_empty();
    let is_alone: [&(dyn Fn(usize, usize) -> bool + Sync); 3] = [&blind, &unseen, &unseen];
    widths(problem).into_iter().enumerate().find_map(|(i, [heads, dim])| {
        let of_rows = rows(sequences)[i];
        gradients[i].par_chunks(dim).enumerate().find_map_first(|(index, values)| {
            let (row, head) = (index / heads, index % heads);
            let batch = of_rows.sequence_of(row);
            let row = row - of_rows.start(batch);
            let fault = values.iter().any(|x| x.to_f32() != 0.0) && is_alone[i](batch, row);
            fault.then(|| {
                format!("batch {batch} row {row} head {head} is in no pair and {} is not 0", NAMES[i])
            })
        })
    })
}

fn choose(problem: &Problem, sequences: &Sequences, seed: u64) -> Vec<(usize, usize)> {
    let Problem { heads_kv, .. } = *problem;
    let all = sequences.count() * heads_kv;
    if all == 0 {
        return Vec::new();
    }
    let cost = |batch: usize| {
        part_of(problem, sequences.q.len(batch), sequences.k.len(batch)).flops_backward() + 1e5
    };
    if (0..sequences.count()).map(cost).sum::<f64>() * heads_kv as f64 <= BUDGET {
        return (0..all).map(|i| (i / heads_kv, i % heads_kv)).collect();
    }
    // The first and the last, and random ones while they are affordable; the last alone where only one is.
    let mut chosen = vec![all - 1];
    let mut left = BUDGET - cost((all - 1) / heads_kv);
    let mut random = Random::new(seed);
    for draw in 0..64 {
        let next = if draw == 0 { 0 } else { random.below(all) };
        left -= cost(next / heads_kv);
        if left < 0.0 {
            break;
        }
        chosen.push(next);
    }
    chosen.sort_unstable();
    chosen.dedup();
    chosen.into_iter().map(|i| (i / heads_kv, i % heads_kv)).collect()
}

/// One K/V head of a sequence with its query heads.
struct Head<'a, T> {
    problem: Problem,
    extras: Extras<'a>,
    program: Option<program::Inputs<'a>>,
    within: Within,
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
        let Sequences { q: of_q, k: of_k } = &inputs.sequences;
        let view = |name, values, rows: &Ragged, heads: usize, own_heads: usize, dim: usize| {
            let strides = Strides { batch: 0, seq: (heads * dim) as i64, head: dim as i64, dim: 1 };
            let from = (rows.start(batch) * heads + head * own_heads) * dim;
            TensorRef::new(name, from_of(values, from), [1, rows.len(batch), own_heads, dim], strides)
        };
        let Problem { heads_q, heads_kv, head_dim, head_dim_v, .. } = *whole;
        let group = whole.group_size();
        Ok(Head {
            problem: part_of(whole, of_q.len(batch), of_k.len(batch)),
            extras: extras(inputs, batch, head * group..(head + 1) * group),
            program: inputs.program(),
            within: Within { first: [batch, head * group, head, 0], lengths: None },
            q: view("q", &inputs.values[0], of_q, heads_q, group, head_dim)?,
            k: view("k", &inputs.values[1], of_k, heads_kv, 1, head_dim)?,
            v: view("v", &inputs.values[2], of_k, heads_kv, 1, head_dim_v)?,
            dout: view("dout", dout, of_q, heads_q, group, head_dim_v)?,
        })
    }

    fn arguments(&self) -> Arguments<'_> {
        Arguments { extras: self.extras, program: self.program.as_ref(), within: self.within }
    }

    fn exact(&self) -> Result<reference::Gradients, CpuError> {
        let Head { problem, q, k, v, dout, .. } = self;
        reference::backward_extras(problem, self.arguments(), q, k, v, dout)
    }

    fn low(&self, held: f32) -> Result<([Vec<T>; 3], Arrays), CpuError> {
        let Head { problem, q, k, v, dout, .. } = self;
        let low = low_precision::backward_extras_held_at(problem, self.arguments(), q, k, v, dout, held)?;
        Ok(([low.dq, low.dk, low.dv], low.darrays))
    }
}

/// The location of an element; `None` where the tensor is empty.
fn from_of<T>(values: &[T], from: usize) -> &[T] {
    &values[from.min(values.len())..]
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Lengths, Mask, TensorLayout};
    use half::bf16;

    use super::*;
    use crate::judge::agree::low_precision_gradients;
    use crate::tensors::random_dout;

    #[test]
    fn the_low_precision_gradients_pass_and_a_wrong_element_does_not() {
        let base = Problem::square(2, 37, 6, 16, Mask::CAUSAL, Dtype::Bf16).with_heads_kv(2);
        for problem in [
            base,
            base.with_mask(Mask::FULL)
                .with_lengths(Lengths::uniform(base.lengths.sequences(), base.lengths.max_q(), 20))
                .with_head_dim_v(8),
            base.with_lengths(Lengths::uniform(base.lengths.sequences(), 50, base.lengths.max_k())),
        ] {
            let inputs = Inputs::<bf16>::random(&problem, TensorLayout::Bshd, 5);
            let dout = random_dout::<bf16>(&inputs, 5);
            let oracle = GradientOracle::new(&inputs, &dout, 1).unwrap();
            let good = low_precision_gradients(&inputs, &dout);
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
            assert!(!oracle.judge(&inputs, &dout, &Gradients { strays: 1, ..good }).unwrap().passed);
        }
    }

    #[test]
    fn gradients_of_arrays_are_judged_by_the_sums_over_heads() {
        let text = "array t: bf16[_, _] grad; array u: i32[_]; mask = k != u[q]; score = s + t[h, k];";
        let program = program::Program::parse(text).unwrap().intern().unwrap();
        let problem = Problem::square(2, 37, 6, 16, Mask::CAUSAL, Dtype::Bf16)
            .with_heads_kv(2)
            .with_score(fa_core::ScoreMod::NONE.with_program(Some(program)));
        let inputs = Inputs::<bf16>::random(&problem, TensorLayout::Bshd, 5);
        let dout = random_dout::<bf16>(&inputs, 5);
        let oracle = GradientOracle::new(&inputs, &dout, 1).unwrap();
        let good = low_precision_gradients(&inputs, &dout);
        assert_eq!(good.darrays.iter().map(Vec::len).collect::<Vec<_>>(), [6 * 37, 0]);
        let found = oracle.judge(&inputs, &dout, &good).unwrap();
        assert!(found.passed && found.detail.contains("dt "), "{}", found.detail);
        for wrong in [2.0, f32::NAN] {
            let mut bad = good.clone();
            bad.darrays[0][100] += wrong;
            let found = oracle.judge(&inputs, &dout, &bad).unwrap();
            assert!(!found.passed && found.detail.contains("dt: "), "{}", found.detail);
        }
        let missing = Gradients { darrays: Vec::new(), ..good };
        assert!(oracle.judge(&inputs, &dout, &missing).is_err());
    }

    /// Failures are judged by the worst of all draws, which is never nearer than the first, and somewhere
    /// farther except in dV, which does not depend on O.
    fn assert_farther(oracle: &GradientOracle<bf16>, tensor: usize) {
        let worst = &oracle.worst.get().expect("it failed by the first draw").0[tensor];
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
        let blind =
            square.with_lengths(Lengths::uniform(square.lengths.sequences(), 5, square.lengths.max_k()));
        let unseen = square
            .with_lengths(Lengths::uniform(square.lengths.sequences(), square.lengths.max_q(), 5))
            .with_mask(Mask::window(0, 0));
        for (problem, tensors) in [(blind, &[0][..]), (unseen, &[1, 2])] {
            let sequences = Sequences::uniform(&problem.lengths);
            let [q, k, v, _] = sequences.shapes(&problem);
            let mut gradients = [q, k, v].map(|shape| vec![bf16::ONE; shape.iter().product()]);
            let alone = |gradients: &[Vec<bf16>; 3]| alone(&problem, &sequences, gradients);
            tensors.iter().for_each(|&i| gradients[i][..2 * 8].fill(bf16::ZERO));
            assert_eq!(alone(&gradients), None);
            for &i in tensors {
                gradients[i][9] = bf16::ONE;
                let fault = alone(&gradients).unwrap();
                assert!(fault.contains("row 1") && fault.contains(NAMES[i]), "{fault}");
                gradients[i][9] = bf16::ZERO;
            }
        }
    }

    #[test]
    fn large_problems_are_judged_by_some_heads() {
        let problem = Problem::square(4, 1024, 16, 128, Mask::FULL, Dtype::Bf16);
        let of = |problem: &Problem| choose(problem, &Sequences::uniform(&problem.lengths), 3);
        let heads = of(&problem);
        assert!(!heads.is_empty() && heads.len() < 16 && heads.contains(&(3, 15)));
        let none = Lengths::uniform(0, problem.lengths.max_q(), problem.lengths.max_k());
        assert_eq!(of(&problem.with_lengths(none)), []);
    }
}
