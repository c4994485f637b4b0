//! The number types that tensors may hold.

use fa_core::Dtype;
use half::{bf16, f16};

use crate::simd::rows::Stored;

/// Keeps other crates from adding element types: the passes are compiled for those below.
mod sealed {
    pub trait Sealed {}
}

/// A number that tensors may hold: f64, f32, f16 or bf16. Conversions are exact upwards and round to nearest
/// even downwards.
pub trait Element: Copy + Send + Sync + Stored + sealed::Sealed + 'static {
    /// The element type's name in problems; `None` for f64, which only the oracle's own tensors have.
    const DTYPE: Option<Dtype>;
    /// Rounds to this type.
    fn from_f64(value: f64) -> Self;
    /// Rounds to this type.
    fn from_f32(value: f32) -> Self;
    /// Exact for every type but f64.
    fn to_f32(self) -> f32;
    /// Exact.
    fn to_f64(self) -> f64;
}

impl sealed::Sealed for f64 {}

impl Element for f64 {
    const DTYPE: Option<Dtype> = None;
    fn from_f64(value: f64) -> Self {
        value
    }
    fn from_f32(value: f32) -> Self {
        f64::from(value)
    }
    fn to_f32(self) -> f32 {
        self as f32
    }
    fn to_f64(self) -> f64 {
        self
    }
}

impl sealed::Sealed for f32 {}

impl Element for f32 {
    const DTYPE: Option<Dtype> = Some(Dtype::F32);
    fn from_f64(value: f64) -> Self {
        value as f32
    }
    fn from_f32(value: f32) -> Self {
        value
    }
    fn to_f32(self) -> f32 {
        self
    }
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
}

macro_rules! sixteen_bit_element {
    ($type:ty, $dtype:expr) => {
        impl sealed::Sealed for $type {}

        impl Element for $type {
            const DTYPE: Option<Dtype> = Some($dtype);
            fn from_f64(value: f64) -> Self {
                <$type>::from_f64(value)
            }
            fn from_f32(value: f32) -> Self {
                <$type>::from_f32(value)
            }
            fn to_f32(self) -> f32 {
                <$type>::to_f32(self)
            }
            fn to_f64(self) -> f64 {
                <$type>::to_f64(self)
            }
        }
    };
}

sixteen_bit_element!(f16, Dtype::F16);
sixteen_bit_element!(bf16, Dtype::Bf16);
