//! Decoder steps: a sequence's logits do not depend on anything else in the batch, and bad arguments are refused.
//! What the numbers must be is tested from Python, against other implementations of the same models.
#![allow(missing_docs, reason = "tests")]

mod common;

use std::sync::Arc;

use cbrs_cpu::decoder::{DecoderShape, Layer, Linear, Rotary};
use cbrs_cpu::{
    Activation, BatchIndex, CacheLayout, CacheMut, Decoder, DecoderParts, Error, Isa, Kernels, StepArgs, WeightsRef,
    bf16,
};
use common::{Random, bits};

const WIDTH: usize = 40;
const VOCAB: usize = 50;
const INNER: usize = 56;
const SHAPE: DecoderShape = DecoderShape {
    num_heads: 6,
    num_kv_heads: 2,
    head_dim: 8,
    attention_scale: 0.35,
    norm_eps: 1e-5,
    embedding_scale: 1.5,
    activation: Activation::Silu,
};
const BLOCK_SIZE: usize = 4;
const MAX_BLOCKS: usize = 24;
const NUM_ROWS: usize = 5;

/// Types of weights and caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    F32,
    Bf16,
    /// With a cache of bf16.
    Int8,
}

fn linear(kernels: &Kernels, random: &mut Random, out: usize, input: usize, parts: usize, kind: Kind) -> Linear {
    let scale = (input as f32).sqrt().recip() * 2.0;
    let weights: Vec<f32> = random.numbers(out * input).iter().map(|weight| weight * scale).collect();
    let narrow: Vec<u16> = weights.iter().map(|weight| bf16::from_f32(*weight)).collect();
    let matrix = match kind {
        Kind::F32 => kernels.pack(WeightsRef::F32(&weights), out, input, parts),
        Kind::Bf16 => kernels.pack(WeightsRef::Bf16(&narrow), out, input, parts),
        Kind::Int8 => kernels.pack_int8(WeightsRef::F32(&weights), out, input, parts),
    };
    let matrix = matrix.expect("valid");
    Linear { matrix: Arc::new(matrix), bias: Some(random.numbers(out)) }
}

fn parts(kernels: &Kernels, kind: Kind) -> DecoderParts {
    let mut random = Random::new(7);
    let random = &mut random;
    let heads = SHAPE.num_heads * SHAPE.head_dim;
    let all_heads = heads + 2 * SHAPE.num_kv_heads * SHAPE.head_dim;
    let layers = (0..3).map(|index| Layer {
        attention_norm: random.numbers(WIDTH),
        mlp_norm: random.numbers(WIDTH),
        after_attention: (index == 1).then(|| random.numbers(WIDTH)),
        after_mlp: (index == 1).then(|| random.numbers(WIDTH)),
        head_norms: (index == 2).then(|| [random.numbers(8), random.numbers(8)]),
        qkv: linear(kernels, random, all_heads, WIDTH, 1, kind),
        out: linear(kernels, random, WIDTH, heads, 1, kind),
        gate_up: linear(kernels, random, 2 * INNER, WIDTH, 2, kind),
        down: linear(kernels, random, WIDTH, INNER, 1, kind),
        rotary: [Some(0), None, Some(1)][index],
        sliding_window: [None, Some(7), None][index],
    });
    let layers = layers.collect();
    let table = linear(kernels, random, VOCAB, WIDTH, 1, kind).matrix;
    DecoderParts {
        shape: SHAPE,
        embedding: Arc::clone(&table),
        head: table,
        final_norm: random.numbers(WIDTH),
        layers,
        rotaries: vec![
            Rotary { inverse_frequencies: vec![1.0, 0.1, 0.01, 0.001], magnitude: 1.0 },
            Rotary { inverse_frequencies: vec![0.5, 0.02], magnitude: 1.1 },
        ],
    }
}

/// Caches of all layers, poisoned, and the arrays of a step.
struct Engine {
    kernels: Kernels,
    decoder: Decoder,
    layout: CacheLayout,
    wide: Vec<[Vec<f32>; 2]>,
    narrow: Vec<[Vec<u16>; 2]>,
    is_bf16: bool,
    block_tables: Vec<i32>,
}

/// The next tokens of the sequence in a row, from a position on.
type Chunk<'a> = (usize, &'a [i32], usize);

/// Arrays of one step, which a test may damage.
struct Arrays {
    token_ids: Vec<i32>,
    positions: Vec<i32>,
    logits_index: Vec<i32>,
    slot_mapping: Vec<i64>,
    row_ids: Vec<i32>,
    query_start: Vec<i32>,
    seq_lens: Vec<i32>,
}

impl Engine {
    fn new(num_threads: usize, isa: Isa, kind: Kind) -> Self {
        let kernels = Kernels::with_isa(num_threads, isa).expect("available");
        let decoder = Decoder::new(parts(&kernels, kind)).expect("valid");
        let layout = CacheLayout::new(NUM_ROWS * MAX_BLOCKS, SHAPE.num_kv_heads, BLOCK_SIZE, SHAPE.head_dim);
        let layout = layout.expect("small");
        let len = layout.num_elements();
        let mut block_tables: Vec<i32> = (0..(NUM_ROWS * MAX_BLOCKS) as i32).collect();
        Random::new(3).shuffle(&mut block_tables);
        Self {
            kernels,
            decoder,
            layout,
            wide: (0..3).map(|_| [vec![f32::NAN; len], vec![f32::NAN; len]]).collect(),
            narrow: (0..3).map(|_| [vec![0x7fc0; len], vec![0x7fc0; len]]).collect(),
            is_bf16: kind != Kind::F32,
            block_tables,
        }
    }

    /// Arrays that ask for the logits of every token.
    fn arrays(&self, chunks: &[Chunk<'_>]) -> Arrays {
        let mut arrays = Arrays {
            token_ids: Vec::new(),
            positions: Vec::new(),
            logits_index: Vec::new(),
            slot_mapping: Vec::new(),
            row_ids: Vec::new(),
            query_start: vec![0],
            seq_lens: Vec::new(),
        };
        for &(row, tokens, start) in chunks {
            for (index, token) in tokens.iter().enumerate() {
                let position = start + index;
                let block = self.block_tables[row * MAX_BLOCKS + position / BLOCK_SIZE] as usize;
                arrays.logits_index.push(arrays.token_ids.len() as i32);
                arrays.token_ids.push(*token);
                arrays.positions.push(position as i32);
                arrays.slot_mapping.push((block * BLOCK_SIZE + position % BLOCK_SIZE) as i64);
            }
            arrays.row_ids.push(row as i32);
            arrays.query_start.push(arrays.token_ids.len() as i32);
            arrays.seq_lens.push((start + tokens.len()) as i32);
        }
        arrays
    }

    fn run(&mut self, arrays: &Arrays) -> Result<Vec<f32>, Error> {
        let mut logits = vec![f32::NAN; arrays.logits_index.len() * VOCAB];
        let caches = if self.is_bf16 {
            self.narrow.iter_mut().map(|[key, value]| [CacheMut::Bf16(key), CacheMut::Bf16(value)]).collect()
        } else {
            self.wide.iter_mut().map(|[key, value]| [CacheMut::F32(key), CacheMut::F32(value)]).collect()
        };
        self.kernels.decode(
            &self.decoder,
            StepArgs {
                logits: &mut logits,
                caches,
                layout: self.layout,
                token_ids: &arrays.token_ids,
                positions: &arrays.positions,
                logits_index: &arrays.logits_index,
                slot_mapping: &arrays.slot_mapping,
                index: BatchIndex {
                    block_tables: &self.block_tables,
                    max_blocks: MAX_BLOCKS,
                    row_ids: &arrays.row_ids,
                    query_start: &arrays.query_start,
                    seq_lens: &arrays.seq_lens,
                },
            },
        )?;
        Ok(logits)
    }

    fn step(&mut self, chunks: &[Chunk<'_>]) -> Vec<f32> {
        let arrays = self.arrays(chunks);
        self.run(&arrays).expect("valid")
    }
}

fn tokens(seed: u64, len: usize) -> Vec<i32> {
    let mut random = Random::new(seed);
    (0..len).map(|_| random.below(VOCAB) as i32).collect()
}

#[test]
fn neighbours_chunks_rows_and_threads_change_no_bit() {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        for kind in [Kind::F32, Kind::Bf16, Kind::Int8] {
            let ours = tokens(1, 60);
            let others: Vec<_> = (0..3).map(|seed| tokens(seed + 2, 80)).collect();
            let alone = Engine::new(1, isa, kind).step(&[(0, &ours, 0)]);
            assert!(alone.iter().all(|logit| logit.is_finite()));
            // The same sequence in another row, in chunks, beside others that prefill and decode.
            let mut engine = Engine::new(3, isa, kind);
            let mut got = Vec::new();
            let mut start = 0;
            for len in [1, 17, 1, 1, 30, 2, 8] {
                // The others end before it does.
                let num_others = if start < 40 { others.len() } else { 0 };
                let mut chunks: Vec<Chunk<'_>> =
                    (0..num_others).map(|row| (row, &others[row][start..start + len], start)).collect();
                chunks.insert(1.min(chunks.len()), (4, &ours[start..start + len], start));
                let first: usize = chunks.iter().take_while(|chunk| chunk.0 != 4).map(|chunk| chunk.1.len()).sum();
                let logits = engine.step(&chunks);
                got.extend_from_slice(&logits[first * VOCAB..(first + len) * VOCAB]);
                start += len;
            }
            assert_eq!(bits(&got), bits(&alone), "{isa:?} {kind:?}");
        }
    }
}

#[test]
fn a_token_without_a_slot_is_not_written_and_an_empty_step_is_no_error() {
    let mut engine = Engine::new(2, Isa::detect(), Kind::F32);
    let ours = tokens(1, 9);
    let mut arrays = engine.arrays(&[(2, &ours, 0)]);
    // A padding token behind the last query.
    arrays.token_ids.push(3);
    arrays.positions.push(0);
    arrays.slot_mapping.push(-1);
    let logits = engine.run(&arrays).expect("valid");
    assert_eq!(bits(&logits), bits(&Engine::new(1, Isa::detect(), Kind::F32).step(&[(0, &ours, 0)])));
    let written = engine.wide[0][0].iter().filter(|number| !number.is_nan()).count();
    assert_eq!(written, 9 * SHAPE.num_kv_heads * SHAPE.head_dim);
    assert!(engine.step(&[]).is_empty());
}

#[test]
fn of_two_tokens_with_one_slot_the_later_one_is_written() {
    let ours = tokens(1, 64);
    let mut engine = Engine::new(3, Isa::detect(), Kind::F32);
    let mut arrays = engine.arrays(&[(2, &ours, 0)]);
    let twin = arrays.slot_mapping[10];
    arrays.slot_mapping[60] = twin;
    arrays.token_ids[60] = arrays.token_ids[10];
    arrays.positions[60] = 10;
    engine.run(&arrays).expect("valid");
    let first_layer = engine.wide[0][0].clone();
    let mut plain = Engine::new(1, Isa::detect(), Kind::F32);
    plain.step(&[(2, &ours[..11], 0)]);
    let place = plain.layout.row_offset(twin as usize / BLOCK_SIZE, 0, twin as usize % BLOCK_SIZE);
    assert_eq!(bits(&first_layer[place..place + 8]), bits(&plain.wide[0][0][place..place + 8]));
}

#[test]
fn every_bad_index_is_refused_with_its_numbers_and_nothing_is_written() {
    let refuse = |damage: &dyn Fn(&mut Arrays)| {
        let mut engine = Engine::new(1, Isa::detect(), Kind::F32);
        let ours = tokens(1, 6);
        let mut arrays = engine.arrays(&[(1, &ours, 0)]);
        damage(&mut arrays);
        let error = engine.run(&arrays).expect_err("refused").to_string();
        assert!(engine.wide.iter().flatten().flatten().all(|number| number.is_nan()));
        error
    };
    let cases: [(String, &str); 8] = [
        (refuse(&|a| a.token_ids[2] = 50), "token_ids[2] is 50, expected 0..50"),
        (refuse(&|a| a.token_ids[0] = -1), "token_ids[0] is -1, expected 0..50"),
        (refuse(&|a| a.positions[5] = -2), "positions[5] is -2, expected 0..2147483647"),
        (refuse(&|a| a.logits_index[0] = 6), "logits_index[0] is 6, expected 0..6"),
        (refuse(&|a| a.slot_mapping[1] = 480), "slot_mapping[1] is 480, the cache has slots 0..480 (-1: do not write)"),
        (refuse(&|a| a.row_ids[0] = 5), "row_ids[0] is 5, block_tables has rows 0..5"),
        (refuse(&|a| a.seq_lens[0] = 97), "seq_lens[0] is 97: needs 25 blocks, block_tables has 24 columns"),
        (
            refuse(&|a| {
                a.positions.pop();
            }),
            "positions has 5 elements, expected 6",
        ),
    ];
    for (got, expected) in cases {
        assert_eq!(got, expected);
    }
}

#[test]
fn parts_that_do_not_fit_together_are_refused_by_name() {
    let kernels = Kernels::new(1).expect("starts");
    let refuse = |damage: &dyn Fn(&mut DecoderParts)| {
        let mut parts = parts(&kernels, Kind::F32);
        damage(&mut parts);
        Decoder::new(parts).expect_err("refused").to_string()
    };
    assert_eq!(refuse(&|p| p.final_norm.truncate(9)), "final_norm has 9 elements, expected 40");
    assert_eq!(refuse(&|p| p.layers.clear()), "layers must be at least 1");
    assert_eq!(refuse(&|p| p.layers[1].mlp_norm.push(0.0)), "mlp_norm has 41 elements, expected 40");
    assert_eq!(refuse(&|p| p.layers[0].rotary = Some(2)), "rotary[0] is 2, expected 0..2");
    assert_eq!(refuse(&|p| p.layers[0].out = p.layers[0].down.clone()), "out has 56 elements, expected 48");
    assert_eq!(refuse(&|p| p.layers[0].qkv = p.layers[0].down.clone()), "qkv has 40 elements, expected 80");
    assert_eq!(refuse(&|p| p.shape.num_heads = 5), "num_heads 5 is not a multiple of num_kv_heads 2");
    let frequencies = |p: &mut DecoderParts| p.rotaries[0].inverse_frequencies.push(0.0);
    assert_eq!(refuse(&frequencies), "inverse_frequencies has 5 elements, expected 4");
    let window = |p: &mut DecoderParts| p.layers[2].sliding_window = Some(0);
    assert_eq!(refuse(&window), "sliding_window must be at least 1 or absent, got 0");
}
