//! Names of tensors in files that several of the readers know.

/// Packed latent rows, in the place of K and V.
pub(crate) const KV: &str = "kv";

/// The names of the keys in use: FlashAttention's of a packed batch and of a cache.
pub(crate) const USED_K: [&str; 2] = ["seqused_k", "cache_seqlens"];
