//! Durations as counts in buckets: constant memory, whatever the number of values.
//!
//! Buckets are linear within each power of two (128 each), so that a percentile is within 0.4 % of the
//! value it stands for. Mean and maximum are exact.

use serde::Serialize;

const SUB_BITS: u32 = 7;
const SUB: u64 = 1 << SUB_BITS;
/// Values above this (2^43 ns, 2.4 hours) are counted in the last bucket.
const MAX_BITS: u32 = 43;
const NUM_BUCKETS: usize = ((MAX_BITS - SUB_BITS + 1) as usize) << SUB_BITS;

/// A histogram of nanoseconds; 37 KiB.
#[derive(Debug, Clone)]
pub struct Histogram {
    counts: Vec<u64>,
    num: u64,
    sum_ns: u128,
    max_ns: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; NUM_BUCKETS], num: 0, sum_ns: 0, max_ns: 0 }
    }
}

/// What a histogram says, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Summary {
    /// Arithmetic mean, exact.
    pub mean: f64,
    /// Half of the values are at most this.
    pub p50: f64,
    /// 90 % of the values are at most this.
    pub p90: f64,
    /// 99 % of the values are at most this.
    pub p99: f64,
    /// The largest value, exact.
    pub max: f64,
}

impl Histogram {
    /// Counts a value.
    pub fn record(&mut self, value_ns: u64) {
        self.counts[bucket_of(value_ns)] += 1;
        self.num += 1;
        self.sum_ns += u128::from(value_ns);
        self.max_ns = self.max_ns.max(value_ns);
    }

    /// Adds all values of another histogram.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.num += other.num;
        self.sum_ns += other.sum_ns;
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// How many values were counted.
    pub const fn len(&self) -> u64 {
        self.num
    }

    /// Whether no value was counted.
    pub const fn is_empty(&self) -> bool {
        self.num == 0
    }

    /// The smallest value that at least `percent` of the values do not exceed (nearest rank), within
    /// 0.4 %; None without values.
    pub fn percentile_ns(&self, percent: f64) -> Option<u64> {
        if self.num == 0 {
            return None;
        }
        let rank = ((percent / 100.0 * self.num as f64).ceil() as u64).clamp(1, self.num);
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return Some(middle_of(bucket).min(self.max_ns));
            }
        }
        Some(self.max_ns)
    }

    /// Mean, percentiles and maximum; None without values.
    pub fn summary(&self) -> Option<Summary> {
        let percentile = |percent| self.percentile_ns(percent).map(|value| ms(value as f64));
        Some(Summary {
            p50: percentile(50.0)?,
            p90: percentile(90.0)?,
            p99: percentile(99.0)?,
            mean: ms(self.sum_ns as f64 / self.num as f64),
            max: ms(self.max_ns as f64),
        })
    }
}

/// Milliseconds to the nanosecond.
fn ms(ns: f64) -> f64 {
    ns.round() / 1e6
}

fn bucket_of(value: u64) -> usize {
    let value = value.min((1 << MAX_BITS) - 1);
    if value < SUB {
        return value as usize;
    }
    let shift = value.ilog2() - SUB_BITS;
    // The top bit is the power; the SUB_BITS below it are the place within.
    (((shift + 1) as usize) << SUB_BITS) + ((value >> shift) - SUB) as usize
}

fn middle_of(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < SUB {
        return bucket;
    }
    let shift = (bucket >> SUB_BITS) - 1;
    let low = (SUB + (bucket & (SUB - 1))) << shift;
    low + (1 << shift) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_lies_near_the_middle_of_its_bucket() {
        let mut value = 0_u64;
        while value < 1 << MAX_BITS {
            let middle = middle_of(bucket_of(value));
            assert!(middle.abs_diff(value) * 250 <= value, "{value} is counted as {middle}");
            value += 1 + value / 97;
        }
        assert_eq!(bucket_of((1 << MAX_BITS) - 1), NUM_BUCKETS - 1);
        assert_eq!(bucket_of(u64::MAX), NUM_BUCKETS - 1);
    }

    #[test]
    fn percentiles_are_nearest_ranks() {
        let mut histogram = Histogram::default();
        (1..=100).for_each(|value| histogram.record(value));
        assert_eq!(histogram.percentile_ns(50.0), Some(50));
        assert_eq!(histogram.percentile_ns(90.0), Some(90));
        assert_eq!(histogram.percentile_ns(99.0), Some(99));
        assert_eq!(histogram.percentile_ns(100.0), Some(100));
        assert_eq!(histogram.percentile_ns(0.0), Some(1));
    }

    #[test]
    fn mean_and_maximum_are_exact_and_percentiles_close() {
        let mut histogram = Histogram::default();
        (1..=1000_u64).for_each(|value| histogram.record(value * 1_000_003));
        let summary = histogram.summary().expect("it has values");
        assert_eq!((summary.mean, summary.max), (500.501_502, 1000.003));
        for (found, right) in [(summary.p50, 500.0015), (summary.p90, 900.0027), (summary.p99, 990.002_97)] {
            assert!((found / right - 1.0).abs() < 0.004, "{found} for {right}");
        }
    }

    #[test]
    fn a_merged_histogram_is_that_of_all_values() {
        let (mut first, mut second, mut all) = (Histogram::default(), Histogram::default(), Histogram::default());
        for value in 0..1000 {
            (if value % 3 == 0 { &mut first } else { &mut second }).record(value * 7919);
            all.record(value * 7919);
        }
        first.merge(&second);
        assert_eq!((first.len(), first.summary()), (all.len(), all.summary()));
    }

    #[test]
    fn nothing_has_no_summary() {
        assert_eq!(Histogram::default().summary(), None);
        assert!(Histogram::default().is_empty());
    }
}
