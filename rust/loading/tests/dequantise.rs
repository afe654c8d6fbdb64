//! Blocks that are packed here from known integers decode to the values that the formula gives.
//!
//! The packing is the inverse of the decoder and written from the description of the format, so an
//! error in one of them does not hide in the other.

#![allow(clippy::unwrap_used, clippy::needless_range_loop)]

mod support;

use cbrs_loading::gguf::GgufFile;
use half::{bf16, f16};
use proptest::collection::vec;
use proptest::prelude::*;
use support::*;

/// Writes one row of one tensor and reads it back as float32 and as bfloat16.
fn decode(kind: u32, elements: usize, data: &[u8]) -> (Vec<f32>, Vec<u16>) {
    let folder = tempfile::tempdir().unwrap();
    let path = Gguf::new().tensor("w", &[elements as u64], kind, 0).data(data).write(folder.path());
    let file = GgufFile::open(path).unwrap();
    (file.tensor_f32("w").unwrap(), file.tensor_bf16("w").unwrap())
}

/// Rounds to bfloat16 by the definition: nearest, ties to the even one.
fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let (kept, lost) = ((bits >> 16) as u16, bits & 0xffff);
    let up = lost > 0x8000 || (lost == 0x8000 && kept & 1 == 1);
    kept + u16::from(up)
}

fn check(kind: u32, data: &[u8], expected: &[f32]) {
    let (values, rounded) = decode(kind, expected.len(), data);
    assert_eq!(values, expected);
    let expected: Vec<u16> = expected.iter().map(|&value| to_bf16(value)).collect();
    assert_eq!(rounded, expected);
}

/// A finite scale.
fn scale() -> impl Strategy<Value = f16> {
    (-0x7bff_i32..=0x7bff)
        .prop_map(|bits| f16::from_bits(bits.unsigned_abs() as u16 | if bits < 0 { 0x8000 } else { 0 }))
}

/// Packs value `i` into the low and value `i + 16` into the high half of byte `i`.
fn halves(values: &[u8]) -> Vec<u8> {
    (0..16).map(|i| (values[i] & 15) | (values[i + 16] & 15) << 4).collect()
}

fn fifths(values: &[u8]) -> Vec<u8> {
    let bits = (0..32).fold(0_u32, |bits, i| bits | u32::from(values[i] >> 4) << i);
    bits.to_le_bytes().to_vec()
}

/// Packs eight 6-bit scales and eight 6-bit minima into 12 bytes.
fn pack_scales(scales: &[u8], minima: &[u8]) -> Vec<u8> {
    let mut packed = vec![0; 12];
    for i in 0..4 {
        packed[i] = scales[i] | (scales[i + 4] >> 4) << 6;
        packed[i + 4] = minima[i] | (minima[i + 4] >> 4) << 6;
        packed[i + 8] = (scales[i + 4] & 15) | (minima[i + 4] & 15) << 4;
    }
    packed
}

/// Packs the low halves of 256 values: pairs of runs of 32 share their bytes.
fn runs(values: &[u8]) -> Vec<u8> {
    let pair = |i: usize| (i / 32) * 64 + i % 32;
    (0..128).map(|i| (values[pair(i)] & 15) | (values[pair(i) + 32] & 15) << 4).collect()
}

fn le(value: f16) -> Vec<u8> {
    value.to_le_bytes().to_vec()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn q4_0_is_scale_times_integer_around_eight(d in scale(), q in vec(0_u8..16, 32)) {
        let expected: Vec<f32> = q.iter().map(|&q| (f32::from(q) - 8.0) * d.to_f32()).collect();
        check(Q4_0, &[le(d), halves(&q)].concat(), &expected);
    }

    #[test]
    fn q4_1_is_scale_times_integer_plus_minimum(d in scale(), m in scale(), q in vec(0_u8..16, 32)) {
        let expected: Vec<f32> =
            q.iter().map(|&q| f32::from(q) * d.to_f32() + m.to_f32()).collect();
        check(Q4_1, &[le(d), le(m), halves(&q)].concat(), &expected);
    }

    #[test]
    fn q5_0_is_scale_times_integer_around_sixteen(d in scale(), q in vec(0_u8..32, 32)) {
        let expected: Vec<f32> = q.iter().map(|&q| (f32::from(q) - 16.0) * d.to_f32()).collect();
        check(Q5_0, &[le(d), fifths(&q), halves(&q)].concat(), &expected);
    }

    #[test]
    fn q5_1_is_scale_times_integer_plus_minimum(d in scale(), m in scale(), q in vec(0_u8..32, 32)) {
        let expected: Vec<f32> =
            q.iter().map(|&q| f32::from(q) * d.to_f32() + m.to_f32()).collect();
        check(Q5_1, &[le(d), le(m), fifths(&q), halves(&q)].concat(), &expected);
    }

    #[test]
    fn q8_0_is_scale_times_signed_byte(d in scale(), q in vec(any::<i8>(), 32)) {
        let expected: Vec<f32> = q.iter().map(|&q| f32::from(q) * d.to_f32()).collect();
        let bytes: Vec<u8> = q.iter().map(|&q| q as u8).collect();
        check(Q8_0, &[le(d), bytes].concat(), &expected);
    }

    #[test]
    fn q4_k_has_a_scale_and_a_minimum_for_every_32_values(
        d in scale(), m in scale(), scales in vec(0_u8..64, 8), minima in vec(0_u8..64, 8),
        q in vec(0_u8..16, 256),
    ) {
        let data = [le(d), le(m), pack_scales(&scales, &minima), runs(&q)].concat();
        check(Q4_K, &data, &k_values(d, m, &scales, &minima, &q));
    }

    #[test]
    fn q5_k_keeps_the_fifth_bits_apart(
        d in scale(), m in scale(), scales in vec(0_u8..64, 8), minima in vec(0_u8..64, 8),
        q in vec(0_u8..32, 256),
    ) {
        let fifth = |i: usize| (0..8).fold(0, |bits, run| bits | (q[32 * run + i] >> 4) << run);
        let fifths: Vec<u8> = (0..32).map(fifth).collect();
        let data = [le(d), le(m), pack_scales(&scales, &minima), fifths, runs(&q)].concat();
        check(Q5_K, &data, &k_values(d, m, &scales, &minima, &q));
    }

    #[test]
    fn q6_k_has_a_signed_scale_for_every_16_values(
        d in scale(), scales in vec(any::<i8>(), 16), q in vec(0_u8..64, 256),
    ) {
        // In each half of the block, runs 0 and 1 are the low nibbles, runs 2 and 3 the high ones.
        let (mut low, mut high) = (vec![0_u8; 128], vec![0_u8; 64]);
        for i in 0..256 {
            let (half, run, at) = (i / 128, i % 128 / 32, i % 32);
            low[64 * half + 32 * (run % 2) + at] |= (q[i] & 15) << (4 * (run / 2));
            high[32 * half + at] |= (q[i] >> 4) << (2 * run);
        }
        let value = |i: usize| {
            d.to_f32() * f32::from(scales[i / 16]) * (f32::from(q[i]) - 32.0)
        };
        let expected: Vec<f32> = (0..256).map(value).collect();
        let scales: Vec<u8> = scales.iter().map(|&scale| scale as u8).collect();
        check(Q6_K, &[low, high, scales, le(d)].concat(), &expected);
    }

    #[test]
    fn plain_numbers_come_back_as_they_are(values in vec(-1e30_f32..1e30, 1..40)) {
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        check(F32, &data, &values);
        let halves: Vec<f16> = values.iter().map(|&value| f16::from_f32(value / 1e28)).collect();
        let data: Vec<u8> = halves.iter().flat_map(|value| value.to_le_bytes()).collect();
        check(F16, &data, &halves.iter().map(|value| value.to_f32()).collect::<Vec<_>>());
        let brains: Vec<bf16> = values.iter().map(|&value| bf16::from_f32(value)).collect();
        let data: Vec<u8> = brains.iter().flat_map(|value| value.to_le_bytes()).collect();
        check(BF16, &data, &brains.iter().map(|value| value.to_f32()).collect::<Vec<_>>());
    }
}

fn k_values(d: f16, m: f16, scales: &[u8], minima: &[u8], q: &[u8]) -> Vec<f32> {
    let value = |i: usize| {
        let scale = d.to_f32() * f32::from(scales[i / 32]);
        let minimum = m.to_f32() * f32::from(minima[i / 32]);
        scale * f32::from(q[i]) - minimum
    };
    (0..256).map(value).collect()
}

/// Numbers 0, 1, 2, … as float32.
fn counting(count: usize) -> Vec<u8> {
    (0..count).flat_map(|i| (i as f32).to_le_bytes()).collect()
}

#[test]
fn large_tensors_are_decoded_completely_whatever_the_number_of_threads() {
    let folder = tempfile::tempdir().unwrap();
    let (rows, columns) = (1_031, 1_023);
    let path = Gguf::new()
        .tensor("w", &[columns, rows], F32, 0)
        .data(counting((rows * columns) as usize))
        .write(folder.path());
    let values = GgufFile::open(path).unwrap().tensor_f32("w").unwrap();
    assert_eq!(values.len(), 1_031 * 1_023);
    assert!(values.iter().enumerate().all(|(i, value)| value.to_bits() == (i as f32).to_bits()));
}

/// The rows of a matrix of counting numbers with 2 columns, by the first number of each.
fn row_numbers(file: &GgufFile, name: &str) -> Vec<usize> {
    let values = file.tensor_f32(name).unwrap();
    values.chunks(2).map(|row| row[0] as usize / 2).collect()
}

#[test]
fn query_and_key_rows_of_llama_files_are_put_into_half_split_order() {
    let folder = tempfile::tempdir().unwrap();
    let write = |architecture: &str| {
        let file = Gguf::new()
            .text("general.architecture", architecture)
            .u32(&format!("{architecture}.attention.head_count"), 2)
            .u32(&format!("{architecture}.attention.head_count_kv"), 1)
            .tensor("blk.0.attn_q.weight", &[2, 8], F32, 0)
            .tensor("blk.0.attn_k.weight", &[2, 4], F32, 64)
            .tensor("blk.0.attn_v.weight", &[2, 4], F32, 96)
            .tensor("blk.0.attn_q.bias", &[8], F32, 128)
            .data([counting(16), counting(8), counting(8), counting(8)].concat())
            .write(folder.path());
        GgufFile::open(file).unwrap()
    };
    let file = write("llama");
    assert_eq!(row_numbers(&file, "blk.0.attn_q.weight"), [0, 2, 1, 3, 4, 6, 5, 7]);
    assert_eq!(row_numbers(&file, "blk.0.attn_k.weight"), [0, 2, 1, 3]);
    assert_eq!(row_numbers(&file, "blk.0.attn_v.weight"), [0, 1, 2, 3]);
    let bias = file.tensor_f32("blk.0.attn_q.bias").unwrap();
    assert_eq!(bias, [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);

    // Other architectures store the rows as they are used.
    let file = write("qwen2");
    assert_eq!(row_numbers(&file, "blk.0.attn_q.weight"), [0, 1, 2, 3, 4, 5, 6, 7]);
}

#[test]
fn head_counts_may_differ_from_layer_to_layer() {
    let folder = tempfile::tempdir().unwrap();
    let path = Gguf::new()
        .text("general.architecture", "llama")
        .entry("llama.attention.head_count", ARRAY, &integers(&[1, 2]))
        .tensor("blk.0.attn_q.weight", &[2, 8], F32, 0)
        .tensor("blk.1.attn_q.weight", &[2, 8], F32, 64)
        .tensor("blk.2.attn_q.weight", &[2, 8], F32, 128)
        .data(counting(16).repeat(3))
        .write(folder.path());
    let file = GgufFile::open(path).unwrap();
    assert_eq!(row_numbers(&file, "blk.0.attn_q.weight"), [0, 2, 4, 6, 1, 3, 5, 7]);
    assert_eq!(row_numbers(&file, "blk.1.attn_q.weight"), [0, 2, 1, 3, 4, 6, 5, 7]);
    let error = file.tensor_f32("blk.2.attn_q.weight").unwrap_err();
    assert_eq!(error.field(), "llama.attention.head_count");
}
