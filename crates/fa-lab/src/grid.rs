//! The cases: shapes, head dims, heads, masks and placements, and where known implementations failed.

mod case;
mod gradients;
pub mod knobs;
mod library;
pub mod soak;

pub use case::{Action, Arrangement, BASE, Case, Extent, NamedSpec, Values, case};
pub use gradients::gradients;
pub use library::{library, of_spec};
