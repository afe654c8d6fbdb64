//! Sums of products of integers on x86-64.

use std::arch::x86_64::{
    __m256, __m256i, __m512, __m512i, _mm256_add_epi32, _mm256_cvtepi32_ps, _mm256_loadu_si256, _mm256_madd_epi16,
    _mm256_maddubs_epi16, _mm256_set1_epi16, _mm256_set1_epi32, _mm512_add_epi32, _mm512_cvtepi32_ps,
    _mm512_dpbusd_epi32, _mm512_loadu_si512, _mm512_madd_epi16, _mm512_maddubs_epi16, _mm512_set1_epi16,
    _mm512_set1_epi32,
};

use super::dot::Dot;
use super::x86::{Avx2, Avx512};

/// AVX-512 with VNNI; needs `avx512vnni` besides what [`Avx512`] needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Vnni;

// SAFETY: all methods need no more than `avx2`; loads are unaligned ones.
unsafe impl Dot for Avx2 {
    type Numbers = Self;
    type Sums = __m256i;
    type Bytes = __m256i;
    const TILE_ROWS: usize = 5;

    #[inline(always)]
    unsafe fn start(offset: i32) -> __m256i {
        // SAFETY: the caller promises the instruction set.
        unsafe { _mm256_set1_epi32(offset) }
    }

    #[inline(always)]
    unsafe fn weights(ptr: *const u8) -> [__m256i; 2] {
        // SAFETY: the caller promises the instruction set and 64 readable bytes.
        unsafe { [_mm256_loadu_si256(ptr.cast()), _mm256_loadu_si256(ptr.add(32).cast())] }
    }

    #[inline(always)]
    unsafe fn inputs(ptr: *const i8) -> __m256i {
        // SAFETY: the caller promises the instruction set and four readable inputs.
        unsafe { _mm256_set1_epi32(ptr.cast::<i32>().read_unaligned()) }
    }

    #[inline(always)]
    unsafe fn add(sums: __m256i, weights: __m256i, inputs: __m256i) -> __m256i {
        // SAFETY: the caller promises the instruction set. Nothing saturates, see `dot.rs`.
        unsafe {
            let pairs = _mm256_madd_epi16(_mm256_maddubs_epi16(weights, inputs), _mm256_set1_epi16(1));
            _mm256_add_epi32(sums, pairs)
        }
    }

    #[inline(always)]
    unsafe fn to_numbers(sums: __m256i) -> __m256 {
        // SAFETY: the caller promises the instruction set.
        unsafe { _mm256_cvtepi32_ps(sums) }
    }
}

// SAFETY: all methods need no more than `avx512f` and `avx512bw`; loads are unaligned ones.
unsafe impl Dot for Avx512 {
    type Numbers = Self;
    type Sums = __m512i;
    type Bytes = __m512i;
    const TILE_ROWS: usize = 12;

    #[inline(always)]
    unsafe fn start(offset: i32) -> __m512i {
        // SAFETY: the caller promises the instruction set.
        unsafe { _mm512_set1_epi32(offset) }
    }

    #[inline(always)]
    unsafe fn weights(ptr: *const u8) -> [__m512i; 2] {
        // SAFETY: the caller promises the instruction set and 128 readable bytes.
        unsafe { [_mm512_loadu_si512(ptr.cast()), _mm512_loadu_si512(ptr.add(64).cast())] }
    }

    #[inline(always)]
    unsafe fn inputs(ptr: *const i8) -> __m512i {
        // SAFETY: the caller promises the instruction set and four readable inputs.
        unsafe { _mm512_set1_epi32(ptr.cast::<i32>().read_unaligned()) }
    }

    #[inline(always)]
    unsafe fn add(sums: __m512i, weights: __m512i, inputs: __m512i) -> __m512i {
        // SAFETY: the caller promises the instruction set. Nothing saturates, see `dot.rs`.
        unsafe {
            let pairs = _mm512_madd_epi16(_mm512_maddubs_epi16(weights, inputs), _mm512_set1_epi16(1));
            _mm512_add_epi32(sums, pairs)
        }
    }

    #[inline(always)]
    unsafe fn to_numbers(sums: __m512i) -> __m512 {
        // SAFETY: the caller promises the instruction set.
        unsafe { _mm512_cvtepi32_ps(sums) }
    }
}

// SAFETY: all methods need no more than `avx512f` and `avx512vnni`; those of `Avx512` that it calls need `avx512f` only.
unsafe impl Dot for Vnni {
    type Numbers = Avx512;
    type Sums = __m512i;
    type Bytes = __m512i;
    const TILE_ROWS: usize = <Avx512 as Dot>::TILE_ROWS;

    #[inline(always)]
    unsafe fn start(offset: i32) -> __m512i {
        // SAFETY: the contract is the same.
        unsafe { Avx512::start(offset) }
    }

    #[inline(always)]
    unsafe fn weights(ptr: *const u8) -> [__m512i; 2] {
        // SAFETY: the contract is the same.
        unsafe { Avx512::weights(ptr) }
    }

    #[inline(always)]
    unsafe fn inputs(ptr: *const i8) -> __m512i {
        // SAFETY: the contract is the same.
        unsafe { Avx512::inputs(ptr) }
    }

    #[inline(always)]
    unsafe fn add(sums: __m512i, weights: __m512i, inputs: __m512i) -> __m512i {
        // SAFETY: the caller promises the instruction set.
        // It takes bytes without a sign, then such with one, and does not saturate.
        unsafe { _mm512_dpbusd_epi32(sums, weights, inputs) }
    }

    #[inline(always)]
    unsafe fn to_numbers(sums: __m512i) -> __m512 {
        // SAFETY: the contract is the same.
        unsafe { Avx512::to_numbers(sums) }
    }
}
