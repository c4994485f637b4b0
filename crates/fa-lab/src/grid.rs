//! The cases: shapes, head dims, heads, masks and placements, among them those on which known implementations
//! failed.

mod append;
mod awkward;
mod bits;
mod case;
mod codes;
mod dropout;
mod fp8;
mod gradients;
mod groups;
pub mod knobs;
mod known;
mod library;
mod merge;
mod of_spec;
mod paged;
mod problem;
mod programs;
mod scores;
mod serving;
mod small;
pub mod soak;
mod varied;
mod wide;

pub(crate) use codes::codes;
pub(crate) use fp8::fp8;

pub use awkward::LENGTHS;
pub use case::{Action, Arrangement, BASE, Case, Extent, NamedSpec, Values, case, case_of};
pub use gradients::gradients;
pub use groups::{GROUPS, check_group, is_serving};
pub use library::library;
pub use of_spec::of_spec;
pub use problem::problem_of;
pub use serving::{serving, serving_gradients};
pub use small::{Form, small};
