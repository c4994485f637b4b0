//! The example that trains a transformer follows torch's losses.

// The example's files; its GPU side is not used here.
#[allow(dead_code)]
#[path = "../../examples/train/attention.rs"]
mod attention;
#[path = "../../examples/train/layers.rs"]
mod layers;
#[path = "../../examples/train/model.rs"]
mod model;

/// f32 sums against torch's f64: a loss of 3.6 falls to 0.009, and strays by a few 1e-5 on the way.
#[test]
fn losses_on_the_cpu_are_torchs() {
    let torch = include_str!("../../examples/train/torch.txt");
    let mut model = model::Model::new();
    let attention = attention::Attention::cpu().unwrap();
    let mut last = f64::INFINITY;
    for (step, torch) in torch.lines().enumerate() {
        let torch: f64 = torch.parse().unwrap();
        last = model.train(&attention).unwrap();
        assert!((last - torch).abs() <= 3e-4, "step {step}: {last} for torch's {torch}");
    }
    assert!(last < 0.01, "the text is not learnt: {last}");
}
