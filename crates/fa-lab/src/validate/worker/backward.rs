//! Cases of gradients: the library's forward, then the backward behind it, both judged.

use std::sync::Arc;

use fa_attn::device::{Bound, DeviceOutput, Half};
use fa_kernels::cudarc::driver::CudaStream;
use fa_kernels::{Backward, Error, Forward};

use super::session::{Found, Session};
use super::twin;
use crate::device::{PlacedBackward, PlacedForward, place_backward, place_forward};
use crate::error::Result;
use crate::grid::{Action, Case};
use crate::judge::forward::Oracle;
use crate::judge::gradients::GradientOracle;
use crate::memory::Gradients;
use crate::tensors::{Inputs, random_dout};

/// Inputs, dO and the oracles of a case.
pub(super) struct Prepared<T> {
    inputs: Inputs<T>,
    dout: Vec<T>,
    forward: Oracle<T>,
    gradients: GradientOracle<T>,
}

/// Computes inputs and oracles of a case.
///
/// # Errors
/// Inputs that do not fit their problem.
pub(super) fn prepare<T: Half>(case: &Case) -> Result<Prepared<T>> {
    let inputs = case.inputs::<T>();
    let dout = random_dout(&inputs, case.seed());
    let forward = Oracle::new(&inputs, case.seed())?;
    let gradients = GradientOracle::new(&inputs, &dout, case.seed())?;
    Ok(Prepared { inputs, dout, forward, gradients })
}

/// The results of a case.
struct Runs<T> {
    outputs: DeviceOutput<T>,
    gradients: Vec<Gradients<T>>,
    fault: Option<String>,
}

/// Both kernels of a case and its inputs.
struct Job<'a, T> {
    forward: &'a Forward,
    backward: &'a Backward,
    prepared: &'a Prepared<T>,
    deterministic: bool,
}

impl<T: Half> Job<'_, T> {
    /// Tensors of both passes on `stream`, after the forward has run.
    fn calls(&self, stream: &Arc<CudaStream>) -> Result<(PlacedForward<T>, PlacedBackward<T>), Error> {
        let mut call = place_forward(stream, self.forward, &self.prepared.inputs)?;
        call.run(self.forward, stream)?;
        let gradients =
            place_backward(stream, self.backward, &call, &self.prepared.inputs, &self.prepared.dout)?;
        Ok((call, gradients))
    }

    /// `times` runs on `stream`, all but the last on poisoned tensors that hold the run before; of a
    /// deterministic kernel each must have the bits of the first.
    fn runs(&self, stream: &Arc<CudaStream>, times: usize) -> Result<Runs<T>, Error> {
        let (call, mut gradients) = self.calls(stream)?;
        gradients.run(&call, self.backward, stream)?;
        let first = gradients.read(&call, stream)?;
        let mut fault = None;
        for turn in 1..times {
            gradients.poison(stream)?;
            gradients.run(&call, self.backward, stream)?;
            if self.deterministic && !gradients.read(&call, stream)?.same_bits(&first) {
                fault = Some(format!("run {} of {times} differs from the first", turn + 1));
                break;
            }
        }
        let mut all = vec![first];
        if times > 1 {
            all.push(gradients.read(&call, stream)?);
        }
        Ok(Runs { outputs: call.read(stream)?, gradients: all, fault })
    }

    fn graph(&self, stream: &Arc<CudaStream>) -> Result<Runs<T>, Error> {
        let (call, mut gradients) = self.calls(stream)?;
        // The first run loads what a capture must not.
        gradients.run(&call, self.backward, stream)?;
        let graph = gradients.capture(&call, self.backward, stream)?;
        let mut all: Vec<Gradients<T>> = Vec::new();
        let mut fault = None;
        for turn in 0..3 {
            gradients.poison(stream)?;
            graph.launch().map_err(|source| Error::Driver { doing: "launching a graph", source })?;
            all.push(gradients.read(&call, stream)?);
            if self.deterministic && !all[turn].same_bits(&all[0]) {
                fault = Some(format!("replay {} differs from the first", turn + 1));
            }
        }
        Ok(Runs { outputs: call.read(stream)?, gradients: all, fault })
    }
}

/// Runs and judges `backward` on a case, after `forward`.
///
/// # Errors
/// Errors of the GPU.
pub(super) fn examine<T: Half>(
    session: &Session,
    case: &Case,
    forward: Forward,
    backward: Backward,
    deterministic: bool,
) -> Result<Found> {
    if case.action == Action::Measure {
        return session.measure(case, &Bound::Backward(backward), Some(&forward));
    }
    let prepared = session.prepared(case, prepare::<T>)?;
    let job = Job { forward: &forward, backward: &backward, prepared: &prepared, deterministic };
    let twin = if case.action == Action::AsDense {
        Some(twin::of(case, &prepared.inputs)?.bind(session, &forward, &backward)?)
    } else {
        None
    };
    let runs = {
        let _gpu = session.begin(case);
        let mut runs = act(session, case.action, &job)?;
        if let Some((twin, forward, backward)) = &twin {
            let inputs = (&twin.inputs, prepared.dout.as_slice());
            let theirs = run_twin(&session.gpu.stream, forward, backward, inputs)?;
            if !theirs.same_bits(&runs.gradients[0]) {
                runs.fault = Some(twin.fault());
            }
        }
        runs
    };
    let of_out = prepared.forward.judge(&prepared.inputs, &runs.outputs)?;
    let mut found = Found {
        passed: of_out.passed,
        detail: if of_out.passed { String::new() } else { format!("the forward: {}", of_out.detail) },
        ..Found::of(&backward.kernel().spec)
    };
    for gradients in &runs.gradients {
        let judged = prepared.gradients.judge(&prepared.inputs, &prepared.dout, gradients)?;
        found.ratio = found.ratio.max(judged.ratio);
        if found.detail.is_empty() || found.passed && !judged.passed {
            found.detail = judged.detail;
        }
        found.passed &= judged.passed;
    }
    if let Some(fault) = runs.fault {
        found.passed = false;
        found.detail = fault;
    }
    Ok(found)
}

fn run_twin<T: Half>(
    stream: &Arc<CudaStream>,
    forward: &Forward,
    backward: &Backward,
    (inputs, dout): (&Inputs<T>, &[T]),
) -> Result<Gradients<T>, Error> {
    let mut call = place_forward(stream, forward, inputs)?;
    call.run(forward, stream)?;
    let mut gradients = place_backward(stream, backward, &call, inputs, dout)?;
    gradients.run(&call, backward, stream)?;
    gradients.read(&call, stream)
}

fn act<T: Half>(session: &Session, action: Action, job: &Job<'_, T>) -> Result<Runs<T>> {
    const THREAD_RUNS: usize = 20;
    let stream = || session.gpu.context().new_stream();
    Ok(match action {
        Action::Once | Action::AsDense => job.runs(&session.gpu.stream, 1)?,
        Action::Repeat(times) => job.runs(&session.gpu.stream, times)?,
        Action::OwnStream => job.runs(&stream()?, 1)?,
        Action::Graph => job.graph(&stream()?)?,
        Action::Threads => {
            let work = || -> Result<_> { Ok(job.runs(&stream()?, THREAD_RUNS)?) };
            let both = std::thread::scope(|scope| {
                let threads = [scope.spawn(work), scope.spawn(work)];
                threads.map(|thread| thread.join().expect("a thread that launches does not panic"))
            });
            let [one, two] = both;
            let (mut one, two) = (one?, two?);
            if job.deterministic && !one.gradients[0].same_bits(&two.gradients[0]) {
                one.fault.get_or_insert("the threads' results differ".to_owned());
            }
            one.fault = one.fault.or(two.fault);
            one.gradients.extend(two.gradients);
            one
        }
        Action::Measure => unreachable!("examine() sends it to Session::measure()"),
        Action::Relength | Action::AsContiguous | Action::BadPages => {
            unreachable!("the grid of gradients has no pages and no other lengths")
        }
    })
}
