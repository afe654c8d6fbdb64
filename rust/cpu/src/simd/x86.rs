//! AVX2 with FMA, and AVX-512.

use std::arch::x86_64::{
    __m128, __m256, __m512, _CMP_NLT_UQ, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT, _mm_add_ps, _mm_cvtss_f32,
    _mm_loadl_epi64, _mm_loadu_si128, _mm_max_ps, _mm_movehdup_ps, _mm_movehl_ps, _mm_storeu_ps, _mm256_add_epi32,
    _mm256_add_ps, _mm256_and_ps, _mm256_and_si256, _mm256_castpd_ps, _mm256_castps256_ps128, _mm256_castsi256_ps,
    _mm256_cmp_ps, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps, _mm256_cvtepu16_epi32, _mm256_cvtps_epi32, _mm256_div_ps,
    _mm256_extractf128_ps, _mm256_fmadd_ps, _mm256_hadd_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_max_ps,
    _mm256_mul_ps, _mm256_round_ps, _mm256_set1_epi32, _mm256_set1_ps, _mm256_slli_epi32, _mm256_storeu_ps,
    _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512, _mm512_castps_pd, _mm512_castps512_ps256, _mm512_castsi512_ps,
    _mm512_cmp_ps_mask, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_cvtepu16_epi32, _mm512_cvtps_epi32,
    _mm512_div_ps, _mm512_extractf64x4_pd, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_maskz_mov_ps,
    _mm512_max_ps, _mm512_mul_ps, _mm512_roundscale_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_slli_epi32,
    _mm512_storeu_ps,
};

use super::Simd;

/// 8 lanes; needs `avx2` and `fma`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2;

/// 16 lanes; needs `avx512f` besides `avx2` and `fma`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512;

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

#[inline(always)]
unsafe fn max_of_four(vector: __m128) -> f32 {
    // SAFETY: SSE, which every x86-64 CPU has (`movehdup` is SSE3, part of AVX2).
    unsafe {
        let pairs = _mm_max_ps(vector, _mm_movehl_ps(vector, vector));
        _mm_cvtss_f32(_mm_max_ps(pairs, _mm_movehdup_ps(pairs)))
    }
}

// SAFETY: all methods need no more than `avx2` and `fma`; loads and stores are unaligned ones.
unsafe impl Simd for Avx2 {
    const LANES: usize = 8;
    const HAS_FUSED: bool = true;
    const TILE_ROWS: usize = 6;
    const UNROLL: usize = 4;
    type Vector = __m256;

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m256 {
        // SAFETY: the caller promises the instruction set.
        unsafe { _mm256_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn load(ptr: *const f32) -> __m256 {
        // SAFETY: the caller promises the instruction set and 8 readable elements.
        unsafe { _mm256_loadu_ps(ptr) }
    }

    #[inline(always)]
    unsafe fn load_bf16(ptr: *const u16) -> __m256 {
        // SAFETY: the caller promises the instruction set and 8 readable elements, which are 16 bytes.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(ptr.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(ptr: *const u16) -> [__m256; 2] {
        // SAFETY: the caller promises the instruction set and 16 readable elements.
        unsafe {
            let pairs = _mm256_loadu_si256(ptr.cast());
            let first = _mm256_slli_epi32::<16>(pairs);
            let second = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000_u32 as i32));
            [_mm256_castsi256_ps(first), _mm256_castsi256_ps(second)]
        }
    }

    #[inline(always)]
    unsafe fn load_i8(ptr: *const i8) -> __m256 {
        // SAFETY: the caller promises the instruction set and 8 readable elements, which are 8 bytes.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(ptr.cast()))) }
    }

    #[inline(always)]
    unsafe fn store(ptr: *mut f32, vector: __m256) {
        // SAFETY: the caller promises the instruction set and 8 writable elements.
        unsafe { _mm256_storeu_ps(ptr, vector) }
    }

    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the caller promises the instruction set.
        unsafe { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the caller promises the instruction set.
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the caller promises the instruction set.
        unsafe { _mm256_div_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul_add(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: the caller promises the instruction set.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the caller promises the instruction set.
        unsafe { _mm256_max_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn round(a: __m256) -> __m256 {
        // SAFETY: the caller promises the instruction set.
        unsafe { _mm256_round_ps::<NEAREST>(a) }
    }

    #[inline(always)]
    unsafe fn exp2_int(n: __m256) -> __m256 {
        // SAFETY: the caller promises the instruction set.
        unsafe {
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
        }
    }

    #[inline(always)]
    unsafe fn zero_below(x: __m256, limit: f32, value: __m256) -> __m256 {
        // SAFETY: the caller promises the instruction set.
        unsafe { _mm256_and_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(x, _mm256_set1_ps(limit)), value) }
    }

    #[inline(always)]
    unsafe fn sum4([a, b, c, d]: [__m256; 4]) -> [f32; 4] {
        let mut sums = [0.0; 4];
        // SAFETY: the caller promises the instruction set; `sums` has room for 4 numbers.
        unsafe {
            // Each half of `quads` ends up as the sums of that half of a, b, c, d.
            let quads = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
            let total = _mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps::<1>(quads));
            _mm_storeu_ps(sums.as_mut_ptr(), total);
        }
        sums
    }

    #[inline(always)]
    unsafe fn max_lane(vector: __m256) -> f32 {
        // SAFETY: the caller promises the instruction set.
        unsafe {
            let (low, high) = (_mm256_castps256_ps128(vector), _mm256_extractf128_ps::<1>(vector));
            max_of_four(_mm_max_ps(low, high))
        }
    }
}

#[inline(always)]
unsafe fn halves(vector: __m512) -> (__m256, __m256) {
    // SAFETY: the caller promises AVX-512. The cast to f64 and back moves bits only: the extract for f32
    // would need a further extension.
    unsafe {
        let high = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd(vector));
        (_mm512_castps512_ps256(vector), _mm256_castpd_ps(high))
    }
}

// SAFETY: all methods need no more than `avx512f`, `avx2` and `fma`; loads and stores are unaligned ones.
unsafe impl Simd for Avx512 {
    const LANES: usize = 16;
    const HAS_FUSED: bool = true;
    const TILE_ROWS: usize = 12;
    const UNROLL: usize = 2;
    type Vector = __m512;

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m512 {
        // SAFETY: the caller promises the instruction set.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn load(ptr: *const f32) -> __m512 {
        // SAFETY: the caller promises the instruction set and 16 readable elements.
        unsafe { _mm512_loadu_ps(ptr) }
    }

    #[inline(always)]
    unsafe fn load_bf16(ptr: *const u16) -> __m512 {
        // SAFETY: the caller promises the instruction set and 16 readable elements, which are 32 bytes.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(ptr.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(ptr: *const u16) -> [__m512; 2] {
        // SAFETY: the caller promises the instruction set and 32 readable elements.
        unsafe {
            let pairs = _mm512_loadu_si512(ptr.cast());
            let first = _mm512_slli_epi32::<16>(pairs);
            let second = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            [_mm512_castsi512_ps(first), _mm512_castsi512_ps(second)]
        }
    }

    #[inline(always)]
    unsafe fn load_i8(ptr: *const i8) -> __m512 {
        // SAFETY: the caller promises the instruction set and 16 readable elements, which are 16 bytes.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(ptr.cast()))) }
    }

    #[inline(always)]
    unsafe fn store(ptr: *mut f32, vector: __m512) {
        // SAFETY: the caller promises the instruction set and 16 writable elements.
        unsafe { _mm512_storeu_ps(ptr, vector) }
    }

    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller promises the instruction set.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller promises the instruction set.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller promises the instruction set.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: the caller promises the instruction set.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller promises the instruction set.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn round(a: __m512) -> __m512 {
        // SAFETY: the caller promises the instruction set. The immediate's upper half, 0, keeps 0 fraction bits.
        unsafe { _mm512_roundscale_ps::<NEAREST>(a) }
    }

    #[inline(always)]
    unsafe fn exp2_int(n: __m512) -> __m512 {
        // SAFETY: the caller promises the instruction set.
        unsafe {
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        }
    }

    #[inline(always)]
    unsafe fn zero_below(x: __m512, limit: f32, value: __m512) -> __m512 {
        // SAFETY: the caller promises the instruction set.
        unsafe {
            let kept = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(limit));
            _mm512_maskz_mov_ps(kept, value)
        }
    }

    #[inline(always)]
    unsafe fn sum4(vectors: [__m512; 4]) -> [f32; 4] {
        // SAFETY: the caller promises the instruction set, which includes AVX2.
        unsafe {
            Avx2::sum4(vectors.map(|vector| {
                let (low, high) = halves(vector);
                Avx2::add(low, high)
            }))
        }
    }

    #[inline(always)]
    unsafe fn max_lane(vector: __m512) -> f32 {
        // SAFETY: the caller promises the instruction set, which includes AVX2.
        unsafe {
            let (low, high) = halves(vector);
            Avx2::max_lane(Avx2::max(low, high))
        }
    }
}
