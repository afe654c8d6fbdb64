//! The way from the engine thread to the consumer: step outputs copied into pooled buffers.
//!
//! 1. `publish` copies and wakes; it waits for nothing but a lock that is held for a few pointer moves.
//! 2. Outputs arrive complete and in order. There is no bound: what waits is bounded by the tokens of live requests.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use cbrs_core::{OutputSink, StepOutput};

use super::Shared;

/// Empty buffers kept for reuse; more than this many steps behind is the exception.
const MAX_FREE_BUFFERS: usize = 8;

#[derive(Debug, Default)]
pub(super) struct Mailbox {
    state: Mutex<State>,
    arrived: Condvar,
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

    fn publish(&self, output: &StepOutput) {
        let mut state = self.lock();
        if state.is_closed {
            return;
        }
        let mut buffer = state.free.pop().unwrap_or_default();
        drop(state);
        copy(output, &mut buffer);
        self.lock().full.push_back(buffer);
        self.arrived.notify_one();
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
