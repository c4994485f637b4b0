//! Tensors of a call with lengths, pages, slopes or sinks on the GPU: rows of the sequences in their places,
//! NaN everywhere else.
#![allow(unsafe_code)]

use std::sync::Arc;

use fa_attn::device::{Bound, DeviceOutput, DeviceTensor, Half, Placement, fill_with_nan};
use fa_core::{Strides, TensorLayout};
use fa_kernels::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, DriverError};
use fa_kernels::{Backward, Error, Forward, RawBackwardArgs, RawExtras, RawForwardArgs};

use crate::memory::{Arrays, Gradients, load, load_lse, store};
use crate::sequences::Sequences;
use crate::tensors::{Inputs, dout_placement};

fn doing(doing: &'static str) -> impl Fn(DriverError) -> Error {
    move |source| Error::Driver { doing, source }
}

/// Q, K, V, O and LSE of one forward, and what goes with them.
pub struct VariedForward<T> {
    q: DeviceTensor<T>,
    k: DeviceTensor<T>,
    v: DeviceTensor<T>,
    out: DeviceTensor<T>,
    lse: CudaSlice<f32>,
    workspace: CudaSlice<u8>,
    arrays: DeviceArrays,
    sequences: Sequences,
    heads_q: usize,
}

/// [`Arrays`] in device memory.
struct DeviceArrays {
    integers: [Option<CudaSlice<i32>>; 5],
    floats: [Option<CudaSlice<f32>>; 2],
}

/// dO, the gradients and the workspace of one backward.
pub struct VariedBackward<T> {
    dout: DeviceTensor<T>,
    dq: DeviceTensor<T>,
    dk: DeviceTensor<T>,
    dv: DeviceTensor<T>,
    dsinks: Option<CudaSlice<f32>>,
    workspace: CudaSlice<u8>,
}

/// A copy of `values`; of none, an element that nobody reads.
fn upload<U: DeviceRepr + Clone + Default>(
    stream: &Arc<CudaStream>,
    values: &[U],
) -> Result<CudaSlice<U>, Error> {
    let sent = doing("copying to the GPU");
    if values.is_empty() { stream.clone_htod(&[U::default()]) } else { stream.clone_htod(values) }
        .map_err(sent)
}

/// Memory that holds NaN.
fn poisoned(stream: &Arc<CudaStream>, len: usize) -> Result<CudaSlice<f32>, Error> {
    let mut made = stream.alloc_zeros(len.max(1)).map_err(doing("allocating device memory"))?;
    fill_with_nan(stream, &mut made)?;
    Ok(made)
}

impl DeviceArrays {
    fn upload(stream: &Arc<CudaStream>, arrays: &Arrays) -> Result<DeviceArrays, Error> {
        let Arrays { cu_q, cu_k, used_q, used_k, page_table, alibi_slopes, sinks } = arrays;
        let integers = |of: &Option<Vec<i32>>| of.as_ref().map(|of| upload(stream, of)).transpose();
        let floats = |of: &Option<Vec<f32>>| of.as_ref().map(|of| upload(stream, of)).transpose();
        Ok(DeviceArrays {
            integers: [
                integers(cu_q)?,
                integers(cu_k)?,
                integers(used_q)?,
                integers(used_k)?,
                integers(page_table)?,
            ],
            floats: [floats(alibi_slopes)?, floats(sinks)?],
        })
    }

    /// Other values in the same memory.
    fn write(&mut self, stream: &Arc<CudaStream>, arrays: &Arrays) -> Result<(), Error> {
        let Arrays { cu_q, cu_k, used_q, used_k, page_table, alibi_slopes, sinks } = arrays;
        let sent = doing("copying to the GPU");
        for (to, from) in self.integers.iter_mut().zip([cu_q, cu_k, used_q, used_k, page_table]) {
            if let (Some(to), Some(from)) = (to, from)
                && !from.is_empty()
            {
                stream.memcpy_htod(from, to).map_err(&sent)?;
            }
        }
        for (to, from) in self.floats.iter_mut().zip([alibi_slopes, sinks]) {
            if let (Some(to), Some(from)) = (to, from) {
                stream.memcpy_htod(from, to).map_err(&sent)?;
            }
        }
        Ok(())
    }

    fn raw(&self, stream: &CudaStream) -> RawExtras {
        let integers = |i: usize| self.integers[i].as_ref().map(|of| of.device_ptr(stream).0);
        let floats = |i: usize| self.floats[i].as_ref().map(|of| of.device_ptr(stream).0);
        RawExtras {
            cu_q: integers(0),
            cu_k: integers(1),
            used_q: integers(2),
            used_k: integers(3),
            page_table: integers(4),
            alibi_slopes: floats(0),
            sinks: floats(1),
            ..RawExtras::default()
        }
    }
}

fn tensor<T: Half>(
    stream: &Arc<CudaStream>,
    memory: &[T],
    placement: Placement,
) -> Result<DeviceTensor<T>, Error> {
    let data = stream.clone_htod(memory).map_err(doing("copying to the GPU"))?;
    Ok(DeviceTensor { data, placement })
}

impl<T: Half> VariedForward<T> {
    /// `inputs` in device memory, outputs that hold NaN.
    ///
    /// # Errors
    /// [`Error::Driver`], above all for want of memory.
    pub fn place(
        stream: &Arc<CudaStream>,
        workspace_bytes: usize,
        inputs: &Inputs<T>,
    ) -> Result<VariedForward<T>, Error> {
        let [q, k, v] = inputs.stored();
        let [of_q, of_k, of_v, of_out] = inputs.placements;
        let heads_q = inputs.problem.heads_q;
        Ok(VariedForward {
            q: tensor(stream, &q, of_q)?,
            k: tensor(stream, &k, of_k)?,
            v: tensor(stream, &v, of_v)?,
            out: DeviceTensor::nan(stream, of_out)?,
            lse: poisoned(stream, inputs.sequences.q.lse_len(heads_q))?,
            // Zero before its first use, as kernels ask.
            workspace: stream
                .alloc_zeros(workspace_bytes.max(16))
                .map_err(doing("allocating device memory"))?,
            arrays: DeviceArrays::upload(stream, &inputs.arrays())?,
            sequences: inputs.sequences.clone(),
            heads_q,
        })
    }

    /// Other inputs in the same memory: lengths, pages and values change, addresses do not.
    ///
    /// # Errors
    /// [`Error::Driver`].
    ///
    /// # Panics
    /// If the inputs do not lie as those before did.
    pub fn write(&mut self, stream: &Arc<CudaStream>, inputs: &Inputs<T>) -> Result<(), Error> {
        let before = [&self.q, &self.k, &self.v, &self.out].map(|tensor| tensor.placement);
        assert_eq!(before, inputs.placements, "other inputs lie as those before");
        for (to, from) in [&mut self.q, &mut self.k, &mut self.v].into_iter().zip(inputs.stored()) {
            stream.memcpy_htod(&from, &mut to.data).map_err(doing("copying to the GPU"))?;
        }
        self.arrays.write(stream, &inputs.arrays())?;
        self.sequences = inputs.sequences.clone();
        Ok(())
    }

    /// Fills O, gaps included, and LSE with NaN.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn poison(&mut self, stream: &CudaStream) -> Result<(), Error> {
        self.out.poison(stream)?;
        fill_with_nan(stream, &mut self.lse)
    }

    /// Makes room for the workspace of another kernel, and zeroes it.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn fit(&mut self, stream: &Arc<CudaStream>, forward: &Forward) -> Result<(), Error> {
        if self.workspace.len() < forward.workspace_bytes() {
            let made = doing("allocating device memory");
            self.workspace = stream.alloc_zeros(forward.workspace_bytes()).map_err(made)?;
        }
        Ok(())
    }

    fn raw(&mut self, stream: &CudaStream) -> RawForwardArgs {
        RawForwardArgs {
            q: self.q.raw(stream),
            k: self.k.raw(stream),
            v: self.v.raw(stream),
            out: self.out.raw(stream),
            lse: Some(self.lse.device_ptr_mut(stream).0),
            workspace: Some(self.workspace.device_ptr_mut(stream).0),
            extras: self.arrays.raw(stream),
        }
    }

    /// Launches `forward`: allocates nothing, waits for nothing.
    ///
    /// # Errors
    /// What the kernel refuses.
    pub fn run(&mut self, forward: &Forward, stream: &CudaStream) -> Result<(), Error> {
        let args = self.raw(stream);
        // SAFETY: the addresses are those of this value's tensors, which lie and are as long as the problem
        // says; the stream's work is waited for before they are read or freed.
        unsafe { forward.run_raw(stream, &args) }
    }

    /// Waits for the stream and reads what was written.
    ///
    /// # Errors
    /// [`Error::Driver`], also for what went wrong on the GPU meanwhile.
    pub fn read(&self, stream: &Arc<CudaStream>) -> Result<DeviceOutput<T>, Error> {
        let read = doing("copying from the GPU");
        let memory = stream.clone_dtoh(&self.out.data).map_err(&read)?;
        let lse = stream.clone_dtoh(&self.lse).map_err(&read)?;
        let (out, strays) = load(memory, &self.sequences.q, &self.out.placement);
        let (lse, stray_lses) = load_lse(lse, &self.sequences.q, self.heads_q);
        Ok(DeviceOutput { out, lse, strays: strays + stray_lses })
    }
}

impl<T: Half> VariedBackward<T> {
    /// `dout`, rows end to end, in the places of O's; gradients and a workspace that hold NaN.
    ///
    /// # Errors
    /// [`Error::Driver`], above all for want of memory.
    pub fn place(
        stream: &Arc<CudaStream>,
        backward: &Backward,
        forward: &VariedForward<T>,
        inputs: &Inputs<T>,
        dout: &[T],
    ) -> Result<VariedBackward<T>, Error> {
        let placement = dout_placement(&inputs.placements);
        let memory = store(dout, &inputs.sequences.q, &placement);
        let room = |of: &DeviceTensor<T>| {
            let Placement { shape, strides: Strides { batch, seq, head, .. } } = of.placement;
            let broadcast = [batch, seq, head].contains(&0);
            let packed = Placement::packed(shape, TensorLayout::Bshd);
            DeviceTensor::nan(stream, if broadcast { packed } else { of.placement })
        };
        let sinks = inputs.problem.score.sinks;
        let bytes = backward.workspace_bytes().max(16);
        let mut made = VariedBackward {
            dout: tensor(stream, &memory, placement)?,
            dq: room(&forward.q)?,
            dk: room(&forward.k)?,
            dv: room(&forward.v)?,
            dsinks: sinks.then(|| poisoned(stream, inputs.problem.heads_q)).transpose()?,
            workspace: stream.alloc_zeros(bytes).map_err(doing("allocating device memory"))?,
        };
        fill_with_nan(stream, &mut made.workspace)?;
        Ok(made)
    }

    /// Makes room for the workspace of another kernel.
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
        if let Some(dsinks) = &mut self.dsinks {
            fill_with_nan(stream, dsinks)?;
        }
        fill_with_nan(stream, &mut self.workspace)
    }

    /// Launches `backward` on what `forward` holds: allocates nothing, waits for nothing.
    ///
    /// # Errors
    /// What the kernel refuses.
    pub fn run(
        &mut self,
        forward: &VariedForward<T>,
        backward: &Backward,
        stream: &CudaStream,
    ) -> Result<(), Error> {
        let dsinks = self.dsinks.as_mut().map(|dsinks| dsinks.device_ptr_mut(stream).0);
        let args = RawBackwardArgs {
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
            extras: RawExtras { dsinks, ..forward.arrays.raw(stream) },
        };
        // SAFETY: as for the forward.
        unsafe { backward.run_raw(stream, &args) }
    }

    /// Waits for the stream and reads what was written.
    ///
    /// # Errors
    /// [`Error::Driver`], also for what went wrong on the GPU meanwhile.
    pub fn read(&self, forward: &VariedForward<T>, stream: &Arc<CudaStream>) -> Result<Gradients<T>, Error> {
        let read = doing("copying from the GPU");
        let Sequences { q, k } = &forward.sequences;
        let mut strays = 0;
        let mut values = [Vec::new(), Vec::new(), Vec::new()];
        for (i, (tensor, rows)) in [(&self.dq, q), (&self.dk, k), (&self.dv, k)].into_iter().enumerate() {
            let memory = stream.clone_dtoh(&tensor.data).map_err(&read)?;
            let (own, others) = load(memory, rows, &tensor.placement);
            values[i] = own;
            strays += others;
        }
        let dsinks = match &self.dsinks {
            Some(dsinks) => stream.clone_dtoh(dsinks).map_err(&read)?,
            None => Vec::new(),
        };
        Ok(Gradients { values, strays, dsinks })
    }
}

/// The passes by name, for refusals.
pub(super) fn other_pass(bound: &Bound) -> Error {
    let (kernel, problem) = match bound {
        Bound::Forward(_) => ("the forward", "the backward"),
        Bound::Backward(_) => ("the backward", "the forward"),
    };
    Error::Mismatch { what: "pass", kernel: kernel.to_owned(), problem: problem.to_owned() }
}
