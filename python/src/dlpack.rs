//! Arrays of other libraries as they lie, by DLPack: the C exchange API of a type that has it (torch), else a
//! capsule. Nothing is copied.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::ptr::NonNull;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyDict, PyType};
use pyo3::{ffi, intern};

use crate::error::{InputError, of_another_type};

/// The most axes of an array that a call takes.
pub(crate) const MAX_AXES: usize = 5;

const CPU: i32 = 1;
const CUDA: i32 = 2;
const CUDA_HOST: i32 = 3;
const CUDA_MANAGED: i32 = 13;

#[repr(C)]
#[derive(Clone, Copy)]
struct DlDevice {
    kind: i32,
    id: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DlDtype {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    ndim: i32,
    dtype: DlDtype,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct DlManaged {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManaged)>,
}

#[repr(C)]
struct DlVersion {
    major: u32,
    minor: u32,
}

#[repr(C)]
struct DlManagedVersioned {
    version: DlVersion,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManagedVersioned)>,
    flags: u64,
    tensor: DlTensor,
}

#[repr(C)]
struct ExchangeHeader {
    version: DlVersion,
    older: *const ExchangeHeader,
}

/// `DLPackExchangeAPI` of version 1.
#[repr(C)]
struct Exchange {
    header: ExchangeHeader,
    allocate: *const c_void,
    managed_from_object: *const c_void,
    managed_to_object: *const c_void,
    tensor_from_object: Option<unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int>,
    current_stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int>,
}

const READ_ONLY: u64 = 1;
const CAPSULE: &std::ffi::CStr = c"dltensor";
const CAPSULE_VERSIONED: &std::ffi::CStr = c"dltensor_versioned";
const USED: &std::ffi::CStr = c"used_dltensor";
const USED_VERSIONED: &std::ffi::CStr = c"used_dltensor_versioned";
const EXCHANGE: &std::ffi::CStr = c"dlpack_exchange_api";
/// The types of 8 bits, from code 7 on, as torch and ml_dtypes name them.
const FLOAT8: [&str; 8] = [
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
];

/// Code and bits of bfloat16.
const BFLOAT16: (u8, u8) = (4, 16);

/// Where an array lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Place {
    /// Memory of the host.
    Cpu,
    /// A GPU, in the driver's order.
    Cuda(i32),
}

/// What an array holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Type {
    F32,
    F16,
    Bf16,
    I32,
    /// Something that no call reads.
    Other,
}

/// An array as it lies, borrowed from a Python object for a call.
pub(crate) struct View<'py> {
    /// The first element; null where there is none.
    pub data: *mut u8,
    pub place: Place,
    pub dtype: Type,
    /// The type as the object has it, for messages.
    code: (u8, u8),
    ndim: usize,
    shape: [usize; MAX_AXES],
    /// In elements.
    strides: [i64; MAX_AXES],
    pub read_only: bool,
    owner: Owner,
    object: PhantomData<Bound<'py, PyAny>>,
}

/// Who gives the memory back.
enum Owner {
    /// The Python object, which outlives the call.
    Object,
    Capsule(NonNull<DlManaged>),
    Versioned(NonNull<DlManagedVersioned>),
}

impl Drop for View<'_> {
    fn drop(&mut self) {
        // SAFETY: the capsule was renamed when it was taken, so the deleter is ours to call, once.
        unsafe {
            match self.owner {
                Owner::Object => {}
                Owner::Capsule(managed) => {
                    if let Some(deleter) = managed.as_ref().deleter {
                        deleter(managed.as_ptr());
                    }
                }
                Owner::Versioned(managed) => {
                    if let Some(deleter) = managed.as_ref().deleter {
                        deleter(managed.as_ptr());
                    }
                }
            }
        }
    }
}

impl<'py> View<'py> {
    /// `object` as an array; `name` is for messages, `stream` the CUDA stream on which a library that orders
    /// by streams makes it ready.
    ///
    /// # Errors
    /// What the object's library refuses, more than five axes, and devices other than the CPU and CUDA.
    pub(crate) fn of(name: &str, object: &Bound<'py, PyAny>, stream: Option<u64>) -> PyResult<View<'py>> {
        if let Some(exchange) = exchange_of(object)? {
            return View::exchanged(name, object, exchange);
        }
        match capsule_of(name, object, stream) {
            Ok(capsule) => View::taken(name, capsule),
            Err(error) => {
                let words = words_of_bfloat16(object).ok_or(error)?;
                let mut view = View::taken(name, capsule_of(name, &words, stream)?)?;
                (view.dtype, view.code) = (Type::Bf16, BFLOAT16);
                Ok(view)
            }
        }
    }

    fn exchanged(name: &str, object: &Bound<'py, PyAny>, exchange: &Exchange) -> PyResult<View<'py>> {
        let Some(of) = exchange.tensor_from_object else {
            return Err(InputError::new_err(format!("{name}: its library exchanges no plain tensors")));
        };
        let mut tensor = std::mem::MaybeUninit::<DlTensor>::uninit();
        // SAFETY: the table is of the object's type; the tensor is filled where 0 is returned.
        let status = unsafe { of(object.as_ptr().cast(), tensor.as_mut_ptr()) };
        if status != 0 {
            return Err(PyErr::take(object.py()).map_or_else(
                || InputError::new_err(format!("{name}: its library gives no tensor for it")),
                |error| unlent(name, object, error),
            ));
        }
        // SAFETY: filled, and its shape and strides live as long as the object.
        unsafe { View::read(name, &tensor.assume_init(), Owner::Object, false) }
    }

    fn taken(name: &str, capsule: Bound<'py, PyCapsule>) -> PyResult<View<'py>> {
        let versioned = capsule.is_valid_checked(Some(CAPSULE_VERSIONED));
        let expected = if versioned { CAPSULE_VERSIONED } else { CAPSULE };
        let pointer = capsule.pointer_checked(Some(expected))?;
        let used = if versioned { USED_VERSIONED } else { USED };
        // SAFETY: a capsule of that name holds a managed tensor, which renaming makes ours.
        unsafe {
            if ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) != 0 {
                return Err(PyErr::fetch(capsule.py()));
            }
            if versioned {
                let managed: NonNull<DlManagedVersioned> = pointer.cast();
                let DlManagedVersioned { version, flags, tensor, .. } = managed.as_ref();
                let owner = Owner::Versioned(managed);
                if version.major != 1 {
                    // Made only to be given back.
                    drop(View::read(name, &empty(), owner, true));
                    let message = format!("{name}: DLPack {}.{} is not known", version.major, version.minor);
                    return Err(InputError::new_err(message));
                }
                View::read(name, tensor, owner, flags & READ_ONLY != 0)
            } else {
                let managed: NonNull<DlManaged> = pointer.cast();
                View::read(name, &managed.as_ref().tensor, Owner::Capsule(managed), false)
            }
        }
    }

    /// # Safety
    /// `tensor` is whole, and lives as long as `owner` or the object.
    unsafe fn read(name: &str, tensor: &DlTensor, owner: Owner, read_only: bool) -> PyResult<View<'py>> {
        let DlTensor { data, device, ndim, dtype, shape, strides, byte_offset } = *tensor;
        let place = match device.kind {
            CPU | CUDA_HOST => Some(Place::Cpu),
            CUDA | CUDA_MANAGED => Some(Place::Cuda(device.id)),
            _ => None,
        };
        let mut view = View {
            data: data.cast::<u8>(),
            place: place.unwrap_or(Place::Cpu),
            dtype: type_of(dtype),
            code: (dtype.code, dtype.bits),
            ndim: usize::try_from(ndim).unwrap_or(0),
            shape: [0; MAX_AXES],
            strides: [0; MAX_AXES],
            read_only,
            owner,
            object: PhantomData,
        };
        if place.is_none() {
            let message = format!(
                "{name} lies on a device that DLPack numbers {}: it must be in the memory of the CPU or of \
                 an NVIDIA GPU",
                device.kind
            );
            return Err(InputError::new_err(message));
        }
        if view.ndim > MAX_AXES {
            let message =
                format!("{name} has {} axes: attention's arrays have at most {MAX_AXES}", view.ndim);
            return Err(InputError::new_err(message));
        }
        let mut packed = 1;
        for axis in (0..view.ndim).rev() {
            // SAFETY: DLPack's shape has ndim entries, as have strides where they are not null.
            let (len, stride) = unsafe {
                let stride = if strides.is_null() { packed } else { *strides.add(axis) };
                (*shape.add(axis), stride)
            };
            view.shape[axis] = usize::try_from(len).unwrap_or(0);
            view.strides[axis] = stride;
            packed *= len.max(1);
        }
        if !view.data.is_null() {
            // SAFETY: the offset is within the allocation by DLPack's contract.
            view.data = unsafe { view.data.add(byte_offset as usize) };
        }
        // A GPU's kernels have an alignment of their own to ask for.
        let bytes = usize::from(dtype.bits).div_ceil(8).next_power_of_two();
        if view.place == Place::Cpu && view.elements() > 0 && !(view.data as usize).is_multiple_of(bytes) {
            let message = format!(
                "{name} starts at an address that is no multiple of its elements' {bytes} bytes: copy \
                 the array"
            );
            return Err(InputError::new_err(message));
        }
        Ok(view)
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape[..self.ndim]
    }

    pub(crate) fn strides(&self) -> &[i64] {
        &self.strides[..self.ndim]
    }

    pub(crate) fn elements(&self) -> usize {
        self.shape().iter().product()
    }

    /// Bytes of an element, 1 at least.
    pub(crate) fn element_bytes(&self) -> u8 {
        self.code.1.div_ceil(8).max(1)
    }

    pub(crate) fn address(&self) -> u64 {
        self.data as u64
    }

    /// The type as the array's library names it.
    pub(crate) fn type_name(&self) -> String {
        let (code, bits) = self.code;
        let kind = match code {
            0 => "int",
            1 => "uint",
            2 => "float",
            4 => "bfloat",
            5 => "complex",
            6 => return "bool".to_owned(),
            7..=14 => return FLOAT8[usize::from(code) - 7].to_owned(),
            _ => return format!("DLPack's type {code} of {bits} bits"),
        };
        format!("{kind}{bits}")
    }

    /// Whether elements lie end to end, in order.
    pub(crate) fn is_contiguous(&self) -> bool {
        if self.elements() == 0 {
            return true;
        }
        let mut packed = 1;
        self.shape().iter().zip(self.strides()).rev().all(|(&len, &stride)| {
            let fits = len <= 1 || stride == packed;
            packed *= len.max(1) as i64;
            fits
        })
    }

    /// Elements from the first to the end of the last; `None` where a stride is negative.
    pub(crate) fn span(&self) -> Option<usize> {
        if self.elements() == 0 {
            return Some(0);
        }
        let mut last = 0usize;
        for (&len, &stride) in self.shape().iter().zip(self.strides()).filter(|(len, _)| **len > 1) {
            last = last.checked_add(usize::try_from(stride).ok()?.checked_mul(len - 1)?)?;
        }
        last.checked_add(1)
    }
}

fn empty() -> DlTensor {
    DlTensor {
        data: std::ptr::null_mut(),
        device: DlDevice { kind: CPU, id: 0 },
        ndim: 0,
        dtype: DlDtype { code: 2, bits: 32, lanes: 1 },
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    }
}

fn type_of(dtype: DlDtype) -> Type {
    match (dtype.code, dtype.bits, dtype.lanes) {
        (2, 32, 1) => Type::F32,
        (2, 16, 1) => Type::F16,
        (4, 16, 1) => Type::Bf16,
        (0, 32, 1) => Type::I32,
        _ => Type::Other,
    }
}

/// The exchange table of the object's type; the last type that was asked about is remembered.
fn exchange_of(object: &Bound<'_, PyAny>) -> PyResult<Option<&'static Exchange>> {
    static LAST: PyOnceLock<(Py<PyType>, Table)> = PyOnceLock::new();
    let py = object.py();
    let of = object.get_type();
    if let Some((known, table)) = LAST.get(py)
        && known.is(&of)
    {
        return Ok(Some(table.0));
    }
    let name = intern!(py, "__dlpack_c_exchange_api__");
    let Ok(capsule) = of.getattr(name) else { return Ok(None) };
    let Ok(capsule) = capsule.cast_into::<PyCapsule>() else { return Ok(None) };
    let pointer = capsule.pointer_checked(Some(EXCHANGE))?;
    // SAFETY: a capsule of that name points at a table that lives as long as the process.
    let table: &'static Exchange = unsafe { pointer.cast().as_ref() };
    if table.header.version.major != 1 || table.tensor_from_object.is_none() {
        return Ok(None);
    }
    // Subclasses such as torch's Parameter inherit the table of their base.
    let _ = LAST.set(py, (of.unbind(), Table(table)));
    Ok(Some(table))
}

/// A table of functions that any thread may call.
#[derive(Clone, Copy)]
struct Table(&'static Exchange);

// SAFETY: the table is constant for the life of the process.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

/// The stream on which the object's library works now, where it says so.
pub(crate) fn current_stream(object: &Bound<'_, PyAny>, device: i32) -> PyResult<Option<u64>> {
    let Some(Exchange { current_stream: Some(ask), .. }) = exchange_of(object)? else { return Ok(None) };
    let mut stream = std::ptr::null_mut();
    // SAFETY: the argument points at a local.
    let status = unsafe { ask(CUDA, device, &mut stream) };
    if status != 0 {
        return Err(PyErr::take(object.py())
            .unwrap_or_else(|| InputError::new_err("the arrays' library names no current stream")));
    }
    Ok(Some(stream as u64))
}

/// The object's capsule, of version 1 where its library knows that.
fn capsule_of<'py>(
    name: &str,
    object: &Bound<'py, PyAny>,
    stream: Option<u64>,
) -> PyResult<Bound<'py, PyCapsule>> {
    let py = object.py();
    let Ok(method) = object.getattr(intern!(py, "__dlpack__")) else {
        let of = object.get_type();
        let message = format!(
            "{name} is {}: it must be an array that speaks DLPack (numpy, torch, jax, cupy)",
            of.name()?
        );
        return Err(of_another_type(py, message));
    };
    let options = PyDict::new(py);
    if let Some(stream) = stream {
        // Of CUDA's streams 0 is ambiguous to DLPack: the default one is 1.
        options.set_item(intern!(py, "stream"), stream.max(1))?;
    }
    let plain = options.copy()?;
    options.set_item(intern!(py, "max_version"), (1, 0))?;
    let capsule = match method.call((), Some(&options)) {
        Err(error) if error.is_instance_of::<pyo3::exceptions::PyTypeError>(py) => {
            method.call((), Some(&plain))
        }
        capsule => capsule,
    };
    Ok(capsule.map_err(|error| unlent(name, object, error))?.cast_into::<PyCapsule>()?)
}

/// The words of 16 bits of a numpy array of ml_dtypes' bfloat16, for which numpy's capsules have no name.
fn words_of_bfloat16<'py>(object: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    let py = object.py();
    let name = object.getattr(intern!(py, "dtype")).and_then(|of| of.getattr(intern!(py, "name"))).ok()?;
    if !name.eq(intern!(py, "bfloat16")).ok()? {
        return None;
    }
    object.call_method1(intern!(py, "view"), (intern!(py, "uint16"),)).ok()
}

/// The refusal of an array that its library does not lend: a byte order or a type that DLPack has no name
/// for, no memory (torch's meta tensors).
fn unlent(name: &str, object: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    use pyo3::exceptions::{PyBufferError, PyRuntimeError};
    let py = object.py();
    if !error.is_instance_of::<PyBufferError>(py) && !error.is_instance_of::<PyRuntimeError>(py) {
        return error;
    }
    let of = object.getattr(intern!(py, "dtype")).map_or_else(|_| String::new(), |of| format!(" ({of})"));
    let text = error.value(py).to_string();
    let line = text.lines().next().unwrap_or_default().trim_end_matches('.');
    InputError::new_err(format!("{name}{of} cannot be lent: {line}; convert it"))
}
