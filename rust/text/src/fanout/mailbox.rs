//! The way from the engine thread to the consumer: step outputs copied into pooled buffers.
//!
//! 1. `publish` copies and wakes; it waits for nothing but a lock that is held for a few pointer moves.
//! 2. Outputs arrive complete and in order. There is no bound: what waits is bounded by the tokens of live requests.
//! 3. The consumer is woken for what somebody waits for: for each output while a `Hurry` lives, otherwise for ends, or once
//!    `MAX_HELD` outputs wait. A wake-up takes the engine as long as planning a small step.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use cbrs_core::{OutputSink, StepOutput};

use super::Shared;

/// Empty buffers kept for reuse; more than this many steps behind is the exception.
const MAX_FREE_BUFFERS: usize = 8;
/// Outputs that may wait without a wake-up: work that is put off comes in one piece.
const MAX_HELD: usize = 8;

#[derive(Debug, Default)]
pub(super) struct Mailbox {
    state: Mutex<State>,
    arrived: Condvar,
    /// How many `Hurry` there are.
    num_hurried: Arc<AtomicUsize>,
}

/// While it lives, the consumer is woken for each output.
#[derive(Debug)]
pub(super) struct Hurry(Arc<AtomicUsize>);

impl Hurry {
    fn new(num_hurried: &Arc<AtomicUsize>) -> Self {
        // The queue of requests, through which the engine learns of those that follow, orders it.
        num_hurried.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(num_hurried))
    }
}

impl Clone for Hurry {
    fn clone(&self) -> Self {
        Self::new(&self.0)
    }
}

impl Drop for Hurry {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
struct State {
    full: VecDeque<StepOutput>,
    free: Vec<StepOutput>,
    is_closed: bool,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing between lock and unlock can panic half-way through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether it woke the consumer.
    fn publish(&self, output: &StepOutput) -> bool {
        let mut state = self.lock();
        if state.is_closed {
            return false;
        }
        let mut buffer = state.free.pop().unwrap_or_default();
        drop(state);
        copy(output, &mut buffer);
        let mut state = self.lock();
        state.full.push_back(buffer);
        let is_many = state.full.len() >= MAX_HELD;
        drop(state);
        let is_due = is_many || self.num_hurried.load(Ordering::Relaxed) > 0 || has_end(output);
        if is_due {
            self.arrived.notify_one();
        }
        is_due
    }

    /// Has the consumer woken for each output; a request that is submitted later is told of at once.
    pub(super) fn hurry(&self) -> Hurry {
        Hurry::new(&self.num_hurried)
    }

    /// No further output is taken; the consumer reads what is there and ends.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.arrived.notify_one();
    }

    /// Takes the buffers of the last call back and waits for outputs; false = closed and empty.
    pub(super) fn receive(&self, outputs: &mut Vec<StepOutput>) -> bool {
        let mut state = self.lock();
        let room = MAX_FREE_BUFFERS.saturating_sub(state.free.len());
        state.free.extend(outputs.drain(..).take(room));
        while state.full.is_empty() {
            if state.is_closed {
                return false;
            }
            state = self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        outputs.extend(state.full.drain(..));
        true
    }
}

/// The scheduler's end of the mailbox. Dropping it says that no output will ever come again.
pub(super) struct MailSink(pub(super) Arc<Shared>);

impl OutputSink for MailSink {
    fn publish(&mut self, output: &StepOutput) {
        self.0.mailbox.publish(output);
    }
}

impl Drop for MailSink {
    fn drop(&mut self) {
        self.0.mailbox.close();
    }
}

/// Whether a choice ends with it.
fn has_end(output: &StepOutput) -> bool {
    output.finish_reasons.iter().any(|&code| code != 0)
}

/// Copies `from` without giving up the memory of `to`.
fn copy(from: &StepOutput, to: &mut StepOutput) {
    let StepOutput {
        step_id,
        time_ns,
        request_ids,
        choice_ids,
        token_ids,
        finish_reasons,
        stop_ids,
        logprob_events,
        logprobs,
        prompt_logprob_requests,
        prompt_logprob_positions,
        prompt_logprobs,
        details,
        started_request_ids,
        started_num_cached_tokens,
    } = from;
    to.step_id = *step_id;
    to.time_ns = *time_ns;
    to.request_ids.clone_from(request_ids);
    to.choice_ids.clone_from(choice_ids);
    to.token_ids.clone_from(token_ids);
    to.finish_reasons.clone_from(finish_reasons);
    to.stop_ids.clone_from(stop_ids);
    to.logprob_events.clone_from(logprob_events);
    to.logprobs.clone_from(logprobs);
    to.prompt_logprob_requests.clone_from(prompt_logprob_requests);
    to.prompt_logprob_positions.clone_from(prompt_logprob_positions);
    to.prompt_logprobs.clone_from(prompt_logprobs);
    to.details.clone_from(details);
    to.started_request_ids.clone_from(started_request_ids);
    to.started_num_cached_tokens.clone_from(started_num_cached_tokens);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(step_id: u64, finish: u8) -> StepOutput {
        StepOutput { step_id, finish_reasons: vec![0, finish, 0], ..StepOutput::default() }
    }

    /// The steps that the consumer finds.
    fn received(mailbox: &Mailbox) -> Vec<u64> {
        let mut outputs = Vec::new();
        mailbox.receive(&mut outputs);
        outputs.iter().map(|output| output.step_id).collect()
    }

    #[test]
    fn what_nobody_waits_for_waits_for_an_end() {
        let mailbox = Mailbox::default();
        assert!(!mailbox.publish(&output(1, 0)));
        assert!(!mailbox.publish(&output(2, 0)));
        assert!(mailbox.publish(&output(3, 1)));
        assert_eq!(received(&mailbox), [1, 2, 3]);
        assert!(!mailbox.publish(&output(4, 0)));
        mailbox.close();
        assert_eq!(received(&mailbox), [4], "what is left comes at the end");
        assert!(!mailbox.publish(&output(5, 1)));
    }

    #[test]
    fn no_more_than_so_many_outputs_wait() {
        let mailbox = Mailbox::default();
        let last = MAX_HELD as u64;
        assert!((1..last).all(|step_id| !mailbox.publish(&output(step_id, 0))));
        assert!(mailbox.publish(&output(last, 0)));
        assert_eq!(received(&mailbox), (1..=last).collect::<Vec<_>>());
        assert!(!mailbox.publish(&output(last + 1, 0)), "it counts anew");
    }

    #[test]
    fn each_output_comes_at_once_while_one_request_is_in_a_hurry() {
        let mailbox = Mailbox::default();
        let hurry = mailbox.hurry();
        let hurries = [hurry.clone(), hurry];
        for (step_id, hurry) in (1..).zip(hurries) {
            assert!(mailbox.publish(&output(step_id, 0)));
            drop(hurry);
        }
        assert!(!mailbox.publish(&output(3, 0)), "nobody is left who hurries");
    }
}
