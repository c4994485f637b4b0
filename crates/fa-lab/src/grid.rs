//! The cases: shapes, head dims, heads, masks and placements, and where known implementations failed.

mod case;
mod gradients;
pub mod knobs;
mod library;
pub mod soak;

pub use case::{Action, BASE, Case, Extent, NamedSpec, Placing, Values, case};
pub use gradients::gradients;
pub use library::{library, of_spec};
