//! Records of validation: which kernels, by the hash of their sources and spec, on which GPU.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fa_attn::atomic_file;
use fa_attn::device::Gpu;
use fa_core::{Arch, KernelSpec};
use fa_kernels::{Compiler, CompilerKind, Headers, Source, smem_bytes, specs};
use serde::{Deserialize, Serialize};

use crate::device::DeviceInfo;
use crate::error::{Context, Error, Result, read_text};
use crate::machine;

/// The folder of validation records below the results.
pub const VALIDATED: &str = "validate";

/// The folder of records of random problems below the results.
pub const SOAKED: &str = "soak";

/// The folder of sanitizers' records below the results.
pub const SANITIZED: &str = "sanitize";

/// The file, below the results, that names kernels whose sources have not been validated, with the reasons.
pub const UNVALIDATED: &str = "unvalidated.ron";

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

/// A shipped kernel and the hash of its sources and spec.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// The spec's file below `specs/`.
    pub file: String,
    /// The spec's short name.
    pub name: String,
    /// [`Source::fingerprint`] of the kernel.
    pub sources: String,
}

/// Fingerprints of the shipped kernels, each with its spec and the architectures that it ships for.
///
/// # Errors
/// A shipped spec that is not valid.
pub fn shipped() -> Result<Vec<(Fingerprint, KernelSpec, Vec<Arch>)>> {
    let headers = Headers::embedded();
    let files = specs::shipped().map_err(|(path, error)| Error::Record(format!("specs/{path}: {error}")))?;
    let fingerprint = |file: specs::ShippedFile| {
        let spec = file.shipped.spec;
        let arch = *file
            .shipped
            .archs
            .first()
            .ok_or_else(|| Error::Record(format!("specs/{}: no archs", file.path)))?;
        let source = Source::new(&spec, arch, Some(smem_bytes(&spec)), &headers)?;
        let fingerprint =
            Fingerprint { file: file.path.to_owned(), name: spec.to_string(), sources: source.fingerprint() };
        Ok((fingerprint, spec, file.shipped.archs))
    };
    files.into_iter().map(fingerprint).collect()
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

/// The part of a validation record that the check reads.
#[derive(Debug, Deserialize)]
struct Record {
    passed: bool,
    kernels: Vec<Fingerprint>,
}

/// Kernels that are known not to be validated.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Unvalidated {
    /// A kernel (`sm90_fwd`) or a spec's file (`sm90/hd64-full-bf16.ron`), and why.
    kernels: BTreeMap<String, String>,
}

/// The validation state of a shipped kernel.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Standing {
    /// The kernel.
    #[serde(flatten)]
    pub kernel: Fingerprint,
    /// Its state.
    pub state: State,
}

/// The validation state of a kernel.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// A record holds the current sources.
    Validated {
        /// The record's file name.
        record: String,
    },
    /// No record does, and [`UNVALIDATED`] says why.
    Excused {
        /// Why.
        reason: String,
    },
    /// No record does, without a reason.
    Unknown,
}

/// Compares the shipped kernels with the records below `results`.
///
/// # Errors
/// Records and lists that cannot be read, and reasons that are empty.
pub fn standings(results: &Path) -> Result<Vec<Standing>> {
    if !results.is_dir() {
        let message =
            format!("there is no folder {}: --results names the one with the records", results.display());
        return Err(Error::Request(message));
    }
    let records = read_records(&results.join(VALIDATED))?;
    let unvalidated = read_unvalidated(&results.join(UNVALIDATED))?;
    let standing = |(kernel, spec, _): (Fingerprint, KernelSpec, Vec<Arch>)| {
        let holds = |record: &Record| {
            record.passed
                && record.kernels.iter().any(|k| k.file == kernel.file && k.sources == kernel.sources)
        };
        let found = records.iter().find(|(_, record)| holds(record));
        let excuse =
            [kernel.file.as_str(), spec.kernel.name()].iter().find_map(|name| unvalidated.kernels.get(*name));
        let state = match (found, excuse) {
            (Some((record, _)), _) => State::Validated { record: record.clone() },
            (None, Some(reason)) => State::Excused { reason: reason.clone() },
            (None, None) => State::Unknown,
        };
        Standing { kernel, state }
    };
    Ok(shipped()?.into_iter().map(standing).collect())
}

fn read_records(folder: &Path) -> Result<Vec<(String, Record)>> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let entries = std::fs::read_dir(folder).context(folder.display().to_string())?;
    let mut paths: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    paths.sort();
    let read = |path: PathBuf| -> Result<(String, Record)> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(&path)?;
        Ok((name, serde_json::from_str(&text)?))
    };
    paths
        .into_iter()
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .map(|path| read(path.clone()).context(path.display().to_string()))
        .collect()
}

fn read_unvalidated(path: &Path) -> Result<Unvalidated> {
    if !path.is_file() {
        return Ok(Unvalidated::default());
    }
    let text = read_text(path)?;
    let list: Unvalidated = ron::from_str(&text).context(path.display().to_string())?;
    if let Some((kernel, _)) = list.kernels.iter().find(|(_, reason)| reason.trim().is_empty()) {
        let path = path.display();
        let message = format!("{path}: {kernel} has no reason: say why it is not validated");
        return Err(Error::Record(message));
    }
    Ok(list)
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

    fn check(fill: impl FnOnce(&Path, &Fingerprint)) -> Result<State> {
        let results = tempfile::tempdir()?;
        let kernel = shipped()?.swap_remove(0).0;
        fill(results.path(), &kernel);
        let standings = standings(results.path())?;
        Ok(standings.into_iter().find(|standing| standing.kernel == kernel).expect("it ships").state)
    }

    fn record(results: &Path, passed: bool, kernel: &Fingerprint) {
        let text = serde_json::json!({ "passed": passed, "kernels": [kernel], "more": 1 }).to_string();
        write(results, VALIDATED, "gpu.json", &text).unwrap();
    }

    #[test]
    fn a_record_of_the_same_sources_validates_and_no_other() {
        assert_eq!(check(|_, _| {}).unwrap(), State::Unknown);
        let state = check(|results, kernel| record(results, true, kernel)).unwrap();
        assert_eq!(state, State::Validated { record: "gpu.json".into() });
        assert_eq!(check(|results, kernel| record(results, false, kernel)).unwrap(), State::Unknown);
        let changed = |results: &Path, kernel: &Fingerprint| {
            record(results, true, &Fingerprint { sources: "0".repeat(64), ..kernel.clone() });
        };
        assert_eq!(check(changed).unwrap(), State::Unknown);
    }

    #[test]
    fn excuses_name_a_kernel_or_a_file_and_need_a_reason() {
        let excuse = |key: &str, reason: &str| {
            check(|results, _| {
                std::fs::write(results.join(UNVALIDATED), format!("(kernels: {{\"{key}\": \"{reason}\"}})"))
                    .unwrap();
            })
        };
        let first = shipped().unwrap().swap_remove(0);
        for key in [first.0.file.as_str(), first.1.kernel.name()] {
            assert_eq!(excuse(key, "new").unwrap(), State::Excused { reason: "new".into() });
        }
        assert_eq!(excuse("other.ron", "new").unwrap(), State::Unknown);
        assert!(excuse("other.ron", " ").is_err());
    }
}
