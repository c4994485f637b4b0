//! One step of decoding: a new token of each request on its keys in a cache of pages.
//!
//! ```text
//! cargo run --release -p fa-attn --example decode
//! ```

use fa_attn::{
    Dtype, Engine, Error, Extras, Lengths, Mask, Problem, Side, Tensor, TensorLayout, Types, bf16,
};

/// Runs the step; the attention of every request's token, `[requests, 1, heads, head_dim]`.
///
/// # Errors
/// What the engine refuses.
pub(crate) fn step() -> Result<Tensor<bf16>, Error> {
    // 3 requests of at most 64 keys; 12 pages of 16 keys; 8 query heads on 2 key/value heads of 64.
    let (requests, page, pages, most) = (3, 16, 12, 64);
    let problem = Problem::new(
        Lengths::of(requests, Side::padded(1), Side::paged(page, pages, most)),
        (8, 2),
        (64, 64),
        Types::same(Dtype::Bf16),
    )
    .with_mask(Mask::CAUSAL);
    let wave = |shape: [usize; 4], f: f32| {
        let data = (0..shape.iter().product()).map(|i: usize| bf16::from_f32((i as f32 * f).sin())).collect();
        Tensor::with_layout(shape, TensorLayout::Bshd, data)
    };
    let q = wave([requests, 1, 8, 64], 0.1)?;
    let (k, v) = (wave([pages, page, 2, 64], 0.2)?, wave([pages, page, 2, 64], 0.3)?);

    // Which pages each request has, in order, and how many keys; -1 where it needs no more pages.
    let page_table = [7, 2, 9, 0, 3, -1, -1, -1, 11, 5, -1, -1];
    let keys = [50, 4, 32];
    let extras = Extras { page_table: Some(&page_table), seqused_k: Some(&keys), ..Extras::NONE };

    let engine = Engine::new()?; // the GPU where there is one, else all CPU cores
    let output = engine.forward(&problem, [&q, &k, &v], &extras)?;
    println!("LSE of each request's first head: {:?}", [output.lse[0], output.lse[8], output.lse[16]]);
    Ok(output.out)
}

/// Runs the step.
#[allow(dead_code)]
fn main() -> Result<(), Error> {
    step().map(drop)
}
