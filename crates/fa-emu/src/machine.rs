//! The machine's library: its C interface, a session of launches, and device memory.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr::null_mut;

use libloading::Library;

use crate::compiler::{Compiler, hash};
use crate::error::Error;
use crate::options::{Options, Progress};

/// Sources of the machine and the host's side of the kernels' headers.
static SOURCES: &[(&str, &str)] = &sources::ALL;

mod sources {
    macro_rules! files {
        ($($name:literal),+ $(,)?) => {
            [$(($name, include_str!(concat!("../", $name)))),+]
        };
    }

    pub(super) static ALL: [(&str, &str); 53] = files![
        "host/cuda.h",
        "host/ptx/address.cuh",
        "host/ptx/atomic.cuh",
        "host/ptx/bulk.cuh",
        "host/ptx/cluster.cuh",
        "host/ptx/compiler.cuh",
        "host/ptx/cp_async.cuh",
        "host/ptx/e4m3.cuh",
        "host/ptx/grid.cuh",
        "host/ptx/ldmatrix.cuh",
        "host/ptx/math.cuh",
        "host/ptx/mbarrier.cuh",
        "host/ptx/mma_sync.cuh",
        "host/ptx/multiply.cuh",
        "host/ptx/packed.cuh",
        "host/ptx/registers.cuh",
        "host/ptx/redux.cuh",
        "host/ptx/segment.cuh",
        "host/ptx/special.cuh",
        "host/ptx/stmatrix.cuh",
        "host/ptx/sync.cuh",
        "host/ptx/tcgen05.cuh",
        "host/ptx/thread.cuh",
        "host/ptx/tma.cuh",
        "host/ptx/warp.cuh",
        "host/ptx/wgmma.cuh",
        "machine/all.cpp",
        "machine/barrier.cpp",
        "machine/clock.h",
        "machine/cp_async.cpp",
        "machine/entry.cpp",
        "machine/fiber.cpp",
        "machine/fiber.h",
        "machine/global.cpp",
        "machine/global.h",
        "machine/hooks.cpp",
        "machine/interface.h",
        "machine/machine.h",
        "machine/matrix.cpp",
        "machine/mbarrier.cpp",
        "machine/memory.cpp",
        "machine/operand.h",
        "machine/report.cpp",
        "machine/report.h",
        "machine/scheduler.cpp",
        "machine/shadow.cpp",
        "machine/shadow.h",
        "machine/shared.cpp",
        "machine/tensor_memory.cpp",
        "machine/tma.cpp",
        "machine/trace.h",
        "machine/warp.cpp",
        "machine/wgmma.cpp",
    ];
}

/// The sources in a folder of this crate, by their names within it.
pub(crate) fn sources_of(folder: &str) -> impl Iterator<Item = (&'static str, &'static str)> {
    SOURCES.iter().filter_map(move |(name, text)| Some((name.strip_prefix(folder)?, *text)))
}

/// A hash of the machine and the twins, which identifies the emulation that a proof was made by.
pub fn version() -> String {
    let parts: Vec<&str> = SOURCES.iter().flat_map(|(name, text)| [*name, *text]).collect();
    hash(&parts)[..16].to_owned()
}

#[repr(C)]
struct RawOptions {
    seed: u64,
    pace: u32,
    order: u32,
    poison: u32,
    hazards: u32,
    trace_cta: c_int,
    ordered_additions: u32,
    products_in_order: u32,
    step_limit: u64,
    progress: Option<unsafe extern "C" fn(*mut c_void, u32, u32)>,
    context: *mut c_void,
}

#[repr(C)]
struct RawLaunch {
    name: *const c_char,
    entry: *const c_void,
    arguments: *const *const c_void,
    grid: u32,
    threads: u32,
    cluster: u32,
    resident: u32,
    smem_bytes: u32,
    cp_async: u32,
    blocks_per_sm: u32,
}

/// The loaded machine.
#[derive(Debug)]
pub(crate) struct Machine {
    library: Library,
}

macro_rules! function {
    ($name:ident: fn($($argument:ty),*) $(-> $result:ty)?) => {
        /// # Safety
        /// As the C++ function of the same name asks.
        unsafe fn $name(&self) -> unsafe extern "C" fn($($argument),*) $(-> $result)? {
            // SAFETY: the machine's own function, whose type is this one.
            unsafe {
                *self
                    .library
                    .get::<unsafe extern "C" fn($($argument),*) $(-> $result)?>(stringify!($name).as_bytes())
                    .expect("the machine exports it")
            }
        }
    };
}

impl Machine {
    /// Loads the machine, after compiling it if necessary.
    pub(crate) fn load(compiler: &Compiler) -> Result<Machine, Error> {
        let files: Vec<(String, String)> =
            sources_of("machine/").map(|(name, text)| (name.to_owned(), text.to_owned())).collect();
        let flags = ["-O3".to_owned()];
        let path = compiler.library("machine", "the machine", &files, "all.cpp", &flags)?;
        Ok(Machine { library: open(&path, true)? })
    }

    function!(emu_open: fn(*const RawOptions) -> *mut c_void);
    function!(emu_close: fn(*mut c_void));
    function!(emu_region: fn(*mut c_void, *const c_char, u64, u64, u64, u64, c_int, c_int));
    function!(emu_forbid: fn(*mut c_void, u64, u64));
    function!(emu_launch: fn(*mut c_void, *const RawLaunch) -> c_int);
    function!(emu_result: fn(*mut c_void) -> *const c_char);
    function!(emu_map: fn(u64) -> *mut u8);
    function!(emu_unmap: fn(*mut u8, u64));

    /// A session on this machine. `ordered_additions`: whether the order of f32 additions is checked, as
    /// deterministic kernels promise one.
    pub(crate) fn session<'a>(&'a self, options: &Options<'a>, ordered_additions: bool) -> Session<'a> {
        let progress = options.progress.map(Box::new);
        let context =
            progress.as_ref().map_or(null_mut(), |own| (&raw const **own).cast_mut().cast::<c_void>());
        let raw = RawOptions {
            seed: options.seed,
            pace: options.pace as u32,
            order: options.order.into(),
            poison: options.poison.into(),
            hazards: options.hazards.into(),
            trace_cta: options.trace_cta.map_or(-1, |cta| cta as c_int),
            ordered_additions: ordered_additions.into(),
            products_in_order: options.products_in_order.into(),
            step_limit: options.step_limit,
            progress: progress.as_ref().map(|_| call_progress as _),
            context,
        };
        // SAFETY: the options are copied; the context lives as long as the session.
        let handle = unsafe { self.emu_open()(&raw) };
        Session { machine: self, handle, _progress: progress }
    }
}

/// # Safety
/// `context` is the box of a session.
unsafe extern "C" fn call_progress(context: *mut c_void, done: u32, all: u32) {
    // SAFETY: the caller's promise.
    let progress = unsafe { *context.cast::<Progress<'_>>() };
    progress(done, all);
}

/// One launch.
pub(crate) struct Launch<'a> {
    pub name: &'a str,
    /// The unit's function that calls the entry with `arguments`.
    pub entry: *const c_void,
    pub arguments: &'a [*const c_void],
    pub grid: u32,
    pub threads: u32,
    pub cluster: u32,
    pub resident: u32,
    pub smem_bytes: u32,
    pub cp_async: bool,
    /// CTAs that share the registers of an SM.
    pub blocks_per_sm: u32,
}

/// Launches over the same device memory.
pub(crate) struct Session<'a> {
    machine: &'a Machine,
    handle: *mut c_void,
    _progress: Option<Box<Progress<'a>>>,
}

impl Session<'_> {
    /// Registers device memory. `around`: guard bytes before and after it.
    pub(crate) fn region(&self, name: &str, begin: u64, bytes: u64, around: (u64, u64), access: Access) {
        let name = CString::new(name).expect("names of tensors have no NUL");
        let (writable, initialised) = (access != Access::Input, access != Access::Unwritten);
        // SAFETY: the name is copied; the memory is not accessed.
        unsafe {
            let region = self.machine.emu_region();
            region(
                self.handle,
                name.as_ptr(),
                begin,
                bytes,
                around.0,
                around.1,
                writable.into(),
                initialised.into(),
            );
        }
    }

    /// Forbids access to bytes of registered memory: rows that belong to no sequence.
    pub(crate) fn forbid(&self, begin: u64, bytes: u64) {
        // SAFETY: the memory is not accessed.
        unsafe { self.machine.emu_forbid()(self.handle, begin, bytes) }
    }

    /// Runs a launch; false when it had to be given up.
    ///
    /// # Safety
    /// The entry and its arguments fit each other, and what they point at has been named to the session and
    /// is alive.
    pub(crate) unsafe fn launch(&self, launch: &Launch) -> bool {
        let name = CString::new(launch.name).expect("entries have no NUL");
        let raw = RawLaunch {
            name: name.as_ptr(),
            entry: launch.entry,
            arguments: launch.arguments.as_ptr(),
            grid: launch.grid,
            threads: launch.threads,
            cluster: launch.cluster,
            resident: launch.resident,
            smem_bytes: launch.smem_bytes,
            cp_async: launch.cp_async.into(),
            blocks_per_sm: launch.blocks_per_sm,
        };
        // SAFETY: the caller's promise.
        unsafe { self.machine.emu_launch()(self.handle, &raw) != 0 }
    }

    /// All findings, as the machine's JSON.
    pub(crate) fn result(&self) -> String {
        // SAFETY: the text is valid until the next call, and copied.
        unsafe {
            let text = self.machine.emu_result()(self.handle);
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle is the session's own.
        unsafe { self.machine.emu_close()(self.handle) }
    }
}

/// The access of kernels to device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Read only.
    Input,
    /// Written; initialised.
    Written,
    /// Written; uninitialised.
    Unwritten,
}

/// Memory between two guard pages, its end at the second one.
pub(crate) struct Memory<'a> {
    machine: &'a Machine,
    begin: *mut u8,
    bytes: usize,
}

/// Bytes of a page: the guards around [`Memory`].
pub(crate) const PAGE: u64 = 4096;

impl<'a> Memory<'a> {
    /// `bytes` bytes of all ones: NaN of every type.
    pub(crate) fn new(machine: &'a Machine, tensor: &str, bytes: usize) -> Result<Memory<'a>, Error> {
        // SAFETY: maps new pages.
        let begin = unsafe { machine.emu_map()(bytes as u64) };
        if begin.is_null() {
            return Err(Error::Memory { tensor: tensor.to_owned(), bytes });
        }
        let mut memory = Memory { machine, begin, bytes };
        memory.bytes_mut().fill(0xff);
        Ok(memory)
    }

    pub(crate) fn address(&self) -> u64 {
        self.begin as u64
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: mapped, written in full, and borrowed as the memory is.
        unsafe { std::slice::from_raw_parts(self.begin, self.bytes) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.begin, self.bytes) }
    }
}

impl Drop for Memory<'_> {
    fn drop(&mut self) {
        // SAFETY: mapped by new() with these bytes.
        unsafe { self.machine.emu_unmap()(self.begin, self.bytes as u64) }
    }
}

/// Loads a library; `global`: for the libraries after it to find its symbols.
#[cfg(unix)]
pub(crate) fn open(path: &Path, global: bool) -> Result<Library, Error> {
    use libloading::os::unix::{Library as Unix, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};
    let scope = if global { RTLD_GLOBAL } else { RTLD_LOCAL };
    // SAFETY: our own machine and units; they run nothing when they are loaded.
    let library = unsafe { Unix::open(Some(path), RTLD_NOW | scope) };
    library.map(Library::from).map_err(|source| Error::Load { path: path.to_owned(), source })
}

#[cfg(not(unix))]
pub(crate) fn open(path: &Path, _global: bool) -> Result<Library, Error> {
    // SAFETY: as above.
    unsafe { Library::new(path) }.map_err(|source| Error::Load { path: path.to_owned(), source })
}
