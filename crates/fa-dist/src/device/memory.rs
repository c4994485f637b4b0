//! Device memory that NCCL and peers may read, and that of other ranks.
#![allow(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError, Weak};

use fa_attn::device::Gpu;
use fa_kernels::cudarc::driver::{CudaStream, DriverError, result, sys};

use crate::error::Error;

/// The driver's failure while `doing` something.
pub(super) fn driver(doing: &'static str) -> impl Fn(DriverError) -> Error {
    move |source| Error::Kernels(fa_kernels::Error::Driver { doing, source })
}

/// Device memory that NCCL and peers may read: of no pool.
pub(super) struct Memory {
    pub(super) address: u64,
    pub(super) bytes: usize,
    gpu: Arc<Gpu>,
}

impl Memory {
    /// `bytes` of memory with `byte` in each.
    pub(super) fn new(gpu: &Arc<Gpu>, bytes: usize, byte: u8) -> Result<Memory, Error> {
        gpu.context().bind_to_thread().map_err(driver("entering the context"))?;
        let bytes = bytes.max(16);
        // SAFETY: the context is current; the memory is freed once, when this is dropped.
        let address = unsafe { result::malloc_sync(bytes) }.map_err(driver("allocating device memory"))?;
        let memory = Memory { address, bytes, gpu: gpu.clone() };
        // SAFETY: the memory has so many bytes.
        unsafe { result::memset_d8_sync(address, byte, bytes) }.map_err(driver("filling device memory"))?;
        Ok(memory)
    }

    /// Memory with these words.
    pub(super) fn of(gpu: &Arc<Gpu>, words: &[i32]) -> Result<Memory, Error> {
        let memory = Memory::new(gpu, size_of_val(words), 0)?;
        // SAFETY: the memory has so many bytes.
        unsafe { result::memcpy_htod_sync(memory.address, words) }.map_err(driver("copying to the GPU"))?;
        Ok(memory)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.gpu.context().bind_to_thread().is_ok() {
            // SAFETY: the memory is this one's, and freeing waits for work that uses it. What fails is that
            // the GPU has failed before.
            unsafe { result::free_sync(self.address) }.ok();
        }
    }
}

/// Enqueues a copy of rows, each side with its address and the bytes from a row to the next.
///
/// # Safety
/// All rows lie in device memory that stays until `stream` has run the copy.
pub(super) unsafe fn copy_rows(
    stream: &CudaStream,
    (from, from_pitch): (u64, usize),
    (to, to_pitch): (u64, usize),
    (width, rows): (usize, usize),
) -> Result<(), DriverError> {
    let copy = sys::CUDA_MEMCPY2D_st {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        srcHost: std::ptr::null(),
        srcDevice: from,
        srcArray: std::ptr::null_mut(),
        srcPitch: from_pitch,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: std::ptr::null_mut(),
        dstDevice: to,
        dstArray: std::ptr::null_mut(),
        dstPitch: to_pitch,
        WidthInBytes: width,
        Height: rows,
    };
    // SAFETY: as the caller vouches.
    unsafe { sys::cuMemcpy2DAsync_v2(&copy, stream.cu_stream()) }.result()
}

/// A block of the driver's memory: exported memory has whole ones, so that peers see nothing else.
pub(super) const BLOCK: usize = 2 << 20;

/// What ranks of this process have for one another, which its own handles cannot open.
static EXPORTED: Mutex<Vec<Weak<Memory>>> = Mutex::new(Vec::new());

impl Memory {
    /// What other ranks need to open this memory, as text; `is_far`: some are other processes.
    pub(super) fn export(self: &Arc<Memory>, is_far: bool) -> Result<String, Error> {
        let mut handle = sys::CUipcMemHandle_st { reserved: [0; 64] };
        self.gpu.context().bind_to_thread().map_err(driver("entering the context"))?;
        if is_far {
            // SAFETY: the handle is a local, the address that of an allocation of its own.
            let made = unsafe { sys::cuIpcGetMemHandle(&mut handle, self.address) }.result();
            made.map_err(driver("making memory known to other processes"))?;
        }
        let mut known = EXPORTED.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|other| other.strong_count() > 0);
        known.push(Arc::downgrade(self));
        let handle: String = handle.reserved.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
        Ok(format!("{:x} {handle}", self.address))
    }
}

/// Another rank's memory.
pub(super) enum Peer {
    /// Of this process: it lives as long as this.
    Near(Arc<Memory>),
    /// Of another one, mapped.
    Far { address: u64, gpu: Arc<Gpu> },
}

impl Peer {
    /// Opens the memory of a text of [`Memory::export`], of a rank of this process where `is_near`, for
    /// `gpu`; `None` for a text that is none, or memory that is gone.
    pub(super) fn open(gpu: &Arc<Gpu>, text: &str, is_near: bool) -> Result<Option<Peer>, Error> {
        let Some((address, text)) = text.split_once(' ') else { return Ok(None) };
        let Ok(address) = u64::from_str_radix(address, 16) else { return Ok(None) };
        gpu.context().bind_to_thread().map_err(driver("entering the context"))?;
        if is_near {
            let known = EXPORTED.lock().unwrap_or_else(PoisonError::into_inner);
            let found = known.iter().filter_map(Weak::upgrade).find(|memory| memory.address == address);
            drop(known);
            let Some(memory) = found else { return Ok(None) };
            let [own, theirs] = [gpu, &memory.gpu].map(|gpu| gpu.context().cu_ctx());
            if own != theirs {
                use sys::CUresult::{CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, CUDA_SUCCESS};
                // SAFETY: both contexts live as long as their GPUs, of which both sides hold one.
                let enabled = unsafe { sys::cuCtxEnablePeerAccess(theirs, 0) };
                if ![CUDA_SUCCESS, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED].contains(&enabled) {
                    enabled.result().map_err(driver("opening another GPU's memory"))?;
                }
            }
            return Ok(Some(Peer::Near(memory)));
        }
        let mut handle = sys::CUipcMemHandle_st { reserved: [0; 64] };
        for (index, byte) in handle.reserved.iter_mut().enumerate() {
            let digits = text.get(2 * index..2 * index + 2);
            let Some(Ok(value)) = digits.map(|digits| u8::from_str_radix(digits, 16)) else {
                return Ok(None);
            };
            *byte = value as _;
        }
        const LAZY_PEER_ACCESS: u32 = 1;
        let mut address = 0;
        // SAFETY: the address is a local, the handle one of another process's `cuIpcGetMemHandle`.
        let opened = unsafe { sys::cuIpcOpenMemHandle_v2(&mut address, handle, LAZY_PEER_ACCESS) }.result();
        opened.map_err(driver("opening another process's memory"))?;
        Ok(Some(Peer::Far { address, gpu: gpu.clone() }))
    }

    pub(super) fn address(&self) -> u64 {
        match self {
            Peer::Near(memory) => memory.address,
            Peer::Far { address, .. } => *address,
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Peer::Far { address, gpu } = self
            && gpu.context().bind_to_thread().is_ok()
        {
            // SAFETY: the mapping is this one's, and nothing that reads it is enqueued any more.
            unsafe { sys::cuIpcCloseMemHandle(*address) };
        }
    }
}
