//! AVX-512 registers: 16 lanes, 32 registers, two fused multiply-adds per cycle on server cores.
#![allow(unsafe_code)]

use core::arch::x86_64::*;

use super::vector::Vector;

#[derive(Clone, Copy)]
pub(super) struct F32x16(pub(super) __m512);

/// The first `count` of 16 lanes.
#[inline(always)]
fn first(count: usize) -> __mmask16 {
    ((1u32 << count) - 1) as __mmask16
}

/// 16 bf16 numbers as f32: they are its upper halves.
#[inline(always)]
unsafe fn widen_bf16(numbers: __m256i) -> F32x16 {
    // SAFETY: register operations; the caller vouches for AVX-512.
    unsafe { F32x16(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(numbers)))) }
}

/// The sum of register `i` in lane `i`: registers are added as they are transposed, 45 instructions in all.
#[inline(always)]
unsafe fn sixteen_sums(registers: &[__m512; 16]) -> __m512 {
    // SAFETY: register operations; the caller vouches for AVX-512.
    unsafe {
        // Within each quarter, two registers to one and again two to one. (No closures: they would be calls.)
        let mut halves = [_mm512_setzero_ps(); 8];
        for (half, pair) in halves.iter_mut().zip(registers.chunks_exact(2)) {
            let (low, high) = (_mm512_unpacklo_ps(pair[0], pair[1]), _mm512_unpackhi_ps(pair[0], pair[1]));
            *half = _mm512_add_ps(low, high);
        }
        let mut quarters = [_mm512_setzero_ps(); 4];
        for (quarter, pair) in quarters.iter_mut().zip(halves.chunks_exact(2)) {
            let (a, b) = (_mm512_castps_pd(pair[0]), _mm512_castps_pd(pair[1]));
            let (low, high) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
            *quarter = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
        }
        // Then the quarters.
        let [a, b, c, d] = quarters;
        let ab = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
        let cd = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
        _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xdd>(ab, cd))
    }
}

// SAFETY (every block below): the trait's contract, AVX-512 F and DQ present and pointers valid for 16
// values.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Vector for F32x16 {
    const LANES: usize = 16;
    const ROWS: usize = 8;
    const COLUMNS: usize = 3;
    const PREFETCHES: bool = true;

    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
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
    unsafe fn min(self, other: Self) -> Self {
        unsafe { F32x16(_mm512_min_ps(self.0, other.0)) }
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
    unsafe fn sums<const N: usize>(registers: [Self; N]) -> [f32; N] {
        unsafe {
            let (mut sums, mut all) = ([0.0; N], [_mm512_setzero_ps(); 16]);
            for (from, to) in registers.chunks(16).zip(sums.chunks_mut(16)) {
                for (all, one) in all.iter_mut().zip(from) {
                    *all = one.0;
                }
                let mut lanes = [0.0; 16];
                _mm512_storeu_ps(lanes.as_mut_ptr(), sixteen_sums(&all));
                to.copy_from_slice(&lanes[..to.len()]);
            }
            sums
        }
    }
    #[inline(always)]
    unsafe fn load_part(from: *const f32, count: usize) -> Self {
        unsafe { F32x16(_mm512_maskz_loadu_ps(first(count), from)) }
    }
    #[inline(always)]
    unsafe fn load_part_bf16(from: *const u16, count: usize) -> Self {
        unsafe { widen_bf16(_mm256_maskz_loadu_epi16(first(count), from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_part_f16(from: *const u16, count: usize) -> Self {
        unsafe { F32x16(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(count), from.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        unsafe { widen_bf16(_mm256_loadu_si256(from.cast())) }
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
