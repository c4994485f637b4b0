//! A backward's tensors on the GPU, on top of those of its forward's call; and calls of either pass.
#![allow(unsafe_code)]

use std::sync::Arc;

use fa_core::{KernelSpec, TensorLayout};
use fa_kernels::cudarc::driver::{CudaGraph, CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
use fa_kernels::{
    Backward, BackwardArgs, Error, Forward, Input, LoadedKernel, Output, RawBackwardArgs, RawTensor,
};

use super::call::{Call, capture, doing, download, fill_with_nan, upload};
use crate::tensors::{Gradients, Half, Inputs, Outputs, Place, dout_place};

/// A kernel bound to a problem: its forward, or its backward.
#[derive(Debug)]
// A handful exist at a time; a box would only be in the way.
#[allow(clippy::large_enum_variant)]
pub enum Bound {
    /// O and LSE.
    Forward(Forward),
    /// dQ, dK and dV.
    Backward(Backward),
}

impl Bound {
    /// The kernel.
    pub fn kernel(&self) -> &LoadedKernel {
        match self {
            Bound::Forward(forward) => forward.kernel(),
            Bound::Backward(backward) => backward.kernel(),
        }
    }

    /// What it was made from.
    pub fn spec(&self) -> &KernelSpec {
        &self.kernel().spec
    }
}

/// What the backward of a call reads and writes beside the call's own tensors.
pub struct GradientCall<T> {
    dout: CudaSlice<T>,
    /// dQ, dK and dV.
    gradients: [CudaSlice<T>; 3],
    workspace: CudaSlice<u8>,
    /// Of dO, dQ, dK and dV.
    places: [Place; 4],
}

impl<T: Half> GradientCall<T> {
    /// dO, of [`random_dout`], on the GPU beside `inputs`, and gradients that hold NaN. Gradients lie as their tensors do; those of tensors with
    /// broadcast axes are packed.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn new(
        stream: &Arc<CudaStream>,
        backward: &Backward,
        inputs: &Inputs<T>,
        dout: &[T],
    ) -> Result<GradientCall<T>, Error> {
        let [q, k, v, _] = inputs.places;
        let own = |place: Place| {
            let broadcast = [place.strides.batch, place.strides.seq, place.strides.head].contains(&0);
            if broadcast { Place::packed(place.shape, TensorLayout::Bshd) } else { place }
        };
        let places = [dout_place(&inputs.places), own(q), own(k), own(v)];
        let made = doing("allocating device memory");
        let room = |place: &Place| stream.alloc_zeros(place.len()).map_err(&made);
        let mut call = GradientCall {
            dout: upload(stream, dout, &places[0])?,
            gradients: [room(&places[1])?, room(&places[2])?, room(&places[3])?],
            workspace: stream.alloc_zeros(backward.workspace_bytes().max(16)).map_err(&made)?,
            places,
        };
        call.poison(stream)?;
        Ok(call)
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
        self.gradients.iter_mut().try_for_each(|gradient| fill_with_nan(stream, gradient))?;
        fill_with_nan(stream, &mut self.workspace)
    }

    /// Launches `backward` on what the forward of `call` has left.
    ///
    /// # Errors
    /// What [`Backward::run`] refuses.
    pub fn run(&mut self, call: &Call<T>, backward: &Backward, stream: &CudaStream) -> Result<(), Error> {
        let [q, k, v, out] = call.places.map(|place| place.strides);
        let [dout, to_q, to_k, to_v] = self.places.map(|place| place.strides);
        let [dq, dk, dv] = &mut self.gradients;
        backward.run(
            stream,
            BackwardArgs {
                q: Input { data: &call.inputs[0], strides: q },
                k: Input { data: &call.inputs[1], strides: k },
                v: Input { data: &call.inputs[2], strides: v },
                out: Input { data: &call.out, strides: out },
                lse: &call.lse,
                dout: Input { data: &self.dout, strides: dout },
                dq: Output { data: dq, strides: to_q },
                dk: Output { data: dk, strides: to_k },
                dv: Output { data: dv, strides: to_v },
                workspace: &mut self.workspace,
            },
        )
    }

    /// The launches on `stream` (not the default one) captured as a CUDA graph, which must not outlive the tensors of both.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn capture(
        &mut self,
        call: &Call<T>,
        backward: &Backward,
        stream: &Arc<CudaStream>,
    ) -> Result<CudaGraph, Error> {
        let tensor = |slice: &CudaSlice<T>, place: &Place| RawTensor {
            address: slice.device_ptr(stream).0,
            strides: place.strides,
        };
        let (q, k, v) = (
            tensor(&call.inputs[0], &call.places[0]),
            tensor(&call.inputs[1], &call.places[1]),
            tensor(&call.inputs[2], &call.places[2]),
        );
        let out = tensor(&call.out, &call.places[3]);
        let dout = tensor(&self.dout, &self.places[0]);
        let mut written = |i: usize| RawTensor {
            address: self.gradients[i].device_ptr_mut(stream).0,
            strides: self.places[i + 1].strides,
        };
        let (dq, dk, dv) = (written(0), written(1), written(2));
        let args = RawBackwardArgs {
            q,
            k,
            v,
            out,
            lse: call.lse.device_ptr(stream).0,
            dout,
            dq,
            dk,
            dv,
            workspace: self.workspace.device_ptr_mut(stream).0,
        };
        // SAFETY: the addresses are those of tensors with these places, which the caller keeps for the graph.
        capture(stream, || unsafe { backward.run_raw(stream, &args) })
    }

    /// Waits for the stream and reads what was written.
    ///
    /// # Errors
    /// [`Error::Driver`], also for what went wrong on the GPU meanwhile.
    pub fn read(&self, stream: &Arc<CudaStream>) -> Result<Gradients<T>, Error> {
        let mut strays = 0;
        let mut read = |i: usize| -> Result<Vec<T>, Error> {
            let (values, written) = download(stream, &self.gradients[i], &self.places[i + 1])?;
            strays += written;
            Ok(values)
        };
        let values = [read(0)?, read(1)?, read(2)?];
        Ok(Gradients { values, strays })
    }
}

/// Tensors of one call of either pass.
pub struct PassCall<T> {
    call: Call<T>,
    gradients: Option<GradientCall<T>>,
}

impl<T: Half> PassCall<T> {
    /// Tensors of the forward, and with a `backward` those of the gradients after the forward has run.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn new(
        stream: &Arc<CudaStream>,
        forward: &Forward,
        backward: Option<(&Backward, &[T])>,
        inputs: &Inputs<T>,
    ) -> Result<PassCall<T>, Error> {
        let mut call = Call::new(stream, forward, inputs)?;
        let gradients = match backward {
            None => None,
            Some((backward, dout)) => {
                call.run(forward, stream)?;
                Some(GradientCall::new(stream, backward, inputs, dout)?)
            }
        };
        Ok(PassCall { call, gradients })
    }

    /// Fills with NaN what the pass writes; makes room for its workspace.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn ready(&mut self, pass: &Bound, stream: &Arc<CudaStream>) -> Result<(), Error> {
        match (pass, &mut self.gradients) {
            (Bound::Backward(backward), Some(gradients)) => {
                gradients.fit(stream, backward)?;
                gradients.poison(stream)
            }
            _ => self.call.poison(stream),
        }
    }

    /// Launches the pass.
    ///
    /// # Errors
    /// What the kernel refuses; [`Error::Mismatch`] for a backward where only the forward has tensors.
    pub fn run(&mut self, pass: &Bound, stream: &CudaStream) -> Result<(), Error> {
        match (pass, &mut self.gradients) {
            (Bound::Forward(forward), _) => self.call.run(forward, stream),
            (Bound::Backward(backward), Some(gradients)) => gradients.run(&self.call, backward, stream),
            (Bound::Backward(_), None) => Err(Error::Mismatch {
                what: "pass",
                kernel: "the backward".to_owned(),
                problem: "the forward".to_owned(),
            }),
        }
    }

    /// What a forward wrote.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn outputs(&self, stream: &Arc<CudaStream>) -> Result<Outputs<T>, Error> {
        self.call.outputs(stream)
    }

    /// What a backward wrote; `None` where only the forward has tensors.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn gradients(&self, stream: &Arc<CudaStream>) -> Result<Option<Gradients<T>>, Error> {
        self.gradients.as_ref().map(|gradients| gradients.read(stream)).transpose()
    }
}
