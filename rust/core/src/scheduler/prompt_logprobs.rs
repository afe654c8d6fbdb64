//! Log-probabilities of prompt tokens: which logits a step has to compute, and what becomes of them.
//!
//! 1. The logits at position p say how likely the token at p + 1 is; the first token of a prompt has none.
//! 2. Each is told once, in order. Until all are told, the request's sequences compute the prompt from its beginning: a cached block
//!    has no logits. After a preemption, only the logits that were not told are asked for again.
//! 3. One step computes logits for at most `max_prompt_logits` prompt tokens in total; chunks are shortened to that.

use super::{Planned, Scheduler};
use crate::logprobs::LogprobMatrix;

/// What the result of a plan must say about prompts. A copy of its own: the batch's arrays are lent to the caller.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PromptLogits {
    pub(super) num_rows: usize,
    /// Most likely ids wanted, at most.
    pub(super) most_logprobs: u32,
}

impl Scheduler {
    /// Whether the request's first tokens cannot be scheduled in this plan, since others need all logits that there are.
    pub(super) fn lacks_prompt_logits(&self, slot: u32) -> bool {
        let request = self.request(slot);
        let needs_first = request.num_untold_prompt_logprobs() > 0 && request.extras().num_told_prompt_logprobs == 0;
        needs_first && self.prompt_logits.num_rows >= self.config.max_prompt_logits
    }

    /// Reserves the logits that the next `num_tokens` tokens of a row need, or fewer tokens if there are not enough; returns how many of both.
    pub(super) fn plan_prompt_logits(&mut self, row: u32, num_tokens: usize) -> (usize, u16) {
        let state = self.rows.get(row);
        if !state.wants_prompt_logits {
            return (num_tokens, 0);
        }
        let request = self.request(self.sequences[state.sequence].slot);
        let extras = request.extras();
        let (start, num_told) = (state.num_computed_tokens as usize, extras.num_told_prompt_logprobs as usize);
        // The last token's logits are those of the first output token.
        let last = request.num_prompt_tokens as usize - 1;
        let num_wanted = (start + num_tokens).min(last).saturating_sub(num_told);
        let num_left = self.config.max_prompt_logits - self.prompt_logits.num_rows;
        let num_tokens = if num_wanted > num_left { num_told + num_left - start } else { num_tokens };
        let num_rows = num_wanted.min(num_left);
        if num_rows > 0 {
            let most_logprobs = extras.prompt_logprobs.unwrap_or(0);
            self.prompt_logits.num_rows += num_rows;
            self.prompt_logits.most_logprobs = self.prompt_logits.most_logprobs.max(most_logprobs);
        }
        (num_tokens, num_rows as u16)
    }

    /// Asks for the logits of a planned sequence, whose tokens are the last in the batch so far.
    pub(super) fn write_prompt_logits(&mut self, planned: Planned) {
        let row = self.rows.get(planned.row);
        let sequence = &self.sequences[row.sequence];
        let request = self.requests[sequence.slot as usize].as_ref().expect("a sequence has a request");
        let extras = request.extras();
        let batch = &mut self.batches[self.current];
        let first_token = batch.token_ids.len() - planned.num_tokens as usize;
        for offset in 0..usize::from(planned.num_prompt_logits) {
            let position = extras.num_told_prompt_logprobs as usize + offset;
            batch.prompt_logits_index.push(batch.logits_index.len() as i32);
            batch.logits_index.push((first_token + position - row.num_computed_tokens as usize) as i32);
            batch.prompt_target_ids.push(sequence.known().tokens[position + 1]);
            batch.prompt_rows.push(planned.row as i32);
            batch.num_prompt_logprobs.push(extras.prompt_logprobs.unwrap_or(0) as i32);
        }
    }

    /// Tells what `matrix` says from `first_row` on about the prompt of a planned sequence.
    pub(super) fn tell_prompt_logprobs(&mut self, planned: Planned, first_row: usize, matrix: &LogprobMatrix<'_>) {
        let row = self.rows.get_mut(planned.row);
        let slot = self.sequences[row.sequence].slot;
        let request = self.requests[slot as usize].as_mut().expect("a sequence has a request");
        for offset in 0..usize::from(planned.num_prompt_logits) {
            let position = request.tell_prompt_position();
            self.pending.prompt_logprob_requests.push(request.id.as_u64());
            self.pending.prompt_logprob_positions.push(position as i32);
            let num_logprobs = request.extras().prompt_logprobs.unwrap_or(0) as usize;
            self.pending.prompt_logprobs.push_from(matrix, first_row + offset, num_logprobs);
        }
        row.wants_prompt_logits = request.num_untold_prompt_logprobs() > 0;
    }
}
