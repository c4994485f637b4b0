//! The process that works on the GPU: cases in, events out.

mod append;
mod backward;
mod choose;
mod forward;
mod merge;
mod session;
mod twin;

use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fa_attn::device::Half;
use fa_core::spec::WHOLE_ROW_HEAD_DIM;
use fa_core::{Pass, Problem};
use rayon::prelude::*;

use super::event::{CaseResult, Event, Status, tell};
use super::options::{Cases, Job};
use super::select::select;
use crate::error::{Error, Result, message};
use crate::grid::{Action, Case, Extent, is_serving, soak};
use crate::tensors::with_half;
use crate::worker::EXIT_LOST;

use choose::Chosen;
use session::{Found, Session};

/// Runs the cases of a job: the whole life of the worker. The process ends early when its GPU context is
/// lost.
///
/// # Errors
/// When there is no GPU. What happens to a case is an event.
pub(crate) fn work(job: &Job) -> Result<()> {
    let mut session = Session::open(job.options.family)?;
    if let (Some(time), Cases::Soak { seed, .. }) = (job.options.soak_time(), &job.options.cases) {
        run_soak(&session, *seed, time, job.options.pass, job.finished.len());
        return Ok(());
    }
    let finished: HashSet<&String> = job.finished.iter().collect();
    let mut cases = select(&job.options, session.gpu.arch(), session.family)?;
    cases.retain(|case| !finished.contains(&case.name()));
    tell(&Event::Cases(cases.len()));
    if matches!(job.options.cases, Cases::Grid { extent: Extent::Quick, .. }) {
        session.choose(Chosen::few(&cases, session.gpu.arch(), session.family));
    }
    compile(&session, &cases);
    session.share(shared(&cases)?);
    if matches!(job.options.cases, Cases::Sanitize) {
        // racecheck may wait for ever where several threads launch.
        cases.iter().for_each(|case| run_case(&session, case));
    } else {
        cases.par_iter().with_max_len(1).for_each(|case| run_case(&session, case));
    }
    Ok(())
}

/// Runs random problems until the time is up, from number `first` on.
fn run_soak(session: &Session, seed: u64, time: Duration, pass: Pass, first: usize) {
    let case_of = if pass.is_backward() { soak::gradients } else { soak::case };
    let start = Instant::now();
    let mut turn = first as u64;
    while start.elapsed() < time {
        let count = 4 * rayon::current_num_threads();
        tell(&Event::Cases(count));
        (0..count).into_par_iter().with_max_len(1).for_each(|i| {
            if start.elapsed() < time {
                run_case(session, &case_of(seed, turn + i as u64, session.family));
            }
        });
        turn += count as u64;
    }
}

/// Compiles the cases' kernels on all cores. Failures are reported when the cases run.
fn compile(session: &Session, cases: &[Case]) {
    let mut seen = HashSet::new();
    let new: Vec<_> = cases
        .iter()
        .filter(|case| case.is_attention())
        .filter_map(|case| session.first_choice(case))
        .filter(|s| seen.insert(s.to_ron()))
        .collect();
    new.par_iter().with_max_len(1).for_each(|spec| drop(session.gpu.kernels.load(spec)));
}

/// Computes inputs and oracles that several cases share.
fn shared(cases: &[Case]) -> Result<HashMap<String, Arc<dyn Any + Send + Sync>>> {
    let mut users: HashMap<String, (usize, &Case)> = HashMap::new();
    let keeps_own =
        |case: &&Case| !case.is_attention() || matches!(case.action, Action::Measure | Action::Repeat(_));
    for case in cases.iter().filter(|case| !keeps_own(case)) {
        users.entry(case.problem_name()).or_insert((0, case)).0 += 1;
    }
    let several: Vec<&Case> = users.values().filter(|(n, _)| *n > 1).map(|&(_, case)| case).collect();
    let prepared = several.par_iter().with_max_len(1).map(|case| {
        let inputs = with_half!(case.problem.types.wide(), T => {
            match case.pass {
                Pass::Forward => Arc::new(forward::prepare::<T>(case)?) as Arc<dyn Any + Send + Sync>,
                Pass::Backward { .. } => Arc::new(backward::prepare::<T>(case)?),
            }
        }, else Arc::new(()));
        Ok((case.problem_name(), inputs))
    });
    prepared.collect()
}

fn run_case(session: &Session, case: &Case) {
    let name = case.name();
    let types = case.problem.types;
    let found = with_half!(types.wide(), T => examine::<T>(session, case), else Err(Error::NotTried(
        format!("no GPU kernel computes in {}", types.q))));
    let fate = |status, detail| CaseResult {
        name: name.clone(),
        kernel: String::new(),
        status,
        ratio: 0.0,
        detail,
        ms: None,
        passed_over: Vec::new(),
    };
    tell(&Event::Done(match found {
        Ok(Found { kernel, passed, ratio, detail, ms, passed_over }) => {
            let status = if passed { Status::Passed } else { Status::Failed };
            CaseResult { kernel, ratio, ms, passed_over, ..fate(status, detail) }
        }
        Err(Error::NotTried(why)) => fate(Status::Skipped, why),
        // The library refuses problems without a kernel with the same error.
        Err(error) if may_be_refused(case) && is_unplanned(&error) => fate(Status::Skipped, message(&error)),
        // No kernel with a switch that this compiler ignores ships or is chosen by the library.
        Err(error) if case.group == "knobs" && is_refused(&error) => fate(Status::Skipped, message(&error)),
        Err(error) => fate(Status::Failed, message(&error)),
    }));
    // After an illegal access, the context is unusable in this process.
    if session.gpu.synchronize().is_err() {
        std::process::exit(EXIT_LOST);
    }
}

fn examine<T: Half>(session: &Session, case: &Case) -> Result<Found> {
    if let Some(append) = &case.append {
        return append::examine::<T>(session, case, append);
    }
    if let Some(merge) = &case.merge {
        return merge::examine(session, case, merge);
    }
    let (forward, mut passed_over) = session.forward(case)?;
    session.check_memory(case)?;
    let found = match case.pass {
        Pass::Forward => forward::examine::<T>(session, case, forward)?,
        Pass::Backward { deterministic } => {
            let (backward, more) = session.backward(case, deterministic)?;
            passed_over.extend(more);
            backward::examine::<T>(session, case, forward, backward, deterministic)?
        }
    };
    Ok(Found { passed_over, ..found })
}

/// Whether a family may have no kernel for a case: pages whose boxes none loads, latent keys and wide heads.
fn may_be_refused(case: &Case) -> bool {
    let Problem { latent, head_dim, types, .. } = case.problem;
    match case.group {
        "fp8" | "wide programs" => true,
        "soak" => types.is_fp8(),
        "sanitize" => latent || head_dim > WHOLE_ROW_HEAD_DIM as usize,
        group => is_serving(group),
    }
}

fn is_unplanned(error: &Error) -> bool {
    matches!(error, Error::Plan(_))
}

fn is_refused(error: &Error) -> bool {
    matches!(error, Error::Kernels(fa_kernels::Error::Refused { .. }))
}
