//! The worker process, which does the job on its standard input.

use std::io::BufRead;

use serde::Deserialize;

use crate::error::{Context, Result};
use crate::{tune, validate};

/// A job, by the command that gave it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Job {
    Validate(validate::Job),
    Tune(tune::worker::Job),
}

/// Does the job that `input` holds as one line of JSON, and writes its events to standard output: the whole
/// life of a process that [`crate::Program`] starts. It ends the process when its GPU context is lost or its
/// parent is gone.
///
/// # Errors
/// No job, no usable GPU, and errors of the GPU.
pub fn serve(mut input: impl BufRead) -> Result<()> {
    let mut line = String::new();
    input.read_line(&mut line)?;
    match serde_json::from_str(&line).context("standard input holds no job of a worker")? {
        Job::Validate(job) => validate::worker::work(&job),
        Job::Tune(job) => tune::worker::work(&job),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_job_is_refused() {
        for text in ["", "{}", "{\"paint\": 1}"] {
            let error = serve(text.as_bytes()).unwrap_err();
            assert!(error.to_string().contains("no job"), "{text}: {error}");
        }
    }
}
