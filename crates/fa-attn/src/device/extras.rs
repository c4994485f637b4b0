//! The other inputs of a launch in device memory: lengths, page table, slopes, sinks.

use std::sync::Arc;

use fa_core::Pass;
use fa_core::program::{Inputs, Program};
use fa_cpu::{Arguments, Extras};
use fa_kernels::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DeviceRepr};
use fa_kernels::launch::{RawArray, RawProgram};
use fa_kernels::{Backward, Error, Forward, RawExtras};

use super::tensor::doing;

/// Starts and lengths of sequences, page table, slopes and sinks in device memory, as far as the problem has
/// them. Kernels read them when they run: one captured graph serves any values within the problem's bounds.
#[derive(Debug, Default)]
pub struct DeviceExtras {
    /// Copies of the host's extras.
    pub inputs: fa_core::Extras<CudaSlice<i32>, CudaSlice<f32>>,
    /// A work plan that serves all forwards with these lengths, as [`DeviceExtras::make_plan`] makes it.
    /// Without one, every launch makes its own.
    pub plan: Option<CudaSlice<u8>>,
    /// The same for backwards.
    pub backward_plan: Option<CudaSlice<u8>>,
    /// The arrays and scalars of the problem's program.
    pub program: Option<DeviceProgram>,
}

/// Arrays and scalars of a program: the arrays in device memory, where a captured graph reads them.
#[derive(Debug)]
pub struct DeviceProgram {
    /// The elements, in the order of the program's declarations.
    pub arrays: Vec<CudaSlice<u8>>,
    /// Their gradients, each packed, of those that a backward is to compute.
    pub gradients: Vec<Option<CudaSlice<f32>>>,
    /// Strides, extents and scalars; the addresses are those of `arrays`.
    layout: RawProgram,
}

impl DeviceProgram {
    /// Copies of the host's arrays.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn upload(stream: &Arc<CudaStream>, inputs: &Inputs<'_>) -> Result<DeviceProgram, Error> {
        let mut layout = RawProgram { scalars: inputs.scalar_bits(), ..RawProgram::default() };
        let mut arrays = Vec::new();
        for (array, to) in inputs.arrays().iter().zip(&mut layout.arrays) {
            *to = RawArray { address: 0, strides: array.strides, extents: array.extents };
            arrays.push(copy(stream, &array.data.bytes())?);
        }
        Ok(DeviceProgram { arrays, gradients: Vec::new(), layout })
    }

    /// Makes room for the gradients of the arrays that want one; backwards write them from now on.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn want_gradients(&mut self, stream: &Arc<CudaStream>, program: &Program) -> Result<(), Error> {
        self.gradients.clear();
        for (decl, array) in program.arrays().iter().zip(&self.layout.arrays) {
            let len =
                array.extents[..decl.rank].iter().map(|&extent| extent.max(0) as usize).product::<usize>();
            let room = decl.gradient.then(|| stream.alloc_zeros(len.max(1))).transpose();
            self.gradients.push(room.map_err(doing("allocating device memory"))?);
        }
        Ok(())
    }

    /// Copies other elements into the same memory, for instance between replays of a captured graph; scalars,
    /// strides and extents stay those of the upload.
    ///
    /// # Errors
    /// [`Error::TooShort`] where an array has another number of elements, [`Error::Driver`].
    pub fn update(&mut self, stream: &Arc<CudaStream>, inputs: &Inputs<'_>) -> Result<(), Error> {
        for (to, array) in self.arrays.iter_mut().zip(inputs.arrays()) {
            let bytes = array.data.bytes();
            replace(stream, "program", Some(to), Some(&bytes))?;
        }
        Ok(())
    }

    /// What a launch takes.
    pub fn raw(&self, pass: Pass) -> RawProgram {
        let mut raw = self.layout;
        let wanted = self.gradients.iter().filter(|_| pass.is_backward());
        for (to, gradient) in raw.gradients.iter_mut().zip(wanted) {
            *to = gradient.as_ref().map_or(0, |own| own.device_ptr(own.stream()).0);
        }
        for (to, array) in raw.arrays.iter_mut().zip(&self.arrays) {
            to.address = array.device_ptr(array.stream()).0;
        }
        raw
    }
}

impl DeviceExtras {
    /// Copies of the host's extras.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn upload<'a>(
        stream: &Arc<CudaStream>,
        arguments: impl Into<Arguments<'a>>,
    ) -> Result<DeviceExtras, Error> {
        let Arguments { extras, program, .. } = arguments.into();
        let program = program.map(|inputs| DeviceProgram::upload(stream, inputs)).transpose()?;
        let inputs = extras.try_map(|_, values| copy(stream, values), |_, values| copy(stream, values))?;
        Ok(DeviceExtras { inputs, plan: None, backward_plan: None, program })
    }

    /// Copies new values into the same memory, for instance between replays of a captured graph. The host
    /// slices are read before this returns.
    ///
    /// # Errors
    /// [`Error::MissingExtra`] and [`Error::UnusedExtra`] where the set of tensors differs from the uploaded
    /// one, [`Error::TooShort`] where a length does, [`Error::Driver`].
    pub fn update(&mut self, stream: &Arc<CudaStream>, extras: &Extras<'_>) -> Result<(), Error> {
        self.inputs.as_mut().zip(*extras).try_map(
            |extra, (slice, values)| replace(stream, extra.name(), slice, values),
            |extra, (slice, values)| replace(stream, extra.name(), slice, values),
        )?;
        Ok(())
    }

    /// Plans the work of `forward` for the lengths that are in device memory now: once a step, for all layers
    /// whose kernel and problem are the same. Allocates at the first call; the launch waits for nothing.
    /// After [`DeviceExtras::update`], plan again. Does nothing for a kernel that needs no plan.
    ///
    /// # Errors
    /// As [`Forward::plan`].
    pub fn make_plan(&mut self, forward: &Forward, stream: &Arc<CudaStream>) -> Result<(), Error> {
        let Some(mut plan) = room(stream, self.plan.take(), forward.plan_bytes())? else { return Ok(()) };
        let planned = forward.plan(stream, self.args(), &mut plan);
        self.plan = Some(plan);
        planned
    }

    /// [`DeviceExtras::make_plan`] for backwards.
    ///
    /// # Errors
    /// As [`Backward::plan`].
    pub fn make_backward_plan(&mut self, backward: &Backward, stream: &Arc<CudaStream>) -> Result<(), Error> {
        let Some(mut plan) = room(stream, self.backward_plan.take(), backward.plan_bytes())? else {
            return Ok(());
        };
        let planned = backward.plan(stream, self.backward_args(&mut None), &mut plan);
        self.backward_plan = Some(plan);
        planned
    }

    /// The extras as arguments of a forward.
    pub fn args(&self) -> fa_kernels::Extras<'_> {
        fa_kernels::Extras { plan: self.plan.as_ref().map(|plan| plan as _), ..self.args_of(Pass::Forward) }
    }

    /// The extras as arguments of a backward, with the gradient of the sinks.
    pub fn backward_args<'a>(&'a self, dsinks: &'a mut Option<CudaSlice<f32>>) -> fa_kernels::Extras<'a> {
        fa_kernels::Extras {
            plan: self.backward_plan.as_ref().map(|plan| plan as _),
            dsinks: dsinks.as_mut().map(|slice| slice as _),
            ..self.args_of(Pass::BACKWARD)
        }
    }

    fn args_of(&self, pass: Pass) -> fa_kernels::Extras<'_> {
        let inputs = self.inputs.as_ref().read_by(pass);
        let inputs =
            inputs.map(|_, slice| slice as &dyn DevicePtr<i32>, |_, slice| slice as &dyn DevicePtr<f32>);
        let program = self.program.as_ref().map(|program| program.raw(pass));
        fa_kernels::Extras { inputs, program, ..fa_kernels::Extras::default() }
    }

    /// The addresses for a forward.
    pub fn raw(&self, stream: &CudaStream) -> RawExtras {
        self.raw_of(Pass::Forward, &self.plan, stream)
    }

    /// The addresses for a backward.
    pub fn backward_raw(&self, dsinks: Option<u64>, stream: &CudaStream) -> RawExtras {
        RawExtras { dsinks, ..self.raw_of(Pass::BACKWARD, &self.backward_plan, stream) }
    }

    fn raw_of(&self, pass: Pass, plan: &Option<CudaSlice<u8>>, stream: &CudaStream) -> RawExtras {
        let inputs = self.inputs.as_ref().read_by(pass);
        let inputs = inputs.map(|_, slice| slice.device_ptr(stream).0, |_, slice| slice.device_ptr(stream).0);
        let plan = plan.as_ref().map(|plan| plan.device_ptr(stream).0);
        let program = self.program.as_ref().map(|program| program.raw(pass));
        RawExtras { inputs, plan, program, ..RawExtras::default() }
    }
}

/// Makes `memory` at least `bytes` bytes long, reusing what is long enough; `None` for 0 bytes.
fn room(
    stream: &Arc<CudaStream>,
    have: Option<CudaSlice<u8>>,
    bytes: usize,
) -> Result<Option<CudaSlice<u8>>, Error> {
    match have {
        _ if bytes == 0 => Ok(None),
        Some(have) if have.len() >= bytes => Ok(Some(have)),
        _ => stream.alloc_zeros(bytes).map(Some).map_err(doing("allocating device memory")),
    }
}

/// Copies `values` over those that are there.
fn replace<T: DeviceRepr>(
    stream: &Arc<CudaStream>,
    name: &'static str,
    slice: Option<&mut CudaSlice<T>>,
    values: Option<&[T]>,
) -> Result<(), Error> {
    match (slice, values) {
        (None, None) => Ok(()),
        (None, Some(_)) => Err(Error::UnusedExtra { name }),
        (Some(slice), None) => Err(Error::MissingExtra { name, need: slice.len() }),
        (Some(slice), Some(values)) if values.is_empty() && slice.len() == 1 => Ok(()),
        (Some(slice), Some(values)) if values.len() != slice.len() => {
            let (have, need) = (values.len() as u64, slice.len() as u64);
            Err(Error::TooShort { tensor: name, have, need })
        }
        (Some(slice), Some(values)) => stream.memcpy_htod(values, slice).map_err(doing("copying to the GPU")),
    }
}

/// A device copy; CUDA rejects allocations of zero bytes, so that an empty slice takes one element.
pub(super) fn copy<T: DeviceRepr + Default + Clone>(
    stream: &Arc<CudaStream>,
    values: &[T],
) -> Result<CudaSlice<T>, Error> {
    let one = [T::default()];
    let values = if values.is_empty() { &one } else { values };
    stream.clone_htod(values).map_err(doing("copying to the GPU"))
}
