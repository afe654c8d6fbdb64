//! `Histogram`: how many values lay between fixed bounds, and their sum.
//!
//! One thread at a time records, any thread reads, nobody waits. A reader may see a value in its count and not yet in the sum.

use crate::sync::{AtomicU64, Ordering};

/// Bounds for times, in nanoseconds: five a decade, from 100 microseconds to 1,000 seconds.
pub const TIME_BOUNDS_NS: [u64; 36] = in_decades([100_000, 150_000, 250_000, 400_000, 600_000]);
/// Bounds for numbers of tokens: three a decade, from 1 to 1 million.
pub const TOKEN_BOUNDS: [u64; 19] = in_decades([1, 2, 5]);

/// These steps, then ten times as much, and so on.
const fn in_decades<const NUM_STEPS: usize, const NUM: usize>(steps: [u64; NUM_STEPS]) -> [u64; NUM] {
    let mut bounds = [0; NUM];
    let (mut index, mut scale) = (0, 1);
    while index < bounds.len() {
        bounds[index] = steps[index % steps.len()] * scale;
        index += 1;
        if index % steps.len() == 0 {
            scale *= 10;
        }
    }
    bounds
}

/// Counts of values by bounds.
///
/// ```
/// use cbrs_core::histogram::Histogram;
/// let histogram = Histogram::new(&[10, 20]);
/// histogram.record(10);
/// histogram.record_many(25, 3);
/// assert_eq!(histogram.counts(), [1, 0, 3]);
/// assert_eq!(histogram.sum(), 85);
/// ```
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [u64],
    /// One for each bound, of the values up to it and above the one before, and one for what is above all.
    counts: Box<[AtomicU64]>,
    sum: AtomicU64,
}

impl Histogram {
    /// A histogram without values; `bounds` ascend.
    pub fn new(bounds: &'static [u64]) -> Self {
        debug_assert!(bounds.is_sorted(), "bounds ascend");
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds, counts, sum: AtomicU64::new(0) }
    }

    /// Counts a value. Calls must not overlap.
    pub fn record(&self, value: u64) {
        self.record_many(value, 1);
    }

    /// Counts a value that came `count` times. Calls must not overlap.
    pub fn record_many(&self, value: u64, count: u64) {
        let index = self.bounds.partition_point(|&bound| bound < value);
        add(&self.counts[index], count);
        add(&self.sum, value.wrapping_mul(count));
    }

    /// The largest values of the buckets, but for the last one, which has no bound.
    pub fn bounds(&self) -> &'static [u64] {
        self.bounds
    }

    /// Values by bucket: one for each bound, and one for what is above all.
    pub fn counts(&self) -> Vec<u64> {
        self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect()
    }

    /// Sum of all values.
    pub fn sum(&self) -> u64 {
        self.sum.load(Ordering::Relaxed)
    }
}

/// Adds where only one thread writes: no other can come between, so it need not be one operation. Relaxed: each number stands alone.
fn add(number: &AtomicU64, value: u64) {
    number.store(number.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_round_and_ascend() {
        assert_eq!(TIME_BOUNDS_NS[..6], [100_000, 150_000, 250_000, 400_000, 600_000, 1_000_000]);
        assert_eq!(TIME_BOUNDS_NS[35], 1_000_000_000_000);
        assert_eq!(TOKEN_BOUNDS[..5], [1, 2, 5, 10, 20]);
        assert_eq!(TOKEN_BOUNDS[18], 1_000_000);
        assert!(TIME_BOUNDS_NS.is_sorted() && TOKEN_BOUNDS.is_sorted());
    }

    #[test]
    fn a_value_on_a_bound_belongs_below_it() {
        let histogram = Histogram::new(&[10, 20]);
        for value in [0, 10, 11, 20, 21] {
            histogram.record(value);
        }
        assert_eq!(histogram.counts(), [2, 2, 1]);
        assert_eq!(histogram.sum(), 62);
    }
}
