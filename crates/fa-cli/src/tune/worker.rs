//! The process that measures: it is given a problem and kernels, and says what it does before it does it.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::Context;
use fa_core::{KernelSpec, Problem};
use serde::{Deserialize, Serialize};

use crate::bench_gpu::bind;
use crate::contest::{Arena, Turns};
use crate::cuda::{Bound, Device, Half, with_half};
use crate::term::failure::Verdict;

use super::{Candidate, Found};

/// A worker that says nothing for this long hangs.
const SILENCE: Duration = Duration::from_secs(60);

/// What a worker is told, in a line of JSON.
#[derive(Debug, Serialize, Deserialize)]
struct Job {
    problem: Problem,
    specs: Vec<KernelSpec>,
}

/// What it says, a line of JSON each.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Event {
    /// This kernel runs from now on; a worker that is lost now was lost to it.
    Begin(usize),
    /// This kernel cannot be used.
    Bad(usize, String),
    /// Median milliseconds of every kernel that is not bad.
    Times(Vec<(usize, f64)>),
}

fn say(event: &Event) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(event)?)?;
    Ok(out.flush()?)
}

/// Measures what standard input says: the worker's whole life.
///
/// # Errors
/// What the GPU reports.
pub fn work(turns: Turns) -> anyhow::Result<Verdict> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    let job: Job = serde_json::from_str(&line).context("standard input is no job")?;
    let device = Device::open()?;
    with_half!(
        job.problem.types.qkv,
        T => contest::<T>(&device, &job, turns),
        else anyhow::bail!("no GPU kernel computes in {}", job.problem.types.qkv)
    )?;
    Ok(Verdict::Good)
}

fn contest<T: Half>(device: &Device, job: &Job, turns: Turns) -> anyhow::Result<()> {
    let mut arena: Option<Arena<'_, T>> = None;
    let mut good: Vec<(usize, Bound)> = Vec::new();
    for (index, spec) in job.specs.iter().enumerate() {
        say(&Event::Begin(index))?;
        let forward = match bind(device, &job.problem, spec, spec.kernel.pass()) {
            Ok(forward) => forward,
            Err(error) => {
                say(&Event::Bad(index, crate::record::without_logs(&error.to_string())))?;
                continue;
            }
        };
        if arena.is_none() {
            arena = Some(Arena::new(device, &job.problem, &forward)?);
        }
        let judged = arena.as_mut().context("just made")?.check(&forward)?;
        if judged.passed {
            good.push((index, forward));
        } else {
            let why = format!(
                "wrong: off by {:.3e} (tolerance {:.3e}), or not all written",
                judged.max_abs, judged.tolerance
            );
            say(&Event::Bad(index, why))?;
        }
    }
    let Some(mut arena) = arena else { return say(&Event::Times(Vec::new())) };
    let (indices, forwards): (Vec<usize>, Vec<Bound>) = good.into_iter().unzip();
    let outcome = arena.contest(&forwards, &job.problem, None, turns)?;
    let times = indices.into_iter().zip(outcome.ours.iter().map(|times| times.median())).collect();
    say(&Event::Times(times))
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

/// Has workers measure all candidates that have no error; one that is lost costs its worker, and the others go on without.
///
/// # Errors
/// When workers cannot be started, or end before they have begun.
pub fn measure(
    problem: &Problem,
    candidates: &[Candidate],
    found: &mut [Found],
    turns: Turns,
) -> anyhow::Result<()> {
    loop {
        let live: Vec<usize> = (0..candidates.len()).filter(|&i| found[i].error.is_none()).collect();
        if live.is_empty() {
            return Ok(());
        }
        let specs = live.iter().map(|&i| candidates[i].spec.clone()).collect();
        let (begun, end) = watch(&Job { problem: *problem, specs }, turns, &live, found)?;
        match (end, begun) {
            (Ok(()), _) => return Ok(()),
            (Err(why), Some(lost)) => found[live[lost]].error = Some(format!("its worker was lost: {why}")),
            (Err(why), None) => anyhow::bail!("the worker did not begin: {why}"),
        }
    }
}

/// Runs one worker to its end. Returns which kernel it began last, and why it ended early if it did.
#[allow(clippy::type_complexity)]
fn watch(
    job: &Job,
    turns: Turns,
    live: &[usize],
    found: &mut [Found],
) -> anyhow::Result<(Option<usize>, Result<(), String>)> {
    let program = std::env::current_exe().context("this program does not find itself")?;
    let child = Command::new(program)
        .args(["tune", "--worker", "--reps", &(turns.rounds * turns.reps).to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start a worker")?;
    let mut worker = Guard(child);
    let pipes = worker.0.stdin.take().zip(worker.0.stdout.take()).zip(worker.0.stderr.take());
    let ((mut stdin, stdout), mut stderr) = pipes.context("a worker has no pipes")?;
    let said = std::thread::spawn(move || {
        let mut text = String::new();
        let _ = stderr.read_to_string(&mut text);
        text
    });
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    writeln!(stdin, "{}", serde_json::to_string(job)?).context("a worker takes no job")?;
    drop(stdin);
    let mut begun = None;
    loop {
        match lines.recv_timeout(SILENCE) {
            Ok(line) => match serde_json::from_str(&line).context("a worker talks oddly")? {
                Event::Begin(index) => begun = Some(index),
                Event::Bad(index, why) => found[live[index]].error = Some(why),
                Event::Times(times) => {
                    times.into_iter().for_each(|(index, ms)| found[live[index]].ms = Some(ms));
                    return Ok((begun, Ok(())));
                }
            },
            Err(mpsc::RecvTimeoutError::Timeout) => {
                return Ok((begun, Err(format!("nothing happened for {} s", SILENCE.as_secs()))));
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                let status = worker.0.wait().context("a worker cannot be waited for")?;
                let said = said.join().unwrap_or_default();
                let last = said.lines().last().unwrap_or("it said nothing");
                return Ok((begun, Err(format!("{status}: {last}"))));
            }
        }
    }
}
