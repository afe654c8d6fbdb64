//! Whole passes over a row. The loops are plain: the compiler makes vectors of them, with the instruction set of the caller.
//!
//! Invariants:
//! 1. Rows are taken in blocks of [`BLOCK`] ids from id 0, the last one shorter; sums add lane by lane within a block, then block
//!    by block.

use crate::simd::{Simd, exp, sum};

/// Ids in a block.
pub(super) const BLOCK: usize = 64;

/// Below this exponent a weight counts as 0; it is so small that no sum would show it.
const LEAST_EXPONENT: f64 = -700.0;

/// Adding 1.5 * 2^52 leaves the nearest integer in the lowest bits.
const ROUNDER: f64 = 6_755_399_441_055_744.0;
/// ln 2 in two parts: the first has 21 zero bits at the end, so that its product with an exponent is exact.
const LN_2_HIGH: f64 = 0.693_147_180_369_123_8;
const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;
/// Bits of an f64 below its exponent.
const MANTISSA_BITS: u32 = 52;
/// Exponent bits of 1.
const EXPONENT_BIAS: u64 = 1023;

/// `1 / k!` for k = 13 down to 0: on `|r| <= ln 2 / 2` the rest of the series is below 1e-17.
const COEFFICIENTS: [f64; 14] = coefficients();

const fn coefficients() -> [f64; 14] {
    let mut result = [1.0; 14];
    let (mut k, mut factorial) = (1, 1.0);
    while k < 14 {
        factorial *= k as f64;
        result[13 - k] = 1.0 / factorial;
        k += 1;
    }
    result
}

/// Puts the largest of each block into `block_largest` and returns the largest of all; `None` if that is no finite number, or
/// if one of `scores` is NaN.
#[inline(always)]
pub(super) fn largest(scores: &[f32], block_largest: &mut Vec<f32>) -> Option<f32> {
    block_largest.clear();
    let mut has_nan = false;
    for block in scores.chunks(BLOCK) {
        let (largest, block_has_nan) = block_maximum(block);
        has_nan |= block_has_nan;
        block_largest.push(largest);
    }
    let largest = block_largest.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    (!has_nan && largest.is_finite()).then_some(largest)
}

#[inline(always)]
fn block_maximum(block: &[f32]) -> (f32, bool) {
    const LANES: usize = 16;
    let (mut maxima, mut nans) = ([f32::NEG_INFINITY; LANES], [0u32; LANES]);
    let chunks = block.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for lane in 0..LANES {
            maxima[lane] = if chunk[lane] > maxima[lane] { chunk[lane] } else { maxima[lane] };
            nans[lane] |= u32::from(chunk[lane].is_nan());
        }
    }
    let maximum = maxima.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max);
    let has_nan = nans.iter().fold(0, |any, nan| any | nan) != 0 || rest.iter().any(|score| score.is_nan());
    (maximum, has_nan)
}

/// Returns the first id whose score is `largest`, which is that of the row.
#[inline(always)]
#[allow(clippy::float_cmp, reason = "it is one of them")]
pub(super) fn first_equal(scores: &[f32], block_largest: &[f32], largest: f32) -> usize {
    let block = block_largest.iter().position(|&of_block| of_block == largest).expect("it is in a block");
    let start = block * BLOCK;
    start + scores[start..].iter().position(|&score| score == largest).expect("it is in this block")
}

/// Counts the scores above `limit`.
#[inline(always)]
pub(super) fn count_above(scores: &[f32], limit: f32) -> usize {
    // Blocks of 32-bit counters, which vectors hold as many of as scores.
    let count = |block: &[f32]| block.iter().map(|&score| u32::from(score > limit)).sum::<u32>();
    scores.chunks(BLOCK * BLOCK).map(|block| count(block) as usize).sum()
}

/// Weights of a row, and of each block their sum and the largest.
#[derive(Debug, Default)]
pub(super) struct Weights {
    pub(super) all: Vec<f64>,
    pub(super) block_sum: Vec<f64>,
    pub(super) block_largest: Vec<f64>,
}

impl Weights {
    /// Computes `e^((score - largest) / temperature)` of each score.
    #[inline(always)]
    pub(super) fn fill<S: Simd>(&mut self, scores: &[f32], largest: f32, temperature: f64) {
        self.all.resize(scores.len(), 0.0);
        self.block_sum.clear();
        self.block_largest.clear();
        let largest = f64::from(largest);
        for (block, weights) in scores.chunks(BLOCK).zip(self.all.chunks_mut(BLOCK)) {
            for (score, weight) in block.iter().zip(weights.iter_mut()) {
                *weight = exp_f64::<S>((f64::from(*score) - largest) / temperature);
            }
            let (sum, maximum) = sum_and_maximum(weights);
            self.block_sum.push(sum);
            self.block_largest.push(maximum);
        }
    }
}

#[inline(always)]
fn sum_and_maximum(weights: &[f64]) -> (f64, f64) {
    const LANES: usize = 8;
    let (mut sums, mut maxima) = ([0.0; LANES], [0.0f64; LANES]);
    let chunks = weights.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for lane in 0..LANES {
            sums[lane] += chunk[lane];
            maxima[lane] = if chunk[lane] > maxima[lane] { chunk[lane] } else { maxima[lane] };
        }
    }
    let sum = sums.iter().chain(rest).sum();
    (sum, maxima.iter().chain(rest).copied().fold(0.0, f64::max))
}

/// `e^x` for `x <= 0`, within 2 units in the last place; exactly 1 for 0, exactly 0 below [`LEAST_EXPONENT`].
#[inline(always)]
fn exp_f64<S: Simd>(x: f64) -> f64 {
    let shifted = fused::<S>(x, std::f64::consts::LOG2_E, ROUNDER);
    let n = shifted - ROUNDER;
    let r = fused::<S>(n, -LN_2_HIGH, x);
    let r = fused::<S>(n, -LN_2_LOW, r);
    let mut power = COEFFICIENTS[0];
    for &coefficient in &COEFFICIENTS[1..] {
        power = fused::<S>(power, r, coefficient);
    }
    let scale = (shifted.to_bits() << MANTISSA_BITS).wrapping_add(EXPONENT_BIAS << MANTISSA_BITS);
    if x < LEAST_EXPONENT { 0.0 } else { power * f64::from_bits(scale) }
}

#[inline(always)]
fn fused<S: Simd>(a: f64, b: f64, c: f64) -> f64 {
    // Without the instruction `mul_add` is a slow library call.
    if S::HAS_FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// Returns the sum of `e^(score - largest)`, to the precision of f32.
///
/// # Safety
/// The CPU has the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn sum_of_exp<S: Simd>(scores: &[f32], largest: f32) -> f64 {
    let mut total = 0.0;
    let blocks = scores.chunks_exact(BLOCK);
    let mut last = [f32::NEG_INFINITY; BLOCK];
    last[..blocks.remainder().len()].copy_from_slice(blocks.remainder());
    for block in blocks.chain(std::iter::once(&last[..])) {
        // SAFETY: the caller promises the instruction set; LANES divides BLOCK, the length of `block`.
        unsafe {
            let mut sums = S::splat(0.0);
            for start in (0..BLOCK).step_by(S::LANES) {
                let distance = S::add(S::load(block.as_ptr().add(start)), S::splat(-largest));
                sums = S::add(sums, exp::<S>(distance));
            }
            total += f64::from(sum::<S>(sums));
        }
    }
    total
}

#[cfg(test)]
#[allow(clippy::float_cmp, reason = "each number has one right value")]
mod tests {
    use super::*;
    use crate::simd::portable::Portable;

    #[test]
    fn the_exponential_is_right_to_the_last_bits() {
        for step in 0..=70_000 {
            let x = f64::from(step) * -0.01;
            let (got, expected) = (exp_f64::<Portable<8>>(x), x.exp());
            assert!((got - expected).abs() <= 4.5e-16 * expected, "e^{x} = {got:e}, expected {expected:e}");
        }
        assert_eq!(exp_f64::<Portable<8>>(0.0), 1.0);
        assert_eq!(exp_f64::<Portable<8>>(-0.0), 1.0);
        for x in [-700.1, -745.0, -1e300, f64::NEG_INFINITY] {
            assert_eq!(exp_f64::<Portable<8>>(x), 0.0);
        }
    }

    #[test]
    fn passes_of_every_length_see_every_number() {
        for len in [1, 15, 16, 17, 63, 64, 65, 127, 130, 4097] {
            for at in [0, len / 2, len - 1] {
                let mut scores: Vec<f32> = (0..len).map(|i| (i * 7 % 13) as f32 * -0.5).collect();
                scores[at] = 3.0;
                let mut blocks = Vec::new();
                assert_eq!(largest(&scores, &mut blocks), Some(3.0));
                assert_eq!(blocks.len(), len.div_ceil(BLOCK));
                assert_eq!(first_equal(&scores, &blocks, 3.0), at);
                assert_eq!(count_above(&scores, -0.5), scores.iter().filter(|&&score| score > -0.5).count());
                let expected: f64 = scores.iter().map(|&score| f64::from(score - 3.0).exp()).sum();
                // SAFETY: needs no instruction set.
                let got = unsafe { sum_of_exp::<Portable<8>>(&scores, 3.0) };
                assert!((got / expected - 1.0).abs() < 1e-6, "{got} instead of {expected}");
                let mut weights = Weights::default();
                weights.fill::<Portable<8>>(&scores, 3.0, 1.0);
                let got: f64 = weights.block_sum.iter().sum();
                assert!((got / expected - 1.0).abs() < 1e-12, "{got} instead of {expected}");
                assert_eq!(weights.block_largest[at / BLOCK], 1.0);
                scores[at] = f32::NAN;
                assert_eq!(largest(&scores, &mut blocks), None);
                scores[at] = f32::INFINITY;
                assert_eq!(largest(&scores, &mut blocks), None);
            }
        }
    }
}
