//! `top_k`, `top_p`, `min_p` and the draw, over the weights of one row.
//!
//! Invariants:
//! 1. What is left out by a shortcut (a floor below which nothing can stay) would have been left out anyway.
//! 2. An id of weight 0 is never drawn.

use crate::sampling::mass::Histogram;
use crate::sampling::scan::{BLOCK, Weights};
use crate::sampling::select::{Candidate, collect, floor_of_count, keep_count, keep_mass};
use crate::simd::Simd;

/// How one token is drawn.
#[derive(Debug, Clone, Copy)]
pub(super) struct DrawParameters {
    pub(super) temperature: f64,
    /// 0 = all.
    pub(super) top_k: usize,
    pub(super) top_p: f64,
    pub(super) min_p: f64,
    pub(super) uniform: f64,
}

/// Memory for one row at a time.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    weights: Weights,
    histogram: Histogram,
    kept: Vec<Candidate<f64>>,
    work: Vec<Candidate<f64>>,
    block_work: Vec<f64>,
}

/// Returns the token; `largest` is the largest of `scores`, and finite.
///
/// # Safety
/// The CPU has the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn draw<S: Simd>(
    scores: &[f32],
    largest: f32,
    parameters: &DrawParameters,
    scratch: &mut Scratch,
) -> usize {
    let Scratch { weights, histogram, kept, work, block_work } = scratch;
    weights.fill::<S>(scores, largest, parameters.temperature);
    let DrawParameters { top_k, top_p, uniform, .. } = *parameters;
    // The largest weight is 1, so this is the limit itself.
    let min_p = parameters.min_p.min(1.0);
    let (is_limited, has_nucleus) = ((1..scores.len()).contains(&top_k), top_p < 1.0);
    if is_limited {
        let floor = floor_of_count(&weights.block_largest, top_k, 0.0, block_work);
        collect(&weights.all, &weights.block_largest, floor, kept);
        keep_count(kept, top_k, work);
        if has_nucleus {
            let total: f64 = kept.iter().map(|candidate| candidate.value).sum();
            keep_mass(kept, top_p * total, f64::INFINITY, work);
        }
    } else if has_nucleus {
        let total: f64 = weights.block_sum.iter().sum();
        // All ids below this together have less than half of what may be left out.
        let least = (1.0 - top_p) * total / (2 * scores.len()) as f64;
        let bounds = histogram.bounds(weights, least, top_p * total);
        collect(&weights.all, &weights.block_largest, bounds.floor, kept);
        keep_mass(kept, top_p * total, bounds.certain, work);
    } else if min_p > 0.0 {
        collect(&weights.all, &weights.block_largest, min_p, kept);
    } else {
        return pick_from_all(weights, uniform);
    }
    if min_p > 0.0 {
        kept.retain(|candidate| candidate.value >= min_p);
    }
    pick(kept, uniform)
}

/// The number that the cumulated weights must exceed: rounding may lift the product to the total itself.
fn target(uniform: f64, total: f64) -> f64 {
    (uniform * total).min(total.next_down())
}

fn pick(kept: &[Candidate<f64>], uniform: f64) -> usize {
    let total = kept.iter().map(|candidate| candidate.value).sum();
    let target = target(uniform, total);
    let mut cumulated = 0.0;
    let found = kept.iter().find(|candidate| {
        cumulated += candidate.value;
        cumulated > target
    });
    found.expect("added in the same order they exceed what is below their sum").id
}

fn pick_from_all(weights: &Weights, uniform: f64) -> usize {
    let target = target(uniform, weights.block_sum.iter().sum());
    let mut before = 0.0;
    let block = weights.block_sum.iter().position(|sum| {
        let is_here = before + sum > target;
        before += if is_here { 0.0 } else { *sum };
        is_here
    });
    let start = block.expect("added in the same order they exceed what is below their sum") * BLOCK;
    let end = weights.all.len().min(start + BLOCK);
    let of_block = &weights.all[start..end];
    let mut cumulated = before;
    let offset = of_block.iter().position(|weight| {
        cumulated += weight;
        cumulated > target
    });
    // The sum of the block was added in another order: rounding may hide the last step.
    let last = || of_block.iter().rposition(|weight| *weight > 0.0).expect("the block's sum is above 0");
    start + offset.unwrap_or_else(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::portable::Portable;

    const ALL: DrawParameters = DrawParameters { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, uniform: 0.0 };

    fn run(scores: &[f32], parameters: DrawParameters) -> usize {
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        // SAFETY: needs no instruction set.
        unsafe { draw::<Portable<8>>(scores, largest, &parameters, &mut Scratch::default()) }
    }

    #[test]
    fn extreme_uniforms_give_an_id_that_is_possible() {
        let mut scores = vec![f32::NEG_INFINITY; 200];
        scores[70..140].fill(1.0);
        let last = 1f64.next_down();
        for (uniform, expected) in [(0.0, 70), (f64::from_bits(1), 70), (last, 139), (1.0, 139), (7.0, 139)] {
            for parameters in
                [ALL, DrawParameters { min_p: 0.5, ..ALL }, DrawParameters { top_k: 100, top_p: 1.0, ..ALL }]
            {
                assert_eq!(run(&scores, DrawParameters { uniform, ..parameters }), expected);
            }
        }
    }

    #[test]
    fn equal_scores_share_the_uniform_numbers_evenly() {
        let scores = vec![-3.5; 1000];
        for token in 0..1000u32 {
            let uniform = (f64::from(token) + 0.5) / 1000.0;
            let wanted = DrawParameters { uniform, ..ALL };
            assert_eq!(run(&scores, wanted), token as usize);
            // The lower ids stay, so the same numbers lead to the first half, or to the first 10.
            assert_eq!(run(&scores, DrawParameters { top_p: 0.5, ..wanted }), token as usize / 2);
            assert_eq!(run(&scores, DrawParameters { top_k: 10, ..wanted }), token as usize / 100);
        }
    }

    #[test]
    fn a_tiny_top_p_and_a_top_k_of_one_leave_the_first_of_the_largest() {
        let mut scores = vec![0.0; 129];
        (scores[77], scores[128]) = (2.0, 2.0);
        for parameters in [
            DrawParameters { top_p: 1e-9, ..ALL },
            DrawParameters { top_k: 1, ..ALL },
            DrawParameters { top_k: 2, top_p: 0.5, ..ALL },
        ] {
            assert_eq!(run(&scores, DrawParameters { uniform: 0.999, ..parameters }), 77);
        }
        assert_eq!(run(&scores, DrawParameters { min_p: 1.0, uniform: 0.999, ..ALL }), 128);
    }
}
