//! Gradients of a program's arrays that kernels do not sum, of host tensors on a GPU: an array with an
//! element for each place, which the host gathers, stands for each of their loads, and the host adds up its
//! gradient.

use std::time::Duration;

use fa_core::program::{ArrayData, ArrayView, Direct, Inputs, Interned, Places};
use fa_core::{Pass, Problem};

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

impl DirectGradients {
    /// The problem that a kernel computes in place of `problem`, and what it needs of the host; `None` where
    /// kernels sum all gradients, or the sequences differ in length.
    pub(crate) fn of(problem: &Problem, pass: Pass) -> Option<(Problem, DirectGradients)> {
        let own = problem.score.program.filter(|_| pass.is_backward())?;
        let places = Places::of(problem)?;
        let (made, loads) = own.with_direct_gradients().ok()??;
        let made = made.intern().ok()?;
        let posed = problem.with_score(problem.score.with_program(Some(made)));
        Some((posed, DirectGradients { own, made, loads, places }))
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
        let gathered: Vec<(Vec<usize>, Vec<f32>)> = self
            .loads
            .iter()
            .map(|load| (self.places.extents(load), self.own.gathered(load, inputs, &self.places)))
            .collect();
        let place = |name: &str| self.own.arrays().iter().position(|own| own.name == name);
        let stands = |name: &str| self.loads.iter().position(|load| load.name == name);
        let arrays = self.made.arrays().iter().map(|decl| match (stands(&decl.name), place(&decl.name)) {
            (Some(at), _) => {
                let (extents, values) = &gathered[at];
                ArrayView::contiguous(ArrayData::F32(values), extents)
            }
            (None, place) => inputs.arrays()[place.unwrap_or(0)],
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
        darrays.clear();
        for (slot, decl) in self.own.arrays().iter().enumerate() {
            let of = |name: &str| self.made.arrays().iter().position(|own| own.name == name);
            let mut loads = self.loads.iter().filter(|load| load.array(&self.own) == Some(slot)).peekable();
            if !decl.gradient || loads.peek().is_none() {
                let kept = of(&decl.name).filter(|_| decl.gradient).and_then(|at| found.get_mut(at));
                darrays.push(kept.map(std::mem::take).unwrap_or_default());
                continue;
            }
            let extents = &inputs.arrays()[slot].extents[..decl.rank];
            let mut sums = vec![0.0; extents.iter().map(|&extent| extent.max(0) as usize).product()];
            for load in loads {
                if let Some(gradient) = of(&load.name).and_then(|at| found.get(at)) {
                    self.own.scatter(load, inputs, &self.places, gradient, &mut sums);
                }
            }
            darrays.push(sums.into_iter().map(|sum| sum as f32).collect());
        }
        Ok(time)
    }
}

#[cfg(test)]
mod tests {
    use fa_core::program::Program;
    use fa_core::{Dtype, Mask, ScoreMod};

    use super::*;
    use crate::{Backend, CpuOptions, Engine, Gradients, Tensor};

    /// The same by the CPU, which sums gradients of any indices, for both programs.
    #[test]
    fn gathered_arrays_have_the_gradients_of_what_they_stand_for() {
        let text = "array c: i32[_]; array g: f32[_] grad; array t: f32[_, _] grad; scalar x: f32; \
                    mask = k <= q; score = s * g[h] + t[h, q - k + 1] - x * t[c[k], 2];";
        let program = Program::parse(text).expect("parsed").intern().expect("room");
        let problem = Problem::square(2, 9, 4, 16, Mask::FULL, Dtype::F32)
            .with_score(ScoreMod::NONE.with_program(Some(program)));
        let engine = Engine::with(Backend::Cpu(CpuOptions::default())).expect("a CPU");
        let shape = [2, 9, 4, 16];
        let drawn = |turn: usize| -> Tensor<f32> {
            let values = (0..2 * 9 * 4 * 16).map(|i| ((i * 37 + turn * 11) % 23) as f32 / 11.0 - 1.0);
            Tensor::new(shape, values.collect()).expect("a tensor")
        };
        let (q, k, v, dout) = (drawn(0), drawn(1), drawn(2), drawn(3));
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
        let forward = crate::ForwardTensors::of(views(), &mut output, fa_cpu::Extras::NONE).expect("fits");
        engine.bind(&problem, Pass::Forward).expect("bound").run(forward.with_program(&inputs)).expect("run");
        let (posed, direct) = DirectGradients::of(&problem, Pass::BACKWARD).expect("other indices");
        let backward = |by: &dyn Fn(BackwardTensors<'_, f32>) -> Result<(), Error>| {
            let mut gradients = Gradients::new(&problem, q.layout).expect("room");
            let mut darrays = Vec::new();
            let tensors = BackwardTensors::of(views(), &output, &dout, &mut gradients, fa_cpu::Extras::NONE)
                .expect("fits");
            by(tensors.with_program(&inputs, Some(&mut darrays))).expect("run");
            (gradients.dq.data, darrays)
        };
        let call = engine.bind(&problem, Pass::BACKWARD).expect("bound");
        let (want_dq, want) = backward(&|tensors| call.run(tensors));
        let other = engine.bind(&posed, Pass::BACKWARD).expect("bound");
        let (dq, found) = backward(&|tensors| direct.run(tensors, |tensors| other.time(tensors)).map(drop));
        let close = |a: &[f32], b: &[f32]| {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-4 * (1.0 + b.abs()))
        };
        assert!(close(&dq, &want_dq));
        assert_eq!(found.len(), 3);
        assert!(found[0].is_empty() && found[1].len() == 4 && found[2].len() == 48);
        assert!(found.iter().zip(&want).all(|(a, b)| close(a, b)), "{found:?} {want:?}");
    }
}
