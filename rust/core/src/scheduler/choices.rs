//! The choices of a request: who computes the prompt, how the others follow, and how each ends.
//!
//! 1. Choices start in order. The first one computes the prompt; the others wait for it (in no list), then start as rows and blocks allow.
//! 2. From then until the last has started the request itself holds the prompt's full blocks (`pins`), all but the one in which the
//!    last prompt token lies, whatever happens to the choice that computed them. Who starts holds these too and computes the rest.
//! 3. Pinned blocks count as used. They are given up, those of the newest request first, when a running sequence finds no block, before
//!    anything is preempted, and when nothing runs and the first in line does not fit. Then the next choice computes the prompt again.
//! 4. If the choice that computes the prompt ends by `finish`, the next one takes its place; if it ends with an error, those that have not started do too.
//! 5. A request is in the list of waiting ones exactly while a choice of it could start; it is gone when its last choice has ended.

use std::ops::Range;
use std::sync::Arc;

use super::Scheduler;
use super::request::Request;
use super::sequence::{Order, Sequence};
use crate::block::{BlockId, NONE};
use crate::request::{FinishReason, RequestId};

/// Who computes the prompt for the choices that have not started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fork {
    /// Nobody: the next choice will.
    Absent,
    /// This sequence, for which they wait.
    UnderWay { sequence: u32 },
    /// It is computed: they can start.
    Ready,
}

impl Scheduler {
    /// Makes a sequence of the next choice of a request.
    pub(super) fn start_choice(&mut self, slot: u32) -> u32 {
        let class = self.flows.get(self.flows.of(slot)).class;
        if !self.request(slot).is_started() {
            let request = self.request(slot);
            let (arrival, deadline) = (request.arrival, request.next_deadline_ns());
            self.flows.remove_unstarted(slot, arrival, self.deadline_key(slot));
            self.deadlines.remove(deadline, slot);
        }
        let request = self.requests[slot as usize].as_mut().expect("a listed slot has a request");
        let (is_last, was_started) = (request.num_unstarted_choices() == 1, request.is_started());
        let known = if is_last { request.prompt.take() } else { request.prompt.clone() };
        let sequence = self.sequences.insert(Sequence {
            slot,
            order: Order::new(class, request.arrival, u32::from(request.num_started_choices)),
            known,
            row: NONE,
        });
        if request.is_started() {
            self.num_unstarted_choices -= 1;
        } else {
            self.num_unstarted_choices += u64::from(request.num_choices - 1);
        }
        request.num_started_choices += 1;
        if !is_last && request.fork() == Fork::Absent {
            request.set_fork(Fork::UnderWay { sequence });
        }
        match self.sequences.siblings(request.first_sequence).last() {
            None => request.first_sequence = sequence,
            Some(last) => self.sequences.set_next_sibling(last, sequence),
        }
        match was_started {
            true if !request.is_waiting() => self.flows.remove_started(slot),
            true => {}
            false => self.deadlines.add(request.next_deadline_ns(), slot),
        }
        sequence
    }

    /// The prompt is computed: pins its full blocks and lets the other choices start.
    pub(super) fn fork(&mut self, row: u32) {
        let state = self.rows.get(row);
        let slot = self.sequences[state.sequence].slot;
        let num_pins = (self.num_prompt_tokens(row) as usize - 1) / self.config.block_size;
        self.rows.get_mut(row).is_forked_from = false;
        let request = self.requests[slot as usize].as_mut().expect("a running row has a request");
        request.set_fork(Fork::Ready);
        let pins = request.pins_mut().expect("a request with several choices has room for pins");
        for &block in &self.rows.blocks(row)[..num_pins] {
            let block = BlockId::from_table(block);
            self.pool.acquire(block);
            pins.push(block);
        }
        if !pins.is_empty() {
            self.pinning.insert(self.pin_place(slot));
        }
        self.enter_waiting(slot);
        self.note_wait(slot, false);
    }

    /// Puts a started request in its place among those that wait: by arrival, before all that have not started.
    fn enter_waiting(&mut self, slot: u32) {
        let (requests, arrival) = (&self.requests, self.request(slot).arrival);
        self.flows.push_started(slot, |other| {
            let other = requests[other as usize].as_ref().expect("a listed slot has a request");
            !other.is_started() || other.arrival > arrival
        });
    }

    /// Blocks that a request holds for its choices that have not started, to look at.
    pub fn pinned_blocks(&self, id: RequestId) -> &[BlockId] {
        self.live(id).map_or(&[], Request::pins)
    }

    /// Gives back the pins of a request, deepest first so that eviction reaches children before their parents.
    pub(super) fn unpin(&mut self, slot: u32) {
        if self.request(slot).pins().is_empty() {
            return;
        }
        self.pinning.remove(&self.pin_place(slot));
        let request = self.requests[slot as usize].as_mut().expect("a listed slot has a request");
        let Some(pins) = request.pins_mut() else { return };
        while let Some(block) = pins.pop() {
            self.pool.give_back(block);
        }
    }

    /// Place of a request among those that hold pins.
    pub(super) fn pin_place(&self, slot: u32) -> (Order, u32) {
        (Order::new(self.flows.get(self.flows.of(slot)).class, self.request(slot).arrival, 0), slot)
    }

    /// Takes the pins from the newest request that has some: `only_sole` = whose deepest one nobody else holds.
    ///
    /// Returns false if there is none.
    pub(super) fn drop_newest_pins(&mut self, only_sole: bool) -> bool {
        let is_deepest_sole = |&&(_, slot): &&(Order, u32)| {
            self.request(slot).pins().last().is_some_and(|&block| self.pool.ref_count(block) == 1)
        };
        let mut newest_first = self.pinning.iter().rev();
        let newest = if only_sole { newest_first.find(is_deepest_sole) } else { newest_first.next() };
        let Some(&(_, slot)) = newest else { return false };
        self.unpin(slot);
        self.request_mut(slot).set_fork(Fork::Absent);
        true
    }

    /// The live sequence of a choice that has started.
    pub(super) fn find_sequence(&self, id: RequestId, choice: u32) -> Option<u32> {
        let first = self.live(id)?.first_sequence;
        self.sequences.siblings(first).find(|&sequence| self.sequences[sequence].order.choice() == choice)
    }

    /// Ends every choice of a request, each with an event that brings no token.
    pub(super) fn end_request(&mut self, id: RequestId, reason: FinishReason, detail: Option<&Arc<str>>) {
        self.make_room_for_events(self.request(id.slot()).num_live_choices as usize);
        let unstarted = self.withdraw_unstarted(id.slot());
        let sequences: Vec<u32> = self.sequences.siblings(self.request(id.slot()).first_sequence).collect();
        for sequence in sequences {
            self.end_sequence(sequence, reason, detail);
        }
        self.end_unstarted(id, unstarted, reason, detail);
    }

    fn end_unstarted(&mut self, id: RequestId, choices: Range<u32>, reason: FinishReason, detail: Option<&Arc<str>>) {
        for choice in choices {
            self.push_end(id, choice, reason, detail);
            self.forget_choice(id.slot(), reason);
        }
    }

    /// Ends one choice with an event that brings no token.
    pub(super) fn end_sequence(&mut self, sequence: u32, reason: FinishReason, detail: Option<&Arc<str>>) {
        let Sequence { slot, order, .. } = self.sequences[sequence];
        self.push_end(self.request(slot).id, order.choice(), reason, detail);
        self.forget_sequence(sequence, reason);
    }

    /// Ends the choice with an error, and with it those that have not started and wait for its prompt.
    pub(super) fn fail_sequence(&mut self, sequence: u32, message: &Arc<str>) {
        let id = self.request(self.sequences[sequence].slot).id;
        let is_waited_for = self.request(id.slot()).fork() == (Fork::UnderWay { sequence });
        let waiting = if is_waited_for { self.withdraw_unstarted(id.slot()) } else { 0..0 };
        self.make_room_for_events(1 + waiting.len());
        self.end_sequence(sequence, FinishReason::Error, Some(message));
        self.end_unstarted(id, waiting, FinishReason::Error, Some(message));
    }

    fn push_end(&mut self, id: RequestId, choice: u32, reason: FinishReason, detail: Option<&Arc<str>>) {
        self.make_room_for_events(1);
        self.pending.push_end(id, choice as u8, reason, detail.cloned());
    }

    /// No further choice of the request will start; returns those that have not.
    fn withdraw_unstarted(&mut self, slot: u32) -> Range<u32> {
        let request = self.request(slot);
        let unstarted = u32::from(request.num_started_choices)..u32::from(request.num_choices);
        if request.is_waiting() {
            if request.is_started() {
                self.flows.remove_started(slot);
            } else {
                let arrival = request.arrival;
                self.flows.remove_unstarted(slot, arrival, self.deadline_key(slot));
            }
        }
        self.unpin(slot);
        let request = self.requests[slot as usize].as_mut().expect("a listed slot has a request");
        if request.is_started() {
            self.num_unstarted_choices -= u64::from(request.num_unstarted_choices());
        }
        request.num_choices = request.num_started_choices;
        request.prompt = None;
        unstarted
    }

    /// Takes a choice, whose terminal event is written, out of every structure.
    pub(super) fn forget_sequence(&mut self, sequence: u32, reason: FinishReason) {
        match self.sequences[sequence].row {
            NONE => {
                let Sequence { slot, order, .. } = self.sequences[sequence];
                self.flows.remove_preempted(self.flows.of(slot), order, sequence);
            }
            row => self.release_row(row),
        }
        let next_sibling = self.sequences.next_sibling(sequence);
        self.sequences.set_next_sibling(sequence, NONE);
        let slot = self.sequences.remove(sequence).slot;
        let request = self.requests[slot as usize].as_mut().expect("a sequence has a request");
        if request.first_sequence == sequence {
            request.first_sequence = next_sibling;
        } else {
            let mut siblings = self.sequences.siblings(request.first_sequence);
            let previous = siblings.find(|&other| self.sequences.next_sibling(other) == sequence);
            drop(siblings);
            self.sequences.set_next_sibling(previous.expect("a sequence is among its siblings"), next_sibling);
        }
        if request.fork() == (Fork::UnderWay { sequence }) {
            request.set_fork(Fork::Absent);
            if request.is_waiting() {
                self.enter_waiting(slot);
            }
        }
        self.forget_choice(slot, reason);
        if self.requests[slot as usize].is_some() {
            self.note_wait(slot, false);
        }
    }

    /// Counts the end of a choice; the last one takes its request with it.
    fn forget_choice(&mut self, slot: u32, reason: FinishReason) {
        *match reason {
            FinishReason::Stop => &mut self.stats.num_stop_requests,
            FinishReason::Length => &mut self.stats.num_length_requests,
            FinishReason::Cancelled => &mut self.stats.num_cancelled_requests,
            FinishReason::Error => &mut self.stats.num_error_requests,
        } += 1;
        let request = self.request_mut(slot);
        request.num_live_choices -= 1;
        if request.num_live_choices > 0 {
            return;
        }
        let request = self.requests[slot as usize].take().expect("only a live request ends");
        self.deadlines.remove(request.next_deadline_ns(), slot);
        self.num_shielded -= usize::from(request.is_shielded());
        self.flows.end_wait(slot);
        let flow = self.flows.of(slot);
        if self.flows.leave(flow) && self.reserved_flow == Some(flow) {
            self.reserved_flow = None;
        }
        if !request.is_started() {
            self.shared.gate.release(&request.reservation());
        }
        self.shared.gate.leave(request.tenant);
        self.pool.roots().release(request.root);
        self.shared.slots.release(request.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Class, PolicyConfig};
    use crate::{RequestSpec, SchedulerConfig};

    /// A call that waits steps several times, and its caller may look at what the last batch told until it returns.
    #[test]
    fn steps_with_nothing_to_tell_leave_alone_what_was_told() {
        let mut scheduler = Scheduler::new(SchedulerConfig::default()).expect("the configuration is valid");
        let submitter = scheduler.submitter();
        let mut cancelled_in = || {
            let id = submitter.submit(RequestSpec::new(vec![1])).expect("it is acceptable");
            submitter.cancel(id);
            scheduler.step(None, 0).expect("no result is due");
            let told = scheduler.output().request_ids.as_ptr();
            for _ in 0..3 {
                scheduler.step(None, 0).expect("no result is due");
                assert!(scheduler.output().is_empty());
            }
            told
        };
        let told = [cancelled_in(), cancelled_in(), cancelled_in()];
        assert!(told[0] != told[1] && told[1] != told[2], "events stand where the last ones stood");
    }

    #[test]
    fn the_newest_of_the_lowest_class_gives_up_its_pins_first_whatever_its_tenant() {
        let rules = Some(PolicyConfig { max_preemptions: 0, ..PolicyConfig::fair() });
        let config = SchedulerConfig { max_num_seqs: 4, rules, ..SchedulerConfig::default() };
        let mut scheduler = Scheduler::new(config).expect("the configuration is valid");
        let submitter = scheduler.submitter();
        let submit = |tenant: &str, class, first| {
            let tokens = (first..first + 40).collect();
            let (tenant, priority) = (Some(Arc::from(tenant)), Some(class));
            submitter.submit(RequestSpec { n: 3, tenant, priority, ..RequestSpec::new(tokens) }).expect("it fits")
        };
        let classes = [Class::Batch, Class::Standard, Class::Batch, Class::Standard];
        let ids: Vec<RequestId> =
            (0..4).map(|index| submit(&format!("tenant {index}"), classes[index], 100 * index as i32)).collect();
        scheduler.step(None, 0).expect("no result is due");
        let tokens = [8; 4];
        let result = crate::StepResult { token_ids: &tokens, ..crate::StepResult::default() };
        scheduler.step(Some(&result), 1).expect("the result fits");
        let mut given_up = Vec::new();
        while scheduler.drop_newest_pins(false) {
            scheduler.check_invariants();
            given_up.extend(
                (0..4)
                    .filter(|&index| scheduler.pinned_blocks(ids[index]).is_empty() && !given_up.contains(&index))
                    .collect::<Vec<_>>(),
            );
        }
        assert_eq!(given_up, [2, 0, 3, 1]);
    }

    /// Somebody may still look at the old ones.
    #[test]
    fn arrays_of_events_that_grow_too_small_are_kept() {
        let config = SchedulerConfig { max_num_seqs: 1, queue_capacity: 1, ..SchedulerConfig::default() };
        let mut scheduler = Scheduler::new(config).expect("the configuration is valid");
        let submitter = scheduler.submitter();
        for num_outgrown in [1, 2, 2, 2] {
            let id = submitter.submit(RequestSpec { n: 128, ..RequestSpec::new(vec![1]) }).expect("it is acceptable");
            submitter.cancel(id);
            scheduler.step(None, 0).expect("no result is due");
            assert_eq!(scheduler.output().len(), 128);
            assert_eq!(scheduler.retired_outputs.len(), num_outgrown, "two sets of arrays take turns");
        }
    }
}
