//! Keys and values in 8 bits: whole numbers in -127..=127 and, for each head of a token, a factor in bf16.
//!
//! The factor is rounded up before the numbers are divided by it, so the greatest one never exceeds 127. In a cache the
//! factors of a block and head stand behind its numbers, low byte first.

use crate::bf16;

/// Bytes of a factor.
pub const SCALE_BYTES: usize = 2;

/// Greatest number that is kept.
const MOST: f32 = 127.0;
/// Adding and subtracting 1.5 * 2^23 leaves the nearest integer, ties to even.
const ROUNDER: f32 = 12_582_912.0;

/// Writes a row as whole numbers and returns the bits of their factor; NaN if a number of the row is not finite.
///
/// ```
/// let mut numbers = [0; 3];
/// let scale = cbrs_cpu::int8::quantize(&[127.0, -63.5, 0.0], &mut numbers);
/// assert_eq!((cbrs_cpu::bf16::to_f32(scale), numbers), (1.0, [127, -64, 0]));
/// ```
pub fn quantize(row: &[f32], to: &mut [i8]) -> u16 {
    let greatest = row.iter().fold(0.0_f32, |greatest, x| greatest.max(x.abs()));
    if row.iter().any(|x| !x.is_finite()) {
        to.fill(0);
        return bf16::from_f32(f32::NAN);
    }
    let scale = round_up(greatest / MOST);
    // So small a number is none; its inverse could not be told from infinity.
    if bf16::to_f32(scale) < f32::MIN_POSITIVE {
        to.fill(0);
        return 0;
    }
    let inverse = 1.0 / bf16::to_f32(scale);
    for (x, to) in row.iter().zip(to) {
        *to = ((x * inverse + ROUNDER) - ROUNDER) as i8;
    }
    scale
}

/// The least bf16 number that is not below `x`, which is finite, not negative, and far from the greatest.
fn round_up(x: f32) -> u16 {
    ((x.to_bits() + 0xffff) >> 16) as u16
}

/// The factor whose two bytes these are.
#[inline]
pub fn scale_from([low, high]: [i8; SCALE_BYTES]) -> f32 {
    bf16::to_f32(u16::from_le_bytes([low as u8, high as u8]))
}

/// The two bytes of a factor.
#[inline]
pub fn scale_bytes(scale: u16) -> [i8; SCALE_BYTES] {
    scale.to_le_bytes().map(|byte| byte as i8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_within_half_a_step_and_the_greatest_does_not_wrap() {
        for scale in [1e-30_f32, 3e-5, 0.7, 1.0, 123.456, 1e30] {
            let row: Vec<f32> = (-100..=100).map(|i| scale * i as f32 / 100.0).collect();
            let mut numbers = vec![0; row.len()];
            let step = bf16::to_f32(quantize(&row, &mut numbers));
            assert!(step >= scale / MOST && step <= scale / MOST * 1.01, "{step}");
            for (x, number) in row.iter().zip(&numbers) {
                assert!((x - step * f32::from(*number)).abs() <= 0.501 * step, "{x}: {number} x {step}");
            }
            assert!(numbers[0] < -125 && numbers[200] > 125);
        }
    }

    #[test]
    fn zeros_and_numbers_too_small_are_zeros() {
        for row in [[0.0; 4], [-0.0; 4], [1e-40, -1e-40, 0.0, 1e-38]] {
            let mut numbers = [7; 4];
            assert_eq!((quantize(&row, &mut numbers), numbers), (0, [0; 4]));
        }
    }

    #[test]
    fn what_is_not_finite_is_not_swallowed() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let scale = quantize(&[1.0, bad, 2.0], &mut [0; 3]);
            assert!(scale_from(scale_bytes(scale)).is_nan());
        }
        assert_eq!(scale_from(scale_bytes(bf16::from_f32(0.75))).to_bits(), 0.75_f32.to_bits());
    }
}
