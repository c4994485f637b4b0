//! A cubin loaded into a context.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::CUfunction_attribute as Attribute;
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, result};
use cudarc::nvrtc::Ptx;
use fa_core::{Arch, KernelSpec};

use crate::jit::source::{BACKWARD_ENTRIES, ENTRY, SMALL_THREADS};
use crate::{Error, smem_bytes};

/// A kernel that can be launched.
#[derive(Debug)]
pub struct LoadedKernel {
    /// What it was made from.
    pub spec: KernelSpec,
    /// The architecture that it was compiled for.
    pub arch: Arch,
    /// SMs of the GPU.
    pub sms: u32,
    /// Bytes of dynamic shared memory.
    pub smem: u32,
    context: Arc<CudaContext>,
    function: CudaFunction,
    /// The functions of [`BACKWARD_ENTRIES`], of a backward only.
    further: Vec<CudaFunction>,
}

impl LoadedKernel {
    /// Loads `cubin`, compiled from `spec`, and lets it use the shared memory that the planner accounts for.
    ///
    /// # Errors
    /// [`Error::Driver`], for example for code that the driver is too old to load.
    pub fn load(
        context: &Arc<CudaContext>,
        spec: &KernelSpec,
        (arch, sms): (Arch, u32),
        cubin: &[u8],
    ) -> Result<LoadedKernel, Error> {
        let module = context
            .load_module(Ptx::from_binary(cubin.to_vec()))
            .map_err(|e| Error::driver("loading a kernel (its compiler may be newer than the driver)", e))?;
        let entry = |name| module.load_function(name).map_err(|e| Error::driver("finding an entry", e));
        let function = entry(ENTRY)?;
        let names: &[&str] = if spec.kernel.is_backward() { &BACKWARD_ENTRIES } else { &[] };
        let further = names.iter().map(|name| entry(name)).collect::<Result<_, _>>()?;
        let smem = smem_bytes(spec);
        let bytes = i32::try_from(smem).unwrap_or(i32::MAX);
        function
            .set_attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes)
            .map_err(|e| Error::driver("asking for dynamic shared memory", e))?;
        Ok(LoadedKernel { spec: spec.clone(), arch, sms, smem, context: context.clone(), function, further })
    }

    /// Registers per thread, as the driver allocates them at launch.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn registers(&self) -> Result<u32, Error> {
        let registers = self.function.get_attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS);
        registers.map(|n| n.max(0) as u32).map_err(|e| Error::driver("asking about a kernel", e))
    }

    /// Blocks of the kernel that an SM holds at once, by the driver's account.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn blocks_per_sm(&self) -> Result<u32, Error> {
        self.function
            .occupancy_max_active_blocks_per_multiprocessor(self.spec.threads(), self.smem as usize, None)
            .map_err(|e| Error::driver("asking about a kernel", e))
    }

    /// Checks that `of`, the context of `name`, is the one that the kernel was loaded into: elsewhere addresses mean nothing to it.
    ///
    /// # Errors
    /// [`Error::Context`].
    pub(crate) fn check_context(&self, name: &'static str, of: &CudaContext) -> Result<(), Error> {
        if *of == *self.context {
            return Ok(());
        }
        Err(Error::Context { name, have: of.ordinal(), need: self.context.ordinal() })
    }

    /// Readies the calling thread for launches on `stream`, whatever context it was in.
    ///
    /// # Errors
    /// [`Error::Context`] for the stream of another context, and [`Error::Driver`].
    pub(crate) fn enter(&self, stream: &CudaStream) -> Result<(), Error> {
        self.check_context("the stream", stream.context())?;
        self.context.bind_to_thread().map_err(|e| Error::driver("entering the context", e))
    }

    /// Launches `blocks` blocks in one dimension, after [`LoadedKernel::enter`]. Allocates nothing and waits for nothing.
    ///
    /// # Safety
    /// `args` point at the entry's parameters, in order and with their types, and every address in them is valid for the
    /// kernel's accesses until the stream has run it.
    pub(crate) unsafe fn launch(
        &self,
        stream: &CudaStream,
        blocks: u32,
        args: &mut [*mut c_void],
    ) -> Result<(), Error> {
        let threads = self.spec.threads();
        // SAFETY: the caller's promise.
        unsafe { launch(stream, &self.function, (blocks, threads, self.smem), args) }
    }

    /// Launches `blocks` blocks of one of [`BACKWARD_ENTRIES`], by its place there, after [`LoadedKernel::enter`].
    ///
    /// # Safety
    /// As [`LoadedKernel::launch`].
    pub(crate) unsafe fn launch_further(
        &self,
        stream: &CudaStream,
        entry: usize,
        blocks: u32,
        args: &mut [*mut c_void],
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { launch(stream, &self.further[entry], (blocks, SMALL_THREADS, 0), args) }
    }
}

/// Launches so many blocks of so many threads with so many bytes of shared memory.
///
/// # Safety
/// As [`LoadedKernel::launch`].
unsafe fn launch(
    stream: &CudaStream,
    function: &CudaFunction,
    (blocks, threads, smem): (u32, u32, u32),
    args: &mut [*mut c_void],
) -> Result<(), Error> {
    // SAFETY: the function and the stream are alive; the rest is the caller's promise.
    unsafe {
        result::launch_kernel(
            function.cu_function(),
            (blocks, 1, 1),
            (threads, 1, 1),
            smem,
            stream.cu_stream(),
            args,
        )
    }
    .map_err(|e| Error::driver("launching a kernel", e))
}
