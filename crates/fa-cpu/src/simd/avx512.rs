//! AVX-512 registers: 16 lanes, 32 registers, two fused multiply-adds per cycle on server cores.
#![allow(unsafe_code)]

use core::arch::x86_64::*;

use super::vector::Vector;

#[derive(Clone, Copy)]
pub(super) struct F32x16(pub(super) __m512);

// SAFETY (every block below): the trait's contract, AVX-512 F and DQ present and pointers valid for 16
// values.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Vector for F32x16 {
    const LANES: usize = 16;
    const ROWS: usize = 8;
    const COLUMNS: usize = 3;

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        unsafe { F32x16(_mm512_loadu_ps(from)) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { _mm512_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        unsafe { F32x16(_mm512_set1_ps(value)) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        unsafe { F32x16(_mm512_add_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        unsafe { F32x16(_mm512_sub_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        unsafe { F32x16(_mm512_mul_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        unsafe { F32x16(_mm512_div_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        unsafe { F32x16(_mm512_fmadd_ps(self.0, factor.0, addend.0)) }
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        unsafe { F32x16(_mm512_max_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn shift_to_exponent(self) -> Self {
        unsafe { F32x16(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(self.0)))) }
    }
    #[inline(always)]
    unsafe fn select_greater(self, limit: Self, yes: Self, no: Self) -> Self {
        unsafe {
            let greater = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.0, limit.0);
            F32x16(_mm512_mask_blend_ps(greater, no.0, yes.0))
        }
    }
    #[inline(always)]
    unsafe fn any_greater(self, limit: Self) -> bool {
        unsafe { _mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.0, limit.0) != 0 }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        unsafe { _mm512_reduce_add_ps(self.0) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            F32x16(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        unsafe { F32x16(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        unsafe {
            let bits = _mm512_castps_si512(self.0);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
            // A NaN stays one, quiet.
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
            let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
            let words = _mm512_srli_epi32::<16>(_mm512_mask_blend_epi32(nan, rounded, quiet));
            _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(words));
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16) {
        unsafe {
            let halves = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0);
            _mm256_storeu_si256(to.cast(), halves);
        }
    }
    #[inline(always)]
    unsafe fn transpose(from: *const u32, ld_from: usize, to: *mut u32, ld_to: usize) {
        unsafe {
            let mut rows = [_mm512_setzero_si512(); 16];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = _mm512_loadu_si512(from.add(i * ld_from).cast());
            }
            // Pairs of rows, then fours, within each 128-bit quarter; then the quarters themselves, twice.
            let mut fours = [_mm512_setzero_si512(); 16];
            for i in (0..16).step_by(4) {
                let (a, b, c, d) = (rows[i], rows[i + 1], rows[i + 2], rows[i + 3]);
                let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
                fours[i] = _mm512_unpacklo_epi64(ab, cd);
                fours[i + 1] = _mm512_unpackhi_epi64(ab, cd);
                let (ab, cd) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
                fours[i + 2] = _mm512_unpacklo_epi64(ab, cd);
                fours[i + 3] = _mm512_unpackhi_epi64(ab, cd);
            }
            for j in 0..4 {
                let (a, b, c, d) = (fours[j], fours[j + 4], fours[j + 8], fours[j + 12]);
                let (even_ab, odd_ab) =
                    (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b));
                let (even_cd, odd_cd) =
                    (_mm512_shuffle_i32x4::<0x88>(c, d), _mm512_shuffle_i32x4::<0xdd>(c, d));
                let columns = [
                    _mm512_shuffle_i32x4::<0x88>(even_ab, even_cd),
                    _mm512_shuffle_i32x4::<0x88>(odd_ab, odd_cd),
                    _mm512_shuffle_i32x4::<0xdd>(even_ab, even_cd),
                    _mm512_shuffle_i32x4::<0xdd>(odd_ab, odd_cd),
                ];
                for (quarter, column) in columns.into_iter().enumerate() {
                    _mm512_storeu_si512(to.add((4 * quarter + j) * ld_to).cast(), column);
                }
            }
        }
    }
}

super::table::table!(F32x16, "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma");
