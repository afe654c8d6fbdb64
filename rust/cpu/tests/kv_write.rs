//! Writing keys and values to their slots.

mod common;

use cbrs_cpu::{CacheLayout, CacheMut, Error, Kernels, WriteArgs, bf16, int8};
use common::{Random, bits};

const UNTOUCHED: u32 = 0x7fc0_1234;

fn write(layout: CacheLayout, key: &[f32], value: &[f32], slot_mapping: &[i64]) -> Result<(Vec<f32>, Vec<f32>), Error> {
    let mut key_cache = vec![f32::from_bits(UNTOUCHED); layout.num_elements()];
    let mut value_cache = key_cache.clone();
    Kernels::new(3)?.write_kv(WriteArgs {
        key,
        value,
        key_cache: CacheMut::F32(&mut key_cache),
        value_cache: CacheMut::F32(&mut value_cache),
        layout,
        slot_mapping,
    })?;
    Ok((key_cache, value_cache))
}

#[test]
fn each_token_lands_in_its_slot_and_nothing_else_changes() {
    let mut random = Random::new(1);
    for (num_tokens, head_dim) in [(1, 3), (7, 8), (300, 64)] {
        let layout = CacheLayout::new(100, 4, 4, head_dim).expect("small");
        let mut slots: Vec<i64> = (0..layout.num_slots() as i64).collect();
        random.shuffle(&mut slots);
        slots.truncate(num_tokens);
        // The highest slot is written, and every third token is padding.
        slots[0] = layout.num_slots() as i64 - 1;
        slots.iter_mut().skip(1).step_by(3).for_each(|slot| *slot = -1);
        let (key, value) = (random.numbers(num_tokens * 4 * head_dim), random.numbers(num_tokens * 4 * head_dim));
        let (key_cache, value_cache) = write(layout, &key, &value, &slots).expect("valid");
        for (new, cache) in [(&key, key_cache), (&value, value_cache)] {
            let mut expected = vec![f32::from_bits(UNTOUCHED); layout.num_elements()];
            for (token, slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
                let slot = *slot as usize;
                for head in 0..4 {
                    let to = layout.row_offset(slot / 4, head, slot % 4);
                    let from = (token * 4 + head) * head_dim;
                    expected[to..to + head_dim].copy_from_slice(&new[from..from + head_dim]);
                }
            }
            assert_eq!(bits(&cache), bits(&expected));
        }
    }
}

#[test]
fn a_bf16_cache_holds_the_nearest_numbers() {
    let layout = CacheLayout::new(2, 1, 2, 8).expect("small");
    let key = Random::new(2).numbers(8);
    let value = vec![f32::NAN; 8];
    let (mut key_cache, mut value_cache) = (vec![0u16; 32], vec![0u16; 32]);
    Kernels::new(1)
        .expect("starts")
        .write_kv(WriteArgs {
            key: &key,
            value: &value,
            key_cache: CacheMut::Bf16(&mut key_cache),
            value_cache: CacheMut::Bf16(&mut value_cache),
            layout,
            slot_mapping: &[3],
        })
        .expect("valid");
    let nearest: Vec<u16> = key.iter().map(|x| bf16::from_f32(*x)).collect();
    assert_eq!(key_cache[24..], nearest);
    assert!(value_cache[24..].iter().all(|x| bf16::to_f32(*x).is_nan()));
    assert_eq!(key_cache[..24], [0; 24]);
}

#[test]
fn a_cache_of_8_bits_holds_numbers_and_factors_in_their_places_only() {
    let layout = CacheLayout::new(2, 2, 2, 8).expect("small");
    let mut random = Random::new(3);
    let key = random.numbers(16);
    let mut value = random.numbers(16);
    value[3] = f32::NAN;
    let (mut key_cache, mut value_cache) = (vec![7_i8; 80], vec![7_i8; 80]);
    Kernels::new(2)
        .expect("starts")
        .write_kv(WriteArgs {
            key: &key,
            value: &value,
            key_cache: CacheMut::Int8(&mut key_cache),
            value_cache: CacheMut::Int8(&mut value_cache),
            layout,
            slot_mapping: &[3],
        })
        .expect("valid");
    let mut expected = vec![7_i8; 80];
    for (head, row) in key.chunks_exact(8).enumerate() {
        // The second of four runs of 20 bytes, two a block: 2 x 8 numbers, then 2 factors of 2 bytes.
        let run = (2 + head) * 20;
        let scale = int8::quantize(row, &mut expected[run + 8..run + 16]);
        expected[run + 18..run + 20].copy_from_slice(&int8::scale_bytes(scale));
        let step = bf16::to_f32(scale);
        for (x, number) in row.iter().zip(&key_cache[run + 8..run + 16]) {
            assert!((x - step * f32::from(*number)).abs() <= 0.501 * step);
        }
    }
    assert_eq!(key_cache, expected);
    assert!(int8::scale_from([value_cache[58], value_cache[59]]).is_nan());
    assert!(int8::scale_from([value_cache[78], value_cache[79]]).is_finite());
}

#[test]
fn of_two_tokens_with_one_slot_the_later_one_stays() {
    let layout = CacheLayout::new(1, 2, 2, 1).expect("small");
    let (cache, _) = write(layout, &[1.0, 2.0, 3.0, 4.0], &[0.0; 4], &[1, 1]).expect("valid");
    assert_eq!((cache[1], cache[3]), (3.0, 4.0));
}

#[test]
fn a_slot_outside_the_cache_is_refused_before_anything_is_written() {
    let layout = CacheLayout::new(2, 1, 2, 1).expect("small");
    for slot in [4, -2, i64::MAX, i64::MIN] {
        let mut cache = [7.0f32; 4];
        let mut other = [7.0f32; 4];
        let result = Kernels::new(1).expect("starts").write_kv(WriteArgs {
            key: &[1.0, 1.0],
            value: &[1.0, 1.0],
            key_cache: CacheMut::F32(&mut cache),
            value_cache: CacheMut::F32(&mut other),
            layout,
            slot_mapping: &[0, slot],
        });
        let text = result.expect_err("outside").to_string();
        assert_eq!(text, format!("slot_mapping[1] is {slot}, the cache has slots 0..4 (-1: do not write)"));
        assert_eq!((cache, other), ([7.0; 4], [7.0; 4]));
    }
}

#[test]
fn arrays_of_the_wrong_length_are_named() {
    let layout = CacheLayout::new(2, 1, 2, 1).expect("small");
    let text = write(layout, &[1.0], &[1.0, 2.0], &[0]).expect_err("value too long");
    assert_eq!(text.to_string(), "value has 2 elements, expected 1");
    assert!(write(layout, &[], &[], &[]).is_ok());
}
