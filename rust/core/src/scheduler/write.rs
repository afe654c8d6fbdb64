//! Writing the arrays of a planned batch: lanes, then the other sequences with one query token, then chunks.

use super::plan::in_batch_order;
use super::{Planned, Scheduler};
use crate::policy::cost::StepWork;

impl Scheduler {
    pub(super) fn write_batch(&mut self, now_ns: u64) {
        let mut num_kv_tokens = self.lanes.total_tokens();
        if self.planned_lanes.are_all() {
            self.write_all_lanes();
        } else {
            let batch = &mut self.batches[self.current];
            batch.lanes_version = 0;
            batch.keep_sequences(0);
            let planned_lanes = std::mem::take(&mut self.planned_lanes);
            planned_lanes.iter().for_each(|lane| self.write_lane(lane));
            self.planned_lanes = planned_lanes;
            num_kv_tokens = self.batches[self.current].seq_lens.iter().map(|&len| len as u64).sum();
        }
        let mut work = StepWork { kv_tokens_read: num_kv_tokens, ..StepWork::default() };
        let pieces = std::mem::take(&mut self.pieces);
        let mut num_singles = 0;
        for planned in in_batch_order(&pieces) {
            let start = u64::from(self.rows.get(planned.row).num_computed_tokens);
            let len = u64::from(planned.num_tokens);
            work.kv_tokens_read += start + len;
            work.attn_pairs += if len > 1 { len * (start + len / 2) } else { 0 };
            self.write_sequence(planned);
            num_singles += usize::from(planned.num_tokens == 1);
        }
        self.pieces = pieces;
        let batch = &mut self.batches[self.current];
        batch.step_id = self.step_id;
        batch.num_decodes = self.planned_lanes.len() + num_singles;
        self.rows.report_freed(&mut batch.freed_rows);
        self.in_flight = batch.num_seqs() > 0;
        work.new_tokens = batch.num_tokens() as u64;
        self.pace.begin_step(work, now_ns);
        self.stats.num_steps += u64::from(self.in_flight);
        self.stats.num_scheduled_tokens += batch.num_tokens() as u64;
    }

    /// The leading part of the batch is a copy of the lanes. Who runs was copied before if that has not changed since.
    fn write_all_lanes(&mut self) {
        let lanes = &self.lanes;
        let num_lanes = self.planned_lanes.len();
        let batch = &mut self.batches[self.current];
        if batch.lanes_version == lanes.version() {
            batch.keep_sequences(num_lanes);
        } else {
            batch.lanes_version = lanes.version();
            batch.keep_sequences(0);
            batch.query_start.extend(1..=num_lanes as i32);
            batch.row_ids.extend_from_slice(&lanes.rows);
            batch.request_ids.extend_from_slice(&lanes.request_ids);
            batch.choice_ids.extend(lanes.choice_ids.iter().map(|&choice| i32::from(choice)));
            batch.logits_index.extend(0..num_lanes as i32);
            batch.sample_index.extend(0..num_lanes as i32);
            batch.sample_rows.extend_from_slice(&lanes.rows);
            batch.sample_choices.extend(lanes.choice_ids.iter().map(|&choice| i32::from(choice)));
        }
        batch.token_ids.extend_from_slice(&lanes.tokens);
        batch.positions.extend(lanes.num_tokens.iter().map(|count| count - 1));
        batch.slot_mapping.extend_from_slice(&lanes.slots);
        batch.seq_lens.extend_from_slice(&lanes.num_tokens);
        let counts = lanes.num_tokens.iter().zip(&lanes.num_prompt_tokens);
        batch.sample_positions.extend(counts.map(|(num_tokens, num_prompt)| num_tokens - num_prompt));
        batch.max_query_len = 1;
        batch.max_seq_len = lanes.num_tokens.iter().fold(0, |longest, &count| longest.max(count)) as usize;
        let has_extras = |(&count, &row): (&i32, &i32)| self.rows.sampling.has_extras(row as u32, count as u32);
        batch.has_sampling_extras =
            lanes.have_extras() && batch.sample_positions.iter().zip(&lanes.rows).any(has_extras);
    }

    fn write_lane(&mut self, lane: usize) {
        let lanes = &self.lanes;
        let batch = &mut self.batches[self.current];
        let token = batch.token_ids.len() as i32;
        batch.token_ids.push(lanes.tokens[lane]);
        batch.positions.push(lanes.num_tokens[lane] - 1);
        batch.slot_mapping.push(lanes.slots[lane]);
        batch.query_start.push(token + 1);
        batch.seq_lens.push(lanes.num_tokens[lane]);
        batch.row_ids.push(lanes.rows[lane]);
        batch.request_ids.push(lanes.request_ids[lane]);
        batch.choice_ids.push(i32::from(lanes.choice_ids[lane]));
        batch.sample_index.push(batch.logits_index.len() as i32);
        batch.logits_index.push(token);
        batch.sample_rows.push(lanes.rows[lane]);
        let num_output_tokens = lanes.num_tokens[lane] - lanes.num_prompt_tokens[lane];
        batch.sample_positions.push(num_output_tokens);
        batch.sample_choices.push(i32::from(lanes.choice_ids[lane]));
        batch.max_query_len = 1;
        batch.max_seq_len = batch.max_seq_len.max(lanes.num_tokens[lane] as usize);
        batch.has_sampling_extras |= self.rows.sampling.has_extras(lanes.rows[lane] as u32, num_output_tokens as u32);
    }

    fn write_sequence(&mut self, planned: Planned) {
        let block_size = self.config.block_size;
        let row = self.rows.get(planned.row);
        let sequence = &self.sequences[row.sequence];
        let choice = sequence.order.choice() as i32;
        let request_id = self.request(sequence.slot).id.as_u64();
        let batch = &mut self.batches[self.current];
        let (start, end) = (row.num_computed_tokens, row.num_computed_tokens + planned.num_tokens);
        let tokens = &sequence.known().tokens;
        batch.token_ids.extend_from_slice(&tokens[start as usize..end as usize]);
        batch.positions.extend(start as i32..end as i32);
        let table = self.rows.blocks(planned.row);
        write_slots(&mut batch.slot_mapping, table, start as usize, end as usize, block_size);
        batch.query_start.push(batch.token_ids.len() as i32);
        batch.seq_lens.push(end as i32);
        batch.row_ids.push(planned.row as i32);
        batch.request_ids.push(request_id);
        batch.choice_ids.push(choice);
        batch.max_query_len = batch.max_query_len.max(planned.num_tokens as usize);
        batch.max_seq_len = batch.max_seq_len.max(end as usize);
        if planned.num_prompt_logits > 0 {
            self.write_prompt_logits(planned);
        }
        if planned.is_sampled {
            // All known tokens are computed then.
            let num_prompt_tokens = self.num_prompt_tokens(planned.row);
            let batch = &mut self.batches[self.current];
            batch.sample_index.push(batch.logits_index.len() as i32);
            batch.logits_index.push(batch.token_ids.len() as i32 - 1);
            batch.sample_rows.push(planned.row as i32);
            let num_output_tokens = end - num_prompt_tokens;
            batch.sample_positions.push(num_output_tokens as i32);
            batch.sample_choices.push(choice);
            batch.has_sampling_extras |= self.rows.sampling.has_extras(planned.row, num_output_tokens);
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
