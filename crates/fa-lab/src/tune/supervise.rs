//! Supervises the process that measures: a kernel that hangs or crashes ends its worker, and another worker
//! goes on with the remaining kernels.

use std::time::{Duration, Instant};

use fa_core::Problem;
use serde_json::json;

use super::candidates::Candidate;
use super::measured::Outcome;
use super::worker::{Event, Job};
use crate::error::{Context, Error, Result};
use crate::runner::Turns;
use crate::worker::{Program, Received, StandardError, Worker};

/// A worker that is silent for this long counts as hung.
const SILENCE: Duration = Duration::from_secs(60);

/// Has workers measure all candidates that have no error; the loss of a worker is recorded as an error of the
/// kernel that ran.
///
/// # Errors
/// When workers cannot be started, or end before they have begun.
pub(super) fn measure(
    problem: &Problem,
    candidates: &[Candidate],
    found: &mut [Outcome],
    turns: Turns,
    program: &Program,
) -> Result<()> {
    loop {
        let live: Vec<usize> = (0..candidates.len()).filter(|&i| found[i].error.is_none()).collect();
        if live.is_empty() {
            return Ok(());
        }
        let specs = live.iter().map(|&i| candidates[i].spec.clone()).collect();
        let mut ranked: Vec<usize> =
            (0..live.len()).filter(|&index| candidates[live[index]].rank.is_some()).collect();
        ranked.sort_by_key(|&index| candidates[live[index]].rank);
        let job = Job { problem: *problem, specs, ranked, turns };
        match watch(&job, &live, found, program)? {
            End::Through => return Ok(()),
            End::Lost { begun: Some(lost), why } => {
                found[live[lost]].error = Some(format!("its worker was lost: {why}"));
            }
            End::Lost { begun: None, why } => {
                return Err(Error::Worker(format!("the worker did not begin: {why}")));
            }
        }
    }
}

enum End {
    Through,
    /// It ended early: the kernel that it had started last, and the reason.
    Lost {
        begun: Option<usize>,
        why: String,
    },
}

/// Runs one worker to its end.
fn watch(job: &Job, live: &[usize], found: &mut [Outcome], program: &Program) -> Result<End> {
    let mut worker =
        Worker::start(program.command(), StandardError::Read).context("cannot start a worker")?;
    // The loss of a worker is reported below.
    let _ = worker.send(&json!({ "tune": job }));
    worker.close_input();
    let mut begun = None;
    let mut deadline = Instant::now() + SILENCE;
    loop {
        match worker.receive(deadline) {
            Received::Line(line) => {
                deadline = Instant::now() + SILENCE;
                match serde_json::from_str(&line).context("a worker talks oddly")? {
                    Event::Begin(index) => begun = Some(index),
                    Event::Bad(index, why) => found[live[index]].error = Some(why),
                    Event::Again(times) => {
                        found.iter_mut().for_each(|found| found.again_ms = None);
                        times.into_iter().for_each(|(index, ms)| found[live[index]].again_ms = Some(ms));
                    }
                    Event::Times(times) => {
                        times.into_iter().for_each(|(index, ms)| found[live[index]].ms = Some(ms));
                        return Ok(End::Through);
                    }
                }
            }
            Received::Said(_) => {}
            Received::Nothing => {
                let why = format!("nothing happened for {} s", SILENCE.as_secs());
                return Ok(End::Lost { begun, why });
            }
            Received::End => {
                let status = worker.wait()?;
                let last = worker.last_words().next_back().unwrap_or("it said nothing");
                return Ok(End::Lost { begun, why: format!("{status}: {last}") });
            }
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use fa_core::{Arch, Dtype, Family, Mask, Pass};

    use super::*;
    use crate::tune::candidates;

    fn program(script: &str) -> Program {
        Program { executable: "sh".into(), arguments: vec!["-c".to_owned(), script.to_owned()] }
    }

    #[test]
    fn a_kernel_that_loses_its_worker_is_left_out_and_the_others_are_measured() {
        let problem = Problem::square(1, 1024, 8, 64, Mask::CAUSAL, Dtype::F16);
        let tried = candidates::of(&problem, Arch::Sm80, Family::Sm80, Pass::Forward, 1).expect("a plan");
        let mut found = vec![Outcome::default(); tried.len()];
        let turns = Turns::of(6);
        // Two kernels: the first worker dies in the second, the other worker gets one kernel.
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mark = folder.path().join("second");
        let script = format!(
            "read job; if [ -e {mark} ]; then echo '{{\"again\":[[0,1.25]]}}'; \
             echo '{{\"times\":[[0,1.5]]}}'; else touch {mark}; \
             echo '{{\"begin\":1}}'; echo 'an illegal access' >&2; exit 3; fi",
            mark = mark.display()
        );
        assert!(tried.len() >= 2, "a tile and a variant of it");
        measure(&problem, &tried, &mut found, turns, &program(&script)).expect("a worker got through");
        assert_eq!((found[0].ms, found[0].again_ms), (Some(1.5), Some(1.25)));
        let error = found[1].error.as_deref().expect("it was lost");
        assert!(error.starts_with("its worker was lost") && error.ends_with("an illegal access"), "{error}");
        let error = measure(&problem, &tried, &mut found[..], turns, &program("exit 1")).unwrap_err();
        assert!(error.to_string().contains("did not begin"), "{error}");
    }
}
