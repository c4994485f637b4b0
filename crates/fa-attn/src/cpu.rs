//! The CPU: its instruction set and threads.

use std::num::NonZeroUsize;
use std::sync::Arc;

use fa_cpu::simd::Isa;
use fa_cpu::threads::most;
use fa_cpu::tiled;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::Error;

/// The CPU's side of an engine.
#[derive(Clone, Debug)]
pub(crate) struct Cpu {
    pub(crate) isa: Isa,
    /// The most threads; `None` for those of the current rayon pool.
    limit: Option<usize>,
    /// Its own thread pool, where the limit differs from the size of rayon's.
    pool: Option<Arc<ThreadPool>>,
}

impl Cpu {
    /// With `threads` threads at most, or those of the current rayon pool.
    pub(crate) fn new(isa: Isa, threads: Option<NonZeroUsize>) -> Result<Cpu, Error> {
        let limit = threads.map(|threads| threads.get().min(most()));
        let own = limit.filter(|&limit| limit != rayon::current_num_threads());
        Ok(Cpu { isa, limit, pool: own.map(pool).transpose()? })
    }

    /// Runs `work` on the threads.
    pub(crate) fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match &self.pool {
            Some(pool) => pool.install(work),
            None => work(),
        }
    }

    /// Runs `work`, which respects [`Cpu::options`], on this thread where the current pool has enough: in
    /// another pool, this one would sleep and have to be woken, as long as a short problem takes.
    pub(crate) fn install_tiled<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        let suffices = self.limit.is_none_or(|limit| limit <= rayon::current_num_threads());
        if suffices { work() } else { self.install(work) }
    }

    /// The number of threads.
    pub(crate) fn threads(&self) -> usize {
        self.pool.as_ref().map_or_else(rayon::current_num_threads, |pool| pool.current_num_threads())
    }

    pub(crate) fn options(&self) -> tiled::Options {
        tiled::Options { isa: Some(self.isa), threads: self.limit }
    }
}

fn pool(threads: usize) -> Result<Arc<ThreadPool>, Error> {
    let pool = ThreadPoolBuilder::new().num_threads(threads).build();
    pool.map(Arc::new).map_err(|error| Error::Threads { threads, reason: error.to_string() })
}
