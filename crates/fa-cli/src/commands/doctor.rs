//! `fa doctor`: what works on this machine, and what to do about what does not.

mod time;

use std::fmt::Write;

use fa_attn::{Backend, CpuOptions, Engine, Tensor};
use fa_core::{Arch, Dtype, Mask, Problem, counted};
use fa_kernels::bundle::Bundle;
use fa_kernels::cache::{CACHE_VARIABLE, DEFAULT_LIMIT};
use fa_kernels::{Cache, Compiler, CompilerKind, Error};
use fa_lab::machine::{self, gpu};
use serde::Serialize;

use crate::term::failure::Verdict;
use crate::term::output;
use clap::Args;

/// `fa doctor`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  fa doctor\n  fa doctor --json\n  fa doctor --time")]
pub(crate) struct DoctorArgs {
    /// Measure start-up on the GPU instead, with a warm and with an empty cache, and the host time of a call
    #[arg(long)]
    pub time: bool,
    /// Start up once and report how long it took: what --time runs in a separate process
    #[arg(long, hide = true, requires = "time", conflicts_with = "notices")]
    pub start: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Print the licences and copyright notices of the third-party crates in this program instead
    #[arg(long, conflicts_with_all = ["time", "json"])]
    pub notices: bool,
}

/// Written by `cargo xtask notices`.
const NOTICES: &str = include_str!("../../THIRD-PARTY.txt");

/// What is printed.
#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    checks: Vec<Check>,
}

/// One thing that was looked at.
#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    status: Status,
    found: String,
    /// What to do, where something is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

/// The state of a component.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Status {
    /// Works.
    Ok,
    /// Not there; something else stands in or less is possible.
    Missing,
    /// There, and wrong.
    Broken,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Check {
        Check { name, status: Status::Ok, found: found.into(), advice: None }
    }

    fn missing(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Check {
        Check { name, status: Status::Missing, found: found.into(), advice: Some(advice.into()) }
    }

    fn broken(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Check {
        Check { name, status: Status::Broken, found: found.into(), advice: Some(advice.into()) }
    }
}

/// Runs the command: a bad verdict when something is broken; what is merely missing is not.
///
/// # Errors
/// When standard output is closed; with `--time` also for want of a GPU.
pub(crate) fn command(args: &DoctorArgs) -> anyhow::Result<Verdict> {
    if args.start {
        return time::start();
    }
    if args.time {
        return time::command(args.json);
    }
    if args.notices {
        output::print(NOTICES)?;
        return Ok(Verdict::Good);
    }
    let mut checks = cpu_checks();
    checks.push(attention_check());
    checks.extend(gpu_checks());
    let broken = checks.iter().any(|check| check.status == Status::Broken);
    let report = Report { version: env!("CARGO_PKG_VERSION"), checks };
    if args.json {
        output::print_json(&report)?
    } else {
        output::print(&text(&report))?
    }
    Ok(if broken { Verdict::Bad } else { Verdict::Good })
}

fn cpu_checks() -> Vec<Check> {
    let cpu = machine::cpu();
    let (have, lack): (Vec<_>, Vec<_>) = cpu.features.iter().partition(|feature| feature.present);
    let names =
        |features: &[&machine::Feature]| features.iter().map(|f| f.name).collect::<Vec<_>>().join(", ");
    let simd = match (have.is_empty(), lack.is_empty()) {
        (true, _) => Check::missing(
            "simd",
            format!("none of {}", names(&lack)),
            "portable code is used: right, but several times slower",
        ),
        (false, true) => Check::ok("simd", names(&have)),
        (false, false) => Check::ok("simd", format!("{} (not: {})", names(&have), names(&lack))),
    };
    vec![Check::ok("cpu", cpu.name.clone()), simd, Check::ok("threads", cpu.threads.to_string())]
}

/// A small causal problem on the CPU against the oracle.
fn attention_check() -> Check {
    const SEQLEN: usize = 96;
    let problem = Problem::square(1, SEQLEN, 2, 32, Mask::CAUSAL, Dtype::F32);
    let wave = |factor: f32| {
        let data = (0..SEQLEN * 2 * 32).map(|i| (i as f32 * factor).sin()).collect();
        Tensor::new([1, SEQLEN, 2, 32], data)
    };
    let compute = |backend| -> Result<Vec<f32>, fa_attn::Error> {
        let engine = Engine::with(backend)?;
        Ok(engine.attention(&wave(0.37)?, &wave(0.71)?, &wave(0.13)?, Mask::CAUSAL)?.out.data)
    };
    let judged = compute(Backend::Cpu(CpuOptions::default())).and_then(|out| {
        let reference = compute(Backend::Reference { threads: None })?;
        let exact: Vec<f64> = reference.into_iter().map(f64::from).collect();
        let shape = fa_cpu::check::out_shape(&problem);
        Ok(fa_cpu::compare::compare::<f32, f32>(shape, problem.types.q, &out, &exact, None)?)
    });
    match judged {
        Ok(found) if found.passed() => {
            Check::ok("attention", format!("right on a small problem (max error {:.1e})", found.max_abs))
        }
        Ok(found) => Check::broken(
            "attention",
            found.to_string(),
            "please report this with the output of `fa doctor --json`",
        ),
        Err(error) => Check::broken(
            "attention",
            error.to_string(),
            "please report this with the output of `fa doctor --json`",
        ),
    }
}

fn gpu_checks() -> Vec<Check> {
    let gpus = gpu::gpus();
    let mut checks = Vec::new();
    if gpus.is_empty() {
        checks.push(Check::missing(
            "gpu",
            "no NVIDIA GPU",
            "attention is computed on the CPU; planning needs no GPU",
        ));
    }
    for gpu in &gpus {
        let about =
            [gpu.compute_capability.as_ref().map(|c| format!("compute capability {c}")), gpu.memory.clone()];
        let about: Vec<String> = about.into_iter().flatten().collect();
        let found = format!("{} ({})", gpu.name, about.join(", "));
        checks.push(match (gpu.arch, &gpu.compute_capability) {
            (None, Some(_)) => Check::missing("gpu", found, "kernels need compute capability 8.0 or newer"),
            (Some(arch), _) => Check::ok("gpu", format!("{found}: kernels of {arch}")),
            (None, None) => Check::ok("gpu", found),
        });
    }
    checks.push(driver_check());
    checks.push(compiler_check());
    checks.extend(bundle_check(Bundle::embedded()));
    checks.push(cache_check());
    checks
}

fn driver_check() -> Check {
    let gpu::Driver { version: module, library } = gpu::driver();
    match (fa_kernels::driver::version(), module, library) {
        (Ok(cuda), module, library) => {
            let module = module.map_or(String::new(), |version| format!("{version}, "));
            let library = library.map_or(String::new(), |path| format!(", {}", path.display()));
            Check::ok("driver", format!("{module}CUDA {}.{}{library}", cuda / 1000, cuda % 1000 / 10))
        }
        (Err(_), Some(module), None) => Check::broken(
            "driver",
            format!("kernel module {module}, but no libcuda.so.1"),
            "install the driver's user-space part, or in a container start it with GPU support (--gpus all)",
        ),
        (Err(error), _, Some(library)) => Check::broken(
            "driver",
            format!("{}: {error}", library.display()),
            "reinstall NVIDIA's driver, or restart the machine after an update of it",
        ),
        (Err(_), None, None) => Check::missing(
            "driver",
            "no libcuda.so.1",
            "on a machine with a GPU, install NVIDIA's driver (550 or newer)",
        ),
    }
}

fn compiler_check() -> Check {
    let found = Compiler::find(CompilerKind::Nvrtc);
    let version = found.as_ref().map_err(ToString::to_string).and_then(|compiler| {
        compiler.version().map(|version| (compiler.path(), version)).map_err(|error| error.to_string())
    });
    match version {
        Ok((path, version)) => Check::ok("nvrtc", format!("{version}, {}", path.display())),
        Err(error) if matches!(found, Err(Error::BadCompiler { .. })) => {
            let variable = fa_kernels::toolchain::NVRTC_VARIABLE;
            Check::broken("nvrtc", error, format!("unset {variable}, or let it name an NVRTC library"))
        }
        Err(_) if found.is_err() => Check::missing(
            "nvrtc",
            "no NVRTC library",
            format!(
                "GPU kernels are compiled with it: `cargo xtask toolkit` in this workspace, or `pip install \
                 nvidia-cuda-nvrtc`, or set {} to one",
                fa_kernels::toolchain::NVRTC_VARIABLE
            ),
        ),
        Err(error) => {
            Check::broken("nvrtc", error, "install another version: `cargo xtask toolkit` in this workspace")
        }
    }
}

/// The kernels that the program was built with, if any.
fn bundle_check(bundle: &Bundle) -> Option<Check> {
    let archs = Arch::ALL.into_iter().filter(|&arch| bundle.specs(arch).next().is_some());
    let archs: Vec<&str> = archs.map(Arch::name).collect();
    let found = format!("{} built-in kernels for {}", bundle.len(), archs.join(", "));
    (!bundle.is_empty()).then(|| Check::ok("bundle", found))
}

fn cache_check() -> Check {
    let cache = Cache::open_default();
    let Some(root) = cache.root() else {
        return Check::missing(
            "cache",
            "no cache folder",
            format!("kernels are compiled again by every process: set {CACHE_VARIABLE}, or HOME"),
        );
    };
    if let Err(error) = cache.check() {
        return Check::broken("cache", root.display().to_string(), error.to_string());
    }
    // The cache creates its folder when it stores a kernel, so the nearest existing folder must be writable.
    let nearest = root.ancestors().find(|folder| folder.exists());
    let writable = nearest.is_some_and(|folder| tempfile::tempfile_in(folder).is_ok());
    let (mib, most) = (cache.size() as f64 / f64::from(1 << 20), DEFAULT_LIMIT >> 20);
    let found = format!("{} ({}, {mib:.1} of {most} MiB)", root.display(), counted(cache.len(), "kernel"));
    if writable {
        Check::ok("cache", found)
    } else {
        let advice =
            format!("kernels are compiled again by every process: set {CACHE_VARIABLE} to a writable folder");
        Check::missing("cache", format!("{found}: not writable"), advice)
    }
}

fn text(report: &Report) -> String {
    let mut text = format!("fa {}\n", report.version);
    for check in &report.checks {
        let mark = match check.status {
            Status::Ok => "ok",
            Status::Missing => "--",
            Status::Broken => "BAD",
        };
        writeln!(text, "{mark:<4}{:<11}{}", check.name, check.found)
            .expect("writing to a string cannot fail");
        if let Some(advice) = &check.advice {
            writeln!(text, "{:<15}{advice}", "").expect("writing to a string cannot fail");
        }
    }
    text
}
