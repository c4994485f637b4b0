//! Trains the transformer of fa-attn's example with its sequences spread over ranks, and prints its losses
//! beside torch's.
//!
//! `cargo run --release -p fa-dist --example train [-- RANKS [SCHEME]]`: ranks are threads, attention on the
//! CPU in f32. With `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` set, as torchrun does, this process
//! is one rank with a GPU: attention in bf16, over NCCL, RANKS of the environment. Exits with an error when a loss strays from torch's
//! curve by more than the precision explains.

mod attention;
// The model, its text and torch's losses are fa-attn's, by links that a package has as files.
mod layers;
// One process has a constructor of its own.
#[allow(dead_code)]
mod model;

use std::process::ExitCode;

use attention::{Attention, Result, plan};
use fa_dist::{Bootstrap, MemoryOptions, MemoryTransport, Scheme};
use model::Model;

/// Torch's losses, step by step.
const TORCH: &str = include_str!("torch.txt");

fn main() -> ExitCode {
    let Err(error) = run() else { return ExitCode::SUCCESS };
    eprintln!("error: {error}");
    ExitCode::FAILURE
}

/// Numbers of ranks that all have as many tokens: losses are averaged over ranks.
const RANKS: [usize; 6] = [1, 2, 4, 8, 16, 32];

fn ranks(text: &str) -> Result<usize> {
    let found = text.parse().ok().filter(|ranks| RANKS.contains(ranks));
    Ok(found.ok_or_else(|| format!("{text} ranks: 64 tokens are dealt to {RANKS:?}"))?)
}

fn scheme(name: &str) -> Result<Scheme> {
    let all = [Scheme::Gather, Scheme::Ulysses, Scheme::Ring];
    let found = all.into_iter().find(|scheme| scheme.name() == name);
    Ok(found.ok_or_else(|| format!("unknown scheme '{name}': use gather, ulysses or ring"))?)
}

fn run() -> Result<()> {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let number = given.first().map_or(Ok(2), |text| ranks(text))?;
    let scheme = given.get(1).map_or(Ok(Scheme::Gather), |name| scheme(name))?;
    if let Some(more) = given.get(2) {
        return Err(format!("unexpected '{more}': use RANKS [SCHEME], as in 4 ring").into());
    }
    if std::env::var_os("RANK").is_some() {
        let (bootstrap, place) = Bootstrap::from_env()?;
        ranks(&place.world.to_string())?;
        if !given.is_empty() && number != place.world {
            return Err(format!("{number} ranks, and WORLD_SIZE is {}: give the same", place.world).into());
        }
        let attention = Attention::gpu(&bootstrap, place, scheme)?;
        return train(&attention, 3e-2, place.rank == 0);
    }
    let plan = plan(number, scheme)?;
    let done = MemoryTransport::run(number, &MemoryOptions::default(), |transport| {
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
