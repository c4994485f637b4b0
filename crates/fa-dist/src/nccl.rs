//! NCCL: the functions used, bound at run time to the library that is found, and communicators that never
//! block.
#![allow(unsafe_code)]

use std::env;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;
use std::ptr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use libloading::Library;

use crate::error::{Error, Lost};

/// The environment variable that names NCCL's library, or its folder.
pub const NCCL_VARIABLE: &str = "FA_NCCL";

type Status = c_int;
type CommHandle = *mut c_void;
type Stream = *mut c_void;

const SUCCESS: Status = 0;
const IN_PROGRESS: Status = 7;
/// `ncclInt8`: everything travels as bytes.
const BYTES: c_int = 0;

/// What rank 0 makes and all ranks need: `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId([u8; 128]);

impl UniqueId {
    /// As text.
    pub fn to_hex(self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// From its text.
    pub fn from_hex(text: &str) -> Option<UniqueId> {
        if text.len() != 256 || !text.is_ascii() {
            return None;
        }
        let mut id = UniqueId([0; 128]);
        for (index, byte) in id.0.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * index..2 * index + 2], 16).ok()?;
        }
        Some(id)
    }
}

/// `ncclConfig_t` as of NCCL 2.18; newer libraries take the rest from its size and version.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;
/// 2.18.1: the oldest library that takes the config.
const CONFIG_VERSION: c_uint = 21801;

struct Functions {
    version: unsafe extern "C" fn(*mut c_int) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> Status,
    init: unsafe extern "C" fn(*mut CommHandle, c_int, UniqueId, c_int, *mut Config) -> Status,
    async_error: unsafe extern "C" fn(CommHandle, *mut Status) -> Status,
    abort: unsafe extern "C" fn(CommHandle) -> Status,
    finalize: unsafe extern "C" fn(CommHandle) -> Status,
    destroy: unsafe extern "C" fn(CommHandle) -> Status,
    group_start: unsafe extern "C" fn() -> Status,
    group_end: unsafe extern "C" fn() -> Status,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, CommHandle, Stream) -> Status,
    recv: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, CommHandle, Stream) -> Status,
}

/// NCCL's library, loaded.
pub struct Nccl {
    path: PathBuf,
    functions: Functions,
    _library: Library,
}

impl Nccl {
    /// The library of `FA_NCCL`, or else of the loader's path, the active Python environment and the system.
    ///
    /// # Errors
    /// [`Error::NoNccl`] with what was tried.
    pub fn load() -> Result<Arc<Nccl>, Error> {
        static LOADED: OnceLock<Result<Arc<Nccl>, String>> = OnceLock::new();
        let loaded = LOADED.get_or_init(|| {
            let mut tried = Vec::new();
            for path in candidates() {
                match Nccl::open(path.clone()) {
                    Ok(nccl) => return Ok(Arc::new(nccl)),
                    Err(reason) => tried.push(format!("{}: {reason}", path.display())),
                }
            }
            let where_to = "looked in FA_NCCL, LD_LIBRARY_PATH, VIRTUAL_ENV and Python's site-packages";
            Err(if tried.is_empty() { where_to.to_owned() } else { tried.join("; ") })
        });
        loaded.clone().map_err(|tried| Error::NoNccl { tried })
    }

    fn open(path: PathBuf) -> Result<Nccl, String> {
        // SAFETY: NVIDIA's library runs no code at load that depends on this process's state.
        let library = unsafe { Library::new(&path) }.map_err(|error| error.to_string())?;
        // SAFETY: the signatures are those of nccl.h, unchanged since 2.18; they are called only while
        // `library` is open, which the struct guarantees.
        let functions = unsafe {
            Functions {
                version: symbol(&library, c"ncclGetVersion")?,
                error_string: symbol(&library, c"ncclGetErrorString")?,
                unique_id: symbol(&library, c"ncclGetUniqueId")?,
                init: symbol(&library, c"ncclCommInitRankConfig")?,
                async_error: symbol(&library, c"ncclCommGetAsyncError")?,
                abort: symbol(&library, c"ncclCommAbort")?,
                finalize: symbol(&library, c"ncclCommFinalize")?,
                destroy: symbol(&library, c"ncclCommDestroy")?,
                group_start: symbol(&library, c"ncclGroupStart")?,
                group_end: symbol(&library, c"ncclGroupEnd")?,
                send: symbol(&library, c"ncclSend")?,
                recv: symbol(&library, c"ncclRecv")?,
            }
        };
        let nccl = Nccl { path, functions, _library: library };
        match nccl.version() {
            Ok(version) if version >= CONFIG_VERSION as i32 => Ok(nccl),
            Ok(version) => Err(format!("version {version} is older than 2.18.1")),
            Err(error) => Err(error.to_string()),
        }
    }

    /// The file.
    pub fn path(&self) -> &std::path::Path {
        &self.path
    }

    /// `10000 * major + 100 * minor + patch`.
    ///
    /// # Errors
    /// [`Error::Nccl`].
    pub fn version(&self) -> Result<i32, Error> {
        let mut version = 0;
        // SAFETY: the argument points at a local.
        self.check("asking its version", unsafe { (self.functions.version)(&mut version) })?;
        Ok(version)
    }

    /// A new id, for rank 0.
    ///
    /// # Errors
    /// [`Error::Nccl`].
    pub fn unique_id(&self) -> Result<UniqueId, Error> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the argument points at a local.
        self.check("making an id", unsafe { (self.functions.unique_id)(&mut id) })?;
        Ok(id)
    }

    fn check(&self, doing: &'static str, status: Status) -> Result<(), Error> {
        match status {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => {
                // SAFETY: the library gives a static zero-terminated string for every status.
                let text = unsafe { CStr::from_ptr((self.functions.error_string)(code)) };
                Err(Error::Nccl { code, text: text.to_string_lossy().into_owned(), doing })
            }
        }
    }
}

/// # Safety
/// `T` must be the function's signature.
unsafe fn symbol<T: Copy>(library: &Library, name: &CStr) -> Result<T, String> {
    // SAFETY: the caller vouches for the signature.
    unsafe { library.get::<T>(name).map(|symbol| *symbol).map_err(|error| error.to_string()) }
}

/// Files that may be NCCL, the most wanted first. The last are names for the loader to find.
fn candidates() -> Vec<PathBuf> {
    const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
    let named = env::var_os(NCCL_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
    if let Some(named) = named {
        return if named.is_dir() {
            NAMES.iter().map(|name| named.join(name)).collect()
        } else {
            vec![named]
        };
    }
    let paths = |variable: &str| -> Vec<PathBuf> {
        env::var_os(variable).map_or(Vec::new(), |list| env::split_paths(&list).collect())
    };
    let mut folders = paths("LD_LIBRARY_PATH");
    let mut prefixes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().flat_map(|name| paths(name)).collect();
    let pythons = paths("PATH").into_iter().filter_map(|folder| folder.join("python3").canonicalize().ok());
    prefixes.extend(pythons.filter_map(|python| Some(python.parent()?.parent()?.to_owned())));
    prefixes.extend(env::var_os("HOME").map(|home| PathBuf::from(home).join(".local")));
    prefixes.extend(["/usr".into(), "/usr/local".into()]);
    let inside = |folder: PathBuf| -> Vec<PathBuf> {
        std::fs::read_dir(folder)
            .map_or(Vec::new(), |all| all.filter_map(|entry| Some(entry.ok()?.path())).collect())
    };
    for prefix in prefixes {
        let pythons = inside(prefix.join("lib")).into_iter().filter(|folder| {
            folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3"))
        });
        for python in pythons {
            for site in ["site-packages", "dist-packages"] {
                folders.push(python.join(site).join("nvidia/nccl/lib"));
            }
        }
    }
    folders
        .extend(["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"].map(PathBuf::from));
    let files = folders.iter().flat_map(|folder| NAMES.map(|name| folder.join(name)));
    files.filter(|file| file.is_file()).chain(NAMES.map(PathBuf::from)).collect()
}

/// A message of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DevicePiece {
    pub peer: usize,
    pub address: u64,
    pub bytes: usize,
}

impl DevicePiece {
    /// Whether another one for the same rank begins where this one ends.
    pub(crate) fn meets(&self, other: &DevicePiece) -> bool {
        self.peer == other.peer && self.address + self.bytes as u64 == other.address
    }
}

/// A communicator that never blocks: what takes time is polled, until a deadline.
pub(crate) struct Communicator {
    nccl: Arc<Nccl>,
    /// Null once aborted.
    handle: CommHandle,
    deadline: Duration,
}

// SAFETY: NCCL's communicators may be used by any thread, by one at a time, which `&mut` guarantees.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Joins `world` ranks; the GPU is that of the context that is current.
    ///
    /// `ctas` bounds the SMs that transfers take.
    pub(crate) fn join(
        nccl: &Arc<Nccl>,
        id: UniqueId,
        (rank, world): (usize, usize),
        ctas: Option<u32>,
        deadline: Duration,
        lost: &dyn Fn() -> Option<Lost>,
    ) -> Result<Communicator, Error> {
        let ctas = ctas.map_or(UNDEFINED, |ctas| ctas as c_int);
        let mut config = Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: CONFIG_VERSION,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: ctas,
            net_name: ptr::null(),
            split_share: UNDEFINED,
        };
        let mut communicator = Communicator { nccl: nccl.clone(), handle: ptr::null_mut(), deadline };
        let (rank, world) = (rank as c_int, world as c_int);
        // SAFETY: the pointers are to locals; the config has the size that it says.
        let status = unsafe { (nccl.functions.init)(&mut communicator.handle, world, id, rank, &mut config) };
        nccl.check("joining", status)?;
        communicator.settle("joining", lost)?;
        Ok(communicator)
    }

    /// Waits until the last call is done on the host.
    fn settle(&mut self, doing: &'static str, lost: &dyn Fn() -> Option<Lost>) -> Result<(), Error> {
        let begun = Instant::now();
        loop {
            if self.is_settled(doing)? {
                return Ok(());
            }
            self.still(doing, begun, lost)?;
            std::thread::yield_now();
        }
    }

    /// Whether the last call is done on the host.
    pub(crate) fn is_settled(&mut self, doing: &'static str) -> Result<bool, Error> {
        if self.handle.is_null() {
            let doing = format!("{doing}, after an abort");
            return Err(Error::PeerLost { rank: usize::MAX, doing, why: None });
        }
        let mut status = SUCCESS;
        // SAFETY: the communicator is alive, the argument points at a local.
        let asked = unsafe { (self.nccl.functions.async_error)(self.handle, &mut status) };
        let checked = self.nccl.check(doing, asked).and_then(|()| self.nccl.check(doing, status));
        if let Err(error) = checked {
            self.abort();
            return Err(error);
        }
        Ok(status != IN_PROGRESS)
    }

    /// Aborts, with the reason, if a rank is lost or the deadline is over.
    pub(crate) fn still(
        &mut self,
        doing: &'static str,
        begun: Instant,
        lost: &dyn Fn() -> Option<Lost>,
    ) -> Result<(), Error> {
        if let Some(lost) = lost() {
            self.abort();
            return Err(lost.while_doing(doing));
        }
        if begun.elapsed() > self.deadline {
            self.abort();
            return Err(Error::Deadline { after: self.deadline, doing: doing.to_owned() });
        }
        Ok(())
    }

    /// Enqueues sends and receives as one group.
    ///
    /// # Safety
    /// The pieces lie in device memory of this communicator's GPU, and stay there, untouched by others, until
    /// `stream` has run them.
    pub(crate) unsafe fn exchange(
        &mut self,
        sends: &[DevicePiece],
        recvs: &[DevicePiece],
        stream: Stream,
        lost: &dyn Fn() -> Option<Lost>,
    ) -> Result<(), Error> {
        const DOING: &str = "exchanging";
        // Whatever happened before shows here, and not as a hang.
        self.is_settled(DOING)?;
        let functions = &self.nccl.functions;
        // SAFETY: the communicator is alive; the caller vouches for memory and stream. A group that was
        // started is ended whatever happens in it.
        let (started, inside, ended) = unsafe {
            let started = (functions.group_start)();
            let send = |piece: &DevicePiece| {
                let from = piece.address as *const c_void;
                (functions.send)(from, piece.bytes, BYTES, piece.peer as c_int, self.handle, stream)
            };
            let recv = |piece: &DevicePiece| {
                let to = piece.address as *mut c_void;
                (functions.recv)(to, piece.bytes, BYTES, piece.peer as c_int, self.handle, stream)
            };
            let calls = sends.iter().map(send).chain(recvs.iter().map(recv));
            // Every call is made: the group ends with as many as the other side's.
            let keep = |known, status| if [SUCCESS, IN_PROGRESS].contains(&status) { known } else { status };
            let inside = calls.fold(SUCCESS, keep);
            (started, inside, (functions.group_end)())
        };
        let nccl = self.nccl.clone();
        let checked = [started, inside, ended].into_iter().try_for_each(|status| nccl.check(DOING, status));
        if let Err(error) = checked {
            self.abort();
            return Err(error);
        }
        self.settle(DOING, lost)
    }

    /// Gives up: what is enqueued ends, and so do the other ranks' waits for this one.
    pub(crate) fn abort(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: the communicator is alive and not used again.
            unsafe { (self.nccl.functions.abort)(self.handle) };
            self.handle = ptr::null_mut();
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.handle.is_null() {
            return;
        }
        // SAFETY: the communicator is alive and not used again once it is destroyed.
        unsafe {
            (self.nccl.functions.finalize)(self.handle);
            if self.settle("ending", &|| None).is_ok() && !self.handle.is_null() {
                (self.nccl.functions.destroy)(self.handle);
                self.handle = ptr::null_mut();
            }
        }
        self.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_survive_their_text() {
        let mut id = UniqueId([0; 128]);
        id.0.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i as u8).wrapping_mul(7));
        let text = id.to_hex();
        assert!(text.starts_with("00070e15") && text.len() == 256);
        assert_eq!(UniqueId::from_hex(&text).unwrap().0, id.0);
        assert!(UniqueId::from_hex("00").is_none() && UniqueId::from_hex(&"x".repeat(256)).is_none());
    }

    #[test]
    fn the_config_is_that_of_the_header() {
        assert_eq!(size_of::<Config>(), 48);
        assert_eq!(std::mem::offset_of!(Config, net_name), 32);
    }

    #[test]
    fn without_a_library_the_error_says_what_to_do() {
        let text = Error::NoNccl { tried: "x".to_owned() }.to_string();
        assert!(text.contains("pip install nvidia-nccl-cu13") && text.contains("FA_NCCL"), "{text}");
    }

    /// Where NCCL is installed: the functions are there, and rank 0 makes an id without a GPU.
    #[test]
    fn the_library_that_is_found_has_all_functions() {
        match Nccl::load() {
            Ok(nccl) => {
                assert!(nccl.version().unwrap() >= CONFIG_VERSION as i32, "{}", nccl.path().display());
                let id = nccl.unique_id().unwrap().to_hex();
                assert!(id.bytes().any(|digit| digit != b'0'), "{id}");
            }
            Err(error) => assert!(matches!(error, Error::NoNccl { .. }), "{error}"),
        }
    }
}
