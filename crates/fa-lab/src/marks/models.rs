//! Attention layers of released models: heads, head dims and masks from their public cards or configurations,
//! at lengths of their training and serving.

use fa_core::{Dtype, Lengths, Mask, Problem, ScoreMod};

use super::wanted::Wanted;
use crate::random::Random;
use crate::sequences::{Ragged, Sequences};

/// A model's layer: name, batch, queries x keys, query and K/V heads, head dims, mask, soft cap.
struct Layer {
    name: &'static str,
    batch: usize,
    seqlens: (usize, usize),
    heads: (usize, usize),
    head_dims: (usize, usize),
    mask: Mask,
    softcap: Option<f64>,
}

const fn layer(
    name: &'static str,
    batch: usize,
    seqlens: (usize, usize),
    heads: (usize, usize),
    head_dim: usize,
    mask: Mask,
) -> Layer {
    Layer { name, batch, seqlens, heads, head_dims: (head_dim, head_dim), mask, softcap: None }
}

const CAUSAL: Mask = Mask::CAUSAL;
const FULL: Mask = Mask::FULL;

/// The layers. Windows count the query's own key among the window's keys, as the models' configurations do.
const LAYERS: [Layer; 24] = [
    layer("Llama 3 8B", 2, (8192, 8192), (32, 8), 128, CAUSAL),
    layer("Llama 3 8B, short", 8, (1024, 1024), (32, 8), 128, CAUSAL),
    layer("Llama 3 8B, chunked prefill", 1, (512, 16384), (32, 8), 128, CAUSAL),
    layer("Llama 3 70B", 2, (4096, 4096), (64, 8), 128, CAUSAL),
    layer("Qwen2.5 7B", 4, (4096, 4096), (28, 4), 128, CAUSAL),
    layer("Qwen3 32B", 1, (16384, 16384), (64, 8), 128, CAUSAL),
    layer("Qwen3 30B-A3B", 4, (2048, 2048), (32, 4), 128, CAUSAL),
    layer("Mistral 7B, window 4096", 1, (16384, 16384), (32, 8), 128, Mask::causal_window(4095)),
    Layer { softcap: Some(50.0), ..layer("Gemma 2 9B", 1, (8192, 8192), (16, 8), 256, CAUSAL) },
    layer("Gemma 3 12B, global", 1, (8192, 8192), (16, 8), 256, CAUSAL),
    layer("Gemma 3 12B, window 1024", 1, (8192, 8192), (16, 8), 256, Mask::causal_window(1023)),
    layer("Phi-3 mini", 4, (4096, 4096), (32, 32), 96, CAUSAL),
    layer("Falcon 7B", 4, (2048, 2048), (71, 1), 64, CAUSAL),
    layer("StarCoder", 1, (8192, 8192), (48, 1), 128, CAUSAL),
    Layer { head_dims: (192, 128), ..layer("DeepSeek-V3", 1, (4096, 4096), (128, 128), 192, CAUSAL) },
    layer("BERT large", 32, (512, 512), (16, 16), 64, FULL),
    layer("ViT-L/16 at 384", 32, (577, 577), (16, 16), 64, FULL),
    layer("SigLIP So400m at 384", 32, (729, 729), (16, 16), 72, FULL),
    layer("InternViT-6B at 448", 16, (1025, 1025), (25, 25), 128, FULL),
    layer("EVA-CLIP g at 224", 64, (257, 257), (16, 16), 88, FULL),
    layer("SDXL, self", 8, (4096, 4096), (10, 10), 64, FULL),
    layer("SDXL, 77 text keys", 8, (4096, 77), (10, 10), 64, FULL),
    layer("CogVideoX 5B", 1, (17776, 17776), (48, 48), 64, FULL),
    layer("Wan 2.1 14B at 480p", 1, (32760, 32760), (40, 40), 128, FULL),
];

/// Layers of other models, which no kernel, constant of the planner or default was tuned for: a held-out
/// test. A row that a change is tuned for moves to [`LAYERS`].
const HELD_OUT: [Layer; 16] = [
    layer("Llama 3 405B", 1, (6000, 6000), (128, 8), 128, CAUSAL),
    layer("Qwen2.5 14B", 2, (3000, 3000), (40, 8), 128, CAUSAL),
    layer("Mixtral 8x7B", 4, (1536, 1536), (32, 8), 128, CAUSAL),
    layer("Llama 3 8B, 2,048 more on 10,000", 1, (2048, 12048), (32, 8), 128, CAUSAL),
    Layer { softcap: Some(50.0), ..layer("Gemma 2 2B", 2, (4096, 4096), (8, 4), 256, CAUSAL) },
    layer("Gemma 3 27B, window 1024", 1, (6000, 6000), (32, 16), 128, Mask::causal_window(1023)),
    Layer { head_dims: (192, 128), ..layer("DeepSeek-V2 Lite", 4, (2048, 2048), (16, 16), 192, CAUSAL) },
    layer("Falcon 40B", 2, (2048, 2048), (128, 8), 64, CAUSAL),
    layer("Phi-2", 4, (2048, 2048), (32, 32), 80, CAUSAL),
    layer("GPT-2", 16, (1024, 1024), (12, 12), 64, CAUSAL),
    layer("Whisper large, encoder", 16, (1500, 1500), (20, 20), 64, FULL),
    layer("Whisper large, cross", 16, (448, 1500), (20, 20), 64, FULL),
    layer("DINOv2 g/14 at 518", 16, (1370, 1370), (24, 24), 64, FULL),
    layer("ViT-H/14 at 224", 64, (257, 257), (16, 16), 80, FULL),
    layer("FLUX.1", 1, (4608, 4608), (24, 24), 128, FULL),
    layer("HunyuanVideo", 1, (27000, 27000), (24, 24), 128, FULL),
];

/// Whole sequences on one of the GPUs that share a model's heads, as in training and for a prompt.
const SHARDED: [Layer; 20] = [
    layer("Llama 3 8B, 1 of 4 GPUs, 8k", 1, (8192, 8192), (8, 2), 128, CAUSAL),
    layer("Llama 3 8B, 1 of 8, 8k", 1, (8192, 8192), (4, 1), 128, CAUSAL),
    layer("Llama 3 8B, 1 of 2, 2k", 1, (2048, 2048), (16, 4), 128, CAUSAL),
    layer("Llama 3 70B, 1 of 8, 2k", 1, (2048, 2048), (8, 1), 128, CAUSAL),
    layer("Llama 3 70B, 1 of 8, 4k", 1, (4096, 4096), (8, 1), 128, CAUSAL),
    layer("Llama 3 70B, 1 of 8, 8k", 1, (8192, 8192), (8, 1), 128, CAUSAL),
    layer("Llama 3 70B, 1 of 8, 16k", 1, (16384, 16384), (8, 1), 128, CAUSAL),
    layer("Llama 3 70B, 1 of 4, 2 x 4k", 2, (4096, 4096), (16, 2), 128, CAUSAL),
    layer("Llama 3 405B, 1 of 8, 8k", 1, (8192, 8192), (16, 1), 128, CAUSAL),
    layer("Qwen2.5 7B, 1 of 4, 3,000", 1, (3000, 3000), (7, 1), 128, CAUSAL),
    layer("Qwen2.5 14B, 1 of 4, 4k", 1, (4096, 4096), (10, 2), 128, CAUSAL),
    layer("Qwen3 30B-A3B, 1 of 2, 4 x 1k", 4, (1024, 1024), (16, 2), 128, CAUSAL),
    layer("Mistral 7B, window 4096, 1 of 4, 16k", 1, (16384, 16384), (8, 2), 128, Mask::causal_window(4095)),
    layer("Gemma 3 12B, global, 1 of 4, 4k", 1, (4096, 4096), (4, 2), 256, CAUSAL),
    layer("Gemma 3 12B, window 1024, 1 of 4, 8k", 1, (8192, 8192), (4, 2), 256, Mask::causal_window(1023)),
    Layer {
        head_dims: (192, 128),
        ..layer("DeepSeek-V3, 1 of 8, 4k", 1, (4096, 4096), (16, 16), 192, CAUSAL)
    },
    layer("gpt-oss 120B, full, 1 of 4, 4k", 1, (4096, 4096), (16, 2), 64, CAUSAL),
    layer("GPT-3 13B, 1 of 8, 2 x 2k", 2, (2048, 2048), (5, 5), 128, CAUSAL),
    layer("FLUX.1, 1 of 4", 1, (4608, 4608), (6, 6), 128, FULL),
    layer("Wan 2.1 14B at 480p, 1 of 8", 1, (32760, 32760), (5, 5), 128, FULL),
];

/// Decoding by such models: one token on a cache, and a few that a smaller model guessed. None has a window,
/// under which not all of the cache is read.
const DECODING: [Layer; 12] = [
    layer("Llama 3 8B, 1 x 2k", 1, (1, 2048), (32, 8), 128, FULL),
    layer("Llama 3 8B, 32 x 2k", 32, (1, 2048), (32, 8), 128, FULL),
    layer("Llama 3 8B, 4 tokens guessed", 8, (4, 8192), (32, 8), 128, CAUSAL),
    layer("Llama 3 70B, 16 x 4k", 16, (1, 4096), (64, 8), 128, FULL),
    layer("Llama 3 70B, 8 tokens guessed", 1, (8, 16384), (64, 8), 128, CAUSAL),
    layer("Qwen2.5 7B, 4 x 4k", 4, (1, 4096), (28, 4), 128, FULL),
    layer("Qwen2.5 14B, 8 x 6k", 8, (1, 6000), (40, 8), 128, FULL),
    layer("Qwen3 30B-A3B, 1 x 32k", 1, (1, 32768), (32, 4), 128, FULL),
    layer("Gemma 3 12B, global, 4 x 8k", 4, (1, 8192), (16, 8), 256, FULL),
    layer("Phi-3 mini, 8 x 2k", 8, (1, 2048), (32, 32), 96, FULL),
    layer("gpt-oss 120B, full, 8 x 8k", 8, (1, 8192), (64, 8), 64, FULL),
    layer("StarCoder, 2 x 8k", 2, (1, 8192), (48, 1), 128, FULL),
];

/// What chunks are summarised as.
const CHUNKS_GROUP: &str = "chunks, bf16";

/// Chunks of prompts, or what is new of a conversation, on one of the GPUs that share a model's heads.
const CHUNKS: [Layer; 10] = [
    layer("Llama 3 8B, 1 of 4 GPUs, 512 on 32k", 1, (512, 32768), (8, 2), 128, CAUSAL),
    layer("Llama 3 70B, 1 of 8, 512 on 16k", 1, (512, 16384), (8, 1), 128, CAUSAL),
    layer("Llama 3 70B, 1 of 8, 1,024 on 6,000", 1, (1024, 6000), (8, 1), 128, CAUSAL),
    layer("Llama 3 405B, 1 of 8, 512 on 16k", 1, (512, 16384), (16, 1), 128, CAUSAL),
    layer("Qwen3 32B, 1 of 8, 256 on 8k", 1, (256, 8192), (8, 1), 128, CAUSAL),
    layer("Qwen2.5 7B, 1 of 4, 300 on 5,000", 1, (300, 5000), (7, 1), 128, CAUSAL),
    layer(
        "Mistral 7B, window 4096, 1 of 4, 512 on 32k",
        1,
        (512, 32768),
        (8, 2),
        128,
        Mask::causal_window(4095),
    ),
    layer("Gemma 3 12B, global, 1 of 4, 512 on 8k", 1, (512, 8192), (4, 2), 256, CAUSAL),
    Layer {
        head_dims: (192, 128),
        ..layer("DeepSeek-V3, 1 of 8, 512 on 16k", 1, (512, 16384), (16, 16), 192, CAUSAL)
    },
    layer("gpt-oss 120B, full, 1 of 8, 512 on 16k", 1, (512, 16384), (8, 1), 64, CAUSAL),
];

/// The chunk of Llama 3 70B, 512 on 16k, on a cache in pages of 16.
fn paged_chunk() -> Wanted {
    let keys = Ragged::paged(&[16384], 16, 0, &mut Random::new(16));
    let sequences = Sequences { q: Ragged::uniform(1, 512), k: keys };
    let name = Some("Llama 3 70B, 1 of 8, 512 on 16k, pages of 16");
    Wanted { name, ..Wanted::of(CHUNKS[1].problem(), sequences, CHUNKS_GROUP) }
}

/// The models' layers with their names.
pub(super) fn shapes() -> Vec<Wanted> {
    LAYERS.iter().map(|layer| layer.wanted("models, bf16")).collect()
}

/// The layers that are kept out of all tuning.
pub(super) fn held_out() -> Vec<Wanted> {
    HELD_OUT.iter().map(|layer| layer.wanted("held out, bf16")).collect()
}

/// Whole sequences on few heads.
pub(super) fn sharded() -> Vec<Wanted> {
    SHARDED.iter().map(|layer| layer.wanted("one of several GPUs, bf16")).collect()
}

/// Chunks of prompts on few heads.
pub(super) fn chunks() -> Vec<Wanted> {
    CHUNKS.iter().map(|layer| layer.wanted(CHUNKS_GROUP)).chain([paged_chunk()]).collect()
}

/// Layers of decoding models, as replays of a CUDA graph.
pub(super) fn decoding() -> Vec<Wanted> {
    let of = |layer: &Layer| Wanted {
        name: Some(layer.name),
        ..Wanted::decoding(layer.problem(), "decoding models, bf16")
    };
    DECODING.iter().map(of).collect()
}

impl Layer {
    fn problem(&self) -> Problem {
        let (seqlen_q, seqlen_k) = self.seqlens;
        let (heads_q, heads_kv) = self.heads;
        let (head_dim, head_dim_v) = self.head_dims;
        let square = Problem::square(self.batch, seqlen_q, heads_q, head_dim, self.mask, Dtype::Bf16);
        square
            .with_lengths(Lengths::uniform(square.lengths.sequences(), square.lengths.max_q(), seqlen_k))
            .with_heads_kv(heads_kv)
            .with_head_dim_v(head_dim_v)
            .with_score(ScoreMod::NONE.with_softcap(self.softcap))
    }

    /// The problem, summarised with the rows of `group`.
    fn wanted(&self, group: &'static str) -> Wanted {
        Wanted { name: Some(self.name), ..Wanted::new(self.problem(), group) }
    }
}
