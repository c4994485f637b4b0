//! The device tensors of a backward, next to those of its forward.
#![allow(unsafe_code)]

use std::sync::Arc;

use fa_core::{Pass, Strides, TensorLayout};
use fa_kernels::cudarc::driver::{CudaGraph, CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
use fa_kernels::launch::RawProgram;
use fa_kernels::{Backward, BackwardArgs, Error, RawBackwardArgs};

use super::forward::{DeviceForward, capture};
use super::half::Half;
use super::tensor::{DeviceTensor, Placement, doing, fill_with_nan};

/// dO, the gradients and the workspace of one backward.
#[derive(Debug)]
pub struct DeviceBackward<T> {
    /// The gradient of O, `[batch, seqlen_q, heads_q, head_dim_v]`.
    pub dout: DeviceTensor<T>,
    /// The gradient of Q.
    pub dq: DeviceTensor<T>,
    /// The gradient of K.
    pub dk: DeviceTensor<T>,
    /// The gradient of V.
    pub dv: DeviceTensor<T>,
    /// The gradient of the sinks, `[heads_q]`, where there are some.
    pub dsinks: Option<CudaSlice<f32>>,
    /// The kernel's workspace.
    pub workspace: CudaSlice<u8>,
    /// Where the gradients of scores go whose sums are an array's ([`Backward::room_bytes`]).
    pub room: Option<CudaSlice<u8>>,
}

/// What a backward wrote.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceGradients<T> {
    /// dQ, dK and dV, packed `[batch, seqlen, heads, dim]`.
    pub values: [Vec<T>; 3],
    /// Elements in the gaps between rows that are not NaN any more: stray writes.
    pub strays: usize,
}

impl<T: Half> DeviceGradients<T> {
    /// Whether both are equal bit by bit.
    pub fn same_bits(&self, other: &DeviceGradients<T>) -> bool {
        self.values.iter().zip(&other.values).all(|(a, b)| T::bits(a) == T::bits(b))
    }
}

/// Says to a call's program where its room is.
fn give_room(program: &mut Option<RawProgram>, room: &Option<CudaSlice<u8>>, stream: &CudaStream) {
    if let Some(program) = program {
        program.room = room.as_ref().map_or(0, |room| room.device_ptr(stream).0);
    }
}

impl<T: Half> DeviceBackward<T> {
    /// Next to `dout`: gradients that hold NaN, placed as Q, K and V are (packed BSHD for those with
    /// broadcast axes), and a workspace that holds NaN.
    ///
    /// # Errors
    /// [`Error::Driver`], above all for want of memory.
    pub fn new(
        stream: &Arc<CudaStream>,
        backward: &Backward,
        forward: &DeviceForward<T>,
        dout: DeviceTensor<T>,
    ) -> Result<DeviceBackward<T>, Error> {
        let placement = |of: &DeviceTensor<T>| {
            let Placement { shape, strides: Strides { batch, seq, head, .. } } = of.placement;
            let broadcast = [batch, seq, head].contains(&0);
            if broadcast { Placement::packed(shape, TensorLayout::Bshd) } else { of.placement }
        };
        let room = |of: &DeviceTensor<T>| DeviceTensor::nan(stream, placement(of));
        let bytes = backward.workspace_bytes().max(16);
        let workspace = stream.alloc_zeros(bytes).map_err(doing("allocating device memory"))?;
        let (dq, dk, dv) = (room(&forward.q)?, room(&forward.k)?, room(&forward.v)?);
        let problem = backward.problem();
        let dsinks = problem.score.sinks.then(|| stream.alloc_zeros(problem.heads_q));
        let dsinks = dsinks.transpose().map_err(doing("allocating device memory"))?;
        let program = forward.extras.program.as_ref().map(|program| program.raw(Pass::BACKWARD));
        // Gradients in f32 are summed without terms of 16 bits.
        let program = program.filter(|program| program.is_narrow.contains(&true));
        let bytes = program.map_or(0, |program| backward.room_bytes(&program));
        let room = (bytes > 0).then(|| stream.alloc_zeros(bytes)).transpose();
        let room = room.map_err(doing("allocating device memory"))?;
        let mut made = DeviceBackward { dout, dq, dk, dv, dsinks, workspace, room };
        made.poison_memory(stream)?;
        Ok(made)
    }

    fn poison_memory(&mut self, stream: &CudaStream) -> Result<(), Error> {
        self.room.iter_mut().try_for_each(|room| fill_with_nan(stream, room))?;
        fill_with_nan(stream, &mut self.workspace)
    }

    /// Grows the workspace to what another kernel needs.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn fit(&mut self, stream: &Arc<CudaStream>, backward: &Backward) -> Result<(), Error> {
        if self.workspace.len() < backward.workspace_bytes() {
            let made = doing("allocating device memory");
            self.workspace = stream.alloc_zeros(backward.workspace_bytes()).map_err(made)?;
        }
        Ok(())
    }

    /// Fills gradients, gaps included, and workspace with NaN.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn poison(&mut self, stream: &CudaStream) -> Result<(), Error> {
        [&mut self.dq, &mut self.dk, &mut self.dv].into_iter().try_for_each(|to| to.poison(stream))?;
        self.poison_memory(stream)
    }

    /// Launches `backward` on what `forward` holds: allocates nothing, waits for nothing.
    ///
    /// # Errors
    /// What [`Backward::run`] refuses.
    pub fn run(
        &mut self,
        forward: &DeviceForward<T>,
        backward: &Backward,
        stream: &CudaStream,
    ) -> Result<(), Error> {
        forward.extras.check_rows(backward.problem())?;
        let mut extras = forward.extras.backward_args(&mut self.dsinks);
        give_room(&mut extras.program, &self.room, stream);
        let args = BackwardArgs {
            q: forward.q.input(),
            k: forward.k.input(),
            v: forward.v.input(),
            out: forward.out.input(),
            lse: &forward.lse,
            dout: self.dout.input(),
            dq: self.dq.output(),
            dk: self.dk.output(),
            dv: self.dv.output(),
            workspace: &mut self.workspace,
            extras,
        };
        // SAFETY: starts were checked when they were copied to the GPU, and against the problem now.
        unsafe { backward.run(stream, args) }
    }

    /// The addresses.
    pub fn raw(&mut self, forward: &DeviceForward<T>, stream: &CudaStream) -> RawBackwardArgs {
        RawBackwardArgs {
            q: forward.q.raw(stream),
            k: forward.k.raw(stream),
            v: forward.v.raw(stream),
            out: forward.out.raw(stream),
            lse: forward.lse.device_ptr(stream).0,
            dout: self.dout.raw(stream),
            dq: self.dq.raw(stream),
            dk: self.dk.raw(stream),
            dv: self.dv.raw(stream),
            workspace: self.workspace.device_ptr_mut(stream).0,
            extras: {
                let dsinks = self.dsinks.as_mut().map(|dsinks| dsinks.device_ptr_mut(stream).0);
                let mut extras = forward.extras.backward_raw(dsinks, stream);
                give_room(&mut extras.program, &self.room, stream);
                extras
            },
        }
    }

    /// The launches on `stream` (not the default one) captured as a CUDA graph.
    ///
    /// # Safety
    /// As for [`super::capture()`]: these tensors and the forward's stay while the graph is launched.
    ///
    /// # Errors
    /// [`Error::Beyond`] and [`Error::Driver`].
    pub unsafe fn capture(
        &mut self,
        forward: &DeviceForward<T>,
        backward: &Backward,
        stream: &Arc<CudaStream>,
    ) -> Result<CudaGraph, Error> {
        forward.extras.check_rows(backward.problem())?;
        let args = self.raw(forward, stream);
        // SAFETY: the addresses are those of tensors with these placements, which the caller keeps for the
        // graph.
        unsafe { capture(stream, || backward.run_raw(stream, &args)) }
    }

    /// Waits for the stream and reads what was written.
    ///
    /// # Errors
    /// [`Error::Driver`], also for what went wrong on the GPU meanwhile.
    pub fn read(&self, stream: &Arc<CudaStream>) -> Result<DeviceGradients<T>, Error> {
        let mut strays = 0;
        let mut read = |tensor: &DeviceTensor<T>| -> Result<Vec<T>, Error> {
            let (values, written) = tensor.read(stream)?;
            strays += written;
            Ok(values)
        };
        let values = [read(&self.dq)?, read(&self.dk)?, read(&self.dv)?];
        Ok(DeviceGradients { values, strays })
    }
}
