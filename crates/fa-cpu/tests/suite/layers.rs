//! Attention layers of a real model on a real text, against that model's own attention output.

use fa_core::{Dtype, Mask, Problem};
use fa_cpu::Element;
use fa_cpu::reference;

use crate::files::{File, folder};
use crate::inputs::{Inputs, bshd};
use crate::tiled::{Expected, check_against, isas};

/// The layers: (file, problem).
fn layers() -> Vec<(File, Problem)> {
    let files = folder("../../examples").into_iter().map(|path| File::read(&path));
    // The other examples are made up: packed sequences, keys in pages, slopes and sinks.
    files
        .filter(|file| file.name.starts_with("minilm"))
        .map(|file| {
            let [batch, seqlen, heads, head_dim] = file.shape("q");
            let problem = Problem::square(batch, seqlen, heads, head_dim, Mask::FULL, file.dtype());
            (file, problem)
        })
        .collect()
}

/// How far the model's output may be from attention on its Q, K and V: f32 rounding in one case, scores and
/// probabilities rounded to bf16 (which the model's path does and ours does not) in the other.
fn model_error(dtype: Dtype) -> f64 {
    if dtype == Dtype::F32 { 3e-6 } else { 0.06 }
}

#[test]
fn the_oracle_agrees_with_the_model_and_tiled_with_the_oracle() {
    fn check<T: Element>(file: &File, problem: &Problem) {
        let [q, k, v, out] = ["q", "k", "v", "out"].map(|name| file.values::<T>(name));
        let [q, k, v] =
            [("q", &q), ("k", &k), ("v", &v)].map(|(name, data)| bshd(name, data, file.shape(name)));
        let forward = reference::forward(problem, &q, &k, &v).unwrap();
        let differences = forward.out.iter().zip(&out).map(|(a, b)| (a - b.to_f64()).abs());
        let (largest, worst) = (
            forward.out.iter().fold(0.0, |max: f64, value| max.max(value.abs())),
            differences.fold(0.0, f64::max),
        );
        assert!(
            worst <= model_error(problem.types.q),
            "{}: off by {worst}, outputs up to {largest}",
            file.name
        );
        assert!(forward.lse.iter().all(|lse| lse.is_finite()));

        // The layer has no gradient: its output stands in for dO.
        let [q, k, v] = ["q", "k", "v"].map(|name| file.values::<T>(name));
        let inputs = Inputs { q, k, v, dout: out };
        let expected = Expected::compute(problem, &inputs, true);
        for isa in isas() {
            let failures = check_against(&file.name, problem, &inputs, &expected, isa);
            assert!(failures.is_empty(), "{}", failures.join("\n"));
        }
    }
    let layers = layers();
    assert_eq!(layers.len(), 3);
    for (file, problem) in &layers {
        in_dtype!(problem.types.q, T => check::<T>(file, problem));
    }
}
