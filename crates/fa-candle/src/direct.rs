//! Gradients of a program's arrays that kernels do not sum ([`DirectGradients`]), of tensors on a GPU.

use candle_core::{Device, Result, Tensor, Var};
use fa_core::Pass;
use fa_core::program::{DirectGradients, Gathered, PosedArray};

use crate::error::Error;
use crate::problem::{Gradients, Posed};
use crate::programs::ProgramCall;
use crate::{cpu, cuda};

/// The gradients by `run`, where it sums those of all arrays of its program.
pub(crate) fn backward(
    posed: &Posed,
    device: &Device,
    run: impl FnOnce(&Posed) -> Result<Gradients>,
) -> Result<Gradients> {
    let direct = DirectGradients::of(&posed.problem, Pass::BACKWARD);
    let (Some(own), Some((problem, direct))) = (&posed.program, direct) else { return run(posed) };
    cuda::check_not_captured(device)?;
    let lengths = cpu::on_host(&posed.lengths())?;
    let places = direct.places(&lengths.view());
    let arrays = own.arrays.iter().map(|array| array.to_device(&Device::Cpu));
    let host = ProgramCall { arrays: arrays.collect::<Result<_>>()?, ..own.clone() };
    let locked = cpu::lock(&host);
    let inputs = cpu::program_inputs(&host, &locked)?;
    let tracked: Vec<usize> = own.tracked().collect();
    let arrays = direct.arrays().map(|array| match array {
        PosedArray::Own(slot) => Ok(own.arrays[slot].clone()),
        PosedArray::Gathered(at) => {
            let load = &direct.loads()[at];
            let Gathered { extents, values } = direct.gather(load, &inputs, &places);
            let gathered = Tensor::from_vec(values, extents, device)?;
            // What candle differentiates gets its gradient.
            let is_wanted = load.array(&own.program).is_some_and(|slot| tracked.contains(&slot));
            if is_wanted { Ok(Var::from_tensor(&gathered)?.into_inner()) } else { Ok(gathered) }
        }
    });
    let arrays = arrays.collect::<Result<_>>()?;
    let call = ProgramCall { program: *direct.made(), arrays, scalars: own.scalars.clone() };
    let given: Vec<PosedArray> = direct.arrays().collect();
    let given: Vec<PosedArray> = call.tracked().map(|slot| given[slot]).collect();
    let found = run(&Posed { problem, program: Some(call), ..posed.clone() })?;
    let of = |array: PosedArray| given.iter().position(|own| *own == array).map(|at| &found.arrays[at]);
    let on_host = |at: usize| -> Result<Option<Vec<f32>>> {
        let gradient = of(PosedArray::Gathered(at)).map(|own| own.to_device(&Device::Cpu));
        gradient.map(|own| own?.flatten_all()?.to_vec1()).transpose()
    };
    let of_loads: Vec<Option<Vec<f32>>> = (0..direct.loads().len()).map(on_host).collect::<Result<_>>()?;
    let summed = tracked.into_iter().map(|slot| {
        if let Some(gradient) = of(PosedArray::Own(slot)) {
            return Ok(gradient.clone());
        }
        let sums = direct.sums(slot, &inputs, &places, |at| of_loads[at].clone()).ok_or(Error::NoForward)?;
        Tensor::from_vec(sums, own.arrays[slot].shape(), device)
    });
    Ok(Gradients { arrays: summed.collect::<Result<_>>()?, ..found })
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
        let unread = Var::from_tensor(&drawn(&[5])?)?;
        let which = Tensor::new(&[0u32, 3, 1, 2, 0, 1, 2, 3, 1], &device)?;
        let program = Program::new(
            "array c: i32[_]; array f: f32[_] grad; array g: f32[_] grad; array t: f32[_, _] grad; \
             array unread: f32[_] grad; scalar x: f32; mask = k <= q; \
             score = s * g[h] + t[h, q - k + 1] - x * t[c[k], 2] + f[q + k];",
        )?;
        let program = program
            .with_array("c", &which)
            .with_array("f", &fixed)
            .with_array("g", &gain)
            .with_array("t", &table)
            .with_array("unread", &unread)
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
        assert_eq!((found.arrays.len(), want.arrays.len()), (3, 3));
        assert_eq!(found.arrays[2].to_vec1::<f32>()?, [0.0; 5]);
        let pairs = found.arrays.iter().zip(&want.arrays).chain(found.inputs.iter().zip(&want.inputs));
        for (found, want) in pairs {
            assert_eq!(found.dims(), want.dims());
            let apart = (found - want)?.abs()?.flatten_all()?.max(0)?.to_dtype(DType::F32)?;
            assert!(apart.to_scalar::<f32>()? < 1e-3, "{apart}");
        }
        Ok(())
    }
}
