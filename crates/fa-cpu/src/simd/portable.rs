//! Plain Rust: four lanes that the compiler maps to whatever the target has. Always there, and what the other
//! instruction sets are tested against.
#![allow(unsafe_code)]

use super::vector::Vector;

#[derive(Clone, Copy)]
pub(super) struct Lanes4([f32; 4]);

impl Lanes4 {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        let (a, b) = (self.0, other.0);
        Lanes4([f(a[0], b[0]), f(a[1], b[1]), f(a[2], b[2]), f(a[3], b[3])])
    }
}

impl Vector for Lanes4 {
    const LANES: usize = 4;
    const ROWS: usize = 4;
    const COLUMNS: usize = 2;

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller vouches for 4 values.
        Lanes4(unsafe { from.cast::<[f32; 4]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller vouches for 4 values.
        unsafe { to.cast::<[f32; 4]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Lanes4([value; 4])
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // Not f32::mul_add: without FMA hardware that is a library call per lane.
        self.zip(factor, |a, b| a * b).zip(addend, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn shift_to_exponent(self) -> Self {
        Lanes4(self.0.map(|lane| f32::from_bits(lane.to_bits() << 23)))
    }
    #[inline(always)]
    unsafe fn select_greater(self, limit: Self, yes: Self, no: Self) -> Self {
        Lanes4(core::array::from_fn(|i| if self.0[i] > limit.0[i] { yes.0[i] } else { no.0[i] }))
    }
    #[inline(always)]
    unsafe fn any_greater(self, limit: Self) -> bool {
        (0..4).any(|i| self.0[i] > limit.0[i])
    }
}

super::table::table!(Lanes4);
