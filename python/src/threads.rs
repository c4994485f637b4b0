//! Work without the interpreter's lock, on threads that this process has.

use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use fa_cpu::threads::{alone, are_refused, current};
use pyo3::exceptions::PyRuntimeWarning;
use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

/// The threads of a forked process, by its process id.
static FORKED: Mutex<Option<(u32, Arc<ThreadPool>)>> = Mutex::new(None);

/// `work` on all cores, while other threads of the interpreter go on. A process that was forked from one that
/// has computed inherits rayon's pool without its threads, and gets a pool of its own; where the system
/// starts no thread, the calling one does all work, with a warning.
///
/// # Errors
/// That warning, where warnings are errors.
pub(crate) fn detached<R: Send>(py: Python<'_>, work: impl FnOnce() -> R + Send) -> PyResult<R> {
    static FIRST: OnceLock<u32> = OnceLock::new();
    let own = process::id();
    let first = FIRST.get_or_init(|| {
        // Made once, by whoever is first.
        current();
        own
    });
    if *first == own {
        static SAID: AtomicBool = AtomicBool::new(false);
        if are_refused() && !SAID.swap(true, Ordering::Relaxed) {
            let message = c"the system starts no thread: the calling one does all work";
            PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), message, 1)?;
        }
        return Ok(py.detach(work));
    }
    Ok(py.detach(|| match pool(own) {
        Ok(pool) => pool.install(work),
        Err(_) => alone(work),
    }))
}

fn pool(own: u32) -> Result<Arc<ThreadPool>, ThreadPoolBuildError> {
    let mut forked = FORKED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((process, pool)) = &*forked
        && *process == own
    {
        return Ok(pool.clone());
    }
    let threads = current();
    let pool = Arc::new(ThreadPoolBuilder::new().num_threads(threads).build()?);
    // The parent's has no threads here that could be told to end.
    std::mem::forget(forked.replace((own, pool.clone())));
    Ok(pool)
}
