//! Tuning: the engine measures kernels itself, in the background of the first calls.
//!
//! - `search`: which candidate wins, within a budget; knows no GPU.
//! - `tuner`: the thread, its jobs and their outcomes; knows no GPU either.
//! - `scratch`: candidates compiled and timed on a GPU.

mod outcome;
mod scratch;
mod search;
mod tuner;

use std::time::Duration;

use crate::error::Error;

pub use outcome::{Tried, TuningOutcome};
pub(crate) use scratch::Scratch;
pub(crate) use search::{candidates, search, winner};
pub(crate) use tuner::{Job, Tuner};

/// Whether kernels are measured in the background of the calls that use them; off by default.
///
/// ```no_run
/// use fa_attn::{Engine, Tuning};
///
/// let engine = Engine::new()?;
/// engine.set_tuning(Tuning::ON_FIRST_USE)?;
/// # Ok::<(), fa_attn::Error>(())
/// ```
///
/// Where the planner's model cannot tell which of its best kernels is the fastest, measuring can. With
/// [`Tuning::OnFirstUse`], the first bind of a problem and pass returns at once, with the kernel that it
/// would return without tuning, and hands the problem to a thread. There, one problem at a time:
///
/// 1. The bound kernel and the best of the planner's other tiles, `candidates` kernels in all, are compiled,
///    as far as the cache does not have them. One that does not compile cleanly is skipped.
/// 2. They are timed in turns on a problem of the same shape, with inputs, outputs and workspace that belong
///    to the thread, on its own stream; each counts with its fastest sample, as calls in between slow others
///    down. The bound kernel stays unless another one is faster by 2 %.
/// 3. The winner goes into the user's table of tuned kernels (`FA_TUNED`, or `tuned.json` beside the kernel
///    cache), which is replaced in one step, and is used from the next bind on: in this process and in later
///    ones. Calls that are bound already keep their kernel. Processes that tune at once keep each other's
///    winners.
///
/// A problem is not measured where the user's table or those that ship have an entry of exactly its
/// [`crate::tune::TuneKey`] whose kernel computes it (an entry whose kernel no longer compiles cleanly does
/// not count), nor where its kernel was chosen by [`crate::device::Gpu::prefer`] or stands in for another
/// family's. Threads that bind the same problem at once have it measured once.
///
/// What the caller notices: the caller's tensors and streams are not touched, waited for or captured. The
/// GPU's SMs, its memory (at most half of what is free) and a CPU core are shared while it lasts; loading a
/// module may make the driver wait for the context, as with any kernel's first use. While the stream of the
/// [`crate::device::Gpu`] is being captured nothing is started; the next bind starts it. Candidates run in
/// the caller's context, so a fault in one of them would break that context.
///
/// The budget is wall-clock time per problem and pass, compiling included. When it is spent, no further
/// candidate is started and no further sample taken; the current one is finished. The fastest of at least two
/// measured candidates wins; with fewer nothing is kept, but what was compiled is in the cache for the next
/// process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tuning {
    /// The table's kernel, or the planner's first choice.
    #[default]
    Off,
    /// The best few of the planner's kernels are tried when a problem is first bound.
    OnFirstUse {
        /// Kernels that are tried, the bound one included: at least 2.
        candidates: usize,
        /// Time for a problem and pass: above 0.
        budget: Duration,
    },
}

impl Tuning {
    /// Four kernels, half a minute.
    pub const ON_FIRST_USE: Tuning = Tuning::OnFirstUse { candidates: 4, budget: Duration::from_secs(30) };

    /// Checks the numbers.
    ///
    /// # Errors
    /// [`Error::TuningOption`].
    pub fn check(self) -> Result<(), Error> {
        match self {
            Tuning::OnFirstUse { candidates, .. } if candidates < 2 => Err(Error::TuningOption {
                name: "candidates",
                value: candidates.to_string(),
                need: "at least 2, the bound kernel included",
            }),
            Tuning::OnFirstUse { budget, .. } if budget.is_zero() => {
                Err(Error::TuningOption { name: "budget", value: "0 s".to_owned(), need: "above 0 s" })
            }
            Tuning::Off | Tuning::OnFirstUse { .. } => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_tune_nothing_are_named() {
        assert!(Tuning::Off.check().is_ok() && Tuning::ON_FIRST_USE.check().is_ok());
        let one = Tuning::OnFirstUse { candidates: 1, budget: Duration::from_secs(1) };
        assert!(one.check().expect_err("one").to_string().contains("candidates is 1"));
        let none = Tuning::OnFirstUse { candidates: 2, budget: Duration::ZERO };
        assert!(none.check().expect_err("no time").to_string().contains("budget is 0 s"));
    }
}
