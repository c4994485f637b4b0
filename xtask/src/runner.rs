//! The workspace's tests, by cargo-nextest where it is installed, else by cargo: both say how many tests were
//! skipped.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::workspace;

/// How many tests there were, by the runner's own figures.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl Tally {
    /// Adds a line of a runner's output if it is a summary: `test result: ..` of cargo, `Summary ..` of
    /// nextest.
    pub(crate) fn add(&mut self, line: &str) {
        let line = line.trim_start();
        let Some(result) = line.strip_prefix("test result:").or_else(|| line.strip_prefix("Summary")) else {
            return;
        };
        let words: Vec<&str> =
            result.split([' ', ';', ',', '(', ')']).filter(|word| !word.is_empty()).collect();
        let count = |what: &str| -> u64 {
            words.windows(2).find(|pair| pair[1] == what).and_then(|pair| pair[0].parse().ok()).unwrap_or(0)
        };
        self.passed += count("passed");
        self.failed += count("failed");
        self.skipped += count("ignored") + count("skipped");
    }
}

/// Which tests run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Which<'a> {
    /// Those of packages (of all, where there is no nextest) that are not ignored.
    Of(&'a [&'a str]),
    /// Those of the emulation, which are ignored.
    Emulation,
}

/// The test program of the emulation.
const EMULATION: &str = "emulation";

/// Whether cargo-nextest is installed.
fn has_nextest() -> bool {
    let mut command = workspace::cargo_command(&["nextest", "--version"]);
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// The command that runs tests, built as for the whole workspace.
fn command(nextest: bool, which: Which<'_>) -> Command {
    let filter = match which {
        Which::Of([]) => "none()".to_owned(),
        Which::Of(names) => {
            names.iter().map(|name| format!("package(={name})")).collect::<Vec<_>>().join(" + ")
        }
        Which::Emulation => format!("binary(={EMULATION})"),
    };
    let arguments: Vec<&str> = match (nextest, which) {
        (true, _) => {
            let ignored = if which == Which::Emulation { "only" } else { "default" };
            let quiet = ["--status-level", "fail", "--final-status-level", "fail", "--hide-progress-bar"];
            let run = ["nextest", "run", "--workspace", "--tests", "--no-tests", "pass", "--no-fail-fast"];
            [&run[..], &quiet, &["--run-ignored", ignored, "-E", &filter]].concat()
        }
        (false, Which::Of(_)) => vec!["test", "--workspace", "--tests", "--no-fail-fast", "--", "--quiet"],
        (false, Which::Emulation) => {
            vec!["test", "--workspace", "--test", EMULATION, "--", "--quiet", "--ignored"]
        }
    };
    workspace::cargo_command(&arguments)
}

/// Runs tests with these variables, and counts them.
pub(crate) fn run(which: Which<'_>, variables: &[(&str, &str)]) -> Result<Tally> {
    let mut command = command(has_nextest(), which);
    command.envs(variables.iter().copied());
    // nextest writes its report to standard error.
    let (reader, writer) = std::io::pipe().context("no pipe")?;
    command.stdout(writer.try_clone()?).stderr(writer);
    let mut child = command.spawn().context("cargo does not start")?;
    drop(command);
    let mut tally = Tally::default();
    for line in BufReader::new(reader).split(b'\n') {
        let line = line.context("the runner's output breaks off")?;
        let line = String::from_utf8_lossy(&line);
        println!("{line}");
        tally.add(&line);
    }
    let status = child.wait().context("cargo does not end")?;
    ensure!(status.success(), "tests fail: {} passed, {} failed", tally.passed, tally.failed);
    Ok(tally)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_both_runners_add_up() {
        let mut tally = Tally::default();
        for line in [
            "running 3 tests",
            "test tests::results_add_up ... ok",
            "test result: ok. 14 passed; 0 failed; 2 ignored; 0 measured; 1 filtered out; finished in 0.02s",
            "test result: FAILED. 10 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in \
             0.44s",
            "     Summary [   1.234s] 10 tests run: 8 passed (1 slow), 2 failed, 3 skipped",
        ] {
            tally.add(line);
        }
        assert_eq!(tally, Tally { passed: 32, failed: 4, skipped: 5 });
    }

    #[test]
    fn each_runner_is_told_what_to_run() {
        let words = |nextest, which| {
            let command = command(nextest, which);
            command.get_args().map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
        };
        let named = words(true, Which::Of(&["fa-cpu", "fa-emu"]));
        assert!(named.ends_with("--run-ignored default -E package(=fa-cpu) + package(=fa-emu)"), "{named}");
        assert!(words(true, Which::Of(&[])).ends_with("none()"));
        assert!(words(true, Which::Emulation).ends_with("--run-ignored only -E binary(=emulation)"));
        assert!(words(false, Which::Of(&["fa-cpu"])).starts_with("test --workspace --tests"));
        assert!(words(false, Which::Emulation).ends_with("--test emulation -- --quiet --ignored"));
    }
}
