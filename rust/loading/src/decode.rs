//! Turns the bytes of a tensor into float32 or bfloat16, on several threads for large ones.
//!
//! Invariants:
//!
//! 1. Every element of the output is written exactly once; the result does not depend on the number
//!    of threads.
//! 2. Threads live only inside one call (scoped): no pool is kept, so several engines and forked
//!    processes do not meet here.

use std::num::NonZero;
use std::ops::Range;
use std::thread;

use half::{bf16, f16};

use crate::Encoding;
use crate::blocks;

/// The fewest elements that are worth a thread of their own.
const MIN_ELEMENTS_PER_THREAD: usize = 1 << 18;
/// More threads than this only wait for memory.
const MAX_THREADS: usize = 8;

/// An element of the output: `f32`, or the bits of a bfloat16 as `u16`.
pub(crate) trait Element: Copy + Default + Send {
    /// Rounds a float32 to this type (to nearest, ties to even).
    fn from_f32(value: f32) -> Self;
}

impl Element for f32 {
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Element for u16 {
    fn from_f32(value: f32) -> Self {
        // Without a branch, so that whole blocks are rounded at once. The addition carries into the kept
        // half exactly when the lost half is more than a tie, or a tie above an odd number.
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet_nan = (bits >> 16) | 0x40;
        (if value.is_nan() { quiet_nan } else { rounded }) as u16
    }
}

/// Which stored row becomes which row of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// The rows are stored as they are used.
    AsStored,
    /// Within each head of `head_rows` rows, the two halves of the rotary pairs are interleaved; the
    /// output has the first halves first.
    Interleaved {
        /// Rows of one head; even.
        head_rows: usize,
    },
}

impl RowOrder {
    fn stored_row(self, row: usize) -> usize {
        match self {
            Self::AsStored => row,
            Self::Interleaved { head_rows } => {
                let (head, row) = (row / head_rows, row % head_rows);
                let half = head_rows / 2;
                head * head_rows + 2 * (row % half) + row / half
            }
        }
    }
}

/// What of a vector or a matrix is read: indices of one of its dimensions, and of the other all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// 0 or 1.
    pub dimension: usize,
    /// Indices of it; not beyond its size.
    pub range: Range<usize>,
}

impl Part {
    /// Returns whether a tensor of this shape has the part; of more than two dimensions none has.
    pub fn is_of(&self, shape: &[usize]) -> bool {
        let size = shape.get(self.dimension).copied().filter(|_| shape.len() <= 2);
        size.is_some_and(|size| self.range.start <= self.range.end && self.range.end <= size)
    }

    /// Returns the rows and the columns that it is, for a tensor that is stored in `rows` of `row_elements`.
    fn of_rows(&self, shape: &[usize], rows: usize, row_elements: usize) -> (Range<usize>, Range<usize>) {
        assert!(self.is_of(shape), "{shape:?} has no {:?} in dimension {}", self.range, self.dimension);
        // A vector is one row, unless its elements are put into another order.
        let is_row = shape.len() == 1 && row_elements > 1;
        if is_row || self.dimension == 1 {
            (0..rows, self.range.clone())
        } else {
            (self.range.clone(), 0..row_elements)
        }
    }
}

/// Decodes `bytes`, which hold a tensor of `shape` in rows of `row_elements`, or a part of it.
///
/// Nothing else of `bytes` is read. The caller has checked that they are exactly what [`Encoding::byte_len`] asks for.
pub(crate) fn decode<T: Element>(
    encoding: Encoding,
    bytes: &[u8],
    shape: &[usize],
    row_elements: usize,
    order: RowOrder,
    part: Option<&Part>,
) -> Vec<T> {
    let stored: usize = shape.iter().product();
    let stored_rows = stored.checked_div(row_elements).unwrap_or(0);
    let whole = (0..stored_rows, 0..row_elements);
    let (rows, columns) = part.map_or(whole, |part| part.of_rows(shape, stored_rows, row_elements));
    let elements = rows.len() * columns.len();
    let mut values = vec![T::default(); elements];
    if elements == 0 {
        return values;
    }
    let threads = thread::available_parallelism()
        .map_or(1, NonZero::get)
        .min(MAX_THREADS)
        .min(elements / MIN_ELEMENTS_PER_THREAD)
        .clamp(1, rows.len());
    let rows_per_thread = rows.len().div_ceil(threads);
    let first_row = rows.start;
    let row_bytes = bytes.len() / stored_rows;
    let row_values = columns.len();
    let job = Rows { encoding, bytes, row_bytes, row_elements, columns, order };
    thread::scope(|scope| {
        let mut chunks = values.chunks_mut(rows_per_thread * row_values).enumerate();
        // The calling thread takes the first chunk itself.
        let first = chunks.next();
        let job = &job;
        for (chunk, values) in chunks {
            scope.spawn(move || job.decode(first_row + chunk * rows_per_thread, values));
        }
        if let Some((_, values)) = first {
            job.decode(first_row, values);
        }
    });
    values
}

/// The stored rows of one tensor, and the columns of them that are wanted.
struct Rows<'a> {
    encoding: Encoding,
    bytes: &'a [u8],
    row_bytes: usize,
    row_elements: usize,
    columns: Range<usize>,
    order: RowOrder,
}

impl Rows<'_> {
    /// Decodes the output rows from `first_row` on into `values`.
    fn decode<T: Element>(&self, first_row: usize, values: &mut [T]) {
        if self.columns.len() < self.row_elements {
            self.decode_columns(first_row, values);
            return;
        }
        if self.order == RowOrder::AsStored {
            let begin = first_row * self.row_bytes;
            let length = values.len() / self.row_elements * self.row_bytes;
            decode_run(self.encoding, &self.bytes[begin..begin + length], values);
            return;
        }
        for (row, values) in values.chunks_exact_mut(self.row_elements).enumerate() {
            let begin = self.order.stored_row(first_row + row) * self.row_bytes;
            decode_run(self.encoding, &self.bytes[begin..begin + self.row_bytes], values);
        }
    }

    /// The same for some columns: the blocks that hold them are decoded, and what is beside them dropped.
    fn decode_columns<T: Element>(&self, first_row: usize, values: &mut [T]) {
        let size = self.encoding.block_elements();
        let blocks = self.columns.start / size..self.columns.end.div_ceil(size);
        let skipped = self.columns.start - blocks.start * size;
        let mut decoded = vec![T::default(); blocks.len() * size];
        for (row, values) in values.chunks_exact_mut(self.columns.len()).enumerate() {
            let begin = self.order.stored_row(first_row + row) * self.row_bytes;
            let begin = begin + blocks.start * self.encoding.block_bytes();
            let end = begin + blocks.len() * self.encoding.block_bytes();
            decode_run(self.encoding, &self.bytes[begin..end], &mut decoded);
            values.copy_from_slice(&decoded[skipped..skipped + values.len()]);
        }
    }
}

/// Decodes consecutive blocks.
fn decode_run<T: Element>(encoding: Encoding, bytes: &[u8], values: &mut [T]) {
    match encoding {
        Encoding::F32 => numbers(bytes, values, f32::from_le_bytes),
        Encoding::F16 => numbers(bytes, values, |bytes| f16::from_le_bytes(bytes).to_f32()),
        Encoding::BF16 => numbers(bytes, values, |bytes| bf16::from_le_bytes(bytes).to_f32()),
        Encoding::Q4_0 => quantised::<T, 32>(encoding, bytes, values, blocks::q4_0),
        Encoding::Q4_1 => quantised::<T, 32>(encoding, bytes, values, blocks::q4_1),
        Encoding::Q5_0 => quantised::<T, 32>(encoding, bytes, values, blocks::q5_0),
        Encoding::Q5_1 => quantised::<T, 32>(encoding, bytes, values, blocks::q5_1),
        Encoding::Q8_0 => quantised::<T, 32>(encoding, bytes, values, blocks::q8_0),
        Encoding::Q4_K => quantised::<T, 256>(encoding, bytes, values, blocks::q4_k),
        Encoding::Q5_K => quantised::<T, 256>(encoding, bytes, values, blocks::q5_k),
        Encoding::Q6_K => quantised::<T, 256>(encoding, bytes, values, blocks::q6_k),
    }
}

fn numbers<T: Element, const BYTES: usize>(bytes: &[u8], values: &mut [T], to_f32: impl Fn([u8; BYTES]) -> f32) {
    let (stored, _) = bytes.as_chunks::<BYTES>();
    for (value, &stored) in values.iter_mut().zip(stored) {
        *value = T::from_f32(to_f32(stored));
    }
}

fn quantised<T: Element, const ELEMENTS: usize>(
    encoding: Encoding,
    bytes: &[u8],
    values: &mut [T],
    decode_block: impl Fn(&[u8], &mut [f32]),
) {
    let mut decoded = [0.0; ELEMENTS];
    let blocks = bytes.chunks_exact(encoding.block_bytes());
    for (values, block) in values.chunks_exact_mut(ELEMENTS).zip(blocks) {
        decode_block(block, &mut decoded);
        for (value, &decoded) in values.iter_mut().zip(&decoded) {
            *value = T::from_f32(decoded);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(dimension: usize, range: Range<usize>) -> Part {
        Part { dimension, range }
    }

    #[test]
    fn a_part_is_inside_a_vector_or_a_matrix() {
        assert!(part(0, 0..0).is_of(&[0]));
        assert!(part(0, 1..3).is_of(&[3]) && part(1, 2..4).is_of(&[1, 4]));
        assert!(!part(0, 1..4).is_of(&[3]) && !part(1, 0..1).is_of(&[3]) && !part(0, 0..0).is_of(&[]));
        #[allow(clippy::reversed_empty_ranges)]
        let reversed = part(0, 2..1);
        assert!(!reversed.is_of(&[3]));
        assert!(!part(0, 0..1).is_of(&[1, 1, 1]));
    }

    #[test]
    fn parts_of_interleaved_heads_and_of_their_biases_are_those_of_the_whole() {
        let stored: Vec<u8> = (0..24).flat_map(|number| (number as f32).to_le_bytes()).collect();
        let order = RowOrder::Interleaved { head_rows: 4 };
        let read =
            |shape: &[usize], row, part: Option<&Part>| decode::<f32>(Encoding::F32, &stored, shape, row, order, part);
        let whole = read(&[12, 2], 2, None);
        assert_eq!(whole[..8], [0.0, 1.0, 4.0, 5.0, 2.0, 3.0, 6.0, 7.0]);
        assert_eq!(read(&[12, 2], 2, Some(&part(0, 3..9))), whole[6..18]);
        let second: Vec<f32> = whole.iter().copied().skip(1).step_by(2).collect();
        assert_eq!(read(&[12, 2], 2, Some(&part(1, 1..2))), second);
        assert_eq!(read(&[24], 1, Some(&part(0, 5..7))), read(&[24], 1, None)[5..7]);
        assert_eq!(read(&[24], 1, Some(&part(0, 5..5))), [] as [f32; 0]);
    }

    #[test]
    fn rounding_to_bfloat16_is_to_nearest_even_for_all_upper_halves() {
        for upper in 0..=u16::MAX {
            for lower in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits(u32::from(upper) << 16 | lower);
                assert_eq!(u16::from_f32(value), bf16::from_f32(value).to_bits(), "{value:e}");
            }
        }
    }
}
