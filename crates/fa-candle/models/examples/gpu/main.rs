//! fa-candle on a GPU: every function and gradient against the CPU's, a Llama with its attention
//! against candle-transformers' own, tokens per second of both, and how long a first call takes.
//!
//!     cargo run --release -p fa-candle-models --features cuda --example gpu
//!
//! Arguments `functions`, `tokens`, `first-call` and `rates` choose parts; the first compiles some 80
//! kernels.

#[path = "../../tests/models/decoder.rs"]
mod decoder;
mod first_call;
mod functions;
mod llama;

use candle_core::{Device, Result};

fn main() -> Result<()> {
    let device = Device::new_cuda(0)?;
    let chosen: Vec<String> = std::env::args().skip(1).collect();
    if chosen.iter().any(|part| part == first_call::FLAG) {
        return first_call::here(&device);
    }
    let wants = |part: &str| chosen.is_empty() || chosen.iter().any(|chosen| chosen == part);
    let mut failed = 0;
    if wants("functions") {
        failed += functions::check(&device)?;
    }
    if wants("tokens") {
        failed += llama::check(&device)?;
    }
    if wants("first-call") {
        first_call::report();
    }
    if wants("rates") {
        llama::rates(&device)?;
    }
    if failed > 0 {
        candle_core::bail!("{failed} checks failed");
    }
    println!("all checks passed");
    Ok(())
}
