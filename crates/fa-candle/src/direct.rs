//! Gradients of a program's arrays that kernels do not sum: an array with an element for each place, which
//! the host gathers, stands for each of their loads, and the host adds up its gradient.

use candle_core::{Device, Result, Tensor, Var};
use fa_core::program::{Interned, Places};

use crate::error::{Error, refused};
use crate::problem::{Gradients, Posed};
use crate::programs::ProgramCall;
use crate::{cpu, cuda};

/// The gradients by `run`, where it sums those of all arrays of its program.
pub(crate) fn backward(
    posed: &Posed,
    device: &Device,
    run: impl FnOnce(&Posed) -> Result<Gradients>,
) -> Result<Gradients> {
    let Some(own) = &posed.program else { return run(posed) };
    let Some((made, loads)) = own.program.with_direct_gradients().map_err(refused)? else {
        return run(posed);
    };
    cuda::check_not_captured(device)?;
    let lengths = cpu::on_host(&posed.lengths())?;
    let places = Places::of(&posed.problem).with_lengths(&lengths.view());
    let made: Interned = made.intern().map_err(Error::from)?;
    let arrays = own.arrays.iter().map(|array| array.to_device(&Device::Cpu));
    let host = ProgramCall { arrays: arrays.collect::<Result<_>>()?, ..own.clone() };
    let locked = cpu::lock(&host);
    let inputs = cpu::program_inputs(&host, &locked)?;
    let tracked: Vec<usize> = own.tracked().collect();
    let slot = |name: &str| own.program.arrays().iter().position(|array| array.name == name);
    let arrays = made.arrays().iter().map(|decl| {
        let Some(load) = loads.iter().find(|load| load.name == decl.name) else {
            return slot(&decl.name).map(|slot| own.arrays[slot].clone()).ok_or(Error::NoForward.into());
        };
        let gathered = own.program.gathered(load, &inputs, &places);
        let gathered = Tensor::from_vec(gathered, places.extents(load), device)?;
        // What candle differentiates gets its gradient.
        let is_wanted = load.array(&own.program).is_some_and(|slot| tracked.contains(&slot));
        if is_wanted { Ok(Var::from_tensor(&gathered)?.into_inner()) } else { Ok(gathered) }
    });
    let call =
        ProgramCall { program: made, arrays: arrays.collect::<Result<_>>()?, scalars: own.scalars.clone() };
    let names: Vec<&str> = call.tracked().map(|slot| made.get().arrays()[slot].name.as_str()).collect();
    let problem = posed.problem.with_score(posed.problem.score.with_program(Some(made)));
    let found = run(&Posed { problem, program: Some(call.clone()), ..posed.clone() })?;
    let of = |name: &str| names.iter().position(|own| *own == name).and_then(|at| found.arrays.get(at));
    let mut summed = Vec::with_capacity(tracked.len());
    for slot in tracked {
        let (array, name) = (&own.arrays[slot], &own.program.arrays()[slot].name);
        if let Some(gradient) = of(name) {
            summed.push(gradient.clone());
            continue;
        }
        let mut sums = vec![0f64; array.elem_count()];
        for load in loads.iter().filter(|load| load.array(&own.program) == Some(slot)) {
            let gradient = of(&load.name).ok_or(Error::NoForward)?;
            let gradient = gradient.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?;
            own.program.scatter(load, &inputs, &places, &gradient, &mut sums);
        }
        let sums: Vec<f32> = sums.into_iter().map(|sum| sum as f32).collect();
        summed.push(Tensor::from_vec(sums, array.shape(), device)?);
    }
    Ok(Gradients { arrays: summed, ..found })
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::op::apply;
    use crate::options::Options;
    use crate::program::Program;

    /// The same by the CPU, which sums gradients of any indices, for both programs.
    #[test]
    fn gathered_arrays_have_the_gradients_of_what_they_stand_for() -> Result<()> {
        let device = Device::Cpu;
        let drawn = |shape: &[usize]| Tensor::randn(0f32, 1.0, shape, &device);
        let (q, k, v) = (drawn(&[2, 9, 4, 16])?, drawn(&[2, 9, 2, 16])?, drawn(&[2, 9, 2, 16])?);
        let table = Var::from_tensor(&drawn(&[4, 12])?)?;
        let (gain, fixed) = (Var::from_tensor(&drawn(&[4])?)?, drawn(&[30])?);
        let which = Tensor::new(&[0u32, 3, 1, 2, 0, 1, 2, 3, 1], &device)?;
        let program = Program::new(
            "array c: i32[_]; array f: f32[_] grad; array g: f32[_] grad; array t: f32[_, _] grad; \
             scalar x: f32; mask = k <= q; \
             score = s * g[h] + t[h, q - k + 1] - x * t[c[k], 2] + f[q + k];",
        )?;
        let program = program
            .with_array("c", &which)
            .with_array("f", &fixed)
            .with_array("g", &gain)
            .with_array("t", &table)
            .with_scalar("x", 0.25);
        let options = Options::full(0.25).with_program(Some(&program));
        let posed = Posed::new(&q, &k, &v, &options)?;
        let (out, lse) = apply(&q, &k, &v, posed.clone(), true)?;
        let (lse, dout) = (lse.ok_or(Error::NoForward)?, drawn(&[2, 9, 4, 16])?);
        let by_cpu = |posed: &Posed| cpu::backward(posed, [&q, &k, &v], [&out, &lse, &dout], None);
        let want = by_cpu(&posed)?;
        let found = backward(&posed, &device, |other| {
            assert_ne!(other.problem, posed.problem);
            by_cpu(other)
        })?;
        assert_eq!((found.arrays.len(), want.arrays.len()), (2, 2));
        let pairs = found.arrays.iter().zip(&want.arrays).chain(found.inputs.iter().zip(&want.inputs));
        for (found, want) in pairs {
            assert_eq!(found.dims(), want.dims());
            let apart = (found - want)?.abs()?.flatten_all()?.max(0)?.to_dtype(DType::F32)?;
            assert!(apart.to_scalar::<f32>()? < 1e-3, "{apart}");
        }
        Ok(())
    }
}
