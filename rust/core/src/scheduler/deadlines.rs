//! Deadlines: who is dropped when. A request that waits past its deadline costs nothing more; one that runs past it ends.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::Scheduler;
use super::request::Request;
use crate::request::FinishReason;

/// Live requests with a deadline, by the next of their deadlines and slot.
#[derive(Debug, Default)]
pub(super) struct Deadlines {
    by_time: BTreeSet<(u64, u32)>,
}

impl Deadlines {
    pub(super) fn add(&mut self, deadline_ns: Option<u64>, slot: u32) {
        if let Some(deadline_ns) = deadline_ns {
            self.by_time.insert((deadline_ns, slot));
        }
    }

    pub(super) fn remove(&mut self, deadline_ns: Option<u64>, slot: u32) {
        if let Some(deadline_ns) = deadline_ns {
            self.by_time.remove(&(deadline_ns, slot));
        }
    }

    pub(super) fn len(&self) -> usize {
        self.by_time.len()
    }

    fn first(&self) -> Option<(u64, u32)> {
        self.by_time.first().copied()
    }
}

impl Scheduler {
    /// Ends who is past a deadline.
    pub(super) fn expire(&mut self, now_ns: u64) {
        while let Some((_, slot)) = self.deadlines.first().filter(|&(deadline_ns, _)| deadline_ns <= now_ns) {
            let request = self.request(slot);
            let (state, advice) = self.state_at_deadline(request);
            let age_ms = self.flows.tickets[slot as usize].age_ms(now_ns);
            // Of what has started it is known when something last came of it, not when it arrived.
            let after = if request.is_started() { String::new() } else { format!(" after {age_ms} ms") };
            let message = format!("the deadline passed: the request {state}{after}; give {advice}");
            let id = request.id;
            self.stats.num_expired_requests += 1;
            self.end_request(id, FinishReason::Error, Some(&Arc::from(message)));
        }
    }

    /// What a request past its deadline did until now, and what would help.
    fn state_at_deadline(&self, request: &Request) -> (&'static str, &'static str) {
        let is_running =
            self.sequences.siblings(request.first_sequence).any(|sequence| self.sequences[sequence].is_running());
        if !request.is_started() {
            ("still waited", "a later deadline or a higher priority, or send it when less waits")
        } else if is_running {
            ("still ran", "a later deadline or a lower max_tokens")
        } else {
            ("waited again to go on", "a later deadline or a higher priority")
        }
    }

    /// When a step has something to do even if nobody calls for it: the next deadline.
    pub fn next_timer_ns(&self) -> Option<u64> {
        self.deadlines.first().map(|(deadline_ns, _)| deadline_ns)
    }
}
