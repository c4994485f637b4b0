//! `cargo xtask python`: the Python package built as a wheel, installed in an environment of its own and
//! tested with numpy on the CPU.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail, ensure};

use crate::workspace;

/// Build the Python package's wheel, install it in a fresh environment and run its tests with numpy.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Build the wheel that is shipped, optimised, with the bundle of `cargo xtask build` in it and, on
    /// Linux, for glibc 2.17 and later, and the source distribution; leave both in target/wheels
    #[arg(long)]
    release: bool,
    /// Build the wheel of a release for Linux on Arm, too, which is not tested here (needs `rustup target add
    /// aarch64-unknown-linux-gnu`; docs/packages.md says how to run it under qemu)
    #[arg(long, requires = "release")]
    aarch64: bool,
}

/// The target of [`Args::aarch64`].
const AARCH64: &str = "aarch64-unknown-linux-gnu";

/// What builds the wheel and what its tests need.
const TOOLS: [&str; 1] = ["maturin==1.16.0"];
/// What links a wheel that is shipped against an old glibc, and says which one it needs. One version of zig,
/// as it is a compiler's.
const SHIPPING: [&str; 4] = ["ziglang==0.17.1", "auditwheel>=6.4,<7", "pyelftools>=0.31,<1", "packaging>=24"];
const TESTS: [&str; 2] = ["numpy>=2,<3", "pytest>=8,<10"];
/// What checks types, with the node that runs it. One version, whose findings are known.
const TYPES: [&str; 2] = ["pyright[nodejs]==1.1.414", "numpy>=2,<3"];
/// What the tests of jax need, 400 MB.
const JAX: [&str; 3] = ["jax==0.10.2", "numpy>=2,<3", "pytest>=8,<10"];
/// What the tests of torch and transformers need, 4.9 GB.
const TORCH: [&str; 4] = ["torch>=2.11,<2.12", "transformers>=5.24,<6", "numpy>=2,<3", "pytest>=8,<10"];

/// Names what was installed, so that a second call is free.
const STAMP: &str = "packages.txt";

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.release {
        ready_to_ship(args)?;
    }
    let folder = workspace::target_dir().join("python");
    let tools = tools(&folder.join("tools"), &[&TOOLS[..], &TESTS[..]].concat())?;
    let shipping = if args.release && cfg!(target_os = "linux") { Some(shipping(&folder)?) } else { None };
    let wheels = if args.release { workspace::target_dir().join("wheels") } else { folder.join("wheels") };
    if wheels.exists() {
        std::fs::remove_dir_all(&wheels)?;
    }
    let wheel = build(&tools, &wheels, args.release, shipping.as_deref(), None)?;
    let fresh = Fresh::with(&folder, &wheel)?;
    if args.release {
        fresh.computes()?;
        let mut made = vec![wheel];
        if args.aarch64 {
            made.push(build(&tools, &wheels, true, shipping.as_deref(), Some(AARCH64))?);
        }
        for wheel in &made {
            describe(wheel, shipping.as_deref())?;
        }
        let sources = source_distribution(&tools, &wheels)?;
        println!("{}: {}", sources.display(), megabytes(&sources)?);
    }
    check_types(&folder)?;
    fresh.test(&folder)
}

/// Whether a release can be built here, before minutes are spent on a part of it.
fn ready_to_ship(args: &Args) -> Result<()> {
    if let Some(bundle) = std::env::var_os("FA_BUNDLE") {
        ensure!(
            has_kernels(),
            "FA_BUNDLE = {}: no kernels are there: run `cargo xtask build`",
            bundle.display()
        );
    }
    if args.aarch64 {
        ensure!(cfg!(target_os = "linux"), "--aarch64: wheels for Linux are built on Linux");
        let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        let mut asked = Command::new(&rustc);
        asked.args(["--print", "target-libdir", "--target", AARCH64]).current_dir(workspace::root());
        let said = asked.output().with_context(|| format!("{} does not start", rustc.display()))?;
        let libraries = PathBuf::from(String::from_utf8_lossy(&said.stdout).trim());
        ensure!(
            said.status.success() && libraries.is_dir(),
            "--aarch64: the compiler has no libraries of {AARCH64}: run `rustup target add {AARCH64}`"
        );
    }
    Ok(())
}

/// Whether there are kernels for a wheel to ship.
fn has_kernels() -> bool {
    let bundle = std::env::var_os("FA_BUNDLE").map_or_else(|| workspace::root().join("dist"), PathBuf::from);
    bundle.join("manifest.json").is_file()
}

/// Says a wheel's tag, its size and the glibc that it needs; an error if other systems than intended take it.
fn describe(wheel: &Path, shipping: Option<&Path>) -> Result<()> {
    let tag = tag(wheel).with_context(|| format!("{} has no tag", wheel.display()))?;
    ensure!(
        tag.starts_with("cp39-abi3-"),
        "{}: the wheel is not one for Python 3.9 and later",
        wheel.display()
    );
    let glibc = shipping.map(|tools| audit(tools, wheel)).transpose()?;
    let needs =
        glibc.map_or(String::new(), |(major, minor)| format!(", needs glibc {major}.{minor} by auditwheel"));
    println!("{}: {}, tag {tag}{needs}", wheel.display(), megabytes(wheel)?);
    if !has_kernels() {
        println!(
            "no kernels are in it: NVRTC compiles each when it is first needed; `cargo xtask build` adds them"
        );
    }
    Ok(())
}

/// The tag of a wheel's name: `cp39-abi3-linux_x86_64`.
fn tag(wheel: &Path) -> Option<&str> {
    let name = wheel.file_name()?.to_str()?.strip_suffix(".whl")?;
    name.rsplitn(4, '-').nth(3).and_then(|before| name.get(before.len() + 1..))
}

fn megabytes(file: &Path) -> Result<String> {
    Ok(format!("{:.1} MB", file.metadata()?.len() as f64 / 1e6))
}

/// The wheel of a development build, tested: a step of `cargo xtask ci`.
pub(crate) fn check() -> Result<()> {
    run(&Args { release: false, aarch64: false })
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

/// Runs `pip install` with these arguments. Of thousands of modules the tests import some, which are compiled
/// when they are.
fn install(arguments: &[&str], to: &Path, packages: &[&str]) -> Result<()> {
    let mut pip = Command::new(python());
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    pip.args(["--only-binary=:all:", "--no-compile"]);
    pip.args(arguments).arg("--target").arg(to).args(packages).env("PIP_ROOT_USER_ACTION", "ignore");
    finish(&mut pip, "Python 3.9 or newer with pip is needed, and a package index that it reaches")
}

/// The folder `tools` with these packages, installed at the first call.
fn tools(tools: &Path, packages: &[&str]) -> Result<PathBuf> {
    let wanted = packages.join("\n");
    if std::fs::read_to_string(tools.join(STAMP)).is_ok_and(|stamp| stamp == wanted) {
        return Ok(tools.to_owned());
    }
    if tools.exists() {
        std::fs::remove_dir_all(tools)?;
    }
    std::fs::create_dir_all(tools)?;
    install(&["--upgrade"], tools, packages)?;
    std::fs::write(tools.join(STAMP), wanted)?;
    Ok(tools.to_owned())
}

/// Where the packages that ship a wheel are.
fn shipping(folder: &Path) -> Result<PathBuf> {
    tools(&folder.join("shipping"), &SHIPPING)
}

/// Checks the types of the package's public functions, and that mistakes in calls of them are seen.
fn check_types(folder: &Path) -> Result<()> {
    let tools = tools(&folder.join("types"), &TYPES)?;
    let mut pyright = Command::new(python());
    pyright.args(["-m", "pyright", "--level", "error", "--project"]).arg(workspace::root().join("python"));
    pyright.args(["--pythonpath", python()]).env("PYTHONPATH", tools);
    finish(&mut pyright, "the types of the Python package")
}

/// The glibc that the wheel needs; an error if it is a later one than its name says.
fn audit(tools: &Path, wheel: &Path) -> Result<(u32, u32)> {
    let mut show = Command::new(python());
    show.args(["-m", "auditwheel", "show"]).arg(wheel).env("PYTHONPATH", tools);
    let shown = show.output().with_context(|| format!("{} does not start", python()))?;
    let text = String::from_utf8_lossy(&shown.stdout).into_owned() + &String::from_utf8_lossy(&shown.stderr);
    ensure!(shown.status.success(), "auditwheel failed ({}): {text}", shown.status);
    let needed = least_glibc(&text).with_context(|| format!("auditwheel names no glibc: {text}"))?;
    let name = wheel.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let is_named = name.contains(&format!("manylinux_{}_{}", GLIBC.0, GLIBC.1));
    ensure!(is_named && needed <= GLIBC, "{name} needs glibc {}.{}: {text}", needed.0, needed.1);
    Ok(needed)
}

/// The glibc of manylinux2014.
const GLIBC: (u32, u32) = (2, 17);

/// The glibc of the platform tag that auditwheel says a wheel is consistent with, which stands first.
fn least_glibc(shown: &str) -> Option<(u32, u32)> {
    let words = shown.split_whitespace().collect::<Vec<&str>>().join(" ");
    let (_, after) = words.split_once("consistent with the following platform tag:")?;
    let (_, tag) = after.split_once("manylinux_")?;
    let mut numbers = tag.split('_').map_while(|number| number.parse().ok());
    Some((numbers.next()?, numbers.next()?))
}

/// `maturin` with this command, writing to `to`.
fn maturin(tools: &Path, command: &str, to: &Path) -> Command {
    let mut maturin = Command::new(tools.join(format!("bin/maturin{}", std::env::consts::EXE_SUFFIX)));
    maturin.args([command, "--manifest-path", "python/Cargo.toml", "--out"]).arg(to);
    maturin.current_dir(workspace::root());
    maturin
}

/// The sources as pip builds them; the file.
fn source_distribution(tools: &Path, to: &Path) -> Result<PathBuf> {
    let before = files(to)?;
    finish(&mut maturin(tools, "sdist", to), "the source distribution is not made")?;
    only_new(to, &before)
}

/// The files in a folder; none where there is no folder.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Ok(Vec::new()) };
    entries.map(|entry| Ok(entry?.path())).collect()
}

/// The file that a folder has besides those before.
fn only_new(folder: &Path, before: &[PathBuf]) -> Result<PathBuf> {
    let mut found = files(folder)?;
    found.retain(|file| !before.contains(file));
    match found.as_slice() {
        [file] => Ok(file.clone()),
        _ => bail!("{} has {} new files instead of one", folder.display(), found.len()),
    }
}

/// Builds the wheel into `wheels`, for another target than this machine's where one is named; its file.
fn build(
    tools: &Path,
    wheels: &Path,
    release: bool,
    shipping: Option<&Path>,
    target: Option<&str>,
) -> Result<PathBuf> {
    let before = files(wheels)?;
    let mut maturin = maturin(tools, "build", wheels);
    maturin.args(["--quiet", "--locked", "--interpreter", python()]);
    if let Some(target) = target {
        maturin.args(["--target", target]);
    }
    match shipping {
        Some(shipping) => {
            maturin.args(["--zig", "--compatibility", "manylinux2014"]).env("PYTHONPATH", shipping);
        }
        // For this machine and its like.
        None => _ = maturin.args(["--compatibility", "linux"]),
    }
    if release {
        maturin.args(["--profile", "wheel", "--features", "bundle"]);
    } else {
        // The profile of the tests, whose crates are built already.
        maturin.args(["--profile", "dev", "--strip", "false"]);
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        maturin.env(CARGO_BEHIND, cargo).env("CARGO", workspace::program()?);
    }
    finish(&mut maturin, "the wheel is not built")?;
    only_new(wheels, &before)
}

/// Where this is set, xtask stands for cargo, which is the variable's value: see [`stand_for_cargo`].
pub(crate) const CARGO_BEHIND: &str = "FA_XTASK_CARGO";

/// Runs cargo with the arguments that xtask was called with, by maturin. What builds the library alone builds
/// it as a part of the workspace: what the other members ask of the crates below counts, and these are there
/// from the tests' build. Alone, cargo builds 46 of them once more. Of maturin's word on the interpreter
/// pyo3 needs nothing on Linux, where the library is linked to none; it would be built again for it.
pub(crate) fn stand_for_cargo(cargo: &OsStr) -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let mut command = Command::new(cargo);
    command.args(in_workspace(&arguments).unwrap_or(arguments)).env("CARGO", cargo).env_remove(CARGO_BEHIND);
    if cfg!(target_os = "linux") {
        command.env_remove("PYO3_CONFIG_FILE");
    }
    match command.status() {
        Ok(status) => ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1)),
        Err(error) => {
            eprintln!("error: {} does not start: {error}", Path::new(cargo).display());
            ExitCode::FAILURE
        }
    }
}

/// Of `cargo rustc` for a package's library, the arguments of `cargo build` for the workspace's libraries;
/// `None` of anything else, and where the compiler is given flags of its own. A test among the targets makes
/// cargo count what tests ask of the crates.
fn in_workspace(arguments: &[OsString]) -> Option<Vec<OsString>> {
    let (first, rest) = arguments.split_first()?;
    if first != "rustc" || rest.iter().any(|argument| argument == "--") {
        return None;
    }
    let at = rest.iter().position(|argument| argument == "--manifest-path")?;
    let mut wanted = ["build", "--workspace", "--test", "search"].map(OsString::from).to_vec();
    wanted.extend_from_slice(rest);
    let manifest = wanted.len() - rest.len() + at + 1;
    *wanted.get_mut(manifest)? = workspace::root().join("Cargo.toml").into();
    Some(wanted)
}

/// Files of tests that need numpy alone.
const FILES: [&str; 9] = [
    "test_codes.py",
    "test_fp8.py",
    "test_flash_mla.py",
    "test_numpy.py",
    "test_refusals.py",
    "test_processes.py",
    "test_numpy_serving.py",
    "test_planning.py",
    "test_program.py",
];

/// Tests of jax's arrays.
const JAX_FILES: [&str; 5] = [
    "test_jax.py",
    "test_jax_codes.py",
    "test_jax_traced.py",
    "test_jax_programs.py",
    "test_jax_functions.py",
];
/// A mask of each kind: jax compiles every case anew, half a second of two cores.
const JAX_CHOSEN: &str =
    "not (full or window or scale or axes1 or options1 or options2 or extents or (bfloat16 and options))";

/// Tests of what programs of torch and transformers rely on: numbers that change under torch.compile, sharded
/// tensors, ranks, masks and padding. The others (and inductor, which compiles C++) take minutes more.
const TORCH_FILES: [&str; 15] = [
    "test_codes.py",
    "test_fp8.py",
    "test_mla_model.py",
    "test_torch_flash_mla.py",
    "test_flashinfer.py",
    "test_stand_in_installed.py",
    "test_notebook.py",
    "test_torch_compiled.py",
    "test_torch_shards.py",
    "test_torch_refusals.py",
    "test_torch_distributed.py",
    "test_torch_distributed_faces.py",
    "test_torch_distributed_faults.py",
    "test_torch_distributed_ring.py",
    "test_transformers_masks.py",
];
const TORCH_CHOSEN: &str =
    "not inductor and not 2x2 and not [4] and not one_computes[1] and not llama_trains";

/// Fetches what the check of types and the tests need beside the wheel's tools.
pub(crate) fn fetch_libraries() -> Result<()> {
    let folder = workspace::target_dir().join("python");
    tools(&folder.join("types"), &TYPES)?;
    tools(&folder.join("jax"), &JAX)?;
    tools(&folder.join("torch"), &TORCH).map(drop)
}

/// An environment that has nothing but the wheel.
struct Fresh {
    python: PathBuf,
}

impl Fresh {
    fn with(folder: &Path, wheel: &Path) -> Result<Fresh> {
        let fresh = folder.join("fresh");
        let mut venv = Command::new(python());
        venv.args(["-m", "venv", "--clear", "--without-pip"]).arg(&fresh);
        finish(&mut venv, "Python's module venv is needed")?;
        let program = fresh.join(if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" });
        let site = Command::new(&program)
            .args(["-c", "import sysconfig; print(sysconfig.get_path('platlib'), end='')"])
            .output()
            .with_context(|| format!("{} does not start", program.display()))?;
        let site = PathBuf::from(String::from_utf8(site.stdout).context("its folder is not UTF-8")?);
        let file = wheel.to_str().context("the target folder's path is not UTF-8")?;
        install(&["--no-deps", "--no-index", "--upgrade"], &site, &[file])?;
        Ok(Fresh { python: program })
    }

    /// Imports the package and lets it compute, away from its sources.
    fn computes(&self) -> Result<()> {
        let mut doctor = Command::new(&self.python);
        doctor.args(["-m", "fa_attn", "doctor"]).current_dir(std::env::temp_dir()).env_remove("PYTHONPATH");
        finish(&mut doctor, "the wheel does not work in an environment of its own")
    }

    /// Runs the package's tests, those of jax, which compiles for most of the time, beside those of torch;
    /// what they print is shown when they end.
    fn test(&self, folder: &Path) -> Result<()> {
        let pytest = |packages: &str, arguments: &[&str]| {
            let mut pytest = Command::new(&self.python);
            pytest.args(["-m", "pytest", "-q", "-p", "no:cacheprovider"]).args(arguments);
            pytest
                .current_dir(workspace::root().join("python/tests"))
                .env("PYTHONPATH", folder.join(packages));
            // Compiled once, and not in the folder of the sources.
            pytest.env("PYTHONPYCACHEPREFIX", folder.join("compiled")).env("OMP_NUM_THREADS", "1");
            let output =
                pytest.output().with_context(|| format!("{} does not start", self.python.display()))?;
            let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
            println!("{out}{err}");
            ensure!(
                output.status.success(),
                "the package's tests with {packages} failed ({})",
                output.status
            );
            Ok(())
        };
        pytest("tools", &FILES)?;
        fetch_libraries()?;
        std::thread::scope(|scope| {
            let jax = scope.spawn(|| pytest("jax", &[&JAX_FILES[..], &["-k", JAX_CHOSEN]].concat()));
            let torch = pytest("torch", &[&TORCH_FILES[..], &["-k", TORCH_CHOSEN]].concat());
            jax.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)).and(torch)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(Into::into).collect()
    }

    #[test]
    fn a_glibc_is_read_from_what_auditwheel_shows() {
        let shown = "\nx-manylinux_2_5_x86_64.whl is consistent\nwith the following platform\ntag: \
                     \"manylinux_2_17_x86_64\".";
        assert_eq!(least_glibc(shown), Some((2, 17)));
        let newer = "x.whl is consistent with the following platform tag: \"manylinux_2_34_x86_64\".\n\
                     constrained to \"manylinux_2_17_x86_64\"";
        assert_eq!(least_glibc(newer), Some((2, 34)));
        for other in ["", "consistent with the following platform tag: \"linux_x86_64\"", "manylinux_2_17"] {
            assert_eq!(least_glibc(other), None, "{other}");
        }
    }

    #[test]
    fn a_tag_is_read_from_a_wheels_name() {
        let of = |name: &str| tag(Path::new(name)).map(str::to_owned);
        let shipped = "target/wheels/fa_attn-0.1.0-cp39-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl";
        assert_eq!(of(shipped).as_deref(), Some("cp39-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64"));
        assert_eq!(
            of("fa_attn-0.1.0-1-cp39-abi3-linux_x86_64.whl").as_deref(),
            Some("cp39-abi3-linux_x86_64")
        );
        for other in ["fa_attn-0.1.0.tar.gz", "fa_attn.whl", ""] {
            assert_eq!(of(other), None, "{other}");
        }
    }

    #[test]
    fn a_library_is_built_as_a_part_of_the_workspace() {
        let asked = "rustc --quiet --profile dev --locked --manifest-path /a/python/Cargo.toml --lib";
        let all = workspace::root().join("Cargo.toml");
        let built = format!(
            "build --workspace --test search --quiet --profile dev --locked --manifest-path {} --lib",
            all.display()
        );
        assert_eq!(in_workspace(&arguments(asked)), Some(arguments(&built)));
        for other in ["", "metadata --manifest-path /a/Cargo.toml", "rustc --lib", "rustc --manifest-path"] {
            assert_eq!(in_workspace(&arguments(other)), None, "{other}");
        }
        let linked = format!("{asked} -- -C link-arg=-undefined");
        assert_eq!(in_workspace(&arguments(&linked)), None);
    }
}
