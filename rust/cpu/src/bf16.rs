//! Conversion between `f32` and the bits of a bf16 number (the upper half of an `f32`).

/// Rounds to the nearest bf16, ties to even; a NaN stays a (quiet) NaN.
///
/// ```
/// assert_eq!(cbrs_cpu::bf16::from_f32(1.0), 0x3f80);
/// ```
#[inline]
pub fn from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        // Truncation could clear every mantissa bit that is set, which would make it an infinity.
        return ((bits >> 16) as u16) | 0x0040;
    }
    let round = 0x7fff + ((bits >> 16) & 1);
    // Cannot wrap: the largest non-NaN pattern is 0xff80_0000.
    ((bits + round) >> 16) as u16
}

/// Widens a bf16 number; exact.
#[inline]
pub fn to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bf16_number_survives_the_round_trip() {
        for bits in 0..=u16::MAX {
            let wide = to_f32(bits);
            if wide.is_nan() {
                assert!(to_f32(from_f32(wide)).is_nan());
            } else {
                assert_eq!(from_f32(wide), bits);
            }
        }
    }

    #[test]
    fn ties_round_to_even_and_overflow_becomes_infinity() {
        assert_eq!(from_f32(f32::from_bits(0x3f80_8000)), 0x3f80);
        assert_eq!(from_f32(f32::from_bits(0x3f81_8000)), 0x3f82);
        assert_eq!(from_f32(f32::from_bits(0x3f80_8001)), 0x3f81);
        assert_eq!(from_f32(f32::MAX), 0x7f80);
        assert_eq!(from_f32(f32::NEG_INFINITY), 0xff80);
    }

    #[test]
    fn a_nan_with_low_bits_only_stays_a_nan() {
        assert!(to_f32(from_f32(f32::from_bits(0x7f80_0001))).is_nan());
    }
}
