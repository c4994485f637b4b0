//! Tests that need no GPU.

mod engine;
mod train;
