//! The model's state, and what controls, results and failures do to it. Plans are not predicted but judged: see `plan.rs`.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use cbrs_core::admission::UNKNOWN_RETRY_S;
use cbrs_core::{Error, FinishReason, RequestId, RequestSpec, SchedulerConfig, Stats};

use super::cache::Cache;
use super::forks::Request;
use super::logprobs::Told;
use super::memory::Memory;
use super::requests::{Choice, Control, Detail, Event};

/// A sequence of the batch in flight: positions `start..end` of a choice.
#[derive(Debug, Clone)]
pub(crate) struct Flying {
    pub(crate) choice: usize,
    pub(crate) row: usize,
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// Positions whose logits are asked for, because of the prompt token after each.
    pub(crate) prompt_logits: Range<usize>,
    /// Its place among the samples.
    pub(crate) sample: Option<usize>,
}

/// Block tables as the model knows them.
#[derive(Debug)]
pub(crate) struct Tables {
    ids: Vec<i32>,
    max_blocks: usize,
    pub(crate) len: Vec<usize>,
}

impl Tables {
    fn new(num_rows: usize, max_blocks: usize) -> Self {
        Self { ids: vec![-1; num_rows * max_blocks], max_blocks, len: vec![0; num_rows] }
    }

    pub(crate) fn row(&self, row: usize) -> &[i32] {
        &self.ids[row * self.max_blocks..][..self.len[row]]
    }

    pub(crate) fn set(&mut self, row: usize, column: usize, block: i32) {
        self.ids[row * self.max_blocks + column] = block;
    }
}

/// What must be true.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) config: SchedulerConfig,
    /// Every request that was ever accepted, in order of arrival.
    pub(crate) requests: Vec<Request>,
    /// All their choices, in order of arrival and number.
    pub(crate) choices: Vec<Choice>,
    /// The choices that have not ended, in order.
    pub(crate) live: Vec<usize>,
    by_slot: Vec<usize>,
    pub(crate) controls: Vec<Control>,
    /// What the next step must tell.
    pub(crate) events: Vec<Event>,
    pub(crate) told: Told,
    /// Choice in each row.
    pub(crate) rows: Vec<Option<usize>>,
    /// Rows that lost their sequence since the last plan, in order.
    pub(crate) freed: Vec<i32>,
    pub(crate) tables: Tables,
    /// The device's copy, made from `block_table_updates` alone.
    pub(crate) device_tables: Vec<i32>,
    /// Blocks exchanged for an equal published one since the last plan: row, column, block.
    pub(crate) exchanges: Vec<(usize, usize, i32)>,
    pub(crate) flight: Vec<Flying>,
    pub(crate) cache: Cache,
    pub(crate) memory: Memory,
    /// The first decode that the last plan with turns left out.
    pub(crate) left_out: usize,
    /// Number of cache resets.
    pub(crate) epoch: u64,
    /// Number of operations.
    pub(crate) operation: u64,
    pub(crate) step_id: u64,
    pub(crate) counters: Stats,
    pub(crate) is_closed: bool,
    pub(crate) is_paused: bool,
    /// What waited when the door began to refuse, in requests and tokens; 0 = it does not.
    refusing: [Cell<u64>; 2],
    /// What has come up, for tests that want to know.
    pub(crate) seen: Seen,
}

/// How often the rarer cases have come up.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Seen {
    /// Choices that started with pinned blocks, and of these those that no cache would have given them.
    pub(crate) forks: u64,
    pub(crate) unpublished_forks: u64,
    /// Requests that gave up their pins because a decode needed a block, and because nothing ran.
    pub(crate) starved_drops: u64,
    pub(crate) stuck_drops: u64,
    /// Choices that computed the prompt although another had before.
    pub(crate) later_leaders: u64,
    /// Plans in which a request could have started, but was paused.
    pub(crate) paused_plans: u64,
    /// Prompt tokens whose log-probabilities were told, and of these those after which a sequence had to begin anew.
    pub(crate) prompt_logprobs: u64,
    pub(crate) resumed_prompt_logprobs: u64,
    /// Chunks that were shortened because others needed the logits.
    pub(crate) short_of_logits: u64,
}

impl Model {
    /// A model of a scheduler with this (validated) configuration.
    pub(crate) fn new(config: SchedulerConfig) -> Self {
        let max_blocks = config.max_blocks_per_seq();
        Self {
            requests: Vec::new(),
            choices: Vec::new(),
            live: Vec::new(),
            by_slot: vec![usize::MAX; config.queue_capacity + 4 * config.max_num_seqs],
            refusing: Default::default(),
            controls: Vec::new(),
            events: Vec::new(),
            told: Told::default(),
            rows: vec![None; config.max_num_seqs],
            freed: Vec::new(),
            tables: Tables::new(config.max_num_seqs, max_blocks),
            device_tables: vec![-1; config.max_num_seqs * max_blocks],
            exchanges: Vec::new(),
            flight: Vec::new(),
            cache: Cache::new(config.num_blocks),
            memory: Memory::new(config.num_blocks, config.block_size),
            left_out: 0,
            epoch: 0,
            operation: 0,
            step_id: 0,
            counters: Stats::default(),
            is_closed: false,
            is_paused: false,
            seen: Seen::default(),
            config,
        }
    }

    pub(crate) fn caches(&self) -> bool {
        self.config.enable_prefix_caching
    }

    /// A live or ended choice.
    pub(crate) fn find(&self, id: RequestId, number: i32) -> usize {
        let index = self.by_slot.get(id.slot() as usize).copied().unwrap_or(usize::MAX);
        let request = self.requests.get(index).filter(|request| request.id == id);
        let choices = &request.unwrap_or_else(|| panic!("{id:?} was never given out")).choices;
        let index = choices.start + number as usize;
        assert!(choices.contains(&index), "{id:?} has no choice {number}");
        index
    }

    /// Running choices in order.
    pub(crate) fn running(&self) -> Vec<usize> {
        self.live.iter().copied().filter(|&index| self.choices[index].row.is_some()).collect()
    }

    /// Why `submit` must refuse this request, if it must.
    pub(crate) fn refusal(&self, spec: &RequestSpec) -> Option<Error> {
        if self.is_closed {
            return Some(Error::Closed);
        }
        if spec.prompt_token_ids.is_empty() {
            return Some(Error::EmptyPrompt);
        }
        let vocab_size = self.config.vocab_size.map_or(1 << 31, i64::from);
        let is_wrong = |&(_, &token): &(usize, &i32)| token < 0 || i64::from(token) >= vocab_size;
        if let Some((position, &token)) = spec.prompt_token_ids.iter().enumerate().find(is_wrong) {
            let (field, token) = ("prompt_token_ids", i64::from(token));
            return Some(Error::TokenOutOfVocabulary { field, position, token, vocab_size });
        }
        let (num_prompt_tokens, max_model_len) = (spec.prompt_token_ids.len(), self.config.max_model_len);
        let max_tokens = spec.max_tokens.unwrap_or(1);
        if max_tokens == 0 {
            return Some(Error::InvalidParameter { name: "max_tokens", value: 0.0, expected: ">= 1" });
        }
        if num_prompt_tokens as u64 + max_tokens > max_model_len as u64 {
            return Some(Error::PromptTooLong { num_prompt_tokens, max_tokens, max_model_len });
        }
        let ((requests, queued), requested) = (self.queued(), num_prompt_tokens as u64);
        if self.config.max_queued_tokens.is_some_and(|limit| requested > limit) {
            let expected = "within max_queued_tokens, of which a class fills its queue_share";
            let (name, len) = ("prompt_token_ids", num_prompt_tokens);
            return Some(Error::InvalidLength { name, len, unit: "tokens", expected });
        }
        let queue_full = |limit| Error::QueueFull { queued: requests, limit, retry_after_s: UNKNOWN_RETRY_S };
        let tokens_full = |limit| Error::QueuedTokensFull { queued, requested, limit, retry_after_s: UNKNOWN_RETRY_S };
        if let Some(low) = self.keeps_refusing(0, requests as u64) {
            return Some(queue_full(low as usize));
        }
        if let Some(low) = self.keeps_refusing(1, queued) {
            return Some(tokens_full(low));
        }
        if requests == self.config.queue_capacity {
            self.refusing[0].set(requests as u64);
            return Some(queue_full(requests));
        }
        let limit = self.config.max_queued_tokens.filter(|limit| queued + requested > *limit)?;
        if queued >= limit - limit / 10 {
            self.refusing[1].set(queued);
        }
        Some(tokens_full(limit))
    }

    /// Whether a bound that was reached keeps requests out until a tenth of what waited is gone; then: what may wait.
    fn keeps_refusing(&self, bound: usize, queued: u64) -> Option<u64> {
        let level = self.refusing[bound].get();
        let low = level - level / 10;
        if queued < low || queued == 0 {
            self.refusing[bound].set(0);
        }
        (self.refusing[bound].get() > 0).then_some(low)
    }

    /// Takes up a new request; returns its first choice.
    pub(crate) fn accept(&mut self, id: RequestId, choices: Vec<Choice>) -> usize {
        assert!(id.generation() > 0, "0 is no id");
        let (request, first) = (self.requests.len(), self.choices.len());
        let previous = std::mem::replace(&mut self.by_slot[id.slot() as usize], request);
        let has_ended = |previous: &Request| previous.choices.clone().all(|index| self.choices[index].end.is_some());
        assert!(
            self.requests.get(previous).is_none_or(|previous| previous.id != id && has_ended(previous)),
            "{id:?} was given out twice"
        );
        for choice in choices {
            self.live.push(self.choices.len());
            self.choices.push(Choice { request, ..choice });
        }
        self.requests.push(Request::new(id, first..self.choices.len()));
        self.counters.num_accepted_requests += 1;
        first
    }

    /// Whether a cancel or finish of this choice waits for the next step.
    pub(crate) fn is_end_asked(&self, index: usize) -> bool {
        self.controls.iter().any(|control| match control {
            Control::Cancel { choice } => self.choices[*choice].request == self.choices[index].request,
            Control::Finish { choice, .. } => *choice == index,
        })
    }

    /// Applies cancels and finishes in the order in which they were asked for; the first end wins.
    pub(crate) fn apply_controls(&mut self) {
        for control in std::mem::take(&mut self.controls) {
            match control {
                Control::Cancel { choice } => self.end_request(choice, FinishReason::Cancelled, &Detail::Absent),
                Control::Finish { choice: index, num_tokens, reason } => {
                    let choice = &self.choices[index];
                    // One that has not started has no text that could stop it.
                    if choice.end.is_none() && choice.is_started {
                        self.counters.num_output_tokens -= choice.num_output().saturating_sub(num_tokens) as u64;
                        self.end_with_event(index, FinishReason::Stop, reason.map_or(Detail::Absent, Detail::Exactly));
                    }
                }
            }
        }
    }

    /// The step completed: computed tokens count, filled blocks are published, samples are delivered.
    pub(crate) fn commit(&mut self, tokens: &[i32], errors: &[u8]) {
        for flying in std::mem::take(&mut self.flight) {
            if self.choices[flying.choice].end.is_some() {
                continue;
            }
            self.choices[flying.choice].computed = flying.end;
            if flying.sample.is_some_and(|sample| errors[sample] != 0) {
                self.fail_choice(&flying, &Detail::Message);
                continue;
            }
            self.tell_prompt(&flying);
            self.publish(&flying);
            if let Some(sample) = flying.sample {
                self.fork(flying.choice, flying.row);
                self.deliver(flying.choice, tokens[sample]);
            }
        }
    }

    fn publish(&mut self, flying: &Flying) {
        let choice = &mut self.choices[flying.choice];
        if !self.config.enable_prefix_caching || choice.epoch != self.epoch {
            return;
        }
        let block_size = self.config.block_size;
        let num_full = flying.end / block_size;
        for column in choice.published..num_full {
            let prefix = choice.block_prefix(column, block_size);
            let block = self.tables.row(flying.row)[column];
            if let Some(other) = self.cache.publish(prefix, block) {
                self.tables.set(flying.row, column, other);
                self.exchanges.push((flying.row, column, other));
            }
        }
        choice.published = choice.published.max(num_full);
    }

    fn deliver(&mut self, index: usize, token: i32) {
        self.tell_output(index, token);
        let choice = &mut self.choices[index];
        choice.push(token);
        let (finish, stop_id) = choice.finish_with(token, &self.config.eos_token_ids);
        let (id, number) = (choice.id, choice.number);
        self.events.push(Event { id, number, token, finish, stop_id, detail: Detail::Absent });
        self.counters.num_output_tokens += 1;
        if let Some(reason) = finish {
            self.end(index, reason);
        }
    }

    /// The step failed: whatever it touched ends, and what it wrote is garbage.
    pub(crate) fn fail(&mut self, message: &str) {
        for flying in std::mem::take(&mut self.flight) {
            if self.choices[flying.choice].end.is_none() {
                self.fail_choice(&flying, &Detail::Exactly(Arc::from(message)));
            }
        }
    }

    /// A choice ends with an error, and with it those that have not started and wait for its prompt.
    fn fail_choice(&mut self, flying: &Flying, detail: &Detail) {
        let table = self.tables.row(flying.row);
        self.memory.poison(table, flying.start, flying.end);
        let is_leader = self.request_of(flying.choice).leader == Some(flying.choice);
        let siblings = if is_leader { self.request_of(flying.choice).choices.clone() } else { 0..0 };
        self.end_with_event(flying.choice, FinishReason::Error, detail.clone());
        for choice in siblings {
            if !self.choices[choice].is_started {
                self.end_with_event(choice, FinishReason::Error, detail.clone());
            }
        }
    }

    /// Ends every choice of the request of this one.
    pub(crate) fn end_request(&mut self, index: usize, reason: FinishReason, detail: &Detail) {
        for choice in self.request_of(index).choices.clone() {
            self.end_with_event(choice, reason, detail.clone());
        }
    }

    /// Ends a choice, unless it has ended: each gets one end.
    pub(crate) fn end_with_event(&mut self, index: usize, reason: FinishReason, detail: Detail) {
        if self.choices[index].end.is_none() {
            self.events.push(Event::end(&self.choices[index], reason, detail));
            self.end(index, reason);
        }
    }

    fn end(&mut self, index: usize, reason: FinishReason) {
        let choice = &mut self.choices[index];
        assert!(choice.end.replace(reason).is_none(), "choice {index} ends twice");
        if let Some(row) = choice.row.take() {
            self.vacate(row);
            self.freed.push(row as i32);
        }
        self.live.retain(|&other| other != index);
        self.leave_request(index);
        *match reason {
            FinishReason::Stop => &mut self.counters.num_stop_requests,
            FinishReason::Length => &mut self.counters.num_length_requests,
            FinishReason::Cancelled => &mut self.counters.num_cancelled_requests,
            FinishReason::Error => &mut self.counters.num_error_requests,
        } += 1;
    }

    pub(crate) fn vacate(&mut self, row: usize) {
        self.rows[row] = None;
        self.tables.len[row] = 0;
    }

    pub(crate) fn reset_cache(&mut self) {
        self.cache.reset();
        self.epoch += 1;
    }

    /// Holders of each block, counted from tables and pins.
    pub(crate) fn holders(&self) -> Vec<u32> {
        let mut holders = vec![0; self.config.num_blocks];
        for row in 0..self.rows.len() {
            for &block in self.tables.row(row) {
                holders[block as usize] += 1;
            }
        }
        for request in self.live_requests() {
            for &block in &self.requests[request].pins {
                holders[block as usize] += 1;
            }
        }
        holders
    }
}
