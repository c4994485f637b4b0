//! Work for all threads: items in order, each worker takes the next one when it is done.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::threads;

/// Runs `work` on the items `0..count`, in order of their start, on at most `threads` threads of the current
/// rayon pool. Each worker makes its scratch once.
pub(super) fn run<S>(
    count: usize,
    threads: Option<usize>,
    scratch: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize) + Sync,
) {
    let workers = workers(threads).min(count);
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut scratch = scratch();
        loop {
            let item = next.fetch_add(1, Ordering::Relaxed);
            if item >= count {
                break;
            }
            work(&mut scratch, item);
        }
    };
    match workers {
        0 => {}
        1 => worker(),
        _ => rayon::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(|_| worker());
            }
        }),
    }
}

/// Threads that a call may use.
pub(super) fn workers(limit: Option<usize>) -> usize {
    let pool = rayon::current_num_threads().min(threads::most());
    limit.map_or(pool, |limit| limit.clamp(1, pool))
}
