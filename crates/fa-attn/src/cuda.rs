//! The types of cudarc in this crate's public functions: contexts, streams, device memory and graphs. A
//! program that takes them from here has the version that this crate is built with.

pub use fa_kernels::cudarc;
pub use fa_kernels::cudarc::driver::{
    CudaContext, CudaEvent, CudaGraph, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut,
    DeviceRepr, DriverError, ValidAsZeroBits,
};
