//! Tensors of timed calls of either pass.

use std::sync::Arc;

use fa_attn::device::{Bound, DeviceOutput, DeviceTensor, Gpu, Half, capture};
use fa_core::Pass;
use fa_kernels::cudarc::driver::{CudaGraph, CudaSlice, CudaStream};
use fa_kernels::{Backward, Error, Forward};

use super::placed::{PlacedBackward, PlacedForward, place_backward, place_dout, place_forward, place_inputs};
use crate::memory::Gradients;
use crate::tensors::Inputs;

/// Tensors of timed calls of either pass. Inputs: up to 32 copies, taken in turn, which with an O each would
/// take twice the L2, so that a call hardly finds its own there. Outputs and workspace: once, since a
/// framework's allocator gives every call the memory that the one before it has freed; so it is for peers.
pub struct Calls<T> {
    forward: PlacedForward<T>,
    backward: Option<PlacedBackward<T>>,
    /// The other copies of the inputs.
    others: Vec<OtherInputs<T>>,
    turn: usize,
}

/// What a pass reads: the inputs of a forward, or a whole forward and dO.
enum OtherInputs<T> {
    Forward(Box<[DeviceTensor<T>; 3]>),
    Backward(Box<PlacedForward<T>>, DeviceTensor<T>),
}

/// The error for tensors of the other pass.
fn other_pass() -> Error {
    let (kernel, problem) = ("one pass".to_owned(), "the other".to_owned());
    Error::Mismatch { what: "pass", kernel, problem }
}

impl<T: Half> Calls<T> {
    /// Tensors of the forward, and with a `backward` and dO those of the gradients after the forward has run.
    ///
    /// # Errors
    /// [`Error::Driver`], most often for lack of memory.
    pub fn new(
        gpu: &Gpu,
        forward: &Forward,
        backward: Option<(&Backward, &[T])>,
        inputs: &Inputs<T>,
    ) -> Result<Calls<T>, Error> {
        const MOST: usize = 32;
        let stream = &gpu.stream;
        let l2 = gpu.arch().limits().l2_bytes as f64;
        let copies = (2.0 * l2 / inputs.problem.bytes_held(Pass::Forward).max(1.0)).ceil() as usize;
        let others = 1..copies.clamp(1, MOST);
        let mut tensors = place_forward(stream, forward, inputs)?;
        let Some((backward, dout)) = backward else {
            let other = |_| Ok(OtherInputs::Forward(Box::new(place_inputs(stream, inputs)?)));
            let others = others.map(other).collect::<Result<_, Error>>()?;
            return Ok(Calls { forward: tensors, backward: None, others, turn: 0 });
        };
        tensors.run(forward, stream)?;
        let gradients = place_backward(stream, backward, &tensors, inputs, dout)?;
        let other = |_| {
            let mut tensors = place_forward(stream, forward, inputs)?;
            tensors.run(forward, stream)?;
            let dout = place_dout(stream, &tensors, inputs, dout)?;
            Ok(OtherInputs::Backward(Box::new(tensors), dout))
        };
        let others = others.map(other).collect::<Result<_, Error>>()?;
        Ok(Calls { forward: tensors, backward: Some(gradients), others, turn: 0 })
    }

    /// Makes the next copy of the inputs the one that calls read. Exchanging the current one for each of the
    /// others in turn visits all of them in turn.
    fn advance(&mut self) {
        let Some(other) = self.others.get_mut(self.turn) else { return };
        match (other, &mut self.backward) {
            (OtherInputs::Forward(inputs), _) => self.forward.swap_inputs(inputs),
            (OtherInputs::Backward(forward, dout), Some(backward)) => {
                std::mem::swap(&mut self.forward, forward);
                backward.swap_dout(dout);
            }
            (OtherInputs::Backward(..), None) => unreachable!("made together"),
        }
        self.turn = (self.turn + 1) % self.others.len();
    }

    /// Fills the pass's outputs with NaN; allocates its workspace.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn ready(&mut self, bound: &Bound, stream: &Arc<CudaStream>) -> Result<(), Error> {
        match (bound, &mut self.backward) {
            (Bound::Backward(backward), Some(tensors)) => {
                tensors.fit(stream, backward)?;
                tensors.poison(stream)
            }
            (Bound::Forward(forward), None) => {
                self.forward.fit(stream, forward)?;
                self.forward.poison(stream)
            }
            (Bound::Forward(_), Some(_)) | (Bound::Backward(_), None) => Err(other_pass()),
        }
    }

    /// Launches the pass on the next copy of the inputs.
    ///
    /// # Errors
    /// What the kernel refuses; [`Error::Mismatch`] where the tensors are those of the other pass.
    pub fn run(&mut self, bound: &Bound, stream: &CudaStream) -> Result<(), Error> {
        self.advance();
        match (bound, &mut self.backward) {
            (Bound::Forward(forward), None) => self.forward.run(forward, stream),
            (Bound::Backward(backward), Some(tensors)) => tensors.run(&self.forward, backward, stream),
            (Bound::Forward(_), Some(_)) | (Bound::Backward(_), None) => Err(other_pass()),
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

/// Launches captured as one CUDA graph, and the memory that they need besides the calls' tensors.
pub struct Captured {
    /// The graph.
    pub graph: CudaGraph,
    /// The work plan of all launches, where they share one.
    _plan: Option<CudaSlice<u8>>,
}

/// When a forward whose lengths are on the device plans its work in a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plans {
    /// In every call.
    EachCall,
    /// Once, at the head of the graph, shared by the layers of a step.
    Once,
    /// In every call, which does nothing else.
    Alone,
}

/// `count` launches of a pass, captured as one CUDA graph on `stream` (not the default one), which must not
/// outlive the calls.
///
/// # Errors
/// [`Error::Driver`], what the kernel refuses, and [`Error::UnusedExtra`] where a plan alone is asked for and
/// the pass has none.
pub fn capture_calls<T: Half>(
    calls: &mut Calls<T>,
    bound: &Bound,
    stream: &Arc<CudaStream>,
    count: usize,
    plans: Plans,
) -> Result<Captured, Error> {
    let plan = match bound {
        Bound::Forward(forward) if plans != Plans::EachCall && forward.plan_bytes() > 0 => {
            let made = |source| Error::Driver { doing: "allocating device memory", source };
            Some(stream.alloc_zeros::<u8>(forward.plan_bytes()).map_err(made)?)
        }
        Bound::Forward(_) | Bound::Backward(_) if plans == Plans::Alone => {
            return Err(Error::UnusedExtra { name: "plan" });
        }
        Bound::Forward(_) | Bound::Backward(_) => None,
    };
    let mut head: Option<Launch<'_>> = None;
    let mut launches: Vec<Launch<'_>> = Vec::new();
    for _ in 0..=calls.others.len() {
        calls.advance();
        launches.push(match (bound, &mut calls.backward, &plan) {
            (Bound::Forward(forward), _, Some(plan)) if plans == Plans::Alone => {
                Box::new(calls.forward.plan(forward, stream, plan))
            }
            (Bound::Forward(forward), _, Some(plan)) => {
                if head.is_none() {
                    head = Some(Box::new(calls.forward.plan(forward, stream, plan)));
                }
                Box::new(calls.forward.launch_planned(forward, stream, plan))
            }
            (Bound::Forward(forward), _, None) => Box::new(calls.forward.launch(forward, stream)),
            (Bound::Backward(backward), Some(tensors), _) => {
                Box::new(tensors.launch(&calls.forward, backward, stream))
            }
            (Bound::Backward(_), None, _) => return Err(other_pass()),
        });
    }
    let graph = capture(stream, || {
        head.iter().try_for_each(|plan| plan(stream))?;
        (0..count).try_for_each(|i| launches[i % launches.len()](stream))
    })?;
    Ok(Captured { graph, _plan: plan })
}

/// A launch on a stream.
type Launch<'a> = Box<dyn Fn(&CudaStream) -> Result<(), Error> + 'a>;
