//! The inner loop of a product with int8 weights: a few rows of quantised input and one panel.
//!
//! A panel is a run of groups of 32 inputs; a group is the scales of all its features (bf16, in pairs as bf16 weights
//! are), then their weights in the order of [`DotSet::place`](crate::simd::dot::DotSet::place).
//!
//! Invariants:
//! 1. Each sum is one chain of multiply-adds over the groups in ascending order, started at 0: the sum of a group's integer
//!    products, times the product of both scales. The same bits whichever rows are taken together.

use std::ops::Range;

use super::block::{Multiply, tiles};
use super::quantize::Quantized;
use crate::simd::dot::{Dot, GROUP, STEP};
use crate::simd::{CACHE_LINE, Simd, prefetch_line};

/// Groups of a run: with those of a tile's rows a panel takes half of the first-level cache.
const RUN: usize = 16;
/// Steps between two jumps.
const UNROLL: usize = 2;
/// Bytes ahead of the weights at work that are fetched if each is read once: across the page borders at which the hardware
/// stops. What several tiles read is fetched a run ahead instead, each tile its part.
const FETCH_AHEAD: usize = 1024;

/// Bytes of one group of a panel of two vectors: a bf16 scale and 32 weights of each feature.
pub(crate) const fn group_bytes(lanes: usize) -> usize {
    2 * lanes * (size_of::<u16>() + GROUP)
}

/// Quantised input and packed weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ints<'a, D> {
    panels: &'a [u8],
    input: &'a Quantized,
    /// Jumps in a group.
    num_turns: usize,
    dot: std::marker::PhantomData<D>,
}

impl<'a, D: Dot> Ints<'a, D> {
    pub(crate) fn new(panels: &'a [u8], input: &'a Quantized) -> Self {
        // Hidden from the compiler, which would unroll the loop and add up in another order, with most sums in memory.
        let num_turns = std::hint::black_box(GROUP / STEP / UNROLL);
        Self { panels, input, num_turns, dot: std::marker::PhantomData }
    }
}

impl<D: Dot + Sync> Multiply for Ints<'_, D> {
    type Numbers = D::Numbers;
    const TILE_ROWS: usize = D::TILE_ROWS;
    /// Two vectors of integers keep the units busy without a second panel.
    const HAS_PAIRS: bool = false;

    #[inline(always)]
    unsafe fn multiply<const P: usize>(&self, rows: &Range<usize>, panels: [usize; P], sums: *mut f32) {
        let (num_groups, lanes) = (self.input.num_groups(), D::Numbers::LANES);
        let run = if rows.len() <= D::TILE_ROWS { num_groups } else { RUN };
        for (p, panel) in panels.into_iter().enumerate() {
            for first in (0..num_groups).step_by(run) {
                let len = run.min(num_groups - first);
                let panel =
                    &self.panels[(panel * num_groups + first) * group_bytes(lanes)..][..len * group_bytes(lanes)];
                let num_tiles = rows.len().div_ceil(D::TILE_ROWS);
                let ahead = if num_tiles == 1 { FETCH_AHEAD } else { panel.len() };
                for (index, tile) in tiles(rows.clone(), D::TILE_ROWS).enumerate() {
                    let place = sums.wrapping_add(((tile.start - rows.start) * P + p) * 2 * lanes);
                    let (ints, scales, offsets) = self.input.row(tile.start, first);
                    let tile = Tile {
                        ints,
                        scales,
                        offsets,
                        row_groups: num_groups,
                        num_rows: tile.len(),
                        panel: panel.as_ptr(),
                        num_groups: len,
                        num_turns: self.num_turns,
                        goes_on: first > 0,
                        ahead,
                        fetched: [index * len / num_tiles, (index + 1) * len / num_tiles],
                    };
                    // SAFETY: passed on; the ranges were taken from slices, and a quantised row has `num_groups` groups.
                    unsafe { multiply::<D>(tile, place, P * 2 * lanes) };
                }
            }
        }
    }
}

/// Rows of the input of a tile, and the panel that they meet; all or a run of the groups.
#[derive(Debug, Clone, Copy)]
struct Tile {
    /// First integer, scale and offset of the first row.
    ints: *const i8,
    scales: *const f32,
    offsets: *const i32,
    /// Groups from a row to the next.
    row_groups: usize,
    num_rows: usize,
    panel: *const u8,
    /// Groups to add up.
    num_groups: usize,
    /// Jumps in a group.
    num_turns: usize,
    /// Whether the sums go on from what they are, instead of from 0.
    goes_on: bool,
    /// Bytes ahead of the weights at work that are fetched.
    ahead: usize,
    /// First of the groups at which this tile fetches, and the one after the last.
    fetched: [usize; 2],
}

/// Writes the sums of a tile, `[num_rows, 2 * LANES]` with `stride` elements from a row to the next.
///
/// # Safety
/// - The CPU has the instruction set of `D`.
/// - `num_rows` is 1 to `TILE_ROWS`; rows and panel are readable, `num_groups` groups long; there is room for the sums.
#[inline(always)]
unsafe fn multiply<D: Dot>(tile: Tile, sums: *mut f32, stride: usize) {
    let most = D::TILE_ROWS;
    debug_assert!((1..=most).contains(&tile.num_rows));
    // SAFETY: passed on; each arm has the number of rows that the tile says.
    unsafe {
        match tile.num_rows {
            1 => rows::<D, 1>(tile, sums, stride),
            2 => rows::<D, 2>(tile, sums, stride),
            3 => rows::<D, 3>(tile, sums, stride),
            4 => rows::<D, 4>(tile, sums, stride),
            5 => rows::<D, 5>(tile, sums, stride),
            6 => rows::<D, 6>(tile, sums, stride),
            7 if most >= 7 => rows::<D, 7>(tile, sums, stride),
            8 if most >= 8 => rows::<D, 8>(tile, sums, stride),
            9 if most >= 9 => rows::<D, 9>(tile, sums, stride),
            10 if most >= 10 => rows::<D, 10>(tile, sums, stride),
            11 if most >= 11 => rows::<D, 11>(tile, sums, stride),
            _ => rows::<D, 12>(tile, sums, stride),
        }
    }
}

/// Does [`multiply`] for `R` rows.
///
/// # Safety
/// As for [`multiply`].
#[inline(always)]
unsafe fn rows<D: Dot, const R: usize>(tile: Tile, sums: *mut f32, stride: usize) {
    // The arms of `multiply` that this instruction set has no registers for.
    if R > D::TILE_ROWS {
        return;
    }
    let lanes = D::Numbers::LANES;
    // SAFETY: the caller promises the rows, the panel and the room for the sums.
    unsafe {
        if !tile.goes_on {
            for half in 0..2 * R {
                let place = sums.wrapping_add(half / 2 * stride + half % 2 * lanes);
                D::Numbers::store(place, D::Numbers::splat(0.0));
            }
        }
        for group in 0..tile.num_groups {
            let block = tile.panel.wrapping_add(group * group_bytes(lanes));
            if tile.fetched[0] <= group && group < tile.fetched[1] {
                for line in (0..group_bytes(lanes)).step_by(CACHE_LINE) {
                    prefetch_line(block.wrapping_add(tile.ahead + line).cast());
                }
            }
            let totals = group_sums::<D, R>(&tile, group, block.wrapping_add(2 * lanes * size_of::<u16>()));
            let weight_scales = D::Numbers::load_bf16_pairs(block.cast());
            for (r, total) in totals.into_iter().enumerate() {
                let scale = D::Numbers::splat(*tile.scales.wrapping_add(r * tile.row_groups + group));
                for (half, (total, weight_scale)) in total.into_iter().zip(weight_scales).enumerate() {
                    let place = sums.wrapping_add(r * stride + half * lanes);
                    let scale = D::Numbers::mul(weight_scale, scale);
                    let before = D::Numbers::load(place);
                    D::Numbers::store(place, D::Numbers::mul_add(D::to_numbers(total), scale, before));
                }
            }
        }
    }
}

/// Returns the sums of one group's integer products.
///
/// # Safety
/// As for [`multiply`]; the group exists, and `weights` are its weights.
#[inline(always)]
unsafe fn group_sums<D: Dot, const R: usize>(tile: &Tile, group: usize, weights: *const u8) -> [[D::Sums; 2]; R] {
    let step_bytes = 2 * D::Numbers::LANES * STEP;
    // SAFETY: passed on.
    unsafe {
        let mut totals =
            std::array::from_fn(|r| [D::start(*tile.offsets.wrapping_add(r * tile.row_groups + group)); 2]);
        for turn in 0..tile.num_turns {
            for step in 0..UNROLL {
                // The places are inside the rows and panels; without checks of that here, which would be most of a
                // checked build.
                let step = turn.wrapping_mul(UNROLL).wrapping_add(step);
                let weights = D::weights(weights.wrapping_add(step.wrapping_mul(step_bytes)));
                let column = tile.ints.wrapping_add(group.wrapping_mul(GROUP).wrapping_add(step.wrapping_mul(STEP)));
                for (r, total) in totals.iter_mut().enumerate() {
                    let row = r.wrapping_mul(tile.row_groups).wrapping_mul(GROUP);
                    let inputs = D::inputs(column.wrapping_add(row));
                    for (sum, weights) in total.iter_mut().zip(weights) {
                        *sum = D::add(*sum, weights, inputs);
                    }
                }
            }
        }
        totals
    }
}

#[cfg(test)]
mod tests {
    use crate::dispatch::Kernels;
    use crate::linear::{LinearArgs, Then, WeightsRef};
    use crate::simd::dot::DotSet;

    /// With scales of 1 the result is the integer sum itself.
    #[test]
    fn every_set_that_the_cpu_has_gives_the_sums_of_the_integers() {
        let kernels = Kernels::new(1).expect("starts");
        let (num_rows, in_features, out_features) = (29, 160, 70);
        let mut state = 1_u32;
        let mut below = |limit: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) % limit
        };
        let mut weights: Vec<f32> = (0..out_features * in_features).map(|_| below(255) as f32 - 127.0).collect();
        let mut input: Vec<f32> = (0..num_rows * in_features).map(|_| below(127) as f32 - 63.0).collect();
        weights.chunks_mut(32).for_each(|group| group[7] = 127.0);
        input.chunks_mut(32).for_each(|group| group[4..6].copy_from_slice(&[-127.0, 0.0]));
        for set in [DotSet::Vnni, DotSet::Avx512, DotSet::Avx2, DotSet::Portable] {
            if !set.is_available() {
                continue;
            }
            let weights_ref = WeightsRef::F32(&weights);
            let matrix = kernels.pack_int8_for(set, weights_ref, out_features, in_features, 1).expect("valid");
            let mut out = vec![f32::NAN; num_rows * out_features];
            let args =
                LinearArgs { out: &mut out, input: &input, num_rows, matrix: &matrix, bias: None, then: Then::Store };
            kernels.linear(args).expect("valid");
            for (index, got) in out.iter().enumerate() {
                let row = &input[index / out_features * in_features..][..in_features];
                let feature = &weights[index % out_features * in_features..][..in_features];
                let expected: i64 = row.iter().zip(feature).map(|(a, b)| *a as i64 * *b as i64).sum();
                assert_eq!(*got as i64, expected, "{} {index}", set.name());
            }
        }
    }
}
