//! DLPack's types and constants as C declares them.

use std::ffi::{CStr, c_int, c_void};

pub(super) const CPU: i32 = 1;
pub(super) const CUDA: i32 = 2;
pub(super) const CUDA_HOST: i32 = 3;
pub(super) const CUDA_MANAGED: i32 = 13;

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct DlDevice {
    pub(super) kind: i32,
    pub(super) id: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct DlDtype {
    pub(super) code: u8,
    pub(super) bits: u8,
    pub(super) lanes: u16,
}

#[repr(C)]
pub(super) struct DlTensor {
    pub(super) data: *mut c_void,
    pub(super) device: DlDevice,
    pub(super) ndim: i32,
    pub(super) dtype: DlDtype,
    pub(super) shape: *mut i64,
    pub(super) strides: *mut i64,
    pub(super) byte_offset: u64,
}

#[repr(C)]
pub(super) struct DlManaged {
    pub(super) tensor: DlTensor,
    pub(super) context: *mut c_void,
    pub(super) deleter: Option<unsafe extern "C" fn(*mut DlManaged)>,
}

#[repr(C)]
pub(super) struct DlVersion {
    pub(super) major: u32,
    pub(super) minor: u32,
}

#[repr(C)]
pub(super) struct DlManagedVersioned {
    pub(super) version: DlVersion,
    pub(super) context: *mut c_void,
    pub(super) deleter: Option<unsafe extern "C" fn(*mut DlManagedVersioned)>,
    pub(super) flags: u64,
    pub(super) tensor: DlTensor,
}

#[repr(C)]
pub(super) struct ExchangeHeader {
    pub(super) version: DlVersion,
    pub(super) older: *const ExchangeHeader,
}

/// `DLPackExchangeAPI` of version 1.
#[repr(C)]
pub(super) struct Exchange {
    pub(super) header: ExchangeHeader,
    pub(super) allocate: *const c_void,
    pub(super) managed_from_object: *const c_void,
    pub(super) managed_to_object: *const c_void,
    pub(super) tensor_from_object: Option<unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int>,
    pub(super) current_stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int>,
}

pub(super) const READ_ONLY: u64 = 1;
pub(super) const CAPSULE: &CStr = c"dltensor";
pub(super) const CAPSULE_VERSIONED: &CStr = c"dltensor_versioned";
pub(super) const USED: &CStr = c"used_dltensor";
pub(super) const USED_VERSIONED: &CStr = c"used_dltensor_versioned";

/// Code and bits of bfloat16.
pub(crate) const BFLOAT16: (u8, u8) = (4, 16);

/// A tensor without axes and memory.
pub(super) fn empty() -> DlTensor {
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
