//! Tensors of one call of either pass.

use std::sync::Arc;

use fa_attn::device::{
    Bound, DeviceBackward, DeviceForward, DeviceGradients, DeviceOutput, DeviceTensor, Half,
};
use fa_kernels::cudarc::driver::CudaStream;
use fa_kernels::{Backward, Error, Forward};

use crate::tensors::{Inputs, dout_placement};

/// Tensors of one call of either pass.
pub struct PassCall<T> {
    forward: DeviceForward<T>,
    backward: Option<DeviceBackward<T>>,
}

/// `inputs` on the GPU, gaps between rows filled with NaN, and outputs that hold NaN.
///
/// # Errors
/// [`Error::Driver`], above all for want of memory.
pub fn place_forward<T: Half>(
    stream: &Arc<CudaStream>,
    forward: &Forward,
    inputs: &Inputs<T>,
) -> Result<DeviceForward<T>, Error> {
    let values = [&inputs.values[0], &inputs.values[1], &inputs.values[2]].map(Vec::as_slice);
    DeviceForward::place(stream, &inputs.problem, forward.workspace_bytes(), values, &inputs.placements)
}

/// `dout`, packed BSHD, on the GPU next to the tensors of its forward, and gradients that hold NaN.
///
/// # Errors
/// [`Error::Driver`], above all for want of memory.
pub fn place_backward<T: Half>(
    stream: &Arc<CudaStream>,
    backward: &Backward,
    forward: &DeviceForward<T>,
    inputs: &Inputs<T>,
    dout: &[T],
) -> Result<DeviceBackward<T>, Error> {
    let dout = DeviceTensor::place(stream, dout, dout_placement(&inputs.placements))?;
    DeviceBackward::new(stream, backward, forward, dout)
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
            (Bound::Backward(_), None) | (Bound::Forward(_), _) => self.forward.poison(stream),
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
    pub fn output(&self, stream: &Arc<CudaStream>) -> Result<DeviceOutput<T>, Error> {
        self.forward.read(stream)
    }

    /// What a backward wrote; `None` where only the forward has tensors.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn gradients(&self, stream: &Arc<CudaStream>) -> Result<Option<DeviceGradients<T>>, Error> {
        self.backward.as_ref().map(|backward| backward.read(stream)).transpose()
    }
}
