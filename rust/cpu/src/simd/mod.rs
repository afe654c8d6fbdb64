//! The few vector operations that attention needs, and the exponential function built from them.
//!
//! The kernels are written once, generic over [`Simd`], and compiled once per instruction set: every function here
//! is `inline(always)` and ends up inside a function with the right `target_feature` (see `dispatch.rs`).
//!
//! Invariants:
//! 1. Within one instruction set each operation works lane by lane with a fixed result, and the reductions add in a
//!    fixed order: the blocking of the loops around them never changes a bit.

pub(crate) mod dot;
#[cfg(target_arch = "x86_64")]
pub(crate) mod dot_x86;
pub(crate) mod portable;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86;

/// Vectors of `LANES` numbers.
///
/// # Safety
/// A type promises that its methods are sound on every CPU that has its instruction set. Callers promise that
/// the running CPU has it, and that pointers are valid for `LANES` elements.
pub(crate) unsafe trait Simd: Copy {
    /// Numbers in a vector.
    const LANES: usize;
    /// Whether `a * b + c` of single numbers is one instruction, too.
    const HAS_FUSED: bool;
    /// Rows of a tile of a matrix product: with two vectors a row its sums, the weights and an input fill the registers.
    const TILE_ROWS: usize;
    /// Inputs of a matrix product between two jumps: a jump and the addresses cost as many instructions as a third of an
    /// input's work.
    const UNROLL: usize;
    /// One vector.
    type Vector: Copy;

    /// Returns a vector of one number.
    unsafe fn splat(value: f32) -> Self::Vector;
    /// Loads `LANES` numbers; no alignment needed.
    unsafe fn load(ptr: *const f32) -> Self::Vector;
    /// Loads and widens `LANES` bf16 numbers; no alignment needed.
    unsafe fn load_bf16(ptr: *const u16) -> Self::Vector;
    /// Loads and widens `2 * LANES` bf16 numbers that lie in pairs: number `i` of the first vector, then number `i` of the
    /// second. Two vectors of the same width without moving a number across lanes.
    unsafe fn load_bf16_pairs(ptr: *const u16) -> [Self::Vector; 2];
    /// Loads and widens `LANES` whole numbers; no alignment needed.
    unsafe fn load_i8(ptr: *const i8) -> Self::Vector;
    /// Stores `LANES` numbers; no alignment needed.
    unsafe fn store(ptr: *mut f32, vector: Self::Vector);
    /// `a + b`.
    unsafe fn add(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a * b`.
    unsafe fn mul(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a / b`.
    unsafe fn div(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a * b + c`, fused where the instruction set can.
    unsafe fn mul_add(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// The greater of each pair; which one it is for NaN is not specified.
    unsafe fn max(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// Rounds to the nearest integer, ties to even.
    unsafe fn round(a: Self::Vector) -> Self::Vector;
    /// `2^n` for integers `n` in -126..=127; some finite number for anything else.
    unsafe fn exp2_int(n: Self::Vector) -> Self::Vector;
    /// `value` where not `x < limit` (so also where `x` is NaN), else 0.
    unsafe fn zero_below(x: Self::Vector, limit: f32, value: Self::Vector) -> Self::Vector;
    /// Adds all lanes of each of four vectors.
    unsafe fn sum4(vectors: [Self::Vector; 4]) -> [f32; 4];
    /// The greatest lane.
    unsafe fn max_lane(vector: Self::Vector) -> f32;
}

/// Below this the exponential is returned as 0; `e^-87` is just above the smallest normal number.
const EXP_ZERO_BELOW: f32 = -87.0;
/// ln 2 in two parts: the first has few bits, so that its product with an exponent is exact.
const LN_2_HIGH: f32 = 355.0 / 512.0;
const LN_2_LOW: f32 = (std::f64::consts::LN_2 - 355.0 / 512.0) as f32;
/// `1 / k!` for k = 7 down to 0: the Taylor polynomial, whose error on `|r| <= ln 2 / 2` is below 1e-8.
const EXP_COEFFICIENTS: [f32; 8] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];

/// `e^x` for `x <= 0`, within 2 units in the last place; exactly 1 for 0, exactly 0 below -87, NaN for NaN.
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::Vector) -> S::Vector {
    // SAFETY: the caller promises that the CPU has the instruction set; no pointers.
    unsafe {
        let n = S::round(S::mul(x, S::splat(std::f32::consts::LOG2_E)));
        let r = S::mul_add(n, S::splat(-LN_2_HIGH), x);
        let r = S::mul_add(n, S::splat(-LN_2_LOW), r);
        let mut power = S::splat(EXP_COEFFICIENTS[0]);
        for coefficient in &EXP_COEFFICIENTS[1..] {
            power = S::mul_add(power, r, S::splat(*coefficient));
        }
        S::zero_below(x, EXP_ZERO_BELOW, S::mul(power, S::exp2_int(n)))
    }
}

/// `e^x` of one number, with the bits that a lane of [`exp`] has.
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
pub(crate) unsafe fn exp_one<S: Simd>(x: f32) -> f32 {
    // SAFETY: as in `exp`; every lane holds the same number.
    unsafe { S::max_lane(exp::<S>(S::splat(x))) }
}

/// `x / (1 + e^-slope_x)`: SiLU for `slope_x = x`, GELU by its tanh form for `slope_x = 2 sqrt(2 / pi) (x + 0.044715 x^3)`.
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
pub(crate) unsafe fn gate<S: Simd>(x: S::Vector, slope_x: S::Vector) -> S::Vector {
    // SAFETY: as in `exp`.
    unsafe {
        let (one, minus) = (S::splat(1.0), S::splat(-1.0));
        // e^-|s|, which cannot overflow; the sigmoid is 1 / (1 + e) for s >= 0, and e / (1 + e) below.
        let negated = S::mul(slope_x, minus);
        let e = exp::<S>(S::mul(S::max(slope_x, negated), minus));
        let numerator = S::add(e, S::zero_below(slope_x, 0.0, S::add(one, S::mul(e, minus))));
        S::mul(x, S::div(numerator, S::add(one, e)))
    }
}

/// Adds all lanes of one vector, in the order of [`Simd::sum4`].
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
pub(crate) unsafe fn sum<S: Simd>(vector: S::Vector) -> f32 {
    // SAFETY: as in `exp`.
    unsafe { S::sum4([vector; 4])[0] }
}

/// Bytes that one cache line holds on the CPUs that matter here; another size only wastes or misses hints.
pub(crate) const CACHE_LINE: usize = 64;

/// Asks for the line of an address to be brought near; only a hint, any address is fine.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn prefetch_line(address: *const i8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: SSE, which every x86-64 CPU has; a prefetch never faults.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address) };
}

/// There is no stable hint for other CPUs.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
pub(crate) fn prefetch_line(_: *const i8) {}

#[cfg(test)]
#[allow(clippy::float_cmp, reason = "the numbers are small integers")]
mod tests {
    use super::portable::Portable;
    use super::*;

    /// Checks one instruction set against `std` on numbers that span the range.
    ///
    /// # Safety
    /// As for [`Simd`].
    unsafe fn check<S: Simd>() {
        let mut inputs: Vec<f32> = (0..=8700).map(|i| -(i as f32) * 0.01).collect();
        inputs.extend([-0.0, -1e-30, -f32::EPSILON]);
        for x in inputs {
            // SAFETY: passed on.
            let got = unsafe { exp_one::<S>(x) };
            let expected = f64::from(x).exp();
            let error = (f64::from(got) - expected).abs() / expected;
            assert!(error < 2.5e-7, "exp({x}) = {got}, expected {expected}");
        }
        // SAFETY: passed on.
        unsafe {
            assert_eq!(exp_one::<S>(0.0).to_bits(), 1f32.to_bits());
            assert_eq!(exp_one::<S>(f32::NEG_INFINITY).to_bits(), 0);
            assert_eq!(exp_one::<S>(-1e30).to_bits(), 0);
            assert!(exp_one::<S>(f32::NAN).is_nan());
        }
        for x in [-200.0, -87.5, -20.0, -3.0, -0.5, -0.0, 0.0, 1e-3, 0.7, 5.0, 86.0, 1e4_f32] {
            // SAFETY: passed on.
            let got = unsafe { S::max_lane(gate::<S>(S::splat(x), S::splat(x))) };
            let expected = f64::from(x) / (1.0 + (-f64::from(x)).exp());
            assert!((f64::from(got) - expected).abs() <= 5e-7 * expected.abs() + 1e-30, "{x}: {got}, not {expected}");
        }
        // SAFETY: passed on.
        assert!(unsafe { S::max_lane(gate::<S>(S::splat(f32::NAN), S::splat(f32::NAN))) }.is_nan());
        let numbers: Vec<f32> = (0..4 * S::LANES).map(|i| (i * i % 37) as f32 - 9.0).collect();
        let bits: Vec<u16> = numbers.iter().map(|x| crate::bf16::from_f32(*x)).collect();
        // SAFETY: passed on; vector `c` spans elements `c * LANES..(c + 1) * LANES` of arrays of 4 * LANES.
        unsafe {
            let at = |c: usize| S::load(numbers.as_ptr().add(c * S::LANES));
            let sums = S::sum4([at(0), at(1), at(2), at(3)]);
            for (c, chunk) in numbers.chunks(S::LANES).enumerate() {
                assert_eq!(sums[c], chunk.iter().sum::<f32>());
                assert_eq!(sum::<S>(at(c)).to_bits(), sums[c].to_bits());
                let greatest = chunk.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                assert_eq!(S::max_lane(at(c)), greatest);
                let mut widened = vec![f32::NAN; S::LANES];
                S::store(widened.as_mut_ptr(), S::load_bf16(bits.as_ptr().add(c * S::LANES)));
                assert_eq!(widened, chunk);
                let whole: Vec<i8> = chunk.iter().map(|x| *x as i8).collect();
                S::store(widened.as_mut_ptr(), S::load_i8(whole.as_ptr()));
                assert_eq!(widened, chunk);
                let pairs: Vec<u16> = (0..2 * S::LANES).map(|i| bits[i / 2 + i % 2 * S::LANES]).collect();
                for (half, vector) in S::load_bf16_pairs(pairs.as_ptr()).into_iter().enumerate() {
                    S::store(widened.as_mut_ptr(), vector);
                    assert_eq!(widened, numbers[half * S::LANES..][..S::LANES]);
                }
                S::store(widened.as_mut_ptr(), S::div(at(c), S::splat(4.0)));
                assert_eq!(widened, chunk.iter().map(|x| x / 4.0).collect::<Vec<_>>());
                let mut combined = vec![f32::NAN; S::LANES];
                let sum = S::mul_add(at(c), S::splat(3.0), S::max(at(c), at(0)));
                S::store(combined.as_mut_ptr(), S::add(sum, S::mul(at(0), at(c))));
                for (lane, x) in chunk.iter().enumerate() {
                    let first = numbers[lane];
                    assert_eq!(combined[lane], x * 3.0 + x.max(first) + first * x);
                }
            }
        }
    }

    #[test]
    fn portable_vectors_compute_what_they_say() {
        // SAFETY: needs no instruction set.
        unsafe {
            check::<Portable<1>>();
            check::<Portable<8>>();
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn x86_vectors_compute_what_they_say_where_the_cpu_has_them() {
        #[target_feature(enable = "avx2,fma")]
        fn avx2() {
            // SAFETY: this function has the features.
            unsafe { check::<x86::Avx2>() }
        }
        #[target_feature(enable = "avx512f,avx2,fma")]
        fn avx512() {
            // SAFETY: this function has the features.
            unsafe { check::<x86::Avx512>() }
        }
        if crate::Isa::Avx2.is_available() {
            // SAFETY: detected just now.
            unsafe { avx2() }
        }
        if crate::Isa::Avx512.is_available() {
            // SAFETY: detected just now.
            unsafe { avx512() }
        }
    }
}
