//! Watches over a worker: a case that hangs or crashes is reported, and a new worker goes on with the others.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::Context;

use super::worker::{CaseResult, Event, Status};
use crate::term::progress::Steps;

/// After so many lost workers the GPU or the driver is in a state where nothing can be learnt.
const MOST_LOST: usize = 8;

/// Runs `command`, a worker, and others after it where it is lost, until all cases are through. Cases in `done` are not run.
///
/// # Errors
/// When no worker starts, or the first ends before its first case, with what it says.
pub fn run(
    mut command: impl FnMut() -> anyhow::Result<Command>,
    watchdog: Duration,
    deadline: Option<Instant>,
    done: Vec<CaseResult>,
) -> anyhow::Result<Vec<CaseResult>> {
    let known = done.len();
    let mut results = done;
    let mut lost = 0;
    loop {
        let end = watch(command()?, watchdog, deadline, &mut results)?;
        match end {
            End::Through => return Ok(results),
            End::Lost { case: None, reason } if results.len() == known => anyhow::bail!("{reason}"),
            End::Lost { case, reason } => {
                lost += 1;
                results.push(CaseResult {
                    name: case.unwrap_or_else(|| "worker/between cases".to_owned()),
                    kernel: String::new(),
                    status: Status::Failed,
                    ratio: 0.0,
                    detail: reason,
                    ms: None,
                });
                if lost >= MOST_LOST {
                    anyhow::bail!(
                        "{lost} workers were lost, the last in {}: {}",
                        results.last().map_or("", |result| &result.name),
                        results.last().map_or("", |result| &result.detail)
                    );
                }
            }
        }
    }
}

enum End {
    Through,
    Lost { case: Option<String>, reason: String },
}

/// Kills and reaps a worker that is left behind.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        // It has ended already where all went well.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn watch(
    mut command: Command,
    watchdog: Duration,
    deadline: Option<Instant>,
    results: &mut Vec<CaseResult>,
) -> anyhow::Result<End> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut worker = Guard(command.spawn().context("cannot start a worker")?);
    let mut stdin = worker.0.stdin.take().context("a worker has no input")?;
    let finished: String = results.iter().map(|result| result.name.clone() + "\n").collect();
    // A worker that is already gone says why below.
    let _ = stdin.write_all(finished.as_bytes());
    drop(stdin);
    let stdout = worker.0.stdout.take().context("a worker has no output")?;
    let stderr = worker.0.stderr.take().context("a worker has no error output")?;
    let errors = std::thread::spawn(move || {
        let lines = BufReader::new(stderr).lines().map_while(Result::ok);
        // The last lines tell why; warnings before them are many.
        let mut last: Vec<String> = Vec::new();
        for line in lines {
            eprintln!("{line}");
            if last.len() == 5 {
                last.remove(0);
            }
            last.push(line);
        }
        last.join("; ")
    });
    let (sender, events) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            let Ok(event) = serde_json::from_str::<Event>(&line) else { continue };
            if sender.send(event).is_err() {
                break;
            }
        }
    });
    let mut steps: Option<Steps> = None;
    let mut on_gpu: Option<(String, Instant)> = None;
    loop {
        match events.recv_timeout(Duration::from_millis(200)) {
            Ok(Event::Cases(count)) => steps = Some(Steps::new(count)),
            Ok(Event::Begin(name)) => {
                if let Some(steps) = &mut steps {
                    steps.begin(name.clone());
                }
                on_gpu = Some((name, Instant::now()));
            }
            Ok(Event::Done(result)) => {
                if on_gpu.as_ref().is_some_and(|(name, _)| *name == result.name) {
                    on_gpu = None;
                }
                if let Some(steps) = &mut steps {
                    steps.advance();
                }
                results.push(result);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        if let Some((name, since)) = &on_gpu
            && since.elapsed() > watchdog
        {
            let reason = format!("hangs: on the GPU for over {} s", watchdog.as_secs());
            return Ok(End::Lost { case: Some(name.clone()), reason });
        }
        // A soak's worker ends by itself; one that does not is stuck somewhere else than in a case.
        if deadline.is_some_and(|deadline| Instant::now() > deadline + 2 * watchdog) {
            return Ok(End::Lost { case: None, reason: "did not end when its time was up".to_owned() });
        }
    }
    drop(steps);
    let status = worker.0.wait().context("a worker does not end")?;
    let said = errors.join().unwrap_or_default();
    if status.success() {
        return Ok(End::Through);
    }
    // The case that is still on the GPU, unless its own result tells what happened.
    let case = on_gpu.map(|(name, _)| name);
    if case.is_none() && results.last().is_some_and(|result| result.status == Status::Failed) {
        return Ok(End::Lost { case: None, reason: format!("lost its GPU context ({status}): {said}") });
    }
    let reason = if said.is_empty() { format!("ended with {status}") } else { said };
    Ok(End::Lost { case, reason })
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn worker(script: &str) -> impl FnMut() -> anyhow::Result<Command> + '_ {
        move || {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            Ok(command)
        }
    }

    const DONE: &str =
        r#"{"done":{"name":"a/1","kernel":"k","status":"passed","ratio":0.5,"detail":"fine"}}"#;

    #[test]
    fn results_are_collected() {
        let script =
            format!("cat >/dev/null; echo '{{\"cases\":1}}'; echo '{{\"begin\":\"a/1\"}}'; echo '{DONE}'");
        let results = run(worker(&script), Duration::from_secs(10), None, Vec::new()).unwrap();
        assert_eq!((results.len(), results[0].status), (1, Status::Passed));
    }

    #[test]
    fn a_case_that_hangs_is_named_and_the_others_go_on() {
        // The second worker is told of the case that hung and does not start it again.
        let script = format!(
            "if grep -q a/2; then echo '{DONE}'; else echo '{{\"begin\":\"a/2\"}}'; exec sleep 30; fi"
        );
        let start = Instant::now();
        let results = run(worker(&script), Duration::from_millis(300), None, Vec::new()).unwrap();
        assert!(start.elapsed() < Duration::from_secs(20));
        let names: Vec<&str> = results.iter().map(|result| result.name.as_str()).collect();
        assert_eq!(names, ["a/2", "a/1"]);
        assert!(results[0].status == Status::Failed && results[0].detail.contains("hangs"));
    }

    #[test]
    fn a_worker_that_cannot_begin_says_why() {
        let error =
            run(worker("echo 'no driver here' >&2; exit 1"), Duration::from_secs(10), None, Vec::new());
        assert!(error.unwrap_err().to_string().contains("no driver here"));
        // One that ends between cases again and again is given up.
        let script = format!("cat >/dev/null; echo '{DONE}'; exit 3");
        assert!(
            run(worker(&script), Duration::from_secs(10), None, Vec::new())
                .unwrap_err()
                .to_string()
                .contains("8 workers")
        );
    }
}
