//! Paged attention against the scalar reference, and the promises about bits.

mod common;

use cbrs_cpu::{Error, Isa, Kernels, reference};
use common::{Batch, Kind, Random, Sequence, Shape, bits};

const SHAPE: Shape = Shape { num_kv_heads: 2, group: 3, head_dim: 16, block_size: 4 };

fn available() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

fn assert_close(got: &[f32], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len());
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        // False for NaN too.
        let close = (got - expected).abs() <= 2e-6 * (1.0 + expected.abs());
        assert!(close, "{what}: element {index} is {got}, expected {expected}");
    }
}

/// Compares every instruction set and cache type with the reference.
fn check(batch: &Batch, what: &str) {
    for kind in Kind::ALL {
        let expected = batch.call(kind, reference::paged_attention).expect("valid batch");
        for isa in available() {
            let kernels = Kernels::with_isa(2, isa).expect("available");
            let got = batch.attend_over(kind, &kernels);
            assert_close(&got, &expected, &format!("{what}, {}, {kind:?}", isa.name()));
        }
    }
}

#[test]
fn every_length_around_a_block_or_tile_edge_equals_the_reference() {
    let mut random = Random::new(1);
    for block_size in [1, 4, 16] {
        let shape = Shape { block_size, ..SHAPE };
        for len in [1, 3, 4, 5, 15, 16, 17, 63, 64, 65, 111, 128, 130] {
            let sequence = Sequence::random(shape, len, &mut random);
            let whole = Batch::new(shape, &[(&sequence, 0, len)], &mut random);
            check(&whole, &format!("prefill of {len}, blocks of {block_size}"));
            let last = Batch::new(shape, &[(&sequence, len - 1, len)], &mut random);
            check(&last, &format!("decode at {len}, blocks of {block_size}"));
        }
    }
}

#[test]
fn every_head_size_and_group_equals_the_reference() {
    let mut random = Random::new(2);
    for head_dim in [1, 3, 8, 12, 24, 64, 80, 96, 128, 256] {
        // With 71 rows even one token is more than a tile of query rows.
        let wide = (head_dim == 8).then_some(71);
        for group in [1, 2, 3, 4, 5, 7, 8].into_iter().chain(wide) {
            let shape = Shape { group, head_dim, ..SHAPE };
            let sequence = Sequence::random(shape, 70, &mut random);
            let parts = [(&sequence, 69, 70), (&sequence, 20, 45)];
            check(&Batch::new(shape, &parts, &mut random), &format!("head of {head_dim}, group of {group}"));
        }
    }
}

#[test]
fn random_mixed_batches_equal_the_reference() {
    for seed in 0..30 {
        let mut random = Random::new(100 + seed);
        let shape = Shape {
            num_kv_heads: 1 + random.below(3),
            group: 1 + random.below(5),
            head_dim: 8 * (1 + random.below(4)),
            block_size: 1 + random.below(17),
        };
        let sequences: Vec<_> = (0..=random.below(5))
            .map(|_| {
                let len = 1 + random.below(150);
                Sequence::random(shape, len, &mut random)
            })
            .collect();
        let parts: Vec<_> = sequences
            .iter()
            .map(|sequence| {
                let end = 1 + random.below(sequence.len);
                (sequence, random.below(end), end)
            })
            .collect();
        let mut batch = Batch::new(shape, &parts, &mut random);
        if seed % 2 == 1 {
            batch.sliding_window = Some(1 + random.below(100));
        }
        check(&batch, &format!("seed {seed}"));
    }
}

/// Decodes, chunks and whole prompts of one sequence must give the same bits for the same position.
#[test]
fn chunks_neighbours_threads_and_placement_change_no_bit() {
    let mut random = Random::new(3);
    // Beyond 256 keys there are several chunks, which threads share.
    let cases = [(150, None), (150, Some(33)), (64, None), (65, Some(64)), (700, None), (600, Some(300))];
    for ((len, window), kind) in cases.into_iter().flat_map(|case| Kind::ALL.map(|kind| (case, kind))) {
        let sequence = Sequence::random(SHAPE, len, &mut random);
        let neighbour = Sequence::random(SHAPE, 301, &mut random);
        let token_len = SHAPE.num_heads() * SHAPE.head_dim;
        for isa in available() {
            let one = Kernels::with_isa(1, isa).expect("available");
            let three = Kernels::with_isa(3, isa).expect("available");
            let mut whole = Batch::new(SHAPE, &[(&sequence, 0, len)], &mut random);
            whole.sliding_window = window;
            let expected = bits(&whole.attend_over(kind, &one));
            for chunk in [1, 7, 16, 64, 100] {
                // Of many tokens one by one, some.
                for start in (0..len).step_by(if len > 500 && chunk < 16 { 41 } else { chunk }) {
                    let end = len.min(start + chunk);
                    let block_size = [1, 4, 16][random.below(3)];
                    let shape = Shape { block_size, ..SHAPE };
                    let parts = [(&neighbour, 300, 301), (&sequence, start, end), (&neighbour, 10, 200)];
                    let mut batch = Batch::new(shape, &parts, &mut random);
                    batch.sliding_window = window;
                    let out = bits(&batch.attend_over(kind, &three));
                    let got = &out[token_len..(1 + end - start) * token_len];
                    assert_eq!(got, &expected[start * token_len..end * token_len]);
                }
            }
        }
    }
}

/// Contexts of several chunks: alone, so that threads share one sequence, and in a batch.
#[test]
fn long_contexts_equal_the_reference_and_themselves_in_a_batch() {
    let mut random = Random::new(12);
    for (len, group, head_dim, block_size) in
        [(255, 1, 64, 16), (256, 3, 64, 16), (257, 4, 80, 32), (1030, 3, 64, 64), (2049, 8, 24, 16), (8192, 3, 16, 32)]
    {
        let shape = Shape { num_kv_heads: 2, group, head_dim, block_size };
        let sequence = Sequence::random(shape, len, &mut random);
        let neighbours = [1, 300, 1025].map(|len| Sequence::random(shape, len, &mut random));
        for window in [None, Some(len / 2 + 3)] {
            let mut alone = Batch::new(shape, &[(&sequence, len - 1, len)], &mut random);
            alone.sliding_window = window;
            let what = format!("decode at {len}, group of {group}, head of {head_dim}, window {window:?}");
            check(&alone, &what);
            let [a, b, c] = &neighbours;
            let parts = [(a, 0, 1), (b, 250, 300), (&sequence, len - 1, len), (c, 1024, 1025)];
            let mut batch = Batch::new(shape, &parts, &mut random);
            batch.sliding_window = window;
            let row = 51 * shape.num_heads() * head_dim..52 * shape.num_heads() * head_dim;
            for (isa, kind) in available().flat_map(|isa| Kind::ALL.map(|kind| (isa, kind))) {
                let one = alone.attend_over(kind, &Kernels::with_isa(1, isa).expect("available"));
                for num_threads in [1, 2, 5] {
                    let kernels = Kernels::with_isa(num_threads, isa).expect("available");
                    assert_eq!(bits(&alone.attend_over(kind, &kernels)), bits(&one), "{what}");
                    assert_eq!(bits(&batch.attend_over(kind, &kernels)[row.clone()]), bits(&one), "{what}");
                }
            }
        }
        if len <= 1030 {
            let chunk = Batch::new(shape, &[(&sequence, len - 130, len)], &mut random);
            check(&chunk, &format!("the last 130 of {len}, group of {group}, head of {head_dim}"));
        }
    }
}

#[test]
fn c01_a_chunk_reads_no_slot_beyond_its_end() {
    let mut random = Random::new(4);
    let sequence = Sequence::random(SHAPE, 40, &mut random);
    let kernels = Kernels::new(2).expect("starts");
    let whole = Batch::new(SHAPE, &[(&sequence, 0, 40)], &mut random).attend(&kernels);
    let mut chunks = Vec::new();
    for (start, end) in [(0, 16), (16, 32), (32, 40)] {
        // The cache holds NaN in every slot from `end` on.
        let batch = Batch::new(SHAPE, &[(&sequence, start, end)], &mut random);
        chunks.extend(batch.attend(&kernels));
    }
    assert_eq!(bits(&chunks), bits(&whole));
}

#[test]
fn a_query_reads_no_key_behind_its_own_position() {
    let mut random = Random::new(5);
    let shape = Shape { group: 1, ..SHAPE };
    let mut sequence = Sequence::random(shape, 30, &mut random);
    let token_len = shape.num_kv_heads * shape.head_dim;
    sequence.key[20 * token_len..].fill(f32::NAN);
    sequence.value[20 * token_len..].fill(f32::NAN);
    for (isa, kind) in available().flat_map(|isa| Kind::ALL.map(|kind| (isa, kind))) {
        let kernels = Kernels::with_isa(1, isa).expect("available");
        let out = Batch::new(shape, &[(&sequence, 0, 30)], &mut random).attend_over(kind, &kernels);
        assert!(out[..20 * token_len].iter().all(|x| x.is_finite()));
        // And a NaN that is seen is not swallowed.
        assert!(out[20 * token_len..].iter().all(|x| x.is_nan()));
    }
}

/// With queries of 0 all visible keys weigh the same; with one-hot values the output shows which they are.
fn visible_keys(len: usize, start: usize, window: Option<usize>) -> Vec<Vec<usize>> {
    let shape = Shape { num_kv_heads: 1, group: 1, head_dim: len.next_multiple_of(16), block_size: 4 };
    let mut random = Random::new(6);
    let mut sequence = Sequence::random(shape, len, &mut random);
    sequence.query.fill(0.0);
    sequence.value.fill(0.0);
    for position in 0..len {
        sequence.value[position * shape.head_dim + position] = 1.0;
    }
    let mut batch = Batch::new(shape, &[(&sequence, start, len)], &mut random);
    batch.sliding_window = window;
    let out = batch.attend(&Kernels::new(1).expect("starts"));
    let rows = out.chunks_exact(shape.head_dim);
    rows.map(|row| (0..row.len()).filter(|key| row[*key] > 0.0).collect()).collect()
}

#[test]
fn i18_a_window_of_8_shows_the_query_itself_and_the_7_keys_before_it() {
    let seen = visible_keys(20, 0, Some(8));
    for (position, keys) in seen.into_iter().enumerate() {
        let lowest = position.saturating_sub(7);
        assert_eq!(keys, (lowest..=position).collect::<Vec<_>>());
    }
    assert_eq!(visible_keys(3, 2, None), [vec![0, 1, 2]]);
}

#[test]
fn i19_decoding_across_the_window_edge_shows_the_same_keys_as_one_pass() {
    let whole = visible_keys(16, 0, Some(8));
    for len in 7..=16 {
        assert_eq!(visible_keys(len, len - 1, Some(8)), whole[len - 1..len]);
    }
    // Keys before the window are not read: poison them.
    let mut random = Random::new(7);
    let mut sequence = Sequence::random(SHAPE, 16, &mut random);
    let token_len = SHAPE.num_kv_heads * SHAPE.head_dim;
    sequence.key[..8 * token_len].fill(f32::NAN);
    sequence.value[..8 * token_len].fill(f32::NAN);
    let mut batch = Batch::new(SHAPE, &[(&sequence, 15, 16)], &mut random);
    batch.sliding_window = Some(8);
    let out = batch.attend(&Kernels::new(1).expect("starts"));
    assert!(out.iter().all(|x| x.is_finite()));
}

#[test]
fn scores_far_apart_neither_overflow_nor_lose_the_greatest() {
    let mut random = Random::new(8);
    let mut sequence = Sequence::random(SHAPE, 100, &mut random);
    sequence.query.iter_mut().for_each(|x| *x *= 1e4);
    let batch = Batch::new(SHAPE, &[(&sequence, 0, 100)], &mut random);
    for isa in available() {
        let kernels = Kernels::with_isa(1, isa).expect("available");
        assert!(batch.attend(&kernels).iter().all(|x| x.abs() <= 1.0));
    }
}

#[test]
fn an_empty_batch_is_no_error_and_padding_rows_become_zero() {
    let mut random = Random::new(9);
    let kernels = Kernels::new(2).expect("starts");
    let empty = Batch::new(SHAPE, &[], &mut random);
    assert!(empty.attend(&kernels).is_empty());
    let sequence = Sequence::random(SHAPE, 5, &mut random);
    let mut padded = Batch::new(SHAPE, &[(&sequence, 3, 5)], &mut random);
    let real_len = padded.query.len();
    padded.query.extend(vec![f32::NAN; real_len]);
    let out = padded.attend(&kernels);
    assert!(out[..real_len].iter().all(|x| x.is_finite()));
    assert_eq!(bits(&out[real_len..]), vec![0; real_len]);
    assert_eq!(
        bits(&padded.call(Kind::F32, reference::paged_attention).expect("valid")[real_len..]),
        vec![0; real_len]
    );
}

/// Damages a valid batch and returns the error's text.
fn refusal(damage: impl FnOnce(&mut Batch)) -> String {
    let mut random = Random::new(10);
    let sequence = Sequence::random(SHAPE, 9, &mut random);
    let mut batch = Batch::new(SHAPE, &[(&sequence, 8, 9), (&sequence, 2, 7)], &mut random);
    batch.row_ids = vec![1, 0];
    batch.block_tables.fill(0);
    damage(&mut batch);
    let kernels = Kernels::new(1).expect("starts");
    let error = batch.call(Kind::F32, |args| {
        let before = bits(args.out);
        let out: *const [f32] = &raw const *args.out;
        let result = kernels.paged_attention(args);
        // SAFETY: the output outlives the call, and the exclusive borrow of it ended with the call.
        assert_eq!(bits(unsafe { &*out }), before);
        result
    });
    error.expect_err("damaged").to_string()
}

#[test]
fn every_bad_index_is_refused_with_its_numbers_and_nothing_is_written() {
    let cases: Vec<(String, &str)> = vec![
        (refusal(|b| b.block_tables[b.max_blocks + 2] = 8), "block_tables[1, 2] is 8, the cache has blocks 0..8"),
        (refusal(|b| b.block_tables[1] = -1), "block_tables[0, 1] is -1, the cache has blocks 0..8"),
        (refusal(|b| b.row_ids[1] = 4), "row_ids[1] is 4, block_tables has rows 0..4"),
        (refusal(|b| b.row_ids[0] = -1), "row_ids[0] is -1, block_tables has rows 0..4"),
        (refusal(|b| b.seq_lens[1] = 4), "seq_lens[1] is 4, less than its 5 query tokens"),
        (refusal(|b| b.seq_lens[0] = -9), "seq_lens[0] is -9, less than its 1 query tokens"),
        (refusal(|b| b.seq_lens[0] = 17), "seq_lens[0] is 17: needs 5 blocks, block_tables has 4 columns"),
        (
            refusal(|b| b.query_start[1] = 7),
            "query_start[1] is 7; it must start at 0, ascend, and end at or below the 6 tokens given",
        ),
        (
            refusal(|b| b.query_start[0] = -1),
            "query_start[0] is -1; it must start at 0, ascend, and end at or below the 6 tokens given",
        ),
        (refusal(|b| b.query_start = vec![0, 3]), "query_start has 2 elements, expected 3"),
        (refusal(|b| b.row_ids.truncate(1)), "row_ids has 1 elements, expected 2"),
        (refusal(|b| b.block_tables.truncate(3)), "block_tables has 3 elements, expected 0"),
        (refusal(|b| b.value_cache.truncate(7)), "value_cache has 7 elements, expected 1024"),
        (refusal(|b| b.query.truncate(95)), "query has 95 elements, expected 0"),
        (refusal(|b| b.shape.num_kv_heads = 1), "num_heads 3 is not a multiple of num_kv_heads 2"),
        (refusal(|b| b.shape.group = 0), "num_heads must be at least 1"),
        (refusal(|b| b.sliding_window = Some(0)), "sliding_window must be at least 1 or absent, got 0"),
    ];
    for (got, expected) in cases {
        assert_eq!(got, expected);
    }
}

#[test]
fn a_scale_that_is_not_finite_and_caches_of_two_types_are_refused() {
    let mut random = Random::new(11);
    let sequence = Sequence::random(SHAPE, 2, &mut random);
    let batch = Batch::new(SHAPE, &[(&sequence, 1, 2)], &mut random);
    let kernels = Kernels::new(1).expect("starts");
    let infinite = batch.call(Kind::F32, |mut args| {
        args.scale = f32::INFINITY;
        kernels.paged_attention(args)
    });
    assert!(matches!(infinite, Err(Error::Scale { .. })));
    let mixed = batch.call(Kind::F32, |mut args| {
        args.key_cache = cbrs_cpu::CacheRef::Bf16(&[]);
        kernels.paged_attention(args)
    });
    assert!(matches!(mixed, Err(Error::CacheTypes)));
}
