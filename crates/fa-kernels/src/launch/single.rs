//! A unit of one entry that all problems share, loaded into a context.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaFunction, CudaStream, result};
use cudarc::nvrtc::Ptx;

use crate::Error;

/// The entry.
#[derive(Debug)]
pub(crate) struct Single {
    context: Arc<CudaContext>,
    function: CudaFunction,
}

impl Single {
    /// Loads `entry` of `cubin`.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub(crate) fn load(context: &Arc<CudaContext>, entry: &str, cubin: &[u8]) -> Result<Single, Error> {
        let module = context
            .load_module(Ptx::from_binary(cubin.to_vec()))
            .map_err(|e| Error::driver("loading a kernel (its compiler may be newer than the driver)", e))?;
        let function = module.load_function(entry).map_err(|e| Error::driver("finding an entry", e))?;
        Ok(Single { context: context.clone(), function })
    }

    /// Checks that memory of `of` is in the kernel's context.
    ///
    /// # Errors
    /// [`Error::Context`].
    pub(super) fn check_context(&self, name: &'static str, of: &CudaStream) -> Result<(), Error> {
        if **of.context() == *self.context {
            return Ok(());
        }
        Err(Error::Context { name, have: of.context().ordinal(), need: self.context.ordinal() })
    }

    /// Launches it with `params`, its one argument.
    ///
    /// # Safety
    /// The entry takes a `P`, and what that points at stays in place until the stream has run the kernel.
    ///
    /// # Errors
    /// [`Error::Context`] and [`Error::Driver`].
    pub(super) unsafe fn launch<P>(
        &self,
        stream: &CudaStream,
        (grid, threads, smem): (u32, u32, u32),
        mut params: P,
    ) -> Result<(), Error> {
        self.check_context("the stream", stream)?;
        self.context.bind_to_thread().map_err(|e| Error::driver("entering the context", e))?;
        let mut arguments: [*mut c_void; 1] = [(&raw mut params).cast()];
        // SAFETY: the caller vouches for the entry's parameters and for what they point at.
        unsafe {
            result::launch_kernel(
                self.function.cu_function(),
                (grid, 1, 1),
                (threads, 1, 1),
                smem,
                stream.cu_stream(),
                &mut arguments,
            )
        }
        .map_err(|e| Error::driver("launching a kernel", e))
    }
}
