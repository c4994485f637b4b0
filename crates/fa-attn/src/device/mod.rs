//! Tensors that stay on a GPU: a [`Gpu`] binds a kernel to a problem, and launches on [`DeviceForward`],
//! [`DeviceBackward`] and [`DeviceAppend`] allocate nothing and wait for nothing.

mod append;
pub mod args;
mod backward;
mod bind;
mod bound;
mod extras;
mod forward;
mod gathered;
mod gpu;
mod half;
mod rounded;
mod tensor;

pub use crate::clean::{Clean, first_clean};
pub use append::{DeviceAppend, DeviceCache, DeviceTable};
pub use backward::{DeviceBackward, DeviceGradients};
pub use bind::BindOptions;
pub use bound::Bound;
pub(crate) use extras::layout_of;
pub use extras::{AppendLengths, DeviceExtras, DeviceGradient, DeviceProgram};
pub use fa_kernels::{
    Backward, BackwardPass, BoundAppend, BoundMerge, Cache, Forward, ForwardPass, Headers, Kernels,
    LoadedKernel, driver,
};
pub use forward::{DeviceForward, DeviceOutput, ForwardCall, capture};
pub use gathered::GatheredBackward;
pub use gpu::Gpu;
pub use half::{Half, Stored};
pub(crate) use tensor::doing;
pub use tensor::{DeviceTensor, Placement, fill_with_nan, shapes};
