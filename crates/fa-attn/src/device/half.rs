//! The element types of GPU kernels.

use std::fmt::Debug;

use fa_kernels::cudarc::driver::{DeviceRepr, ValidAsZeroBits};
use half::slice::HalfFloatSliceExt;

/// An element type that GPU kernels compute in: f16 or bf16.
pub trait Half:
    fa_kernels::Element + fa_cpu::Element + DeviceRepr + ValidAsZeroBits + Default + PartialEq + Debug
{
    /// The bits of each value: equal bits are equal results, which equal values (0 and -0, NaN) are not.
    fn bits(values: &[Self]) -> &[u16];
}

impl Half for half::f16 {
    fn bits(values: &[Self]) -> &[u16] {
        values.reinterpret_cast()
    }
}

impl Half for half::bf16 {
    fn bits(values: &[Self]) -> &[u16] {
        values.reinterpret_cast()
    }
}
