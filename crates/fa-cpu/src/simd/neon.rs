//! NEON (AArch64): 4 lanes, 32 registers.
#![allow(unsafe_code)]

use core::arch::aarch64::*;

use super::vector::Vector;

#[derive(Clone, Copy)]
pub(super) struct F32x4(float32x4_t);

// SAFETY (every block below): the trait's contract, NEON present and pointers valid for 4 values.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Vector for F32x4 {
    const LANES: usize = 4;
    const ROWS: usize = 8;
    const COLUMNS: usize = 3;

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        unsafe { F32x4(vld1q_f32(from)) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { vst1q_f32(to, self.0) }
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        unsafe { F32x4(vdupq_n_f32(value)) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        unsafe { F32x4(vaddq_f32(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        unsafe { F32x4(vsubq_f32(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        unsafe { F32x4(vmulq_f32(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        unsafe { F32x4(vdivq_f32(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        unsafe { F32x4(vfmaq_f32(addend.0, self.0, factor.0)) }
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        unsafe { F32x4(vmaxq_f32(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        unsafe { F32x4(vminq_f32(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn shift_to_exponent(self) -> Self {
        unsafe { F32x4(vreinterpretq_f32_u32(vshlq_n_u32::<23>(vreinterpretq_u32_f32(self.0)))) }
    }
    #[inline(always)]
    unsafe fn select_greater(self, limit: Self, yes: Self, no: Self) -> Self {
        unsafe { F32x4(vbslq_f32(vcgtq_f32(self.0, limit.0), yes.0, no.0)) }
    }
    #[inline(always)]
    unsafe fn any_greater(self, limit: Self) -> bool {
        unsafe { vmaxvq_u32(vcgtq_f32(self.0, limit.0)) != 0 }
    }
}

super::table::table!(F32x4, "neon");
