//! Seeded random numbers (SplitMix64): the same on every machine and in every version.

/// A generator; equal seeds give equal numbers.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    /// A generator for one thing (`index`) of one kind (`stream`): independent of all others.
    pub(crate) fn new(seed: u64, stream: u64, index: u64) -> Self {
        let mut random = Self(seed);
        random = Self(random.next_u64() ^ stream);
        Self(random.next_u64() ^ index)
    }

    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// A gap between arrivals of a Poisson process of rate 1.
    pub(crate) fn exponential(&mut self) -> f64 {
        // 53 bits, in (0, 1]: the logarithm is finite.
        let uniform = ((self.next_u64() >> 11) + 1) as f64 / (1_u64 << 53) as f64;
        -uniform.ln()
    }
}
