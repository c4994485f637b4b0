//! Worker processes: GPU work that may hang or break its context runs in a child process, which takes a job
//! as one line of JSON on its standard input and answers in lines of JSON on its standard output.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use fa_kernels::{HEADERS_VARIABLE, Headers};
use serde::Serialize;

use crate::error::{Context, Error, Result};

/// Exit code of a worker whose GPU context is lost.
pub const EXIT_LOST: i32 = 3;

/// Lines of a worker's standard error that are kept: the last ones give the reason of its end.
const KEPT_LINES: usize = 5;

/// How a worker is started: a program and the arguments that make it call `serve()`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// The program.
    pub executable: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
}

impl Program {
    /// The command that starts a worker.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.executable);
        command.args(&self.arguments);
        if let Some(folder) = Headers::folder() {
            command.env(HEADERS_VARIABLE, folder);
        }
        command
    }
}

/// Where a child's standard error goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StandardError {
    /// Read line by line; the last lines are kept.
    Read,
    /// Passed through to ours.
    Inherit,
    /// Discarded.
    Discard,
}

/// What is received from a child.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Received {
    /// A line of its standard output.
    Line(String),
    /// A line of its standard error.
    Said(String),
    /// Nothing within the time limit.
    Nothing,
    /// The end: all its streams are closed.
    End,
}

/// Kills and reaps a child that is left behind.
#[derive(Debug)]
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        // Normally, it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A child process with line-based input and output. It is killed when this value is dropped.
#[derive(Debug)]
pub(crate) struct Worker {
    child: Guard,
    input: Option<ChildStdin>,
    received: Receiver<Received>,
    said: VecDeque<String>,
}

impl Worker {
    /// Starts `command` with its standard streams piped.
    pub(crate) fn start(mut command: Command, standard_error: StandardError) -> std::io::Result<Worker> {
        let errors = match standard_error {
            StandardError::Read => Stdio::piped(),
            StandardError::Inherit => Stdio::inherit(),
            StandardError::Discard => Stdio::null(),
        };
        let mut child = Guard(command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(errors).spawn()?);
        let (sender, received) = mpsc::channel();
        if let Some(output) = child.0.stdout.take() {
            forward_lines(output, Received::Line, sender.clone())?;
        }
        if let Some(errors) = child.0.stderr.take() {
            forward_lines(errors, Received::Said, sender)?;
        }
        let input = child.0.stdin.take();
        Ok(Worker { child, input, received, said: VecDeque::new() })
    }

    /// Sends a value as one line of JSON.
    pub(crate) fn send(&mut self, value: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_string(value)?;
        line.push('\n');
        let input = self.input.as_mut().ok_or_else(|| Error::Worker("its input is closed".to_owned()))?;
        Ok(input.write_all(line.as_bytes()).and_then(|()| input.flush())?)
    }

    /// Closes the child's standard input.
    pub(crate) fn close_input(&mut self) {
        self.input = None;
    }

    /// The next line, [`Received::Nothing`] after `deadline`.
    pub(crate) fn receive(&mut self, deadline: Instant) -> Received {
        let patience = deadline.saturating_duration_since(Instant::now());
        match self.received.recv_timeout(patience) {
            Ok(Received::Said(line)) => {
                if self.said.len() == KEPT_LINES {
                    self.said.pop_front();
                }
                self.said.push_back(line.clone());
                Received::Said(line)
            }
            Ok(received) => received,
            Err(RecvTimeoutError::Timeout) => Received::Nothing,
            Err(RecvTimeoutError::Disconnected) => Received::End,
        }
    }

    /// The last lines of its standard error that were received.
    pub(crate) fn last_words(&self) -> impl DoubleEndedIterator<Item = &str> {
        self.said.iter().map(String::as_str)
    }

    /// Waits for the child to end.
    pub(crate) fn wait(&mut self) -> Result<ExitStatus> {
        self.child.0.wait().context("a worker does not end")
    }

    /// Whether the child ends within `patience`.
    pub(crate) fn ends_within(&mut self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        while matches!(self.child.0.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        true
    }
}

/// Sends every line of a stream from a thread that ends with the stream.
fn forward_lines(
    stream: impl Read + Send + 'static,
    kind: fn(String) -> Received,
    sender: Sender<Received>,
) -> std::io::Result<()> {
    let forward = move || {
        let mut stream = BufReader::new(stream);
        let mut line = Vec::new();
        while stream.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
            let text = String::from_utf8_lossy(&line);
            if sender.send(kind(text.trim_end_matches(['\n', '\r']).to_owned())).is_err() {
                break;
            }
            line.clear();
        }
    };
    std::thread::Builder::new().spawn(forward).map(drop)
}

/// Writes an event as one line of JSON to this worker's standard output.
pub(crate) fn say(event: &impl Serialize) -> Result<()> {
    let mut line = serde_json::to_string(event)?;
    line.push('\n');
    let mut output = std::io::stdout().lock();
    Ok(output.write_all(line.as_bytes()).and_then(|()| output.flush())?)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn shell(script: &str) -> Worker {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Worker::start(command, StandardError::Read).expect("there is a shell")
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn lines_come_from_both_streams_and_the_last_words_are_kept() {
        let mut worker =
            shell("read job; echo \"$job\"; for i in 1 2 3 4 5 6; do echo \"warning $i\" >&2; done");
        worker.send(&"work").expect("it reads");
        worker.close_input();
        let mut lines = Vec::new();
        loop {
            match worker.receive(soon()) {
                Received::Line(line) => lines.push(line),
                Received::Said(_) => {}
                end @ (Received::Nothing | Received::End) => break assert_eq!(end, Received::End),
            }
        }
        assert_eq!(lines, ["\"work\""]);
        assert_eq!(worker.last_words().next(), Some("warning 2"));
        assert_eq!(worker.last_words().next_back(), Some("warning 6"));
        assert!(worker.wait().expect("it ended").success());
    }

    #[test]
    fn a_silent_worker_is_left_and_killed() {
        let start = Instant::now();
        let mut worker = shell("exec sleep 60");
        assert_eq!(worker.receive(Instant::now() + Duration::from_millis(50)), Received::Nothing);
        assert!(!worker.ends_within(Duration::ZERO));
        drop(worker);
        assert!(start.elapsed() < Duration::from_secs(20));
    }
}
