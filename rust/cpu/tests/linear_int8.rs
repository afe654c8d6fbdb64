//! Products with int8 weights against the reference, and their independence of everything but row and feature.
#![allow(missing_docs, reason = "tests")]

mod common;

use cbrs_cpu::reference::{self, LinearShape};
use cbrs_cpu::{Activation, Isa, Kernels, LinearArgs, PackedMatrix, Then, WeightType, WeightsRef, bf16};
use common::{Random, bits};

fn all_kernels(num_threads: usize) -> impl Iterator<Item = Kernels> {
    let available = Isa::ALL.into_iter().filter(|isa| isa.is_available());
    available.map(move |isa| Kernels::with_isa(num_threads, isa).expect("available"))
}

fn pack(kernels: &Kernels, weights: &[f32], out_features: usize, in_features: usize, parts: usize) -> PackedMatrix {
    kernels.pack_int8(WeightsRef::F32(weights), out_features, in_features, parts).expect("valid")
}

fn run(kernels: &Kernels, matrix: &PackedMatrix, input: &[f32], num_rows: usize, then: Then, out: &mut [f32]) {
    kernels.linear(LinearArgs { out, input, num_rows, matrix, bias: None, then }).expect("valid");
}

fn store(kernels: &Kernels, matrix: &PackedMatrix, input: &[f32]) -> Vec<f32> {
    let num_rows = input.len() / matrix.in_features();
    let mut out = vec![f32::NAN; num_rows * matrix.out_features()];
    run(kernels, matrix, input, num_rows, Then::Store, &mut out);
    out
}

/// Numbers of which some are much greater than others, some groups are 0, and neighbours often have equal signs.
fn uneven(len: usize, random: &mut Random) -> Vec<f32> {
    let mut numbers = random.numbers(len);
    for group in numbers.chunks_mut(32) {
        match random.below(6) {
            0 => group.fill(0.0),
            1 => group.iter_mut().for_each(|number| *number = number.abs()),
            2 => group.fill(-0.75),
            3 => {
                let index = random.below(group.len());
                group[index] *= 50.0;
            }
            _ => group.iter_mut().for_each(|number| *number *= 1e-3),
        }
    }
    numbers
}

fn check(num_rows: usize, in_features: usize, out_features: usize, random: &mut Random) {
    let wide = uneven(out_features * in_features, random);
    let narrow: Vec<u16> = wide.iter().map(|weight| bf16::from_f32(*weight)).collect();
    let input = uneven(num_rows * in_features, random);
    let bias = random.numbers(out_features);
    let gates = [Activation::Silu, Activation::GeluTanh].map(Then::Gate);
    for kernels in all_kernels(2) {
        for then in [Then::Store, Then::Add].into_iter().chain(gates) {
            let is_gated = matches!(then, Then::Gate(_));
            if is_gated && !out_features.is_multiple_of(2) {
                continue;
            }
            let weights = if random.below(2) == 0 { WeightsRef::F32(&wide) } else { WeightsRef::Bf16(&narrow) };
            let parts = if is_gated { 2 } else { 1 };
            let matrix = kernels.pack_int8(weights, out_features, in_features, parts).expect("valid");
            let len = num_rows * out_features / parts;
            let before = if then == Then::Add { random.numbers(len) } else { vec![f32::NAN; len] };
            let bias = (random.below(2) == 0).then_some(&bias[..]);
            let mut out = before.clone();
            kernels
                .linear(LinearArgs { out: &mut out, input: &input, num_rows, matrix: &matrix, bias, then })
                .expect("valid");
            let shape = LinearShape { num_rows, in_features, out_features, then };
            let expected = reference::linear_int8(&before, &input, weights, bias, shape);
            let greatest = expected.iter().fold(1.0, |greatest: f64, number| greatest.max(number.abs()));
            for (index, (got, expected)) in out.iter().zip(&expected).enumerate() {
                let error = (f64::from(*got) - expected).abs();
                assert!(
                    error <= 2e-6 * greatest,
                    "{num_rows} x {in_features} x {out_features} {then:?} [{index}]: {got}, not {expected}"
                );
            }
        }
    }
}

#[test]
fn odd_sizes_equal_the_reference() {
    let mut random = Random::new(1);
    for (num_rows, in_features, out_features) in [
        (1, 1, 1),
        (1, 33, 2),
        (2, 31, 17),
        (3, 64, 31),
        (4, 96, 33),
        (5, 63, 48),
        (6, 65, 34),
        (11, 576, 64),
        (13, 1000, 66),
        (97, 545, 18),
        (120, 33, 50),
    ] {
        check(num_rows, in_features, out_features, &mut random);
    }
    for _ in 0..40 {
        let (rows, inputs, outputs) = (random.below(20), 1 + random.below(150), 1 + random.below(90));
        check(rows, inputs, outputs, &mut random);
    }
}

/// With scales of 1 the result is the integer sum itself, exactly; the inputs are as large as two neighbours may be.
#[test]
fn sums_are_those_of_the_integers_also_at_the_ends_of_their_range() {
    let mut random = Random::new(2);
    for pattern in 0..4 {
        let (num_rows, in_features, out_features) = (7, 96, 40);
        let int = |random: &mut Random| (random.below(255) as i32 - 127) as f32;
        let mut weights: Vec<f32> = (0..out_features * in_features).map(|_| int(&mut random)).collect();
        let mut input = vec![0.0; num_rows * in_features];
        for (pair, index) in input.chunks_mut(2).zip(0..) {
            let first = random.below(128) as f32;
            pair.copy_from_slice(&match pattern {
                0 => [first, 127.0 - first],
                1 => [-first, first - 127.0],
                2 => [127.0, -127.0],
                _ => [first - 64.0, if index % 16 == 0 { 63.0 } else { 0.0 }],
            });
        }
        // Each group has a number of the greatest magnitude, so that its scale is 1.
        for group in weights.chunks_mut(32) {
            group[0] = if pattern % 2 == 0 { 127.0 } else { -127.0 };
            if pattern < 3 {
                let greatest = group[0];
                group[1..9].fill(greatest);
            }
        }
        for group in input.chunks_mut(32) {
            group[30] = -127.0;
            group[31] = 0.0;
        }
        for kernels in all_kernels(1) {
            let matrix = pack(&kernels, &weights, out_features, in_features, 1);
            let got = store(&kernels, &matrix, &input);
            for (index, got) in got.iter().enumerate() {
                let row = &input[index / out_features * in_features..][..in_features];
                let feature = &weights[index % out_features * in_features..][..in_features];
                let expected: i64 = row.iter().zip(feature).map(|(a, b)| *a as i64 * *b as i64).sum();
                assert_eq!(*got as i64, expected, "{pattern} {index}");
                assert_eq!(got.fract().to_bits() & 0x7fff_ffff, 0);
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_batch_on_any_number_of_threads() {
    let mut random = Random::new(3);
    let (num_rows, in_features, out_features) = (150, 530, 148);
    let weights = uneven(out_features * in_features, &mut random);
    let input = uneven(num_rows * in_features, &mut random);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let single = Kernels::with_isa(1, isa).expect("available");
        let several = Kernels::with_isa(3, isa).expect("available");
        for then in [Then::Store, Then::Gate(Activation::Silu)] {
            let matrix = pack(&single, &weights, out_features, in_features, 2);
            let width = if then == Then::Store { out_features } else { out_features / 2 };
            let rows = |kernels: &Kernels, first: usize, count: usize| {
                let mut out = vec![f32::NAN; count * width];
                let input = &input[first * in_features..(first + count) * in_features];
                run(kernels, &matrix, input, count, then, &mut out);
                bits(&out)
            };
            let whole = rows(&several, 0, num_rows);
            for count in [1, 2, 3, 4, 5, 6, 7, 9, 13, 40, 149] {
                let first = random.below(num_rows - count);
                let expected = &whole[first * width..(first + count) * width];
                assert_eq!(rows(&single, first, count), expected);
                assert_eq!(rows(&several, first, count), expected);
            }
        }
    }
}

#[test]
fn what_is_not_finite_stays_in_its_row_and_its_feature() {
    let mut random = Random::new(4);
    let (num_rows, in_features, out_features) = (11, 70, 37);
    let mut weights = random.numbers(out_features * in_features);
    weights[20 * in_features + 69] = f32::NAN;
    weights[21 * in_features + 1] = f32::INFINITY;
    let mut input = random.numbers(num_rows * in_features);
    input[5 * in_features] = f32::INFINITY;
    input[6 * in_features + 69] = f32::NAN;
    // Two neighbours whose sum is infinite; the smallest and the largest numbers are fine otherwise.
    input[7 * in_features..7 * in_features + 2].fill(3e38);
    input[8 * in_features] = 3e38;
    input[9 * in_features..10 * in_features].fill(1e-42);
    input[10 * in_features..].fill(0.0);
    for kernels in all_kernels(1) {
        let matrix = pack(&kernels, &weights, out_features, in_features, 1);
        let out = store(&kernels, &matrix, &input);
        for (index, number) in out.iter().enumerate() {
            let (row, feature) = (index / out_features, index % out_features);
            let is_finite = ![5, 6, 7].contains(&row) && ![20, 21].contains(&feature);
            assert_eq!(number.is_finite(), is_finite, "{row} {feature} {number}");
            if row >= 9 && is_finite {
                assert_eq!(number.to_bits(), 0);
            }
        }
    }
}

#[test]
fn features_are_read_back_as_they_were_rounded() {
    let mut random = Random::new(5);
    for (out_features, in_features, parts) in [(70, 9, 1), (70, 64, 2), (16, 33, 1), (1, 1, 1)] {
        let weights = uneven(out_features * in_features, &mut random);
        for kernels in all_kernels(2) {
            let matrix = pack(&kernels, &weights, out_features, in_features, parts);
            assert_eq!(matrix.weight_type(), WeightType::Int8);
            for feature in 0..out_features {
                let mut row = vec![f32::NAN; in_features];
                matrix.read_feature(feature, &mut row).expect("exists");
                // Of an input that is 1 at one place the product is the rounded weight there.
                let place = random.below(in_features);
                let mut input = vec![0.0; in_features];
                input[place] = 127.0;
                let product = store(&kernels, &matrix, &input)[feature];
                assert!((product - 127.0 * row[place]).abs() <= 1e-5 * product.abs(), "{product} {}", row[place]);
                for (got, group) in row.chunks(32).zip(weights[feature * in_features..][..in_features].chunks(32)) {
                    let greatest = group.iter().fold(0.0, |greatest: f32, weight| greatest.max(weight.abs()));
                    for (got, weight) in got.iter().zip(group) {
                        assert!((got - weight).abs() <= greatest / 127.0 * 0.505);
                    }
                }
            }
            assert!(matrix.read_feature(out_features, &mut vec![0.0; in_features]).is_err());
        }
    }
}

#[test]
fn a_matrix_takes_a_byte_a_weight_and_two_a_group() {
    let kernels = Kernels::new(1).expect("starts");
    let matrix = pack(&kernels, &vec![0.0; 128 * 64], 128, 64, 2);
    assert_eq!(matrix.num_bytes(), 128 * 64 + 2 * 128 * 64 / 32);
    assert!(kernels.pack_int8(WeightsRef::F32(&[0.0; 12]), 3, 5, 1).is_err());
    assert!(kernels.pack_int8(WeightsRef::F32(&[0.0; 12]), usize::MAX / 2, 9, 1).is_err());
}
