//! The GPU at hand: its kernels, tensors on it, and times of launches.

mod backward;
mod call;
mod timer;

use std::sync::Arc;

use fa_core::{Arch, KernelSpec, Pass, Problem};
use fa_kernels::cudarc::driver::{CudaContext, CudaStream};
use fa_kernels::{Backward, Error, Forward, Kernels, driver};
use serde::Serialize;

use crate::machine;
use crate::tensors::{Half, Inputs};

pub use backward::{Bound, GradientCall, PassCall};
pub use call::Call;
use call::doing;
pub use timer::{Timing, median, time_each};

/// A GPU with its kernels and the stream that everything here runs on.
pub struct Device {
    /// Plans, compiles and loads.
    pub kernels: Kernels,
    /// The stream of uploads, downloads, launches and timings.
    pub stream: Arc<CudaStream>,
}

/// What a GPU is, for records of measurements.
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
    /// Version of the kernel module, where it says so.
    pub driver: Option<String>,
    /// CUDA version that the driver supports, such as `13.0`.
    pub cuda: String,
}

impl Device {
    /// The first GPU.
    ///
    /// # Errors
    /// [`Error::NoDriver`], [`Error::OldDriver`], [`Error::Driver`] where there is no GPU, [`Error::Device`] where it is
    /// too old: each says what to do.
    pub fn open() -> Result<Device, Error> {
        let context = driver::context(0)?;
        let kernels = Kernels::new(&context)?;
        Ok(Device { stream: context.default_stream(), kernels })
    }

    /// The context.
    pub fn context(&self) -> &Arc<CudaContext> {
        self.kernels.context()
    }

    /// What the GPU is.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn info(&self) -> Result<DeviceInfo, Error> {
        use fa_kernels::cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let asked = doing("asking about the GPU");
        let sms = self.context().attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT).map_err(&asked)?;
        let cuda = driver::version()?;
        Ok(DeviceInfo {
            gpu: self.context().name().map_err(&asked)?,
            arch: self.kernels.arch(),
            sms: sms.max(0) as u32,
            memory_bytes: self.context().total_mem().map_err(&asked)?,
            driver: machine::gpu::driver().version,
            cuda: format!("{}.{}", cuda / 1000, cuda % 1000 / 10),
        })
    }

    /// The forward of `problem`: by the kernel of `spec`, or else by the library's own choice.
    ///
    /// # Errors
    /// What planning, compiling and loading report.
    pub fn forward(&self, problem: &Problem, spec: Option<&KernelSpec>) -> Result<Forward, Error> {
        match spec {
            Some(spec) => self.kernels.forward_with(problem, spec),
            None => self.kernels.forward(problem),
        }
    }

    /// The kernel of `spec` for its own pass.
    ///
    /// # Errors
    /// [`Error::Mismatch`] when it does not compute the problem or is for the other pass, and those of compiling and loading.
    pub fn bind(&self, problem: &Problem, spec: &KernelSpec, pass: Pass) -> Result<Bound, Error> {
        let own = spec.kernel.pass();
        if own.is_backward() != pass.is_backward() {
            let text = |pass: Pass| format!("the {}", pass.name());
            return Err(Error::Mismatch { what: "pass", kernel: text(own), problem: text(pass) });
        }
        match pass {
            Pass::Forward => self.kernels.forward_with(problem, spec).map(Bound::Forward),
            Pass::Backward { .. } => self.kernels.backward_with(problem, spec).map(Bound::Backward),
        }
    }

    /// `inputs` on the GPU with room for the outputs, which hold NaN.
    ///
    /// # Errors
    /// [`Error::Driver`], above all for want of memory.
    pub fn call<T: Half>(&self, forward: &Forward, inputs: &Inputs<T>) -> Result<Call<T>, Error> {
        Call::new(&self.stream, forward, inputs)
    }

    /// Copies of one call, and of that of its backward with a dO, so many that together they exceed the L2 twice: timed in turn, none finds its inputs there.
    ///
    /// # Errors
    /// As [`Device::call`].
    pub fn calls<T: Half>(
        &self,
        forward: &Forward,
        backward: Option<(&Backward, &[T])>,
        inputs: &Inputs<T>,
    ) -> Result<Vec<PassCall<T>>, Error> {
        const MOST: usize = 32;
        let l2 = self.kernels.arch().limits().l2_bytes as f64;
        let copies = (2.0 * l2 / inputs.problem.bytes_forward().max(1.0)).ceil();
        let call = |_| PassCall::new(&self.stream, forward, backward, inputs);
        (0..(copies as usize).clamp(1, MOST)).map(call).collect()
    }

    /// Milliseconds of a launch by CUDA events, one figure per sample, in ascending order.
    ///
    /// # Errors
    /// What a launch reports.
    pub fn time<T: Half>(
        &self,
        pass: &Bound,
        calls: &mut [PassCall<T>],
        timing: Timing,
    ) -> Result<Vec<f64>, Error> {
        let mut next = 0;
        timer::time_launches(&self.stream, timing, |launches| {
            for _ in 0..launches {
                calls[next].run(pass, &self.stream)?;
                next = (next + 1) % calls.len();
            }
            Ok(())
        })
    }

    /// Waits until the stream is idle.
    ///
    /// # Errors
    /// What went wrong on the GPU meanwhile.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.stream.synchronize().map_err(doing("waiting for the GPU"))
    }
}
