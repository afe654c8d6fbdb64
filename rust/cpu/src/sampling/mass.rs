//! Where the mass of a row lies: a histogram of its weights, which says how small a weight may be that `top_p` still keeps.

use crate::sampling::scan::{BLOCK, Weights};

/// Bins per factor of 2, as a number of bits.
const FINENESS: u32 = 4;
/// Bits of a weight that tell nothing about its bin.
const SHIFT: u32 = 52 - FINENESS;
/// Weights below 2^-64 share the last bin.
const NUM_BINS: usize = 64 << FINENESS;
/// Bits of 1, the largest weight. The bits of smaller weights are smaller numbers.
const ONE: u64 = 1f64.to_bits();
/// How far sums of the same weights may lie apart, generously: they are added in different orders.
const ROUNDING: f64 = 1e-9;

/// What a histogram says about the fewest largest weights that reach a mass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Bounds {
    /// All weights of at least this are among them, and do not reach the mass alone.
    pub(super) certain: f64,
    /// No weight below this is among them.
    pub(super) floor: f64,
}

/// Sums of weights by size.
#[derive(Debug, Default)]
pub(super) struct Histogram {
    bins: Option<Box<[f64; NUM_BINS]>>,
}

impl Histogram {
    /// Bounds the fewest largest weights whose sum reaches `target`; what is below `least` is certainly not among them.
    #[inline(always)]
    pub(super) fn bounds(&mut self, weights: &Weights, least: f64, target: f64) -> Bounds {
        let bins = self.bins.get_or_insert_with(|| Box::new([0.0; NUM_BINS]));
        bins.fill(0.0);
        for (block, largest) in weights.all.chunks(BLOCK).zip(&weights.block_largest) {
            if *largest >= least {
                // What is below `least` does no harm: whether to leave it out would be guessed wrong too often.
                for weight in block {
                    bins[bin(*weight)] += weight;
                }
            }
        }
        let mut bounds = Bounds { certain: f64::INFINITY, floor: least };
        let mut mass = 0.0;
        for (bin, sum) in bins.iter().enumerate() {
            if mass < target * (1.0 - ROUNDING) {
                bounds.certain = above(bin);
            }
            mass += sum;
            if mass >= target * (1.0 + ROUNDING) {
                bounds.floor = least.max(above(bin + 1));
                break;
            }
        }
        bounds
    }
}

fn bin(weight: f64) -> usize {
    let distance = (ONE - weight.to_bits()) >> SHIFT;
    (distance as usize).min(NUM_BINS - 1)
}

/// The least number whose bin comes before `bin`.
fn above(bin: usize) -> f64 {
    if bin < NUM_BINS { f64::from_bits(ONE - ((bin as u64) << SHIFT) + 1) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::portable::Portable;

    #[test]
    fn a_bin_ends_where_the_next_begins() {
        for number in 0..NUM_BINS - 1 {
            let least_before = above(number);
            assert_eq!(bin(least_before.next_down()), number);
            assert!(number == 0 || bin(least_before) == number - 1);
        }
        assert_eq!((bin(1.0), bin(1e-300)), (0, NUM_BINS - 1));
    }

    #[test]
    fn the_bounds_enclose_what_a_sort_finds() {
        let scores: Vec<f32> = (0..3000u32).map(|i| -((i * 7919 % 3001) as f32) * 0.01).collect();
        let mut weights = Weights::default();
        weights.fill::<Portable<8>>(&scores, 0.0, 1.0);
        let mut sorted = weights.all.clone();
        sorted.sort_unstable_by(|a, b| b.total_cmp(a));
        let total: f64 = sorted.iter().sum();
        for top_p in [1e-9, 0.01, 0.5, 0.9, 0.999, 1.0 - 1e-7] {
            let bounds = Histogram::default().bounds(&weights, 0.0, top_p * total);
            let mut mass = 0.0;
            let count = sorted.iter().position(|weight| {
                mass += weight;
                mass >= top_p * total
            });
            let last = sorted[count.expect("the total reaches it")];
            assert!(bounds.floor <= last && last < bounds.certain, "{top_p}: {last} not in {bounds:?}");
            let certain: f64 = sorted.iter().filter(|weight| **weight >= bounds.certain).sum();
            assert!(certain < top_p * total);
            let candidates = sorted.iter().filter(|weight| (bounds.floor..bounds.certain).contains(*weight)).count();
            assert!(candidates < 40, "{top_p}: {candidates} candidates");
        }
    }
}
