//! The other inputs of a launch in device memory: lengths, page table, slopes, sinks.

use std::sync::Arc;

use fa_cpu::Extras;
use fa_kernels::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr};
use fa_kernels::{Backward, Error, Forward, RawExtras};

use super::tensor::doing;

/// Starts and lengths of sequences, page table, slopes and sinks in device memory, as far as the problem has
/// them. Kernels read them when they run: one captured graph serves any values within the problem's bounds.
#[derive(Debug, Default)]
pub struct DeviceExtras {
    /// `[batch + 1]`.
    pub cu_q: Option<CudaSlice<i32>>,
    /// `[batch + 1]`.
    pub cu_k: Option<CudaSlice<i32>>,
    /// `[batch]`.
    pub used_q: Option<CudaSlice<i32>>,
    /// `[batch]`.
    pub used_k: Option<CudaSlice<i32>>,
    /// `[batch, ceil(max_k / page)]`.
    pub page_table: Option<CudaSlice<i32>>,
    /// `[heads_q]` or `[batch, heads_q]`.
    pub alibi_slopes: Option<CudaSlice<f32>>,
    /// `[heads_q]`.
    pub sinks: Option<CudaSlice<f32>>,
    /// `[batch, heads_q, seqlen_q]` or `[heads_q, total_q]`: the gradient of the LSE, which backwards read.
    pub dlse: Option<CudaSlice<f32>>,
    /// A work plan that serves all forwards with these lengths, as [`DeviceExtras::make_plan`] makes it.
    /// Without one, every launch makes its own.
    pub plan: Option<CudaSlice<u8>>,
    /// The same for backwards.
    pub backward_plan: Option<CudaSlice<u8>>,
}

impl DeviceExtras {
    /// Copies of the host's extras.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn upload(stream: &Arc<CudaStream>, extras: &Extras<'_>) -> Result<DeviceExtras, Error> {
        Ok(DeviceExtras {
            cu_q: copy(stream, extras.cu_q)?,
            cu_k: copy(stream, extras.cu_k)?,
            used_q: copy(stream, extras.used_q)?,
            used_k: copy(stream, extras.used_k)?,
            page_table: copy(stream, extras.page_table)?,
            alibi_slopes: copy(stream, extras.alibi_slopes)?,
            sinks: copy(stream, extras.sinks)?,
            dlse: copy(stream, extras.dlse)?,
            plan: None,
            backward_plan: None,
        })
    }

    /// Copies new values into the same memory, for instance between replays of a captured graph. The host
    /// slices are read before this returns.
    ///
    /// # Errors
    /// [`Error::MissingExtra`] and [`Error::UnusedExtra`] where the set of tensors differs from the uploaded
    /// one, [`Error::TooShort`] where a length does, [`Error::Driver`].
    pub fn update(&mut self, stream: &Arc<CudaStream>, extras: &Extras<'_>) -> Result<(), Error> {
        replace(stream, "cu_q", &mut self.cu_q, extras.cu_q)?;
        replace(stream, "cu_k", &mut self.cu_k, extras.cu_k)?;
        replace(stream, "used_q", &mut self.used_q, extras.used_q)?;
        replace(stream, "used_k", &mut self.used_k, extras.used_k)?;
        replace(stream, "page_table", &mut self.page_table, extras.page_table)?;
        replace(stream, "alibi_slopes", &mut self.alibi_slopes, extras.alibi_slopes)?;
        replace(stream, "sinks", &mut self.sinks, extras.sinks)?;
        replace(stream, "dlse", &mut self.dlse, extras.dlse)
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
        fn read<T>(slice: &Option<CudaSlice<T>>) -> Option<&dyn DevicePtr<T>> {
            slice.as_ref().map(|slice| slice as &dyn DevicePtr<T>)
        }
        fa_kernels::Extras {
            cu_q: read(&self.cu_q),
            cu_k: read(&self.cu_k),
            used_q: read(&self.used_q),
            used_k: read(&self.used_k),
            page_table: read(&self.page_table),
            alibi_slopes: read(&self.alibi_slopes),
            sinks: read(&self.sinks),
            plan: read(&self.plan),
            page_faults: None,
            dsinks: None,
            dlse: None,
        }
    }

    /// The extras as arguments of a backward, with the gradient of the sinks.
    pub fn backward_args<'a>(&'a self, dsinks: &'a mut Option<CudaSlice<f32>>) -> fa_kernels::Extras<'a> {
        let dsinks = dsinks.as_mut().map(|slice| slice as &mut dyn DevicePtrMut<f32>);
        let plan = self.backward_plan.as_ref().map(|plan| plan as &dyn DevicePtr<u8>);
        let dlse = self.dlse.as_ref().map(|dlse| dlse as &dyn DevicePtr<f32>);
        fa_kernels::Extras { dsinks, dlse, plan, ..self.args() }
    }

    /// The addresses for a forward.
    pub fn raw(&self, stream: &CudaStream) -> RawExtras {
        fn at<T>(slice: &Option<CudaSlice<T>>, stream: &CudaStream) -> Option<u64> {
            slice.as_ref().map(|slice| slice.device_ptr(stream).0)
        }
        RawExtras {
            cu_q: at(&self.cu_q, stream),
            cu_k: at(&self.cu_k, stream),
            used_q: at(&self.used_q, stream),
            used_k: at(&self.used_k, stream),
            page_table: at(&self.page_table, stream),
            alibi_slopes: at(&self.alibi_slopes, stream),
            sinks: at(&self.sinks, stream),
            plan: at(&self.plan, stream),
            counter: None,
            page_faults: None,
            dsinks: None,
            dlse: None,
        }
    }

    /// The addresses for a backward.
    pub fn backward_raw(&self, dsinks: Option<u64>, stream: &CudaStream) -> RawExtras {
        let plan = self.backward_plan.as_ref().map(|plan| plan.device_ptr(stream).0);
        let dlse = self.dlse.as_ref().map(|dlse| dlse.device_ptr(stream).0);
        RawExtras { plan, dsinks, dlse, ..self.raw(stream) }
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
    slice: &mut Option<CudaSlice<T>>,
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
    values: Option<&[T]>,
) -> Result<Option<CudaSlice<T>>, Error> {
    let Some(values) = values else { return Ok(None) };
    let one = [T::default()];
    let values = if values.is_empty() { &one } else { values };
    stream.clone_htod(values).map(Some).map_err(doing("copying to the GPU"))
}
