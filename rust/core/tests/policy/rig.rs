//! A scheduler with a scripted model and a clock. After every step it is checked (`checks.rs`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cbrs_core::policy::{Class, Fairness, Order, PolicyConfig};
use cbrs_core::{FinishReason, RequestId, RequestSpec, Scheduler, SchedulerConfig, Stats, StepResult, Submitter};

use crate::checks::Checks;

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

/// A request and one of its choices.
pub(crate) type ChoiceId = (u64, usize);

/// What is known of a choice.
#[derive(Debug, Clone, Default)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts, not a state")]
pub(crate) struct Choice {
    pub(crate) num_tokens: usize,
    pub(crate) has_ended: bool,
    /// It was ended as if by a stop string.
    pub(crate) is_finished: bool,
    pub(crate) row: Option<i32>,
    /// It has lost its row, and waits for another.
    pub(crate) was_preempted: bool,
    /// It has sampled since it got its row.
    pub(crate) is_decoding: bool,
    /// Step in which it last ran, or got its row.
    pub(crate) last_run_step: u64,
    /// Decodes that had begun by then, in the whole engine.
    pub(crate) num_decodes_then: u64,
    /// Tokens that are computed, as far as it is known: since it got its row it has run.
    pub(crate) num_computed: Option<usize>,
}

/// What is known of a request.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts, not a state")]
pub(crate) struct Known {
    pub(crate) class: Class,
    pub(crate) tenant: Option<Arc<str>>,
    pub(crate) num_prompt_tokens: usize,
    /// Of choice 0.
    pub(crate) num_outputs: usize,
    /// Its place in the line of its flow: deadline, if that counts, then arrival.
    pub(crate) place: (u64, u64),
    pub(crate) has_target: bool,
    /// Step in which its first tokens were scheduled.
    pub(crate) first_step: Option<u64>,
    /// It has had a row.
    pub(crate) is_started: bool,
    /// Tokens of choice 0, and their times.
    pub(crate) tokens: Vec<i32>,
    pub(crate) times_ns: Vec<u64>,
    pub(crate) choices: Vec<Choice>,
    /// End of its last choice.
    pub(crate) end: Option<(FinishReason, Option<Arc<str>>)>,
    pub(crate) num_preemptions: u32,
    /// Later ones of its flow that started before it, by step.
    pub(crate) overtakes: Vec<u32>,
    /// Since when it waits for a row.
    pub(crate) wait: Option<Wait>,
    /// When it last got a row or a chunk, or lost a row.
    pub(crate) touched_ns: u64,
    /// It was seen to get nothing for so long that it has to be shielded.
    pub(crate) is_shielded: bool,
    /// It may have started because it was aged.
    pub(crate) may_be_shielded: bool,
}

/// A wait of a request with one choice.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wait {
    /// Its place among all waits.
    pub(crate) place: u64,
    pub(crate) since_ns: u64,
    /// Starts, of all since the beginning, by which it has to have ended; known when it is aged.
    pub(crate) max_starts: Option<u64>,
}

impl Choice {
    /// Known tokens that are not computed, as far as it is known.
    pub(crate) fn num_remaining(&self, request: &Known) -> Option<usize> {
        Some(request.num_prompt_tokens + self.num_tokens - self.num_computed?)
    }
}

impl Known {
    /// Output tokens of a choice.
    pub(crate) fn num_outputs_of(&self, choice: usize) -> usize {
        1 + (self.num_outputs - 1 + 7 * choice) % self.num_outputs
    }
}

/// What a plan has changed.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub(crate) running_before: BTreeSet<ChoiceId>,
    pub(crate) stats_before: Stats,
    pub(crate) preempted: Vec<ChoiceId>,
    pub(crate) started: Vec<ChoiceId>,
    /// Those of them that were preempted before.
    pub(crate) resumed: BTreeSet<ChoiceId>,
    /// Rows that were given, also to those who lost them again at once.
    pub(crate) num_starts: u64,
}

pub(crate) struct Rig {
    pub(crate) scheduler: Scheduler,
    submitter: Submitter,
    pub(crate) now_ns: u64,
    pub(crate) profile: Profile,
    pub(crate) rules: PolicyConfig,
    pub(crate) requests: BTreeMap<u64, Known>,
    num_submitted: u64,
    pub(crate) num_waits: u64,
    by_row: BTreeMap<i32, ChoiceId>,
    pub(crate) step_id: u64,
    pub(crate) is_paused: bool,
    pub(crate) num_decodes_begun: u64,
    pub(crate) num_starts: u64,
    /// The last batch: choices and query tokens.
    pub(crate) batch: Vec<(ChoiceId, usize)>,
    pub(crate) checks: Checks,
}

impl Rig {
    pub(crate) fn new(config: SchedulerConfig) -> Self {
        let rules = config.rules.clone().unwrap_or_else(|| config.policy.rules());
        let config = SchedulerConfig { eos_token_ids: vec![EOS], ..config };
        let scheduler = Scheduler::new(config).expect("the configuration is valid");
        Self {
            submitter: scheduler.submitter(),
            checks: Checks::default(),
            scheduler,
            now_ns: 1,
            profile: GPU,
            rules,
            requests: BTreeMap::new(),
            num_submitted: 0,
            num_waits: 0,
            by_row: BTreeMap::new(),
            step_id: 0,
            is_paused: false,
            num_decodes_begun: 0,
            num_starts: 0,
            batch: Vec::new(),
        }
    }

    /// A rig whose policy is changed from `fair`.
    pub(crate) fn fair(config: SchedulerConfig, change: impl FnOnce(&mut PolicyConfig)) -> Self {
        let mut rules = PolicyConfig::fair();
        change(&mut rules);
        Self::new(SchedulerConfig { rules: Some(rules), ..config })
    }

    /// Submits a request whose first choice ends itself after `num_outputs` tokens.
    pub(crate) fn submit(&mut self, spec: RequestSpec, num_outputs: usize) -> Option<u64> {
        let arrival = self.num_submitted;
        let class = spec.priority.unwrap_or_default();
        let tenant = self.rules.tenant(spec.tenant.as_deref());
        let of_class = &self.rules.classes[class as usize];
        let targets = [spec.target_itl_ms, tenant.target_itl_ms, of_class.target_itl_ms, self.rules.target_itl_ms];
        let deadline = [spec.ttft_deadline_ms, spec.deadline_ms].into_iter().flatten().map(ns_of_ms).min();
        let deadline = deadline.filter(|_| self.rules.order == Order::Edf);
        let wait = Wait { place: self.num_waits, since_ns: self.now_ns, max_starts: None };
        let known = Known {
            class,
            tenant: spec.tenant.clone(),
            num_prompt_tokens: spec.prompt_token_ids.len(),
            num_outputs,
            place: (deadline.map_or(u64::MAX, |ns| self.now_ns + ns), arrival),
            has_target: targets.iter().any(Option::is_some),
            first_step: None,
            is_started: false,
            tokens: Vec::new(),
            times_ns: Vec::new(),
            choices: vec![Choice::default(); spec.n as usize],
            end: None,
            num_preemptions: 0,
            overtakes: Vec::new(),
            wait: (spec.n == 1).then_some(wait),
            touched_ns: self.now_ns,
            is_shielded: false,
            may_be_shielded: false,
        };
        let id = self.submitter.submit_at(spec, self.now_ns).ok()?.as_u64();
        self.num_submitted += 1;
        self.num_waits += 1;
        self.requests.insert(id, known);
        Some(id)
    }

    pub(crate) fn cancel(&self, id: u64) {
        self.submitter.cancel(RequestId::from_u64(id));
    }

    /// Ends a choice as if a stop string had been found after its last token.
    pub(crate) fn finish(&mut self, (id, choice): ChoiceId) {
        let state = &mut self.requests.get_mut(&id).expect("it was submitted").choices[choice];
        state.is_finished = true;
        self.submitter.finish(RequestId::from_u64(id), choice as i32, state.num_tokens as u32, None);
    }

    /// The step in flight fails.
    pub(crate) fn fail(&mut self) {
        if self.scheduler.is_in_flight() {
            self.scheduler.fail(self.scheduler.batch().step_id, "the device is gone").expect("it is in flight");
            self.scheduler.check_invariants();
        }
    }

    pub(crate) fn set_paused(&mut self, is_paused: bool) {
        self.is_paused = is_paused;
        if is_paused { self.submitter.pause() } else { self.submitter.resume() }
    }

    /// Puts another policy in force.
    pub(crate) fn set_policy(&mut self, rules: PolicyConfig) -> cbrs_core::Result<()> {
        self.submitter.set_policy(rules.clone())?;
        self.rules = rules;
        Ok(())
    }

    pub(crate) fn submitter(&self) -> &Submitter {
        &self.submitter
    }

    /// Token number `position` of a choice.
    fn token((id, choice): ChoiceId, position: usize, num_outputs: usize) -> i32 {
        if position + 1 >= num_outputs {
            return EOS;
        }
        2 + ((id ^ (position as u64 * 7) ^ (choice as u64 * 3)) % 5) as i32
    }

    /// Runs the batch in flight and makes the next one; the time passes that it takes.
    pub(crate) fn step(&mut self) {
        self.step_with_errors(|| false);
    }

    /// The same, with samples that cannot be drawn.
    pub(crate) fn step_with_errors(&mut self, mut is_error: impl FnMut() -> bool) {
        let (mut tokens, mut errors) = (Vec::new(), Vec::new());
        let has_batch = self.scheduler.is_in_flight();
        if has_batch {
            let batch = self.scheduler.batch();
            for (index, &row) in batch.sample_rows.iter().enumerate() {
                let id = self.by_row[&row];
                let num_outputs = self.requests[&id.0].num_outputs_of(id.1);
                tokens.push(Self::token(id, batch.sample_positions[index] as usize, num_outputs));
                errors.push(u8::from(is_error()));
            }
            let kv: u64 = batch.seq_lens.iter().map(|&len| len as u64).sum();
            self.now_ns += self.profile.a + self.profile.b * batch.num_tokens() as u64 + self.profile.c * kv;
        }
        let row_error = errors.contains(&1).then_some(&errors[..]);
        let result = StepResult { token_ids: &tokens, row_error, ..StepResult::default() };
        let stats_before = self.submitter.stats();
        self.scheduler.step(has_batch.then_some(&result), self.now_ns).expect("the result fits the batch");
        self.step_id += 1;
        self.scheduler.check_invariants();
        self.read_output();
        let mut changes =
            Changes { running_before: self.by_row.values().copied().collect(), stats_before, ..Changes::default() };
        self.read_rows(&mut changes);
        self.read_batch();
        self.check_plan(&changes);
    }

    fn read_output(&mut self) {
        let output = self.scheduler.output();
        for (index, &id) in output.request_ids.iter().enumerate() {
            let known = self.requests.get_mut(&id).expect("nobody else was submitted");
            let at = output.choice_ids[index] as usize;
            let num_outputs = known.num_outputs_of(at);
            let choice = &mut known.choices[at];
            assert!(!choice.has_ended, "something is told of {id} after its end");
            let token = output.token_ids[index];
            if token >= 0 {
                assert_eq!(token, Self::token((id, at), choice.num_tokens, num_outputs), "{id} got another token");
                choice.num_tokens += 1;
                if !choice.is_decoding {
                    choice.is_decoding = true;
                    self.num_decodes_begun += 1;
                }
                if at == 0 {
                    known.tokens.push(token);
                    known.times_ns.push(self.now_ns);
                }
            }
            if let Some(reason) = FinishReason::from_code(output.finish_reasons[index]) {
                (choice.has_ended, choice.was_preempted, choice.is_decoding) = (true, false, false);
                if let Some(row) = choice.row.take() {
                    self.by_row.remove(&row);
                }
                let is_told = choice.is_finished || reason != FinishReason::Stop || choice.num_tokens == num_outputs;
                assert!(is_told, "choice {at} of {id} has {} tokens", choice.num_tokens);
                known.touched_ns = self.now_ns;
                if known.choices.iter().all(|choice| choice.has_ended) {
                    (known.end, known.wait) = (Some((reason, output.detail(index).cloned())), None);
                }
            }
        }
    }

    fn read_rows(&mut self, changes: &mut Changes) {
        let batch = self.scheduler.batch();
        // Rows that were freed and not by an end: preempted.
        for &row in &batch.freed_rows {
            let Some((id, at)) = self.by_row.remove(&row) else { continue };
            changes.preempted.push((id, at));
            let known = self.requests.get_mut(&id).expect("a row had a request");
            let choice = &mut known.choices[at];
            (choice.row, choice.was_preempted, choice.is_decoding) = (None, true, false);
            known.num_preemptions += 1;
            known.touched_ns = self.now_ns;
            if known.choices.len() == 1 {
                known.wait = Some(Wait { place: self.num_waits, since_ns: self.now_ns, max_starts: None });
                self.num_waits += 1;
            }
        }
        for &id in &self.scheduler.output().started_request_ids {
            self.requests.get_mut(&id).expect("nobody else was submitted").is_started = true;
        }
        changes.num_starts = batch.new_rows.len() as u64;
        self.num_starts += changes.num_starts;
        for &row in &batch.new_rows {
            // A row that was given and taken again in one plan may have nobody.
            let Some((id, at)) = self.scheduler.choice_in_row(row as u32) else { continue };
            let known = self.requests.get_mut(&id).expect("nobody else was submitted");
            let choice = &mut known.choices[at as usize];
            if choice.was_preempted {
                changes.resumed.insert((id, at as usize));
            }
            (choice.row, choice.was_preempted, choice.num_computed) = (Some(row), false, None);
            (choice.last_run_step, choice.num_decodes_then) = (self.step_id, self.num_decodes_begun);
            (known.wait, known.touched_ns) = (None, self.now_ns);
            self.by_row.insert(row, (id, at as usize));
            changes.started.push((id, at as usize));
        }
    }

    fn read_batch(&mut self) {
        let batch = self.scheduler.batch();
        self.batch.clear();
        for (index, &id) in batch.request_ids.iter().enumerate() {
            let len = (batch.query_start[index + 1] - batch.query_start[index]) as usize;
            let at = batch.choice_ids[index] as usize;
            self.batch.push(((id, at), len));
            let known = self.requests.get_mut(&id).expect("nobody else was submitted");
            let choice = &known.choices[at];
            assert_eq!(choice.row, Some(batch.row_ids[index]), "{id} runs in a row that was not given to it");
            known.first_step.get_or_insert(self.step_id);
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
    }

    /// Query tokens of a request in the last batch.
    pub(crate) fn scheduled(&self, id: u64) -> usize {
        self.batch.iter().filter(|&&((other, _), _)| other == id).map(|&(_, len)| len).sum()
    }

    pub(crate) fn is_running(&self, id: u64) -> bool {
        self.requests[&id].choices.iter().any(|choice| choice.row.is_some())
    }

    pub(crate) fn aging_ns(&self) -> u64 {
        (self.rules.aging_s * 1e9) as u64
    }

    /// Whether two requests stand in one line.
    pub(crate) fn is_same_flow(&self, a: &Known, b: &Known) -> bool {
        a.class == b.class && (self.rules.fairness == Fairness::Off || a.tenant == b.tenant)
    }
}

fn ns_of_ms(ms: f64) -> u64 {
    (ms * 1e6) as u64
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
