//! Tensors of one call of either pass.
#![allow(unsafe_code)]

use std::sync::Arc;

use fa_attn::device::{Bound, DeviceBackward, DeviceForward, DeviceOutput, DeviceTensor, Half, capture};
use fa_kernels::cudarc::driver::{CudaGraph, CudaStream};
use fa_kernels::{Backward, Error, Forward};

use super::varied::{VariedBackward, VariedForward, other_pass};
use crate::memory::Gradients;
use crate::tensors::{Inputs, dout_placement};

/// Tensors of one call of either pass.
pub struct PassCall<T> {
    forward: PlacedForward<T>,
    backward: Option<PlacedBackward<T>>,
}

/// Tensors of a forward.
// A handful exist at a time; a box would only be in the way.
#[allow(clippy::large_enum_variant)]
pub enum PlacedForward<T> {
    /// Of lengths that the host knows, and nothing beside.
    Plain(DeviceForward<T>),
    /// With lengths, pages, slopes or sinks.
    Varied(VariedForward<T>),
}

/// Tensors of a backward.
#[allow(clippy::large_enum_variant)]
pub enum PlacedBackward<T> {
    /// Next to a plain forward's.
    Plain(DeviceBackward<T>),
    /// Next to those of the other kind.
    Varied(VariedBackward<T>),
}

/// `inputs` on the GPU, gaps between rows filled with NaN, and outputs that hold NaN.
///
/// # Errors
/// [`Error::Driver`], above all for want of memory.
pub fn place_forward<T: Half>(
    stream: &Arc<CudaStream>,
    forward: &Forward,
    inputs: &Inputs<T>,
) -> Result<PlacedForward<T>, Error> {
    let workspace = forward.workspace_bytes();
    if !inputs.is_plain() {
        return VariedForward::place(stream, workspace, inputs).map(PlacedForward::Varied);
    }
    let values = [&inputs.values[0], &inputs.values[1], &inputs.values[2]].map(Vec::as_slice);
    DeviceForward::place(stream, &inputs.problem, workspace, values, &inputs.placements)
        .map(PlacedForward::Plain)
}

/// `dout`, rows end to end, on the GPU next to the tensors of its forward, and gradients that hold NaN.
///
/// # Errors
/// [`Error::Driver`], above all for want of memory.
pub fn place_backward<T: Half>(
    stream: &Arc<CudaStream>,
    backward: &Backward,
    forward: &PlacedForward<T>,
    inputs: &Inputs<T>,
    dout: &[T],
) -> Result<PlacedBackward<T>, Error> {
    match forward {
        PlacedForward::Plain(forward) => {
            let dout = DeviceTensor::place(stream, dout, dout_placement(&inputs.placements))?;
            DeviceBackward::new(stream, backward, forward, dout).map(PlacedBackward::Plain)
        }
        PlacedForward::Varied(forward) => {
            VariedBackward::place(stream, backward, forward, inputs, dout).map(PlacedBackward::Varied)
        }
    }
}

impl<T: Half> PlacedForward<T> {
    /// Launches `forward`: allocates nothing, waits for nothing.
    ///
    /// # Errors
    /// What the kernel refuses.
    pub fn run(&mut self, forward: &Forward, stream: &CudaStream) -> Result<(), Error> {
        match self {
            PlacedForward::Plain(tensors) => tensors.run(forward, stream),
            PlacedForward::Varied(tensors) => tensors.run(forward, stream),
        }
    }

    /// The same by addresses, as a capture needs it.
    fn enqueue(&mut self, forward: &Forward, stream: &CudaStream) -> Result<(), Error> {
        match self {
            PlacedForward::Plain(tensors) => {
                let args = tensors.raw(stream);
                // SAFETY: the addresses are those of tensors with these placements, which the caller keeps
                // for the graph.
                unsafe { forward.run_raw(stream, &args) }
            }
            PlacedForward::Varied(tensors) => tensors.run(forward, stream),
        }
    }

    /// Fills what is written, gaps included, with NaN.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn poison(&mut self, stream: &CudaStream) -> Result<(), Error> {
        match self {
            PlacedForward::Plain(tensors) => tensors.poison(stream),
            PlacedForward::Varied(tensors) => tensors.poison(stream),
        }
    }

    /// Waits for the stream and reads what was written.
    ///
    /// # Errors
    /// [`Error::Driver`], also for what went wrong on the GPU meanwhile.
    pub fn read(&self, stream: &Arc<CudaStream>) -> Result<DeviceOutput<T>, Error> {
        match self {
            PlacedForward::Plain(tensors) => tensors.read(stream),
            PlacedForward::Varied(tensors) => tensors.read(stream),
        }
    }

    /// A launch on `stream` (not the default one) captured as a CUDA graph, which must not outlive these
    /// tensors.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn capture(&mut self, forward: &Forward, stream: &Arc<CudaStream>) -> Result<CudaGraph, Error> {
        capture(stream, || self.enqueue(forward, stream))
    }

    /// Makes room for the workspace of another kernel.
    ///
    /// # Errors
    /// [`Error::Driver`].
    fn fit(&mut self, stream: &Arc<CudaStream>, forward: &Forward) -> Result<(), Error> {
        match self {
            PlacedForward::Plain(tensors) => {
                if tensors.workspace.len() < forward.workspace_bytes() {
                    let made = |source| Error::Driver { doing: "allocating device memory", source };
                    tensors.workspace = stream.alloc_zeros(forward.workspace_bytes()).map_err(made)?;
                }
                Ok(())
            }
            PlacedForward::Varied(tensors) => tensors.fit(stream, forward),
        }
    }
}

impl<T: Half> PlacedBackward<T> {
    /// Launches `backward` on what `forward` holds.
    ///
    /// # Errors
    /// What the kernel refuses; [`Error::Mismatch`] for a forward of the other kind.
    pub fn run(
        &mut self,
        forward: &PlacedForward<T>,
        backward: &Backward,
        stream: &CudaStream,
    ) -> Result<(), Error> {
        match (self, forward) {
            (PlacedBackward::Plain(tensors), PlacedForward::Plain(forward)) => {
                tensors.run(forward, backward, stream)
            }
            (PlacedBackward::Varied(tensors), PlacedForward::Varied(forward)) => {
                tensors.run(forward, backward, stream)
            }
            _ => unreachable!("place_backward() makes the kind of the forward"),
        }
    }

    /// The same by addresses, as a capture needs it.
    fn enqueue(
        &mut self,
        forward: &PlacedForward<T>,
        backward: &Backward,
        stream: &CudaStream,
    ) -> Result<(), Error> {
        match (&mut *self, forward) {
            (PlacedBackward::Plain(tensors), PlacedForward::Plain(forward)) => {
                let args = tensors.raw(forward, stream);
                // SAFETY: as for the forward.
                unsafe { backward.run_raw(stream, &args) }
            }
            _ => self.run(forward, backward, stream),
        }
    }

    /// Fills gradients, gaps included, and workspace with NaN.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn poison(&mut self, stream: &CudaStream) -> Result<(), Error> {
        match self {
            PlacedBackward::Plain(tensors) => tensors.poison(stream),
            PlacedBackward::Varied(tensors) => tensors.poison(stream),
        }
    }

    /// Makes room for the workspace of another kernel.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn fit(&mut self, stream: &Arc<CudaStream>, backward: &Backward) -> Result<(), Error> {
        match self {
            PlacedBackward::Plain(tensors) => tensors.fit(stream, backward),
            PlacedBackward::Varied(tensors) => tensors.fit(stream, backward),
        }
    }

    /// Waits for the stream and reads what was written.
    ///
    /// # Errors
    /// [`Error::Driver`], also for what went wrong on the GPU meanwhile.
    pub fn read(&self, forward: &PlacedForward<T>, stream: &Arc<CudaStream>) -> Result<Gradients<T>, Error> {
        match (self, forward) {
            (PlacedBackward::Plain(tensors), _) => tensors.read(stream).map(Gradients::from),
            (PlacedBackward::Varied(tensors), PlacedForward::Varied(forward)) => {
                tensors.read(forward, stream)
            }
            _ => unreachable!("place_backward() makes the kind of the forward"),
        }
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
        capture(stream, || self.enqueue(forward, backward, stream))
    }
}

impl<T: Half> PassCall<T> {
    /// Tensors of the forward, and with a `backward` and dO those of the gradients after the forward has run.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn new(
        stream: &Arc<CudaStream>,
        forward: &Forward,
        backward: Option<(&Backward, &[T])>,
        inputs: &Inputs<T>,
    ) -> Result<PassCall<T>, Error> {
        let mut tensors = place_forward(stream, forward, inputs)?;
        let backward = match backward {
            None => None,
            Some((backward, dout)) => {
                tensors.run(forward, stream)?;
                Some(place_backward(stream, backward, &tensors, inputs, dout)?)
            }
        };
        Ok(PassCall { forward: tensors, backward })
    }

    /// Fills with NaN what the pass writes; makes room for its workspace.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn ready(&mut self, bound: &Bound, stream: &Arc<CudaStream>) -> Result<(), Error> {
        match (bound, &mut self.backward) {
            (Bound::Backward(backward), Some(tensors)) => {
                tensors.fit(stream, backward)?;
                tensors.poison(stream)
            }
            (Bound::Backward(_), None) => self.forward.poison(stream),
            (Bound::Forward(forward), _) => {
                self.forward.fit(stream, forward)?;
                self.forward.poison(stream)
            }
        }
    }

    /// Launches the pass.
    ///
    /// # Errors
    /// What the kernel refuses; [`Error::Mismatch`] for a backward where only the forward has tensors.
    pub fn run(&mut self, bound: &Bound, stream: &CudaStream) -> Result<(), Error> {
        match (bound, &mut self.backward) {
            (Bound::Forward(forward), _) => self.forward.run(forward, stream),
            (Bound::Backward(backward), Some(tensors)) => tensors.run(&self.forward, backward, stream),
            (Bound::Backward(_), None) => Err(other_pass(bound)),
        }
    }

    /// What a forward wrote.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn output(&self, stream: &Arc<CudaStream>) -> Result<DeviceOutput<T>, Error> {
        self.forward.read(stream)
    }

    /// What a backward wrote; `None` where only the forward has tensors.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn gradients(&self, stream: &Arc<CudaStream>) -> Result<Option<Gradients<T>>, Error> {
        self.backward.as_ref().map(|backward| backward.read(&self.forward, stream)).transpose()
    }
}

/// `count` launches of a pass on `calls` in turn, captured as one CUDA graph on `stream` (not the default
/// one), which must not outlive the calls.
///
/// # Errors
/// [`Error::Driver`], and what the kernel refuses.
pub fn capture_calls<T: Half>(
    calls: &mut [PassCall<T>],
    bound: &Bound,
    stream: &Arc<CudaStream>,
    count: usize,
) -> Result<CudaGraph, Error> {
    let copies = calls.len();
    let launch = |call: &mut PassCall<T>| match (bound, &mut call.backward) {
        (Bound::Forward(forward), _) => call.forward.enqueue(forward, stream),
        (Bound::Backward(backward), Some(tensors)) => tensors.enqueue(&call.forward, backward, stream),
        (Bound::Backward(_), None) => Err(other_pass(bound)),
    };
    capture(stream, || (0..count).try_for_each(|i| launch(&mut calls[i % copies])))
}
