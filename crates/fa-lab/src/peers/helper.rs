//! The Python helper that times the peers: its files, its process and its first line.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::error::{Context, Error, Result};
use crate::worker::{Received, StandardError, Worker};

/// The helper's files, which are written to a temporary folder, so that the program needs no other files.
const FILES: [(&str, &str); 8] = [
    (SCRIPT, include_str!("../../peers/peers.py")),
    ("fa_peers/__init__.py", include_str!("../../peers/fa_peers/__init__.py")),
    ("fa_peers/helper.py", include_str!("../../peers/fa_peers/helper.py")),
    ("fa_peers/inputs.py", include_str!("../../peers/fa_peers/inputs.py")),
    ("fa_peers/kernels.py", include_str!("../../peers/fa_peers/kernels.py")),
    ("fa_peers/report.py", include_str!("../../peers/fa_peers/report.py")),
    ("fa_peers/request.py", include_str!("../../peers/fa_peers/request.py")),
    ("fa_peers/timing.py", include_str!("../../peers/fa_peers/timing.py")),
];

/// The script that is run.
pub(super) const SCRIPT: &str = "peers.py";

/// Names the Python interpreter that has torch.
pub const PYTHON_VARIABLE: &str = "FA_PYTHON";

/// Time limit for importing torch and the peers.
const START: Duration = Duration::from_secs(180);

/// The helper's first line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// torch's version.
    pub torch: Option<String>,
    /// The GPU that torch sees.
    pub gpu: Option<String>,
    /// The driver's version.
    pub driver: Option<String>,
    /// Names of the peers that could be loaded.
    pub peers: Vec<String>,
    /// Their versions, by name.
    #[serde(default)]
    pub versions: BTreeMap<String, String>,
    /// The errors of the others.
    pub errors: BTreeMap<String, String>,
}

/// Makes the command of the helper.
pub(super) struct Helper(pub Box<dyn FnMut() -> Command + Send>);

impl std::fmt::Debug for Helper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Helper")
    }
}

/// Starts a helper and waits for its first line.
pub(super) fn begin(helper: &mut Helper) -> Result<(Worker, Hello)> {
    let verbose = tracing::enabled!(tracing::Level::DEBUG);
    let errors = if verbose { StandardError::Inherit } else { StandardError::Discard };
    let mut worker = Worker::start((helper.0)(), errors)?;
    #[derive(Deserialize)]
    struct First {
        hello: Hello,
    }
    let line = receive(&mut worker, START).context("the peers' helper does not start")?;
    let First { hello } = serde_json::from_str(&line).context("the peers' helper says hello oddly")?;
    if hello.peers.is_empty() {
        let reasons: Vec<String> = hello.errors.iter().map(|(name, why)| format!("{name}: {why}")).collect();
        let reasons = reasons.join("; ");
        return Err(Error::Peers(format!(
            "there is no peer: {reasons}; set {PYTHON_VARIABLE} to a Python with torch"
        )));
    }
    Ok((worker, hello))
}

/// The helper's files in a folder of their own.
pub(super) fn files() -> std::io::Result<tempfile::TempDir> {
    let folder = tempfile::Builder::new().prefix("fa-peers-").tempdir()?;
    std::fs::create_dir(folder.path().join("fa_peers"))?;
    for (name, text) in FILES {
        std::fs::write(folder.path().join(name), text)?;
    }
    Ok(folder)
}

/// The helper's next line.
pub(super) fn receive(worker: &mut Worker, patience: Duration) -> Result<String> {
    let deadline = Instant::now() + patience;
    loop {
        match worker.receive(deadline) {
            Received::Line(line) => return Ok(line),
            Received::Said(_) => {}
            Received::Nothing => {
                let seconds = patience.as_secs();
                return Err(Error::Peers(format!("the peers do not answer within {seconds} s")));
            }
            Received::End => {
                return Err(Error::Peers("the peers' helper has ended; -vv shows what it says".to_owned()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_helper_is_whole() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/fa_peers");
        let mut modules: Vec<String> = std::fs::read_dir(folder)
            .expect("the modules are here")
            .map(|entry| entry.expect("it can be read").file_name().into_string().expect("text"))
            .filter(|name| name.ends_with(".py"))
            .map(|name| format!("fa_peers/{name}"))
            .collect();
        modules.sort();
        let names: Vec<&str> = FILES.iter().map(|(name, _)| *name).filter(|name| *name != SCRIPT).collect();
        assert_eq!(names, modules);
        // From its folder the helper prints its first line, with or without torch.
        let files = files().expect("they can be written");
        let mut python = Command::new("python3");
        python.arg(files.path().join(SCRIPT)).stdin(std::process::Stdio::null());
        let Ok(done) = python.output() else {
            eprintln!("note: no python3 here, the peers' helper is not started");
            return;
        };
        let text = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success() && text.starts_with(r#"{"hello": {"#), "{done:?}");
    }
}
