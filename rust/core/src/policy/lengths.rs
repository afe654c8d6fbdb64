//! Lengths of outputs so far, by class: how likely it is that an output which has come so far goes on for so much longer.

use super::Class;

/// Buckets of lengths: one for each length below 8, then four to an octave.
const NUM_BUCKETS: usize = 64;
/// Output tokens from now on at which the future is looked at.
pub const HORIZONS: [u32; 24] = [
    0, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384,
    32_768, 65_536,
];
/// Probability of still running at each of the horizons.
pub type Survival = [f32; HORIZONS.len()];

/// Weight of what is assumed before anything is known: outputs of 256 tokens on average.
const PRIOR_WEIGHT: f64 = 8.0;
const PRIOR_MEAN: f64 = 256.0;
/// Observations that count in total; older ones are forgotten by halves.
const MAX_WEIGHT: f64 = 1024.0;
/// Ends after which the tables are made anew.
const REFRESH: u32 = 16;

fn bucket(len: u32) -> usize {
    if len < 8 {
        return len as usize;
    }
    let octave = len.ilog2();
    let quarter = (len >> (octave - 2)) & 3;
    (8 + 4 * (octave as usize - 3) + quarter as usize).min(NUM_BUCKETS - 1)
}

/// The least length of a bucket.
fn start_of(bucket: usize) -> f64 {
    if bucket < 8 {
        return bucket as f64;
    }
    let (octave, quarter) = ((bucket - 8) / 4 + 3, (bucket - 8) % 4);
    ((4 + quarter) << (octave - 2)) as f64
}

/// The history of one class.
#[derive(Debug)]
struct History {
    counts: [f64; NUM_BUCKETS],
    weight: f64,
    mean: f64,
    /// By bucket of the tokens that are out; made when it is asked for.
    tables: Vec<Survival>,
    num_new: u32,
    /// Outputs under way, by bucket of the tokens that are out.
    num_running: [u32; NUM_BUCKETS],
}

impl Default for History {
    fn default() -> Self {
        // A geometric distribution.
        let stays = |len: f64| (1.0 - 1.0 / PRIOR_MEAN).powi(len as i32);
        let counts = std::array::from_fn(|index| {
            let end = if index + 1 < NUM_BUCKETS { stays(start_of(index + 1)) } else { 0.0 };
            PRIOR_WEIGHT * (stays(start_of(index)) - end)
        });
        Self {
            counts,
            weight: PRIOR_WEIGHT,
            mean: PRIOR_MEAN,
            tables: Vec::new(),
            num_new: REFRESH,
            num_running: [0; NUM_BUCKETS],
        }
    }
}

impl History {
    fn observe(&mut self, len: u32) {
        if self.weight >= MAX_WEIGHT {
            self.counts.iter_mut().for_each(|count| *count /= 2.0);
            self.weight /= 2.0;
        }
        self.counts[bucket(len)] += 1.0;
        self.weight += 1.0;
        self.mean += (f64::from(len) - self.mean) / self.weight;
        self.num_new += 1;
    }

    /// A length that nine of ten outputs reach, rounded down to where a bucket begins.
    fn likely(&self) -> f64 {
        let mut shorter = 0.0;
        for (index, count) in self.counts.iter().enumerate() {
            shorter += count;
            if shorter > 0.1 * self.weight {
                return start_of(index);
            }
        }
        0.0
    }

    /// Outputs of at least the length where each bucket starts, by weight.
    ///
    /// Those under way are known to come at least as far as they are (Kaplan and Meier's estimate). Without them the long ones would be
    /// underestimated as long as most of them have not ended, which is when the engine fills for the first time.
    fn at_least_start(&self) -> [f64; NUM_BUCKETS + 1] {
        // From the last bucket on: those at risk of ending in it. Whoever is in the bucket has seen half of it.
        let mut part_ending = [0.0; NUM_BUCKETS];
        let (mut num_ended, mut num_beyond) = (0.0, 0.0);
        for index in (0..NUM_BUCKETS).rev() {
            let here = f64::from(self.num_running[index]);
            num_ended += self.counts[index];
            let at_risk = num_ended + num_beyond + here / 2.0;
            part_ending[index] = if at_risk > 0.0 { self.counts[index] / at_risk } else { 1.0 };
            num_beyond += here;
        }
        let mut at_least = [0.0; NUM_BUCKETS + 1];
        at_least[0] = self.weight;
        for index in 0..NUM_BUCKETS - 1 {
            at_least[index + 1] = at_least[index] * (1.0 - part_ending[index]);
        }
        at_least
    }

    fn refresh(&mut self) {
        self.num_new = 0;
        let at_start = self.at_least_start();
        // Within a bucket they are spread evenly.
        let at_least = |len: u32| {
            let index = bucket(len);
            let (start, end) = (start_of(index), start_of(index + 1));
            let part = if index + 1 == NUM_BUCKETS { 1.0 } else { (end - f64::from(len)) / (end - start) };
            at_start[index + 1] + (at_start[index] - at_start[index + 1]) * part
        };
        self.tables.clear();
        for index in 0..NUM_BUCKETS {
            let generated = start_of(index) as u32;
            let now = at_least(generated + 1);
            let later = HORIZONS.map(|horizon| at_least(generated.saturating_add(horizon + 1)));
            // Longer than all that was seen: as long again.
            let unknown = |horizon: u32| if horizon <= generated { 1.0 } else { 0.0 };
            let is_known = now > 0.01;
            self.tables.push(std::array::from_fn(|at| {
                if is_known { (later[at] / now) as f32 } else { unknown(HORIZONS[at]) }
            }));
        }
    }
}

/// Output lengths by class.
#[derive(Debug, Default)]
pub struct LengthHistory {
    classes: [History; 3],
}

impl LengthHistory {
    /// An output has ended by itself or at its limit.
    pub fn observe(&mut self, class: Class, num_output_tokens: u32) {
        self.classes[class as usize].observe(num_output_tokens);
    }

    /// Mean length of the last outputs.
    pub fn mean(&self, class: Class) -> f64 {
        self.classes[class as usize].mean
    }

    /// Length that nine of ten of the last outputs reach, about.
    pub fn likely(&self, class: Class) -> f64 {
        self.classes[class as usize].likely()
    }

    /// Makes the tables that `survival` reads up to date; they change after every few ends. `running` tells the class of each output under
    /// way, and how many tokens are out.
    pub fn refresh(&mut self, running: impl Iterator<Item = (Class, u32)>) {
        if self.classes.iter().all(|class| class.num_new < REFRESH) {
            return;
        }
        for class in &mut self.classes {
            class.num_running = [0; NUM_BUCKETS];
        }
        for (class, num_generated) in running {
            self.classes[class as usize].num_running[bucket(num_generated)] += 1;
        }
        for class in &mut self.classes {
            if class.num_new >= REFRESH {
                class.refresh();
            }
        }
    }

    /// How likely an output of which `num_generated` tokens are out is to go on beyond each horizon. After `refresh`.
    pub fn survival(&self, class: Class, num_generated: u32) -> &Survival {
        &self.classes[class as usize].tables[bucket(num_generated)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_cover_all_lengths_in_order() {
        let mut last = 0;
        for len in (0..5000).chain([65_535, 65_536, 1 << 20, u32::MAX]) {
            let index = bucket(len);
            assert!(index == last || index == last + 1 || len > 5000, "{len}");
            assert!(start_of(index) <= f64::from(len));
            assert!(index + 1 == NUM_BUCKETS || f64::from(len) < start_of(index + 1), "{len}");
            last = index;
        }
    }

    #[test]
    fn survival_follows_what_was_seen() {
        let mut history = LengthHistory::default();
        history.refresh(std::iter::empty());
        let prior = *history.survival(Class::Batch, 0);
        assert!((prior[9] - 0.37).abs() < 0.05, "the prior is geometric: {}", prior[9]);
        // Half of the outputs have 64 tokens, half 1,024.
        for _ in 0..2000 {
            history.observe(Class::Standard, 64);
            history.observe(Class::Standard, 1024);
        }
        history.refresh(std::iter::empty());
        assert!((history.mean(Class::Standard) - 544.0).abs() < 30.0);
        assert!((history.likely(Class::Standard) - 64.0).abs() < 1.0 && history.likely(Class::Batch) < 32.0);
        for _ in 0..400 {
            history.observe(Class::Interactive, 20);
            (0..20).for_each(|_| history.observe(Class::Interactive, 200));
        }
        assert!((history.likely(Class::Interactive) - 192.0).abs() < 1.0, "one of 21 is shorter");
        let at = |horizon| HORIZONS.iter().position(|&other| other == horizon).expect("it is looked at");
        let fresh = history.survival(Class::Standard, 0);
        assert!((fresh[at(128)] - 0.5).abs() < 0.05 && fresh[at(16)] > 0.95 && fresh[at(2048)] < 0.01);
        // Whoever is past 64 goes on to 1,024.
        let long = history.survival(Class::Standard, 128);
        assert!(long[at(768)] > 0.95 && long[at(1536)] < 0.01, "{long:?}");
        // Past everything: as long again.
        let longest = history.survival(Class::Standard, 4096);
        assert!(longest[at(2048)] > 0.9 && longest[at(8192)] < 0.1, "{longest:?}");
        let untouched = history.survival(Class::Batch, 0).map(f32::to_bits);
        assert_eq!(untouched, prior.map(f32::to_bits), "classes do not learn from each other");
    }

    #[test]
    fn outputs_under_way_count_as_long_as_they_are() {
        let mut history = LengthHistory::default();
        // 64 have started together; the 32 that have ended had 8 tokens, the others are at 64.
        for _ in 0..32 {
            history.observe(Class::Standard, 8);
        }
        history.refresh(std::iter::repeat_n((Class::Standard, 64), 32));
        let at = |horizon| HORIZONS.iter().position(|&other| other == horizon).expect("it is looked at");
        let fresh = history.survival(Class::Standard, 0)[at(32)];
        // Half, and the 8 that are assumed of which about 7 come so far: (32 + 7) / (64 + 8).
        assert!((fresh - 39.0 / 72.0).abs() < 0.02, "{fresh}");
    }
}
