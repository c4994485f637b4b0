//! A BERT encoder whose attention is fa-candle's: sentences of any lengths end to end, without padding.

use candle_core::{Device, Module, Result, Tensor};
use candle_nn::{Embedding, LayerNorm, Linear, VarBuilder};
use candle_transformers::models::bert::Config;
use fa_candle::flash_attn_varlen;

/// Names and shapes of all weights.
pub(crate) fn shapes(config: &Config) -> Vec<(String, Vec<usize>)> {
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let mut shapes = Vec::new();
    let mut add = |name: String, shape: &[usize]| shapes.push((name, shape.to_vec()));
    for (name, rows) in [
        ("word", config.vocab_size),
        ("position", config.max_position_embeddings),
        ("token_type", config.type_vocab_size),
    ] {
        add(format!("embeddings.{name}_embeddings.weight"), &[rows, hidden]);
    }
    let norm = |name: String, add: &mut dyn FnMut(String, &[usize])| {
        add(format!("{name}.LayerNorm.weight"), &[hidden]);
        add(format!("{name}.LayerNorm.bias"), &[hidden]);
    };
    norm("embeddings".to_owned(), &mut add);
    for layer in 0..config.num_hidden_layers {
        let of = |name: &str| format!("encoder.layer.{layer}.{name}");
        for (name, rows, columns) in [
            ("attention.self.query", hidden, hidden),
            ("attention.self.key", hidden, hidden),
            ("attention.self.value", hidden, hidden),
            ("attention.output.dense", hidden, hidden),
            ("intermediate.dense", inner, hidden),
            ("output.dense", hidden, inner),
        ] {
            add(of(&format!("{name}.weight")), &[rows, columns]);
            add(of(&format!("{name}.bias")), &[rows]);
        }
        norm(of("attention.output"), &mut add);
        norm(of("output"), &mut add);
    }
    shapes
}

struct Layer {
    qkv: [Linear; 3],
    out: Linear,
    inner: Linear,
    outer: Linear,
    norms: [LayerNorm; 2],
}

pub(crate) struct Encoder {
    heads: usize,
    word: Embedding,
    position: Embedding,
    token_type: Embedding,
    norm: LayerNorm,
    layers: Vec<Layer>,
}

impl Encoder {
    pub(crate) fn load(vb: VarBuilder<'_>, config: &Config) -> Result<Encoder> {
        let (hidden, inner, eps) = (config.hidden_size, config.intermediate_size, config.layer_norm_eps);
        let embeddings = vb.pp("embeddings");
        let norm = |vb: &VarBuilder<'_>| candle_nn::layer_norm(hidden, eps, vb.pp("LayerNorm"));
        let layer = |layer: usize| -> Result<Layer> {
            let vb = vb.pp("encoder.layer").pp(layer);
            let (attention, output) = (vb.pp("attention.self"), vb.pp("attention.output"));
            let square = |vb: VarBuilder<'_>| candle_nn::linear(hidden, hidden, vb);
            Ok(Layer {
                qkv: [
                    square(attention.pp("query"))?,
                    square(attention.pp("key"))?,
                    square(attention.pp("value"))?,
                ],
                out: square(output.pp("dense"))?,
                inner: candle_nn::linear(hidden, inner, vb.pp("intermediate.dense"))?,
                outer: candle_nn::linear(inner, hidden, vb.pp("output.dense"))?,
                norms: [norm(&output)?, norm(&vb.pp("output"))?],
            })
        };
        let table = |rows, name| candle_nn::embedding(rows, hidden, embeddings.pp(name));
        Ok(Encoder {
            heads: config.num_attention_heads,
            word: table(config.vocab_size, "word_embeddings")?,
            position: table(config.max_position_embeddings, "position_embeddings")?,
            token_type: table(config.type_vocab_size, "token_type_embeddings")?,
            norm: norm(&embeddings)?,
            layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?,
        })
    }

    /// The last layer's rows `(total, hidden)` of sentences end to end.
    pub(crate) fn forward(&self, sentences: &[Vec<u32>], device: &Device) -> Result<Tensor> {
        let (mut starts, mut longest) = (vec![0u32], 0);
        for sentence in sentences {
            longest = longest.max(sentence.len());
            starts.push(starts[starts.len() - 1] + sentence.len() as u32);
        }
        let ids = Tensor::new(sentences.concat(), device)?;
        let positions: Vec<u32> = sentences.iter().flat_map(|ids| 0..ids.len() as u32).collect();
        let positions = Tensor::new(positions, device)?;
        let starts = Tensor::new(starts, device)?;
        let words = (self.word.forward(&ids)? + self.position.forward(&positions)?)?;
        let mut x = self.norm.forward(&(words + self.token_type.forward(&ids.zeros_like()?)?)?)?;
        let (total, hidden) = x.dims2()?;
        let dim = hidden / self.heads;
        for Layer { qkv, out, inner, outer, norms } in &self.layers {
            let of = |i: usize| qkv[i].forward(&x)?.reshape((total, self.heads, dim));
            let scale = 1.0 / (dim as f32).sqrt();
            let attended = flash_attn_varlen(
                &of(0)?,
                &of(1)?,
                &of(2)?,
                &starts,
                &starts,
                longest,
                longest,
                scale,
                false,
            )?;
            x = norms[0].forward(&(&x + out.forward(&attended.reshape((total, hidden))?)?)?)?;
            x = norms[1].forward(&(&x + outer.forward(&inner.forward(&x)?.gelu_erf()?)?)?)?;
        }
        Ok(x)
    }
}
