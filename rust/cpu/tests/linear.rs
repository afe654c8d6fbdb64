//! Products with packed weights against the reference, and their independence of everything but row and feature.
#![allow(missing_docs, reason = "tests")]

mod common;

use cbrs_cpu::reference::{self, LinearShape};
use cbrs_cpu::{Activation, Error, Isa, Kernels, LinearArgs, PackedMatrix, Then, WeightType, WeightsRef, bf16};
use common::{Random, bits};

/// Weights as both types; the f32 ones are exactly the bf16 ones where `rounded`.
struct Weights {
    wide: Vec<f32>,
    narrow: Vec<u16>,
}

impl Weights {
    fn random(len: usize, random: &mut Random) -> Self {
        let wide = random.numbers(len);
        let narrow = wide.iter().map(|weight| bf16::from_f32(*weight)).collect();
        Self { wide, narrow }
    }

    fn get(&self, is_bf16: bool) -> WeightsRef<'_> {
        if is_bf16 { WeightsRef::Bf16(&self.narrow) } else { WeightsRef::F32(&self.wide) }
    }
}

/// All kernels that this machine runs.
fn all_kernels(num_threads: usize) -> impl Iterator<Item = Kernels> {
    let available = Isa::ALL.into_iter().filter(|isa| isa.is_available());
    available.map(move |isa| Kernels::with_isa(num_threads, isa).expect("available"))
}

fn run(
    kernels: &Kernels,
    matrix: &PackedMatrix,
    input: &[f32],
    num_rows: usize,
    bias: Option<&[f32]>,
    then: Then,
    before: &[f32],
) -> Vec<f32> {
    let mut out = before.to_vec();
    kernels.linear(LinearArgs { out: &mut out, input, num_rows, matrix, bias, then }).expect("valid");
    out
}

/// Checks one shape in all variants against the reference; what is not added to starts as NaN.
fn check(num_rows: usize, in_features: usize, out_features: usize, random: &mut Random) {
    let weights = Weights::random(out_features * in_features, random);
    let input = random.numbers(num_rows * in_features);
    let bias = random.numbers(out_features);
    let gates = [Activation::Silu, Activation::GeluTanh].map(Then::Gate);
    for kernels in all_kernels(2) {
        for is_bf16 in [false, true] {
            for then in [Then::Store, Then::Add].into_iter().chain(gates) {
                let is_gated = matches!(then, Then::Gate(_));
                if is_gated && !out_features.is_multiple_of(2) {
                    continue;
                }
                let parts = if is_gated { 2 } else { 1 };
                let matrix = kernels.pack(weights.get(is_bf16), out_features, in_features, parts).expect("valid");
                let len = num_rows * out_features / parts;
                let before = if then == Then::Add { random.numbers(len) } else { vec![f32::NAN; len] };
                for bias in [None, Some(&bias[..])] {
                    let got = run(&kernels, &matrix, &input, num_rows, bias, then, &before);
                    let shape = LinearShape { num_rows, in_features, out_features, then };
                    let expected = reference::linear(&before, &input, weights.get(is_bf16), bias, shape);
                    assert_eq!(got.len(), expected.len());
                    // Rounding grows with the root of the terms; a product of two sums has that of both.
                    let limit = 2e-6 * (in_features as f64).sqrt() * (2.0 + (in_features as f64).sqrt());
                    for (index, (got, expected)) in got.iter().zip(&expected).enumerate() {
                        let error = (f64::from(*got) - expected).abs();
                        assert!(
                            error <= limit,
                            "{num_rows} x {in_features} x {out_features} {then:?} [{index}]: {got}, not {expected}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn odd_sizes_equal_the_reference() {
    let mut random = Random::new(1);
    for (num_rows, in_features, out_features) in [
        (1, 1, 1),
        (1, 3, 2),
        (2, 5, 17),
        (3, 7, 31),
        (4, 64, 33),
        (5, 63, 48),
        (6, 65, 34),
        (7, 17, 64),
        (12, 4, 15),
        (13, 111, 130),
        (25, 255, 66),
        (31, 257, 32),
        (64, 300, 96),
        (97, 513, 18),
        (200, 33, 50),
    ] {
        check(num_rows, in_features, out_features, &mut random);
    }
    for _ in 0..40 {
        let (rows, inputs, outputs) = (random.below(20), 1 + random.below(90), 1 + random.below(90));
        check(rows, inputs, outputs, &mut random);
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_batch_on_any_number_of_threads() {
    let mut random = Random::new(2);
    let (num_rows, in_features, out_features) = (150, 530, 148);
    let weights = Weights::random(out_features * in_features, &mut random);
    let input = random.numbers(num_rows * in_features);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let single = Kernels::with_isa(1, isa).expect("available");
        let several = Kernels::with_isa(3, isa).expect("available");
        for (is_bf16, then) in [(false, Then::Store), (true, Then::Store), (true, Then::Gate(Activation::Silu))] {
            let matrix = single.pack(weights.get(is_bf16), out_features, in_features, 2).expect("valid");
            let width = if then == Then::Store { out_features } else { out_features / 2 };
            let rows = |kernels: &Kernels, first: usize, count: usize| {
                let input = &input[first * in_features..(first + count) * in_features];
                run(kernels, &matrix, input, count, None, then, &vec![f32::NAN; count * width])
            };
            let whole = bits(&rows(&several, 0, num_rows));
            for count in [1, 2, 3, 4, 5, 6, 7, 9, 13, 40, 149] {
                let first = random.below(num_rows - count);
                let expected = &whole[first * width..(first + count) * width];
                assert_eq!(bits(&rows(&single, first, count)), expected);
                assert_eq!(bits(&rows(&several, first, count)), expected);
            }
        }
    }
}

#[test]
fn a_nan_stays_in_its_row_and_a_weight_that_is_nan_in_its_feature() {
    let mut random = Random::new(3);
    let (num_rows, in_features, out_features) = (11, 40, 37);
    let mut weights = random.numbers(out_features * in_features);
    weights[20 * in_features + 39] = f32::NAN;
    let mut input = random.numbers(num_rows * in_features);
    input[5 * in_features] = f32::INFINITY;
    for kernels in all_kernels(1) {
        let matrix = kernels.pack(WeightsRef::F32(&weights), out_features, in_features, 1).expect("valid");
        let out = run(&kernels, &matrix, &input, num_rows, None, Then::Store, &vec![0.0; num_rows * out_features]);
        for (index, number) in out.iter().enumerate() {
            let (row, feature) = (index / out_features, index % out_features);
            assert_eq!(number.is_finite(), row != 5 && feature != 20);
        }
    }
}

#[test]
fn features_are_read_back_as_they_were_packed() {
    let mut random = Random::new(4);
    for (out_features, parts) in [(70, 1), (70, 2), (16, 1), (1, 1)] {
        let weights = Weights::random(out_features * 9, &mut random);
        for kernels in all_kernels(2) {
            for is_bf16 in [false, true] {
                let matrix = kernels.pack(weights.get(is_bf16), out_features, 9, parts).expect("valid");
                assert_eq!(matrix.weight_type(), if is_bf16 { WeightType::Bf16 } else { WeightType::F32 });
                for feature in 0..out_features {
                    let mut row = [f32::NAN; 9];
                    matrix.read_feature(feature, &mut row).expect("exists");
                    let expected: Vec<f32> = match weights.get(is_bf16) {
                        WeightsRef::F32(data) => data[feature * 9..][..9].to_vec(),
                        WeightsRef::Bf16(data) => data[feature * 9..][..9].iter().map(|w| bf16::to_f32(*w)).collect(),
                    };
                    assert_eq!(row.to_vec(), expected);
                }
                assert!(matrix.read_feature(out_features, &mut [0.0; 9]).is_err());
            }
        }
    }
}

#[test]
fn a_packed_matrix_is_no_larger_than_its_weights_but_for_the_last_panels() {
    let kernels = Kernels::new(1).expect("starts");
    let matrix = kernels.pack(WeightsRef::Bf16(&[0; 100 * 50]), 100, 50, 2).expect("valid");
    let panel_bytes = 2 * 50 * matrix.panel_width();
    assert!(matrix.num_bytes() < 2 * 100 * 50 + 2 * panel_bytes);
    assert_eq!((matrix.out_features(), matrix.in_features(), matrix.num_parts()), (100, 50, 2));
}

#[test]
fn bad_shapes_are_refused_with_their_numbers_and_nothing_is_written() {
    let kernels = Kernels::new(1).expect("starts");
    let text = |result: Result<PackedMatrix, Error>| result.expect_err("refused").to_string();
    let weights = WeightsRef::F32(&[0.0; 12]);
    assert_eq!(text(kernels.pack(weights, 0, 4, 1)), "out_features must be at least 1");
    assert_eq!(text(kernels.pack(weights, 3, 4, 2)), "3 output features are not 2 parts of equal size");
    assert_eq!(text(kernels.pack(weights, 3, 5, 1)), "weights has 12 elements, expected 15");
    assert!(matches!(kernels.pack(weights, usize::MAX / 2, 9, 1), Err(Error::MatrixTooLarge { .. })));
    let matrix = kernels.pack(weights, 3, 4, 1).expect("valid");
    let refuse = |input: usize, out: usize, bias: Option<&[f32]>, then: Then| {
        let mut out = vec![f32::NAN; out];
        let input = vec![1.0; input];
        let args = LinearArgs { out: &mut out, input: &input, num_rows: 2, matrix: &matrix, bias, then };
        let error = kernels.linear(args).expect_err("refused").to_string();
        assert!(out.iter().all(|number| number.is_nan()));
        error
    };
    assert_eq!(refuse(7, 6, None, Then::Store), "input has 7 elements, expected 8");
    assert_eq!(refuse(8, 7, None, Then::Store), "out has 7 elements, expected 6");
    assert_eq!(refuse(8, 6, Some(&[0.0; 2]), Then::Add), "bias has 2 elements, expected 3");
    let gate = Then::Gate(Activation::Silu);
    assert_eq!(refuse(8, 6, None, gate), "a gated product needs a matrix of 2 parts, this one has 1");
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available() && *isa != kernels.isa()) {
        let other = Kernels::with_isa(1, isa).expect("available");
        let mut out = [f32::NAN; 3];
        let args =
            LinearArgs { out: &mut out, input: &[1.0; 4], num_rows: 1, matrix: &matrix, bias: None, then: Then::Store };
        assert!(matches!(other.linear(args), Err(Error::PackedFor { .. })));
    }
}
