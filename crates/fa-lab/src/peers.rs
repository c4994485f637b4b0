//! Other attention kernels, timed by a Python helper in a child process.

mod helper;
mod request;

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use fa_core::Pass;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::error::{Context, Error, Result};
use crate::marks::Wanted;
use crate::worker::Worker;

use helper::{Helper, SCRIPT, begin, files, receive};
use request::request;

pub use helper::{Hello, PYTHON_VARIABLE};

/// Time limit for preparing the peers for one shape. FlashAttention 4 compiles its kernels then, which has
/// taken more than two minutes, unless FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 kept them from an earlier
/// run.
const READY: Duration = Duration::from_secs(900);

/// Time limit for timing a peer.
const ANSWER: Duration = Duration::from_secs(120);

/// Time limit for ending.
const END: Duration = Duration::from_secs(5);

/// The peers that compute a problem, prepared for timing.
#[derive(Clone, Debug, Deserialize)]
pub struct Opened {
    /// Their names.
    pub peers: Vec<String>,
    /// The errors of the others.
    pub errors: BTreeMap<String, String>,
}

/// Rates of the GPU in the same run that attention can be compared with.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Ceilings {
    /// torch's bf16 product of two 8192 x 8192 matrices of random normal numbers, TFLOP/s.
    pub matmul_tflops: f64,
    /// A copy of 2 GiB within the device's memory, bytes read and written, GB/s.
    pub copy_gb_per_s: f64,
}

/// An answer of the helper.
enum Reply<R> {
    /// The result.
    Answer(R),
    /// The GPU context was lost to a peer.
    Lost {
        /// The peer, where it is known.
        to: Option<String>,
        /// Its message.
        why: String,
    },
}

/// The helper process, which ends when this is dropped.
#[derive(Debug)]
pub struct Peers {
    /// Its first line: versions and peers.
    pub hello: Hello,
    worker: Worker,
    /// Starts the helper, and again when a peer has broken the GPU context.
    helper: Helper,
    /// The shape that is open.
    open: Option<serde_json::Value>,
    /// Peers that failed on the open shape, with the errors.
    failed: BTreeMap<String, String>,
    /// Removes the helper's files when dropped.
    _files: tempfile::TempDir,
}

impl Peers {
    /// Starts the helper with the interpreter named by FA_PYTHON, or else `python3`, and waits for its first
    /// line.
    ///
    /// # Errors
    /// Without such an interpreter, or without any peer, with the reasons.
    pub fn start() -> Result<Peers> {
        let named = std::env::var_os(PYTHON_VARIABLE).filter(|name| !name.is_empty());
        let python = named.unwrap_or_else(|| "python3".into());
        let files = files()?;
        let (interpreter, script) = (python.clone(), files.path().join(SCRIPT));
        let command = move || {
            let mut command = Command::new(&interpreter);
            command.arg(&script);
            command
        };
        let started = Peers::of(command, files);
        started
            .context(format!("cannot use {}: set {PYTHON_VARIABLE} to a Python with torch", python.display()))
    }

    /// The helper that `command` starts.
    fn of(command: impl FnMut() -> Command + Send + 'static, files: tempfile::TempDir) -> Result<Peers> {
        let mut helper = Helper(Box::new(command));
        let (worker, hello) = begin(&mut helper)?;
        let (open, failed) = (None, BTreeMap::new());
        Ok(Peers { hello, worker, helper, open, failed, _files: files })
    }

    /// Opens the shape again in a new helper, without the peers that have failed.
    fn open_again(&mut self, mut request: serde_json::Value) -> Result<Opened> {
        loop {
            let mut names: Vec<String> = match request["peers"].as_array() {
                Some(names) => names.iter().filter_map(|name| Some(name.as_str()?.to_owned())).collect(),
                None => self.hello.peers.clone(),
            };
            names.retain(|name| !self.failed.contains_key(name));
            if names.is_empty() {
                return Ok(Opened { peers: Vec::new(), errors: self.failed.clone() });
            }
            request["peers"] = json!(names);
            match self.reply::<Opened>(&request, READY)? {
                Reply::Answer(Opened { peers, mut errors }) => {
                    errors.extend(self.failed.clone());
                    self.open = Some(request);
                    return Ok(Opened { peers, errors });
                }
                Reply::Lost { to, why } => self.lost(to, why)?,
            }
        }
    }

    /// Replaces a helper whose GPU context the peer `to` has broken.
    fn lost(&mut self, to: Option<String>, why: String) -> Result<()> {
        let Some(name) = to else { return Err(Error::Peers(format!("the peers refuse: {why}"))) };
        tracing::warn!(name, why, "a peer lost its GPU context; the helper is started again");
        self.failed.insert(name, format!("it lost the GPU context: {why}"));
        self.worker.ends_within(END);
        self.worker = begin(&mut self.helper)?.0;
        Ok(())
    }

    fn ask<R: DeserializeOwned>(&mut self, request: &serde_json::Value, patience: Duration) -> Result<R> {
        match self.reply(request, patience)? {
            Reply::Answer(answer) => Ok(answer),
            Reply::Lost { why, .. } => Err(Error::Peers(format!("the peers refuse: {why}"))),
        }
    }

    fn reply<R: DeserializeOwned>(
        &mut self,
        request: &serde_json::Value,
        patience: Duration,
    ) -> Result<Reply<R>> {
        self.worker.send(request).context("the peers are gone")?;
        let line = receive(&mut self.worker, patience)?;
        let reply: serde_json::Value = serde_json::from_str(&line).context("the peers answer oddly")?;
        let errors = &reply["errors"];
        if let Some(lost) = errors["gpu"].as_str() {
            let to = reply["lost_to"].as_str().map(str::to_owned);
            let said = to.as_ref().and_then(|name| errors[name.as_str()].as_str());
            return Ok(Reply::Lost { why: said.unwrap_or(lost).to_owned(), to });
        }
        if let Some(why) = errors["request"].as_str() {
            return Err(Error::Peers(format!("the peers refuse: {why}")));
        }
        Ok(Reply::Answer(serde_json::from_value(reply).context("the peers answer oddly")?))
    }

    /// Compiles in parallel the kernels that FlashAttention 4 would compile at its first calls, if it is
    /// among `names` (all, if empty); returns the number of kinds of calls.
    ///
    /// # Errors
    /// When the helper is gone or does not answer.
    pub fn warm(&mut self, shapes: &[Wanted], names: &[String], pass: Pass) -> Result<usize> {
        const COMPILES: &str = "fa4";
        let asked = names.is_empty() || names.iter().any(|name| name == COMPILES);
        if !asked || !self.hello.peers.iter().any(|name| name == COMPILES) {
            return Ok(0);
        }
        #[derive(Deserialize)]
        struct Warmed {
            compiled: usize,
        }
        let requests: Vec<_> = shapes.iter().map(|wanted| request(wanted, pass)).collect();
        Ok(self.ask::<Warmed>(&json!({ "cmd": "warm", "requests": requests }), READY)?.compiled)
    }

    /// Prepares the peers `names` (all, if empty) for the forward of `wanted`, or its backward alone. Peers
    /// that do not compute it (a window, a soft cap, packed sequences, pages, sinks) are among the errors.
    ///
    /// # Errors
    /// When the helper is gone or does not answer.
    pub fn open(&mut self, wanted: &Wanted, names: &[String], pass: Pass) -> Result<Opened> {
        let mut request = request(wanted, pass);
        if !names.is_empty() {
            request["peers"] = json!(names);
        }
        self.failed.clear();
        self.open_again(request)
    }

    /// Peers that have failed on the open shape since, with the errors: they are not timed any more.
    pub fn failed(&self) -> &BTreeMap<String, String> {
        &self.failed
    }

    /// Milliseconds of `reps` calls of one peer on the open shape; none when it fails or has failed. A peer
    /// that breaks the GPU context is left out, and the others go on in another helper.
    ///
    /// # Errors
    /// When the helper is gone or does not answer.
    pub fn round(&mut self, peer: &str, reps: usize) -> Result<Vec<f64>> {
        #[derive(Deserialize)]
        struct Round {
            times: Vec<f64>,
            errors: BTreeMap<String, String>,
        }
        if self.failed.contains_key(peer) {
            return Ok(Vec::new());
        }
        let asked = json!({"cmd": "round", "peer": peer, "reps": reps});
        match self.reply::<Round>(&asked, ANSWER)? {
            Reply::Answer(Round { times, errors }) => {
                self.failed.extend(errors);
                Ok(times)
            }
            Reply::Lost { to, why } => {
                self.lost(to, why)?;
                if let Some(request) = self.open.take() {
                    self.open_again(request)?;
                }
                Ok(Vec::new())
            }
        }
    }

    /// Measures the ceilings.
    ///
    /// # Errors
    /// When the helper is gone, does not answer or fails.
    pub fn ceilings(&mut self) -> Result<Ceilings> {
        #[derive(Deserialize)]
        struct Matmul {
            tflops: f64,
        }
        #[derive(Deserialize)]
        struct Copied {
            gb_per_s: f64,
        }
        let Matmul { tflops: matmul_tflops } = self.ask(&json!({"cmd": "matmul"}), ANSWER)?;
        let Copied { gb_per_s: copy_gb_per_s } = self.ask(&json!({"cmd": "copy"}), ANSWER)?;
        Ok(Ceilings { matmul_tflops, copy_gb_per_s })
    }

    /// Frees the memory of the open shape.
    ///
    /// # Errors
    /// When the helper is gone or does not answer.
    pub fn close(&mut self) -> Result<()> {
        self.ask::<serde_json::Value>(&json!({"cmd": "close"}), ANSWER).map(drop)
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        // The helper exits on request; one that hangs is killed with its worker.
        let _ = self.worker.send(&json!({"cmd": "quit"}));
        self.worker.ends_within(END);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::marks::Marks;

    #[cfg(unix)]
    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    /// A helper with fixed replies, one per request.
    #[cfg(unix)]
    fn stand_in(hello: &str, replies: &[&str]) -> Result<Peers> {
        let replies: String = replies.iter().map(|reply| format!("read line; echo '{reply}'; ")).collect();
        let script = format!("echo '{hello}'; {replies} read line");
        Peers::of(move || shell(&script), tempfile::tempdir().expect("a folder"))
    }

    #[cfg(unix)]
    const HELLO: &str =
        r#"{"hello":{"torch":"2","gpu":"a GPU","driver":null,"peers":["fa3","cudnn"],"errors":{}}}"#;

    #[cfg(unix)]
    #[test]
    fn rounds_of_peers_that_compute_a_shape_are_timed_and_the_others_say_why() {
        let opened = r#"{"peers":["fa3"],"errors":{"cudnn":"no pages"}}"#;
        let round = r#"{"times":[0.5,0.25],"errors":{}}"#;
        let failed = r#"{"times":[],"errors":{"fa3":"out of memory"}}"#;
        let mut peers = stand_in(HELLO, &[opened, round, failed]).expect("started");
        assert_eq!(peers.hello.peers, ["fa3", "cudnn"]);
        let found = peers.open(&Marks::Paged.shapes()[1], &[], Pass::Forward).expect("opened");
        assert_eq!((found.peers, found.errors["cudnn"].as_str()), (vec!["fa3".to_owned()], "no pages"));
        assert_eq!(peers.round("fa3", 2).expect("timed"), [0.5, 0.25]);
        assert!(peers.round("fa3", 2).expect("an answer").is_empty());
        // None of these compiles at its first call, so none is asked to.
        assert_eq!(peers.warm(&Marks::Paged.shapes(), &[], Pass::Forward).expect("nothing to do"), 0);
    }

    #[cfg(unix)]
    #[test]
    fn a_peer_that_takes_the_gpu_context_with_it_is_left_out_and_the_others_go_on() {
        let both = r#"{"peers":["fa3","cudnn"],"errors":{}}"#;
        let lost = r#"{"times":[],"errors":{"fa3":"illegal access","gpu":"lost"},"lost_to":"fa3"}"#;
        let other = r#"{"peers":["cudnn"],"errors":{}}"#;
        let round = r#"{"times":[0.5],"errors":{}}"#;
        // The first helper loses its context, the second goes on.
        let mut scripts = [vec![both, lost], vec![other, round]].into_iter().map(|replies| {
            let replies: String =
                replies.iter().map(|reply| format!("read line; echo '{reply}'; ")).collect();
            format!("echo '{HELLO}'; {replies} read line")
        });
        let helper = move || shell(&scripts.next().expect("two helpers"));
        let mut peers = Peers::of(helper, tempfile::tempdir().expect("a folder")).expect("started");
        let shape = &Marks::Decode.shapes()[0];
        assert_eq!(peers.open(shape, &[], Pass::Forward).expect("opened").peers, ["fa3", "cudnn"]);
        assert!(peers.round("fa3", 1).expect("left out").is_empty());
        assert!(peers.failed()["fa3"].contains("lost the GPU context: illegal access"));
        assert_eq!(peers.round("cudnn", 1).expect("timed"), [0.5]);
        assert!(peers.round("fa3", 1).expect("not asked again").is_empty());
    }

    #[cfg(unix)]
    #[test]
    fn a_helper_without_peers_that_refuses_or_ends_says_so() {
        let none =
            r#"{"hello":{"torch":null,"gpu":null,"driver":null,"peers":[],"errors":{"torch":"not found"}}}"#;
        let said = |error: Error| crate::error::message(&error);
        assert!(said(stand_in(none, &[]).expect_err("no peers")).contains("torch: not found"));
        let refused = r#"{"peers":{},"errors":{"request":"lens of k"}}"#;
        let mut peers = stand_in(HELLO, &[refused]).expect("started");
        let error = peers.open(&Marks::Packed.shapes()[0], &[], Pass::Forward).expect_err("refused");
        assert!(said(error).contains("lens of k"));
        let files = tempfile::tempdir().expect("a folder");
        assert!(said(Peers::of(|| shell("exit 1"), files).expect_err("it ends")).contains("has ended"));
    }
}
