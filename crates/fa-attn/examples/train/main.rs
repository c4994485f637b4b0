//! Trains a two-layer causal transformer on a short text with our forward and backward, and prints its losses
//! beside torch's.
//!
//! `cargo run --release -p fa-attn --example train [-- cuda]`: on the CPU in f32, or attention on the GPU in
//! bf16. Exits with an error when a loss strays from torch's curve (`scripts/train_torch.py`) by more than
//! the backend's precision explains.

mod attention;
mod layers;
mod model;

use attention::Attention;
use model::Model;

/// Torch's losses, step by step.
const TORCH: &str = include_str!("torch.txt");

fn main() -> attention::Result<()> {
    let (attention, tolerance) = match std::env::args().nth(1).as_deref() {
        None | Some("cpu") => (Attention::cpu()?, 1e-3),
        Some("cuda") => (Attention::gpu()?, 3e-2),
        Some(other) => return Err(format!("unknown backend '{other}': use cpu or cuda").into()),
    };
    let mut model = Model::new();
    println!("step  loss    torch");
    for (step, torch) in TORCH.lines().enumerate() {
        let torch: f64 = torch.parse()?;
        let loss = model.train(&attention)?;
        if step % 10 == 0 || step + 1 == TORCH.lines().count() {
            println!("{step:>4}  {loss:.4}  {torch:.4}");
        }
        // Differences of rounding grow from step to step; relative to the loss they stay small while it falls
        // a hundredfold.
        if (loss - torch).abs() > tolerance * torch.max(1.0) {
            return Err(format!("step {step}: loss {loss} is not torch's {torch} within {tolerance}").into());
        }
    }
    Ok(())
}
