//! One rank: a process with a GPU, or one of its threads, which does the jobs on standard
//! input and prints an answer for each.

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use fa_attn::device::{
    BindOptions, Bound, DeviceBackward, DeviceExtras, DeviceForward, DeviceGradient, DeviceTensor, Gpu,
    Placement,
};
use fa_core::{Lengths, Pass, TensorLayout};
use fa_cpu::{CpuError, TensorRef};
use fa_dist::cost::{Link, Machine, Times, predict, staged};
use fa_dist::{
    Bootstrap, DeviceAttention, Error, Place, Rank, RankOptions, ShardPlan, StepTime, Transport, one_gpu,
};
use fa_kernels::cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use half::bf16;

use super::found::{Found, repeated};
use super::jobs::{Answer, DEADLINE_VARIABLE, Job, Kind, Stage, THREADS_VARIABLE, TRANSPORT_VARIABLE};
use super::tensors::{Tensors, one};
use crate::term::failure::Verdict;

/// Does the jobs on standard input, as one rank or as several, of which each is a thread.
///
/// # Errors
/// No GPU, no NCCL, and jobs that cannot be read. What fails between ranks is an answer.
pub(super) fn command() -> anyhow::Result<Verdict> {
    let jobs: Vec<Job> = serde_json::from_reader(std::io::stdin().lock()).context("no jobs to read")?;
    let (bootstrap, place) = Bootstrap::from_env()?;
    let count = std::env::var(THREADS_VARIABLE).ok().and_then(|text| text.parse().ok());
    let Some(count) = count else { return one_rank(&jobs, &bootstrap, place) };
    let done: Vec<anyhow::Result<Verdict>> = std::thread::scope(|scope| {
        let place = |rank: usize| Place { rank, world: count, local: rank };
        let start = |place: Place| {
            scope.spawn({
                let (jobs, bootstrap) = (&jobs, &bootstrap);
                move || one_rank(jobs, bootstrap, place)
            })
        };
        let started: Vec<_> = (0..count).map(place).map(start).collect();
        let ended = started.into_iter().map(std::thread::ScopedJoinHandle::join);
        ended.map(|rank| rank.unwrap_or_else(|_| Err(anyhow::anyhow!("a rank panicked")))).collect()
    });
    done.into_iter().find(|rank| !matches!(rank, Ok(Verdict::Good))).unwrap_or(Ok(Verdict::Good))
}

fn one_rank(jobs: &[Job], bootstrap: &Bootstrap, place: Place) -> anyhow::Result<Verdict> {
    let seconds = std::env::var(DEADLINE_VARIABLE).ok().and_then(|text| text.parse().ok()).unwrap_or(60);
    let named = std::env::var(TRANSPORT_VARIABLE).unwrap_or_default();
    let transport = Transport::ALL.into_iter().find(|own| own.name() == named).unwrap_or_default();
    let deadline = Duration::from_secs(seconds);
    let options = RankOptions { deadline, transport, ..RankOptions::default() };
    fa_kernels::driver::probe()?;
    let count = usize::try_from(CudaContext::device_count().unwrap_or(0)).unwrap_or(0);
    // Where there are too few ranks share GPUs.
    let mut gpu = Gpu::nth(place.local % count.max(1))?;
    // The default stream is one of all threads of a GPU, of which each waits for others.
    let stream = gpu.context().new_stream();
    gpu.stream = stream.map_err(|source| fa_kernels::Error::Driver { doing: "making a stream", source })?;
    let gpu = Arc::new(gpu);
    let mut rank = match Rank::join(&gpu, bootstrap, place, &options) {
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

/// Q, K, V and dO of the whole problem, or a rank's rows of them.
struct OnGpu {
    forward: DeviceForward<bf16>,
    backward: Option<DeviceBackward<bf16>>,
}

/// Copies to the GPU; `bound`: the kernels of one GPU, whose workspaces they need. With room for gradients
/// where there is a backward.
fn upload(
    gpu: &Gpu,
    host: &Tensors<bf16>,
    bound: Option<(&Bound, Option<&Bound>)>,
    gradients: bool,
) -> Result<OnGpu, Error> {
    let (stream, of) = (&gpu.stream, host.shapes);
    let view = |i: usize| TensorRef::packed("input", &host.values[i], of[i], TensorLayout::Bshd);
    let (q, k, v, dout) = (view(0)?, view(1)?, view(2)?, view(3)?);
    let workspace = bound.map_or(0, |(forward, _)| forward.workspace_bytes());
    let placement = Placement::packed(of[3], TensorLayout::Bshd);
    let mut forward = DeviceForward::upload(stream, &host.problem, workspace, [&q, &k, &v], placement)?;
    let program = host.inputs().map_err(CpuError::from)?;
    forward.extras = DeviceExtras::upload(stream, host.arguments(program.as_ref(), true))?;
    let whole = host.problem.score.program.filter(|_| gradients);
    if let (Some(program), Some(own)) = (whole, &mut forward.extras.program) {
        own.want_gradients(stream, &program)?;
    }
    let backward = match (gradients, bound) {
        (false, _) => None,
        (true, Some((_, Some(Bound::Backward(bound))))) => {
            Some(DeviceBackward::new(stream, bound, &forward, DeviceTensor::upload(stream, &dout)?)?)
        }
        (true, _) => {
            let nan = |i: usize| DeviceTensor::nan(stream, Placement::packed(of[i], TensorLayout::Bshd));
            let allocating = |source| fa_kernels::Error::Driver { doing: "allocating device memory", source };
            let heads = host.problem.heads_q;
            let dsinks = host.problem.score.sinks.then(|| stream.alloc_zeros(heads).map_err(allocating));
            Some(DeviceBackward {
                dout: DeviceTensor::upload(stream, &dout)?,
                dq: nan(0)?,
                dk: nan(1)?,
                dv: nan(2)?,
                dsinks: dsinks.transpose()?,
                workspace: stream.alloc_zeros(16).map_err(allocating)?,
                room: None,
            })
        }
    };
    Ok(OnGpu { forward, backward })
}

/// A forward on a cache of codes, of one GPU (`bound`) or of a rank.
fn on_codes(
    gpu: &Gpu,
    host: &Tensors<bf16>,
    bound: Option<&Bound>,
    attention: Option<&mut DeviceAttention>,
) -> Result<Found<bf16>, Error> {
    let (stream, of) = (&gpu.stream, host.shapes);
    let codes = host.codes().unwrap_or_default();
    let q = TensorRef::packed("q", &host.values[0], of[0], TensorLayout::Bshd)?;
    let [k, v] = [1, 2].map(|i| TensorRef::packed("codes", &codes[i - 1], of[i], TensorLayout::Bshd));
    let placement = Placement::packed(of[3], TensorLayout::Bshd);
    let workspace = bound.map_or(0, Bound::workspace_bytes);
    let mut tensors: DeviceForward<bf16, u8, bf16> =
        DeviceForward::upload_with(stream, &host.problem, workspace, &q, [&k?, &v?], placement)?;
    tensors.extras = DeviceExtras::upload(stream, host.arguments(None, false))?;
    if let Some(Bound::Forward(forward)) = bound {
        tensors.run(forward, stream)?;
    }
    if let Some(attention) = attention {
        attention.forward(&mut tensors, stream)?;
        attention.rank().wait(stream)?;
    }
    let output = tensors.read(stream)?;
    let (gradients, dsinks, darrays) = (Vec::new(), Vec::new(), Vec::new());
    Ok(Found { out: output.out, lse: output.lse, gradients, dsinks, darrays })
}

/// A job's plan on a GPU, and the kernels of one GPU that computes the same.
struct Planned {
    plan: ShardPlan,
    passes: Vec<Pass>,
    bound: Bound,
    bound_backward: Option<Bound>,
}

fn planned(gpu: &Gpu, job: &Job, place: Place, machine: Machine) -> Result<Planned, Error> {
    let mut problem = job.problem;
    if job.odd_rank == Some(place.rank) {
        let lengths = problem.lengths;
        problem = problem.with_lengths(Lengths::uniform(1, lengths.max_q() - 1, lengths.max_k() - 1));
    }
    let pass = job.backward.then_some(match job.kind {
        Kind::Check => Pass::DETERMINISTIC_BACKWARD,
        Kind::Bench { .. } | Kind::Ends(_) | Kind::Fails => Pass::BACKWARD,
    });
    let passes: Vec<Pass> = [Some(Pass::Forward), pass].into_iter().flatten().collect();
    let mut plan = job.plan(&problem, place.world)?;
    if matches!(job.kind, Kind::Bench { .. }) {
        plan = staged(&plan, &passes, machine)?;
    } else if let Some(staged) = [8, 4, 2].into_iter().find_map(|n| plan.clone().with_stages(n).ok()) {
        // Checks transfer heads in as many parts as there can be.
        plan = staged;
    }
    // One GPU has the keys of all caches.
    let bound = match job.used.is_empty() {
        true => one_gpu(gpu, &plan, Pass::Forward)?,
        false => gpu.bind(&one(job), Pass::Forward, &BindOptions::default())?,
    };
    let bound_backward = pass.map(|pass| one_gpu(gpu, &plan, pass)).transpose()?;
    let (rows, keys) = bound.spec().tile();
    Ok(Planned { plan: plan.with_tiles(rows as usize, keys as usize), passes, bound, bound_backward })
}

fn work(rank: Rank, number: usize, job: &Job, own: usize) -> Result<(Rank, Answer), Error> {
    let place = rank.place();
    let world = place.world;
    reached(own + 1 == world && job.kind == Kind::Ends(Stage::Joined), &Answer::of(number, own));
    let gpu = rank.gpu().clone();
    let machine = Machine { arch: gpu.arch(), link: Link::NVLINK };
    let Planned { plan, passes, bound, bound_backward } = planned(&gpu, job, place, machine)?;
    let pass = passes.get(1).copied();
    let mut attention = DeviceAttention::new(rank, &plan, pass)?;
    let mut answer = Answer { memory: attention.workspace_bytes(), ..Answer::of(number, own) };
    for pass in passes.iter().filter(|_| matches!(job.kind, Kind::Bench { .. })) {
        answer.model.push(predict(&plan, &mut Times::new(machine, *pass))?.share(world));
    }

    let whole = Tensors::whole(job);
    let host = whole.of_rank(job, &plan, own);
    if host.problem.types.kv.is_code() {
        let found = repeated(job.repeat, &mut answer, |_| on_codes(&gpu, &host, None, Some(&mut attention)))?;
        let one = on_codes(&gpu, &whole, Some(&bound), None)?;
        found.judge(&whole.rows_of(&one, &plan, own), &mut answer);
        return Ok((attention.into_rank(), answer));
    }
    let mut mine = upload(&gpu, &host, None, job.backward)?;
    let alone = || upload(&gpu, &whole, Some((&bound, bound_backward.as_ref())), job.backward);
    let stream = gpu.stream.clone();
    match job.kind {
        Kind::Check => {
            let mut alone = alone()?;
            run_alone(&mut alone, &bound, bound_backward.as_ref(), &gpu)?;
            let found = repeated(job.repeat, &mut answer, |_| run(&mut attention, &mut mine, &stream))?;
            found.judge(&whole.rows_of(&read(&alone, &stream)?, &plan, own), &mut answer);
        }
        Kind::Bench { iterations } => {
            {
                let mut alone = alone()?;
                run_alone(&mut alone, &bound, bound_backward.as_ref(), &gpu)?;
                answer.one_gpu = time_alone(&mut alone, &bound, bound_backward.as_ref(), &gpu, iterations)?;
            }
            drop(whole);
            measure(&mut attention, &mut mine, &stream, iterations, &mut answer)?;
        }
        Kind::Fails => {
            if own + 1 == world {
                // As an LSE that is too short.
                mine.forward.rows -= 1;
            }
            attention.forward(&mut mine.forward, &stream)?;
            attention.rank().wait(&stream)?;
        }
        Kind::Ends(stage) => ends(&mut attention, &mut mine, &stream, stage, answer.clone())?,
    }
    Ok((attention.into_rank(), answer))
}

/// The least time of a pass over three measurements, which all ranks begin together.
fn least(
    attention: &mut DeviceAttention,
    iterations: usize,
    mut pass: impl FnMut(&mut DeviceAttention) -> Result<(), Error>,
    stream: &Arc<CudaStream>,
) -> Result<f64, Error> {
    pass(attention)?;
    attention.rank().wait(stream)?;
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        attention.rank().gather("ready")?;
        let begun = Instant::now();
        for _ in 0..iterations {
            pass(attention)?;
        }
        attention.rank().wait(stream)?;
        best = best.min(begun.elapsed().as_secs_f64() / iterations as f64);
    }
    Ok(best)
}

/// Measures passes of a rank, and the steps of a forward.
fn measure(
    attention: &mut DeviceAttention,
    mine: &mut OnGpu,
    stream: &Arc<CudaStream>,
    iterations: usize,
    answer: &mut Answer,
) -> Result<(), Error> {
    let forward = &mut mine.forward;
    answer.seconds.push(least(attention, iterations, |own| own.forward(forward, stream), stream)?);
    // Few enough for the queue.
    let (few, begun) = (iterations.min(10), Instant::now());
    (0..few).try_for_each(|_| attention.forward(forward, stream))?;
    answer.host = begun.elapsed().as_secs_f64() / few as f64;
    attention.rank().wait(stream)?;
    attention.rank().gather("steps")?;
    attention.timed(forward, stream)?;
    let told = |steps: Vec<StepTime>| -> Vec<(String, f64, f64)> {
        steps.into_iter().map(|step| (step.name.to_owned(), step.begin, step.seconds)).collect()
    };
    answer.steps[0] = told(attention.timed(forward, stream)?);
    if let Some(backward) = &mut mine.backward {
        let forward = &mine.forward;
        let pass = |own: &mut DeviceAttention| own.backward(forward, backward, stream);
        answer.seconds.push(least(attention, iterations, pass, stream)?);
        attention.rank().gather("steps")?;
        answer.steps[1] = told(attention.timed_backward(forward, backward, stream)?);
    }
    Ok(())
}

/// Passes among which the last rank waits to be killed at `stage`.
fn ends(
    attention: &mut DeviceAttention,
    mine: &mut OnGpu,
    stream: &Arc<CudaStream>,
    stage: Stage,
    answer: Answer,
) -> Result<(), Error> {
    let Place { rank, world, .. } = attention.rank().place();
    let last = rank + 1 == world;
    reached(last && stage == Stage::Planned, &answer);
    attention.forward(&mut mine.forward, stream)?;
    reached(last && stage == Stage::Forward, &answer);
    attention.rank().wait(stream)?;
    reached(last && stage == Stage::Between, &answer);
    if let Some(backward) = &mut mine.backward {
        attention.backward(&mine.forward, backward, stream)?;
        reached(last && stage == Stage::Backward, &answer);
        attention.rank().wait(stream)?;
    }
    if last {
        print(&answer).ok();
    }
    if stage == Stage::Running {
        loop {
            attention.forward(&mut mine.forward, stream)?;
            attention.rank().wait(stream)?;
        }
    }
    // Who needs nothing more of it learns of it here.
    attention.rank().gather("the end")?;
    Ok(())
}

/// A forward and a backward into poisoned outputs.
fn run(
    attention: &mut DeviceAttention,
    mine: &mut OnGpu,
    stream: &Arc<CudaStream>,
) -> Result<Found<bf16>, Error> {
    mine.forward.poison(stream)?;
    attention.forward(&mut mine.forward, stream)?;
    attention.rank().wait(stream)?;
    if let Some(backward) = &mut mine.backward {
        backward.poison(stream)?;
        for room in arrays(&mut mine.forward) {
            let poison = vec![f32::NAN; room.len()];
            let copied = stream.memcpy_htod(&poison, room);
            copied.map_err(|source| fa_kernels::Error::Driver { doing: "copying to the GPU", source })?;
        }
        attention.backward(&mine.forward, backward, stream)?;
        attention.rank().wait(stream)?;
    }
    read(mine, stream)
}

/// The gradients of arrays.
fn arrays(forward: &mut DeviceForward<bf16>) -> impl Iterator<Item = &mut CudaSlice<f32>> {
    let rooms = forward.extras.program.iter_mut().flat_map(|own| own.gradients.iter_mut().flatten());
    // Ranks add up in f32.
    rooms.filter_map(|room| if let DeviceGradient::F32(own) = room { Some(own) } else { None })
}

/// What is on the GPU.
fn read(tensors: &OnGpu, stream: &Arc<CudaStream>) -> Result<Found<bf16>, Error> {
    let output = tensors.forward.read(stream)?;
    let (mut gradients, mut dsinks, mut darrays) = (Vec::new(), Vec::new(), Vec::new());
    if let Some(backward) = &tensors.backward {
        let read = |own: &CudaSlice<f32>| -> Result<Vec<f32>, Error> {
            let copied = stream.clone_dtoh(own);
            let doing = "copying from the GPU";
            Ok(copied.map_err(|source| fa_kernels::Error::Driver { doing, source })?)
        };
        gradients.extend(backward.read(stream)?.values);
        if let Some(own) = &backward.dsinks {
            dsinks = read(own)?;
        }
        let arrays = tensors.forward.extras.program.iter().flat_map(|own| own.gradients.iter().flatten());
        darrays = arrays.map(|own| Ok(own.read(stream)?)).collect::<Result<_, Error>>()?;
    }
    Ok(Found { out: output.out, lse: output.lse, gradients, dsinks, darrays })
}

fn run_alone(tensors: &mut OnGpu, bound: &Bound, backward: Option<&Bound>, gpu: &Gpu) -> Result<(), Error> {
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
    tensors: &mut OnGpu,
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
