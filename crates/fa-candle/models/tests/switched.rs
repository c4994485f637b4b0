//! candle-transformers' own models, as they stand, with their `use_flash_attn` on fa-candle:
//! `[patch.crates-io]` has put it in the place of candle-flash-attn. The same weights without flash
//! attention give the same tokens.
//!
//! `cargo xtask candle models` on the CPU; with a CUDA toolkit, `--features cuda,switched` and the patch.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_transformers::models::{
    gemma, gemma2, gemma3, granite, helium, llama, mistral, mixtral, stable_diffusion::unet_2d, stable_lm,
};
use serde_json::{Value, json};

use fa_candle_models::Random;

const VOCAB: usize = 61;
const PROMPT: usize = 11;
const STEPS: usize = 12;

fn device() -> Result<Device> {
    if cfg!(feature = "cuda") { Device::new_cuda(0) } else { Ok(Device::Cpu) }
}

/// On a GPU flash attention computes in 16 bits.
fn dtype() -> DType {
    if cfg!(feature = "cuda") { DType::BF16 } else { DType::F32 }
}

/// Weights from a seed for whatever a model asks for.
struct Weights(VarMap);

impl Weights {
    fn vb(&self) -> Result<VarBuilder<'static>> {
        Ok(VarBuilder::from_varmap(&self.0, dtype(), &device()?))
    }

    /// Gives all that has been asked for its values.
    fn seed(&self) -> Result<()> {
        let vars = self.0.data().lock().expect("no thread has panicked");
        let mut names: Vec<_> = vars.iter().map(|(name, var)| (name.clone(), var.dims().to_vec())).collect();
        names.sort();
        for (name, value) in Random::new(11).weights(names)? {
            let var = &vars[&name];
            var.set(&value.to_dtype(var.dtype())?.to_device(var.device())?)?;
        }
        Ok(())
    }
}

/// Logits of the token after some ids at a position.
type Forward = Box<dyn FnMut(&Tensor, usize) -> Result<Tensor>>;

/// Greedy tokens after a prompt, and the logits that they are of.
fn generate(mut forward: Forward) -> Result<(Vec<u32>, Tensor)> {
    let device = device()?;
    let mut ids = Random::new(5).tokens(1, PROMPT, VOCAB, &device)?;
    let (mut at, mut tokens, mut logits) = (0, Vec::new(), Vec::new());
    for _ in 0..STEPS {
        let row = forward(&ids, at)?.flatten_all()?.to_dtype(DType::F32)?;
        at += ids.dim(1)?;
        let next = row.argmax(0)?.to_scalar::<u32>()?;
        ids = Tensor::new(&[[next]], &device)?;
        tokens.push(next);
        logits.push(row);
    }
    Ok((tokens, Tensor::stack(&logits, 0)?))
}

fn apart(a: &Tensor, b: &Tensor) -> Result<f32> {
    (a - b)?.abs()?.flatten_all()?.max(0)?.to_scalar()
}

/// A model with and without flash attention on the same weights; `load` is told which.
fn compare(name: &str, load: impl Fn(VarBuilder<'static>, bool) -> Result<Forward>) -> Result<()> {
    let weights = Weights(VarMap::new());
    drop(load(weights.vb()?, false)?);
    weights.seed()?;
    let (want, logits) = generate(load(weights.vb()?, false)?)?;
    let (got, flash) = generate(load(weights.vb()?, true)?)?;
    let largest = logits.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
    println!("{name}: tokens {got:?}, logits differ by {:.1e} of {largest:.2}", apart(&logits, &flash)?);
    if dtype() == DType::F32 {
        assert_eq!(got, want, "{name}");
        assert!(apart(&logits, &flash)? <= 2e-5 * largest, "{name}: logits differ");
        assert!(got.windows(2).any(|pair| pair[0] != pair[1]), "{name} says one word: {got:?}");
    } else {
        // In 16 bits close logits may change places: those of the first step are on the same ids.
        assert!(apart(&logits.get(0)?, &flash.get(0)?)? <= 4e-2 * largest, "{name}: logits differ");
    }
    Ok(())
}

/// What configurations of decoders have in common, and what a model adds.
fn config<T: serde::de::DeserializeOwned>(of_model: Value) -> T {
    let mut all = json!({
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "attention_bias": false,
    });
    let (Value::Object(all), Value::Object(more)) = (&mut all, of_model) else { panic!("objects") };
    all.extend(more);
    serde_json::from_value(Value::Object(all.clone())).expect("a configuration")
}

#[test]
fn llama_and_granite() -> Result<()> {
    compare("Llama", |vb, flash| {
        let config = config::<llama::LlamaConfig>(json!({})).into_config(flash);
        let model = llama::Llama::load(vb, &config)?;
        let mut cache = llama::Cache::new(true, dtype(), &config, &device()?)?;
        Ok(Box::new(move |ids, at| model.forward(ids, at, &mut cache)))
    })?;
    compare("Granite", |vb, flash| {
        let config = config::<granite::GraniteConfig>(json!({})).into_config(flash);
        let model = granite::Granite::load(vb, &config)?;
        let mut cache = granite::Cache::new(true, dtype(), &config, &device()?)?;
        Ok(Box::new(move |ids, at| model.forward(ids, at, &mut cache)))
    })
}

#[test]
fn mistral_and_mixtral() -> Result<()> {
    compare("Mistral", |vb, flash| {
        let config = config(json!({ "use_flash_attn": flash }));
        let mut model = mistral::Model::new(&config, vb)?;
        Ok(Box::new(move |ids, at| model.forward(ids, at)))
    })?;
    compare("Mixtral", |vb, flash| {
        let config = config(json!({
            "use_flash_attn": flash, "hidden_act": "silu", "sliding_window": 4096,
            "num_experts_per_tok": 2, "num_local_experts": 4,
        }));
        let mut model = mixtral::Model::new(&config, vb)?;
        Ok(Box::new(move |ids, at| model.forward(ids, at)))
    })
}

#[test]
fn three_gemmas() -> Result<()> {
    compare("Gemma", |vb, flash| {
        let config = config(json!({ "hidden_act": "gelu" }));
        let mut model = gemma::Model::new(flash, &config, vb)?;
        Ok(Box::new(move |ids, at| model.forward(ids, at)))
    })?;
    // Their calls leave out the cap of scores and the window: here the models have none that shows.
    compare("Gemma 2", |vb, flash| {
        let config = config(json!({
            "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": null, "query_pre_attn_scalar": 16, "sliding_window": null,
        }));
        let mut model = gemma2::Model::new(flash, &config, vb)?;
        Ok(Box::new(move |ids, at| model.forward(ids, at)))
    })?;
    // Its cache takes V as it comes, which lies end to end where there is one head.
    compare("Gemma 3", |vb, flash| {
        let config = config(json!({
            "num_key_value_heads": 1,
            "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": null,
            "attn_logit_softcapping": null, "query_pre_attn_scalar": 16, "sliding_window": 64,
            "sliding_window_pattern": 2, "rope_local_base_freq": 10_000.0,
        }));
        let mut model = gemma3::Model::new(flash, &config, vb)?;
        Ok(Box::new(move |ids, at| model.forward(ids, at)))
    })
}

#[test]
fn stable_lm_and_helium() -> Result<()> {
    compare("StableLM", |vb, flash| {
        let config = config(json!({
            "use_flash_attn": flash, "hidden_act": "silu", "partial_rotary_factor": 0.5,
            "layer_norm_eps": 1e-5, "use_cache": true,
        }));
        let mut model = stable_lm::Model::new(&config, vb)?;
        Ok(Box::new(move |ids, at| model.forward(ids, at)))
    })?;
    compare("Helium", |vb, flash| {
        let config = config(json!({
            "use_flash_attn": flash, "hidden_act": "silu", "mlp_bias": false, "tie_word_embeddings": false,
            "bos_token_id": 1, "eos_token_id": 2,
        }));
        let mut model = helium::Model::new(&config, vb)?;
        Ok(Box::new(move |ids, at| model.forward(ids, at)))
    })
}

/// A step of a small UNet: self-attention over the picture, cross-attention to the text, in f16 by its own
/// casts.
#[test]
fn stable_diffusion() -> Result<()> {
    let block =
        |cross| unet_2d::BlockConfig { out_channels: 64, use_cross_attn: cross, attention_head_dim: 8 };
    let config = unet_2d::UNet2DConditionModelConfig {
        blocks: vec![block(Some(1)), block(None)],
        layers_per_block: 1,
        norm_num_groups: 8,
        cross_attention_dim: 24,
        ..Default::default()
    };
    let weights = Weights(VarMap::new());
    let load = |flash| unet_2d::UNet2DConditionModel::new(weights.vb()?, 4, 4, flash, config.clone());
    drop(load(false)?);
    weights.seed()?;
    let device = device()?;
    let noise = |shape: &[usize], seed| -> Result<Tensor> {
        let values = Random::new(seed).weights(vec![("x".to_owned(), shape.to_vec())])?;
        values["x"].to_dtype(dtype())?.to_device(&device)
    };
    let (picture, text) = (noise(&[2, 4, 16, 16], 3)?, noise(&[2, 7, 24], 4)?);
    let step = |flash| load(flash)?.forward(&picture, 500.0, &text)?.to_dtype(DType::F32);
    let (want, got) = (step(false)?, step(true)?);
    let largest = want.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
    println!("Stable Diffusion: differs by {:.1e} of {largest:.2}", apart(&want, &got)?);
    let limit = if dtype() == DType::F32 { 2e-3 } else { 4e-2 };
    assert!(largest > 0.01 && apart(&want, &got)? <= limit * largest);
    Ok(())
}
