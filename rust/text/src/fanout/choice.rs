//! One choice of a request between its first token and its end.
//!
//! 1. Once a stop string is found, or a terminal event has come, tokens and text never change.
//! 2. A stop string that was found decides the end, whatever the engine ended the choice with meanwhile.

use std::sync::Arc;

use cbrs_core::FinishReason;
use compact_str::CompactString;

use super::event::Event;
use super::finished::StopReason;
use crate::stream::TextStream;

/// How a choice ended.
#[derive(Debug, Clone, PartialEq)]
pub struct End {
    /// How it ended.
    pub finish_reason: FinishReason,
    /// What ended it as `stop`; absent for EOS.
    pub stop_reason: Option<StopReason>,
    /// Why it failed, if it did.
    pub error: Option<Arc<str>>,
    /// Tokens of the output.
    pub num_tokens: u32,
}

/// What an event did to its choice.
#[derive(Debug, Default)]
pub(super) struct Change {
    /// Whether the token of the event belongs to the output.
    pub(super) has_token: bool,
    /// Nanoseconds since the token before, if it has one and there was one.
    pub(super) latency_ns: Option<u64>,
    /// A stop string that this token completed.
    pub(super) stop: Option<Arc<str>>,
    pub(super) end: Option<End>,
}

#[derive(Debug)]
pub(super) struct LiveChoice {
    /// Absent without a text.
    stream: Option<TextStream>,
    num_tokens: u32,
    /// Absent before the first token.
    first_token_ns: Option<u64>,
    last_token_ns: u64,
    has_ended: bool,
}

impl LiveChoice {
    pub(super) fn new(stream: Option<TextStream>) -> Self {
        Self { stream, num_tokens: 0, first_token_ns: None, last_token_ns: 0, has_ended: false }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Tokens that belong to the output.
    pub(super) fn num_tokens(&self) -> u32 {
        self.num_tokens
    }

    /// When the first of them came, if there is one.
    pub(super) fn first_token_ns(&self) -> Option<u64> {
        self.first_token_ns
    }

    /// Counts a token; returns the nanoseconds since the one before, if there was one.
    fn count_token(&mut self, time_ns: u64) -> Option<u64> {
        self.num_tokens += 1;
        let last_ns = std::mem::replace(&mut self.last_token_ns, time_ns);
        let is_first = self.num_tokens == 1;
        if is_first {
            self.first_token_ns = Some(time_ns);
        }
        (!is_first).then(|| time_ns.saturating_sub(last_ns))
    }

    /// Reads an event; one that comes after the end changes nothing.
    pub(super) fn read(&mut self, event: &Event<'_>) -> Change {
        let mut change = Change::default();
        if self.has_ended {
            return change;
        }
        if let Some(token) = event.token.filter(|_| self.stopped().is_none()) {
            change.has_token = true;
            change.latency_ns = self.count_token(event.time_ns);
            // The token that ends the output as `stop` is EOS or a stop id: it stays in the ids, not in the text.
            let is_ending = event.finish == Some(FinishReason::Stop);
            if let Some(stream) = self.stream.as_mut().filter(|_| !is_ending) {
                stream.push(token);
                change.stop = stream.stopped().cloned();
            }
        }
        change.end = event.finish.map(|reason| self.end(reason, event));
        change
    }

    /// What may be shown since the last call.
    pub(super) fn take_delta(&mut self) -> CompactString {
        self.stream.as_mut().map_or_else(CompactString::default, |stream| stream.take_delta().into())
    }

    /// The text of a choice that has ended; it is given out once.
    pub(super) fn take_text(&mut self) -> String {
        self.stream.take().map_or_else(String::new, TextStream::into_text)
    }

    fn stopped(&self) -> Option<&Arc<str>> {
        self.stream.as_ref().and_then(TextStream::stopped)
    }

    fn end(&mut self, reason: FinishReason, event: &Event<'_>) -> End {
        self.has_ended = true;
        if let Some(stream) = &mut self.stream {
            stream.finish();
        }
        let (finish_reason, stop_reason) = match (self.stopped(), reason) {
            (Some(stop), _) => (FinishReason::Stop, Some(StopReason::Text(Arc::clone(stop)))),
            (None, FinishReason::Stop) => {
                let text = || event.detail.cloned().map(StopReason::Text);
                (reason, event.stop_id.map(StopReason::Token).or_else(text))
            }
            (None, _) => (reason, None),
        };
        let error = event.detail.filter(|_| finish_reason == FinishReason::Error).cloned();
        End { finish_reason, stop_reason, error, num_tokens: self.num_tokens }
    }
}
