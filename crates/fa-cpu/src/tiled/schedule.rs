//! Work for all threads: items in order, each worker takes the next one when it is done.

use std::iter;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::threads;

/// How long a finished thread spins for the others before it sleeps: waking takes tens of microseconds,
/// longer than the last item of a short problem.
const PATIENCE: Duration = Duration::from_micros(50);

/// Runs `work` on the items `0..count`, in order of their start, on at most `threads` threads: this one,
/// which starts at once, and others of the current rayon pool as they wake. Each worker allocates its scratch
/// memory once.
pub(super) fn run<S>(
    count: usize,
    threads: Option<usize>,
    scratch: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize) + Sync,
) {
    let next = AtomicUsize::new(0);
    let take = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&item| item < count);
    let worker = || {
        // A thread that wakes when all is done allocates nothing.
        let Some(first) = take() else { return };
        let mut scratch = scratch();
        for item in iter::once(first).chain(iter::from_fn(take)) {
            work(&mut scratch, item);
        }
    };
    on_threads(workers(threads).min(count), &worker);
}

/// Runs `worker` on so many threads. It is compiled once, not for each work.
fn on_threads(workers: usize, worker: &(dyn Fn() + Sync)) {
    match workers {
        0 => {}
        1 => worker(),
        _ => {
            // Threads that have started and not finished.
            let at_work = AtomicUsize::new(0);
            rayon::in_place_scope(|scope| {
                for _ in 1..workers {
                    scope.spawn(|_| {
                        at_work.fetch_add(1, Ordering::Relaxed);
                        worker();
                        at_work.fetch_sub(1, Ordering::Relaxed);
                    });
                }
                worker();
                let begin = Instant::now();
                while at_work.load(Ordering::Relaxed) > 0 && begin.elapsed() < PATIENCE {
                    std::hint::spin_loop();
                }
            });
        }
    }
}

/// Threads that a call may use: more threads than cores would only take turns, each with scratch memory of
/// its own.
pub(super) fn workers(limit: Option<usize>) -> usize {
    let pool = rayon::current_num_threads().min(cores());
    limit.map_or(pool, |limit| limit.clamp(1, pool))
}

#[cfg(not(test))]
fn cores() -> usize {
    threads::cores()
}

#[cfg(test)]
fn cores() -> usize {
    tests::PRETENDED.get().unwrap_or_else(threads::cores)
}

#[cfg(test)]
pub(super) mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        /// Cores that this thread assumes.
        pub(super) static PRETENDED: Cell<Option<usize>> = const { Cell::new(None) };
    }

    /// Runs `work` on this thread as if the machine had this many cores.
    pub(in crate::tiled) fn with_cores(cores: usize, work: impl FnOnce()) {
        let before = PRETENDED.replace(Some(cores));
        work();
        PRETENDED.set(before);
    }

    #[test]
    fn threads_beyond_the_cores_get_no_work() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(6).build().unwrap();
        pool.install(|| {
            with_cores(4, || {
                assert_eq!(
                    [workers(None), workers(Some(3)), workers(Some(5)), workers(Some(0))],
                    [4, 3, 4, 1]
                );
                let made = AtomicUsize::new(0);
                run(100, None, || made.fetch_add(1, Ordering::Relaxed), |_, _| {});
                assert!(made.into_inner() <= 4);
            });
            with_cores(64, || assert_eq!(workers(None), 6));
        });
    }
}
