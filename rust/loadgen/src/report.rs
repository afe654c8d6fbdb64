//! The figures of a load, as they are printed and written as JSON.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;

use serde::Serialize;

use crate::histogram::Summary;
use crate::recorder::Recorder;
use crate::request::Counters;

/// What a load came to. Rates and latencies are of requests that succeeded; latencies are null where
/// nothing was measured. Times start when a request is to be sent.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Requests that ended.
    pub num_requests: u64,
    /// Those of them that failed: an error status, a broken stream, no connection, no end in time.
    pub num_failed: u64,
    /// From the start to the end of the last request, in seconds.
    pub duration_s: f64,
    /// Requests that succeeded, over the duration.
    pub requests_per_s: f64,
    /// Their output tokens, over the duration.
    pub output_tokens_per_s: f64,
    /// Their prompt and output tokens, over the duration.
    pub total_tokens_per_s: f64,
    /// Prompt tokens, as the server reports them.
    pub num_prompt_tokens: u64,
    /// Prompt tokens found in the prefix cache, as the server reports them.
    pub num_cached_tokens: u64,
    /// Output tokens, as the server reports them; without usage, events with text.
    pub num_output_tokens: u64,
    /// Time to the first event with text.
    pub ttft_ms: Option<Summary>,
    /// From one event with text to the next; 0 within one read of the socket.
    pub itl_ms: Option<Summary>,
    /// Mean time per output token after the first, of each request.
    pub tpot_ms: Option<Summary>,
    /// Time to the end of the response.
    pub e2e_ms: Option<Summary>,
    /// Time to the end of a response with an error status.
    pub refusal_ms: Option<Summary>,
    /// Open loop: how much later than due the client started requests.
    pub lag_ms: Option<Summary>,
    /// Responses by status, those that were retried too; 0 where none came.
    pub statuses: BTreeMap<u16, u64>,
    /// Failed requests by message, with the numbers; after 32 different ones the rest counts as one.
    pub errors: BTreeMap<String, u64>,
    /// Requests sent again after 429 or 503.
    pub num_retries: u64,
    /// Connections opened, for the warm-up too.
    pub num_connections: u64,
    /// Requests sent again because a connection kept alive had been closed by the server.
    pub num_reconnects: u64,
    /// Events of streams.
    pub num_events: u64,
    /// Reads of a socket that completed an event.
    pub num_reads: u64,
    /// Events per such read: how many came together.
    pub events_per_read: Option<f64>,
    /// What the client itself used.
    pub client: ClientShare,
}

/// What the client itself used while the load ran. A thread near 1 is the bottleneck.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct ClientShare {
    /// Threads of the client.
    pub threads: usize,
    /// Share of one core that the busiest of them used.
    pub busiest_thread_cpu: f64,
    /// Cores that all of them used.
    pub total_cpu: f64,
}

impl Report {
    /// The figures as a JSON object.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("numbers and texts are JSON")
    }

    pub(crate) fn new(recorder: &Recorder, counters: &Counters, duration_s: f64, client: ClientShare) -> Self {
        let per_s = |count: u64| if duration_s > 0.0 { count as f64 / duration_s } else { 0.0 };
        Self {
            num_requests: recorder.num_succeeded + recorder.num_failed,
            num_failed: recorder.num_failed,
            duration_s,
            requests_per_s: per_s(recorder.num_succeeded),
            output_tokens_per_s: per_s(recorder.num_output_tokens),
            total_tokens_per_s: per_s(recorder.num_prompt_tokens + recorder.num_output_tokens),
            num_prompt_tokens: recorder.num_prompt_tokens,
            num_cached_tokens: recorder.num_cached_tokens,
            num_output_tokens: recorder.num_output_tokens,
            ttft_ms: recorder.time_to_first_token.summary(),
            itl_ms: recorder.inter_token_latency.summary(),
            tpot_ms: recorder.time_per_output_token.summary(),
            e2e_ms: recorder.end_to_end.summary(),
            refusal_ms: recorder.refusal.summary(),
            lag_ms: recorder.lag.summary(),
            statuses: recorder.statuses.clone(),
            errors: recorder.errors.clone(),
            num_retries: counters.retries.load(Relaxed),
            num_connections: counters.connections.load(Relaxed),
            num_reconnects: counters.reconnects.load(Relaxed),
            num_events: recorder.num_events,
            num_reads: recorder.num_reads,
            events_per_read: (recorder.num_reads > 0).then(|| recorder.num_events as f64 / recorder.num_reads as f64),
            client,
        }
    }
}
