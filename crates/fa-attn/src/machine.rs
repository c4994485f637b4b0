//! A description of this machine.

pub mod gpu;

use serde::Serialize;

/// The CPU.
#[derive(Clone, Debug, Serialize)]
pub struct Cpu {
    /// Its name, as the system reports it.
    pub name: String,
    /// Logical cores available to this process.
    pub threads: usize,
    /// The instruction set extensions of this kind of CPU that matter here, and whether this one has them.
    pub features: Vec<Feature>,
}

/// An instruction set extension.
#[derive(Clone, Debug, Serialize)]
pub struct Feature {
    /// Its name.
    pub name: &'static str,
    /// Whether the CPU has it and the system allows it.
    pub present: bool,
}

/// Describes the CPU.
pub fn cpu() -> Cpu {
    Cpu {
        name: cpu_name().unwrap_or_else(|| format!("unknown {} CPU", std::env::consts::ARCH)),
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        features: features(),
    }
}

/// Bytes of memory that a program may still allocate, where the system reports it.
pub fn available_memory() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    kib.checked_mul(1024)
}

fn cpu_name() -> Option<String> {
    if cfg!(target_os = "macos") {
        let done =
            std::process::Command::new("sysctl").args(["-n", "machdep.cpu.brand_string"]).output().ok()?;
        return String::from_utf8(done.stdout).ok().map(|name| name.trim().to_owned());
    }
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    line.split_once(':').map(|(_, name)| name.trim().to_owned())
}

#[cfg(target_arch = "x86_64")]
fn features() -> Vec<Feature> {
    macro_rules! features {
        ($($name:tt),*) => { vec![$(Feature { name: $name, present: is_x86_feature_detected!($name) }),*] };
    }
    features!("avx2", "fma", "f16c", "avx512f", "avx512bf16", "avx512fp16")
}

#[cfg(target_arch = "aarch64")]
fn features() -> Vec<Feature> {
    macro_rules! features {
        ($($name:tt),*) => {
            vec![$(Feature { name: $name, present: std::arch::is_aarch64_feature_detected!($name) }),*]
        };
    }
    features!("neon", "fp16", "bf16")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn features() -> Vec<Feature> {
    Vec::new()
}
