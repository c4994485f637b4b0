//! AVX2 with FMA: 8 lanes, 16 registers.
#![allow(unsafe_code)]

use core::arch::x86_64::*;

use super::vector::Vector;

#[derive(Clone, Copy)]
pub(super) struct F32x8(__m256);

// SAFETY (every block below): the trait's contract, AVX2 and FMA present and pointers valid for 8 values.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Vector for F32x8 {
    const LANES: usize = 8;
    const ROWS: usize = 6;
    const COLUMNS: usize = 2;

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        unsafe { F32x8(_mm256_loadu_ps(from)) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { _mm256_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        unsafe { F32x8(_mm256_set1_ps(value)) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        unsafe { F32x8(_mm256_add_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        unsafe { F32x8(_mm256_sub_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        unsafe { F32x8(_mm256_mul_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        unsafe { F32x8(_mm256_div_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        unsafe { F32x8(_mm256_fmadd_ps(self.0, factor.0, addend.0)) }
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        unsafe { F32x8(_mm256_max_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn shift_to_exponent(self) -> Self {
        unsafe { F32x8(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(self.0)))) }
    }
    #[inline(always)]
    unsafe fn select_greater(self, limit: Self, yes: Self, no: Self) -> Self {
        unsafe {
            let greater = _mm256_cmp_ps::<_CMP_GT_OQ>(self.0, limit.0);
            F32x8(_mm256_blendv_ps(no.0, yes.0, greater))
        }
    }
    #[inline(always)]
    unsafe fn any_greater(self, limit: Self) -> bool {
        unsafe { _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(self.0, limit.0)) != 0 }
    }
}

super::table::table!(F32x8, "avx2,fma");
