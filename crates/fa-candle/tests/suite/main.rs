//! Every function against candle's own operations, on the CPU; where the crate is built with `cuda` and there
//! is a GPU, `examples/gpu.rs` does the same there.

mod codes;
mod errors;
mod functions;
mod gradients;
mod inputs;
mod lse;
mod materialised;
mod programs;
mod random;
mod rows;
