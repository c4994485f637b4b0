//! The benchmark runner: kernels timed against one another on one problem, in rounds, each in another order,
//! on the same inputs.
//!
//! A GPU's clock follows its temperature and power, and the first kernel after a pause runs slower than the
//! next. So every turn begins with warm-up launches, every launch that counts is between two events, and
//! medians over turns spread over the run are compared. Beside peers, and where problems are compared, every
//! turn begins after an equal pause.
//!
//! Calls of a few microseconds are captured as one CUDA graph, ours and those of peers alike, to time the GPU
//! and not the host.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use fa_attn::device::{BindOptions, Bound, Gpu, Half};
use fa_core::{Pass, Problem, TensorLayout};
use fa_kernels::Error;
use fa_kernels::cudarc::driver::CudaStream;
use serde::{Deserialize, Serialize};

use crate::device::{Calls, Captured, Plans, capture_calls, median, time_each};
use crate::error::Result;
use crate::judge::sample_head::SampleHead;
use crate::judge::sample_rows::{Judged, SampleRows};
use crate::marks::{Unit, Wanted};
use crate::peers::Peers;
use crate::random::Random;
use crate::tensors::{Inputs, random_dout};

/// Warm-up launches at the start of a turn.
const LEAD: usize = 3;

/// Milliseconds of launches before a kernel's first turn.
const WARM_UP_MS: f64 = 10.0;

/// How long the GPU idles before each turn of a run beside peers. A card at its power limit runs faster for
/// tens of milliseconds after a pause, and a peer's turn begins with one: its process queues its calls first
/// (NB-131).
const PAUSE: Duration = Duration::from_millis(100);

/// How often each candidate runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Turns {
    /// Turns of each candidate.
    pub rounds: usize,
    /// Launches in a turn that count.
    pub reps: usize,
}

impl Turns {
    /// At least `total` launches of each candidate, in turns of six.
    pub fn of(total: usize) -> Turns {
        let rounds = total.div_ceil(6).max(1);
        Turns { rounds, reps: total.div_ceil(rounds).max(1) }
    }
}

/// A problem's tensors on the GPU, shared by all kernels that are timed on it, and the expected results.
pub struct Runner<'d, T> {
    gpu: &'d Gpu,
    wanted: Wanted,
    pass: Pass,
    calls: Calls<T>,
    rows: SampleRows,
    /// The expected gradients of a head, where gradients are timed.
    head: Option<SampleHead>,
}

/// Times of one candidate.
#[derive(Clone, Debug, Default)]
pub struct Times {
    /// Milliseconds of each launch that counted, ascending.
    pub ms: Vec<f64>,
}

impl Times {
    /// The median; infinite where nothing was measured.
    pub fn median(&self) -> f64 {
        if self.ms.is_empty() { f64::INFINITY } else { median(&self.ms) }
    }

    /// TFLOP/s of `pass` over the visible pairs of `wanted`, at the median.
    pub fn tflops(&self, wanted: &Wanted, pass: Pass) -> f64 {
        wanted.flops(pass) / (self.median() * 1e9)
    }
}

/// The results of a run.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Of our kernels, in the order given.
    pub ours: Vec<Times>,
    /// Of the peers that ran.
    pub peers: BTreeMap<String, Times>,
    /// The errors of the others.
    pub peer_errors: BTreeMap<String, String>,
}

impl Outcome {
    /// Of `ours` kernels of ours, nothing measured yet.
    fn of(ours: usize) -> Outcome {
        Outcome { ours: vec![Times::default(); ours], ..Outcome::default() }
    }

    /// Puts the times in order.
    fn sort(&mut self) {
        for times in self.ours.iter_mut().chain(self.peers.values_mut()) {
            times.ms.sort_by(f64::total_cmp);
        }
    }
}

/// What is timed: single launches, or replays of a graph.
enum Candidate<'b> {
    Launches(&'b Bound),
    Replays(Graph),
}

/// Calls captured on a stream, which they are replayed on.
struct Graph {
    captured: Captured,
    stream: Arc<CudaStream>,
}

impl<'d, T: Half> Runner<'d, T> {
    /// Random inputs for `wanted` and some exact rows. `any` is one of the kernels; each gets its workspace
    /// when it is checked.
    ///
    /// # Errors
    /// Most often for lack of device memory.
    pub fn of(gpu: &'d Gpu, wanted: &Wanted, any: &Bound) -> Result<Runner<'d, T>> {
        let problem = &wanted.problem;
        let inputs = Inputs::<T>::of(problem, wanted.sequences(), TensorLayout::Bshd, 1);
        let (rows, head, calls) = match any {
            Bound::Forward(forward) => {
                (SampleRows::new(&inputs, 2)?, None, Calls::new(gpu, forward, None, &inputs)?)
            }
            Bound::Backward(backward) => {
                let dout = random_dout(&inputs, 1);
                let forward = gpu.bind(problem, Pass::Forward, &BindOptions::default())?.forward()?;
                let calls = Calls::new(gpu, &forward, Some((backward, &dout)), &inputs)?;
                (SampleRows::none(&inputs), Some(SampleHead::new(&inputs, &dout)?), calls)
            }
        };
        let pass = any.spec().kernel.pass();
        Ok(Runner { gpu, wanted: wanted.clone(), pass, calls, rows, head })
    }

    /// The same for a problem without a name.
    ///
    /// # Errors
    /// As [`Runner::of`].
    pub fn new(gpu: &'d Gpu, problem: &Problem, any: &Bound) -> Result<Runner<'d, T>> {
        Runner::of(gpu, &Wanted::new(*problem, ""), any)
    }

    /// Runs `pass` once on poisoned outputs and judges them. A pass must be checked before it is timed: it
    /// gets its workspace here.
    ///
    /// # Errors
    /// Errors of the GPU.
    pub fn check(&mut self, pass: &Bound) -> Result<Judged> {
        let stream = &self.gpu.stream;
        self.calls.ready(pass, stream)?;
        self.calls.run(pass, stream)?;
        match (&self.head, self.calls.gradients(stream)?) {
            (Some(head), Some(gradients)) => Ok(head.judge(&gradients)?),
            _ => Ok(self.rows.judge(&self.calls.output(stream)?)?),
        }
    }

    /// Runs `pass` until clocks have settled.
    ///
    /// # Errors
    /// Errors of the GPU.
    pub fn warm_up(&mut self, pass: &Bound) -> Result<(), Error> {
        let mut spent = 0.0;
        while spent < WARM_UP_MS {
            // Above 0 even where events are too coarse.
            spent += self.sample(pass, LEAD)?.iter().sum::<f64>().max(0.1);
        }
        Ok(())
    }

    /// Milliseconds of `reps` launches of `pass`, each between two events.
    ///
    /// # Errors
    /// Errors of the GPU.
    pub fn sample(&mut self, pass: &Bound, reps: usize) -> Result<Vec<f64>, Error> {
        let stream = &self.gpu.stream;
        time_each(stream, LEAD, reps, || self.calls.run(pass, stream))
    }

    /// Captures the calls of a graph on all copies of the tensors in turn, on a separate stream.
    fn graph(&mut self, pass: &Bound) -> Result<Graph> {
        let stream = self.gpu.context().new_stream()?;
        self.gpu.synchronize()?;
        // The layers of a step have one plan; other rows are of calls by themselves.
        let plans = match self.wanted.unit {
            Unit::StepMs => Plans::Once,
            Unit::PlanUs => Plans::Alone,
            Unit::Flops | Unit::KvBytes => Plans::EachCall,
        };
        let captured = capture_calls(&mut self.calls, pass, &stream, self.wanted.graph, plans)?;
        Ok(Graph { captured, stream })
    }

    /// `pass` as it is timed, after a warm-up.
    fn candidate<'b>(&mut self, pass: &'b Bound) -> Result<Candidate<'b>> {
        self.warm_up(pass)?;
        Ok(match self.wanted.graph {
            0 => Candidate::Launches(pass),
            _ => Candidate::Replays(self.graph(pass)?),
        })
    }

    /// Milliseconds of a call of `candidate`, `reps` times.
    fn time(&mut self, candidate: &Candidate<'_>, reps: usize) -> Result<Vec<f64>, Error> {
        match candidate {
            Candidate::Launches(pass) => self.sample(pass, reps),
            Candidate::Replays(Graph { captured: Captured { graph, .. }, stream }) => {
                let calls = self.wanted.graph.max(1) as f64;
                let launched = |source| Error::Driver { doing: "launching a graph", source };
                let times = time_each(stream, LEAD, reps, || graph.launch().map_err(launched))?;
                Ok(times.into_iter().map(|ms| ms / calls).collect())
            }
        }
    }

    /// Times `ours` and the peers in rounds, after a warm-up of all. Kernels must have been checked.
    ///
    /// # Errors
    /// Errors of our kernels on the GPU; peers that fail are in the outcome.
    pub fn run(
        &mut self,
        ours: &[Bound],
        mut peers: Option<(&mut Peers, &[String])>,
        turns: Turns,
    ) -> Result<Outcome> {
        let mut outcome = Outcome::of(ours.len());
        let mut names = Vec::new();
        if let Some((peers, wanted)) = &mut peers {
            let opened = peers.open(&self.wanted, wanted, self.pass)?;
            outcome.peer_errors = opened.errors;
            names = opened.peers;
        }
        let candidates = ours.iter().map(|pass| self.candidate(pass)).collect::<Result<Vec<_>>>()?;
        let (seed, pause) = (self.wanted.problem.lengths.max_k() as u64, peers.is_some());
        take_turns(turns, ours.len() + names.len(), seed, pause, |candidate| {
            if let Some(own) = candidates.get(candidate) {
                let times = self.time(own, turns.reps)?;
                tracing::debug!(kernel = candidate, ?times, "turn, ms");
                outcome.ours[candidate].ms.extend(times);
            } else if let Some((peers, _)) = &mut peers {
                let name = &names[candidate - ours.len()];
                let times = peers.round(name, turns.reps)?;
                tracing::debug!(%name, ?times, "turn, ms");
                outcome.peers.entry(name.clone()).or_default().ms.extend(times);
            }
            Ok(())
        })?;
        if let Some((peers, _)) = &mut peers {
            // The times of a peer that failed later are dropped.
            outcome.peers.retain(|name, _| !peers.failed().contains_key(name));
            outcome.peer_errors.extend(peers.failed().clone());
            peers.close()?;
        }
        outcome.sort();
        outcome.peers.retain(|name, times| {
            if times.ms.is_empty() {
                outcome.peer_errors.insert(name.clone(), "it failed while it was timed".to_owned());
            }
            !times.ms.is_empty()
        });
        Ok(outcome)
    }
}

/// Times the kernels of several problems, those of `ours[i]` on that of `runners[i]`, in common rounds.
/// Kernels must have been checked.
///
/// # Errors
/// Errors of our kernels on the GPU.
pub fn run_together<T: Half>(
    runners: &mut [Runner<'_, T>],
    ours: &[Vec<Bound>],
    turns: Turns,
) -> Result<Vec<Outcome>> {
    let mut candidates = Vec::new();
    for (problem, (runner, ours)) in runners.iter_mut().zip(ours).enumerate() {
        for (kernel, pass) in ours.iter().enumerate() {
            candidates.push((problem, kernel, runner.candidate(pass)?));
        }
    }
    let mut outcomes: Vec<Outcome> = ours.iter().map(|ours| Outcome::of(ours.len())).collect();
    take_turns(turns, candidates.len(), candidates.len() as u64, true, |turn| {
        let (problem, kernel, candidate) = &candidates[turn];
        let times = runners[*problem].time(candidate, turns.reps)?;
        tracing::debug!(problem, kernel, ?times, "turn, ms");
        outcomes[*problem].ours[*kernel].ms.extend(times);
        Ok(())
    })?;
    outcomes.iter_mut().for_each(Outcome::sort);
    Ok(outcomes)
}

/// Calls `turn` with each of `candidates`, in rounds, each in another order; after a pause, if they `pause`.
fn take_turns(
    turns: Turns,
    candidates: usize,
    seed: u64,
    pause: bool,
    mut turn: impl FnMut(usize) -> Result<()>,
) -> Result<()> {
    let mut random = Random::new(seed);
    for _ in 0..turns.rounds {
        for candidate in random.order(candidates) {
            if pause {
                sleep(PAUSE);
            }
            turn(candidate)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_give_at_least_the_launches_asked_for() {
        for (total, rounds, reps) in [(1, 1, 1), (6, 1, 6), (15, 3, 5), (24, 4, 6), (25, 5, 5), (0, 1, 1)] {
            assert_eq!(Turns::of(total), Turns { rounds, reps });
        }
    }

    #[test]
    fn an_order_has_every_number_once() {
        let mut random = Random::new(3);
        let mut order = random.order(20);
        assert_ne!(order, (0..20).collect::<Vec<_>>());
        order.sort_unstable();
        assert_eq!(order, (0..20).collect::<Vec<_>>());
    }

    #[test]
    fn rates_are_of_the_median() {
        let problem = Problem::square(1, 1000, 1, 50, fa_core::Mask::FULL, fa_core::Dtype::Bf16);
        let problem = Wanted::new(problem, "");
        let times = Times { ms: vec![1.0, 2.0, 30.0] };
        assert!((times.tflops(&problem, fa_core::Pass::Forward) - 0.1).abs() < 1e-12);
        assert!((times.tflops(&problem, fa_core::Pass::BACKWARD) - 0.25).abs() < 1e-12);
        assert_eq!(Times::default().tflops(&problem, fa_core::Pass::Forward), 0.0);
    }
}
