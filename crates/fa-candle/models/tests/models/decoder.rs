//! A decoder with the weights of Llama and of Qwen2, whose attention is fa-candle's: rows stay where the
//! projections put them, `(batch, seqlen, heads, head_dim)`, and the cache is read as far as it is filled.

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::kv_cache::KvCache;
use candle_nn::{Embedding, Linear, RmsNorm, VarBuilder};
use candle_transformers::models::llama;
use fa_candle::flash_attn_windowed;

#[derive(Clone, Copy)]
pub(crate) struct Config {
    pub vocab: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub heads: usize,
    pub heads_kv: usize,
    pub max_positions: usize,
    pub rope_theta: f32,
    pub eps: f64,
    /// Whether the projections to Q, K and V have biases, as Qwen2's.
    pub biases: bool,
    /// Keys left of a query that it sees.
    pub window: Option<usize>,
}

impl Config {
    /// The same model to candle-transformers.
    pub(crate) fn llama(&self) -> llama::Config {
        llama::Config {
            hidden_size: self.hidden,
            intermediate_size: self.intermediate,
            vocab_size: self.vocab,
            num_hidden_layers: self.layers,
            num_attention_heads: self.heads,
            num_key_value_heads: self.heads_kv,
            use_flash_attn: false,
            rms_norm_eps: self.eps,
            rope_theta: self.rope_theta,
            bos_token_id: None,
            eos_token_id: None,
            rope_scaling: None,
            max_position_embeddings: self.max_positions,
            tie_word_embeddings: false,
        }
    }

    fn head_dim(&self) -> usize {
        self.hidden / self.heads
    }

    /// Names and shapes of all weights.
    pub(crate) fn shapes(&self) -> Vec<(String, Vec<usize>)> {
        let Config { vocab, hidden, intermediate, .. } = *self;
        let kv = self.heads_kv * self.head_dim();
        let mut shapes = vec![
            ("model.embed_tokens.weight".to_owned(), vec![vocab, hidden]),
            ("model.norm.weight".to_owned(), vec![hidden]),
            ("lm_head.weight".to_owned(), vec![vocab, hidden]),
        ];
        for layer in 0..self.layers {
            let mut add = |name: &str, shape: &[usize]| {
                shapes.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
            };
            add("input_layernorm.weight", &[hidden]);
            add("post_attention_layernorm.weight", &[hidden]);
            for (name, out) in [("q", hidden), ("k", kv), ("v", kv)] {
                add(&format!("self_attn.{name}_proj.weight"), &[out, hidden]);
                if self.biases {
                    add(&format!("self_attn.{name}_proj.bias"), &[out]);
                }
            }
            add("self_attn.o_proj.weight", &[hidden, hidden]);
            add("mlp.gate_proj.weight", &[intermediate, hidden]);
            add("mlp.up_proj.weight", &[intermediate, hidden]);
            add("mlp.down_proj.weight", &[hidden, intermediate]);
        }
        shapes
    }
}

struct Layer {
    norms: [RmsNorm; 2],
    qkv: [Linear; 3],
    out: Linear,
    gate: Linear,
    up: Linear,
    down: Linear,
    cache: KvCache,
}

pub(crate) struct Decoder {
    config: Config,
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
    cos: Tensor,
    sin: Tensor,
}

impl Decoder {
    pub(crate) fn load(vb: VarBuilder<'_>, config: Config) -> Result<Decoder> {
        let Config { vocab, hidden, intermediate, max_positions, eps, .. } = config;
        let kv = config.heads_kv * config.head_dim();
        let model = vb.pp("model");
        let plain = candle_nn::linear_no_bias;
        let projection = if config.biases { candle_nn::linear } else { candle_nn::linear_no_bias };
        let layer = |layer: usize| -> Result<Layer> {
            let vb = model.pp("layers").pp(layer);
            let (attention, mlp) = (vb.pp("self_attn"), vb.pp("mlp"));
            Ok(Layer {
                norms: [
                    candle_nn::rms_norm(hidden, eps, vb.pp("input_layernorm"))?,
                    candle_nn::rms_norm(hidden, eps, vb.pp("post_attention_layernorm"))?,
                ],
                qkv: [
                    projection(hidden, hidden, attention.pp("q_proj"))?,
                    projection(hidden, kv, attention.pp("k_proj"))?,
                    projection(hidden, kv, attention.pp("v_proj"))?,
                ],
                out: plain(hidden, hidden, attention.pp("o_proj"))?,
                gate: plain(hidden, intermediate, mlp.pp("gate_proj"))?,
                up: plain(hidden, intermediate, mlp.pp("up_proj"))?,
                down: plain(intermediate, hidden, mlp.pp("down_proj"))?,
                cache: KvCache::new(1, max_positions),
            })
        };
        let (cos, sin) = turns(&config, vb.dtype(), vb.device())?;
        Ok(Decoder {
            config,
            embedding: candle_nn::embedding(vocab, hidden, model.pp("embed_tokens"))?,
            layers: (0..config.layers).map(layer).collect::<Result<_>>()?,
            norm: candle_nn::rms_norm(hidden, eps, model.pp("norm"))?,
            head: plain(hidden, vocab, vb.pp("lm_head"))?,
            cos,
            sin,
        })
    }

    /// Logits `(batch, vocab)` of the token after `ids` `(batch, seqlen)`, which follow what the cache holds.
    pub(crate) fn forward(&mut self, ids: &Tensor) -> Result<Tensor> {
        let (batch, seqlen) = ids.dims2()?;
        let Config { heads, heads_kv, window, .. } = self.config;
        let dim = self.config.head_dim();
        let mut x = self.embedding.forward(ids)?;
        for Layer { norms, qkv, out, gate, up, down, cache } in &mut self.layers {
            let at = cache.current_seq_len();
            let (cos, sin) = (self.cos.narrow(0, at, seqlen)?, self.sin.narrow(0, at, seqlen)?);
            let rows = norms[0].forward(&x)?;
            let of = |i: usize, heads| qkv[i].forward(&rows)?.reshape((batch, seqlen, heads, dim));
            let q = candle_nn::rotary_emb::rope_thd(&of(0, heads)?, &cos, &sin)?;
            let k = candle_nn::rotary_emb::rope_thd(&of(1, heads_kv)?, &cos, &sin)?;
            let (k, v) = cache.append(&k, &of(2, heads_kv)?)?;
            let scale = 1.0 / (dim as f32).sqrt();
            let attended = flash_attn_windowed(&q, &k, &v, scale, window, Some(0))?;
            x = (&x + out.forward(&attended.reshape((batch, seqlen, heads * dim))?)?)?;
            let rows = norms[1].forward(&x)?;
            let inner = (gate.forward(&rows)?.silu()? * up.forward(&rows)?)?;
            x = (&x + down.forward(&inner)?)?;
        }
        let last = self.norm.forward(&x.narrow(1, seqlen - 1, 1)?.contiguous()?)?;
        self.head.forward(&last)?.squeeze(1)?.to_dtype(DType::F32)
    }
}

/// Cosines and sines of the rotary embedding, `(max_positions, head_dim / 2)`.
fn turns(config: &Config, dtype: DType, device: &Device) -> Result<(Tensor, Tensor)> {
    let dim = config.head_dim();
    let rates: Vec<f32> =
        (0..dim).step_by(2).map(|i| config.rope_theta.powf(-(i as f32) / dim as f32)).collect();
    let rates = Tensor::new(rates, device)?.unsqueeze(0)?;
    let positions = Tensor::arange(0, config.max_positions as u32, device)?.to_dtype(DType::F32)?;
    let angles = positions.unsqueeze(1)?.matmul(&rates)?;
    Ok((angles.cos()?.to_dtype(dtype)?, angles.sin()?.to_dtype(dtype)?))
}
