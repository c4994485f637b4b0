//! Tests that need no GPU.

mod engine;
mod packed;
mod shared;
mod train;
