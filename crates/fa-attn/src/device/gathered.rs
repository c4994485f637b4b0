//! A backward in device memory of a program whose arrays kernels do not sum the gradients of: the host
//! gathers and adds up, between copies of the arrays.
#![allow(unsafe_code)]

use std::sync::Arc;

use fa_core::program::{
    ArrayData, ArrayView, DirectGradients, Gathered, MAX_RANK, OwnedArray, OwnedData, OwnedInputs,
    PosedArray, Type, Value,
};
use fa_core::{Pass, Problem};
use fa_kernels::cudarc::driver::sys::CUstreamCaptureStatus;
use fa_kernels::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
use fa_kernels::launch::{RawArray, RawProgram};
use fa_kernels::{Backward, Error as KernelError};

use super::backward::DeviceBackward;
use super::bind::BindOptions;
use super::extras::DeviceProgram;
use super::forward::DeviceForward;
use super::gpu::Gpu;
use super::half::Half;
use super::tensor::doing;
use crate::direct::gather;
use crate::error::Error;

/// A backward whose program reads arrays with gradients twice, or at other indices than `b`, `h` or `hk`, `q`
/// and `k`: a kernel bound to the problem in which arrays with an element for each place stand for these
/// loads.
///
/// A call copies the arrays that the loads read to the host and waits for them, evaluates the loads at every
/// distance or place that their indices follow (up to heads x queries x keys of each sequence; a thread for
/// each load), copies the elements to the GPU (f32) and their gradients back, and adds these up in one order:
/// its time is mostly the host's. A captured stream is refused.
#[derive(Debug)]
pub struct GatheredBackward {
    direct: DirectGradients,
    backward: Backward,
}

impl Gpu {
    /// [`Gpu::bind`] for a backward whose program's arrays are read at any indices; `None` where kernels sum
    /// the gradients of all, which [`Gpu::bind`] binds.
    ///
    /// # Errors
    /// As [`Gpu::bind`].
    pub fn bind_gathered(
        &self,
        problem: &Problem,
        pass: Pass,
        options: &BindOptions,
    ) -> Result<Option<GatheredBackward>, Error> {
        let Some((posed, direct)) = DirectGradients::of(problem, pass) else { return Ok(None) };
        let backward = self.bind(&posed, pass, options)?.backward()?;
        Ok(Some(GatheredBackward { direct, backward }))
    }
}

impl GatheredBackward {
    /// The kernel, which [`DeviceBackward::new`] takes. Its problem's program is the posed one.
    pub fn backward(&self) -> &Backward {
        &self.backward
    }

    /// Computes the gradients of what `forward` holds, those of its program's arrays
    /// ([`DeviceProgram::want_gradients`]) too, and waits for them.
    ///
    /// # Errors
    /// [`Error::Captured`], inputs that are not the program's, and those of [`Backward::run`].
    pub fn run<T: Half>(
        &self,
        forward: &mut DeviceForward<T>,
        tensors: &mut DeviceBackward<T>,
        stream: &Arc<CudaStream>,
    ) -> Result<(), Error> {
        let status = stream.capture_status().map_err(Error::driver("asking whether a graph is captured"))?;
        if status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            return Err(Error::Captured);
        }
        let own = self.direct.own();
        forward.extras.check_rows(self.backward.problem())?;
        let lengths = forward.extras.host_lengths(stream)?;
        let need = own.arrays().len();
        let missing = KernelError::MissingExtra { name: "program", need };
        let program = forward.extras.program.as_ref().ok_or(missing)?;
        let host = on_host(program, &self.direct, stream)?;
        let inputs = host.view(own).map_err(fa_cpu::CpuError::from)?;
        let places = self.direct.places(&lengths.view());
        let made: Vec<(Gathered, CudaSlice<f32>)> = gather(&self.direct, &inputs, &places)
            .into_iter()
            .map(|gathered| {
                let values = super::extras::copy(stream, &gathered.values)?;
                Ok((gathered, values))
            })
            .collect::<Result<_, KernelError>>()?;
        let mut rooms = Vec::with_capacity(made.len());
        for (Gathered { values, .. }, _) in &made {
            let room = stream.alloc_zeros::<f32>(values.len().max(1));
            rooms.push(room.map_err(doing("allocating device memory"))?);
        }
        let mut posed = RawProgram::default();
        let whole = program.raw(Pass::BACKWARD);
        posed.scalars = whole.scalars;
        for (to, array) in self.direct.arrays().enumerate() {
            (posed.arrays[to], posed.gradients[to]) = match array {
                PosedArray::Own(slot) if self.direct.is_summed(to) => {
                    posed.is_narrow[to] = whole.is_narrow[slot];
                    (whole.arrays[slot], whole.gradients[slot])
                }
                PosedArray::Own(slot) => (whole.arrays[slot], 0),
                PosedArray::Gathered(at) => {
                    let (Gathered { extents, values }, data) = &made[at];
                    let ArrayView { strides, extents, .. } =
                        ArrayView::contiguous(ArrayData::F32(values), extents);
                    let address = data.device_ptr(stream).0;
                    (RawArray { address, strides, extents }, rooms[at].device_ptr_mut(stream).0)
                }
            };
        }
        let mut raw = tensors.raw(forward, stream);
        raw.extras.program = Some(posed);
        // SAFETY: the addresses are those of tensors with these placements, which live until the stream has
        // been waited for; starts were checked when they were copied to the GPU, and against the problem now.
        unsafe { self.backward.run_raw(stream, &raw) }?;
        let found = rooms.iter().map(|room| stream.clone_dtoh(room).map_err(doing("copying from the GPU")));
        let found: Vec<Vec<f32>> = found.collect::<Result<_, _>>()?;
        stream.synchronize().map_err(Error::driver("waiting for the GPU"))?;
        let sums: Vec<Option<Vec<f32>>> = (0..need)
            .map(|slot| self.direct.sums(slot, &inputs, &places, |at| found.get(at).cloned()))
            .collect();
        let rooms = forward.extras.program.iter_mut().flat_map(|program| program.gradients.iter_mut());
        for (room, sums) in rooms.zip(sums) {
            if let (Some(room), Some(sums)) = (room, sums) {
                room.write(stream, &sums)?;
            }
        }
        stream.synchronize().map_err(Error::driver("waiting for the GPU"))
    }
}

/// What a program is given, of the arrays that the host reads; each other array has one element, which
/// nothing reads.
fn on_host(
    program: &DeviceProgram,
    direct: &DirectGradients,
    stream: &Arc<CudaStream>,
) -> Result<OwnedInputs, KernelError> {
    let own = direct.own();
    let raw = program.raw(Pass::Forward);
    let mut arrays = Vec::with_capacity(program.arrays.len());
    let slots = program.arrays.iter().zip(own.arrays()).zip(&raw.arrays).zip(direct.read());
    for (((array, decl), placed), is_read) in slots {
        let (bytes, strides, extents) = if is_read {
            let bytes = stream.clone_dtoh(array).map_err(doing("copying from the GPU"))?;
            (bytes, placed.strides, placed.extents)
        } else {
            (vec![0; decl.element.bytes()], [0; MAX_RANK], [1; MAX_RANK])
        };
        // The bytes are there when the copy has been waited for.
        stream.synchronize().map_err(doing("waiting for the GPU"))?;
        arrays.push(OwnedArray { data: OwnedData::of_bytes(decl.element, &bytes), strides, extents });
    }
    let scalars = own.scalars().iter().zip(raw.scalars).map(|(decl, bits)| match decl.ty {
        Type::F32 => Value::F32(f32::from_bits(bits).into()),
        Type::I32 => Value::I32(bits as i32),
        Type::Bool => Value::Bool(bits != 0),
    });
    Ok(OwnedInputs { arrays, scalars: scalars.collect() })
}
