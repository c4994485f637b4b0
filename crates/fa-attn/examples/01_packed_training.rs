//! Training on a packed batch: sequences of different lengths end to end, without padding. Gradient descent
//! on Q, K and V until the attention of each sequence is what it should be. On the GPU where there is one.
//!
//! ```text
//! cargo run --release -p fa-attn --example 01_packed_training
//! ```

use fa_attn::{
    Dtype, Engine, Error, Extras, Lengths, Mask, Pass, Problem, Tensor, TensorLayout, Types, bf16,
};

/// The first row of each sequence, and their end: 5, 0, 40 and 19 rows.
const STARTS: [i32; 5] = [0, 5, 5, 45, 64];
const ROWS: usize = 64;
const HEADS: usize = 4;
const HEADS_KV: usize = 2;
const DIM: usize = 64;

fn main() -> Result<(), Error> {
    train(20).map(drop)
}

/// Weights are f32, what attention computes is bf16; the loss before each step and after the last.
pub(crate) fn train(steps: usize) -> Result<Vec<f64>, Error> {
    let lengths = Lengths::packed(STARTS.len() - 1, ROWS, ROWS, 40, 40);
    let problem = Problem::new(lengths, (HEADS, HEADS_KV), (DIM, DIM), Types::same(Dtype::Bf16));
    let problem = problem.with_mask(Mask::CAUSAL);
    let engine = Engine::new()?;
    println!("{}", engine.bind(&problem, Pass::Forward)?.report().text());
    let extras = Extras { cu_seqlens_q: Some(&STARTS), cu_seqlens_k: Some(&STARTS), ..Extras::NONE };

    let wave =
        |heads: usize, f: f32| (0..ROWS * heads * DIM).map(|i| (i as f32 * f).sin()).collect::<Vec<f32>>();
    let mut weights = [wave(HEADS, 0.37), wave(HEADS_KV, 0.61), wave(HEADS_KV, 0.83)];
    let target = wave(HEADS, 0.11);
    let mut losses = Vec::new();
    for step in 0..=steps {
        let [q, k, v] = [0, 1, 2].map(|i| rounded(&weights[i]));
        let output = engine.forward(&problem, [&q, &k, &v], &extras)?;
        let difference: Vec<f32> = output.out.data.iter().zip(&target).map(|(a, b)| a.to_f32() - b).collect();
        let loss = difference.iter().map(|d| f64::from(d * d)).sum::<f64>() / difference.len() as f64;
        println!("step {step:>2}  loss {loss:.4}");
        losses.push(loss);
        let gradients = engine.backward(&problem, [&q, &k, &v], &extras, &output, &rounded(&difference))?;
        for (weight, gradient) in weights.iter_mut().zip([&gradients.dq, &gradients.dk, &gradients.dv]) {
            weight.iter_mut().zip(&gradient.data).for_each(|(w, g)| *w -= 0.02 * g.to_f32());
        }
    }
    Ok(losses)
}

/// A packed tensor, `[1, rows, heads, dim]`.
fn rounded(values: &[f32]) -> Tensor<bf16> {
    let data = values.iter().map(|value| bf16::from_f32(*value)).collect::<Vec<bf16>>();
    let mut tensor =
        Tensor::filled([1, ROWS, data.len() / (ROWS * DIM), DIM], TensorLayout::Bshd, bf16::ZERO);
    tensor.data = data;
    tensor
}
