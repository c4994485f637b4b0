//! The few functions of NVRTC that compiling a cubin needs, bound to one library file.
//!
//! cudarc's binding loads whichever `libnvrtc.so` the loader finds first, once per process, and panics when
//! there is none or a symbol is missing. The cache keys kernels by their compiler, so here the file is chosen
//! first.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;

use libloading::Library;

use crate::Error;

/// A loaded NVRTC library.
pub(crate) struct Nvrtc {
    path: PathBuf,
    functions: Functions,
    version: (i32, i32),
    archs: Vec<i32>,
    // The builtins stay open as long as the library that looks them up. Fields drop in order: functions
    // first.
    _library: Library,
    _builtins: Option<Library>,
}

/// The result of a compilation.
pub(crate) struct Output {
    /// Messages of the front end and of ptxas.
    pub log: String,
    /// The cubin, unless there were errors.
    pub code: Option<Vec<u8>>,
}

/// What a program is compiled to: a cubin for a real architecture, PTX for a virtual one.
#[derive(Clone, Copy)]
pub(super) enum Wanted {
    Cubin,
    Ptx,
}

type Program = *mut c_void;
type Status = c_int;

const SUCCESS: Status = 0;
const COMPILATION_FAILED: Status = 6;

struct Functions {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status,
    num_archs: unsafe extern "C" fn(*mut c_int) -> Status,
    archs: unsafe extern "C" fn(*mut c_int) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    destroy: unsafe extern "C" fn(*mut Program) -> Status,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    log: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    ptx_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    ptx: unsafe extern "C" fn(Program, *mut c_char) -> Status,
}

impl Nvrtc {
    /// Loads the library at `path` and asks for its version.
    ///
    /// # Errors
    /// [`Error::BadCompiler`] when it does not load or lacks a function.
    pub(super) fn load(path: &Path) -> Result<Nvrtc, Error> {
        let bad = |reason: String| Error::BadCompiler { path: path.to_owned(), reason };
        // Without a GPU, NVRTC 13.0 finds its builtins only if they are loaded already or on the loader's
        // path.
        let builtins = builtins_beside(path).and_then(|file| open_global(&file).ok());
        let library = open_global(path).map_err(|e| bad(e.to_string()))?;
        // SAFETY: the signatures are those of nvrtc.h, unchanged since CUDA 11.1; the pointers are used only
        // while `library` is open, which the struct guarantees.
        let functions = unsafe {
            Functions {
                version: symbol(&library, c"nvrtcVersion").map_err(&bad)?,
                num_archs: symbol(&library, c"nvrtcGetNumSupportedArchs").map_err(&bad)?,
                archs: symbol(&library, c"nvrtcGetSupportedArchs").map_err(&bad)?,
                error_string: symbol(&library, c"nvrtcGetErrorString").map_err(&bad)?,
                create: symbol(&library, c"nvrtcCreateProgram").map_err(&bad)?,
                destroy: symbol(&library, c"nvrtcDestroyProgram").map_err(&bad)?,
                compile: symbol(&library, c"nvrtcCompileProgram").map_err(&bad)?,
                log_size: symbol(&library, c"nvrtcGetProgramLogSize").map_err(&bad)?,
                log: symbol(&library, c"nvrtcGetProgramLog").map_err(&bad)?,
                cubin_size: symbol(&library, c"nvrtcGetCUBINSize").map_err(&bad)?,
                cubin: symbol(&library, c"nvrtcGetCUBIN").map_err(&bad)?,
                ptx_size: symbol(&library, c"nvrtcGetPTXSize").map_err(&bad)?,
                ptx: symbol(&library, c"nvrtcGetPTX").map_err(&bad)?,
            }
        };
        let mut nvrtc = Nvrtc {
            path: path.to_owned(),
            functions,
            version: (0, 0),
            archs: Vec::new(),
            _library: library,
            _builtins: builtins,
        };
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: the arguments point at locals, and `archs` has room for the count that the library gave.
        unsafe {
            nvrtc.call("nvrtcVersion", (nvrtc.functions.version)(&mut major, &mut minor))?;
            nvrtc.call("nvrtcGetNumSupportedArchs", (nvrtc.functions.num_archs)(&mut count))?;
            let mut archs = vec![0; usize::try_from(count).unwrap_or(0)];
            nvrtc.call("nvrtcGetSupportedArchs", (nvrtc.functions.archs)(archs.as_mut_ptr()))?;
            nvrtc.archs = archs;
        }
        nvrtc.version = (major, minor);
        Ok(nvrtc)
    }

    /// Major and minor version.
    pub(super) fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Whether it compiles for this compute capability (`10 * major + minor`).
    pub(super) fn supports(&self, capability: u32) -> bool {
        self.archs.iter().any(|&arch| u32::try_from(arch) == Ok(capability))
    }

    /// Compiles a unit with named headers. Errors in the source are not an `Err`: the output then has no
    /// cubin.
    ///
    /// # Errors
    /// [`Error::BadCompiler`] when the library itself fails.
    pub(super) fn compile(
        &self,
        unit: &str,
        headers: &[(String, String)],
        options: &[String],
        wanted: Wanted,
    ) -> Result<Output, Error> {
        let text = |text: &str| {
            CString::new(text).map_err(|_| self.bad("a source or option holds a zero byte".to_owned()))
        };
        let unit = text(unit)?;
        let names = headers.iter().map(|(name, _)| text(name)).collect::<Result<Vec<_>, _>>()?;
        let texts = headers.iter().map(|(_, body)| text(body)).collect::<Result<Vec<_>, _>>()?;
        let options = options.iter().map(|option| text(option)).collect::<Result<Vec<_>, _>>()?;
        let (names, texts, options) = (pointers(&names), pointers(&texts), pointers(&options));

        let mut program = Created { nvrtc: self, program: ptr::null_mut() };
        // SAFETY: every pointer is to a zero-terminated string or an array of the length given, all alive
        // until the program is destroyed at the end of this function.
        unsafe {
            self.call(
                "nvrtcCreateProgram",
                (self.functions.create)(
                    &mut program.program,
                    unit.as_ptr(),
                    c"fa_kernel.cu".as_ptr(),
                    texts.len() as c_int,
                    texts.as_ptr(),
                    names.as_ptr(),
                ),
            )?;
            let status = (self.functions.compile)(program.program, options.len() as c_int, options.as_ptr());
            if status != COMPILATION_FAILED {
                self.call("nvrtcCompileProgram", status)?;
            }
            let mut size = 0;
            self.call("nvrtcGetProgramLogSize", (self.functions.log_size)(program.program, &mut size))?;
            let mut log = vec![0u8; size.max(1)];
            self.call("nvrtcGetProgramLog", (self.functions.log)(program.program, log.as_mut_ptr().cast()))?;
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
            if status == COMPILATION_FAILED {
                return Ok(Output { log, code: None });
            }
            let Functions { cubin_size, cubin, ptx_size, ptx, .. } = &self.functions;
            let (names, size_of, get) = match wanted {
                Wanted::Cubin => (["nvrtcGetCUBINSize", "nvrtcGetCUBIN"], cubin_size, cubin),
                Wanted::Ptx => (["nvrtcGetPTXSize", "nvrtcGetPTX"], ptx_size, ptx),
            };
            let mut size = 0;
            self.call(names[0], size_of(program.program, &mut size))?;
            let mut code = vec![0u8; size];
            self.call(names[1], get(program.program, code.as_mut_ptr().cast()))?;
            Ok(Output { log, code: Some(code) })
        }
    }

    fn call(&self, function: &str, status: Status) -> Result<(), Error> {
        if status == SUCCESS {
            return Ok(());
        }
        // SAFETY: the library gives a static zero-terminated string for every status.
        let name = unsafe { CStr::from_ptr((self.functions.error_string)(status)) };
        Err(self.bad(format!("{function}: {}", name.to_string_lossy())))
    }

    fn bad(&self, reason: String) -> Error {
        Error::BadCompiler { path: self.path.clone(), reason }
    }
}

/// Destroys the program on every return path.
struct Created<'a> {
    nvrtc: &'a Nvrtc,
    program: Program,
}

impl Drop for Created<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: the program was created by this library and is destroyed once.
            unsafe { (self.nvrtc.functions.destroy)(&mut self.program) };
        }
    }
}

fn pointers(texts: &[CString]) -> Vec<*const c_char> {
    texts.iter().map(|text| text.as_ptr()).collect()
}

/// # Safety
/// `T` must be the function's signature.
unsafe fn symbol<T: Copy>(library: &Library, name: &CStr) -> Result<T, String> {
    // SAFETY: the caller vouches for the signature.
    unsafe { library.get::<T>(name).map(|symbol| *symbol).map_err(|e| e.to_string()) }
}

/// The builtins library in the same folder: `libnvrtc-builtins.so.13.0` for `libnvrtc.so.13`.
fn builtins_beside(path: &Path) -> Option<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(path.parent()?)
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|file| {
            file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libnvrtc-builtins.so"))
        })
        .collect();
    found.sort();
    found.pop()
}

/// Opens a library with its symbols and soname visible to the libraries that are opened after it.
fn open_global(path: &Path) -> Result<Library, libloading::Error> {
    // SAFETY: NVIDIA's libraries run no code at load that depends on this process's state.
    #[cfg(unix)]
    unsafe {
        use libloading::os::unix;
        unix::Library::open(Some(path), unix::RTLD_NOW | unix::RTLD_GLOBAL).map(Library::from)
    }
    // SAFETY: as above.
    #[cfg(not(unix))]
    unsafe {
        Library::new(path)
    }
}
