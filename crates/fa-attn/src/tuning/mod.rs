//! Tuning: the engine measures kernels itself, in the background of the first calls.
//!
//! - `search`: which candidate wins, within a budget; knows no GPU.
//! - `tuner`: the thread, its jobs and their outcomes; knows no GPU either.
//! - `scratch`: candidates compiled and timed on a GPU.

mod outcome;
mod scratch;
mod search;
mod tuner;

use std::str::FromStr;
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
/// [`crate::tune::TuneKey`] whose kernel computes it. Not for ever: an entry that tuning made with another
/// compiler or other sources, or whose kernel no longer compiles cleanly, does not count. Nor is it measured
/// where its kernel is the only one, was chosen by [`crate::device::Gpu::prefer`] or stands in for another
/// family's, or must stay: in deterministic passes, and where [`crate::device::BindOptions::pinned`] says so.
/// Threads that bind the same problem at once have it measured once.
///
/// What the caller notices: the caller's tensors and streams are not touched, waited for or captured. The
/// GPU's SMs, its memory (at most half of what is free) and half of the CPU's cores are shared while it
/// lasts; loading a module may make the driver wait for the context, as with any kernel's first use. While
/// the stream of the [`crate::device::Gpu`] is being captured nothing is started; the next bind starts it.
/// Candidates run in the caller's context, so a fault in one of them would break that context.
///
/// The budget is wall-clock time per problem and pass, compiling included; loading and timing take at most a
/// fifth of it, so that by default a winner is there after a second where the cache has the kernels, and
/// after five where they are compiled. When it is spent, no further candidate is started and no further
/// sample taken; what was begun is finished. The fastest of at least two measured candidates wins; with fewer
/// nothing is kept, but what was compiled is in the cache for the next process.
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
    /// Four kernels, one of which is within 3 % of the best for 98 of 100 problems, and five seconds.
    pub const ON_FIRST_USE: Tuning = Tuning::OnFirstUse { candidates: 4, budget: Duration::from_secs(5) };

    /// What `FA_TUNE` says, which an [`crate::Engine`] and the Python package begin with; off where it is not
    /// set.
    ///
    /// # Errors
    /// [`Error::TuningOption`] for another value than those of [`Tuning::from_str`].
    pub fn from_environment() -> Result<Tuning, Error> {
        let value = std::env::var_os(TUNE_VARIABLE).unwrap_or_default();
        if value.is_empty() { Ok(Tuning::Off) } else { value.to_string_lossy().parse() }
    }

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

/// Environment variable that switches tuning on for a process.
pub const TUNE_VARIABLE: &str = "FA_TUNE";

/// `auto`, `auto:SECONDS` with a budget, or `off`, as in `FA_TUNE`.
impl FromStr for Tuning {
    type Err = Error;

    fn from_str(text: &str) -> Result<Tuning, Error> {
        let refused = || Error::TuningOption {
            name: TUNE_VARIABLE,
            value: text.to_owned(),
            need: "auto, auto:SECONDS (a budget from above 0 s to a day) or off",
        };
        match text.split_once(':') {
            None if text == "off" => Ok(Tuning::Off),
            None if text == "auto" => Ok(Tuning::ON_FIRST_USE),
            Some(("auto", seconds)) => {
                let seconds: f64 = seconds.parse().map_err(|_| refused())?;
                if !(seconds > 0.0 && seconds <= LONGEST_S) {
                    return Err(refused());
                }
                let Tuning::OnFirstUse { candidates, .. } = Tuning::ON_FIRST_USE else {
                    return Err(refused());
                };
                // Never zero: a nanosecond at the least.
                let budget = Duration::from_secs_f64(seconds).max(Duration::from_nanos(1));
                Ok(Tuning::OnFirstUse { candidates, budget })
            }
            None | Some(_) => Err(refused()),
        }
    }
}

/// The longest budget in text, a day in seconds.
const LONGEST_S: f64 = 86_400.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_says_when_and_for_how_long() {
        let budget = |seconds| Tuning::OnFirstUse { candidates: 4, budget: Duration::from_secs_f64(seconds) };
        for (text, tuning) in [
            ("off", Tuning::Off),
            ("auto", budget(5.0)),
            ("auto:2.5", budget(2.5)),
            ("auto:1e-12", budget(1e-9)),
        ] {
            assert_eq!(text.parse::<Tuning>().expect(text), tuning, "{text}");
        }
        for text in
            ["on", "1", "auto:", "auto:0", "auto:-1", "auto:NaN", "auto:inf", "auto:1e9", "Auto", "off:1"]
        {
            let error = text.parse::<Tuning>().expect_err(text).to_string();
            assert!(
                error.contains(&format!("FA_TUNE is {text}")) && error.contains("auto:SECONDS"),
                "{error}"
            );
        }
    }

    #[test]
    fn options_that_tune_nothing_are_named() {
        assert!(Tuning::Off.check().is_ok() && Tuning::ON_FIRST_USE.check().is_ok());
        let one = Tuning::OnFirstUse { candidates: 1, budget: Duration::from_secs(1) };
        assert!(one.check().expect_err("one").to_string().contains("candidates is 1"));
        let none = Tuning::OnFirstUse { candidates: 2, budget: Duration::ZERO };
        assert!(none.check().expect_err("no time").to_string().contains("budget is 0 s"));
    }
}
