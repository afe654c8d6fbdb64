//! The events of one step output, each with the row of log-probabilities that belongs to it.

use std::sync::Arc;

use cbrs_core::{FinishReason, StepOutput};

/// Ids, values and the rank of the token itself, which comes first.
pub(super) type LogprobRow<'a> = (&'a [i32], &'a [f32], i32);

/// One event of a step output.
#[derive(Debug, Clone, Copy)]
pub(super) struct Event<'a> {
    pub(super) request: u64,
    pub(super) choice: usize,
    pub(super) time_ns: u64,
    pub(super) token: Option<i32>,
    pub(super) logprobs: Option<LogprobRow<'a>>,
    pub(super) finish: Option<FinishReason>,
    /// The stop token id that ended the choice.
    pub(super) stop_id: Option<i32>,
    pub(super) detail: Option<&'a Arc<str>>,
}

/// Reads the events of a step output in their order.
pub(super) fn events(output: &StepOutput) -> impl Iterator<Item = Event<'_>> {
    let mut num_rows = 0;
    (0..output.len()).map(move |index| {
        let row = num_rows;
        num_rows += usize::from(output.logprob_events.get(row) == Some(&(index as i32)));
        let finish = FinishReason::from_code(output.finish_reasons[index]);
        Event {
            request: output.request_ids[index],
            choice: output.choice_ids[index] as usize,
            time_ns: output.time_ns,
            token: given(output.token_ids[index]),
            logprobs: (num_rows > row).then(|| output.logprobs.row(row)),
            finish,
            stop_id: given(output.stop_ids[index]),
            // Only ends have details; most events need no search.
            detail: finish.and_then(|_| output.detail(index)),
        }
    })
}

/// -1 stands for none.
fn given(id: i32) -> Option<i32> {
    (id >= 0).then_some(id)
}
