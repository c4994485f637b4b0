//! Trains the transformer of fa-attn's example with its sequences spread over ranks, and prints its losses
//! beside torch's.
//!
//! `cargo run --release -p fa-dist --example train [-- RANKS [SCHEME]]`: ranks are threads, attention on the
//! CPU in f32. With `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` set, as torchrun does, this process
//! is one rank with a GPU: attention in bf16, over NCCL. Exits with an error when a loss strays from torch's
//! curve by more than the precision explains.

mod attention;
#[path = "../../../fa-attn/examples/train/layers.rs"]
mod layers;
// One process has a constructor of its own.
#[allow(dead_code)]
#[path = "../../../fa-attn/examples/train/model.rs"]
mod model;

use attention::{Attention, Result, plan};
use fa_dist::{Bootstrap, MemoryOptions, MemoryTransport, Scheme};
use model::Model;

/// Torch's losses, step by step.
const TORCH: &str = include_str!("../../../fa-attn/examples/train/torch.txt");

fn main() -> Result<()> {
    let mut given = std::env::args().skip(1);
    let ranks: usize = given.next().map_or(Ok(2), |text| text.parse())?;
    let scheme = match given.next() {
        None => Scheme::Gather,
        Some(name) => *Scheme::ALL
            .iter()
            .find(|scheme| scheme.name() == name)
            .ok_or_else(|| format!("unknown scheme '{name}': use gather, ulysses or ring"))?,
    };
    if std::env::var_os("RANK").is_some() {
        let (bootstrap, place) = Bootstrap::from_env()?;
        let attention = Attention::gpu(&bootstrap, place, scheme)?;
        return train(&attention, 3e-2, place.rank == 0);
    }
    let plan = plan(ranks, scheme)?;
    let done = MemoryTransport::run(ranks, &MemoryOptions::default(), |transport| {
        let run = || -> Result<()> {
            let attention = Attention::cpu(&plan, transport)?;
            let is_first = attention.rank() == 0;
            train(&attention, 1e-3, is_first)
        };
        run().map_err(|error| error.to_string())
    });
    done.into_iter().try_for_each(|rank| Ok(rank?))
}

fn train(attention: &Attention, tolerance: f64, prints: bool) -> Result<()> {
    let mut model = Model::of(attention.places());
    if prints {
        println!("step  loss    torch");
    }
    for (step, torch) in TORCH.lines().enumerate() {
        let torch: f64 = torch.parse()?;
        let loss = model.train(attention)?;
        if prints && (step % 10 == 0 || step + 1 == TORCH.lines().count()) {
            println!("{step:>4}  {loss:.4}  {torch:.4}");
        }
        if (loss - torch).abs() > tolerance * torch.max(1.0) {
            return Err(format!("step {step}: loss {loss} is not torch's {torch} within {tolerance}").into());
        }
    }
    Ok(())
}
