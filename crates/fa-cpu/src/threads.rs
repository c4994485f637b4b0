//! How many threads are useful, and how many can be had. An idle thread of a rayon pool looks for work at
//! every other thread, so that starting a pool takes time quadratic in its size: half a minute with 4,000
//! threads. Where the system starts no thread (a limit on processes), work is done by the calling thread.

use std::cell::Cell;
use std::io;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, OnceLock, mpsc};
use std::thread::{self, available_parallelism};

use rayon::ThreadPoolBuilder;

/// Names the size of rayon's global pool.
const VARIABLE: &str = "RAYON_NUM_THREADS";

/// The most threads that a pool should have: four for each core that this process may use, and 64 in any
/// case. The products of attention fill a core with one thread; more only take turns on it.
pub fn most() -> usize {
    (4 * cores()).max(64)
}

/// Cores that this process may use, as they were when it was first asked: the answer is read from files,
/// which takes longer than a short problem.
pub fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| available_parallelism().map_or(1, NonZeroUsize::get))
}

thread_local! {
    /// Whether this thread is inside [`alone`].
    static ALONE: Cell<bool> = const { Cell::new(false) };
}

/// Threads of the current rayon pool; 1, the calling thread, where none can be started. With 1, nothing may
/// be given to rayon, whose global pool may not exist.
pub fn current() -> usize {
    if ALONE.get() {
        1
    } else if rayon::current_thread_index().is_some() {
        rayon::current_num_threads()
    } else {
        global()
    }
}

/// Runs `work` with this thread as the only one that [`current`] counts.
pub fn alone<R>(work: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            ALONE.set(self.0);
        }
    }
    let _restore = Restore(ALONE.replace(true));
    work()
}

/// Whether [`current`] has found that the system starts too few threads.
pub fn are_refused() -> bool {
    REFUSED.load(Ordering::Relaxed)
}

static REFUSED: AtomicBool = AtomicBool::new(false);

/// Threads of rayon's global pool, which is made here if it has not been: with [`most`] threads where
/// `RAYON_NUM_THREADS` asks for more.
fn global() -> usize {
    static GLOBAL: OnceLock<usize> = OnceLock::new();
    *GLOBAL.get_or_init(|| match start(wanted(), spawn) {
        Some(waiting) => {
            make(waiting);
            // Of a pool that was there before. Where making that has failed, rayon panics.
            std::panic::catch_unwind(rayon::current_num_threads).unwrap_or(1)
        }
        None => {
            REFUSED.store(true, Ordering::Relaxed);
            1
        }
    })
}

/// For the start of a program: makes rayon's global pool, so that all code may use it. It has [`most`]
/// threads where `RAYON_NUM_THREADS` asks for more; where the system starts too few, the calling thread is
/// its only one. A pool that has been made stays as it is.
pub fn prepare_global_pool() {
    if let Some(waiting) = start(wanted(), spawn) {
        make(waiting);
    } else if let Err(error) = ThreadPoolBuilder::new().num_threads(1).use_current_thread().build_global() {
        tracing::debug!(%error, "the global pool stays as it is");
    }
}

/// The size that the global pool is to have.
fn wanted() -> usize {
    let asked = std::env::var(VARIABLE).ok().and_then(|text| text.parse::<usize>().ok());
    let Some(asked) = asked.filter(|&asked| asked > 0) else { return cores() };
    if asked > most() {
        tracing::warn!(asked, threads = most(), "{VARIABLE} is more than is of use");
    }
    asked.min(most())
}

/// A thread that waits for what a pool's thread is to do.
type Waiting = mpsc::Sender<rayon::ThreadBuilder>;

/// Starts the threads of a pool before the pool: rayon's global one cannot be made again after it has failed.
/// `None` where the system starts fewer; those that it has started end.
fn start(threads: usize, spawn: impl Fn(Box<dyn FnOnce() + Send>) -> io::Result<()>) -> Option<Vec<Waiting>> {
    let one = |_| {
        let (give, take) = mpsc::channel::<rayon::ThreadBuilder>();
        let run = move || {
            if let Ok(thread) = take.recv() {
                thread.run();
            }
        };
        spawn(Box::new(run)).map(|()| give)
    };
    let started: io::Result<Vec<Waiting>> = (0..threads).map(one).collect();
    if let Err(error) = &started {
        tracing::warn!(threads, %error, "they cannot be started: the calling thread does all work");
    }
    started.ok()
}

fn spawn(run: Box<dyn FnOnce() + Send>) -> io::Result<()> {
    thread::Builder::new().spawn(run).map(drop)
}

/// Makes rayon's global pool of these threads.
fn make(mut waiting: Vec<Waiting>) {
    let builder = ThreadPoolBuilder::new().num_threads(waiting.len());
    let give = move |thread| {
        let sent = waiting.pop().map(|next| next.send(thread));
        sent.and_then(Result::ok).ok_or_else(|| io::ErrorKind::BrokenPipe.into())
    };
    if let Err(error) = builder.spawn_handler(give).build_global() {
        tracing::debug!(%error, "the global pool stays as it is");
    }
}

/// Runs `work` on this thread and on as many others, of `threads` in all, as can be started; all results.
///
/// # Panics
/// If `work` does, on any thread.
pub fn together<R: Send>(threads: usize, work: impl Fn() -> R + Sync) -> Vec<R> {
    at_once(threads, |_| work())
}

/// Like [`together`], with a barrier for all threads that work.
///
/// # Panics
/// If `work` does, on any thread.
pub fn at_once<R: Send>(threads: usize, work: impl Fn(&Barrier) -> R + Sync) -> Vec<R> {
    let (barrier, work) = (OnceLock::new(), &work);
    thread::scope(|scope| {
        let start = |_| thread::Builder::new().spawn_scoped(scope, || work(barrier.wait())).ok();
        let others: Vec<_> = (1..threads).map_while(start).collect();
        let mut results = vec![work(barrier.get_or_init(|| Barrier::new(others.len() + 1)))];
        let join = |other: thread::ScopedJoinHandle<'_, R>| {
            other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        results.extend(others.into_iter().map(join));
        results
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn a_pool_needs_all_its_threads() {
        let started = AtomicUsize::new(0);
        let two = |run: Box<dyn FnOnce() + Send>| match started.fetch_add(1, Ordering::Relaxed) {
            0 | 1 => spawn(run),
            _ => Err(io::ErrorKind::WouldBlock.into()),
        };
        assert!(start(4, two).is_none());
        started.store(0, Ordering::Relaxed);
        assert_eq!(
            (start(2, two).map(|all| all.len()), start(0, two).map(|all| all.len())),
            (Some(2), Some(0))
        );
        assert_eq!((current(), are_refused()), (rayon::current_num_threads(), false));
    }

    #[test]
    fn alone_counts_the_calling_thread() {
        let pool = ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        pool.install(|| {
            assert_eq!((current(), alone(current), alone(|| alone(current)), current()), (3, 1, 1, 3));
            let panic = std::panic::catch_unwind(|| alone(|| panic!("as this test wants")));
            assert!(panic.is_err() && current() == 3);
        });
    }

    #[test]
    fn threads_that_start_all_work() {
        let count = AtomicUsize::new(0);
        let mut turns = together(4, || count.fetch_add(1, Ordering::Relaxed));
        turns.sort_unstable();
        assert_eq!((turns, together(0, || 7)), (vec![0, 1, 2, 3], vec![7]));
        let leaders = at_once(3, |barrier| barrier.wait().is_leader());
        assert_eq!((leaders.len(), leaders.iter().filter(|is| **is).count()), (3, 1));
    }
}
