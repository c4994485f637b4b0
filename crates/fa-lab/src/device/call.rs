//! Tensors of one call of either pass, for kernels that are timed.

use std::sync::Arc;

use fa_attn::device::{Bound, DeviceOutput, Half, capture};
use fa_kernels::cudarc::driver::{CudaGraph, CudaSlice, CudaStream};
use fa_kernels::{Backward, Error, Forward};

use super::placed::{PlacedBackward, PlacedForward, place_backward, place_forward};
use crate::memory::Gradients;
use crate::tensors::Inputs;

/// Tensors of one call of either pass.
pub struct PassCall<T> {
    forward: PlacedForward<T>,
    backward: Option<PlacedBackward<T>>,
}

/// The error for a pass that has no tensors.
fn no_tensors() -> Error {
    let (kernel, problem) = ("the backward".to_owned(), "the forward".to_owned());
    Error::Mismatch { what: "pass", kernel, problem }
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
            (Bound::Backward(_), None) => Err(no_tensors()),
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

/// `count` launches of a pass on `calls` in turn, captured as one CUDA graph on `stream` (not the default
/// one), which must not outlive the calls.
///
/// # Errors
/// [`Error::Driver`], what the kernel refuses, and [`Error::UnusedExtra`] where a plan alone is asked for and
/// the pass has none.
pub fn capture_calls<T: Half>(
    calls: &mut [PassCall<T>],
    bound: &Bound,
    stream: &Arc<CudaStream>,
    count: usize,
    plans: Plans,
) -> Result<Captured, Error> {
    let copies = calls.len();
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
    for call in calls {
        launches.push(match (bound, &mut call.backward, &plan) {
            (Bound::Forward(forward), _, Some(plan)) if plans == Plans::Alone => {
                Box::new(call.forward.plan(forward, stream, plan))
            }
            (Bound::Forward(forward), _, Some(plan)) => {
                if head.is_none() {
                    head = Some(Box::new(call.forward.plan(forward, stream, plan)));
                }
                Box::new(call.forward.launch_planned(forward, stream, plan))
            }
            (Bound::Forward(forward), _, None) => Box::new(call.forward.launch(forward, stream)),
            (Bound::Backward(backward), Some(tensors), _) => {
                Box::new(tensors.launch(&call.forward, backward, stream))
            }
            (Bound::Backward(_), None, _) => return Err(no_tensors()),
        });
    }
    let graph = capture(stream, || {
        head.iter().try_for_each(|plan| plan(stream))?;
        (0..count).try_for_each(|i| launches[i % copies](stream))
    })?;
    Ok(Captured { graph, _plan: plan })
}

/// A launch on a stream.
type Launch<'a> = Box<dyn Fn(&CudaStream) -> Result<(), Error> + 'a>;
