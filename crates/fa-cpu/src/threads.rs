//! How many threads are useful. An idle thread of a rayon pool looks for work at every other thread, so that
//! starting a pool takes time quadratic in its size: half a minute with 4,000 threads.

use std::num::NonZeroUsize;
use std::sync::OnceLock;
use std::thread::available_parallelism;

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

/// Makes rayon's global pool with [`most`] threads where `RAYON_NUM_THREADS` asks for more. For the start of
/// a program: a pool that has been made stays as it is.
pub fn limit_global_pool() {
    let asked = std::env::var(VARIABLE).ok().and_then(|text| text.parse::<usize>().ok());
    if let Some(asked) = asked
        && asked > most()
    {
        match rayon::ThreadPoolBuilder::new().num_threads(most()).build_global() {
            Ok(()) => tracing::warn!(asked, threads = most(), "{VARIABLE} is more than is of use"),
            Err(error) => tracing::debug!(%error, "the global pool stays as it is"),
        }
    }
}
