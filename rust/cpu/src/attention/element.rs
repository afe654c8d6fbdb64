//! Elements of a cache, as the loops of attention take them.
//!
//! A row is handed out as vectors in an order of its own ("vector order"): two bf16 numbers side by side become the same
//! lane of two vectors, which takes a shift and a mask instead of moving numbers across lanes. Queries are put into that
//! order once, and results back, so scores and sums do not notice.

use crate::int8;
use crate::layout::CacheLayout;
use crate::simd::{CACHE_LINE, Simd, prefetch_line};

/// Element of a cache.
pub(crate) trait Element: Copy + Send + Sync {
    /// Whether `load_two` hands out even numbers first, then odd ones.
    const IN_PAIRS: bool;
    /// Whether each head of a token has a factor.
    const HAS_SCALES: bool = false;

    /// Index of the first element of one head of one token, and of its factor if it has one.
    #[inline(always)]
    fn offsets(layout: &CacheLayout, block: usize, kv_head: usize, offset: usize) -> [usize; 2] {
        [layout.row_offset(block, kv_head, offset), 0]
    }

    /// The factor at an index.
    #[inline(always)]
    fn scale(_: &[Self], _: usize) -> f32 {
        1.0
    }

    /// Loads and widens `S::LANES` elements.
    ///
    /// # Safety
    /// As for [`Simd`].
    unsafe fn load<S: Simd>(ptr: *const Self) -> S::Vector;

    /// Loads and widens `2 * S::LANES` elements.
    ///
    /// # Safety
    /// As for [`Simd`], for twice as many elements.
    unsafe fn load_two<S: Simd>(ptr: *const Self) -> [S::Vector; 2];

    /// The first or the second of what `load_two` loads.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    unsafe fn load_half<S: Simd>(ptr: *const Self, is_second: bool) -> S::Vector {
        // SAFETY: the contract is the same.
        unsafe {
            if Self::IN_PAIRS {
                let [first, second] = Self::load_two::<S>(ptr);
                if is_second { second } else { first }
            } else {
                Self::load::<S>(ptr.add(if is_second { S::LANES } else { 0 }))
            }
        }
    }
}

impl Element for f32 {
    const IN_PAIRS: bool = false;

    #[inline(always)]
    unsafe fn load<S: Simd>(ptr: *const Self) -> S::Vector {
        // SAFETY: the contract is the same.
        unsafe { S::load(ptr) }
    }

    #[inline(always)]
    unsafe fn load_two<S: Simd>(ptr: *const Self) -> [S::Vector; 2] {
        // SAFETY: the contract is the same.
        unsafe { [S::load(ptr), S::load(ptr.add(S::LANES))] }
    }
}

/// A `u16` element holds the bits of a bf16 number.
impl Element for u16 {
    const IN_PAIRS: bool = true;

    #[inline(always)]
    unsafe fn load<S: Simd>(ptr: *const Self) -> S::Vector {
        // SAFETY: the contract is the same.
        unsafe { S::load_bf16(ptr) }
    }

    #[inline(always)]
    unsafe fn load_two<S: Simd>(ptr: *const Self) -> [S::Vector; 2] {
        // SAFETY: the contract is the same.
        unsafe { S::load_bf16_pairs(ptr) }
    }
}

/// A whole number that its token's factor multiplies.
impl Element for i8 {
    const IN_PAIRS: bool = false;
    const HAS_SCALES: bool = true;

    #[inline(always)]
    fn offsets(layout: &CacheLayout, block: usize, kv_head: usize, offset: usize) -> [usize; 2] {
        layout.int8_offsets(block, kv_head, offset)
    }

    #[inline(always)]
    fn scale(cache: &[Self], at: usize) -> f32 {
        int8::scale_from([cache[at], cache[at + 1]])
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(ptr: *const Self) -> S::Vector {
        // SAFETY: the contract is the same.
        unsafe { S::load_i8(ptr) }
    }

    #[inline(always)]
    unsafe fn load_two<S: Simd>(ptr: *const Self) -> [S::Vector; 2] {
        // SAFETY: the contract is the same.
        unsafe { [S::load_i8(ptr), S::load_i8(ptr.add(S::LANES))] }
    }
}

/// Numbers of a row of `head_dim` that are handed out two vectors at a time; the rest comes one at a time.
#[inline(always)]
pub(crate) fn in_twos<S: Simd>(head_dim: usize) -> usize {
    head_dim - head_dim % (2 * S::LANES)
}

/// Writes `factor * row` in the vector order of `E`.
#[inline(always)]
pub(crate) fn to_vector_order<S: Simd, E: Element>(row: &[f32], factor: f32, to: &mut [f32]) {
    let split = if E::IN_PAIRS { in_twos::<S>(row.len()) } else { 0 };
    for (from, to) in row[..split].chunks_exact(2 * S::LANES).zip(to.chunks_exact_mut(2 * S::LANES)) {
        let (even, odd) = to.split_at_mut(S::LANES);
        for ((pair, even), odd) in from.chunks_exact(2).zip(even).zip(odd) {
            (*even, *odd) = (factor * pair[0], factor * pair[1]);
        }
    }
    for (number, to) in row[split..].iter().zip(&mut to[split..]) {
        *to = factor * number;
    }
}

/// Puts a row back into its own order.
#[inline(always)]
pub(crate) fn from_vector_order<S: Simd, E: Element>(row: &[f32], to: &mut [f32]) {
    let split = if E::IN_PAIRS { in_twos::<S>(row.len()) } else { 0 };
    for (from, to) in row[..split].chunks_exact(2 * S::LANES).zip(to.chunks_exact_mut(2 * S::LANES)) {
        let (even, odd) = from.split_at(S::LANES);
        for ((pair, even), odd) in to.chunks_exact_mut(2).zip(even).zip(odd) {
            (pair[0], pair[1]) = (*even, *odd);
        }
    }
    to[split..].copy_from_slice(&row[split..]);
}

/// Asks for `len` elements from `start` to be brought near; only a hint, any address is fine.
#[inline(always)]
pub(crate) fn prefetch<E: Element>(data: *const E, start: usize, len: usize) {
    let first = data.wrapping_add(start).cast::<i8>();
    for byte in (0..len * size_of::<E>()).step_by(CACHE_LINE) {
        prefetch_line(first.wrapping_add(byte));
    }
}
