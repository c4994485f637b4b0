//! Is a result right? Against the oracle on the CPU.

pub mod forward;
pub mod gradients;
mod heads;
mod rows;
pub mod sample_head;
pub mod sample_rows;
mod sinks;
