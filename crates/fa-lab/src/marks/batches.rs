//! Packed batches of released models: prompts, documents, texts and images of different lengths.

use fa_core::{Dtype, Mask, Problem, ScoreMod};

use super::wanted::Wanted;
use crate::random::Random;
use crate::sequences::Sequences;

/// The head dims of queries and of values, and query and K/V heads.
type Heads = ((usize, usize), (usize, usize));

const LLAMA_8B: Heads = ((128, 128), (32, 8));

/// Documents of `tokens` rows in all, shorter ones more often: each takes a random share of at most half of
/// what is left, or of `longest`.
fn documents(random: &mut Random, tokens: usize, longest: usize) -> Vec<usize> {
    let mut lens = Vec::new();
    let mut left = tokens;
    while left > 0 {
        let len = 64 + random.below((left / 2).clamp(1, longest));
        lens.push(len.min(left));
        left -= lens[lens.len() - 1];
    }
    lens
}

/// The batches, for either pass.
pub(super) fn packed_models() -> Vec<Wanted> {
    let mut random = Random::new(41);
    let mut between = |count: usize, least: usize, most: usize| -> Vec<usize> {
        (0..count).map(|_| least + random.below(most - least + 1)).collect()
    };
    let texts = between(64, 8, 200);
    let articles = between(16, 100, 4000);
    let prompts = between(32, 50, 600);
    let long_prompts = between(8, 100, 3000);
    let images = between(24, 196, 1024);
    let mut random = Random::new(42);
    let mut documents = |tokens, longest| documents(&mut random, tokens, longest);
    let of = |name, (head_dims, heads): Heads, mask, lens: &[usize]| {
        let square = Problem::square(1, 1, heads.0, head_dims.0, mask, Dtype::Bf16);
        let problem = square.with_heads_kv(heads.1).with_head_dim_v(head_dims.1);
        Wanted { name: Some(name), ..Wanted::of(problem, Sequences::packed(lens), "packed models, bf16") }
    };
    let (causal, full) = (Mask::CAUSAL, Mask::FULL);
    let dims = |head_dim| (head_dim, head_dim);
    let mut gpt_oss = of(
        "gpt-oss 120B, window 128 and sinks, documents",
        (dims(64), (64, 8)),
        Mask::causal_window(127),
        &documents(16384, 6000),
    );
    gpt_oss.problem.score = ScoreMod::NONE.with_sinks(true);
    vec![
        of("Qwen2.5-VL vision, windows of 64", (dims(80), (16, 16)), full, &[64; 324]),
        of("Qwen2.5-VL vision, 4 images", (dims(80), (16, 16)), full, &[5184, 2304, 1024, 4096]),
        of("SigLIP 2 So400m, 24 images", (dims(72), (16, 16)), full, &images),
        of("BGE large, 64 texts", (dims(64), (16, 16)), full, &texts),
        of("ModernBERT, global, 16 articles", (dims(64), (12, 12)), full, &articles),
        of("ModernBERT, window 128, 16 articles", (dims(64), (12, 12)), Mask::window(64, 64), &articles),
        of("Llama 3 8B, documents", LLAMA_8B, causal, &documents(16384, 8192)),
        of("Llama 3 8B, 32 prompts of 50 to 600", LLAMA_8B, causal, &prompts),
        of("Llama 3 70B, 1 of 8, 8 prompts", (dims(128), (8, 1)), causal, &long_prompts),
        of("Qwen2.5 7B, documents", (dims(128), (28, 4)), causal, &documents(32768, 8192)),
        of(
            "Gemma 3 12B, window 1024, documents",
            (dims(256), (16, 8)),
            Mask::causal_window(1023),
            &documents(16384, 6000),
        ),
        gpt_oss,
        of("DeepSeek-V3, 1 of 8, 8 prompts", ((192, 128), (16, 16)), causal, &long_prompts),
        of("Phi-3 mini, documents", (dims(96), (32, 32)), causal, &documents(16384, 4096)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_fill_their_tokens_and_are_mostly_short() {
        let lens = documents(&mut Random::new(1), 16384, 4096);
        assert_eq!(lens.iter().sum::<usize>(), 16384);
        assert!(lens.iter().all(|&len| 0 < len && len <= 64 + 4096));
        assert!(lens.iter().filter(|&&len| len < 1024).count() > lens.len() / 2, "{lens:?}");
    }

    #[test]
    fn every_batch_has_a_name_of_its_own_and_is_packed() {
        let rows = packed_models();
        for row in &rows {
            row.problem.check().expect("a valid problem");
            assert!(!row.problem.lengths.is_uniform());
            assert_eq!(rows.iter().filter(|other| other.name == row.name).count(), 1);
        }
    }
}
