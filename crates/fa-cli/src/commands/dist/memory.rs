//! `fa dist check --transport memory`: ranks that are threads of this process, on the CPU.

use std::time::{Duration, Instant};

use fa_core::{Lengths, Pass, Problem, TensorLayout};
use fa_cpu::tiled::{self, BackwardInputs};
use fa_cpu::{CpuError, TensorMut, TensorRef};
use fa_dist::program::Op;
use fa_dist::{Error, Fault, FaultKind, HostAttention, HostTransport, MemoryOptions, MemoryTransport, Order};

use super::args::{CheckArgs, RunArgs};
use super::found::{Found, repeated};
use super::jobs::{Answer, Job, TILE, checks_in_memory};
use super::parent::{judge, line, named, shape};
use super::tensors::Tensors;
use crate::term::failure::Verdict;

fn views(tensors: &Tensors<f32>) -> Result<[TensorRef<'_, f32>; 4], Error> {
    let Tensors { values, shapes, .. } = tensors;
    let view = |i: usize| TensorRef::packed("input", &values[i], shapes[i], TensorLayout::Bshd);
    Ok([view(0)?, view(1)?, view(2)?, view(3)?])
}

fn codes_of<'a>(
    tensors: &Tensors<f32>,
    codes: &'a [Vec<u8>; 2],
    i: usize,
) -> Result<TensorRef<'a, u8>, Error> {
    Ok(TensorRef::packed("codes", &codes[i], tensors.shapes[1 + i], TensorLayout::Bshd)?)
}

/// Zeros for O, LSE and, where there is a backward, the gradients.
fn room(tensors: &Tensors<f32>, backward: bool) -> Found<f32> {
    let [batch, rows, heads, _] = tensors.shapes[3];
    let zeros = |i: usize| vec![0.0; tensors.values[i].len()];
    let gradients = if backward { vec![zeros(0), zeros(1), zeros(2)] } else { Vec::new() };
    let sinks = if backward && tensors.problem.score.sinks { heads } else { 0 };
    let (lse, dsinks) = (vec![0.0; batch * heads * rows], vec![0.0; sinks]);
    Found { out: zeros(3), lse, gradients, dsinks, darrays: Vec::new() }
}

fn view_mut(values: &mut [f32], shape: [usize; 4]) -> Result<TensorMut<'_, f32>, Error> {
    Ok(TensorMut::packed("output", values, shape, TensorLayout::Bshd)?)
}

/// A forward and, where the job has one, a backward of one process.
fn alone(job: &Job, whole: &Tensors<f32>) -> Result<Found<f32>, Error> {
    let (problem, options) = (&whole.problem, Default::default());
    let program = whole.inputs().map_err(CpuError::from)?;
    let given = |backward: bool| whole.arguments(program.as_ref(), backward);
    let [q, k, v, dout] = views(whole)?;
    let mut to = room(whole, job.backward);
    let mut out = view_mut(&mut to.out, whole.shapes[3])?;
    let lse = Some(to.lse.as_mut_slice());
    match whole.codes() {
        None => tiled::forward_extras(options, problem, given(false), &q, &k, &v, &mut out, lse)?,
        Some(codes) => {
            let [k, v] = [codes_of(whole, &codes, 0)?, codes_of(whole, &codes, 1)?];
            tiled::forward_extras(options, problem, given(false), &q, &k, &v, &mut out, lse)?;
        }
    }
    if let [dq, dk, dv] = to.gradients.as_mut_slice() {
        let out = TensorRef::packed("out", &to.out, whole.shapes[3], TensorLayout::Bshd)?;
        let inputs = BackwardInputs { q, k, v, out, lse: &to.lse, dout };
        let (mut dq, mut dk) = (view_mut(dq, whole.shapes[0])?, view_mut(dk, whole.shapes[1])?);
        let mut dv = view_mut(dv, whole.shapes[2])?;
        let dsinks = Some(to.dsinks.as_mut_slice()).filter(|dsinks| !dsinks.is_empty());
        let to_arrays = job.has_arrays().then_some(&mut to.darrays);
        let (given, dq, dk, dv) = (given(true), &mut dq, &mut dk, &mut dv);
        tiled::backward_program(options, problem, given, &inputs, dq, dk, dv, dsinks, to_arrays)?;
    }
    Ok(to)
}

/// The same of a rank.
fn passes(
    own: &mut HostAttention<MemoryTransport>,
    tensors: &Tensors<f32>,
    (backward, has_arrays): (bool, bool),
) -> Result<Found<f32>, Error> {
    let program = tensors.inputs().map_err(CpuError::from)?;
    let given = |backward: bool| tensors.arguments(program.as_ref(), backward);
    let [q, k, v, dout] = views(tensors)?;
    let mut to = room(tensors, backward);
    let (mut out, lse) = (view_mut(&mut to.out, tensors.shapes[3])?, &mut to.lse);
    match tensors.codes() {
        None => own.forward([q, k, v], &mut out, lse, given(false))?,
        Some(codes) => {
            let kv = [codes_of(tensors, &codes, 0)?, codes_of(tensors, &codes, 1)?];
            own.forward_on_codes(q, kv, &mut out, lse, given(false))?;
        }
    }
    if let [dq, dk, dv] = to.gradients.as_mut_slice() {
        let out = TensorRef::packed("out", &to.out, tensors.shapes[3], TensorLayout::Bshd)?;
        let inputs = BackwardInputs { q, k, v, out, lse: &to.lse, dout };
        let (mut dq, mut dk) = (view_mut(dq, tensors.shapes[0])?, view_mut(dk, tensors.shapes[1])?);
        let mut dv = view_mut(dv, tensors.shapes[2])?;
        let dsinks = Some(to.dsinks.as_mut_slice()).filter(|dsinks| !dsinks.is_empty());
        let to_arrays = has_arrays.then_some(&mut to.darrays);
        own.backward_program(&inputs, [&mut dq, &mut dk, &mut dv], dsinks, to_arrays, given(true))?;
    }
    Ok(to)
}

/// What each rank answers to a job: run after run with other delays and another order of its two queues.
fn answers(number: usize, job: &Job, world: usize, deadline: Duration) -> Result<Vec<Answer>, Error> {
    let plan = job.plan(&job.problem, world)?.with_tiles(TILE, TILE);
    let whole = Tensors::whole(job);
    let one = alone(job, &whole)?;
    let options = MemoryOptions { deadline, delays: Some(1), ..MemoryOptions::default() };
    Ok(MemoryTransport::run(world, &options, |transport| {
        let rank = transport.rank();
        let mut answer = Answer::of(number, rank);
        let run = || -> Result<(), Error> {
            let mut own = Some(HostAttention::new(&plan, transport)?);
            let mine = whole.of_rank(job, &plan, rank);
            let found = repeated(job.repeat, &mut answer, |seed| {
                let Some(given) = own.take() else { unreachable!("given back below") };
                let order = if seed == 1 { Order::Listed } else { Order::Seeded(seed as u64) };
                passes(own.insert(given.with_order(order)), &mine, (job.backward, job.has_arrays()))
            })?;
            found.judge(&whole.rows_of(&one, &plan, rank), &mut answer);
            Ok(())
        };
        run().err().map_or(answer, |error| Answer::failed(number, rank, &error))
    }))
}

/// Runs the command.
///
/// # Errors
/// What the CPU's code refuses.
pub(super) fn check_on_cpu(given: &CheckArgs) -> anyhow::Result<Verdict> {
    let (args, repeat) = (&given.run, given.repeat);
    let (world, deadline) = (args.ranks, Duration::from_secs(args.deadline));
    let mut jobs = named(checks_in_memory(world, args.quick, repeat), args.only.as_deref())?;
    let mut good = true;
    let refused = |job: &Job| job.plan(&job.problem, world).err();
    for (job, why) in jobs.iter().filter_map(|job| Some((job, refused(job)?))) {
        if !args.json {
            line(&format!("skip {:<28} {:<8} {why}", shape(job), job.scheme.name()))?;
        }
    }
    jobs.retain(|job| refused(job).is_none());
    for (number, job) in jobs.iter().enumerate() {
        let found = answers(number, job, world, deadline)?;
        for answer in found.iter().filter(|_| args.json) {
            line(&serde_json::to_string(answer)?)?;
        }
        good &= judge(job, &found, args.json)?;
    }
    if world > 1 && args.only.is_none() {
        let plain = |job: &&Job| job.problem.mask != fa_core::Mask::FULL && job.words().is_empty();
        for job in jobs.iter().filter(plain) {
            good &= ends(job, args)?;
        }
        good &= disagreeing(&jobs[0], args)?;
    }
    Ok(if good { Verdict::Good } else { Verdict::Bad })
}

/// Whether all others say so, and in time, when the last rank ends at each of its exchanges.
fn ends(job: &Job, args: &RunArgs) -> anyhow::Result<bool> {
    let (world, last) = (args.ranks, args.ranks - 1);
    let plan = job.plan(&job.problem, world)?;
    let exchanges = |pass| -> Result<usize, Error> {
        let steps = plan.program(last, pass)?.steps;
        Ok(steps.iter().filter(|step| matches!(step.op, Op::Exchange { .. })).count())
    };
    let backward = if job.backward { exchanges(Pass::BACKWARD)? } else { 0 };
    let stages = exchanges(Pass::Forward)? + backward;
    let whole = Tensors::whole(job);
    let begun = Instant::now();
    let mut silent = Vec::new();
    for exchange in 0..stages {
        let fault = Fault { rank: last, exchange, kind: FaultKind::Die };
        let deadline = Duration::from_secs(args.deadline);
        let options = MemoryOptions { deadline, faults: vec![fault], ..MemoryOptions::default() };
        let said = MemoryTransport::run(world, &options, |transport| {
            let mut own = HostAttention::new(&plan, transport)?;
            let mine = whole.of_rank(job, &plan, own.rank());
            passes(&mut own, &mine, (job.backward, job.has_arrays()))?;
            // Who needs nothing more of it learns of it here.
            own.transport().agree("the end")
        });
        let is_told =
            |error: &Result<(), Error>| matches!(error, Err(Error::PeerLost { rank, .. }) if *rank == last);
        if !said.iter().all(is_told) {
            silent.push(exchange);
        }
    }
    let good = silent.is_empty();
    if !args.json {
        let after = begun.elapsed().as_secs_f64() / stages.max(1) as f64;
        let what = if good { format!("{after:.2} s each") } else { format!("not said at {silent:?}") };
        let verdict = if good { "pass" } else { "FAIL" };
        let name = job.scheme.name();
        line(&format!("{verdict} rank {last} ends at each of {stages} exchanges of {name}: {what}"))?;
    }
    Ok(good)
}

/// Whether all ranks say so when the last one has a row less.
fn disagreeing(job: &Job, args: &RunArgs) -> anyhow::Result<bool> {
    let (world, lengths) = (args.ranks, job.problem.lengths);
    let shorter = Lengths::uniform(1, lengths.max_q() - 1, lengths.max_k() - 1);
    let plan = |problem: &Problem| job.plan(problem, world);
    let (ours, theirs) = (plan(&job.problem)?, plan(&job.problem.with_lengths(shorter))?);
    let said = MemoryTransport::run(world, &MemoryOptions::default(), |transport| {
        let plan = if transport.rank() == world - 1 { &theirs } else { &ours };
        HostAttention::new(plan, transport).err()
    });
    let good = said.iter().all(|error| matches!(error, Some(Error::Mismatch { .. })));
    if !args.json {
        line(&format!("{} ranks with other shapes", if good { "pass" } else { "FAIL" }))?;
    }
    Ok(good)
}
