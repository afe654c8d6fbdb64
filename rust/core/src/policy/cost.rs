//! What a step costs, learned while the engine runs: `t = a + b * new_tokens + c * kv_tokens_read + d * attn_pairs`.
//!
//! A Kalman filter over the four coefficients (Kalman, 1960): each step is one observation whose noise is taken as a part of its time. The
//! coefficients drift together, since a machine that others use, or that gets hot, is slower at everything at once; and each may drift a little
//! by itself. So a stretch of steps that are all alike tells how fast the machine is, says nothing about the proportions of coefficients that it
//! cannot tell apart, and spoils none of them. Errors beyond a few times the usual one count only that much: one slow step says little; several
//! in a row, all slow or all fast, mean that the machine has changed its speed.

/// What a step has to do.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepWork {
    /// Query tokens.
    pub new_tokens: u64,
    /// Sum of the contexts of all its sequences.
    pub kv_tokens_read: u64,
    /// Pairs of query and key within chunks: the sum of `len * (start + len / 2)`.
    pub attn_pairs: u64,
}

/// Units in which the features are counted, so that none dwarfs the others.
const UNITS: [f64; 4] = [1.0, 64.0, 16_384.0, 1_048_576.0];
/// Observations before anything is predicted.
const MIN_OBSERVATIONS: u64 = 8;
/// Drift of a coefficient by itself in one step, as a part of it.
const DRIFT: f64 = 0.005;
/// Drift of all coefficients together in one step, as a part of the usual error: what is seen of a machine's speed is half forgotten after
/// one or two steps. (From 0.3 to 1.2 there was little difference on a real engine; more spoils what is known on a steady one.)
const COMMON_DRIFT: f64 = 0.5;
/// Errors count up to this many times the usual one.
const CLIP: f64 = 4.0;
/// Least error that is taken as usual: no clock and no machine is better.
const MIN_ERROR: f64 = 0.005;

/// The model.
///
/// ```
/// use cbrs_core::policy::cost::{CostModel, StepWork};
/// let mut model = CostModel::default();
/// for step in 0..50 {
///     let work = StepWork { new_tokens: 64 + 8 * (step % 7), kv_tokens_read: 30_000 + 500 * (step % 11), attn_pairs: 0 };
///     model.observe(work, 5_000_000 + 30_000 * work.new_tokens + 40 * work.kv_tokens_read);
/// }
/// let work = StepWork { new_tokens: 200, kv_tokens_read: 40_000, attn_pairs: 0 };
/// let predicted = model.predict_ns(work).unwrap();
/// assert!((predicted / 12_600_000.0 - 1.0).abs() < 0.02);
/// ```
#[derive(Debug, Clone)]
pub struct CostModel {
    /// Coefficients in the units above, in nanoseconds; never negative.
    coefficients: [f64; 4],
    covariance: [[f64; 4]; 4],
    num_observations: u64,
    /// Running median of the relative error of predictions.
    error: f64,
}

impl Default for CostModel {
    fn default() -> Self {
        Self { coefficients: [0.0; 4], covariance: [[0.0; 4]; 4], num_observations: 0, error: 0.1 }
    }
}

fn features(work: StepWork) -> [f64; 4] {
    let counts = [1.0, work.new_tokens as f64, work.kv_tokens_read as f64, work.attn_pairs as f64];
    std::array::from_fn(|index| counts[index] / UNITS[index])
}

fn dot(a: &[f64; 4], b: &[f64; 4]) -> f64 {
    (a[0] * b[0] + a[1] * b[1]) + (a[2] * b[2] + a[3] * b[3])
}

impl CostModel {
    /// A model that has learned nothing and takes it that a step's time is that of its tokens alone.
    pub(crate) fn per_token(time_ns: f64) -> Self {
        Self { coefficients: [0.0, time_ns * UNITS[1], 0.0, 0.0], ..Self::default() }
    }

    /// Learns from a step that took `time_ns`.
    pub fn observe(&mut self, work: StepWork, time_ns: u64) {
        let (features, time) = (features(work), time_ns as f64);
        if self.num_observations == 0 {
            // Nothing is known: each coefficient alone may account for the whole time, and more.
            for index in 0..4 {
                self.covariance[index][index] = time * time;
            }
        }
        self.num_observations += 1;
        let predicted = dot(&self.coefficients, &features);
        let usual = self.error.max(MIN_ERROR);
        let mut error = time - predicted;
        if self.num_observations > MIN_OBSERVATIONS {
            let relative = error.abs() / time;
            let grows = relative > self.error;
            self.error = (self.error * if grows { 1.05 } else { 1.0 / 1.05 }).clamp(1e-4, 0.5);
            let limit = CLIP * usual * predicted.max(time * 0.1);
            error = error.clamp(-limit, limit);
        }
        self.drift(usual);
        self.correct(&features, error, usual * time);
        self.keep_positive();
    }

    fn drift(&mut self, usual: f64) {
        let common = COMMON_DRIFT * usual;
        let x = self.coefficients;
        for row in 0..4 {
            let drift = common * common * x[row];
            for (entry, other) in self.covariance[row].iter_mut().zip(x) {
                *entry += drift * other;
            }
            self.covariance[row][row] += DRIFT * DRIFT * x[row] * x[row];
        }
    }

    fn correct(&mut self, features: &[f64; 4], error: f64, noise: f64) {
        let spread: [f64; 4] = std::array::from_fn(|row| dot(&self.covariance[row], features));
        let scale = 1.0 / (dot(&spread, features) + noise * noise);
        for row in 0..4 {
            let gain = spread[row] * scale;
            self.coefficients[row] += gain * error;
            for (entry, spread) in self.covariance[row].iter_mut().zip(spread) {
                *entry -= gain * spread;
            }
        }
    }

    /// Nothing takes negative time. What a coefficient loses or gains here, the others make up for as far as it cannot be told from theirs.
    fn keep_positive(&mut self) {
        for index in 0..4 {
            let (value, variance) = (self.coefficients[index], self.covariance[index][index]);
            if value < 0.0 && variance > 0.0 {
                for (coefficient, row) in self.coefficients.iter_mut().zip(&self.covariance) {
                    *coefficient -= row[index] / variance * value;
                }
            }
        }
        self.coefficients = self.coefficients.map(|value| value.max(0.0));
    }

    /// Whether enough was observed to predict anything.
    pub fn is_ready(&self) -> bool {
        self.num_observations >= MIN_OBSERVATIONS
    }

    /// Time of a step, in nanoseconds; absent before the first few observations.
    pub fn predict_ns(&self, work: StepWork) -> Option<f64> {
        self.is_ready().then(|| dot(&self.coefficients, &features(work)))
    }

    /// The usual error of predictions, as a part of the time: about their running median.
    pub fn relative_error(&self) -> f64 {
        self.error
    }

    /// `a`, `b`, `c` and `d` in nanoseconds.
    pub fn coefficients(&self) -> [f64; 4] {
        std::array::from_fn(|index| self.coefficients[index] / UNITS[index])
    }

    /// What a chunk of `len` tokens after `start` others adds to a step, in nanoseconds.
    pub fn chunk_ns(&self, start: u64, len: u64) -> f64 {
        let [_, b, c, d] = self.coefficients();
        let (start, len) = (start as f64, len as f64);
        b * len + c * (start + len) + d * len * (start + len / 2.0)
    }

    /// What the decodes of so many sequences add to a step, with contexts of `num_kv_tokens` in total, in nanoseconds.
    pub fn decode_ns(&self, num_seqs: u64, num_kv_tokens: u64) -> f64 {
        let [_, b, c, _] = self.coefficients();
        b * num_seqs as f64 + c * num_kv_tokens as f64
    }

    /// The most tokens, up to `wanted`, of a chunk after `start` others that fit so much time; 0 if not even one does.
    pub fn max_chunk(&self, time_left_ns: f64, start: u64, wanted: u64) -> u64 {
        if self.chunk_ns(start, wanted) <= time_left_ns {
            return wanted;
        }
        // It fits with `fits` tokens (or with none), and not with `too_many`.
        let (mut fits, mut too_many) = (0, wanted);
        while too_many - fits > 1 {
            let middle = fits + (too_many - fits) / 2;
            if self.chunk_ns(start, middle) <= time_left_ns {
                fits = middle;
            } else {
                too_many = middle;
            }
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `a`, `b`, `c` of the profiles with which policies are measured, and quadratic attention.
    const PROFILES: [[f64; 4]; 3] = [[5e6, 3e4, 40.0, 0.0], [6e6, 2.5e5, 500.0, 0.0], [6e6, 2.5e5, 500.0, 20.0]];

    struct Machine {
        profile: [f64; 4],
        noise: f64,
        state: u64,
    }

    impl Machine {
        fn random(&mut self) -> f64 {
            self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.state >> 11) as f64 / (1u64 << 53) as f64
        }

        /// Decodes of up to 64 sequences, and in most steps a chunk.
        fn work(&mut self) -> StepWork {
            let num_decodes = 1 + (self.random() * 63.0) as u64;
            let num_kv = num_decodes * (100 + (self.random() * 900.0) as u64);
            let (len, start) = match self.random() {
                x if x < 0.4 => (0, 0),
                _ => (1 + (self.random() * 500.0) as u64, (self.random() * 4000.0) as u64),
            };
            StepWork {
                new_tokens: num_decodes + len,
                kv_tokens_read: num_kv + start + len,
                attn_pairs: len * (start + len / 2),
            }
        }

        fn time(&mut self, work: StepWork) -> f64 {
            let noise = 1.0 + self.noise * (self.random() + self.random() - 1.0) * 2.4;
            self.exact(work) * noise
        }

        fn exact(&self, work: StepWork) -> f64 {
            let [a, b, c, d] = self.profile;
            a + b * work.new_tokens as f64 + c * work.kv_tokens_read as f64 + d * work.attn_pairs as f64
        }
    }

    fn train(model: &mut CostModel, machine: &mut Machine, num_steps: usize) {
        for _ in 0..num_steps {
            let work = machine.work();
            let time = machine.time(work);
            model.observe(work, time as u64);
        }
    }

    /// Median error of predictions against the exact time.
    fn median_error(model: &CostModel, machine: &mut Machine) -> f64 {
        let mut errors: Vec<f64> = (0..501)
            .map(|_| {
                let work = machine.work();
                let exact = machine.exact(work);
                (model.predict_ns(work).expect("it has seen enough") - exact).abs() / exact
            })
            .collect();
        errors.sort_unstable_by(f64::total_cmp);
        errors[250]
    }

    #[test]
    fn two_hundred_steps_are_enough() {
        for (seed, profile) in PROFILES.into_iter().enumerate() {
            for (noise, goal) in [(0.0, 0.01), (0.05, 0.05), (0.1, 0.1)] {
                let mut machine = Machine { profile, noise, state: seed as u64 };
                let mut model = CostModel::default();
                train(&mut model, &mut machine, 200);
                let error = median_error(&model, &mut machine);
                assert!(error <= goal, "profile {profile:?}, noise {noise}: {error}");
            }
        }
    }

    #[test]
    fn one_slow_step_in_twenty_changes_little() {
        let mut machine = Machine { profile: PROFILES[0], noise: 0.05, state: 7 };
        let mut model = CostModel::default();
        for step in 0..2000 {
            let work = machine.work();
            let factor = if step % 20 == 19 { 10.0 } else { 1.0 };
            model.observe(work, (machine.time(work) * factor) as u64);
        }
        let error = median_error(&model, &mut machine);
        assert!(error <= 0.05, "{error}");
    }

    #[test]
    fn a_lasting_change_of_speed_is_followed() {
        for factor in [0.4, 2.0] {
            let mut machine = Machine { profile: PROFILES[1], noise: 0.05, state: 3 };
            let mut model = CostModel::default();
            train(&mut model, &mut machine, 500);
            machine.profile = machine.profile.map(|coefficient| coefficient * factor);
            train(&mut model, &mut machine, 50);
            let error = median_error(&model, &mut machine);
            assert!(error <= 0.08, "{factor}: {error}");
        }
    }

    #[test]
    fn thousands_of_equal_steps_spoil_nothing() {
        for noise in [0.0, 0.05] {
            let mut machine = Machine { profile: PROFILES[0], noise, state: 11 };
            let mut model = CostModel::default();
            train(&mut model, &mut machine, 400);
            for step in 0..5000 {
                let work = StepWork { new_tokens: 64, kv_tokens_read: 30_000 + 64 * (step % 200), attn_pairs: 0 };
                let time = machine.time(work);
                model.observe(work, time as u64);
            }
            let work = StepWork { new_tokens: 2048, kv_tokens_read: 34_000, attn_pairs: 2_000_000 };
            let exact = machine.exact(work);
            let error = (model.predict_ns(work).expect("it has seen enough") - exact).abs() / exact;
            assert!(error <= 0.1, "noise {noise}: {error}");
        }
    }

    #[test]
    fn the_longest_chunk_that_fits_is_found_to_the_token() {
        let mut machine = Machine { profile: PROFILES[2], noise: 0.0, state: 5 };
        let mut model = CostModel::default();
        train(&mut model, &mut machine, 300);
        for (start, time) in [(0, 5e6), (3000, 2e7), (50_000, 5e7), (10, 1e9)] {
            let len = model.max_chunk(time, start, 2048);
            assert!(model.chunk_ns(start, len) <= time || len == 0);
            assert!(len == 2048 || model.chunk_ns(start, len + 1) > time);
        }
        assert_eq!(model.max_chunk(-1.0, 0, 100), 0);
        assert_eq!(CostModel::default().max_chunk(f64::INFINITY, 0, 100), 100);
    }
}
