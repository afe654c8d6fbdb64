//! What other threads asked for: new requests, cancels, finishes, closing.

use std::sync::Arc;

use super::flows::Ticket;
use super::request::{Entry, Request};
use super::{Rules, Scheduler};
use crate::policy::Class;
use crate::request::{FinishReason, RequestId};
use crate::submit::{Control, Submitted};

impl Scheduler {
    /// Takes new requests into the waiting list, then applies cancels and finishes.
    pub(super) fn take_controls(&mut self) {
        // Controls are taken before the queue is drained: each of them was pushed after its request, so the request is drained
        // now, unless another producer is in the middle of a push before it. Such a control waits for the next step.
        let mut controls = std::mem::take(&mut self.late_controls);
        controls.extend(self.shared.controls.take_all());
        self.drain_queue();
        for control in controls {
            self.apply(control);
        }
    }

    fn drain_queue(&mut self) {
        while let Some(submitted) = self.shared.queue.pop() {
            self.enter(*submitted);
        }
    }

    fn enter(&mut self, submitted: Submitted) {
        let Submitted { id, spec, max_tokens, reservation, times, root_hash, hashes } = submitted;
        let reservation = self.priced(reservation, max_tokens, spec.n);
        self.rates.enter(reservation.class, u64::from(reservation.service_us));
        let root = self.pool.roots().intern(spec.tenant.as_ref(), spec.cache_salt.as_ref(), root_hash);
        let arrival = self.next_arrival;
        self.next_arrival += 1;
        let seed = spec.sampling.seed.unwrap_or_else(|| derive_seed(self.config.seed, arrival));
        // In a fixed group there are no classes.
        let class = if self.is_static() { Class::Standard } else { reservation.class };
        let flow = self.flows.join(self.config.rules(), class, spec.tenant.as_ref());
        if id.slot() as usize >= self.flows.tickets.len() {
            // Displaced requests hold slots besides those of the queue and of the rows.
            self.flows.grow(self.shared.slots.capacity());
        }
        self.flows.tickets[id.slot() as usize] = Ticket { since_ms: 0, flow };
        // Who came after this step has read the clock is of no age, not of a negative one.
        self.flows.begin_wait(id.slot(), times.arrival_ns.min(self.now_ns));
        let entry = Entry { id, arrival, seed, root, max_tokens, reservation, times, hashes };
        let request = Request::new(spec, entry);
        self.deadlines.add(request.next_deadline_ns(), id.slot());
        self.requests.insert(request);
        self.flows.enter(id.slot(), arrival, self.deadline_key(id.slot()));
    }

    fn apply(&mut self, control: Control) {
        let Some(id) = control.request() else { return self.follow_policy() };
        if !self.shared.slots.is_live(id) {
            return;
        }
        if self.live(id).is_none() {
            self.late_controls.push(control);
            return;
        }
        match control {
            Control::Cancel(id) => self.end_request(id, FinishReason::Cancelled, None),
            Control::Finish { id, choice, num_tokens, stop_reason } => {
                // A choice that has not started has no text that could stop it; one that has ended or never was names nothing.
                let sequence = u32::try_from(choice).ok().and_then(|choice| self.find_sequence(id, choice));
                if let Some(sequence) = sequence {
                    self.finish_early(sequence, num_tokens, stop_reason.as_ref());
                }
            }
            Control::FollowPolicy => {}
        }
    }

    /// Takes over the policy of the door; several changes since the last step are one.
    fn follow_policy(&mut self) {
        let policy = self.shared.gate.rules().policy.clone();
        self.flows.set_policy(&policy);
        // What is counted from the beginning stays counted.
        let counts_service = self.rules.counts_service;
        self.rules = Rules { counts_service, ..Rules::new(&policy) };
        self.config.rules = Some(policy);
    }

    fn finish_early(&mut self, sequence: u32, num_tokens: u32, stop_reason: Option<&Arc<str>>) {
        let slot = self.sequences[sequence].slot;
        let num_output_tokens = self.num_tokens(sequence) - self.request(slot).num_prompt_tokens;
        self.stats.num_output_tokens -= u64::from(num_output_tokens.saturating_sub(num_tokens));
        // Those that came after the stop string took time and memory, too.
        self.growth.observe(self.request(slot).class, num_output_tokens);
        self.end_sequence(sequence, FinishReason::Stop, stop_reason);
    }

    /// The request with this id, if it is known here and still lives.
    pub(super) fn live(&self, id: RequestId) -> Option<&Request> {
        self.requests.get(id.slot() as usize)?.as_ref().filter(|request| request.id == id)
    }

    /// Ends every accepted request as cancelled: the scheduler was closed.
    pub(super) fn end_all_requests(&mut self) {
        // A producer that claimed its place before the close finishes its push within moments; its request is accepted, so it ends here.
        while !self.shared.queue.is_drained() {
            self.drain_queue();
            std::thread::yield_now();
        }
        for slot in 0..self.requests.len() {
            if let Some(request) = &self.requests[slot] {
                self.end_request(request.id, FinishReason::Cancelled, None);
            }
        }
        self.late_controls.clear();
        self.in_flight = false;
        self.is_finished = true;
    }
}

/// Seed of a request that has none: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) of the scheduler's seed at the request's place.
fn derive_seed(seed: u64, arrival: u64) -> u64 {
    let mut z = seed.wrapping_add((arrival + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
