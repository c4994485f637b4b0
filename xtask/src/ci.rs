//! `cargo xtask ci`: everything that must pass before a change goes in, cheapest first.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::passed::{Check, Passed};
use crate::runner::{self, Tally, Which};
use crate::{candle, device, packages, python, toolkit, workspace};

/// Check formatting, lints, documentation and all tests; stops at the first failure.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run the tests of the emulation and those that have passed on these very files, too
    #[arg(long)]
    full: bool,
}

/// A check by name.
struct Step {
    name: &'static str,
    run: fn(&Args, &mut Tally) -> Result<()>,
}

/// What clippy's compiler is told.
const LINTS: [&str; 2] = ["-D", "warnings"];

const STEPS: [Step; 4] = [
    Step { name: "format", run: |_, _| workspace::cargo(&["fmt", "--all", "--check"]) },
    Step { name: "lint, toolkit, device sources", run: |_, _| lint() },
    Step { name: "build of tests", run: |_, _| build() },
    Step { name: "test, documentation, candle, python", run: tests },
];

pub(crate) fn run(args: &Args) -> Result<()> {
    let start = Instant::now();
    let mut tally = Tally::default();
    for (i, step) in STEPS.iter().enumerate() {
        let (step_start, cpu_before) = (Instant::now(), cpu_seconds());
        println!("ci [{}/{}] {}", i + 1, STEPS.len(), step.name);
        (step.run)(args, &mut tally).with_context(|| format!("ci stopped at {}", step.name))?;
        let cpu =
            cpu_seconds().zip(cpu_before).map(|(now, before)| format!(" ({} s of CPU time)", now - before));
        let (time, cpu) = (step_start.elapsed(), cpu.unwrap_or_default());
        println!("ci [{}/{}] {} ok, {time:.0?}{cpu}", i + 1, STEPS.len(), step.name);
    }
    println!("ci: all {} checks ok, {:.0?}", STEPS.len(), start.elapsed());
    let Tally { passed, failed, skipped } = tally;
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    Ok(())
}

/// Seconds of CPU time of all processes that this one has started and that have ended: unlike wall time they
/// hardly depend on what else the machine does. `None` where there is no Linux to ask.
fn cpu_seconds() -> Option<u64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // Behind the name, which may hold spaces: user and system time of children, in hundredths.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |field: usize| fields.get(field)?.parse::<u64>().ok();
    Some((ticks(13)? + ticks(14)?) / 100)
}

/// Lints all targets: examples and benchmarks are checked here and not built again for the tests. The
/// compiler of the shipped kernels, which the tests run, clang-format and torch are fetched meanwhile.
fn lint() -> Result<()> {
    std::thread::scope(|scope| {
        let device = scope.spawn(|| {
            toolkit::install(false)?;
            device::format(true)?;
            python::fetch_libraries()
        });
        let lints =
            workspace::cargo(&[&["clippy", "--workspace", "--all-targets", "--"], &LINTS[..]].concat());
        let device = device.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        lints.and(device)
    })
}

/// Builds the test programs, as both runners run them, and `fa`, which knows what is proven.
fn build() -> Result<()> {
    workspace::cargo(&["test", "--workspace", "--tests", "--no-run", "--quiet"])
}

/// Runs the tests. Documentation and its tests, what stands on crates that are built by now, candle's side
/// and the Python package come meanwhile, in two rows: none of the three fills the cores alone.
fn tests(args: &Args, tally: &mut Tally) -> Result<()> {
    // The same random problems in every run, so that what fails is the change's; `cargo test` draws others.
    let mut variables = vec![];
    if std::env::var_os(RANDOM_SEED).is_none() {
        variables.push((RANDOM_SEED, "1"));
    }
    let passed = Passed::read(args.full)?;
    let (own, of_docs) = std::thread::scope(|scope| {
        let python = scope.spawn(|| passed.check(Check::Python, python::check));
        let rest = scope.spawn(|| {
            docs()?;
            if args.full { packages::verify() } else { packages::check() }?;
            passed.check(Check::Candle, candle::check)?;
            doc_tests()
        });
        let left = passed.left();
        let tests = runner::run(Which::Of(&left), &variables).and_then(|mut own| {
            if args.full || (left.contains(&"fa-emu") && emulation_is_due()?) {
                let emulated = runner::run(Which::Emulation, &variables)?;
                own.skipped -= (emulated.passed + emulated.failed).min(own.skipped);
                own.passed += emulated.passed;
            }
            passed.keep_packages()?;
            Ok(own)
        });
        let rest = rest.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        python.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok::<_, anyhow::Error>((tests?, rest?))
    })?;
    for part in [own, of_docs] {
        tally.passed += part.passed;
        tally.skipped += part.skipped;
    }
    Ok(())
}

/// Whether the tests of the emulation have not passed on these sources, by the ledger.
fn emulation_is_due() -> Result<bool> {
    let fa = workspace::target_dir().join("debug").join(format!("fa{}", std::env::consts::EXE_SUFFIX));
    let mut command = Command::new(&fa);
    command.args(["prove", "--check", "--tier", "suite", "--only", "append"]).current_dir(workspace::root());
    let output = command.output().with_context(|| format!("{} does not start", fa.display()))?;
    match output.status.code() {
        Some(0) => Ok(false),
        Some(1) => Ok(true),
        _ => anyhow::bail!("fa prove --check: {}", String::from_utf8_lossy(&output.stderr)),
    }
}

/// Builds the documentation; a link that leads nowhere is an error.
///
/// An example among the targets makes cargo count what tests ask of the crates below, so that these are as
/// the lints have checked them; without it 41 of them, candle's and proc-macros, are checked once more. The
/// workspace's own are as the lints have checked them where cargo is told of clippy as `cargo clippy` tells
/// it; without that they are checked once more, by rustc.
fn docs() -> Result<()> {
    let targets = ["--lib", "--bins", "--example", "codegen"];
    let mut cargo = workspace::cargo_command(&["doc", "--quiet", "--workspace", "--no-deps"]);
    cargo.args(targets);
    if let Some(clippy) = clippy_driver() {
        let words: String = LINTS.iter().map(|word| format!("{word}__CLIPPY_HACKERY__")).collect();
        cargo.env("RUSTC_WORKSPACE_WRAPPER", clippy).env("CLIPPY_ARGS", words);
    }
    let status = cargo.env("RUSTDOCFLAGS", "-D warnings").status().context("cargo does not start")?;
    ensure!(status.success(), "cargo doc failed ({status})");
    Ok(())
}

/// The compiler that `cargo clippy` runs, where it is beside rustc.
fn clippy_driver() -> Option<PathBuf> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc).args(["--print", "sysroot"]).output().ok()?;
    let sysroot = String::from_utf8(output.stdout).ok().filter(|_| output.status.success())?;
    let name = format!("clippy-driver{}", std::env::consts::EXE_SUFFIX);
    Some(Path::new(sysroot.trim()).join("bin").join(name)).filter(|program| program.is_file())
}

/// Where proptest reads the seed of its random cases.
const RANDOM_SEED: &str = "PROPTEST_RNG_SEED";

/// Runs the examples in the documentation, shows their output and counts their results. Without the package
/// that has none and for which cargo would compile all of candle-transformers.
fn doc_tests() -> Result<Tally> {
    let mut tally = Tally::default();
    let mut command =
        workspace::cargo_command(&["test", "--workspace", "--doc", "--exclude", "fa-candle-models"]);
    let mut child = command.stdout(Stdio::piped()).spawn().context("cargo does not start")?;
    let stdout = child.stdout.take().context("cargo's output is not piped")?;
    for line in BufReader::new(stdout).split(b'\n') {
        let line = line.context("cargo's output breaks off")?;
        let line = String::from_utf8_lossy(&line);
        println!("{line}");
        tally.add(&line);
    }
    let status = child.wait().context("cargo does not end")?;
    ensure!(status.success(), "cargo test --doc failed ({status})");
    ensure!(tally.passed > 0, "cargo test --doc ran no test");
    Ok(tally)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn cpu_time_of_children_is_read() {
        assert!(cpu_seconds().is_some_and(|seconds| seconds < 24 * 3600));
    }
}
