//! What happened to one HTTP request.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use cbrs_core::{FinishReason, RequestId, TraceKind, TraceRecord};
use cbrs_text::Update;

use crate::stream::Submitted;

/// Events of one HTTP request that are kept.
const MAX_EVENTS: usize = 1_024;

/// An HTTP request and the requests of the core that it became.
#[derive(Debug, Clone)]
pub(crate) struct Record {
    submitted: Arc<Submitted>,
    /// On the engine's clock, and in seconds since 1970.
    pub(super) submitted_ns: u64,
    pub(super) submitted_at: f64,
    pub(super) prompts: Vec<Prompt>,
    num_events: usize,
    /// Events that were left out.
    pub(super) num_omitted: u64,
    /// Events of all requests that the core wrote faster than they were read, while this one was live.
    pub(super) num_missed: u64,
}

/// One request of the core.
#[derive(Debug, Clone)]
pub(super) struct Prompt {
    request: RequestId,
    pub(super) num_tokens: usize,
    /// In no order: what the core wrote down and what updates tell come on two ways.
    pub(super) events: Vec<Event>,
    pub(super) has_ended: bool,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Event {
    pub(super) time_ns: u64,
    pub(super) choice: u32,
    pub(super) what: What,
}

/// What happened, and how many tokens it was about.
#[derive(Debug, Clone, Copy)]
pub(super) enum What {
    Traced(TraceKind, u32),
    FirstToken,
    End(FinishReason, u32),
}

/// Whether an update tells more than a further token of a choice that goes on.
pub(super) fn is_event(update: &Update) -> bool {
    update.end.is_some() || has_first_token(update)
}

/// Whether the first token of the choice came with this update: a token of a stream came when the update did, and a choice that is told as a
/// whole has all its tokens here.
fn has_first_token(update: &Update) -> bool {
    let is_whole = update.end.as_ref().is_some_and(|end| end.num_tokens as usize == update.token_ids.len());
    !update.token_ids.is_empty() && (is_whole || update.first_token_ns == Some(update.time_ns))
}

impl Record {
    /// A request that is submitted now.
    pub(super) fn new(submitted: Arc<Submitted>, now_ns: u64) -> Self {
        let submitted_at = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
        Self {
            submitted,
            submitted_ns: now_ns,
            submitted_at,
            prompts: Vec::new(),
            num_events: 0,
            num_omitted: 0,
            num_missed: 0,
        }
    }

    /// Its names.
    pub(crate) fn submitted(&self) -> &Submitted {
        &self.submitted
    }

    /// Forgets its prompts, which were not submitted; returns their ids.
    pub(super) fn withdraw(&mut self) -> Vec<RequestId> {
        std::mem::take(&mut self.prompts).iter().map(|prompt| prompt.request).collect()
    }

    pub(super) fn is_submitted(&self) -> bool {
        !self.prompts.is_empty()
    }

    pub(super) fn is_live(&self) -> bool {
        self.prompts.iter().any(|prompt| !prompt.has_ended)
    }

    /// Events were missed, some of which may be its own.
    pub(super) fn miss(&mut self, count: u64) {
        if self.is_live() {
            self.num_missed += count;
        }
    }

    pub(super) fn requests(&self) -> impl Iterator<Item = RequestId> + '_ {
        self.prompts.iter().map(|prompt| prompt.request)
    }

    /// Adds a prompt; returns its number.
    pub(super) fn enter(&mut self, request: RequestId, num_tokens: usize) -> usize {
        self.prompts.push(Prompt { request, num_tokens, events: Vec::new(), has_ended: false });
        self.prompts.len() - 1
    }

    fn push(&mut self, prompt: usize, time_ns: u64, choice: u32, what: What) {
        if self.num_events == MAX_EVENTS {
            self.num_omitted += 1;
            return;
        }
        self.num_events += 1;
        self.prompts[prompt].events.push(Event { time_ns, choice, what });
    }

    pub(super) fn trace(&mut self, prompt: usize, written: &TraceRecord) {
        let what = What::Traced(written.kind, written.num_tokens);
        self.push(prompt, written.time_ns, u32::from(written.choice), what);
    }

    pub(super) fn note(&mut self, prompt: usize, update: &Update) {
        if has_first_token(update) {
            self.push(prompt, update.first_token_ns.unwrap_or(update.time_ns), update.choice, What::FirstToken);
        }
        if let Some(end) = &update.end {
            self.push(prompt, update.time_ns, update.choice, What::End(end.finish_reason, end.num_tokens));
        }
        self.prompts[prompt].has_ended |= update.is_last;
    }
}
