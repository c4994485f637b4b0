//! What a launch of a unit of one entry left behind.

use serde::Deserialize;

#[derive(Deserialize)]
struct Found {
    findings: Vec<FoundOne>,
}

#[derive(Deserialize)]
struct FoundOne {
    kind: String,
    text: String,
}

/// What a session's `result` says against a launch, a line each.
///
/// # Panics
/// On text that is no JSON of the machine's.
pub(crate) fn faults(result: &str, finished: bool) -> Vec<String> {
    let found: Found = serde_json::from_str(result).expect("the machine writes JSON");
    let mut faults: Vec<String> =
        found.findings.into_iter().map(|one| format!("{}: {}", one.kind, one.text)).collect();
    if !finished {
        faults.push("the launch was given up".into());
    }
    faults
}
