//! The number types that are computed in: f32, as the fast implementations do, and f64, as the oracle does.

use std::fmt::Debug;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Sub};

use crate::element::Element;
use crate::view::Row;

/// A number type to compute in. Every operation is IEEE 754's; nothing is fused or reassociated behind the
/// caller's back.
pub trait Real:
    Element
    + Debug
    + PartialOrd
    + Add<Output = Self>
    + AddAssign
    + Sub<Output = Self>
    + Mul<Output = Self>
    + MulAssign
    + Div<Output = Self>
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// The score of a key that is not seen, and the LSE of a row that sees none.
    const NEG_INFINITY: Self;
    /// Not a number: marks what is never written.
    const NAN: Self;
    /// `e^self`.
    fn exp(self) -> Self;
    /// The natural logarithm.
    fn ln(self) -> Self;
    /// The square root.
    fn sqrt(self) -> Self;
    /// The hyperbolic tangent.
    fn tanh(self) -> Self;
    /// The larger number; a NaN loses against any number.
    fn max(self, other: Self) -> Self;
    /// The element as a number of this type.
    fn from_element<T: Element>(element: T) -> Self;
    /// Appends the elements of a row as numbers of this type.
    #[doc(hidden)]
    fn append_row<T: Element>(row: &Row<'_, T>, to: &mut Vec<Self>);
}

macro_rules! real {
    ($type:ident, $to:ident, $append:ident) => {
        impl Real for $type {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const NEG_INFINITY: Self = $type::NEG_INFINITY;
            const NAN: Self = $type::NAN;
            fn exp(self) -> Self {
                $type::exp(self)
            }
            fn ln(self) -> Self {
                $type::ln(self)
            }
            fn sqrt(self) -> Self {
                $type::sqrt(self)
            }
            fn tanh(self) -> Self {
                $type::tanh(self)
            }
            fn max(self, other: Self) -> Self {
                $type::max(self, other)
            }
            fn from_element<T: Element>(element: T) -> Self {
                element.$to()
            }
            fn append_row<T: Element>(row: &Row<'_, T>, to: &mut Vec<Self>) {
                T::$append(row, to);
            }
        }
    };
}

real!(f32, to_f32, append_f32);
real!(f64, to_f64, append_f64);
