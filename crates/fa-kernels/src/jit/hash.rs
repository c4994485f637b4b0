//! The hash of kernels' sources and code.

use sha2::{Digest, Sha256};

/// SHA-256 in hex over the parts and their lengths, so that no two lists of parts read the same.
pub(crate) fn hash(parts: &[&[u8]]) -> String {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
