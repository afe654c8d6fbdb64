//! Numbers as small integers: groups of 32 neighbours share a scale, the largest magnitude over 127.
//!
//! Weights are quantised when they are packed, as keys and values are ([`int8::quantize`](crate::int8::quantize)), the
//! rows of an input here, once for each product. What counts as an input's magnitude is that of two neighbours' sum, too,
//! so that two integers have a sum of at most 128: the fast instructions add their products in 16 bits (see
//! `simd/dot.rs`). Few groups get a larger scale by that.
//!
//! Invariants:
//! 1. A row's integers and scales depend on that row only and have the same bits on every instruction set.
//! 2. A group with a NaN or an infinity (or with neighbours whose sum is one) has the scale NaN, so that everything computed
//!    from it is NaN.

use crate::dispatch::Isa;
use crate::pool::Team;
use crate::simd::dot::{GROUP, MAX_INT};

/// Below this largest magnitude a group counts as zeros: the reciprocal of its scale would be infinite.
const ZERO_BELOW: f32 = 1e-35;
/// Adding 1.5 * 2^23 leaves the nearest integer, ties to even, in the low bits.
const ROUNDER: f32 = 12_582_912.0;
/// Below this many numbers handing a part of them to another thread costs more than it saves.
const PARALLEL_NUMBERS: usize = 1 << 14;
/// Runs of rows per thread.
const RUNS_PER_THREAD: usize = 4;

/// Bits of a magnitude; as integers they are in order, infinity and NaN last.
#[inline(always)]
fn magnitude(number: f32) -> u32 {
    number.to_bits() & 0x7fff_ffff
}

/// Returns the scale for a largest magnitude and what numbers are multiplied with; (NaN, 0) if it is not finite.
#[inline(always)]
fn scale_for(greatest: u32) -> (f32, f32) {
    let greatest = f32::from_bits(greatest);
    if !greatest.is_finite() {
        (f32::NAN, 0.0)
    } else if greatest < ZERO_BELOW {
        (0.0, 0.0)
    } else {
        (greatest / MAX_INT as f32, MAX_INT as f32 / greatest)
    }
}

/// Rounds a product of at most 127 in magnitude to an integer.
#[inline(always)]
fn round(number: f32) -> i32 {
    ((number + ROUNDER).to_bits() as i32).wrapping_sub(ROUNDER.to_bits() as i32)
}

/// Rows of an input, quantised; the memory is kept for the next ones.
#[derive(Debug, Default)]
pub(crate) struct Quantized {
    /// `[num_rows, num_groups * 32]`.
    ints: Vec<i8>,
    /// `[num_rows, num_groups]`.
    scales: Vec<f32>,
    /// -128 times the sum of a group's integers: what the sums of products with stored weights start with. Same shape.
    offsets: Vec<i32>,
    num_groups: usize,
}

/// What the items of a round write, each at rows of its own.
#[derive(Debug, Clone, Copy)]
struct Target {
    ints: *mut i8,
    scales: *mut f32,
    offsets: *mut i32,
    num_groups: usize,
}

// SAFETY: the pointers stand for buffers that are borrowed exclusively for a round, whose items have rows of their own.
unsafe impl Sync for Target {}

impl Target {
    /// # Safety
    /// The buffers have room for this row, and no other item has it.
    unsafe fn row(&self, row: usize) -> Row<'_> {
        let (first, len) = (row * self.num_groups, self.num_groups);
        // SAFETY: passed on.
        unsafe {
            Row {
                ints: std::slice::from_raw_parts_mut(self.ints.add(first * GROUP), len * GROUP),
                scales: std::slice::from_raw_parts_mut(self.scales.add(first), len),
                offsets: std::slice::from_raw_parts_mut(self.offsets.add(first), len),
            }
        }
    }
}

impl Quantized {
    /// Groups of a row.
    pub(crate) fn num_groups(&self) -> usize {
        self.num_groups
    }

    /// Integers, scales and offsets of a row from a group on.
    pub(crate) fn row(&self, row: usize, group: usize) -> (*const i8, *const f32, *const i32) {
        let first = row * self.num_groups + group;
        (self.ints[first * GROUP..].as_ptr(), self.scales[first..].as_ptr(), self.offsets[first..].as_ptr())
    }

    /// Quantises `num_rows` rows, at least one; `isa` is one that this CPU has.
    pub(crate) fn fill(&mut self, isa: Isa, team: &Team<'_>, input: &[f32], num_rows: usize) {
        let len = input.len() / num_rows;
        self.num_groups = len.div_ceil(GROUP);
        let num_scales = num_rows * self.num_groups;
        if self.scales.len() < num_scales {
            self.ints.resize(num_scales * GROUP, 0);
            self.scales.resize(num_scales, 0.0);
            self.offsets.resize(num_scales, 0);
        }
        let target = Target {
            ints: self.ints.as_mut_ptr(),
            scales: self.scales.as_mut_ptr(),
            offsets: self.offsets.as_mut_ptr(),
            num_groups: self.num_groups,
        };
        let target = &target;
        let parallel = input.len() >= PARALLEL_NUMBERS && num_rows > 1;
        let count = if parallel { (RUNS_PER_THREAD * team.num_threads()).min(num_rows) } else { 1 };
        team.run(count, parallel, |_, item| {
            for row in num_rows * item / count..num_rows * (item + 1) / count {
                // SAFETY: the buffers were made for `num_rows` rows, of which each belongs to one item.
                let to = unsafe { target.row(row) };
                let from = &input[row * len..][..len];
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    // SAFETY: the caller promises the instruction set; AVX-512 includes AVX2.
                    Isa::Avx512 | Isa::Avx2 => unsafe { quantize_avx2(from, to) },
                    _ => quantize(from, to),
                }
            }
        });
    }
}

/// Where one row goes.
struct Row<'a> {
    ints: &'a mut [i8],
    scales: &'a mut [f32],
    offsets: &'a mut [i32],
}

/// # Safety
/// The CPU must have the features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn quantize_avx2(from: &[f32], to: Row<'_>) {
    quantize(from, to);
}

/// Plain Rust, which the compiler turns into the vectors of the function around it.
#[inline(always)]
fn quantize(from: &[f32], to: Row<'_>) {
    let groups = to.ints.as_chunks_mut::<GROUP>().0.iter_mut();
    let places = groups.zip(to.scales).zip(to.offsets);
    for (start, ((ints, scale), offset)) in (0..from.len()).step_by(GROUP).zip(places) {
        let mut padded = [0.0; GROUP];
        let group = from[start..].first_chunk::<GROUP>().unwrap_or_else(|| {
            padded[..from.len() - start].copy_from_slice(&from[start..]);
            &padded
        });
        let mut greatest = [0; GROUP / 2];
        for (greatest, pair) in greatest.iter_mut().zip(group.as_chunks::<2>().0) {
            let [first, second] = *pair;
            *greatest = magnitude(first).max(magnitude(second)).max(magnitude(first + second));
        }
        let factor;
        (*scale, factor) = scale_for(greatest.into_iter().fold(0, u32::max));
        if factor == 0.0 {
            // Infinity times 0 is NaN, which is no integer.
            ints.fill(0);
            *offset = 0;
            continue;
        }
        let mut sum = 0;
        for (int, number) in ints.iter_mut().zip(group) {
            let rounded = round(number * factor);
            sum += rounded;
            *int = rounded as i8;
        }
        *offset = -128 * sum;
    }
}
