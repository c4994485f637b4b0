//! What works on this machine, for `python -m fa_attn doctor`.

use fa_attn::device::Gpu;
use fa_attn::{Backend, CpuOptions, Engine, Tensor, bf16};
use fa_core::{Arch, Dtype, Mask, Pass, Problem};
use fa_kernels::bundle::Bundle;
use fa_kernels::cache::CACHE_VARIABLE;
use fa_kernels::toolchain::NVRTC_VARIABLE;
use fa_kernels::{Cache, Compiler, CompilerKind, cudarc::driver::CudaContext};
use pyo3::prelude::*;
use serde::Serialize;

use crate::error::InputError;
use crate::{devices, threads};

/// One thing that was looked at.
#[derive(Serialize)]
struct Check {
    name: &'static str,
    /// Works, is not there, or is there and wrong.
    status: &'static str,
    found: String,
    /// What to do where it does not work.
    advice: Option<String>,
}

fn ok(name: &'static str, found: impl Into<String>) -> Check {
    Check { name, status: "ok", found: found.into(), advice: None }
}

fn missing(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Check {
    Check { name, status: "missing", found: found.into(), advice: Some(advice.into()) }
}

fn broken(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Check {
    Check { name, status: "broken", found: found.into(), advice: Some(advice.into()) }
}

/// The checks of the library as a JSON list.
#[pyfunction]
pub(crate) fn doctor(py: Python<'_>) -> PyResult<String> {
    let _current = devices::Current::keep();
    threads::detached(py, || {
        let checks = checks();
        serde_json::to_string(&checks).map_err(|error| InputError::new_err(error.to_string()))
    })?
}

fn checks() -> Vec<Check> {
    let has_driver = fa_kernels::driver::probe().is_ok();
    let mut checks = vec![cpu(), attention("attention", Backend::Cpu(CpuOptions::default())), driver()];
    checks.extend(gpus(has_driver));
    checks.push(compiler(has_driver));
    checks.extend(bundle(Bundle::embedded()));
    checks.push(cache());
    checks
}

fn cpu() -> Check {
    let problem = Problem::square(1, 64, 1, 64, Mask::CAUSAL, Dtype::Bf16);
    let engine = Engine::with(Backend::Cpu(CpuOptions::default()));
    match engine.and_then(|engine| Ok(engine.bind(&problem, Pass::Forward)?.report())) {
        Ok(report) => {
            let report = serde_json::to_value(&report).unwrap_or_default();
            let field = |name: &str| report.get(name).map_or(String::new(), ToString::to_string);
            ok("cpu", format!("{}, {} threads", field("isa").trim_matches('"'), field("threads")))
        }
        Err(error) => {
            broken("cpu", error.to_string(), "set RAYON_NUM_THREADS, or raise the process's limits")
        }
    }
}

/// A small causal problem, compared with the reference in f64.
fn attention(name: &'static str, backend: Backend) -> Check {
    const ROWS: usize = 96;
    const DIM: usize = 64;
    const TOLERANCE: f32 = 0.02;
    let wave = |factor: f32| {
        let data = (0..ROWS * 2 * DIM).map(|i| bf16::from_f32((i as f32 * factor).sin())).collect();
        Tensor::new([1, ROWS, 2, DIM], data)
    };
    let compute = |backend| -> Result<Vec<bf16>, fa_attn::Error> {
        let engine = Engine::with(backend)?;
        Ok(engine.attention(&wave(0.37)?, &wave(0.71)?, &wave(0.13)?, Mask::CAUSAL)?.out.data)
    };
    let advice = "report this with the output of `python -m fa_attn doctor`";
    let results = compute(backend).and_then(|out| Ok((out, compute(Backend::Reference { threads: None })?)));
    match results {
        Err(error) => broken(name, error.to_string(), advice),
        Ok((out, reference)) => {
            let worst = out.iter().zip(&reference).map(|(one, other)| (one.to_f32() - other.to_f32()).abs());
            // A comparison with NaN is false.
            let is_right = worst.clone().all(|error| error <= TOLERANCE);
            let worst = worst.fold(0.0, f32::max);
            let found = format!("a small problem in bf16: at most {worst:.1e} from the reference");
            if is_right { ok(name, found) } else { broken(name, format!("{found}, or NaN"), advice) }
        }
    }
}

fn driver() -> Check {
    match fa_kernels::driver::version() {
        Ok(version) => ok("driver", format!("CUDA {}.{}", version / 1000, version % 1000 / 10)),
        Err(_) if std::path::Path::new("/proc/driver/nvidia/version").exists() => broken(
            "driver",
            "NVIDIA's kernel module, and no libcuda.so.1 that loads",
            "install the driver's user-space part; start a container with GPU support (--gpus all)",
        ),
        Err(_) => missing(
            "driver",
            "no libcuda.so.1",
            "attention is computed on the CPU; for a GPU install NVIDIA's driver (550 or newer)",
        ),
    }
}

fn gpus(has_driver: bool) -> Vec<Check> {
    let count = if has_driver { CudaContext::device_count().unwrap_or(0) } else { 0 };
    if count == 0 {
        return if has_driver {
            vec![missing("gpu", "no NVIDIA GPU", "attention is computed on the CPU")]
        } else {
            Vec::new()
        };
    }
    let gpu = |ordinal: i32| match Gpu::nth(usize::try_from(ordinal).unwrap_or(0)) {
        Ok(gpu) => ok("gpu", format!("{ordinal}: {}, kernels of {}", gpu.name(), gpu.arch())),
        Err(error) => {
            missing("gpu", format!("{ordinal}: {error}"), "kernels need compute capability 8.0 or newer")
        }
    };
    let mut checks: Vec<Check> = (0..count).map(gpu).collect();
    if checks[0].status == "ok" {
        checks.push(attention("attention on the GPU", Backend::Gpu));
    }
    checks
}

fn compiler(has_driver: bool) -> Check {
    let found = Compiler::find(CompilerKind::Nvrtc)
        .and_then(|compiler| Ok(format!("{}, {}", compiler.version()?, compiler.path().display())));
    match found {
        Ok(found) => ok("nvrtc", found),
        Err(error) if std::env::var_os(NVRTC_VARIABLE).is_some_and(|value| value != "none") => broken(
            "nvrtc",
            error.to_string(),
            format!("unset {NVRTC_VARIABLE}, or let it name an NVRTC library"),
        ),
        Err(_) if has_driver => missing(
            "nvrtc",
            "no NVRTC library",
            format!(
                "kernels other than those in the package are compiled by it: pip install nvidia-cuda-nvrtc \
                 (torch with CUDA brings it), or set {NVRTC_VARIABLE}"
            ),
        ),
        Err(_) => missing("nvrtc", "no NVRTC library", "not needed without a GPU"),
    }
}

/// The kernels in the package, if there are any.
fn bundle(bundle: &Bundle) -> Option<Check> {
    let archs = Arch::ALL.into_iter().filter(|&arch| bundle.specs(arch).next().is_some());
    let archs: Vec<&str> = archs.map(Arch::name).collect();
    let found = format!("{} kernels in the package, for {}", bundle.len(), archs.join(", "));
    (!bundle.is_empty()).then(|| ok("bundle", found))
}

fn cache() -> Check {
    let cache = Cache::open_default();
    let again = "kernels are compiled again by every process";
    let Some(root) = cache.root() else {
        return missing("cache", "no folder", format!("{again}: set {CACHE_VARIABLE}, or HOME"));
    };
    let size = cache.size() as f64 / f64::from(1 << 20);
    let found = format!("{}{}, {} kernels, {size:.1} MiB", root.display(), mode(root), cache.len());
    // The cache makes its folder when it stores a kernel.
    let Some(nearest) = root.ancestors().find(|folder| folder.exists()) else {
        return missing("cache", found, format!("{again}: set {CACHE_VARIABLE} to a folder"));
    };
    let probe = nearest.join(format!(".fa-doctor-{}", std::process::id()));
    let is_writable = std::fs::write(&probe, "").is_ok();
    if is_writable {
        // Left behind it does no harm.
        let _ = std::fs::remove_file(&probe);
        return ok("cache", found);
    }
    let advice = format!("{again}: set {CACHE_VARIABLE} to a folder that can be written");
    missing("cache", format!("{found}: not writable"), advice)
}

#[cfg(unix)]
fn mode(folder: &std::path::Path) -> String {
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::metadata(folder).map(|about| about.permissions().mode() & 0o7777);
    mode.map_or(" (not made yet)".to_owned(), |mode| format!(" (mode {mode:04o})"))
}

#[cfg(not(unix))]
fn mode(_folder: &std::path::Path) -> String {
    String::new()
}
