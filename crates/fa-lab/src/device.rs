//! The GPU: its description, tensors of calls that are timed in turn, and times of launches.

mod call;
mod placed;
mod timer;

use fa_attn::device::{BindOptions, Bound, Gpu, Half};
use fa_attn::machine;
use fa_core::{Arch, Division, KernelSpec, Pass, Problem};
use fa_kernels::{Error, driver};
use serde::Serialize;

use crate::error::{self, gpu_only};

pub use call::{Calls, Captured, Plans, capture_calls};
pub use placed::{PlacedBackward, PlacedForward, place_backward, place_forward};
pub use timer::{Timing, median, time_each};

/// A GPU's description, for records of measurements.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceInfo {
    /// The product's name.
    pub gpu: String,
    /// The architecture whose kernels it runs.
    pub arch: Arch,
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Bytes of device memory.
    pub memory_bytes: usize,
    /// Version of the kernel module, where it is known.
    pub driver: Option<String>,
    /// CUDA version that the driver supports, such as `13.0`.
    pub cuda: String,
}

impl DeviceInfo {
    /// The description of `gpu`.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn of(gpu: &Gpu) -> Result<DeviceInfo, Error> {
        use fa_kernels::cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let asked = |source| Error::Driver { doing: "asking about the GPU", source };
        let sms = gpu.context().attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT).map_err(asked)?;
        let cuda = driver::version()?;
        Ok(DeviceInfo {
            gpu: gpu.context().name().map_err(asked)?,
            arch: gpu.arch(),
            sms: sms.max(0) as u32,
            memory_bytes: gpu.context().total_mem().map_err(asked)?,
            driver: machine::gpu::driver().version,
            cuda: format!("{}.{}", cuda / 1000, cuda % 1000 / 10),
        })
    }
}

/// The first GPU, for work that nothing else can do.
///
/// # Errors
/// Without a driver, a GPU, or one that kernels run on, with what to do.
pub fn open() -> Result<Gpu, error::Error> {
    Gpu::open().map_err(gpu_only)
}

/// The kernel of `spec`, which has to be for `pass`, deterministic or not; a forward with the keys of a tile
/// in `splits` parts, or in as many as the planner takes.
///
/// # Errors
/// [`Error::Mismatch`] when it does not compute the problem or is for the other pass, and those of compiling
/// and loading.
pub fn bind_spec(
    gpu: &Gpu,
    problem: &Problem,
    spec: &KernelSpec,
    splits: Option<usize>,
    pass: Pass,
) -> Result<Bound, fa_attn::Error> {
    let own = spec.kernel.pass();
    if own.is_backward() != pass.is_backward() {
        return Err(call::other_pass(own, pass).into());
    }
    let division = Division { splits, ..Division::PLANNED };
    let options = BindOptions::default().with_division(division).with_spec(Some(spec.clone()));
    gpu.bind(problem, own, &options)
}

/// Milliseconds of a launch by CUDA events, one figure per sample, in ascending order.
///
/// # Errors
/// What a launch reports.
pub fn time<T: Half>(
    gpu: &Gpu,
    bound: &Bound,
    calls: &mut Calls<T>,
    timing: Timing,
) -> Result<Vec<f64>, Error> {
    timer::time_launches(&gpu.stream, timing, |launches| {
        (0..launches).try_for_each(|_| calls.run(bound, &gpu.stream))
    })
}
