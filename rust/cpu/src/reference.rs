//! The meaning of products and of paged attention, one number at a time, `f64` throughout.
//!
//! Slow and obvious on purpose; the fast kernels are tested against it. It checks its arguments as they do.

use crate::attention::AttentionArgs;
use crate::bf16;
use crate::error::Result;
use crate::int8;
use crate::layout::{CacheLayout, CacheRef};
use crate::linear::{Activation, Then, WeightsRef};

/// Computes what [`Kernels::paged_attention`](crate::Kernels::paged_attention) computes, on the calling thread.
///
/// # Errors
/// As there.
pub fn paged_attention(args: AttentionArgs<'_>) -> Result<()> {
    args.check()?;
    let AttentionArgs { out, query, key_cache, value_cache, layout, num_heads, index, scale, sliding_window } = args;
    let (head_dim, block_size) = (layout.head_dim(), layout.block_size());
    let group = num_heads / layout.num_kv_heads();
    out.fill(0.0);
    for sequence in 0..index.seq_lens.len() {
        let first = index.query_start[sequence] as usize;
        let last = index.query_start[sequence + 1] as usize;
        let seq_len = index.seq_lens[sequence] as usize;
        let row_id = index.row_ids[sequence] as usize;
        let table = &index.block_tables[row_id * index.max_blocks..][..index.max_blocks];
        for (token, head) in (first..last).flat_map(|t| (0..num_heads).map(move |h| (t, h))) {
            let position = seq_len - (last - token);
            let lowest = sliding_window.map_or(0, |window| (position + 1).saturating_sub(window));
            let row = (token * num_heads + head) * head_dim;
            let at = |cache: CacheRef<'_>, key: usize, d: usize| {
                let block = table[key / block_size] as usize;
                at(cache, &layout, [block, head / group, key % block_size], d)
            };
            let score = |key: usize| {
                let products = (0..head_dim).map(|d| f64::from(query[row + d]) * at(key_cache, key, d));
                products.sum::<f64>() * f64::from(scale)
            };
            let scores: Vec<f64> = (lowest..=position).map(score).collect();
            let greatest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - greatest).exp()).collect();
            let total: f64 = weights.iter().sum();
            for d in 0..head_dim {
                let keys = (lowest..=position).zip(&weights);
                let weighted = keys.map(|(key, w)| w * at(value_cache, key, d));
                out[row + d] = (weighted.sum::<f64>() / total) as f32;
            }
        }
    }
    Ok(())
}

fn at(cache: CacheRef<'_>, layout: &CacheLayout, [block, kv_head, offset]: [usize; 3], d: usize) -> f64 {
    let index = layout.row_offset(block, kv_head, offset) + d;
    match cache {
        CacheRef::F32(data) => f64::from(data[index]),
        CacheRef::Bf16(data) => f64::from(bf16::to_f32(data[index])),
        CacheRef::Int8(data) => {
            let [first, scale] = layout.int8_offsets(block, kv_head, offset);
            f64::from(int8::scale_from([data[scale], data[scale + 1]])) * f64::from(data[first + d])
        }
    }
}

/// Computes what [`Kernels::linear`](crate::Kernels::linear) computes, from unpacked weights
/// `[out_features, in_features]` and what the output held before, and returns the output.
///
/// # Panics
/// The lengths do not belong together.
pub fn linear(
    before: &[f32],
    input: &[f32],
    weights: WeightsRef<'_>,
    bias: Option<&[f32]>,
    shape: LinearShape,
) -> Vec<f64> {
    let LinearShape { num_rows, in_features, out_features, then } = shape;
    let weight = |index: usize| match weights {
        WeightsRef::F32(data) => f64::from(data[index]),
        WeightsRef::Bf16(data) => f64::from(bf16::to_f32(data[index])),
    };
    let product = |row: usize, feature: usize| {
        let terms =
            (0..in_features).map(|i| f64::from(input[row * in_features + i]) * weight(feature * in_features + i));
        terms.sum::<f64>() + bias.map_or(0.0, |bias| f64::from(bias[feature]))
    };
    let width = if matches!(then, Then::Gate(_)) { out_features / 2 } else { out_features };
    let place = |index: usize| {
        let (row, feature) = (index / width, index % width);
        match then {
            Then::Store => product(row, feature),
            Then::Add => f64::from(before[index]) + product(row, feature),
            Then::Gate(activation) => activate(activation, product(row, feature)) * product(row, feature + width),
        }
    };
    (0..num_rows * width).map(place).collect()
}

/// Computes what a product with weights packed by [`Kernels::pack_int8`](crate::Kernels::pack_int8) is: what
/// [`linear`] is of the rounded weights and the rounded input.
///
/// # Panics
/// The lengths do not belong together.
pub fn linear_int8(
    before: &[f32],
    input: &[f32],
    weights: WeightsRef<'_>,
    bias: Option<&[f32]>,
    shape: LinearShape,
) -> Vec<f64> {
    let weights: Vec<f32> = match weights {
        WeightsRef::F32(data) => data.to_vec(),
        WeightsRef::Bf16(data) => data.iter().map(|bits| bf16::to_f32(*bits)).collect(),
    };
    let weights: Vec<f32> = weights.chunks(shape.in_features).flat_map(round_weights).collect();
    let input: Vec<f32> = input.chunks(shape.in_features).flat_map(round_input).collect();
    linear(before, &input, WeightsRef::F32(&weights), bias, shape)
}

/// Rounds the weights of an output: in groups of 32 to a multiple of a bf16 number, the 127th part of the greatest.
fn round_weights(weights: &[f32]) -> Vec<f32> {
    let round = |group: &[f32]| {
        let greatest = group.iter().fold(0.0, |greatest: f32, weight| greatest.max(weight.abs()));
        let scale = f32::from_bits(((greatest / 127.0).to_bits() + 0xffff) & 0xffff_0000);
        let factor = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        group.iter().map(|weight| (weight * factor).round_ties_even() * scale).collect::<Vec<_>>()
    };
    weights.chunks(32).flat_map(round).collect()
}

/// Rounds a row of an input: in groups of 32 to a multiple of the 127th part of the greatest, or of the greatest sum of two
/// neighbours.
fn round_input(row: &[f32]) -> Vec<f32> {
    let round = |group: &[f32]| {
        let sums = group.chunks(2).map(|pair| pair.iter().sum());
        let greatest =
            group.iter().copied().chain(sums).fold(0.0, |greatest: f32, number: f32| greatest.max(number.abs()));
        let factor = if greatest > 0.0 { 127.0 / greatest } else { 0.0 };
        group.iter().map(|number| (number * factor).round_ties_even() * (greatest / 127.0)).collect::<Vec<_>>()
    };
    row.chunks(32).flat_map(round).collect()
}

/// Sizes of a product, and what becomes of it.
#[derive(Debug, Clone, Copy)]
pub struct LinearShape {
    /// Rows of input and output.
    pub num_rows: usize,
    /// Inputs.
    pub in_features: usize,
    /// Outputs, of both parts if the product is gated.
    pub out_features: usize,
    /// What becomes of the product.
    pub then: Then,
}

fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            0.5 * x * (1.0 + inner.tanh())
        }
    }
}
