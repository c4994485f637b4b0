//! The thread that measures, and what it was given.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use fa_core::{Family, KernelSpec, Pass, Problem, Reads, ScoreKind};

use crate::error::Error;
use crate::tune::TuneKey;

use super::outcome::TuningOutcome;

/// Outcomes that are kept for [`Tuner::finish`], the newest.
const KEPT: usize = 1024;

/// A problem to find the fastest kernel for.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub problem: Problem,
    pub pass: Pass,
    pub family: Family,
    /// The kernel that the caller got.
    pub bound: KernelSpec,
}

impl Job {
    /// What has the same key has the same winner.
    fn key(&self) -> Key {
        let problem = &self.problem;
        (TuneKey::of(problem), self.family, self.pass, problem.score.kind(), Reads::of(problem))
    }
}

/// What a job depends on.
type Key = (TuneKey, Family, Pass, ScoreKind, Reads);

/// A thread that is given problems, each kind once. Dropping it ends the search at hand, and waits for the
/// candidate that is being compiled or timed.
#[derive(Debug)]
pub(crate) struct Tuner {
    shared: Arc<Shared>,
    jobs: Option<Mutex<Sender<Job>>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    idle: Condvar,
    stop: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    begun: HashSet<Key>,
    pending: usize,
    outcomes: Vec<TuningOutcome>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // The fields are whole whatever a panicking thread was doing.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tuner {
    /// A thread that calls `work` for each job; the flag is set when it is to end.
    ///
    /// # Errors
    /// [`Error::Threads`].
    pub(crate) fn start(
        mut work: impl FnMut(&Job, &AtomicBool) -> TuningOutcome + Send + 'static,
    ) -> Result<Tuner, Error> {
        let shared = Arc::new(Shared::default());
        let (jobs, received) = mpsc::channel::<Job>();
        let own = shared.clone();
        let run = move || {
            for job in received {
                if own.stop.load(Ordering::Relaxed) {
                    break;
                }
                let _done = Done(&own);
                let outcome = work(&job, &own.stop);
                let mut state = own.state();
                if state.outcomes.len() == KEPT {
                    state.outcomes.remove(0);
                }
                state.outcomes.push(outcome);
            }
        };
        let thread = thread::Builder::new()
            .name("fa-tune".to_owned())
            .spawn(run)
            .map_err(|error| Error::Threads { threads: 1, reason: error.to_string() })?;
        Ok(Tuner { shared, jobs: Some(Mutex::new(jobs)), thread: Some(thread) })
    }

    /// Gives it a job, unless it had one with the same key and `skip` does not hold: that is asked only then,
    /// and a job that is skipped can be offered again. Whether it was taken.
    pub(crate) fn offer(&self, job: Job, skip: impl FnOnce() -> bool) -> bool {
        let key = job.key();
        let mut state = self.shared.state();
        if state.begun.contains(&key) || skip() {
            return false;
        }
        let Some(jobs) = &self.jobs else { return false };
        if jobs.lock().unwrap_or_else(PoisonError::into_inner).send(job).is_err() {
            return false;
        }
        state.begun.insert(key);
        state.pending += 1;
        true
    }

    /// Waits until every job is done; what came of those since the last call.
    pub(crate) fn finish(&self) -> Vec<TuningOutcome> {
        let idle = self.shared.idle.wait_while(self.shared.state(), |state| state.pending > 0);
        std::mem::take(&mut idle.unwrap_or_else(PoisonError::into_inner).outcomes)
    }
}

/// Counts a job as done, also where its work panics.
struct Done<'a>(&'a Shared);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        // After a panic the thread is gone: what is left is not done either.
        state.pending = if thread::panicking() { 0 } else { state.pending - 1 };
        drop(state);
        self.0.idle.notify_all();
    }
}

impl Drop for Tuner {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A panic was traced by the panic hook, and nothing of the caller's depends on the thread.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use fa_core::{Arch, Dtype, Lengths, Mask};
    use fa_planner::plan::{PlanOptions, plan};

    use super::*;

    const PROBLEM: Problem = Problem::square(2, 4096, 16, 128, Mask::CAUSAL, Dtype::Bf16);

    fn job(problem: Problem) -> Job {
        let bound = plan(&problem, Arch::Sm90, &PlanOptions::default()).expect("plans").swap_remove(0).spec;
        Job { problem, pass: Pass::Forward, family: Family::Sm90, bound }
    }

    fn outcome(job: &Job) -> TuningOutcome {
        let Job { problem, pass, family, ref bound } = *job;
        TuningOutcome { problem, pass, family, tried: Vec::new(), winner: Some(bound.clone()), error: None }
    }

    #[test]
    fn threads_at_once_tune_once() {
        let count = Arc::new(AtomicUsize::new(0));
        let counted = count.clone();
        let tuner = Tuner::start(move |job, _| {
            counted.fetch_add(1, Ordering::Relaxed);
            outcome(job)
        })
        .expect("a thread");
        let taken = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    // Of the same key, though not the same problem.
                    for seqlen in [3000, 4096, 2049] {
                        let lengths = Lengths::uniform(2, seqlen, seqlen);
                        let problem = PROBLEM.with_lengths(lengths);
                        let is_taken = tuner.offer(job(problem), || false);
                        taken.fetch_add(usize::from(is_taken), Ordering::Relaxed);
                    }
                });
            }
        });
        let outcomes = tuner.finish();
        assert_eq!((outcomes.len(), taken.into_inner(), count.load(Ordering::Relaxed)), (1, 1, 1));
        assert!(tuner.offer(job(PROBLEM.with_mask(Mask::FULL)), || false), "another key");
        assert_eq!(tuner.finish().len(), 1);
        assert!(tuner.finish().is_empty(), "outcomes are given once");
    }

    #[test]
    fn what_is_skipped_is_taken_later() {
        let tuner = Tuner::start(|job, _| outcome(job)).expect("a thread");
        assert!(!tuner.offer(job(PROBLEM), || true));
        assert!(tuner.offer(job(PROBLEM), || false));
        assert!(!tuner.offer(job(PROBLEM), || unreachable!("it is known")));
    }

    #[test]
    fn dropping_it_tells_the_search_to_stop() {
        let (begun, wait) = mpsc::channel();
        let tuner = Tuner::start(move |job, stop| {
            let _ = begun.send(());
            while !stop.load(Ordering::Relaxed) {
                thread::yield_now();
            }
            outcome(job)
        })
        .expect("a thread");
        assert!(tuner.offer(job(PROBLEM), || false));
        wait.recv().expect("it began");
        drop(tuner);
    }

    #[test]
    fn work_that_panics_leaves_nobody_waiting() {
        let tuner = Tuner::start(|_, _| panic!("as this test wants")).expect("a thread");
        tuner.offer(job(PROBLEM), || false);
        assert!(tuner.finish().is_empty());
    }
}
