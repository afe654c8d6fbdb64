//! The shape of one layer's key or value cache, and every offset computed from it.
//!
//! A cache is one contiguous array `[num_blocks, num_kv_heads, block_size, head_dim]`: the tokens of one block and one
//! head lie next to each other, so that a decode reads runs of `block_size * head_dim` elements. In a cache of 8 bits a run
//! is `block_size * (head_dim + 2)` bytes: the numbers, then the factors of its tokens (see [`int8`](crate::int8)).
//!
//! Invariants:
//! 1. The product of the dimensions fits `isize`, so no offset of an element wraps. All arithmetic is in `usize`.

use crate::error::{Error, Result};
use crate::int8::SCALE_BYTES;

/// Shape of a key or value cache `[num_blocks, num_kv_heads, block_size, head_dim]`.
///
/// ```
/// let layout = cbrs_cpu::CacheLayout::new(8, 2, 16, 64)?;
/// assert_eq!(layout.num_slots(), 128);
/// # Ok::<(), cbrs_cpu::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheLayout {
    num_blocks: usize,
    num_kv_heads: usize,
    block_size: usize,
    head_dim: usize,
}

impl CacheLayout {
    /// Checks the dimensions and their product.
    ///
    /// # Errors
    /// [`Error::ZeroDimension`], [`Error::CacheTooLarge`].
    pub fn new(num_blocks: usize, num_kv_heads: usize, block_size: usize, head_dim: usize) -> Result<Self> {
        let named = [
            ("num_blocks", num_blocks),
            ("num_kv_heads", num_kv_heads),
            ("block_size", block_size),
            ("head_dim", head_dim),
        ];
        if let Some(&(dimension, _)) = named.iter().find(|(_, size)| *size == 0) {
            return Err(Error::ZeroDimension { dimension });
        }
        // In bytes of the wider element type: what one allocation can hold at most.
        named
            .iter()
            .try_fold(size_of::<f32>(), |product, (_, size)| product.checked_mul(*size))
            .filter(|bytes| isize::try_from(*bytes).is_ok())
            .ok_or(Error::CacheTooLarge { num_blocks, num_kv_heads, block_size, head_dim })?;
        Ok(Self { num_blocks, num_kv_heads, block_size, head_dim })
    }

    /// Blocks in the cache.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// KV heads.
    pub fn num_kv_heads(&self) -> usize {
        self.num_kv_heads
    }

    /// Tokens in a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Elements of one head of one token.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Elements in the whole cache.
    pub fn num_elements(&self) -> usize {
        self.num_blocks * self.num_kv_heads * self.block_size * self.head_dim
    }

    /// The same of a cache of 8 bits, with the factors.
    pub fn num_int8_elements(&self) -> usize {
        self.num_blocks * self.num_kv_heads * self.block_size * (self.head_dim + SCALE_BYTES)
    }

    /// Token places in the cache; a slot is `block * block_size + offset`.
    pub fn num_slots(&self) -> usize {
        self.num_blocks * self.block_size
    }

    /// Index of the first element of one head of one token.
    ///
    /// In range for `block < num_blocks`, `kv_head < num_kv_heads` and `offset < block_size`.
    /// Of a cache of 8 bits the places of the first element and of the factor are those of [`Self::int8_offsets`].
    #[inline]
    pub fn row_offset(&self, block: usize, kv_head: usize, offset: usize) -> usize {
        ((block * self.num_kv_heads + kv_head) * self.block_size + offset) * self.head_dim
    }
}

impl CacheLayout {
    /// Index, in a cache of 8 bits, of the first element of one head of one token, and of its factor.
    ///
    /// In range as for [`Self::row_offset`].
    #[inline]
    pub fn int8_offsets(&self, block: usize, kv_head: usize, offset: usize) -> [usize; 2] {
        let run = (block * self.num_kv_heads + kv_head) * self.block_size * (self.head_dim + SCALE_BYTES);
        let scales = run + self.block_size * self.head_dim;
        [run + offset * self.head_dim, scales + offset * SCALE_BYTES]
    }
}

/// A cache to read from.
#[derive(Debug, Clone, Copy)]
pub enum CacheRef<'a> {
    /// Elements are `f32`.
    F32(&'a [f32]),
    /// Elements are the bits of bf16 numbers.
    Bf16(&'a [u16]),
    /// Elements are whole numbers, followed by factors (see [`int8`](crate::int8)).
    Int8(&'a [i8]),
}

impl CacheRef<'_> {
    pub(crate) fn has_type_of(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }

    /// Verifies that it has the elements of `layout`.
    pub(crate) fn check(&self, argument: &'static str, layout: &CacheLayout) -> Result<()> {
        match self {
            Self::F32(data) => check_len(argument, data.len(), layout.num_elements()),
            Self::Bf16(data) => check_len(argument, data.len(), layout.num_elements()),
            Self::Int8(data) => check_len(argument, data.len(), layout.num_int8_elements()),
        }
    }
}

/// A cache to write to.
#[derive(Debug)]
pub enum CacheMut<'a> {
    /// Elements are `f32`.
    F32(&'a mut [f32]),
    /// Elements are the bits of bf16 numbers.
    Bf16(&'a mut [u16]),
    /// Elements are whole numbers, followed by factors (see [`int8`](crate::int8)).
    Int8(&'a mut [i8]),
}

impl CacheMut<'_> {
    /// The same, to read.
    pub(crate) fn as_ref(&self) -> CacheRef<'_> {
        match self {
            Self::F32(data) => CacheRef::F32(data),
            Self::Bf16(data) => CacheRef::Bf16(data),
            Self::Int8(data) => CacheRef::Int8(data),
        }
    }
}

pub(crate) fn check_len(argument: &'static str, len: usize, expected: usize) -> Result<()> {
    if len == expected { Ok(()) } else { Err(Error::Length { argument, len, expected }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a16_the_highest_slot_of_a_pool_beyond_2_to_the_31_elements_has_the_right_offset() {
        let layout = CacheLayout::new(1 << 20, 8, 16, 128).expect("addressable");
        let last = layout.row_offset((1 << 20) - 1, 7, 15);
        assert_eq!(last, (1 << 34) - 128);
        assert_eq!(layout.num_elements(), 1 << 34);
        assert!(last > i32::MAX as usize);
    }

    #[test]
    fn a_shape_whose_product_wraps_is_refused() {
        let error = CacheLayout::new(usize::MAX / 2, 8, 16, 128).expect_err("wraps");
        assert!(matches!(error, Error::CacheTooLarge { .. }));
        assert!(CacheLayout::new(1 << 60, 1, 1, 8).is_err());
    }

    #[test]
    fn a_zero_dimension_is_named() {
        let error = CacheLayout::new(1, 1, 0, 8).expect_err("no tokens in a block");
        assert_eq!(error.to_string(), "block_size must be at least 1");
    }
}
