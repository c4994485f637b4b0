//! Calls from programs that XLA compiles, as jax does under jit: handlers of its C ABI for foreign functions
//! (`xla/ffi/api/c_api.h`, whose version 0 only adds at the ends of its structs). Buffers are read and
//! written in place, on the CPU and on the program's CUDA stream.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

use fa_attn::{Division, Pass};
use fa_core::{Extra, Extras};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use serde::Deserialize;

use crate::call_program::CallProgram;
use crate::calls::{On, run};
use crate::dlpack::{BFLOAT16, Place, Type, View};
use crate::error::{InputError, UnsupportedError};
use crate::given::{Beside, Given, Options};
use crate::host::{Backward, Written};

/// The extension that asks a handler for its version.
const METADATA: c_int = 1;
const INVALID_ARGUMENT: c_int = 3;
const INTERNAL: c_int = 13;
const ATTRIBUTE_STRING: c_int = 4;

#[repr(C)]
struct Extension {
    size: usize,
    kind: c_int,
    next: *mut Extension,
}

#[repr(C)]
struct Version {
    size: usize,
    extension: *mut Extension,
    major: c_int,
    minor: c_int,
}

#[repr(C)]
struct Metadata {
    size: usize,
    version: Version,
    traits: u32,
}

#[repr(C)]
struct MetadataExtension {
    base: Extension,
    metadata: *mut Metadata,
}

#[repr(C)]
struct ErrorArgs {
    size: usize,
    extension: *mut Extension,
    message: *const c_char,
    code: c_int,
}

#[repr(C)]
struct StreamArgs {
    size: usize,
    extension: *mut Extension,
    context: *mut c_void,
    stream: *mut c_void,
}

#[repr(C)]
struct OrdinalArgs {
    size: usize,
    extension: *mut Extension,
    context: *mut c_void,
    ordinal: i32,
}

/// A function that is not called.
type Unused = *const c_void;

#[repr(C)]
struct Api {
    size: usize,
    extension: *mut Extension,
    version: Version,
    internal: Unused,
    error_create: unsafe extern "C" fn(*mut ErrorArgs) -> *mut c_void,
    error_message: Unused,
    error_destroy: Unused,
    handler_register: Unused,
    stream_get: unsafe extern "C" fn(*mut StreamArgs) -> *mut c_void,
    others: [Unused; 12],
    ordinal_get: unsafe extern "C" fn(*mut OrdinalArgs) -> *mut c_void,
}

#[repr(C)]
struct Buffer {
    size: usize,
    extension: *mut Extension,
    dtype: c_int,
    data: *mut c_void,
    rank: i64,
    dims: *const i64,
}

/// Arguments or results.
#[repr(C)]
struct Buffers {
    size: usize,
    extension: *mut Extension,
    count: i64,
    types: *const c_int,
    buffers: *const *const Buffer,
}

#[repr(C)]
struct Text {
    start: *const u8,
    len: usize,
}

#[repr(C)]
struct Attributes {
    size: usize,
    extension: *mut Extension,
    count: i64,
    types: *const c_int,
    names: *const *const Text,
    values: *const *const c_void,
}

#[repr(C)]
pub(crate) struct Frame {
    size: usize,
    extension: *mut Extension,
    api: *const Api,
    context: *mut c_void,
    stage: c_int,
    arguments: Buffers,
    results: Buffers,
    attributes: Attributes,
}

/// A call's options, its one attribute as JSON.
#[derive(Deserialize)]
struct Call {
    #[serde(flatten)]
    options: Options,
    /// The names of the extra tensors, in the order of their buffers.
    extras: Vec<String>,
    max_seqlen_q: i64,
    max_seqlen_k: i64,
    /// The texts of programs, the names of their arrays, in the order of their buffers, which follow the
    /// extra tensors, and their scalars.
    texts: Vec<String>,
    arrays: Vec<String>,
    scalars: Vec<(String, f64)>,
    /// The arrays whose gradients a backward writes, in the order of its last results.
    wants: Vec<String>,
    /// A [`Division`].
    division: (Option<usize>, Option<bool>),
    /// Whether the buffers are in the memory of a GPU.
    on_gpu: bool,
}

/// The addresses of the handlers of a forward and a backward.
#[pyfunction]
pub(crate) fn xla_handlers() -> (usize, usize) {
    let address = |handler: unsafe extern "C" fn(*mut Frame) -> *mut c_void| handler as usize;
    (address(forward), address(backward))
}

/// # Safety
/// XLA's: the frame is whole.
unsafe extern "C" fn forward(frame: *mut Frame) -> *mut c_void {
    // SAFETY: as this function's.
    unsafe { handle(frame, false) }
}

/// # Safety
/// XLA's: the frame is whole.
unsafe extern "C" fn backward(frame: *mut Frame) -> *mut c_void {
    // SAFETY: as this function's.
    unsafe { handle(frame, true) }
}

/// Handles a call, or says which version of the ABI handlers have; XLA's error, null without one.
///
/// # Safety
/// The frame is whole, of a version 0 of the ABI.
unsafe fn handle(frame: *mut Frame, is_backward: bool) -> *mut c_void {
    // SAFETY: XLA's frame, its extensions and its functions live for the call.
    unsafe {
        let frame = &mut *frame;
        let mut extension = frame.extension;
        while let Some(found) = extension.as_ref() {
            if found.kind == METADATA {
                let metadata = &mut *(*extension.cast::<MetadataExtension>()).metadata;
                let version = &(*frame.api).version;
                (metadata.version.major, metadata.version.minor) = (version.major, version.minor);
                metadata.traits = 0;
                return null_mut();
            }
            extension = found.next;
        }
        let computed = catch_unwind(AssertUnwindSafe(|| {
            Python::attach(|py| {
                compute(py, frame, is_backward).map_err(|error| {
                    let is_input = error.is_instance_of::<InputError>(py)
                        || error.is_instance_of::<UnsupportedError>(py);
                    (error.value(py).to_string(), if is_input { INVALID_ARGUMENT } else { INTERNAL })
                })
            })
        }));
        let (message, code) = match computed {
            Ok(Ok(())) => return null_mut(),
            Ok(Err(error)) => error,
            Err(_) => ("the call panicked".to_owned(), INTERNAL),
        };
        let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
        let size = size_of::<ErrorArgs>();
        let mut error = ErrorArgs { size, extension: null_mut(), message: message.as_ptr(), code };
        ((*frame.api).error_create)(&raw mut error)
    }
}

/// # Safety
/// As [`handle`].
unsafe fn compute(py: Python<'_>, frame: &Frame, is_backward: bool) -> PyResult<()> {
    // SAFETY: the frame is whole.
    let call = unsafe { call_of(&frame.attributes)? };
    // SAFETY: as above.
    let (place, stream) = if call.on_gpu { unsafe { stream_of(frame)? } } else { (Place::Cpu, None) };
    // SAFETY: as above; buffers live for the call.
    let (mut given, mut written) =
        unsafe { (views(&frame.arguments, place)?.into_iter(), views(&frame.results, place)?) };
    let mut next = || given.next().ok_or_else(|| PyRuntimeError::new_err("a call has too few arguments"));
    let dout = if is_backward { Some(next()?) } else { None };
    let (q, k, v) = (next()?, next()?, next()?);
    let results = if is_backward { Some((next()?, next()?, next()?)) } else { None };
    let named = call.extras.iter().map(|name| Ok((name, next()?))).collect::<PyResult<Vec<_>>>()?;
    let own = call.arrays.into_iter().map(|name| Ok((name, next()?))).collect::<PyResult<Vec<_>>>()?;
    let named = RefCell::new(named);
    let take = |extra: Extra, need: Type| {
        let mut named = named.borrow_mut();
        let Some(at) = named.iter().position(|(name, _)| *name == extra.name()) else { return Ok(None) };
        let (_, view) = named.swap_remove(at);
        if view.dtype == need {
            return Ok(Some(view));
        }
        let need = if need == Type::F32 { "float32" } else { "int32" };
        let message = format!("{} holds {}: it must be {need}", extra.name(), view.type_name());
        Err(InputError::new_err(message))
    };
    let mut extras = Extras::try_of(|extra| take(extra, Type::I32), |extra| take(extra, Type::F32))?;
    let (out, lse, dlse) = match results {
        Some((out, lse, dlse)) => (Some(out), Some(lse), Some(dlse)),
        None => (None, None, None),
    };
    extras.dlse = dlse;
    let mut given =
        Given::of_views([q, k, v], Beside::bounded(extras, call.max_seqlen_q, call.max_seqlen_k)?)?;
    let mut program = CallProgram::of_views(&call.texts, own, &call.scalars)?;
    let gradients = written.split_off(written.len() - call.wants.len().min(written.len()));
    if let Some(program) = &mut program {
        program.want_views(call.wants.into_iter().zip(gradients))?;
    }
    given.take_program(program)?;
    let problem = given.problem(&call.options)?;
    let (splits, pack_gqa) = call.division;
    let (division, pinned) = (Division { splits, pack_gqa }, call.options.deterministic);
    let on = On { stream, allocate: None, plans: None, division, pinned };
    match (written.as_slice(), dout.zip(out).zip(lse)) {
        ([out, lse], None) => {
            run(py, &given, (&problem, Pass::Forward), &Written::Forward { out, lse: Some(lse) }, None, on)
        }
        ([dq, dk, dv, dsinks @ ..], Some(((dout, out), lse))) => {
            let (dout, out, lse) = (&dout, &out, &lse);
            let to = Written::Backward(Backward { dout, out, lse, dq, dk, dv, dsinks: dsinks.first() });
            let pass = Pass::Backward { deterministic: call.options.deterministic };
            run(py, &given, (&problem, pass), &to, None, on)
        }
        _ => Err(PyRuntimeError::new_err(format!("a call has {} results", written.len()))),
    }
}

/// The options in the attribute `call`.
///
/// # Safety
/// As [`handle`].
unsafe fn call_of(attributes: &Attributes) -> PyResult<Call> {
    let count = usize::try_from(attributes.count).unwrap_or(0);
    for at in 0..count {
        // SAFETY: the arrays have `count` entries; strings are spans of bytes.
        let (kind, name, value) = unsafe {
            let name = &**attributes.names.add(at);
            let name = std::slice::from_raw_parts(name.start, name.len);
            (*attributes.types.add(at), name, *attributes.values.add(at))
        };
        if name == b"call" && kind == ATTRIBUTE_STRING {
            // SAFETY: an attribute of this kind is a span.
            let text = unsafe {
                let text = &*value.cast::<Text>();
                std::slice::from_raw_parts(text.start, text.len)
            };
            return serde_json::from_slice(text)
                .map_err(|error| PyRuntimeError::new_err(format!("the attribute `call`: {error}")));
        }
    }
    Err(PyRuntimeError::new_err("a call without the attribute `call`"))
}

/// The GPU and the stream that the program runs on.
///
/// # Safety
/// As [`handle`].
unsafe fn stream_of(frame: &Frame) -> PyResult<(Place, Option<u64>)> {
    let refused = || PyRuntimeError::new_err("XLA gives no stream");
    // SAFETY: XLA's functions, of the frame's context.
    unsafe {
        let api = &*frame.api;
        let (extension, context) = (null_mut(), frame.context);
        let size = size_of::<StreamArgs>();
        let mut stream = StreamArgs { size, extension, context, stream: null_mut() };
        if !(api.stream_get)(&raw mut stream).is_null() {
            return Err(refused());
        }
        if api.size < size_of::<Api>() {
            return Err(PyRuntimeError::new_err(
                "this jaxlib does not say which GPU a call is on: update it",
            ));
        }
        let mut ordinal = OrdinalArgs { size: size_of::<OrdinalArgs>(), extension, context, ordinal: 0 };
        if !(api.ordinal_get)(&raw mut ordinal).is_null() {
            return Err(refused());
        }
        Ok((Place::Cuda(ordinal.ordinal), Some(stream.stream as u64)))
    }
}

/// # Safety
/// As [`handle`]; the views must not outlive the call.
unsafe fn views<'a>(buffers: &Buffers, place: Place) -> PyResult<Vec<View<'a>>> {
    let count = usize::try_from(buffers.count).unwrap_or(0);
    let view = |at: usize| {
        // SAFETY: there are `count` buffers, dense and in row-major order, each with a dimension for each
        // axis.
        unsafe {
            let buffer = &**buffers.buffers.add(at);
            let dims = match usize::try_from(buffer.rank).unwrap_or(0) {
                0 => &[],
                rank => std::slice::from_raw_parts(buffer.dims, rank),
            };
            View::dense("an array", buffer.data.cast(), place, type_of(buffer.dtype), dims)
        }
    };
    (0..count).map(view).collect()
}

/// XLA's types as DLPack has them: code and bits.
fn type_of(dtype: c_int) -> (u8, u8) {
    match dtype {
        1 => (6, 8),
        2 => (0, 8),
        4 => (0, 32),
        6 => (1, 8),
        8 => (1, 32),
        10 => (2, 16),
        11 => (2, 32),
        16 => BFLOAT16,
        _ => (3, 8),
    }
}
