//! Gradients of a program's arrays that kernels do not sum, of host tensors on a GPU: an array with an
//! element for each place, which the host gathers, stands for each of their loads, and the host adds up its
//! gradient.

use std::time::Duration;

use fa_core::program::{ArrayData, ArrayView, Direct, Inputs, Interned, Places};
use fa_core::{Pass, Problem};
use rayon::prelude::*;

use crate::element::Element;
use crate::error::Error;
use crate::tensors::{BackwardTensors, Tensors};

/// The program of a backward with arrays of its own, and what they stand for.
#[derive(Debug)]
pub(crate) struct DirectGradients {
    own: Interned,
    made: Interned,
    loads: Vec<Direct>,
    places: Places,
}

/// The array of the posed program at a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PosedArray {
    /// That of the own program at this slot.
    Own(usize),
    /// What stands for this load.
    Gathered(usize),
}

/// What stands for a load.
#[derive(Debug)]
pub(crate) struct Gathered {
    pub(crate) extents: Vec<usize>,
    pub(crate) values: Vec<f32>,
}

impl DirectGradients {
    /// The problem that a kernel computes in place of `problem`, and what it needs of the host; `None` where
    /// kernels sum all gradients.
    pub(crate) fn of(problem: &Problem, pass: Pass) -> Option<(Problem, DirectGradients)> {
        let own = problem.score.program.filter(|_| pass.is_backward())?;
        let (made, loads) = own.with_direct_gradients().ok()??;
        let made = made.intern().ok()?;
        let posed = problem.with_score(problem.score.with_program(Some(made)));
        Some((posed, DirectGradients { own, made, loads, places: Places::of(problem) }))
    }

    /// The program of the problem that it was made of.
    pub(crate) fn own(&self) -> &Interned {
        &self.own
    }

    /// Whether a kernel sums the gradient of the posed program's array at `slot`.
    pub(crate) fn is_summed(&self, slot: usize) -> bool {
        self.made.arrays()[slot].gradient
    }

    /// The slots of the own program's arrays that the host reads.
    pub(crate) fn read(&self) -> Vec<bool> {
        self.own.arrays_of(&self.loads)
    }

    /// The places of a call of these lengths.
    pub(crate) fn places<F>(&self, extras: &fa_core::Extras<&[i32], F>) -> Places {
        self.places.clone().with_lengths(extras)
    }

    /// What stands for each load.
    pub(crate) fn gather(&self, inputs: &Inputs<'_>, places: &Places) -> Vec<Gathered> {
        let of = |load| Gathered {
            extents: places.extents(load),
            values: self.own.gathered(load, inputs, places),
        };
        self.loads.par_iter().map(of).collect()
    }

    /// What the arrays of the posed program are, in their order.
    pub(crate) fn arrays(&self) -> impl Iterator<Item = PosedArray> + '_ {
        let place = |name: &str| self.own.arrays().iter().position(|own| own.name == name);
        let stands = |name: &str| self.loads.iter().position(|load| load.name == name);
        self.made.arrays().iter().map(move |decl| match stands(&decl.name) {
            Some(at) => PosedArray::Gathered(at),
            None => PosedArray::Own(place(&decl.name).unwrap_or(0)),
        })
    }

    /// The gradient of the own program's array at `slot` by those of what stands for its loads; `None` where
    /// none does, or the array has no gradient.
    pub(crate) fn sums(
        &self,
        slot: usize,
        inputs: &Inputs<'_>,
        places: &Places,
        gradient_of: impl Fn(usize) -> Option<Vec<f32>>,
    ) -> Option<Vec<f32>> {
        let decl = &self.own.arrays()[slot];
        let is_own = |load: &Direct| load.array(&self.own) == Some(slot);
        if !decl.gradient || !self.loads.iter().any(is_own) {
            return None;
        }
        let extents = &inputs.arrays()[slot].extents[..decl.rank];
        let mut sums = vec![0.0; extents.iter().map(|&extent| extent.max(0) as usize).product()];
        for (at, load) in self.loads.iter().enumerate().filter(|(_, load)| is_own(load)) {
            if let Some(gradient) = gradient_of(at) {
                self.own.scatter(load, inputs, places, &gradient, &mut sums);
            }
        }
        Some(sums.into_iter().map(|sum| sum as f32).collect())
    }

    /// Computes `tensors` by `run`, which takes those of the other problem.
    ///
    /// # Errors
    /// [`Error::Pass`] for a forward, inputs that are not the program's, and those of `run`.
    pub(crate) fn run<'a, T: Element>(
        &self,
        tensors: BackwardTensors<'a, T>,
        run: impl FnOnce(Tensors<'_, T>) -> Result<Duration, Error>,
    ) -> Result<Duration, Error> {
        let of_inputs = |error| Error::Cpu(fa_cpu::CpuError::from(error));
        let Some(inputs) = tensors.program else { return run(tensors.into()) };
        inputs.check(&self.own).map_err(of_inputs)?;
        let places = self.places(&tensors.extras);
        let gathered = self.gather(inputs, &places);
        let arrays = self.arrays().map(|array| match array {
            PosedArray::Own(slot) => inputs.arrays()[slot],
            PosedArray::Gathered(at) => {
                let Gathered { extents, values } = &gathered[at];
                ArrayView::contiguous(ArrayData::F32(values), extents)
            }
        });
        let posed =
            Inputs::new(&self.made, arrays.collect(), inputs.scalars().to_vec()).map_err(of_inputs)?;
        let mut found = Vec::new();
        let BackwardTensors { q, k, v, out, lse, dout, dq, dk, dv, dsinks, darrays, extras, .. } = tensors;
        let time = run(Tensors::Backward(BackwardTensors {
            q,
            k,
            v,
            out,
            lse,
            dout,
            dq,
            dk,
            dv,
            dsinks,
            darrays: darrays.is_some().then_some(&mut found),
            extras,
            program: Some(&posed),
        }))?;
        let Some(darrays) = darrays else { return Ok(time) };
        let mut take = |array: PosedArray| {
            let at = self.arrays().position(|own| own == array)?;
            found.get_mut(at).map(std::mem::take)
        };
        let of_loads: Vec<_> = (0..self.loads.len()).map(|at| take(PosedArray::Gathered(at))).collect();
        let slots = self.own.arrays().iter().enumerate();
        *darrays = slots
            .map(|(slot, decl)| {
                let sums = self.sums(slot, inputs, &places, |at| of_loads[at].clone());
                let kept = || take(PosedArray::Own(slot)).filter(|_| decl.gradient);
                sums.or_else(kept).unwrap_or_default()
            })
            .collect();
        Ok(time)
    }
}

#[cfg(test)]
mod tests {
    use fa_core::program::Program;
    use fa_core::{Dtype, Lengths, Mask, ScoreMod, Side};
    use fa_cpu::Extras;

    use super::*;
    use crate::{Backend, CpuOptions, Engine, Gradients, Tensor};

    #[test]
    fn gathered_arrays_have_the_gradients_of_what_they_stand_for() {
        check(Lengths::uniform(2, 9, 9), &Extras::NONE);
    }

    #[test]
    fn those_of_packed_sequences_and_of_lengths_in_use_too() {
        let (starts_q, starts_k) = ([0, 9, 9, 12], [0, 7, 9, 16]);
        let extras = Extras { cu_seqlens_q: Some(&starts_q), cu_seqlens_k: Some(&starts_k), ..Extras::NONE };
        check(Lengths::packed(3, 12, 16, 9, 8), &extras);
        let used = [4, 9];
        let padded = |used| if used { Side::padded(9).with_used() } else { Side::padded(9) };
        let lengths = Lengths::of(2, padded(false), padded(true));
        check(lengths, &Extras { seqused_k: Some(&used), ..Extras::NONE });
    }

    /// The same by the CPU, which sums gradients of any indices, for both programs.
    fn check(lengths: Lengths, extras: &Extras<'_>) {
        let text = "array c: i32[_]; array g: f32[_] grad; array t: f32[_, _] grad; scalar x: f32; \
                    mask = k <= q + 3; score = s * g[h] + t[h, q - k + off + b] - x * t[c[k], 2];";
        let program = Program::parse(text).expect("parsed").intern().expect("room");
        let problem = Problem::square(1, 1, 4, 16, Mask::FULL, Dtype::F32)
            .with_lengths(lengths)
            .with_score(ScoreMod::NONE.with_program(Some(program)));
        let engine = Engine::with(Backend::Cpu(CpuOptions::default())).expect("a CPU");
        let drawn = |shape: [usize; 4], turn: usize| -> Tensor<f32> {
            let count = shape.iter().product::<usize>();
            let values = (0..count).map(|i| ((i * 37 + turn * 11) % 23) as f32 / 11.0 - 1.0);
            Tensor::new(shape, values.collect()).expect("a tensor")
        };
        let [of_q, of_k, of_v, of_out] = crate::device::shapes(&problem);
        let (q, k, v, dout) = (drawn(of_q, 0), drawn(of_k, 1), drawn(of_v, 2), drawn(of_out, 3));
        let (index, gain) = ([0, 3, 1, 2, 0, 1, 2, 3, 1], [0.5, 1.0, 1.5, -1.0]);
        let table: Vec<f32> = (0..4 * 12).map(|i| (i % 7) as f32 / 7.0).collect();
        let arrays = vec![
            ArrayView::contiguous(ArrayData::I32(&index), &[9]),
            ArrayView::contiguous(ArrayData::F32(&gain), &[4]),
            ArrayView::contiguous(ArrayData::F32(&table), &[4, 12]),
        ];
        let inputs =
            Inputs::new(&program, arrays, vec![fa_core::program::Value::F32(0.25)]).expect("they fit");
        let mut output = crate::Output::new(&problem, q.layout).expect("room");
        let views = || [&q, &k, &v].map(|own| own.view("q").expect("a view"));
        let forward = crate::ForwardTensors::of(views(), &mut output, *extras).expect("fits");
        engine.bind(&problem, Pass::Forward).expect("bound").run(forward.with_program(&inputs)).expect("run");
        let (posed, direct) = DirectGradients::of(&problem, Pass::BACKWARD).expect("other indices");
        let backward = |by: &dyn Fn(BackwardTensors<'_, f32>) -> Result<(), Error>| {
            let mut gradients = Gradients::new(&problem, q.layout).expect("room");
            let mut darrays = Vec::new();
            let tensors =
                BackwardTensors::of(views(), &output, &dout, &mut gradients, *extras).expect("fits");
            by(tensors.with_program(&inputs, Some(&mut darrays))).expect("run");
            (gradients.dq.data, darrays)
        };
        let call = engine.bind(&problem, Pass::BACKWARD).expect("bound");
        let (want_dq, want) = backward(&|tensors| call.run(tensors));
        let other = engine.bind(&posed, Pass::BACKWARD).expect("bound");
        let (dq, found) = backward(&|tensors| direct.run(tensors, |tensors| other.time(tensors)).map(drop));
        // Rows of no sequence are not written.
        let same = |a: f32, b: f32| (a - b).abs() <= 1e-4 * (1.0 + b.abs()) || (a.is_nan() && b.is_nan());
        let close = |a: &[f32], b: &[f32]| a.len() == b.len() && a.iter().zip(b).all(|(&a, &b)| same(a, b));
        assert!(close(&dq, &want_dq));
        assert_eq!(found.len(), 3);
        assert!(found[0].is_empty() && found[1].len() == 4 && found[2].len() == 48);
        assert!(found.iter().flatten().all(|sum| sum.is_finite()));
        assert!(found.iter().zip(&want).all(|(a, b)| close(a, b)), "{found:?} {want:?}");
    }
}
