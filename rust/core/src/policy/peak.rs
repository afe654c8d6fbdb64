//! The most blocks that the running sequences will hold at once, as far as it can be foreseen.
//!
//! Each sequence grows by a block every `block_size` tokens, and gives all its blocks back when it ends; how likely it is to run so long is
//! known from the lengths of earlier outputs. So the blocks held at some time in the future have an expected number and a variance; the
//! estimate is the worst over a few dozen horizons. Looking ahead to the peak is the idea of the "past-future scheduler" (Gong et al., ASPLOS
//! 2025), which draws one length for each sequence; here the whole distribution counts, so that nothing is drawn and one candidate costs one pass.

use super::lengths::{HORIZONS, Survival};

/// Standard deviations above the expected number for which there must be room.
const SAFETY: f64 = 3.0;

/// Expected blocks, and their variance, at each horizon.
#[derive(Debug, Default)]
pub struct PeakEstimate {
    mean: [f64; HORIZONS.len()],
    variance: [f64; HORIZONS.len()],
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
    /// Expected blocks and their variance at a horizon.
    fn at(&self, index: usize) -> (f64, f64) {
        let horizon = HORIZONS[index];
        if horizon > self.num_left {
            return (0.0, 0.0);
        }
        let runs = f64::from(self.survival[index]);
        let blocks = f64::from(self.num_held) + f64::from(horizon) / f64::from(self.block_size);
        (runs * blocks, runs * (1.0 - runs) * blocks * blocks)
    }
}

impl PeakEstimate {
    /// Forgets all sequences.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Counts a running sequence.
    pub fn add(&mut self, candidate: Candidate<'_>) {
        for index in 0..HORIZONS.len() {
            let (mean, variance) = candidate.at(index);
            self.mean[index] += mean;
            self.variance[index] += variance;
        }
    }

    /// Blocks for which there must be room if `candidate` runs as well.
    pub fn peak_with(&self, candidate: Candidate<'_>) -> u64 {
        let mut peak = 0.0_f64;
        for index in 0..HORIZONS.len() {
            let (mean, variance) = candidate.at(index);
            peak = peak.max(self.mean[index] + mean + SAFETY * (self.variance[index] + variance).sqrt());
        }
        peak.ceil() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn survival(ends: u32) -> Survival {
        HORIZONS.map(|horizon| if horizon < ends { 1.0 } else { 0.0 })
    }

    fn candidate(survival: &Survival, num_held: u32) -> Candidate<'_> {
        Candidate { survival, num_left: 1 << 20, num_held, block_size: 16 }
    }

    #[test]
    fn known_lengths_give_the_peak_of_a_simulation() {
        let (soon, late) = (survival(64), survival(1024));
        let mut estimate = PeakEstimate::default();
        estimate.add(candidate(&soon, 50));
        // Together they grow until the first one ends, and later one alone grows to less.
        assert_eq!(estimate.peak_with(candidate(&late, 10)), 50 + 10 + 2 * 48 / 16);
        // The long one alone needs more than both now.
        assert_eq!(estimate.peak_with(candidate(&late, 30)), 50 + 30 + 2 * 48 / 16);
        estimate.clear();
        estimate.add(candidate(&soon, 5));
        assert_eq!(estimate.peak_with(candidate(&late, 30)), 30 + 768 / 16);
    }

    #[test]
    fn what_may_not_grow_is_not_counted_as_growing() {
        let long = survival(1 << 20);
        let estimate = PeakEstimate::default();
        let capped = Candidate { num_left: 10, ..candidate(&long, 7) };
        assert_eq!(estimate.peak_with(capped), 8, "the block of the last tokens");
        assert!(estimate.peak_with(candidate(&long, 7)) > 4096);
    }

    #[test]
    fn uncertainty_needs_room_that_grows_slower_than_the_number_of_sequences() {
        let half = HORIZONS.map(|horizon| if horizon == 0 { 1.0 } else { 0.5 });
        let of = |count: usize| {
            let mut estimate = PeakEstimate::default();
            for _ in 1..count {
                estimate.add(Candidate { num_left: 64, ..candidate(&half, 100) });
            }
            estimate.peak_with(Candidate { num_left: 64, ..candidate(&half, 100) }) as f64 / count as f64
        };
        assert!(of(1) > of(4) || (of(1) - of(4)).abs() < 1.0);
        assert!(of(100) < of(4) + 1.0, "{} {}", of(100), of(4));
    }
}
