//! The inner loops of attention: a few query rows and one tile of keys, generic over instruction set and cache type.
//!
//! Invariants:
//! 1. The arithmetic of a query row is the same whichever rows it is blocked with: each score is one chain of
//!    multiply-adds over the head, each output element one chain over the keys of the tile, in ascending order.
//! 2. While keys are scored their values are fetched, and while values are added the keys of the next tile: blocks lie
//!    anywhere, so the hardware's own prefetching stops at the end of each.

use std::ops::Range;

use crate::simd::{Element, Simd, exp, exp_one, prefetch, sum};
use crate::tile::{KEY_TILE, KeyTile, Problem, Scratch};

/// Query rows that share the loads of a key: 3 x 4 accumulators and their operands fill 16 vector registers.
pub(crate) const ROW_BLOCK: usize = 3;
/// Keys whose scores are summed across lanes together.
const KEY_BLOCK: usize = 4;

/// Scores, then weights, of a block of rows.
pub(crate) type Weights = [f32; ROW_BLOCK * KEY_TILE];

/// Adds the keys of the tile at work to `R` rows: scores, softmax update, weighted values.
///
/// # Safety
/// - The CPU has the instruction set of `S`, and `S::LANES` divides the head size.
/// - The problem passed `AttentionArgs::check`, and the tile of `scratch` is located in it.
/// - `keys` are some keys of the tile, not none, and rows `row..row + R` exist.
#[inline(always)]
pub(crate) unsafe fn attend_rows<S: Simd, E: Element, const R: usize>(
    problem: &Problem<'_, E>,
    row: usize,
    keys: Range<usize>,
    scratch: &mut Scratch,
) {
    let head_dim = problem.layout.head_dim();
    let query = &scratch.query[row * head_dim..(row + R) * head_dim];
    let accumulator = &mut scratch.accumulator[row * head_dim..(row + R) * head_dim];
    let (tile, weights) = (&scratch.tile, &mut scratch.weights);
    // The first rows that need a key fetch it for the others too.
    let ahead = (row == 0).then_some(&scratch.ahead);
    // SAFETY: passed on. The offsets come from `CacheLayout::row_offset` with verified ids, so `head_dim` elements
    // from each are inside both caches, which have the same length.
    unsafe {
        score_rows::<S, E, R>(problem, query, tile, keys.clone(), weights, ahead.is_some());
        let mut corrections = [1.0; R];
        for (r, correction) in corrections.iter_mut().enumerate() {
            let scores = &mut weights[r * KEY_TILE..(r + 1) * KEY_TILE];
            let (greatest, total) = (&mut scratch.greatest[row + r], &mut scratch.total[row + r]);
            *correction = update_softmax::<S>(scores, keys.clone(), greatest, total);
        }
        scale_rows::<S, R>(accumulator, corrections);
        add_values::<S, E, R>(problem, weights, tile, keys, accumulator, ahead);
    }
}

/// Writes `scale * query . key` of `R` rows and the given keys; with `fetch` their values are fetched.
///
/// # Safety
/// As for [`attend_rows`]; `query` has `R` rows.
#[inline(always)]
unsafe fn score_rows<S: Simd, E: Element, const R: usize>(
    problem: &Problem<'_, E>,
    query: &[f32],
    tile: &KeyTile,
    keys: Range<usize>,
    weights: &mut Weights,
    fetch: bool,
) {
    let head_dim = query.len() / R;
    let last = keys.end - 1;
    for block in keys.clone().step_by(KEY_BLOCK) {
        // Behind the last key it is taken again; its score is not kept.
        let starts: [usize; KEY_BLOCK] = std::array::from_fn(|c| tile.offsets[(block + c).min(last)]);
        if fetch {
            for start in starts {
                prefetch(problem.value, start, head_dim);
            }
        }
        // SAFETY: the caller promises the offsets, and LANES divides `head_dim`.
        unsafe {
            let mut sums = [[S::splat(0.0); KEY_BLOCK]; R];
            for d in (0..head_dim).step_by(S::LANES) {
                let keys = starts.map(|start| E::load::<S>(problem.key.as_ptr().add(start + d)));
                for (r, sums) in sums.iter_mut().enumerate() {
                    let q = S::load(query.as_ptr().add(r * head_dim + d));
                    for (sum, key) in sums.iter_mut().zip(keys) {
                        *sum = S::mul_add(q, key, *sum);
                    }
                }
            }
            for (r, sums) in sums.into_iter().enumerate() {
                let scores = S::sum4(sums);
                for (c, score) in scores.into_iter().enumerate().take(keys.end - block) {
                    weights[r * KEY_TILE + block + c] = score * problem.scale;
                }
            }
        }
    }
}

/// Turns the scores of one row into weights, and returns the factor for what was summed before.
///
/// # Safety
/// As for [`attend_rows`].
#[inline(always)]
unsafe fn update_softmax<S: Simd>(scores: &mut [f32], keys: Range<usize>, greatest: &mut f32, total: &mut f32) -> f32 {
    // Whole vectors from the start of the tile; a weight of 0 outside `keys` changes no sum.
    let end = keys.end.next_multiple_of(S::LANES);
    scores[..keys.start].fill(f32::NEG_INFINITY);
    scores[keys.end..end].fill(f32::NEG_INFINITY);
    let scores = &mut scores[..end];
    // SAFETY: the caller promises the instruction set; LANES divides `end`, the length of `scores`.
    unsafe {
        let mut tile_greatest = S::splat(f32::NEG_INFINITY);
        for start in (0..end).step_by(S::LANES) {
            tile_greatest = S::max(S::load(scores.as_ptr().add(start)), tile_greatest);
        }
        let new_greatest = greatest.max(S::max_lane(tile_greatest));
        let correction = exp_one::<S>(*greatest - new_greatest);
        let mut sums = S::splat(0.0);
        for start in (0..end).step_by(S::LANES) {
            let place = scores.as_mut_ptr().add(start);
            let weight = exp::<S>(S::add(S::load(place), S::splat(-new_greatest)));
            sums = S::add(sums, weight);
            S::store(place, weight);
        }
        *total = *total * correction + sum::<S>(sums);
        *greatest = new_greatest;
        correction
    }
}

/// Multiplies each row of the accumulator by its factor.
///
/// # Safety
/// As for [`attend_rows`]; `accumulator` has `R` rows.
#[inline(always)]
unsafe fn scale_rows<S: Simd, const R: usize>(accumulator: &mut [f32], factors: [f32; R]) {
    let head_dim = accumulator.len() / R;
    for (row, factor) in accumulator.chunks_exact_mut(head_dim).zip(factors) {
        // The greatest score did not change, as for most tiles.
        if factor.to_bits() == 1f32.to_bits() {
            continue;
        }
        for place in row.chunks_exact_mut(S::LANES) {
            // SAFETY: the caller promises the instruction set; `place` has LANES elements.
            unsafe {
                let scaled = S::mul(S::load(place.as_ptr()), S::splat(factor));
                S::store(place.as_mut_ptr(), scaled);
            }
        }
    }
}

/// Adds `weight * value` of the given keys to `R` rows of the accumulator; the keys of `ahead` are fetched.
///
/// # Safety
/// As for [`attend_rows`]; `accumulator` has `R` rows.
#[inline(always)]
unsafe fn add_values<S: Simd, E: Element, const R: usize>(
    problem: &Problem<'_, E>,
    weights: &Weights,
    tile: &KeyTile,
    keys: Range<usize>,
    accumulator: &mut [f32],
    mut ahead: Option<&KeyTile>,
) {
    let num_vectors = accumulator.len() / R / S::LANES;
    let mut vector = 0;
    while vector < num_vectors {
        let start = vector * S::LANES;
        let (keys, ahead) = (keys.clone(), ahead.take());
        // SAFETY: passed on; 4, 2 or 1 vectors from `start` are inside a row.
        vector += unsafe {
            match num_vectors - vector {
                4.. => add_columns::<S, E, R, 4>(problem, weights, tile, keys, accumulator, start, ahead),
                2..4 => add_columns::<S, E, R, 2>(problem, weights, tile, keys, accumulator, start, ahead),
                _ => add_columns::<S, E, R, 1>(problem, weights, tile, keys, accumulator, start, ahead),
            }
        };
    }
}

/// Does [`add_values`] for `C` vectors of each row, from element `start`, and returns `C`.
///
/// # Safety
/// As for [`add_values`]; elements `start..start + C * LANES` are inside a row.
#[inline(always)]
unsafe fn add_columns<S: Simd, E: Element, const R: usize, const C: usize>(
    problem: &Problem<'_, E>,
    weights: &Weights,
    tile: &KeyTile,
    keys: Range<usize>,
    accumulator: &mut [f32],
    start: usize,
    ahead: Option<&KeyTile>,
) -> usize {
    let head_dim = accumulator.len() / R;
    // SAFETY: the caller promises the ranges in `accumulator` and the offsets.
    unsafe {
        let place = |r: usize, c: usize| r * head_dim + start + c * S::LANES;
        let mut sums: [[S::Vector; C]; R] =
            std::array::from_fn(|r| std::array::from_fn(|c| S::load(accumulator.as_ptr().add(place(r, c)))));
        for key in keys {
            if let Some(ahead) = ahead.filter(|ahead| ahead.keys.contains(&key)) {
                prefetch(problem.key, ahead.offsets[key], head_dim);
            }
            let row = problem.value.as_ptr().add(tile.offsets[key] + start);
            let values: [S::Vector; C] = std::array::from_fn(|c| E::load::<S>(row.add(c * S::LANES)));
            for (r, sums) in sums.iter_mut().enumerate() {
                let weight = S::splat(weights[r * KEY_TILE + key]);
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum = S::mul_add(weight, value, *sum);
                }
            }
        }
        for (r, sums) in sums.into_iter().enumerate() {
            for (c, sum) in sums.into_iter().enumerate() {
                S::store(accumulator.as_mut_ptr().add(place(r, c)), sum);
            }
        }
    }
    C
}
