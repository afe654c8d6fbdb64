//! Checks every array of a batch against the model, and notes what is in flight.

use cbrs_core::{RequestId, Scheduler};

use super::model::{Flying, Model};

impl Model {
    /// Checks the batch's arrays, entry by entry.
    pub(crate) fn check_arrays(&mut self, scheduler: &Scheduler) {
        let batch = scheduler.batch();
        let num_seqs = batch.row_ids.len();
        assert_eq!(
            (batch.num_seqs(), batch.num_tokens(), batch.query_start.len()),
            (num_seqs, batch.token_ids.len(), num_seqs + 1)
        );
        let lens = [batch.seq_lens.len(), batch.request_ids.len(), batch.choice_ids.len()];
        assert_eq!(lens, [num_seqs; 3], "the arrays by sequence differ in length");
        assert_eq!([batch.positions.len(), batch.slot_mapping.len()], [batch.token_ids.len(); 2]);
        let (mut token, mut samples) = (0, 0);
        for index in 0..num_seqs {
            let flying = self.check_sequence(scheduler, index, token, samples);
            token += flying.end - flying.start;
            samples += usize::from(flying.sample.is_some());
            self.flight.push(flying);
        }
        assert_eq!(token, batch.token_ids.len(), "tokens belong to no sequence");
        let lens = [
            batch.sample_index.len(),
            batch.sample_rows.len(),
            batch.sample_positions.len(),
            batch.sample_choices.len(),
        ];
        assert_eq!(lens, [samples; 4], "a sample belongs to no finished sequence");
        self.check_prompt_logits(scheduler);
        self.check_scalars(scheduler);
    }

    fn check_sequence(&self, scheduler: &Scheduler, index: usize, token: usize, samples: usize) -> Flying {
        let batch = scheduler.batch();
        let row = batch.row_ids[index] as usize;
        let choice = self.find(RequestId::from_u64(batch.request_ids[index]), batch.choice_ids[index]);
        assert_eq!(self.rows[row], Some(choice), "row {row} belongs to another choice");
        let tracked = &self.choices[choice];
        assert_eq!(batch.query_start[index] as usize, token);
        let (start, end) = (tracked.computed, tracked.computed + batch.query_start[index + 1] as usize - token);
        assert!(end <= tracked.tokens.len(), "choice {choice} computes tokens that are not known");
        assert_eq!(batch.seq_lens[index] as usize, end, "choice {choice}: the context is not computed + scheduled");
        let table = self.tables.row(row);
        assert!(table.len() * self.config.block_size >= end, "choice {choice}: its table does not cover the step");
        for position in start..end {
            let at = token + position - start;
            assert_eq!(batch.token_ids[at], tracked.tokens[position], "choice {choice}: token at {position}");
            assert_eq!(batch.positions[at] as usize, position);
            let slot = self.memory.slot(table, position) as i64;
            assert_eq!(batch.slot_mapping[at], slot, "choice {choice}: slot of {position}");
        }
        let is_sampled = end == tracked.tokens.len();
        if is_sampled {
            let told = (batch.sample_rows[samples], batch.sample_positions[samples]);
            let wanted = (row as i32, tracked.num_output() as i32);
            assert_eq!(batch.sample_choices[samples] as usize, tracked.number, "choice {choice}: of its sample");
            assert_eq!(told, wanted, "choice {choice}: (row, output position) of its sample");
            let logits = batch.logits_index[batch.sample_index[samples] as usize] as usize;
            assert_eq!(logits, token + end - start - 1, "the logits of its last token");
        } else {
            assert!(!batch.sample_rows.contains(&(row as i32)), "choice {choice} is sampled before its last token");
        }
        let prompt_logits = self.wanted_logits(choice, start, end);
        Flying { choice, row, start, end, prompt_logits, sample: is_sampled.then_some(samples) }
    }

    fn check_scalars(&mut self, scheduler: &Scheduler) {
        let batch = scheduler.batch();
        let query_lens: Vec<usize> = self.flight.iter().map(|flying| flying.end - flying.start).collect();
        let num_ones = query_lens.iter().filter(|&&len| len == 1).count();
        assert_eq!(batch.num_decodes, num_ones, "num_decodes");
        assert!(query_lens[..num_ones].iter().all(|&len| len == 1), "sequences with one token come first");
        assert_eq!(batch.max_query_len, query_lens.iter().copied().max().unwrap_or(0));
        assert_eq!(batch.max_seq_len, self.flight.iter().map(|flying| flying.end).max().unwrap_or(0));
        assert_eq!(scheduler.is_in_flight(), !self.flight.is_empty());
        self.counters.num_steps += u64::from(!self.flight.is_empty());
        self.counters.num_scheduled_tokens += batch.token_ids.len() as u64;
    }
}
