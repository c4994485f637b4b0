//! The example that trains a transformer over ranks follows torch's losses.

// The example's files; its GPU side is not used here.
#[allow(dead_code)]
#[path = "../../examples/train/attention.rs"]
mod attention;
#[path = "../../examples/train/layers.rs"]
mod layers;
#[allow(dead_code)]
#[path = "../../examples/train/model.rs"]
mod model;

use fa_dist::{MemoryOptions, MemoryTransport, Scheme};

#[test]
fn losses_over_ranks_are_torchs() {
    let torch = include_str!("../../examples/train/torch.txt");
    for (ranks, scheme) in [(2, Scheme::Gather), (4, Scheme::Ring)] {
        let plan = attention::plan(ranks, scheme).unwrap();
        MemoryTransport::run(ranks, &MemoryOptions::default(), |transport| {
            let attention = attention::Attention::cpu(&plan, transport).unwrap();
            let mut model = model::Model::of(attention.places());
            for (step, torch) in torch.lines().take(5).enumerate() {
                let torch: f64 = torch.parse().unwrap();
                let loss = model.train(&attention).unwrap();
                assert!(
                    (loss - torch).abs() <= 3e-4,
                    "{ranks} ranks, step {step}: {loss} for torch's {torch}"
                );
            }
        });
    }
}
