//! The formulas of the block encodings: one block of bytes to its float32 values.
//!
//! A block starts with (or, for `Q6_K`, ends with) half-precision scales, followed by packed
//! integers; value = scale × integer (− or + minimum). The order of the operations is part of the
//! format: it decides the last bit of the float32 result.
//!
//! Invariant: `values` and `block` have exactly the sizes of [`crate::Encoding`]; the callers cut
//! them with `chunks_exact`.

use half::f16;

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// `Q4_0`: scale, 16 bytes; the low halves are the first 16 values, the high halves the rest.
pub(crate) fn q4_0(block: &[u8], values: &mut [f32]) {
    let scale = half_at(block, 0);
    let (low, high) = values.split_at_mut(16);
    for ((low, high), &byte) in low.iter_mut().zip(high).zip(&block[2..18]) {
        *low = (i32::from(byte & 15) - 8) as f32 * scale;
        *high = (i32::from(byte >> 4) - 8) as f32 * scale;
    }
}

/// `Q4_1`: scale, minimum, 16 bytes.
pub(crate) fn q4_1(block: &[u8], values: &mut [f32]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    let (low, high) = values.split_at_mut(16);
    for ((low, high), &byte) in low.iter_mut().zip(high).zip(&block[4..20]) {
        *low = i32::from(byte & 15) as f32 * scale + minimum;
        *high = i32::from(byte >> 4) as f32 * scale + minimum;
    }
}

fn fifth_bits(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// The 5-bit integers of values `i` and `i + 16`: four bits from `byte`, the fifth from `bits`.
fn five_bits(byte: u8, bits: u32, i: usize) -> (i32, i32) {
    let low = u32::from(byte & 15) | ((bits >> i) & 1) << 4;
    let high = u32::from(byte >> 4) | ((bits >> (i + 16)) & 1) << 4;
    (low as i32, high as i32)
}

/// `Q5_0`: scale, 32 fifth bits, 16 bytes.
pub(crate) fn q5_0(block: &[u8], values: &mut [f32]) {
    let (scale, bits) = (half_at(block, 0), fifth_bits(block, 2));
    for (i, &byte) in block[6..22].iter().enumerate() {
        let (low, high) = five_bits(byte, bits, i);
        values[i] = (low - 16) as f32 * scale;
        values[i + 16] = (high - 16) as f32 * scale;
    }
}

/// `Q5_1`: scale, minimum, 32 fifth bits, 16 bytes.
pub(crate) fn q5_1(block: &[u8], values: &mut [f32]) {
    let (scale, minimum, bits) = (half_at(block, 0), half_at(block, 2), fifth_bits(block, 4));
    for (i, &byte) in block[8..24].iter().enumerate() {
        let (low, high) = five_bits(byte, bits, i);
        values[i] = low as f32 * scale + minimum;
        values[i + 16] = high as f32 * scale + minimum;
    }
}

/// `Q8_0`: scale, 32 signed bytes.
pub(crate) fn q8_0(block: &[u8], values: &mut [f32]) {
    let scale = half_at(block, 0);
    for (value, &byte) in values.iter_mut().zip(&block[2..34]) {
        *value = f32::from(byte as i8) * scale;
    }
}

/// The 6-bit scale and minimum of sub-block `i` (0..8), packed into 12 bytes.
///
/// The first four of each take the low six bits of a byte; the others take four bits of the last
/// bytes and the two high bits that the first ones leave free.
fn packed_scale(packed: &[u8], i: usize) -> (f32, f32) {
    let (scale, minimum) = if i < 4 {
        (packed[i] & 63, packed[i + 4] & 63)
    } else {
        ((packed[i + 4] & 15) | (packed[i - 4] >> 6) << 4, (packed[i + 4] >> 4) | (packed[i] >> 6) << 4)
    };
    (f32::from(scale), f32::from(minimum))
}

/// `Q4_K`: scale of scales, scale of minima, 12 bytes of scales, 128 bytes.
pub(crate) fn q4_k(block: &[u8], values: &mut [f32]) {
    let (d, d_minimum) = (half_at(block, 0), half_at(block, 2));
    let packed = &block[4..16];
    let pairs = values.chunks_exact_mut(64).zip(block[16..144].chunks_exact(32));
    for (pair, (values, bytes)) in pairs.enumerate() {
        let (scale, minimum) = packed_scale(packed, 2 * pair);
        let (scale, minimum) = (d * scale, d_minimum * minimum);
        let (next_scale, next_minimum) = packed_scale(packed, 2 * pair + 1);
        let (next_scale, next_minimum) = (d * next_scale, d_minimum * next_minimum);
        let (low, high) = values.split_at_mut(32);
        for ((low, high), &byte) in low.iter_mut().zip(high).zip(bytes) {
            *low = scale * f32::from(byte & 15) - minimum;
            *high = next_scale * f32::from(byte >> 4) - next_minimum;
        }
    }
}

/// `Q5_K`: as `Q4_K`, with 32 bytes of fifth bits (bit `i` for sub-block `i`) before the integers.
pub(crate) fn q5_k(block: &[u8], values: &mut [f32]) {
    let (d, d_minimum) = (half_at(block, 0), half_at(block, 2));
    let (packed, fifths) = (&block[4..16], &block[16..48]);
    let pairs = values.chunks_exact_mut(64).zip(block[48..176].chunks_exact(32));
    for (pair, (values, bytes)) in pairs.enumerate() {
        let (scale, minimum) = packed_scale(packed, 2 * pair);
        let (scale, minimum) = (d * scale, d_minimum * minimum);
        let (next_scale, next_minimum) = packed_scale(packed, 2 * pair + 1);
        let (next_scale, next_minimum) = (d * next_scale, d_minimum * next_minimum);
        let (low, high) = values.split_at_mut(32);
        for (((low, high), &byte), &fifth) in low.iter_mut().zip(high).zip(bytes).zip(fifths) {
            let first = (byte & 15) | ((fifth >> (2 * pair)) & 1) << 4;
            let second = (byte >> 4) | ((fifth >> (2 * pair + 1)) & 1) << 4;
            *low = scale * f32::from(first) - minimum;
            *high = next_scale * f32::from(second) - next_minimum;
        }
    }
}

/// `Q6_K`: 128 bytes of low halves, 64 bytes of high pairs of bits, 16 signed scales, scale.
///
/// Each half of the block holds four runs of 32 values, with two sub-blocks of 16 a run.
pub(crate) fn q6_k(block: &[u8], values: &mut [f32]) {
    let d = half_at(block, 208);
    for (half, values) in values.chunks_exact_mut(128).enumerate() {
        let low = &block[64 * half..64 * half + 64];
        let high = &block[128 + 32 * half..128 + 32 * half + 32];
        let scales = &block[192 + 8 * half..192 + 8 * half + 8];
        for (run, values) in values.chunks_exact_mut(32).enumerate() {
            let low = &low[32 * (run % 2)..32 * (run % 2) + 32];
            for (sub, values) in values.chunks_exact_mut(16).enumerate() {
                let scale = d * f32::from(scales[2 * run + sub] as i8);
                let bytes = low[16 * sub..].iter().zip(&high[16 * sub..]);
                for (value, (&low, &high)) in values.iter_mut().zip(bytes) {
                    let four = if run < 2 { low & 15 } else { low >> 4 };
                    let six = four | ((high >> (2 * run)) & 3) << 4;
                    *value = scale * (i32::from(six) - 32) as f32;
                }
            }
        }
    }
}
