//! Models of candle-transformers, and the same weights with fa-candle's attention: logits agree, greedy
//! tokens are the same.

mod bert;
mod decoder;
mod encoder;
mod generate;
mod mla;

use candle_core::Tensor;

/// The largest difference.
fn difference(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    let most = || (a - b)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>();
    most().unwrap()
}
