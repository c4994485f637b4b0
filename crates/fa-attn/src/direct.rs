//! Gradients of a program's arrays that kernels do not sum ([`DirectGradients`]), of host tensors on a GPU.

use std::time::Duration;

use fa_core::program::{ArrayData, ArrayView, DirectGradients, Gathered, Inputs, Places, PosedArray};
use rayon::prelude::*;

use crate::element::Element;
use crate::error::Error;
use crate::tensors::{BackwardTensors, Tensors};

/// What stands for each load: a thread for each.
pub(crate) fn gather(direct: &DirectGradients, inputs: &Inputs<'_>, places: &Places) -> Vec<Gathered> {
    direct.loads().par_iter().map(|load| direct.gather(load, inputs, places)).collect()
}

/// Computes `tensors` by `run`, which takes those of the other problem.
///
/// # Errors
/// [`Error::Pass`] for a forward, inputs that are not the program's, and those of `run`.
pub(crate) fn run<T: Element>(
    direct: &DirectGradients,
    tensors: BackwardTensors<'_, T>,
    run: impl FnOnce(Tensors<'_, T>) -> Result<Duration, Error>,
) -> Result<Duration, Error> {
    let of_inputs = |error| Error::Cpu(fa_cpu::CpuError::from(error));
    let Some(inputs) = tensors.program else { return run(tensors.into()) };
    inputs.check(direct.own()).map_err(of_inputs)?;
    let places = direct.places(&tensors.extras);
    let gathered = gather(direct, inputs, &places);
    let arrays = direct.arrays().map(|array| match array {
        PosedArray::Own(slot) => inputs.arrays()[slot],
        PosedArray::Gathered(at) => {
            let Gathered { extents, values } = &gathered[at];
            ArrayView::contiguous(ArrayData::F32(values), extents)
        }
    });
    let posed = Inputs::new(direct.made(), arrays.collect(), inputs.scalars().to_vec()).map_err(of_inputs)?;
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
        let at = direct.arrays().position(|own| own == array)?;
        found.get_mut(at).map(std::mem::take)
    };
    let of_loads: Vec<_> = (0..direct.loads().len()).map(|at| take(PosedArray::Gathered(at))).collect();
    let slots = direct.own().arrays().iter().enumerate();
    *darrays = slots
        .map(|(slot, decl)| {
            let sums = direct.sums(slot, inputs, &places, |at| of_loads[at].clone());
            let kept = || take(PosedArray::Own(slot)).filter(|_| decl.gradient);
            sums.or_else(kept).unwrap_or_default()
        })
        .collect();
    Ok(time)
}

#[cfg(test)]
mod tests {
    use fa_core::program::Program;
    use fa_core::{Dtype, Lengths, Mask, Pass, Problem, ScoreMod, Side};
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
        let text = "array c: i32[_]; array g: f32[_] grad; array t: f32[_, _] grad; \
                    array unread: f32[_, _] grad; scalar x: f32; \
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
            ArrayView::contiguous(ArrayData::F32(&table), &[6, 8]),
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
        let (dq, found) = backward(&|tensors| run(&direct, tensors, |tensors| other.time(tensors)).map(drop));
        // Rows of no sequence are not written.
        let same = |a: f32, b: f32| (a - b).abs() <= 1e-4 * (1.0 + b.abs()) || (a.is_nan() && b.is_nan());
        let close = |a: &[f32], b: &[f32]| a.len() == b.len() && a.iter().zip(b).all(|(&a, &b)| same(a, b));
        assert!(close(&dq, &want_dq));
        assert_eq!(found.len(), 4);
        assert!(found[0].is_empty() && found[1].len() == 4 && found[2].len() == 48);
        assert_eq!(found[3], [0.0; 48]);
        assert!(found.iter().flatten().all(|sum| sum.is_finite()));
        assert!(found.iter().zip(&want).all(|(a, b)| close(a, b)), "{found:?} {want:?}");
    }
}
