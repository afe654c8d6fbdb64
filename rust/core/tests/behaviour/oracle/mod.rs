//! The oracle: a scheduler together with a slow, simple model of what must be true, which judges every operation.
//!
//! Results are predicted exactly: events, tokens, ends, refusals, counters, contents of the prefix cache, the fake KV memory.
//! Plans are judged by what any right plan has to be: see the list at the head of `plan.rs`.

mod arrays;
mod cache;
mod fingerprint;
mod forks;
mod logprobs;
mod memory;
mod model;
mod order;
mod plan;
mod requests;
mod tables;
mod trace;

use std::sync::Arc;

use cbrs_core::admission::UNKNOWN_RETRY_S;
use cbrs_core::{Batch, Error, FinishReason, RequestSpec, Scheduler, SchedulerConfig, StepResult, Submitter};

use crate::fake;
use crate::script::{Script, run};
pub(crate) use memory::Memory;
pub(crate) use model::{Model, Seen};
use requests::{Choice, Control, Detail, check_events};
pub(crate) use trace::digest;

/// Steps after which a scheduler that should have come to rest is taken to be stuck.
const MAX_DRAIN_STEPS: usize = 100_000;

/// A scheduler under observation. Choices are named by their place in the order of arrival, and a request by its first choice.
pub(crate) struct Oracle {
    scheduler: Scheduler,
    submitter: Submitter,
    model: Model,
    now_ns: u64,
    /// Whether the scheduler's own invariants and its counters are looked at after each operation.
    is_thorough: bool,
}

impl Oracle {
    pub(crate) fn new(config: SchedulerConfig) -> Self {
        let scheduler = Scheduler::new(config).expect("the test's configuration is valid");
        let submitter = scheduler.submitter();
        let model = Model::new(scheduler.config().clone());
        let mut oracle = Self { scheduler, submitter, model, now_ns: 0, is_thorough: true };
        oracle.check();
        oracle
    }

    pub(crate) fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    pub(crate) fn batch(&self) -> &Batch {
        self.scheduler.batch()
    }

    pub(crate) fn model(&self) -> &Model {
        &self.model
    }

    /// Submits, and checks that the answer is the right one.
    pub(crate) fn submit(&mut self, spec: RequestSpec, script: Script) -> Result<usize, Error> {
        let refusal = self.model.refusal(&spec);
        let answer = self.submitter.submit(spec.clone());
        let answered = answer.as_ref().err().cloned().map(without_time);
        assert_eq!(answered, refusal, "submit gave the left refusal, the right one is due");
        let is_by_load = answer.as_ref().is_err_and(|error| error.retry_after_s().is_some());
        self.model.counters.num_refused_requests += u64::from(is_by_load);
        let (max_model_len, spec) = (self.model.config.max_model_len, Arc::new(spec));
        let scripts = script.into_choices(spec.n).into_iter().enumerate();
        let index = answer.map(|id| {
            let choice = |(number, script)| Choice::new(id, number, Arc::clone(&spec), script, max_model_len);
            self.model.accept(id, scripts.map(choice).collect())
        });
        self.check();
        index
    }

    /// Submits a prompt that must be accepted, to be answered with `script`.
    pub(crate) fn accept(&mut self, prompt: &[i32], max_tokens: u64, script: Script) -> usize {
        let spec = RequestSpec { max_tokens: Some(max_tokens), ..RequestSpec::new(prompt.to_vec()) };
        self.submit(spec, script).expect("the request is acceptable")
    }

    /// Runs the batch in flight, commits what the scripts say, plans the next; everything is checked.
    pub(crate) fn step(&mut self) {
        self.step_with_errors(0);
    }

    /// Like `step`; sample number i is unusable if bit i is set.
    pub(crate) fn step_with_errors(&mut self, error_bits: u64) {
        let tokens = self.run_batch();
        let errors: Vec<u8> =
            (0..tokens.len()).map(|index| u8::from(index < 64 && error_bits >> index & 1 == 1)).collect();
        self.step_with(&tokens, &errors);
    }

    /// Commits these tokens and plans the next batch.
    pub(crate) fn step_with(&mut self, tokens: &[i32], errors: &[u8]) {
        self.now_ns += 1;
        self.model.apply_controls();
        self.model.commit(tokens, errors);
        let batch = self.scheduler.batch();
        let in_flight = self.scheduler.is_in_flight();
        let logprobs = in_flight.then(|| fake::logprobs(batch, self.scheduler.sampling(), tokens)).flatten();
        let prompt_logprobs = in_flight.then(|| fake::prompt_logprobs(batch)).flatten();
        let has_answer = !tokens.is_empty() || prompt_logprobs.is_some();
        let result = StepResult {
            step_id: in_flight.then_some(batch.step_id),
            token_ids: tokens,
            row_error: errors.iter().any(|&error| error != 0).then_some(errors),
            logprobs: logprobs.as_ref().map(fake::Matrix::lend),
            prompt_logprobs: prompt_logprobs.as_ref().map(fake::Matrix::lend),
            ..StepResult::default()
        };
        self.scheduler.step(has_answer.then_some(&result), self.now_ns).expect("the result is right");
        let output = self.scheduler.output();
        check_events(output, &std::mem::take(&mut self.model.events));
        self.model.check_told(output);
        assert_eq!((output.step_id, output.time_ns), (self.scheduler.batch().step_id, self.now_ns));
        self.model.check_plan(&self.scheduler);
        self.check();
    }

    /// What the model that runs the batch would answer.
    pub(crate) fn run_batch(&self) -> Vec<i32> {
        if !self.scheduler.is_in_flight() {
            return Vec::new();
        }
        run(self.batch(), |id, number| &self.model.choices[self.model.find(id, number)].script)
    }

    /// Offers a result that must be refused without any effect.
    pub(crate) fn refuse(&mut self, result: Option<&StepResult<'_>>, wanted: &Error) {
        let before = digest(&self.scheduler);
        assert_eq!(self.scheduler.step(result, self.now_ns + 1).as_ref(), Err(wanted));
        assert_eq!(digest(&self.scheduler), before, "a refused result changed something");
        self.check();
    }

    /// Fails the batch in flight, if there is one.
    pub(crate) fn fail(&mut self, message: &str) {
        let step_id = self.scheduler.batch().step_id;
        if self.scheduler.is_in_flight() {
            let wrong = Error::WrongStep { expected: step_id, got: step_id + 1 };
            assert_eq!(self.scheduler.fail(step_id + 1, message), Err(wrong));
            self.model.fail(message);
            self.scheduler.fail(step_id, message).expect("the batch is in flight");
        } else {
            assert_eq!(self.scheduler.fail(step_id, message), Err(Error::NoBatchInFlight { got: step_id }));
        }
        self.check();
    }

    /// Cancels the request of a choice; only the first cancel of a live one counts.
    pub(crate) fn cancel(&mut self, choice: usize) {
        let request = self.model.request_of(choice);
        let (id, choices) = (request.id, request.choices.clone());
        let is_live = choices.clone().any(|index| self.model.choices[index].end.is_none());
        let counts = is_live && !self.model.choices[choices.start].is_cancel_asked;
        assert_eq!(self.submitter.cancel(id), counts, "whether the cancel of {id:?} counts");
        if counts {
            self.model.choices[choices.start].is_cancel_asked = true;
            self.model.controls.push(Control::Cancel { choice });
        }
        self.check();
    }

    /// Ends a choice at a stop string.
    pub(crate) fn finish(&mut self, choice: usize, num_tokens: usize, reason: Option<&str>) {
        let Choice { id, number, .. } = self.model.choices[choice];
        let choices = self.model.request_of(choice).choices.clone();
        let is_live = choices.clone().any(|index| self.model.choices[index].end.is_none());
        let reason: Option<Arc<str>> = reason.map(Arc::from);
        for absent in [choices.len() as i32, -1] {
            assert_eq!(self.submitter.finish(id, absent, 0, None), is_live, "whether {id:?} lives");
        }
        assert_eq!(self.submitter.finish(id, number as i32, num_tokens as u32, reason.clone()), is_live);
        if is_live {
            self.model.controls.push(Control::Finish { choice, num_tokens, reason });
        }
        self.check();
    }

    /// Lets no request start, or lets them start again.
    pub(crate) fn set_paused(&mut self, is_paused: bool) {
        if is_paused {
            self.submitter.pause();
        } else {
            self.submitter.resume();
        }
        self.model.is_paused = is_paused;
        assert_eq!(self.submitter.is_paused(), is_paused);
        self.check();
    }

    pub(crate) fn reset_prefix_cache(&mut self) {
        self.scheduler.reset_prefix_cache();
        self.model.reset_cache();
        self.check();
    }

    /// Steps until nothing is live and checks that everything was given back. Returns the number of steps.
    pub(crate) fn drain(&mut self) -> usize {
        if self.model.is_paused {
            self.set_paused(false);
        }
        for num_steps in 0..MAX_DRAIN_STEPS {
            if self.is_at_rest() {
                self.scheduler.check_drained();
                return num_steps;
            }
            self.step();
        }
        panic!("{} requests are still live after {MAX_DRAIN_STEPS} steps", self.model.live.len());
    }

    /// Whether another step would neither run nor tell anything.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.model.live.is_empty() && self.model.events.is_empty() && !self.scheduler.is_in_flight()
    }

    /// Closes in the middle of things: every live request ends as cancelled, once.
    pub(crate) fn close(&mut self) {
        self.submitter.close();
        self.model.is_closed = true;
        self.model.apply_controls();
        let mut live = self.model.live.clone();
        live.sort_by_key(|&index| (self.model.choices[index].id.slot(), index));
        for index in live {
            self.model.end_with_event(index, FinishReason::Cancelled, Detail::Absent);
        }
        self.model.flight.clear();
        self.scheduler.step(None, self.now_ns + 1).expect("the step after close tells the ends");
        check_events(self.scheduler.output(), &std::mem::take(&mut self.model.events));
        assert_eq!(self.scheduler.batch().num_seqs(), 0, "a closed scheduler plans nothing");
        assert_eq!(self.scheduler.step(None, self.now_ns + 2), Err(Error::Closed));
        assert_eq!(self.submitter.submit(RequestSpec::new(vec![0])).err(), Some(Error::Closed));
        self.check();
        self.scheduler.check_drained();
    }

    /// Leaves out what only looks back, for operations that were checked before.
    pub(crate) fn set_thorough(&mut self, is_thorough: bool) {
        self.is_thorough = is_thorough;
    }

    /// Compares everything that can be seen between operations.
    pub(crate) fn check(&mut self) {
        self.model.operation += 1;
        let holders = self.model.holders();
        let num_cached = self.model.cache.check(self.scheduler.pool(), &holders, self.model.operation);
        for (block, &holders) in holders.iter().enumerate() {
            if holders == 0 && self.model.cache.contents()[block].is_none() {
                self.model.memory.poison_block(block);
            }
        }
        if self.is_thorough {
            self.scheduler.check_invariants();
            self.check_stats(&holders, num_cached);
        }
    }

    fn check_stats(&self, holders: &[u32], num_cached: usize) {
        let num_used = holders.iter().filter(|&&holders| holders > 0).count();
        let mut wanted = self.model.counters;
        wanted.num_running = self.model.rows.iter().flatten().count() as u64;
        let (num_queued, num_queued_tokens) = self.model.queued();
        let is_under_way = |&&index: &&usize| self.model.request_of(index).is_started;
        let num_under_way = self.model.live.iter().filter(is_under_way).count();
        wanted.num_waiting = (num_queued + num_under_way) as u64 - wanted.num_running;
        wanted.num_queued_tokens = num_queued_tokens;
        wanted.is_paused = u64::from(self.model.is_paused);
        wanted.num_used_blocks = num_used as u64;
        wanted.num_cached_blocks = num_cached as u64;
        wanted.num_free_blocks = (self.model.config.num_blocks - num_used - num_cached) as u64;
        let stats = self.submitter.stats();
        // How much arrives over time is no part of the model.
        wanted.arrival_rate = stats.arrival_rate;
        wanted.is_refusing = stats.is_refusing;
        // Nor is what steps cost.
        (wanted.last_step_ns, wanted.predicted_step_ns) = (stats.last_step_ns, stats.predicted_step_ns);
        (wanted.step_time_error, wanted.token_budget) = (stats.step_time_error, stats.token_budget);
        (wanted.service_rate, wanted.load) = (stats.service_rate, stats.load);
        wanted.queued_service_s = stats.queued_service_s;
        assert_eq!(stats, wanted, "stats (left) and model (right) disagree");
    }
}

/// A refusal whatever time it names: that is no part of the model.
pub(crate) fn without_time(mut error: Error) -> Error {
    if let Error::QueueFull { retry_after_s, .. } | Error::QueuedTokensFull { retry_after_s, .. } = &mut error {
        assert!(*retry_after_s >= 0.001);
        *retry_after_s = UNKNOWN_RETRY_S;
    }
    error
}
