//! The running sums of query rows, and what the softmax does to them.

use std::ops::Range;

use crate::simd::{Simd, exp, exp_one, sum};

/// Sums of some rows over some keys, in one piece of memory.
#[derive(Debug)]
pub(crate) struct Sums<'a> {
    /// Weighted sums of values `[rows, head_dim]`, in vector order, not yet divided by `total`.
    pub(crate) values: &'a mut [f32],
    /// Greatest score so far `[rows]`.
    pub(crate) greatest: &'a mut [f32],
    /// Sum of weights relative to `greatest` `[rows]`.
    pub(crate) total: &'a mut [f32],
}

impl<'a> Sums<'a> {
    /// Numbers that the sums of `rows` rows take.
    pub(crate) fn len(rows: usize, head_dim: usize) -> usize {
        rows * (head_dim + 2)
    }

    /// Takes memory of that length apart.
    pub(crate) fn new(memory: &'a mut [f32], rows: usize) -> Self {
        let (values, rest) = memory.split_at_mut(memory.len() - 2 * rows);
        let (greatest, total) = rest.split_at_mut(rows);
        Self { values, greatest, total }
    }

    /// Sets them to those of no keys.
    pub(crate) fn clear(&mut self) {
        self.values.fill(0.0);
        self.greatest.fill(f32::NEG_INFINITY);
        self.total.fill(0.0);
    }

    fn head_dim(&self) -> usize {
        self.values.len() / self.total.len()
    }

    /// Takes the sums of one row over.
    pub(crate) fn copy_row(&mut self, from: &Sums<'_>, row: usize) {
        let place = row * self.head_dim()..(row + 1) * self.head_dim();
        self.values[place.clone()].copy_from_slice(&from.values[place]);
        self.greatest[row] = from.greatest[row];
        self.total[row] = from.total[row];
    }
}

/// Turns the scores of one row into weights, and returns the factor for what was summed before.
///
/// With `scales`, factors of the tile's keys and values, scores are multiplied with the first, and weights, once they are
/// summed, with the second.
///
/// # Safety
/// The CPU has the instruction set of `S`; `scores` is a tile's, whose length `S::LANES` divides, and has `keys`; so are
/// `scales`.
#[inline(always)]
pub(crate) unsafe fn update_row<S: Simd>(
    scores: &mut [f32],
    keys: Range<usize>,
    greatest: &mut f32,
    total: &mut f32,
    scales: Option<[*const f32; 2]>,
) -> f32 {
    // Whole vectors from the start of the tile; a weight of 0 outside `keys` changes no sum.
    let end = keys.end.next_multiple_of(S::LANES);
    if let Some([factors, _]) = scales {
        for start in (0..end).step_by(S::LANES) {
            // SAFETY: the caller promises the instruction set; LANES divides `end`, which is inside both.
            unsafe {
                let place = scores.as_mut_ptr().add(start);
                S::store(place, S::mul(S::load(place), S::load(factors.add(start))));
            }
        }
    }
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
        // Most tiles do not have the greatest score so far.
        let is_new = new_greatest.to_bits() != greatest.to_bits();
        let correction = if is_new { exp_one::<S>(*greatest - new_greatest) } else { 1.0 };
        let mut sums = S::splat(0.0);
        for start in (0..end).step_by(S::LANES) {
            let place = scores.as_mut_ptr().add(start);
            let weight = exp::<S>(S::add(S::load(place), S::splat(-new_greatest)));
            sums = S::add(sums, weight);
            let kept = match scales {
                Some([_, factors]) => S::mul(weight, S::load(factors.add(start))),
                None => weight,
            };
            S::store(place, kept);
        }
        *total = *total * correction + sum::<S>(sums);
        *greatest = new_greatest;
        correction
    }
}

/// Adds one row's sums over later keys to those over the keys before them.
///
/// # Safety
/// The CPU has the instruction set of `S`, which divides the head size; both have the row.
#[inline(always)]
pub(crate) unsafe fn merge_row<S: Simd>(whole: &mut Sums<'_>, later: &mut Sums<'_>, row: usize) {
    let place = row * whole.head_dim()..(row + 1) * whole.head_dim();
    let (before, greatest) = (whole.greatest[row], whole.greatest[row].max(later.greatest[row]));
    // SAFETY: passed on; both slices have the head size.
    unsafe {
        let (keep, add) = (exp_one::<S>(before - greatest), exp_one::<S>(later.greatest[row] - greatest));
        whole.total[row] = whole.total[row] * keep + later.total[row] * add;
        whole.greatest[row] = greatest;
        let later = later.values[place.clone()].chunks_exact(S::LANES);
        for (values, later) in whole.values[place].chunks_exact_mut(S::LANES).zip(later) {
            let kept = S::mul(S::load(values.as_ptr()), S::splat(keep));
            S::store(values.as_mut_ptr(), S::mul_add(S::load(later.as_ptr()), S::splat(add), kept));
        }
    }
}
