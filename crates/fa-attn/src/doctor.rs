//! What works on this machine, and what to do about what does not: the facts that `fa doctor` and
//! `python -m fa_attn doctor` show.

use fa_core::{Arch, Dtype, Mask, counted};
use fa_kernels::bundle::Bundle;
use fa_kernels::cache::{CACHE_VARIABLE, DEFAULT_LIMIT};
use fa_kernels::cudarc::driver::CudaContext;
use fa_kernels::toolchain::NVRTC_VARIABLE;
use fa_kernels::{Cache, Compiler, CompilerKind};
use half::bf16;
use serde::Serialize;

use crate::device::Gpu;
use crate::machine::{self, gpu};
use crate::{Backend, CpuOptions, Engine, Error, Tensor};

/// One thing that was looked at.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Check {
    /// What it is; GPUs share a name.
    pub name: &'static str,
    /// Its state.
    pub status: Status,
    /// What was found.
    pub found: String,
    /// What to do, where it does not work.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

/// The state of a component.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Works.
    Ok,
    /// Not there; something else stands in or less is possible.
    Missing,
    /// There, and wrong.
    Broken,
}

/// What a check that fails for no known reason asks for.
const REPORT: &str = "please report this with the output of this command";

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

/// Looks at everything: the CPU and attention on it, driver and GPUs, compiler, kernels and their cache.
/// Takes seconds where a GPU has to compile its first kernel.
pub fn checks() -> Vec<Check> {
    let mut checks = cpu();
    checks.push(attention("attention", Backend::Cpu(CpuOptions::default())));
    checks.extend(gpus());
    checks.push(driver());
    checks.push(compiler());
    checks.extend(bundle(Bundle::embedded()));
    checks.push(cache());
    checks
}

fn cpu() -> Vec<Check> {
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

/// A small causal problem against the reference.
fn attention(name: &'static str, backend: Backend) -> Check {
    const SHAPE: [usize; 4] = [1, 96, 2, 64];
    let wave =
        |factor: f32| (0..SHAPE.iter().product()).map(move |i| bf16::from_f32((i as f32 * factor).sin()));
    let waves = [0.37, 0.71, 0.13];
    let judged = (|| -> Result<_, Error> {
        let [q, k, v] = waves.map(|factor| Tensor::new(SHAPE, wave(factor).collect::<Vec<bf16>>()));
        let out = Engine::with(backend)?.attention(&q?, &k?, &v?, Mask::CAUSAL)?.out.data;
        let [q, k, v] = waves.map(|factor| Tensor::new(SHAPE, wave(factor).map(f32::from).collect()));
        let reference = Engine::with(Backend::Reference { threads: None })?;
        let exact = reference.attention(&q?, &k?, &v?, Mask::CAUSAL)?.out.data;
        let exact: Vec<f64> = exact.into_iter().map(f64::from).collect();
        Ok(fa_cpu::compare::compare::<bf16, f32>(SHAPE, Dtype::Bf16, &out, &exact, None)?)
    })();
    match judged {
        Ok(found) if found.passed() => {
            Check::ok(name, format!("right on a small problem in bf16 (max error {:.1e})", found.max_abs))
        }
        Ok(found) => Check::broken(name, found.to_string(), REPORT),
        Err(error) => Check::broken(name, error.to_string(), REPORT),
    }
}

fn gpus() -> Vec<Check> {
    let has_driver = fa_kernels::driver::probe().is_ok();
    let count = if has_driver { CudaContext::device_count().unwrap_or(0) } else { 0 };
    let listed = if count == 0 { gpu::gpus() } else { Vec::new() };
    if count == 0 && listed.is_empty() {
        let advice = "attention is computed on the CPU; planning needs no GPU";
        return vec![Check::missing("gpu", "no NVIDIA GPU", advice)];
    }
    // There, but not for CUDA.
    let unseen = |own: gpu::Gpu| {
        let about = [own.compute_capability.map(|text| format!("compute capability {text}")), own.memory];
        let about: Vec<String> = about.into_iter().flatten().collect();
        let advice = "CUDA does not see it: the driver is below; CUDA_VISIBLE_DEVICES may hide it";
        Check::missing("gpu", format!("{} ({})", own.name, about.join(", ")), advice)
    };
    let opened = |ordinal: i32| match Gpu::nth(usize::try_from(ordinal).unwrap_or(0)) {
        Ok(gpu) => Check::ok("gpu", format!("{ordinal}: {}, kernels of {}", gpu.name(), gpu.arch())),
        Err(error) => {
            let advice = "kernels need compute capability 8.0 or newer";
            Check::missing("gpu", format!("{ordinal}: {error}"), advice)
        }
    };
    let mut checks: Vec<Check> = listed.into_iter().map(unseen).chain((0..count).map(opened)).collect();
    if checks.first().is_some_and(|first| first.status == Status::Ok) {
        checks.push(attention("gpu attention", Backend::Gpu));
    }
    checks
}

fn driver() -> Check {
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

fn compiler() -> Check {
    let found = Compiler::find(CompilerKind::Nvrtc);
    let version = found.as_ref().map_err(ToString::to_string).and_then(|compiler| {
        compiler.version().map(|version| (compiler.path(), version)).map_err(|error| error.to_string())
    });
    match version {
        Ok((path, version)) => Check::ok("nvrtc", format!("{version}, {}", path.display())),
        Err(error) if matches!(found, Err(fa_kernels::Error::BadCompiler { .. })) => {
            Check::broken("nvrtc", error, format!("unset {NVRTC_VARIABLE}, or let it name an NVRTC library"))
        }
        Err(_) if found.is_err() => Check::missing(
            "nvrtc",
            "no NVRTC library",
            format!(
                "GPU kernels are compiled with it; without a GPU it is not needed: `pip install nvidia-cuda-nvrtc` (torch with CUDA brings it), \
                 in the sources `cargo xtask toolkit`, or set {NVRTC_VARIABLE} to one"
            ),
        ),
        Err(error) => {
            Check::broken("nvrtc", error, "install another version: `pip install nvidia-cuda-nvrtc`")
        }
    }
}

/// The kernels that the library was built with, if any.
fn bundle(bundle: &Bundle) -> Option<Check> {
    let archs = Arch::ALL.into_iter().filter(|&arch| bundle.specs(arch).next().is_some());
    let archs: Vec<&str> = archs.map(Arch::name).collect();
    let found = format!("{} built-in kernels for {}", bundle.len(), archs.join(", "));
    (!bundle.is_empty()).then(|| Check::ok("bundle", found))
}

fn cache() -> Check {
    let again = "kernels are compiled again by every process";
    let cache = Cache::open_default();
    let Some(root) = cache.root() else {
        return Check::missing("cache", "no cache folder", format!("{again}: set {CACHE_VARIABLE}, or HOME"));
    };
    if let Err(error) = cache.check() {
        return Check::broken("cache", root.display().to_string(), error.to_string());
    }
    let (mib, most) = (cache.size() as f64 / f64::from(1 << 20), DEFAULT_LIMIT >> 20);
    let kernels = counted(cache.len(), "kernel");
    let found = format!("{}{}, {kernels}, {mib:.1} of {most} MiB", root.display(), mode(root));
    // The cache makes its folder when it stores a kernel, so the nearest existing folder must be writable.
    let nearest = root.ancestors().find(|folder| folder.exists());
    if nearest.is_some_and(is_writable) {
        return Check::ok("cache", found);
    }
    let advice = format!("{again}: set {CACHE_VARIABLE} to a folder that can be written");
    Check::missing("cache", format!("{found}: not writable"), advice)
}

fn is_writable(folder: &std::path::Path) -> bool {
    let probe = folder.join(format!(".fa-doctor-{}", std::process::id()));
    let is_made = std::fs::OpenOptions::new().write(true).create_new(true).open(&probe).is_ok();
    // Left behind it does no harm.
    is_made && std::fs::remove_file(&probe).is_ok()
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
