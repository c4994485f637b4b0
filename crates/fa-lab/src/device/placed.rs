//! Inputs in device memory: rows of the sequences at their positions, NaN everywhere else; and the outputs.
#![allow(unsafe_code)]

use std::mem::swap;
use std::sync::Arc;

use fa_attn::device::{
    DeviceBackward, DeviceExtras, DeviceForward, DeviceGradient, DeviceOutput, DeviceProgram, DeviceTensor,
    ForwardCall, Half, Placement, Stored, capture, fill_with_nan,
};
use fa_cpu::OwnedExtras;
use fa_kernels::cudarc::driver::{CudaGraph, CudaSlice, CudaStream, DevicePtr, DriverError};
use fa_kernels::{Backward, Error, Forward, RawExtras, RawForwardArgs};

use crate::memory::{Gradients, load, load_lse, store};
use crate::sequences::Sequences;
use crate::tensors::{Inputs, dout_placement};

/// Tensors of a forward.
pub struct PlacedForward<T> {
    tensors: DeviceForward<T>,
    /// Those of Q, K and V that hold codes, in whose places `tensors` has placements without elements.
    codes: [Option<DeviceTensor<u8>>; 3],
    /// The sequences, where lengths, pages, slopes or sinks are passed with the tensors.
    sequences: Option<Sequences>,
    heads_q: usize,
}

/// Q, K and V of a forward.
pub(super) struct PlacedInputs<T> {
    /// Elements of O's type; of a tensor of codes a placement without elements.
    tensors: [DeviceTensor<T>; 3],
    /// Codes.
    codes: [Option<DeviceTensor<u8>>; 3],
}

/// Tensors of a backward.
pub struct PlacedBackward<T> {
    tensors: DeviceBackward<T>,
}

fn doing(doing: &'static str) -> impl Fn(DriverError) -> Error {
    move |source| Error::Driver { doing, source }
}

/// Memory that holds NaN.
fn poisoned(stream: &Arc<CudaStream>, len: usize) -> Result<CudaSlice<f32>, Error> {
    let mut made = stream.alloc_zeros(len.max(1)).map_err(doing("allocating device memory"))?;
    fill_with_nan(stream, &mut made)?;
    Ok(made)
}

/// `memory` on the GPU.
fn tensor<T: Stored>(
    stream: &Arc<CudaStream>,
    memory: &[T],
    placement: Placement,
) -> Result<DeviceTensor<T>, Error> {
    let data = stream.clone_htod(memory).map_err(doing("copying to the GPU"))?;
    Ok(DeviceTensor { data, placement })
}

/// Copies `inputs` to the GPU, with NaN in elements of no row and in the outputs.
///
/// # Errors
/// [`Error::Driver`], most often for lack of memory.
pub fn place_forward<T: Half>(
    stream: &Arc<CudaStream>,
    forward: &Forward,
    inputs: &Inputs<T>,
) -> Result<PlacedForward<T>, Error> {
    let (workspace, heads_q) = (forward.workspace_bytes(), inputs.problem.heads_q);
    if inputs.is_plain() {
        let values = [&inputs.values[0], &inputs.values[1], &inputs.values[2]].map(Vec::as_slice);
        let mut tensors =
            DeviceForward::place(stream, &inputs.problem, workspace, values, &inputs.placements)?;
        tensors.extras.program = program(stream, inputs)?;
        return Ok(PlacedForward { tensors, codes: [None, None, None], sequences: None, heads_q });
    }
    let PlacedInputs { tensors: [q, k, v], codes } = place_inputs(stream, inputs)?;
    let rows = inputs.sequences.q.lse_len(heads_q);
    // Zero before its first use, as kernels require.
    let zeroed = stream.alloc_zeros(workspace.max(16)).map_err(doing("allocating device memory"))?;
    let mut tensors = DeviceForward {
        q,
        k,
        v,
        out: DeviceTensor::nan(stream, inputs.placements[3])?,
        lse: poisoned(stream, rows)?,
        workspace: zeroed,
        rows,
        extras: DeviceExtras::upload(stream, &inputs.arrays().view())?,
        page_faults: None,
    };
    tensors.extras.program = program(stream, inputs)?;
    Ok(PlacedForward { tensors, codes, sequences: Some(inputs.sequences.clone()), heads_q })
}

/// The arrays and scalars of the problem's program on the GPU, with room for the gradients of those that have
/// one, which holds NaN.
fn program<T: Half>(stream: &Arc<CudaStream>, inputs: &Inputs<T>) -> Result<Option<DeviceProgram>, Error> {
    let (Some(given), Some(own)) = (inputs.program(), inputs.problem.score.program) else { return Ok(None) };
    let mut placed = DeviceProgram::upload(stream, &given)?;
    placed.want_narrow_gradients(stream, &own)?;
    for gradient in placed.gradients.iter_mut().flatten() {
        match gradient {
            DeviceGradient::F32(own) => fill_with_nan(stream, own)?,
            DeviceGradient::F16(own) | DeviceGradient::Bf16(own) => fill_with_nan(stream, own)?,
        }
    }
    Ok(Some(placed))
}

/// Another copy of Q, K and V on the GPU, placed as [`place_forward`] places them.
///
/// # Errors
/// [`Error::Driver`], most often for lack of memory.
pub(super) fn place_inputs<T: Half>(
    stream: &Arc<CudaStream>,
    inputs: &Inputs<T>,
) -> Result<PlacedInputs<T>, Error> {
    let [of_q, of_k, of_v, _] = inputs.placements;
    if inputs.is_plain() {
        let [q, k, v] = [&inputs.values[0], &inputs.values[1], &inputs.values[2]];
        let place = |values, placement| DeviceTensor::place(stream, values, placement);
        let tensors = [place(q, of_q)?, place(k, of_k)?, place(v, of_v)?];
        return Ok(PlacedInputs { tensors, codes: [None, None, None] });
    }
    let (stored, coded) = (inputs.stored(), inputs.stored_codes());
    let own = |i: usize, placement| match &coded[i] {
        Some(codes) => {
            Ok((tensor(stream, &[T::default()], placement)?, Some(tensor(stream, codes, placement)?)))
        }
        None => Ok::<_, Error>((tensor(stream, &stored[i], placement)?, None)),
    };
    let [(q, q8), (k, k8), (v, v8)] = [own(0, of_q)?, own(1, of_k)?, own(2, of_v)?];
    Ok(PlacedInputs { tensors: [q, k, v], codes: [q8, k8, v8] })
}

/// `dout`, rows end to end, on the GPU, placed beside the tensors of its forward.
///
/// # Errors
/// [`Error::Driver`], most often for lack of memory.
pub(super) fn place_dout<T: Half>(
    stream: &Arc<CudaStream>,
    forward: &PlacedForward<T>,
    inputs: &Inputs<T>,
    dout: &[T],
) -> Result<DeviceTensor<T>, Error> {
    let placement = dout_placement(&inputs.placements);
    match &forward.sequences {
        None => DeviceTensor::place(stream, dout, placement),
        Some(sequences) => tensor(stream, &store(dout, &sequences.q, &placement), placement),
    }
}

/// `dout`, rows end to end, on the GPU next to the tensors of its forward, and gradients that hold NaN.
///
/// # Errors
/// [`Error::Driver`], most often for lack of memory.
pub fn place_backward<T: Half>(
    stream: &Arc<CudaStream>,
    backward: &Backward,
    forward: &PlacedForward<T>,
    inputs: &Inputs<T>,
    dout: &[T],
) -> Result<PlacedBackward<T>, Error> {
    let dout = place_dout(stream, forward, inputs, dout)?;
    let tensors = DeviceBackward::new(stream, backward, &forward.tensors, dout)?;
    let mut placed = PlacedBackward { tensors };
    placed.poison(stream)?;
    Ok(placed)
}

impl<T: Half> PlacedForward<T> {
    /// Exchanges Q, K and V for those of another copy, of the same shapes and strides.
    pub(super) fn swap_inputs(&mut self, inputs: &mut PlacedInputs<T>) {
        let [q, k, v] = &mut inputs.tensors;
        swap(&mut self.tensors.q, q);
        swap(&mut self.tensors.k, k);
        swap(&mut self.tensors.v, v);
        swap(&mut self.codes, &mut inputs.codes);
    }

    /// The addresses.
    fn raw(&mut self, stream: &CudaStream) -> RawForwardArgs {
        let args = self.tensors.raw(stream);
        let [q, k, v] = self.codes.each_ref().map(|codes| codes.as_ref().map(|codes| codes.raw(stream)));
        let (q, k, v) = (q.unwrap_or(args.q), k.unwrap_or(args.k), v.unwrap_or(args.v));
        RawForwardArgs { q, k, v, ..args }
    }

    /// Launches `forward` without allocating or waiting.
    ///
    /// # Errors
    /// What the kernel refuses.
    pub fn run(&mut self, forward: &Forward, stream: &CudaStream) -> Result<(), Error> {
        let [of_q, Some(k), Some(v)] = &self.codes else { return self.tensors.run(forward, stream) };
        let DeviceForward { q, out, lse, workspace, extras, page_faults, .. } = &mut self.tensors;
        let (lse, page_faults) = (Some(lse), page_faults.as_mut());
        match of_q {
            Some(q) => ForwardCall { q, k, v, out, lse, workspace, extras, page_faults }.run(forward, stream),
            None => ForwardCall { q, k, v, out, lse, workspace, extras, page_faults }.run(forward, stream),
        }
    }

    /// A launch by addresses, taken before a capture begins: taking them orders streams by events.
    pub(super) fn launch<'f>(
        &mut self,
        forward: &'f Forward,
        stream: &CudaStream,
    ) -> impl Fn(&CudaStream) -> Result<(), Error> + use<'f, T> {
        let args = self.raw(stream);
        // SAFETY: the addresses are those of tensors with the problem's shapes and strides, which the caller
        // keeps for the graph.
        move |stream| unsafe { forward.run_raw(stream, &args) }
    }

    /// The same with a work plan that [`PlacedForward::plan`] has written, of the same lengths.
    pub(super) fn launch_planned<'f>(
        &mut self,
        forward: &'f Forward,
        stream: &CudaStream,
        plan: &CudaSlice<u8>,
    ) -> impl Fn(&CudaStream) -> Result<(), Error> + use<'f, T> {
        let mut args = self.raw(stream);
        args.extras.plan = Some(plan.device_ptr(stream).0);
        // SAFETY: as of any launch; the caller keeps the plan as well.
        move |stream| unsafe { forward.run_raw(stream, &args) }
    }

    /// A launch that writes the work plan of these lengths to `plan`.
    pub(super) fn plan<'f>(
        &mut self,
        forward: &'f Forward,
        stream: &CudaStream,
        plan: &CudaSlice<u8>,
    ) -> impl Fn(&CudaStream) -> Result<(), Error> + use<'f, T> {
        let plan = Some(plan.device_ptr(stream).0);
        let extras = RawExtras { plan, ..self.tensors.raw(stream).extras };
        // SAFETY: lengths and plan are as long as the kernel's problem says, and the caller keeps both.
        move |stream| unsafe { forward.plan_raw(stream, &extras) }
    }

    /// A launch on `stream` (not the default one) captured as a CUDA graph, which must not outlive these
    /// tensors.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn capture(&mut self, forward: &Forward, stream: &Arc<CudaStream>) -> Result<CudaGraph, Error> {
        let launch = self.launch(forward, stream);
        // SAFETY: the graph is dropped before these tensors, which nothing moves.
        unsafe { capture(stream, || launch(stream)) }
    }

    /// Other inputs in the same memory: lengths, pages and values change, addresses do not.
    ///
    /// # Errors
    /// [`Error::Driver`].
    ///
    /// # Panics
    /// If the inputs are not laid out as those before.
    pub fn write(&mut self, stream: &Arc<CudaStream>, inputs: &Inputs<T>) -> Result<(), Error> {
        assert_eq!(self.tensors.placements(), inputs.placements, "other inputs lie as those before");
        let DeviceForward { q, k, v, extras, .. } = &mut self.tensors;
        let coded = self.codes.iter_mut().zip(inputs.stored_codes());
        for ((to, from), coded) in [q, k, v].into_iter().zip(inputs.stored()).zip(coded) {
            match coded {
                (Some(to), Some(from)) => stream.memcpy_htod(&from, &mut to.data),
                (_, _) => stream.memcpy_htod(&from, &mut to.data),
            }
            .map_err(doing("copying to the GPU"))?;
        }
        extras.update(stream, &inputs.arrays().view())?;
        self.sequences = Some(inputs.sequences.clone());
        Ok(())
    }

    /// Writes another page table and restarts the count of its faults.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn write_table(&mut self, stream: &Arc<CudaStream>, arrays: &OwnedExtras) -> Result<(), Error> {
        self.tensors.extras.update(stream, &arrays.view())?;
        self.tensors.count_page_faults(stream)
    }

    /// Page faults counted so far; waits for the stream.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn page_faults(&self, stream: &Arc<CudaStream>) -> Result<u32, Error> {
        self.tensors.page_faults(stream)
    }

    /// Fills the outputs, gaps included, with NaN.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn poison(&mut self, stream: &CudaStream) -> Result<(), Error> {
        self.tensors.poison(stream)
    }

    /// Allocates the workspace of another kernel.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn fit(&mut self, stream: &Arc<CudaStream>, forward: &Forward) -> Result<(), Error> {
        if self.tensors.workspace.len() < forward.workspace_bytes() {
            let made = doing("allocating device memory");
            self.tensors.workspace = stream.alloc_zeros(forward.workspace_bytes()).map_err(made)?;
        }
        Ok(())
    }

    /// Waits for the stream and reads the outputs.
    ///
    /// # Errors
    /// [`Error::Driver`], also for errors on the GPU meanwhile.
    pub fn read(&self, stream: &Arc<CudaStream>) -> Result<DeviceOutput<T>, Error> {
        let Some(sequences) = &self.sequences else { return self.tensors.read(stream) };
        let read = doing("copying from the GPU");
        let memory = stream.clone_dtoh(&self.tensors.out.data).map_err(&read)?;
        let lse = stream.clone_dtoh(&self.tensors.lse).map_err(&read)?;
        let (out, strays) = load(memory, &sequences.q, &self.tensors.out.placement);
        let (lse, stray_lses) = load_lse(lse, &sequences.q, self.heads_q);
        Ok(DeviceOutput { out, lse, strays: strays + stray_lses })
    }
}

impl<T: Half> PlacedBackward<T> {
    /// Exchanges dO for that of another copy, of the same shape and strides.
    pub(super) fn swap_dout(&mut self, dout: &mut DeviceTensor<T>) {
        swap(&mut self.tensors.dout, dout);
    }

    /// Launches `backward` on the tensors of `forward`, without allocating or waiting.
    ///
    /// # Errors
    /// What the kernel refuses.
    pub fn run(
        &mut self,
        forward: &PlacedForward<T>,
        backward: &Backward,
        stream: &CudaStream,
    ) -> Result<(), Error> {
        self.tensors.run(&forward.tensors, backward, stream)
    }

    /// A launch by addresses: see [`PlacedForward::launch`].
    pub(super) fn launch<'b>(
        &mut self,
        forward: &PlacedForward<T>,
        backward: &'b Backward,
        stream: &CudaStream,
    ) -> impl Fn(&CudaStream) -> Result<(), Error> + use<'b, T> {
        let args = self.tensors.raw(&forward.tensors, stream);
        // SAFETY: as for the forward.
        move |stream| unsafe { backward.run_raw(stream, &args) }
    }

    /// The launches on `stream` (not the default one) captured as a CUDA graph, which must not outlive these
    /// tensors and the forward's.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn capture(
        &mut self,
        forward: &PlacedForward<T>,
        backward: &Backward,
        stream: &Arc<CudaStream>,
    ) -> Result<CudaGraph, Error> {
        let launch = self.launch(forward, backward, stream);
        // SAFETY: the graph is dropped before these tensors, which nothing moves.
        unsafe { capture(stream, || launch(stream)) }
    }

    /// Fills gradients, gaps included, and workspace with NaN.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn poison(&mut self, stream: &CudaStream) -> Result<(), Error> {
        if let Some(dsinks) = &mut self.tensors.dsinks {
            fill_with_nan(stream, dsinks)?;
        }
        self.tensors.poison(stream)
    }

    /// Allocates the workspace of another kernel.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn fit(&mut self, stream: &Arc<CudaStream>, backward: &Backward) -> Result<(), Error> {
        self.tensors.fit(stream, backward)
    }

    /// Waits for the stream and reads the outputs.
    ///
    /// # Errors
    /// [`Error::Driver`], also for errors on the GPU meanwhile.
    pub fn read(&self, forward: &PlacedForward<T>, stream: &Arc<CudaStream>) -> Result<Gradients<T>, Error> {
        let read = doing("copying from the GPU");
        let mut darrays = Vec::new();
        for gradient in forward.tensors.extras.program.iter().flat_map(|program| &program.gradients) {
            let own = gradient.as_ref().map(|own| own.read(stream)).transpose()?;
            darrays.push(own.unwrap_or_default());
        }
        let Some(Sequences { q, k }) = &forward.sequences else {
            let found = Gradients::from(self.tensors.read(stream)?);
            return Ok(Gradients { darrays, ..found });
        };
        let DeviceBackward { dq, dk, dv, dsinks, .. } = &self.tensors;
        let mut strays = 0;
        let mut values = [Vec::new(), Vec::new(), Vec::new()];
        for (i, (tensor, rows)) in [(dq, q), (dk, k), (dv, k)].into_iter().enumerate() {
            let memory = stream.clone_dtoh(&tensor.data).map_err(&read)?;
            let (own, others) = load(memory, rows, &tensor.placement);
            values[i] = own;
            strays += others;
        }
        let dsinks = match dsinks {
            Some(dsinks) => stream.clone_dtoh(dsinks).map_err(&read)?,
            None => Vec::new(),
        };
        Ok(Gradients { values, strays, dsinks, darrays })
    }
}
