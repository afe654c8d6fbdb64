//! Vectors as arrays: runs anywhere; the compiler turns 8 lanes into NEON on aarch64.

use super::Simd;
use crate::bf16;

/// `N` lanes in an array; one lane serves head sizes that no vector divides.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable<const N: usize>;

/// Adding and subtracting 1.5 * 2^23 leaves the nearest integer, without a call into the maths library.
const ROUNDER: f32 = 12_582_912.0;

#[inline(always)]
fn fused(a: f32, b: f32, c: f32) -> f32 {
    // Without the instruction `mul_add` is a slow library call.
    if cfg!(any(target_arch = "aarch64", target_feature = "fma")) { a.mul_add(b, c) } else { a * b + c }
}

#[inline(always)]
fn zip<const N: usize>(a: [f32; N], b: [f32; N], f: impl Fn(f32, f32) -> f32) -> [f32; N] {
    std::array::from_fn(|lane| f(a[lane], b[lane]))
}

/// Folds halves onto each other; `N` is a power of two.
#[inline(always)]
fn fold<const N: usize>(mut vector: [f32; N], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = N;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            vector[lane] = f(vector[lane], vector[lane + width]);
        }
    }
    vector[0]
}

// SAFETY: plain Rust on arrays; the only unsafe operations are the loads and stores the callers vouch for.
unsafe impl<const N: usize> Simd for Portable<N> {
    const LANES: usize = N;
    const HAS_FUSED: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));
    const TILE_ROWS: usize = 6;
    /// The compiler unrolls arrays as it sees fit.
    const UNROLL: usize = 1;
    type Vector = [f32; N];

    #[inline(always)]
    unsafe fn splat(value: f32) -> [f32; N] {
        [value; N]
    }

    #[inline(always)]
    unsafe fn load(ptr: *const f32) -> [f32; N] {
        // SAFETY: the caller promises N readable elements; the array has the alignment of one.
        unsafe { ptr.cast::<[f32; N]>().read() }
    }

    #[inline(always)]
    unsafe fn load_bf16(ptr: *const u16) -> [f32; N] {
        // SAFETY: the caller promises N readable elements; the array has the alignment of one.
        unsafe { ptr.cast::<[u16; N]>().read() }.map(bf16::to_f32)
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(ptr: *const u16) -> [[f32; N]; 2] {
        // SAFETY: the caller promises 2 * N readable elements; the arrays have the alignment of one.
        let pairs = unsafe { ptr.cast::<[[u16; 2]; N]>().read() };
        [pairs.map(|pair| bf16::to_f32(pair[0])), pairs.map(|pair| bf16::to_f32(pair[1]))]
    }

    #[inline(always)]
    unsafe fn load_i8(ptr: *const i8) -> [f32; N] {
        // SAFETY: the caller promises N readable elements; the array has the alignment of one.
        unsafe { ptr.cast::<[i8; N]>().read() }.map(f32::from)
    }

    #[inline(always)]
    unsafe fn store(ptr: *mut f32, vector: [f32; N]) {
        // SAFETY: the caller promises N writable elements; the array has the alignment of one.
        unsafe { ptr.cast::<[f32; N]>().write(vector) }
    }

    #[inline(always)]
    unsafe fn add(a: [f32; N], b: [f32; N]) -> [f32; N] {
        zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn mul(a: [f32; N], b: [f32; N]) -> [f32; N] {
        zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    unsafe fn div(a: [f32; N], b: [f32; N]) -> [f32; N] {
        zip(a, b, |a, b| a / b)
    }

    #[inline(always)]
    unsafe fn mul_add(a: [f32; N], b: [f32; N], c: [f32; N]) -> [f32; N] {
        std::array::from_fn(|lane| fused(a[lane], b[lane], c[lane]))
    }

    #[inline(always)]
    unsafe fn max(a: [f32; N], b: [f32; N]) -> [f32; N] {
        zip(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    unsafe fn round(a: [f32; N]) -> [f32; N] {
        a.map(|x| (x + ROUNDER) - ROUNDER)
    }

    #[inline(always)]
    unsafe fn exp2_int(n: [f32; N]) -> [f32; N] {
        n.map(|n| {
            let exponent = (n as i32).clamp(-126, 127) + 127;
            f32::from_bits((exponent as u32) << 23)
        })
    }

    #[inline(always)]
    unsafe fn zero_below(x: [f32; N], limit: f32, value: [f32; N]) -> [f32; N] {
        zip(x, value, |x, value| if x < limit { 0.0 } else { value })
    }

    #[inline(always)]
    unsafe fn sum4(vectors: [[f32; N]; 4]) -> [f32; 4] {
        vectors.map(|vector| fold(vector, |a, b| a + b))
    }

    #[inline(always)]
    unsafe fn max_lane(vector: [f32; N]) -> f32 {
        // Keeps a NaN in the first lane, as the vector instruction does: `exp_one` relies on it.
        fold(vector, |a, b| if b > a { b } else { a })
    }
}
