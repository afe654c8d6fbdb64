//! Log-probability and rank of a token, and the most likely ids, over the untouched logits of one row.

use crate::sampling::scan::{count_above, sum_of_exp};
use crate::sampling::select::{Candidate, by_preference, collect, floor_of_count};
use crate::simd::Simd;

/// The least log-probability that is reported; also what an unusable row says of every id.
pub const LOGPROB_FLOOR: f32 = -9999.0;

/// Logits and the token that is asked about.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row<'a> {
    pub(super) scores: &'a [f32],
    pub(super) target: usize,
}

/// Where the answer goes: the token itself, then the most likely ids.
#[derive(Debug)]
pub(super) struct Out<'a> {
    pub(super) ids: &'a mut [i32],
    pub(super) values: &'a mut [f32],
    /// One more than the number of ids with a greater logit.
    pub(super) rank: &'a mut i32,
}

/// Memory for one row at a time.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    best: Vec<Candidate<f32>>,
    block_work: Vec<f32>,
}

/// Fills `out`; `largest` is that of the scores, `None` for an unusable row, and `block_largest` that of each block.
///
/// # Safety
/// The CPU has the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn fill<S: Simd>(
    row: Row<'_>,
    largest: Option<f32>,
    out: Out<'_>,
    block_largest: &[f32],
    scratch: &mut Scratch,
) {
    let Out { ids, values, rank } = out;
    let target = Candidate { value: row.scores[row.target], id: row.target };
    *rank = 1 + count_above(row.scores, target.value) as i32;
    let Some(largest) = largest else {
        // Ids that exist, so that a reader can name them.
        for (place, id) in ids.iter_mut().zip(std::iter::once(row.target).chain(0..)) {
            *place = id.min(row.scores.len() - 1) as i32;
        }
        values.fill(LOGPROB_FLOOR);
        return;
    };
    // SAFETY: passed on.
    let log_sum = unsafe { sum_of_exp::<S>(row.scores, largest) }.ln();
    let logprob = |value: f32| {
        let exact = f64::from(value) - f64::from(largest) - log_sum;
        (exact as f32).max(LOGPROB_FLOOR)
    };
    let count = ids.len() - 1;
    let best = &mut scratch.best;
    if count == 0 {
        best.clear();
    } else {
        let floor = floor_of_count(block_largest, count, f32::NEG_INFINITY, &mut scratch.block_work);
        collect(row.scores, block_largest, floor, best);
        if best.len() > count {
            best.select_nth_unstable_by(count - 1, by_preference);
            best.truncate(count);
        }
        best.sort_unstable_by(by_preference);
    }
    // Fewer ids than columns: the last one again.
    let padding = best.last().copied().into_iter().cycle();
    let entries = std::iter::once(target).chain(best.iter().copied()).chain(padding);
    for ((id, value), entry) in ids.iter_mut().zip(values.iter_mut()).zip(entries) {
        (*id, *value) = (entry.id as i32, logprob(entry.value));
    }
}
