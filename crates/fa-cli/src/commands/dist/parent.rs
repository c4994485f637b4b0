//! The parent of ranks: starts a process for each GPU, reads their answers, and ends those that hang.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::Context;
use fa_dist::Scheme;

use super::args::RunArgs;
use super::jobs::{Answer, DEADLINE_VARIABLE, Job, benches, checks, endless, odd};

use crate::term::failure::Verdict;
use crate::term::output;

/// Prints a line.
fn line(text: &str) -> anyhow::Result<()> {
    output::print(&format!("{text}\n"))
}

/// Ranks that are running.
struct Ranks {
    children: Vec<Child>,
    answers: Receiver<Answer>,
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            // Those that have ended cannot be killed, and need not be.
            child.kill().ok();
            child.wait().ok();
        }
    }
}

impl Ranks {
    fn start(world: usize, jobs: &[Job], deadline: u64) -> anyhow::Result<Ranks> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let program = std::env::current_exe().context("cannot find this program to start it again")?;
        let text = serde_json::to_string(jobs)?;
        let (sender, answers) = channel();
        let mut ranks = Ranks { children: Vec::new(), answers };
        for rank in 0..world {
            let mut command = Command::new(&program);
            command.args(["dist", "rank"]).stdin(Stdio::piped()).stdout(Stdio::piped());
            command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
            command.env("WORLD_SIZE", world.to_string()).env("MASTER_ADDR", "127.0.0.1");
            command.env("MASTER_PORT", port.to_string()).env(DEADLINE_VARIABLE, deadline.to_string());
            if std::env::var_os("NCCL_NVLS_ENABLE").is_none() {
                // Multicast is of no use to sends and receives, and not every machine has it.
                command.env("NCCL_NVLS_ENABLE", "0");
            }
            let mut child = command.spawn().context("cannot start a rank")?;
            if let Some(mut stdin) = child.stdin.take() {
                stdin.write_all(text.as_bytes())?;
            }
            if let Some(stdout) = child.stdout.take() {
                let sender = sender.clone();
                std::thread::spawn(move || {
                    let lines = BufReader::new(stdout).lines().map_while(Result::ok);
                    // NCCL may print, too.
                    for answer in lines.filter_map(|line| serde_json::from_str(&line).ok()) {
                        if sender.send(answer).is_err() {
                            return;
                        }
                    }
                });
            }
            ranks.children.push(child);
        }
        Ok(ranks)
    }

    /// The next answer; `None` when all ranks have ended, or the time is over.
    fn next(&self, until: Instant) -> Option<Answer> {
        self.answers.recv_timeout(until.saturating_duration_since(Instant::now())).ok()
    }
}

/// Answers of all ranks to each job, as far as they came.
fn answers(
    world: usize,
    jobs: &[Job],
    args: &RunArgs,
    mut seen: impl FnMut(usize, &[Answer]) -> anyhow::Result<()>,
) -> anyhow::Result<bool> {
    let ranks = Ranks::start(world, jobs, args.deadline)?;
    let mut by_job: Vec<Vec<Answer>> = vec![Vec::new(); jobs.len()];
    let mut last = Instant::now();
    let mut complete = 0;
    while complete < jobs.len() {
        let Some(answer) = ranks.next(last + Duration::from_secs(args.deadline)) else {
            output::note("a rank has ended, or has not answered in time");
            return Ok(false);
        };
        last = Instant::now();
        if args.json {
            line(&serde_json::to_string(&answer)?)?;
        }
        if let Some((variant, text)) = &answer.error {
            output::note(&format!("rank {} at job {}: {variant}: {text}", answer.rank, answer.job));
            return Ok(false);
        }
        let Some(of_job) = by_job.get_mut(answer.job) else { continue };
        let job = answer.job;
        of_job.push(answer);
        if of_job.len() == world {
            seen(job, of_job)?;
            complete += 1;
        }
    }
    Ok(true)
}

fn shape(job: &Job) -> String {
    let problem = &job.problem;
    let (q, k) = (problem.lengths.max_q(), problem.lengths.max_k());
    let len = if q == k { q.to_string() } else { format!("{q}x{k}") };
    format!("{len} {}:{} {}", problem.heads_q, problem.heads_kv, problem.mask)
}

/// How far 16-bit results of other orders of sums may be from each other, over the largest value.
const NEAR: f64 = 0.02;

/// `fa dist check`.
pub(super) fn check(args: &RunArgs) -> anyhow::Result<Verdict> {
    let jobs = checks(args.ranks, args.quick);
    let mut good = true;
    let whole = answers(args.ranks, &jobs, args, |number, found| {
        let job = &jobs[number];
        let promised = matches!(job.scheme, Scheme::Gather | Scheme::Ulysses);
        let same = found.iter().all(|answer| answer.same_bits == Some(true));
        let repeats = found.iter().all(|answer| answer.repeats == Some(true));
        let worst =
            |i: usize| found.iter().filter_map(|answer| answer.errors.get(i)).copied().fold(0.0, f64::max);
        let near = found.iter().flat_map(|answer| &answer.errors).all(|error| *error <= NEAR);
        let passed = near && repeats && (same || !promised);
        good &= passed;
        if args.json {
            return Ok(());
        }
        line(&format!(
            "{} {:<28} {:<8} bits of one GPU: {:<5} same again: {:<5} O {:.1e} dQ {:.1e} dK {:.1e} dV {:.1e}",
            if passed { "pass" } else { "FAIL" },
            shape(job),
            job.scheme.name(),
            same,
            repeats,
            worst(0),
            worst(1),
            worst(2),
            worst(3),
        ))
    })?;
    if !whole {
        return Ok(Verdict::Bad);
    }
    let faults = args.ranks < 2 || (killed(args)? & disagreeing(args)?);
    Ok(if good && faults { Verdict::Good } else { Verdict::Bad })
}

/// What survivors say of a rank that is killed: that it is lost, in time.
fn killed(args: &RunArgs) -> anyhow::Result<bool> {
    let mut good = true;
    for scheme in [Scheme::Gather, Scheme::Ring] {
        let mut ranks = Ranks::start(args.ranks, &[endless(scheme)], args.deadline)?;
        let until = Instant::now() + Duration::from_secs(args.deadline);
        let mut running = 0;
        while running < args.ranks {
            match ranks.next(until) {
                Some(Answer { error: None, .. }) => running += 1,
                Some(Answer { error: Some((_, text)), .. }) => {
                    output::note(&format!("a rank failed before it was killed: {text}"));
                    return Ok(false);
                }
                None => return Ok(false),
            }
        }
        std::thread::sleep(Duration::from_millis(300));
        let last = args.ranks - 1;
        ranks.children[last].kill()?;
        let begun = Instant::now();
        let mut told = 0;
        while told < last {
            let Some(answer) = ranks.next(until) else { break };
            let Some((variant, text)) = answer.error else { continue };
            let named = ["PeerLost", "Nccl"].contains(&variant.as_str());
            good &= named;
            told += 1;
            let after = begun.elapsed().as_secs_f64();
            let verdict = if named { "pass" } else { "FAIL" };
            line(&format!(
                "{verdict} rank {last} killed under {}: rank {} says after {after:.2} s: {text}",
                scheme.name(),
                answer.rank
            ))?;
        }
        good &= told == last;
    }
    Ok(good)
}

/// What ranks with different problems say.
fn disagreeing(args: &RunArgs) -> anyhow::Result<bool> {
    let ranks = Ranks::start(args.ranks, &[odd(args.ranks)], args.deadline)?;
    let until = Instant::now() + Duration::from_secs(args.deadline);
    let mut good = true;
    for _ in 0..args.ranks {
        let Some(answer) = ranks.next(until) else { return Ok(false) };
        let mismatch = answer.error.as_ref().is_some_and(|(variant, _)| variant == "Mismatch");
        good &= mismatch;
        let verdict = if mismatch { "pass" } else { "FAIL" };
        let text = answer.error.map_or("no error".to_owned(), |(variant, _)| variant);
        line(&format!("{verdict} ranks with other shapes: rank {} says {text}", answer.rank))?;
    }
    Ok(good)
}

/// `fa dist bench`.
pub(super) fn bench(args: &RunArgs) -> anyhow::Result<Verdict> {
    let jobs = benches(args.quick);
    let mut header = !args.json;
    let whole = answers(args.ranks, &jobs, args, |number, found| {
        if args.json {
            return Ok(());
        }
        if std::mem::take(&mut header) {
            line(&format!(
                "{:<30} {:<8} {:<4} {:>11} {:>11} {:>7} {:>9} {:>9}",
                "shape", "scheme", "pass", "1 GPU ms", "ms", "times", "per GPU", "MB own"
            ))?;
        }
        let job = &jobs[number];
        for (pass, name) in ["fwd", "bwd"].iter().enumerate() {
            let slowest = |of: fn(&Answer) -> &Vec<f64>| {
                found.iter().filter_map(|answer| of(answer).get(pass)).copied().fold(0.0, f64::max)
            };
            let (seconds, one) = (slowest(|answer| &answer.seconds), slowest(|answer| &answer.one_gpu));
            if seconds == 0.0 {
                continue;
            }
            let memory = found.iter().map(|answer| answer.memory).max().unwrap_or(0);
            line(&format!(
                "{:<30} {:<8} {:<4} {:>11.4} {:>11.4} {:>7.2} {:>8.1}% {:>9.0}",
                shape(job),
                job.scheme.name(),
                name,
                one * 1e3,
                seconds * 1e3,
                one / seconds,
                100.0 * one / seconds / args.ranks as f64,
                memory as f64 / 1e6,
            ))?;
        }
        Ok(())
    })?;
    Ok(if whole { Verdict::Good } else { Verdict::Bad })
}
