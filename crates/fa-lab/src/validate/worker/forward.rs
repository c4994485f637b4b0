//! Cases of the forward.

use std::sync::Arc;

use fa_attn::device::{Bound, DeviceOutput, Half};
use fa_cpu::OwnedExtras;
use fa_kernels::Forward;
use fa_kernels::cudarc::driver::CudaStream;

use super::session::{Found, Session};
use super::twin;
use crate::device::place_forward;
use crate::error::Result;
use crate::grid::{Action, Case};
use crate::judge::forward::Oracle;
use crate::tensors::Inputs;

/// Inputs and oracle of a case.
pub(super) struct Prepared<T> {
    inputs: Inputs<T>,
    oracle: Oracle<T>,
}

/// Computes inputs and oracle of a case.
///
/// # Errors
/// Inputs that do not fit their problem.
pub(super) fn prepare<T: Half>(case: &Case) -> Result<Prepared<T>> {
    let inputs = case.inputs::<T>();
    let oracle = Oracle::new(&inputs, case.seed())?;
    Ok(Prepared { inputs, oracle })
}

/// Runs and judges a case.
///
/// # Errors
/// Errors of the GPU.
pub(super) fn examine<T: Half>(session: &Session, case: &Case, forward: Forward) -> Result<Found> {
    if case.action == Action::Measure {
        return session.measure(case, &Bound::Forward(forward), None);
    }
    let prepared = session.prepared(case, prepare::<T>)?;
    if case.action == Action::BadPages {
        return bad_pages(session, case, &forward, &prepared.inputs);
    }
    if case.action == Action::Relength {
        return relength(session, case, &forward, &prepared);
    }
    let twin = if matches!(case.action, Action::AsDense | Action::AsContiguous) {
        Some(twin::of(case, &prepared.inputs)?.bind_forward(session, &forward)?)
    } else {
        None
    };
    let runs = {
        let _gpu = session.begin(case);
        let mut runs = act(session, case, &forward, &prepared.inputs)?;
        if let Some((twin, forward)) = &twin {
            let theirs = once(&session.gpu.stream, forward, &twin.inputs)?;
            if !theirs.same_bits(&runs.outputs[0]) {
                runs.fault = Some(twin.fault());
            }
        }
        runs
    };
    let mut found = Found::of(&forward.kernel().spec);
    for outputs in &runs.outputs {
        let judged = prepared.oracle.judge(&prepared.inputs, outputs)?;
        found.passed &= judged.passed;
        found.ratio = found.ratio.max(judged.ratio);
        if found.detail.is_empty() || !judged.passed {
            found.detail = judged.detail;
        }
    }
    if let Some(fault) = runs.fault {
        found.passed = false;
        found.detail = fault;
    }
    Ok(found)
}

fn act<T: Half>(session: &Session, case: &Case, forward: &Forward, inputs: &Inputs<T>) -> Result<Runs<T>> {
    let stream = &session.gpu.stream;
    match case.action {
        Action::Once | Action::AsDense | Action::AsContiguous => Ok(Runs::of(once(stream, forward, inputs)?)),
        Action::Repeat(times) => {
            let mut call = place_forward(stream, forward, inputs)?;
            call.run(forward, stream)?;
            let first = call.read(stream)?;
            for turn in 1..times {
                call.poison(stream)?;
                call.run(forward, stream)?;
                if !call.read(stream)?.same_bits(&first) {
                    let fault = format!("run {} of {times} differs from the first", turn + 1);
                    return Ok(Runs { outputs: vec![first], fault: Some(fault) });
                }
            }
            Ok(Runs::of(first))
        }
        Action::OwnStream => {
            let stream = session.gpu.context().new_stream()?;
            Ok(Runs::of(once(&stream, forward, inputs)?))
        }
        Action::Graph => graph(session, forward, inputs),
        Action::Threads => threads(session, forward, inputs),
        Action::Measure | Action::Relength | Action::BadPages => {
            unreachable!("examine() sends them elsewhere")
        }
    }
}

fn once<T: Half>(
    stream: &Arc<CudaStream>,
    forward: &Forward,
    inputs: &Inputs<T>,
) -> Result<DeviceOutput<T>, fa_kernels::Error> {
    let mut call = place_forward(stream, forward, inputs)?;
    call.run(forward, stream)?;
    call.read(stream)
}

/// A run whose page table names pages that the cache does not have.
fn bad_pages<T: Half>(
    session: &Session,
    case: &Case,
    forward: &Forward,
    inputs: &Inputs<T>,
) -> Result<Found> {
    let (table, lost) = inputs.sequences.k.bad_pages();
    let mut zeroed = inputs.clone();
    for (tensor, width) in [(1, case.problem.head_dim_k()), (2, case.problem.head_dim_v)] {
        let row = case.problem.heads_kv * width;
        for rows in &lost {
            zeroed.values[tensor][rows.start * row..rows.end * row].fill(T::default());
        }
    }
    let oracle = Oracle::new(&zeroed, case.seed())?;
    let stream = &session.gpu.stream;
    let (outputs, faults) = {
        let _gpu = session.begin(case);
        let mut call = place_forward(stream, forward, inputs)?;
        call.write_table(stream, &OwnedExtras { page_table: Some(table), ..inputs.arrays() })?;
        call.run(forward, stream)?;
        (call.read(stream)?, call.page_faults(stream)?)
    };
    let judged = oracle.judge(&zeroed, &outputs)?;
    let counted = faults > 0;
    let detail = match (judged.passed, counted) {
        (true, false) => "no page fault was counted".to_owned(),
        _ => judged.detail,
    };
    let found = Found::of(&forward.kernel().spec);
    Ok(Found { passed: judged.passed && counted, ratio: judged.ratio, detail, ..found })
}

/// A run captured on the case's inputs and replayed on others in the same memory, each result judged.
fn relength<T: Half>(
    session: &Session,
    case: &Case,
    forward: &Forward,
    prepared: &Prepared<T>,
) -> Result<Found> {
    const OTHERS: u64 = 3;
    let others: Vec<(Inputs<T>, Oracle<T>)> = (1..=OTHERS)
        .map(|turn| {
            let sequences = prepared.inputs.sequences.drawn_again(case.seed() ^ turn);
            let inputs = Inputs::placed(&case.problem, sequences, prepared.inputs.placements, turn);
            let oracle = Oracle::new(&inputs, turn)?;
            Ok((inputs, oracle))
        })
        .collect::<Result<_>>()?;
    let stream = session.gpu.context().new_stream()?;
    let mut outputs = Vec::new();
    {
        let _gpu = session.begin(case);
        let mut call = place_forward(&stream, forward, &prepared.inputs)?;
        call.run(forward, &stream)?;
        outputs.push(call.read(&stream)?);
        let graph = call.capture(forward, &stream)?;
        for (inputs, _) in &others {
            call.write(&stream, inputs)?;
            call.poison(&stream)?;
            graph.launch()?;
            outputs.push(call.read(&stream)?);
        }
    }
    let mut found = Found::of(&forward.kernel().spec);
    let first = std::iter::once((&prepared.inputs, &prepared.oracle));
    let all = first.chain(others.iter().map(|(inputs, oracle)| (inputs, oracle)));
    for (turn, ((inputs, oracle), outputs)) in all.zip(&outputs).enumerate() {
        let judged = oracle.judge(inputs, outputs)?;
        found.ratio = found.ratio.max(judged.ratio);
        if found.passed && !judged.passed || found.detail.is_empty() {
            found.detail = format!("lengths {turn}: {}", judged.detail);
        }
        found.passed &= judged.passed;
    }
    Ok(found)
}

fn graph<T: Half>(session: &Session, forward: &Forward, inputs: &Inputs<T>) -> Result<Runs<T>> {
    let stream = session.gpu.context().new_stream()?;
    let mut call = place_forward(&stream, forward, inputs)?;
    let graph = call.capture(forward, &stream)?;
    let mut outputs = Vec::new();
    let mut fault = None;
    for turn in 0..5 {
        call.poison(&stream)?;
        graph.launch()?;
        let replayed = call.read(&stream)?;
        match outputs.first() {
            None => outputs.push(replayed),
            Some(first) if !replayed.same_bits(first) => {
                fault.get_or_insert(format!("replay {} differs from the first", turn + 1));
            }
            Some(_) => {}
        }
    }
    Ok(Runs { outputs, fault })
}

fn threads<T: Half>(session: &Session, forward: &Forward, inputs: &Inputs<T>) -> Result<Runs<T>> {
    const RUNS: usize = 50;
    let work = || -> Result<_> {
        let stream = session.gpu.context().new_stream()?;
        let mut call = place_forward(&stream, forward, inputs)?;
        for _ in 0..RUNS {
            call.poison(&stream)?;
            call.run(forward, &stream)?;
        }
        Ok(call.read(&stream)?)
    };
    let outputs = std::thread::scope(|scope| {
        let threads = [scope.spawn(work), scope.spawn(work)];
        threads.map(|thread| thread.join().expect("a thread that launches does not panic"))
    });
    let outputs = outputs.into_iter().collect::<Result<Vec<_>>>()?;
    let fault = (!outputs[0].same_bits(&outputs[1])).then(|| "the threads' results differ".to_owned());
    Ok(Runs { outputs, fault })
}

/// Outputs to be judged, and what else went wrong.
struct Runs<T> {
    outputs: Vec<DeviceOutput<T>>,
    fault: Option<String>,
}

impl<T> Runs<T> {
    fn of(outputs: DeviceOutput<T>) -> Runs<T> {
        Runs { outputs: vec![outputs], fault: None }
    }
}
