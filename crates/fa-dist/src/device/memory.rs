//! Device memory that NCCL and peers may read.
#![allow(unsafe_code)]

use std::sync::Arc;

use fa_attn::device::Gpu;
use fa_kernels::cudarc::driver::{DriverError, result};

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
