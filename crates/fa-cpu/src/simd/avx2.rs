//! AVX2 with FMA and F16C: 8 lanes, 16 registers.
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
    const PREFETCHES: bool = true;

    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
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
    unsafe fn min(self, other: Self) -> Self {
        unsafe { F32x8(_mm256_min_ps(self.0, other.0)) }
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
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        unsafe {
            let half = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        unsafe {
            let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            F32x8(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(words)))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        unsafe { F32x8(_mm256_cvtph_ps(_mm_loadu_si128(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        unsafe {
            let bits = _mm256_castps_si256(self.0);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
            // A NaN stays one, quiet.
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(self.0, self.0));
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
            let words = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan));
            let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(words, words));
            _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(packed));
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16) {
        unsafe {
            let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0);
            _mm_storeu_si128(to.cast(), halves);
        }
    }
}

super::table::table!(F32x8, "avx2,fma,f16c");
