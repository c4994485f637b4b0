//! The number types that tensors may hold.

use fa_core::Dtype;
use half::{bf16, f16};

use crate::simd::rows::Stored;
use crate::view::Row;

/// Keeps other crates from adding element types: the passes are compiled for those below.
mod sealed {
    pub trait Sealed {}
}

/// A number that tensors may hold: f64, f32, f16 or bf16. Conversions are exact upwards and round to nearest
/// even downwards.
pub trait Element: Copy + Default + Send + Sync + Stored + sealed::Sealed + 'static {
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
    /// Appends a row's elements by [`Element::to_f32`].
    ///
    /// This and the functions below are compiled for each type in this crate, as far optimised as it is:
    /// loops of a generic function are compiled again in every crate that calls it.
    #[doc(hidden)]
    fn append_f32(row: &Row<'_, Self>, to: &mut Vec<f32>);
    /// Appends a row's elements by [`Element::to_f64`].
    #[doc(hidden)]
    fn append_f64(row: &Row<'_, Self>, to: &mut Vec<f64>);
    /// The number as a tensor of this type would hold it.
    #[doc(hidden)]
    fn held_f32(value: f32) -> f32;
    /// The numbers by [`Element::from_f32`].
    #[doc(hidden)]
    fn narrowed(values: &[f32]) -> Vec<Self>;
}

/// Functions over many elements, by the conversions of one.
macro_rules! of_many {
    () => {
        fn append_f32(row: &Row<'_, Self>, to: &mut Vec<f32>) {
            row.append(Self::to_f32, to);
        }
        fn append_f64(row: &Row<'_, Self>, to: &mut Vec<f64>) {
            row.append(Self::to_f64, to);
        }
        #[inline(never)]
        fn held_f32(value: f32) -> f32 {
            Self::from_f32(value).to_f32()
        }
        fn narrowed(values: &[f32]) -> Vec<Self> {
            values.iter().map(|&value| Self::from_f32(value)).collect()
        }
    };
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
    of_many!();
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
    of_many!();
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
            of_many!();
        }
    };
}

sixteen_bit_element!(f16, Dtype::F16);
sixteen_bit_element!(bf16, Dtype::Bf16);
