//! One request between its submission and its last event: what it has told, and where it tells it.
//!
//! 1. Its choices end independently; the request ends with the last of them, once.
//! 2. The updates of a choice joined are what its `FinishedChoice` would have been.

use std::sync::Arc;

use cbrs_core::{FinishReason, LogprobRows, RequestId, RequestSpec};

use super::channel::{Channel, Outbox, TokenIds, Update};
use super::choice::{Change, LiveChoice};
use super::event::{Event, LogprobRow};
use super::finished::{FinishedChoice, FinishedRequest};
use super::mailbox::Hurry;
use super::timings::{Recorder, Timings, is_complete};
use crate::stream::TextStream;

/// What an event did to its request.
#[derive(Debug)]
pub(super) enum Progress {
    GoesOn,
    /// The text of the choice is complete; the engine is to be told to end it after so many tokens.
    Stopped {
        num_tokens: u32,
        stop: Arc<str>,
    },
    Ended,
}

/// What is remembered of a request while the engine is asked to take it.
#[derive(Debug)]
pub(super) struct Draft {
    pub(super) prompt_token_ids: Vec<i32>,
    n: u32,
    num_logprobs: Option<u32>,
    has_prompt_logprobs: bool,
    /// Absent without a text.
    pub(super) stream: Option<TextStream>,
    pub(super) index: u64,
    pub(super) channel: Option<Arc<Channel>>,
    pub(super) is_whole: bool,
    /// Present if somebody wants each token as it comes.
    pub(super) hurry: Option<Hurry>,
    pub(super) arrival_ns: u64,
}

impl Draft {
    /// Without a prompt.
    pub(super) fn new(spec: &RequestSpec, index: u64, arrival_ns: u64) -> Self {
        Self {
            prompt_token_ids: Vec::new(),
            n: spec.n,
            num_logprobs: spec.sampling.logprobs,
            has_prompt_logprobs: spec.prompt_logprobs.is_some(),
            stream: None,
            index,
            channel: None,
            is_whole: false,
            hurry: None,
            arrival_ns,
        }
    }

    /// The same for a prompt with an index of its own.
    pub(super) fn with(&self, prompt_token_ids: Vec<i32>, index: u64) -> Self {
        let Self { n, num_logprobs, has_prompt_logprobs, is_whole, arrival_ns, .. } = *self;
        let (stream, channel, hurry) = (self.stream.clone(), self.channel.clone(), self.hurry.clone());
        Self {
            prompt_token_ids,
            n,
            num_logprobs,
            has_prompt_logprobs,
            stream,
            index,
            channel,
            is_whole,
            hurry,
            arrival_ns,
        }
    }
}

/// Tokens of a choice that is told when it ends; its text waits in its stream.
#[derive(Debug, Default, Clone)]
struct Held {
    token_ids: TokenIds,
    /// Absent unless asked for.
    logprobs: Option<LogprobRows>,
}

#[derive(Debug)]
pub(super) struct LiveRequest {
    choices: Vec<LiveChoice>,
    num_open: usize,
    /// Where updates go; absent if the result is wanted as a whole.
    channel: Option<Arc<Channel>>,
    /// What was held back of each choice, if choices are told as a whole.
    held: Option<Vec<Held>>,
    /// Whether an update was sent.
    has_told: bool,
    has_logprobs: bool,
    num_prompt_tokens: usize,
    /// Kept for as long as the request lives.
    _hurry: Option<Hurry>,
    /// Whether no choice has ended otherwise than by itself.
    is_complete: bool,
    /// Without outputs if they are streamed.
    result: FinishedRequest,
}

impl LiveRequest {
    /// A request that the engine has taken, and whose parameters it has checked.
    pub(super) fn new(id: RequestId, draft: Draft) -> Self {
        let n = draft.n;
        let is_kept = draft.channel.is_none();
        let outputs = (0..n).filter(|_| is_kept).map(|index| FinishedChoice::new(index, draft.num_logprobs)).collect();
        Self {
            choices: (0..n).map(|_| LiveChoice::new(draft.stream.clone())).collect(),
            num_open: n as usize,
            channel: draft.channel,
            held: (draft.is_whole && !is_kept).then(|| vec![Held::default(); n as usize]),
            has_told: false,
            has_logprobs: draft.num_logprobs.is_some(),
            num_prompt_tokens: draft.prompt_token_ids.len(),
            _hurry: draft.hurry,
            is_complete: true,
            result: FinishedRequest {
                request_id: id.as_u64(),
                index: draft.index,
                prompt_token_ids: draft.prompt_token_ids,
                outputs,
                prompt_logprobs: draft.has_prompt_logprobs.then(Default::default),
                error: None,
                num_cached_tokens: 0,
                arrival_ns: draft.arrival_ns,
                first_scheduled_ns: None,
                first_token_ns: None,
                finished_ns: draft.arrival_ns,
            },
        }
    }

    pub(super) fn id(&self) -> u64 {
        self.result.request_id
    }

    /// Whether its updates go to `channel`.
    pub(super) fn tells(&self, channel: &Arc<Channel>) -> bool {
        self.channel.as_ref().is_some_and(|own| Arc::ptr_eq(own, channel))
    }

    pub(super) fn start(&mut self, time_ns: u64, num_cached_tokens: usize, timings: &Timings) {
        self.result.first_scheduled_ns = Some(time_ns);
        timings.queue.record(time_ns.saturating_sub(self.result.arrival_ns));
        self.result.num_cached_tokens = num_cached_tokens;
    }

    /// Keeps what was said about the prompt token at `position`; they come in order, each once.
    pub(super) fn add_prompt_logprobs(&mut self, position: usize, (ids, values, rank): LogprobRow<'_>) {
        if let Some(rows) = &mut self.result.prompt_logprobs {
            debug_assert_eq!(position, rows.len() + 1, "log-probabilities of prompt tokens come in order");
            rows.push(ids, values, rank);
        }
    }

    /// Reads an event; `outbox` takes what it makes to tell, `recorder` what it says about times.
    pub(super) fn apply(&mut self, event: &Event<'_>, outbox: &mut Outbox, recorder: &mut Recorder<'_>) -> Progress {
        let Some(choice) = self.choices.get_mut(event.choice).filter(|choice| !choice.has_ended()) else {
            return Progress::GoesOn;
        };
        let mut change = choice.read(event);
        let stop = change.stop.take();
        let num_tokens = choice.num_tokens();
        self.num_open -= usize::from(change.end.is_some());
        self.result.finished_ns = event.time_ns;
        if change.has_token {
            recorder.token(change.latency_ns);
            if self.result.first_token_ns.is_none() {
                self.note_first_token(event.time_ns, recorder.timings);
            }
        }
        if let Some(end) = &change.end {
            recorder.end(end.finish_reason, num_tokens);
            self.is_complete &= is_complete(end.finish_reason);
            if self.num_open == 0 && self.is_complete {
                self.note_end(recorder.timings);
            }
        }
        if self.result.error.is_none() {
            self.result.error = change.end.as_ref().and_then(|end| end.error.clone());
        }
        if self.channel.is_some() {
            self.tell(event, change, outbox);
        } else {
            self.record(event, change);
        }
        match stop {
            _ if self.num_open == 0 => Progress::Ended,
            Some(stop) if !self.choices[event.choice].has_ended() => Progress::Stopped { num_tokens, stop },
            _ => Progress::GoesOn,
        }
    }

    fn note_first_token(&mut self, time_ns: u64, timings: &Timings) {
        self.result.first_token_ns = Some(time_ns);
        timings.first_token.record(time_ns.saturating_sub(self.result.arrival_ns));
        if let Some(started_ns) = self.result.first_scheduled_ns {
            timings.prefill.record(time_ns.saturating_sub(started_ns));
        }
    }

    /// All choices have ended by themselves.
    fn note_end(&self, timings: &Timings) {
        let FinishedRequest { arrival_ns, first_token_ns, finished_ns, .. } = self.result;
        timings.end_to_end.record(finished_ns.saturating_sub(arrival_ns));
        timings.decode.record(finished_ns.saturating_sub(first_token_ns.unwrap_or(finished_ns)));
        timings.prompt_tokens.record(self.num_prompt_tokens as u64);
    }

    /// Ends every choice for which no event will come.
    pub(super) fn end_now(
        &mut self,
        reason: FinishReason,
        error: Option<&Arc<str>>,
        outbox: &mut Outbox,
        recorder: &mut Recorder<'_>,
    ) {
        let event = Event {
            request: self.id(),
            choice: 0,
            time_ns: self.result.finished_ns,
            token: None,
            logprobs: None,
            finish: Some(reason),
            stop_id: None,
            detail: error,
        };
        for choice in 0..self.choices.len() {
            self.apply(&Event { choice, ..event }, outbox, recorder);
        }
    }

    /// The result of a request that has ended; absent if all of it was streamed.
    pub(super) fn into_finished(mut self) -> Option<FinishedRequest> {
        self.result.prompt_logprobs = self.take_prompt_logprobs();
        self.channel.is_none().then_some(self.result)
    }

    /// Adds an event to the result.
    fn record(&mut self, event: &Event<'_>, change: Change) {
        let choice = &mut self.choices[event.choice];
        let output = &mut self.result.outputs[event.choice];
        if let Some(token) = event.token.filter(|_| change.has_token) {
            output.token_ids.push(token);
            output.first_token_ns.get_or_insert(event.time_ns);
            output.inter_token_latencies_s.extend(change.latency_ns.map(|latency| latency as f32 / 1e9));
            if let (Some(rows), Some(sum)) = (&mut output.logprobs, &mut output.cumulative_logprob) {
                let (ids, values, rank) = event.logprobs.unwrap_or_default();
                rows.push(ids, values, rank);
                *sum += f64::from(values.first().copied().unwrap_or_default());
            }
        }
        if let Some(end) = change.end {
            output.text = choice.take_text();
            output.finish_reason = end.finish_reason;
            output.stop_reason = end.stop_reason;
            output.error = end.error;
        }
    }

    /// Sends what an event brought, if it brought something.
    fn tell(&mut self, event: &Event<'_>, change: Change, outbox: &mut Outbox) {
        let token = event.token.filter(|_| change.has_token);
        if token.is_none() && change.end.is_none() {
            return;
        }
        let held = self.held.as_mut().map(|held| std::mem::take(&mut held[event.choice]));
        let Held { mut token_ids, logprobs } = held.unwrap_or_default();
        token_ids.extend(token);
        let mut logprobs = self.has_logprobs.then(|| logprobs.unwrap_or_default());
        if let Some(rows) = logprobs.as_mut().filter(|_| token.is_some()) {
            let (ids, values, rank) = event.logprobs.unwrap_or_default();
            rows.push(ids, values, rank);
        }
        if let Some(held) = self.held.as_mut().filter(|_| change.end.is_none()) {
            held[event.choice] = Held { token_ids, logprobs };
            return;
        }
        let is_first = !std::mem::replace(&mut self.has_told, true);
        let update = Update {
            request_id: self.id(),
            index: self.result.index,
            choice: event.choice as u32,
            text: self.choices[event.choice].take_delta(),
            token_ids,
            logprobs: logprobs.map(Box::new),
            end: change.end,
            prompt_logprobs: if is_first { self.take_prompt_logprobs().map(Box::new) } else { None },
            prompt_token_ids: is_first.then(|| std::mem::take(&mut self.result.prompt_token_ids)),
            num_cached_tokens: self.result.num_cached_tokens,
            arrival_ns: self.result.arrival_ns,
            first_scheduled_ns: self.result.first_scheduled_ns,
            first_token_ns: self.choices[event.choice].first_token_ns(),
            time_ns: event.time_ns,
            is_last: self.num_open == 0,
        };
        if let Some(channel) = &self.channel {
            outbox.push(channel, update);
        }
    }

    /// Log-probabilities of the prompt, if they were asked for and the prompt was read to its end.
    fn take_prompt_logprobs(&mut self) -> Option<LogprobRows> {
        let num_rows = self.result.prompt_token_ids.len().saturating_sub(1);
        self.result.prompt_logprobs.take().filter(|rows| rows.len() == num_rows)
    }
}
