//! The most blocks that the running sequences will hold at once, as far as it can be foreseen.
//!
//! Each sequence grows by a block every `block_size` tokens, and gives all its blocks back when it ends; how likely it is to run so long is
//! known from the lengths of earlier outputs. So at some time in the future there is a number of blocks that are held at most (nobody ends),
//! and of those given back until then an expected number and a variance. What is given back is never negative, and one large sequence must
//! not hide how surely many small ones end: of the blocks that a sequence holds now, as many count as given back as sequences hold on
//! average. The estimate is the worst over a few dozen horizons. Looking ahead to the peak is the idea of the "past-future scheduler" (Gong
//! et al., ASPLOS 2025), which draws one length for each sequence; here the whole distribution counts, so that nothing is drawn and one
//! candidate costs one pass.
//!
//! How much risk an admission is worth: if too little comes back, the newest sequences are preempted and compute again what the others have
//! grown by until somebody ends, whatever was admitted. What is gained by admitting now instead of later is the room that would be idle,
//! which is as large as the candidate, for as long as it would wait, which is longer the more room has to come free; and it is gained only
//! until the peak. So the probability that is taken grows with the square of the candidate's size and with the horizon. For a normal
//! distribution it falls about as `exp(-z^2 / 2)` with `z` deviations of reserve: they are fewer by `2 ln(factor)` in the square.

use super::lengths::{HORIZONS, Survival};

/// Standard deviations by which less may be given back than expected.
const SAFETY: f64 = 3.0;
/// The room that this needs is bounded by a part of the pool, since idle memory costs more than a rare preemption; but fewer deviations
/// than `LEAST_SAFETY` are never assumed.
const MAX_RESERVE: f64 = 1.0 / 32.0;
const LEAST_SAFETY: f64 = 2.5;
/// Up to here ahead, and for a candidate of average size, the deviations are as above.
const USUAL_HORIZON: u32 = 64;
/// `ln(horizon / USUAL_HORIZON)`, at least 0: horizons are powers of two, and halfway between two of these.
const LATENESS: [f64; HORIZONS.len()] = {
    const LN_1_5: f64 = 0.405_465_108_108_164_4;
    let mut logs = [0.0; HORIZONS.len()];
    let mut index = 0;
    while index < HORIZONS.len() {
        let horizon = HORIZONS[index];
        if horizon > USUAL_HORIZON {
            let octaves = (horizon.ilog2() - USUAL_HORIZON.ilog2()) as f64;
            logs[index] = octaves * std::f64::consts::LN_2 + if horizon.is_power_of_two() { 0.0 } else { LN_1_5 };
        }
        index += 1;
    }
    logs
};

/// Blocks at each horizon: held if nobody ends, expected back, and the variance of these.
#[derive(Debug, Default)]
pub struct PeakEstimate {
    most: [f64; HORIZONS.len()],
    released: [f64; HORIZONS.len()],
    variance: [f64; HORIZONS.len()],
    /// Blocks held now that one sequence counts as giving back at most.
    max_released: f64,
}

/// One sequence.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    /// How likely it is to run beyond each horizon.
    pub survival: &'a Survival,
    /// Output tokens that may come at most.
    pub num_left: u32,
    /// Blocks that it will give back.
    pub num_held: u32,
    /// Tokens of a block.
    pub block_size: u32,
}

impl Candidate<'_> {
    /// Blocks that it holds at a horizon if it still runs; those expected back if not, and the variance of these.
    ///
    /// A limit between two horizons is reached before the later one: there, and nowhere beyond it, the sequence counts as long as it may get.
    fn at(&self, index: usize, max_released: f64) -> (f64, f64, f64) {
        if index > 0 && HORIZONS[index - 1] >= self.num_left {
            return (0.0, 0.0, 0.0);
        }
        let horizon = HORIZONS[index].min(self.num_left);
        let (runs, held) = (f64::from(self.survival[index]), f64::from(self.num_held));
        let growth = f64::from(horizon) / f64::from(self.block_size);
        let counted = held.min(max_released) + growth;
        (held + growth, (1.0 - runs) * counted, runs * (1.0 - runs) * counted * counted)
    }
}

impl PeakEstimate {
    /// Forgets all sequences. Those to come hold `mean_held` blocks on average.
    pub fn clear(&mut self, mean_held: f64) {
        *self = Self { max_released: mean_held, ..Self::default() };
    }

    /// Counts a running sequence.
    pub fn add(&mut self, candidate: Candidate<'_>) {
        for index in 0..HORIZONS.len() {
            let (most, released, variance) = candidate.at(index, self.max_released);
            self.most[index] += most;
            self.released[index] += released;
            self.variance[index] += variance;
        }
    }

    /// Blocks for which there must be room, in a pool of `num_blocks`, if `candidate` runs as well.
    pub fn peak_with(&self, candidate: Candidate<'_>, num_blocks: usize) -> u64 {
        let (mut expected, mut least, mut safe) = (0.0_f64, 0.0_f64, 0.0_f64);
        let size = (f64::from(candidate.num_held) / self.max_released.max(1.0)).max(1.0).ln();
        for (index, lateness) in LATENESS.into_iter().enumerate() {
            let (most, released, variance) = candidate.at(index, self.max_released);
            let (most, released) = (self.most[index] + most, self.released[index] + released);
            let variance = self.variance[index] + variance;
            let worth = 2.0 * (2.0 * size + lateness);
            let reserve = |safety: f64| ((safety * safety - worth).max(0.0) * variance).sqrt();
            expected = expected.max(most - released);
            least = least.max(most - (released - reserve(LEAST_SAFETY)).max(0.0));
            safe = safe.max(most - (released - reserve(SAFETY)).max(0.0));
        }
        safe.min(expected + MAX_RESERVE * num_blocks as f64).max(least).ceil() as u64
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
        Candidate { survival, num_left: 1 << 20, num_held, block_size: 16 }
    }

    /// Of `count` sequences with `num_held` blocks each, which run for 16 more tokens at most and end before that with probability 1/2.
    fn peak_of_coins(count: usize, num_held: u32, num_blocks: usize) -> u64 {
        let half = HORIZONS.map(|horizon| if horizon == 0 { 1.0 } else { 0.5 });
        let coin = Candidate { num_left: 16, ..candidate(&half, num_held) };
        let mut estimate = PeakEstimate::default();
        estimate.clear(f64::from(num_held));
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
        assert_eq!(estimate.peak_with(candidate(&late, 10), POOL), 50 + 10 + 2 * 48 / 16);
        // The long one alone needs more than both now.
        assert_eq!(estimate.peak_with(candidate(&late, 30), POOL), 50 + 30 + 2 * 48 / 16);
        estimate.clear(30.0);
        estimate.add(candidate(&soon, 5));
        assert_eq!(estimate.peak_with(candidate(&late, 30), POOL), 30 + 768 / 16);
    }

    #[test]
    fn a_limit_between_two_horizons_is_reached_before_it_ends_the_output() {
        let long = survival(1 << 20);
        // 64 that started together, and may have 500 tokens: between 384 and 512.
        let limited = Candidate { num_left: 500, ..candidate(&long, 10) };
        let mut estimate = PeakEstimate::default();
        estimate.clear(10.0);
        (1..64).for_each(|_| estimate.add(limited));
        assert_eq!(estimate.peak_with(limited, POOL), 64 * 10 + 64 * 500 / 16);
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
        // 2.5 deviations less and nothing is back: all 68 are needed, however small the pool is.
        assert_eq!(peak_of_coins(4, 16, 64), 68);
        // 16 of them: 272 at most, 136 expected back, a deviation of 34. Even three less leave 238, fewer than the 256 held now.
        assert_eq!(peak_of_coins(16, 16, 320), 256);
        // 9 of them hold 144 now: 153 at most, 76.5 expected back, a deviation of 25.5. Three less: 153. 2.5 less: 140.3.
        assert_eq!(peak_of_coins(9, 16, 1600), 153);
        // The room beyond the 144 is at most a thirty-second of the pool.
        assert_eq!(peak_of_coins(9, 16, 160), 149);
    }

    #[test]
    fn what_gains_more_may_risk_more() {
        for (index, &horizon) in HORIZONS.iter().enumerate() {
            let expected = f64::from(horizon.max(64)) / 64.0;
            assert!((LATENESS[index].exp() / expected - 1.0).abs() < 1e-9, "{horizon}");
        }
        // 4 of 16 blocks each: 68 after 16 tokens, 34 expected back, a deviation of 17. 2.5 less are none, so that 17 more make 85.
        let half = HORIZONS.map(|horizon| if horizon == 0 { 1.0 } else { 0.5 });
        let sure = survival(1 << 20);
        let mut estimate = PeakEstimate::default();
        estimate.clear(16.0);
        (0..4).for_each(|_| estimate.add(Candidate { num_left: 16, ..candidate(&half, 16) }));
        let peak = |num_held| estimate.peak_with(Candidate { num_left: 16, ..candidate(&sure, num_held) }, POOL);
        assert_eq!(peak(16), 85);
        // Ten times as large: the square of 3 deviations is used up by 4 ln(10) = 9.2. It has to fit now, and with what is expected back.
        assert_eq!(peak(160), 64 + 160);
        // 4 of 64 blocks each that end before 256 tokens with probability 1/2: 320 then, 160 expected back, a deviation of 80. 2.5 less would be
        // none. The square is less by 2 ln(4) = 2.77, so it is 1.86 less, and 10.8 are back.
        let late = HORIZONS.map(|horizon| if horizon < 256 { 1.0 } else { 0.5 });
        let coin = Candidate { num_left: 256, ..candidate(&late, 64) };
        let mut estimate = PeakEstimate::default();
        estimate.clear(64.0);
        (1..4).for_each(|_| estimate.add(coin));
        assert_eq!(estimate.peak_with(coin, 32), 310);
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
