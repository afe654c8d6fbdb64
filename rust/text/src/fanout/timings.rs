//! How long requests wait and how fast they run, counted where their tokens pass anyway.
//!
//! The consumer records, any thread reads. Times are those of the steps, on the engine's clock: no clock is read. Most tokens of a step come
//! as long after the one before as the last one did, so that most of them cost a comparison.

use std::sync::atomic::{AtomicU64, Ordering};

use cbrs_core::FinishReason;
use cbrs_core::histogram::{Histogram, TIME_BOUNDS_NS, TOKEN_BOUNDS};

/// Figures about all requests of a processor since it was made. Times are nanoseconds.
#[derive(Debug)]
pub struct Timings {
    /// From submission to first admission, of each request that started.
    pub queue: Histogram,
    /// From first admission to the first token, of each request that had one.
    pub prefill: Histogram,
    /// From submission to the first token of any choice, of each request that had one.
    pub first_token: Histogram,
    /// From each token of a choice to the next.
    pub inter_token: Histogram,
    /// From the first token to the last event, of each request all of whose choices ended by themselves.
    pub decode: Histogram,
    /// From submission to the last event, of the same ones.
    pub end_to_end: Histogram,
    /// Prompt tokens of the same ones.
    pub prompt_tokens: Histogram,
    /// Output tokens of each choice that ended by itself.
    pub output_tokens: Histogram,
    num_output_tokens: AtomicU64,
    num_ends: [AtomicU64; FinishReason::ALL.len()],
}

impl Default for Timings {
    fn default() -> Self {
        let times = || Histogram::new(&TIME_BOUNDS_NS);
        let tokens = || Histogram::new(&TOKEN_BOUNDS);
        Self {
            queue: times(),
            prefill: times(),
            first_token: times(),
            inter_token: times(),
            decode: times(),
            end_to_end: times(),
            prompt_tokens: tokens(),
            output_tokens: tokens(),
            num_output_tokens: AtomicU64::new(0),
            num_ends: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }
}

impl Timings {
    /// Tokens that belong to some output.
    pub fn num_output_tokens(&self) -> u64 {
        self.num_output_tokens.load(Ordering::Relaxed)
    }

    /// Choices that ended, by how they ended for their readers.
    pub fn num_ends(&self) -> [(FinishReason, u64); FinishReason::ALL.len()] {
        FinishReason::ALL.map(|reason| (reason, self.num_ends[place(reason)].load(Ordering::Relaxed)))
    }
}

/// Codes of finish reasons begin with 1.
fn place(reason: FinishReason) -> usize {
    reason as usize - 1
}

/// Records one step's events; the consumer has one at a time.
#[derive(Debug)]
pub(super) struct Recorder<'a> {
    pub(super) timings: &'a Timings,
    num_tokens: u64,
    /// The last time between two tokens, and how often it came in a row.
    latency_ns: u64,
    num_latencies: u64,
}

impl<'a> Recorder<'a> {
    pub(super) fn new(timings: &'a Timings) -> Self {
        Self { timings, num_tokens: 0, latency_ns: 0, num_latencies: 0 }
    }

    /// A token came, so long after the one before, if there was one.
    pub(super) fn token(&mut self, latency_ns: Option<u64>) {
        self.num_tokens += 1;
        let Some(latency_ns) = latency_ns else { return };
        if latency_ns != self.latency_ns {
            self.flush_latencies();
            self.latency_ns = latency_ns;
        }
        self.num_latencies += 1;
    }

    /// A choice ended.
    pub(super) fn end(&mut self, reason: FinishReason, num_tokens: u32) {
        self.timings.num_ends[place(reason)].fetch_add(1, Ordering::Relaxed);
        if is_complete(reason) {
            self.timings.output_tokens.record(u64::from(num_tokens));
        }
    }

    fn flush_latencies(&mut self) {
        if self.num_latencies > 0 {
            self.timings.inter_token.record_many(self.latency_ns, std::mem::take(&mut self.num_latencies));
        }
    }
}

impl Drop for Recorder<'_> {
    fn drop(&mut self) {
        self.flush_latencies();
        self.timings.num_output_tokens.fetch_add(self.num_tokens, Ordering::Relaxed);
    }
}

/// Whether a choice ended by itself.
pub(super) fn is_complete(reason: FinishReason) -> bool {
    matches!(reason, FinishReason::Stop | FinishReason::Length)
}
