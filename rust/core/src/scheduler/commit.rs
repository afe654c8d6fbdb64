//! Commit: what the batch in flight computed becomes known — tokens, ends, published blocks.

use std::sync::Arc;

use super::plan::in_batch_order;
use super::sequence::Known;
use super::{Planned, PromptLogits, Scheduler};
use crate::batch::StepResult;
use crate::block::{Parent, Published};
use crate::error::{Error, Result};
use crate::logprobs::LogprobMatrix;
use crate::trace::TraceKind;

impl Scheduler {
    pub(super) fn check_step_id(&self, got: u64) -> Result<()> {
        if !self.in_flight {
            return Err(Error::NoBatchInFlight { got });
        }
        let expected = self.step_id;
        if got == expected { Ok(()) } else { Err(Error::WrongStep { expected, got }) }
    }

    /// Checks a whole result before anything of it is used.
    pub(super) fn check_result(&self, result: Option<&StepResult<'_>>) -> Result<()> {
        let step_id = self.step_id;
        let expected = if self.in_flight { self.batch().num_samples() } else { 0 };
        let Some(result) = result else {
            if expected > 0 {
                return Err(Error::MissingResult { step_id, num_samples: expected });
            }
            return self.check_logprobs(&StepResult::default());
        };
        // The result of a batch without sequences is empty, and may name its step.
        let answers_empty_batch = !self.in_flight && result.token_ids.is_empty();
        if let Some(got) = result.step_id.filter(|&got| !(answers_empty_batch && got == step_id)) {
            self.check_step_id(got)?;
        }
        if !self.in_flight && !result.token_ids.is_empty() {
            return Err(Error::NoBatchInFlight { got: step_id });
        }
        let check_len = |field, got, expected| {
            if got == expected { Ok(()) } else { Err(Error::ResultLength { field, step_id, expected, got }) }
        };
        check_len("token_ids", result.token_ids.len(), expected)?;
        if let Some(row_error) = result.row_error {
            check_len("row_error", row_error.len(), expected)?;
        }
        self.check_logprobs(result)?;
        if let Some(token_start) = result.token_start {
            check_len("token_start", token_start.len(), expected + 1)?;
            let wrong = token_start.iter().enumerate().find(|&(position, &got)| got != position as i32);
            if let Some((position, &got)) = wrong {
                return Err(Error::ResultTokenStart { position, expected: position as i32, got });
            }
        }
        self.check_tokens(result)
    }

    fn check_logprobs(&self, result: &StepResult<'_>) -> Result<()> {
        let (step_id, batch) = (self.step_id, self.batch());
        let check = |field, matrix: Option<LogprobMatrix<'_>>, num_rows, most: Option<i32>| match (matrix, most) {
            (Some(matrix), _) => matrix.check(field, step_id, num_rows, most.map_or(0, |most| most as usize)),
            (None, Some(_)) => Err(Error::ResultLength { field, step_id, expected: num_rows, got: 0 }),
            (None, None) => Ok(()),
        };
        let of_lanes = || self.planned_lanes.iter().map(|lane| self.lanes.num_logprobs[lane]);
        let others = || self.pieces.iter().filter(|planned| planned.is_sampled);
        let wanted = || of_lanes().chain(others().map(|planned| planned.num_logprobs)).map(i32::from);
        let most = if self.in_flight && batch.has_sampling_extras { wanted().max() } else { None };
        check("logprobs", result.logprobs, batch.num_samples(), most.filter(|&most| most >= 0))?;
        let wanted = if self.in_flight { self.prompt_logits } else { PromptLogits::default() };
        let most = (wanted.num_rows > 0).then_some(wanted.most_logprobs as i32);
        check("prompt_logprobs", result.prompt_logprobs, wanted.num_rows, most)
    }

    fn check_tokens(&self, result: &StepResult<'_>) -> Result<()> {
        let vocab_size = self.config.vocab_size.map_or(1 << 31, i64::from);
        let failed = |position: usize| result.row_error.is_some_and(|row_error| row_error[position] != 0);
        let is_valid = |token: i32| i64::from(token as u32) < vocab_size;
        // The common case is one pass without branches; which token is wrong matters only if one is.
        if result.token_ids.iter().fold(true, |valid, &token| valid & is_valid(token)) {
            return Ok(());
        }
        let wrong =
            result.token_ids.iter().enumerate().find(|&(position, &token)| !is_valid(token) && !failed(position));
        match wrong {
            Some((position, &token)) => {
                let (step_id, token) = (self.step_id, i64::from(token));
                Err(Error::ResultToken { step_id, position, token, vocab_size })
            }
            None => Ok(()),
        }
    }

    /// Commits the batch in flight with its (checked) result.
    pub(super) fn commit(&mut self, result: Option<&StepResult<'_>>, now_ns: u64) {
        if !std::mem::take(&mut self.in_flight) {
            return;
        }
        let result = result.copied().unwrap_or_default();
        if let Some(time_ns) = self.pace.end_step(result.step_time_ns, now_ns) {
            self.shared.step_times.record(time_ns);
        }
        self.make_room_for_events(self.batch().num_samples());
        let mut sample = self.planned_lanes.len();
        let mut prompt_row = 0;
        self.commit_decodes(&result);
        let pieces = std::mem::take(&mut self.pieces);
        for planned in in_batch_order(&pieces) {
            // A sample belongs to a sequence even if the sequence has ended meanwhile.
            let drawn = planned.is_sampled.then(|| Sample::of(&result, sample));
            if self.rows.get(planned.row).is_planned {
                self.commit_sequence(planned, drawn, prompt_row, &result);
            }
            sample += usize::from(planned.is_sampled);
            prompt_row += usize::from(planned.num_prompt_logits);
        }
        self.pieces = pieces;
        self.close_gaps();
    }

    /// Commits a sequence with its sample, if it has one, and what the result says about its prompt from `prompt_row` on.
    fn commit_sequence(
        &mut self,
        planned: Planned,
        sample: Option<Sample>,
        prompt_row: usize,
        result: &StepResult<'_>,
    ) {
        let row = self.rows.get_mut(planned.row);
        row.is_planned = false;
        let num_computed_before = row.num_computed_tokens;
        row.num_computed_tokens += planned.num_tokens;
        let (sequence, is_forked_from) = (row.sequence, row.is_forked_from);
        if let Some(message) = sample.and_then(Sample::error_message) {
            self.fail_sequence(sequence, &Arc::from(message));
            return;
        }
        self.trace(TraceKind::Chunk, sequence, planned.num_tokens);
        if let (1.., Some(matrix)) = (planned.num_prompt_logits, &result.prompt_logprobs) {
            self.tell_prompt_logprobs(planned, prompt_row, matrix);
        }
        self.publish_blocks(planned.row, num_computed_before);
        if is_forked_from && sample.is_some() {
            self.fork(planned.row);
        }
        if let Some(sample) = sample {
            if let (0.., Some(matrix)) = (planned.num_logprobs, &result.logprobs) {
                // The next event is that of this token.
                self.pending.logprob_events.push(self.pending.len() as i32);
                self.pending.logprobs.push_from(matrix, sample.index, planned.num_logprobs as usize);
            }
            self.append_token(planned.row, sample.token);
        } else if self.num_remaining_tokens(planned.row) == 1 {
            self.enter_lane(planned.row, None);
        }
    }

    /// Publishes the blocks that the step filled, or keeps their tokens; a block that duplicates a published one is exchanged for it.
    fn publish_blocks(&mut self, row: u32, num_computed_before: u32) {
        let block_size = self.config.block_size;
        let state = *self.rows.get(row);
        let filled = num_computed_before as usize / block_size..state.num_computed_tokens as usize / block_size;
        let sequence = &mut self.sequences[state.sequence];
        let request = self.requests[sequence.slot as usize].as_ref().expect("a sequence has a request");
        if state.may_publish {
            sequence.known_mut().hash_blocks(
                self.pool.root_hash(request.root),
                filled.end,
                &self.shared.hasher,
                block_size,
            );
        }
        let root = request.root;
        for column in filled {
            let Known { tokens, hashes, .. } = self.sequences[state.sequence].known();
            let tokens = &tokens[column * block_size..][..block_size];
            let block = self.rows.tables.get(row, column as u32);
            if !state.may_publish {
                self.pool.store(block, tokens);
                continue;
            }
            let parent = match column {
                0 => Parent::Root(root),
                _ => Parent::Block(self.rows.tables.get(row, column as u32 - 1)),
            };
            if let Published::Duplicate(other) = self.pool.publish(block, parent, hashes[column], tokens) {
                self.exchange(row, column as u32, other);
            }
        }
    }

    /// The first token of a sequence that has computed all it knew: from now on it decodes.
    fn append_token(&mut self, row: u32, token: i32) {
        let lane = self.enter_lane(row, Some(token));
        // The ends of a failed request may have taken the room that was made for all samples.
        self.make_room_for_events(1);
        let event = self.pending.len();
        self.push_tokens(lane..lane + 1, &[token]);
        self.end_if_due(lane, event);
    }

    /// Ends everything that the batch in flight touched.
    pub(super) fn fail_batch(&mut self, message: &str) {
        let message: Arc<str> = Arc::from(message);
        self.in_flight = false;
        let planned_lanes = std::mem::take(&mut self.planned_lanes);
        for lane in planned_lanes.iter() {
            if let Some(row) = self.lanes.row(lane) {
                self.fail_sequence(self.rows.get(row).sequence, &message);
            }
        }
        let pieces = std::mem::take(&mut self.pieces);
        for planned in in_batch_order(&pieces) {
            if self.rows.get(planned.row).is_planned {
                self.fail_sequence(self.rows.get(planned.row).sequence, &message);
            }
        }
        (self.planned_lanes, self.pieces) = (planned_lanes, pieces);
        self.close_gaps();
    }

    /// Takes sequences that run no more, or decode now, out of the lists. Not between a plan and its commit: lanes get other numbers.
    pub(super) fn close_gaps(&mut self) {
        if self.lanes.has_gaps() {
            self.lanes.compact();
        }
        self.close_prefilling_gaps();
    }

    pub(super) fn close_prefilling_gaps(&mut self) {
        if std::mem::take(&mut self.prefilling_has_gaps) {
            let rows = &self.rows;
            for prefilling in &mut self.prefilling {
                prefilling.retain(|&row| rows.get(row).is_prefilling());
            }
        }
    }
}

/// What a result says about one sample.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sample {
    pub(super) token: i32,
    /// Code of `StepResult::row_error`.
    error: u8,
    /// Its index among the samples of the batch.
    pub(super) index: usize,
}

impl Sample {
    pub(super) fn of(result: &StepResult<'_>, index: usize) -> Self {
        let error = result.row_error.map_or(0, |row_error| row_error[index]);
        Self { token: result.token_ids[index], error, index }
    }

    pub(super) fn error_message(self) -> Option<&'static str> {
        match self.error {
            0 => None,
            2 => Some("every token is excluded by bad_words, logit_bias or min_tokens; loosen them"),
            _ => Some("the model gave no usable logits (NaN) for this sequence"),
        }
    }
}
