//! One rank: a process with a GPU, which does the jobs on standard input and prints an answer for each.

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use fa_attn::device::{Bound, DeviceBackward, DeviceForward, DeviceTensor, Gpu, Placement, shapes};
use fa_core::{Lengths, Pass, Problem, TensorLayout};
use fa_cpu::{Element, TensorRef};
use fa_dist::cost::{Link, Machine, Times, predict, staged};
use fa_dist::{Bootstrap, DeviceAttention, Error, Rank, RankOptions, Scheme, ShardPlan, Shards, one_gpu};
use half::bf16;

use super::found::{Found, repeated};
use super::jobs::{Answer, DEADLINE_VARIABLE, Job, Kind, Stage};
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
            print(&Answer::failed(0, place.rank, &error))?;
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
                print(&Answer::failed(number, place.rank, &error))?;
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

/// Where this rank is to be killed, says that it is there, and waits for it.
fn reached(is_here: bool, answer: &Answer) {
    if is_here {
        print(answer).ok();
        loop {
            std::thread::park();
        }
    }
}

/// Values in [-1, 1): a block of random ones again and again, since gigabytes are filled.
pub(super) fn values<T: Element>(len: usize, seed: u64) -> Vec<T> {
    let block: Vec<T> = (0..len.min(1_000_003))
        .map(|i| {
            let mixed =
                (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ seed.wrapping_mul(0xff51_afd7_ed55_8ccd));
            T::from_f32(((mixed >> 40) as f32 / (1u64 << 23) as f32) - 1.0)
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
    reached(own + 1 == world && job.kind == Kind::Ends(Stage::Joined), &Answer::of(number, own));
    let gpu = rank.gpu().clone();
    let pass = job.backward.then_some(Pass::DETERMINISTIC_BACKWARD);
    let pass = match job.kind {
        Kind::Check => pass,
        Kind::Bench { .. } | Kind::Ends(_) => job.backward.then_some(Pass::BACKWARD),
    };
    let mut plan = ShardPlan::new(&problem, world, job.scheme, job.layout)?;
    let is_measured = matches!(job.kind, Kind::Bench { .. });
    let passes: Vec<Pass> = [Some(Pass::Forward), pass].into_iter().flatten().collect();
    let machine = Machine { arch: gpu.arch(), link: Link::NVLINK };
    if is_measured {
        plan = staged(&plan, &passes, machine)?;
    } else if let Some(staged) = [8, 4, 2].into_iter().find_map(|n| plan.clone().with_stages(n).ok()) {
        // Checks transfer heads in as many parts as there can be.
        plan = staged;
    }
    let bound = one_gpu(&gpu, &plan, Pass::Forward)?;
    let bound_backward = pass.map(|pass| one_gpu(&gpu, &plan, pass)).transpose()?;
    let (rows, keys) = bound.spec().tile();
    let plan = plan.with_tiles(rows as usize, keys as usize);
    let mut attention = DeviceAttention::new(rank, &plan, pass)?;
    let mut answer = Answer { memory: attention.workspace_bytes(), ..Answer::of(number, own) };
    for pass in passes.iter().filter(|_| is_measured) {
        answer.model.push(predict(&plan, &mut Times::new(machine, *pass))?.share(world));
    }

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
            let found = repeated(job.repeat, &mut answer, |_| run(&mut attention, &mut mine, &stream))?;
            let want = alone.forward.read(&stream)?;
            let heads = problem.heads_q;
            let len = problem.lengths.max_q();
            let rows = |i: usize, values: &[bf16]| {
                let (shards, rank) = shards[i];
                shards.scatter(rank, values, of[i][2] * of[i][3])
            };
            let lse = (0..heads)
                .flat_map(|head| plan.queries().scatter(queries, &want.lse[head * len..][..len], 1))
                .collect();
            let mut one = Found { out: rows(3, &want.out), lse, gradients: Vec::new() };
            if let Some(backward) = &alone.backward {
                let want = backward.read(&stream)?;
                one.gradients.extend((0..3).map(|i| rows(i, &want.values[i])));
            }
            found.judge(&one, &mut answer);
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
        Kind::Ends(stage) => {
            let last = own + 1 == world;
            reached(last && stage == Stage::Planned, &answer);
            attention.forward(&mut mine.forward, &stream)?;
            reached(last && stage == Stage::Forward, &answer);
            attention.rank().wait(&stream)?;
            reached(last && stage == Stage::Between, &answer);
            if let Some(backward) = &mut mine.backward {
                attention.backward(&mine.forward, backward, &stream)?;
                reached(last && stage == Stage::Backward, &answer);
                attention.rank().wait(&stream)?;
            }
            if last {
                print(&answer).ok();
            }
            if stage == Stage::Running {
                loop {
                    attention.forward(&mut mine.forward, &stream)?;
                    attention.rank().wait(&stream)?;
                }
            }
            // Who needs nothing more of it learns of it here.
            attention.rank().gather("the end")?;
        }
    }
    Ok((attention.into_rank(), answer))
}

/// A forward and a backward into poisoned outputs.
fn run(
    attention: &mut DeviceAttention,
    mine: &mut Tensors,
    stream: &Arc<fa_kernels::cudarc::driver::CudaStream>,
) -> Result<Found<bf16>, Error> {
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
