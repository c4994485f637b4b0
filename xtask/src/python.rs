//! `cargo xtask python`: the Python package built as a wheel, installed in an environment of its own and
//! tested with numpy on the CPU.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::workspace;

/// Build the Python package's wheel, install it in a fresh environment and run its tests with numpy.
#[derive(clap::Args)]
pub struct Args {
    /// Build the wheel that is shipped, optimised and with the bundle of `cargo xtask build` in it, and leave
    /// it in target/wheels
    #[arg(long)]
    release: bool,
}

/// What builds the wheel and what its tests need.
const TOOLS: [&str; 1] = ["maturin==1.16.0"];
const TESTS: [&str; 2] = ["numpy>=2,<3", "pytest>=8,<10"];

/// Names what was installed, so that a second call is free.
const STAMP: &str = "packages.txt";

pub fn run(args: &Args) -> Result<()> {
    let folder = workspace::target_dir().join("python");
    let tools = tools(&folder)?;
    let wheels = if args.release { workspace::target_dir().join("wheels") } else { folder.join("wheels") };
    let wheel = build(&tools, &wheels, args.release)?;
    if args.release {
        println!("{}: {:.1} MB", wheel.display(), wheel.metadata()?.len() as f64 / 1e6);
    }
    test(&folder, &wheel)
}

/// The wheel of a development build, tested: a step of `cargo xtask ci`.
pub fn check() -> Result<()> {
    run(&Args { release: false })
}

fn python() -> &'static str {
    if cfg!(windows) { "python" } else { "python3" }
}

/// Runs a program to its end.
fn finish(command: &mut Command, what: &str) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let status = command.status().with_context(|| format!("{program} does not start: {what}"))?;
    ensure!(status.success(), "{program} failed ({status}): {what}");
    Ok(())
}

/// Runs `pip install` with these arguments.
fn install(arguments: &[&str], to: &Path, packages: &[&str]) -> Result<()> {
    let mut pip = Command::new(python());
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]);
    pip.args(arguments).arg("--target").arg(to).args(packages).env("PIP_ROOT_USER_ACTION", "ignore");
    finish(&mut pip, "Python 3.9 or newer with pip is needed, and a package index that it reaches")
}

/// Where maturin and the tests' packages are, installed at the first call.
fn tools(folder: &Path) -> Result<PathBuf> {
    let tools = folder.join("tools");
    let wanted = [&TOOLS[..], &TESTS[..]].concat().join("\n");
    if std::fs::read_to_string(tools.join(STAMP)).is_ok_and(|stamp| stamp == wanted) {
        return Ok(tools);
    }
    if tools.exists() {
        std::fs::remove_dir_all(&tools)?;
    }
    std::fs::create_dir_all(&tools)?;
    install(&["--upgrade"], &tools, &[&TOOLS[..], &TESTS[..]].concat())?;
    std::fs::write(tools.join(STAMP), wanted)?;
    Ok(tools)
}

/// Builds the wheel into `wheels`; its file.
fn build(tools: &Path, wheels: &Path, release: bool) -> Result<PathBuf> {
    if wheels.exists() {
        std::fs::remove_dir_all(wheels)?;
    }
    let program = tools.join(format!("bin/maturin{}", std::env::consts::EXE_SUFFIX));
    let mut maturin = Command::new(program);
    maturin.args(["build", "--quiet", "--locked", "--compatibility", "linux", "--interpreter", python()]);
    maturin.args(["--manifest-path", "python/Cargo.toml", "--out"]).arg(wheels);
    if release {
        maturin.args(["--release", "--features", "bundle"]);
    } else {
        // The profile of the tests, whose crates are built already.
        maturin.args(["--profile", "dev", "--strip", "false"]);
    }
    maturin.current_dir(workspace::root());
    finish(&mut maturin, "the wheel is not built")?;
    let mut found = Vec::new();
    for entry in std::fs::read_dir(wheels)? {
        found.push(entry?.path());
    }
    match found.as_slice() {
        [wheel] => Ok(wheel.clone()),
        _ => bail!("{} holds {} files instead of one wheel", wheels.display(), found.len()),
    }
}

/// Files of tests that need numpy alone.
const FILES: [&str; 3] = ["test_numpy.py", "test_numpy_serving.py", "test_planning.py"];

/// Installs the wheel in a fresh environment and runs its tests there.
fn test(folder: &Path, wheel: &Path) -> Result<()> {
    let fresh = folder.join("fresh");
    let mut venv = Command::new(python());
    venv.args(["-m", "venv", "--clear", "--without-pip"]).arg(&fresh);
    finish(&mut venv, "Python's module venv is needed")?;
    let bin = if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" };
    let program = fresh.join(bin);
    let site = Command::new(&program)
        .args(["-c", "import sysconfig; print(sysconfig.get_path('platlib'), end='')"])
        .output()
        .with_context(|| format!("{} does not start", program.display()))?;
    let site = PathBuf::from(String::from_utf8(site.stdout).context("its folder is not UTF-8")?);
    let file = wheel.to_str().context("the target folder's path is not UTF-8")?;
    install(&["--no-deps", "--no-index", "--upgrade"], &site, &[file])?;
    let mut pytest = Command::new(program);
    pytest.args(["-m", "pytest", "-q", "-p", "no:cacheprovider"]).args(FILES);
    pytest.current_dir(workspace::root().join("python/tests")).env("PYTHONPATH", folder.join("tools"));
    pytest.env("PYTHONDONTWRITEBYTECODE", "1");
    finish(&mut pytest, "the package's tests")
}
