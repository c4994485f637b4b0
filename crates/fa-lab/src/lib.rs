//! The lab: validates the kernels' results and measures their speed.
//!
//! - `judge`: results and gradients against the f64 oracle of `fa-cpu`, on all rows or on a sample of them.
//! - `grid`: the cases, from lengths of 0 to offsets beyond 2^31.
//! - `validate`: the grid, random problems, all configurations, compute-sanitizer.
//! - `bench`: rates next to other libraries' (`peers`) in the same run, on the shapes of `marks`; `runner`
//!   alternates the candidates.
//! - `tune`: measures candidates and keeps the winner; `ladder`: the gain of each optimisation step.
//! - `configs`, `best`: what the compiler makes of the planner's configurations.
//! - `ledger`: which code has been judged, by whom; `record`: the machine behind a measurement; `campaign`:
//!   the runs that are due on a GPU when code has changed.
//! - `summary`: what of a record is kept; reads records and summaries alike.
//! - `log`: results of a run that may be stopped and go on.
//! - `sequences`, `tensors`, `memory`, `mods`, `append`, `random`: the inputs of a case.
//!
//! Functions take plain options, report their [`Step`]s and return reports that serialize. Work that may hang
//! or break its GPU context runs in a [`worker`] process: the program, started again, which passes its
//! standard input to [`serve()`].
//!
//! ```
//! use fa_core::Pass;
//! use fa_lab::marks::Marks;
//!
//! // The shapes that `fa bench --marks sm90` measures, and the libraries that it measures them with.
//! Marks::Sm90.check_pass(Pass::Forward)?;
//! for wanted in Marks::Sm90.shapes() {
//!     println!("{}: {:?}, {:.1} GFLOP", wanted.group, wanted.problem, wanted.problem.flops_forward() / 1e9);
//! }
//! println!("beside {}", Marks::Sm90.peers().join(", "));
//! # Ok::<(), String>(())
//! ```

pub mod append;
pub mod bench;
pub mod best;
pub mod campaign;
pub mod codes;
pub mod common;
pub mod configs;
pub mod device;
mod error;
pub mod grid;
pub mod judge;
mod kernels;
pub mod ladder;
pub mod ledger;
pub mod log;
pub mod marks;
pub mod memory;
pub mod mods;
pub mod peers;
#[cfg(test)]
mod planner_tests;
mod progress;
pub mod random;
pub mod record;
pub mod refusals;
pub mod runner;
pub mod sequences;
mod serve;
pub mod shape;
pub mod spec_file;
pub mod summary;
pub mod tensors;
pub mod tune;
pub mod validate;
pub mod worker;

pub use error::{Error, Result, asks_too_much, engine_is_asked_too_much, message, read_record, read_text};
pub use progress::{Progress, Step};
pub use serve::serve;
pub use worker::Program;
