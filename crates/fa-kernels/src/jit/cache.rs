//! Compiled kernels on disk, keyed by what they were compiled from.
//!
//! An entry is a folder `ROOT/KEY` with the spec, the unit, the compiler's log, the cubin and `entry.json`.
//! It is built in a temporary folder and renamed, so that a reader sees all of it or nothing; `entry.json`
//! holds a checksum of the cubin, so that a damaged entry is treated as missing and replaced. The entry of a
//! kernel that the compiler spills, or whose wgmma it serialises, has an empty cubin: it is refused without
//! compiling from then on, under the same compiler, flags and sources. No locks:
//! processes that race build the same bytes, and one of them wins. Where nothing can be written, kernels live
//! in memory and a warning is traced. A folder that others may write to is refused: see `trust`.

use std::collections::HashMap;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, SystemTime};
use std::{fs, io, thread};

use fa_core::KernelSpec;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::atomic_file;
use crate::jit::compile::{CompileFailure, Compiled, Compiler};
use crate::jit::hash::hash;
use crate::jit::report::Report;
use crate::jit::source::Source;
use crate::jit::trust::check_trust;

/// The environment variable that names the cache's folder.
pub const CACHE_VARIABLE: &str = "FA_CACHE_DIR";

/// The default limit of a cache in bytes: some two thousand kernels.
pub const DEFAULT_LIMIT: u64 = 256 << 20;

/// Part of every key: raised when the layout of an entry changes.
const FORMAT: &str = "fa-kernels cache 3";

/// Temporary folders of processes that died are removed after this long.
const STALE: Duration = Duration::from_secs(3600);

/// A cache of compiled kernels, shared by threads and by processes.
#[derive(Debug)]
pub struct Cache {
    root: Option<PathBuf>,
    limit: u64,
    memory: Mutex<HashMap<String, Arc<Compiled>>>,
}

/// The contents of `entry.json`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    compiler: String,
    flags: Vec<String>,
    cubin_sha256: String,
    report: Report,
}

/// What a unit was made from, as stored next to its cubin.
#[derive(Clone)]
struct Named<'a> {
    name: &'a str,
    spec: Option<&'a KernelSpec>,
}

impl Cache {
    /// The cache at `FA_CACHE_DIR`, or `fa/kernels` in the user's cache folder; in memory where there is
    /// neither.
    pub fn open_default() -> Cache {
        Cache::open(default_root(), DEFAULT_LIMIT)
    }

    /// The cache at `root` (`None` for memory only) that holds at most `limit` bytes. Nothing is created
    /// until a kernel is stored.
    pub fn open(root: Option<PathBuf>, limit: u64) -> Cache {
        Cache { root, limit, memory: Mutex::new(HashMap::new()) }
    }

    /// The folder.
    pub fn root(&self) -> Option<&Path> {
        self.root.as_deref()
    }

    /// The kernel that `compiler` makes of `source`: from memory, from disk, or compiled now and stored.
    ///
    /// # Errors
    /// [`Error::Compile`] for errors in the source, [`Error::Refused`] for code that spills or that ptxas
    /// says lost what it was written for, [`Error::UntrustedCache`] for a folder that others may write to,
    /// and those of the compiler. A cache that cannot be written is no error.
    pub fn get(
        &self,
        compiler: &Compiler,
        spec: &KernelSpec,
        source: &Source,
    ) -> Result<Arc<Compiled>, Error> {
        self.get_named(compiler, &spec.to_string(), Some(spec), source)
    }

    /// [`Cache::get`] for a unit of that name, which may have no spec.
    ///
    /// # Errors
    /// As [`Cache::get`].
    pub fn get_named(
        &self,
        compiler: &Compiler,
        name: &str,
        spec: Option<&KernelSpec>,
        source: &Source,
    ) -> Result<Arc<Compiled>, Error> {
        self.check()?;
        let identity = self.identities(compiler, std::slice::from_ref(source))?.remove(0);
        self.get_keyed(compiler, &Named { name, spec }, source, identity)
    }

    /// [`Cache::get_named`] of a source whose compiler and key are known.
    fn get_keyed(
        &self,
        compiler: &Compiler,
        spec: &Named<'_>,
        source: &Source,
        (name, key): (String, String),
    ) -> Result<Arc<Compiled>, Error> {
        // Refused code is cached too: a plan that spills is skipped at once the next time.
        let remembered = self.memory().get(&key).cloned();
        let kernel = match remembered {
            Some(kernel) => kernel,
            None => {
                let kernel = match self.read(&key)? {
                    Some(kernel) => kernel,
                    None => {
                        let flags = compiler.flags(&source.target);
                        self.compile(&key, compiler, (name, flags), spec, source)?
                    }
                };
                let kernel = Arc::new(kernel);
                self.memory().insert(key.clone(), kernel.clone());
                kernel
            }
        };
        match kernel.report.fault_beyond(source.spills_allowed()) {
            None => Ok(kernel),
            Some(fault) => {
                let log_file =
                    self.root.as_ref().map(|root| root.join(key).join(LOG)).filter(|log| log.is_file());
                let (name, target) = (spec.name.to_owned(), source.target.clone());
                Err(Error::Refused { name, target, fault, log_file })
            }
        }
    }

    /// The kernels that `compiler` makes of the programs of `spec`, the main one first. Those that are not
    /// there yet are compiled side by side.
    ///
    /// # Errors
    /// As [`Cache::get`], of the first program that has any.
    pub fn get_all(
        &self,
        compiler: &Compiler,
        spec: &KernelSpec,
        programs: &[Source],
    ) -> Result<Vec<Arc<Compiled>>, Error> {
        self.check()?;
        let name = &spec.to_string();
        let identities = self.identities(compiler, programs)?;
        let compiled: Vec<Result<Arc<Compiled>, Error>> = thread::scope(|scope| {
            let mut started = Vec::new();
            // The main one last, by this thread.
            for (at, (source, identity)) in programs.iter().zip(identities).enumerate().rev() {
                // The spec is that of the main program alone: many share the others.
                let own = Named { name, spec: (at == 0).then_some(spec) };
                let is_here = self.holds(&identity.1);
                let get = move || self.get_keyed(compiler, &own, source, identity);
                let thread = (at > 0 && !is_here)
                    .then(|| thread::Builder::new().spawn_scoped(scope, get.clone()).ok());
                // Where there is no further thread, this one compiles.
                started.push(match thread.flatten() {
                    Some(thread) => Started::Beside(thread),
                    None => Started::Done(get()),
                });
            }
            started.into_iter().rev().map(Started::end).collect()
        });
        compiled.into_iter().collect()
    }

    /// Whether the kernel of a key need not be compiled.
    fn holds(&self, key: &str) -> bool {
        self.memory().contains_key(key) || self.root.as_ref().is_some_and(|root| root.join(key).is_dir())
    }

    /// The name and version of `compiler`, and a hash of it and of `programs`.
    pub(crate) fn identity_of_all(
        &self,
        compiler: &Compiler,
        programs: &[Source],
    ) -> Result<(String, String), Error> {
        let keys = self.identities(compiler, programs)?;
        let all: Vec<&[u8]> = keys.iter().map(|(_, key)| key.as_bytes()).collect();
        Ok((self.compiler_name(compiler)?, hash(&all)[..KEY_DIGITS].to_owned()))
    }

    /// The name and version of `compiler`, and the key of what it makes of each of `programs`.
    fn identities<'p>(
        &self,
        compiler: &Compiler,
        programs: &'p [Source],
    ) -> Result<Vec<(String, String)>, Error> {
        let name = self.compiler_name(compiler)?;
        let mut headers = Hashed::new();
        let mut key_of = |own: &'p Source| key(&name, &compiler.flags(&own.target), own, &mut headers);
        Ok(programs.iter().map(|own| (name.clone(), key_of(own))).collect())
    }

    /// Bytes on disk, all entries together.
    pub fn size(&self) -> u64 {
        self.folders().iter().map(|folder| folder.bytes).sum()
    }

    /// Entries on disk, those of refused sources included.
    pub fn len(&self) -> usize {
        self.folders().len()
    }

    /// Whether nothing is on disk.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Compiles a source and stores the result: the kernel, or the log of the errors.
    fn compile(
        &self,
        key: &str,
        compiler: &Compiler,
        (name, flags): (String, Vec<String>),
        spec: &Named<'_>,
        source: &Source,
    ) -> Result<Compiled, Error> {
        tracing::info!(spec = spec.name, target = source.target, compiler = name, "compiling");
        match compiler.compile(source) {
            Ok(mut compiled) => {
                // Of refused code the report is enough.
                if compiled.report.fault_beyond(source.spills_allowed()).is_some() {
                    compiled.cubin = Vec::new();
                }
                let cubin_sha256 = hash(&[&compiled.cubin]);
                let entry = Entry { compiler: name, flags, cubin_sha256, report: compiled.report.clone() };
                self.write(key, spec, source, &compiled.log, Some((&entry, &compiled.cubin)));
                Ok(compiled)
            }
            Err(CompileFailure::Log(log)) => {
                let log_file = self.write(&format!("failed-{key}"), spec, source, &log, None);
                let (name, target) = (spec.name.to_owned(), source.target.clone());
                Err(Error::Compile { name, target, log, log_file })
            }
            Err(CompileFailure::Compiler(error)) => Err(error),
        }
    }

    /// An entry, if it exists and is complete. A damaged one is removed.
    fn read(&self, key: &str) -> Result<Option<Compiled>, Error> {
        let Some(folder) = self.root.as_ref().map(|root| root.join(key)).filter(|folder| folder.is_dir())
        else {
            return Ok(None);
        };
        check_trust(&folder)?;
        let read = || -> Option<Compiled> {
            let entry: Entry = serde_json::from_str(&fs::read_to_string(folder.join(ENTRY)).ok()?).ok()?;
            let cubin = fs::read(folder.join("kernel.cubin")).ok()?;
            let log = fs::read_to_string(folder.join(LOG)).ok()?;
            (hash(&[&cubin]) == entry.cubin_sha256).then_some(Compiled { cubin, log, report: entry.report })
        };
        let found = read();
        // A missing folder was evicted while we read: not damage.
        if found.is_none() && folder.is_dir() {
            tracing::warn!(entry = %folder.display(), "damaged cache entry is compiled anew");
            if let Err(error) = discard(&folder) {
                tracing::warn!(%error, "cannot remove it");
            }
        }
        Ok(found)
    }

    /// Whether the folder may hold what others have put there: see [`Error::UntrustedCache`].
    ///
    /// # Errors
    /// [`Error::UntrustedCache`] with what would work.
    pub fn check(&self) -> Result<(), Error> {
        self.root.as_deref().map_or(Ok(()), check_trust)
    }

    /// Writes an entry and returns where its log lies; `None`, with a traced warning, when the folder is not
    /// writable.
    fn write(
        &self,
        name: &str,
        spec: &Named<'_>,
        source: &Source,
        log: &str,
        good: Option<(&Entry, &[u8])>,
    ) -> Option<PathBuf> {
        let root = self.root.as_ref()?;
        let folder = root.join(name);
        let store = || -> io::Result<()> {
            create_private(root)?;
            let temporary = tempfile::Builder::new().prefix(TEMPORARY).tempdir_in(root)?;
            let to = |file: &str| temporary.path().join(file);
            if let Some(spec) = spec.spec {
                fs::write(to("spec.json"), serde_json::to_vec_pretty(spec)?)?;
            }
            fs::write(to("source.cu"), &source.unit)?;
            fs::write(to(LOG), log)?;
            if let Some((entry, cubin)) = good {
                fs::write(to("kernel.cubin"), cubin)?;
                fs::write(to(ENTRY), serde_json::to_vec_pretty(entry)?)?;
            } else if folder.is_dir() {
                discard(&folder)?;
            }
            match fs::rename(temporary.path(), &folder) {
                // Another process stored the same kernel first.
                Err(_) if folder.is_dir() => Ok(()),
                result => result,
            }
        };
        if let Err(error) = store() {
            tracing::warn!(
                cache = %root.display(), %error,
                "the kernel cache is not writable: kernels are compiled anew in every process"
            );
            return None;
        }
        self.evict(&folder);
        Some(folder.join(LOG))
    }

    /// Removes the oldest entries until the limit holds again, but never the one at `newest`.
    fn evict(&self, newest: &Path) {
        let mut folders = self.folders();
        let mut total: u64 = folders.iter().map(|folder| folder.bytes).sum();
        folders.sort_by_key(|folder| folder.modified);
        for folder in folders {
            if total <= self.limit {
                break;
            }
            if folder.path != newest && discard(&folder.path).is_ok() {
                tracing::debug!(entry = %folder.path.display(), "evicted");
                total -= folder.bytes;
            }
        }
        self.sweep();
    }

    /// Removes temporary folders that were left behind.
    fn sweep(&self) {
        for path in self.children() {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let age =
                fs::metadata(&path).and_then(|m| m.modified()).ok().and_then(|time| time.elapsed().ok());
            if name.starts_with(TEMPORARY) && age.is_some_and(|age| age > STALE) {
                // Best effort: a folder that is still in use stays.
                let _ = fs::remove_dir_all(&path);
            }
        }
    }

    fn folders(&self) -> Vec<Folder> {
        let measure = |path: PathBuf| -> Option<Folder> {
            let modified = fs::metadata(&path).ok()?.modified().ok()?;
            let files = fs::read_dir(&path).ok()?;
            let bytes = files.filter_map(|file| Some(file.ok()?.metadata().ok()?.len())).sum();
            Some(Folder { path, modified, bytes })
        };
        let is_entry = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            !name.starts_with(TEMPORARY) && name != COMPILERS
        };
        self.children().into_iter().filter(is_entry).filter_map(measure).collect()
    }

    fn children(&self) -> Vec<PathBuf> {
        let Some(Ok(entries)) = self.root.as_ref().map(fs::read_dir) else { return Vec::new() };
        entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| path.is_dir()).collect()
    }

    /// The compiler's name, version and size. Loading NVRTC only to ask costs more than the rest of a warm
    /// start, so the answer is stored under the library's path, size and time.
    fn compiler_name(&self, compiler: &Compiler) -> Result<String, Error> {
        let facts = fs::metadata(compiler.path()).map_err(|e| Error::io(compiler.path(), e))?;
        let named = |version: String| format!("{version} ({} B)", facts.len());
        let Some(root) = &self.root else { return compiler.version().map(named) };
        let modified =
            facts.modified().ok().and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
        let identity = format!("{} {} {modified:?}", compiler.path().display(), facts.len());
        let file = root.join(COMPILERS).join(&hash(&[identity.as_bytes()])[..KEY_DIGITS]);
        if let Ok(version) = fs::read_to_string(&file)
            && !version.is_empty()
        {
            return Ok(named(version));
        }
        let version = compiler.version()?;
        if let Err(error) = atomic_file::write(&file, version.as_bytes()) {
            tracing::debug!(%error, "the compiler's version is asked again next time");
        }
        Ok(named(version))
    }

    fn memory(&self) -> std::sync::MutexGuard<'_, HashMap<String, Arc<Compiled>>> {
        // The map holds finished kernels only, so it is valid even if another thread panicked.
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A kernel of [`Cache::get_all`]: found or compiled, or being compiled.
enum Started<'scope> {
    Done(Result<Arc<Compiled>, Error>),
    Beside(ScopedJoinHandle<'scope, Result<Arc<Compiled>, Error>>),
}

impl Started<'_> {
    fn end(self) -> Result<Arc<Compiled>, Error> {
        match self {
            Started::Done(kernel) => kernel,
            Started::Beside(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
        }
    }
}

struct Folder {
    path: PathBuf,
    modified: SystemTime,
    bytes: u64,
}

/// First part of the names of folders that are being written.
const TEMPORARY: &str = ".tmp-";

/// The file that makes an entry whole: [`Entry`].
const ENTRY: &str = "entry.json";

/// The file of a compiler's messages.
const LOG: &str = "log.txt";

/// The folder of compilers' versions.
const COMPILERS: &str = "compilers";

/// Digits of a key: 128 bits, beyond any accident.
const KEY_DIGITS: usize = 32;

/// Headers by their names, with the hashes of their texts.
type Hashed<'a> = HashMap<&'a str, (&'a str, String)>;

/// The key of a source. Programs of one kernel share most of their headers, each of which is hashed once.
fn key<'a>(compiler: &str, flags: &[String], source: &'a Source, known: &mut Hashed<'a>) -> String {
    for (name, text) in &source.headers {
        if known.get(name.as_str()).is_none_or(|(hashed, _)| hashed != text) {
            known.insert(name, (text, hash(&[text.as_bytes()])));
        }
    }
    let flags = flags.join("\n");
    let fixed = [FORMAT, compiler, &flags, &source.unit];
    let headers = source.headers.iter().flat_map(|(name, _)| [name.as_str(), &known[name.as_str()].1]);
    let parts: Vec<&[u8]> = fixed.into_iter().chain(headers).map(str::as_bytes).collect();
    hash(&parts)[..KEY_DIGITS].to_owned()
}

/// Creates a folder and those above it; with a mode of the system's that lets others write, they could put
/// kernels there.
fn create_private(root: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o755);
    builder.create(root)
}

/// Removes a folder atomically for readers: renamed first, then deleted.
fn discard(folder: &Path) -> io::Result<()> {
    let parent = folder.parent().unwrap_or(folder);
    let aside = tempfile::Builder::new().prefix(TEMPORARY).tempdir_in(parent)?;
    match fs::rename(folder, aside.path().join("entry")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// The folder of [`Cache::open_default`]: FA_CACHE_DIR, or one of the user's caches; `None` where there is
/// neither.
pub fn default_root() -> Option<PathBuf> {
    let from =
        |variable: &str| std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(named) = from(CACHE_VARIABLE) {
        return Some(named);
    }
    let user = if cfg!(windows) {
        from("LOCALAPPDATA")
    } else {
        from("XDG_CACHE_HOME").or_else(|| from("HOME").map(|home| home.join(".cache")))
    };
    user.map(|folder| folder.join("fa").join("kernels"))
}
