//! Llama and Qwen2: a prompt, then token by token from a cache.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{Activation, VarBuilder};
use candle_transformers::models::{llama, qwen2};

use crate::decoder::{Config, Decoder};
use crate::difference;
use fa_candle_models::Random;

const STEPS: usize = 12;

const CONFIG: Config = Config {
    vocab: 101,
    hidden: 64,
    intermediate: 96,
    layers: 3,
    heads: 4,
    heads_kv: 2,
    max_positions: 64,
    rope_theta: 10_000.0,
    eps: 1e-5,
    biases: false,
    window: None,
};

fn weights(config: &Config, seed: u64) -> Result<VarBuilder<'static>> {
    Ok(VarBuilder::from_tensors(Random::new(seed).weights(config.shapes())?, DType::F32, &Device::Cpu))
}

/// Both models take the prompt and each other's tokens; `theirs` takes ids and their first position.
pub(crate) fn same_tokens(
    mut ours: impl FnMut(&Tensor) -> Result<Tensor>,
    mut theirs: impl FnMut(&Tensor, usize) -> Result<Tensor>,
    prompt: Tensor,
) -> Result<()> {
    let (mut ids, mut at) = (prompt, 0);
    let mut seen = std::collections::HashSet::new();
    for step in 0..STEPS {
        let (got, need) = (ours(&ids)?, theirs(&ids, at)?);
        let apart = difference(&got, &need);
        assert!(apart < 2e-5, "step {step}: logits differ by {apart}");
        at += ids.dim(1)?;
        ids = got.argmax(D::Minus1)?.unsqueeze(1)?;
        assert_eq!(ids.to_vec2::<u32>()?, need.argmax(D::Minus1)?.unsqueeze(1)?.to_vec2::<u32>()?);
        seen.insert(ids.to_vec2::<u32>()?);
    }
    assert!(seen.len() > 2, "the model says one thing: {seen:?}");
    Ok(())
}

#[test]
fn llama_generates_the_same_tokens() -> Result<()> {
    let config = CONFIG;
    let theirs = config.llama();
    let vb = weights(&config, 1)?;
    let mut ours = Decoder::load(vb.clone(), config)?;
    let model = llama::Llama::load(vb, &theirs)?;
    let mut cache = llama::Cache::new(true, DType::F32, &theirs, &Device::Cpu)?;
    let prompt = Random::new(2).tokens(2, 19, config.vocab, &Device::Cpu)?;
    same_tokens(|ids| ours.forward(ids), |ids, at| model.forward(ids, at, &mut cache), prompt)
}

fn qwen2_config(config: &Config) -> qwen2::Config {
    qwen2::Config {
        vocab_size: config.vocab,
        hidden_size: config.hidden,
        intermediate_size: config.intermediate,
        num_hidden_layers: config.layers,
        num_attention_heads: config.heads,
        num_key_value_heads: config.heads_kv,
        max_position_embeddings: config.max_positions,
        sliding_window: config.window.unwrap_or(config.max_positions),
        max_window_layers: config.layers,
        tie_word_embeddings: false,
        rope_theta: f64::from(config.rope_theta),
        rms_norm_eps: config.eps,
        use_sliding_window: config.window.is_some(),
        hidden_act: Activation::Silu,
    }
}

#[test]
fn qwen2_generates_the_same_tokens() -> Result<()> {
    let config = Config { biases: true, rope_theta: 1_000_000.0, heads_kv: 1, ..CONFIG };
    let vb = weights(&config, 3)?;
    let mut ours = Decoder::load(vb.clone(), config)?;
    let mut theirs = qwen2::ModelForCausalLM::new(&qwen2_config(&config), vb)?;
    let prompt = Random::new(4).tokens(1, 23, config.vocab, &Device::Cpu)?;
    same_tokens(|ids| ours.forward(ids), |ids, at| theirs.forward(ids, at)?.squeeze(1), prompt)
}

#[test]
fn a_sliding_window_is_that_of_qwen2() -> Result<()> {
    let config = Config { biases: true, window: Some(5), ..CONFIG };
    let vb = weights(&config, 5)?;
    let mut ours = Decoder::load(vb.clone(), config)?;
    let mut theirs = qwen2::ModelForCausalLM::new(&qwen2_config(&config), vb)?;
    // candle-transformers masks by the window in the prompt alone.
    let prompt = Random::new(6).tokens(1, 29, config.vocab, &Device::Cpu)?;
    let apart = difference(&ours.forward(&prompt)?, &theirs.forward(&prompt, 0)?.squeeze(1)?);
    assert!(apart < 2e-5, "logits differ by {apart}");
    Ok(())
}
