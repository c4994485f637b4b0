//! Records of measurements: what was measured, of which sources, on which machine.

use std::path::{Path, PathBuf};

use fa_attn::atomic_file;
use fa_attn::device::Gpu;
use fa_attn::machine;
use fa_core::{Arch, KernelSpec};
use fa_kernels::{Compiler, CompilerKind, Headers, Source, smem_bytes};
use serde::Serialize;

use crate::device::DeviceInfo;
use crate::error::{Context, Result};

/// The commit that this library was built from, for records of measurements; `development` in a development
/// build.
pub const COMMIT: &str = env!("FA_COMMIT");

/// The machine, the program and the compiler behind a result.
#[derive(Clone, Debug, Serialize)]
pub struct Provenance {
    /// The command line, without the folders of this machine.
    pub command: String,
    /// Commit that the program was built from.
    pub commit: &'static str,
    /// The program's version.
    pub version: &'static str,
    /// When, in UTC.
    pub date: String,
    /// The GPU and its driver.
    #[serde(flatten)]
    pub device: DeviceInfo,
    /// The compiler of the kernels, with its version.
    pub compiler: String,
    /// The CPU.
    pub cpu: String,
}

impl Provenance {
    /// Of this process on `gpu`.
    ///
    /// # Errors
    /// Errors of the driver and the compiler.
    pub fn new(gpu: &Gpu) -> Result<Provenance> {
        Ok(Provenance {
            command: command_line(),
            commit: COMMIT,
            version: env!("CARGO_PKG_VERSION"),
            date: utc_now(),
            device: DeviceInfo::of(gpu)?,
            compiler: Compiler::find(CompilerKind::Nvrtc)
                .and_then(|compiler| compiler.version())
                .unwrap_or_else(|_| "none: kernels of the built-in bundle".to_owned()),
            cpu: machine::cpu().name,
        })
    }

    /// The GPU's name as part of a file name: `nvidia-h100-80gb-hbm3`.
    pub fn gpu_slug(&self) -> String {
        let lower = self.device.gpu.to_ascii_lowercase();
        let words = lower.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
        words.collect::<Vec<_>>().join("-")
    }
}

/// SHA-256 over a kernel's translation unit, which holds the spec, and every header that it reaches.
///
/// # Errors
/// An invalid spec, or one that is not for `arch`.
pub fn fingerprint(spec: &KernelSpec, arch: Arch) -> Result<String, fa_kernels::Error> {
    Ok(Source::new(spec, arch, Some(smem_bytes(spec)), &Headers::embedded())?.fingerprint())
}

/// A kernel, by its sources.
#[derive(Debug, Serialize)]
pub struct KernelRecord {
    /// The kernel's short name.
    pub name: String,
    /// The kernel.
    pub spec: KernelSpec,
    /// SHA-256 over the translation unit and every header that it reaches.
    pub sources: String,
}

impl KernelRecord {
    /// Adds the kernel of `spec` to `kernels` unless it is there already.
    ///
    /// # Errors
    /// An invalid spec, or one that is not for `arch`.
    pub fn add(kernels: &mut Vec<KernelRecord>, spec: &KernelSpec, arch: Arch) -> Result<()> {
        if kernels.iter().all(|known| known.spec != *spec) {
            let sources = fingerprint(spec, arch)?;
            kernels.push(KernelRecord { name: spec.to_string(), spec: spec.clone(), sources });
        }
        Ok(())
    }
}

/// An argument that names a file of this machine as a file of the current folder.
fn here(argument: &str) -> String {
    let path = Path::new(argument);
    let name = path.is_absolute().then(|| path.file_name()).flatten();
    name.map_or_else(|| argument.to_owned(), |name| name.to_string_lossy().into_owned())
}

/// `text` without the paths of compilation logs, which mean nothing on another machine.
pub fn without_logs(text: &str) -> String {
    let mut parts = text.split(" (log: ");
    let first = parts.next().unwrap_or_default();
    let rest = parts.map(|part| part.split_once(')').map_or("", |(_, rest)| rest));
    std::iter::once(first).chain(rest).collect()
}

/// Writes a record's `text` to `results/folder/name`, creating the folders; paths of logs are left out.
///
/// # Errors
/// When that cannot be written.
pub fn write(results: &Path, folder: &str, name: &str, text: &str) -> Result<PathBuf> {
    let folder = results.join(folder);
    std::fs::create_dir_all(&folder).context(folder.display().to_string())?;
    let path = folder.join(name);
    atomic_file::write(&path, without_logs(text).as_bytes())?;
    Ok(path)
}

/// The command line of this process, without the folders of this machine.
pub fn command_line() -> String {
    let arguments: Vec<String> = std::env::args().skip(1).map(|argument| here(&argument)).collect();
    format!("fa {}", arguments.join(" "))
}

/// `2026-01-31T23:59:59Z`, of the system's clock.
pub fn utc_now() -> String {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    utc(since.as_secs())
}

/// The date in [`utc_now`], `2026-01-31`.
pub fn today() -> String {
    utc_now().chars().take_while(|c| *c != 'T').collect()
}

/// Civil date of a count of seconds since 1970, by counting years of 365.2425 days from the first of March.
fn utc(seconds: u64) -> String {
    let days = seconds / 86_400 + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let (month, year) =
        if month < 10 { (month + 3, era * 400 + year) } else { (month - 9, era * 400 + year + 1) };
    let time = seconds % 86_400;
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", time / 3600, time / 60 % 60, time % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_civil() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(59 * 86_400), "1970-03-01T00:00:00Z");
        assert_eq!(utc(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(utc(1_798_761_599), "2026-12-31T23:59:59Z");
    }

    #[test]
    fn records_hold_no_places_of_this_machine() {
        assert_eq!(here("/somewhere/marks.json"), "marks.json");
        assert_eq!(here("docs/marks.json"), "docs/marks.json");
        assert_eq!(here("--seqlen"), "--seqlen");
        assert_eq!(without_logs("a (log: /cache/1/log.txt): b (log: /cache/2/log.txt) c"), "a: b c");
        assert_eq!(without_logs("a (b) c"), "a (b) c");
    }
}
