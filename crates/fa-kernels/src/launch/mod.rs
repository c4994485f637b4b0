//! From a loaded kernel to a launch. [`Launches`] describes what a pass launches, as data and without a GPU;
//! `Forward` and `Backward` run it on a stream.

pub(crate) mod append;
pub(crate) mod append_call;
pub(crate) mod args;
mod backward;
pub(crate) mod call;
mod checks;
pub(crate) mod dropout;
pub(crate) mod extras;
mod forward;
mod launches;
pub(crate) mod merge;
pub(crate) mod module;
mod plan;
mod problem_params;
pub(crate) mod programs;
pub(crate) mod raw_program;
mod run;
mod sections;
pub(crate) mod single;
mod stored;
mod tma;
pub(crate) mod varied;
mod words;
mod workspace;

pub use append::{AppendLaunch, BoundAppend, RawAppendArgs};
pub use args::Shape;
pub use dropout::{BoundDropout, DropoutLaunch, RawKept};
pub use launches::{Addresses, Argument, Launch, Launches, Params, Step, Tensor};
pub use merge::{BoundMerge, MergeArgs, MergeLaunch, PartialResult, RawMergeArgs, RawPartialResult};
pub use raw_program::{RawArray, RawProgram};
pub use tma::{MapShape, TensorMap};
pub use workspace::{Part, Workspace};
