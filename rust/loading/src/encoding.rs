//! How the numbers of a tensor are stored: names, block sizes, sizes in bytes.
//!
//! Invariant: [`Encoding::byte_len`] is the only place that turns a shape into bytes; it never wraps.

use crate::ErrorKind;

/// One way to store the numbers of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)]
pub enum Encoding {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of IEEE single precision.
    BF16,
    /// 32 numbers: scale, 4-bit integers around 8.
    Q4_0,
    /// 32 numbers: scale, minimum, 4-bit integers.
    Q4_1,
    /// 32 numbers: scale, 5-bit integers around 16.
    Q5_0,
    /// 32 numbers: scale, minimum, 5-bit integers.
    Q5_1,
    /// 32 numbers: scale, signed bytes.
    Q8_0,
    /// 256 numbers: 8 sub-blocks with 6-bit scales and minima, 4-bit integers.
    Q4_K,
    /// 256 numbers: 8 sub-blocks with 6-bit scales and minima, 5-bit integers.
    Q5_K,
    /// 256 numbers: 16 sub-blocks with 8-bit scales, 6-bit integers around 32.
    Q6_K,
}

impl Encoding {
    /// All encodings, for tests and messages.
    pub const ALL: [Self; 11] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
    ];

    /// Returns the name that the formats use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4_K => "Q4_K",
            Self::Q5_K => "Q5_K",
            Self::Q6_K => "Q6_K",
        }
    }

    /// Returns how many numbers one block holds.
    pub const fn block_elements(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Q4_K | Self::Q5_K | Self::Q6_K => 256,
        }
    }

    /// Returns how many bytes one block takes.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q4_K => 144,
            Self::Q5_K => 176,
            Self::Q6_K => 210,
        }
    }

    /// Returns the bytes of a tensor of `shape` (row-major, the last dimension is a row).
    ///
    /// # Errors
    /// `SizeOverflow` when the product does not fit, `PartialUnit` when a row is not a whole number
    /// of blocks.
    pub(crate) fn byte_len(self, shape: &[u64]) -> Result<u64, ErrorKind> {
        let overflow = || ErrorKind::SizeOverflow(shape.to_vec());
        let elements = checked_product(shape).ok_or_else(overflow)?;
        let block = self.block_elements() as u64;
        let row = shape.last().copied().unwrap_or(1);
        if !row.is_multiple_of(block) {
            return Err(ErrorKind::PartialUnit { elements: row, unit: "blocks", size: block });
        }
        let bytes = (elements / block).checked_mul(self.block_bytes() as u64);
        // The decoded float32 array has to be addressable too.
        let decoded = elements.checked_mul(4).filter(|&bytes| isize::try_from(bytes).is_ok());
        bytes.filter(|_| decoded.is_some()).ok_or_else(overflow)
    }
}

/// Multiplies the dimensions, `None` when the product does not fit into 64 bits.
///
/// A zero dimension does not hide the overflow of the others.
pub(crate) fn checked_product(shape: &[u64]) -> Option<u64> {
    let nonzero =
        shape.iter().filter(|&&size| size != 0).try_fold(1_u64, |product, &size| product.checked_mul(size))?;
    Some(if shape.contains(&0) { 0 } else { nonzero })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_counted_in_whole_blocks() {
        assert_eq!(Encoding::Q4_1.byte_len(&[576, 1536]).ok(), Some(576 * 48 * 20));
        assert_eq!(Encoding::F16.byte_len(&[3, 5]).ok(), Some(30));
        assert!(matches!(
            Encoding::Q4_K.byte_len(&[4, 128]),
            Err(ErrorKind::PartialUnit { elements: 128, size: 256, .. })
        ));
    }

    #[test]
    fn i10_sizes_that_do_not_fit_are_errors_and_never_wrap() {
        for shape in [&[1 << 32, 1 << 32][..], &[u64::MAX, 2], &[0, 1 << 40, 1 << 40], &[1 << 62]] {
            assert!(matches!(Encoding::F32.byte_len(shape), Err(ErrorKind::SizeOverflow(_))), "{shape:?}");
        }
    }
}
