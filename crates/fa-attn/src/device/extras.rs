//! What a launch is given beside its tensors, in device memory.

use std::sync::Arc;

use fa_cpu::Extras;
use fa_kernels::Error;
use fa_kernels::cudarc::driver::{CudaSlice, CudaStream, DeviceRepr};

use super::tensor::doing;

/// Starts and lengths of sequences, page table, slopes and sinks in device memory: those that the problem
/// names. Kernels read them there when they run, so that one captured graph serves whatever they hold then,
/// within the problem's bounds.
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
}

impl DeviceExtras {
    /// Copies of the host's.
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
        })
    }
}

/// CUDA rejects allocations of zero bytes: an empty one has an element.
fn copy<T: DeviceRepr + Default + Clone>(
    stream: &Arc<CudaStream>,
    values: Option<&[T]>,
) -> Result<Option<CudaSlice<T>>, Error> {
    let Some(values) = values else { return Ok(None) };
    let one = [T::default()];
    let values = if values.is_empty() { &one } else { values };
    stream.clone_htod(values).map(Some).map_err(doing("copying to the GPU"))
}
