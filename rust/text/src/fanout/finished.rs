//! Results, and the queue from which callers take them.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cbrs_core::{FinishReason, LogprobRows};

/// What ended an output as `stop`, besides EOS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StopReason {
    /// A stop token id.
    Token(i32),
    /// A stop string.
    Text(Arc<str>),
}

/// The result of one request. Times are nanoseconds on the engine's clock.
#[derive(Debug, Clone, PartialEq)]
pub struct FinishedRequest {
    /// Id that the engine gave.
    pub request_id: u64,
    /// Number that the caller gave at submission.
    pub index: u64,
    /// The prompt, as far as it was not truncated.
    pub prompt_token_ids: Vec<i32>,
    /// The outputs, by choice; empty for a request that sent them to a channel.
    pub outputs: Vec<FinishedChoice>,
    /// What was asked about each prompt token but the first; absent if nothing was, or if the prompt was never read to its end.
    pub prompt_logprobs: Option<LogprobRows>,
    /// Why the first failed choice failed, if one did.
    pub error: Option<Arc<str>>,
    /// Prompt tokens found in the prefix cache at its first admission.
    pub num_cached_tokens: usize,
    /// When it was submitted.
    pub arrival_ns: u64,
    /// When it was first planned; absent if it ended while it waited.
    pub first_scheduled_ns: Option<u64>,
    /// When the first token of any choice came.
    pub first_token_ns: Option<u64>,
    /// When its last event came.
    pub finished_ns: u64,
}

/// One output of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct FinishedChoice {
    /// Number of the choice.
    pub index: u32,
    /// The output, with the token that ended it.
    pub token_ids: Vec<i32>,
    /// The output as text: up to the stop string, without EOS or a stop token.
    pub text: String,
    /// How it ended.
    pub finish_reason: FinishReason,
    /// What ended it as `stop`; absent for EOS.
    pub stop_reason: Option<StopReason>,
    /// Why it failed, if it did.
    pub error: Option<Arc<str>>,
    /// When its first token came.
    pub first_token_ns: Option<u64>,
    /// Seconds between one output token and the next; one fewer than tokens.
    pub inter_token_latencies_s: Vec<f32>,
    /// Most likely ids that were asked for with each token, if any were.
    pub num_logprobs: Option<u32>,
    /// One row for each token; absent without `num_logprobs`.
    pub logprobs: Option<LogprobRows>,
    /// Sum of the tokens' own log-probabilities; absent without `num_logprobs`.
    pub cumulative_logprob: Option<f64>,
}

impl FinishedChoice {
    /// A choice without tokens, cancelled unless it ends otherwise.
    pub(super) fn new(index: u32, num_logprobs: Option<u32>) -> Self {
        Self {
            index,
            token_ids: Vec::new(),
            text: String::new(),
            finish_reason: FinishReason::Cancelled,
            stop_reason: None,
            error: None,
            first_token_ns: None,
            inter_token_latencies_s: Vec::new(),
            num_logprobs,
            logprobs: num_logprobs.map(|_| LogprobRows::default()),
            cumulative_logprob: num_logprobs.map(|_| 0.0),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct FinishedQueue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    requests: VecDeque<FinishedRequest>,
    is_closed: bool,
}

impl FinishedQueue {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing between lock and unlock can panic half-way through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn extend(&self, requests: Vec<FinishedRequest>) {
        if !requests.is_empty() {
            self.lock().requests.extend(requests);
            self.changed.notify_all();
        }
    }

    /// Nothing will come any more: waiting ends.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    pub(super) fn take(&self, max: usize) -> Vec<FinishedRequest> {
        take(&mut self.lock(), max)
    }

    pub(super) fn wait(&self, timeout: Duration, max: usize) -> Vec<FinishedRequest> {
        let is_idle = |state: &mut State| state.requests.is_empty() && !state.is_closed;
        let waited = self.changed.wait_timeout_while(self.lock(), timeout, is_idle);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        take(&mut state, max)
    }
}

fn take(state: &mut State, max: usize) -> Vec<FinishedRequest> {
    let len = state.requests.len();
    let count = if max == 0 { len } else { max.min(len) };
    state.requests.drain(..count).collect()
}
