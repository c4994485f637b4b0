//! Hashes of what units execute: source tokens, compiled code, launches.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use fa_core::{Arch, Family, KernelSpec, ShippedSpec};
use fa_kernels::launch::Launches;
use fa_kernels::{
    AppendLaunch, Cache, Compiled, Compiler, CompilerKind, Headers, MergeLaunch, Source, entry_codes, ship,
    toolchain,
};
use sha2::{Digest, Sha256};

use super::units::{Subject, Unit};
use crate::error::{Context, Error, Result};
use crate::grid::{Case, Extent};

/// Digits of a hash of tokens and launches: 64 bits, beyond any accident.
const DIGITS: usize = 16;

/// SMs of the GPUs whose launches are hashed: of the emulation, whole and for divided keys, and of an H100.
const SMS: [u32; 3] = [2, 64, SMS_OF_H100];
const SMS_OF_H100: u32 = 132;

/// A compiler with what it has compiled.
pub struct Workshop {
    compiler: Compiler,
    cache: Cache,
    headers: Headers,
}

impl Workshop {
    /// NVRTC, with a cache in `folder`.
    ///
    /// # Errors
    /// Where there is none.
    pub fn open(folder: &Path) -> Result<Workshop> {
        let compiler = Compiler::find(CompilerKind::Nvrtc)?;
        Ok(Workshop::with(compiler, folder))
    }

    /// A compiler of the caller's choice.
    pub fn with(compiler: Compiler, folder: &Path) -> Workshop {
        let cache = Cache::open(Some(folder.to_owned()), 1 << 30);
        Workshop { compiler, cache, headers: Headers::embedded() }
    }

    /// The same with other device sources.
    #[must_use]
    pub fn of(self, headers: Headers) -> Workshop {
        Workshop { headers, ..self }
    }

    /// The device sources.
    pub(super) fn headers(&self) -> &Headers {
        &self.headers
    }

    /// The compiler's name and version.
    ///
    /// # Errors
    /// A compiler that cannot be loaded.
    pub fn version(&self) -> Result<String> {
        Ok(self.compiler.version()?)
    }

    /// The hash of the code of each entry of a unit.
    ///
    /// # Errors
    /// A kernel that does not compile, or spills.
    pub(super) fn codes(&self, unit: &Unit) -> Result<BTreeMap<String, String>> {
        let codes =
            self.compiled(unit)?.iter().map(|own| entry_codes(&own.cubin)).collect::<Option<Vec<_>>>();
        let codes = codes.ok_or_else(|| Error::Record(format!("{}: no cubin", unit.key())))?;
        Ok(codes.into_iter().flatten().collect())
    }

    /// The programs of a unit, compiled.
    fn compiled(&self, unit: &Unit) -> Result<Vec<Arc<Compiled>>> {
        let programs = unit.programs(&self.headers)?;
        if let Some(spec) = unit.spec() {
            return Ok(self.cache.get_all(&self.compiler, spec, &programs)?);
        }
        let get = |own: &Source| -> Result<Arc<Compiled>> {
            Ok(self.cache.get_named(&self.compiler, &unit.name, None, own)?)
        };
        programs.iter().map(get).collect()
    }

    /// Registers of a unit on each of its architectures, where it compiles within its plan on all of them.
    ///
    /// # Errors
    /// The first fault: a spill, fewer CTAs than planned, local memory, a missing instruction.
    pub fn registers(&self, unit: &Unit) -> Result<BTreeMap<Arch, u32>> {
        let fault = |what: String| Error::Record(format!("{}: {what}", unit.name));
        for (index, own) in self.compiled(unit)?.iter().enumerate() {
            let computes = unit.spec().filter(|_| index == 0);
            if let Some(what) = machine_code_fault(computes, &own.cubin)? {
                return Err(fault(what));
            }
        }
        let Some(spec) = unit.spec() else { return Ok(BTreeMap::new()) };
        let shipped = [ShippedSpec { archs: unit.archs.clone(), spec: spec.clone() }];
        let built = ship::build(&shipped, &[], &self.compiler, &self.cache, &self.headers, &|_, _| ())?;
        if let Some(failure) = built.failures.first() {
            return Err(fault(format!("on {}: {}", failure.arch, failure.reason)));
        }
        for row in &built.rows {
            let limits = row.arch.limits();
            let report = &row.report;
            if report.registers > limits.regs_per_thread
                || row.smem > limits.smem_per_block
                || report.static_smem > 0
            {
                return Err(fault(format!("on {}: beyond its limits: {report:?}", row.arch)));
            }
        }
        Ok(built.rows.iter().map(|row| (row.arch, row.report.registers)).collect())
    }
}

/// What is wrong with the machine code of a program: instructions that the main one must hold, local memory,
/// which nothing may touch whatever the log says of spills, and global data, which hashes of code leave out
/// ([`entry_codes`]). Without a disassembler the log's word is taken.
fn machine_code_fault(spec: Option<&KernelSpec>, cubin: &[u8]) -> Result<Option<String>> {
    let Some(tool) = toolchain::find_tool("nvdisasm") else { return Ok(None) };
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), cubin)?;
    let done = Command::new(tool).arg("-c").arg(file.path()).output().context("nvdisasm does not start")?;
    if !done.status.success() {
        return Ok(Some(format!("nvdisasm: {}", String::from_utf8_lossy(&done.stderr))));
    }
    let text = String::from_utf8_lossy(&done.stdout);
    let words: HashSet<&str> = text.split_whitespace().filter_map(|word| word.split('.').next()).collect();
    if text.contains("c[0x4]") {
        return Ok(Some("reads global data (c[0x4]): a constant is no literal".to_owned()));
    }
    let family = spec.map(|spec| (spec.kernel.family(), spec.kernel.computes_in_8_bits()));
    let wanted: &[&str] = match family {
        None => &[],
        Some((Family::Sm80, _)) => &["HMMA", "LDSM", "LDGSTS"],
        Some((Family::Sm90, true)) => &["QGMMA", "UTMALDG", "USETMAXREG"],
        Some((Family::Sm90, false)) => &["HGMMA", "UTMALDG", "USETMAXREG"],
        Some((Family::Sm100, _)) => &["UTCHMMA", "UTCBAR", "LDTM", "STTM", "UTMALDG", "USETMAXREG"],
    };
    let missing = wanted.iter().find(|word| !words.contains(*word)).map(|word| format!("no {word}"));
    let local = ["LDL", "STL"].into_iter().find(|word| words.contains(word)).map(str::to_owned);
    Ok(missing.or(local))
}

/// Entries that cases launch, with the numbers of SMs on which they do.
pub(super) type Launched = BTreeMap<&'static str, BTreeSet<u32>>;

/// A hash of texts.
pub fn digest(texts: &[String]) -> String {
    let mut hash = Sha256::new();
    texts.iter().for_each(|text| hash.update(format!("{} {text}", text.len())));
    digits(hash)
}

fn digits(hash: Sha256) -> String {
    let all: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    all[..DIGITS].to_owned()
}

/// The hash of a unit's source tokens, which comments and white space do not change.
///
/// # Errors
/// Those of the spec.
pub(super) fn tokens(unit: &Unit, headers: &Headers) -> Result<String> {
    let programs = unit.programs(headers)?;
    Ok(digest(&programs.iter().map(Source::fingerprint).collect::<Vec<_>>()))
}

/// The hash of what the library launches for a unit's emulated cases, and the entries that these and a GPU's
/// cases launch, with the numbers of SMs on which they do.
///
/// # Errors
/// Those of the library for a problem that the kernel does not compute.
pub(super) fn launches(unit: &Unit) -> Result<(String, Launched)> {
    let (mut hash, mut launched) = (Sha256::new(), Launched::new());
    for case in unit.cases(Extent::Emulated) {
        for sms in SMS {
            let mut entries = BTreeSet::new();
            for word in words(unit, &case, sms, &mut entries)? {
                hash.update(word.to_le_bytes());
            }
            for entry in entries {
                launched.entry(entry).or_default().insert(sms);
            }
        }
    }
    // Long problems, which the emulation leaves to a GPU: more tiles than CTAs plan for themselves.
    for entry in self::launched(unit, Extent::Quick, SMS_OF_H100)? {
        launched.entry(entry).or_default().insert(SMS_OF_H100);
    }
    Ok((digits(hash), launched))
}

fn words(unit: &Unit, case: &Case, sms: u32, entries: &mut BTreeSet<&'static str>) -> Result<Vec<u64>> {
    Ok(match (&unit.subject, &case.append, &case.merge) {
        (Subject::Attention(spec), ..) => {
            let plan = fa_planner::divide(&case.problem, spec, unit.arch, sms, None);
            let launches = Launches::of(&plan, &case.problem, unit.arch, sms)?;
            entries.extend(launches.entries());
            let [q, k, v, out] = case.placements().map(|placement| placement.strides);
            launches.words(&[q, k, v, out, out, q, k, v])
        }
        (_, Some(append), _) => {
            entries.insert(fa_kernels::append_entry(append.codes.map(|codes| codes.kind)));
            AppendLaunch::new(append, sms)?.words()
        }
        (_, _, Some(merge)) => {
            entries.insert(fa_kernels::MERGE);
            MergeLaunch::new(merge, sms)?.words()
        }
        (Subject::Append(_) | Subject::Merge, None, None) => Vec::new(),
    })
}

/// The entries that cases of a unit launch on a GPU with `sms` SMs.
///
/// # Errors
/// As [`launches`].
pub(super) fn launched(unit: &Unit, extent: Extent, sms: u32) -> Result<BTreeSet<&'static str>> {
    let mut entries = BTreeSet::new();
    for case in unit.cases(extent) {
        words(unit, &case, sms, &mut entries)?;
    }
    Ok(entries)
}
