//! A kernel's cubins loaded into a context.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUfunction_attribute as Attribute};
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, CudaStream, DriverError};
use cudarc::nvrtc::Ptx;
use fa_core::{Arch, KernelSpec};

use crate::jit::array_gradients::array_gradient_smem;
use crate::jit::entries::{ARRAY_GRADIENTS, ENTRY, PLAN_SMEM, entries_of_programs};
use crate::jit::hash::hash;
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
    /// Whether launches may overlap, in graphs as well.
    overlaps: bool,
}

/// The modules of a context whose programs many kernels have (the plan, the combination), by the hash of
/// their code.
#[derive(Debug, Default)]
pub(crate) struct SharedModules(Mutex<HashMap<String, Arc<CudaModule>>>);

impl SharedModules {
    /// The module of `cubin`, loaded before or now.
    fn load(&self, context: &Arc<CudaContext>, cubin: &[u8]) -> Result<Arc<CudaModule>, Error> {
        // The map is valid even if another thread panicked.
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(match known.entry(hash(&[cubin])) {
            Entry::Occupied(module) => module.get().clone(),
            Entry::Vacant(place) => place.insert(load_module(context, cubin)?).clone(),
        })
    }
}

fn load_module(context: &Arc<CudaContext>, cubin: &[u8]) -> Result<Arc<CudaModule>, Error> {
    let module = context.load_module(Ptx::from_binary(cubin.to_vec()));
    module.map_err(|e| Error::driver("loading a kernel (its compiler may be newer than the driver)", e))
}

/// The driver from which on graphs keep launches that may overlap (CUDA C++ Programming Guide, "Use in CUDA
/// Graphs").
const OVERLAPPING_GRAPHS: i32 = 12_030;

/// Bytes of dynamic shared memory that no entry exceeds but the main one and those of arrays' gradients;
/// every GPU has as much.
const SMALL_SMEM: i32 = 96 << 10;
const _: () = assert!(PLAN_SMEM as i32 <= SMALL_SMEM);

impl LoadedKernel {
    /// Loads `cubins`, compiled from the programs of `spec`, and lets the kernel use the shared memory that
    /// the planner accounts for. Programs after the first are those of other kernels as well.
    ///
    /// # Errors
    /// [`Error::Driver`], for example for code that the driver is too old to load.
    pub(crate) fn load(
        context: &Arc<CudaContext>,
        spec: &KernelSpec,
        (arch, sms): (Arch, u32),
        cubins: &[&[u8]],
        shared: &SharedModules,
    ) -> Result<LoadedKernel, Error> {
        let mut entries = Vec::new();
        for (at, (names, cubin)) in entries_of_programs(spec).into_iter().zip(cubins).enumerate() {
            let module = if at == 0 { load_module(context, cubin)? } else { shared.load(context, cubin)? };
            for name in names {
                let function =
                    module.load_function(name).map_err(|e| Error::driver("finding an entry", e))?;
                entries.push((name, function));
            }
        }
        let function = entries[0].1.clone();
        let smem = smem_bytes(spec);
        let bytes = i32::try_from(smem).unwrap_or(i32::MAX);
        function
            .set_attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes)
            .map_err(|e| Error::driver("asking for dynamic shared memory", e))?;
        // Code that is loaded at its first launch would break a capture: setting an attribute loads it.
        // What exceeds the GPU's is refused at the launch.
        let most = arch.limits().smem_per_block as i32;
        let of_array = most.min(array_gradient_smem(spec) as i32).max(SMALL_SMEM);
        for (name, entry) in &entries[1..] {
            let bytes = if ARRAY_GRADIENTS.contains(name) { of_array } else { SMALL_SMEM };
            entry
                .set_attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes)
                .map_err(|e| Error::driver("asking for dynamic shared memory", e))?;
        }
        let mut driver = 0;
        // SAFETY: the driver writes one number.
        unsafe { sys::cuDriverGetVersion(&raw mut driver) }
            .result()
            .map_err(|e| Error::driver("asking for the driver's version", e))?;
        Ok(LoadedKernel {
            spec: spec.clone(),
            arch,
            sms,
            smem,
            context: context.clone(),
            function,
            entries,
            overlaps: driver >= OVERLAPPING_GRAPHS,
        })
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
        // Clusters that share loads are part of the main entry's code.
        let clusters =
            launch.cluster > self.spec.traits().cluster || (launch.cluster > 1 && launch.entry != ENTRY);
        let mut attributes = [early_attribute(), cluster_attribute(launch.cluster)];
        let attributes = match (launch.starts_early && self.overlaps, clusters) {
            (true, true) => &mut attributes[..],
            (true, false) => &mut attributes[..1],
            (false, true) => &mut attributes[1..],
            (false, false) => &mut [],
        };
        // SAFETY: the function and the stream are alive; the caller vouches for the rest.
        let launched = unsafe { launch_kernel(function, stream, launch, attributes, args) };
        launched.map_err(|e| Error::driver("launching a kernel", e))
    }
}

fn attribute(id: sys::CUlaunchAttributeID) -> sys::CUlaunchAttribute {
    sys::CUlaunchAttribute { id, pad: [0; 4], value: sys::CUlaunchAttributeValue { pad: [0; 64] } }
}

/// A cluster that is no part of the kernel's code.
fn cluster_attribute(ctas: u32) -> sys::CUlaunchAttribute {
    let mut cluster = attribute(sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
    cluster.value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: ctas, y: 1, z: 1 };
    cluster
}

/// A start before the launch before it has ended.
fn early_attribute() -> sys::CUlaunchAttribute {
    let id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    let mut early = attribute(id);
    early.value.programmaticStreamSerializationAllowed = 1;
    early
}

/// # Safety
/// As [`cudarc::driver::result::launch_kernel`].
unsafe fn launch_kernel(
    function: &CudaFunction,
    stream: &CudaStream,
    launch: &Launch,
    attributes: &mut [sys::CUlaunchAttribute],
    args: &mut [*mut c_void],
) -> Result<(), DriverError> {
    let config = sys::CUlaunchConfig {
        gridDimX: launch.grid,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: launch.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: launch.smem,
        hStream: stream.cu_stream(),
        attrs: attributes.as_mut_ptr(),
        numAttrs: attributes.len() as u32,
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
