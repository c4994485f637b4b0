//! Judging results against the oracle on the CPU.

#[cfg(test)]
mod agree;
mod arrays;
pub mod codes;
pub mod forward;
pub mod gradients;
mod heads;
mod rows;
pub mod sample_head;
pub mod sample_rows;
mod sinks;
