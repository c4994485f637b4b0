//! The CUDA driver: whether it is installed, and contexts that return an error instead of panicking.
#![allow(unsafe_code)]

use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{CudaContext, result, sys};
use fa_core::board::Reported;
use fa_core::{Arch, ArchLimits, Board};
use libloading::Library;

use crate::Error;

/// Tensor maps and the launch attributes of SM90 came with this version (`1000 * major + 10 * minor`).
const OLDEST_DRIVER: i32 = 12000;

/// The driver's library, under names by which cudarc finds it too. cudarc's own test of its presence is there
/// only where no other crate has the libraries linked.
const NAMES: [&str; 3] = ["libcuda.so", "libcuda.so.1", "nvcuda.dll"];

/// Checks that the driver can be loaded: cudarc panics where it cannot, so this comes before every first
/// call.
///
/// # Errors
/// [`Error::NoDriver`].
pub fn probe() -> Result<(), Error> {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    // SAFETY: loading the driver's library runs its initialisers, which any CUDA program runs.
    let loads = |name: &&str| unsafe { Library::new(*name) }.is_ok();
    let present = *PRESENT.get_or_init(|| NAMES.iter().any(loads));
    if present { Ok(()) } else { Err(Error::NoDriver) }
}

/// The version of CUDA that the driver supports, `1000 * major + 10 * minor`.
///
/// # Errors
/// [`Error::NoDriver`], or [`Error::Driver`] when it does not answer.
pub fn version() -> Result<i32, Error> {
    probe()?;
    let mut version = 0;
    // SAFETY: the argument points at a local.
    unsafe { sys::cuDriverGetVersion(&mut version).result() }
        .map_err(|e| Error::driver("asking the driver's version", e))?;
    Ok(version)
}

/// The primary context of GPU `ordinal`, for programs that have no context yet.
///
/// # Errors
/// [`Error::NoDriver`], [`Error::OldDriver`], and [`Error::Driver`] when there is no such GPU.
pub fn context(ordinal: usize) -> Result<Arc<CudaContext>, Error> {
    let version = version()?;
    if version < OLDEST_DRIVER {
        return Err(Error::OldDriver { have: version, need: OLDEST_DRIVER });
    }
    CudaContext::new(ordinal).map_err(|e| Error::driver("making a context", e))
}

/// The architecture of a context's GPU and its number of SMs.
///
/// # Errors
/// [`Error::Device`] for a GPU that no kernel runs on.
pub(crate) fn device(context: &CudaContext) -> Result<(Arch, u32), Error> {
    let asked = |e: result::DriverError| Error::driver("asking about the GPU", e);
    let (major, minor) = context.compute_capability().map_err(asked)?;
    let sms = context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT).map_err(asked)?;
    let positive = |value: i32| u32::try_from(value).unwrap_or(0);
    let arch = Arch::of_compute_capability(positive(major), positive(minor));
    Ok((arch.ok_or(Error::Device { major, minor })?, positive(sms)))
}

/// The architecture of a context's GPU, and the limits and rates of its board: those of its datasheet where
/// its name is known, else those that the driver reports.
///
/// # Errors
/// [`Error::Device`] for a GPU that no kernel runs on.
pub fn board(context: &CudaContext) -> Result<(Arch, ArchLimits), Error> {
    let (arch, sms) = device(context)?;
    let name = context.name().map_err(|e| Error::driver("asking the GPU's name", e))?;
    // What a driver does not report counts as 0, for which the architecture's own board stands in.
    let asked = |what| context.attribute(what).map_or(0.0, |value| f64::from(value.max(0)));
    let clock_ghz = asked(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE) / 1e6;
    let memory_clock = asked(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE) * 1e3;
    let bus_bytes = asked(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH) / 8.0;
    let l2_bytes = asked(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE) as u64;
    // Two transfers a clock.
    let reported = Reported { sms, clock_ghz, l2_bytes, hbm_bytes_per_s: 2.0 * memory_clock * bus_bytes };
    Ok((arch, Board::limits_of_device(arch, &name, reported)))
}
