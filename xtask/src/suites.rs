//! The workspace's test programs: built by cargo, run two at a time, the long ones first.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::passed::Passed;
use crate::workspace;

/// A test program.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Suite {
    /// Its package and target: `fa-cpu suite`.
    name: String,
    /// The package's folder, in which it runs.
    folder: PathBuf,
    program: PathBuf,
}

/// Programs at a time. The last tests of a program are often one long one, which leaves cores to another.
const LANES: usize = 2;

/// The programs that take longest. They begin first, so that none of them is left for the end.
const LONGEST: [&str; 5] =
    ["fa-emu suite", "fa-cpu suite", "fa-kernels suite", "fa-cli suite", "fa-lab fa_lab"];

/// What cargo says of each file that it has built.
#[derive(Deserialize)]
struct Artifact {
    manifest_path: PathBuf,
    target: Target,
    profile: Profile,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

impl Suite {
    /// Of a line of cargo's messages, the test program that it names.
    fn of(message: &str) -> Option<Suite> {
        let artifact: Artifact = serde_json::from_str(message).ok()?;
        let program = artifact.executable.filter(|_| artifact.profile.test)?;
        let folder = artifact.manifest_path.parent()?.to_owned();
        let package = folder.file_name()?.to_str()?;
        Some(Suite { name: format!("{package} {}", artifact.target.name), folder, program })
    }

    /// Its place among those that are to begin.
    fn turn(&self) -> usize {
        LONGEST.iter().position(|name| *name == self.name).unwrap_or(LONGEST.len())
    }
}

/// Builds all test programs of the workspace but doc tests: `--tests` are those of libraries and programs
/// too.
pub(crate) fn build() -> Result<Vec<Suite>> {
    let arguments =
        ["test", "--workspace", "--tests", "--no-run", "--message-format", "json-render-diagnostics"];
    let child = workspace::cargo_command(&arguments).stdout(Stdio::piped()).spawn();
    let output = child.and_then(std::process::Child::wait_with_output).context("cargo does not start")?;
    ensure!(output.status.success(), "cargo test --no-run failed ({})", output.status);
    let mut suites: Vec<Suite> =
        String::from_utf8_lossy(&output.stdout).lines().filter_map(Suite::of).collect();
    ensure!(!suites.is_empty(), "cargo has built no test program");
    suites.sort_by(|a, b| (a.turn(), &a.name).cmp(&(b.turn(), &b.name)));
    Ok(suites)
}

/// Runs the programs with these variables; each one's output is shown whole when it ends, and given to
/// `line`, line by line. After the first that fails no other begins. Those that `passed` has are not run,
/// and their results are given to `line`; it gets those that pass.
pub(crate) fn run(
    suites: &[Suite],
    variables: &[(&str, &str)],
    passed: Option<&mut Passed>,
    mut line: impl FnMut(&str) + Send,
) -> Result<()> {
    struct State<'a, L> {
        next: usize,
        failed: Vec<String>,
        passed: Option<&'a mut Passed>,
        line: L,
    }
    let known = |suite: &Suite| passed.as_ref()?.results(&suite.name, &suite.folder, &suite.program);
    let (spared, suites): (Vec<&Suite>, Vec<&Suite>) =
        suites.iter().partition(|suite| known(suite).is_some());
    for suite in spared {
        println!("{}: has passed today on these files (--rerun runs it)", suite.name);
        known(suite).unwrap_or_default().iter().for_each(|result| line(result));
    }
    let state = Mutex::new(State { next: 0, failed: Vec::new(), passed, line });
    let lock = || state.lock().unwrap_or_else(PoisonError::into_inner);
    let lane = || -> Result<()> {
        loop {
            let suite = {
                let mut state = lock();
                let Some(suite) = suites.get(state.next).filter(|_| state.failed.is_empty()) else {
                    return Ok(());
                };
                state.next += 1;
                suite
            };
            let start = Instant::now();
            let (passed, text) = one(suite, variables)?;
            let mut state = lock();
            println!("{} ({}), {:.1?}:", suite.name, short(&suite.program), start.elapsed());
            text.lines().for_each(|text| {
                println!("{text}");
                (state.line)(text);
            });
            if !passed {
                state.failed.push(suite.name.clone());
            } else if let Some(passed) = &mut state.passed {
                passed.keep(&suite.name, &suite.folder, &suite.program, &text)?;
            }
        }
    };
    std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..LANES).map(|_| scope.spawn(lane)).collect();
        lanes
            .into_iter()
            .try_for_each(|lane| lane.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    let failed = lock().failed.join(", ");
    ensure!(failed.is_empty(), "tests fail: {failed}");
    Ok(())
}

/// Runs a program to its end: whether it passed, and what it wrote.
fn one(suite: &Suite, variables: &[(&str, &str)]) -> Result<(bool, String)> {
    let mut command = Command::new(&suite.program);
    command.current_dir(&suite.folder).envs(variables.iter().copied());
    command.env("CARGO_MANIFEST_DIR", &suite.folder);
    let output = command.output().with_context(|| format!("{} does not start", suite.program.display()))?;
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    Ok((output.status.success(), text))
}

fn short(program: &Path) -> String {
    program.strip_prefix(workspace::root()).unwrap_or(program).display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_found_among_cargos_messages() {
        let message = |name: &str, test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/w/crates/fa-cpu/Cargo.toml",
                "target":{{"name":"{name}","kind":["test"]}},"profile":{{"test":{test}}},
                "executable":{executable}}}"#
            )
        };
        let suite = Suite::of(&message("suite", true, r#""/w/target/suite-1""#)).unwrap();
        assert_eq!(
            (suite.name.as_str(), suite.folder.as_path()),
            ("fa-cpu suite", Path::new("/w/crates/fa-cpu"))
        );
        assert_eq!(suite.turn(), 1);
        let library = Suite::of(&message("fa_cpu", true, r#""/w/target/fa_cpu-1""#)).unwrap();
        assert_eq!(library.turn(), LONGEST.len());
        for other in [
            message("fa_cpu", false, "null"),
            message("fa", false, r#""/w/target/fa""#),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
        ] {
            assert_eq!(Suite::of(&other), None, "{other}");
        }
    }

    #[test]
    #[cfg(unix)]
    fn every_program_runs_in_its_folder_and_none_after_a_failure() {
        let own = tempfile::tempdir().unwrap();
        let folder = own.path().canonicalize().unwrap();
        let script = |name: &str, text: &str| {
            use std::os::unix::fs::PermissionsExt;
            let program = folder.join(name);
            std::fs::write(&program, format!("#!/bin/sh\n{text}\n")).unwrap();
            std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
            Suite { name: name.to_owned(), folder: folder.clone(), program }
        };
        let good: Vec<Suite> =
            (0..5).map(|i| script(&format!("good{i}"), "echo $FA_TEST_VALUE $PWD")).collect();
        let mut lines = Vec::new();
        run(&good, &[("FA_TEST_VALUE", "7")], None, |line| lines.push(line.to_owned())).unwrap();
        assert_eq!(lines, vec![format!("7 {}", folder.display()); 5]);
        let bad = "while [ ! -e begun ]; do sleep 0.01; done; echo wrong; exit 1";
        let mut suites = vec![script("bad", bad), script("slow", "touch begun; sleep 0.1; echo slow")];
        suites.extend(good);
        let mut lines = Vec::new();
        let error = run(&suites, &[], None, |line| lines.push(line.to_owned())).unwrap_err();
        assert_eq!(error.to_string(), "tests fail: bad");
        lines.sort();
        assert_eq!(lines, ["slow", "wrong"]);
    }
}
