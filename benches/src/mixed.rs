//! Mixed load: a closed loop in which each end is followed by a new request, so that prompts, decodes and ends share the steps.

use cbrs_core::{RequestSpec, Scheduler, SchedulerConfig, StepResult, Submitter};

use crate::{BLOCK_SIZE, VOCAB_SIZE, prompt};

const NUM_IN_FLIGHT: usize = 1_024;
const NUM_HEADS: usize = 16;
const NUM_HEAD_TOKENS: usize = 256;
const NUM_PROMPT_TOKENS: usize = 512;
const NUM_OUTPUT_TOKENS: usize = 128;
const MAX_NUM_BATCHED_TOKENS: usize = 8_192;

/// A scheduler under the mixed load, and the requests that come next.
#[derive(Debug)]
pub struct Mixed {
    scheduler: Scheduler,
    submitter: Submitter,
    heads: Vec<Vec<i32>>,
    /// Requests made so far.
    num_requests: u64,
    /// Prepared, to be submitted before the next step.
    arriving: Vec<RequestSpec>,
    tokens: Vec<i32>,
}

impl Mixed {
    /// An idle scheduler with every request of the loop prepared.
    pub fn new() -> Self {
        let max_model_len = NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS;
        let scheduler = Scheduler::new(SchedulerConfig {
            max_num_seqs: NUM_IN_FLIGHT,
            max_num_batched_tokens: MAX_NUM_BATCHED_TOKENS,
            // Enough that nobody is preempted, and little enough that old prefixes are evicted.
            num_blocks: NUM_IN_FLIGHT * max_model_len.div_ceil(BLOCK_SIZE),
            max_model_len,
            block_size: BLOCK_SIZE,
            vocab_size: Some(VOCAB_SIZE),
            ..SchedulerConfig::default()
        })
        .expect("the limits are valid");
        let mut this = Self {
            submitter: scheduler.submitter(),
            scheduler,
            heads: (0..NUM_HEADS as u64).map(|head| prompt(head, NUM_HEAD_TOKENS)).collect(),
            num_requests: 0,
            arriving: Vec::new(),
            tokens: prompt(u64::MAX, NUM_IN_FLIGHT),
        };
        this.prepare(NUM_IN_FLIGHT);
        this
    }

    fn prepare(&mut self, num_requests: usize) {
        for _ in 0..num_requests {
            let number = self.num_requests;
            self.num_requests += 1;
            let mut tokens = self.heads[number as usize % NUM_HEADS].clone();
            tokens.extend(prompt(NUM_HEADS as u64 + number, NUM_PROMPT_TOKENS - NUM_HEAD_TOKENS));
            self.arriving.push(RequestSpec { max_tokens: Some(NUM_OUTPUT_TOKENS as u64), ..RequestSpec::new(tokens) });
        }
    }

    /// Submits the requests that follow the last step's ends.
    ///
    /// # Panics
    /// If one is refused.
    pub fn submit(&mut self) {
        for spec in self.arriving.drain(..) {
            self.submitter.submit(spec).expect("the queue holds all that can be in flight");
        }
    }

    /// One step, made by `step`.
    pub fn step(&mut self, step: impl FnOnce(&mut Scheduler, &StepResult<'_>)) {
        let num_samples = self.scheduler.batch().num_samples();
        step(&mut self.scheduler, &StepResult { token_ids: &self.tokens[..num_samples], ..StepResult::default() });
    }

    /// Prepares the requests that follow this step's ends; gives the number of output tokens that the step told.
    pub fn settle(&mut self) -> usize {
        let output = self.scheduler.output();
        let num_tokens = output.token_ids.iter().filter(|&&token| token >= 0).count();
        let num_ends = output.finish_reasons.iter().filter(|&&reason| reason != 0).count();
        self.prepare(num_ends);
        num_tokens
    }

    /// Steps until every request of the first generation has ended, so that the loop has no beginning any more.
    pub fn warm_up(&mut self) {
        while self.num_requests < 2 * NUM_IN_FLIGHT as u64 {
            self.submit();
            self.step(crate::step);
            self.settle();
        }
    }

    /// Checks that the loop is what it should be.
    ///
    /// # Panics
    /// If requests were lost, or blocks ran short.
    pub fn check(&self) {
        let stats = self.submitter.stats();
        let num_in_flight = stats.num_running + stats.num_waiting + self.arriving.len() as u64;
        assert_eq!(num_in_flight, NUM_IN_FLIGHT as u64, "the loop is closed");
        assert_eq!(stats.num_preemptions, 0, "nobody lost its blocks");
        assert!(stats.num_cached_prompt_tokens > 0, "heads are found in the prefix cache");
    }
}

impl Default for Mixed {
    fn default() -> Self {
        Self::new()
    }
}
