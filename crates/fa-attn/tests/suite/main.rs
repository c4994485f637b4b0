//! Tests that need no GPU.

mod engine;
mod extremes;
mod packed;
mod shared;
mod train;
