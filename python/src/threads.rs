//! Work without the interpreter's lock, on threads that this process has.

use std::process;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

use crate::error::DeviceError;

/// The threads of a forked process, by its process id.
static FORKED: Mutex<Option<(u32, Arc<ThreadPool>)>> = Mutex::new(None);

/// `work` on all cores, while other threads of the interpreter go on. A process that was forked from one that
/// has computed inherits rayon's pool without its threads, and gets a pool of its own.
///
/// # Errors
/// A system that gives no threads.
pub(crate) fn detached<R: Send>(py: Python<'_>, work: impl FnOnce() -> R + Send) -> PyResult<R> {
    static FIRST: OnceLock<u32> = OnceLock::new();
    let own = process::id();
    let first = FIRST.get_or_init(|| {
        // Of a hundred thousand threads, which a variable can ask for, a call would never come back.
        fa_cpu::threads::limit_global_pool();
        own
    });
    if *first == own {
        return Ok(py.detach(work));
    }
    let pool = pool(own).map_err(|error| {
        DeviceError::new_err(format!("a forked process needs threads of its own and gets none: {error}"))
    })?;
    Ok(py.detach(|| pool.install(work)))
}

fn pool(own: u32) -> Result<Arc<ThreadPool>, ThreadPoolBuildError> {
    let mut forked = FORKED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((process, pool)) = &*forked
        && *process == own
    {
        return Ok(pool.clone());
    }
    let threads = rayon::current_num_threads();
    let pool = Arc::new(ThreadPoolBuilder::new().num_threads(threads).build()?);
    // The parent's has no threads here that could be told to end.
    std::mem::forget(forked.replace((own, pool.clone())));
    Ok(pool)
}
