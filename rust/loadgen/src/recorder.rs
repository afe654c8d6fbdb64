//! What is kept of all requests: counts and histograms, whose memory does not grow with the load.

use std::collections::BTreeMap;

use crate::histogram::Histogram;
use crate::request::Exchange;

/// Different error messages that are kept; further ones are counted together.
const MAX_MESSAGES: usize = 32;
const OTHER: &str = "(other errors)";

/// Figures of one thread or, merged, of all.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    pub(crate) num_succeeded: u64,
    pub(crate) num_failed: u64,
    pub(crate) num_prompt_tokens: u64,
    pub(crate) num_cached_tokens: u64,
    pub(crate) num_output_tokens: u64,
    pub(crate) num_events: u64,
    pub(crate) num_reads: u64,
    /// By status; 0 where no response came.
    pub(crate) statuses: BTreeMap<u16, u64>,
    pub(crate) errors: BTreeMap<String, u64>,
    pub(crate) time_to_first_token: Histogram,
    pub(crate) inter_token_latency: Histogram,
    pub(crate) time_per_output_token: Histogram,
    pub(crate) end_to_end: Histogram,
    /// To the end of responses with an error status.
    pub(crate) refusal: Histogram,
    /// How much later than due requests of an open loop were started.
    pub(crate) lag: Histogram,
    /// When the last request ended.
    pub(crate) end_ns: u64,
}

impl Recorder {
    /// Adds a request that has ended. One that failed is in no latency but that of refusals.
    pub(crate) fn record(&mut self, exchange: &Exchange) {
        self.end_ns = self.end_ns.max(exchange.end_ns);
        for &status in &exchange.statuses {
            *self.statuses.entry(status).or_default() += 1;
        }
        let total_ns = exchange.end_ns.saturating_sub(exchange.sent_ns);
        if let Some(error) = &exchange.error {
            self.num_failed += 1;
            self.count_error(error, 1);
            if exchange.statuses.last().is_some_and(|&status| status != 200 && status != 0) {
                self.refusal.record(total_ns);
            }
            return;
        }
        self.num_succeeded += 1;
        self.end_to_end.record(total_ns);
        self.num_events += exchange.num_events;
        self.num_reads += exchange.num_reads;
        let num_tokens = exchange.num_output_tokens();
        self.num_output_tokens += num_tokens;
        if let Some(usage) = exchange.usage {
            self.num_prompt_tokens += usage.prompt_tokens;
            self.num_cached_tokens += usage.prompt_tokens_details.map_or(0, |details| details.cached_tokens);
        }
        if let Some(first_ns) = exchange.first_ns {
            self.time_to_first_token.record(first_ns.saturating_sub(exchange.sent_ns));
            if num_tokens > 1 {
                self.time_per_output_token.record(exchange.last_ns.saturating_sub(first_ns) / (num_tokens - 1));
            }
        }
        for &gap_ns in &exchange.gaps_ns {
            self.inter_token_latency.record(gap_ns);
        }
    }

    /// Adds what another thread recorded.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.num_succeeded += other.num_succeeded;
        self.num_failed += other.num_failed;
        self.num_prompt_tokens += other.num_prompt_tokens;
        self.num_cached_tokens += other.num_cached_tokens;
        self.num_output_tokens += other.num_output_tokens;
        self.num_events += other.num_events;
        self.num_reads += other.num_reads;
        self.end_ns = self.end_ns.max(other.end_ns);
        for (&status, count) in &other.statuses {
            *self.statuses.entry(status).or_default() += count;
        }
        for (message, &count) in &other.errors {
            self.count_error(message, count);
        }
        self.time_to_first_token.merge(&other.time_to_first_token);
        self.inter_token_latency.merge(&other.inter_token_latency);
        self.time_per_output_token.merge(&other.time_per_output_token);
        self.end_to_end.merge(&other.end_to_end);
        self.refusal.merge(&other.refusal);
        self.lag.merge(&other.lag);
    }

    fn count_error(&mut self, message: &str, count: u64) {
        if let Some(known) = self.errors.get_mut(message) {
            *known += count;
        } else if self.errors.len() < MAX_MESSAGES {
            self.errors.insert(message.to_owned(), count);
        } else {
            *self.errors.entry(OTHER.to_owned()).or_default() += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_a_bounded_number_of_messages_and_counts_all() {
        let mut recorder = Recorder::default();
        for index in 0..100 {
            let mut exchange = Exchange::default();
            exchange.error = Some(format!("error {}", index % 50));
            exchange.statuses.push(500);
            recorder.record(&exchange);
        }
        assert_eq!(recorder.errors.len(), MAX_MESSAGES + 1);
        assert_eq!(recorder.errors.values().sum::<u64>(), 100);
        assert_eq!(recorder.errors["error 0"], 2);
        assert_eq!((recorder.num_failed, recorder.statuses[&500]), (100, 100));
        assert_eq!((recorder.refusal.len(), recorder.end_to_end.len()), (100, 0));
    }
}
