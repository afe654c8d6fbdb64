//! The inner loop of a product: a few rows of the input and one or two panels of weights.
//!
//! Invariants:
//! 1. Each sum is one chain of multiply-adds over the inputs in ascending order, started at 0: the same bits whichever
//!    rows and panels are taken together.

use std::marker::PhantomData;
use std::ops::Range;

use super::block::{Multiply, tiles};
use crate::simd::{CACHE_LINE, Simd, prefetch_line};

/// Inputs of a run: with them a panel takes half of the first-level cache.
const RUN: usize = 256;

/// Bytes ahead of the weights at work that are fetched: across the page borders at which the hardware stops.
const FETCH_AHEAD: usize = 1024;

/// Element of a panel.
pub(crate) trait Weight: Copy + Send + Sync {
    /// Loads and widens the weights of one input for all features of a panel.
    ///
    /// # Safety
    /// As for [`Simd`]; `2 * LANES` elements are readable.
    unsafe fn load_panel<S: Simd>(ptr: *const Self) -> [S::Vector; 2];
}

impl Weight for f32 {
    #[inline(always)]
    unsafe fn load_panel<S: Simd>(ptr: *const Self) -> [S::Vector; 2] {
        // SAFETY: passed on.
        unsafe { [S::load(ptr), S::load(ptr.add(S::LANES))] }
    }
}

/// A `u16` element holds the bits of a bf16 number.
impl Weight for u16 {
    #[inline(always)]
    unsafe fn load_panel<S: Simd>(ptr: *const Self) -> [S::Vector; 2] {
        // SAFETY: passed on.
        unsafe { S::load_bf16_pairs(ptr) }
    }
}

/// Input and packed weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Floats<'a, S, W> {
    panels: &'a [W],
    input: &'a [f32],
    depth: usize,
    simd: PhantomData<S>,
}

impl<'a, S, W> Floats<'a, S, W> {
    /// Takes `depth` inputs a row.
    pub(crate) fn new(panels: &'a [W], input: &'a [f32], depth: usize) -> Self {
        Self { panels, input, depth, simd: PhantomData }
    }
}

impl<S: Simd + Sync, W: Weight> Multiply for Floats<'_, S, W> {
    type Numbers = S;
    const TILE_ROWS: usize = S::TILE_ROWS;
    const HAS_PAIRS: bool = true;

    #[inline(always)]
    unsafe fn multiply<const P: usize>(&self, rows: &Range<usize>, panels: [usize; P], sums: *mut f32) {
        let (depth, width) = (self.depth, 2 * S::LANES);
        let tile_rows = S::TILE_ROWS / P;
        let run = if rows.len() <= tile_rows { depth } else { RUN };
        for first in (0..depth).step_by(run) {
            let len = run.min(depth - first);
            let mut starts = [self.panels.as_ptr(); P];
            for (start, panel) in starts.iter_mut().zip(panels) {
                *start = self.panels[(panel * depth + first) * width..][..len * width].as_ptr();
            }
            for tile in tiles(rows.clone(), tile_rows) {
                let input = &self.input[tile.start * depth + first..][..(tile.len() - 1) * depth + len];
                let place = sums.wrapping_add((tile.start - rows.start) * P * width);
                let (num_rows, goes_on) = (tile.len(), first > 0);
                let tile = Tile { input: input.as_ptr(), stride: depth, num_rows, panels: starts, depth: len, goes_on };
                // SAFETY: passed on; the ranges were taken from slices.
                unsafe { multiply::<S, W, P>(tile, place) };
            }
        }
    }
}

/// Rows of the input of a tile, and the panels that they meet; all or a run of the inputs.
#[derive(Debug, Clone, Copy)]
struct Tile<W, const P: usize> {
    /// First element of the first row.
    input: *const f32,
    /// Elements from a row to the next; the inputs of the product.
    stride: usize,
    num_rows: usize,
    panels: [*const W; P],
    /// Inputs to add up.
    depth: usize,
    /// Whether the sums go on from what they are, instead of from 0.
    goes_on: bool,
}

/// Writes the sums of a tile, `[num_rows, P, 2 * LANES]`.
///
/// # Safety
/// - The CPU has the instruction set of `S`.
/// - `num_rows` is 1 to `TILE_ROWS / P`; the rows and panels are readable, `depth` inputs long; `sums` is of that size.
#[inline(always)]
unsafe fn multiply<S: Simd, W: Weight, const P: usize>(tile: Tile<W, P>, sums: *mut f32) {
    debug_assert!((1..=S::TILE_ROWS / P).contains(&tile.num_rows));
    let most = S::TILE_ROWS / P;
    // SAFETY: passed on; each arm has the number of rows that the tile says.
    unsafe {
        match tile.num_rows {
            1 => rows::<S, W, 1, P>(tile, sums),
            2 => rows::<S, W, 2, P>(tile, sums),
            3 => rows::<S, W, 3, P>(tile, sums),
            4 if most >= 4 => rows::<S, W, 4, P>(tile, sums),
            5 if most >= 5 => rows::<S, W, 5, P>(tile, sums),
            6 if most >= 6 => rows::<S, W, 6, P>(tile, sums),
            7 if most >= 7 => rows::<S, W, 7, P>(tile, sums),
            8 if most >= 8 => rows::<S, W, 8, P>(tile, sums),
            9 if most >= 9 => rows::<S, W, 9, P>(tile, sums),
            10 if most >= 10 => rows::<S, W, 10, P>(tile, sums),
            11 if most >= 11 => rows::<S, W, 11, P>(tile, sums),
            _ => rows::<S, W, 12, P>(tile, sums),
        }
    }
}

/// Does [`multiply`] for `R` rows.
///
/// # Safety
/// As for [`multiply`].
#[inline(always)]
unsafe fn rows<S: Simd, W: Weight, const R: usize, const P: usize>(tile: Tile<W, P>, sums: *mut f32) {
    // The arms of `multiply` that this instruction set has no registers for.
    if R * P > S::TILE_ROWS {
        return;
    }
    let width = 2 * S::LANES;
    // SAFETY: the caller promises the rows, the panels and the room for the sums.
    unsafe {
        let mut total = [[[S::splat(0.0); 2]; P]; R];
        if tile.goes_on {
            for (index, sum) in total.as_flattened_mut().as_flattened_mut().iter_mut().enumerate() {
                *sum = S::load(sums.wrapping_add(index * S::LANES));
            }
        }
        let mut start = 0;
        while start + S::UNROLL <= tile.depth {
            for panel in tile.panels {
                let ahead = panel.wrapping_add(start * width).cast::<i8>().wrapping_add(FETCH_AHEAD);
                for line in (0..S::UNROLL * width * size_of::<W>()).step_by(CACHE_LINE) {
                    prefetch_line(ahead.wrapping_add(line));
                }
            }
            for step in 0..S::UNROLL {
                add_input::<S, W, R, P>(&tile, start.wrapping_add(step), &mut total);
            }
            start += S::UNROLL;
        }
        for input in start..tile.depth {
            add_input::<S, W, R, P>(&tile, input, &mut total);
        }
        for (index, sum) in total.as_flattened().as_flattened().iter().enumerate() {
            S::store(sums.wrapping_add(index * S::LANES), *sum);
        }
    }
}

/// Adds the products of one input.
///
/// # Safety
/// As for [`multiply`]; `input` is below the depth.
#[inline(always)]
unsafe fn add_input<S: Simd, W: Weight, const R: usize, const P: usize>(
    tile: &Tile<W, P>,
    input: usize,
    total: &mut [[[S::Vector; 2]; P]; R],
) {
    // The places are inside the rows and panels; without checks of that here, which would be most of a checked build.
    let column = tile.input.wrapping_add(input);
    // SAFETY: passed on.
    unsafe {
        for (p, panel) in tile.panels.iter().enumerate() {
            let weights = W::load_panel::<S>(panel.wrapping_add(input.wrapping_mul(2 * S::LANES)));
            for (r, total) in total.iter_mut().enumerate() {
                let factor = S::splat(*column.wrapping_add(r.wrapping_mul(tile.stride)));
                for (sum, weight) in total[p].iter_mut().zip(weights) {
                    *sum = S::mul_add(factor, weight, *sum);
                }
            }
        }
    }
}
