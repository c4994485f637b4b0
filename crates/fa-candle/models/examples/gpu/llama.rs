//! A Llama with random weights: tokens and rates with fa-candle's attention and with candle-transformers'
//! own.

use std::collections::HashMap;
use std::time::Instant;

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama;

use crate::decoder::{Config, Decoder};
use fa_candle_models::Random;

/// What f16 leaves of the logits' accuracy: tokens whose logits are as close are the same to it.
const BOUND: f32 = 2e-2;

/// Greedy tokens of a small model, step by step after the same ones; 1 where they differ by more than a tie.
pub(crate) fn check(device: &Device) -> Result<usize> {
    const STEPS: usize = 64;
    let config = Config {
        vocab: 1000,
        hidden: 512,
        intermediate: 1024,
        layers: 4,
        heads: 8,
        heads_kv: 2,
        max_positions: 512,
        rope_theta: 10_000.0,
        eps: 1e-5,
        biases: false,
        window: None,
    };
    let weights = Random::new(1).weights(config.shapes())?;
    let there = weights.iter().map(|(name, x)| Ok((name.clone(), x.to_device(device)?)));
    let there = there.collect::<Result<HashMap<_, _>>>()?;
    let vb = VarBuilder::from_tensors(there, DType::F16, device);
    let mut ours = Decoder::load(vb.clone(), config)?;
    let (model, settings) = (llama::Llama::load(vb, &config.llama())?, config.llama());
    let mut cache = llama::Cache::new(true, DType::F16, &settings, device)?;
    let mut ids = Random::new(2).tokens(2, 200, config.vocab, device)?;
    let (mut at, mut same, mut ties, mut apart) = (0, 0, 0, 0f32);
    for _ in 0..STEPS {
        let (got, need) = (ours.forward(&ids)?, model.forward(&ids, at, &mut cache)?);
        apart = apart.max((&got - &need)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?);
        at += ids.dim(1)?;
        let (got, tokens) = (got.argmax(D::Minus1)?, need.argmax(D::Minus1)?);
        ids = tokens.unsqueeze(1)?;
        // By how much their choice is above ours, by their logits.
        let above = (need.gather(&ids, 1)? - need.gather(&got.unsqueeze(1)?, 1)?)?;
        for (above, is_same) in above.flatten_all()?.to_vec1::<f32>()?.into_iter().zip(equal(&got, &tokens)?)
        {
            same += usize::from(is_same);
            ties += usize::from(!is_same && above <= BOUND);
        }
    }
    let all = 2 * STEPS;
    let passed = same + ties == all && apart <= BOUND;
    let verdict = if passed { "ok    " } else { "FAILED" };
    println!(
        "{verdict}  Llama, 2 sequences: {same} of {all} tokens are the same, {ties} have logits within \
         {BOUND}; logits differ by at most {apart:.1e}"
    );
    Ok(usize::from(!passed))
}

fn equal(a: &Tensor, b: &Tensor) -> Result<Vec<bool>> {
    Ok(a.to_vec1::<u32>()?.into_iter().zip(b.to_vec1::<u32>()?).map(|(a, b)| a == b).collect())
}

/// Tokens per second of a model of 1.2 billion weights.
pub(crate) fn rates(device: &Device) -> Result<()> {
    let config = Config {
        vocab: 32_000,
        hidden: 2048,
        intermediate: 8192,
        layers: 16,
        heads: 32,
        heads_kv: 8,
        max_positions: 8192,
        rope_theta: 500_000.0,
        eps: 1e-5,
        biases: false,
        window: None,
    };
    let mut weights = HashMap::new();
    for (name, shape) in config.shapes() {
        let columns = shape.last().copied().unwrap_or(1) as f64;
        let (mean, deviation) = if shape.len() == 1 { (1f64, 0.1) } else { (0.0, columns.recip().sqrt()) };
        let made = Tensor::randn(mean as f32, deviation as f32, shape, device)?.to_dtype(DType::BF16)?;
        weights.insert(name, made);
    }
    let vb = VarBuilder::from_tensors(weights, DType::BF16, device);
    let model = llama::Llama::load(vb.clone(), &config.llama())?;
    println!("Llama of 16 layers, 2048 wide, heads 32:8, bf16; tokens per second of prompt and of 64 steps:");
    println!("{:>5} {:>7}  {:>21}  {:>21}", "batch", "prompt", "fa-candle", "candle's own");
    for (batch, prompt) in [(1, 512), (1, 4096), (8, 2048)] {
        let ids = Random::new(3).tokens(batch, prompt, config.vocab, device)?;
        let mut rows = Vec::new();
        for own in [false, true] {
            let mut best = [0f64; 2];
            // The first run compiles, and fills candle's pools.
            for _ in 0..2 {
                let found = match own {
                    false => {
                        let mut ours = Decoder::load(vb.clone(), config)?;
                        generate(device, &ids, |ids, _| ours.forward(ids))
                    }
                    true => {
                        let settings = config.llama();
                        let mut cache = llama::Cache::new(true, DType::BF16, &settings, device)?;
                        generate(device, &ids, |ids, at| model.forward(ids, at, &mut cache))
                    }
                };
                match found {
                    Ok(found) => best = [best[0].max(found[0]), best[1].max(found[1])],
                    Err(error) => println!("batch {batch}, prompt {prompt}: {error}"),
                }
            }
            rows.push(format!("{:>12.0} {:>8.0}", best[0], best[1]));
        }
        println!("{batch:>5} {prompt:>7}  {}  {}", rows[0], rows[1]);
    }
    Ok(())
}

/// Tokens per second of the prompt, and of the steps after it.
fn generate(
    device: &Device,
    prompt: &Tensor,
    mut forward: impl FnMut(&Tensor, usize) -> Result<Tensor>,
) -> Result<[f64; 2]> {
    const STEPS: usize = 64;
    let (batch, mut at) = prompt.dims2()?;
    device.synchronize()?;
    let start = Instant::now();
    let mut ids = forward(prompt, 0)?.argmax(D::Minus1)?.unsqueeze(1)?;
    device.synchronize()?;
    let prefill = (batch * at) as f64 / start.elapsed().as_secs_f64();
    let start = Instant::now();
    for _ in 0..STEPS {
        ids = forward(&ids, at)?.argmax(D::Minus1)?.unsqueeze(1)?;
        at += 1;
    }
    device.synchronize()?;
    Ok([prefill, (batch * STEPS) as f64 / start.elapsed().as_secs_f64()])
}
