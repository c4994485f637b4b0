//! One rank: a process with a GPU, which does the jobs on standard input and prints an answer for each.

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use fa_attn::device::{Bound, DeviceBackward, DeviceForward, DeviceTensor, Gpu, Placement, shapes};
use fa_core::{Lengths, Pass, Problem, TensorLayout};
use fa_cpu::TensorRef;
use fa_dist::{Bootstrap, DeviceAttention, Error, Rank, RankOptions, Scheme, ShardPlan, Shards, one_gpu};
use half::bf16;

use super::jobs::{Answer, DEADLINE_VARIABLE, Job, Kind};
use crate::term::failure::Verdict;

/// Does the jobs on standard input.
///
/// # Errors
/// No GPU, no NCCL, and jobs that cannot be read. What fails between ranks is an answer.
pub(super) fn command() -> anyhow::Result<Verdict> {
    let jobs: Vec<Job> = serde_json::from_reader(std::io::stdin().lock()).context("no jobs to read")?;
    let (bootstrap, place) = Bootstrap::from_env()?;
    let seconds = std::env::var(DEADLINE_VARIABLE).ok().and_then(|text| text.parse().ok()).unwrap_or(60);
    let options = RankOptions { deadline: Duration::from_secs(seconds), ..RankOptions::default() };
    let gpu = Arc::new(Gpu::nth(place.local)?);
    let mut rank = match Rank::join(&gpu, &bootstrap, place, &options) {
        Ok(rank) => rank,
        Err(error) => {
            print(&failed(0, place.rank, &error))?;
            return Ok(Verdict::Bad);
        }
    };
    for (number, job) in jobs.iter().enumerate() {
        let done = work(rank, number, job, place.rank);
        match done {
            Ok((back, answer)) => {
                print(&answer)?;
                rank = back;
            }
            Err(error) => {
                print(&failed(number, place.rank, &error))?;
                return Ok(Verdict::Bad);
            }
        }
    }
    Ok(Verdict::Good)
}

fn print(answer: &Answer) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(answer)?)?;
    Ok(out.flush()?)
}

fn answer(job: usize, rank: usize) -> Answer {
    Answer {
        job,
        rank,
        error: None,
        same_bits: None,
        errors: Vec::new(),
        repeats: None,
        seconds: Vec::new(),
        one_gpu: Vec::new(),
        memory: 0,
    }
}

fn failed(job: usize, rank: usize, error: &Error) -> Answer {
    let debug = format!("{error:?}");
    let variant = debug.split([' ', '(', '{']).next().unwrap_or_default().to_owned();
    Answer { error: Some((variant, error.to_string())), ..answer(job, rank) }
}

/// Values in [-1, 1): a block of random ones again and again, since gigabytes are filled.
fn values(len: usize, seed: u64) -> Vec<bf16> {
    let block: Vec<bf16> = (0..len.min(1_000_003))
        .map(|i| {
            let mixed =
                (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ seed.wrapping_mul(0xff51_afd7_ed55_8ccd));
            bf16::from_f32(((mixed >> 40) as f32 / (1u64 << 23) as f32) - 1.0)
        })
        .collect();
    let mut all = Vec::with_capacity(len);
    while all.len() < len {
        let more = (len - all.len()).min(block.len());
        all.extend_from_slice(&block[..more]);
    }
    all
}

/// Q, K, V and dO of the whole problem, or a rank's rows of them.
struct Tensors {
    forward: DeviceForward<bf16>,
    backward: Option<DeviceBackward<bf16>>,
}

fn tensors(
    gpu: &Gpu,
    problem: &Problem,
    host: &[Vec<bf16>; 4],
    bound: Option<&Bound>,
    backward: Option<&Bound>,
    gradients: bool,
) -> Result<Tensors, Error> {
    let stream = &gpu.stream;
    let of = shapes(problem);
    let view = |i: usize| TensorRef::packed("input", &host[i], of[i], TensorLayout::Bshd);
    let (q, k, v, dout) = (view(0)?, view(1)?, view(2)?, view(3)?);
    let workspace = bound.map_or(0, Bound::workspace_bytes);
    let placement = Placement::packed(of[3], TensorLayout::Bshd);
    let forward = DeviceForward::upload(stream, problem, workspace, [&q, &k, &v], placement)?;
    let backward = match (gradients, backward) {
        (false, _) => None,
        (true, Some(Bound::Backward(bound))) => {
            Some(DeviceBackward::new(stream, bound, &forward, DeviceTensor::upload(stream, &dout)?)?)
        }
        (true, _) => {
            let nan = |i: usize| DeviceTensor::nan(stream, Placement::packed(of[i], TensorLayout::Bshd));
            Some(DeviceBackward {
                dout: DeviceTensor::upload(stream, &dout)?,
                dq: nan(0)?,
                dk: nan(1)?,
                dv: nan(2)?,
                dsinks: None,
                workspace: stream.alloc_zeros(16).map_err(|source| fa_kernels::Error::Driver {
                    doing: "allocating device memory",
                    source,
                })?,
            })
        }
    };
    Ok(Tensors { forward, backward })
}

fn work(rank: Rank, number: usize, job: &Job, own: usize) -> Result<(Rank, Answer), Error> {
    let mut problem = job.problem;
    if job.odd_rank == Some(own) {
        let lengths = problem.lengths;
        problem = problem.with_lengths(Lengths::uniform(1, lengths.max_q() - 1, lengths.max_k() - 1));
    }
    let world = rank.place().world;
    let gpu = rank.gpu().clone();
    let pass = job.backward.then_some(Pass::DETERMINISTIC_BACKWARD);
    let pass = match job.kind {
        Kind::Check => pass,
        Kind::Bench { .. } | Kind::Endless => job.backward.then_some(Pass::BACKWARD),
    };
    let mut plan = ShardPlan::new(&problem, world, job.scheme, job.layout)?;
    if let Some(stages) = job.stages {
        plan = plan.with_stages(stages)?;
    }
    let bound = one_gpu(&gpu, &plan, Pass::Forward)?;
    let bound_backward = pass.map(|pass| one_gpu(&gpu, &plan, pass)).transpose()?;
    let (rows, keys) = bound.spec().tile();
    let plan = plan.with_tiles(rows as usize, keys as usize);
    let mut attention = DeviceAttention::new(rank, &plan, pass)?;
    let mut answer = Answer { memory: attention.workspace_bytes(), ..answer(number, own) };

    let of = shapes(&problem);
    let mut seed = 0;
    let whole: [Vec<bf16>; 4] = of.map(|shape| {
        seed += 1;
        values(shape.iter().product(), seed)
    });
    let queries = if job.scheme == Scheme::Decode { 0 } else { own };
    let shards: [(&Shards, usize); 4] =
        [(plan.queries(), queries), (plan.keys(), own), (plan.keys(), own), (plan.queries(), queries)];
    let local = [0, 1, 2, 3].map(|i| {
        let (shards, rank) = shards[i];
        shards.scatter(rank, &whole[i], of[i][2] * of[i][3])
    });
    let lengths = Lengths::uniform(1, plan.queries().rows(queries), plan.keys().rows(own));
    let shard = problem.with_lengths(lengths);
    let mut mine = tensors(&gpu, &shard, &local, None, None, job.backward)?;
    let stream = gpu.stream.clone();
    match job.kind {
        Kind::Check => {
            let mut alone =
                tensors(&gpu, &problem, &whole, Some(&bound), bound_backward.as_ref(), job.backward)?;
            run_alone(&mut alone, &bound, bound_backward.as_ref(), &gpu)?;
            let found = run(&mut attention, &mut mine, &stream)?;
            let again = run(&mut attention, &mut mine, &stream)?;
            answer.repeats = Some(found == again);
            let want = alone.forward.read(&stream)?;
            let width = of[3][2] * of[3][3];
            let want_out = plan.queries().scatter(queries, &want.out, width);
            let heads = problem.heads_q;
            let len = problem.lengths.max_q();
            let want_lse: Vec<f32> = (0..heads)
                .flat_map(|head| plan.queries().scatter(queries, &want.lse[head * len..][..len], 1))
                .collect();
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            let same_out = found.out.iter().zip(&want_out).all(|(a, b)| a.to_bits() == b.to_bits());
            answer.same_bits = Some(same_out && bits(&found.lse) == bits(&want_lse));
            answer.errors.push(worst(&found.out, &want_out));
            if let Some(backward) = &alone.backward {
                let want = backward.read(&stream)?;
                for i in 0..3 {
                    let (shards, rank) = shards[i];
                    let rows = shards.scatter(rank, &want.values[i], of[i][2] * of[i][3]);
                    answer.errors.push(worst(&found.gradients[i], &rows));
                }
            }
        }
        Kind::Bench { iterations } => {
            {
                let mut alone =
                    tensors(&gpu, &problem, &whole, Some(&bound), bound_backward.as_ref(), job.backward)?;
                run_alone(&mut alone, &bound, bound_backward.as_ref(), &gpu)?;
                answer.one_gpu = time_alone(&mut alone, &bound, bound_backward.as_ref(), &gpu, iterations)?;
            }
            drop(whole);
            attention.forward(&mut mine.forward, &stream)?;
            attention.rank().wait(&stream)?;
            let mut best = f64::INFINITY;
            for _ in 0..3 {
                attention.rank().gather("ready")?;
                let begun = Instant::now();
                for _ in 0..iterations {
                    attention.forward(&mut mine.forward, &stream)?;
                }
                attention.rank().wait(&stream)?;
                best = best.min(begun.elapsed().as_secs_f64() / iterations as f64);
            }
            answer.seconds.push(best);
            if let Some(backward) = &mut mine.backward {
                attention.backward(&mine.forward, backward, &stream)?;
                attention.rank().wait(&stream)?;
                let mut best = f64::INFINITY;
                for _ in 0..3 {
                    attention.rank().gather("ready")?;
                    let begun = Instant::now();
                    for _ in 0..iterations {
                        attention.backward(&mine.forward, backward, &stream)?;
                    }
                    attention.rank().wait(&stream)?;
                    best = best.min(begun.elapsed().as_secs_f64() / iterations as f64);
                }
                answer.seconds.push(best);
            }
        }
        Kind::Endless => {
            attention.forward(&mut mine.forward, &stream)?;
            attention.rank().wait(&stream)?;
            print(&answer).ok();
            loop {
                attention.forward(&mut mine.forward, &stream)?;
                attention.rank().wait(&stream)?;
            }
        }
    }
    Ok((attention.into_rank(), answer))
}

/// What a rank computed.
#[derive(PartialEq)]
struct Found {
    out: Vec<bf16>,
    lse: Vec<f32>,
    gradients: Vec<Vec<bf16>>,
}

/// A forward and a backward into poisoned outputs.
fn run(
    attention: &mut DeviceAttention,
    mine: &mut Tensors,
    stream: &Arc<fa_kernels::cudarc::driver::CudaStream>,
) -> Result<Found, Error> {
    mine.forward.poison(stream)?;
    attention.forward(&mut mine.forward, stream)?;
    attention.rank().wait(stream)?;
    let output = mine.forward.read(stream)?;
    let mut gradients = Vec::new();
    if let Some(backward) = &mut mine.backward {
        backward.poison(stream)?;
        attention.backward(&mine.forward, backward, stream)?;
        attention.rank().wait(stream)?;
        gradients.extend(backward.read(stream)?.values);
    }
    Ok(Found { out: output.out, lse: output.lse, gradients })
}

fn run_alone(tensors: &mut Tensors, bound: &Bound, backward: Option<&Bound>, gpu: &Gpu) -> Result<(), Error> {
    if let Bound::Forward(forward) = bound {
        tensors.forward.run(forward, &gpu.stream)?;
    }
    if let (Some(Bound::Backward(bound)), Some(own)) = (backward, &mut tensors.backward) {
        own.run(&tensors.forward, bound, &gpu.stream)?;
    }
    Ok(gpu.synchronize()?)
}

/// The times of one GPU, by the same clock as those of several.
fn time_alone(
    tensors: &mut Tensors,
    bound: &Bound,
    backward: Option<&Bound>,
    gpu: &Gpu,
    iterations: usize,
) -> Result<Vec<f64>, Error> {
    let mut times = Vec::new();
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        let begun = Instant::now();
        for _ in 0..iterations {
            if let Bound::Forward(forward) = bound {
                tensors.forward.run(forward, &gpu.stream)?;
            }
        }
        gpu.synchronize()?;
        best = best.min(begun.elapsed().as_secs_f64() / iterations as f64);
    }
    times.push(best);
    if let (Some(Bound::Backward(bound)), Some(own)) = (backward, &mut tensors.backward) {
        let mut best = f64::INFINITY;
        for _ in 0..3 {
            let begun = Instant::now();
            for _ in 0..iterations {
                own.run(&tensors.forward, bound, &gpu.stream)?;
            }
            gpu.synchronize()?;
            best = best.min(begun.elapsed().as_secs_f64() / iterations as f64);
        }
        times.push(best);
    }
    Ok(times)
}

/// The largest difference over the largest value; NaN anywhere is infinite.
fn worst(found: &[bf16], want: &[bf16]) -> f64 {
    let largest = want.iter().map(|value| f64::from(value.to_f32().abs())).fold(1e-30, f64::max);
    let differences = found.iter().zip(want).map(|(a, b)| f64::from((a.to_f32() - b.to_f32()).abs()));
    let worst = differences.map(|d| if d.is_nan() { f64::INFINITY } else { d }).fold(0.0, f64::max);
    if found.len() == want.len() { worst / largest } else { f64::INFINITY }
}
