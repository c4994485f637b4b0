//! What was measured, as `fa` wrote it below docs/results.

use serde_json::Value;

/// The record in `docs/results/<path>`.
pub(crate) fn read(path: &str) -> Value {
    let path = format!("{}/../../docs/results/{path}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error}"))
}
