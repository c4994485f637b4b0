//! fa-candle by the name of candle-flash-attn-v3: for a program's dependencies that call it,
//! `[patch.crates-io]` puts this crate in its place.

pub use fa_candle::v3::*;
