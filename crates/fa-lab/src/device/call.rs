//! Tensors of timed calls of either pass.
#![allow(unsafe_code)]

use std::sync::Arc;

use fa_attn::device::{Bound, DeviceOutput, DeviceTensor, Gpu, Half, capture};
use fa_core::Pass;
use fa_kernels::cudarc::driver::{CudaGraph, CudaSlice, CudaStream};
use fa_kernels::{Backward, Error, Forward};

use super::placed::{
    PlacedBackward, PlacedForward, PlacedInputs, place_backward, place_dout, place_forward, place_inputs,
};
use crate::memory::Gradients;
use crate::tensors::Inputs;

/// Tensors of timed calls of either pass. Inputs: up to 32 copies, taken in turn, which with an O each would
/// take twice the L2, so that a call hardly finds its own there. Outputs and workspace: once, since a
/// framework's allocator gives every call the memory that the one before it has freed; so it is for peers.
pub struct Calls<T> {
    forward: PlacedForward<T>,
    own: Own<T>,
    turn: usize,
}

/// What a pass has besides: the other copies of what it reads (Q, K and V, or a whole forward and dO), and a
/// backward's tensors.
enum Own<T> {
    Forward { others: Vec<PlacedInputs<T>> },
    Backward { tensors: Box<PlacedBackward<T>>, others: Vec<(PlacedForward<T>, DeviceTensor<T>)> },
}

/// The error for a kernel of one pass where the other is wanted.
pub(super) fn other_pass(kernel: Pass, wanted: Pass) -> Error {
    let text = |pass: Pass| format!("the {}", pass.name());
    Error::Mismatch { what: "pass", kernel: text(kernel), problem: text(wanted) }
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
            let others = others.map(|_| place_inputs(stream, inputs)).collect::<Result<_, Error>>()?;
            return Ok(Calls { forward: tensors, own: Own::Forward { others }, turn: 0 });
        };
        tensors.run(forward, stream)?;
        let gradients = Box::new(place_backward(stream, backward, &tensors, inputs, dout)?);
        let other = |_| {
            let mut tensors = place_forward(stream, forward, inputs)?;
            tensors.run(forward, stream)?;
            let dout = place_dout(stream, &tensors, inputs, dout)?;
            Ok((tensors, dout))
        };
        let others = others.map(other).collect::<Result<_, Error>>()?;
        Ok(Calls { forward: tensors, own: Own::Backward { tensors: gradients, others }, turn: 0 })
    }

    /// The number of copies of the inputs.
    fn copies(&self) -> usize {
        match &self.own {
            Own::Forward { others } => 1 + others.len(),
            Own::Backward { others, .. } => 1 + others.len(),
        }
    }

    /// Makes the next copy of the inputs the one that calls read. Exchanging the current one for each of the
    /// others in turn visits all of them in turn.
    fn advance(&mut self) {
        match &mut self.own {
            Own::Forward { others } => {
                if let Some(inputs) = others.get_mut(self.turn) {
                    self.forward.swap_inputs(inputs);
                }
            }
            Own::Backward { tensors, others } => {
                if let Some((forward, dout)) = others.get_mut(self.turn) {
                    std::mem::swap(&mut self.forward, forward);
                    tensors.swap_dout(dout);
                }
            }
        }
        self.turn = (self.turn + 1) % (self.copies() - 1).max(1);
    }

    /// Fills the pass's outputs with NaN; allocates its workspace.
    ///
    /// # Errors
    /// [`Error::Driver`]; [`Error::Mismatch`] where the tensors are those of the other pass.
    pub fn ready(&mut self, bound: &Bound, stream: &Arc<CudaStream>) -> Result<(), Error> {
        match (bound, &mut self.own) {
            (Bound::Backward(backward), Own::Backward { tensors, .. }) => {
                tensors.fit(stream, backward)?;
                tensors.poison(stream)
            }
            (Bound::Forward(forward), Own::Forward { .. }) => {
                self.forward.fit(stream, forward)?;
                self.forward.poison(stream)
            }
            (Bound::Forward(_) | Bound::Backward(_), own) => {
                Err(other_pass(bound.spec().kernel.pass(), own.pass()))
            }
        }
    }

    /// Launches the pass on the next copy of the inputs.
    ///
    /// # Errors
    /// What the kernel refuses; [`Error::Mismatch`] where the tensors are those of the other pass.
    pub fn run(&mut self, bound: &Bound, stream: &CudaStream) -> Result<(), Error> {
        self.advance();
        match (bound, &mut self.own) {
            (Bound::Forward(forward), Own::Forward { .. }) => self.forward.run(forward, stream),
            (Bound::Backward(backward), Own::Backward { tensors, .. }) => {
                tensors.run(&self.forward, backward, stream)
            }
            (Bound::Forward(_) | Bound::Backward(_), own) => {
                Err(other_pass(bound.spec().kernel.pass(), own.pass()))
            }
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
        match &self.own {
            Own::Forward { .. } => Ok(None),
            Own::Backward { tensors, .. } => tensors.read(&self.forward, stream).map(Some),
        }
    }
}

impl<T> Own<T> {
    fn pass(&self) -> Pass {
        match self {
            Own::Forward { .. } => Pass::Forward,
            Own::Backward { .. } => Pass::BACKWARD,
        }
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
    for _ in 0..calls.copies() {
        calls.advance();
        launches.push(match (bound, &mut calls.own, &plan) {
            (Bound::Forward(forward), Own::Forward { .. }, Some(plan)) if plans == Plans::Alone => {
                Box::new(calls.forward.plan(forward, stream, plan))
            }
            (Bound::Forward(forward), Own::Forward { .. }, Some(plan)) => {
                if head.is_none() {
                    head = Some(Box::new(calls.forward.plan(forward, stream, plan)));
                }
                Box::new(calls.forward.launch_planned(forward, stream, plan))
            }
            (Bound::Forward(forward), Own::Forward { .. }, None) => {
                Box::new(calls.forward.launch(forward, stream))
            }
            (Bound::Backward(backward), Own::Backward { tensors, .. }, _) => {
                Box::new(tensors.launch(&calls.forward, backward, stream))
            }
            (Bound::Forward(_) | Bound::Backward(_), own, _) => {
                return Err(other_pass(bound.spec().kernel.pass(), own.pass()));
            }
        });
    }
    let launch_all = || {
        head.iter().try_for_each(|plan| plan(stream))?;
        (0..count).try_for_each(|i| launches[i % launches.len()](stream))
    };
    // SAFETY: the graph is dropped before the calls, and has the plan with it.
    let graph = unsafe { capture(stream, launch_all) }?;
    Ok(Captured { graph, _plan: plan })
}

/// A launch on a stream.
type Launch<'a> = Box<dyn Fn(&CudaStream) -> Result<(), Error> + 'a>;
