//! One request between its submission and its result.
//!
//! 1. Once a stop string is found, or a terminal event has come, tokens and text never change.
//! 2. A stop string that was found decides the end, whatever the engine ended the request with meanwhile.

use std::sync::Arc;

use cbrs_core::{FinishReason, RequestId, StepOutput};

use super::finished::{FinishedRequest, StopReason};
use crate::stream::TextStream;

/// One event of a step output.
#[derive(Debug, Clone, Copy)]
pub(super) struct Event<'a> {
    time_ns: u64,
    /// -1 = none.
    token: i32,
    finish: Option<FinishReason>,
    /// -1 = none.
    stop_id: i32,
    detail: Option<&'a Arc<str>>,
}

impl<'a> Event<'a> {
    pub(super) fn read(output: &'a StepOutput, index: usize) -> Self {
        let finish = FinishReason::from_code(output.finish_reasons[index]);
        Self {
            time_ns: output.time_ns,
            token: output.token_ids[index],
            finish,
            stop_id: output.stop_ids[index],
            // Only ends have details; most events need no search.
            detail: finish.and_then(|_| output.detail(index)),
        }
    }
}

/// What an event did to its request.
#[derive(Debug)]
pub(super) enum Progress {
    GoesOn,
    /// The text is complete; the engine is to be told to end the request after so many tokens.
    Stopped {
        num_tokens: u32,
        stop: Arc<str>,
    },
    Ended,
}

#[derive(Debug)]
pub(super) struct LiveRequest {
    /// Absent without a tokenizer.
    stream: Option<TextStream>,
    last_token_ns: u64,
    result: FinishedRequest,
}

impl LiveRequest {
    pub(super) fn new(
        id: RequestId,
        index: u64,
        prompt_token_ids: Vec<i32>,
        stream: Option<TextStream>,
        now_ns: u64,
    ) -> Self {
        let result = FinishedRequest {
            request_id: id.as_u64(),
            index,
            prompt_token_ids,
            token_ids: Vec::new(),
            text: String::new(),
            finish_reason: FinishReason::Cancelled,
            stop_reason: None,
            error: None,
            num_cached_tokens: 0,
            arrival_ns: now_ns,
            first_scheduled_ns: None,
            first_token_ns: None,
            finished_ns: now_ns,
            inter_token_latencies_s: Vec::new(),
        };
        Self { stream, last_token_ns: now_ns, result }
    }

    pub(super) fn id(&self) -> u64 {
        self.result.request_id
    }

    pub(super) fn start(&mut self, time_ns: u64, num_cached_tokens: usize) {
        self.result.first_scheduled_ns.get_or_insert(time_ns);
        self.result.num_cached_tokens = num_cached_tokens;
    }

    pub(super) fn apply(&mut self, event: Event<'_>) -> Progress {
        let mut progress = Progress::GoesOn;
        if event.token >= 0 && self.stopped().is_none() {
            self.count_token(event.token, event.time_ns);
            // The token that ends the output as `stop` is EOS or a stop id: it stays in the ids, not in the text.
            let is_ending = event.finish == Some(FinishReason::Stop);
            if let Some(stream) = self.stream.as_mut().filter(|_| !is_ending) {
                stream.push(event.token);
                if let Some(stop) = stream.stopped() {
                    let num_tokens = self.result.token_ids.len() as u32;
                    progress = Progress::Stopped { num_tokens, stop: Arc::clone(stop) };
                }
            }
        }
        let Some(reason) = event.finish else { return progress };
        self.end(reason, &event);
        Progress::Ended
    }

    /// Ends a request for which no event will come.
    pub(super) fn end_now(&mut self, reason: FinishReason, error: Option<&str>) {
        let time_ns = self.last_token_ns;
        let detail = error.map(Arc::from);
        let event = Event { time_ns, token: -1, finish: Some(reason), stop_id: -1, detail: detail.as_ref() };
        self.end(reason, &event);
    }

    pub(super) fn into_finished(mut self) -> FinishedRequest {
        self.result.text = self.stream.map_or_else(String::new, TextStream::into_text);
        self.result
    }

    fn stopped(&self) -> Option<&Arc<str>> {
        self.stream.as_ref().and_then(TextStream::stopped)
    }

    fn count_token(&mut self, token: i32, time_ns: u64) {
        self.result.token_ids.push(token);
        if self.result.first_token_ns.is_none() {
            self.result.first_token_ns = Some(time_ns);
        } else {
            let latency_ns = time_ns.saturating_sub(self.last_token_ns);
            self.result.inter_token_latencies_s.push(latency_ns as f32 / 1e9);
        }
        self.last_token_ns = time_ns;
    }

    fn end(&mut self, reason: FinishReason, event: &Event<'_>) {
        if let Some(stream) = &mut self.stream {
            stream.finish();
        }
        let (reason, stop_reason) = match (self.stopped(), reason) {
            (Some(stop), _) => (FinishReason::Stop, Some(StopReason::Text(Arc::clone(stop)))),
            (None, FinishReason::Stop) if event.stop_id >= 0 => (reason, Some(StopReason::Token(event.stop_id))),
            (None, FinishReason::Stop) => (reason, event.detail.cloned().map(StopReason::Text)),
            (None, _) => (reason, None),
        };
        self.result.finish_reason = reason;
        self.result.stop_reason = stop_reason;
        self.result.error = event.detail.filter(|_| reason == FinishReason::Error).cloned();
        self.result.finished_ns = event.time_ns;
    }
}
