//! `ServiceModel`: how much of the engine's time a request will take, as the engine says it every few steps.
//!
//! Invariant: until the first publication nothing is known, and nobody is refused for time.

use crossbeam_utils::CachePadded;

use crate::policy::Class;
use crate::sync::{AtomicU64, Ordering};

/// What the engine knows of its speed and its work.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ServiceFigures {
    /// Nanoseconds of a step that one more prompt token takes.
    pub ns_per_prompt_token: f64,
    /// Nanoseconds that an output token takes when all rows are taken: a row's part of a step, plus what the token itself takes.
    pub ns_per_output_token: f64,
    /// Expected number of output tokens of a choice, by class.
    pub expected_output_tokens: [f64; 3],
    /// Number of output tokens that nine of ten choices reach, by class.
    pub likely_output_tokens: [f64; 3],
    /// Nanoseconds of a step that advances what runs now by a token.
    pub ns_per_step: f64,
    /// Requests that would start in the next step: free rows if nothing is left waiting, else 0.
    pub num_startable: usize,
}

/// Predicts service; one thread publishes, any thread reads.
///
/// ```
/// use cbrs_core::overload::{ServiceFigures, ServiceModel};
/// use cbrs_core::policy::Class;
/// let model = ServiceModel::new();
/// assert_eq!(model.service_ns(Class::Standard, 100, 50, 1), None);
/// model.publish(&ServiceFigures {
///     ns_per_prompt_token: 10.0,
///     ns_per_output_token: 100.0,
///     expected_output_tokens: [20.0, 30.0, 40.0],
///     likely_output_tokens: [4.0, 5.0, 6.0],
///     ns_per_step: 800.0,
///     num_startable: 0,
/// });
/// assert_eq!(model.service_ns(Class::Standard, 100, 50, 1), Some(1000 + 3000));
/// assert_eq!(model.service_ns(Class::Standard, 100, 5, 2), Some(1000 + 1000), "no more than was asked for, twice");
/// assert_eq!(model.output_ns(Class::Standard, 50), 4 * 800, "four steps after the first token");
/// ```
#[derive(Debug)]
pub struct ServiceModel {
    /// Numbers as bits. On their own line: written every few steps, read by every submit.
    numbers: CachePadded<Numbers>,
}

#[derive(Debug)]
struct Numbers {
    ns_per_prompt_token: AtomicU64,
    /// 0 = nothing was published.
    ns_per_output_token: AtomicU64,
    expected_output_tokens: [AtomicU64; 3],
    likely_output_tokens: [AtomicU64; 3],
    ns_per_step: AtomicU64,
    num_startable: AtomicU64,
}

impl Default for ServiceModel {
    fn default() -> Self {
        Self::new()
    }
}

impl ServiceModel {
    /// Nothing is known.
    pub fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            numbers: CachePadded::new(Numbers {
                ns_per_prompt_token: zero(),
                ns_per_output_token: zero(),
                expected_output_tokens: [zero(), zero(), zero()],
                likely_output_tokens: [zero(), zero(), zero()],
                ns_per_step: zero(),
                num_startable: zero(),
            }),
        }
    }

    /// Replaces the figures; a reader may see some old and some new ones.
    pub fn publish(&self, figures: &ServiceFigures) {
        let numbers = &*self.numbers;
        numbers.ns_per_prompt_token.store(figures.ns_per_prompt_token.max(0.0).to_bits(), Ordering::Relaxed);
        for (published, tokens) in numbers.expected_output_tokens.iter().zip(figures.expected_output_tokens) {
            published.store(tokens.max(1.0).to_bits(), Ordering::Relaxed);
        }
        for (published, tokens) in numbers.likely_output_tokens.iter().zip(figures.likely_output_tokens) {
            published.store(tokens.max(1.0).to_bits(), Ordering::Relaxed);
        }
        numbers.ns_per_step.store(figures.ns_per_step.max(0.0).to_bits(), Ordering::Relaxed);
        numbers.num_startable.store(figures.num_startable as u64, Ordering::Relaxed);
        // Last, and Release: a reader that finds this finds the others.
        let per_output_token = figures.ns_per_output_token.max(f64::MIN_POSITIVE);
        numbers.ns_per_output_token.store(per_output_token.to_bits(), Ordering::Release);
    }

    /// Nanoseconds of the engine's time that a request of `num_choices` choices will take; `None` = unknown.
    pub fn service_ns(&self, class: Class, num_prompt_tokens: u64, max_tokens: u32, num_choices: u32) -> Option<u64> {
        let per_output_token = self.ns_per_output_token()?;
        let expected = read(&self.numbers.expected_output_tokens[class as usize]).min(f64::from(max_tokens));
        let prompt = num_prompt_tokens as f64 * read(&self.numbers.ns_per_prompt_token);
        Some((prompt + expected * f64::from(num_choices) * per_output_token) as u64)
    }

    /// Nanoseconds from the start of a request to its first token, at least.
    pub fn prompt_ns(&self, num_prompt_tokens: u64) -> u64 {
        (num_prompt_tokens as f64 * read(&self.numbers.ns_per_prompt_token)) as u64
    }

    /// Nanoseconds from the first to the last token of a choice that is as short as one of ten, or as its limit.
    pub fn output_ns(&self, class: Class, max_tokens: u32) -> u64 {
        let likely = read(&self.numbers.likely_output_tokens[class as usize]).min(f64::from(max_tokens));
        ((likely - 1.0).max(0.0) * read(&self.numbers.ns_per_step)) as u64
    }

    /// Requests that would start in the next step.
    pub fn num_startable(&self) -> u64 {
        self.numbers.num_startable.load(Ordering::Relaxed)
    }

    fn ns_per_output_token(&self) -> Option<f64> {
        let bits = self.numbers.ns_per_output_token.load(Ordering::Acquire);
        (bits != 0).then(|| f64::from_bits(bits))
    }
}

fn read(number: &AtomicU64) -> f64 {
    f64::from_bits(number.load(Ordering::Relaxed))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn service_is_prompt_plus_expected_output() {
        let model = ServiceModel::new();
        // 64 rows, a step of 5 ms + 0.03 ms a token + 40 ns for each of 320 tokens of context: the `gpu` profile of the benchmarks.
        let figures = ServiceFigures {
            ns_per_prompt_token: 30_000.0,
            ns_per_output_token: 5e6 / 64.0 + 30_000.0 + 40.0 * 320.0,
            expected_output_tokens: [16.0, 128.0, 0.0],
            likely_output_tokens: [0.0, 41.0, 60.0],
            ns_per_step: 6e6,
            num_startable: 3,
        };
        model.publish(&figures);
        assert_eq!(model.service_ns(Class::Standard, 256, 2048, 1), Some(7_680_000 + 15_478_400));
        assert_eq!(model.service_ns(Class::Interactive, 256, 2048, 1), Some(7_680_000 + 1_934_800));
        assert_eq!(model.service_ns(Class::Batch, 0, 10, 1), Some(120_925), "at least one token is expected");
        assert_eq!((model.prompt_ns(256), model.num_startable()), (7_680_000, 3));
        assert_eq!(Class::ALL.map(|class| model.output_ns(class, 51)), [0, 240_000_000, 300_000_000]);
    }
}
