//! Arrays of other libraries, read in place by DLPack: the C exchange API of a type that has it (torch), else
//! a capsule. Nothing is copied.
#![allow(unsafe_code)]

mod abi;
mod exchange;

use std::marker::PhantomData;
use std::ptr::NonNull;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

pub(crate) use self::abi::BFLOAT16;
use self::abi::{
    CAPSULE, CAPSULE_VERSIONED, CPU, CUDA, CUDA_HOST, CUDA_MANAGED, DlDevice, DlDtype, DlManaged,
    DlManagedVersioned, DlTensor, Exchange, READ_ONLY, USED, USED_VERSIONED, empty,
};
pub(crate) use self::exchange::current_stream;
use self::exchange::{capsule_of, exchange_of, unlent, words_of_bfloat16};
use crate::error::InputError;

/// The most axes of an array that a call takes.
pub(crate) const MAX_AXES: usize = 5;

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
    /// The bits of e4m3 codes: uint8 as well, whose bytes may also be codes of e5m2, or two of int4 each; the
    /// package has checked what is meant.
    E4m3,
    /// Codes of int8.
    I8,
    /// A type that no call reads.
    Other,
}

/// An array in place, borrowed from a Python object for a call.
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

/// The owner that gives the memory back.
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

    /// Elements that lie end to end.
    ///
    /// # Safety
    /// `data` holds as many elements of the type as `shape` says, and the view does not outlive them.
    pub(crate) unsafe fn dense(
        name: &str,
        data: *mut u8,
        place: Place,
        (code, bits): (u8, u8),
        shape: &[i64],
    ) -> PyResult<View<'py>> {
        let mut tensor = empty();
        let (kind, id) = match place {
            Place::Cpu => (CPU, 0),
            Place::Cuda(ordinal) => (CUDA, ordinal),
        };
        (tensor.data, tensor.device) = (data.cast(), DlDevice { kind, id });
        tensor.ndim = i32::try_from(shape.len()).unwrap_or(i32::MAX);
        tensor.dtype = DlDtype { code, bits, lanes: 1 };
        tensor.shape = shape.as_ptr().cast_mut();
        // SAFETY: the shape has as many entries as there are axes; the caller keeps the memory.
        unsafe { View::read(name, &tensor, Owner::Object, false) }
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
            packed = packed.saturating_mul(len.max(1));
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

    /// Elements of the whole shape; of a broadcast array more than it has memory for, `usize::MAX` at most.
    pub(crate) fn elements(&self) -> usize {
        self.shape().iter().fold(1, |product: usize, &len| product.saturating_mul(len))
    }

    /// Whether elements are of DLPack's type `code` in `bits` bits.
    pub(crate) fn is_of(&self, code: u8, bits: u8) -> bool {
        self.code == (code, bits)
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
            packed = packed.saturating_mul(i64::try_from(len.max(1)).unwrap_or(i64::MAX));
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

fn type_of(dtype: DlDtype) -> Type {
    match (dtype.code, dtype.bits, dtype.lanes) {
        (2, 32, 1) => Type::F32,
        (2, 16, 1) => Type::F16,
        (4, 16, 1) => Type::Bf16,
        (0, 32, 1) => Type::I32,
        (1 | 10, 8, 1) => Type::E4m3,
        (0, 8, 1) => Type::I8,
        _ => Type::Other,
    }
}

/// The refusal of an array on another device than Q.
pub(crate) fn elsewhere(name: &str, place: Place) -> PyErr {
    let place = match place {
        Place::Cpu => "in the memory of the CPU".to_owned(),
        Place::Cuda(device) => format!("on GPU {device}"),
    };
    InputError::new_err(format!("{name} lies elsewhere than q, which is {place}: move it there"))
}
