//! A cubin loaded into a context.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUfunction_attribute as Attribute};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, DriverError, result};
use cudarc::nvrtc::Ptx;
use fa_core::{Arch, KernelSpec};

use crate::jit::source::{ENTRY, PLAN_SMEM, entries};
use crate::launch::launches::Launch;
use crate::{Error, smem_bytes};

/// A kernel that can be launched.
#[derive(Debug)]
pub struct LoadedKernel {
    /// The spec that it was compiled from.
    pub spec: KernelSpec,
    /// The architecture that it was compiled for.
    pub arch: Arch,
    /// SMs of the GPU.
    pub sms: u32,
    /// Bytes of dynamic shared memory.
    pub smem: u32,
    context: Arc<CudaContext>,
    /// The main entry.
    function: CudaFunction,
    /// All entries by their names.
    entries: Vec<(&'static str, CudaFunction)>,
}

/// Bytes of dynamic shared memory that no entry but the main one exceeds; every GPU has as much.
const SMALL_SMEM: i32 = 96 << 10;
const _: () = assert!(PLAN_SMEM as i32 <= SMALL_SMEM);

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
        let entry = |name: &'static str| -> Result<_, Error> {
            let function = module.load_function(name).map_err(|e| Error::driver("finding an entry", e))?;
            Ok((name, function))
        };
        let entries = entries(spec).into_iter().map(entry).collect::<Result<Vec<_>, _>>()?;
        let function = entries[0].1.clone();
        let smem = smem_bytes(spec);
        let bytes = i32::try_from(smem).unwrap_or(i32::MAX);
        function
            .set_attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes)
            .map_err(|e| Error::driver("asking for dynamic shared memory", e))?;
        // Code that is loaded at its first launch would break a capture: setting an attribute loads it.
        for (_, entry) in &entries[1..] {
            entry
                .set_attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, SMALL_SMEM)
                .map_err(|e| Error::driver("asking for dynamic shared memory", e))?;
        }
        Ok(LoadedKernel { spec: spec.clone(), arch, sms, smem, context: context.clone(), function, entries })
    }

    /// Registers per thread, as the driver allocates them at launch.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn registers(&self) -> Result<u32, Error> {
        let registers = self.function.get_attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS);
        registers.map(|n| n.max(0) as u32).map_err(|e| Error::driver("asking about a kernel", e))
    }

    /// CTAs of the kernel that fit an SM at once, by the driver's account.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn blocks_per_sm(&self) -> Result<u32, Error> {
        self.function
            .occupancy_max_active_blocks_per_multiprocessor(self.spec.threads(), self.smem as usize, None)
            .map_err(|e| Error::driver("asking about a kernel", e))
    }

    /// Checks that `of`, the context of `name`, is the one that the kernel was loaded into: its
    /// addresses are invalid in any other.
    ///
    /// # Errors
    /// [`Error::Context`].
    pub(crate) fn check_context(&self, name: &'static str, of: &CudaContext) -> Result<(), Error> {
        if *of == *self.context {
            return Ok(());
        }
        Err(Error::Context { name, have: of.ordinal(), need: self.context.ordinal() })
    }

    /// Makes the kernel's context current in the calling thread, for launches on `stream`.
    ///
    /// # Errors
    /// [`Error::Context`] for the stream of another context, and [`Error::Driver`].
    pub(crate) fn enter(&self, stream: &CudaStream) -> Result<(), Error> {
        self.check_context("the stream", stream.context())?;
        self.context.bind_to_thread().map_err(|e| Error::driver("entering the context", e))
    }

    /// Enqueues `launch`, after [`LoadedKernel::enter`]. Allocates nothing and waits for nothing.
    ///
    /// # Safety
    /// The launch is of this kernel's spec. `args` point at the entry's parameters, in order and with their
    /// types, and every address in them is valid for the kernel's accesses until the stream has run it.
    pub(crate) unsafe fn launch(
        &self,
        stream: &CudaStream,
        launch: &Launch,
        args: &mut [*mut c_void],
    ) -> Result<(), Error> {
        let function =
            self.entries.iter().find(|(name, _)| *name == launch.entry).map(|(_, function)| function);
        let function = function.expect("a launch names an entry of its spec's unit");
        // SAFETY: the function and the stream are alive; the caller vouches for the rest.
        let launched = unsafe {
            // Clusters that share loads are part of the main entry's code.
            if launch.cluster > self.spec.traits().cluster || (launch.cluster > 1 && launch.entry != ENTRY) {
                launch_clusters(function, stream, launch, args)
            } else {
                result::launch_kernel(
                    function.cu_function(),
                    (launch.grid, 1, 1),
                    (launch.threads, 1, 1),
                    launch.smem,
                    stream.cu_stream(),
                    args,
                )
            }
        };
        launched.map_err(|e| Error::driver("launching a kernel", e))
    }
}

/// A launch whose cluster is no part of the kernel's code.
///
/// # Safety
/// As [`result::launch_kernel`].
unsafe fn launch_clusters(
    function: &CudaFunction,
    stream: &CudaStream,
    launch: &Launch,
    args: &mut [*mut c_void],
) -> Result<(), DriverError> {
    let mut cluster = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { pad: [0; 64] },
    };
    cluster.value.clusterDim =
        sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: launch.cluster, y: 1, z: 1 };
    let config = sys::CUlaunchConfig {
        gridDimX: launch.grid,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: launch.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: launch.smem,
        hStream: stream.cu_stream(),
        attrs: &raw mut cluster,
        numAttrs: 1,
    };
    // SAFETY: the caller's promise; the driver copies configuration and arguments before it returns.
    unsafe {
        sys::cuLaunchKernelEx(
            &raw const config,
            function.cu_function(),
            args.as_mut_ptr(),
            std::ptr::null_mut(),
        )
    }
    .result()
}
