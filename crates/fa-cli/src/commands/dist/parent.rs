//! The parent of ranks: starts a process for each GPU, reads their answers, and ends those that hang.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::Context;
use fa_core::Dtype;
use fa_dist::Transport;
use fa_kernels::cudarc::driver::CudaContext;

use super::args::{BenchArgs, CheckArgs, RunArgs, TransportName};
use super::found::worst;
use super::jobs::{
    Answer, DEADLINE_VARIABLE, Job, Stage, THREADS_VARIABLE, TRANSPORT_VARIABLE, benches, checks, ends,
    fails, mark, odd,
};

use crate::term::failure::{InputError, Verdict};
use crate::term::output;

/// Prints a line.
pub(super) fn line(text: &str) -> anyhow::Result<()> {
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
    fn start(args: &RunArgs, jobs: &[Job]) -> anyhow::Result<Ranks> {
        let (world, deadline) = (args.ranks, args.deadline);
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let program = std::env::current_exe().context("cannot find this program to start it again")?;
        let text = serde_json::to_string(jobs)?;
        let (sender, answers) = channel();
        let mut ranks = Ranks { children: Vec::new(), answers };
        let processes = if args.threads { 1 } else { world };
        for rank in 0..processes {
            let mut command = Command::new(&program);
            command.args(["dist", "rank"]).stdin(Stdio::piped()).stdout(Stdio::piped());
            command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
            command.env("WORLD_SIZE", world.to_string()).env("MASTER_ADDR", "127.0.0.1");
            command.env("MASTER_PORT", port.to_string()).env(DEADLINE_VARIABLE, deadline.to_string());
            command.env(TRANSPORT_VARIABLE, sends_by(args.transport).name());
            if args.threads {
                command.env(THREADS_VARIABLE, world.to_string());
            }
            if std::env::var_os("NCCL_NVLS_ENABLE").is_none() {
                // Multicast is of no use to sends and receives, and not every machine has it.
                command.env("NCCL_NVLS_ENABLE", "0");
            }
            if args.transport == TransportName::Network {
                command.env("NCCL_P2P_DISABLE", "1").env("NCCL_SHM_DISABLE", "1");
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
    jobs: &[Job],
    args: &RunArgs,
    mut seen: impl FnMut(usize, &[Answer]) -> anyhow::Result<()>,
) -> anyhow::Result<bool> {
    let world = args.ranks;
    let ranks = Ranks::start(args, jobs)?;
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

pub(super) fn shape(job: &Job) -> String {
    let problem = &job.problem;
    let (q, k) = match &job.starts {
        Some(_) => (problem.lengths.total_q(), problem.lengths.total_k()),
        None => (problem.lengths.max_q(), problem.lengths.max_k()),
    };
    let len = if q == k { q.to_string() } else { format!("{q}x{k}") };
    format!("{len} {}:{} {}{}", problem.heads_q, problem.heads_kv, problem.mask, job.words())
}

/// The jobs whose line has the text that is asked for.
pub(super) fn named(jobs: Vec<Job>, only: Option<&str>) -> anyhow::Result<Vec<Job>> {
    let Some(text) = only else { return Ok(jobs) };
    let lines = |job: &Job| format!("{} {}", shape(job), job.scheme.name());
    let words: BTreeSet<String> =
        jobs.iter().flat_map(|job| lines(job).split(' ').map(str::to_owned).collect::<Vec<_>>()).collect();
    let named: Vec<Job> = jobs.into_iter().filter(|job| lines(job).contains(text)).collect();
    if named.is_empty() {
        let words = words.into_iter().collect::<Vec<_>>().join(", ");
        return Err(InputError::Usage(format!("--only {text}: no shape has it, use one of {words}")).into());
    }
    Ok(named)
}

/// A share in percent, or a dash.
fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format!("{share:.1}%"))
}

/// How far results of other orders of sums may be from each other, over the largest value.
fn near(dtype: Dtype) -> f64 {
    if dtype == Dtype::F32 { 1e-4 } else { 0.02 }
}

/// What ranks of a process, or a thread each, are asked to send by.
fn sends_by(name: TransportName) -> Transport {
    match name {
        TransportName::Auto => Transport::Auto,
        TransportName::Copies => Transport::Copies,
        TransportName::Nccl | TransportName::Network | TransportName::Memory => Transport::Nccl,
    }
}

/// Whether there are GPUs for all ranks, or one that copies share, before processes are started.
fn find_gpus(args: &RunArgs, instead: &str) -> anyhow::Result<()> {
    let ranks = args.ranks;
    let count = fa_kernels::driver::probe().map_or(0, |()| CudaContext::device_count().unwrap_or(0));
    let count = usize::try_from(count).unwrap_or(0);
    let is_shared = count > 0 && sends_by(args.transport) != Transport::Nccl;
    anyhow::ensure!(
        ranks <= count || is_shared,
        "--ranks {ranks}: {} here: use as many ranks{}{instead}",
        match count {
            0 => "no CUDA driver or no GPU is".to_owned(),
            1 => "one GPU is".to_owned(),
            count => format!("{count} GPUs are"),
        },
        if count > 0 { ", or --transport copies, by which ranks share a GPU" } else { "" }
    );
    Ok(())
}

/// `fa dist check` on GPUs.
pub(super) fn check(given: &CheckArgs) -> anyhow::Result<Verdict> {
    let (args, repeat) = (&given.run, given.repeat);
    find_gpus(args, ", or threads on the CPU by --transport memory")?;
    let only = args.only.as_deref();
    if args.threads && only == Some(KILLED) {
        let message = "--only killed: threads cannot be killed, use processes: without --threads";
        return Err(InputError::Usage(message.to_owned()).into());
    }
    let alone = match only {
        Some(FAULTS) if args.ranks > 1 => Some(faults(args)?),
        Some(KILLED) if args.ranks > 1 => Some(killed(args)?),
        Some(_) | None => None,
    };
    if let Some(good) = alone {
        return Ok(if good { Verdict::Good } else { Verdict::Bad });
    }
    let jobs = named(checks(args.ranks, args.quick, repeat), only)?;
    let mut good = true;
    let whole = answers(&jobs, args, |number, found| {
        good &= judge(&jobs[number], found, args.json)?;
        Ok(())
    })?;
    let is_done = args.ranks < 2 || only.is_some();
    let good = whole && good && (is_done || ((args.threads || killed(args)?) & faults(args)?));
    Ok(if good { Verdict::Good } else { Verdict::Bad })
}

/// What `--only` names besides shapes: ranks that fail alone, or disagree.
const FAULTS: &str = "faults";
/// Likewise: ranks that are killed, at each stage.
const KILLED: &str = "killed";

/// Ranks of which none is killed, but one does something else than the others.
fn faults(args: &RunArgs) -> anyhow::Result<bool> {
    Ok(failing(args)? & disagreeing(args)?)
}

/// The largest difference of the sum of the ranks' gradients of the sinks, over the largest value.
fn sinks_error(found: &[Answer]) -> Option<f64> {
    let [_, want] = &found.first().filter(|answer| !answer.dsinks[1].is_empty())?.dsinks;
    let mut sum = vec![0.0f32; want.len()];
    for answer in found {
        sum.iter_mut().zip(&answer.dsinks[0]).for_each(|(sum, own)| *sum += own);
    }
    Some(worst(&sum, want))
}

/// Whether all ranks are right; prints a line of them, in JSON where `json` says so.
pub(super) fn judge(job: &Job, found: &[Answer], json: bool) -> anyhow::Result<bool> {
    let same = found.iter().all(|answer| answer.same_bits == Some(true));
    let differs = found.iter().find_map(|answer| Some((answer.rank, answer.differs.as_ref()?)));
    let largest =
        |i: usize| found.iter().filter_map(|answer| answer.errors.get(i)).copied().fold(0.0, f64::max);
    let is_near = |answer: &Answer| {
        !answer.errors.is_empty() && answer.errors.iter().all(|error| *error <= near(job.problem.types.q))
    };
    let dsinks = sinks_error(found);
    let darrays = job.has_arrays().then(|| (4..8).map(largest).fold(0.0, f64::max));
    let is_near = |answer: &Answer| is_near(answer) && dsinks.is_none_or(|error| error <= 0.02);
    let passed = found.iter().all(is_near) && differs.is_none() && (same || !job.same_bits);
    if json {
        return Ok(passed);
    }
    let mut runs = format!("{} equal runs", job.repeat);
    if let Some((rank, what)) = differs {
        runs = format!("rank {rank} differs in {what}");
    }
    line(&format!(
        "{} {:<28} {:<8} bits of one: {:<5} {runs}, O {:.1e} dQ {:.1e} dK {:.1e} dV {:.1e}{}{}",
        if passed { "pass" } else { "FAIL" },
        shape(job),
        job.scheme.name(),
        same,
        largest(0),
        largest(1),
        largest(2),
        largest(3),
        dsinks.map_or_else(String::new, |error| format!(" dsinks {error:.1e}")),
        darrays.map_or_else(String::new, |error| format!(" arrays {error:.1e}")),
    ))?;
    for (variant, text) in found.iter().filter_map(|answer| answer.error.as_ref()) {
        line(&format!("     {variant}: {text}"))?;
    }
    Ok(passed)
}

/// What survivors say of a rank that is killed at each stage: that it is lost, in time.
fn killed(args: &RunArgs) -> anyhow::Result<bool> {
    let last = args.ranks - 1;
    let mut good = true;
    for (stage, job) in ends(args.quick) {
        let scheme = format!("{}{}", job.scheme.name(), job.words());
        let mut ranks = Ranks::start(args, &[job])?;
        let until = Instant::now() + Duration::from_secs(args.deadline);
        loop {
            match ranks.next(until) {
                Some(Answer { error: Some((_, text)), rank, .. }) => {
                    output::note(&format!("rank {rank} failed before rank {last} was killed: {text}"));
                    return Ok(false);
                }
                Some(Answer { rank, .. }) if rank == last => break,
                Some(_) => {}
                None => {
                    output::note(&format!("rank {last} did not get {} in time", stage.words()));
                    return Ok(false);
                }
            }
        }
        if stage == Stage::Running {
            std::thread::sleep(Duration::from_millis(300));
        }
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
                "{verdict} rank {last} killed {} of {scheme}: rank {} says after {after:.2} s: {text}",
                stage.words(),
                answer.rank
            ))?;
        }
        if told < last {
            line(&format!("FAIL rank {last} killed {} of {scheme}: {told} of {last} say so", stage.words()))?;
            good = false;
        }
    }
    Ok(good)
}

/// What ranks with different problems say.
fn disagreeing(args: &RunArgs) -> anyhow::Result<bool> {
    said(args, odd(args.ranks), "ranks with other shapes", |_| &["Mismatch"])
}

/// What ranks say of which the last fails alone in its call.
fn failing(args: &RunArgs) -> anyhow::Result<bool> {
    let last = args.ranks - 1;
    said(args, fails(), "a rank that fails alone", |rank| {
        if rank == last { &["Tensor"] } else { &["PeerLost", "Nccl"] }
    })
}

/// Whether every rank says of a job, in time, one of the errors that it has to.
fn said(
    args: &RunArgs,
    job: Job,
    what: &str,
    wanted: impl Fn(usize) -> &'static [&'static str],
) -> anyhow::Result<bool> {
    let ranks = Ranks::start(args, &[job])?;
    let begun = Instant::now();
    let until = begun + Duration::from_secs(args.deadline);
    let mut good = true;
    for _ in 0..args.ranks {
        let Some(answer) = ranks.next(until) else {
            line(&format!("FAIL {what}: not all say so in time"))?;
            return Ok(false);
        };
        let text = answer.error.map_or("no error".to_owned(), |(variant, _)| variant);
        let named = wanted(answer.rank).contains(&text.as_str());
        good &= named;
        let (verdict, after) = (if named { "pass" } else { "FAIL" }, begun.elapsed().as_secs_f64());
        line(&format!("{verdict} {what}: rank {} says {text} after {after:.2} s", answer.rank))?;
    }
    Ok(good)
}

/// The steps of each rank's passes, in microseconds.
fn steps(found: &[Answer]) -> anyhow::Result<()> {
    for answer in found {
        line(&format!(
            "  rank {}: {:.1} us of the host to enqueue a forward",
            answer.rank,
            answer.host * 1e6
        ))?;
        for (pass, steps) in ["fwd", "bwd"].iter().zip(&answer.steps) {
            for (name, begin, seconds) in steps {
                let (begin, seconds) = (begin * 1e6, seconds * 1e6);
                line(&format!("    {pass} {name:<10} from {begin:>10.1} us, {seconds:>10.1} us"))?;
            }
        }
    }
    Ok(())
}

/// `fa dist bench`.
pub(super) fn bench(given: &BenchArgs) -> anyhow::Result<Verdict> {
    let args = &given.run;
    if args.transport == TransportName::Memory {
        let message = "--transport memory is for fa dist check, on the CPU: measure nccl, copies or network";
        return Err(InputError::Usage(message.to_owned()).into());
    }
    find_gpus(args, "")?;
    let jobs = named(benches(args.quick), args.only.as_deref())?;
    let mut header = !args.json;
    let whole = answers(&jobs, args, |number, found| {
        if args.json {
            return Ok(());
        }
        if std::mem::take(&mut header) {
            line(&format!(
                "{:<30} {:<8} {:<4} {:>11} {:>11} {:>7} {:>9} {:>7} {:>7} {:>9}",
                "shape", "scheme", "pass", "1 GPU ms", "ms", "times", "per GPU", "model", "mark", "MB own"
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
                "{:<30} {:<8} {:<4} {:>11.4} {:>11.4} {:>7.2} {:>8.1}% {:>7} {:>7} {:>9.0}",
                shape(job),
                job.scheme.name(),
                name,
                one * 1e3,
                seconds * 1e3,
                one / seconds,
                100.0 * one / seconds / args.ranks as f64,
                percent(found.iter().find_map(|answer| answer.model.get(pass)).map(|share| 100.0 * share)),
                percent(mark(job, args.ranks)),
                memory as f64 / 1e6,
            ))?;
        }
        if given.steps { steps(found) } else { Ok(()) }
    })?;
    Ok(if whole { Verdict::Good } else { Verdict::Bad })
}
