//! `fa doctor`: what works on this machine, and what to do about what does not.

use std::fmt::Write;

use fa_core::{Dtype, Mask, Problem, TensorLayout};
use serde::Serialize;

use crate::args::{Backend, CpuArgs, DoctorArgs};
use crate::attention::Inputs;
use crate::compute::{Engine, Outputs};
use crate::failure::Verdict;
use crate::{gpu, machine, output};

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

/// How a thing is.
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
/// When standard output is closed.
pub fn command(args: &DoctorArgs) -> anyhow::Result<Verdict> {
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

/// A small causal problem on the default backend against the oracle.
fn attention_check() -> Check {
    const SEQLEN: usize = 96;
    let problem = Problem::square(1, SEQLEN, 2, 32, Mask::CAUSAL, Dtype::F32);
    let wave = |factor: f32| (0..SEQLEN * 2 * 32).map(|i| (i as f32 * factor).sin()).collect::<Vec<f32>>();
    let inputs = Inputs {
        problem,
        layout: TensorLayout::Bshd,
        q: wave(0.37),
        k: wave(0.71),
        v: wave(0.13),
        dout: None,
    };
    let compute = |backend| {
        let engine = Engine::new(backend, &CpuArgs::default())?;
        let mut outputs = Outputs::new(&inputs);
        engine.forward(&inputs, &mut outputs)?;
        anyhow::Ok(outputs.out)
    };
    let judged = compute(Backend::Auto).and_then(|out| {
        let exact: Vec<f64> = compute(Backend::Reference)?.into_iter().map(f64::from).collect();
        let shape = fa_cpu::check::out_shape(&problem);
        Ok(fa_cpu::compare::compare::<f32, f32>(shape, problem.dtype, &out, &exact, None)?)
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
            format!("{error:#}"),
            "please report this with the output of `fa doctor --json`",
        ),
    }
}

fn gpu_checks() -> Vec<Check> {
    let gpus = gpu::gpus();
    let driver = gpu::driver();
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
    checks.push(match (&driver.library, &driver.version) {
        (Some(library), Some(version)) => Check::ok("driver", format!("{version}, {}", library.display())),
        (Some(library), None) => Check::ok("driver", library.display().to_string()),
        (None, Some(version)) => Check::broken(
            "driver",
            format!("kernel module {version}, but no libcuda.so.1"),
            "install the driver's user-space part, or in a container start it with GPU support (--gpus all)",
        ),
        (None, None) => Check::missing(
            "driver",
            "no libcuda.so.1",
            "on a machine with a GPU, install NVIDIA's driver (550 or newer)",
        ),
    });
    checks
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
