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

/// An element type of tensors in device memory: one that kernels compute in, or the bits of codes.
pub trait Stored: DeviceRepr + ValidAsZeroBits + Default + Copy {
    /// What unwritten elements hold: NaN, by bits of all ones.
    fn nan() -> Self;

    /// Whether it is NaN.
    fn is_nan(self) -> bool;
}

impl<T: Half> Stored for T {
    fn nan() -> T {
        T::from_f32(f32::NAN)
    }

    fn is_nan(self) -> bool {
        self.to_f32().is_nan()
    }
}

impl Stored for u8 {
    fn nan() -> u8 {
        u8::MAX
    }

    fn is_nan(self) -> bool {
        self == u8::MAX
    }
}
