//! The CPU: its instruction set and threads.

use std::num::NonZeroUsize;
use std::sync::Arc;

use fa_cpu::simd::Isa;
use fa_cpu::threads::{alone, current, most};
use fa_cpu::tiled;
use rayon::{ThreadPool, ThreadPoolBuilder};

/// The CPU's side of an engine.
#[derive(Clone, Debug)]
pub(crate) struct Cpu {
    pub(crate) isa: Isa,
    /// The most threads; `None` for those of the current rayon pool.
    limit: Option<usize>,
    threads: Threads,
}

/// Where work that does not know of a limit runs.
#[derive(Clone, Debug)]
enum Threads {
    /// In the current rayon pool, whose size is the limit's.
    Current,
    /// In a pool of its own.
    Own(Arc<ThreadPool>),
    /// On the calling thread, as no other can be started.
    Calling,
}

impl Cpu {
    /// With `threads` threads at most, or those of the current rayon pool.
    pub(crate) fn new(isa: Isa, threads: Option<NonZeroUsize>) -> Cpu {
        let limit = threads.map(|threads| threads.get().min(most()));
        let own = limit.filter(|&limit| limit != current());
        Cpu { isa, limit, threads: own.map_or(Threads::Current, Threads::own) }
    }

    /// Runs `work` on the threads.
    pub(crate) fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match &self.threads {
            Threads::Current => work(),
            Threads::Own(pool) => pool.install(work),
            Threads::Calling => alone(work),
        }
    }

    /// Runs `work`, which respects [`Cpu::options`], on this thread where the current pool has enough: in
    /// another pool, this one would sleep and have to be woken, as long as a short problem takes.
    pub(crate) fn install_tiled<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        let suffices = self.limit.is_none_or(|limit| limit <= current());
        if suffices { work() } else { self.install(work) }
    }

    /// The number of threads.
    pub(crate) fn threads(&self) -> usize {
        match &self.threads {
            Threads::Current => current(),
            Threads::Own(pool) => pool.current_num_threads(),
            Threads::Calling => 1,
        }
    }

    pub(crate) fn options(&self) -> tiled::Options {
        tiled::Options { isa: Some(self.isa), threads: self.limit }
    }
}

impl Threads {
    fn own(threads: usize) -> Threads {
        match ThreadPoolBuilder::new().num_threads(threads).build() {
            Ok(pool) => Threads::Own(Arc::new(pool)),
            Err(error) => {
                tracing::warn!(threads, %error, "they cannot be started: the calling thread does all work");
                Threads::Calling
            }
        }
    }
}
