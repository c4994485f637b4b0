//! DeepSeek's decoder with multi-head latent attention: a prompt, then token by token from a cache of each
//! head's keys and values, and from one of latents, whose projections are absorbed into queries and outputs.

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::kv_cache::KvCache;
use candle_nn::{Embedding, Linear, RmsNorm, VarBuilder};
use candle_transformers::models::deepseek2;
use fa_candle::{Options, attention, flash_attn};
use fa_candle_models::Random;

use crate::generate::same_tokens;

const VOCAB: usize = 101;
const HIDDEN: usize = 64;
const INNER: usize = 96;
const LAYERS: usize = 3;
const HEADS: usize = 4;
/// Columns of a head without and with rotary embedding, and of its values.
const NOPE: usize = 16;
const ROPE: usize = 8;
const VALUE: usize = 24;
/// Columns of what all heads share, and of what their queries are made of.
const LATENT: usize = 32;
const QUERY: usize = 40;
const POSITIONS: usize = 64;
const EPS: f64 = 1e-6;

/// Names and shapes of all weights, DeepSeek's.
fn shapes() -> Vec<(String, Vec<usize>)> {
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![VOCAB, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
        ("lm_head.weight".to_owned(), vec![VOCAB, HIDDEN]),
    ];
    for layer in 0..LAYERS {
        shapes.extend(
            [
                ("input_layernorm", vec![HIDDEN]),
                ("post_attention_layernorm", vec![HIDDEN]),
                ("self_attn.q_a_proj", vec![QUERY, HIDDEN]),
                ("self_attn.q_a_layernorm", vec![QUERY]),
                ("self_attn.q_b_proj", vec![HEADS * (NOPE + ROPE), QUERY]),
                ("self_attn.kv_a_proj_with_mqa", vec![LATENT + ROPE, HIDDEN]),
                ("self_attn.kv_a_layernorm", vec![LATENT]),
                ("self_attn.kv_b_proj", vec![HEADS * (NOPE + VALUE), LATENT]),
                ("self_attn.o_proj", vec![HIDDEN, HEADS * VALUE]),
                ("mlp.gate_proj", vec![INNER, HIDDEN]),
                ("mlp.up_proj", vec![INNER, HIDDEN]),
                ("mlp.down_proj", vec![HIDDEN, INNER]),
            ]
            .map(|(name, shape)| (format!("model.layers.{layer}.{name}.weight"), shape)),
        );
    }
    shapes
}

struct Layer {
    norms: [RmsNorm; 2],
    q: (Linear, RmsNorm, Linear),
    row: Linear,
    latent_norm: RmsNorm,
    /// Each head's keys and values from the latent: `(heads, NOPE, LATENT)`, `(heads, VALUE, LATENT)`.
    up: [Tensor; 2],
    out: Linear,
    gate: Linear,
    inner: Linear,
    down: Linear,
    /// Keys and values of each head; absorbed, the key's columns that all heads share, and latents: a fifth
    /// of the numbers here, a 71st in DeepSeek-V3.
    cache: KvCache,
    absorbed: bool,
}

impl Layer {
    fn load(vb: &VarBuilder<'_>, absorbed: bool) -> Result<Layer> {
        let (own, mlp) = (vb.pp("self_attn"), vb.pp("mlp"));
        let plain = |rows, columns, name| candle_nn::linear_no_bias(rows, columns, own.pp(name));
        let norm = |columns, vb: VarBuilder<'_>| candle_nn::rms_norm(columns, EPS, vb);
        let up = own.pp("kv_b_proj").get((HEADS * (NOPE + VALUE), LATENT), "weight")?;
        let up = up.reshape((HEADS, NOPE + VALUE, LATENT))?;
        Ok(Layer {
            norms: [
                norm(HIDDEN, vb.pp("input_layernorm"))?,
                norm(HIDDEN, vb.pp("post_attention_layernorm"))?,
            ],
            q: (
                plain(HIDDEN, QUERY, "q_a_proj")?,
                norm(QUERY, own.pp("q_a_layernorm"))?,
                plain(QUERY, HEADS * (NOPE + ROPE), "q_b_proj")?,
            ),
            row: plain(HIDDEN, LATENT + ROPE, "kv_a_proj_with_mqa")?,
            latent_norm: norm(LATENT, own.pp("kv_a_layernorm"))?,
            up: [up.narrow(1, 0, NOPE)?.contiguous()?, up.narrow(1, NOPE, VALUE)?.contiguous()?],
            out: plain(HEADS * VALUE, HIDDEN, "o_proj")?,
            gate: candle_nn::linear_no_bias(HIDDEN, INNER, mlp.pp("gate_proj"))?,
            inner: candle_nn::linear_no_bias(HIDDEN, INNER, mlp.pp("up_proj"))?,
            down: candle_nn::linear_no_bias(INNER, HIDDEN, mlp.pp("down_proj"))?,
            cache: KvCache::new(1, POSITIONS),
            absorbed,
        })
    }

    /// Each head's values `(batch, seqlen, HEADS, VALUE)`; `x` is normalised.
    fn attend(&mut self, x: &Tensor, turns: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let (batch, seqlen, _) = x.dims3()?;
        let (a, norm, b) = &self.q;
        let q = b.forward(&norm.forward(&a.forward(x)?)?)?.reshape((batch, seqlen, HEADS, NOPE + ROPE))?;
        let (q_nope, q_rope) = (q.narrow(3, 0, NOPE)?, turns(&q.narrow(3, NOPE, ROPE)?)?);
        let row = self.row.forward(x)?;
        let latent = self.latent_norm.forward(&row.narrow(2, 0, LATENT)?.contiguous()?)?.unsqueeze(2)?;
        let rope = turns(&row.narrow(2, LATENT, ROPE)?.unsqueeze(2)?)?;
        // Of the heads before absorption.
        let scale = 1.0 / ((NOPE + ROPE) as f32).sqrt();
        let [up_k, up_v] = &self.up;
        if self.absorbed {
            let (k, v) = self.cache.append(&rope, &latent)?;
            let q = Tensor::cat(&[&by_head(&q_nope, up_k)?, &q_rope], 3)?;
            let out = attention(&q, &k, &v, &Options::causal(scale).with_latent(true))?;
            return by_head(&out, &up_v.t()?);
        }
        let all = latent.broadcast_as((batch, seqlen, HEADS, LATENT))?;
        let rope = rope.broadcast_as((batch, seqlen, HEADS, ROPE))?;
        let k = Tensor::cat(&[&by_head(&all, &up_k.t()?)?, &rope.contiguous()?], 3)?;
        let (k, v) = self.cache.append(&k, &by_head(&all, &up_v.t()?)?)?;
        flash_attn(&Tensor::cat(&[&q_nope, &q_rope], 3)?, &k, &v, scale, true)
    }
}

/// `x` `(batch, seqlen, heads, columns)` times each head's own matrix.
fn by_head(x: &Tensor, matrices: &Tensor) -> Result<Tensor> {
    let (batch, seqlen, heads, columns) = x.dims4()?;
    let rows = x.reshape((batch * seqlen, heads, columns))?.transpose(0, 1)?.contiguous()?;
    rows.matmul(&matrices.contiguous()?)?.transpose(0, 1)?.reshape((batch, seqlen, heads, ()))
}

struct Decoder {
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
    cos: Tensor,
    sin: Tensor,
    at: usize,
}

impl Decoder {
    fn load(vb: &VarBuilder<'_>, absorbed: bool) -> Result<Decoder> {
        let model = vb.pp("model");
        let rates = (0..ROPE).step_by(2).map(|i| 10_000f32.powf(-(i as f32) / ROPE as f32));
        let rates = Tensor::from_iter(rates, vb.device())?.unsqueeze(0)?;
        let positions = Tensor::arange(0, POSITIONS as u32, vb.device())?.to_dtype(DType::F32)?;
        let angles = positions.unsqueeze(1)?.matmul(&rates)?;
        let layers = (0..LAYERS).map(|layer| Layer::load(&model.pp("layers").pp(layer), absorbed));
        Ok(Decoder {
            embedding: candle_nn::embedding(VOCAB, HIDDEN, model.pp("embed_tokens"))?,
            layers: layers.collect::<Result<_>>()?,
            norm: candle_nn::rms_norm(HIDDEN, EPS, model.pp("norm"))?,
            head: candle_nn::linear_no_bias(HIDDEN, VOCAB, vb.pp("lm_head"))?,
            cos: angles.cos()?,
            sin: angles.sin()?,
            at: 0,
        })
    }

    /// Logits `(batch, vocab)` of the token after `ids` `(batch, seqlen)`, which follow what the cache holds.
    fn forward(&mut self, ids: &Tensor) -> Result<Tensor> {
        let (_, seqlen) = ids.dims2()?;
        let (cos, sin) = (self.cos.narrow(0, self.at, seqlen)?, self.sin.narrow(0, self.at, seqlen)?);
        let turns = |x: &Tensor| {
            let x = x.transpose(1, 2)?.contiguous()?;
            candle_nn::rotary_emb::rope_i(&x, &cos, &sin)?.transpose(1, 2)?.contiguous()
        };
        let mut x = self.embedding.forward(ids)?;
        for layer in &mut self.layers {
            let values = layer.attend(&layer.norms[0].forward(&x)?, turns)?;
            x = (&x + layer.out.forward(&values.flatten_from(2)?)?)?;
            let rows = layer.norms[1].forward(&x)?;
            let inner = (layer.gate.forward(&rows)?.silu()? * layer.inner.forward(&rows)?)?;
            x = (&x + layer.down.forward(&inner)?)?;
        }
        self.at += seqlen;
        let last = self.norm.forward(&x.narrow(1, seqlen - 1, 1)?.contiguous()?)?;
        self.head.forward(&last)?.squeeze(1)
    }
}

/// The same model to candle-transformers.
fn theirs() -> deepseek2::DeepSeekV2Config {
    let config = serde_json::json!({
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "moe_intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": EPS,
        "rope_theta": 10_000.0,
        "attention_bias": false,
        "q_lora_rank": QUERY,
        "qk_rope_head_dim": ROPE,
        "kv_lora_rank": LATENT,
        "v_head_dim": VALUE,
        "qk_nope_head_dim": NOPE,
        "n_group": 1,
        "topk_group": 1,
    });
    serde_json::from_value(config).expect("the configuration has every field")
}

#[test]
fn deepseek_generates_the_same_tokens_absorbed_and_not() -> Result<()> {
    let weights = Random::new(11).weights(shapes())?;
    let vb = VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
    let prompt = Random::new(12).tokens(2, 21, VOCAB, &Device::Cpu)?;
    for absorbed in [false, true] {
        let mut ours = Decoder::load(&vb, absorbed)?;
        let mut model = deepseek2::DeepSeekV2::new(&theirs(), vb.clone())?;
        same_tokens(|ids| ours.forward(ids), |ids, at| model.forward(ids, at), prompt.clone())?;
    }
    Ok(())
}
