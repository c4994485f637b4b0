//! `fa doctor --time`: what the library costs on top of the GPU's own time.
//!
//! Every figure of starting up comes from a fresh process, for a process that has compiled once finds its
//! compiler loaded and its pages warm. The first one gets an empty cache, the others the cache that it left.

use std::fmt::Write;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::Context;
use fa_attn::device::{BindOptions, Gpu};
use fa_core::{Dtype, Mask, Pass, Problem, TensorLayout};
use fa_kernels::cache::CACHE_VARIABLE;
use fa_kernels::{Kernels, driver};
use fa_lab::device::{self, DeviceInfo, median, place_forward};
use fa_lab::tensors::Inputs;
use half::bf16;
use serde::{Deserialize, Serialize};

use crate::term::failure::Verdict;
use crate::term::output;

/// Processes with a warm cache.
const WARM: usize = 7;

/// Launches between two waits: fewer than the driver's queue takes, so that no call waits for the GPU.
const CALLS: usize = 200;

/// How often that many.
const BATCHES: usize = 15;

/// What a start may add, in milliseconds.
const WARM_LIMIT: f64 = 20.0;

/// What a compilation may take, in milliseconds.
const COLD_LIMIT: f64 = 1500.0;

/// What a call may take of the host, in microseconds.
const CALL_LIMIT: f64 = 10.0;

/// One process, times in milliseconds but for the last.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Start {
    /// Driver and context: a bare launch needs them too.
    context: f64,
    /// Planning, finding or compiling the kernel, and loading it.
    kernel: f64,
    /// The first launch, waited for.
    launch: f64,
    /// Host microseconds of a call through `Forward::run`.
    call_us: f64,
}

/// What is printed.
#[derive(Debug, Serialize)]
struct Report {
    problem: Problem,
    gpu: String,
    driver: Option<String>,
    cold: Start,
    warm: Vec<Start>,
    /// Median milliseconds that a start with a warm cache adds to a context and a launch.
    warm_adds_ms: f64,
    /// Milliseconds that one with an empty cache adds.
    cold_adds_ms: f64,
    /// Median host microseconds of a call.
    call_us: f64,
}

fn problem() -> Problem {
    Problem::square(1, 2048, 16, 128, Mask::CAUSAL, Dtype::Bf16)
}

/// Measures and judges.
///
/// # Errors
/// No usable GPU, or no compiler.
pub(crate) fn command(json: bool) -> anyhow::Result<Verdict> {
    // What is missing is better said here than by a child.
    let info = DeviceInfo::of(&device::open()?)?;
    let cache = tempfile::tempdir().context("no place for a cache")?;
    let cold = child(cache.path())?;
    let warm = (0..WARM).map(|_| child(cache.path())).collect::<anyhow::Result<Vec<_>>>()?;
    let middle = |value: fn(&Start) -> f64| {
        let mut values: Vec<f64> = warm.iter().map(value).collect();
        values.sort_by(f64::total_cmp);
        median(&values)
    };
    let (warm_adds_ms, call_us) = (middle(|start| start.kernel), middle(|start| start.call_us));
    let report = Report {
        problem: problem(),
        gpu: info.gpu,
        driver: info.driver,
        cold_adds_ms: cold.kernel,
        cold,
        warm_adds_ms,
        call_us,
        warm,
    };
    if json {
        output::print_json(&report)?
    } else {
        output::print(&text(&report)?)?
    }
    let good = warm_adds_ms <= WARM_LIMIT && report.cold_adds_ms <= COLD_LIMIT && call_us <= CALL_LIMIT;
    Ok(if good { Verdict::Good } else { Verdict::Bad })
}

fn text(report: &Report) -> Result<String, std::fmt::Error> {
    let Problem { heads_q, head_dim, mask, .. } = &report.problem;
    let (batch, seqlen_q, dtype) =
        (report.problem.lengths.sequences(), report.problem.lengths.max_q(), report.problem.types.q);
    let shape = format!("B {batch} H {heads_q} N {seqlen_q} hd {head_dim} {mask} {dtype}");
    let mut text = format!("{}, {shape}\n", report.gpu);
    let mut line = |what: &str, value: f64, limit: f64, unit: &str| {
        let mark = if value <= limit { "ok" } else { "BAD" };
        writeln!(text, "{mark:<4}{what:<58}{value:9.2} {unit} (at most {limit})")
    };
    line("a start with a warm cache adds to a bare launch", report.warm_adds_ms, WARM_LIMIT, "ms")?;
    line("a start with an empty cache adds", report.cold_adds_ms, COLD_LIMIT, "ms")?;
    line("a call takes of the host", report.call_us, CALL_LIMIT, "us")?;
    for (name, start) in
        std::iter::once(("cold", &report.cold)).chain(report.warm.iter().map(|start| ("warm", start)))
    {
        writeln!(
            text,
            "    {name}: context {:.1} ms, kernel {:.2} ms, first launch {:.2} ms, call {:.2} us",
            start.context, start.kernel, start.launch, start.call_us
        )?;
    }
    Ok(text)
}

/// Runs a fresh process that starts with this cache.
fn child(cache: &Path) -> anyhow::Result<Start> {
    let program = std::env::current_exe().context("this program does not find itself")?;
    let done = Command::new(program)
        .args(["doctor", "--time", "--start"])
        .env(CACHE_VARIABLE, cache)
        .output()
        .context("cannot start a process")?;
    let said = String::from_utf8_lossy(&done.stderr);
    anyhow::ensure!(done.status.success(), "{}: {}", done.status, said.trim());
    serde_json::from_slice(&done.stdout).context("a process talks oddly")
}

/// The process: everything once, then many calls.
///
/// # Errors
/// What the GPU reports.
pub(crate) fn start() -> anyhow::Result<Verdict> {
    let ms = |from: Instant| from.elapsed().as_secs_f64() * 1e3;
    let began = Instant::now();
    let context = driver::context(0)?;
    let context_ms = ms(began);
    let began = Instant::now();
    let gpu = Gpu::with(Kernels::new(&context)?);
    let forward = gpu.bind(&problem(), Pass::Forward, &BindOptions::default())?.forward()?;
    let kernel = ms(began);
    let inputs = Inputs::<bf16>::random(&problem(), TensorLayout::Bshd, 1);
    let mut call = place_forward(&gpu.stream, &forward, &inputs)?;
    gpu.synchronize()?;
    let began = Instant::now();
    call.run(&forward, &gpu.stream)?;
    gpu.synchronize()?;
    let launch = ms(began);
    let mut times = Vec::new();
    for _ in 0..BATCHES {
        let began = Instant::now();
        (0..CALLS).try_for_each(|_| call.run(&forward, &gpu.stream))?;
        times.push(ms(began) * 1e3 / CALLS as f64);
        gpu.synchronize()?;
    }
    times.sort_by(f64::total_cmp);
    output::print_json(&Start { context: context_ms, kernel, launch, call_us: median(&times) })?;
    Ok(Verdict::Good)
}
