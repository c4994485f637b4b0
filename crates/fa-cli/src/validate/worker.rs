//! The part that works on the GPU, in a process of its own: cases in, events out.

mod backward;

use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::io::{BufRead, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use fa_core::{Arch, Family, Pass, TensorLayout};
use fa_kernels::{Error, Forward};
use fa_planner::plan::{PlanOptions, plan};
use half::bf16;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::cases::{Action, Case, NamedSpec, Placing};
use super::oracle::Oracle;
use super::soak;
use crate::cuda::{Bound, Call, Device, Half, Inputs, PassCall, Timing, median, random_dout, with_half};

/// What a worker tells its supervisor, a line of JSON each.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// So many cases lie ahead.
    Cases(usize),
    /// This case is on the GPU from now on.
    Begin(String),
    /// This case is through.
    Done(CaseResult),
}

/// What became of a case.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CaseResult {
    /// The case.
    pub name: String,
    /// The kernel.
    pub kernel: String,
    /// Its fate.
    pub status: Status,
    /// The largest error as a share of its tolerance.
    pub ratio: f64,
    /// The figures, or what is wrong.
    pub detail: String,
    /// Median milliseconds of a launch, where it was timed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ms: Option<f64>,
}

/// The fate of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Right.
    Passed,
    /// Wrong.
    Failed,
    /// Could not be tried here.
    Skipped,
}

/// Exit code of a worker whose GPU context is lost.
pub const EXIT_LOST: i32 = 3;

struct Worker {
    device: Device,
    family: Family,
    /// One case at a time is on the GPU. Whoever holds it must not start work in rayon: that could take up another case,
    /// which would wait for the same lock.
    gpu: Mutex<Timed>,
    /// Inputs and oracles of problems that several cases have, by [`Case::problem_name`].
    shared: HashMap<String, Box<dyn Any + Send + Sync>>,
}

/// Tensors of problems that several kernels are timed on.
type Timed = HashMap<String, Vec<PassCall<bf16>>>;

/// Runs the cases whose names are not among the lines of standard input.
///
/// # Errors
/// When there is no GPU. What happens to a case is an event.
pub fn run(
    cases: impl FnOnce(Arch, Family) -> anyhow::Result<Vec<Case>>,
    family: Option<Family>,
) -> anyhow::Result<()> {
    let finished: HashSet<String> = std::io::stdin().lock().lines().collect::<Result<_, _>>()?;
    let mut worker = Worker::open(family)?;
    let cases = cases(worker.device.kernels.arch(), worker.family)?;
    let cases: Vec<Case> = cases.into_iter().filter(|case| !finished.contains(&case.name())).collect();
    tell(&Event::Cases(cases.len()));
    worker.compile(&cases);
    worker.prepare(&cases)?;
    cases.par_iter().with_max_len(1).for_each(|case| worker.case(case));
    Ok(())
}

/// Runs random problems until the time is up.
///
/// # Errors
/// When there is no GPU.
pub fn soak(seed: u64, time: Duration, family: Option<Family>, pass: Pass) -> anyhow::Result<()> {
    let case_of = if pass.is_backward() { soak::gradients } else { soak::case };
    let finished = std::io::stdin().lock().lines().collect::<Result<HashSet<String>, _>>()?.len();
    let worker = Worker::open(family)?;
    let start = Instant::now();
    let mut turn = finished as u64;
    while start.elapsed() < time {
        let count = 4 * rayon::current_num_threads();
        tell(&Event::Cases(count));
        (0..count).into_par_iter().with_max_len(1).for_each(|i| {
            if start.elapsed() < time {
                worker.case(&case_of(seed, turn + i as u64, worker.family));
            }
        });
        turn += count as u64;
    }
    Ok(())
}

fn tell(event: &Event) {
    let Ok(mut line) = serde_json::to_string(event) else { return };
    line.push('\n');
    let mut stdout = std::io::stdout().lock();
    // Without a supervisor there is nobody to work for.
    if stdout.write_all(line.as_bytes()).and_then(|()| stdout.flush()).is_err() {
        std::process::exit(EXIT_LOST);
    }
}

/// Why a case was not tried.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Skip(String);

struct Found {
    kernel: String,
    passed: bool,
    ratio: f64,
    detail: String,
    ms: Option<f64>,
}

fn is_refused(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(Error::Refused { .. }))
        || matches!(error.downcast_ref(), Some(fa_attn::Error::Kernels(Error::Refused { .. })))
}

/// Inputs and oracle of a case.
fn made<T: Half>(case: &Case) -> anyhow::Result<(Inputs<T>, Oracle<T>)> {
    let inputs = case.inputs::<T>();
    let oracle = Oracle::new(&inputs, case.seed())?;
    Ok((inputs, oracle))
}

impl Worker {
    fn open(family: Option<Family>) -> anyhow::Result<Worker> {
        let device = Device::open()?;
        let family = family.unwrap_or(Family::native(device.kernels.arch()));
        if !family.runs_on(device.kernels.arch()) {
            anyhow::bail!("{} has no wgmma: use --arch sm80, whose kernels run there", device.kernels.arch());
        }
        Ok(Worker { device, family, gpu: Mutex::default(), shared: HashMap::new() })
    }

    /// Compiles the cases' kernels, all cores at once. Failures show up when the cases are run.
    fn compile(&self, cases: &[Case]) {
        let mut seen = HashSet::new();
        let new: Vec<_> = cases
            .iter()
            .filter_map(|case| self.first_choice(case))
            .filter(|s| seen.insert(s.to_ron()))
            .collect();
        new.par_iter().with_max_len(1).for_each(|spec| drop(self.device.kernels.load(spec)));
    }

    /// Computes inputs and oracles that several cases share.
    fn prepare(&mut self, cases: &[Case]) -> anyhow::Result<()> {
        let mut users: HashMap<String, (usize, &Case)> = HashMap::new();
        for case in cases.iter().filter(|case| !matches!(case.action, Action::Measure | Action::Repeat(_))) {
            users.entry(case.problem_name()).or_insert((0, case)).0 += 1;
        }
        let several: Vec<&Case> = users.values().filter(|(n, _)| *n > 1).map(|&(_, case)| case).collect();
        let made = several.par_iter().with_max_len(1).map(|case| {
            let made = with_half!(case.problem.types.qkv, T => {
                match case.pass {
                    Pass::Forward => Box::new(made::<T>(case)?) as Box<dyn Any + Send + Sync>,
                    Pass::Backward { .. } => Box::new(backward::made::<T>(case)?),
                }
            }, else Box::new(()));
            Ok((case.problem_name(), made))
        });
        self.shared = made.collect::<anyhow::Result<_>>()?;
        Ok(())
    }

    fn first_choice(&self, case: &Case) -> Option<fa_core::KernelSpec> {
        match &case.kernel {
            Some(NamedSpec { spec, .. }) => Some(spec.clone()),
            None => {
                let family = Some(self.family);
                let options = PlanOptions { family, pass: case.pass, ..PlanOptions::default() };
                let plans = plan(&case.problem, self.device.kernels.arch(), &options).ok()?;
                plans.into_iter().next().map(|plan| plan.spec)
            }
        }
    }

    fn forward(&self, case: &Case) -> Result<Forward, fa_attn::Error> {
        // The forward before a backward is the library's own.
        let own = case.kernel.as_ref().filter(|_| !case.pass.is_backward()).map(|named| &named.spec);
        if own.is_some() || case.pass.is_backward() || self.is_native() {
            return self.device.forward(&case.problem, own);
        }
        self.device.gpu().forward(&case.problem, Some(self.family))
    }

    /// Whether the library's own choice is of the family that is validated.
    fn is_native(&self) -> bool {
        self.family == Family::native(self.device.kernels.arch())
    }

    fn case(&self, case: &Case) {
        let name = case.name();
        let found = with_half!(case.problem.types.qkv, T => self.examine::<T>(case), else Err(anyhow::Error::from(
            Skip(format!("no GPU kernel computes in {}", case.problem.types.qkv)))));
        let fate = |status, detail| CaseResult {
            name: name.clone(),
            kernel: String::new(),
            status,
            ratio: 0.0,
            detail,
            ms: None,
        };
        tell(&Event::Done(match found {
            Ok(Found { kernel, passed, ratio, detail, ms }) => {
                let status = if passed { Status::Passed } else { Status::Failed };
                CaseResult { kernel, ratio, ms, ..fate(status, detail) }
            }
            Err(error) if error.is::<Skip>() => fate(Status::Skipped, error.to_string()),
            // A switch that the compiler does not honour here ships nowhere and is none of the library's choices.
            Err(error) if case.group == "knobs" && is_refused(&error) => {
                fate(Status::Skipped, crate::term::failure::message(&error))
            }
            Err(error) => fate(Status::Failed, crate::term::failure::message(&error)),
        }));
        // After an illegal access nothing works in this process any more.
        if self.device.synchronize().is_err() {
            std::process::exit(EXIT_LOST);
        }
    }

    fn examine<T: Half>(&self, case: &Case) -> anyhow::Result<Found> {
        let forward = self.forward(case)?;
        self.check_memory(case)?;
        if let Pass::Backward { deterministic } = case.pass {
            return self.examine_gradients(case, forward, deterministic);
        }
        if case.action == Action::Measure {
            return self.measure(case, &Bound::Forward(forward), None);
        }
        let own;
        let (inputs, oracle) = match self.shared.get(&case.problem_name()).and_then(|any| any.downcast_ref())
        {
            Some(shared) => shared,
            None => {
                own = made::<T>(case)?;
                &own
            }
        };
        let runs = {
            let _gpu = self.gpu.lock().unwrap_or_else(PoisonError::into_inner);
            tell(&Event::Begin(case.name()));
            self.act(case, &forward, inputs)?
        };
        let mut found = Found {
            kernel: forward.kernel().spec.to_string(),
            passed: true,
            ratio: 0.0,
            detail: String::new(),
            ms: None,
        };
        for outputs in &runs.outputs {
            let judged = oracle.judge(&case.problem, outputs)?;
            found.passed &= judged.passed;
            found.ratio = found.ratio.max(judged.ratio);
            if found.detail.is_empty() || !judged.passed {
                found.detail = judged.detail;
            }
        }
        if let Some(fault) = runs.fault {
            found.passed = false;
            found.detail = fault;
        }
        Ok(found)
    }

    /// Times the kernel on tensors that stay on the GPU for the next one.
    fn measure(&self, case: &Case, pass: &Bound, forward: Option<&Forward>) -> anyhow::Result<Found> {
        // A thousand and more are measured one after the other: launches of milliseconds need no more samples than this.
        const TIMING: Timing = Timing { warm_up_ms: 3.0, samples: 5, sample_ms: 0.5 };
        let key = case.problem_name();
        let inputs = {
            let timed = self.gpu.lock().unwrap_or_else(PoisonError::into_inner);
            (!timed.contains_key(&key)).then_some(())
        }
        .map(|()| Inputs::<bf16>::random(&case.problem, TensorLayout::Bshd, case.seed()));
        let mut timed = self.gpu.lock().unwrap_or_else(PoisonError::into_inner);
        tell(&Event::Begin(case.name()));
        if let Some(inputs) = inputs
            && !timed.contains_key(&key)
        {
            let calls = match (pass, forward) {
                (Bound::Backward(backward), Some(forward)) => {
                    let dout = random_dout(&inputs, case.seed());
                    self.device.calls(forward, Some((backward, &dout)), &inputs)?
                }
                (Bound::Forward(forward), _) => self.device.calls(forward, None, &inputs)?,
                (Bound::Backward(_), None) => anyhow::bail!("a backward needs the forward before it"),
            };
            timed.insert(key.clone(), calls);
        }
        let calls = timed.get_mut(&key).expect("inserted above, by this thread or another");
        // Kernels differ in their workspaces.
        calls.iter_mut().try_for_each(|call| call.ready(pass, &self.device.stream))?;
        let times = self.device.time(pass, calls, TIMING)?;
        let ms = median(&times);
        let kernel = pass.spec().to_string();
        let rate = case.problem.flops(case.pass) / ms / 1e9;
        let detail = format!("{ms:.4} ms, {rate:.0} TFLOP/s");
        Ok(Found { kernel, passed: true, ratio: 0.0, detail, ms: Some(ms) })
    }

    fn check_memory(&self, case: &Case) -> anyhow::Result<()> {
        let (need, have) = (case.device_bytes(), self.device.context().total_mem()? as u64);
        if need > have / 10 * 8 {
            return Err(Skip(format!("needs {need} B of device memory, the GPU has {have} B")).into());
        }
        if case.placing == Placing::SharedRows && case.problem.lengths.max_k() == 0 {
            return Err(Skip("there are no keys to share".to_owned()).into());
        }
        Ok(())
    }

    fn act<T: Half>(&self, case: &Case, forward: &Forward, inputs: &Inputs<T>) -> anyhow::Result<Runs<T>> {
        let stream = &self.device.stream;
        match case.action {
            Action::Once => {
                let mut call = self.device.call(forward, inputs)?;
                call.run(forward, stream)?;
                Ok(Runs::of(call.outputs(stream)?))
            }
            Action::Repeat(times) => {
                let mut call = self.device.call(forward, inputs)?;
                call.run(forward, stream)?;
                let first = call.outputs(stream)?;
                for turn in 1..times {
                    call.poison(stream)?;
                    call.run(forward, stream)?;
                    if !call.outputs(stream)?.same_bits(&first) {
                        let fault = format!("run {} of {times} differs from the first", turn + 1);
                        return Ok(Runs { outputs: vec![first], fault: Some(fault) });
                    }
                }
                Ok(Runs::of(first))
            }
            Action::OwnStream => {
                let stream = self.device.context().new_stream()?;
                let mut call = Call::new(&stream, forward, inputs)?;
                call.run(forward, &stream)?;
                Ok(Runs::of(call.outputs(&stream)?))
            }
            Action::Graph => self.graph(forward, inputs),
            Action::Threads => self.threads(forward, inputs),
            Action::Measure => unreachable!("examine() sends it to measure()"),
        }
    }

    fn graph<T: Half>(&self, forward: &Forward, inputs: &Inputs<T>) -> anyhow::Result<Runs<T>> {
        let stream = self.device.context().new_stream()?;
        let mut call = Call::new(&stream, forward, inputs)?;
        let graph = call.capture(forward, &stream)?;
        let mut outputs = Vec::new();
        let mut fault = None;
        for turn in 0..5 {
            call.poison(&stream)?;
            graph.launch()?;
            let replayed = call.outputs(&stream)?;
            match outputs.first() {
                None => outputs.push(replayed),
                Some(first) if !replayed.same_bits(first) => {
                    fault.get_or_insert(format!("replay {} differs from the first", turn + 1));
                }
                Some(_) => {}
            }
        }
        Ok(Runs { outputs, fault })
    }

    fn threads<T: Half>(&self, forward: &Forward, inputs: &Inputs<T>) -> anyhow::Result<Runs<T>> {
        const RUNS: usize = 50;
        let work = || -> anyhow::Result<_> {
            let stream = self.device.context().new_stream()?;
            let mut call = Call::new(&stream, forward, inputs)?;
            for _ in 0..RUNS {
                call.poison(&stream)?;
                call.run(forward, &stream)?;
            }
            Ok(call.outputs(&stream)?)
        };
        let outputs = std::thread::scope(|scope| {
            let threads = [scope.spawn(work), scope.spawn(work)];
            threads.map(|thread| thread.join().expect("a thread that launches does not panic"))
        });
        let outputs = outputs.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
        let fault = (!outputs[0].same_bits(&outputs[1])).then(|| "the threads' results differ".to_owned());
        Ok(Runs { outputs, fault })
    }
}

/// Outputs to be judged, and what else went wrong.
struct Runs<T> {
    outputs: Vec<crate::cuda::Outputs<T>>,
    fault: Option<String>,
}

impl<T> Runs<T> {
    fn of(outputs: crate::cuda::Outputs<T>) -> Runs<T> {
        Runs { outputs: vec![outputs], fault: None }
    }
}
