//! Plan: fill the token budget — decodes first, then chunks of running prompts, then newcomers — and write the batch.

use super::{Planned, PromptLogits, Scheduler};

impl Scheduler {
    /// Plans the next batch. Each pass takes from the token budget what the one before has left.
    pub(super) fn plan(&mut self) {
        self.close_gaps();
        self.step_id += 1;
        // A call that waits plans several times: what it committed stays readable until it returns.
        if self.batch().num_seqs() > 0 || !self.output().is_empty() {
            self.current ^= 1;
        }
        self.buffers[self.current].batch.clear();
        self.decodes.clear();
        self.chunks.clear();
        self.filling.clear();
        self.prompt_logits = PromptLogits::default();
        let num_preemptions = self.stats.num_preemptions;
        let is_paused = self.shared.plan_pause();
        if self.is_static() && self.running.is_empty() {
            self.admit_group(is_paused);
        }
        let budget = self.plan_decodes(self.config.max_num_batched_tokens);
        let budget = self.plan_chunks(budget);
        self.close_gaps();
        // After a preemption memory is short: whoever is admitted now would be displaced next.
        if !self.is_static() && self.stats.num_preemptions == num_preemptions {
            self.admit(budget, is_paused);
        }
        self.write_batch();
    }

    /// Schedules every sequence that lacks one token, oldest first. If the budget does not reach all, they take turns.
    fn plan_decodes(&mut self, mut budget: usize) -> usize {
        let num_running = self.running.len();
        let take_turns = num_running > budget && self.num_decodes() > budget;
        let start = if take_turns { self.first_in_turn() } else { 0 };
        let mut first_left_out = None;
        for offset in 0..num_running {
            let row = self.running[(start + offset) % num_running];
            let state = *self.rows.get(row);
            if state.request.is_none() || state.num_remaining_tokens() != 1 {
                continue;
            }
            if budget > 0 && self.ensure_slot(row) {
                budget -= self.plan_chunk(row, 1);
            } else if self.rows.get(row).request.is_some() {
                first_left_out = first_left_out.or(Some(state.order));
            }
        }
        if let (true, Some(order)) = (take_turns, first_left_out) {
            self.rotation = order;
        }
        budget
    }

    fn num_decodes(&self) -> usize {
        self.running.iter().filter(|&&row| self.rows.get(row).num_remaining_tokens() == 1).count()
    }

    /// Where the sequence stands that was left out first in the last turn (or the next one, if it has ended).
    fn first_in_turn(&self) -> usize {
        let is_before = |&row: &u32| self.rows.get(row).order < self.rotation;
        self.running.partition_point(is_before) % self.running.len()
    }

    /// Schedules the prompts (or recomputed tokens) that are under way, oldest first.
    fn plan_chunks(&mut self, mut budget: usize) -> usize {
        for index in 0..self.running.len() {
            if budget == 0 {
                break;
            }
            let row = self.running[index];
            let state = self.rows.get(row);
            if state.request.is_some() && !state.is_planned && state.num_remaining_tokens() > 1 {
                budget -= self.plan_chunk(row, budget);
            }
        }
        budget
    }

    /// Schedules the next tokens of a row within `budget`; returns how many, 0 if no logits are left for a prompt that wants them.
    pub(super) fn plan_chunk(&mut self, row: u32, budget: usize) -> usize {
        let num_remaining = self.rows.get(row).num_remaining_tokens() as usize;
        let num_tokens = budget.min(self.config.max_chunk_tokens()).min(num_remaining);
        let (num_tokens, num_prompt_logits) = self.plan_prompt_logits(row, num_tokens);
        if num_tokens == 0 {
            return 0;
        }
        let state = self.rows.get_mut(row);
        state.is_planned = true;
        let is_sampled = num_tokens == num_remaining;
        let (order, sequence) = (state.order, state.sequence);
        let num_logprobs = self.num_logprobs(row, sequence);
        let planned =
            Planned { order, row, num_tokens: num_tokens as u32, num_prompt_logits, num_logprobs, is_sampled };
        self.note_filling(planned);
        if num_tokens == 1 {
            self.decodes.push(planned);
        } else {
            self.chunks.push(planned);
        }
        num_tokens
    }

    /// Most likely ids that a sequence's request wants with each sample; -1 = nothing. Few rows have more to look up than one number.
    fn num_logprobs(&self, row: u32, sequence: u32) -> i8 {
        if self.rows.sampling.extras_below[row as usize] < u32::MAX {
            return -1;
        }
        let request = self.request(self.sequences[sequence].request.slot());
        request.sampling.logprobs.map_or(-1, |count| count as i8)
    }

    /// Writes the arrays of the planned batch, sequences with one query token first.
    fn write_batch(&mut self) {
        let decodes = std::mem::take(&mut self.decodes);
        let chunks = std::mem::take(&mut self.chunks);
        for &planned in decodes.iter().chain(&chunks) {
            self.write_sequence(planned);
        }
        let batch = &mut self.buffers[self.current].batch;
        batch.step_id = self.step_id;
        batch.num_decodes = decodes.len();
        self.rows.report_freed(&mut batch.freed_rows);
        std::mem::swap(&mut batch.block_table_updates, &mut self.table_updates);
        self.table_updates.clear();
        self.in_flight = batch.num_seqs() > 0;
        self.stats.num_steps += u64::from(self.in_flight);
        self.stats.num_scheduled_tokens += batch.num_tokens() as u64;
        (self.decodes, self.chunks) = (decodes, chunks);
    }

    fn write_sequence(&mut self, planned: Planned) {
        let block_size = self.config.block_size;
        let row = self.rows.get(planned.row);
        let id = row.request.expect("a planned row has a sequence");
        let choice = planned.order.choice() as i32;
        let batch = &mut self.buffers[self.current].batch;
        let (start, end) = (row.num_computed_tokens, row.num_computed_tokens + planned.num_tokens);
        if planned.num_tokens == 1 && planned.is_sampled {
            batch.token_ids.push(row.last_token);
        } else {
            batch.token_ids.extend_from_slice(&self.sequences[row.sequence].tokens[start as usize..end as usize]);
        }
        batch.positions.extend((start..end).map(|position| position as i32));
        let table = self.rows.blocks(planned.row);
        write_slots(&mut batch.slot_mapping, table, start as usize, end as usize, block_size);
        batch.query_start.push(batch.token_ids.len() as i32);
        batch.seq_lens.push(end as i32);
        batch.row_ids.push(planned.row as i32);
        batch.request_ids.push(id.as_u64());
        batch.choice_ids.push(choice);
        batch.max_query_len = batch.max_query_len.max(planned.num_tokens as usize);
        batch.max_seq_len = batch.max_seq_len.max(end as usize);
        if planned.num_prompt_logits > 0 {
            self.write_prompt_logits(planned);
        }
        let row = self.rows.get(planned.row);
        let batch = &mut self.buffers[self.current].batch;
        if planned.is_sampled {
            batch.sample_index.push(batch.logits_index.len() as i32);
            batch.logits_index.push(batch.token_ids.len() as i32 - 1);
            batch.sample_rows.push(planned.row as i32);
            let num_output_tokens = row.num_tokens - row.num_prompt_tokens;
            batch.sample_positions.push(num_output_tokens as i32);
            batch.sample_choices.push(choice);
            batch.has_sampling_extras |= num_output_tokens < self.rows.sampling.extras_below[planned.row as usize];
        }
    }
}

/// Slots of positions `start..end`, block by block.
fn write_slots(slots: &mut Vec<i64>, table: &[i32], start: usize, end: usize, block_size: usize) {
    let mut position = start;
    while position < end {
        let block_end = end.min((position / block_size + 1) * block_size);
        let first = i64::from(table[position / block_size]) * block_size as i64 + (position % block_size) as i64;
        slots.extend(first..first + (block_end - position) as i64);
        position = block_end;
    }
}
