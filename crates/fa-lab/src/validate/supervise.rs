//! Supervises a worker: a case that hangs or crashes is reported, and a new worker goes on with the others.

use std::time::{Duration, Instant};

use serde_json::json;

use super::event::{CaseResult, Event, Status};
use super::options::Job;
use crate::error::{Context, Error, Result};
use crate::progress::{Progress, Step};
use crate::worker::{Program, Received, StandardError, Worker};

/// Lost workers after which the GPU or the driver is assumed to be broken.
const MOST_LOST: usize = 8;

/// How often to check whether a case has been on the GPU for too long.
const LOOK: Duration = Duration::from_millis(200);

/// When a worker has to end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// A case that is on the GPU for longer hangs.
    pub watchdog: Duration,
    /// When a worker of random problems ends by itself.
    pub deadline: Option<Instant>,
    /// When cases are left for another run.
    pub until: Option<Instant>,
}

/// Runs a worker on `job`, and others when it is lost, until all cases are finished or the time is up. Cases
/// in `done` are not run; `keep` gets each result.
///
/// # Errors
/// When no worker starts, or the first ends before its first case, with what it says.
pub(super) fn run(
    program: &Program,
    mut job: Job,
    limits: Limits,
    done: Vec<CaseResult>,
    keep: &mut Keep<'_>,
    progress: &mut Progress<'_>,
) -> Result<(Vec<CaseResult>, bool)> {
    let known = done.len();
    let mut results = done;
    let mut lost = 0;
    loop {
        job.finished = results.iter().map(|result| result.name.clone()).collect();
        let end = watch(program, &job, limits, &mut results, keep, progress)?;
        match end {
            End::Through => return Ok((results, true)),
            End::Stopped => return Ok((results, false)),
            End::Lost { case: None, reason } if results.len() == known => return Err(Error::Worker(reason)),
            End::Lost { case, reason } => {
                lost += 1;
                let result = CaseResult {
                    name: case.unwrap_or_else(|| "worker/between cases".to_owned()),
                    kernel: String::new(),
                    status: Status::Failed,
                    ratio: 0.0,
                    detail: reason,
                    ms: None,
                    passed_over: Vec::new(),
                };
                keep(&result)?;
                results.push(result);
                if lost >= MOST_LOST {
                    let (name, detail) =
                        results.last().map_or(("", ""), |last| (last.name.as_str(), last.detail.as_str()));
                    let message = format!("{lost} workers were lost, the last in {name}: {detail}");
                    return Err(Error::Worker(message));
                }
            }
        }
    }
}

/// Receives each result.
pub(super) type Keep<'a> = dyn FnMut(&CaseResult) -> Result<()> + 'a;

enum End {
    Through,
    Stopped,
    Lost { case: Option<String>, reason: String },
}

fn watch(
    program: &Program,
    job: &Job,
    Limits { watchdog, deadline, until }: Limits,
    results: &mut Vec<CaseResult>,
    keep: &mut Keep<'_>,
    progress: &mut Progress<'_>,
) -> Result<End> {
    let mut worker =
        Worker::start(program.command(), StandardError::Read).context("cannot start a worker")?;
    // The loss of a worker is reported below.
    let _ = worker.send(&json!({ "validate": job }));
    worker.close_input();
    let mut on_gpu: Option<(String, Instant)> = None;
    loop {
        match worker.receive(Instant::now() + LOOK) {
            Received::Line(line) => match serde_json::from_str::<Event>(&line) {
                Ok(Event::Cases(count)) => progress(Step::Total(count)),
                Ok(Event::Begin(name)) => {
                    progress(Step::Begin(name.clone()));
                    on_gpu = Some((name, Instant::now()));
                }
                Ok(Event::Done(result)) => {
                    if on_gpu.as_ref().is_some_and(|(name, _)| *name == result.name) {
                        on_gpu = None;
                    }
                    progress(Step::Done);
                    keep(&result)?;
                    results.push(result);
                }
                // Libraries in the worker may print lines of their own.
                Err(_) => {}
            },
            Received::Said(line) => progress(Step::Said(line)),
            Received::Nothing => {}
            Received::End => break,
        }
        if let Some((name, since)) = &on_gpu
            && since.elapsed() > watchdog
        {
            let reason = format!("hangs: on the GPU for over {} s", watchdog.as_secs());
            return Ok(End::Lost { case: Some(name.clone()), reason });
        }
        if until.is_some_and(|until| Instant::now() > until) {
            return Ok(End::Stopped);
        }
        // The worker of a soak ends by itself; one that does not is stuck outside of a case.
        if deadline.is_some_and(|deadline| Instant::now() > deadline + 2 * watchdog) {
            return Ok(End::Lost { case: None, reason: "did not end when its time was up".to_owned() });
        }
    }
    let status = worker.wait()?;
    if status.success() {
        return Ok(End::Through);
    }
    let said = worker.last_words().collect::<Vec<_>>().join("; ");
    // The case that is still on the GPU, unless its own result says what happened.
    let case = on_gpu.map(|(name, _)| name);
    if case.is_none() && results.last().is_some_and(|result| result.status == Status::Failed) {
        return Ok(End::Lost { case: None, reason: format!("lost its GPU context ({status}): {said}") });
    }
    let reason = if said.is_empty() { format!("ended with {status}") } else { said };
    Ok(End::Lost { case, reason })
}

#[cfg(all(test, unix))]
mod tests {
    use fa_core::Pass;

    use super::*;
    use crate::grid::Extent;
    use crate::validate::options::{Cases, Kind, Options};

    fn run_script(script: &str, watchdog: Duration) -> Result<Vec<CaseResult>> {
        run_until(script, watchdog, None)
    }

    fn run_until(script: &str, watchdog: Duration, until: Option<Instant>) -> Result<Vec<CaseResult>> {
        let program =
            Program { executable: "sh".into(), arguments: vec!["-c".to_owned(), script.to_owned()] };
        let cases = Cases::Grid { extent: Extent::Quick, repeat: 2 };
        let options = Options {
            family: None,
            pass: Pass::Forward,
            cases,
            groups: Vec::new(),
            kind: Kind::default(),
            filter: None,
            watchdog: 1,
        };
        let job = Job { options, finished: Vec::new() };
        let limits = Limits { watchdog, deadline: None, until };
        run(&program, job, limits, Vec::new(), &mut |_| Ok(()), &mut |_| {}).map(|(results, all)| {
            assert!(all || until.is_some());
            results
        })
    }

    const DONE: &str =
        r#"{"done":{"name":"a/1","kernel":"k","status":"passed","ratio":0.5,"detail":"fine"}}"#;

    #[test]
    fn results_are_collected() {
        let script =
            format!("cat >/dev/null; echo '{{\"cases\":1}}'; echo '{{\"begin\":\"a/1\"}}'; echo '{DONE}'");
        let results = run_script(&script, Duration::from_secs(10)).unwrap();
        assert_eq!((results.len(), results[0].status), (1, Status::Passed));
    }

    #[test]
    fn a_case_that_hangs_is_named_and_the_others_go_on() {
        // The second worker gets the name of the case that hung and does not start it again.
        let script = format!(
            "if grep -q a/2; then echo '{DONE}'; else echo '{{\"begin\":\"a/2\"}}'; exec sleep 30; fi"
        );
        let start = Instant::now();
        let results = run_script(&script, Duration::from_millis(300)).unwrap();
        assert!(start.elapsed() < Duration::from_secs(20));
        let names: Vec<&str> = results.iter().map(|result| result.name.as_str()).collect();
        assert_eq!(names, ["a/2", "a/1"]);
        assert!(results[0].status == Status::Failed && results[0].detail.contains("hangs"));
    }

    #[test]
    fn a_worker_that_cannot_begin_says_why() {
        let error = run_script("echo 'no driver here' >&2; exit 1", Duration::from_secs(10));
        assert!(error.unwrap_err().to_string().contains("no driver here"));
        // A worker that ends between cases repeatedly is given up.
        let script = format!("cat >/dev/null; echo '{DONE}'; exit 3");
        assert!(run_script(&script, Duration::from_secs(10)).unwrap_err().to_string().contains("8 workers"));
    }
}
