//! Merging: a prompt that requests share is attended to once for all of them, each request's own keys apart,
//! and the results are combined by their LSE into the attention over all keys.
//!
//! ```text
//! cargo run --release -p fa-attn --example 03_merging
//! ```

use fa_attn::{Engine, Error, Mask, Tensor, merge};

const REQUESTS: usize = 4;
const PREFIX: usize = 300;
const OWN: usize = 20;
const HEADS: usize = 4;
const DIM: usize = 64;

fn main() -> Result<(), Error> {
    let difference = difference()?;
    println!(
        "{REQUESTS} requests, {PREFIX} keys shared and {OWN} of their own: at most {difference:.2e} \
         from one call over all"
    );
    Ok(())
}

/// The greatest difference between the merged result and one call over all keys.
pub(crate) fn difference() -> Result<f32, Error> {
    let wave = |shape: [usize; 4], f: f32| {
        Tensor::new(shape, (0..shape.iter().product()).map(|i: usize| (i as f32 * f).sin()).collect())
    };
    let q = wave([REQUESTS, 1, HEADS, DIM], 0.17)?;
    let prefix = [wave([1, PREFIX, HEADS, DIM], 0.23)?, wave([1, PREFIX, HEADS, DIM], 0.31)?];
    let own = [wave([REQUESTS, OWN, HEADS, DIM], 0.41)?, wave([REQUESTS, OWN, HEADS, DIM], 0.53)?];

    let engine = Engine::new()?;
    // One sequence of all requests' queries reads the prefix once: [1, requests, heads, dim].
    let together = Tensor::new([1, REQUESTS, HEADS, DIM], q.data.clone())?;
    let mut shared = engine.attention(&together, &prefix[0], &prefix[1], Mask::FULL)?;
    shared.out.shape = [REQUESTS, 1, HEADS, DIM];
    // LSE from [1, heads, requests] to [requests, heads, 1].
    shared.lse = (0..REQUESTS * HEADS).map(|i| shared.lse[i % HEADS * REQUESTS + i / HEADS]).collect();
    let apart = engine.attention(&q, &own[0], &own[1], Mask::FULL)?;
    let merged = merge(&[&shared, &apart], None)?;

    // The same over the keys of the prefix and the own ones end to end.
    let row = HEADS * DIM;
    let all = |side: usize| {
        let of = |request: usize| &own[side].data[request * OWN * row..][..OWN * row];
        let data = (0..REQUESTS).flat_map(|request| [prefix[side].data.as_slice(), of(request)].concat());
        Tensor::new([REQUESTS, PREFIX + OWN, HEADS, DIM], data.collect())
    };
    let whole = engine.attention(&q, &all(0)?, &all(1)?, Mask::FULL)?;
    let pairs = merged.out.data.iter().zip(&whole.out.data).chain(merged.lse.iter().zip(&whole.lse));
    Ok(pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max))
}
