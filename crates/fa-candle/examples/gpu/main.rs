//! The crate on a GPU: every function and gradient against the CPU's, a Llama with this crate's attention
//! against candle-transformers' own, tokens per second of both, and how long a first call takes.
//!
//!     cargo run --release -p fa-candle --features cuda --example gpu

#[path = "../../tests/models/decoder.rs"]
mod decoder;
mod first_call;
mod functions;
mod llama;
#[path = "../../tests/models/weights.rs"]
mod weights;

use candle_core::{Device, Result};

fn main() -> Result<()> {
    let device = Device::new_cuda(0)?;
    if std::env::args().any(|arg| arg == first_call::FLAG) {
        return first_call::here(&device);
    }
    let failed = functions::check(&device)? + llama::check(&device)?;
    println!();
    first_call::report();
    llama::rates(&device)?;
    if failed > 0 {
        candle_core::bail!("{failed} checks failed");
    }
    println!("all checks passed");
    Ok(())
}
