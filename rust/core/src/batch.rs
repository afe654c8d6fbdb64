//! One iteration's flat arrays: what to run (`Batch`), what came of it (`StepResult`), what to tell users (`StepOutput`).
//!
//! Owned by the scheduler, overwritten in place. What is lent to readers is never reallocated, so a view of it stays a view of live memory
//! as long as the scheduler lives: batches have their full capacity from the start, and a set of event arrays that is too small is
//! replaced and kept. Row tables, details and log-probabilities grow, and are copied out instead.

use std::sync::Arc;

use crate::logprobs::{LogprobMatrix, LogprobRows};
use crate::request::{FinishReason, RequestId};
use crate::row_tables::NewRowTables;

/// What runs in one step. `T` tokens, `S` sequences, `R` samples; names and dtypes are the array contract.
///
/// Sequences with exactly one query token come first (`num_decodes` of them), so that a runner splits the batch with
/// one number; the order says nothing about priority.
#[derive(Debug, Default)]
pub struct Batch {
    /// Number of this step; 0 before the first.
    pub step_id: u64,
    /// Leading sequences with exactly one query token.
    pub num_decodes: usize,
    /// Most query tokens of one sequence.
    pub max_query_len: usize,
    /// Longest context after this step.
    pub max_seq_len: usize,
    /// `[T]` tokens to run.
    pub token_ids: Vec<i32>,
    /// `[T]` position of each token in its sequence.
    pub positions: Vec<i32>,
    /// `[T]` where K and V go: `block * block_size + offset`.
    pub slot_mapping: Vec<i64>,
    /// `[S+1]` prefix sums of query tokens per sequence.
    pub query_start: Vec<i32>,
    /// `[S]` context length after this step.
    pub seq_lens: Vec<i32>,
    /// `[S]` persistent row of each sequence.
    pub row_ids: Vec<i32>,
    /// `[S]` request of each sequence.
    pub request_ids: Vec<u64>,
    /// `[S]` choice of each sequence within its request.
    pub choice_ids: Vec<i32>,
    /// `[L]` indices into `T` whose logits are needed.
    pub logits_index: Vec<i32>,
    /// `[R]` indices into `logits_index` that are sampled.
    pub sample_index: Vec<i32>,
    /// `[R]` row of each sample.
    pub sample_rows: Vec<i32>,
    /// `[R]` index of the output token to be sampled, 0 for the first: the counter of its random number.
    pub sample_positions: Vec<i32>,
    /// `[R]` choice of each sample within its request.
    pub sample_choices: Vec<i32>,
    /// `[P]` indices into `logits_index` of the prompt tokens whose log-probabilities are wanted.
    pub prompt_logits_index: Vec<i32>,
    /// `[P]` the token after each of them, whose log-probability it is.
    pub prompt_target_ids: Vec<i32>,
    /// `[P]` row of each of them.
    pub prompt_rows: Vec<i32>,
    /// `[P]` most likely ids wanted beside it.
    pub num_prompt_logprobs: Vec<i32>,
    /// Whether a sampled row has more parameters than temperature, `top_k`, `top_p` and `min_p`, or wants log-probabilities.
    pub has_sampling_extras: bool,
    /// Rows that were given to a sequence by this plan.
    pub new_rows: Vec<i32>,
    /// Ragged parameters of `new_rows`.
    pub new_row_tables: NewRowTables,
    /// Rows that lost their sequence since the last plan.
    pub freed_rows: Vec<i32>,
    /// What changed in `block_tables` since the last plan.
    pub block_table_updates: BlockTableUpdates,
    /// Version of the lanes that the leading entries of the arrays about who runs are a copy of; 0 = of none.
    pub(crate) lanes_version: u64,
}

impl Batch {
    /// A batch whose arrays never grow past these limits.
    pub(crate) fn with_capacity(max_num_seqs: usize, max_num_tokens: usize, max_prompt_logits: usize) -> Self {
        let samples = max_num_seqs.min(max_num_tokens);
        let prompt_logits = max_prompt_logits.min(max_num_tokens);
        Self {
            token_ids: Vec::with_capacity(max_num_tokens),
            positions: Vec::with_capacity(max_num_tokens),
            slot_mapping: Vec::with_capacity(max_num_tokens),
            query_start: {
                let mut query_start = Vec::with_capacity(samples + 1);
                query_start.push(0);
                query_start
            },
            seq_lens: Vec::with_capacity(samples),
            row_ids: Vec::with_capacity(samples),
            request_ids: Vec::with_capacity(samples),
            choice_ids: Vec::with_capacity(samples),
            logits_index: Vec::with_capacity(samples + prompt_logits),
            sample_index: Vec::with_capacity(samples),
            sample_rows: Vec::with_capacity(samples),
            sample_positions: Vec::with_capacity(samples),
            sample_choices: Vec::with_capacity(samples),
            prompt_logits_index: Vec::with_capacity(prompt_logits),
            prompt_target_ids: Vec::with_capacity(prompt_logits),
            prompt_rows: Vec::with_capacity(prompt_logits),
            num_prompt_logprobs: Vec::with_capacity(prompt_logits),
            new_row_tables: NewRowTables::new(),
            new_rows: Vec::with_capacity(max_num_seqs),
            freed_rows: Vec::with_capacity(max_num_seqs),
            block_table_updates: BlockTableUpdates::with_capacity(max_num_seqs),
            ..Self::default()
        }
    }

    /// Sequences in this batch.
    pub fn num_seqs(&self) -> usize {
        self.row_ids.len()
    }

    /// Query tokens in this batch.
    pub fn num_tokens(&self) -> usize {
        self.token_ids.len()
    }

    /// Tokens that the result of this batch must hold.
    pub fn num_samples(&self) -> usize {
        self.sample_index.len()
    }

    /// Empties everything but the arrays about who runs, which `keep_sequences` shortens.
    pub(crate) fn clear(&mut self) {
        self.num_decodes = 0;
        self.max_query_len = 0;
        self.max_seq_len = 0;
        self.token_ids.clear();
        self.positions.clear();
        self.slot_mapping.clear();
        self.seq_lens.clear();
        self.sample_positions.clear();
        self.prompt_logits_index.clear();
        self.prompt_target_ids.clear();
        self.prompt_rows.clear();
        self.num_prompt_logprobs.clear();
        self.has_sampling_extras = false;
        self.new_rows.clear();
        self.new_row_tables.clear();
        self.freed_rows.clear();
        self.block_table_updates.clear();
    }

    /// Shortens the arrays about who runs to their first `num_seqs` sequences, each with one sampled query token.
    pub(crate) fn keep_sequences(&mut self, num_seqs: usize) {
        self.query_start.truncate(num_seqs + 1);
        self.row_ids.truncate(num_seqs);
        self.request_ids.truncate(num_seqs);
        self.choice_ids.truncate(num_seqs);
        self.logits_index.truncate(num_seqs);
        self.sample_index.truncate(num_seqs);
        self.sample_rows.truncate(num_seqs);
        self.sample_choices.truncate(num_seqs);
    }
}

/// What changed in the block tables: run `i` writes `ids[start[i]..start[i + 1]]` to `rows[i]` from `first_columns[i]`.
#[derive(Debug, Default)]
pub struct BlockTableUpdates {
    /// `[U]` row of each run.
    pub rows: Vec<i32>,
    /// `[U]` first column of each run.
    pub first_columns: Vec<i32>,
    /// `[U+1]` prefix sums of run lengths.
    pub start: Vec<i32>,
    /// Block ids of all runs.
    pub ids: Vec<i32>,
}

impl BlockTableUpdates {
    /// Room for a new block of each of `max_num_seqs` sequences; long tables of newcomers may need more.
    fn with_capacity(max_num_seqs: usize) -> Self {
        let mut start = Vec::with_capacity(max_num_seqs + 1);
        start.push(0);
        Self {
            rows: Vec::with_capacity(max_num_seqs),
            first_columns: Vec::with_capacity(max_num_seqs),
            start,
            ids: Vec::with_capacity(max_num_seqs),
        }
    }

    pub(crate) fn clear(&mut self) {
        self.rows.clear();
        self.first_columns.clear();
        self.start.truncate(1);
        self.ids.clear();
    }

    /// Takes all runs of `other`.
    pub(crate) fn append(&mut self, other: &mut Self) {
        let first = self.ids.len() as i32;
        self.start.extend(other.start.drain(..).skip(1).map(|start| first + start));
        self.rows.append(&mut other.rows);
        self.first_columns.append(&mut other.first_columns);
        self.ids.append(&mut other.ids);
    }

    pub(crate) fn push(&mut self, row: u32, first_column: usize, ids: &[i32]) {
        if ids.is_empty() {
            return;
        }
        if self.start.is_empty() {
            self.start.push(0);
        }
        self.rows.push(row as i32);
        self.first_columns.push(first_column as i32);
        self.ids.extend_from_slice(ids);
        self.start.push(self.ids.len() as i32);
    }
}

/// Sampled tokens of the batch in flight: one per entry of its `sample_index`.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepResult<'a> {
    /// Step that the tokens belong to; absent = the one in flight.
    pub step_id: Option<u64>,
    /// `[R]` one token per sample.
    pub token_ids: &'a [i32],
    /// `[R+1]` prefix sums of tokens per sample; absent = one each, and nothing else is supported by this version.
    pub token_start: Option<&'a [i32]>,
    /// `[R]` nonzero = no token could be drawn: the choice ends with an error, its neighbours go on. 1 = the logits were unusable (NaN),
    /// 2 = the parameters exclude every token.
    pub row_error: Option<&'a [u8]>,
    /// `[R, 1 + K]` what requests with `logprobs` want to know; needed if there is one among the samples.
    pub logprobs: Option<LogprobMatrix<'a>>,
    /// `[P, 1 + K]` the same for prompt tokens; needed if the batch asks for any.
    pub prompt_logprobs: Option<LogprobMatrix<'a>>,
    /// How long the step took, for the model of its cost; absent = from its plan until the call that brings this result.
    pub step_time_ns: Option<u64>,
}

/// What one `step` has to tell: tokens and ends of the commit, cancels, and first admissions of the plan.
///
/// Events are in the order of the batch; each choice has exactly one event with a finish reason.
#[derive(Debug, Clone, Default)]
pub struct StepOutput {
    /// Step whose plan this call made.
    pub step_id: u64,
    /// Time of the call on the scheduler's clock.
    pub time_ns: u64,
    /// `[E]` request of each event.
    pub request_ids: Vec<u64>,
    /// `[E]` choice of each event.
    pub choice_ids: Vec<i32>,
    /// `[E]` new token; -1 = the event brings none.
    pub token_ids: Vec<i32>,
    /// `[E]` code of `FinishReason`; 0 = the choice goes on.
    pub finish_reasons: Vec<u8>,
    /// `[E]` stop token id that ended the choice; -1 = none (EOS, stop string, other ends).
    pub stop_ids: Vec<i32>,
    /// `[Q]` indices of the events whose tokens have log-probabilities, in ascending order; sparse.
    pub logprob_events: Vec<i32>,
    /// `[Q]` rows of log-probabilities.
    pub logprobs: LogprobRows,
    /// `[P]` requests that the rows of `prompt_logprobs` belong to.
    pub prompt_logprob_requests: Vec<u64>,
    /// `[P]` position of each row's token in the prompt, 1 or more.
    pub prompt_logprob_positions: Vec<i32>,
    /// `[P]` rows of log-probabilities of prompt tokens.
    pub prompt_logprobs: LogprobRows,
    /// Stop string (finish reason `stop`) or message (finish reason `error`) by index of the event; sparse.
    pub details: Vec<(u32, Arc<str>)>,
    /// `[A]` requests that were admitted for the first time by this plan.
    pub started_request_ids: Vec<u64>,
    /// `[A]` prompt tokens that each of them found in the prefix cache.
    pub started_num_cached_tokens: Vec<i32>,
}

impl StepOutput {
    /// Arrays that never grow past these limits.
    pub(crate) fn with_capacity(max_events: usize, max_started: usize) -> Self {
        Self {
            request_ids: Vec::with_capacity(max_events),
            choice_ids: Vec::with_capacity(max_events),
            token_ids: Vec::with_capacity(max_events),
            finish_reasons: Vec::with_capacity(max_events),
            stop_ids: Vec::with_capacity(max_events),
            started_request_ids: Vec::with_capacity(max_started),
            started_num_cached_tokens: Vec::with_capacity(max_started),
            ..Self::default()
        }
    }

    /// Whether `num_events` more fit the memory of the events' arrays.
    pub(crate) fn has_room(&self, num_events: usize) -> bool {
        let capacities = [
            self.request_ids.capacity(),
            self.choice_ids.capacity(),
            self.token_ids.capacity(),
            self.finish_reasons.capacity(),
            self.stop_ids.capacity(),
        ];
        capacities.iter().all(|&capacity| self.len() + num_events <= capacity)
    }

    /// The same with room for `num_events` more, and as many as there are, in new memory.
    pub(crate) fn enlarged(&self, num_events: usize) -> Self {
        let max_events = 2 * self.len() + num_events;
        let mut larger = Self {
            details: self.details.clone(),
            logprob_events: self.logprob_events.clone(),
            logprobs: self.logprobs.clone(),
            prompt_logprob_requests: self.prompt_logprob_requests.clone(),
            prompt_logprob_positions: self.prompt_logprob_positions.clone(),
            prompt_logprobs: self.prompt_logprobs.clone(),
            ..Self::with_capacity(max_events, self.started_request_ids.capacity())
        };
        larger.request_ids.extend_from_slice(&self.request_ids);
        larger.choice_ids.extend_from_slice(&self.choice_ids);
        larger.token_ids.extend_from_slice(&self.token_ids);
        larger.finish_reasons.extend_from_slice(&self.finish_reasons);
        larger.stop_ids.extend_from_slice(&self.stop_ids);
        larger.started_request_ids.extend_from_slice(&self.started_request_ids);
        larger.started_num_cached_tokens.extend_from_slice(&self.started_num_cached_tokens);
        larger
    }

    /// Number of events.
    pub fn len(&self) -> usize {
        self.request_ids.len()
    }

    /// Whether there is nothing to tell: no event, no admission, no log-probabilities of a prompt.
    pub fn is_empty(&self) -> bool {
        self.request_ids.is_empty() && self.started_request_ids.is_empty() && self.prompt_logprobs.is_empty()
    }

    /// The stop string or error message of event `index`, if it has one.
    pub fn detail(&self, index: usize) -> Option<&Arc<str>> {
        let found = self.details.binary_search_by_key(&(index as u32), |(event, _)| *event).ok()?;
        Some(&self.details[found].1)
    }

    /// Empties all arrays and keeps their memory.
    pub fn clear(&mut self) {
        self.request_ids.clear();
        self.choice_ids.clear();
        self.token_ids.clear();
        self.finish_reasons.clear();
        self.stop_ids.clear();
        self.logprob_events.clear();
        self.logprobs.clear();
        self.prompt_logprob_requests.clear();
        self.prompt_logprob_positions.clear();
        self.prompt_logprobs.clear();
        self.details.clear();
        self.started_request_ids.clear();
        self.started_num_cached_tokens.clear();
    }

    pub(crate) fn push_end(&mut self, request: RequestId, choice: u8, finish: FinishReason, detail: Option<Arc<str>>) {
        if let Some(text) = detail {
            self.details.push((self.request_ids.len() as u32, text));
        }
        self.push_tokens(&[request.as_u64()], &[choice], &[-1]);
        *self.finish_reasons.last_mut().expect("an event was added") = finish as u8;
    }

    /// Adds an event for each of these tokens, none of them the last of its choice.
    pub(crate) fn push_tokens(&mut self, request_ids: &[u64], choice_ids: &[u8], tokens: &[i32]) {
        self.request_ids.extend_from_slice(request_ids);
        self.choice_ids.extend(choice_ids.iter().map(|&choice| i32::from(choice)));
        self.token_ids.extend_from_slice(tokens);
        self.finish_reasons.resize(self.finish_reasons.len() + tokens.len(), 0);
        self.stop_ids.resize(self.stop_ids.len() + tokens.len(), -1);
    }
}

/// Where each `StepOutput` goes besides the caller of `step`, e.g. the ring of the text consumer.
pub trait OutputSink: Send {
    /// Takes what one step has to tell; called on the engine thread, once per step, only if there is something.
    /// Must not block: copy and wake.
    fn publish(&mut self, output: &StepOutput);
}
