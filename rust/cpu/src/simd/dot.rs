//! Sums of products of small integers in 32-bit lanes: what products with int8 weights need.
//!
//! A vector of sums has a lane for each output, and a step adds the products of four inputs to every lane. Weights are
//! bytes in the order in which steps read them, see [`DotSet::place`]; a step gives those of two vectors.
//!
//! x86 multiplies bytes without a sign by bytes with one. So weights are stored plus 128, and sums start at what that adds
//! too much. Without VNNI the products of two neighbouring inputs are added up in 16 bits, saturated: that loses nothing
//! while two neighbouring inputs of one sign have a sum of at most 128 in magnitude (255 * 128 < 2^15), which
//! `linear/quantize.rs` sees to.
//!
//! Invariants:
//! 1. All instruction sets give the same sums: integers, of which nothing is rounded or saturated.

use super::Simd;
use super::portable::Portable;
use crate::dispatch::Isa;

/// Inputs that share a scale.
pub(crate) const GROUP: usize = 32;
/// Largest magnitude of a quantised number.
pub(crate) const MAX_INT: i32 = 127;
/// Inputs of a step.
pub(crate) const STEP: usize = 4;

/// Instruction sets that add up products of integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DotSet {
    /// AVX-512 with VNNI: products of bytes.
    Vnni,
    /// AVX-512BW: sums of products of bytes in 16 bits, then in 32.
    Avx512,
    /// AVX2: the same.
    Avx2,
    /// Plain Rust.
    Portable,
}

impl DotSet {
    /// Returns the one that goes with `isa` on this CPU.
    pub(crate) fn choose(isa: Isa) -> Self {
        match isa {
            Isa::Avx512 => [Self::Vnni, Self::Avx512].into_iter().find(|set| set.is_available()).unwrap_or(Self::Avx2),
            Isa::Avx2 => Self::Avx2,
            Isa::Portable => Self::Portable,
        }
    }

    /// Tells whether this CPU has it.
    pub(crate) fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx512 = Isa::Avx512.is_available() && is_x86_feature_detected!("avx512bw");
            match self {
                Self::Vnni => avx512 && is_x86_feature_detected!("avx512vnni"),
                Self::Avx512 => avx512,
                Self::Avx2 => Isa::Avx2.is_available(),
                Self::Portable => true,
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Self::Portable
        }
    }

    /// Returns its name in lower case.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Vnni => "avx512-vnni",
            Self::Avx512 => "avx512",
            Self::Avx2 => "avx2",
            Self::Portable => "portable",
        }
    }

    /// Sums in a vector.
    pub(crate) fn lanes(self) -> usize {
        match self {
            Self::Vnni | Self::Avx512 => 16,
            Self::Avx2 | Self::Portable => 8,
        }
    }

    /// Where the weight of an input of a group lies among those of `2 * lanes` outputs: four inputs of each lane of the
    /// first vector, the same of the second one, then the next four inputs.
    pub(crate) fn place(self, column: usize, input: usize) -> usize {
        let (half, lane) = (column / self.lanes(), column % self.lanes());
        ((input / STEP * 2 + half) * self.lanes() + lane) * STEP + input % STEP
    }
}

/// How a weight is stored: plus 128.
pub(crate) fn store_weight(weight: i8) -> u8 {
    (weight as u8) ^ 0x80
}

/// Undoes [`store_weight`].
pub(crate) fn load_weight(stored: u8) -> i8 {
    (stored ^ 0x80) as i8
}

/// Adds up products of integers, on vectors with as many lanes as those of [`Self::Numbers`].
///
/// # Safety
/// A type promises that its methods are sound on every CPU that has its instruction set. Callers promise that the
/// running CPU has it, and that pointers are valid for what a step reads.
pub(crate) unsafe trait Dot: Copy {
    /// Vectors of numbers.
    type Numbers: Simd;
    /// A vector of sums.
    type Sums: Copy;
    /// Weights or inputs of a step, for one vector of sums.
    type Bytes: Copy;
    /// Rows of a tile of a product: with two vectors a row its sums, the weights, an input and an intermediate result fill
    /// the registers.
    const TILE_ROWS: usize;

    /// Returns sums to start with, all alike.
    unsafe fn start(offset: i32) -> Self::Sums;
    /// Loads the weights of a step, `2 * LANES * STEP` bytes; no alignment needed.
    unsafe fn weights(ptr: *const u8) -> [Self::Bytes; 2];
    /// Loads the `STEP` inputs of a step, to every lane; no alignment needed.
    unsafe fn inputs(ptr: *const i8) -> Self::Bytes;
    /// Adds the products.
    unsafe fn add(sums: Self::Sums, weights: Self::Bytes, inputs: Self::Bytes) -> Self::Sums;
    /// Returns the sums of a group as numbers; exact, since they are below 2^24.
    unsafe fn to_numbers(sums: Self::Sums) -> <Self::Numbers as Simd>::Vector;
}

// SAFETY: plain Rust; the only unsafe operations are the loads that the callers vouch for.
unsafe impl Dot for Portable<8> {
    type Numbers = Self;
    type Sums = [i32; 8];
    type Bytes = [[u8; STEP]; 8];
    const TILE_ROWS: usize = 4;

    #[inline(always)]
    unsafe fn start(offset: i32) -> [i32; 8] {
        [offset; 8]
    }

    #[inline(always)]
    unsafe fn weights(ptr: *const u8) -> [[[u8; STEP]; 8]; 2] {
        // SAFETY: the caller promises 64 readable bytes.
        unsafe { ptr.cast::<[[[u8; STEP]; 8]; 2]>().read() }
    }

    #[inline(always)]
    unsafe fn inputs(ptr: *const i8) -> [[u8; STEP]; 8] {
        // SAFETY: the caller promises four readable inputs.
        [unsafe { ptr.cast::<[u8; STEP]>().read() }; 8]
    }

    #[inline(always)]
    unsafe fn add(mut sums: [i32; 8], weights: [[u8; STEP]; 8], inputs: [[u8; STEP]; 8]) -> [i32; 8] {
        for ((sum, weights), inputs) in sums.iter_mut().zip(weights).zip(inputs) {
            for (weight, input) in weights.into_iter().zip(inputs) {
                *sum += i32::from(weight) * i32::from(input as i8);
            }
        }
        sums
    }

    #[inline(always)]
    unsafe fn to_numbers(sums: [i32; 8]) -> [f32; 8] {
        sums.map(|sum| sum as f32)
    }
}
