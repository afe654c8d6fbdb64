//! A record as JSON.

use cbrs_core::TraceKind;
use serde::Serialize;

use super::record::{Event, Prompt, Record, What};

#[derive(Serialize)]
struct RequestObject<'a> {
    id: &'a str,
    x_request_id: Option<&'a str>,
    is_live: bool,
    num_omitted_events: u64,
    /// Of all requests, while this one was live.
    num_missed_events: u64,
    prompts: Vec<PromptObject>,
}

#[derive(Serialize)]
struct PromptObject {
    index: usize,
    prompt_tokens: usize,
    events: Vec<EventObject>,
}

#[derive(Serialize, Default)]
struct EventObject {
    event: &'static str,
    /// Seconds since the submission.
    time_s: f64,
    /// Seconds since 1970.
    unix_time: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    choice: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cached_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lost_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    finish_reason: Option<&'static str>,
}

impl Record {
    /// Appends it as an object.
    pub(crate) fn write_json(&self, out: &mut Vec<u8>) {
        let object = RequestObject {
            id: self.submitted().id(),
            x_request_id: self.submitted().names().nth(1),
            is_live: self.is_live(),
            num_omitted_events: self.num_omitted,
            num_missed_events: self.num_missed,
            prompts: self.prompts.iter().enumerate().map(|(index, prompt)| self.prompt(index, prompt)).collect(),
        };
        serde_json::to_writer(out, &object).expect("an object of plain values, written to memory");
    }

    fn prompt(&self, index: usize, prompt: &Prompt) -> PromptObject {
        let mut events = prompt.events.clone();
        // Those of one time in the order in which they can only have come.
        events.sort_by_key(|event| (event.time_ns, rank(event.what)));
        let submitted = EventObject { event: "submitted", unix_time: self.submitted_at, ..EventObject::default() };
        let events = std::iter::once(submitted).chain(events.iter().map(|event| self.event(event))).collect();
        PromptObject { index, prompt_tokens: prompt.num_tokens, events }
    }

    fn event(&self, event: &Event) -> EventObject {
        // A step that began just before the submission may have taken it along.
        let time_s = event.time_ns.saturating_sub(self.submitted_ns) as f64 / 1e9;
        let object = EventObject {
            time_s,
            unix_time: self.submitted_at + time_s,
            choice: Some(event.choice),
            ..EventObject::default()
        };
        match event.what {
            What::Traced(TraceKind::Admitted, tokens) => {
                EventObject { event: "admitted", cached_tokens: Some(tokens), ..object }
            }
            What::Traced(TraceKind::Resumed, tokens) => {
                EventObject { event: "resumed", cached_tokens: Some(tokens), ..object }
            }
            What::Traced(TraceKind::Chunk, tokens) => EventObject { event: "chunk", tokens: Some(tokens), ..object },
            What::Traced(TraceKind::Preempted, tokens) => {
                EventObject { event: "preempted", lost_tokens: Some(tokens), ..object }
            }
            What::FirstToken => EventObject { event: "first_token", ..object },
            What::End(reason, tokens) => {
                EventObject { event: "end", tokens: Some(tokens), finish_reason: Some(reason.as_str()), ..object }
            }
        }
    }
}

/// A step first commits, then plans: what it has computed, what came of that, who gives way, who starts.
fn rank(what: What) -> u8 {
    match what {
        What::Traced(TraceKind::Chunk, _) => 0,
        What::FirstToken => 1,
        What::End(..) => 2,
        What::Traced(TraceKind::Preempted, _) => 3,
        What::Traced(TraceKind::Admitted | TraceKind::Resumed, _) => 4,
    }
}
