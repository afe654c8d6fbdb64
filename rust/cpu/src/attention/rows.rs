//! The inner loops of attention: a few query rows and one tile of keys, generic over instruction set and cache type.
//!
//! Invariants:
//! 1. The arithmetic of a query row is the same whichever rows it is blocked with: each score is one chain of
//!    multiply-adds over the head, each output element one chain over the keys of the tile, in ascending order.
//! 2. While keys are scored their values are fetched, and while values are added the keys of the next tile: blocks lie
//!    anywhere, so the hardware's own prefetching stops at the end of each.

use std::ops::Range;

use super::element::{Element, in_twos, prefetch};
use super::tile::KEY_TILE;
use crate::simd::Simd;

/// Rows of a tile in memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source<'a, T> {
    pub(crate) data: *const T,
    /// First element of each key.
    pub(crate) offsets: &'a [usize; KEY_TILE],
}

/// Rows that are needed next.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fetch<'a, T> {
    source: Source<'a, T>,
    first: usize,
    end: usize,
}

impl<'a, T: Element> Fetch<'a, T> {
    pub(crate) fn new(source: Source<'a, T>, keys: &Range<usize>) -> Self {
        Self { source, first: keys.start, end: keys.end }
    }

    #[inline(always)]
    fn fetch(&self, key: usize, head_dim: usize) {
        if (self.first..self.end).contains(&key) {
            prefetch(self.source.data, self.source.offsets[key], head_dim);
        }
    }
}

/// Writes `query . key` of 1 to 4 rows and the given keys.
///
/// The loops are written with counters: iterators over arrays of vectors are calls of functions that lack the
/// instruction set, unless the compiler happens to inline them.
///
/// # Safety
/// - The CPU has the instruction set of `S`, and `S::LANES` divides the head size.
/// - `query` has `rows` rows, `scores` as many of [`KEY_TILE`]; the source has `keys`, not none.
#[inline(always)]
pub(crate) unsafe fn score_rows<S: Simd, T: Element>(
    query: &[f32],
    rows: usize,
    source: Source<'_, T>,
    keys: Range<usize>,
    scores: &mut [f32],
    fetch: Option<Fetch<'_, T>>,
) {
    // SAFETY: passed on.
    unsafe {
        match rows {
            1 => score::<S, T, 1, 4>(query, source, keys, scores, fetch),
            2 => score::<S, T, 2, 4>(query, source, keys, scores, fetch),
            3 => score::<S, T, 3, 4>(query, source, keys, scores, fetch),
            _ => score::<S, T, 4, 2>(query, source, keys, scores, fetch),
        }
    }
}

/// Scores `R` rows, `K` keys at a time; 4 divides `R * K`.
///
/// # Safety
/// As for [`score_rows`].
#[inline(always)]
unsafe fn score<S: Simd, T: Element, const R: usize, const K: usize>(
    query: &[f32],
    source: Source<'_, T>,
    keys: Range<usize>,
    scores: &mut [f32],
    fetch: Option<Fetch<'_, T>>,
) {
    let head_dim = query.len() / R;
    let twos = in_twos::<S>(head_dim);
    let (query, scores) = (query.as_ptr(), scores.as_mut_ptr());
    let mut block = keys.start;
    while block < keys.end {
        let mut starts = [source.data; K];
        let mut c = 0;
        while c < K {
            // Behind the last key it is taken again; its score is not kept.
            let key = (block + c).min(keys.end - 1);
            starts[c] = source.data.wrapping_add(source.offsets[key]);
            if let Some(fetch) = &fetch {
                fetch.fetch(key, head_dim);
            }
            c += 1;
        }
        // SAFETY: the caller promises the keys and the rows; LANES divides `head_dim`.
        unsafe {
            let mut sums = [[S::splat(0.0); K]; R];
            let mut dim = 0;
            while dim < twos {
                // One half after the other, though both lie in the same memory: sums, queries and a key fill the registers.
                let mut half = 0;
                while half < 2 {
                    let mut c = 0;
                    while c < K {
                        let key = T::load_half::<S>(starts[c].add(dim), half == 1);
                        let mut r = 0;
                        while r < R {
                            let q = query.add(r * head_dim + dim + half * S::LANES);
                            sums[r][c] = S::mul_add(S::load(q), key, sums[r][c]);
                            r += 1;
                        }
                        c += 1;
                    }
                    half += 1;
                }
                dim += 2 * S::LANES;
            }
            if twos < head_dim {
                let mut c = 0;
                while c < K {
                    let key = T::load::<S>(starts[c].add(twos));
                    let mut r = 0;
                    while r < R {
                        sums[r][c] = S::mul_add(S::load(query.add(r * head_dim + twos)), key, sums[r][c]);
                        r += 1;
                    }
                    c += 1;
                }
            }
            let mut first = 0;
            while first < R * K {
                let four = [
                    sums[first / K][first % K],
                    sums[(first + 1) / K][(first + 1) % K],
                    sums[(first + 2) / K][(first + 2) % K],
                    sums[(first + 3) / K][(first + 3) % K],
                ];
                let four = S::sum4(four);
                let mut lane = 0;
                while lane < 4 {
                    let (r, c) = ((first + lane) / K, (first + lane) % K);
                    if block + c < keys.end {
                        *scores.add(r * KEY_TILE + block + c) = four[lane];
                    }
                    lane += 1;
                }
                first += 4;
            }
        }
        block += K;
    }
}

/// Adds the weighted values of the given keys to 1 to 4 rows of sums.
///
/// Sums, weights and values have to fit 16 registers: where they do not, moves between them cost more than loading the
/// weights once more.
///
/// # Safety
/// As for [`score_rows`], with `sums` and `weights` for queries and scores.
#[inline(always)]
pub(crate) unsafe fn add_rows<S: Simd, T: Element>(
    sums: &mut [f32],
    rows: usize,
    source: Source<'_, T>,
    keys: Range<usize>,
    weights: &[f32],
    fetch: Option<Fetch<'_, T>>,
) {
    // SAFETY: passed on.
    unsafe {
        match rows {
            1 => add::<S, T, 1, 4>(sums, source, keys, weights, fetch),
            2 => add::<S, T, 2, 2>(sums, source, keys, weights, fetch),
            3 => add::<S, T, 3, 1>(sums, source, keys, weights, fetch),
            _ => add::<S, T, 4, 1>(sums, source, keys, weights, fetch),
        }
    }
}

/// Multiplies a row with a factor.
///
/// # Safety
/// The CPU has the instruction set of `S`, and `S::LANES` divides the length of `row`.
#[inline(always)]
pub(crate) unsafe fn scale<S: Simd>(row: &mut [f32], factor: f32) {
    let mut start = 0;
    while start < row.len() {
        // SAFETY: the caller promises the instruction set and whole vectors.
        unsafe {
            let place = row.as_mut_ptr().add(start);
            S::store(place, S::mul(S::load(place), S::splat(factor)));
        }
        start += S::LANES;
    }
}

/// Adds to `R` rows, `P` times two vectors of each at a time.
///
/// # Safety
/// As for [`add_rows`].
#[inline(always)]
unsafe fn add<S: Simd, T: Element, const R: usize, const P: usize>(
    sums: &mut [f32],
    source: Source<'_, T>,
    keys: Range<usize>,
    weights: &[f32],
    mut fetch: Option<Fetch<'_, T>>,
) {
    let head_dim = sums.len() / R;
    let mut start = 0;
    // SAFETY: passed on; what is added is inside a row.
    unsafe {
        while start + P * 2 * S::LANES <= head_dim {
            add_twos::<S, T, R, P>(sums, start, source, keys.clone(), weights, fetch.take());
            start += P * 2 * S::LANES;
        }
        while P > 1 && start + 2 * S::LANES <= head_dim {
            add_twos::<S, T, R, 1>(sums, start, source, keys.clone(), weights, fetch.take());
            start += 2 * S::LANES;
        }
        let mut r = 0;
        while start < head_dim && r < R {
            let place = sums.as_mut_ptr().add(r * head_dim + start);
            let mut total = S::load(place);
            let mut key = keys.start;
            while key < keys.end {
                let value = T::load::<S>(source.data.add(source.offsets[key] + start));
                total = S::mul_add(S::splat(weights[r * KEY_TILE + key]), value, total);
                key += 1;
            }
            S::store(place, total);
            r += 1;
        }
    }
}

/// # Safety
/// As for [`add_rows`]; elements `start..start + 2 * P * LANES` are inside a row.
#[inline(always)]
unsafe fn add_twos<S: Simd, T: Element, const R: usize, const P: usize>(
    sums: &mut [f32],
    start: usize,
    source: Source<'_, T>,
    keys: Range<usize>,
    weights: &[f32],
    fetch: Option<Fetch<'_, T>>,
) {
    let head_dim = sums.len() / R;
    let (sums, weights) = (sums.as_mut_ptr(), weights.as_ptr());
    // SAFETY: the caller promises the ranges in `sums` and the keys.
    unsafe {
        let mut totals = [[[S::splat(0.0); 2]; P]; R];
        let mut r = 0;
        while r < R {
            let mut p = 0;
            while p < P {
                let place = sums.add(r * head_dim + start + 2 * p * S::LANES);
                totals[r][p] = [S::load(place), S::load(place.add(S::LANES))];
                p += 1;
            }
            r += 1;
        }
        let mut key = keys.start;
        while key < keys.end {
            if let Some(fetch) = &fetch {
                fetch.fetch(key, head_dim);
            }
            let row = source.data.add(*source.offsets.get_unchecked(key) + start);
            let mut factors = [S::splat(0.0); R];
            let mut r = 0;
            while r < R {
                factors[r] = S::splat(*weights.add(r * KEY_TILE + key));
                r += 1;
            }
            let mut p = 0;
            while p < P {
                let [first, second] = T::load_two::<S>(row.add(2 * p * S::LANES));
                let mut r = 0;
                while r < R {
                    totals[r][p][0] = S::mul_add(factors[r], first, totals[r][p][0]);
                    totals[r][p][1] = S::mul_add(factors[r], second, totals[r][p][1]);
                    r += 1;
                }
                p += 1;
            }
            key += 1;
        }
        let mut r = 0;
        while r < R {
            let mut p = 0;
            while p < P {
                let place = sums.add(r * head_dim + start + 2 * p * S::LANES);
                S::store(place, totals[r][p][0]);
                S::store(place.add(S::LANES), totals[r][p][1]);
                p += 1;
            }
            r += 1;
        }
    }
}
