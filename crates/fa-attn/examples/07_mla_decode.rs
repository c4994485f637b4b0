//! A step of DeepSeek's multi-head latent attention: 128 heads of each request on one row of 576 per token,
//! of which the first 512 columns are the value and the others the part of the key that was rotated. The
//! cache is one buffer in pages, of which K and V are two views.
//!
//! ```text
//! cargo run --release -p fa-attn --example 07_mla_decode
//! ```

use fa_attn::{
    Dtype, Engine, Error, Extras, ForwardTensors, Lengths, Mask, Output, Pass, Problem, Side, Strides,
    Tensor, TensorLayout, TensorRef, Types, bf16,
};

/// Columns of a row of the cache: the latent, then the rotated part.
const LATENT: usize = 512;
const ROW: usize = LATENT + 64;
/// Heads, and the columns of one before its projection was absorbed into the query; 64 more are rotated.
const HEADS: usize = 128;
const NOPE: usize = 128;

/// Requests, new tokens of each (2 where one is a guess to be checked), rows of a page, pages.
const REQUESTS: usize = 3;
const TOKENS: usize = 2;
const PAGE: usize = 64;
const PAGES: usize = 8;

/// Runs the step; the attended latents of every head, `[requests, tokens, heads, 512]`. A model multiplies
/// each by its head's values' projection.
///
/// # Errors
/// What the engine refuses.
pub(crate) fn step() -> Result<Tensor<bf16>, Error> {
    // The scale is that of the heads before absorption: it does not follow from 576.
    let scale = ((NOPE + ROW - LATENT) as f64).powf(-0.5);
    let lengths = Lengths::of(REQUESTS, Side::padded(TOKENS), Side::paged(PAGE, PAGES, 4 * PAGE));
    let problem = Problem::new(lengths, (HEADS, 1), (ROW, LATENT), Types::same(Dtype::Bf16))
        .with_latent(true)
        .with_softmax_scale(Some(scale))
        .with_mask(Mask::CAUSAL);
    let wave = |len: usize, f: f32| -> Vec<bf16> {
        (0..len).map(|i| bf16::from_f32((i as f32 * f).sin())).collect()
    };
    // Columns of a query: what meets the latent, then what meets the rotated part.
    let q = Tensor::new([REQUESTS, TOKENS, HEADS, ROW], wave(REQUESTS * TOKENS * HEADS * ROW, 0.1))?;
    let cache = wave(PAGES * PAGE * ROW, 0.2);
    let row = ROW as i64;
    let strides = Strides { batch: PAGE as i64 * row, seq: row, head: row, dim: 1 };
    let v = TensorRef::new("v", &cache, [PAGES, PAGE, 1, LATENT], strides)?;
    let k = TensorRef::new("k", &cache[LATENT..], [PAGES, PAGE, 1, ROW - LATENT], strides)?;

    let page_table = [5, 1, 7, -1, 0, -1, -1, -1, 3, 2, 6, 4];
    let keys = [180, 20, 250];
    let extras = Extras { page_table: Some(&page_table), seqused_k: Some(&keys), ..Extras::NONE };
    let engine = Engine::new()?;
    let mut output = Output::new(&problem, TensorLayout::Bshd)?;
    let call = engine.bind(&problem, Pass::Forward)?;
    call.run(ForwardTensors::of([q.view("q")?, k, v], &mut output, extras)?)?;
    println!("LSE of each request's first head: {:?}", [0, 1, 2].map(|r| output.lse[r * HEADS * TOKENS]));
    Ok(output.out)
}

/// Runs the step.
#[allow(dead_code)]
fn main() -> Result<(), Error> {
    step().map(drop)
}
