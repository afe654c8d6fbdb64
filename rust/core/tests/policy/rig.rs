//! A scheduler with a scripted model and a clock, and what must hold after every step.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cbrs_core::policy::{Class, PolicyConfig};
use cbrs_core::{FinishReason, RequestId, RequestSpec, Scheduler, SchedulerConfig, StepResult, Submitter};

/// Ends an output.
pub(crate) const EOS: i32 = 1;

/// What a step takes: `a + b * new_tokens + c * kv_tokens_read`, in nanoseconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Profile {
    pub(crate) a: u64,
    pub(crate) b: u64,
    pub(crate) c: u64,
}

/// A GPU with a small model.
pub(crate) const GPU: Profile = Profile { a: 5_000_000, b: 30_000, c: 40 };
/// A CPU with one.
pub(crate) const CPU: Profile = Profile { a: 6_000_000, b: 250_000, c: 500 };

/// What is known of a request.
#[derive(Debug, Clone)]
pub(crate) struct Known {
    pub(crate) class: Class,
    pub(crate) tenant: Option<Arc<str>>,
    pub(crate) num_prompt_tokens: usize,
    pub(crate) num_outputs: usize,
    pub(crate) has_deadline: bool,
    pub(crate) arrival: u64,
    /// Step in which its first tokens were scheduled.
    pub(crate) first_step: Option<u64>,
    pub(crate) tokens: Vec<i32>,
    pub(crate) end: Option<(FinishReason, Option<Arc<str>>)>,
    pub(crate) num_overtakes: u32,
    /// Times of its tokens.
    pub(crate) times_ns: Vec<u64>,
    row: Option<i32>,
    was_preempted: bool,
    last_run_step: u64,
}

pub(crate) struct Rig {
    pub(crate) scheduler: Scheduler,
    submitter: Submitter,
    pub(crate) now_ns: u64,
    pub(crate) profile: Profile,
    pub(crate) requests: BTreeMap<u64, Known>,
    num_submitted: u64,
    by_row: BTreeMap<i32, u64>,
    pub(crate) step_id: u64,
    budget: usize,
    pub(crate) is_paused: bool,
    max_batch_pause_steps: u64,
    aging_ns: u64,
    pub(crate) longest_batch_pause: u64,
    /// The last batch: request and query tokens.
    pub(crate) batch: Vec<(u64, usize)>,
}

impl Rig {
    pub(crate) fn new(config: SchedulerConfig) -> Self {
        let rules = config.rules.clone().unwrap_or_else(|| config.policy.rules());
        let config = SchedulerConfig { eos_token_ids: vec![EOS], ..config };
        let scheduler = Scheduler::new(config).expect("the configuration is valid");
        Self {
            submitter: scheduler.submitter(),
            budget: scheduler.config().max_num_batched_tokens,
            scheduler,
            now_ns: 1,
            profile: GPU,
            requests: BTreeMap::new(),
            num_submitted: 0,
            by_row: BTreeMap::new(),
            step_id: 0,
            is_paused: false,
            max_batch_pause_steps: u64::from(rules.max_batch_pause_steps),
            aging_ns: (rules.aging_s * 1e9) as u64,
            longest_batch_pause: 0,
            batch: Vec::new(),
        }
    }

    /// A rig whose policy is changed from `fair`.
    pub(crate) fn fair(config: SchedulerConfig, change: impl FnOnce(&mut PolicyConfig)) -> Self {
        let mut rules = PolicyConfig::fair();
        change(&mut rules);
        Self::new(SchedulerConfig { rules: Some(rules), ..config })
    }

    /// Submits a request that ends itself after `num_outputs` tokens.
    pub(crate) fn submit(&mut self, spec: RequestSpec, num_outputs: usize) -> Option<u64> {
        let known = Known {
            class: spec.priority.unwrap_or_default(),
            tenant: spec.tenant.clone(),
            num_prompt_tokens: spec.prompt_token_ids.len(),
            num_outputs,
            has_deadline: spec.ttft_deadline_ms.is_some() || spec.deadline_ms.is_some(),
            arrival: self.num_submitted,
            first_step: None,
            tokens: Vec::new(),
            end: None,
            num_overtakes: 0,
            times_ns: Vec::new(),
            row: None,
            was_preempted: false,
            last_run_step: 0,
        };
        self.num_submitted += 1;
        let id = self.submitter.submit_at(spec, self.now_ns).ok()?.as_u64();
        self.requests.insert(id, known);
        Some(id)
    }

    pub(crate) fn cancel(&self, id: u64) {
        self.submitter.cancel(RequestId::from_u64(id));
    }

    pub(crate) fn set_paused(&mut self, is_paused: bool) {
        self.is_paused = is_paused;
        if is_paused { self.submitter.pause() } else { self.submitter.resume() }
    }

    pub(crate) fn submitter(&self) -> &Submitter {
        &self.submitter
    }

    /// Token number `position` of a request.
    fn token(id: u64, position: usize, num_outputs: usize) -> i32 {
        if position + 1 >= num_outputs { EOS } else { 2 + ((id ^ (position as u64 * 7)) % 5) as i32 }
    }

    /// Runs the batch in flight and makes the next one; the time passes that it takes.
    pub(crate) fn step(&mut self) {
        let batch = self.scheduler.batch();
        let mut tokens = Vec::new();
        for (index, &row) in batch.sample_rows.iter().enumerate() {
            let id = self.by_row[&row];
            let num_outputs = self.requests[&id].num_outputs;
            tokens.push(Self::token(id, batch.sample_positions[index] as usize, num_outputs));
        }
        let has_batch = batch.num_seqs() > 0 && self.scheduler.is_in_flight();
        let kv: u64 = batch.seq_lens.iter().map(|&len| len as u64).sum();
        if has_batch {
            self.now_ns += self.profile.a + self.profile.b * batch.num_tokens() as u64 + self.profile.c * kv;
        }
        let result = StepResult { token_ids: &tokens, ..StepResult::default() };
        self.scheduler.step(has_batch.then_some(&result), self.now_ns).expect("the result fits the batch");
        self.step_id += 1;
        self.scheduler.check_invariants();
        let running_before: BTreeSet<u64> = self.by_row.values().copied().collect();
        self.read_output();
        self.read_batch();
        self.check_plan(&running_before);
    }

    fn read_output(&mut self) {
        let output = self.scheduler.output();
        for (index, &id) in output.request_ids.iter().enumerate() {
            let known = self.requests.get_mut(&id).expect("nobody else was submitted");
            assert!(known.end.is_none(), "something is told of {id} after its end");
            let token = output.token_ids[index];
            if token >= 0 {
                assert_eq!(token, Self::token(id, known.tokens.len(), known.num_outputs), "{id} got another token");
                known.tokens.push(token);
                known.times_ns.push(self.now_ns);
            }
            if let Some(reason) = FinishReason::from_code(output.finish_reasons[index]) {
                let detail = output.detail(index).cloned();
                known.end = Some((reason, detail));
                if let Some(row) = known.row.take() {
                    self.by_row.remove(&row);
                }
                known.was_preempted = false;
            }
        }
    }

    fn read_batch(&mut self) {
        let batch = self.scheduler.batch();
        // Rows that were freed and not by an end: preempted.
        for &row in &batch.freed_rows {
            if let Some(id) = self.by_row.remove(&row) {
                let known = self.requests.get_mut(&id).expect("a row had a request");
                (known.row, known.was_preempted) = (None, true);
            }
        }
        let of_batch: BTreeMap<i32, u64> =
            batch.row_ids.iter().copied().zip(batch.request_ids.iter().copied()).collect();
        for &row in &batch.new_rows {
            // A row that was given and taken again in one plan has nobody in the batch.
            let Some(id) = of_batch.get(&row).copied().or_else(|| self.scheduler.request_in_row(row as u32)) else {
                continue;
            };
            let known = self.requests.get_mut(&id).expect("nobody else was submitted");
            (known.row, known.was_preempted) = (Some(row), false);
            known.last_run_step = self.step_id - 1;
            self.by_row.insert(row, id);
        }
        self.batch.clear();
        for (index, &id) in batch.request_ids.iter().enumerate() {
            let len = batch.query_start[index + 1] - batch.query_start[index];
            self.batch.push((id, len as usize));
            let known = self.requests.get_mut(&id).expect("nobody else was submitted");
            assert_eq!(known.row, Some(batch.row_ids[index]), "{id} runs in a row that was not given to it");
            known.first_step.get_or_insert(self.step_id);
            let pause = self.step_id - known.last_run_step - 1;
            if known.class == Class::Batch && known.tokens.len() > 1 {
                self.longest_batch_pause = self.longest_batch_pause.max(pause);
            }
            known.last_run_step = self.step_id;
        }
    }

    /// What holds of every plan.
    fn check_plan(&mut self, running_before: &BTreeSet<u64>) {
        let output = self.scheduler.output();
        let in_batch: BTreeSet<u64> = self.batch.iter().map(|&(id, _)| id).collect();
        // d: whoever got a token and goes on is served again at once, or was preempted.
        let is_urgent = |id: &u64| self.requests[id].class != Class::Batch;
        let num_lanes = output.request_ids.iter().filter(|&&id| self.requests[&id].end.is_none()).count();
        // Memory comes first: a decode without a block waits for those that are in the plan already.
        if num_lanes <= self.budget && self.scheduler.pool().num_available() > 0 {
            for id in output.request_ids.iter().filter(|id| is_urgent(id) && self.requests[id].end.is_none()) {
                // Preempted, and perhaps admitted again at once.
                let row = self.requests[id].row;
                let is_new = row.is_none_or(|row| self.scheduler.batch().new_rows.contains(&row));
                assert!(in_batch.contains(id) || is_new, "decode {id} does not advance");
            }
        }
        // A preempted request is never overtaken within its class and tenant.
        let started: Vec<u64> = output.started_request_ids.clone();
        for id in &started {
            let new = &self.requests[id];
            let is_same = |other: &Known| other.class == new.class && other.tenant == new.tenant;
            for (other, known) in &self.requests {
                let waited = known.was_preempted && !running_before.contains(other);
                assert!(!(waited && is_same(known)), "{id} starts before {other}, which was preempted");
            }
        }
        self.count_overtakes(&started);
        // Progress: whoever lives makes for a plan with something in it.
        let lives = self.requests.values().any(|known| known.end.is_none());
        let may_start =
            !self.is_paused || self.requests.values().any(|known| known.end.is_none() && known.first_step.is_some());
        let is_stuck = lives && may_start && self.batch.is_empty();
        assert!(!is_stuck, "nothing is planned though somebody waits: {:?}", self.scheduler);
        assert!(self.longest_batch_pause <= self.max_batch_pause_steps, "a batch decode pauses too long");
    }

    /// K: later ones of its class and tenant that start before a request.
    fn count_overtakes(&mut self, started: &[u64]) {
        for id in started {
            let new = self.requests[id].clone();
            let is_passed = |known: &Known| {
                let is_same = known.class == new.class && known.tenant == new.tenant;
                let waits = known.end.is_none() && known.first_step.is_none() && known.row.is_none();
                is_same && waits && known.arrival < new.arrival && !new.has_deadline && !known.has_deadline
            };
            for known in self.requests.values_mut().filter(|known| is_passed(known)) {
                known.num_overtakes += 1;
                assert!(known.num_overtakes <= 16, "a request was overtaken {} times", known.num_overtakes);
            }
        }
    }

    /// Steps until everybody has ended.
    pub(crate) fn drain(&mut self) {
        self.set_paused(false);
        let mut num_steps = 0;
        while self.requests.values().any(|known| known.end.is_none()) {
            self.step();
            num_steps += 1;
            assert!(num_steps < 200_000, "somebody never ends");
        }
        self.scheduler.check_drained();
        for (id, known) in &self.requests {
            if let Some((FinishReason::Stop, _)) = known.end {
                assert_eq!(known.tokens.len(), known.num_outputs, "{id} has another length");
            }
        }
    }

    /// Query tokens of a request in the last batch.
    pub(crate) fn scheduled(&self, id: u64) -> usize {
        self.batch.iter().find(|&&(other, _)| other == id).map_or(0, |&(_, len)| len)
    }

    pub(crate) fn is_running(&self, id: u64) -> bool {
        self.requests[&id].row.is_some()
    }

    pub(crate) fn aging_ns(&self) -> u64 {
        self.aging_ns
    }
}

/// A prompt that shares nothing with others.
pub(crate) fn prompt(seed: u64, len: usize) -> Vec<i32> {
    (0..len)
        .map(|index| 2 + ((seed.wrapping_mul(0x9E37_79B9).wrapping_add(index as u64 * 31)) % 30_000) as i32)
        .collect()
}

/// A request of a class and tenant.
pub(crate) fn request(class: Class, tenant: &str, seed: u64, len: usize) -> RequestSpec {
    RequestSpec {
        priority: Some(class),
        tenant: (!tenant.is_empty()).then(|| Arc::from(tenant)),
        ..RequestSpec::new(prompt(seed, len))
    }
}

pub(crate) fn config(max_num_seqs: usize, num_blocks: usize) -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs,
        max_num_batched_tokens: 256,
        num_blocks,
        max_model_len: 4096,
        policy: cbrs_core::Policy::Fair,
        ..SchedulerConfig::default()
    }
}
