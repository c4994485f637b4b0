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
    /// Threads of its own; `None` for those of the current rayon pool.
    pub(crate) pool: Option<Arc<ThreadPool>>,
}

impl Cpu {
    /// Threads of its own where a number is given, as many as are of use at the most.
    pub(crate) fn new(isa: Isa, threads: Option<NonZeroUsize>) -> Result<Cpu, Error> {
        Ok(Cpu { isa, pool: threads.map(pool).transpose()? })
    }

    /// Runs `work` on the threads.
    pub(crate) fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match &self.pool {
            Some(pool) => pool.install(work),
            None => work(),
        }
    }

    /// How many threads there are.
    pub(crate) fn threads(&self) -> usize {
        self.pool.as_ref().map_or_else(rayon::current_num_threads, |pool| pool.current_num_threads())
    }

    pub(crate) fn options(&self) -> tiled::Options {
        tiled::Options { isa: Some(self.isa), threads: None }
    }

    /// Runs `work` once on every thread.
    pub(crate) fn broadcast<R: Send>(&self, work: impl Fn() -> R + Sync) -> Vec<R> {
        match &self.pool {
            Some(pool) => pool.broadcast(|_| work()),
            None => rayon::broadcast(|_| work()),
        }
    }
}

fn pool(threads: NonZeroUsize) -> Result<Arc<ThreadPool>, Error> {
    let threads = threads.get().min(most());
    let pool = ThreadPoolBuilder::new().num_threads(threads).build();
    pool.map(Arc::new).map_err(|error| Error::Threads { threads, reason: error.to_string() })
}
