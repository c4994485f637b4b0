//! NVIDIA GPUs and their driver, found without loading a library.

use std::path::{Path, PathBuf};
use std::process::Command;

use fa_core::Arch;
use serde::Serialize;

/// A GPU, as the driver describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// The product's name.
    pub name: String,
    /// Compute capability, such as `9.0`; `None` when the driver does not report it.
    pub compute_capability: Option<String>,
    /// The architecture whose kernels it runs, if there are any.
    pub arch: Option<Arch>,
    /// Device memory as the driver prints it.
    pub memory: Option<String>,
}

/// The driver.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Driver {
    /// Its version, where the kernel module reports it.
    pub version: Option<String>,
    /// The library that programs load.
    pub library: Option<PathBuf>,
}

/// Looks for the driver's kernel module and library.
pub fn driver() -> Driver {
    let version = std::fs::read_to_string("/proc/driver/nvidia/version").ok();
    Driver { version: version.as_deref().and_then(module_version), library: find_library() }
}

/// The GPUs that the driver lists; empty when there are none or no driver.
pub fn gpus() -> Vec<Gpu> {
    let from_tool = Command::new("nvidia-smi")
        .args(["--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader"])
        .output()
        .ok()
        .filter(|done| done.status.success())
        .map(|done| parse_tool_output(&String::from_utf8_lossy(&done.stdout)));
    from_tool.filter(|gpus| !gpus.is_empty()).unwrap_or_else(gpus_of_module)
}

/// `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue ...`
fn module_version(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("NVRM version"))?;
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    line.split_whitespace().find(is_version).map(str::to_owned)
}

fn parse_tool_output(text: &str) -> Vec<Gpu> {
    let parse = |line: &str| {
        let mut fields = line.split(',').map(str::trim);
        let name = fields.next().filter(|name| !name.is_empty())?.to_owned();
        let capability = fields.next().map(str::to_owned);
        let arch = capability.as_deref().and_then(|text| {
            let (major, minor) = text.split_once('.')?;
            Arch::of_compute_capability(major.parse().ok()?, minor.parse().ok()?)
        });
        Some(Gpu { name, compute_capability: capability, arch, memory: fields.next().map(str::to_owned) })
    };
    text.lines().filter_map(parse).collect()
}

/// The GPUs by the kernel module, where there is no nvidia-smi.
fn gpus_of_module() -> Vec<Gpu> {
    let Ok(entries) = std::fs::read_dir("/proc/driver/nvidia/gpus") else { return Vec::new() };
    let mut folders: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    folders.sort();
    let name = |folder: &PathBuf| {
        let text = std::fs::read_to_string(folder.join("information")).ok()?;
        let line = text.lines().find(|line| line.starts_with("Model:"))?;
        Some(line["Model:".len()..].trim().to_owned())
    };
    let gpu = |name| Gpu { name, compute_capability: None, arch: None, memory: None };
    folders.iter().filter_map(name).map(gpu).collect()
}

fn find_library() -> Option<PathBuf> {
    if cfg!(windows) {
        return Some(PathBuf::from(r"C:\Windows\System32\nvcuda.dll")).filter(|path| path.is_file());
    }
    let loader_path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let usual = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/nvidia/lib64",
        "/usr/lib/wsl/lib",
        "/run/opengl-driver/lib",
    ];
    let folders = std::env::split_paths(&loader_path).chain(usual.iter().map(PathBuf::from));
    folders
        .filter(|folder| folder != Path::new(""))
        .map(|folder| folder.join("libcuda.so.1"))
        .find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_texts_are_understood() {
        let proc =
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n";
        assert_eq!(module_version(proc).as_deref(), Some("550.54.15"));
        assert_eq!(module_version("GCC version: 12.2.0"), None);
        let gpus = parse_tool_output("NVIDIA H100 80GB HBM3, 9.0, 81559 MiB\nTesla T4, 7.5, 15360 MiB\n\n");
        assert_eq!(gpus.len(), 2);
        assert_eq!((gpus[0].arch, gpus[0].memory.as_deref()), (Some(Arch::Sm90), Some("81559 MiB")));
        assert_eq!((gpus[1].name.as_str(), gpus[1].arch), ("Tesla T4", None));
    }
}
