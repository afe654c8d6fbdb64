//! The most blocks that the running sequences will hold at once, as far as it can be foreseen.
//!
//! Each sequence grows by a block every `block_size` tokens, and gives all its blocks back when it ends; how likely it is to run so long is
//! known from the lengths of earlier outputs. So at some time in the future there is a number of blocks that are held at most (nobody ends),
//! and of those given back until then a mean, a variance and a third moment. The estimate is the worst over a few dozen horizons. Looking
//! ahead to the peak is the idea of the "past-future scheduler" (Gong et al., ASPLOS 2025), which draws one length for each sequence; here the
//! whole distribution counts, so that nothing is drawn and one candidate costs one pass.
//!
//! How few blocks come back at worst is a quantile of a sum of independent parts: normal, corrected for skewness (Cornish and Fisher), since
//! of few rare ends nearly none may come, but less than none cannot. One large sequence must not hide how surely many small ones end: if of
//! each sequence no more is counted than sequences hold on average, the sum is smaller but surer. Both are lower bounds, the larger one counts.

use super::lengths::{HORIZONS, Survival};

const NUM_HORIZONS: usize = HORIZONS.len();
/// Standard deviations by which less may be given back than expected.
const SAFETY: f32 = 3.0;
/// The room that this needs is bounded by a part of the pool, since idle memory costs more than a rare preemption; but fewer deviations
/// than `LEAST_SAFETY` are never assumed.
const MAX_RESERVE: f32 = 1.0 / 32.0;
const LEAST_SAFETY: f32 = 2.0;
/// Part of a block that is an error of rounding.
const ROUNDING: f32 = 0.01;

/// By horizon.
type Moments = [f32; NUM_HORIZONS];

/// Tokens from now on, and of the horizon before (-1 = none).
const TOKENS: Moments = {
    let mut tokens = [0.0; NUM_HORIZONS];
    let mut index = 0;
    while index < NUM_HORIZONS {
        tokens[index] = HORIZONS[index] as f32;
        index += 1;
    }
    tokens
};
const TOKENS_BEFORE: Moments = {
    let mut before = [-1.0; NUM_HORIZONS];
    let mut index = 1;
    while index < NUM_HORIZONS {
        before[index] = TOKENS[index - 1];
        index += 1;
    }
    before
};

/// One sequence.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    /// How likely it is to run beyond each horizon.
    pub survival: &'a Survival,
    /// How much larger its variance is because that is not known for sure.
    pub doubt: f32,
    /// Output tokens that may come at most.
    pub num_left: u32,
    /// Blocks that it will give back.
    pub num_held: u32,
    /// Tokens of a block.
    pub block_size: u32,
}

impl Candidate<'_> {
    /// Blocks that it holds at a horizon if nothing but its limit ends it, and what of them is growth.
    #[inline]
    fn at(&self, index: usize) -> (f32, f32) {
        let num_left = self.num_left as f32;
        // Since the horizon before it may have been there still, so it counts up to the first one beyond its limit.
        let is_there = if num_left > TOKENS_BEFORE[index] { 1.0 } else { 0.0 };
        let growth = is_there * TOKENS[index].min(num_left) / self.block_size as f32;
        (is_there * self.num_held as f32, growth)
    }
}

/// Blocks given back until each horizon, if of each sequence `max_held` count at most besides its growth.
#[derive(Debug)]
struct Releases {
    max_held: f32,
    mean: Moments,
    variance: Moments,
    third: Moments,
}

impl Releases {
    fn new(max_held: f32) -> Self {
        Self { max_held, mean: [0.0; NUM_HORIZONS], variance: [0.0; NUM_HORIZONS], third: [0.0; NUM_HORIZONS] }
    }

    /// What one sequence adds to the three.
    #[inline]
    fn of(&self, candidate: &Candidate<'_>, index: usize) -> (f32, f32, f32) {
        let (held, growth) = candidate.at(index);
        let counted = held.min(self.max_held) + growth;
        let runs = candidate.survival[index];
        let variance = runs * (1.0 - runs) * counted * counted;
        ((1.0 - runs) * counted, candidate.doubt * variance, variance * counted * (2.0 * runs - 1.0))
    }

    fn add(&mut self, candidate: &Candidate<'_>) {
        for index in 0..NUM_HORIZONS {
            let (mean, variance, third) = self.of(candidate, index);
            self.mean[index] += mean;
            self.variance[index] += variance;
            self.third[index] += third;
        }
    }

    /// Blocks that are given back with `candidate`: expected, and at least with `LEAST_SAFETY` and with `SAFETY`.
    fn with(&self, candidate: &Candidate<'_>, index: usize) -> [f32; 3] {
        let (mean, variance, third) = self.of(candidate, index);
        let (mean, variance, third) =
            (self.mean[index] + mean, self.variance[index] + variance, self.third[index] + third);
        let deviation = variance.sqrt();
        let skewness = if variance > 0.0 { third / variance } else { 0.0 };
        // Where the skewness is large the correction is not valid; a third of what it corrects is never too much.
        let at_least = |safety: f32| {
            let correction = (skewness * (safety * safety - 1.0) / 6.0).min(safety * deviation / 3.0);
            (mean - safety * deviation + correction).max(0.0)
        };
        [mean, at_least(LEAST_SAFETY), at_least(SAFETY)]
    }
}

/// Blocks at each horizon: held if nobody ends, and given back.
#[derive(Debug)]
pub struct PeakEstimate {
    most: Moments,
    all: Releases,
    /// Of large sequences no more counts than sequences hold on average.
    even: Releases,
}

impl Default for PeakEstimate {
    fn default() -> Self {
        Self { most: [0.0; NUM_HORIZONS], all: Releases::new(f32::INFINITY), even: Releases::new(0.0) }
    }
}

impl PeakEstimate {
    /// Forgets all sequences. Those to come hold `mean_held` blocks on average.
    pub fn clear(&mut self, mean_held: f32) {
        *self = Self { even: Releases::new(mean_held), ..Self::default() };
    }

    /// Counts a running sequence.
    pub fn add(&mut self, candidate: Candidate<'_>) {
        for index in 0..NUM_HORIZONS {
            let (held, growth) = candidate.at(index);
            self.most[index] += held + growth;
        }
        self.all.add(&candidate);
        self.even.add(&candidate);
    }

    /// Blocks for which there must be room, in a pool of `num_blocks`, if `candidate` runs as well.
    pub fn peak_with(&self, candidate: Candidate<'_>, num_blocks: usize) -> u64 {
        let (mut expected, mut least, mut safe) = (0.0_f32, 0.0_f32, 0.0_f32);
        for index in 0..NUM_HORIZONS {
            let (held, growth) = candidate.at(index);
            let most = self.most[index] + held + growth;
            let (all, even) = (self.all.with(&candidate, index), self.even.with(&candidate, index));
            expected = expected.max(most - all[0]);
            least = least.max(most - all[1].max(even[1]));
            safe = safe.max(most - all[2].max(even[2]));
        }
        let peak = safe.min(expected + MAX_RESERVE * num_blocks as f32).max(least);
        (peak - ROUNDING).ceil() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POOL: usize = 1 << 20;

    fn survival(ends: u32) -> Survival {
        HORIZONS.map(|horizon| if horizon < ends { 1.0 } else { 0.0 })
    }

    fn candidate(survival: &Survival, num_held: u32) -> Candidate<'_> {
        Candidate { survival, doubt: 1.0, num_left: 1 << 20, num_held, block_size: 16 }
    }

    /// Of `count` sequences with `num_held` blocks each, which run for 16 more tokens at most and end before that with probability 1/2.
    fn peak_of_coins(count: usize, num_held: u32, num_blocks: usize) -> u64 {
        let half = HORIZONS.map(|horizon| if horizon == 0 { 1.0 } else { 0.5 });
        let coin = Candidate { num_left: 16, ..candidate(&half, num_held) };
        let mut estimate = PeakEstimate::default();
        estimate.clear(num_held as f32);
        (1..count).for_each(|_| estimate.add(coin));
        estimate.peak_with(coin, num_blocks)
    }

    #[test]
    fn known_lengths_give_the_peak_of_a_simulation() {
        let (soon, late) = (survival(64), survival(1024));
        let mut estimate = PeakEstimate::default();
        estimate.clear(50.0);
        estimate.add(candidate(&soon, 50));
        // Together they grow until the first one ends, and later one alone grows to less.
        assert_eq!(estimate.peak_with(candidate(&late, 10), POOL), 50 + 10 + 2 * 56 / 16);
        // The long one alone needs more than both now.
        assert_eq!(estimate.peak_with(candidate(&late, 30), POOL), 50 + 30 + 2 * 56 / 16);
        estimate.clear(30.0);
        estimate.add(candidate(&soon, 5));
        assert_eq!(estimate.peak_with(candidate(&late, 30), POOL), 30 + 896 / 16);
    }

    #[test]
    fn a_limit_between_two_horizons_is_reached_before_it_ends_the_output() {
        let long = survival(1 << 20);
        // 64 that started together, and may have 500 tokens: between 448 and 512.
        let limited = Candidate { num_left: 500, ..candidate(&long, 10) };
        let mut estimate = PeakEstimate::default();
        estimate.clear(10.0);
        (1..64).for_each(|_| estimate.add(limited));
        assert_eq!(estimate.peak_with(limited, POOL), 64 * 10 + 64 * 500 / 16);
    }

    #[test]
    fn few_rare_ends_are_skewed_and_doubt_widens_them() {
        // 16 of 16 blocks each, which grow by one and end by then with probability 1/4: 272 blocks are held at most, 68 are expected back.
        let rare = HORIZONS.map(|horizon| if horizon == 0 { 1.0 } else { 0.75 });
        let peak = |doubt| {
            let coin = Candidate { doubt, num_left: 16, ..candidate(&rare, 16) };
            let mut estimate = PeakEstimate::default();
            estimate.clear(16.0);
            (1..16).for_each(|_| estimate.add(coin));
            estimate.peak_with(coin, 0)
        };
        // A deviation of sqrt(16 * 3) / 4 * 17 = 29.4, and the third moment is 17 / 2 of the variance: 68 - 2 * 29.4 + 17 / 4 = 13.4.
        assert_eq!(peak(1.0), 259, "258.6; 262.9 if skewness were not counted");
        // With four times the variance nothing is sure to come back.
        assert_eq!(peak(4.0), 272);
    }

    #[test]
    fn what_may_not_grow_is_not_counted_as_growing() {
        let long = survival(1 << 20);
        let mut estimate = PeakEstimate::default();
        estimate.clear(7.0);
        let capped = Candidate { num_left: 10, ..candidate(&long, 7) };
        assert_eq!(estimate.peak_with(capped, POOL), 8, "the block of the last tokens");
        assert!(estimate.peak_with(candidate(&long, 7), POOL) > 4096);
    }

    #[test]
    fn uncertainty_needs_room_as_worked_out_by_hand() {
        // 4 of 16 blocks each. After 16 tokens 4 * 17 = 68 are held at most; 34 are expected back, with a deviation of sqrt(4) * 17 / 2 = 17.
        // 2 deviations less and nothing is back: all 68 are needed, however small the pool is.
        assert_eq!(peak_of_coins(4, 16, 64), 68);
        // 16 of them: 272 at most, 136 expected back, a deviation of 34. Even three less leave 238, fewer than the 256 held now.
        assert_eq!(peak_of_coins(16, 16, 320), 256);
        // 9 of them hold 144 now: 153 at most, 76.5 expected back, a deviation of 25.5. Three less: 153. Two less: 127.5.
        assert_eq!(peak_of_coins(9, 16, 1600), 153);
        // The room beyond the 144 is at most a thirty-second of the pool.
        assert_eq!(peak_of_coins(9, 16, 160), 149);
    }

    #[test]
    fn a_large_sequence_does_not_hide_that_small_ones_end() {
        let half = HORIZONS.map(|horizon| if horizon == 0 { 1.0 } else { 0.5 });
        let small = Candidate { num_left: 16, ..candidate(&half, 15) };
        let large = Candidate { num_left: 16, ..candidate(&half, 1500) };
        let mut estimate = PeakEstimate::default();
        // 100 of 15 blocks and one of 1,500.
        estimate.clear(3000.0 / 101.0);
        (0..100).for_each(|_| estimate.add(small));
        // What the small ones give back for sure is more than what all grow by: the most is what is held now.
        assert_eq!(estimate.peak_with(large, POOL), 3000);
    }
}
