//! A work plan made ahead of the calls that it serves: all layers of a step have the same lengths, and need
//! one.
#![allow(unsafe_code)]

use cudarc::driver::{CudaStream, DevicePtrMut};
use fa_core::TensorLayout;

use crate::Error;
use crate::launch::args::RawTensor;
use crate::launch::call::Bound;
use crate::launch::extras::{Extras, RawExtras};
use crate::launch::launches::{Addresses, Launches, Step};
use crate::launch::module::LoadedKernel;

impl<P> Bound<P> {
    /// Bytes of a work plan; 0 where lengths are uniform, which needs none.
    pub fn plan_bytes(&self) -> usize {
        self.launches().plan_bytes
    }

    /// Writes the work plan of the lengths in `extras` to `plan`, of [`Bound::plan_bytes`] bytes: for
    /// calls of this kernel and problem with the same lengths, which get it as [`Extras::plan`].
    /// Waits for nothing and can be captured. Nothing where lengths are uniform.
    ///
    /// # Errors
    /// Extras that are missing, not the problem's or too short; a plan that is too short; a stream or
    /// a tensor of another context; [`Error::Driver`].
    pub fn plan(
        &self,
        stream: &CudaStream,
        extras: Extras<'_>,
        plan: &mut dyn DevicePtrMut<u8>,
    ) -> Result<(), Error> {
        write_plan(self.kernel(), self.launches(), stream, extras, plan)
    }

    /// [`Bound::plan`] on addresses alone; [`RawExtras::plan`] is where the plan goes.
    ///
    /// # Safety
    /// The extras are as long as the problem says, the plan has [`Bound::plan_bytes`] bytes, and both
    /// stay, untouched by others, until the stream has run the kernel.
    ///
    /// # Errors
    /// As [`Bound::plan`], except that lengths are the caller's responsibility.
    pub unsafe fn plan_raw(&self, stream: &CudaStream, extras: &RawExtras) -> Result<(), Error> {
        // SAFETY: the caller vouches for the memory.
        unsafe { enqueue_plan(self.kernel(), self.launches(), stream, extras) }
    }
}

fn write_plan(
    kernel: &LoadedKernel,
    launches: &Launches,
    stream: &CudaStream,
    mut extras: Extras<'_>,
    plan: &mut dyn DevicePtrMut<u8>,
) -> Result<(), Error> {
    let need = launches.plan_bytes;
    if plan.len() < need {
        return Err(Error::TooShort { tensor: "plan", have: plan.len() as u64, need: need as u64 });
    }
    let check = |name, of: &CudaStream| kernel.check_context(name, of.context());
    check("plan", plan.stream())?;
    extras.plan = None;
    let (extras, _guards) = extras.raw(&launches.extras, stream, check)?;
    let (address, _plan) = plan.device_ptr_mut(stream);
    // SAFETY: lengths were checked, and the guards keep the memory until the launch is in the stream.
    unsafe { enqueue_plan(kernel, launches, stream, &RawExtras { plan: Some(address), ..extras }) }
}

/// Puts the plan kernel alone on the stream.
///
/// # Safety
/// As [`Bound::plan_raw`].
unsafe fn enqueue_plan(
    kernel: &LoadedKernel,
    launches: &Launches,
    stream: &CudaStream,
    extras: &RawExtras,
) -> Result<(), Error> {
    if launches.plan_bytes == 0 {
        return Ok(());
    }
    extras.check(&launches.extras)?;
    if extras.plan.is_none() {
        return Err(Error::MissingExtra { name: "plan", need: launches.plan_bytes });
    }
    kernel.enter(stream)?;
    // The plan kernel reads no tensor; parameters want strides all the same.
    let shapes = launches.tensors.iter().map(|tensor| tensor.shape);
    let strides = shapes.map(|shape| TensorLayout::Bshd.strides(shape.seqlen, shape.heads, shape.dim));
    let tensors: Vec<RawTensor> = strides.map(|strides| RawTensor { address: 0, strides }).collect();
    let at = Addresses { tensors: &tensors, lse: None, workspace: None, extras: *extras };
    let mut params = launches.argument(&at);
    for step in &launches.steps {
        if let Step::Plan(launch) = step {
            // SAFETY: the plan's entry takes the parameters alone; the caller vouches for the addresses.
            unsafe { kernel.launch(stream, launch, &mut [params.raw()])? }
        }
    }
    Ok(())
}
