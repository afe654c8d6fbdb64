//! Plan: fill the token budget — decodes first, then chunks of running prompts, then newcomers — and write the batch.

use super::{Planned, PromptLogits, Scheduler};

/// Pieces of a plan in the order of the batch: those of one token, then the longer ones, each as they were planned.
pub(super) fn in_batch_order(pieces: &[Planned]) -> impl Iterator<Item = Planned> + '_ {
    let [singles, chunks] = [true, false]
        .map(|is_single| pieces.iter().copied().filter(move |planned| (planned.num_tokens == 1) == is_single));
    singles.chain(chunks)
}

impl Scheduler {
    /// Plans the next batch. Each pass takes from the token budget what the one before has left.
    pub(super) fn plan(&mut self) {
        self.close_gaps();
        self.step_id += 1;
        // A call that waits plans several times: what it committed stays readable until it returns.
        if self.batch().num_seqs() > 0 || !self.output().is_empty() {
            self.current ^= 1;
        }
        let batch = &mut self.batches[self.current];
        batch.clear();
        batch.block_table_updates.append(&mut self.exchanged);
        self.planned_lanes.clear();
        self.pieces.clear();
        self.filling.clear();
        self.prompt_logits = PromptLogits::default();
        let num_preemptions = self.stats.num_preemptions;
        let is_paused = self.shared.plan_pause();
        if self.is_static() && self.num_running() == 0 {
            self.admit_group(is_paused);
        }
        let budget = self.plan_decodes(self.config.max_num_batched_tokens);
        let budget = self.plan_chunks(budget);
        self.close_prefilling_gaps();
        // After a preemption memory is short: whoever is admitted now would be displaced next.
        if !self.is_static() && self.stats.num_preemptions == num_preemptions {
            self.admit(budget, is_paused);
        }
        self.write_batch();
    }

    /// Schedules the prompts (or recomputed tokens) that are under way, oldest first.
    fn plan_chunks(&mut self, mut budget: usize) -> usize {
        for index in 0..self.prefilling.len() {
            if budget == 0 {
                break;
            }
            let row = self.prefilling[index];
            if self.rows.get(row).is_prefilling() {
                budget -= self.plan_chunk(row, budget);
            }
        }
        budget
    }

    /// Schedules the next tokens of a row within `budget`; returns how many, 0 if no logits are left for a prompt that wants them.
    pub(super) fn plan_chunk(&mut self, row: u32, budget: usize) -> usize {
        let num_remaining = self.num_remaining_tokens(row);
        let num_tokens = budget.min(self.config.max_chunk_tokens()).min(num_remaining);
        let (num_tokens, num_prompt_logits) = self.plan_prompt_logits(row, num_tokens);
        if num_tokens == 0 {
            return 0;
        }
        let state = self.rows.get_mut(row);
        state.is_planned = true;
        let is_sampled = num_tokens == num_remaining;
        let sequence = state.sequence;
        let num_logprobs = self.num_logprobs(row, sequence);
        let planned = Planned { row, num_tokens: num_tokens as u32, num_prompt_logits, num_logprobs, is_sampled };
        self.note_filling(planned);
        self.pieces.push(planned);
        num_tokens
    }

    /// Most likely ids that a sequence's request wants with each sample; -1 = nothing. Few rows have more to look up than one number.
    fn num_logprobs(&self, row: u32, sequence: u32) -> i8 {
        if self.rows.sampling.extras_below[row as usize] < u32::MAX {
            return -1;
        }
        self.request(self.sequences[sequence].request.slot()).extras().num_logprobs
    }
}
