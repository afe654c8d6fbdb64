//! The meaning of paged attention: one query row and one key at a time, softmax in two passes, `f64` throughout.
//!
//! Slow and obvious on purpose; the fast kernels are tested against it. It checks its arguments as they do.

use crate::attention::AttentionArgs;
use crate::bf16;
use crate::error::Result;
use crate::layout::CacheRef;

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
            let offset_of = |key: usize| {
                let block = table[key / block_size] as usize;
                layout.row_offset(block, head / group, key % block_size)
            };
            let score = |key: usize| {
                let products = (0..head_dim).map(|d| f64::from(query[row + d]) * at(key_cache, offset_of(key) + d));
                products.sum::<f64>() * f64::from(scale)
            };
            let scores: Vec<f64> = (lowest..=position).map(score).collect();
            let greatest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - greatest).exp()).collect();
            let total: f64 = weights.iter().sum();
            for d in 0..head_dim {
                let keys = (lowest..=position).zip(&weights);
                let weighted = keys.map(|(key, w)| w * at(value_cache, offset_of(key) + d));
                out[row + d] = (weighted.sum::<f64>() / total) as f32;
            }
        }
    }
    Ok(())
}

fn at(cache: CacheRef<'_>, index: usize) -> f64 {
    f64::from(match cache {
        CacheRef::F32(data) => data[index],
        CacheRef::Bf16(data) => bf16::to_f32(data[index]),
    })
}
